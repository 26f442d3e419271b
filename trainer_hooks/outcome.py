"""What ``Monitor.step`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from trainvitals.records import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of a step, as far as the host knows it already.

    The verdict itself stays on the device; a decision concerns the step ``readback_lag`` steps ago.
    """

    step: int
    """Index of the update that was just attempted."""
    next_step: int
    """Index of the update that comes next; smaller than ``step`` after a rollback."""
    decision: Decision | None = None
    """The ladder's decision that this call carried out or recorded, if there was one."""
    rolled_back_to: int | None = None
    """The step the run went back to in this call, None if it did not."""
