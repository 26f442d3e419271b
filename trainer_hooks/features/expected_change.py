"""``monitor.expect``: an announced change, from which finite values get new limits."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.records import AttemptStarted, ChangeExpected


class ExpectedChangeFeature(StepFeature):
    """Lets all ranks start their limits again at the same step. Rank 0's call counts."""

    slots = Slots(
        rank0=(
            "expect_steps",  # steps in which finite rules abstain; 0: no change
            "change_expected",  # this step is within an announced change
        )
    )

    _num_steps = 0
    """Steps of an announced change that no vector has returned yet; only on rank 0."""
    _was_announced = False
    _marked = range(0)
    """Steps within an announced change, for the rows; only on rank 0."""

    def announce(self, reason: str, num_steps: int, *, step: int) -> None:
        """Announce a change before ``step``; call on rank 0."""
        self._num_steps = max(1, num_steps)
        # A scheduler that is called after the step shows in the next row.
        self.mark(range(step, step + num_steps + 1))
        event = ChangeExpected(reason=reason, steps=num_steps)
        self._run.emitter.event(event, step=step, attempt=self._run.attempt)

    def mark(self, steps: range) -> None:
        """Mark the rows of these steps: their settings changed as intended. Call on rank 0."""
        is_next = steps.start <= self._marked.stop
        start = min(self._marked.start, steps.start) if self._marked and is_next else steps.start
        self._marked = range(start, max(self._marked.stop, steps.stop))

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the steps of the announced change, and whether this step is one of them."""
        return {
            "expect_steps": float(self._num_steps),
            "change_expected": float(step.step in self._marked),
        }

    def on_reduced(self, step: ReturnedStep) -> None:
        """Discard the references, once per change: steps in flight repeat the number."""
        num_steps = int(step.reduced.root["expect_steps"])
        if num_steps and not self._was_announced:
            self._run.judge.rebaseline(num_steps)
            for feature in self._run.features:
                feature.on_change_expected(num_steps)
            self._num_steps = 0
        self._was_announced = num_steps > 0

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Take a number that comes back with the new attempt as a new change."""
        self._was_announced = False
