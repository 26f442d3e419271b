"""Health of a real collector whose files are deleted."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.collector.rows import Writer
from tests.e2e.lab import free_port
from tests.support.collectors import collector, connected
from trainvitals.errors import StorageError
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import open_data_store

MAX_SECONDS = 60.0
"""More than the limit of the collector, because the machine may be busy."""


def health(port: int) -> tuple[int, str]:
    """Return the status of ``/healthz`` and its reason; fail if it takes too long."""
    with httpx.Client(verify=False, trust_env=False, timeout=MAX_SECONDS) as client:
        answer = client.get(f"https://127.0.0.1:{port}/healthz")
    return answer.status_code, answer.json()["status"]


@pytest.mark.servers
def test_a_deleted_lake_is_reported_also_after_rows_created_it_again(tmp_path: Path):
    data, writer, port = tmp_path / "data", Writer(), free_port()
    with collector(data, "--listen", f"127.0.0.1:{port}"), connected(data, "ingest") as client:
        client.ingest(writer.steps(range(5)))
        assert (200, "ok") == health(port)
        shutil.rmtree(data / "lake" / "data")
        status, reason = health(port)
        assert (503, True) == (status, "No such file or directory" in reason), reason
        (data / "lake" / "data" / "main").mkdir(parents=True)
        status, reason = health(port)
        assert (503, True) == (status, "was replaced" in reason), reason
    with pytest.raises(StorageError, match="has no files, but the catalog lists some"):
        open_data_store(data)


def test_a_lake_whose_rows_were_all_kept_opens_again(tmp_path: Path):
    for step in range(2):
        store = open_data_store(tmp_path / "data")
        ingest(store, Writer().steps([step]))
        store.numbers.check_place()
        store.close()
