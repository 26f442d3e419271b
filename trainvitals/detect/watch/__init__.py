"""Watchers: detectors that only tell, on steps of the whole job and on samples of its nodes."""

from trainvitals.detect.watch.base import NodeWatcher
from trainvitals.detect.watch.layers import (
    ActivationConfig,
    ActivationWatcher,
    LayerConfig,
    LayerGradientWatcher,
    UpdateRatioWatcher,
)
from trainvitals.detect.watch.memory import MemoryConfig, MemoryCreepWatcher
from trainvitals.detect.watch.node import (
    GpuErrorConfig,
    GpuErrorWatcher,
    GpuLostConfig,
    GpuLostWatcher,
    GpuThrottleWatcher,
    ThrottleConfig,
)
from trainvitals.detect.watch.overdue import (
    CheckpointConfig,
    StallConfig,
    checkpoint_overdue,
    stalled,
    usual_interval,
)
from trainvitals.detect.watch.pace import Pace, PaceConfig
from trainvitals.detect.watch.rate import LearningRateConfig, LearningRateWatcher
from trainvitals.detect.watch.scale import LossScaleConfig, LossScaleWatcher
from trainvitals.detect.watch.set import WatchConfig, WatchSet
from trainvitals.detect.watch.speed import ThroughputConfig, ThroughputWatcher
from trainvitals.detect.watch.spread import RankLossConfig, RankLossWatcher
from trainvitals.detect.watch.waits import (
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
    "WatchConfig",
    "WatchSet",
    "checkpoint_overdue",
    "stalled",
    "usual_interval",
]
