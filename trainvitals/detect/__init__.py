"""Detectors: problems of a step, found in reduced numbers only."""

from trainvitals.detect.level import (
    DriftConfig,
    DriftDetector,
    LevelConfig,
    LevelDetector,
    ProgressConfig,
    ProgressDetector,
)
from trainvitals.detect.outliers import (
    Detector,
    Limits,
    LossKind,
    NonFiniteDetector,
    OutlierConfig,
    OutlierRule,
    is_clean,
)
from trainvitals.detect.spike import (
    BurstConfig,
    BurstDetector,
    GradNormConfig,
    SpikeConfig,
    SpikeDetector,
)

__all__ = [
    "BurstConfig",
    "BurstDetector",
    "Detector",
    "DriftConfig",
    "DriftDetector",
    "GradNormConfig",
    "LevelConfig",
    "LevelDetector",
    "Limits",
    "LossKind",
    "NonFiniteDetector",
    "OutlierConfig",
    "OutlierRule",
    "ProgressConfig",
    "ProgressDetector",
    "SpikeConfig",
    "SpikeDetector",
    "is_clean",
]
