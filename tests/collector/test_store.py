import contextlib
import random
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tests.collector.conftest import grow
from tests.collector.rows import Writer, num_stored
from trainvitals.errors import InsecurePathError, StorageError, UsageError
from trainvitals.rows import Value
from vitals_collector.ingest.ingest import ingest, store_bodies
from vitals_collector.numbers.interface import FULL
from vitals_collector.storage.migrate import NEWEST, migration_config
from vitals_collector.storage.schema import metadata, streams
from vitals_collector.storage.store import (
    DATABASE_FILE,
    LAKE_FOLDER,
    LOCKED,
    Store,
    open_data_store,
    open_store,
)
from vitals_collector.storage.tokens import Principal


def test_a_new_database_has_the_tables_and_the_version_of_the_schema(store: Store):
    with store.write() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, metadata)
        scripts = ScriptDirectory.from_config(migration_config())
        assert context.get_current_revision() == scripts.get_current_head()


def test_the_migrations_make_exactly_the_tables_of_the_schema(store: Store):
    config = migration_config()
    with store.write() as connection:
        metadata.drop_all(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, metadata)
        assert context.get_current_revision() == NEWEST


def test_alembic_is_not_imported_without_an_upgrade(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path\n"
        "from vitals_collector.storage.store import open_data_store\n"
        "for _ in range(2): open_data_store(Path(sys.argv[1])).close()\n"
        "print('alembic' in sys.modules, 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "data")], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_a_database_of_an_earlier_version_is_upgraded_and_keeps_what_it_has(
    store: Store, version: str
):
    writer = Writer()
    ingest(store, writer.steps(range(3)))
    with store.write() as connection:
        connection.exec_driver_sql("ALTER TABLE sources DROP writer_key_hash")
        if version == "v3":
            for of in ("runs DROP owner", "sources DROP token_id", "streams DROP last_unix_ns"):
                connection.exec_driver_sql(f"ALTER TABLE {of}")
            connection.exec_driver_sql("DROP TABLE tokens")
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    url = store.engine.url.render_as_string(hide_password=False)
    opened = open_store(url, store.numbers)
    with opened.write() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, metadata)
    # Writers of before have no key, and need none.
    sender = Principal(writer_key_hash="a key")
    (answers,) = store_bodies(opened, [[writer.steps([3])]], 1, principals=[sender])
    assert [""] == [stored.reply.code for stored in answers]
    assert 4 == num_stored(opened)
    opened.engine.dispose()


def test_the_database_and_all_its_files_are_private(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps([0]))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
    assert 0o700 == stat.S_IMODE((tmp_path / "data").stat().st_mode)
    assert 0o700 == modes.pop(LAKE_FOLDER)
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
    assert 5 == num_stored(store)
    store.close()


def test_a_database_of_a_newer_version_is_left_alone(store: Store):
    with store.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StorageError, match="has version 9999; this program reads") as caught:
        open_store(url)
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("version", ["0001", "0010", "v1"])
def test_a_database_of_before_the_baseline_is_left_alone(store: Store, version: str):
    with store.write() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StorageError, match=f"has version {version}, older than v3; ") as caught:
        open_store(url)
    assert "--folder" in caught.value.hint
    with store.read_transaction() as connection:
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
    assert 0 == num_stored(store)
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
        num_stored(open_data_store(tmp_path / "data"))
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
    num_sent, refused = fill(store, writer)
    assert store.no_room is not None
    # Rows of the refused batch may have had room where their mark had none: none is acknowledged.
    num_kept = num_stored(store)
    assert 0 < num_sent == num_acknowledged(store) and num_kept in (num_sent, num_sent + 500)
    store.close()
    store = open_data_store(small_disk / "data")
    assert (num_sent, num_kept) == (num_acknowledged(store), num_stored(store))
    grow(small_disk)
    assert 500 == ingest(store, refused).num_new
    assert store.no_room is None
    assert num_sent + 500 == num_stored(store)
    with store.read_transaction() as connection:
        noted = connection.execute(sqlalchemy.select(streams.c.num_rows, streams.c.num_lost)).all()
    assert [(num_sent + 500, 0)] == noted
    store.close()


def num_acknowledged(store: Store) -> int:
    with store.read_transaction() as connection:
        return int(connection.execute(sqlalchemy.select(streams.c.num_rows)).scalar_one())


def fill(store: Store, writer: Writer) -> tuple[int, bytes]:
    """Send until the disk is full; return how many rows were acknowledged, and what was not."""
    num_sent = 0
    while True:
        loss: list[Value] = [random.random() for _ in range(500)]
        raw = writer.steps(range(num_sent, num_sent + 500), loss=loss, grad_norm=loss)
        try:
            num_sent += ingest(store, raw).num_new
        except StorageError as error:
            assert FULL == error.code
            return num_sent, raw


def test_a_read_sees_one_moment(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]))
    count = sqlalchemy.select(streams.c.num_rows)
    with store.read_transaction() as connection:
        before = connection.execute(count).scalar_one()
        ingest(store, writer.steps([1]))
        assert before == connection.execute(count).scalar_one()
    assert 2 == num_stored(store)


@pytest.mark.parametrize("lake_store", ["postgresql"], indirect=True)
@pytest.mark.servers
def test_collectors_on_one_postgresql_find_the_one_folder_of_rows(
    lake_store: Store, tmp_path: Path
):
    url = lake_store.engine.url.render_as_string(hide_password=False)
    ingest(lake_store, Writer().steps(range(3)))
    with contextlib.closing(open_data_store(tmp_path / "second", url)) as second:
        assert 3 == num_stored(second)
    with pytest.raises(StorageError, match="is not the lake of this database") as caught:
        open_data_store(tmp_path / "third", url, lake=str(tmp_path / "elsewhere"))
    assert "--lake" in caught.value.hint
    (tmp_path / "store").rename(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="which is not on this machine") as caught:
        open_data_store(tmp_path / "fourth", url)
    assert "--lake" in caught.value.hint
