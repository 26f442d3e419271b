"""What each rank does in ``test_ranks_probe``; results go to a file by rank."""

import functools
import json
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import probe_of, store_of
from tests.trainer_hooks.probing import MoCo, ask, batches, loss_of, notes, seeded, trained

STEPS, FEW_STEPS = 42, 26
"""Of a training that reads eight batches, and of one whose probe ends."""


class Block(nn.Linear):
    """A layer that is wrapped by itself."""


class Plain(nn.Module):
    """A small net with dropout, for what a momentum encoder cannot be wrapped in."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            Block(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), Block(8, 8), nn.Linear(8, 1)
        )

    def forward(self, x):
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()


def ddp():
    return DistributedDataParallel(MoCo())


def fsdp2():
    model, mesh = MoCo(batch_norm=False), init_device_mesh("cpu", (dist.get_world_size(),))
    for linear in (model.encoder[0], model.encoder[4]):
        fully_shard(linear, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=set(model.momentum.parameters()))


def fsdp1(original=True):
    return FullyShardedDataParallel(
        Plain(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )


def fsdp1_flat():
    return fsdp1(original=False)


WRAPPINGS = {"ddp": ddp, "fsdp2": fsdp2, "fsdp1": fsdp1, "fsdp1 flat": fsdp1_flat}


@functools.cache
def bare_of(make, rank):
    """Return the numbers of a training without a probe."""
    return trained(seeded(make), probe=False, rank=rank, count=2 * STEPS)[0]


def with_and_without(make, rank):
    """Return whether a training is the same with and without a probe, and what was read."""
    bare = bare_of(make, rank)
    probed, readings, is_on = trained(seeded(make), probe=True, rank=rank, count=2 * STEPS)
    return {
        "differs": [name for name in bare if bare[name] != probed[name]],
        "is_on": is_on,
        "faults": probed["faults"],
        "readings": [repr(reading) for reading in readings],
        "num_batches": [reading.num_batches for reading in readings],
    }


def switched_off(make, rank, change, *, at=12):
    """Train with a loss_of that is changed from some step on, and return what became of it."""
    model = seeded(make)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.003, fused=True)
    right, now = loss_of(model), {"step": 0}

    def probe(batch):
        if now["step"] >= at:
            return change(model, right, batch, rank)
        return right(batch)

    readings, losses = [], []
    with trainer_hooks.watch(model, optimizer) as monitor:
        told = notes(monitor)
        for batch in monitor.batches(batches(rank, FEW_STEPS), probe=probe):
            loss = right(batch)
            loss.backward()
            losses.append(loss.item())
            monitor.step(loss)
            now["step"] = monitor.step_index
            if monitor.step_index in (22, 24):
                readings.append(probe_of(monitor).evaluate(ask(22)).num_batches)
        is_on = probe_of(monitor).is_on
    return {
        "is_on": is_on,
        "readings": readings,
        "off": [note.text for note in told if note.code == "probe_off"],
        "steps": len(losses),
    }


def raises_before(_model, right, batch, rank):
    if rank == 1:
        raise ValueError("no such key")
    return right(batch)


def raises_behind(_model, right, batch, rank):
    loss = right(batch)
    if rank == 1:
        raise ValueError("no such key")
    return loss


def swallows(_model, right, batch, rank):
    if rank == 1:
        raise ValueError("no such key")
    try:
        return right(batch)
    except Exception:
        return right(batch)


def calls_twice(_model, right, batch, rank):
    if rank == 1:
        right(batch)
    return right(batch)


def all_raise_inside(model, right, _batch, _rank):
    return right({"x": torch.zeros(2, 5)})


CHANGES = {
    "before": raises_before,
    "behind": raises_behind,
    "swallowed": swallows,
    "twice": calls_twice,
    "inside": all_raise_inside,
}


def wrong_on_one(_model, right, batch, rank):
    return right(batch) * (8 if rank == 1 else 1)


def goes_on_as_bare(make, rank):
    """Return whether a training whose probe failed on all ranks goes on as if there were none."""
    bare = bare_of(make, rank)
    model = seeded(make)
    right, asked = loss_of(model), []

    def probe(batch):
        asked.append(0)
        return right(batch if len(asked) < 20 else {"x": torch.zeros(2, 5)})

    probed, _, is_on = trained(model, probe=probe, rank=rank, count=2 * STEPS)
    return {"differs": [name for name in bare if bare[name] != probed[name]], "is_on": is_on}


def while_saving(make, rank, folder):
    """Ask the probe while a save to disk waits for rank 0 in the background."""
    model = seeded(make)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.003, fused=True)
    where = trainer_hooks.CheckpointSettings(
        directory=folder / "saved", healthy_after=2, snapshot_every=2, save_every=4
    )
    has_begun, may_end = threading.Event(), threading.Event()
    with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=where) as monitor:
        store = store_of(monitor)
        publish = store.folder.publish

        def publish_later(manifest):
            has_begun.set()
            assert may_end.wait(60)
            publish(manifest)

        store.folder.publish = publish_later
        for batch in monitor.batches(batches(rank, FEW_STEPS), probe=loss_of(model)):
            loss = loss_of(model)(batch)
            loss.backward()
            monitor.step(loss)
            if monitor.step_index == 22:
                assert rank or has_begun.wait(60)
                read = probe_of(monitor).evaluate(ask(22)).num_batches
                may_end.set()
        assert store.wait(60)
        num_saved = store.num_saved
    return {"num_batches": read, "num_saved": num_saved}


def main(rank, folder):
    folder = Path(folder)
    world_size = int(os.environ["PROBING_RANKS"])
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    cases = json.loads(os.environ["PROBING_CASES"])
    found = {}
    for case in cases:
        kind, _, change = case.partition(", ")
        if change == "":
            found[case] = with_and_without(WRAPPINGS[kind], rank)
        elif change == "while saving":
            found[case] = while_saving(WRAPPINGS[kind], rank, folder)
        elif change == "goes on":
            found[case] = goes_on_as_bare(WRAPPINGS[kind], rank)
        elif change == "wrong on one":
            found[case] = switched_off(WRAPPINGS[kind], rank, wrong_on_one, at=0)
        else:
            found[case] = switched_off(WRAPPINGS[kind], rank, CHANGES[change])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
