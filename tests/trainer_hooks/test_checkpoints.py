"""Checkpoints on disk: what is proven loads, what is damaged never does, and nothing is lost."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from tests.trainer_hooks.training import Training
from trainer_hooks.checkpoints import CheckpointStore, payload
from trainer_hooks.checkpoints import manifest as manifests
from trainer_hooks.ranks import Ranks
from trainer_hooks.snapshots import SnapshotRing
from trainvitals.errors import (
    CheckpointCorruptError,
    CheckpointError,
    NewerVersionError,
    StorageError,
    UsageError,
)

ALONE = Ranks(0, 1, 0, None)
ROOT = Path(__file__).parents[2]


class Run:
    """A training with snapshots and a store; ``save`` trains some steps and writes a checkpoint."""

    def __init__(self, directory, *, optimizer="adamw", run_id="run", keep=3, **options):
        self.training = Training(optimizer, **options)
        self.ring = SnapshotRing(self.training.state, num_slots=3, interval=1, healthy_after=0)
        self.store = CheckpointStore(
            self.training.state, directory, run_id=run_id, ranks=ALONE, keep=keep
        )
        self.store.prepare()
        self.step = 0

    def save(self, *, steps=2, healthy=True):
        self.training.run(steps)
        self.step += steps
        self.ring.take(self.step, 7, {"batch": self.step}, trusted=healthy)
        self.ring.commit(self.step, True)
        name = self.store.save(self.ring.newest_committed())
        assert self.store.wait()
        return name


def ids(store):
    return [ref.id for ref in store.refs()]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "checkpoints")


def another_process(run):
    """Return what a relaunch of the same run has: the folder, and a new training."""
    return Run(run.store._directory, keep=run.store._keep)


# ------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "name", ["sgd-momentum-fused", "adam-foreach", "adamw-fused", "adamw", "adamw-tensor-lr"]
)
def test_a_relaunch_goes_on_bit_for_bit(tmp_path, name):
    old = Run(tmp_path, optimizer=name)
    old.save(steps=3)
    saved, losses, end = old.training.bits(), old.training.run(3), old.training.bits()
    new = Run(tmp_path, optimizer=name, seed=5)
    restored = new.store.load_newest()
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
    new.store.load_newest()
    assert old.training.scaler.get_scale() == new.training.scaler.get_scale()
    assert saved == new.training.bits()


def test_a_checkpoint_is_written_from_the_snapshot_not_from_what_is_live(run):
    run.training.run(2)
    saved = run.training.bits()
    run.ring.take(2, 7, trusted=True)
    run.ring.commit(2, True)
    run.training.run(3)
    run.store.save(run.ring.newest_healthy())
    assert run.store.wait()
    new = another_process(run)
    new.store.load_newest()
    assert saved == new.training.bits()


def test_an_empty_folder_has_nothing_to_load(run):
    assert run.store.load_newest() is None
    assert () == run.store.refs()


def test_what_was_saved_is_told_once(run):
    name = run.save()
    change = run.store.take_changes()[0]
    assert (name, "healthy", "disk") == (change.checkpoint_id, change.state, change.where)
    assert change.num_bytes > 0
    assert [] == run.store.take_changes()
    assert (1, 0) == (run.store.num_saved, run.store.num_failed)


# ---------------------------------------------------------------------------------- damage


def flip(path, at=-100):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def plant_file(path):
    (path.parent / "__9_9.distcp").write_bytes(b"more")


def link_elsewhere(path):
    copy = path.parent.parent / "elsewhere"
    shutil.move(path, copy)
    path.symlink_to(copy)


DAMAGE = {
    "a flipped bit in the data": ("__0_0.distcp", flip),
    "a flipped bit in the metadata": (".metadata", flip),
    "a flipped bit in the manifest": ("manifest.json", flip),
    "truncated data": ("__0_0.distcp", halve),
    "a truncated manifest": ("manifest.json", halve),
    "an empty manifest": ("manifest.json", lambda path: path.write_bytes(b"")),
    "missing data": ("__0_0.distcp", Path.unlink),
    "missing metadata": (".metadata", Path.unlink),
    "a missing manifest": ("manifest.json", Path.unlink),
    "a file more": ("manifest.json", plant_file),
    "data that is a link": ("__0_0.distcp", link_elsewhere),
    "a manifest that is a link": ("manifest.json", link_elsewhere),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_loading_falls_back_past_a_damaged_checkpoint_and_sets_it_aside(run, what):
    sound, damaged = run.save(), run.save()
    folder = run.store._directory
    file, damage = DAMAGE[what]
    damage(folder / damaged / file)
    new = another_process(run)
    assert sound == new.store.load_newest().id
    assert [sound] == ids(new.store)
    assert (folder / f"bad-{damaged}").is_dir()
    change = new.store.take_changes()[0]
    assert (damaged, "bad") == (change.checkpoint_id, change.state)
    assert change.detail


def test_a_folder_that_is_a_link_is_refused(run, tmp_path):
    sound, moved = run.save(), run.save()
    folder = run.store._directory
    (folder / moved).rename(tmp_path / moved)
    (folder / moved).symlink_to(tmp_path / moved)
    assert sound == another_process(run).store.load_newest().id
    assert (tmp_path / moved / "manifest.json").is_file()


def test_when_all_are_damaged_training_does_not_silently_begin_anew(run):
    for name in (run.save(), run.save()):
        flip(run.store._directory / name / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        another_process(run).store.load_newest()


def test_a_damaged_checkpoint_changes_nothing_of_the_live_state(run):
    name = run.save()
    flip(run.store._directory / name / "__0_0.distcp")
    before = run.training.bits()
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        run.store.load(name)
    assert before == run.training.bits()


def test_a_manifest_of_a_newer_vitals_is_neither_loaded_nor_set_aside(run):
    name = run.save()
    path = run.store._directory / name / "manifest.json"
    content = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(content | {"format_version": 99}))
    with pytest.raises(NewerVersionError, match="format 99"):
        another_process(run).store.load(name)
    assert path.is_file()


class Evil:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (Path.touch, (self.witness,))


def reseal(folder):
    """Forge a manifest that fits the folder's present files, as somebody who can write may."""
    path = folder / "manifest.json"
    content = msgspec.json.decode(path.read_bytes(), type=manifests.Manifest)
    path.unlink()
    manifests.seal(folder, content)


@pytest.mark.parametrize("forged_manifest", [False, True])
def test_code_planted_in_the_metadata_does_not_run(run, tmp_path, forged_manifest):
    name = run.save()
    folder, witness = run.store._directory / name, tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(witness)))
    if forged_manifest:
        reseal(folder)
    with pytest.raises(CheckpointCorruptError):
        run.store.load(name)
    assert not witness.exists()


def test_code_planted_among_the_tensors_does_not_run(run, tmp_path):
    name = run.save()
    folder, witness = run.store._directory / name, tmp_path / "ran"
    torch.save(Evil(witness), folder / "__0_0.distcp")
    reseal(folder)
    with pytest.raises((CheckpointCorruptError, CheckpointError)):
        run.store.load(name)
    assert not witness.exists()


def test_metadata_that_points_out_of_the_folder_is_refused(run, tmp_path):
    name = run.save()
    folder = run.store._directory / name
    metadata = payload.read_metadata(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder.parent / "secret").write_bytes(b"key")
    reseal(folder)
    with pytest.raises(CheckpointCorruptError, match="secret"):
        run.store.load(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc", "step-1", "", "step-00000001-7/x"])
def test_an_id_is_a_name_never_a_path(run, name):
    with pytest.raises(UsageError, match="it must be an id"):
        run.store.load(name)


def test_an_id_that_is_not_there_is_refused_with_those_that_are(run):
    name = run.save()
    with pytest.raises(UsageError, match=f"there are: {name}"):
        run.store.verify("step-00009999-7")


def test_another_model_is_told_and_the_checkpoint_stays(run):
    name = run.save()
    new = another_process(run)
    new.training.model[1].register_buffer("more", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"buffer\.1\.more is not in the checkpoint"):
        new.store.load_newest()
    assert [name] == ids(new.store)


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
    assert {healthy: "healthy", last: "verified"} == {r.id: r.state for r in run.store.refs()}
    run.store.mark_healthy(last)
    newest = run.save(steps=1, healthy=False)
    assert {last: "healthy", newest: "verified"} == {r.id: r.state for r in run.store.refs()}


def test_a_proven_checkpoint_is_still_healthy_to_another_process(run):
    name = run.save(healthy=False)
    run.store.mark_healthy(name)
    new = another_process(run)
    assert ["healthy"] == [ref.state for ref in new.store.refs()]
    assert name == new.store.load_newest().id


def test_two_runs_in_one_folder_leave_each_other_alone(tmp_path):
    first, second = Run(tmp_path, run_id="first", keep=1), Run(tmp_path, run_id="second", keep=1)
    mine = first.save(steps=1)
    theirs = second.save(steps=5)
    assert ([mine], [theirs]) == (ids(first.store), ids(second.store))
    assert mine == Run(tmp_path, run_id="first").store.load_newest().id
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
    assert "'loader' is more than plain values" in change.detail
    assert [] == list(tmp_path.iterdir())


def test_a_disk_without_room_is_seen_before_anything_is_written(run, monkeypatch):
    kept = run.save()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    run.save()
    assert "0 MiB free" in run.store.take_changes()[-1].detail
    assert ([kept], 1) == (ids(run.store), run.store.num_failed)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 1 MB, where this machine lets us."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


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
    assert kept == another_process(run).store.load_newest().id


def test_a_folder_that_cannot_be_made_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/below"):
        Run(tmp_path / "file" / "below")


def test_a_save_that_cannot_be_read_back_is_not_kept(run, monkeypatch):
    real = payload.write

    def write_wrong(folder, tensors, group):
        real(folder, {k: t + 1 if k == "model.0.weight" else t for k, t in tensors.items()}, group)

    monkeypatch.setattr(payload, "write", write_wrong)
    run.save()
    assert "model.0.weight reads back otherwise" in run.store.take_changes()[-1].detail
    assert () == run.store.refs()


def test_a_snapshot_that_is_not_finite_is_not_kept(run):
    run.training.state.tensors()["model.0.weight"][0, 0] = float("nan")
    run.save(steps=0)
    assert "model.0.weight is not finite" in run.store.take_changes()[-1].detail
    assert () == run.store.refs()


def test_torchs_own_exception_which_is_no_exception_ends_nothing(run, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException

    def fail(*args):
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
        thread.join(5)
    assert before == set(threading.enumerate())


# ------------------------------------------------------------------------------------- death


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer_hooks.test_checkpoints import Run
from trainer_hooks.checkpoints import manifest, payload, store
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
    payload.write = die
run.save()
"""


@pytest.mark.parametrize("where", ["before-data", "after-data", "in-manifest", "before-rename"])
def test_a_rank_killed_while_it_saves_leaves_the_old_checkpoint(tmp_path, where):
    done = subprocess.run(
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
    assert kept == new.store.load_newest().id


# --------------------------------------------------------------------------------- two ranks


def two_ranks(rank, folder, port):
    """Train two ranks with DDP, save, spoil, load: each gets its own part back."""
    import torch.distributed as dist

    from trainer_hooks.state import TrainingState

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, rank, dist.new_group(backend="gloo"))

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        state = TrainingState(ddp, [optimizer])
        return ddp, optimizer, state, CheckpointStore(state, folder, run_id="run", ranks=ranks)

    def train(ddp, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return {k: t.clone() for k, t in state.tensors().items()}

    ddp, optimizer, state, store = make()
    if rank == 0:
        store.prepare()
    dist.barrier()
    assert state.replicated
    torch.manual_seed(100 + rank)
    train(ddp, optimizer, 2)
    ring = SnapshotRing(state, num_slots=2, interval=2, healthy_after=0)
    ring.take(2, 7, {"rank": rank}, trusted=True)
    ring.commit(2, True)
    store.save(ring.newest_healthy())
    expected = train(ddp, optimizer, 2)
    assert store.wait()
    assert 0 == store.num_failed, store.take_changes()
    dist.barrier()

    ddp, optimizer, state, store = make()
    restored = store.load_newest()
    assert ("step-00000002-7", {"rank": rank}, True) == (restored.id, restored.meta, restored.exact)
    found = train(ddp, optimizer, 2)
    assert all(torch.equal(expected[key], found[key]) for key in expected | found)

    failing = ring.newest_healthy()
    failing.step = 3
    if rank == 1:
        failing.host["extra"]["odd"] = {"path": folder}  # only this rank cannot write its part
    store.save(failing)
    assert store.wait(30)
    assert 1 == store.num_failed
    if rank == 1:
        assert "'odd'" in store.take_changes()[-1].detail
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.dist
def test_two_ranks_save_together_and_each_gets_its_own_part_back(tmp_path, free_port):
    code = (
        "import sys, pathlib; from tests.trainer_hooks.test_checkpoints import two_ranks; "
        "two_ranks(int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", code, str(r), str(tmp_path), str(free_port)] for r in (0, 1)]
    ranks = [
        subprocess.Popen(c, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [0, 0] == [rank.returncode for rank in ranks], said
    names = {path.name for path in (tmp_path / "step-00000002-7").iterdir()}
    assert {"manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp"} == names
    assert not list(tmp_path.glob(".partial*"))


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
