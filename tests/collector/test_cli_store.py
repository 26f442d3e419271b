import json
import shutil
import time
from pathlib import Path

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from tests.collector.alerting import decision
from tests.collector.rows import RUN, SECOND, Writer
from tests.collector.volume_runs import ranks, write_steps
from tests.support.small_disks import small_file_system
from trainvitals.cli.main import build_app
from trainvitals.errors import StorageError, VitalsError
from trainvitals.records import RunEnded, RunInfo, RunStarted
from vitals_collector.api.serve import lock_data_dir
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.schema import audit, runs
from vitals_collector.storage.store import FULL, open_data_store


@pytest.fixture(scope="module")
def with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with one run of eleven ranks that ended."""
    data = tmp_path_factory.mktemp("run") / "data"
    store = open_data_store(data)
    writers = ranks(11)
    info = RunInfo(name="night", mode="guard")
    ingest(store, writers[0].events(RunStarted(info=info), decision(step=1), step=1))
    write_steps(store, writers, range(60))
    ingest(store, writers[0].events(RunEnded(state="finished"), step=59))
    store.close()
    return data


@pytest.fixture
def data(tmp_path: Path, with_a_run: Path) -> Path:
    """A copy of that directory."""
    return Path(shutil.copytree(with_a_run, tmp_path / "data"))


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
    done = vitals("backup", tmp_path / "copy", "--data", data)
    assert 0 == done.exit_code, done.output
    assert "night" in vitals("size", "--data", tmp_path / "copy").output
    again = vitals("backup", tmp_path / "copy", "--data", data)
    assert "already exists" in str(again.exception)
    url = vitals("backup", tmp_path / "other", "--database", "postgresql://ann@host/db")
    assert "pg_dump" in str(url.exception)


def test_forget_asks_first_and_leaves_an_audit(data: Path):
    refused = vitals("delete", "night", "--data", data, asked="n\n")
    assert 1 == refused.exit_code
    done = vitals("delete", RUN[:8], "--data", data, asked="y\n")
    assert 0 == done.exit_code, done.output
    store = open_data_store(data)
    with store.read_transaction() as connection:
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


@pytest.mark.nightly
def test_on_a_disk_with_hardly_any_room_sizes_are_shown_and_a_run_is_removed(tmp_path: Path):
    with small_file_system(tmp_path / "small", "40m") as disk:
        data = disk / "data"
        store = open_data_store(data)
        write_steps(store, ranks(2), range(60))
        store.close()
        (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 20)))
        shown = vitals("size", "--data", data)
        assert 0 == shown.exit_code, shown.output
        assert RUN in shown.output
        assert 0 == vitals("delete", RUN, "--yes", "--data", data).exit_code
        assert RUN not in vitals("size", "--data", data).output


def test_where_there_is_no_room_to_remove_a_run_the_way_out_is_said(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left", code=FULL)

    monkeypatch.setattr("vitals_collector.retention.removal.delete_run", full)
    refused = vitals("delete", RUN, "--yes", "--data", data).exception
    assert isinstance(refused, VitalsError)
    assert "run the command again" in refused.hint


def test_check_reads_everything_and_names_what_is_damaged(data: Path):
    whole = vitals("check", "--data", data)
    assert 0 == whole.exit_code, whole.output
    assert "damaged: 0" in whole.output
    (file,) = (data / "lake" / "data" / "main" / "steps").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    store = open_data_store(data)
    with store.write() as connection:
        connection.exec_driver_sql(
            "UPDATE events SET body = CAST(x'00' || body AS BLOB) WHERE kind = 'RunStarted'"
        )
    store.close()
    damaged = vitals("check", "--data", data, "--format", "json")
    assert 1 == damaged.exit_code, damaged.exception
    told = {each["what"]: each for each in json.loads(damaged.stdout)["damaged"]}
    assert {"records in events", f"steps/{file.name}"} == told.keys()
    assert (660, [RUN]) == (
        told[f"steps/{file.name}"]["num_rows"],
        told[f"steps/{file.name}"]["run_ids"],
    )


def test_keep_pins_a_run_until_it_is_let_go(data: Path):
    assert 0 == vitals("pin", "night", "--data", data).exit_code
    assert "yes" in vitals("size", "--data", data).output
    assert 0 == vitals("pin", "night", "--off", "--data", data).exit_code
    assert "yes" not in vitals("size", "--data", data).output


def test_compact_needs_the_store_for_itself(data: Path):
    with lock_data_dir(data):
        busy = vitals("compact", "--data", data)
    assert "another collector runs" in str(busy.exception)
    assert 0 == vitals("compact", "--data", data).exit_code


def test_a_place_without_a_store_is_said(tmp_path: Path):
    assert "there is no store" in str(vitals("size", "--data", tmp_path).exception)
