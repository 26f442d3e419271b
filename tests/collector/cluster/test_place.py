"""What names a data folder's lock; and who needs none."""

import shutil
from pathlib import Path

from trainvitals.testing import ManualClock
from vitals_collector.api.serve import lock_data_dir
from vitals_collector.cluster.leases import UPKEEP, Lease
from vitals_collector.storage.store import open_store


def name_of(data: Path) -> str:
    with lock_data_dir(data) as name:
        return name


def test_a_data_folder_has_the_same_name_each_time_and_its_copy_another(tmp_path: Path) -> None:
    first = name_of(tmp_path / "a")
    assert len(first) == 16
    assert name_of(tmp_path / "a") == first
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert name_of(tmp_path / "copy") != first


def test_a_lock_that_was_made_anew_has_another_name(tmp_path: Path) -> None:
    # The former file is kept, or its number might be given to the next one.
    with lock_data_dir(tmp_path / "a") as first:
        (tmp_path / "a" / "collector.lock").unlink()
        assert name_of(tmp_path / "a") != first


def test_on_sqlite_a_lease_is_always_held(tmp_path: Path) -> None:
    store, clock = open_store("sqlite://"), ManualClock()
    lease = Lease(store, UPKEEP, clock=clock, is_shared=False)
    lease.start()
    clock.advance(3_600)
    assert lease.is_held()
    lease.close()
    assert lease.is_held()
    store.close()
