"""Attempts: the id that a rollback would use, agreed before it is needed."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.identity import new_attempt_id
from trainvitals.records import AttemptStarted


class AttemptsFeature(StepFeature):
    """Sends the next attempt's id with every step, so that a rollback needs no collective."""

    slots = Slots(rank0=("next_attempt",))

    _next_attempt = 0

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the id of the attempt that a rollback would start."""
        return {"next_attempt": float(self._next_attempt)}

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the step be judged with rank 0's id."""
        step.next_attempt = int(step.reduced.root["next_attempt"])

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Choose the next id. A clock may go backwards; the id still has to grow."""
        self._next_attempt = max(new_attempt_id(self._run.clock.time_ns()), attempt.id + 1)
