"""Checkpoints on disk: what is proven loads, what is damaged never does, and nothing is lost."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.forked import TRAINING
from tests.support.small_disks import small_file_system
from tests.trainer_hooks.ranks_saving import main as two_ranks
from tests.trainer_hooks.saving import ROOT, Run, another_process, ids, load_newest
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.recovery.checkpoints import payload
from trainvitals.errors import (
    CheckpointError,
    StorageError,
)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "checkpoints")


# ------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "name", ["sgd-momentum-fused", "adam-foreach", "adamw-fused", "adamw", "adamw-tensor-lr"]
)
def test_a_relaunch_goes_on_bit_for_bit(tmp_path, name):
    old = Run(tmp_path, optimizer=name)
    old.save(steps=3)
    saved, losses, end = old.training.bits(), old.training.run(3), old.training.bits()
    new = Run(tmp_path, optimizer=name, seed=5)
    restored = load_newest(new.store)
    assert ("step-00000003-7", 3, 7, {"batch": 3}, True) == tuple(restored)
    assert saved == new.training.bits()
    assert losses == new.training.run(3)
    assert end == new.training.bits()


def test_a_relaunch_takes_over_scaler_average_and_registered_state(tmp_path):
    def make(seed):
        return Run(
            tmp_path,
            optimizer="sgd-momentum",
            seed=seed,
            scaler=torch.amp.GradScaler("cpu", growth_interval=2),
            extra=lambda model: {"ema": torch.optim.swa_utils.AveragedModel(model)},
        )

    old, new = make(0), make(1)
    old.save(steps=3)
    saved = old.training.bits()
    load_newest(new.store)
    assert old.training.scaler.get_scale() == new.training.scaler.get_scale()
    assert saved == new.training.bits()


def test_a_checkpoint_is_written_from_the_snapshot_not_from_what_is_live(run):
    run.training.run(2)
    saved = run.training.bits()
    run.ring.capture(2, 7, trusted=True)
    run.ring.commit(2, True)
    run.training.run(3)
    run.store.save(run.ring.newest_healthy())
    assert run.store.wait()
    new = another_process(run)
    load_newest(new.store)
    assert saved == new.training.bits()


def test_an_empty_folder_has_nothing_to_load(run):
    assert load_newest(run.store) is None
    assert () == run.store.folder.refs()


def test_what_was_saved_is_told_once(run):
    name = run.save()
    change = run.store.take_changes()[0]
    assert (name, "healthy", "disk") == (change.checkpoint_id, change.state, change.where)
    assert change.num_bytes > 0
    assert [] == run.store.take_changes()
    assert (1, 0) == (run.store.num_saved, run.store.num_failed)


# -------------------------------------------------------------------------- keeping, rotating


def test_rotation_keeps_the_newest(tmp_path):
    run = Run(tmp_path, keep=2)
    names = [run.save(steps=1) for _ in range(4)]
    assert names[2:] == ids(run.store)
    retired = [c.checkpoint_id for c in run.store.take_changes() if c.state == "retired"]
    assert names[:2] == retired


def test_rotation_never_removes_the_newest_healthy_one(tmp_path):
    run = Run(tmp_path, keep=1)
    healthy = run.save(steps=1)
    for _ in range(3):
        last = run.save(steps=1, healthy=False)
    assert {healthy: "healthy", last: "verified"} == {
        r.id: r.state for r in run.store.folder.refs()
    }
    run.store.mark_healthy(last)
    assert run.store.wait()
    newest = run.save(steps=1, healthy=False)
    assert {last: "healthy", newest: "verified"} == {r.id: r.state for r in run.store.folder.refs()}


def test_a_proven_checkpoint_is_still_healthy_to_another_process(run):
    name = run.save(healthy=False)
    run.store.mark_healthy(name)
    assert run.store.wait()
    new = another_process(run)
    assert ["healthy"] == [ref.state for ref in new.store.folder.refs()]
    assert name == load_newest(new.store).id


def test_two_runs_in_one_folder_leave_each_other_alone(tmp_path):
    first, second = Run(tmp_path, run_id="first", keep=1), Run(tmp_path, run_id="second", keep=1)
    mine = first.save(steps=1)
    theirs = second.save(steps=5)
    assert ([mine], [theirs]) == (ids(first.store), ids(second.store))
    assert mine == load_newest(Run(tmp_path, run_id="first").store).id
    with pytest.raises(CheckpointError, match="belongs to run second"):
        first.store.load(theirs)


def test_saving_the_same_snapshot_twice_is_harmless(run):
    name = run.save()
    run.store.save(run.ring.newest_healthy())
    assert run.store.wait()
    assert ([name], 0) == (ids(run.store), run.store.num_failed)


# -------------------------------------------------------------------------- errors of saving


def test_state_that_is_no_plain_value_is_told_by_name_and_training_goes_on(tmp_path):
    class Odd:
        def state_dict(self):
            return {"path": ROOT}

        def load_state_dict(self, state_dict):
            pass

    run = Run(tmp_path, extra=lambda model: {"loader": Odd()})
    run.save()
    change = run.store.take_changes()[0]
    assert "bad" == change.state
    assert "'loader' contains objects other than plain values" in change.detail
    assert [] == list(tmp_path.glob("*step*"))


def test_a_disk_without_room_is_seen_before_anything_is_written(run, monkeypatch):
    kept = run.save()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    run.save()
    assert "0 MiB free" in run.store.take_changes()[-1].detail
    assert ([kept], 1) == (ids(run.store), run.store.num_failed)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    with small_file_system(tmp_path / "small", "1m") as folder:
        yield folder


def test_a_disk_that_fills_up_loses_the_new_checkpoint_and_keeps_the_old(small_disk, monkeypatch):
    roomy = shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: roomy)
    run = Run(small_disk)
    kept = run.save()
    (small_disk / "filler").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 20_000))
    run.save()
    assert "No space left" in run.store.take_changes()[-1].detail
    assert ([kept], 1) == (ids(run.store), run.store.num_failed)
    assert not list(small_disk.glob(".partial*"))
    assert kept == load_newest(another_process(run).store).id


def test_a_folder_that_cannot_be_made_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/below"):
        Run(tmp_path / "file" / "below")


def test_a_save_that_cannot_be_read_back_is_not_kept(run, monkeypatch):
    real = payload.write

    def write_wrong(folder, boxes, group, **how):
        wrong = [b._replace(tensor=b.tensor + (b.name == "model.0.weight")) for b in boxes]
        written = real(folder, wrong, group, **how)
        return written._replace(boxes=boxes)

    monkeypatch.setattr(payload, "write", write_wrong)
    run.save()
    assert "model.0.weight reads back differently" in run.store.take_changes()[-1].detail
    assert () == run.store.folder.refs()


def test_a_snapshot_that_is_not_finite_is_not_kept(run):
    run.training.state.tensors()["model.0.weight"][0, 0] = float("nan")
    run.save(steps=0)
    assert "model.0.weight is not finite" in run.store.take_changes()[-1].detail
    assert () == run.store.folder.refs()


def test_torchs_own_exception_which_is_no_exception_ends_nothing(run, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException

    def fail(*args, **how):
        raise CheckpointException("no", {0: (OSError("lost"), None)})

    monkeypatch.setattr(payload, "write", fail)
    run.save()
    monkeypatch.undo()
    name = run.save()
    assert ([name], 1) == (ids(run.store), run.store.num_failed)


def test_no_thread_is_left_once_all_is_saved(run):
    before = set(threading.enumerate())
    run.save()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert before == set(threading.enumerate())


# ------------------------------------------------------------------------------------- death


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer_hooks.saving import Run
from trainer_hooks.recovery.checkpoints import manifest, payload, store
run = Run(Path(sys.argv[1]))
print(run.save(), flush=True)
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
where = sys.argv[2]
if where == "after-data":
    store.CheckpointStore._read_back = die
elif where == "in-manifest":
    os.fsync = lambda fd: die() if os.readlink(f"/proc/self/fd/{fd}").endswith("json") else None
elif where == "before-rename":
    Path.rename = die
elif where == "before-data":
    payload.FileSystemWriter.write_data = die
run.save()
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("before-data", marks=pytest.mark.slow),
        pytest.param("after-data", marks=pytest.mark.slow),
        "in-manifest",
        pytest.param("before-rename", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_it_saves_leaves_the_old_checkpoint(tmp_path, where):
    done = TRAINING.run(
        [sys.executable, "-c", KILLED, str(tmp_path), where],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert -signal.SIGKILL == done.returncode, done.stderr
    kept = done.stdout.strip()
    assert list(tmp_path.glob(".partial*")), "it was killed in the middle"
    new = Run(tmp_path)
    assert not list(tmp_path.glob(".partial*"))
    assert kept == load_newest(new.store).id


# --------------------------------------------------------------------------------- two ranks


@pytest.mark.dist
def test_two_ranks_save_together_and_each_gets_its_own_part_back(tmp_path):
    folder = Path(spawned(two_ranks, tmp_path)[0]["folder"])
    names = {path.name for path in (folder / "step-00000002-7").iterdir()}
    assert {"manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp"} == names
    assert not list(folder.glob(".partial*"))
