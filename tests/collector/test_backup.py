import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tests.collector.rows import Writer
from tests.collector.test_folder import seqs, spool_of
from trainvitals.errors import StorageError, UsageError
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.ingest.ingest import ingest
from vitals_collector.retention.backup import backup
from vitals_collector.storage.schema import batches, streams
from vitals_collector.storage.store import DATABASE_FILE, Store, open_data_store


def marks_and_rows(store: Store) -> dict[str, tuple[int, int]]:
    """Return how far each writer's mark is, and how many rows there are of it."""
    with store.read() as connection:
        marks = connection.execute(select(streams.c.incarnation, streams.c.last_seq)).all()
        query = select(batches.c.incarnation, func.sum(batches.c.num_rows))
        found = connection.execute(query.group_by(batches.c.incarnation)).all()
    rows = {row[0]: int(row[1]) for row in found}
    return {one: (last_seq, rows.get(one, 0)) for one, last_seq in marks}


def names_in(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def restored(file: Path, where: Path) -> Store:
    """Return the store that a backup is, in a data directory of its own."""
    where.mkdir(mode=0o700)
    file.rename(where / DATABASE_FILE)
    return open_data_store(where)


def test_what_came_after_the_copy_is_read_from_the_run_directories(tmp_path: Path):
    spool, writer = spool_of(tmp_path / "runs"), Writer()
    store = open_data_store(tmp_path / "data")
    for first in (0, 20, 40):
        raw = writer.steps(range(first, first + 20))
        spool.append(raw)
        ingest(store, raw)
        if first == 0:
            made = backup(tmp_path / "data", tmp_path / "copy.db")
    spool.sync()
    store.close()
    copy = restored(made.file, tmp_path / "restored")
    assert 40 == FolderIngest(copy, [tmp_path / "runs"]).poll()
    assert list(range(60)) == seqs(copy)
    assert 1 == ingest(copy, writer.steps([60])).num_new, "and it goes on"
    copy.close()
    spool.close()


def test_a_copy_amid_ingest_holds_one_moment_and_all_that_was_acknowledged(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    writers = [Writer(f"rank:{rank}") for rank in range(3)]
    acknowledged: dict[str, int] = {}
    has_begun, stop = threading.Event(), threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            for writer in writers:
                reply = ingest(store, writer.steps(range(step, step + 5)))
                acknowledged[writer.identity.incarnation] = reply.durable_seq
            step += 5
            if step >= 25:
                has_begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert has_begun.wait(60)
        before = dict(acknowledged)
        made = backup(tmp_path / "data", tmp_path / "copy.db")
    finally:
        stop.set()
        thread.join()
    store.close()
    assert 0o600 == stat.S_IMODE(made.file.stat().st_mode)
    assert made.num_bytes == made.file.stat().st_size
    copy = restored(made.file, tmp_path / "restored")
    found = marks_and_rows(copy)
    assert len(before) == len(found) == 3
    for incarnation, (last_seq, num_rows) in found.items():
        assert num_rows == last_seq + 1, "marks and rows are of one moment"
        assert before[incarnation] <= last_seq <= acknowledged[incarnation]
    again = writers[0].steps(range(1000, 1005))
    assert 5 == ingest(copy, again).num_new, "what came since is sent again, and taken"
    copy.close()


def test_a_file_that_is_there_stays_unless_that_is_meant(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    ingest(store, Writer().steps(range(3)))
    store.close()
    file = tmp_path / "copy.db"
    file.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        backup(tmp_path / "data", file)
    assert "mine" == file.read_text()
    backup(tmp_path / "data", file, force=True)
    assert 3 == next(iter(marks_and_rows(restored(file, tmp_path / "again")).values()))[1]


def test_a_file_that_came_into_being_meanwhile_stays(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    file = tmp_path / "copy.db"
    with pytest.raises(UsageError, match="meanwhile"):
        backup(tmp_path / "data", file, copied=lambda: file.write_text("mine"))
    assert ["copy.db", "data"] == names_in(tmp_path)
    assert "mine" == file.read_text()


def test_the_store_itself_is_never_replaced(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    with pytest.raises(UsageError, match="already exists"):
        backup(tmp_path / "data", tmp_path / "data" / DATABASE_FILE, force=True)


def test_a_damaged_copy_is_an_error_and_leaves_nothing(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    for step in range(40):
        ingest(store, Writer().steps([step]))
    store.close()

    def damage() -> None:
        (copy,) = tmp_path.glob(".copy.db.*.partial")
        with copy.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(40_000))

    with pytest.raises(StorageError):
        backup(tmp_path / "data", tmp_path / "copy.db", copied=damage)
    assert ["data"] == names_in(tmp_path)


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path: Path, monkeypatch):
    open_data_store(tmp_path / "data").close()

    def no_room(*_: object) -> str:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("vitals_collector.retention.backup._copy", no_room)
    with pytest.raises(StorageError, match="is full") as caught:
        backup(tmp_path / "data", tmp_path / "copy.db")
    assert "free space" in caught.value.hint
    assert ["data"] == names_in(tmp_path)


def test_a_place_without_a_store_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        backup(tmp_path, tmp_path / "copy.db")
