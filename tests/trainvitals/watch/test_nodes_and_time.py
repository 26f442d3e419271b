"""Nodes, what does not come in time, settings, and merged steps as text."""

import pytest
from msgspec.structs import replace

from tests.trainvitals.watch.worlds import SECOND, healthy_run, slower
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.fleet.layers import LayerConfig
from trainvitals.detect.fleet.memory import MemoryConfig
from trainvitals.detect.fleet.node import GpuErrorConfig, GpuErrorWatcher, GpuLostWatcher
from trainvitals.detect.fleet.optimizer import LearningRateConfig, LossScaleConfig
from trainvitals.detect.fleet.ranks import RankLossConfig
from trainvitals.detect.fleet.speed import (
    StallConfig,
    ThroughputConfig,
    checkpoint_overdue,
    stalled,
    usual_interval,
)
from trainvitals.errors import ConfigError
from trainvitals.testing.merged import causes, merged_series

# -------------------------------------------------------------------------- nodes


def samples(*rows: dict[str, dict[str, float | int | None]]) -> list[NodeSample]:
    return [
        NodeSample(node="a", time_unix_ns=i * SECOND, step=i, gpus=gpus)
        for i, gpus in enumerate(rows)
    ]


def test_errors_from_before_the_first_sample_are_old() -> None:
    rows = samples(*[{"G": {"ecc_uncorrected_errors": 7, "last_xid": 79}}] * 5)
    assert [] == [f for row in rows for f in GpuErrorWatcher().update(row)]


def test_an_xid_is_told_in_words_and_only_when_it_comes_up() -> None:
    watcher = GpuErrorWatcher()
    rows = samples({"G": {"power_watts": 1.0}}, *[{"G": {"last_xid": 79}}] * 9)
    (finding,) = [f for row in rows for f in watcher.update(row)]
    assert ("gpu_xid", "xid_fatal", 79) == (finding.kind, finding.cause, finding.value)
    assert (
        "GPU G of node a reported Xid 79: it has fallen off the bus; reset the GPU or drain "
        "the node" == finding.reason
    )


def test_a_reset_counter_is_no_error() -> None:
    watcher = GpuErrorWatcher()
    rows = samples(*[{"G": {"ecc_uncorrected_errors": n}} for n in (9, 9, 0, 0)])
    assert [] == [f for row in rows for f in watcher.update(row)]


def test_corrected_errors_count_from_zero_after_a_reset_and_in_each_window() -> None:
    watcher = GpuErrorWatcher(GpuErrorConfig(corrected=100, corrected_seconds=10.0))
    counts = (5000, 5000, 0, 100)  # a driver that was loaded again counts from zero
    rows = samples(*[{"G": {"ecc_corrected_errors": n}} for n in counts])
    (finding,) = [f for row in rows for f in watcher.update(row)]
    assert ("ecc_corrected", 3, 100) == (finding.cause, finding.step, finding.value)
    watcher = GpuErrorWatcher(GpuErrorConfig(corrected=100, corrected_seconds=10.0))
    rows = samples(*[{"G": {"ecc_corrected_errors": 9 * i}} for i in range(60)])
    assert [] == [f for row in rows for f in watcher.update(row)]


def test_a_gpu_that_comes_back_may_be_lost_again() -> None:
    watcher = GpuLostWatcher()
    both, one = {"G": {"power_watts": 1.0}, "H": {"power_watts": 1.0}}, {"G": {"power_watts": 1.0}}
    rows = samples(both, *[one] * 9, both, *[one] * 9)
    assert [3, 13] == [f.step for row in rows for f in watcher.update(row)]


def test_all_gpus_of_a_node_together_are_one_finding() -> None:
    watcher = GpuLostWatcher()
    both = {"G": {"power_watts": 1.0}, "H": {"power_watts": 1.0}}
    rows = samples(both, *[{}] * 30)
    (finding,) = [f for row in rows for f in watcher.update(row)]
    assert "all 2 GPUs of node a stopped responding" == finding.reason


# -------------------------------------------------------------------------- not in time


def test_a_stall_is_a_function_of_the_time_given() -> None:
    def at(seconds: float, typical: float | None, second: float = 0.0, once: float = 310.0) -> bool:
        found = stalled(
            int(seconds * SECOND),
            last_step=7,
            last_time_ns=0,
            typical_seconds=typical,
            longest_seconds=second,
            longest_once_seconds=max(second, once),
        )
        return found is not None

    assert [False, True] == [at(372, 1.0), at(373, 1.0)]
    assert [False, True] == [at(1999, 100.0), at(2001, 100.0)]
    assert [False, True] == [at(1799, 1.0, 600.0), at(1801, 1.0, 600.0)]
    assert not at(-5, 1.0)


@pytest.mark.parametrize("num_steps", [1, 3, 60])
def test_the_first_long_silence_may_be_an_evaluation_for_half_an_hour_however_few_steps_are_known(
    num_steps: int,
) -> None:
    watchers = FleetDetectors()
    assert () == watchers.check_stall(10**6 * SECOND), (
        "nothing began yet: data may take long to prepare"
    )
    for row in healthy_run(num_steps):
        watchers.update(row)
    last = row.time_unix_ns
    assert () == watchers.check_stall(last + 1_800 * SECOND)
    (finding,) = watchers.check_stall(last + 1_801 * SECOND)
    assert ("stalled", num_steps == 60) == (finding.kind, "usually takes" in finding.reason)


def test_a_stall_is_told_once_until_the_next_step() -> None:
    watchers = FleetDetectors()
    rows = list(healthy_run(60))
    for row in rows:
        watchers.update(row)
    last = rows[-1].time_unix_ns
    assert () == watchers.check_stall(last + 1_700 * SECOND)
    assert ["stalled"] == [f.kind for f in watchers.check_stall(last + 1_900 * SECOND)]
    assert () == watchers.check_stall(last + 2_000 * SECOND)
    (row,) = merged_series("loss 1", first_step=60)
    watchers.update(row)
    assert ["stalled"] == [f.kind for f in watchers.check_stall(row.time_unix_ns + 1_900 * SECOND)]


def after_one_pause(seconds: float) -> tuple[FleetDetectors, int]:
    """Return the watchers of a run that paused once, and when its newest step ended."""
    watchers = FleetDetectors()
    for row in healthy_run(100):
        late = int(seconds * SECOND) if row.step >= 50 else 0
        pause = seconds if row.step == 50 else 0.0
        took = [value + pause for value in row.ranks["step_duration_seconds"]]  # type: ignore[operator]
        ranks = {**row.ranks, "step_duration_seconds": took}
        last = row.time_unix_ns + late
        watchers.update(replace(row, time_unix_ns=last, ranks=ranks))
    return watchers, last


@pytest.mark.parametrize("evaluation", [400.0, 1_200.0, 3_000.0])
def test_a_second_evaluation_as_long_as_the_first_is_no_stall(evaluation: float) -> None:
    watchers, last = after_one_pause(evaluation)
    assert () == watchers.check_stall(last + int(1.15 * evaluation * SECOND))
    assert ["stalled"] == [
        f.kind for f in watchers.check_stall(last + int(1.3 * evaluation * SECOND))
    ]


def test_a_hang_that_ended_lengthens_the_patience_to_an_hour_at_most() -> None:
    watchers, last = after_one_pause(7_200.0)
    assert () == watchers.check_stall(last + 3_590 * SECOND)
    assert ["stalled"] == [f.kind for f in watchers.check_stall(last + 3_610 * SECOND)]


def test_a_checkpoint_is_overdue_after_twice_the_usual_interval() -> None:
    assert 100 == usual_interval([0, 100, 200, 350, 450])
    assert None is usual_interval([100])
    told = [
        step
        for step in range(500, 800)
        if checkpoint_overdue(step, newest_checkpoint_step=450, interval=100)
    ]
    assert 651 == told[0]
    assert None is checkpoint_overdue(9999, newest_checkpoint_step=0, interval=None)


def test_an_overdue_checkpoint_is_told_once_until_one_comes() -> None:
    watchers, found = FleetDetectors(), []
    for row in merged_series("loss 1x1000"):
        if row.step in (100, 200, 300, 700):
            watchers.saved(row.step)
        found += watchers.update(row)
    assert {501: ["checkpoint_overdue"], 901: ["checkpoint_overdue"]} == causes(found)


# -------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LearningRateConfig(max_rise=1.0), "learning_rate.max_rise is 1.0; it must be 1.1"),
        (lambda: LossScaleConfig(overflow_ratio=float("nan")), "overflow_ratio is nan"),
        (lambda: LayerConfig(weak_ratio=50.0), "layers.strong_ratio is 30.0"),
        (lambda: ThroughputConfig(fall=1.5), "throughput.fall is 1.5; it must be 0.01 to 0.99"),
        (
            lambda: MemoryConfig(blocks=4),
            r"memory.blocks is 4; it must be at least memory.least_blocks \(8\)",
        ),
        (
            lambda: RankLossConfig(least=0.5),
            r"rank_loss.most is 0.1; it must be at least rank_loss.least \(0.5\)",
        ),
        (lambda: StallConfig(longest_ratio=0.0), "stall.longest_ratio is 0.0"),
    ],
)
def test_a_setting_out_of_range_is_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


def test_a_set_from_before_a_watcher_was_there_starts_that_one_anew() -> None:
    watchers = FleetDetectors()
    for row in healthy_run(50):
        watchers.update(row)
    state = watchers.state_dict()
    del state["watchers"]["throughput"]
    restored = FleetDetectors()
    restored.load_state_dict(state)
    assert set(FleetDetectors().state_dict()["watchers"]) == set(restored.state_dict()["watchers"])


def test_the_period_of_evaluations_is_shown() -> None:
    watchers = FleetDetectors()
    for row in healthy_run(900):
        watchers.update(slower(row, 1.0))
    assert 0 < watchers.period


def test_merged_steps_read_as_text() -> None:
    (first, second) = merged_series("loss 2 -; rank_loss[1] 3x2; h:grad_norm 1 -", ranks=2)
    assert (
        MergedStep(
            step=0,
            attempt=1,
            time_unix_ns=0,
            run={"loss": 2.0},
            ranks={"rank_loss": [None, 3.0]},
            layers={"h": {"grad_norm": 1.0}},
        )
        == first
    )
    assert ({"loss": None}, {}) == (second.run, second.layers)
