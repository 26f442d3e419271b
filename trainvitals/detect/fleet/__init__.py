"""Watchers: detectors that only tell, on steps of the whole job and on samples of its nodes."""

from trainvitals.detect.fleet.base import NodeWatcher
from trainvitals.detect.fleet.layers import (
    ActivationConfig,
    ActivationWatcher,
    LayerConfig,
    LayerGradientWatcher,
    UpdateRatioWatcher,
)
from trainvitals.detect.fleet.memory import MemoryConfig, MemoryCreepWatcher
from trainvitals.detect.fleet.node import (
    GpuErrorConfig,
    GpuErrorWatcher,
    GpuLostConfig,
    GpuLostWatcher,
    GpuThrottleWatcher,
    ThrottleConfig,
)
from trainvitals.detect.fleet.overdue import (
    CheckpointConfig,
    StallConfig,
    checkpoint_overdue,
    stalled,
    usual_interval,
)
from trainvitals.detect.fleet.pace import Pace, PaceConfig
from trainvitals.detect.fleet.rate import LearningRateConfig, LearningRateWatcher
from trainvitals.detect.fleet.scale import LossScaleConfig, LossScaleWatcher
from trainvitals.detect.fleet.set import FleetConfig, FleetDetectors
from trainvitals.detect.fleet.speed import ThroughputConfig, ThroughputWatcher
from trainvitals.detect.fleet.spread import RankLossConfig, RankLossWatcher
from trainvitals.detect.fleet.waits import (
    DataBoundConfig,
    DataBoundWatcher,
    StragglerConfig,
    StragglerWatcher,
)

__all__ = [
    "ActivationConfig",
    "ActivationWatcher",
    "CheckpointConfig",
    "DataBoundConfig",
    "DataBoundWatcher",
    "FleetConfig",
    "FleetDetectors",
    "GpuErrorConfig",
    "GpuErrorWatcher",
    "GpuLostConfig",
    "GpuLostWatcher",
    "GpuThrottleWatcher",
    "LayerConfig",
    "LayerGradientWatcher",
    "LearningRateConfig",
    "LearningRateWatcher",
    "LossScaleConfig",
    "LossScaleWatcher",
    "MemoryConfig",
    "MemoryCreepWatcher",
    "NodeWatcher",
    "Pace",
    "PaceConfig",
    "RankLossConfig",
    "RankLossWatcher",
    "StallConfig",
    "StragglerConfig",
    "StragglerWatcher",
    "ThrottleConfig",
    "ThroughputConfig",
    "ThroughputWatcher",
    "UpdateRatioWatcher",
    "checkpoint_overdue",
    "stalled",
    "usual_interval",
]
