"""Checks of the first steps of a start: gradients exist, and a restart has the earlier weights."""

from __future__ import annotations

from trainer_hooks.features.earlier_losses import RestartCheck
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep, StepFeature
from trainer_hooks.tensors.gradients import no_gradient_error
from trainvitals.records import StepRecord


class FirstStepsFeature(StepFeature):
    """Refuses a loop without gradients, and warns one that started again without its state."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._turns_begun: set[int] = set()
        """Turns that have had a step."""
        self._first_record: StepRecord | None = None
        self._starts_again = False
        self._restart_check: RestartCheck | None = None

    def expect_again(self, restart_check: RestartCheck | None) -> None:
        """Expect the first steps of a run that was started before, without a state to resume.

        Only rank 0 has a ``restart_check``.
        """
        self._starts_again, self._restart_check = True, restart_check

    def pop_first_record(self) -> StepRecord | None:
        """Return the record of the first step once, after it was judged."""
        record, self._first_record = self._first_record, None
        return record

    def complete(self, step: ReturnedStep) -> None:
        """Check that the first steps have gradients and, after a restart, the earlier losses.

        Raises:
            UsageError: no rank has a gradient in the first step of an optimizer.
        """
        run, turn = self._run, step.measured.turn
        is_first = step.step == run.first_step
        if is_first or (step.optimizer and turn not in self._turns_begun):
            self._turns_begun.add(turn)
            if not step.reduced.has_gradients and not step.record.failed_ranks:
                raise no_gradient_error(step.optimizer)  # known on all ranks
        if is_first:
            self._first_record = step.record
            if self._starts_again and not step.step:
                self._report_second_start()
        check = self._restart_check
        if check is not None and (text := check.add(step.record)):
            run.warn("weights_not_restored", text, step=step.step)
        run.first_step = -1

    def _report_second_start(self) -> None:
        """Warn a loop that resumes from its own checkpoint without our state: step starts at 0."""
        run = self._run
        text = (
            f"run {run.run_dir.run_id} was started before, and this start counts from step 0, "
            "with new limits. If the loop loaded a checkpoint of its own, keep "
            "monitor.state_dict() in it and call monitor.load_state_dict(state) before the first "
            "step; for a new training set another VITALS_RUN_ID"
        )
        text += "".join(feature.on_second_start() for feature in run.features)
        run.warn("starts_again", text, step=0)
