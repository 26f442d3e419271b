import math

import msgspec
import numpy as np
import pytest

from tests.dashboard import samples
from tests.dashboard.look_back import BAD_LAYER, LAYERS, STEPS, with_look_back
from trainvitals.views import CellsReply
from vitals_dashboard import stragglers
from vitals_dashboard.charts import heatmap
from vitals_dashboard.theme import DARK, LIGHT


def reply(rows: dict[str, list[float | None]], *, unit: str = "", **more: object) -> CellsReply:
    values: dict[str, object] = {
        "run_id": samples.run_id(1),
        "metric": "layers.grad_norm",
        "unit": unit,
        "rows": tuple(rows),
        "num_rows": len(rows),
        "step": tuple(range(0, 10 * len(next(iter(rows.values()))), 10)),
        "value": tuple(tuple(row) for row in rows.values()),
        "nonfinite": (),
    }
    return CellsReply(**(values | more))  # type: ignore[arg-type]


def test_a_cell_that_is_not_finite_is_a_cross_where_it_is_and_an_unmeasured_one_is_empty() -> None:
    sample = with_look_back(samples.sample_run())
    cells = sample.cells["layers.grad_norm"]
    spec = heatmap.heat_map("Norm", cells, shade="change", look=LIGHT, decisions=sample.decisions)
    drawn, crosses = spec["series"]
    long = spec["dataset"][0]["source"]
    assert len(LAYERS) * len(STEPS) - 2 == len(long)
    rows = spec["yAxis"]["data"]
    assert ["blocks.0.attn.weight", "blocks.1.attn.weight", "blocks.2.attn.weight"] == rows[:3]
    assert [[18, rows.index(LAYERS[BAD_LAYER])]] == crosses["data"]
    marks = [(mark["xAxis"], mark["label"]["formatter"]) for mark in drawn["markLine"]["data"]]
    assert [12, 18, 26] == [column for column, _ in marks]
    assert 3 == len({*marks})


def test_a_cell_that_is_not_finite_only_in_what_was_rolled_back_has_a_small_cross() -> None:
    cells = reply({"b": [1.0, 2.0], "a": [1.0, 2.0]}, nonfinite=((0, 0), (0, 1), (1, 1)))
    left = msgspec.structs.replace(cells, nonfinite_rolled_back=((0, 1),))
    _, kept, small = heatmap.heat_map("x", left, shade="size", look=LIGHT)["series"]
    assert ([[0, 1], [1, 0]], [[1, 1]]) == (kept["data"], small["data"])
    assert small["symbolSize"] < kept["symbolSize"]
    assert "only in steps that were rolled back" in small["tooltip"]["formatter"]
    assert 2 == len(heatmap.heat_map("x", cells, shade="size", look=LIGHT)["series"])


@pytest.mark.parametrize("shade", ["size", "change", "others"])
@pytest.mark.parametrize(
    "row",
    [[None, None], [0.0, 0.0], [1.0, 1.0], [-1.0, 2.0], [1e-30, 1e30], [1e308, -1e308],
     [5e-324, 1.0], [1e-299, 1e299]],
)  # fmt: skip
def test_any_values_give_a_scale_that_is_finite_and_grows(
    shade: heatmap.Shade, row: list[float | None]
) -> None:
    spec = heatmap.heat_map("x", reply({"a": row, "b": row[::-1]}), shade=shade, look=DARK)
    scale = spec["visualMap"]
    assert math.isfinite(scale["min"]) and math.isfinite(scale["max"])
    assert scale["min"] < scale["max"]
    assert np.isfinite(spec["dataset"][0]["source"]["shade"]).all()


def test_names_are_distinct_and_one_line_and_units_are_those_people_read() -> None:
    hostile = f"{samples.HOSTILE}\n\u202e"
    cells = reply({hostile: [2.0**30], hostile + " ": [2.0**31]}, unit="bytes")
    spec = heatmap.heat_map("Memory", cells, shade="size", look=LIGHT)
    names = spec["yAxis"]["data"]
    assert 2 == len({*names}) and not any("\n" in name or "\u202e" in name for name in names)
    assert "Memory, GiB" == spec["title"]["text"]
    assert ["1", "2"] == list(spec["dataset"][0]["source"]["value"])
    assert "<script>" not in spec["series"][0]["tooltip"]["formatter"]


def test_a_step_lies_in_the_column_that_begins_at_or_before_it() -> None:
    steps = (100, 110, 120)
    found = [heatmap.step_column(step, steps) for step in (99, 100, 109, 110, 129, 130)]
    assert [None, 0, 0, 1, 2, None] == found
    assert None is heatmap.step_column(1, ())


def test_stragglers_are_named_by_rank_and_node_and_noise_is_not() -> None:
    detail = with_look_back(samples.sample_run()).detail
    ranks = {f"rank:{n}": [0.05 * (1 + n / 1000)] * 3 for n in range(8)}

    def said(**slow: list[float | None]) -> list[str]:
        rows = {**ranks, **{name.replace("_", ":"): row for name, row in slow.items()}}
        cells = reply(rows, unit="seconds")
        return stragglers.straggler_sentences(
            stragglers.summarize_stragglers(heatmap.cells_of(cells), cells.rows, detail)
        )

    assert ["No straggler. Median step 50.2 ms over 8 ranks."] == said()
    assert said(rank_3=[0.1, 0.1, None])[0].startswith("rank 3 on node-b is slow: 100 ms a step, 9")
    assert "No straggler" in said(rank_3=[0.05, 9.0, 0.05])[0], "one slow step is no pace"
    nodes = tuple(
        msgspec.structs.replace(s, node=f"n{i // 2}") for i, s in enumerate(detail.sources)
    )
    detail = msgspec.structs.replace(detail, sources=nodes)
    both = said(rank_6=[0.1] * 3, rank_7=[0.1] * 3)
    assert ["node n3 is slow", "rank 6 on n3 is slow"] == [line.split(":")[0] for line in both[:2]]


def test_of_two_ranks_the_slower_one_is_named_and_one_has_no_other() -> None:
    detail = with_look_back(samples.sample_run()).detail
    two = reply({"rank:0": [1.0], "rank:1": [1.5]})
    said = stragglers.straggler_sentences(
        stragglers.summarize_stragglers(heatmap.cells_of(two), two.rows, detail)
    )
    assert ["rank 1 on node-a is slow: 1.5 s a step, 50% above the other rank (1 s)."] == said
    one = reply({"rank:0": [1.0]})
    said = stragglers.straggler_sentences(
        stragglers.summarize_stragglers(heatmap.cells_of(one), one.rows, detail)
    )
    assert "no other rank to compare with" in said[0]
