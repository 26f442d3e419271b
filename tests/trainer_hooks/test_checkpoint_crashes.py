"""A process killed, or a disk full or broken, at any write: the newest healthy one is found."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import TRAINING
from tests.support.small_disks import small_file_system
from tests.trainer_hooks.faulty_disk import FaultyDisk, Killed, healthy, relaunch, save, states
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.manifest import checkpoint_id
from trainvitals.errors import VitalsError

ROOT = Path(__file__).parents[2]
ROOMY = shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
OLD, DAMAGED, NEW = (checkpoint_id(step, 7) for step in (10, 20, 30))


def before(path):
    """Make a folder with a healthy checkpoint that is the best, and a damaged newer one."""
    folder = relaunch(path)
    save(folder, 10, state="healthy")
    folder.mark_best(OLD, "validation_loss", 2.0)
    save(folder, 20)
    (path / DAMAGED / "__0_0.distcp").write_bytes(b"?" * 64)


def life(path):
    """Do everything that a folder does: save, mark, set aside, rotate."""
    folder = CheckpointFolder(path, run_id="run", keep=1)
    folder.prepare()
    try:
        save(folder, 30)
    except (OSError, VitalsError):
        folder.note(NEW, "bad", detail="not saved")
        folder.discard(NEW)
        return
    folder.mark_healthy(NEW)
    folder.quarantine_damaged(DAMAGED, "does not match")
    folder.mark_best(NEW, "validation_loss", 1.0)
    folder.rotate()
    folder.mark_best(NEW, "validation_loss", 0.5)


def lived_through(path, at, fault):
    """Live under the fault; return the operations that were begun."""
    disk = FaultyDisk(at, fault)
    with disk.under():
        try:
            life(path)
        except (Killed, OSError, VitalsError):
            assert disk.struck
    return disk.done


def operations(tmp_path_factory, fault):
    path = tmp_path_factory.mktemp("count")
    before(path)
    return lived_through(path, -1, fault)


@pytest.mark.parametrize("fault", ["kill", "full", "once"])
def test_whatever_goes_wrong_at_any_operation_the_newest_healthy_one_is_found(
    tmp_path_factory, fault, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power fails here, and it is slow
    done = operations(tmp_path_factory, fault)
    assert len(done) >= 20, done
    template = tmp_path_factory.mktemp("before")
    before(template)
    seen = set()
    for at in range(0, len(done), {"kill": 1, "full": 3, "once": 5}[fault]):
        path = tmp_path_factory.mktemp("crash")
        shutil.copytree(template, path, dirs_exist_ok=True)
        lived_through(path, at, fault)
        where = f"{fault} at {at}: {done[at]}"
        abandon(path)
        folder = relaunch(path, keep=1)
        found = healthy(folder)
        assert found, where
        assert found[-1] in (OLD, NEW), where
        best = folder.best()
        assert best is not None, where
        assert (best[0], best[1].value) in ((OLD, 2.0), (NEW, 1.0), (NEW, 0.5)), where
        assert best[0] in states(folder), where
        assert [] == [p.name for p in path.iterdir() if p.name.startswith(".")], where
        seen.add(found[-1])
        assert_the_index_is_true(folder, where)
        last = save(folder, 40, state="healthy")
        folder.rotate()
        assert last == healthy(folder)[-1], where
    assert {OLD, NEW} == seen, "before the new one is marked, and after"


def abandon(path):
    """Let the hour pass after which nobody is taken to write a temporary file any more."""
    for temporary in path.glob(".tmp-*"):
        os.utime(temporary, (0, 0))


def assert_the_index_is_true(folder, where):
    written = json.loads((folder.path / "index.json").read_text())["entries"]
    gone = ("retired", "bad")
    there = {e["id"]: e["state"] for e in written if e["state"] not in gone}
    assert states(folder) == there, where
    aside = {p.name.removeprefix("bad-") for p in folder.path.glob("bad-*")}
    assert aside <= {e["id"] for e in written if e["state"] == "bad"}, where


def test_a_folder_without_files_or_without_manifest_is_no_checkpoint(tmp_path):
    before(tmp_path)
    (tmp_path / ".partial-run-step-00000040-7").mkdir()
    (tmp_path / ".partial-run-step-00000040-7" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-00000050-7").mkdir()
    shutil.copytree(tmp_path / OLD, tmp_path / "step-00000060-7")
    for file in (tmp_path / "step-00000060-7").glob("*.distcp"):
        file.unlink()
    folder = relaunch(tmp_path)
    assert [OLD] == healthy(folder)
    assert not list(tmp_path.glob(".partial*"))
    with pytest.raises(VitalsError):
        folder.check("step-00000060-7")


def test_what_another_run_is_just_writing_is_left_to_it(tmp_path):
    before(tmp_path)
    (tmp_path / ".tmp-file").write_bytes(b"half")
    (tmp_path / ".tmp-folder").mkdir()
    relaunch(tmp_path)
    assert [".tmp-file", ".tmp-folder"] == sorted(p.name for p in tmp_path.glob(".tmp-*"))
    abandon(tmp_path)
    relaunch(tmp_path)
    assert [] == list(tmp_path.glob(".tmp-*"))


# --------------------------------------------------------------------------------- a real disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB."""
    with small_file_system(tmp_path / "small", "256k") as folder:
        yield folder


def test_a_real_disk_that_fills_up_at_any_size_keeps_the_old_one(small_disk, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: ROOMY)
    folder = relaunch(small_disk, keep=1)
    save(folder, 1, state="healthy")
    outcomes = []
    for pages in range(12):  # from no room at all to room enough
        free = os.statvfs(small_disk).f_bavail
        (small_disk / "filler").write_bytes(b"x" * (free - pages) * 4096)
        name = checkpoint_id(100 + pages, 7)
        try:
            save(folder, 100 + pages, state="healthy")
            outcomes.append("saved")
        except OSError:
            folder.discard(name)
            outcomes.append("full")
            assert [checkpoint_id(1, 7)] == healthy(relaunch(small_disk)), pages
        (small_disk / "filler").unlink()
        if outcomes[-1] == "saved":
            folder.rotate()
            break
    assert "full" == outcomes[0]
    assert "saved" == outcomes[-1]
    assert [name] == healthy(relaunch(small_disk))


def test_a_disk_that_became_read_only_is_told_and_what_is_there_can_be_checked(
    small_disk, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: ROOMY)
    name = save(relaunch(small_disk), 1, state="healthy")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    folder = CheckpointFolder(small_disk, run_id="run")
    with pytest.raises(VitalsError, match="Read-only") as caught:
        folder.prepare()
    assert "checkpoints=PATH" in caught.value.hint
    assert [name] == healthy(folder)
    folder.quarantine_damaged(name, "damaged")  # told, and training goes on to an older one
    assert ["bad"] == [change.state for change in folder.take_changes()]
    with pytest.raises(VitalsError, match="cannot be renamed"):
        folder.quarantine(name, "by hand")


# ------------------------------------------------------------------------------- a real death


SAVING = """
import sys
from tests.trainer_hooks.faulty_disk import relaunch, save
folder = relaunch(sys.argv[1], keep=2)
step = max((ref.step for ref in folder.refs()), default=0)
print("ready", flush=True)
while True:
    step += 1
    name = save(folder, step, size=200_000)
    if step % 3 == 0:
        folder.mark_healthy(name)
        folder.mark_best(name, "validation_loss", float(step))
    print("saved", flush=True)
    folder.rotate()
    print("rotated", flush=True)
    if step % 7 == 0:
        folder.set_aside(save(folder, step, attempt=8), "a try")
"""


@pytest.mark.parametrize("seed", [1])
def test_a_saving_process_killed_at_random_moments_loses_no_healthy_one(tmp_path, seed):
    moments = random.Random(seed)
    path = tmp_path / "checkpoints"
    newest = save(relaunch(path), 1, state="healthy")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(4):
        with TRAINING.Popen(
            [sys.executable, "-c", SAVING, str(path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert "ready\n" == process.stdout.readline()
            for _ in range(moments.randrange(60)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        folder = relaunch(path, keep=2)
        found = healthy(folder)
        assert newest <= found[-1]
        assert folder.refs()[-1].id == folder.check(folder.refs()[-1].id).id
        assert 2 <= len(folder.refs()) <= 5 or newest == found[-1]
        newest = found[-1]
    assert newest > checkpoint_id(1, 7), "it saved between the deaths"
