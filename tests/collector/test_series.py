import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from vitals_collector.numbers.interface import (
    AttemptRow,
    Points,
    downsample,
    downsample_means,
    lineage,
    smooth,
    stitch,
)
from vitals_collector.queries.series import nonfinite_marks

FLOATS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


def points(*rows: tuple[int, int, float], times: list[int] | None = None) -> Points:
    """Return points from (step, attempt, value)."""
    step, attempt, value = (np.array(part) for part in zip(*rows, strict=True))
    time = np.arange(len(rows)) if times is None else np.array(times)
    return Points(step.astype(np.int64), attempt.astype(np.int64), time, value.astype(float))


def curve(values: list[float]) -> Points:
    return points(*((i, 1, value) for i, value in enumerate(values)))


def test_a_run_that_never_rolled_back_is_its_own_lineage():
    assert {1: math.inf} == lineage([AttemptRow(1, None, 0)])


def test_each_ancestor_counts_only_below_the_fork_of_its_child():
    rows = [AttemptRow(1, None, 0), AttemptRow(2, 1, 30), AttemptRow(3, 2, 50)]
    assert {3: math.inf, 2: 50, 1: 30} == lineage(rows)


def test_a_fork_behind_the_parents_own_fork_leaves_nothing_of_the_parent():
    rows = [AttemptRow(1, None, 0), AttemptRow(2, 1, 30), AttemptRow(3, 2, 20)]
    assert {3: math.inf, 2: 20, 1: 20} == lineage(rows)


def test_an_abandoned_branch_is_no_part_of_the_lineage():
    rows = [AttemptRow(1, None, 0), AttemptRow(2, 1, 30), AttemptRow(3, 1, 25)]
    assert {3: math.inf, 1: 25} == lineage(rows)


def test_a_parent_that_is_itself_or_unknown_ends_the_walk():
    assert {} == lineage([AttemptRow(1, 1, 0)])
    assert {2: math.inf} == lineage([AttemptRow(2, 1, 10)])


def test_the_curve_takes_each_step_from_the_branch_that_counts():
    rows = [(s, 1, 1.0) for s in range(6)] + [(s, 2, 2.0) for s in range(3, 8)]
    attempts = [AttemptRow(1, None, 0), AttemptRow(2, 1, 3)]
    kept = stitch(points(*rows), attempts, "lineage")
    lost = stitch(points(*rows), attempts, "discarded")
    every = stitch(points(*rows), attempts, "all")
    assert [1, 1, 1, 2, 2, 2, 2, 2] == kept.attempt.tolist()
    assert [(3, 1), (4, 1), (5, 1)] == list(
        zip(lost.step.tolist(), lost.attempt.tolist(), strict=True)
    )
    assert len(rows) == len(every)
    assert [3, 3, 4, 4, 5, 5] == every.step.tolist()[3:9]


def test_a_step_that_a_relaunch_wrote_again_keeps_the_newest_row():
    rows = [(0, 1, 1.0), (1, 1, 1.0), (1, 1, 9.0), (2, 1, 9.0)]
    found = stitch(points(*rows), [AttemptRow(1, None, 0)], "lineage")
    assert [1.0, 9.0, 9.0] == found.value.tolist()


def test_rows_of_an_attempt_nobody_told_of_yet_are_shown():
    found = stitch(points((0, 1, 1.0), (1, 5, 2.0)), [AttemptRow(1, None, 0)], "lineage")
    assert [1, 5] == found.attempt.tolist()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=3_000), st.integers(2, 100))
@example([0.0, 3.0, 1.0, -2.0, 0.5, 0.0, 1.0], 2)
def test_downsampling_never_loses_an_extreme_an_end_or_a_gap(values: list[float], num: int):
    whole = curve(values)
    drawn = downsample(whole, num)
    finite = [value for value in values if math.isfinite(value)]
    shown = drawn.value[np.isfinite(drawn.value)].tolist()
    if finite:
        assert (min(finite), max(finite)) == (min(shown), max(shown))
        assert (finite[0], finite[-1]) == (shown[0], shown[-1])
    assert any(not math.isfinite(v) for v in values) == bool(np.any(~np.isfinite(drawn.value)))
    assert len(drawn) <= 2 * num + 4
    assert sorted(set(drawn.step.tolist())) == drawn.step.tolist()


@pytest.mark.parametrize("at", [0, 1, 4_999, 50_000, 99_998, 99_999])
def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn(at: int):
    values = np.sin(np.arange(100_000) / 500).tolist()
    values[at] = 50.0
    assert at in downsample(curve(values), 200).step


def test_every_column_keeps_its_own_minimum_and_maximum():
    rng = np.random.default_rng(1)
    values = rng.normal(size=1_000)
    drawn = set(downsample(curve(values.tolist()), 22).step.tolist())
    for column in np.split(np.arange(1_000), range(64, 1_000, 64)):
        low, high = column[values[column].argmin()], column[values[column].argmax()]
        assert {low, high} - {0, 999} == drawn & set(column.tolist()) - {0, 999}


def test_a_short_curve_is_not_touched():
    assert list(range(50)) == downsample(curve([1.0] * 50), 50).step.tolist()
    assert list(range(50)) == downsample_means(curve([1.0] * 50), 50).step.tolist()


def test_a_mean_of_each_column_is_drawn_at_its_last_finite_value():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, math.nan, math.nan, math.nan, 1e308, 1e308, 9.0, math.inf]
    drawn = downsample_means(curve(values), 4)
    assert [4, 10] == drawn.step.tolist(), "of columns of eight steps"
    assert [3.0, pytest.approx(1e308 / 1.5)] == drawn.value.tolist()
    gap = downsample_means(curve([1.0] * 4 + [math.nan] * 4 + [2.0] * 4), 6)
    assert [1, 3, 4, 6, 9, 11] == gap.step.tolist(), "of columns of two steps"
    assert [True, True, False, False, True, True] == np.isfinite(gap.value).tolist()


def test_a_smoothed_curve_of_a_million_noisy_steps_is_a_line_and_no_band():
    noise = np.random.default_rng(1).normal(size=1_000_000)
    whole = smooth(Points(*(np.arange(len(noise)) for _ in range(3)), noise), 0.9)
    band, line = downsample(whole, 1_000), downsample_means(whole, 1_000)
    assert np.abs(np.diff(line.value)).max() < 0.2 < np.abs(np.diff(band.value)).mean()
    assert 500 <= len(line) <= 1_001


def test_the_mean_of_a_lineage_continues_across_attempts_and_that_of_another_branch_does_not():
    rows = points((0, 1, 0.0), (1, 1, 0.0), (2, 2, 7.0))
    assert [0.0, 0.0, 4.0] == pytest.approx(smooth(rows, 0.5, "lineage").value.tolist())
    assert [0.0, 0.0, 7.0] == pytest.approx(smooth(rows, 0.5, "all").value.tolist())


def test_every_nonfinite_value_has_a_mark_with_its_kind():
    marks = nonfinite_marks(curve([1.0, math.nan, math.inf, 2.0, -math.inf]), 10)
    assert [(1, "nan"), (2, "+inf"), (4, "-inf")] == [(mark.step, mark.kind) for mark in marks]
