"""A bench runs, its rows have their form, and a miss is said and is no failure. No times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vitals_bench import cli, guard, page, parts
from vitals_bench.measure import halves, interleave, medians, spread
from vitals_bench.rows import Row, at_most, exactly, ratio_at_most

pytestmark = pytest.mark.nightly

KEYS = ("name", "ours", "peer", "theirs", "ratio", "goal", "met")


def row(**options):
    return Row(**{"name": "a", "ours": 2.0, "unit": "ms", **options})


@pytest.mark.parametrize(
    ("made", "ratio", "goal", "met"),
    [
        (row(), None, "", None),
        (row(theirs=4.0), 0.5, "", None),
        (row(theirs=4.0, goal=ratio_at_most(0.5)), 0.5, "ratio <= 0.5", True),
        (row(theirs=4.0, goal=ratio_at_most(0.4)), 0.5, "ratio <= 0.4", False),
        (row(goal=ratio_at_most(0.4)), None, "ratio <= 0.4", None),
        (row(goal=at_most(2.0)), None, "<= 2 ms", True),
        (row(goal=exactly(0)), None, "= 0 ms", False),
        (row(ours=None, goal=exactly(0)), None, "= 0 ms", None),
    ],
)
def test_a_row_says_its_ratio_its_goal_and_whether_it_is_met(made, ratio, goal, met):
    plain = made.plain()
    assert KEYS == tuple(plain)[: len(KEYS)]
    assert (ratio, goal, met) == (plain["ratio"], plain["goal"], plain["met"])


def test_arms_take_turns_in_ever_new_orders():
    order = []
    arms = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleave(arms, rounds=20, warm_up=0)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 60, 3)]
    assert {"abc"} == {"".join(sorted(turn)) for turn in rounds}
    assert len(set(rounds)) >= 4
    assert [20, 20, 20] == [len(values) for values in times.values()]


def test_warm_up_and_what_lies_between_are_not_timed():
    clock = iter(range(0, 10_000, 5))
    between = []
    arms = {"a": lambda: None, "b": lambda: None}
    times = interleave(
        arms, rounds=4, warm_up=2, between=lambda: between.append(1), clock_ns=lambda: next(clock)
    )
    assert {"a": 5.0, "b": 5.0} == medians(times, scale=1e9)
    assert 12 == len(between)
    assert 0.5 == spread(3.0, 2.0)
    assert 1.0 == halves([2.0, 1.0] * 5)


def test_the_page_says_what_was_missed_and_on_which_machine():
    rows = [
        row(name="fast", theirs=4.0, goal=ratio_at_most(1.0)),
        row(name="slow", peer="them", theirs=1.0, goal=ratio_at_most(1.0), spread=0.05),
        row(name="absent", ours=None, note="wandb: not installed"),
    ]
    text = page.markdown(page.facts(), {"guard": rows})
    assert "Missed: slow (them)." in text
    assert "| slow | 2 ms | them | 1 ms | 2.00 | 5 % | ratio <= 1 | MISSED |  |" in text
    assert "wandb: not installed" in text
    assert "| torch | " in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| fast")}
    assert {len(page.COLUMNS) + 1} == widths


def test_figures_of_another_processor_stay_when_a_bench_runs_again(monkeypatch):
    def on(name, ours, before, benches=("guard", "parts")):
        monkeypatch.setattr(page, "processor", lambda: name)
        rows = {bench: [row(name=f"{bench} row", ours=ours)] for bench in benches}
        return page.markdown(page.facts(), rows, before=before)

    text = on("Xeon, 2 cores", 3.0, "")
    text = on("EPYC, 2 cores", 5.0, text)
    text = on("Xeon, 2 cores", 4.0, text)
    for bench in ("guard", "parts"):
        figures = page.section_of(text, bench).split("### ")[1:]
        assert ["Xeon, 2 cores", "EPYC, 2 cores"] == [part.partition("\n")[0] for part in figures]
        assert f"| {bench} row | 4 ms |" in figures[0]
        assert f"| {bench} row | 5 ms |" in figures[1]
    part = page.section("guard", [row(ours=6.0)], page.facts(), before=text)
    after = page.replaced(text, "guard", part)
    assert "| guard row | 5 ms |" in after
    assert "| guard row | 4 ms |" not in after
    assert page.section_of(text, "parts") == page.section_of(after, "parts")


def run(arguments, monkeypatch, benches):
    monkeypatch.setattr("vitals_bench.cli._benches", lambda: benches)
    return CliRunner().invoke(cli.build_app(), arguments)


def test_every_bench_is_a_command_whose_help_says_all():
    command = typer.main.get_command(cli.build_app())
    # The GPU check has results of its own instead of rows.
    assert cli._benches().keys() | {"gpu"} == command.commands.keys()
    for each in (command, *command.commands.values()):
        assert (each.epilog or "").startswith("Example: python -m vitals_bench ")
        assert [] == [p.name for p in each.params if not getattr(p, "help", "")]


def test_python_dash_m_says_a_mistake_in_words(tmp_path):
    arguments = ["detect", "--quick", "--traces", os.fspath(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "vitals_bench", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 2 == done.returncode
    assert done.stderr.startswith("error: ")


def test_a_missed_goal_is_no_failure_and_json_is_rows_alone(monkeypatch):
    benches = {
        "guard": {"one": lambda quick: [row(theirs=1.0, goal=ratio_at_most(1.0))]},
        "parts": {"two": lambda quick: [print("a peer talks") or row(name=str(quick))]},
    }
    done = run(["--format", "json", "--quick"], monkeypatch, benches)
    assert 0 == done.exit_code, done.output
    assert [("a", False), ("True", None)] == [
        (r["name"], r["met"]) for r in json.loads(done.stdout)
    ]
    assert ["a"] == [
        r["name"]
        for r in json.loads(run(["guard", "--format", "json"], monkeypatch, benches).stdout)
    ]


def test_a_bench_that_cannot_run_is_named_and_the_others_are_shown(monkeypatch, tmp_path):
    def broken(quick):
        yield row(name="before")
        raise OSError("no room")

    benches = {"guard": {"broken": broken, "fine": lambda quick: [row(name="fine")]}, "parts": {}}
    written = tmp_path / "page.md"
    done = run(["--page", str(written)], monkeypatch, benches)
    assert 1 == done.exit_code
    assert "guard: broken could not run: OSError: no room" in done.stderr
    assert "fine" in done.stdout
    assert "| fine | 2 ms |" in written.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["norms", "steps", "loop"])
def test_a_part_of_the_guard_s_bench_yields_rows_with_figures(part):
    rows = list(guard.PARTS[part](quick=True))
    assert len(rows) >= 2
    measured = [r for r in rows if "not installed" not in r.note]
    assert [] == [r.name for r in measured if r.ours is None or r.ours <= 0.0]
    assert len(rows) == len({(r.name, r.peer) for r in rows})


@pytest.mark.slow
def test_nothing_is_read_lost_or_grown():
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = "import sys, json; from vitals_bench.guard import reads, saying; " + (
        "rows = [reads._reads(5), saying._killed(100), saying._memory(5000)]; "
        "print(json.dumps([r.plain() for r in rows]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [True, True, True] == [r["met"] for r in found], found


@pytest.mark.slow
@pytest.mark.dist
def test_the_ranks_of_the_sharded_bench_leave_their_rows(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    below, above = guard.PARTS["sharded"](quick=True)  # the limit
    assert all(row.ours is not None and row.ratio is not None for row in (below, above))


def test_the_parts_are_measured():
    rows = list(parts.measure_parts(quick=True))
    assert 5 == len(rows)
    assert all(r.ours is not None and r.ours > 0 for r in rows)


def test_the_page_of_the_repository_was_written_by_this_bench():
    text = (Path(__file__).parents[2] / "docs" / "figures.md").read_text()
    assert page.NOTICE in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    names = [heading.removeprefix("## ") for heading in headings]
    assert ["guard", "parts", "detect", "query"] == names[:4]
    assert {"gpu"} == set(names) - cli._benches().keys()
