"""Runs work on all ranks, or on rank 0 for all: all ranks succeed, or all raise."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from trainer_hooks.ranks import Ranks, name_failed_ranks
from trainvitals.errors import CheckpointCorruptError, CheckpointError, VitalsError

MEET_SECONDS = 60.0
"""Maximum time between two synchronizations of the ranks; gloo's timeout is 1,800 s."""


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Runs a call on one or all ranks; then every rank raises the same error, or none does."""

    ranks: Ranks

    def on_root(self, call: Callable[[], object]) -> None:
        """Run a checkpoint's call on rank 0; an error there is raised on all ranks."""
        error = self._meet(call if self.ranks.rank == 0 else lambda: None)[0]
        if error is not None:
            raise error

    def on_all(self, call: Callable[[], object]) -> None:
        """Run a checkpoint's call on all ranks; all raise the first rank's error, damage first."""
        errors = self._meet(call)
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        damage = [e for e in errors if isinstance(e, CheckpointCorruptError)]
        for error in [*damage, *errors]:
            if error is not None:
                raise name_failed_ranks(error, failed, self.ranks.world_size)

    def _meet(self, call: Callable[[], object]) -> list[VitalsError | None]:
        """Run the call for a checkpoint and return each rank's error, in rank order.

        A slow rank is allowed: a separate thread synchronizes with the others every MEET_SECONDS
        until all are done, so that no rank waits in a collective for as long as gloo's timeout. The
        call must not use the side group.
        """
        if self.ranks.side is None:
            return [catch_error(call)]
        ended: Future[VitalsError | None] = Future()
        outcomes: Future[list[VitalsError | None]] = Future()

        def meet() -> None:
            try:
                outcomes.set_result(self._until_all_ended(ended))
            except BaseException as error:  # noqa: BLE001 - raised by the caller of ``result``
                outcomes.set_exception(error)

        helper = threading.Thread(target=meet, name="vitals-meet", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no thread is available: then the others wait for this rank
            ended.set_result(catch_error(call))
            return self._until_all_ended(ended)
        ended.set_result(catch_error(call))
        return outcomes.result()

    def _until_all_ended(self, ended: Future[VitalsError | None]) -> list[VitalsError | None]:
        """Exchange all ranks' errors once every rank's call for a checkpoint has ended."""
        while True:
            wait([ended], timeout=MEET_SECONDS)
            rank_result = (True, ended.result()) if ended.done() else (False, None)
            outcomes = self.ranks.gather(rank_result)
            if all(is_done for is_done, _ in outcomes):
                return [error for _, error in outcomes]


def catch_error(call: Callable[[], object]) -> VitalsError | None:
    """Run a checkpoint's call; return its error in a form that can be sent; None without one."""
    try:
        call()
    except VitalsError as error:
        return error
    except BaseException as error:  # noqa: BLE001 - CheckpointException is not an Exception
        return CheckpointError(f"{type(error).__name__}: {error}")
    return None
