"""The detectors that run in every rank, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainvitals.detect.level import (
    DRIFT_DEFAULTS,
    LEVEL_DEFAULTS,
    PROGRESS_DEFAULTS,
    DriftConfig,
    DriftDetector,
    LevelConfig,
    LevelDetector,
    ProgressConfig,
    ProgressDetector,
)
from trainvitals.detect.outliers import LossKind, NonFiniteDetector, is_clean
from trainvitals.detect.spike import (
    BURST_DEFAULTS,
    GRAD_NORM_DEFAULTS,
    LOSS_DEFAULTS,
    BurstConfig,
    BurstDetector,
    GradNormConfig,
    SpikeConfig,
    SpikeDetector,
)
from trainvitals.records import Finding, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig:
    """Settings of the detectors in the loop."""

    loss: SpikeConfig = LOSS_DEFAULTS
    """A loss that is high, for one step or for several."""
    grad_norm: GradNormConfig = GRAD_NORM_DEFAULTS
    """Outliers of the gradient norm."""
    burst: BurstConfig = BURST_DEFAULTS
    """A gradient norm that rises over several steps."""
    level: LevelConfig = LEVEL_DEFAULTS
    """A loss that walks away, or does not recover."""
    drift: DriftConfig = DRIFT_DEFAULTS
    """The same, slow or within the noise."""
    progress: ProgressConfig = PROGRESS_DEFAULTS
    """Progress that is lost, never made, or too good."""


class DetectorSet:
    """Feeds every detector the same record, in a fixed order.

    All of them tell, except the one of non-finite numbers. Where the loss is not minimized (``rl``,
    ``adversarial``) its level says nothing: what is told about it are single outliers.
    """

    def __init__(
        self, config: DetectConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        config = config or DetectConfig()
        self._minimizes = loss_kind == "minimize"
        self._nonfinite = NonFiniteDetector()
        self._loss = SpikeDetector("loss", config.loss, together=self._minimizes)
        self._grad_norm = SpikeDetector("grad_norm", config.grad_norm)
        self._burst = BurstDetector(config.burst)
        self._level = LevelDetector(config.level)
        self._drift = DriftDetector(config.drift)
        self._progress = ProgressDetector(config.progress)
        self._suspended = 0
        self._parts = (
            self._nonfinite,
            self._loss,
            self._grad_norm,
            self._burst,
            self._level,
            self._drift,
            self._progress,
        )

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return all findings about it."""
        findings = self._nonfinite.update(record)
        clean = is_clean(record)
        outliers = self._grad_norm.update(record, clean)
        loss = self._loss.update(record, clean and not outliers)
        if outliers or loss:
            clean = False  # what one rule tells enters no other rule's reference
        findings += loss + outliers + self._burst.update(record, clean)
        if not self._minimizes:
            return findings
        if self._suspended:
            self._suspended -= 1
            return findings
        shifted = any(finding.kind == "level_shift" for finding in loss)
        level = self._level.update(record, shifted)
        drift = self._drift.update(record, bool(loss or level))
        return findings + level + drift + self._progress.update(record)

    def rebaseline(self, steps: int) -> None:
        """Forget every reference, and say nothing about finite values for ``steps`` steps."""
        self._loss.rebaseline(steps)
        self._grad_norm.rebaseline(steps)
        self._burst.rebaseline()
        self._level.rebaseline()
        self._drift.rebaseline()
        self._progress.rebaseline()
        self._suspended = max(self._suspended, steps)

    def accept(self, losses: Sequence[float], grad_norms: Sequence[float]) -> None:
        """Begin new references from the values of a level that the policy accepted.

        Nothing about the rise to it is told again.
        """
        self._loss.accept(list(losses))
        self._grad_norm.accept(list(grad_norms))
        self._burst.accept(list(grad_norms))
        self._level.accept(losses)
        self._drift.accept()
        self._progress.accept(losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        state: dict[str, Any] = {part.name: part.state_dict() for part in self._parts}
        return {**state, "suspended": self._suspended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the set that gave ``state``; a detector it did not have starts anew."""
        self._suspended = int(state.get("suspended", 0))
        for part in self._parts:
            if part.name in state:
                part.load_state_dict(state[part.name])
