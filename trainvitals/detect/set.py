"""The detectors that run in every rank, as one."""

from __future__ import annotations

from collections.abc import Sequence

from trainvitals.config import Settings
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
from trainvitals.stateful import Stateful


class DetectConfig(Settings, frozen=True, kw_only=True):
    """Settings of the detectors in the loop."""

    section = "detect"

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


class DetectorSet(Stateful):
    """Feeds every detector the same record, in a fixed order.

    All of them tell, except the one of non-finite numbers. Where the loss is not minimized (``rl``,
    ``adversarial``) its level says nothing: what is told about it are single outliers.
    """

    STATE = (
        "_nonfinite", "_loss_spike", "_grad_norm_spike", "_grad_norm_burst", "_loss_level",
        "_loss_drift", "_loss_progress", "_suspended",
    )  # fmt: skip
    MAY_LACK = True  # a detector that an older version did not have starts anew

    def __init__(
        self, config: DetectConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        config = config or DetectConfig()
        self._minimizes = loss_kind == "minimize"
        self._nonfinite = NonFiniteDetector()
        self._loss_spike = SpikeDetector("loss", config.loss, together=self._minimizes)
        self._grad_norm_spike = SpikeDetector("grad_norm", config.grad_norm)
        self._grad_norm_burst = BurstDetector(config.burst)
        self._loss_level = LevelDetector(config.level)
        self._loss_drift = DriftDetector(config.drift)
        self._loss_progress = ProgressDetector(config.progress)
        self._suspended = 0

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return all findings about it."""
        findings = self._nonfinite.update(record)
        clean = is_clean(record)
        # The norm first: where it is an outlier, the loss of that step enters no reference either.
        outliers = self._grad_norm_spike.update(record, clean)
        loss = self._loss_spike.update(record, clean and not outliers)
        if outliers or loss:
            clean = False  # what one rule tells enters no other rule's reference
        findings += loss + outliers + self._grad_norm_burst.update(record, clean)
        if not self._minimizes:
            return findings
        if self._suspended:
            self._suspended -= 1
            return findings
        # In this order: the level must know whether the loss got there at once, and the drift, the
        # slowest, what the others told already, so that one rise is told once.
        shifted = any(finding.kind == "level_shift" for finding in loss)
        level = self._loss_level.update(record, shifted)
        drift = self._loss_drift.update(record, bool(loss or level))
        return findings + level + drift + self._loss_progress.update(record)

    def rebaseline(self, steps: int) -> None:
        """Forget every reference, and say nothing about finite values for ``steps`` steps."""
        self._loss_spike.rebaseline(steps)
        self._grad_norm_spike.rebaseline(steps)
        self._grad_norm_burst.rebaseline()
        self._loss_level.rebaseline()
        self._loss_drift.rebaseline()
        self._loss_progress.rebaseline()
        self._suspended = max(self._suspended, steps)

    def accept(self, losses: Sequence[float], grad_norms: Sequence[float]) -> None:
        """Begin new references from the values of a level that the policy accepted.

        Nothing about the rise to it is told again.
        """
        self._loss_spike.accept(list(losses))
        self._grad_norm_spike.accept(list(grad_norms))
        self._grad_norm_burst.accept(list(grad_norms))
        self._loss_level.accept(losses)
        self._loss_drift.accept()
        self._loss_progress.accept(losses)
