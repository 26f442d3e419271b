"""What each rank does in ``test_replicas``; results go to a file by rank."""

import json
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.trainer_hooks.test_resume import events_of
from trainer_hooks.recovery import replicas
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
        self, rank, folder, name, *, mode="guard", steps=40, model=None, wrap=True, **more
    ):
        self.rank, self.steps = rank, steps
        inner = made() if model is None else model
        self.model = DistributedDataParallel(inner) if wrap else inner
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.schedulers = more.pop("schedulers", None)
        if mode == "heal":
            more["checkpoints"] = trainer_hooks.CheckpointSettings(
                directory=Path(folder) / name, healthy_after=3, snapshot_every=4, save_every=10**6
            )
        self.monitor = trainer_hooks.watch(
            self.model, self.optimizer, self.schedulers, mode=mode, **more
        )
        self.events = events_of(self.monitor)
        self.max_norm = None
        self.after_backward = None

    def run(self, before=lambda run, step: None):
        data = [
            torch.randn(16, 8, generator=torch.Generator().manual_seed(s))
            for s in range(self.steps)
        ]
        back, halted = [], ""
        began = time.time()
        try:
            for batch in self.monitor.batches(data):
                before(self, self.monitor.step_index)
                mine = batch + 0.01 * self.rank
                loss = self.model(mine).square().mean()
                loss.backward()
                if self.after_backward is not None:
                    self.after_backward()
                    self.after_backward = None
                outcome = self.monitor.step(loss, max_norm=self.max_norm)
                back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
        except TrainingHalted as error:
            halted = str(error)
        refs = (
            []
            if self.monitor._controller.recovery is None
            else [[ref.step, ref.state] for ref in self.monitor._controller.recovery.refs()]
        )
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
            "notes": {e.code: e.text for e in self.events if isinstance(e, Note)},
            "bad": [
                e.checkpoint_step
                for e in self.events
                if isinstance(e, CheckpointChanged) and e.state == "bad"
            ],
            "faults": dict(self.monitor.swallowed_errors),
            "weights": [p.detach().double().sum().item().hex() for p in self.model.parameters()],
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
    replicas.EVERY = EVERY
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "VITALS_LADDER_MARGIN": "3",
    }  # fmt: skip


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
