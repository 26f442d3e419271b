"""The bench compares ours with the peers, says where one is better, and writes its part alone."""

import json
import os

import pytest
from typer.testing import CliRunner

from trainvitals.errors import UsageError
from trainvitals.metrics import LAYER_METRICS, STEP_METRICS
from vitals_bench import detect, page
from vitals_bench.cli import build_app, main
from vitals_bench.detect import cost, measure
from vitals_bench.detect.judged import ACT, TELL, best_peer, judge_all
from vitals_bench.detect.logs import Logs, read_logs
from vitals_bench.detect.ours import Verdicts
from vitals_bench.detect.rules import PEERS
from vitals_bench.detect.scoring import Total, score
from vitals_bench.detect.series import Alarm, Event, Series
from vitals_bench.detect.shapes import ONSET, SHAPES, make_shape
from vitals_bench.detect.tables import (
    act_grid,
    better_than_ours,
    rules_grid,
    shapes_grid,
    thinning_grid,
)
from vitals_bench.rows import Grid, Row, at_least

pytestmark = pytest.mark.nightly

SOME = [shape for shape in SHAPES if shape.name in ("BLOOM-176B's spike", "NaN once", "clean")]


def everything(log):
    return True


def log(*events, num=500):
    flat = [2.0 + i % 5 / 100 for i in range(num)]
    return Series(
        name="log", steps=range(num), losses=flat, norms=flat, rates=[None] * num,
        events=events, is_clean=not events,
    )  # fmt: skip


def total_of(*rows, event=None):
    made = log(*([event] if event else []))
    return Total.of([score(made, [Alarm(row, "spike") for row in rows])])


def totals(ours, **peers):
    """Return totals where every peer but the named ones says nothing at all."""
    silent = total_of(event=Event(kind="spike", onset=300, end=300))
    found = dict.fromkeys((ACT, *PEERS), silent)
    return {TELL: ours, **found, **{name.replace("_", " "): one for name, one in peers.items()}}


SPIKE = Event(kind="spike", onset=300, end=300)


def test_ours_and_every_peer_judge_the_same_logs():
    judged = judge_all([make_shape(SOME[1], 0)])
    assert [TELL, ACT, *PEERS] == list(judged.totals())
    assert ONSET in [alarm.row for alarm in judged.verdicts[0].alarms]
    assert [ONSET] == [alarm.row for alarm in judged.verdicts[0].skipped]
    assert ([], []) == (judged.verdicts[0].rollbacks, judged.verdicts[0].halts)
    theirs = {alarm.row for alarm in judged.alarms["OLMo"][0]}
    assert set(range(ONSET, ONSET + 129)) <= theirs


def test_the_line_about_better_peers_is_made_of_the_numbers():
    ours = total_of(100, event=SPIKE)
    said = better_than_ours(totals(ours, OLMo=total_of(300, event=SPIKE)))
    assert "recall: OLMo-core, 6 sigma of 128 1; ours 0." in said
    assert "precision: OLMo-core, 6 sigma of 128 1 (at a recall of 1.00); ours 0." in said
    assert said.endswith("In recall and precision at once: OLMo-core, 6 sigma of 128.")
    ours = total_of(300, event=SPIKE)
    said = better_than_ours(totals(ours, OLMo=total_of(300, 100, event=SPIKE)))
    assert said == (
        "No peer is better than ours (tell) in any column. In recall and precision at once: none."
    )


def test_the_best_peer_is_good_in_both():
    some = totals(
        total_of(event=SPIKE),
        OLMo=total_of(300, 10, 50, 90, event=SPIKE),
        ZClip=total_of(300, 10, event=SPIKE),
    )
    assert "ZClip" == best_peer(some)


def test_a_table_says_dash_where_there_is_no_figure():
    grid = rules_grid("t", totals(total_of(300, event=SPIKE)), kinds=True)
    cells = dict(zip(grid.columns, grid.cells()[0], strict=True))
    assert ("1.00", "1.00", "0.00", "0/0", "1/1") == (
        cells["recall"], cells["precision"], cells["delay"], cells["clean logs paged"],
        cells["spike"],
    )  # fmt: skip
    assert "-" == dict(zip(grid.columns, grid.cells()[1], strict=True))["precision"]


def test_what_would_have_been_done_is_counted_apart_from_what_was_told():
    logs = [make_shape(shape, 0) for shape in SOME]
    grid = act_grid(judge_all(logs), {"all": everything, "none": lambda one: False})
    both = [dict(zip(grid.columns, row, strict=True)) for row in grid.rows]
    assert (3, 0, 0) == (both[0]["number"], both[0]["false skips"], both[0]["of these false"])
    assert both[0]["skips"] > 1
    assert (0, 0, 0) == (both[1]["number"], both[1]["skips"], both[1]["records"])


def test_thinning_compares_the_same_events():
    judged = judge_all([make_shape(SOME[1], 0)])
    grid = thinning_grid(judged, {"all": everything})
    ((name, times, left, full, thin, *_),) = grid.rows
    assert ("all", 10, 1, 1, 1) == (name, times, left, full, thin)


def test_every_part_yields_rows_and_tables(monkeypatch):
    monkeypatch.setattr(measure, "SHAPES", SOME)
    found = list(detect.PARTS["shapes"](quick=True))
    rows = [one for one in found if isinstance(one, Row)]
    grids = [one for one in found if isinstance(one, Grid)]
    assert ["found: BLOOM-176B's spike", "found: NaN once"] == [row.name for row in rows[:2]]
    assert [100.0, 100.0] == [row.ours for row in rows[:2]]
    assert (0, 128) == (rows[-1].ours, rows[-1].theirs)
    assert 5 == len(grids)
    assert [len(PEERS), 2 + len(PEERS)] == [len(grid.rows) for grid in grids[:2]]
    assert [] == [g.title for g in grids if {len(g.columns)} != {len(row) for row in g.rows}]
    json.dumps([one.plain() for one in found], allow_nan=False)


def test_what_ours_got_wrong_is_named_by_shape_and_seed(monkeypatch):
    monkeypatch.setattr("vitals_bench.detect.judged.judge", lambda log: quiet)
    quiet = Verdicts(alarms=[Alarm(9, "spike")], skipped=[], rollbacks=[], halts=[])
    detail = shapes_grid(judge_all([make_shape(SOME[1], seed) for seed in (0, 1)])).detail
    wrong = {"shape": "NaN once", "missed": [ONSET], "false": [9]}
    assert [{**wrong, "seed": 0}, {**wrong, "seed": 1}] == detail[TELL]
    assert [[], []] == [one["false"] for one in detail[ACT]]


def test_the_cost_of_a_step_is_measured():
    in_loop, ladder, collector = cost.measure_cost(quick=True)
    assert min(in_loop.ours, ladder.ours, collector.ours) > 0.0
    assert ["<= 25 us", "", "<= 50 us"] == [
        row.goal.text(row.unit) if row.goal else "" for row in (in_loop, ladder, collector)
    ]


def test_the_merged_steps_have_the_columns_of_the_catalogue():
    merged = cost._merged(make_shape(SOME[2], 0))[10]
    columns = {metric.column for metric in (*STEP_METRICS, *LAYER_METRICS)}
    assert set() == {*merged.run, *merged.ranks, *merged.layers["layers.3"]} - columns


# --------------------------------------------------------------------------------- labelled logs


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "series").mkdir()
    label = {"cls": "anomalous", "split": "dev", "events": []}
    label["events"].append(
        {"onset_idx": 150, "end_idx": 151, "kind": "spike", "severity": "major", "reason": "x4"}
    )
    clean = {"cls": "clean", "split": "heldout", "events": []}
    labels = {"spiked": label, "calm": clean, "a_sinv6_imagenet_resnet": {**label}}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    for name in labels:
        lines = ["step,loss,grad_norm,lr"]
        for i in range(200):
            loss = 2.0 + i % 7 / 50 + (6.0 if name != "calm" and i in (150, 151) else 0.0)
            lines.append(f"{i * 10}.0,{loss},{'' if i % 2 else 1.0 + i % 3 / 50},")
        (tmp_path / "series" / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_logs_are_read_with_what_is_missing_missing(folder):
    first, second, third = read_logs(Logs(folder=folder))
    assert (200, 10, False, True) == (len(first), first.cadence, first.is_clean, second.is_clean)
    assert (1.0, None, [None] * 200) == (first.norms[0], first.norms[1], first.rates)
    assert [1490, 1500] == list(first.steps[149:151])
    assert (Event(kind="spike", onset=150, end=151, reason="x4"),) == third.events


def test_a_split_and_the_logs_labelled_by_hand_can_be_chosen(folder):
    names = [one.name for one in read_logs(Logs(folder=folder, split="dev"))]
    assert ["spiked", "a_sinv6_imagenet_resnet"] == names
    names = [one.name for one in read_logs(Logs(folder=folder, manual=True))]
    assert ["spiked", "calm"] == names


def test_missing_cells_of_the_logs_are_not_zero(folder):
    path = folder / "series" / "calm.csv"
    path.write_text("step,loss\n,2.5\n3,\nnan,inf\n")
    (calm,) = read_logs(Logs(folder=folder, split="heldout"))
    assert ([0, 3, 2], [2.5, None, float("inf")]) == (calm.steps, list(calm.losses))
    assert [None] * 3 == list(calm.norms)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("labels.json", "{", "does not hold labelled logs"),
        ("labels.json", '{"a": {"cls": "clean"}}', "KeyError: 'split'"),
        ("labels.json", "[1]", "AttributeError"),
        ("series/calm.csv", "step,loss\n1,two\n", "could not convert"),
        ("labels.json", "{}", "has no log of split all"),
    ],
)
def test_a_folder_of_something_else_is_refused_in_words(folder, file, text, said):
    (folder / file).write_text(text)
    with pytest.raises(UsageError, match=said):
        read_logs(Logs(folder=folder))


def test_the_logs_are_scored_and_what_was_missed_is_named_in_json(folder):
    found = list(detect.PARTS["logs"](quick=False, logs=Logs(folder=folder)))
    rows = {one.name: one for one in found if isinstance(one, Row)}
    assert 1.0 == rows["labelled logs: recall of what is reported"].ours
    assert (0, "of 1") == (
        rows["labelled logs: clean ones paged"].ours, rows["labelled logs: clean ones paged"].note,
    )  # fmt: skip
    (by_log,) = [one for one in found if isinstance(one, Grid) and "log by log" in one.title]
    missed = by_log.plain()["detail"]["isfinite"]["spiked"]["missed"]
    assert [{"kind": "spike", "row": 150, "label": "x4"}] == missed
    assert ["spiked", "a_sinv6_imagenet_resnet"] == [row[0] for row in by_log.rows]


def test_without_a_folder_the_logs_are_skipped_and_say_so():
    (row,) = detect.PARTS["logs"](quick=False)
    assert (None, True) == (row.ours, "--traces" in row.note)


# ------------------------------------------------------------------------------------ command line


def yields(*found):
    return {"detect": {"shapes": lambda quick, logs=None: iter(found)}}


GRID = Grid(
    title="rules", columns=("rule", "recall"), rows=(("us", 0.5), ("a | b", None)), note="read me",
    detail={"missed": [1]},
)  # fmt: skip


def run(monkeypatch, benches, *arguments):
    monkeypatch.setattr("vitals_bench.cli._benches", lambda: benches)
    return CliRunner().invoke(build_app(), arguments)


def test_json_has_tables_with_their_details(monkeypatch):
    row = Row(name="a", ours=0.5, unit="", goal=at_least(0.9))
    done = run(monkeypatch, yields(row, GRID), "detect", "--format", "json", "--quick")
    assert 0 == done.exit_code, done.output
    first, second = json.loads(done.stdout)
    assert (">= 0.9", False) == (first["goal"], first["met"])
    assert {"rule": "a | b", "recall": None} == second["rows"][1]
    assert ({"missed": [1]}, "read me") == (second["detail"], second["note"])


def test_a_terminal_shows_tables_too(monkeypatch):
    done = run(monkeypatch, yields(GRID), "detect")
    assert all(word in done.stdout for word in ("rules", "0.50", "read me"))


def test_one_bench_writes_its_own_part_of_a_page_and_leaves_the_rest(monkeypatch, tmp_path):
    written = tmp_path / "page.md"
    benches = {
        name: {"one": lambda quick, name=name: [Row(name=f"{name} row", ours=1.0, unit="ms")]}
        for name in ("guard", "parts")
    }
    done = run(monkeypatch, {**benches, **yields(GRID)}, "--page", str(written))
    assert 0 == done.exit_code, done.output
    before = written.read_text()
    assert 3 == before.count("\n## ")
    again = run(monkeypatch, yields(GRID, GRID), "detect", "--page", str(written))
    assert 0 == again.exit_code, again.output
    after = written.read_text()
    assert before.split("## detect")[0] == after.split("## detect")[0]
    assert (1, 2) == (before.count("**rules**"), after.count("**rules**"))
    assert "| a / b | - |" in after
    assert after == page.replaced(after, "detect", after[after.index("## detect") :])


def test_a_part_in_the_middle_of_a_page_is_replaced_there():
    text = "# B\n\n## guard\n\nold\n\n## parts\n\nkept\n"
    new = "## guard\n\nnew\n"
    expected = "# B\n\n## guard\n\nnew\n\n## parts\n\nkept\n"
    assert expected == page.replaced(text, "guard", new)
    assert text.rstrip() + "\n\n## x\n" == page.replaced(text, "x", "## x\n")


def test_a_folder_without_labels_is_a_wrong_usage(tmp_path, capsys):
    assert 2 == main(["detect", "--quick", "--traces", os.fspath(tmp_path)])
    assert "does not hold labelled logs" in capsys.readouterr().err
