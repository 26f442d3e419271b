"""Heat maps: no spike of one step is hidden, whatever lies around it."""

import math
from typing import get_args

import numpy as np
import pytest

from tests.collector.lookback import BACK_TO, BAD, ONSET, gpu_rows, troubled_run
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.queries import At, query
from tests.support.served import Served
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.errors import UsageError
from trainvitals.records import AttemptStarted, NamesDefined
from trainvitals.rows import Value
from trainvitals.views import Branch, CellsQuestion, MoversQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries import heatmap_layers
from vitals_collector.queries.heatmap import MAX_CELLS
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

NUM = 2_500


def with_spikes(store: Store) -> None:
    """Store three ranks: a spike up, one down, and a NaN, of one step each, on a falling curve."""
    for rank in range(3):
        steps = np.arange(NUM)
        loss = 3.0 + 5.0 * np.exp(-steps / 300) + 0.01 * np.sin(steps + rank)
        if rank == 1:
            loss[777], loss[1_300], loss[2_000] = 9.0, 0.5, math.nan
        writer = Writer(f"rank:{rank}", world_size=3)
        for first in range(0, NUM, 500):
            part = slice(first, first + 500)
            ingest(store, writer.steps(steps[part].tolist(), rank_loss=loss[part].tolist()))


def test_a_spike_of_one_step_is_seen_among_thousands(store: Store):
    with_spikes(store)
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=10))
    assert (("rank:0", "rank:1", "rank:2"), 3) == (found.rows, found.num_rows)
    assert tuple(range(0, NUM, 250)) == found.step
    assert (0.5, 9.0) == (found.value[1][5], found.value[1][3])
    assert ((1, 8),) == found.nonfinite
    assert found.value[1][8] == pytest.approx(3.0, abs=0.05)
    one = query(store).ask(CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=10, rows=1))
    assert (("rank:1",), 3, ((0, 8),)) == (one.rows, one.num_rows, one.nonfinite)
    near = query(store).ask(
        CellsQuestion(
            run_id=RUN, metric="steps.rank_loss", points=10, from_step=1_996, to_step=2_003
        )
    )
    assert tuple(range(1_996, 2_004)) == near.step
    assert [None] == [v for v in near.value[1] if v is None]
    assert ((1, 4),) == near.nonfinite


def test_summaries_hide_no_spike_either(store: Store, monkeypatch: pytest.MonkeyPatch):
    from vitals_collector.queries import heatmap

    monkeypatch.setattr(heatmap, "_POINTS_A_COLUMN", 1)  # so that so few rows are enough
    with_spikes(store)
    store.numbers.merge()
    seen = Query(store, clock=At(100)).ask(
        CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=5)
    )
    assert (9.0, ((1, 4),)) == (max(v for v in seen.value[1] if v), seen.nonfinite)
    assert min(seen.value[1]) == 0.5


@pytest.mark.parametrize("edge", ["first", "last"])
def test_a_dip_on_a_steep_slope_at_the_edge_is_seen(store: Store, edge: str):
    steps = np.arange(NUM)
    loss = 3.0 + 5.0 * np.exp(-steps / 300) + 0.01 * np.sin(steps)
    loss[30] = 3.5  # no lower than the curve comes to be, and far below what was due
    loss = loss if edge == "first" else loss[::-1]
    ingest(store, Writer().steps(steps.tolist(), rank_loss=loss.tolist()))
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=10))
    assert 3.5 == found.value[0][0 if edge == "first" else -1]


def test_what_lasts_is_shown_as_it_is_within_flat_rows(store: Store):
    loss = np.ones(NUM)
    loss[1_010:1_240] = 50.0  # most of a column
    ingest(store, Writer().steps(list(range(NUM)), rank_loss=loss.tolist()))
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=10))
    assert [1.0] * 4 + [50.0] + [1.0] * 5 == list(found.value[0])


def layer_rows(writer: Writer, values: dict[int, list[float]]) -> list[list[Value]]:
    return [
        [step, 1, writer.time_of(step), 0, number, value, *[None] * 7]
        for step, some in values.items()
        for number, value in enumerate(some)
    ]


def test_of_a_layers_step_the_newest_row_counts_however_batches_are_cut(store: Store):
    num, wide, cut = 900, 10, 4_105  # the first batch ends within a step
    writer, other = Writer(), Writer("rank:1", started=START + 1_000 * SECOND)
    norms = np.random.default_rng(1).uniform(1.0, 2.0, (num, wide)).round(3)
    norms[77, 3], norms[410, 6], norms[450, 4] = 40.0, 30.0, math.inf
    for who in (writer, other):
        names = {number: f"h.{number}" for number in range(wide)}
        ingest(store, who.events(NamesDefined(stream="layers", names=names)))
    rows = layer_rows(writer, dict(enumerate(norms.tolist())))
    for part in (rows[:cut], rows[cut:]):
        ingest(store, writer.batch(LAYERS_SCHEMA, part))
        store.numbers.merge()
    again = layer_rows(writer, {num - 1: [7.0] * wide})
    ingest(store, writer.batch(LAYERS_SCHEMA, again))
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="layers.grad_norm", points=3))
    assert tuple(f"h.{number}" for number in range(wide)) == found.rows
    assert (0, 300, 600) == found.step
    assert (40.0, 30.0, ((4, 1),)) == (found.value[3][0], found.value[6][1], found.nonfinite)
    assert {7.0} == {row[2] for row in found.value}
    ingest(store, other.batch(LAYERS_SCHEMA, layer_rows(other, {650: [60.0] * wide})))
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="layers.grad_norm", points=3))
    assert {60.0} == {row[2] for row in found.value}
    each = query(store).ask(
        CellsQuestion(run_id=RUN, metric="layers.grad_norm", points=500, from_step=num - 10)
    )
    assert ({7.0}, 10) == ({row[-1] for row in each.value}, len(each.step))
    assert tuple(norms[num - 10 : num - 1, 2]) == each.value[2][:-1]


def test_layers_have_a_row_each_in_the_models_order(store: Store):
    troubled_run(store)
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="layers.grad_norm", points=500))
    assert ("embed", "h.0", "h.1") == found.rows
    assert 270 == len(found.step)
    ratio = query(store).ask(
        CellsQuestion(run_id=RUN, metric="layers.update_ratio", points=2, rows=2)
    )
    assert (3, "ratio") == (ratio.num_rows, ratio.unit)
    assert all(v == pytest.approx(0.01) for row in ratio.value for v in row)


def test_what_was_rolled_back_is_in_the_map_unless_only_the_lineage_is_asked_for(store: Store):
    troubled_run(store, num_after=30)  # fewer than were rolled back
    for metric, row, bad in (
        ("layers.grad_norm", 2, ((2, BAD), (2, BAD + 1))),
        ("steps.rank_loss", 1, ((1, BAD),)),
    ):
        found = query(store).ask(CellsQuestion(run_id=RUN, metric=metric, points=500))
        assert (bad, (BACK_TO, BAD + 1)) == (found.nonfinite, found.rolled_back)
        assert bad == found.nonfinite_rolled_back
        assert tuple(range(BAD + 2)) == found.step
        kept = query(store).ask(
            CellsQuestion(run_id=RUN, metric=metric, points=500, branch="lineage")
        )
        assert ((), (), None) == (kept.nonfinite, kept.nonfinite_rolled_back, kept.rolled_back)
        assert tuple(range(BACK_TO + 30)) == kept.step
        left = query(store).ask(
            CellsQuestion(run_id=RUN, metric=metric, points=500, branch="discarded")
        )
        assert ((BACK_TO, BAD + 1), BACK_TO) == (left.rolled_back, left.step[0])
        assert tuple((r, c - BACK_TO) for r, c in bad) == left.nonfinite
        assert found.value[row][ONSET:BAD] == left.value[row][ONSET - BACK_TO : BAD - BACK_TO]
        wide = query(store).ask(CellsQuestion(run_id=RUN, metric=metric, points=9))  # 18 steps each
        assert ((row, 8),) == wide.nonfinite
        before = query(store).ask(CellsQuestion(run_id=RUN, metric=metric, to_step=BACK_TO - 1))
        assert ((), None) == (before.nonfinite, before.rolled_back)
    layers = query(store).ask(CellsQuestion(run_id=RUN, metric="layers.grad_norm", points=9))
    assert 500.0 == layers.value[2][8]


def test_a_map_of_layers_is_the_same_in_windows_of_few_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    troubled_run(store, num_after=30)
    asked = [
        CellsQuestion(run_id=RUN, metric=metric, points=points, branch=branch, **steps)
        for metric, points in (("layers.grad_norm", 9), ("layers.update_ratio", 500))
        for branch in get_args(Branch)
        for steps in ({}, {"from_step": 20, "to_step": BAD - 3})
    ]
    whole = [repr(query(store).ask(one)) for one in asked]
    monkeypatch.setattr(heatmap_layers, "MAX_ROWS", 40)
    assert whole == [repr(query(store).ask(one)) for one in asked]


@pytest.mark.parametrize("points", [100, 10])
@pytest.mark.parametrize("bad", [0.5, 9.0])
def test_a_cell_of_two_attempts_shows_the_one_that_left_the_lineages_course(
    store: Store, points: int, bad: float
):
    writer, other = Writer(), Writer("rank:1")
    ingest(store, writer.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    ingest(store, writer.events(AttemptStarted(id=2, parent=1, fork_step=50, reason="rollback")))
    norms = {1: [2.0] * 50 + [bad] * 40, 2: [2.0] * 50}
    rows = []
    for attempt, first in ((1, 0), (2, 50)):
        some = norms[attempt]
        steps = range(first, first + len(some))
        ingest(store, other.steps(steps, attempt=attempt, rank_loss=list(some)))
        each = layer_rows(writer, {s: [v] * 3 for s, v in zip(steps, some, strict=True)})
        rows += [[step, attempt, *rest] for step, _, *rest in each]
    # one batch has rows of both attempts, and the first one's last steps were written twice
    for part in (rows[:150], rows[150:330], rows[330:], rows[240:270]):
        ingest(store, writer.batch(LAYERS_SCHEMA, part))
    for metric in ("layers.grad_norm", "steps.rank_loss"):
        found = query(store).ask(CellsQuestion(run_id=RUN, metric=metric, points=points))
        num = points // 2
        assert [2.0] * num == list(found.value[0][:num])
        assert [bad] * (num * 4 // 5) == list(found.value[0][num : num * 9 // 5])
        kept = query(store).ask(
            CellsQuestion(run_id=RUN, metric=metric, points=points, branch="lineage")
        )
        assert (points, {2.0}) == (len(kept.step), {v for row in kept.value for v in row})
        left = query(store).ask(
            CellsQuestion(run_id=RUN, metric=metric, points=points, branch="discarded")
        )
        assert (50, {bad}) == (left.step[0], {v for row in left.value for v in row})


def test_gpus_are_drawn_over_the_steps_that_ran_then(store: Store):
    troubled_run(store, num_after=5)
    late = Writer("gpu:GPU-1")  # of an agent that was there before and after the run
    ingest(store, gpu_rows(late, [-50, 500], [1.0, 2.0]))
    found = query(store).ask(CellsQuestion(run_id=RUN, metric="gpu.temperature_celsius", points=4))
    assert (("gpu:GPU-1",), "celsius") == (found.rows, found.unit)
    assert 91.0 == found.value[0][-1]
    assert max(found.step) <= BAD
    assert (BACK_TO, BAD) == found.rolled_back
    kept = query(store).ask(
        CellsQuestion(run_id=RUN, metric="gpu.temperature_celsius", points=500, branch="lineage")
    )
    assert (BACK_TO - 2, None) == (max(kept.step), kept.rolled_back)  # the agent saw no more
    assert 61.0 > max(kept.value[0])
    part = query(store).ask(
        CellsQuestion(run_id=RUN, metric="gpu.temperature_celsius", points=500, to_step=ONSET - 50)
    )
    assert max(part.step) <= ONSET - 50


def test_what_is_no_heat_map_says_which_there_are(store: Store):
    ingest(store, Writer().steps([0, 1], loss=[1.0, None]))
    for metric in ("steps.los", "loss", "", "scalars.x", "steps.step", "layers.update_ratio"):
        with pytest.raises(UsageError, match=r"steps\.loss"):
            query(store).ask(CellsQuestion(run_id=RUN, metric=metric))
    for how in ({"points": 0}, {"rows": 0}, {"points": 2_001}, {"points": 2_000, "rows": 1_000}):
        with pytest.raises(UsageError, match=r"must be|at most"):
            query(store).ask(CellsQuestion(run_id=RUN, metric="steps.loss", **how))
    nothing = query(store).ask(CellsQuestion(run_id=RUN, metric="steps.loss", from_step=50))
    assert ((), (), 0) == (nothing.rows, nothing.step, nothing.num_rows)
    huge = query(store).ask(
        CellsQuestion(run_id=RUN, metric="steps.loss", from_step=-(2**62), to_step=2**62)
    )
    assert ((0,), ((1.0,),)) == (huge.step, huge.value)
    assert MAX_CELLS >= 200 * 64


def test_a_heat_map_comes_over_http(served: Served):
    troubled_run(served.store, num_after=5)
    with served.client() as client:
        found = client.ask(
            CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=7, rows=1, from_step=3)
        )
        assert (
            query(served.store).ask(
                CellsQuestion(run_id=RUN, metric="steps.rank_loss", points=7, rows=1, from_step=3)
            )
            == found
        )
        kept = client.ask(CellsQuestion(run_id=RUN, metric="steps.rank_loss", branch="lineage"))
        assert ((BACK_TO, BAD + 1), None) == (found.rolled_back, kept.rolled_back)
        assert client.ask(MoversQuestion(run_id=RUN, step=BAD))
        with pytest.raises(UsageError, match=r"did you mean steps\.rank_loss"):
            client.ask(CellsQuestion(run_id=RUN, metric="steps.rnk_loss"))
