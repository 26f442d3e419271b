"""The detectors that run in every rank, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from trainvitals.detect.burst import BURST_DEFAULTS, BurstConfig, BurstDetector
from trainvitals.detect.level import LEVEL_DEFAULTS, LevelConfig, LevelDetector
from trainvitals.detect.nonfinite import NonFiniteDetector
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.spike import (
    GRAD_NORM_DEFAULTS,
    LOSS_DEFAULTS,
    GradNormConfig,
    SpikeConfig,
)
from trainvitals.records import Finding, StepRecord


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

    def __init__(
        self, config: DetectConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        config = config or DetectConfig()
        self._loss_kind = loss_kind
        self._nonfinite = NonFiniteDetector()
        self._burst = BurstDetector(config.burst)
        self._level = LevelDetector(config.level)
        self._parts = (self._nonfinite, self._burst, self._level)

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return all findings about it."""
        told = self._burst.update(record) + self._level.update(record)
        return self._nonfinite.update(record) + tuple(replace(f, level="tell") for f in told)

    def rebaseline(self, steps: int) -> None:
        """Forget the reference: a planned change comes within ``steps`` steps."""
        self._burst.rebaseline()
        self._level.rebaseline()

    def accept(self, losses: Sequence[float], grad_norms: Sequence[float]) -> None:
        """Begin a new reference with a level that was accepted."""
        self.rebaseline(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {part.name: part.state_dict() for part in self._parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the set that gave ``state``; a detector it did not have starts anew."""
        for part in self._parts:
            if part.name in state:
                part.load_state_dict(state[part.name])
