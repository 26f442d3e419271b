"""The guide "Query with SQL": each question has the answer shown, each way to the files works."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import pyarrow.parquet as parquet
import pytest
from sqlalchemy import Connection, insert

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.house.pages import ROOT, after, block, blocks
from tests.support.forked import COMMANDS
from trainvitals.alerting import ALERTS_BY_NAME
from trainvitals.identity import Identity
from trainvitals.records import ActionName
from vitals_collector.cli.sql import sql
from vitals_collector.cli.store import StoreChoice
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_engine import find_duckdb_extension
from vitals_collector.storage import schema
from vitals_collector.storage.store import open_data_store

GUIDE = ROOT / "docs" / "guides" / "sql.md"
EVERY = blocks(GUIDE)
SQL = [number for number, b in enumerate(EVERY) if b.mark.startswith("test: sql")]
PYTHON = [number for number, b in enumerate(EVERY) if b.mark.startswith("test: lake")]
LARGE = {RUN: "small", OTHER_RUN: "large"}
SECOND = 1_700_000_000_000_000_000


def records(connection: Connection) -> None:
    """Store what a collector keeps beside the numbers of two runs."""
    for run_id, name in LARGE.items():
        who = {"run_id": run_id, "incarnation": identity(run_id).incarnation}
        started = {"started_unix_ns": SECOND, "world_size": 2, "info": b""}
        connection.execute(insert(schema.runs), {"run_id": run_id, "name": name} | started)
        state = "finished" if name == "small" else ""
        seen = {"rank": 0, "last_step": 5, "ended_state": state, "started_unix_ns": SECOND}
        connection.execute(insert(schema.sources), who | {"source": "rank:0"} | seen)
        for stream, text in (("scalars", "eval/loss"), ("layers", "blocks.0")):
            connection.execute(
                insert(schema.names), who | {"stream": stream, "id": 0, "name": text}
            )
    who = {"run_id": OTHER_RUN, "incarnation": identity(OTHER_RUN).incarnation}
    for step, action, rule in ((3, "skip_step", "outlier"), (4, "rollback", "state_damaged")):
        assert action in get_args(ActionName)
        said = {"seq": step, "step": step, "action": action, "rule": rule, "acted": True}
        connection.execute(
            insert(schema.decisions),
            who | said | {"time_unix_ns": SECOND + step * 10**9, "body": b""},
        )
    severity = ALERTS_BY_NAME["StateDamaged"].severity
    alert = {"fingerprint": "a", "name": "StateDamaged", "severity": severity, "state": "firing"}
    connection.execute(insert(schema.alerts), {"run_id": OTHER_RUN, "step": 3} | alert)
    saved = {"checkpoint_id": "step-4", "place": "disk", "step": 4, "state": "healthy"}
    connection.execute(insert(schema.checkpoints), {"run_id": OTHER_RUN, "num_bytes": 9000} | saved)


def numbers(lake: Lake) -> None:
    """Store rows of two ranks of two runs, of layers, scalars, a GPU."""
    for run_id, name in LARGE.items():
        for rank in (0, 1):
            best = 3.0 if name == "small" else 1.5
            rows = [
                {"loss": best + 5 - i, "rank_loss": best + rank * i / 4}
                | {"step_duration_seconds": 0.25 + rank / 4, "verdict": 0.0}
                | {"time_unix_ns": SECOND + i * 10**9}
                for i in range(6)
            ]
            lake.append([batch(identity(run_id, rank=rank), rows)])
        who, kinds = identity(run_id), {"name": "i8", "value": "f8"}
        evals = [{"name": 0, "value": 4.0 - i, "step": 2 * i} for i in range(3)]
        lake.append([batch(who, evals, kinds=kinds, stream="scalars")])
        norms = [{"layer": 0, "grad_norm": 0.5 * i} for i in range(4)]
        kinds = {"layer": "i8", "grad_norm": "f8"}
        lake.append([batch(who, norms, kinds=kinds, stream="layers")])
    gpu = Identity(run_id=OTHER_RUN, incarnation="a" * 16, source="gpu:GPU-1", node="node-0")
    watts = [{"power_watts": 300.0 + i, "temperature_celsius": 60.0 + i} for i in range(3)]
    lake.append([batch(gpu, watts, stream="gpu")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder with ``data``, a collector's, whose lake was merged and has lost a run."""
    folder = tmp_path_factory.mktemp("guide")
    store = open_data_store(folder / "data")
    with store.write() as connection:
        records(connection)
    lake = Lake(folder / "data" / "lake")
    numbers(lake)
    lake.merge()
    gone = "01J00000000000000000000003"
    rows = [{"loss": 1000.0} for _ in range(3)]
    lake.append([batch(identity(gone), rows), batch(identity(rank=2), rows[:1])])
    lake.delete(gone)  # a delete file is left, and merged files wait for their removal
    yield folder
    lake.close()
    store.close()


@pytest.mark.parametrize("number", SQL)
def test_a_question_has_the_answer_that_is_shown(folder: Path, number: int) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        sql(question=EVERY[number].body, choice=StoreChoice(data=folder / "data"))
    assert EVERY[number + 1].body == printed.getvalue()


def test_there_are_eight_queries_and_two_for_grafana() -> None:
    assert len(SQL) == 10


@pytest.mark.parametrize("number", PYTHON)
def test_a_program_reads_the_lake_as_it_is_shown(folder: Path, number: int) -> None:
    mark = EVERY[number].mark
    if needed := re.search(r"needs (\w+)", mark):
        pytest.importorskip(needed[1])
    program, shown = EVERY[number].body, EVERY[number + 1].body
    if "after files" in mark:
        program = block(GUIDE, "test: lake; files").body + program
        shown = after(GUIDE, "test: lake; files").body + shown
    assert shown.rstrip() == run(program, folder).rstrip()


def test_every_parquet_file_of_the_folder_is_more_than_the_lake_has(folder: Path) -> None:
    """So the guide is right that one must not read them all."""
    files = (folder / "data" / "lake" / "data" / "main" / "steps").glob("*.parquet")
    tables = [parquet.read_table(file) for file in files]
    assert any("pos" in table.column_names for table in tables)
    assert sum(len(table) for table in tables if "loss" in table.column_names) > 25


def run(program: str, folder: Path) -> str:
    """Run a text as a program; DuckDB's extensions come from packages, not from the network."""
    loads = "; ".join(
        f"LOAD '{find_duckdb_extension(name)}'" for name in ("ducklake", "sqlite_scanner")
    )
    text = re.sub(r"INSTALL ducklake; INSTALL sqlite", loads, program)
    done = COMMANDS.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
