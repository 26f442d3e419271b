"""Detectors: what is wrong with a step, said from reduced numbers alone."""

from trainvitals.detect.burst import BurstConfig, BurstDetector
from trainvitals.detect.level import LevelConfig, LevelDetector
from trainvitals.detect.nonfinite import NonFiniteDetector
from trainvitals.detect.outliers import Limits, OutlierConfig, OutlierRule
from trainvitals.detect.protocol import Detector, is_clean
from trainvitals.detect.set import DetectConfig, DetectorSet
from trainvitals.detect.spike import SpikeConfig, SpikeDetector

__all__ = [
    "BurstConfig",
    "BurstDetector",
    "DetectConfig",
    "Detector",
    "DetectorSet",
    "LevelConfig",
    "LevelDetector",
    "Limits",
    "NonFiniteDetector",
    "OutlierConfig",
    "OutlierRule",
    "SpikeConfig",
    "SpikeDetector",
    "is_clean",
]
