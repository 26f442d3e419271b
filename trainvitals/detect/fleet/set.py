"""All fleet detectors together, as the collector runs them, live or in a replay."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trainvitals.config import Settings
from trainvitals.detect.fleet.base import MergedStep, NodeSample, NodeWatcher, Watcher
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
from trainvitals.detect.fleet.optimizer import (
    LearningRateConfig,
    LearningRateWatcher,
    LossScaleConfig,
    LossScaleWatcher,
    WeightDecayConfig,
    WeightDecayWatcher,
)
from trainvitals.detect.fleet.ranks import (
    DataBoundConfig,
    DataBoundWatcher,
    RankLossConfig,
    RankLossWatcher,
    ReductionConfig,
    ReductionWatcher,
)
from trainvitals.detect.fleet.speed import (
    CheckpointConfig,
    StallConfig,
    ThroughputConfig,
    ThroughputWatcher,
    checkpoint_overdue,
    stalled,
    usual_interval,
)
from trainvitals.detect.fleet.straggler import StragglerConfig, StragglerWatcher
from trainvitals.detect.fleet.weights import WeightNormConfig, WeightNormWatcher
from trainvitals.records import Finding
from trainvitals.stateful import Stateful, state_row

_KEPT_CHECKPOINTS = 16
_BY_CLOCKS = ("straggler_forward", "straggler_backward", "straggler_optimizer", "straggler")
"""Findings that slow clocks can explain; the last covers ranks whose steps are not placed."""


class FleetConfig(Settings, frozen=True, kw_only=True):
    """Settings of all watchers."""

    section = "fleet"

    learning_rate: LearningRateConfig = LearningRateConfig()
    """Jumps, a rate stuck at zero, one that a resume forgot."""
    weight_decay: WeightDecayConfig = WeightDecayConfig()
    """Jumps of the weight decay."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """The gradient scaler."""
    layers: LayerConfig = LayerConfig()
    """Layers whose gradients or updates leave their course."""
    activations: ActivationConfig = ActivationConfig()
    """Growing activations."""
    weight_norm: WeightNormConfig = WeightNormConfig()
    """Weights that grow or shrink unusually fast."""
    throughput: ThroughputConfig = ThroughputConfig()
    """A sustained fall."""
    data_bound: DataBoundConfig = DataBoundConfig()
    """Waiting for data."""
    straggler: StragglerConfig = StragglerConfig()
    """Waiting for one rank."""
    memory: MemoryConfig = MemoryConfig()
    """Creeping device memory."""
    rank_loss: RankLossConfig = RankLossConfig()
    """One rank's loss off from the others'."""
    reduction: ReductionConfig = ReductionConfig()
    """Gradients that are not the sum of what the ranks put in."""
    throttle: ThrottleConfig = ThrottleConfig()
    """Slowed clocks of a GPU."""
    gpu_errors: GpuErrorConfig = GpuErrorConfig()
    """Memory errors and Xids."""
    gpu_lost: GpuLostConfig = GpuLostConfig()
    """GPUs that vanish."""
    stall: StallConfig = StallConfig()
    """A step that does not come."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """A checkpoint that does not come."""


class FleetDetectors(Stateful):
    """Runs every fleet detector of a run, in a fixed order. Reads no clock, never raises on data.

    Call ``update`` with each merged step, ``update_node`` with each node's sample, ``saved`` with
    each checkpoint, and ``check_stall`` periodically with the time.
    """

    STATE = ("_watchers", "_last", state_row("told", "_is_stalled", "_is_overdue"), "_checkpoints")
    FLAGS_ARE_NUMBERS = True

    def __init__(self, config: FleetConfig | None = None) -> None:
        self._config = config = config or FleetConfig()
        self._throughput = ThroughputWatcher(config.throughput)
        self._memory = MemoryCreepWatcher(config.memory)
        self._clocks = GpuThrottleWatcher(config.throttle)
        self.gpus: Mapping[int, str] = {}
        """By rank, the UUID of its GPU, if known."""
        self._of_steps: tuple[Watcher, ...] = (
            LearningRateWatcher(config.learning_rate),
            WeightDecayWatcher(config.weight_decay),
            LossScaleWatcher(config.loss_scale),
            LayerGradientWatcher(config.layers),
            UpdateRatioWatcher(config.layers),
            ActivationWatcher(config.activations),
            WeightNormWatcher(config.weight_norm),
            self._throughput,
            DataBoundWatcher(config.data_bound),
            StragglerWatcher(config.straggler),
            self._memory,
            RankLossWatcher(config.rank_loss),
            ReductionWatcher(config.reduction),
        )
        self._of_nodes: tuple[NodeWatcher, ...] = (
            self._clocks,
            GpuErrorWatcher(config.gpu_errors),
            GpuLostWatcher(config.gpu_lost),
        )
        self._watchers = {watcher.name: watcher for watcher in (*self._of_steps, *self._of_nodes)}
        self._last: Sequence[int] | None = None
        """Step and time of the latest step."""
        self._is_stalled = self._is_overdue = False
        self._checkpoints: list[int] = []
        self._interval: int | None = None

    @property
    def period(self) -> int:
        """Distance in steps of periodic slow steps; 0 if unknown."""
        return self._throughput.pace.period

    def update(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Add one step and return all findings about it."""
        findings: list[Finding] = []
        for watcher in self._of_steps:
            of_watcher = watcher.update(merged)
            if of_watcher:
                findings += map(self._with_gpu, of_watcher)
        self._last, self._is_stalled = (merged.step, merged.time_unix_ns), False
        if self._interval is not None:
            findings += self._overdue_findings(merged.step)
        return tuple(findings)

    def _with_gpu(self, finding: Finding) -> Finding:
        """Add the state of its GPU's clocks to a late rank's finding, if they explain it."""
        if finding.cause not in _BY_CLOCKS or finding.rank not in self.gpus:
            return finding
        uuid = self.gpus[finding.rank]
        if not (slowed := self._clocks.now(uuid)):
            return finding
        reason = f"{finding.reason}; its GPU {uuid} {slowed}"
        return msgspec.structs.replace(finding, reason=reason, cause="straggler_gpu")

    def update_node(self, sample: NodeSample) -> tuple[Finding, ...]:
        """Add one sample of a node and return all findings about it."""
        for columns in sample.gpus.values():
            total = columns.get("memory_total_bytes")
            if total is not None:
                self._memory.learn_total(total)
        return tuple(finding for w in self._of_nodes for finding in w.update(sample))

    def holds(self, finding: Finding) -> bool:
        """Return whether the condition of an earlier finding on merged steps still holds."""
        watchers = (watcher for watcher in self._of_steps if watcher.name == finding.detector)
        return any(watcher.holds(finding.cause) for watcher in watchers)

    def check_stall(self, now_ns: int) -> tuple[Finding, ...]:
        """Return the finding about a step that does not arrive; once, until one does.

        ``now_ns`` must be from the clock of the steps' ``time_unix_ns``.
        """
        if self._last is None or self._is_stalled:
            return ()
        pace = self._throughput.pace
        finding = stalled(
            now_ns,
            last_step=self._last[0],
            last_time_ns=self._last[1],
            typical_seconds=pace.typical_seconds,
            longest_seconds=pace.longest_seconds,
            longest_once_seconds=pace.longest_once_seconds,
            config=self._config.stall,
        )
        self._is_stalled = finding is not None
        return () if finding is None else (finding,)

    def resumed(self, now_ns: int) -> None:
        """Record that an operator resumed the run: the stall timer starts now."""
        if self._last is not None:
            self._last, self._is_stalled = (self._last[0], now_ns), False

    def saved(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is on disk."""
        earlier_steps = [earlier for earlier in self._checkpoints if earlier < step]
        self._checkpoints = [*earlier_steps, step][-_KEPT_CHECKPOINTS:]
        self._interval = usual_interval(self._checkpoints)
        self._is_overdue = False

    def _overdue_findings(self, step: int) -> tuple[Finding, ...]:
        """Return the finding about an overdue checkpoint, once."""
        if self._is_overdue:
            return ()
        finding = checkpoint_overdue(
            step,
            newest_checkpoint_step=self._checkpoints[-1],
            interval=self._interval,
            config=self._config.checkpoint,
        )
        self._is_overdue = finding is not None
        return () if finding is None else (finding,)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the set that returned ``state``; a detector missing in it starts empty."""
        super().load_state_dict(state)
        self._interval = usual_interval(self._checkpoints)
