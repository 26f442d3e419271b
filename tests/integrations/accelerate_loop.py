"""A loop as people write it with Accelerate, for the tests."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.integrations.accelerate import attach
from trainvitals.records import RunEnded


@pytest.fixture
def bare():
    """Each test makes the state that Accelerate keeps for the process anew."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


class Own:
    """A loop as people write it with Accelerate."""

    def __init__(self, *, fused=True, scaler=None, micro_batches=1):
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=micro_batches,
            mixed_precision="no" if scaler is None else "fp16",
        )
        if scaler is not None:  # as it is made where there is a GPU
            self.accelerator.scaler, self.accelerator.native_amp = scaler, True
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        found = self.accelerator.prepare(net, optimizer, schedule)
        self.model, self.optimizer, self.scheduler = found
        self.data = torch.Generator().manual_seed(1)
        self.losses = []

    def attach(self, **options):
        self.attached = attach(self.accelerator, self.model, self.optimizer, **options)
        return self.attached

    def backward(self, gradient=None):
        x = torch.randn(8, 4, generator=self.data)
        loss = (self.model(x) - x[:, :1]).square().mean()
        self.losses.append(loss.item())
        self.accelerator.backward(loss)
        if gradient is not None:
            self.model[0].weight.grad[0, 0] = gradient

    def update(self):
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm=0.1, **options):
        return self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, **options)

    def step(self, gradient=None):
        self.backward(gradient)
        self.clip()
        self.update()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self):
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        everything = [*self.model.parameters(), *self.model.buffers(), *moments]
        return [t.detach().clone() for t in everything]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def journal(tmp_path):
    return Journal(tmp_path / "shm")


def ends(tmp_path):
    return [e.state for e in journal(tmp_path).events if isinstance(e, RunEnded)]
