"""`vitals export`: all rows of a stream, whatever the length, in both forms."""

import csv
import io
import math
from pathlib import Path

import pytest

from tests.collector.rows import RUN, Writer
from tests.support.cli import vitals
from tests.support.served import Served
from tests.support.story import story, through_a_folder
from trainvitals.records import NamesDefined, RunInfo, RunStarted
from vitals_collector.cli import export


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run of the story."""
    with through_a_folder(story(), tmp_path):
        return tmp_path / "runs"


def exported(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, str]]:
    assert 0 == vitals("export", *arguments)
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def queried(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, str]]:
    assert 0 == vitals("query", *arguments, "--format", "csv", "--limit", 100_000)
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.parametrize("stream", ["steps", "ranks"])
def test_all_rows_come_out_whatever_is_asked_at_a_time(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: str
):
    want = queried(capsys, stream, runs)
    assert len(want) > 40
    for rows in (14, 20_000):
        monkeypatch.setattr(export, "_ROWS", rows)
        assert want == exported(capsys, runs, "--stream", stream)


def test_parquet_has_the_same_numbers_and_one_type_a_column(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(export, "_ROWS", 14)
    want = exported(capsys, runs)
    file = tmp_path / "steps.parquet"
    assert 0 == vitals("export", runs, "--format", "parquet", "--output", file)
    table = parquet.read_table(file)
    assert [int(row["step"]) for row in want] == table["step"].to_pylist()
    losses = [float(row["loss"]) for row in want]
    assert any(math.isnan(loss) for loss in losses)
    assert list(map(repr, losses)) == list(map(repr, table["loss"].to_pylist()))
    assert 2 == vitals("export", runs, "--format", "parquet", "--output", file)
    assert "--force" in capsys.readouterr().err
    assert [file] == list(tmp_path.glob("*.parquet"))
    assert 2 == vitals("export", runs, "--format", "parquet")


def test_scalars_of_a_collector_have_their_names(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    writer = Writer()
    with served.client("ingest") as client:
        client.ingest(writer.events(RunStarted(info=RunInfo(name="tiny"))))
        client.ingest(writer.events(NamesDefined(stream="scalars", names={1: "eval/loss"})))
        client.ingest(writer.steps(range(6)))
        client.ingest(writer.scalars(1, {0: 4.0, 2: math.inf, 9: 3.0}))
    tokens = served.settings.data / "tokens.json"
    where = ("--collector", served.url, "--token-file", tokens)
    rows = exported(capsys, RUN, "--stream", "scalars", *where)
    assert [("0", "4.0"), ("2", "inf"), ("9", "3.0")] == [
        (row["step"], row["value"].lstrip("+")) for row in rows
    ]
    assert {"eval/loss"} == {row["name"] for row in rows}
