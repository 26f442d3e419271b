"""Runs from Python: the same answers of a collector and of a folder, as arrays; and the guide."""

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from tests.collector.rows import RUN, Writer
from tests.e2e import long_run
from tests.support.served import Served, served_in
from tests.support.story import story
from trainvitals import client as client_module
from trainvitals.arrays import Table, decode_cells_reply, decode_series_reply
from trainvitals.client import Client
from trainvitals.errors import MissingDependencyError, UnauthorizedError, UsageError
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.views import CellsReply, NonFiniteMark, SeriesReply, TableReply

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "python.md").read_text()
BLOCK = re.compile(r"<!-- run; gives -->\n```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A collector that was told the story of the tests of both ways."""
    with served_in(tmp_path_factory.mktemp("client") / "data") as collector:
        with collector.client("ingest") as agent:
            for raws in story().values():
                agent.ingest_all(raws)
        yield collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, as agents without any server leave it."""
    runs = tmp_path_factory.mktemp("runs")
    for node, raws in story().items():
        where = RunDir.create(runs, RUN).agent_dir(node) / "spool"
        with contextlib.closing(Spool(where, max_bytes=1 << 24, keep=True)) as spool:
            for raw in raws:
                spool.append(raw)
    return runs


@pytest.fixture(params=["collector", "folder"])
def client(
    request: pytest.FixtureRequest, served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(served.settings.data / "tokens.json"))
    with Client(served.url if request.param == "collector" else folder) as opened:
        yield opened


def test_a_closed_client_says_that_it_is_closed(client: Client):
    run = client.run("tiny")
    client.close()
    for query in (client.runs, lambda: run.series("steps.loss")):
        with pytest.raises(UsageError, match=r"this client of .* is closed"):
            query()


def test_runs_are_found_by_what_they_are(client: Client):
    (run,) = client.runs(name="tiny", tag="x", state="finished")
    assert [] == client.runs(project="another")
    assert RUN == run.run_id == client.run().run_id == client.run(RUN[:20].lower()).run_id
    assert f"<Run 'tiny' {RUN}: finished, step 119>" == repr(run)
    with pytest.raises(UsageError, match="no run 'nobody'"):
        client.run("nobody")


def test_a_series_has_every_point_with_its_nan_and_its_attempt(client: Client):
    run = client.run("tiny")
    found = run.series("steps.rank_loss", source="rank:1", branch="all")
    assert sorted([*range(90), *range(60, 120)]) == found.step.tolist()
    assert {1: 90, 2: 60} == {a: int((found.attempt == a).sum()) for a in (1, 2)}
    assert [40] == found.step[np.isnan(found.value)].tolist()
    assert (np.int64, np.int64, np.float64, "<M8[ns]") == (
        found.step.dtype,
        found.attempt.dtype,
        found.value.dtype,
        found.time.dtype.str,
    )
    part = run.series("steps.loss", from_step=58, to_step=62)
    assert ([58, 59, 60, 61, 62], [1, 1, 2, 2, 2]) == (part.step.tolist(), part.attempt.tolist())


def test_parts_of_a_long_series_are_joined_without_a_seam(
    client: Client, monkeypatch: pytest.MonkeyPatch
):
    run = client.run("tiny")
    whole = {b: run.series("steps.loss", branch=b) for b in ("lineage", "discarded")}
    monkeypatch.setattr(client_module, "_STEPS_AT_ONCE", 7)
    for branch, once in whole.items():
        parts = run.series("steps.loss", branch=branch)
        assert once.step.tolist() == parts.step.tolist()
        np.testing.assert_array_equal(once.value, parts.value)
    assert 30 == len(whole["discarded"])


def test_fewer_points_keep_the_nan_and_say_how_many_there_were(client: Client):
    few = client.run().series("steps.loss", points=10)
    assert (True, 120) == (len(few) < 20, few.num_total)
    assert [40] == few.step[np.isnan(few.value)].tolist()
    assert repr(few) == f"<Series steps.loss of rank:0: {len(few)} of 120 points>"


def test_rows_without_steps_come_whole_and_by_time(client: Client):
    found = client.run().series("node.cpu_ratio", source="node:node-b")
    assert (10, {-1}, "ratio") == (len(found), set(found.step.tolist()), found.unit)
    assert np.all(np.diff(found.time_unix_ns) > 0)


def test_the_ledger_a_step_and_the_rest_are_the_views(client: Client):
    run = client.run()
    assert ["skip_step", "rollback"] == [view.decision.action for view in run.decisions()]
    assert [40] == [view.finding.step for view in run.findings()]
    (incident,) = run.incidents()
    assert incident.verdict == run.verdict().verdict
    assert ["c60"] == [one.checkpoint_id for one in run.checkpoints()]
    assert {"rank:0", "rank:1"} == {row.source for row in run.step(40).rows}
    assert "steps.loss" in run.metrics()
    assert [True] == [one.state == "healthy" for one in run.checkpoints()]
    assert any("bye" in event.text for event in run.events())


def test_an_unknown_series_says_what_is_close(client: Client):
    with pytest.raises(UsageError, match=r"did you mean steps\.loss"):
        client.run().series("steps.los")


def test_pandas_gets_columns(client: Client):
    pandas = pytest.importorskip("pandas")
    frame = client.run().series("steps.loss").to_pandas()
    assert ["step", "time", "attempt", "value"] == list(frame.columns)
    assert (120, 1) == (len(frame), int(frame.value.isna().sum()))
    assert pandas.Timestamp("2023-11-14 22:13:20") == frame.time[0]


def test_without_pandas_it_says_what_to_install(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        client.run().series("steps.loss").to_pandas()


def test_a_folder_shows_what_came_since_it_was_opened(tmp_path: Path):
    writer = Writer()
    where = RunDir.create(tmp_path, RUN).agent_dir("a") / "spool"
    with contextlib.closing(Spool(where, max_bytes=1 << 24, keep=True)) as spool:
        spool.append(writer.steps(range(5), loss=1.0))
        with Client(str(tmp_path)) as client:
            assert 5 == len(client.run().series("steps.loss"))
            spool.append(writer.steps(range(5, 9), loss=1.0))
            client.refresh()
            assert 9 == len(client.run().series("steps.loss"))


def test_what_cannot_be_read_says_so(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"no folder .*none"):
        Client()
    with pytest.raises(UsageError, match="there is no folder"):
        Client(tmp_path / "none")
    with Client(served.url, "wrong") as client, pytest.raises(UnauthorizedError):
        client.runs()
    with Client(served.url, served.tokens.read) as client:
        assert [RUN] == [run.run_id for run in client.runs()]


def test_without_the_collectors_packages_a_folder_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    point = EntryPoint("folder", "package_that_is_not_there:open", client_module.READERS)
    for found in ([point], []):
        monkeypatch.setattr(client_module, "entry_points", lambda found=found, **_: found)
        with pytest.raises(MissingDependencyError, match="pip install trainvitals"):
            Client(tmp_path)


def test_movers_tables_and_heat_maps_come_both_ways(client: Client):
    run = client.run()
    found = run.table("steps", columns=("step", "loss"), from_step=39, to_step=41)
    assert ([39, 40, 41], 3) == (found["step"].tolist(), found.num_total)
    assert [40] == found["step"][np.isnan(found["loss"])].tolist()
    assert ["rollback"] == client.table("decisions", where=["action = rollback"])["action"].tolist()
    assert [] != [one.row for one in run.movers(40)]
    heat = run.cells("steps.rank_loss")
    assert (("rank:0", "rank:1"), (2, len(heat.step))) == (heat.rows, heat.value.shape)


def test_an_annotation_is_written_with_the_token_that_may_control(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(served.settings.data / "tokens.json"))
    with Client(served.url) as client:
        client.run().annotate(40, "a bad disk", by="ada")
        assert [(40, "a bad disk", "ada")] == [
            (one.step, one.text, one.by) for one in client.run().annotations()
        ]
    with Client(served.url, served.tokens.read) as client, pytest.raises(UnauthorizedError):
        client.run().annotate(40, "a bad disk")


def test_an_annotation_needs_a_collector(folder: Path):
    with Client(folder) as client, pytest.raises(UsageError, match="read-only"):
        client.run().annotate(40, "a bad disk")


class TestArrays:
    """What becomes of an answer."""

    def test_what_was_not_finite_is_itself_again(self):
        marks = (
            NonFiniteMark(1, 1, "-inf"),
            NonFiniteMark(2, 1, "+inf"),
            NonFiniteMark(2, 2, "nan"),
        )
        reply = SeriesReply(
            run_id=RUN,
            metric="steps.loss",
            source="rank:0",
            unit="",
            branch="all",
            num_total=4,
            step=(0, 1, 2, 2),
            time_unix_ns=(0, 1, 2, 3),
            attempt=(1, 1, 1, 2),
            value=(0.5, None, None, None),
            nonfinite=marks,
        )
        np.testing.assert_array_equal(
            [0.5, -np.inf, np.inf, np.nan], decode_series_reply(reply).value
        )

    def test_a_table_has_the_types_its_values_have(self):
        data = (
            (1, 2, 3),
            (0.5, "nan", None),
            ("-inf", 2, 3.5),
            (True, False, True),
            ("nan", "a run", None),
        )
        table = Table(TableReply(columns=tuple("abcde"), data=data, num_total=9))
        assert ["int64", "float64", "float64", "bool", "object"] == [
            str(column.dtype) for column in table.values()
        ]
        np.testing.assert_array_equal([0.5, np.nan, np.nan], table["b"])
        assert ["nan", "a run", None] == table["e"].tolist()
        assert "<Table of 3 rows of 9: a, b, c, d, e>" == repr(table)

    def test_a_heat_map_is_two_dimensional_even_where_nothing_was_measured(self):
        reply = CellsReply(
            run_id=RUN,
            metric="steps.rank_loss",
            unit="",
            rows=("rank:0", "rank:1"),
            num_rows=2,
            step=(0, 10, 20),
            value=((1.0, None, 2.0), (None, None, None)),
            nonfinite=((0, 1), (1, 2)),
            nonfinite_rolled_back=((1, 2),),
            rolled_back=(15, 20),
        )
        found = decode_cells_reply(reply)
        assert ((2, 3), (15, 20)) == (found.value.shape, found.rolled_back)
        marks = (found.is_nonfinite, found.is_nonfinite_rolled_back)
        assert [[[0, 1], [1, 2]], [[1, 2]]] == [np.argwhere(mask).tolist() for mask in marks]
        assert ["rank:0", "rank:1"] == list(found.to_pandas().index)
        empty = CellsReply(
            run_id=RUN, metric="a.b", unit="", rows=(), num_rows=0, step=(), value=(), nonfinite=()
        )
        assert (0, 0) == decode_cells_reply(empty).value.shape


def test_the_guide_gives_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    long_run.LongRun(3_000).write_into(tmp_path / "vitals_runs")
    names: dict[str, object] = {}
    blocks = BLOCK.findall(GUIDE)
    assert GUIDE.count("```python") == len(blocks)
    for source, shown in blocks:
        assert shown == executed(source, names), source
    names["client"].close()


def executed(source: str, names: dict[str, object]) -> str:
    """Run a block as a notebook does; return what it prints, and its last value."""
    tree = ast.parse(source)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "guide", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "guide", "eval"), names)
            if value is not None:
                print(repr(value))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
