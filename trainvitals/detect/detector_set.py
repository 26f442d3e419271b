"""The detectors that only report, in the order in which they see a step."""

from trainvitals.config import Settings
from trainvitals.detect.guard import GuardDetector
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
from trainvitals.detect.outliers import Detector, Limits, LossKind, NonFiniteDetector, is_clean
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
    """Passes the same record to every detector, in a fixed order.

    All of them only report, except the detector of non-finite numbers. If the loss is not minimized
    (``rl``, ``adversarial``), its level has no meaning: only single outliers of it are reported.
    """

    STATE = (
        "_nonfinite", "_guard", "_loss_spike", "_grad_norm_spike", "_grad_norm_burst",
        "_loss_level", "_loss_drift", "_loss_progress", "_suspended",
    )  # fmt: skip
    MAY_LACK = True  # a detector that an older version did not have starts without state

    def __init__(
        self, config: DetectConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        config = config or DetectConfig()
        self._minimizes = loss_kind == "minimize"
        self._nonfinite = NonFiniteDetector()
        self._guard = GuardDetector(loss_kind=loss_kind)
        self._loss_spike = SpikeDetector("loss", config.loss, together=self._minimizes)
        self._grad_norm_spike = SpikeDetector("grad_norm", config.grad_norm)
        self._grad_norm_burst = BurstDetector(config.burst)
        self._loss_level = LevelDetector(config.level)
        self._loss_drift = DriftDetector(config.drift)
        self._loss_progress = ProgressDetector(config.progress)
        self._parts: tuple[Detector, ...] = (
            self._nonfinite,
            self._guard,
            self._loss_spike,
            self._grad_norm_spike,
            self._grad_norm_burst,
            self._loss_level,
            self._loss_drift,
            self._loss_progress,
        )
        self._suspended = 0

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Pass one step to the detectors and return all findings about it."""
        findings = self._nonfinite.update(record) + self._guard.update(record)
        clean = is_clean(record)
        # The norm first: if it is an outlier, the loss of that step enters no reference either.
        outliers = self._grad_norm_spike.update(record, clean)
        loss = self._loss_spike.update(record, clean and not outliers)
        if outliers or loss:
            clean = False  # a value that one rule reports enters no other rule's reference
        findings += loss + outliers + self._grad_norm_burst.update(record, clean)
        if not self._minimizes:
            return findings
        if self._suspended:
            self._suspended -= 1
            return findings
        # In this order: the level must know whether the loss rose at once. The drift is slowest and
        # must know what the others already reported, so that one rise is reported once.
        shifted = bool(loss) and any(finding.kind == "level_shift" for finding in loss)
        level = self._loss_level.update(record, shifted)
        drift = self._loss_drift.update(record, bool(loss or level))
        known = shifted or bool(level or drift)
        return findings + level + drift + self._loss_progress.update(record, known)

    def rebaseline(self, steps: int) -> None:
        """Discard every reference, and report no finite values for ``steps`` steps."""
        for part in self._parts:
            part.rebaseline(steps)
        self._suspended = max(self._suspended, steps)

    def accept_level(self) -> None:
        """Start all references again at the current level, which an operator called healthy."""
        self.rebaseline(0)
        self._loss_progress.accept_level()

    def limits(self) -> Limits:
        """Return the values above which one step is reported."""
        return Limits(self._loss_spike.limit(), self._grad_norm_spike.limit())
