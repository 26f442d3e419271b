"""`vitals sql`: answers in every form, from a process of its own that needs no network."""

import csv
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer
from sqlalchemy import insert
from typer.testing import CliRunner, Result

from tests.collector.numbers.written import RUN, batch, identity
from trainvitals.cli.groups import add_commands
from trainvitals.errors import StorageError, UsageError
from vitals_collector.cli import sql
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage import schema
from vitals_collector.storage.store import open_data_store

_NO_NETWORK = """
import socket, sys

def refuse(event, args):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        raise OSError(f"the network was used: {event} {args}")

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a collector's data folder, open as a collector has it."""
    data = tmp_path_factory.mktemp("asked") / "data"
    store = open_data_store(data)
    with store.write() as connection:
        connection.execute(insert(schema.runs), {"run_id": RUN, "name": "=cmd", "info": b""})
    lake = Lake(data / "lake")
    losses = [0.5, math.nan, math.inf]
    lake.append([batch(identity(), [{"loss": loss} for loss in losses])])
    yield data
    lake.close()
    store.close()


def ask(*arguments: object, stdin: str | None = None) -> Result:
    """Run the command alone."""
    app = typer.Typer()
    add_commands(app, {"sql": (sql.sql, "vitals sql QUERY")})
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def test_runs_have_the_state_that_the_list_of_runs_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lake = open_data_store(tmp_path), Lake(tmp_path / "lake")
    lake.append([batch(identity(), [{"loss": 1.0}])])
    now = time.time_ns()
    cases = {
        "finished": {"ended_state": "finished", "last_received_unix_ns": 1},
        "running": {"last_received_unix_ns": now},
        "lost": {"last_received_unix_ns": now - 120 * 10**9},
        "halted": {"ended_state": "failed", "last_received_unix_ns": now},
    }
    with store.write() as connection:
        for state, source in cases.items():
            who = {"run_id": state, "incarnation": "1"}
            connection.execute(insert(schema.runs), {"run_id": state, "info": b""})
            connection.execute(
                insert(schema.sources), who | {"source": "rank:0", "rank": 0} | source
            )
        halt = {"seq": 1, "step": 1, "action": "halt", "rule": "spike", "acted": True, "body": b""}
        connection.execute(insert(schema.decisions), who | halt)
    monkeypatch.setenv("VITALS_COLLECTOR_URL", str(tmp_path))
    answer = json.loads(ask("SELECT run_id, state FROM runs", "--format", "json").stdout)
    assert {state: state for state in cases} == {row["run_id"]: row["state"] for row in answer}
    lake.close()
    store.close()


def test_a_url_of_another_collector_is_refused_and_not_taken_for_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("VITALS_COLLECTOR_URL", "https://far:8765")
    refused = ask("FROM runs").exception
    assert isinstance(refused, UsageError)
    assert "VITALS_COLLECTOR_URL is https://far:8765" in str(refused)


def test_the_same_rows_come_out_in_every_form(data: Path) -> None:
    asked = ("SELECT step, loss FROM steps ORDER BY step", "--data", data)
    assert [line.split() for line in ask(*asked).stdout.splitlines()] == [
        ["STEP", "LOSS"],
        ["0", "0.5"],
        ["1", "nan"],
        ["2", "inf"],
    ]
    assert json.loads(ask(*asked, "--format", "json").stdout) == [
        {"step": 0, "loss": 0.5},
        {"step": 1, "loss": "nan"},
        {"step": 2, "loss": "inf"},
    ]
    rows = list(csv.DictReader(io.StringIO(ask(*asked, "--format", "csv").stdout)))
    assert [row["loss"] for row in rows] == ["0.5", "nan", "inf"]


def test_a_question_comes_from_stdin_and_a_cut_is_told(data: Path) -> None:
    asked = ask("-", "--data", data, "--limit", 2, stdin="SELECT step FROM steps ORDER BY step")
    assert asked.stdout.split() == ["STEP", "0", "1"]
    assert "first 2 rows" in asked.stderr


def test_times_and_lists_are_written_as_json_and_text_that_is_a_formula_is_not_one(
    data: Path,
) -> None:
    asked = ("SELECT name, [1, 2] AS pair, make_timestamp(0) AS at FROM runs", "--data", data)
    (row,) = json.loads(ask(*asked, "--format", "json").stdout)
    assert row["pair"] == [1, 2]
    assert row["at"].startswith("1970-01-01")
    assert ask(*asked, "--format", "csv").stdout.splitlines()[1].startswith("'=cmd,")


def test_what_cannot_be_asked_says_what_to_do(data: Path, tmp_path: Path) -> None:
    refused = ask("DROP VIEW steps", "--data", data).exception
    assert isinstance(refused, UsageError)
    assert "only one SELECT" in str(refused)
    missing = ask("FROM runs", "--data", tmp_path).exception
    assert isinstance(missing, StorageError)
    assert "--data" in str(missing.hint)
    empty = ask("-", "--data", data, stdin=" \n").exception
    assert isinstance(empty, UsageError)
    early = ask("FROM gpus", "--data", data).exception
    assert isinstance(early, UsageError)
    assert "nothing was recorded here yet that gpus would show" in str(early)


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(
            "SELECT count(*) FROM range(10000000000) a(i), range(9) b(j)", marks=pytest.mark.slow
        ),
        # One function on one row: the engine does not look up until it has compared each letter.
        "SELECT levenshtein(repeat('a', 1000000), repeat('b', 1000000))",
    ],
    ids=["many rows", "one function"],
)
@pytest.mark.nightly
def test_a_question_over_its_time_ends_within_seconds(data: Path, endless: str) -> None:
    done = vitals(["sql", endless, "--data", str(data), "--seconds", "0.5"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the question took longer than 0.5 s")
    assert "hint: name a run" in done.stderr


def vitals(command: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a program of its own, without a network where that can be had."""
    return subprocess.run(
        [*_without_network(), sys.executable, "-m", "trainvitals", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.servers
def test_a_collector_on_postgresql_is_asked_where_its_catalogue_lies(
    postgres: str, tmp_path: Path
) -> None:
    store = open_data_store(tmp_path, postgres)
    with store.write() as connection:
        connection.execute(insert(schema.runs), {"run_id": RUN, "name": "team", "info": b""})
    store.numbers.append([batch(identity(), [{"loss": 0.5}])])
    asked = ("SELECT name, step, steps.loss FROM steps JOIN runs USING (run_id)", "--data")
    answer = ask(*asked, tmp_path, "--database", postgres)
    assert answer.stdout.split() == ["NAME", "STEP", "LOSS", "team", "0", "0.5"]
    store.numbers.append([batch(identity(), [{"loss": 0.25}], first_seq=1)])
    live = ask(*asked, tmp_path, "--database", postgres)
    assert len(live.stdout.splitlines()) == 3
    without = ask(*asked, tmp_path).exception
    assert isinstance(without, StorageError)
    assert "--database" in str(without.hint)
    store.close()


def test_a_password_is_in_no_error(data: Path) -> None:
    url = "postgresql://ada:s3cret@127.0.0.1:1/team"
    refused = ask("FROM runs", "--data", data, "--database", url).exception
    assert isinstance(refused, StorageError)
    assert "s3cret" not in str(refused)
    refused = ask("FROM runs", "--data", data, "--database", "ada:s3cret@team").exception
    assert isinstance(refused, UsageError)
    assert "s3cret" not in str(refused)


def test_no_network_is_used_and_nothing_is_written_into_the_home(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_NO_NETWORK)
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    asked = ["sql", "SELECT count(*) AS n FROM steps", "--data", str(data)]
    done = vitals(asked, HOME=str(home), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["N", "3"]
    assert not list(home.iterdir())


def _without_network() -> list[str]:
    """Return what runs a command without any network, where this machine allows it.

    The engine's own connections are not Python's: where it is not allowed, only those are refused.
    """
    unshare = ["unshare", "--map-root-user", "--net"]
    try:
        done = subprocess.run([*unshare, "true"], capture_output=True, timeout=10, check=False)
    except FileNotFoundError:
        return []
    return unshare if done.returncode == 0 else []
