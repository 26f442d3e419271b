"""Where a run's files are, on a machine where the usual place cannot be used."""

import os
import socket

import pytest
import torch

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.lifecycle.run_paths import RunPaths, open_inbox, open_journal, open_run
from trainer_hooks.ranks import Ranks
from trainvitals.clock import SystemClock
from trainvitals.io import private

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
    assert open_inbox(place, ALONE, {}, clock) is None
    assert (place.run_dir.path / "command.key").exists()
