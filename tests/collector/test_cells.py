"""Heat maps: no spike of one step is hidden, whatever lies around it."""

import math

import numpy as np
import pytest

from tests.collector.conftest import Served
from tests.collector.lookback import BAD, ONSET, gpu_rows, troubled_run
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.collector.test_query import At, query
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.errors import UsageError
from trainvitals.records import NamesDefined
from trainvitals.rows import Value
from vitals_collector.queries.cells import MAX_CELLS
from vitals_collector.queries.query import Query
from vitals_collector.receiving.ingest import ingest
from vitals_collector.storage import compaction
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
    found = query(store).cells(RUN, "steps.rank_loss", points=10)
    assert (("rank:0", "rank:1", "rank:2"), 3) == (found.rows, found.num_rows)
    assert tuple(range(0, NUM, 250)) == found.step
    assert (0.5, 9.0) == (found.value[1][5], found.value[1][3])
    assert ((1, 8),) == found.nonfinite
    assert found.value[1][8] == pytest.approx(3.0, abs=0.05)
    one = query(store).cells(RUN, "steps.rank_loss", points=10, rows=1)
    assert (("rank:1",), 3, ((0, 8),)) == (one.rows, one.num_rows, one.nonfinite)
    near = query(store).cells(RUN, "steps.rank_loss", points=10, from_step=1_996, to_step=2_003)
    assert tuple(range(1_996, 2_004)) == near.step
    assert [None] == [v for v in near.value[1] if v is None]
    assert ((1, 4),) == near.nonfinite


def test_summaries_hide_no_spike_either(store: Store, monkeypatch: pytest.MonkeyPatch):
    from vitals_collector.queries import cells

    monkeypatch.setattr(cells, "_POINTS_A_COLUMN", 1)  # so that so few rows are enough
    with_spikes(store)
    monkeypatch.setattr(compaction, "MIN_ROWS", 1)
    compaction.compact(store)
    seen = Query(store, clock=At(100)).cells(RUN, "steps.rank_loss", points=5)
    assert (9.0, ((1, 4),)) == (max(v for v in seen.value[1] if v), seen.nonfinite)
    assert min(seen.value[1]) == 0.5


@pytest.mark.parametrize("edge", ["first", "last"])
def test_a_dip_on_a_steep_slope_at_the_edge_is_seen(store: Store, edge: str):
    steps = np.arange(NUM)
    loss = 3.0 + 5.0 * np.exp(-steps / 300) + 0.01 * np.sin(steps)
    loss[30] = 3.5  # no lower than the curve comes to be, and far below what was due
    loss = loss if edge == "first" else loss[::-1]
    ingest(store, Writer().steps(steps.tolist(), rank_loss=loss.tolist()))
    found = query(store).cells(RUN, "steps.rank_loss", points=10)
    assert 3.5 == found.value[0][0 if edge == "first" else -1]


def test_what_lasts_is_shown_as_it_is_within_flat_rows(store: Store):
    loss = np.ones(NUM)
    loss[1_010:1_240] = 50.0  # most of a column
    ingest(store, Writer().steps(list(range(NUM)), rank_loss=loss.tolist()))
    found = query(store).cells(RUN, "steps.rank_loss", points=10)
    assert [1.0] * 4 + [50.0] + [1.0] * 5 == list(found.value[0])


def layer_rows(writer: Writer, values: dict[int, list[float]]) -> list[list[Value]]:
    return [
        [step, 1, writer.time_of(step), 0, number, value, *[None] * 5]
        for step, some in values.items()
        for number, value in enumerate(some)
    ]


def test_of_a_layers_step_the_newest_row_counts_however_batches_are_cut(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    num, wide, cut = 900, 10, 4_105  # so many rows are a chunk that stays, and ends within a step
    writer, other = Writer(), Writer("rank:1", started=START + 1_000 * SECOND)
    norms = np.random.default_rng(1).uniform(1.0, 2.0, (num, wide)).round(3)
    norms[77, 3], norms[410, 6], norms[450, 4] = 40.0, 30.0, math.inf
    for who in (writer, other):
        names = {number: f"h.{number}" for number in range(wide)}
        ingest(store, who.events(NamesDefined(stream="layers", names=names)))
    rows = layer_rows(writer, dict(enumerate(norms.tolist())))
    monkeypatch.setattr(compaction, "MIN_ROWS", 1)
    for part in (rows[:cut], rows[cut:]):
        ingest(store, writer.batch(LAYERS_SCHEMA, part))
        compaction.compact(store)
    again = layer_rows(writer, {num - 1: [7.0] * wide})
    ingest(store, writer.batch(LAYERS_SCHEMA, again))
    found = query(store).cells(RUN, "layers.grad_norm", points=3)
    assert tuple(f"h.{number}" for number in range(wide)) == found.rows
    assert (0, 300, 600) == found.step
    assert (40.0, 30.0, ((4, 1),)) == (found.value[3][0], found.value[6][1], found.nonfinite)
    assert {7.0} == {row[2] for row in found.value}
    ingest(store, other.batch(LAYERS_SCHEMA, layer_rows(other, {650: [60.0] * wide})))
    found = query(store).cells(RUN, "layers.grad_norm", points=3)
    assert {60.0} == {row[2] for row in found.value}
    each = query(store).cells(RUN, "layers.grad_norm", points=500, from_step=num - 10)
    assert ({7.0}, 10) == ({row[-1] for row in each.value}, len(each.step))
    assert tuple(norms[num - 10 : num - 1, 2]) == each.value[2][:-1]


def test_layers_have_a_row_each_in_the_models_order(store: Store):
    troubled_run(store)
    found = query(store).cells(RUN, "layers.grad_norm", points=500)
    assert ("embed", "h.0", "h.1") == found.rows
    assert 270 == len(found.step)
    assert () == found.nonfinite  # the lineage went back before it
    ratio = query(store).cells(RUN, "layers.update_ratio", points=2, rows=2)
    assert (3, "ratio") == (ratio.num_rows, ratio.unit)
    assert all(v == pytest.approx(0.01) for row in ratio.value for v in row)


def test_gpus_are_drawn_over_the_steps_that_ran_then(store: Store):
    troubled_run(store, num_after=5)
    late = Writer("gpu:GPU-1")  # of an agent that was there before and after the run
    ingest(store, gpu_rows(late, [-50, 500], [1.0, 2.0]))
    found = query(store).cells(RUN, "gpu.temperature_celsius", points=4)
    assert (("gpu:GPU-1",), "celsius") == (found.rows, found.unit)
    assert 91.0 == found.value[0][-1]
    assert max(found.step) <= BAD
    part = query(store).cells(RUN, "gpu.temperature_celsius", points=500, to_step=ONSET - 50)
    assert max(part.step) <= ONSET - 50


def test_what_is_no_heat_map_says_which_there_are(store: Store):
    ingest(store, Writer().steps([0, 1], loss=[1.0, None]))
    for metric in ("steps.los", "loss", "", "scalars.x", "steps.step", "layers.update_ratio"):
        with pytest.raises(UsageError, match=r"steps\.loss"):
            query(store).cells(RUN, metric)
    for how in ({"points": 0}, {"rows": 0}, {"points": 2_001}, {"points": 2_000, "rows": 1_000}):
        with pytest.raises(UsageError, match=r"must be|at most"):
            query(store).cells(RUN, "steps.loss", **how)
    nothing = query(store).cells(RUN, "steps.loss", from_step=50)
    assert ((), (), 0) == (nothing.rows, nothing.step, nothing.num_rows)
    huge = query(store).cells(RUN, "steps.loss", from_step=-(2**62), to_step=2**62)
    assert ((0,), ((1.0,),)) == (huge.step, huge.value)
    assert MAX_CELLS >= 200 * 64


def test_a_heat_map_comes_over_http(served: Served):
    troubled_run(served.store, num_after=5)
    with served.client() as client:
        found = client.cells(RUN, "steps.rank_loss", points=7, rows=1, from_step=3)
        assert (
            query(served.store).cells(RUN, "steps.rank_loss", points=7, rows=1, from_step=3)
            == found
        )
        assert client.movers(RUN, BAD)
        with pytest.raises(UsageError, match=r"did you mean steps\.rank_loss"):
            client.cells(RUN, "steps.rnk_loss")
