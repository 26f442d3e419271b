"""What stays of old rows: no store, no clock."""

import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from tests.collector.rows import STEPS
from trainvitals.catalog import NODE_SCHEMA
from trainvitals.errors import ConfigError
from trainvitals.rows import column_of, rows_of
from vitals_collector.retention.rollup import (
    Batch,
    OverRanks,
    Present,
    VolumeSettings,
    Window,
    cut,
    merge_rows,
    plan_thinning,
    thin_hosts,
)

SETTINGS = VolumeSettings()
PRESENT = Present(attempt=1, step=10_000)
NOW = 10**18


def a_batch(first: int, last: int, *, attempt: int = 1, at: int = 0, number: int = 0) -> Batch:
    return Batch(number, f"rank{number}", attempt, first, last, last - first + 1, at, at, last)


def planned(batches: list[Batch], **how: object) -> list[Window]:
    given = {"present": PRESENT, "before_unix_ns": NOW, "near": [], "settings": SETTINGS}
    return list(plan_thinning(batches, **{**given, **how}))  # type: ignore[arg-type]


def step_rows(steps: range, **columns: object):
    rows = []
    for i, step in enumerate(steps):
        values = [step, 1, step, 0]
        for column in STEPS.columns[4:]:
            value = columns.get(column.name)
            values.append(value[i] if isinstance(value, list) else value)
        rows.append(STEPS.pack(step, values))
    return rows_of(STEPS, b"".join(rows))


def test_a_window_is_thinned_once_all_of_its_rows_are_old():
    old, young = a_batch(0, 499, number=1), a_batch(0, 499, at=NOW, number=2)
    assert [] == planned([old, young])
    (window,) = planned([old, old._replace(id=3)])
    assert (1, 0, 500, False) == window[:4]
    assert 2 == len(window.batches)


def test_the_steps_behind_which_a_decision_may_still_come_wait():
    batches = [a_batch(0, 499), a_batch(500, 999), a_batch(1_000, 1_499)]
    found = planned(batches, present=Present(1, 1_500))
    assert [0, 500] == [window.first_step for window in found]
    assert [0, 500, 1_000] == [w.first_step for w in planned(batches, present=Present(2, 3))]
    assert [] == planned(batches, present=Present(0, 9_000)), "of an attempt nobody told of yet"


@pytest.mark.parametrize(
    ("step", "whole"),
    [(498, []), (499, [500]), (999, [500, 1_000]), (1_500, [1_000]), (1_501, [])],
)
def test_windows_that_touch_the_margin_of_an_incident_stay_whole(step: int, whole: list[int]):
    settings = VolumeSettings(window_steps=500, margin_steps=1)
    batches = [a_batch(500, 999), a_batch(1_000, 1_499)]
    found = planned(batches, near=[step], settings=settings)
    assert whole == [window.first_step for window in found if window.is_whole]


def test_4096_ranks_for_a_day_are_planned_one_window_at_a_time():
    num_ranks, num_windows = 4_096, 48  # a step takes 3.6 s
    num_asked = 0

    def a_day() -> Iterator[Batch]:
        nonlocal num_asked
        for number in range(num_windows):
            for rank in range(num_ranks):
                num_asked += 1
                yield a_batch(number * 500, number * 500 + 499, number=rank)

    planning = plan_thinning(
        a_day(), present=Present(1, 90_000), before_unix_ns=NOW, near=[12_000], settings=SETTINGS
    )
    num_given, whole = 0, []
    for window in planning:
        num_given += len(window.batches)
        assert num_asked <= num_given + 1, "more than one window is held"
        whole += [window.first_step] if window.is_whole else []
    assert num_windows * num_ranks == num_given
    assert [11_500, 12_000, 12_500] == whole


def test_the_numbers_of_a_window_take_little_memory():
    rng = np.random.default_rng(1)
    rows = step_rows(
        range(500), rank_loss=rng.normal(2, 0.1, 500).tolist(), step_duration_seconds=1.0
    )
    tracemalloc.start()
    try:
        over = OverRanks(0, 500)
        for rank in range(128):
            over.add(f"rank:{rank + 1}", STEPS, rows)
        assert 8 == len(over.worst(8))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak * 4_096 / 128 < 200e6


def test_broken_ranks_come_first_then_by_turns_the_slowest_and_the_furthest():
    over = OverRanks(0, 10)
    losses = {3: [2.0] * 9 + [math.nan], 5: [2.0, math.inf] + [2.0] * 8, 6: [9.0] + [2.0] * 9}
    for rank in range(1, 9):
        loss = losses.get(rank, [2.0 + rank / 1_000] * 10)
        seconds = 1.0 + (3.0 if rank == 7 else 2.0 if rank == 8 else 0.0)
        rows = step_rows(range(10), rank_loss=loss, step_duration_seconds=seconds)
        over.add(f"rank:{rank}", STEPS, rows)
    assert ["rank:5", "rank:3", "rank:7", "rank:6", "rank:8"] == over.worst(5)


def test_a_step_that_no_rank_measured_has_no_minimum():
    over = OverRanks(0, 3)
    over.add("rank:1", STEPS, step_rows(range(3), rank_loss=[1.0, None, math.nan]))
    over.add("rank:2", STEPS, step_rows(range(2), rank_loss=[3.0, None]))
    _, rows = over.rows(1)
    assert [2, 2, 1] == [row["num_ranks"] for row in rows]
    assert (1.0, 2.0, 3.0, 2, 0) == tuple(
        rows[0][f"rank_loss:{what}"] for what in ("min", "mean", "max", "num", "nonfinite")
    )
    assert "rank_loss:min" not in rows[1]
    assert (0, 1) == (rows[2]["rank_loss:num"], rows[2]["rank_loss:nonfinite"])
    assert "rank_loss:min" not in rows[2], "unknown is not zero"


def test_numbers_of_some_ranks_and_of_the_others_are_those_of_all():
    rng = np.random.default_rng(7)
    parts = [rng.normal(size=(num, 4)).tolist() for num in (3, 5)]
    parts[1][2][1] = math.nan
    parts[0][1][3] = None

    def over(*some: list[list[float]]) -> list[dict[str, float | int]]:
        gathered = OverRanks(0, 4)
        for i, losses in enumerate([one for part in some for one in part]):
            gathered.add(f"rank:{i}", STEPS, step_rows(range(4), rank_loss=losses))
        return gathered.rows(1)[1]

    merged = [merge_rows(*both) for both in zip(over(parts[0]), over(parts[1]), strict=True)]
    for expected, found in zip(over(*parts), merged, strict=True):
        assert {name: pytest.approx(value) for name, value in expected.items()} == found


def test_cutting_keeps_every_row_and_parts_end_with_their_window_or_attempt():
    first, second = step_rows(range(95, 215)), step_rows(range(180, 460))
    again = second.copy()
    again["c1"] = 2
    rows = np.concatenate([first, again])
    settings = VolumeSettings(window_steps=100, margin_steps=100)
    parts = cut(STEPS, rows, present=Present(2, 420), before_unix_ns=NOW, settings=settings)
    steps = [column_of(STEPS, part, "step")[0] for part in parts]
    ends = [(95, 99), (100, 199), (200, 214), (180, 199), (200, 299), (300, 459)]
    assert ends == [(int(one[0]), int(one[-1])) for one in steps]
    assert np.array_equal(np.concatenate(parts), rows)
    young = cut(STEPS, first, present=Present(2, 420), before_unix_ns=150, settings=settings)
    assert [5, 115] == [len(part) for part in young], "what is too young stays together"


def host_rows(values: list[float | None]):
    rest = [None] * (len(NODE_SCHEMA.columns) - 5)
    rows = [NODE_SCHEMA.pack(i, [-1, 0, i * 10**9, 0, v, *rest]) for i, v in enumerate(values)]
    return rows_of(NODE_SCHEMA, b"".join(rows))


def cpu(rows) -> list[float]:
    values, valid = column_of(NODE_SCHEMA, rows, "cpu_ratio")
    return values[valid].tolist()


def test_a_broken_sample_of_a_host_is_not_lost_among_the_others():
    settings = VolumeSettings(host_samples=5)
    values = [0.1, 0.2, math.nan, 0.4, 0.5, None, None, None, None, None]
    found = thin_hosts(NODE_SCHEMA, host_rows(values), [], settings)
    least, greatest = cpu(found)
    assert 0.1 == least
    assert math.isnan(greatest)
    assert 4 == len(found), "that samples were taken and had no value stays to be seen"


def test_thinning_what_was_thinned_takes_nothing_of_the_extremes():
    rng = np.random.default_rng(3)
    values = rng.normal(size=100).tolist()
    settings = VolumeSettings(host_samples=10)
    once = thin_hosts(NODE_SCHEMA, host_rows(values), [], settings)
    assert 20 == len(once)
    assert (min(values), max(values)) == (min(cpu(once)), max(cpu(once)))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="keep_hours is -1"):
        VolumeSettings(keep_hours=-1)
    with pytest.raises(ConfigError, match="host_samples is 1"):
        VolumeSettings(host_samples=1)
