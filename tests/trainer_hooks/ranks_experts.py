"""What each rank does in ``test_experts``; results go to a file by rank."""

import json
import math
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import device_of, events_of, probe_of, records_of
from tests.trainer_hooks.probing import ask, notes
from tests.trainer_hooks.thawing import alike
from trainvitals.errors import UsageError
from trainvitals.records import FindingRaised, Note

NAN = float("nan")
STEPS, BATCH, WIDTH = 14, 8, 8
BAD = (3, 4, 9)
"""Steps that are left out of the bare program, and are bad in the watched one."""


class Mixture(nn.Module):
    """Two experts per rank, with the names that they have in the whole model."""

    def __init__(self, rank, size, num=2):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict()
        for i in range(num * rank, num * rank + num):
            torch.manual_seed(i)
            self.experts[str(i)] = nn.Linear(WIDTH, WIDTH)
        self.size = size
        self.ignored = [n for n, _ in self.named_parameters() if n.startswith("experts.")]

    def forward(self, x):
        x = self.enter(x)
        sent = self.exchange(x)  # one token in two goes to each of the owner's experts
        parts = sent.unflatten(0, (-1, len(self.experts))).unbind(1)
        outs = [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        return self.leave(x + self.exchange(torch.stack(outs, 1).flatten(0, 1)))

    def exchange(self, x):
        return all_to_all_single_autograd(x, None, None, dist.group.WORLD)


def average(param):
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


class Trainee:
    """One rank of the training; DDP ignores the experts, or the loop averages and marks them."""

    def __init__(self, *, marked=False, num_optimizers=1):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.bare = Mixture(self.rank, self.size)
        self.model = self.bare
        if marked:
            for name, param in self.bare.named_parameters():
                if name in self.bare.ignored:
                    param.allreduce = False
                else:
                    param.register_post_accumulate_grad_hook(average)
        else:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self.bare, self.bare.ignored
            )
            self.model = DistributedDataParallel(self.bare)
        params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(params, lr=0.01, fused=True)

    def loss_of(self, batch):
        return (self.model(batch) - batch.flip(1)).square().mean()

    def batch(self, step):
        return torch.randn(
            BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + self.rank)
        )

    def backward(self, step, factor=1.0):
        """Run one step's forward and backward; return its loss."""
        loss = self.loss_of(self.batch(step)) * factor
        loss.backward()
        return loss

    def bits(self):
        """Return this rank's model and optimizer state."""
        state = dict(self.bare.state_dict())
        for i, param in enumerate(self.bare.parameters()):
            held = self.optimizer.state.get(param, {})
            state |= {f"{i}.{name}": value for name, value in held.items()}
        return {key: value.clone() for key, value in state.items()}

    def squares(self, tensor_of):
        """Return the squares of a tensor of each parameter, with those of all ranks' experts."""
        mine = {
            n: tensor_of(p).double().square().sum().item() for n, p in self.bare.named_parameters()
        }
        everyone = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return {name: square for rank in everyone for name, square in rank.items()}

    def run_bare(self, *, without=BAD, steps=STEPS):
        """Train without Vitals, without the updates of some steps."""
        for step in range(steps):
            if step not in without:
                self.backward(step)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.bits()


def skips(*, value=NAN, bad_step=None, **settings):
    """A bad loss, or a bad gradient of one expert, on rank 1 alone."""
    bad = BAD if bad_step is None else (bad_step,)
    steps = STEPS if bad_step is None else bad_step + 3
    expected = Trainee(**settings).run_bare(without=bad, steps=steps)
    trainee, norms = Trainee(**settings), []
    with trainer_hooks.watch(trainee.model, trainee.optimizer) as monitor:
        records, findings = records_of(monitor), events_of(monitor)
        for step in range(steps):
            is_bad = step in bad and trainee.rank == 1
            loss = trainee.backward(step, value if is_bad and bad_step is None else 1.0)
            if is_bad and bad_step is not None:
                next(iter(trainee.bare.experts.values())).weight.grad.mul_(value)
            norms.append(math.sqrt(sum(trainee.squares(lambda p: p.grad).values())))
            monitor.step(loss)
    good = [step for step in range(steps) if step not in bad]
    return {
        "exact": alike(expected, trainee.bits()),
        "names": device_of(monitor).norms.names,
        "num_parameters": device_of(monitor).norms.num_parameters,
        "norms": [norms[step] for step in good],
        "recorded norms": [records[step].grad_norm for step in good],
        "skipped": [record.step for record in records if record.skipped],
        "ranks": [record.nonfinite_ranks for record in records if record.nonfinite_ranks],
        "reasons": [e.finding.reason for e in findings if isinstance(e, FindingRaised)],
        "faults": monitor.swallowed_errors,
    }


def thaws():
    """Each rank adds its experts to the optimizer in mid-run; two steps later its loss is NaN."""

    def train(monitor, trainee):
        for step in range(STEPS):
            if step == 6:
                trainee.optimizer.add_param_group(
                    {"params": list(trainee.bare.experts.parameters())}
                )
            if monitor is None and step == 8:
                continue
            loss = trainee.backward(step, NAN if step == 8 and trainee.rank else 1.0)
            if monitor is not None:
                monitor.step(loss)
                continue
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            trainee.bare.experts.zero_grad()

    def make():
        trainee = Trainee()
        shared = [*trainee.bare.enter.parameters(), *trainee.bare.leave.parameters()]
        trainee.optimizer = torch.optim.AdamW(shared, lr=0.01, fused=True)
        return trainee

    bare, trainee = make(), make()
    train(None, bare)
    with trainer_hooks.watch(trainee.model, trainee.optimizer) as monitor:
        records = records_of(monitor)
        # Without an optimizer, nothing clears these gradients.
        trainee.model.register_forward_pre_hook(lambda *_: trainee.bare.experts.zero_grad())
        train(monitor, trainee)
    return {
        "exact": alike(bare.bits(), trainee.bits()),
        "names": device_of(monitor).norms.names,
        "skipped": [record.step for record in records if record.skipped],
        "faults": monitor.swallowed_errors,
    }


def signals():
    """Weights, updates, outside writes and outputs, of all ranks' experts."""
    trainee, settings = Trainee(), trainer_hooks.SignalSettings(
        every=1, weight_norm=True, update_norm=True, outside_writes=True, activations=("*",)
    )  # fmt: skip
    samples, expected = [], []
    with trainer_hooks.watch(trainee.model, trainee.optimizer, signals=settings) as monitor:
        sampler = device_of(monitor).sampler
        unpack = sampler.unpack
        sampler.unpack = lambda *numbers: samples.append(unpack(*numbers)) or samples[-1]
        for step in range(6):
            loss = trainee.backward(step)
            if step == 4:
                with torch.no_grad():  # another rank's expert, written by other code
                    if trainee.rank == 1:
                        trainee.bare.experts["3"].weight.mul_(2.0)
            expected.append(trainee.squares(lambda p: p.detach()))
            monitor.step(loss)
    names = device_of(monitor).norms.names
    return {
        "names": names,
        "weights": [sample.weight_squares for sample in samples],
        "expected weights": [[each[name] for name in names] for each in expected],
        "updated": [n for n, x in zip(names, samples[3].update_squares, strict=True) if x > 0],
        "written": [n for n, x in zip(names, samples[4].weight_writes, strict=True) if x > 0],
        "modules": sampler.measured_modules,
        "measured": sorted(samples[1].activations),
        "faults": monitor.swallowed_errors,
    }


def heals(folder, *, damage, **settings):
    """Rank 1's expert is damaged; then the run is started again from its checkpoint."""
    expected = Trainee(**settings).run_bare(without=())
    where = trainer_hooks.CheckpointSettings(
        directory=Path(folder) / f"{damage}{settings}",
        healthy_after=2,
        snapshot_every=2,
        save_every=4,
    )
    trainee, back, done = Trainee(**settings), [], []
    with trainer_hooks.watch(
        trainee.model, trainee.optimizer, mode="heal", checkpoints=where
    ) as monitor:
        findings = events_of(monitor)
        while monitor.step_index < STEPS:
            step = monitor.step_index
            if step == 8 and trainee.rank == 1 and not done:
                done.append(step)
                with torch.no_grad():
                    trainee.bare.experts["2"].weight[0, 0] = damage
            outcome = monitor.step(trainee.backward(step))
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
    found = {
        "exact": alike(expected, trainee.bits()),
        "back": back,
        "reasons": [e.finding.reason for e in findings if isinstance(e, FindingRaised)],
        "notes": [note.text for note in findings if isinstance(note, Note)],
        "faults": monitor.swallowed_errors,
    }
    os.environ["VITALS_RUN_ID"] = monitor.run_id
    again = Trainee(**settings)
    for param in again.model.parameters():
        param.data.fill_(1.0)
    with trainer_hooks.watch(
        again.model, again.optimizer, mode="heal", checkpoints=where
    ) as monitor:
        found["resumed"] = monitor.step_index
        while monitor.step_index < STEPS:
            monitor.step(again.backward(monitor.step_index))
    del os.environ["VITALS_RUN_ID"]
    return found | {"exact after a restart": alike(expected, again.bits())}


def probes():
    """The probe asks before and after an expert of rank 1 is scaled."""
    trainee, readings = Trainee(), []
    with trainer_hooks.watch(trainee.model, trainee.optimizer) as monitor:
        told = notes(monitor)
        stream = [trainee.batch(step) for step in range(40)]
        for batch in monitor.batches(stream, probe=trainee.loss_of):
            loss = trainee.loss_of(batch)
            loss.backward()
            monitor.step(loss)
            if monitor.step_index in (30, 34):
                readings.append(probe_of(monitor).evaluate(ask(monitor.step_index)).ratio(0.01))
                with torch.no_grad():
                    if trainee.rank == 1:
                        trainee.bare.experts["2"].weight.mul_(30.0)
        is_on = probe_of(monitor).is_on
    return {
        "is_on": is_on,
        "readings": readings,
        "off": [note.text for note in told if note.code == "probe_off"],
        "faults": monitor.swallowed_errors,
    }


def corrupted():
    """One rank's copy of a shared weight changes."""
    trainee = Trainee()
    with trainer_hooks.watch(trainee.model, trainee.optimizer) as monitor:
        findings = events_of(monitor)
        for step in range(60):
            if step == 20 and trainee.rank == 1:
                with torch.no_grad():
                    trainee.bare.enter.weight[0, 0] += 2.0**-9
            monitor.step(trainee.backward(step))
        pages = [e.finding for e in findings if isinstance(e, FindingRaised)]
    kinds = {finding.kind for finding in pages}
    return {"kinds": sorted(kinds), "reasons": [f.reason for f in pages]}


def refusals():
    """Return the error of each setup that is refused, by its name."""
    trainee, texts = Trainee(), {}
    try:
        trainer_hooks.watch(trainee.bare, torch.optim.SGD(trainee.bare.parameters(), lr=0.1))
    except UsageError as error:
        texts["unmarked"] = str(error)
    halves = [
        torch.optim.SGD(part.parameters(), lr=0.1)
        for part in (trainee.bare.enter, trainee.bare.experts)
    ]
    with trainer_hooks.watch(trainee.model, halves) as monitor:
        trainee.backward(0)
        try:
            monitor.step(optimizer=halves[1])
        except UsageError as error:
            texts["optimizer"] = error.text
    wrong = trainer_hooks.SignalSettings(activations=("nothing",))
    try:
        trainer_hooks.watch(trainee.model, trainee.optimizer, signals=wrong)
    except UsageError as error:
        texts["no module"] = error.text
    return texts


def cases(rank, folder, *, world_size):
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "VITALS_LADDER_MARGIN": "2",
    }  # fmt: skip
    found = {
        "skips": {"ddp": skips(), "marked": skips(marked=True)},
        "gradients": {"nan": skips(value=NAN, bad_step=20), "large": skips(value=1e9, bad_step=20)},
        "heals": {"marked": heals(folder, damage=NAN, marked=True)},
        "probes": probes(),
    }
    if world_size == 2:
        # On more ranks, DDP adds up in another order in the first step after a restart.
        found["heals"]["ddp"] = heals(folder, damage=NAN)
        found["signals"] = signals()
        found["thaws"] = thaws()
        found["refusals"] = refusals()
    else:
        found["corrupted"] = corrupted()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


two = partial(cases, world_size=2)
four = partial(cases, world_size=4)
