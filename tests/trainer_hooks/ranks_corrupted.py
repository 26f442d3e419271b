"""What each rank does in ``test_replicas``; results go to a file by rank."""

import json
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainer_hooks
from tests.support.inside import events_of, refs_of, run_of
from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.recovery import replicas
from trainer_hooks.tensors.gradients import local_tensor
from trainvitals.errors import TrainingHalted
from trainvitals.records import CheckpointChanged, DecisionMade, FindingRaised, Note

EVERY = 5
"""Steps of a round, for 50."""


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))


class Run:
    """A watched training of some ranks, in which something may be done before a step."""

    def __init__(
        self, rank, folder, name, *, mode="guard", steps=40, model=None, wrap=True, prepare=None,
        fused=True, ddp=None, **more,
    ):  # fmt: skip
        self.rank, self.steps = rank, steps
        inner = made() if model is None else model
        self.model = DistributedDataParallel(inner, **(ddp or {})) if wrap else inner
        if prepare is not None:
            prepared = prepare(self.model)
            self.model = self.model if prepared is None else prepared
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.schedulers = more.pop("schedulers", None)
        if mode == "heal":
            more["checkpoints"] = trainer_hooks.CheckpointSettings(
                directory=Path(folder) / name, healthy_after=3, snapshot_every=4, save_every=10**6
            )
        self.at_start = {}
        with mock.patch.object(Emitter, "note", self._hear):
            self.monitor = trainer_hooks.watch(
                self.model, self.optimizer, self.schedulers, mode=mode, **more
            )
        self.events = events_of(self.monitor)
        self.max_norm = None
        self.after_backward = None
        self.sampler_seed = None

    def _hear(self, code, text, *args, **kwargs):
        self.at_start[code] = text

    def backward(self, batch):
        """Return the loss; what differs from an ordinary loop overrides it."""
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss

    def run(self, before=lambda run, step: None):
        data = [
            torch.randn(16, 8, generator=torch.Generator().manual_seed(s))
            for s in range(self.steps)
        ]
        if self.sampler_seed is not None:
            data *= dist.get_world_size()
            sampler = DistributedSampler(data, seed=self.sampler_seed)
            data = DataLoader(data, batch_size=None, sampler=sampler)
        back, halted = [], ""
        began = time.time()
        try:
            for batch in self.monitor.batches(data):
                before(self, self.monitor.step_index)
                loss = self.backward(batch + 0.01 * self.rank)
                if self.after_backward is not None:
                    self.after_backward()
                    self.after_backward = None
                outcome = self.monitor.step(loss, max_norm=self.max_norm)
                back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
        except TrainingHalted as error:
            halted = str(error)
        heals = run_of(self.monitor).recovery is not None
        refs = [[ref.step, ref.state] for ref in refs_of(self.monitor)] if heals else []
        self.monitor.close()
        found = [e.finding for e in self.events if isinstance(e, FindingRaised)]
        ours = ("replica_corrupted", "replica_named", "settings_differ")
        return {
            "back": back,
            "halted": halted,
            "seconds": time.time() - began,
            "refs": refs,
            "findings": [[f.kind, f.step, f.rank, f.reason] for f in found if f.kind in ours],
            "decisions": [
                [e.decision.action, e.decision.step, e.decision.rank, e.decision.reason]
                for e in self.events
                if isinstance(e, DecisionMade)
            ],
            "notes": self.at_start | {e.code: e.text for e in self.events if isinstance(e, Note)},
            "bad": [
                e.checkpoint_step
                for e in self.events
                if isinstance(e, CheckpointChanged) and e.state == "bad"
            ],
            "faults": dict(self.monitor.swallowed_errors),
            "weights": [
                local_tensor(p.detach()).double().sum().item().hex()
                for p in self.model.parameters()
            ],
        }


def flip(tensor, element=3, bit=12):
    tensor.detach().view(-1).view(torch.int32)[element] ^= 1 << bit


def once(rank, step, what):
    """Return what does something on one rank before one step, the first time it comes to it."""
    done = []

    def before(run, now):
        if now == step and run.rank == rank and not done:
            done.append(now)
            what(run)

    return before


def weight(run):
    flip(run.model.module[3].weight)


def moment(run):
    flip(run.optimizer.state[run.model.module[3].weight]["exp_avg_sq"])


def rate(run):
    run.optimizer.param_groups[0]["lr"] *= 1.5


def clip(run):
    run.max_norm = 0.25


def reduced_gradient(run):
    """Change one number of the gradient behind DDP's sum, of this step alone."""
    run.after_backward = lambda: flip(run.model.module[3].weight.grad, bit=20)


def each_time(rank, step, what):
    """Return what does the same on one rank each time a step comes, as software would."""

    def before(run, now):
        if now == step and run.rank == rank:
            what(run)

    return before


def twice(rank, first, second):
    """Return what flips a weight at one step, and another once that was healed."""
    done = []

    def before(run, now):
        if run.rank != rank or len(done) == 2:
            return
        if now == (first, second)[len(done)]:
            flip(run.model.module[3].weight, element=len(done), bit=15)
            done.append(now)

    return before


def joined(rank, folder, world_size):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    torch.set_num_threads(1)
    replicas.ROUND = EVERY
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "VITALS_LADDER_MARGIN": "3",
    }  # fmt: skip


class Half(Run):
    """Mixed precision."""

    def backward(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(batch).square().mean()
        loss.backward()
        return loss


class Accumulated(Run):
    """Three micro-batches a step, synchronised at the last."""

    def backward(self, batch):
        for i in range(3):
            with nullcontext() if i == 2 else self.model.no_sync():
                loss = self.model(batch + i).square().mean()
                loss.backward()
            self.monitor.micro(loss)


class Unused(Run):
    """A branch that one rank alone takes, now and then."""

    def backward(self, batch):
        self.model.module.takes = self.rank == 1 and self.monitor.step_index % 3 == 0
        return super().backward(batch)


class Sampled(Run):
    """Its data are shared out by torch's sampler."""

    def run(self, before=lambda run, step: None):
        self.sampler_seed = 3
        return super().run(before)


class Drifting(Run):
    """Rounds its weights at random, each rank for itself: from the first step on none is alike."""

    def backward(self, batch):
        if self.monitor.step_index:
            shaken(self.rank, self.model)
        return super().backward(batch)


def shaken(rank, model):
    """Change every weight a little, on each rank in another way."""
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1e-4 * torch.rand(param.shape, generator=generator))


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.takes = False

    def forward(self, x):
        x = self.first(x)
        return self.last(self.other(x) if self.takes else x)


class Experts(nn.Module):
    """Each rank has an expert of its own, which DDP leaves alone."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(rank)
        self.expert = nn.Linear(8, 8)
        names = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, x):
        return self.expert(self.shared(x))


def power_sgd(state):
    def prepare(model):
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return prepare


def local_sgd(model):
    own, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=4)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def sharded(*sides):
    """Return what shards a model over a mesh of these sides, the first of two replicated."""

    def prepare(model):
        names = ("replicate", "shard")[-len(sides) :]
        mesh = dist.device_mesh.init_device_mesh("cpu", sides, mesh_dim_names=names)
        torch.distributed.fsdp.fully_shard(model[0], mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)

    return prepare


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def shard(run):
    flip(run.model[2].weight.to_local())


def healthy(rank, folder, *, world_size):
    joined(rank, folder, world_size)
    hook = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=4)
    sides = {"model": plain(), "wrap": False, "fused": False}
    runs = {
        "power": (Run, {"prepare": power_sgd(hook), "state": {"hook": hook}}),
        "half": (Half, {}),
        "accumulated": (Accumulated, {}),
        "sampled": (Sampled, {}),
        "unused": (Unused, {"model": Branched(), "ddp": {"find_unused_parameters": True}}),
        "experts": (Run, {"model": Experts(rank)}),
        "local": (Run, {"prepare": local_sgd}),
        "alone": (Run, {"wrap": False}),
        "unmarked": (Run, {"model": Experts(rank), "wrap": False}),
        "hybrid": (Run, {"prepare": sharded(world_size, 1), **sides}),
        "cut": (Run, {"prepare": sharded(world_size), **sides | {"model": plain()}}),
        "apart": (Run, {"prepare": partial(shaken, rank)}),
        "drifting": (Drifting, {}),
    }
    if world_size > 2:  # nightly: a compile takes as long as several of these trainings
        runs["compiled"] = (Run, {"prepare": lambda m: torch.compile(m, backend="eager")})
    cases = {}
    for name, (kind, more) in runs.items():
        for mode in ("heal", "guard")[: 2 if name in ("power", "local", "alone") else 1]:
            cases[f"{name}-{mode}"] = kind(
                rank, folder, f"{name}-{mode}", mode=mode, steps=16, **more
            ).run()
    sides["model"] = plain()
    run = Run(rank, folder, "flipped", steps=16, prepare=sharded(world_size, 1), **sides)
    cases["flipped"] = run.run(once(1, 9, shard))
    left(folder, rank, cases)


healthy_two = partial(healthy, world_size=2)
healthy_three = partial(healthy, world_size=3)


def left(folder, rank, cases):
    Path(folder, f"{rank}.json").write_text(json.dumps(cases))
    dist.destroy_process_group()


def two(rank, folder):
    joined(rank, folder, 2)
    run = partial(Run, rank, folder)
    cases = {
        "clean": run("clean", mode="heal").run(),
        "guard": run("guard").run(once(1, 20, weight)),
        "heal": run("heal", mode="heal").run(once(1, 20, weight)),
        "software": run("software", mode="heal").run(each_time(1, 21, weight)),
        "persistent": run("persistent", mode="heal").run(twice(1, 20, 33)),
        "rate": run("rate", steps=12).run(once(1, 6, rate)),
        "clip": run("clip", steps=12).run(once(1, 6, clip)),
        "moment": run("moment", steps=62).run(once(0, 9, moment)),
    }
    sampled = run("sampled", steps=12)
    sampled.sampler_seed = 2**31 + rank
    cases["sampled"] = sampled.run()
    left(folder, rank, cases)


def three(rank, folder):
    joined(rank, folder, 3)
    run = partial(Run, rank, folder)
    cases = {
        "clean": run("clean", mode="heal").run(),
        "heal": run("heal", mode="heal").run(once(1, 22, reduced_gradient)),
        "guard": run("guard", steps=30).run(once(1, 20, weight)),
        "rate": run("rate", steps=12).run(once(2, 6, rate)),
        "persistent": run("persistent", mode="heal").run(twice(2, 20, 33)),
    }
    left(folder, rank, cases)
