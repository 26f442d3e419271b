"""A training that saves, for the tests of checkpoints on disk."""

import os
from pathlib import Path

import msgspec
import torch

from tests.trainer_hooks.training import Training
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints import payload
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.manager import SnapshotRing

ALONE = Ranks(0, 1, 0, None)
ROOT = Path(__file__).parents[2]


class Run:
    """A training with snapshots and a store; ``save`` trains some steps and writes a checkpoint."""

    def __init__(self, directory, *, optimizer="adamw", run_id="run", keep=3, key=b"", **options):
        self.training = Training(optimizer, **options)
        self.ring = SnapshotRing(self.training.state, num_slots=3, interval=1, healthy_after=0)
        self.store = CheckpointStore(
            self.training.state, directory, run_id=run_id, ranks=ALONE, keep=keep, key=key
        )
        self.store.prepare()
        self.step, self.keep = 0, keep

    def save(self, *, steps=2, healthy=True):
        self.training.run(steps)
        self.step += steps
        self.ring.capture(self.step, 7, {"batch": self.step}, trusted=healthy)
        self.ring.commit(self.step, True)
        name = self.store.save(self.ring.newest_committed())
        assert self.store.wait()
        return name


def ids(store):
    return [ref.id for ref in store.folder.refs()]


def another_process(run):
    """Return what a relaunch of the same run has: the folder, and a new training."""
    return Run(run.store.folder.path, keep=run.keep)


def load_newest(store):
    """Load the newest that is in the folder, as a relaunch does."""
    return store.load_newest(store.loadable_refs())


def flip(path, at=-100):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def reseal(folder):
    """Forge a manifest that fits the folder's present files, as somebody who can write may."""
    path = folder / "manifest.json"
    content = msgspec.json.decode(path.read_bytes(), type=manifests.Manifest)
    path.unlink()
    manifests.seal(folder, msgspec.structs.replace(content, files=manifests.measure(folder)))


def all_of(folder):
    found = []
    payload.scan(folder, lambda index, tensor: found.append((index, tensor.clone())))
    return found


def spoil(folder):
    """Put NaN where a weight lies in the file, and seal the folder again."""
    file = next(iter(sorted(folder.glob("*.distcp"))))
    key, value = next(
        (index.fqn, tensor)
        for index, tensor in all_of(folder)
        if index.fqn.startswith("model.") and tensor.numel() > 4
    )
    raw, wanted = file.read_bytes(), value.contiguous().numpy().tobytes()
    assert 1 <= raw.count(wanted), key
    nan = torch.full_like(value, float("nan")).numpy().tobytes()
    file.write_bytes(raw.replace(wanted, nan))
    reseal(folder)
