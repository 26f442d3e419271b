import logging
import sqlite3
import stat
from pathlib import Path

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from tests.collector.conftest import grow
from tests.collector.rows import Writer
from trainvitals.errors import InsecurePathError, StorageError, UsageError
from vitals_collector.ingest.ingest import ingest
from vitals_collector.ingest.staging import WriteAheadBuffer
from vitals_collector.storage.schema import batches, metadata, streams
from vitals_collector.storage.store import (
    DATABASE_FILE,
    FULL,
    LOCKED,
    Store,
    open_data_store,
    open_store,
)


def num_rows(store: Store) -> int:
    with store.read() as connection:
        query = sqlalchemy.select(
            sqlalchemy.func.coalesce(sqlalchemy.func.sum(batches.c.num_rows), 0)
        )
        return int(connection.execute(query).scalar_one())


def test_the_migrations_make_exactly_the_tables_of_the_schema(store: Store):
    with store.write() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, metadata)


def test_the_database_and_all_its_files_are_private(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps([0]))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
    assert 0o700 == stat.S_IMODE((tmp_path / "data").stat().st_mode)
    assert {0o600} == set(modes.values()), modes
    store.close()


def test_an_old_directory_of_ours_is_made_private_again(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    (tmp_path / "data").chmod(0o755)
    open_data_store(tmp_path / "data").close()
    assert 0o700 == stat.S_IMODE((tmp_path / "data").stat().st_mode)


def test_a_directory_with_other_things_is_not_taken_over(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(InsecurePathError, match="holds other files"):
        open_data_store(tmp_path)
    assert 0o755 == stat.S_IMODE(tmp_path.stat().st_mode)


def test_a_commit_of_sqlite_is_synced_to_the_disk(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    with store.write() as connection:
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("synchronous", "journal_mode", "foreign_keys")
        ]
    store.close()
    assert [2, "wal", 1] == pragmas


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps(range(5)))
    store.close()
    store = open_data_store(tmp_path / "data")
    assert 5 == num_rows(store)
    store.close()


def test_a_database_of_a_newer_version_is_left_alone(store: Store):
    with store.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StorageError, match="has version 9999; this Vitals knows") as caught:
        open_store(url)
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("version", ["0001", "0010"])
def test_a_database_of_before_the_baseline_is_left_alone(store: Store, version: str):
    with store.write() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StorageError, match=f"has version {version}, of before v1; ") as caught:
        open_store(url)
    assert "--folder" in caught.value.hint
    with store.read() as connection:
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
    assert version == found


def test_a_database_that_someone_else_holds_says_so(tmp_path: Path):
    store = open_data_store(tmp_path / "data", busy_seconds=0.05)
    writer = Writer()
    holder = sqlite3.connect(tmp_path / "data" / DATABASE_FILE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="locked by another process") as caught:
        ingest(store, writer.steps([0]))
    assert LOCKED == caught.value.code
    with pytest.raises(StorageError, match="locked"):
        open_data_store(tmp_path / "data", busy_seconds=0.05)
    holder.execute("ROLLBACK")
    holder.close()
    assert 0 == num_rows(store)
    store.close()


def test_a_file_that_is_no_database_says_so(tmp_path: Path):
    (tmp_path / "x.db").write_bytes(b"this is a text file, not a database, really" * 50)
    with pytest.raises(StorageError, match="file is not a database") as caught:
        open_store(f"sqlite:///{tmp_path}/x.db")
    assert "vitals store backup" in caught.value.hint


def test_a_damaged_database_names_the_backup_and_a_new_folder(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps(range(5)))
    store.close()
    with (tmp_path / "data" / DATABASE_FILE).open("r+b") as file:
        file.truncate(3 * 4096)
    with pytest.raises(StorageError, match="is damaged: database disk image is malf") as caught:
        num_rows(open_data_store(tmp_path / "data"))
    assert "vitals store backup" in caught.value.hint
    assert "--data" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "cannot be used"),
        ("mysql://u:secret@h/d", "supported are sqlite and postgresql"),
        ("oracle+no_such_driver://u:secret@h/d", "cannot be used|supported are"),
    ],
)
def test_a_wrong_database_url_is_explained_without_its_password(url: str, said: str):
    with pytest.raises(UsageError, match=said) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_a_storage_error():
    with pytest.raises(StorageError, match="cannot be used"):
        open_store("postgresql://nobody@127.0.0.1:9/nothing")


def test_on_a_full_disk_nothing_is_acknowledged_and_nothing_acknowledged_is_lost(small_disk: Path):
    store = open_data_store(small_disk / "data")
    writer = Writer()
    acknowledged = 0
    with pytest.raises(StorageError, match="no disk space left") as caught:
        for i in range(200):
            raw = writer.steps(range(i * 50, i * 50 + 50), loss=1.0)
            acknowledged += ingest(store, raw).num_new
    assert FULL == caught.value.code
    assert 0 < acknowledged == num_rows(store)
    store.close()
    store = open_data_store(small_disk / "data")
    assert acknowledged == num_rows(store)
    store.close()


def test_what_a_full_disk_holds_is_read_and_what_waits_is_placed_by_the_next_process(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    store = open_data_store(small_disk / "data")
    writer = Writer()
    num_sent = fill(WriteAheadBuffer(store), writer)
    num_placed = [num_rows(store), num_rows(store)][-1]
    assert 0 < num_placed < num_sent
    assert {"arrivals": 1} == store.counters.failures
    assert 1 == caplog.text.count("newest_rows_not_shown")
    assert store.no_room is not None
    store.close()  # as a process that is killed does: what waits is left

    store = open_data_store(small_disk / "data")
    after = WriteAheadBuffer(store)
    assert num_placed == num_rows(store)
    raw = writer.steps(range(50), loss=1.0)
    with pytest.raises(StorageError, match="no disk space left"):
        after.ingest_bodies([[raw]], 5)
    grow(small_disk)
    assert num_sent == num_rows(store)
    assert store.no_room is None
    after.ingest_bodies([[raw]], 5)
    assert num_sent + 50 == num_rows(store)
    with store.read() as connection:
        marks = connection.execute(sqlalchemy.select(streams.c.num_rows, streams.c.num_lost)).all()
    assert [(num_sent + 50, 15)] == marks, "the 15 that were refused and never came again"
    store.close()


def fill(arrivals: WriteAheadBuffer, writer: Writer) -> int:
    """Send small batches until the disk is full; return how many rows were acknowledged."""
    num_sent = 0
    try:
        while True:
            arrivals.ingest_bodies([[writer.steps(range(num_sent, num_sent + 15), loss=1.0)]], 5)
            num_sent += 15
    except StorageError:
        return num_sent


def test_a_read_sees_one_moment(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]))
    count = sqlalchemy.select(sqlalchemy.func.count()).select_from(batches)
    with store.read() as connection:
        before = connection.execute(count).scalar_one()
        ingest(store, writer.steps([1]))
        assert before == connection.execute(count).scalar_one()
    assert 2 == num_rows(store)
