"""Result of ``Monitor.step``."""

from __future__ import annotations

from dataclasses import dataclass

from trainvitals.records import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of one call of ``monitor.step``.

    With a fused optimizer the verdict stays on the device, so ``decision`` belongs to an earlier
    step; the lag is ``readback_lag`` steps.
    """

    step: int
    """Index of the update that was attempted."""
    next_step: int
    """Index of the next update; smaller than ``step`` after a rollback."""
    decision: Decision | None = None
    """Decision that this call applied or recorded, if any. ``decision.step`` is its step."""
    rolled_back_to: int | None = None
    """Step to which this call rolled back; None if it did not."""
