"""Where a run's files are, on a machine where the usual place cannot be used."""

import os
import socket

import pytest
import torch

from tests.support.small_disks import empty, fill, small_file_system
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.run_paths import RunPaths, open_inbox, open_journal, open_run
from trainvitals.clock import SystemClock
from trainvitals.identity import new_run_id
from trainvitals.io import private
from trainvitals.io.rundir import RunDir

ALONE = Ranks(0, 1, 0, None)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose /dev/shm and /tmp are folders of the test's own."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(private, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(private, "_TEMPORARY", (tmp_path / "tmp",))
    return tmp_path


def opened(machine, faults: FaultCounter) -> RunPaths:
    return open_run(ALONE, {}, machine / "runs", SystemClock(), faults)


def plant(parent) -> None:
    (parent / f"trainvitals-{os.getuid()}").symlink_to("/")


def test_a_planted_link_is_said_and_the_next_folder_is_taken(machine):
    plant(machine / "shm")
    faults = FaultCounter()
    place = opened(machine, faults)
    base = machine / "tmp" / f"trainvitals-{os.getuid()}"
    assert base / place.run_dir.run_id == place.folder
    assert [f"journal.folder, {base} is used instead"] == list(faults.counts)
    assert (socket.gethostname(), True) == (place.node, place.is_first)


def test_without_any_folder_a_run_has_no_journal_and_no_mailbox_and_begins_all_the_same(machine):
    plant(machine / "shm")
    plant(machine / "tmp")
    faults = FaultCounter()
    place = opened(machine, faults)
    assert (None, {"journal.folder": 2}) == (place.folder, dict(faults.counts))
    clock = SystemClock()
    assert open_journal(place, ALONE, faults, clock, torch.device("cpu")) is None
    assert open_inbox(place, ALONE, {}, clock, faults) is None
    assert (place.run_dir.path / "command.key").exists()


@pytest.fixture
def full_shm(machine):
    """The machine's /dev/shm, with room for a few small files and no more."""
    (machine / "shm").rmdir()
    with small_file_system(machine / "shm", "64k") as folder:
        yield folder


def test_shared_memory_without_room_for_a_journal_is_said_and_the_next_folder_is_taken(
    machine, full_shm
):
    faults = FaultCounter()
    place = opened(machine, faults)
    base = machine / "tmp" / f"trainvitals-{os.getuid()}"
    assert base / place.run_dir.run_id == place.folder
    assert [f"journal.folder, {base} is used instead"] == list(faults.counts)
    assert open_inbox(place, ALONE, {}, SystemClock(), faults) is not None


def test_where_no_folder_has_room_it_is_said_and_training_begins_all_the_same(machine, full_shm):
    plant(machine / "tmp")
    faults = FaultCounter()
    place = opened(machine, faults)
    assert full_shm / f"trainvitals-{os.getuid()}" / place.run_dir.run_id == place.folder
    fill(full_shm)
    assert open_inbox(place, ALONE, {}, SystemClock(), faults) is None
    assert {"journal.folder": 2, "mailbox": 1} == dict(faults.counts)


def test_a_full_disk_for_run_directories_is_said_and_another_one_is_taken(
    machine, full_shm, caplog
):
    with small_file_system(machine / "runs", "64k") as runs:
        fill(runs)
        place = opened(machine, FaultCounter())
        base = machine / "tmp" / f"trainvitals-{os.getuid()}"
        assert base / "vitals_runs" / place.run_dir.run_id == place.run_dir.path
        assert f"the run is stored in {base / 'vitals_runs'} instead" in caplog.text


def test_a_disk_that_fills_up_leaves_no_torn_key_behind(machine):
    with small_file_system(machine / "runs", "64k") as runs:
        run_dir = RunDir.create(runs, new_run_id(1_790_000_000_000_000_000))
        fill(runs)
        (runs / "fill-0").unlink(missing_ok=True)  # a name may be had, a byte may not
        with pytest.raises(OSError, match="No space left"):
            run_dir.command_key(create=True)
        empty(runs)
        assert 32 == len(run_dir.command_key(create=True))
