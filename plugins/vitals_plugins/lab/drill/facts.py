"""Facts about one training of a drill, from which the judge decides."""

from __future__ import annotations

import msgspec

from trainvitals.records import Decision, Finding
from trainvitals.views import CheckpointView
from vitals_plugins.lab.drill.faults import DrillRecord
from vitals_plugins.lab.drill.receiver import ReceivedAlert


class DrillFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one training of a drill."""

    records: tuple[DrillRecord, ...] = ()
    exit_code: int | None = None
    """None if the drill ended it."""
    is_out_of_time: bool = False
    decisions: tuple[tuple[int, Decision], ...] = ()
    """Decisions, with their time."""
    findings: tuple[tuple[int, Finding], ...] = ()
    notes: tuple[tuple[int, str, str], ...] = ()
    """Time, kind and text of all other events."""
    alerts: tuple[ReceivedAlert, ...] = ()
    """Alerts that the local receiver got."""
    resumed_step: int = -1
    """Step at which the restarted training continued; -1 if it was not restarted."""
    steps: frozenset[int] = frozenset()
    """Steps that are stored."""
    latest_steps: frozenset[int] = frozenset()
    """Those of the latest attempt."""
    overflow_steps: frozenset[int] = frozenset()
    """Steps whose update the gradient scaler skipped."""
    losses: dict[int, float | None] = {}
    """Loss of each step that is stored; the latest one of a step that was trained twice."""
    repeated_losses: dict[int, tuple[float, float]] = {}
    """First and latest loss of each step that was trained more than once."""
    repeated_rates: dict[int, tuple[float, float]] = {}
    """First and latest learning rate of these steps."""
    checkpoints: tuple[CheckpointView, ...] = ()
    """Latest state of each checkpoint on disk."""
    num_lost_rows: int = 0
    output: tuple[str, ...] = ()
    """Last lines that the program printed."""

    def first(self, kind: str) -> DrillRecord | None:
        """Return the first record of a kind from a drilled training."""
        return next((each for each in self.records if each.kind == kind), None)

    @property
    def owns_step(self) -> bool:
        """Return whether Vitals controls the step of the drilled loop: not with adapters."""
        started = self.first("started")
        return started is None or started.owns_step

    @property
    def is_stored(self) -> bool:
        """Return whether all steps of the drilled training are stored, of the latest start too."""
        last = self.last_step
        if last < 0:
            return True
        is_restarted = sum(each.kind == "started" and each.rank == 0 for each in self.records) > 1
        steps = range(min(self.steps, default=0), last + 1)
        return self.steps.issuperset(steps) and (not is_restarted or last in self.latest_steps)

    @property
    def last_step(self) -> int:
        """Return the last step of the drilled training that must be stored; -1 if unknown.

        The row of a step is written in the next one, which a kill can prevent.
        """
        injected = self.first("injected")
        if self.end_step >= 0:
            return self.end_step - 1
        return -1 if injected is None else injected.step - 2

    @property
    def end_step(self) -> int:
        """Return the step at which the drill ended the training; -1 if it did not."""
        return max((each.step for each in self.records if each.kind == "ended"), default=-1)
