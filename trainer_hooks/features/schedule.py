"""Learning rates: whether a rise was declared, and whether the rates follow the schedule."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.guard.declared_schedule import DeclaredSchedule
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.errors import UsageError
from trainvitals.policy.state import FOREVER
from trainvitals.records import FindingRaised

_LOG = logging.getLogger("trainvitals")


class ScheduleFeature(StepFeature):
    """Informs all ranks of what rank 0 knows about schedulers, and compares the learning rates.

    Every run has it, because a scheduler given to ``watch`` declares its rises as well. Only rank 0
    follows the schedule of ``watch(schedule=...)``.
    """

    slots = Slots(
        rank0=(
            "stepped_twice",  # rank 0's loop steps a scheduler that monitor.step() steps too
            "rate_declared",  # the rate rose according to the declared schedule or the scheduler
        )
    )
    state_key = "schedule"

    def __init__(self, run: RunContext, declared: DeclaredSchedule | None) -> None:
        super().__init__(run)
        self._declared = declared
        self._first_rate = 0.0
        """Rate of the first group in the previous step, as requested by the loop."""
        self.stepped_twice: UsageError | None = None
        """Error of a loop that steps the schedulers too, until rank 0 has informed all ranks."""

    @classmethod
    def make(cls, run: RunContext) -> Self:
        """Return the feature; on rank 0 with the declared schedule, if there is one."""
        return cls(run, run.given.declared_schedule() if run.ranks.rank == 0 else None)

    @property
    def name(self) -> str:
        """Name of the declared schedule; empty without one, and on other ranks."""
        return "" if self._declared is None else self._declared.name

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return whether the rate rose as declared, and whether schedulers are stepped twice."""
        is_declared, rates = False, step.rates
        if step.turn <= 1 and rates and rates[0] is not None:  # the row has this optimizer's rate
            is_declared = step.is_scheduled and rates[0] > self._first_rate
            self._first_rate = rates[0]
        if self._declared is not None and not step.turn:
            with self._run.faults.fail_open("schedule"):
                is_declared |= self._declared.has_rise(step.step, rates)
        return {
            "stepped_twice": float(self.stepped_twice is not None),
            "rate_declared": float(is_declared),
        }

    def complete(self, step: ReturnedStep) -> None:
        """Refuse a loop that steps its schedulers itself, on all ranks at the same step.

        Raises:
            UsageError: rank 0's loop does.
        """
        if step.reduced.root["stepped_twice"]:
            raise self.stepped_twice or UsageError(
                "rank 0's loop steps a scheduler that was given to watch()",
                hint="take scheduler.step() out of the loop",
            )

    def on_row_written(self, step: ReturnedStep) -> None:
        """Report a rate that deviates from the declared schedule, also at the terminal."""
        if self._declared is None:
            return
        with self._run.faults.fail_open("schedule"):
            finding = self._declared.judge(step.measured, skipped=step.record.skipped)
            if finding is not None:
                _LOG.warning("vitals: step %d: %s", finding.step, finding.reason)
                event = FindingRaised(finding=finding)
                self._run.emitter.run_event(event, step=step.step, attempt=step.attempt)

    def on_change_expected(self, num_steps: int) -> None:
        """Do not compare the rates while a change was announced."""
        if self._declared is not None:
            self._declared.follower.expect(num_steps)

    def on_second_start(self) -> str:
        """Stop the comparison: the declared schedule would start at step 0 again."""
        if self._declared is None:
            return ""
        self._declared.follower.expect(FOREVER)
        return ". The declared schedule is not checked in this start"

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position in the declared schedule; None without one, and on other ranks."""
        return None if self._declared is None else self._declared.follower.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue at the saved position in the declared schedule."""
        if self._declared is not None:
            self._declared.follower.load_state_dict(state)
