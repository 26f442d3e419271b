"""One outcome for all ranks of something that can fail on one of them."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_hooks.ranks import Ranks
from trainvitals.errors import CheckpointError, VitalsError


@dataclass(frozen=True, slots=True)
class Agreement:
    """Runs a call on one or all ranks; every rank then raises alike, or none does."""

    ranks: Ranks

    def on_root(self, call: Callable[[], object]) -> None:
        """Run on rank 0; what it raises there is raised on all ranks."""
        _raise(self.ranks.broadcast(caught(call) if self.ranks.rank == 0 else None))

    def on_all(self, call: Callable[[], object]) -> None:
        """Run on every rank; the first rank's error is raised on all."""
        for error in self.ranks.gather(caught(call)):
            _raise(error)


def caught(call: Callable[[], object]) -> VitalsError | None:
    """Run the call and return its error as one that can travel; None where all went well."""
    try:
        call()
    except VitalsError as error:
        return error
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return CheckpointError(f"{type(error).__name__}: {error}")
    return None


def _raise(error: VitalsError | None) -> None:
    if error is not None:
        raise error
