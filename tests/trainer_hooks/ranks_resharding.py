"""What each rank does in ``test_resharding``: loads and saves checkpoints in every wrapping."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_hooks.saving import load_newest
from tests.trainer_hooks.wrappings.models import FOUR_RANKS, TORCH, TWO_RANKS, Net, Wrapping
from trainer_hooks.guard.ema import EMA
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.store import CheckpointStore
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.state import TrainingState
from trainvitals.errors import CheckpointError

STEPS = 3
MIXED = "fsdp2 of mixed types"
OF_TWO = ("ddp", "fsdp1", "fsdp1 not cut", "fsdp2 nested", "fsdp1 flat", "sequence parallel", MIXED)
"""In this order each takes up the checkpoint that the one before it left."""
NIGHTLY = ("fsdp1", "fsdp1 not cut")
"""Kinds of FSDP1, the older wrapping, whose flat kind is tried every day."""
OF_FOUR = {
    "ddp": "fsdp2 nested",
    "fsdp1 flat": "ddp",
    "fsdp1 hybrid": "sequence parallel",
    "fsdp1 hybrid flat": "fsdp2 nested",
    "fsdp2 nested": "fsdp1 flat",
    "hsdp": "fsdp1 not cut",
    "fsdp2 x tp": "ddp",
    "fsdp2 x tp, sequence parallel": "fsdp2 nested",
}
"""What each takes up of two ranks' checkpoints."""


def known(names, wrappings):
    return [name for name in names if wrappings[name].since <= TORCH]


class Trainee:
    """One wrapped network with its optimizer, and a store for every folder."""

    def __init__(self, wrapping: Wrapping, ranks: Ranks, optimizer=None, average=None) -> None:
        self.ranks = ranks
        torch.manual_seed(7)
        net = Net(batch_norm=False)
        if wrapping.mixed:
            net.head.bfloat16()
        self.bare = net
        self.model = wrapping.wrap(net)
        make = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-3))
        self.optimizer = make(self.model.parameters())
        self.average = average(self.model) if average else None
        extra = {"average": self.average} if average else {}
        self.state = TrainingState(self.model, [self.optimizer], extra=extra)
        self.step = 0

    def train(self, steps):
        """Train on data that is the same on every rank; return the losses."""
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            inputs = torch.randn(4, 4, 6, generator=generator)
            targets = torch.randn(4, 4, 3, generator=generator)
            self.optimizer.zero_grad()
            loss = (self.model(inputs).float() - targets).square().mean()
            loss.backward()
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
            self.step += 1
            losses.append(loss.item())
        return losses

    def store(self, folder):
        store = CheckpointStore(self.state, Path(folder), run_id="run", ranks=self.ranks)
        if self.ranks.rank == 0:
            store.prepare()
        self.ranks.gather(None)
        return store

    def snapshot(self):
        ring = SnapshotRing(self.state, num_slots=2, interval=1, healthy_after=0)
        ring.capture(self.step, 7, {"by": self.ranks.rank}, trusted=True)
        ring.commit(self.step, True)
        return ring.newest_healthy()

    def save(self, folder):
        store = self.store(folder)
        store.save(self.snapshot())
        assert store.wait()
        assert 0 == store.num_failed, store.take_changes()

    def load(self, folder):
        with torch.no_grad():  # what is loaded must not have been there before
            for tensor in self.state.tensors().values():
                tensor.fill_(0.5)
        restored = load_newest(self.store(folder))
        self.step = restored.step
        return restored


def twin(wrapping=None, *, wrap=lambda net: net, average=None):
    """Return a training in one process, without any wrapper."""
    wrapping = Wrapping(wrap=wrap, mixed=wrapping is not None and wrapping.mixed)
    return Trainee(wrapping, Ranks(0, 1, 0, None), average=average)


def ema(model):
    """Return an average of the kind that is tried here."""
    return EMA(model, decay=0.5, warmup=False)


def full(trainee):
    """Return whole parameters and moments, gathered in the wrappers' own slow way."""

    def whole(tensor):
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return tensor.detach().clone()

    if isinstance(trainee.model, Fsdp1):
        with Fsdp1.summon_full_params(trainee.model, writeback=False):
            named = dict(trainee.model.named_parameters())
            names = [n.replace("_fsdp_wrapped_module.", "") for n in named]
            return {f"model.{n}": whole(p) for n, p in zip(names, named.values(), strict=True)}
    found = {}
    module = trainee.model
    for name, param in (module.module if hasattr(module, "module") else module).named_parameters():
        found[f"model.{name}"] = whole(param)
        for key, value in trainee.optimizer.state.get(param, {}).items():
            found[f"optim.0.{name}.{key}"] = whole(value)
    return found


def refused(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def takes_up(wrapping, ranks, old, new):
    """Load a checkpoint, look at it, save it again, and train on."""
    trainee = Trainee(wrapping, ranks)
    restored = trainee.load(old)
    loaded = full(trainee)
    trainee.save(new)
    return (
        trainee,
        {
            "restored": [restored.step, restored.exact],
            "losses": trainee.train(2),
            "folder": str(new),
        },
        loaded,
    )


def two(rank, folder, names=OF_TWO):
    """Take up the twin's checkpoint in each wrapping, then each other's."""
    ranks = join(rank, 2, folder)
    home, results = Path(folder).parents[1], {}
    before = home / "twin"
    for name in known(names, TWO_RANKS):
        wrapping = TWO_RANKS[name]
        old = home / "twin-mixed" if wrapping.mixed else home / "twin"
        trainee, found, loaded = takes_up(wrapping, ranks, old, Path(folder) / "from-twin" / name)
        results[name] = found
        torch.save(loaded, f"{folder}/full-{name}-{rank}.pt")
        trainee.save(Path(folder) / "trained" / name)
        store = trainee.store(Path(folder) / "alone" / name)
        assert store.write_alone(trainee.snapshot()), store.take_changes()
        found["next"] = trainee.train(1)
        if not wrapping.mixed:
            _, found["chained"], _ = takes_up(
                wrapping, ranks, before, Path(folder) / "chained" / name
            )
            found["chained"]["of"] = str(before)
            before = Path(folder) / "trained" / name
    results["averages"] = averages(ranks, Path(folder) / "averages")
    results["refused"] = refusals(ranks, home, Path(folder))
    leave(rank, folder, results)


def averages(ranks, folder):
    """Save with an average in one wrapping, take it up in the next; return where each saved."""
    saved = []
    for name in ("ddp", "fsdp1 flat", "fsdp2 nested", "fsdp1"):
        trainee = Trainee(TWO_RANKS[name], ranks, average=ema)
        if saved:
            trainee.load(saved[-1])
        else:
            trainee.train(STEPS)
        saved.append(str(folder / name))
        trainee.save(saved[-1])
    return saved


def refusals(ranks, home, folder):
    """Return what is said of checkpoints that do not fit."""
    flat = Trainee(TWO_RANKS["fsdp1 flat"], ranks)
    uneven = refused(lambda: flat.load(home / "uneven"))
    unchanged = all((t == 0.5).all().item() for t in flat.state.tensors().values())

    def zero(params):
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)

    split = Trainee(TWO_RANKS["ddp"], ranks, optimizer=zero)
    split.train(2)
    split.save(folder / "zero")
    losses = split.train(1)
    again = Trainee(TWO_RANKS["ddp"], ranks, optimizer=zero)
    again.load(folder / "zero")
    by_hand = Trainee(Wrapping(wrap=lambda net: net), ranks)
    by_hand.train(1)
    by_hand.save(folder / "by hand")
    synced = Trainee(Wrapping(wrap=DistributedDataParallel), ranks)
    return {
        "uneven": uneven,
        "unchanged": unchanged,
        "zero again": again.train(1) == losses,
        "by hand": refused(lambda: synced.load(folder / "by hand")),
    }


def four(rank, folder):
    """Take up what two ranks left."""
    ranks = join(rank, 4, folder)
    home, results = Path(folder).parents[1], {}
    trained = Path((home / "trained").read_text())
    for name, old in OF_FOUR.items():
        if FOUR_RANKS[name].since <= TORCH:
            new = Path(folder) / name
            trainee, results[name], _ = takes_up(FOUR_RANKS[name], ranks, trained / old, new)
            results[name]["of"] = str(trained / old)
            store = trainee.store(Path(folder) / "alone" / name)
            assert store.write_alone(trainee.snapshot()), store.take_changes()
            trainee.save(Path(folder) / "trained" / name)
    leave(rank, folder, results)


def join(rank, world_size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    return Ranks.join()


def leave(rank, folder, results):
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo aborts a process at its exit now and then; what was found is written
