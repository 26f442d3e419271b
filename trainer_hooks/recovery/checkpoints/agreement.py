"""Work that all ranks do, or rank 0 for all: it ends alike on every one, however long one takes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from trainer_hooks.ranks import Ranks, named
from trainvitals.errors import CheckpointCorruptError, CheckpointError, VitalsError

MEET_SECONDS = 60.0
"""Longest time that a rank works without meeting the others; gloo gives up after 1,800 s."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Runs a call on one or all ranks; every rank then raises alike, or none does."""

    ranks: Ranks

    def on_root(self, call: Callable[[], object]) -> None:
        """Run on rank 0; what it raises there is raised on all ranks."""
        _raise(self._meet(call if self.ranks.rank == 0 else lambda: None)[0])

    def on_all(self, call: Callable[[], object]) -> None:
        """Run on every rank; the first rank's error is raised on all, damage before others."""
        errors = self._meet(call)
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        damage = [e for e in errors if isinstance(e, CheckpointCorruptError)]
        for error in [*damage, *errors]:
            if error is not None:
                raise named(error, failed, self.ranks.world_size)

    def _meet(self, call: Callable[[], object]) -> list[VitalsError | None]:
        """Run the call and return what each rank's ended in, in rank order.

        However long one rank takes: a helper meets the others' every MEET_SECONDS until all are
        done, so that none waits in a collective for as long as gloo's own timeout. The call must
        use the side group for nothing.
        """
        if self.ranks.side is None:
            return [caught(call)]
        ended: Future[VitalsError | None] = Future()
        outcomes: Future[list[VitalsError | None]] = Future()

        def meet() -> None:
            try:
                outcomes.set_result(self._until_all_ended(ended))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                outcomes.set_exception(error)

        helper = threading.Thread(target=meet, name="vitals-meet", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no thread to be had: then the others wait for this rank
            ended.set_result(caught(call))
            return self._until_all_ended(ended)
        ended.set_result(caught(call))
        return outcomes.result()

    def _until_all_ended(self, ended: Future[VitalsError | None]) -> list[VitalsError | None]:
        while True:
            wait([ended], timeout=MEET_SECONDS)
            own = (True, ended.result()) if ended.done() else (False, None)
            outcomes = self.ranks.gather(own)
            if all(is_done for is_done, _ in outcomes):
                return [error for _, error in outcomes]


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
