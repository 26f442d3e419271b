"""What each rank does in ``test_checkpoint_share``: saves and loads, and counts what it reads."""

import dataclasses
import io
import json
import logging
import os
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.trainer_hooks.ranks_resharding import Trainee, join, leave
from tests.trainer_hooks.saving import flip, load_newest
from tests.trainer_hooks.wrappings.models import FOUR_RANKS, TWO_RANKS
from trainer_hooks import agreement
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainvitals.errors import VitalsError


@contextmanager
def counted_reads():
    """Yield the bytes that are hashed, by file name, and take them from the file objects."""
    counts = Counter()

    class Counting:
        def __init__(self, file, name):
            self._file, self._name = file, name

        def read(self, size):
            raw = self._file.read(size)
            counts[self._name] += len(raw)
            return raw

        def fileno(self):
            return self._file.fileno()

        def __enter__(self):
            self._file.__enter__()
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

    def wrapped(fd, *args, **kwargs):
        file = io.open(fd, *args, **kwargs)  # noqa: SIM115, UP020 - handed on
        if not isinstance(fd, int):
            return file
        return Counting(file, Path(f"/proc/self/fd/{fd}").readlink().name)

    with mock.patch.object(manifests, "open", wrapped, create=True):
        yield counts


def hashed(counts):
    """Leave out what every rank reads, whose size grows with the tensors' number only."""
    return {name: size for name, size in counts.items() if name.endswith(".distcp")}


def lying(measure):
    """Return ``measure`` with another checksum for what rank 1 wrote."""

    def lie(folder, names=None):
        return {
            name: manifests.FileEntry(entry.size, "0" * 64) if "__1_" in name else entry
            for name, entry in measure(folder, names).items()
        }

    return lie


def slow_for(seconds, call):
    def slowly(*args):
        time.sleep(seconds)
        return call(*args)

    return slowly


def with_short_timeout(ranks, seconds):
    """Return the ranks with a side group that gives up soon."""
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return dataclasses.replace(ranks, side=side)


def saves_slowly(trainee, ranks, folder, *, meet_seconds):
    """Save while rank 1 writes, and hashes, for twice as long as gloo waits; return how many were
    saved.
    """
    trainee.ranks = with_short_timeout(ranks, 2)
    store = trainee.store(folder)
    seconds = 4 * ranks.rank
    write = FileSystemWriter.write_data
    with (
        mock.patch.object(agreement, "MEET_SECONDS", meet_seconds),
        mock.patch.object(manifests, "measure", slow_for(seconds, manifests.measure)),
        mock.patch.object(FileSystemWriter, "write_data", slow_for(seconds, write)),
    ):
        store.save(trainee.snapshot())
        assert store.wait()
    trainee.ranks = ranks
    return store.num_saved


def share(rank, folder, *, world_size, wrapping):
    """Save, load, and load past a file of another rank that is damaged, or hashed wrongly."""
    logging.disable(logging.CRITICAL)
    ranks = join(rank, world_size, folder)
    trainee = Trainee(wrapping, ranks)
    home = Path(folder) / "checkpoints"
    found = {}
    trainee.train(1)
    with counted_reads() as counts:
        trainee.save(home)
    found["saving"] = hashed(counts)
    with counted_reads() as counts:
        trainee.load(home)
    found["loading"] = hashed(counts)
    found["sizes"] = {p.name: p.stat().st_size for p in home.glob("step-*/*.distcp")}
    for what in ("damaged", "lied"):
        trainee.train(1)
        if what == "lied":
            with mock.patch.object(manifests, "measure", lying(manifests.measure)):
                trainee.save(home)
        else:
            trainee.save(home)
            newest = sorted(home.glob("step-*"))[-1]
            if rank == 0:
                flip(newest / "__1_0.distcp")
            ranks.gather(None)
        store = trainee.store(home)
        restored = load_newest(store)
        found[what] = {
            "step": restored.step,
            "aside": sorted(p.name for p in home.glob("bad-*")) if rank == 0 else [],
            "left": len(list(home.glob("step-*"))),
        }
        trainee.step = restored.step + 1  # the id of the one that is bad is taken
    if world_size == 2:
        found["slow"] = saves_slowly(trainee, ranks, Path(folder) / "slow", meet_seconds=0.5)
        try:
            found["waiting"] = saves_slowly(
                trainee, ranks, Path(folder) / "waiting", meet_seconds=600.0
            )
        except (VitalsError, RuntimeError) as error:
            found["waiting"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if world_size == 2:
        time.sleep(1)
        os._exit(0)  # the group that timed out is broken, and so may be a barrier
    leave(rank, folder, found)


def two(rank, folder):
    share(rank, folder, world_size=2, wrapping=TWO_RANKS["fsdp2 nested"])


def four(rank, folder):
    share(rank, folder, world_size=4, wrapping=FOUR_RANKS["ddp"])
