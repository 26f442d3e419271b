"""What each rank does in ``test_shared_snapshots``; results go to a file by rank."""

import errno
import json
import os
import signal
import time
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import events_of, snapshots_of, store_of
from tests.trainer_hooks.ranks_taking_turns import made
from trainer_hooks.arguments import join_models
from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.recovery import node_memory
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.state import TrainingState
from trainvitals.records import CheckpointChanged, Note

STEPS = 26


class Kept:
    """A watched DDP training that keeps its own state of every step, to compare with."""

    def __init__(self, rank, folder, name, *, steps=STEPS, **settings):
        torch.manual_seed(0)
        inner = nn.Sequential(
            nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 256),
            nn.Linear(256, 8),
        )  # fmt: skip
        inner[3].bias.requires_grad_(False)
        self.rank, self.steps = rank, steps
        self.model = DistributedDataParallel(inner)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        kept = {"healthy_after": 2, "snapshot_every": 4, "save_every": 10**6} | settings
        where = trainer_hooks.CheckpointSettings(directory=Path(folder) / name, **kept)
        self.said_at_start = []
        with mock.patch.object(Emitter, "note", self._hear):
            self.monitor = trainer_hooks.watch(
                self.model, self.optimizer, mode="heal", checkpoints=where
            )
        self.ring, self.store = snapshots_of(self.monitor), store_of(self.monitor)
        self.state = TrainingState(self.model, [self.optimizer], ())
        self.events = events_of(self.monitor)
        self.of_step = {}

    def _hear(self, code, text, *args, **kwargs):
        self.said_at_start.append((code, text))

    def bits(self):
        """Return this rank's tensors as they are now."""
        return {k: t.clone() for k, t in self.state.tensors().items()}

    def run(self, before=lambda step: None):
        """Train; ``before`` is called with each step, before its forward."""
        back = []
        while self.monitor.step_index < self.steps:
            step = self.monitor.step_index
            before(step)
            self.of_step[step] = self.bits()
            generator = torch.Generator().manual_seed(7 * step + self.rank)
            loss = self.model(torch.randn(16, 8, generator=generator)).square().mean()
            loss.backward()
            outcome = self.monitor.step(loss)
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
        return back

    def is_as_kept(self, step):
        """Return whether the live state is that of the step, but for state that began after it."""
        return same(self.bits(), self.of_step[step])

    def result(self):
        """Return what every case tells."""
        changes = [e for e in self.events if isinstance(e, CheckpointChanged)]
        return {
            "shares": self.ring.shares,
            "ranks_per_copy": self.ring.ranks_per_copy,
            "faults": dict(self.monitor.swallowed_errors),
            "missed": self.ring.num_missed,
            "refs": [[ref.step, ref.state] for ref in self.ring.refs()],
            "bad": [[c.checkpoint_step, c.detail] for c in changes if c.state == "bad"],
            "notes": {e.code: e.text for e in self.events if isinstance(e, Note)}
            | dict(self.said_at_start),
        }


def same(now, then):
    return (
        all(torch.equal(t, then[k]) if k in then else not t.any() for k, t in now.items())
        and then.keys() <= now.keys()
    )


def pss():
    """Return this process's part of the shared snapshots that it has mapped."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            inside = "memfd:vitals-snapshot" in line
        if inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def taken(ring):
    """Return what the shared slots take of the node's memory."""
    fds = [slot.region.fd for slot in ring.slots if slot.region is not None]
    return sum(os.fstat(fd).st_blocks * 512 for fd in fds)


def healed(rank, folder, world_size):
    """A moment turns infinite on one rank; then every snapshot is restored in turn."""
    kept = Kept(rank, folder, "healed")
    was = []

    def spoil(step):
        if step == 14 and rank == world_size - 1 and not was:
            was.append(step)
            kept.optimizer.state[kept.model.module[0].weight]["exp_avg_sq"][2, 2] = float("inf")

    with kept.monitor:
        back = kept.run(spoil)
        exact = []
        for ref in reversed([r for r in kept.ring.refs() if r.state != "candidate"]):
            kept.ring.restore(ref.id)
            exact.append(kept.is_as_kept(ref.step))
        dist.barrier()
        parts = [None] * world_size
        dist.all_gather_object(parts, pss())
        owners = [p.into is not None for s in kept.ring.slots for p in s.pairs if p.unit >= 0]
    snapshots = len(exact)
    return kept.result() | {
        "back": back, "exact": exact, "taken": taken(kept.ring), "pss": sum(parts),
        "whole": kept.state.bytes_when_warm(), "snapshots": snapshots,
        "copied": sum(owners), "units": len(owners), "ring": kept.ring.bytes(),
    }  # fmt: skip


def from_the_start(rank, folder):
    """The snapshot before the first step has no optimizer state; it comes back as that."""
    kept = Kept(rank, folder, "start", steps=3)
    with kept.monitor:
        kept.run()
        kept.ring.restore(kept.ring.refs()[0].id)
        return {"exact": kept.is_as_kept(0)}


def differing(rank, folder, world_size):
    """One bit of one weight flips on the last rank, once."""
    kept, was = Kept(rank, folder, "differing"), []

    def flip(step):
        if step == 6 and rank == world_size - 1 and not was:
            was.append(step)
            weight = kept.model.module[3].weight.detach().view(torch.int32)
            weight[5, 5] ^= 1 << 3

    with kept.monitor:
        back = kept.run(flip)
        newest = kept.ring.newest_committed()
        kept.ring.restore(newest.id)
        exact = kept.is_as_kept(newest.step)
        regions = [s.region is not None for s in kept.ring.slots]
    return kept.result() | {
        "newest": newest.step, "exact": exact, "regions": regions, "back": back,
    }  # fmt: skip


@contextmanager
def slow_writes(seconds):
    write = FileSystemWriter.write_data

    def slowly(*args):
        time.sleep(seconds)
        return write(*args)

    with mock.patch.object(FileSystemWriter, "write_data", slowly):
        yield


def saving(rank, folder):
    """Each save takes longer than many snapshots, on the last rank longest."""
    kept = Kept(
        rank, folder, "saving", snapshot_every=1, save_every=4, healthy_after=2, keep=50, steps=60
    )
    with slow_writes(0.05 + 0.1 * rank), kept.monitor:
        kept.run(lambda step: time.sleep(0.01))
        assert kept.store.wait()
        result = kept.result() | {
            "saved": kept.store.num_saved, "failed": kept.store.num_failed, "right": [],
        }  # fmt: skip
        for ref in kept.store.loadable_refs():
            restored = kept.store.load(ref.id)
            result["right"].append(kept.is_as_kept(restored.step))
    return result


def refused(rank, folder, world_size):
    """The last rank may not open what the first one offers."""
    real = os.open

    def refuse(path, *args, **kwargs):
        if rank == world_size - 1 and fnmatch(path, "/proc/*/fd/*"):
            raise PermissionError(errno.EACCES, "Permission denied", "/proc/1/fd/9")
        return real(path, *args, **kwargs)

    with mock.patch.object(os, "open", refuse):
        kept = Kept(rank, folder, "refused", steps=10)
    with kept.monitor:
        kept.run()
        kept.ring.restore(kept.ring.newest_committed().id)
        exact = kept.is_as_kept(kept.ring.refs()[-1].step)
    return kept.result() | {"exact": exact, "taken": taken(kept.ring)}


def overwritten(rank, folder):
    """What another rank overwrites while it is written down alone is no part of a checkpoint."""
    kept = Kept(rank, folder, "overwritten", steps=10)
    with kept.monitor:
        kept.run()
        last = kept.ring.newest_committed()
        fine = kept.store.write_alone(last)
        dist.barrier()
        if rank == 0:
            regions = [slot.region for slot in kept.ring.slots]
            (region,) = [region for region in regions if region.holds(last.generation)]
            region.mark_incomplete(last.generation + 1)
        dist.barrier()
        home = kept.store.folder.path / f".alone-{kept.monitor.run_id}"
        names = sorted(p.name for p in home.glob(f"*/rank-{rank}-of-*"))
        for path in home.glob(f"*/rank-{rank}-of-*"):
            path.rename(path.with_name("aside" + str(rank)))
        torn = kept.store.write_alone(last)
        again = sorted(p.name for p in home.glob(f"*/rank-{rank}-of-*"))
    return {"fine": fine, "names": names, "torn": torn, "again": again}


def turns(rank, folder):
    """Two models, each with an optimizer that is stepped by itself."""
    gan, of_step = made(rank), {}
    where = trainer_hooks.CheckpointSettings(
        directory=Path(folder) / "turns", healthy_after=2, snapshot_every=5
    )
    with trainer_hooks.watch(
        {"g": gan.g, "d": gan.d}, [gan.of_g, gan.of_d], mode="heal", checkpoints=where
    ) as monitor:
        ring = snapshots_of(monitor)

        training = TrainingState(join_models({"g": gan.g, "d": gan.d}), [gan.of_g, gan.of_d], ())
        is_replica = training.replicas(dist.get_world_size())

        def state():
            live = training.tensors()
            return {k: t.clone() for k, t in live.items() if is_replica(k)}

        def step(optimizer, loss):
            of_step[monitor.step_index] = state()
            monitor.step(loss, optimizer=optimizer)

        for real in monitor.batches(gan.data):
            gan.play(real, step)
            if monitor.step_index >= 27:
                break
        newest = ring.newest_committed()
        ring.restore(newest.id)
        exact = same(state(), of_step[newest.step])
        kinds = {key.split(".")[1] for key in state()}
        return {
            "shares": ring.shares, "exact": exact, "step": newest.step, "kinds": sorted(kinds),
            "faults": dict(monitor.swallowed_errors),
        }  # fmt: skip


def joined(rank, folder, world_size):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    torch.set_num_threads(1)
    node_memory.UNIT_BYTES = 4096
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "VITALS_LADDER_MARGIN": "2",
    }  # fmt: skip


def cases(rank, folder, *, world_size):
    joined(rank, folder, world_size)
    found = {
        "healed": healed(rank, folder, world_size),
        "start": from_the_start(rank, folder),
        "differing": differing(rank, folder, world_size),
        "saving": saving(rank, folder),
        "refused": refused(rank, folder, world_size),
        "overwritten": overwritten(rank, folder),
        "turns": turns(rank, folder),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


two = partial(cases, world_size=2)
four = partial(cases, world_size=4)


def killed(rank, folder):
    """Rank 0, which made the memory, is killed; rank 1 reads the copy and writes its part."""
    joined(rank, folder, 2)
    kept = Kept(rank, folder, "killed", steps=10)
    kept.run()
    last = kept.ring.newest_committed()
    expected = kept.of_step[last.step]
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{os.getppid()}").exists() and not Path(folder, "dead").exists():
        time.sleep(0.01)
    found = {
        "shares": kept.ring.shares,
        "same": same(last.tensors(), expected),
        "written": CheckpointStore.write_alone(kept.store, last),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)
