"""Detectors: what is wrong with a step, said from reduced numbers alone."""

from trainvitals.detect.nonfinite import NonFiniteDetector
from trainvitals.detect.protocol import Detector, is_clean
from trainvitals.detect.set import DetectConfig, DetectorSet, Limits
from trainvitals.detect.spike import SpikeConfig, SpikeDetector

__all__ = [
    "DetectConfig",
    "Detector",
    "DetectorSet",
    "Limits",
    "NonFiniteDetector",
    "SpikeConfig",
    "SpikeDetector",
    "is_clean",
]
