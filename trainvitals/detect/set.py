"""The detectors that run in every rank, as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from trainvitals.detect.burst import BURST_DEFAULTS, BurstConfig, BurstDetector
from trainvitals.detect.level import LEVEL_DEFAULTS, LevelConfig, LevelDetector
from trainvitals.detect.nonfinite import NonFiniteDetector
from trainvitals.detect.spike import (
    GRAD_NORM_DEFAULTS,
    LOSS_DEFAULTS,
    GradNormConfig,
    SpikeConfig,
    SpikeDetector,
)
from trainvitals.records import Finding, StepRecord


class Limits(msgspec.Struct, frozen=True):
    """What the device compares the next steps with; None: that rule has no say yet."""

    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig:
    """Settings of the detectors in the loop."""

    loss: SpikeConfig = LOSS_DEFAULTS
    """Outliers of the loss."""
    grad_norm: GradNormConfig = GRAD_NORM_DEFAULTS
    """Outliers of the gradient norm."""
    burst: BurstConfig = BURST_DEFAULTS
    """A gradient norm that rises over several steps."""
    level: LevelConfig = LEVEL_DEFAULTS
    """A loss that walks away, or does not recover."""


class DetectorSet:
    """Feeds every detector the same record, in a fixed order."""

    def __init__(self, config: DetectConfig | None = None) -> None:
        config = config or DetectConfig()
        self._nonfinite = NonFiniteDetector()
        self._loss = SpikeDetector("loss", config.loss)
        self._grad_norm = SpikeDetector("grad_norm", config.grad_norm)
        self._burst = BurstDetector(config.burst)
        self._level = LevelDetector(config.level)
        self._parts = (self._nonfinite, self._loss, self._grad_norm, self._burst, self._level)

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return all findings about it."""
        found = (
            self._nonfinite.update(record)
            + self._loss.update(record)
            + self._grad_norm.update(record)
            + self._burst.update(record)
        )
        if any(finding.kind == "level_shift" for finding in found):
            self._level.excuse()
        return found + self._level.update(record)

    def limits(self) -> Limits:
        """Return what the device compares the next steps with."""
        return Limits(self._loss.limit(), self._grad_norm.limit())

    def rebaseline(self, steps: int, *, metric: str = "") -> None:
        """Forget the reference of one metric or of all, and have no limit for ``steps`` steps."""
        for detector in (self._loss, self._grad_norm):
            if metric in ("", detector.metric):
                detector.rebaseline(steps)
        if metric in ("", "grad_norm"):
            self._burst.rebaseline()
        if metric == "":
            self._level.rebaseline()
        elif metric == "loss":
            self._level.excuse()  # the lowest level stays: what came after it is told, no more

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {part.name: part.state_dict() for part in self._parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the set that gave ``state``; a detector it did not have starts anew."""
        for part in self._parts:
            if part.name in state:
                part.load_state_dict(state[part.name])
