"""Merging decoded rows of all ranks, as pure functions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collector.alerting import Asked
from tests.collector.rows import SECOND, STEPS, Writer
from trainvitals.catalog import LAYERS_SCHEMA, steps_schema
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.rows import Schema, rows_of
from trainvitals.wire import decode_batch
from vitals_collector.live.step_join import (
    BEFORE_ALL,
    LAYER_COLUMNS,
    RANK_COLUMNS,
    LayerPart,
    MergeConfig,
    RowWriters,
    StepMerger,
    WriterRows,
    decode_rank_rows,
    merge_steps,
    step_columns,
)


def decoded(
    schema: Schema, raw: bytes, wanted: Sequence[str], *, rank: int = 0, world: int = 1, writer=0
) -> WriterRows:
    found = rows_of(schema, decode_batch(raw).rows)
    origin = RowWriters(*(np.full(len(found), of) for of in (rank, world, writer)))
    return decode_rank_rows(schema, found, wanted, origin)


def part(
    rank: int,
    steps: Sequence[int],
    *,
    world: int = 2,
    writer: int = 0,
    attempt: int = 1,
    **columns: Any,
) -> WriterRows:
    raw = Writer(f"rank:{rank}").steps(steps, attempt=attempt, **columns)
    wanted = step_columns(STEPS, is_rank0=rank == 0)
    return decoded(STEPS, raw, wanted, rank=rank, world=world, writer=writer)


def steps_of(merged: Sequence[MergedStep]) -> list[tuple[int, int]]:
    return [(m.attempt, m.step) for m in merged]


# ------------------------------------------------------------------------------------- one range


def test_ranks_stand_side_by_side_and_rank_0_speaks_for_all():
    merged = merge_steps(
        [
            part(1, [5, 6], rank_loss=[3.0, 4.0], loss=99.0),
            part(0, [5, 6], rank_loss=[1.0, 2.0], loss=[2.0, 3.0], verdict=0),
        ]
    )
    first, second = merged.steps
    assert {"rank_loss": [1.0, 3.0]} == first.ranks
    assert {"loss": 2.0, "verdict": 0} == first.run
    assert [2.0, 4.0] == second.ranks["rank_loss"]
    assert 0 == merged.num_missing


def test_a_rank_that_is_missing_leaves_a_gap_that_is_counted():
    merged = merge_steps([part(0, [5, 6], rank_loss=1.0), part(1, [6], rank_loss=2.0)])
    assert [[1.0, None], [1.0, 2.0]] == [m.ranks["rank_loss"] for m in merged.steps]
    assert 1 == merged.num_missing


def test_a_value_that_was_not_measured_is_none_and_nan_stays_nan():
    merged = merge_steps(
        [part(0, [1, 2], rank_loss=[None, math.nan], loss=[math.nan, None], world=1)]
    )
    first, second = merged.steps
    assert [None] == first.ranks["rank_loss"]
    assert math.isnan(second.ranks["rank_loss"][0])
    assert math.isnan(first.run["loss"])
    assert "loss" not in second.run


def test_a_column_nobody_measured_is_absent():
    (only,) = merge_steps([part(0, [1], world=1)]).steps
    assert ({}, {}, {}) == (only.run, only.ranks, only.layers)


def test_attempts_come_one_after_the_other_and_a_newer_one_goes_back():
    merged = merge_steps(
        [
            part(0, [8, 9], attempt=1, world=1),
            part(0, [6, 7, 8], attempt=2, world=1),
        ]
    )
    assert [(1, 8), (1, 9), (2, 6), (2, 7), (2, 8)] == steps_of(merged.steps)


def test_each_attempt_has_as_many_ranks_as_it_ran_on():
    merged = merge_steps(
        [
            *(part(rank, [1], world=4, rank_loss=1.0) for rank in range(4)),
            *(part(rank, [1], world=2, attempt=2, rank_loss=1.0) for rank in range(2)),
        ]
    )
    assert [4, 2] == [len(m.ranks["rank_loss"]) for m in merged.steps]
    assert 0 == merged.num_missing


def test_of_a_step_that_was_written_twice_the_last_row_counts():
    merged = merge_steps([part(0, [3], loss=1.0, world=1), part(0, [3], loss=2.0, world=1)])
    assert [2.0] == [m.run["loss"] for m in merged.steps]


def test_64_ranks_are_64_places_in_their_order():
    parts = [part(r, range(10), world=64, rank_loss=float(r)) for r in reversed(range(64))]
    merged = merge_steps(parts).steps
    assert 10 == len(merged)
    assert all([float(r) for r in range(64)] == m.ranks["rank_loss"] for m in merged)


def test_the_time_is_rank_0s_where_it_has_one():
    early, late = Writer("rank:0"), Writer("rank:1")
    late.started += 5 * SECOND
    parts = [
        decoded(STEPS, w.steps([1, 2][:num]), (), rank=rank, world=2)
        for rank, w, num in ((0, early, 1), (1, late, 2))
    ]
    first, second = merge_steps(parts).steps
    assert (early.time_of(1), late.time_of(2)) == (first.time_unix_ns, second.time_unix_ns)


def test_layers_join_their_step_by_name():
    writer = Writer()
    rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
    raw = writer.batch(
        LAYERS_SCHEMA, [[1, 1, 0, 0, i, norm, *rest] for i, norm in ((0, 2.0), (7, 3.0))]
    )
    layers = decoded(LAYERS_SCHEMA, raw, ["layer", *LAYER_COLUMNS])
    merged = merge_steps([part(0, [1, 2], world=1)], [LayerPart({0: "head"}, layers)]).steps
    assert [{"head": {"grad_norm": 2.0}, "layer 7": {"grad_norm": 3.0}}, {}] == [
        m.layers for m in merged
    ]


def test_rates_of_further_parameter_groups_are_taken_along():
    schema = steps_schema(num_groups=3)
    columns = {"learning_rate": 0.1, "learning_rate.2": 0.3}
    row = [1, 1, 0, 0, *(columns.get(c.name) for c in schema.columns[4:])]
    wanted = step_columns(schema, is_rank0=True)
    (only,) = merge_steps([decoded(schema, Writer().batch(schema, [row]), wanted)]).steps
    assert columns == only.run


def test_text_in_a_number_s_place_and_columns_nobody_knows_are_left_out():
    base = [c for c in STEPS.columns if c.name != "rank_loss"]
    schema = Schema("steps", (*base, type(base[0])("rank_loss", "S8")))
    row = [1, 1, 0, 0, *([None] * (len(base) - 4)), b"text"]
    only = decoded(schema, Writer().batch(schema, [row]), RANK_COLUMNS)
    assert {} == merge_steps([only]).steps[0].ranks


def test_the_watchers_look_at_no_rank_column_that_is_not_merged():
    asked: set[str] = set()
    watchers = FleetDetectors()
    for have in ((), RANK_COLUMNS):
        for step in range(200):
            ranks = Asked({name: [1.0 + step % 7, 1.0, 9.0] for name in have})
            ranks.asked = asked
            watchers.update(
                MergedStep(step=step, attempt=1, time_unix_ns=step * SECOND, ranks=ranks)
            )
    assert asked
    assert set() == asked - set(RANK_COLUMNS)


# ---------------------------------------------------------------------------------- as they come


class Gathered:
    """A merger, the time, and what came out."""

    def __init__(self, world: int = 2, **config: Any) -> None:
        self.merger = StepMerger(MergeConfig(**config), world_size=world)
        self.now = 0
        self.numbers: dict[int, int] = {}
        self.world = world

    def write(self, rank: int, steps: Sequence[int], *, attempt: int = 1) -> None:
        writer = self.merger.number_of((f"i{rank}", "steps"))
        found = part(rank, steps, world=self.world, writer=writer, attempt=attempt, rank_loss=1.0)
        found.seq[:] += self.numbers.get(rank, 0)
        self.numbers[rank] = self.numbers.get(rank, 0) + len(steps)
        self.merger.add(found, self.now)

    def write_layers(self, steps: Sequence[int]) -> None:
        rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
        raw = Writer().batch(LAYERS_SCHEMA, [[s, 1, 0, 0, 0, 1.0, *rest] for s in steps])
        writer = self.merger.number_of(("i0", "layers"))
        found = decoded(LAYERS_SCHEMA, raw, ["layer", *LAYER_COLUMNS], writer=writer)
        self.merger.add_layers(LayerPart({0: "a"}, found), 0)

    def out(self, seconds: float = 0.0, **how: Any) -> list[tuple[int, int]]:
        self.now += int(seconds * SECOND)
        return steps_of(self.merger.take_ready(self.now, **how))


def test_a_step_comes_out_when_all_ranks_have_written_it():
    gathered = Gathered()
    gathered.write(0, [0, 1, 2])
    assert [] == gathered.out()
    gathered.write(1, [0, 1])
    assert [(1, 0), (1, 1)] == gathered.out()
    assert [] == gathered.out()
    gathered.write(1, [2])
    assert [(1, 2)] == gathered.out()
    assert gathered.merger.is_empty


def test_one_rank_waits_for_nobody():
    gathered = Gathered(world=1)
    gathered.write(0, [0, 1])
    assert [(1, 0), (1, 1)] == gathered.out()


def test_a_rank_that_never_wrote_is_waited_for_and_then_no_more():
    gathered = Gathered(world=3, patience_seconds=20)
    gathered.write(0, [0, 1])
    gathered.write(1, [0, 1])
    assert [] == gathered.out(19)
    assert [(1, 0), (1, 1)] == gathered.out(1)
    assert 2 == gathered.merger.num_missing
    gathered.write(0, [2])
    gathered.write(1, [2])
    assert [(1, 2)] == gathered.out()
    assert {2} == gathered.merger.absent


def test_a_rank_that_joins_late_is_waited_for_again_and_its_old_rows_are_counted():
    gathered = Gathered(patience_seconds=20)
    gathered.write(0, range(10))
    gathered.out(20)
    gathered.write(1, range(12))
    assert 10 == gathered.merger.num_late
    assert [] == gathered.out()
    gathered.write(0, [10])
    assert [(1, 10)] == gathered.out()
    gathered.write(0, [11, 12])
    assert [(1, 11)] == gathered.out()
    assert frozenset() == gathered.merger.absent


def test_a_rank_that_lost_rows_does_not_hold_the_others_up():
    gathered = Gathered()
    gathered.write(0, [0, 1, 2])
    gathered.write(1, [0, 2])
    assert [(1, 0), (1, 1), (1, 2)] == gathered.out()
    assert 1 == gathered.merger.num_missing


def test_a_new_attempt_goes_back_once_all_ranks_have_begun_it():
    gathered = Gathered()
    gathered.write(0, [7, 8, 9])
    gathered.write(1, [7, 8])
    gathered.write(0, [5, 6], attempt=2)
    assert [(1, 7), (1, 8)] == gathered.out()
    gathered.write(1, [5], attempt=2)
    assert [(1, 9), (2, 5)] == gathered.out()
    gathered.write(1, [6], attempt=2)
    assert [(2, 6)] == gathered.out()


def test_what_is_held_has_a_bound_and_the_oldest_steps_come_out_first():
    gathered = Gathered(most_rows=100, least_steps=10, patience_seconds=1e6)
    gathered.write(0, range(150))
    assert [(1, step) for step in range(50)] == gathered.out()
    assert 50 == gathered.merger.num_missing


def test_nothing_comes_out_beyond_rows_that_were_not_read_yet():
    gathered = Gathered(world=1, patience_seconds=1)
    gathered.write(0, range(10))
    assert [(1, s) for s in range(4)] == gathered.out(60, gate=(1, 3))
    assert [] == gathered.out(gate=BEFORE_ALL)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_merger_that_is_begun_anew_tells_what_the_other_would_have(cut: int):
    told = [(0, [0, 1]), (1, [0]), (0, [2, 3]), (1, [1, 3]), (0, [4]), (1, [4, 5]), (0, [5])]
    whole = Gathered()
    expected = [
        step for rank, steps in told for _ in [whole.write(rank, steps)] for step in whole.out()
    ]
    first, out = Gathered(), []
    for rank, steps in told[:cut]:
        first.write(rank, steps)
        out += first.out()
    again = Gathered()
    again.merger.load_state_dict(first.merger.state_dict())
    done = first.merger.done()
    for rank in (0, 1):
        every = [step for who, steps in told[:cut] if who == rank for step in steps]
        left = every[done.get((f"i{rank}", "steps"), -1) + 1 :]
        again.numbers[rank] = len(every) - len(left)
        if left:
            again.write(rank, left)
    for rank, steps in [(0, []), *told[cut:]]:
        if steps:
            again.write(rank, steps)
        out += again.out()
    assert expected == out
    assert 0 == again.merger.num_late


def test_steps_at_which_layers_are_due_wait_for_them():
    gathered = Gathered(world=1, patience_seconds=20)
    for steps in ([0], [10]):
        gathered.write_layers(steps)
    gathered.write(0, range(25))
    merged = gathered.merger.take_ready(0)
    assert [0, 10] == [m.step for m in merged if m.layers]
    assert 19 == merged[-1].step
    gathered.write_layers([20])
    assert [20] == [m.step for m in gathered.merger.take_ready(0) if m.layers]


def test_layers_that_end_hold_nobody_up_for_long():
    gathered = Gathered(world=1, patience_seconds=20)
    gathered.write_layers([0, 1])
    gathered.write(0, range(5))
    assert [(1, 0), (1, 1)] == gathered.out()
    assert [(1, 2), (1, 3), (1, 4)] == gathered.out(20)
    gathered.write(0, [5])
    assert [(1, 5)] == gathered.out()


def test_a_rank_number_without_bound_costs_nothing():
    gathered = Gathered(world=1)
    gathered.write(10**12, [0])
    gathered.write(0, [0])
    assert [(1, 0)] == gathered.out()


@given(st.data())
def test_however_rows_arrive_each_step_comes_out_once_and_in_order(data: st.DataObject):
    world = data.draw(st.integers(1, 4))
    gathered = Gathered(world=world, patience_seconds=20)
    left = {
        rank: [(1, s) for s in range(6)] + [(2, s) for s in range(3, 8)] for rank in range(world)
    }
    out: list[tuple[int, int]] = []
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank, rows in left.items() if rows]))
        num = data.draw(st.integers(1, 5))
        attempt = left[rank][0][0]
        some = [step for at, step in left[rank][:num] if at == attempt]
        del left[rank][: len(some)]
        gathered.write(rank, some, attempt=attempt)
        out += gathered.out(data.draw(st.sampled_from([0.0, 1.0, 25.0])))
    out += gathered.out(60)
    assert sorted(set(out)) == out
    assert [(1, s) for s in range(6)] + [(2, s) for s in range(3, 8)] == out
    given_rows = 11 * world
    merged = 11 * world - gathered.merger.num_missing
    assert given_rows == merged + gathered.merger.num_late
    assert gathered.merger.is_empty
