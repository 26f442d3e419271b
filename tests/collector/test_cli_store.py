import json
import time
from pathlib import Path

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from tests.collector.alerting import decision
from tests.collector.conftest import grow
from tests.collector.rows import RUN, SECOND, Writer
from tests.collector.test_store import fill
from tests.collector.volume_runs import ranks, settled, write_steps
from trainvitals.cli.main import build_app
from trainvitals.errors import VitalsError
from trainvitals.records import RunEnded, RunInfo, RunStarted
from vitals_collector.api.serve import only_one
from vitals_collector.ingest.ingest import ingest
from vitals_collector.ingest.staging import WriteAheadBuffer
from vitals_collector.storage.schema import audit, runs
from vitals_collector.storage.store import open_data_store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with one run of eleven ranks that ended."""
    store = open_data_store(tmp_path / "data")
    writers = ranks(11)
    info = RunInfo(name="night", mode="guard")
    ingest(store, writers[0].events(RunStarted(info=info), decision(step=1), step=1))
    write_steps(store, writers, range(60), at_once=60)
    ingest(store, writers[0].events(RunEnded(state="finished"), step=59))
    settled(store)
    store.close()
    return tmp_path / "data"


def vitals(*words: object, asked: str = ""):
    return CliRunner().invoke(build_app()[0], ["store", *map(str, words)], input=asked)


def test_size_says_what_each_run_takes_and_which_is_above_its_cap(data: Path):
    table = vitals("size", "--data", data)
    assert 0 == table.exit_code, table.output
    assert "night" in table.output
    assert "above" not in table.output
    told = vitals("size", "--data", data, "--cap-gb", "0.000001", "--format", "csv")
    assert ",above," in told.output
    body = json.loads(vitals("size", "--data", data, "--format", "json").stdout)
    assert body["runs"][RUN]["num_bytes"] > 0
    assert body["store"]["num_bytes"] > 0


def test_backup_copies_the_store(data: Path, tmp_path: Path):
    done = vitals("backup", tmp_path / "copy.db", "--data", data)
    assert 0 == done.exit_code, done.output
    assert (tmp_path / "copy.db").is_file()
    again = vitals("backup", tmp_path / "copy.db", "--data", data)
    assert "already exists" in str(again.exception)
    url = vitals("backup", tmp_path / "other.db", "--database", "postgresql://ann@host/db")
    assert "pg_dump" in str(url.exception)


def test_forget_asks_first_and_leaves_an_audit(data: Path):
    refused = vitals("delete", "night", "--data", data, asked="n\n")
    assert 1 == refused.exit_code
    done = vitals("delete", RUN[:8], "--data", data, asked="y\n")
    assert 0 == done.exit_code, done.output
    store = open_data_store(data)
    with store.read() as connection:
        assert [] == list(connection.execute(select(runs.c.run_id)).scalars())
        assert ["delete"] == list(connection.execute(select(audit.c.action)).scalars())
    store.close()
    unknown = vitals("delete", RUN, "--yes", "--data", data)
    assert "matches 0 runs" in str(unknown.exception)


def test_a_run_is_lost_after_the_silence_that_the_collector_was_told(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    heard = time.time_ns() - 30 * SECOND
    ingest(store, Writer(started=heard).steps([0]), received_unix_ns=heard)
    store.close()
    running = vitals("delete", RUN, "--yes", "--data", tmp_path / "data")
    assert "is still running" in str(running.exception)
    lost = vitals("delete", RUN, "--yes", "--data", tmp_path / "data", "--lost-after", "10")
    assert 0 == lost.exit_code, lost.output


def test_on_a_full_disk_sizes_are_shown_and_the_way_to_remove_a_run_is_said(small_disk: Path):
    data = small_disk / "data"
    store = open_data_store(data)
    fill(WriteAheadBuffer(store), Writer())
    store.close()
    shown = vitals("size", "--data", data)
    assert 0 == shown.exit_code, shown.output
    assert RUN in shown.output
    assert "the newest rows are left out" in shown.output
    refused = vitals("delete", RUN, "--yes", "--data", data).exception
    assert isinstance(refused, VitalsError)
    assert "run the command again" in refused.hint
    grow(small_disk)
    assert 0 == vitals("delete", RUN, "--yes", "--data", data).exit_code
    assert RUN not in vitals("size", "--data", data).output


def test_keep_pins_a_run_until_it_is_let_go(data: Path):
    assert 0 == vitals("pin", "night", "--data", data).exit_code
    assert "yes" in vitals("size", "--data", data).output
    assert 0 == vitals("pin", "night", "--off", "--data", data).exit_code
    assert "yes" not in vitals("size", "--data", data).output


def test_compact_needs_the_store_for_itself(data: Path):
    with only_one(data):
        busy = vitals("compact", "--data", data)
    assert "another collector runs" in str(busy.exception)
    assert 0 == vitals("compact", "--data", data).exit_code


def test_a_place_without_a_store_is_said(tmp_path: Path):
    assert "there is no store" in str(vitals("size", "--data", tmp_path).exception)
