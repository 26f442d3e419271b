"""Health of a real collector whose files are deleted."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.collector.rows import Writer
from tests.support.collectors import collector, connected
from trainvitals.errors import StorageError
from trainvitals.io.client import collector_on
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import open_data_store

MAX_SECONDS = 10.0
"""Three times the limit of the collector, because the machine may be busy."""


def health(data: Path) -> tuple[int, str]:
    """Return the status of ``/healthz`` and its reason; fail if it takes too long."""
    found = collector_on(data)
    assert found is not None
    with httpx.Client(verify=False, trust_env=False, timeout=MAX_SECONDS) as client:
        answer = client.get(f"{found.url.removeprefix('unproven+')}/healthz")
    return answer.status_code, answer.json()["status"]


@pytest.mark.servers
def test_a_deleted_lake_is_reported_also_after_rows_created_it_again(tmp_path: Path):
    data, writer = tmp_path / "data", Writer()
    with collector(data, "--listen", "127.0.0.1:0"), connected(data, "ingest") as client:
        client.ingest(writer.steps(range(5)))
        assert (200, "ok") == health(data)
        shutil.rmtree(data / "lake" / "data")
        status, reason = health(data)
        assert (503, True) == (status, "No such file or directory" in reason), reason
        (data / "lake" / "data" / "main").mkdir(parents=True)
        status, reason = health(data)
        assert (503, True) == (status, "was replaced" in reason), reason
    with pytest.raises(StorageError, match="has no files, but the catalog lists some"):
        open_data_store(data)


def test_a_lake_whose_rows_were_all_kept_opens_again(tmp_path: Path):
    for step in range(2):
        store = open_data_store(tmp_path / "data")
        ingest(store, Writer().steps([step]))
        store.numbers.check_place()
        store.close()
