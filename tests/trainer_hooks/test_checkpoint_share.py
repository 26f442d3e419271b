"""Each rank hashes what it wrote, and verifies its share: the cost per rank stays flat."""

import io
import os
import signal
import sys
from contextlib import contextmanager
from unittest import mock

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.support.examples import one_in
from tests.support.forked import TRAINING
from tests.trainer_hooks.ranks_sharing_files import counted_reads, four, hashed, two
from tests.trainer_hooks.saving import ROOT, Run, another_process, ids, load_newest
from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.training import Training
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints import emergency_save
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.manifest import Manifest
from trainer_hooks.recovery.checkpoints.planner import TensorBox
from trainer_hooks.recovery.checkpoints.store import CheckpointStore

MIB = 1 << 20
NAME = "step-00000001-7"


def written(path, world_size, num_bytes):
    """Let so many virtual ranks write their parts, one after another; return bytes hashed by each.

    No collective: so any number of them fits into one process.
    """
    content = Manifest(
        id=NAME, run_id="run", step=1, attempt=7, state="verified", world_size=world_size,
        torch_version="2", num_bytes=0, files={},
    )  # fmt: skip
    numbers = num_bytes // 4 // world_size
    by_rank = []
    for rank in range(world_size):
        box = TensorBox("model.w", (world_size * numbers,), (rank * numbers,), torch.ones(numbers))
        with counted_reads() as counts:
            emergency_save.write_part(path, content, rank, [box])
        by_rank.append(sum(hashed(counts).values()))
    return by_rank


@contextmanager
def counted_by_torch():
    """Yield a list of one number: the bytes of tensors that torch's own reader has read."""
    total, real = [0], FileSystem.create_stream

    class Counting(io.FileIO):
        def read(self, size=-1):
            raw = super().read(size)
            total[0] += len(raw)
            return raw

        def readinto(self, buffer):
            size = super().readinto(buffer)
            total[0] += size
            return size

    @contextmanager
    def create_stream(self, path, mode):
        assert mode == "rb"
        with Counting(path, "rb") as stream:
            yield stream

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        yield total
    assert FileSystem.create_stream is real


def verified(path, world_size):
    """Let so many virtual ranks verify their share; return the bytes that each hashed, and those
    that it read once more to look into them. No file is anybody's but one rank's.
    """
    content, files, by_rank, looked_into = manifests.read(path / NAME), [], [], []
    state = Training().state
    for rank in range(world_size):
        ranks = Ranks(rank, world_size, 0, None)
        store = CheckpointStore(state, path, run_id="run", ranks=ranks)
        with counted_reads() as counts, counted_by_torch() as total:
            store.verify_share(content)
        looked_into += total
        files += hashed(counts)
        by_rank.append(sum(hashed(counts).values()))
    assert sorted(content.files.keys() - {manifests.METADATA}) == sorted(files)
    return by_rank, looked_into


@pytest.mark.parametrize("world_size", [2, 8, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_with_the_model_each_rank_s_cost_is_its_share_from_2_to_256_ranks(tmp_path, world_size):
    """The same 8 MiB on more and more ranks; each file carries some KiB that are no tensors."""
    total, names = 8 * MIB, 8192
    saving = written(tmp_path, world_size, total)
    folder = CheckpointFolder(tmp_path, run_id="run")
    with counted_reads() as counts:
        folder.prepare()
        assert [NAME] == emergency_save.merge_emergency_parts(folder, "run")
    assert {} == hashed(counts), "rank 0 reads nobody's tensors"
    loading, looked_into = verified(tmp_path, world_size)
    assert max(saving) <= total // world_size + names
    assert max(loading) <= total // world_size + names
    assert saving == loading
    assert max(looked_into) <= total // world_size + names


@pytest.mark.parametrize(("wrote", "loads"), [(8, 3), (8, 8), (3, 8), (64, 5)])
def test_with_another_number_of_ranks_each_file_is_verified_by_one(tmp_path, wrote, loads):
    written(tmp_path, wrote, MIB)
    folder = CheckpointFolder(tmp_path, run_id="run")
    folder.prepare()
    emergency_save.merge_emergency_parts(folder, "run")
    by_rank, _ = verified(tmp_path, loads)
    assert max(by_rank) <= -(-wrote // loads) * (MIB // wrote + 4096)


# ------------------------------------------------------------------------------ real ranks


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return spawned(four, tmp_path_factory.mktemp("four"), ranks=4)


@pytest.fixture(params=one_in(2, ["of_two", "of_four"]))
def found(request):
    return request.getfixturevalue(request.param)


@pytest.mark.dist
def test_each_real_rank_hashes_its_own_files_once_at_a_save_and_once_at_a_load(found):
    for rank, one in enumerate(found):
        own = {k: v for k, v in one["sizes"].items() if k.startswith(f"__{rank}_")}
        assert own
        assert own == one["saving"]
        assert own == one["loading"]


@pytest.mark.dist
@pytest.mark.parametrize("what", ["damaged", "lied"])
def test_one_file_that_does_not_match_sends_all_ranks_to_the_older_checkpoint(found, what):
    assert {1} == {one[what]["step"] for one in found}
    assert {1} == {one[what]["left"] for one in found}
    assert len(found[0][what]["aside"]) == {"damaged": 1, "lied": 2}[what]


@pytest.mark.dist
def test_a_rank_that_writes_and_hashes_for_longer_than_gloo_waits_ends_nobody(of_two):
    assert [1, 1] == [one["slow"] for one in of_two]
    assert 0 == of_two[0]["waiting"], "without the meetings in between it would have"


# -------------------------------------------------------------------------------- its end


def test_what_was_hashed_and_not_sealed_is_no_checkpoint_after_a_kill(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from tests.trainer_hooks.saving import Run
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
run = Run(Path(sys.argv[1]))
run.save()
CheckpointFolder.publish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
run.save()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = TRAINING.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=environment, check=False
    )
    assert -signal.SIGKILL == ended.returncode
    assert [".partial-run-step-00000004-7"] == [p.name for p in tmp_path.glob(".partial-*")]
    again = Run(tmp_path)
    assert [] == list(tmp_path.glob(".partial-*"))
    assert 2 == load_newest(again.store).step


def test_a_file_that_nobody_measured_keeps_the_seal_away(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.save()
    measure = manifests.measure
    monkeypatch.setattr(manifests, "measure", lambda *args: dict([*measure(*args).items()][:1]))
    run.save()
    assert (1, 1) == (run.store.num_saved, run.store.num_failed)
    assert ["step-00000002-7"] == ids(run.store)
    assert "differ in" in run.store.take_changes()[-1].detail


def test_a_file_that_cannot_be_read_says_nothing_of_the_checkpoint(tmp_path, monkeypatch):
    run = Run(tmp_path)
    name = run.save()
    again = another_process(run)

    def unreadable(*args):
        raise PermissionError(13, "Permission denied", str(tmp_path / name / "__0_0.distcp"))

    monkeypatch.setattr(manifests, "check_files", unreadable)
    with pytest.raises(Exception, match="cannot be read: Permission denied"):
        load_newest(again.store)
    assert [name] == ids(again.store)


def test_a_checkpoint_of_an_earlier_vitals_loads(tmp_path):
    """Its manifest is of the same format; only who hashed the files was another."""
    run = Run(tmp_path)
    name = run.save()
    path = tmp_path / name / "manifest.json"
    body = msgspec.json.decode(path.read_bytes())
    assert 1 == body["format_version"]
    assert {"size", "sha256"} == set(body["files"][".metadata"])
    assert 2 == load_newest(another_process(run).store).step
