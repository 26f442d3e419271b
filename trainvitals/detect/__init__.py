"""Detectors: what is wrong with a step, told from reduced numbers alone."""

from trainvitals.detect.burst import BurstConfig, BurstDetector
from trainvitals.detect.level import DriftConfig, DriftDetector, LevelConfig, LevelDetector
from trainvitals.detect.nonfinite import NonFiniteDetector
from trainvitals.detect.outliers import Limits, LossKind, OutlierConfig, OutlierRule
from trainvitals.detect.progress import ProgressConfig, ProgressDetector
from trainvitals.detect.protocol import Detector, is_clean
from trainvitals.detect.set import DetectConfig, DetectorSet
from trainvitals.detect.spike import GradNormConfig, SpikeConfig, SpikeDetector

__all__ = [
    "BurstConfig",
    "BurstDetector",
    "DetectConfig",
    "Detector",
    "DetectorSet",
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
