"""A training in which nearly all that a forward can write is written, watched with a probe."""

import copy
import random

import numpy as np
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import events_of, probe_of
from trainvitals.policy.evidence import Ask
from trainvitals.records import Note


class MoCo(nn.Module):
    """A momentum encoder that forward moves, a queue with its pointer, dropout and batch norm."""

    def __init__(self, *, batch_norm=True, width=8, size=32):
        super().__init__()
        norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.encoder = nn.Sequential(
            nn.Linear(6, width), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width)
        )
        self.momentum = copy.deepcopy(self.encoder)
        self.momentum.requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(size, width)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.calls = 0

    @torch.no_grad()
    def _keys(self, x):
        for ours, moving in zip(self.encoder.parameters(), self.momentum.parameters(), strict=True):
            moving.mul_(0.9).add_(whole(ours), alpha=0.1)
        return nn.functional.normalize(self.momentum(x), dim=1)

    def forward(self, x):
        self.calls += 1
        queries = nn.functional.normalize(self.encoder(x), dim=1)
        keys = self._keys(x + 0.1 * torch.randn_like(x) + random.random() + np.random.rand())
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat((positive, queries @ self.queue.clone().t()), dim=1) / 0.5
        with torch.no_grad():
            start = int(self.pointer)
            self.queue[start : start + len(keys)] = keys
            self.pointer.fill_((start + len(keys)) % len(self.queue))
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


def whole(param):
    full = getattr(param, "full_tensor", None)
    return param if full is None else full()


def batches(rank=0, count=120, size=8):
    made = torch.Generator().manual_seed(31 * rank + 5)
    return [{"x": torch.randn(size, 6, generator=made)} for _ in range(count)]


def loss_of(model):
    return lambda batch: model(batch["x"])


def trained(model, *, probe, rank=0, accumulate=2, ask_every=7, count=120, **watch):
    """Train and return every number that must not depend on the probe, and what it read."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.003, fused=True)
    readings, losses, counted = [], [], []
    with trainer_hooks.watch(model, optimizer, **watch) as monitor:
        stream = monitor.batches(
            batches(rank, count), probe=loss_of(model) if probe is True else probe or None
        )
        for number, batch in enumerate(stream):
            batch["x"].mul_(1.5)
            loss = model(batch["x"] / 1.5)
            (loss / accumulate).backward()
            monitor.micro(loss)
            losses.append(loss.item())
            counted.append(number)
            if (number + 1) % accumulate == 0:
                monitor.step()
                if probe and monitor.step_index % ask_every == 0:
                    readings.append(probe_of(monitor).evaluate(ask(monitor.step_index)))
        faults = dict(monitor.swallowed_errors)
        is_on = probe_of(monitor).is_on
    numbers = {
        "losses": losses,
        "counted": counted,
        "state": digest(model, optimizer),
        "rng": (random.random(), float(np.random.rand()), torch.rand(1).item()),
        "faults": faults,
    }
    return numbers, readings, is_on


def ask(onset_step, floor=0.01):
    return Ask(trigger="spike", step=onset_step, onset_step=onset_step, floor=floor)


def notes(monitor):
    """Return a list that all notes of the monitor go to from now on."""
    told = []
    events_of(monitor, keep=lambda event, **_: isinstance(event, Note) and told.append(event))
    return told


def digest(model, optimizer):
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    return [local(t).double().sum().item().hex() for t in tensors] + [getattr(model, "calls", 0)]


def local(tensor):
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach()


def seeded(make, seed=3):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return make()
