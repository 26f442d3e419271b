import os
import sqlite3
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.collector.rows import RUN, Writer, seqs_stored
from tests.support.spools import spool_of
from trainvitals.errors import StorageError, UsageError
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.ingest.ingest import ingest
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.retention.backup import backup
from vitals_collector.storage.schema import streams
from vitals_collector.storage.store import DATABASE_FILE, Store, open_data_store


def marks_and_rows(store: Store) -> dict[str, tuple[int, int]]:
    """Return how far each writer's mark is, and how many rows there are of it."""
    with store.read_transaction() as connection:
        query = select(streams.c.run_id, streams.c.incarnation, streams.c.stream)
        keys = [tuple(row) for row in connection.execute(query)]
    incarnations = store.numbers.scan(RowSpan(RUN, "steps"), ["incarnation"])["incarnation"].values
    rows = Counter(incarnations.tolist())
    return {key[1]: (store.numbers.mark(key), rows[key[1]]) for key in keys}


def names_in(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_what_came_after_the_copy_is_read_from_the_run_directories(tmp_path: Path):
    spool, writer = spool_of(tmp_path / "runs"), Writer()
    store = open_data_store(tmp_path / "data")
    for first in (0, 20, 40):
        raw = writer.steps(range(first, first + 20))
        spool.append(raw)
        ingest(store, raw)
        if first == 0:
            made = backup(tmp_path / "data", tmp_path / "copy")
    spool.sync()
    store.close()
    copy = open_data_store(made.folder)
    assert 40 == FolderIngest(copy, [tmp_path / "runs"]).poll()
    assert list(range(60)) == seqs_stored(copy)
    assert 1 == ingest(copy, writer.steps([60])).num_new, "and it goes on"
    copy.close()
    spool.close()


@pytest.mark.nightly
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
        made = backup(tmp_path / "data", tmp_path / "copy")
    finally:
        stop.set()
        thread.join()
    store.close()
    assert 0o700 == stat.S_IMODE(made.folder.stat().st_mode)
    assert 0o600 == stat.S_IMODE((made.folder / DATABASE_FILE).stat().st_mode)
    sizes = [path.stat().st_size for path in made.folder.rglob("*") if path.is_file()]
    assert 0 <= sum(sizes) - made.num_bytes < 1 << 16, "all but checksums of merged files"
    copy = open_data_store(made.folder)
    found = marks_and_rows(copy)
    assert len(before) == len(found) == 3
    for incarnation, (last_seq, num_rows) in found.items():
        assert num_rows == last_seq + 1, "marks and rows are of one moment"
        assert before[incarnation] <= last_seq <= acknowledged[incarnation]
    again = writers[0].steps(range(1000, 1005))
    assert 5 == ingest(copy, again).num_new, "what came since is sent again, and taken"
    copy.close()


def test_what_is_there_stays(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    target = tmp_path / "copy"
    target.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        backup(tmp_path / "data", target)
    assert "mine" == target.read_text()


def test_what_came_into_being_meanwhile_stays(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    target = tmp_path / "copy"
    with pytest.raises(StorageError, match="failed"):
        backup(tmp_path / "data", target, copied=lambda: target.write_text("mine"))
    assert ["copy", "data"] == names_in(tmp_path)
    assert "mine" == target.read_text()


def test_the_store_itself_is_never_replaced(tmp_path: Path):
    open_data_store(tmp_path / "data").close()
    with pytest.raises(UsageError, match="already exists"):
        backup(tmp_path / "data", tmp_path / "data")


def test_a_damaged_copy_is_an_error_and_leaves_nothing(tmp_path: Path):
    store = open_data_store(tmp_path / "data")
    for step in range(40):
        ingest(store, Writer().steps([step]))
    store.close()

    def damage() -> None:
        (copy,) = tmp_path.glob(".copy.*.partial")
        with (copy / DATABASE_FILE).open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(40_000))

    with pytest.raises(StorageError):
        backup(tmp_path / "data", tmp_path / "copy", copied=damage)
    assert ["data"] == names_in(tmp_path)


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path: Path, monkeypatch):
    open_data_store(tmp_path / "data").close()

    def no_room(*_: object) -> str:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("vitals_collector.retention.backup._copy_database", no_room)
    with pytest.raises(StorageError, match="is full") as caught:
        backup(tmp_path / "data", tmp_path / "copy")
    assert "free space" in caught.value.hint
    assert ["data"] == names_in(tmp_path)


def test_a_place_without_a_store_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        backup(tmp_path, tmp_path / "copy")
