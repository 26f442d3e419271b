"""Findings of detectors: the fields that they have in common."""

from typing import Any, Literal, TypedDict, Unpack

from trainvitals.records import Finding, Level, Severity
from trainvitals.stateful import Stateful


class FindingDetails(TypedDict, total=False):
    """Fields of a finding that have a default; kind and cause are the detector's name."""

    kind: str
    cause: str
    level: Level
    rank: int
    value: float | None
    limit: float | None
    onset_step: int
    severity: Severity | Literal[""]


def make_finding(
    detector: str, step: int, reason: str, **details: Unpack[FindingDetails]
) -> Finding:
    """Return a finding, advisory unless given; its onset is the step, and its cause the kind."""
    kind = details.get("kind", detector)
    defaults = {"kind": kind, "cause": kind, "level": "advisory", "onset_step": step}
    fields: dict[str, Any] = {**defaults, **details}
    return Finding(step=step, detector=detector, reason=reason, **fields)


class Reporter(Stateful):
    """Base of the detectors. Reads no clock and no random number, and never raises on data."""

    name: str

    def _report(
        self, step: int, reason: str, **details: Unpack[FindingDetails]
    ) -> tuple[Finding, ...]:
        """Return one finding of this detector, as ``update`` returns it."""
        return (make_finding(self.name, step, reason, **details),)
