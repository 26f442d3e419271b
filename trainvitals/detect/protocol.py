"""What a detector is: state fed with step records, which answers with findings."""

from __future__ import annotations

import math
from typing import Any, Protocol

from trainvitals.records import Finding, StepRecord


class Detector(Protocol):
    """Judges one step after another. Reads no clock, draws no random number, never raises on data.

    Every rank, the collector and a replay run it on the same records and get the same findings.
    """

    name: str

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it. Steps come in order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        ...


def is_clean(record: StepRecord) -> bool:
    """Say whether a step may enter a reference: applied, finite, and below the limits in force."""
    if record.skipped or record.overflow or record.nonfinite_ranks or record.nonfinite_params:
        return False
    return not (
        _bad(record.loss, record.loss_limit) or _bad(record.grad_norm, record.grad_norm_limit)
    )


def _bad(value: float | None, limit: float | None) -> bool:
    if value is None:
        return False
    return not math.isfinite(value) or (limit is not None and value > limit)
