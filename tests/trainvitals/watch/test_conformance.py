"""What every watcher must do, whatever it watches."""

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples, one_in
from tests.trainvitals.watch.worlds import GONE_WRONG, healthy_run, poisoned
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.fleet.layers import (
    ActivationConfig,
    ActivationWatcher,
    LayerConfig,
    LayerGradientWatcher,
    UpdateRatioWatcher,
)
from trainvitals.detect.fleet.memory import MemoryConfig, MemoryCreepWatcher
from trainvitals.detect.fleet.node import GpuErrorWatcher, GpuLostWatcher, GpuThrottleWatcher
from trainvitals.detect.fleet.optimizer import (
    LearningRateConfig,
    LearningRateWatcher,
    LossScaleWatcher,
    WeightDecayConfig,
    WeightDecayWatcher,
)
from trainvitals.detect.fleet.ranks import (
    DataBoundConfig,
    DataBoundWatcher,
    RankLossConfig,
    RankLossWatcher,
    ReductionWatcher,
)
from trainvitals.detect.fleet.speed import ThroughputConfig, ThroughputWatcher
from trainvitals.detect.fleet.straggler import StragglerConfig, StragglerWatcher
from trainvitals.detect.fleet.weights import WeightNormConfig, WeightNormWatcher
from trainvitals.records import Finding

QUICK_LAYERS = LayerConfig(warm_up=4, clear_after=2, accept_after=4)


def quick_memory() -> MemoryCreepWatcher:
    watcher = MemoryCreepWatcher(MemoryConfig(block=2, least_blocks=4, blocks=5, warmup_rows=0))
    watcher.learn_total(100)
    return watcher


STEP_WATCHERS: list[Callable[[], Any]] = [
    lambda: LearningRateWatcher(LearningRateConfig(warm_up_rows=2, zero_rows=2, clear_after=2)),
    lambda: WeightDecayWatcher(WeightDecayConfig(warm_up_rows=2, clear_after=2)),
    LossScaleWatcher,
    lambda: LayerGradientWatcher(QUICK_LAYERS),
    lambda: UpdateRatioWatcher(QUICK_LAYERS),
    lambda: ActivationWatcher(ActivationConfig(warm_up=4, clear_after=2)),
    lambda: WeightNormWatcher(WeightNormConfig(span=1, warm_up=3, clear_after=2)),
    lambda: ThroughputWatcher(ThroughputConfig(block=3, blocks=5, warmup_rows=1, accept_after=3)),
    lambda: DataBoundWatcher(DataBoundConfig(block=5, clear_after=1)),
    lambda: StragglerWatcher(
        StragglerConfig(steps=3, window=6, hits=3, diffuse_steps=2, sigmas=1.0)
    ),
    quick_memory,
    lambda: RankLossWatcher(RankLossConfig(steps=10)),
    ReductionWatcher,
    FleetDetectors,
]
"""With short memories, so that few steps reach every branch."""
NODE_WATCHERS: list[Callable[[], Any]] = [GpuThrottleWatcher, GpuErrorWatcher, GpuLostWatcher]

RUN_COLUMNS = (
    *("learning_rate", "learning_rate.1", "loss_scale", "tokens_per_second", "weight_norm"),
    "weight_decay",
)
RUN_COUNTS = ("verdict", "overflow_steps")
RANK_COLUMNS = (
    "rank_loss",
    "step_duration_seconds",
    "data_wait_seconds",
    "before_forward_seconds",
    "forward_seconds",
    "backward_seconds",
    "gradient_wait_seconds",
    "after_backward_seconds",
    "run_queue_seconds",
    "communication_seconds",
    "optimizer_seconds",
    "checkpoint_seconds",
    "monitor_seconds",
    "reduction_error",
    "memory_allocated_bytes",
    "memory_peak_bytes",
)
LAYER_COLUMNS = ("grad_norm", "weight_norm", "update_norm", "activation_rms", "activation_max")
GPU_COLUMNS = ("temperature_celsius", "power_watts", "sm_clock_hertz", "memory_total_bytes")
GPU_COUNTS = ("throttle_reasons", "ecc_uncorrected_errors", "ecc_corrected_errors", "last_xid")

ODD = (None, math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 5e-324, 1e308, -1e308, 3, 10**30)
USUAL = (1.0, 1.0, 1.1, 2.0, 10.0, 1000.0)
WHOLE = (None, 0, 0, 1, 2, 4, 16, 32, 64, 79, 128, -1, 2**63 - 1, -(2**63))


class Anything:
    """Draws values of any kind; odder ones in some runs than in others."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.odd = self.rng.choice([0.0, 0.02, 0.3, 1.0])

    def value(self) -> Any:
        rng = self.rng
        if rng.random() >= self.odd:
            return rng.choice(USUAL)
        return rng.choice(ODD) if rng.random() < 0.7 else struct.unpack("d", rng.randbytes(8))[0]

    def some(self, names: tuple[str, ...], *, whole: tuple[str, ...] = ()) -> dict[str, Any]:
        rng = self.rng
        columns = {name: self.value() for name in names if rng.random() < 0.8}
        return columns | {name: rng.choice(WHOLE) for name in whole if rng.random() < 0.8}


def merged_steps(seed: int) -> list[MergedStep]:
    """A run of anything at all: ranks appear and vanish, steps go back, values are any float."""
    anything = Anything(seed)
    rng, step, attempt, rows = anything.rng, 0, 1, []
    restarts = rng.choice([0.0, 0.02, 0.3])
    for _ in range(rng.randrange(120)):
        is_restart = rng.random() < restarts
        attempt += is_restart and rng.random() < 0.7
        step = max(0, step + (rng.choice([-7, 0]) if is_restart else rng.choice([1, 1, 1, 9])))
        num = rng.choice([0, 1, 2, 5, 5, 5, 5]) if rng.random() < anything.odd else 5
        names = [name for name in RANK_COLUMNS if rng.random() < 0.8]
        layers = [f"h.{i}" for i in range(rng.choice([0, 1, 6, 6]))]
        rows.append(
            MergedStep(
                step=step,
                attempt=attempt,
                time_unix_ns=rng.randrange(2**62),
                run=anything.some(RUN_COLUMNS, whole=RUN_COUNTS),
                ranks={name: [anything.value() for _ in range(num)] for name in names},
                layers={
                    layer: {k: float(v) for k, v in anything.some(LAYER_COLUMNS).items() if v}
                    for layer in layers
                },
            )
        )
    return rows


def node_samples(seed: int) -> list[NodeSample]:
    anything = Anything(seed)
    rng = anything.rng
    return [
        NodeSample(
            node=rng.choice("ab"),
            time_unix_ns=rng.randrange(2**62),
            step=i,
            gpus={
                uuid: anything.some(GPU_COLUMNS, whole=GPU_COUNTS)
                for uuid in ("GPU-1", "GPU-2", "GPU-3")
                if rng.random() < 0.8
            },
        )
        for i in range(rng.randrange(60))
    ]


seeds = st.integers(0, 2**32)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return found


def check_restoring(make: Callable[[], Any], before: list[Any], after: list[Any]) -> None:
    kept, restored = make(), make()
    for row in before:
        for finding in kept.update(row):
            check_finding(finding, row.step)
    restored.load_state_dict(through_json(kept.state_dict()))
    for row in after:
        assert repr(kept.update(row)) == repr(restored.update(row))
    assert kept.state_dict() == restored.state_dict()


def check_finding(finding: Finding, step: int) -> None:
    assert ("advisory", step) == (finding.level, finding.step)
    assert finding.reason.isascii()
    assert finding.kind
    assert finding.cause
    for number in (finding.value, finding.limit):
        assert number is None or not math.isnan(number)


quickly = settings(max_examples=examples(25), deadline=None)


@pytest.mark.parametrize("make", STEP_WATCHERS)
@quickly
@given(before=seeds, after=seeds)
def test_restoring_state_changes_nothing_on_any_steps(
    make: Callable[[], Any], before: int, after: int
) -> None:
    check_restoring(make, merged_steps(before), merged_steps(after))


@pytest.mark.parametrize("make", NODE_WATCHERS)
@quickly
@given(before=seeds, after=seeds)
def test_restoring_state_changes_nothing_on_any_samples(
    make: Callable[[], Any], before: int, after: int
) -> None:
    check_restoring(make, node_samples(before), node_samples(after))


@pytest.mark.parametrize("make", STEP_WATCHERS)
def test_a_run_without_any_column_is_told_nothing_about(make: Callable[[], Any]) -> None:
    watcher = make()
    rows = [MergedStep(step=i, attempt=1, time_unix_ns=i) for i in range(300)]
    assert [()] * 300 == [watcher.update(row) for row in rows]


@pytest.mark.parametrize("make", NODE_WATCHERS)
def test_a_node_without_gpus_is_told_nothing_about(make: Callable[[], Any]) -> None:
    watcher = make()
    rows = [NodeSample(node="a", time_unix_ns=i, step=i) for i in range(300)]
    assert [()] * 300 == [watcher.update(row) for row in rows]


@pytest.mark.parametrize("name", GONE_WRONG)
def test_what_goes_wrong_is_told_once_and_soon(name: str) -> None:
    case = GONE_WRONG[name]
    watcher, rows = case.make(), case.rows()
    found = [finding for row in rows for finding in watcher.update(row)]
    assert [case.cause] == [finding.cause for finding in found]
    assert case.onset <= found[0].step <= case.onset + case.within
    check_finding(found[0], found[0].step)


@pytest.mark.parametrize("name", one_in(3, GONE_WRONG))
def test_a_watcher_restored_in_the_middle_of_an_episode_does_not_tell_it_again(name: str) -> None:
    case = GONE_WRONG[name]
    watcher, found = case.make(), []
    for i, row in enumerate(case.rows()):
        found += watcher.update(row)
        if i % 7 == 0:
            state = through_json(watcher.state_dict())
            watcher = case.make()
            watcher.load_state_dict(state)
    assert [case.cause] == [finding.cause for finding in found]


@pytest.mark.parametrize("name", one_in(3, GONE_WRONG))
def test_a_poisoned_past_hides_nothing(name: str) -> None:
    """Every 7th row before the fault is of NaN, infinities or nothing, and enters no reference."""
    case = GONE_WRONG[name]
    watcher, found = case.make(), []
    for i, row in enumerate(case.rows()):
        poison = (math.nan, math.inf, -math.inf, None)[i % 4]
        is_poisoned = i % 7 == 6 and row.step < case.onset
        found += watcher.update(poisoned(row, poison) if is_poisoned else row)
    told = [finding for finding in found if finding.cause != "lr_nonfinite"]
    assert [case.cause] == [finding.cause for finding in told]
    assert case.onset <= told[0].step <= case.onset + case.within


def test_a_healthy_run_with_all_columns_is_told_nothing_about() -> None:
    watchers = FleetDetectors()
    found = [finding for row in healthy_run(3000) for finding in watchers.update(row)]
    assert [] == found
