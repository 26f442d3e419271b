"""Tables by conditions in every form, and what may not be written over."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest

from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.served import Served
from tests.support.story import story, through_a_folder
from trainvitals.records import RunInfo, RunStarted
from vitals_collector.cli.show import write_run
from vitals_collector.cli.writing import TableFormat, write_file
from vitals_collector.queries.open import open_reader

FORMULA = "=cmd|' /C calc'!A0"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run of the story."""
    with through_a_folder(story(), tmp_path):
        return tmp_path / "runs"


def test_the_same_rows_come_out_in_every_form(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    parquet = pytest.importorskip("pyarrow.parquet")
    asked = ("query", "steps", runs, "--columns", "step,loss", "--from-step", 38, "--to-step", 41)
    assert 0 == vitals(*asked)
    assert ["STEP LOSS", "38 0.0769231", "39 0.075", "40 nan", "41 0.0714286"] == [
        " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
    ]
    assert 0 == vitals(*asked, "--format", "json")
    rows = json.loads(capsys.readouterr().out)
    assert [(38, 3 / 39), (39, 3 / 40), (40, "nan"), (41, 3 / 42)] == [
        (row["step"], row["loss"]) for row in rows
    ]
    assert 0 == vitals(*asked, "--format", "csv")
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [str(row["loss"]) for row in rows] == [row["loss"] for row in found]
    file = tmp_path / "steps.parquet"
    assert 0 == vitals(*asked, "--format", "parquet", "--output", file)
    table = parquet.read_table(file)
    assert ["int64", "double"] == [str(field.type) for field in table.schema]
    losses = table["loss"].to_pylist()
    assert math.isnan(losses.pop(2))
    assert [3 / 39, 3 / 40, 3 / 42] == losses


def test_conditions_and_a_limit_are_obeyed_and_what_was_cut_is_said(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert 0 == vitals(
        *("query", "steps", "tiny", "--dir", runs, "--where", "loss > 1", "--limit", 1),
        *("--newest-first", "--columns", "step"),
    )
    said = capsys.readouterr()
    assert ["STEP", "1"] == said.out.split()
    assert "1 of 2 rows; --limit 2 has all" in said.err
    assert 0 == vitals("query", "decisions", runs, "--columns", "step,action", "--format", "csv")
    assert ["step,action", "40,skip_step", "90,rollback"] == capsys.readouterr().out.splitlines()
    assert 2 == vitals("query", "layers", runs)
    assert "must be one of runs, steps," in capsys.readouterr().err
    assert 2 == vitals("query", "steps", runs, "--where", "losss > 1")
    assert "losss" in capsys.readouterr().err


def test_what_a_branch_leaves_out_and_which_rows_look_alike_is_said(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    at_88 = ("query", "steps", runs, "--from-step", 88, "--format", "csv", "--to-step", 88)
    assert 0 == vitals(*at_88, "--columns", "step,attempt,loss")
    said = capsys.readouterr()
    assert ["88,1", "88,2"] == [line.rpartition(",")[0] for line in said.out.split()[1:]]
    assert "" == said.err
    assert 0 == vitals(*at_88, "--columns", "step,loss")
    assert "the column attempt tells them apart" in capsys.readouterr().err
    assert 0 == vitals(*at_88, "--columns", "step,attempt", "--branch", "lineage")
    said = capsys.readouterr()
    assert ["step,attempt", "88,2"] == said.out.split()
    assert "not looked at: 1; --branch all" in said.err
    assert 0 == vitals(*at_88, "--columns", "step,attempt", "--branch", "discarded")
    assert ("step,attempt\n88,1\n", "") == capsys.readouterr()
    assert 2 == vitals("query", "decisions", runs, "--branch", "lineage")
    assert "only steps and ranks have branches" in capsys.readouterr().err


def test_a_collector_answers_as_a_folder_does(
    served: Served, runs: Path, capsys: pytest.CaptureFixture[str]
):
    with served.client("ingest") as client:
        for raws in story().values():
            for raw in raws:
                client.ingest(raw)
    tokens = served.settings.data / "tokens.json"
    asked = ("query", "ranks", "tiny", "--where", "rank_loss = 0.02", "--format", "csv")
    assert 0 == vitals(*asked, "--collector", served.url, "--token-file", tokens)
    answer = capsys.readouterr().out
    assert 0 == vitals(*asked, "--dir", runs)
    assert capsys.readouterr().out == answer
    assert 100 < len(answer.splitlines())


def test_no_text_of_a_stranger_becomes_a_formula_and_no_number_is_hurt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    writer = Writer()
    leave(
        tmp_path,
        writer.events(RunStarted(info=RunInfo(name=FORMULA, user="@me", project="-1.5"))),
        writer.steps([0], loss=-2.5),
    )
    assert 0 == vitals("query", "runs", tmp_path, "--format", "csv")
    (run,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (f"'{FORMULA}", "'@me", "-1.5", "-2.5") == (
        *(run["name"], run["user"], run["project"], run["loss"]),
    )


def test_without_pyarrow_it_is_said_what_to_install(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert 2 == vitals("runs", runs, "--format", "parquet")
    assert "add --output FILE.parquet" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = runs / "x.parquet"
    for command in (("runs", runs), ("tail", runs), ("show", runs, "--metric", "steps.loss")):
        assert 2 == vitals(*command, "--format", "parquet", "--output", file)
        assert "pip install 'trainvitals[collector]'" in capsys.readouterr().err
    assert not file.exists()
    assert 2 == vitals("show", runs, "--format", "parquet", "--output", file)
    assert "add --metric" in capsys.readouterr().err
    assert 2 == vitals("tail", runs, "--follow", "--output", file)
    assert "--follow writes lines as they come" in capsys.readouterr().err


def test_runs_show_and_tail_write_into_a_file(runs: Path, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "out"
    assert 0 == vitals("tail", runs, "-n", 3, "--format", "parquet", "--output", file)
    assert [117, 118, 119] == parquet.read_table(file)["step"].to_pylist()
    asked = ("show", runs, "--metric", "steps.loss", "--format", "parquet", "--output", file)
    assert 0 == vitals(*asked, "--force")
    table = parquet.read_table(file)
    assert ["int64", "int64", "int64", "double"] == [str(f.type) for f in table.schema]
    assert 0 == vitals("runs", runs, "--output", file, "--force")
    assert "tiny" in file.read_text()
    assert 0 == vitals("show", runs, "--output", file, "--force")
    assert "decided |" in file.read_text()


def test_a_file_with_another_content_stays_unless_it_is_forced(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.py"
    file.write_text("precious")
    asked = ("query", "runs", runs, "--format", "csv", "--output", file)
    assert 2 == vitals(*asked)
    assert "overwrite it with --force" in capsys.readouterr().err
    assert "precious" == file.read_text()
    assert 0 == vitals(*asked, "--force")
    assert RUN in file.read_text()
    assert [] == [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    for where in (tmp_path / "no" / "file", tmp_path):
        assert 1 == vitals("query", "runs", runs, "--output", where)
        assert "cannot be written" in capsys.readouterr().err


def test_a_link_is_followed_and_the_same_content_may_be_written_again(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_file(link, b"one")
    write_file(link, b"one")
    assert (b"one", True) == (target.read_bytes(), link.is_symlink())


class Terminal(io.StringIO):
    """A terminal of an encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


def test_only_a_terminal_that_wants_colors_gets_them_and_a_plain_one_plain_characters(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def shown(encoding: str) -> str:
        terminal = Terminal(encoding)
        with open_reader(runs) as opened:
            write_run(opened.reader, RUN, TableFormat.TABLE, terminal)
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in shown("utf-8")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown("utf-8")
    assert shown("ascii").isascii()
    monkeypatch.delenv("NO_COLOR")
    assert 0 == vitals("show", runs)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "s step skipped (1)" in said
    assert "120 steps, 1 not finite; 30 discarded by rollbacks" in said
