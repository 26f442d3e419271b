import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainvitals.detect import (
    BurstDetector,
    DetectConfig,
    Detector,
    DetectorSet,
    LevelDetector,
    NonFiniteDetector,
    SpikeConfig,
    SpikeDetector,
)
from trainvitals.errors import ConfigError
from trainvitals.records import StepRecord
from trainvitals.testing import replay, series

STATEFUL: list[Callable[[], Detector | DetectorSet]] = [
    NonFiniteDetector,
    lambda: SpikeDetector("loss"),
    lambda: SpikeDetector("grad_norm"),
    BurstDetector,
    LevelDetector,
    DetectorSet,
]
maybe = st.none() | st.floats() | st.floats(0.5, 2.0) | st.floats(0.5, 20.0)


@st.composite
def records(draw: st.DrawFn) -> list[StepRecord]:
    size = draw(st.integers(0, 70))
    return [
        StepRecord(
            step=step,
            attempt=1,
            loss=draw(maybe),
            grad_norm=draw(maybe),
            loss_limit=draw(maybe),
            grad_norm_limit=draw(maybe),
            nonfinite_ranks=draw(st.sampled_from([(), (), (), (1,), (0, 3)])),
            nonfinite_params=draw(st.sampled_from([0, 0, 0, 2])),
            skipped=draw(st.booleans()),
            overflow=draw(st.booleans()),
        )
        for step in range(size)
    ]


# ----------------------------------------------------------------------------- properties


@pytest.mark.parametrize("make", STATEFUL)
@settings(max_examples=25)
@given(before=records(), after=records())
def test_restoring_state_changes_nothing(
    make: Callable[[], DetectorSet], before: list[StepRecord], after: list[StepRecord]
) -> None:
    kept, restored = make(), make()
    for record in before:
        kept.update(record)
    restored.load_state_dict(json.loads(json.dumps(kept.state_dict(), allow_nan=False)))
    for record in after:
        assert repr(kept.update(record)) == repr(restored.update(record))
    assert kept.state_dict() == restored.state_dict()


@given(records())
def test_limits_are_finite_or_absent_whatever_was_seen(given_records: list[StepRecord]) -> None:
    detectors = DetectorSet()
    for record in given_records:
        detectors.update(record)
        limits = detectors.limits()
        assert limits.loss is None or math.isfinite(limits.loss)
        assert limits.grad_norm is None or math.isfinite(limits.grad_norm)


@given(st.lists(st.floats(0.5, 2.0), min_size=20, max_size=60), st.floats(1e3, 1e300))
def test_a_skipped_outlier_leaves_no_trace_in_the_limit(values: list[float], spike: float) -> None:
    clean, poisoned = SpikeDetector("loss"), SpikeDetector("loss")
    for step, value in enumerate(values):
        limit = clean.limit()
        record = StepRecord(step=step, attempt=1, loss=value, loss_limit=limit)
        if limit is not None and value > limit:
            return
        clean.update(record)
        poisoned.update(record)
    bad = StepRecord(step=99, attempt=1, loss=spike, loss_limit=4.0, skipped=True)
    poisoned.update(bad)
    nan = StepRecord(step=100, attempt=1, loss=math.nan, loss_limit=4.0, skipped=True)
    poisoned.update(nan)
    for part in ("window", "deviations", "course"):
        assert clean.state_dict()[part] == poisoned.state_dict()[part]


# ----------------------------------------------------------------------------- non-finite


def test_a_nan_on_one_rank_names_the_rank() -> None:
    (record,) = series("loss 2.1; grad_norm nan; nonfinite_ranks 3")
    (finding,) = NonFiniteDetector().update(record)
    assert ("nonfinite", "act", 3, "nonfinite_gradient") == (
        finding.kind, finding.level, finding.rank, finding.cause,
    )  # fmt: skip
    assert "gradient norm is nan on rank 3" == finding.reason


def test_a_nan_on_several_ranks_blames_none_of_them() -> None:
    record = StepRecord(step=0, attempt=1, loss=math.nan, nonfinite_ranks=tuple(range(12)))
    (finding,) = NonFiniteDetector().update(record)
    assert -1 == finding.rank
    assert "loss is nan on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" == finding.reason


def test_non_finite_gradients_behind_a_finite_norm_are_found_by_their_rank() -> None:
    assert {0: ["nonfinite"]} == replay(NonFiniteDetector(), "grad_norm 1; nonfinite_ranks 2")


def test_a_scaler_overflow_is_normal() -> None:
    assert {} == replay(NonFiniteDetector(), "loss 2.1x9; grad_norm infx9; overflow 1x9")


def test_an_overflow_does_not_excuse_a_non_finite_loss() -> None:
    assert {0: ["nonfinite"]} == replay(NonFiniteDetector(), "loss nan; grad_norm inf; overflow 1")


def test_overflows_without_end_are_no_longer_excused() -> None:
    found = replay(NonFiniteDetector(), "loss 2.1x45; grad_norm infx45; overflow 1x45")
    assert [40, 41, 42, 43, 44] == list(found)


def test_non_finite_parameters_are_said_first() -> None:
    found = replay(NonFiniteDetector(), "loss nan; nonfinite_params 2")
    assert {0: ["nonfinite_params", "nonfinite"]} == found


def test_a_rank_that_could_not_measure_is_told_and_not_acted_on() -> None:
    (finding,) = NonFiniteDetector().update(
        StepRecord(step=4, attempt=1, loss=2.0, failed_ranks=(1,))
    )
    assert ("rank_failed", "tell", 1) == (finding.kind, finding.level, finding.rank)


# ---------------------------------------------------------------------------------- spikes


def test_one_outlier_is_reported_once_at_its_step() -> None:
    assert {20: ["spike"]} == replay(SpikeDetector("loss"), "loss 2.1x20 9.5 2.1x5")


def test_a_finding_says_value_and_limit_in_words() -> None:
    record = StepRecord(step=7, attempt=1, grad_norm=145.0, grad_norm_limit=4.84)
    (finding,) = SpikeDetector("grad_norm").update(record)
    assert "gradient norm 145 is above its limit 4.84" == finding.reason
    assert (145.0, 4.84, 7) == (finding.value, finding.limit, finding.onset_step)


def test_the_limit_that_was_in_force_decides_and_not_the_present_one() -> None:
    detector = SpikeDetector("loss")
    for record in series("loss 2.1x30"):
        detector.update(record)
    assert () == detector.update(StepRecord(step=30, attempt=1, loss=50.0, loss_limit=60.0))
    assert () != detector.update(StepRecord(step=31, attempt=1, loss=2.1, loss_limit=2.0))


def test_a_record_without_a_limit_is_not_judged() -> None:
    assert () == SpikeDetector("loss").update(StepRecord(step=0, attempt=1, loss=1e9))


def test_there_is_no_limit_before_the_warm_up_is_over() -> None:
    detector = SpikeDetector("loss", SpikeConfig(warm_up=10))
    for record in series("loss 2.1x9"):
        detector.update(record)
    assert None is detector.limit()
    detector.update(StepRecord(step=9, attempt=1, loss=2.1))
    assert 4.2 == detector.limit()


def test_one_heavy_batch_passes_and_the_second_in_a_row_does_not() -> None:
    assert {} == replay(SpikeDetector("loss"), "loss 2.1x30 3.8 2.1x20 3.8 2.1x20")
    assert {32: ["spike"], 33: ["spike"]} == replay(
        SpikeDetector("loss"), "loss 2.1x30 3.8x4 2.1x20"
    )


def test_heavy_batches_that_come_one_by_one_become_the_tail_that_is_normal() -> None:
    detector = SpikeDetector("loss")
    assert {} == replay(detector, "loss " + ("2.1x12 3.4 " * 6))
    assert {} == replay(detector, "loss " + ("2.1x12 3.4 3.4 " * 6))


def test_trouble_that_built_up_is_dated_to_where_it_began() -> None:
    detector = SpikeDetector("loss")
    for record in series("loss 2.1x30 3.8 3.8"):
        detector.update(record)
    (finding,) = detector.update(StepRecord(step=32, attempt=1, loss=3.8, loss_limit=2.52))
    assert 30 == finding.onset_step


def test_blooms_spike_is_caught_by_the_norm_before_the_loss_moves() -> None:
    # BLOOM-176B, iterations 31214 to 31222, as published; calm steps before them.
    text = """
        loss 2.2x40 2.199 2.220 2.595 2.242 2.345 5.098 3.492 3.213 2.805
        grad_norm 0.24x40 .242 .947 2.39 15.9 145 960 353 379 650
    """
    judge_steps = replay(SpikeDetector("grad_norm"), text)
    assert {step: ["spike"] for step in range(43, 49)} == judge_steps


def test_clean_gpt2_norms_of_fifteen_times_the_median_are_no_outliers() -> None:
    text = "grad_norm " + "1x19 5 1x19 15 1x7 8 12 " * 5
    assert {} == replay(SpikeDetector("grad_norm"), text)


@pytest.mark.parametrize(
    "text",
    [
        "loss 11..6x30 6..3x100 3..2.5x200",
        "loss 12.4..17x30 17..6x80",
        "loss " + "3..2.4x40 2.9..2.3x40 2.8..2.2x40 ",
        "loss " + "1.0 3.3 " * 100,
        "loss " + "0 0.0002 -0.0004 0 0.0001 -0.0001 0 0.0006 " * 20,
        "loss 0x40 0.0001x5 0x40",
        "loss 1x100",
        "loss -1..-3x100",
    ],
    ids=["falling", "rising", "stairs", "bimodal", "zero", "almost-none", "flat", "negative"],
)
def test_a_clean_course_is_left_alone(text: str) -> None:
    assert {} == replay(SpikeDetector("loss"), text)


def test_a_negative_loss_that_explodes_is_found() -> None:
    text = "loss " + "0.01 -0.02 0.03 -0.01 " * 10 + "50 0.01"
    assert {40: ["spike"]} == replay(SpikeDetector("loss"), text)


def test_a_lasting_shift_is_accepted_after_a_bounded_number_of_skips() -> None:
    found = replay(SpikeDetector("loss"), "loss 2.1x30 5x60")
    assert ["spike", "level_shift"] == found[59]
    assert list(range(30, 61)) == list(found), "30 outliers, and one in flight"


@pytest.mark.parametrize("wild", ["5 500 " * 100, " ".join(f"{5 * 1.03**i}" for i in range(200))])
def test_outliers_that_are_not_alike_are_never_a_level(wild: str) -> None:
    found = replay(SpikeDetector("loss"), f"loss 2.1x30 {wild}")
    assert 200 == len(found)
    assert all(kinds == ["spike"] for kinds in found.values())


def test_a_change_that_was_announced_is_not_judged_until_it_is_known() -> None:
    detector = SpikeDetector("loss")
    for record in series("loss 2.1x30"):
        detector.update(record)
    detector.rebaseline(50)
    records = series("loss 9.5x100 40")
    assert {100: ["spike"]} == replay(detector, records)


def test_an_announced_change_waits_as_long_as_was_said() -> None:
    detector = SpikeDetector("loss")
    detector.rebaseline(40)
    limits = []
    for record in series("loss 2x60"):
        detector.update(record)
        limits.append(detector.limit())
    assert [None] * 39 == limits[:39]
    assert 4.0 == limits[39]


def test_the_set_rebaselines_one_metric_alone() -> None:
    detectors = DetectorSet()
    for record in series("loss 2x20; grad_norm 1x20"):
        detectors.update(record)
    detectors.rebaseline(0, metric="loss")
    assert None is detectors.limits().loss
    assert 40.0 == detectors.limits().grad_norm


def test_a_step_that_one_rule_flags_enters_no_other_rules_reference() -> None:
    detectors = DetectorSet()
    for record in series("loss 2x20; grad_norm 1x20"):
        detectors.update(record)
    before = detectors.state_dict()["loss_spike"]["window"]
    detectors.update(StepRecord(step=20, attempt=1, loss=2.5, grad_norm=90.0, grad_norm_limit=20.0))
    assert before == detectors.state_dict()["loss_spike"]["window"]


@pytest.mark.parametrize(
    "settings",
    [
        {"warm_up": 4},
        {"warm_up": 100},
        {"course": 17},
        {"tail": 47},
        {"sigmas": 0.0},
        {"headroom": 0.5},
        {"min_ratio": 1.1},
        {"doubt_ratio": 1.0},
        {"accept_after": 1},
        {"doubt_steps": 0},
    ],
    ids=str,
)
def test_a_setting_without_sense_is_refused_with_its_value(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(settings.values())))):
        SpikeConfig(**settings)  # type: ignore[arg-type]


def test_settings_reach_the_detectors() -> None:
    config = DetectConfig(loss=SpikeConfig(min_ratio=3.0), grad_norm=SpikeConfig(min_ratio=5.0))
    detectors = DetectorSet(config)
    for record in series("loss 2x20; grad_norm 1x20"):
        detectors.update(record)
    assert (6.0, 5.0) == (detectors.limits().loss, detectors.limits().grad_norm)


@pytest.mark.parametrize("first", [2, 6, 9])
def test_a_spike_before_the_first_limit_hides_none_of_those_after_it(first: int) -> None:
    losses = [1.2 + 0.01 * (step % 5) for step in range(120)]
    for step in (first, 20, 42, 74):
        losses[step] = 1.9e11
    detectors, limit, found = SpikeDetector("loss"), None, []
    for step, loss in enumerate(losses):
        record = StepRecord(step=step, attempt=1, loss=loss, loss_limit=limit)
        found += [finding.step for finding in detectors.update(record)]
        limit = detectors.limit()
    assert [20, 42, 74] == found


def test_where_one_batch_in_five_is_heavier_an_outlier_beyond_both_is_still_one() -> None:
    losses = [2.4 if step % 5 == 3 else 1.2 for step in range(200)]
    detectors = SpikeDetector("loss")
    for step, loss in enumerate(losses):
        detectors.update(StepRecord(step=step, attempt=1, loss=loss, loss_limit=detectors.limit()))
    limit = detectors.limit()
    assert limit is not None
    assert 2.4 * 1.1 < limit < 1.2 * 10
