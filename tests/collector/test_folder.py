import logging
import threading
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from tests.collector.rows import OTHER_RUN, RUN, Writer, seqs_stored
from tests.support.spools import spool_of
from trainvitals.errors import StorageError, UsageError
from trainvitals.wire import decode_batch, encode_batch
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.storage.schema import streams
from vitals_collector.storage.store import Store, open_store


def test_a_folder_is_followed_as_it_grows_across_files(store: Store, tmp_path: Path):
    spool, writer = spool_of(tmp_path), Writer()
    reader = FolderIngest(store, [tmp_path])
    assert 0 == reader.poll()
    for part in range(4):
        for i in range(5):
            first = part * 50 + i * 10
            spool.append(writer.steps(range(first, first + 10)))
        spool.sync()
        assert 50 == reader.poll()
    assert 0 == reader.poll()
    assert list(range(200)) == seqs_stored(store)
    spool.close()


def test_a_restart_goes_on_where_it_was(store: Store, tmp_path: Path):
    spool, writer = spool_of(tmp_path), Writer()
    spool.append(writer.steps(range(10)))
    FolderIngest(store, [tmp_path]).poll()
    duplicates = store.counters.num_duplicate
    spool.append(writer.steps(range(10, 20)))
    assert 10 == FolderIngest(store, [tmp_path]).poll()
    assert duplicates == store.counters.num_duplicate, "nothing was read twice"
    spool.close()


def test_while_a_past_is_read_in_it_is_said_and_at_its_end_no_more(store: Store, tmp_path: Path):
    said: list[bool] = []
    store.after_ingest.append(lambda _: said.append(store.is_importing))
    spool, writer = spool_of(tmp_path), Writer()
    reader = FolderIngest(store, [tmp_path])
    for first in (0, 10):
        spool.append(writer.steps(range(first, first + 10)))
        spool.sync()
        reader.poll()
        assert not store.is_importing
    assert [True, False] == said, "what is written while we follow is no past"
    spool.close()


def test_a_run_directory_alone_will_do(tmp_path: Path):
    for run in (RUN, OTHER_RUN):
        spool = spool_of(tmp_path, run=run)
        spool.append(Writer(run=run).steps([0]))
        spool.close()
    store = open_store("sqlite://")
    assert 1 == FolderIngest(store, [tmp_path / RUN]).poll()
    store.close()


def test_a_torn_tail_waits_for_the_rest(tmp_path: Path):
    spool, writer = spool_of(tmp_path), Writer()
    raw = writer.steps(range(10))
    spool.append(raw)
    spool.close()
    (file,) = (tmp_path / RUN).rglob("*.tvs")
    following = writer.steps(range(10, 20))
    whole = file.read_bytes() + following
    file.write_bytes(whole[: len(raw) + 100])
    store = open_store("sqlite://")
    reader = FolderIngest(store, [tmp_path])
    assert 10 == reader.poll()
    file.write_bytes(whole)
    assert 10 == reader.poll()
    store.close()


def test_a_spool_that_was_replaced_is_read_from_its_beginning(tmp_path: Path):
    spool = spool_of(tmp_path)
    spool.append(Writer().steps(range(10)))
    spool.close()
    store = open_store("sqlite://")
    FolderIngest(store, [tmp_path]).poll()
    (file,) = (tmp_path / RUN).rglob("*.tvs")
    file.write_bytes(Writer("rank:1").steps(range(2)))
    assert 2 == FolderIngest(store, [tmp_path]).poll()
    store.close()


def test_a_refused_batch_is_passed_over_and_the_rest_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    spool, writer = spool_of(tmp_path), Writer()
    stranger = Writer()
    stranger.identity = msgspec.structs.replace(
        stranger.identity, source="rank:7", incarnation=writer.identity.incarnation
    )
    for raw in (writer.steps([0]), stranger.scalars(1, {0: 1.0}), writer.steps([1])):
        spool.append(raw)
    spool.close()
    store = open_store("sqlite://")
    assert 2 == FolderIngest(store, [tmp_path]).poll()
    assert [0, 1] == seqs_stored(store)
    assert "a batch is skipped" in caplog.text
    store.close()


def test_a_batch_of_a_newer_version_is_kept_for_the_upgrade(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    writer = Writer()
    first, later = writer.steps([0]), decode_batch(writer.steps([1]))
    newer = encode_batch(msgspec.structs.replace(later.header, version=2), later.rows)
    spool = spool_of(tmp_path)
    spool.append(first)
    spool.close()
    (file,) = (tmp_path / RUN).rglob("*.tvs")
    file.write_bytes(first + newer)
    store = open_store("sqlite://")
    reader = FolderIngest(store, [tmp_path])
    with caplog.at_level(logging.WARNING):
        assert [1, 0, 0] == [reader.poll() for _ in range(3)]
    assert 1 == caplog.text.count("upgrade this program"), "said once"
    file.write_bytes(first + encode_batch(later.header, later.rows))
    assert 1 == reader.poll()
    store.close()


def test_a_position_that_was_not_kept_costs_no_row_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spool = spool_of(tmp_path)
    spool.append(Writer().steps([0]))
    spool.close()
    store = open_store("sqlite://")
    reader = FolderIngest(store, [tmp_path])

    def full(*_: object) -> None:
        raise StorageError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr("vitals_collector.ingest.folder.upsert", full)
        with pytest.raises(StorageError):
            reader.poll()
    assert [] == num_noted(store)
    assert 1 == reader.poll()
    assert ([0], [1]) == (seqs_stored(store), num_noted(store))
    store.close()


def num_noted(store: Store) -> list[int]:
    """Return how many rows each stream is said to have."""
    with store.read_transaction() as connection:
        return list(connection.execute(select(streams.c.num_rows)).scalars())


def test_a_run_that_cannot_be_read_is_counted_and_keeps_no_other_back(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    for run in (RUN, OTHER_RUN):
        spool = spool_of(tmp_path, run=run)
        spool.append(Writer(run=run).steps([0]))
        spool.close()
    stop = threading.Event()
    store.after_ingest.append(lambda _: stop.set())
    reader = FolderIngest(store, [tmp_path])
    read = reader._store_spool

    def read_or_fail(spool: Path, stop: threading.Event) -> int:
        if RUN in str(spool):
            raise ValueError("a fault of ours")
        return read(spool, stop)

    monkeypatch.setattr(reader, "_store_spool", read_or_fail)
    reader.follow(stop)
    assert [0] == seqs_stored(store, run=OTHER_RUN)
    assert {"folder": 1} == store.counters.failures
    assert "a fault of ours" in caplog.text


def test_reading_changes_nothing_in_the_folder(tmp_path: Path):
    spool = spool_of(tmp_path)
    spool.append(Writer().steps([0]))
    spool.close()

    def snapshot() -> dict[str, tuple[int, int]]:
        found = tmp_path.rglob("*")
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in found}

    before = snapshot()
    store = open_store("sqlite://")
    FolderIngest(store, [tmp_path]).poll()
    store.close()
    assert before == snapshot()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path):
    store = open_store("sqlite://")
    with pytest.raises(UsageError, match="there is no folder"):
        FolderIngest(store, [tmp_path / "none"])
    store.close()
