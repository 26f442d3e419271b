"""A training that thaws its first layer in mid-run, watched or bare, on one rank or several."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, THAW = 16, 6
BAD = (3, THAW, THAW + 1, 12)
"""Steps whose gradients are NaN: before the thaw, at it, after it."""
OPTIMIZERS = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd-momentum-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


class Thawing:
    """The first layer is in no optimizer until ``thaw``."""

    def __init__(self, optimizer="adamw-fused", *, wrapper="", frozen_first=False):
        torch.manual_seed(0)
        self.inner = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1)
        )
        if frozen_first:
            self._freeze()
        self.model = self.inner
        if wrapper == "ddp":
            self.model = DistributedDataParallel(self.inner, find_unused_parameters=True)
        if wrapper == "fsdp2":
            for layer in (self.inner[0], self.inner[3]):
                fully_shard(layer)
            self.model = fully_shard(self.inner)
        self._freeze()
        trained = [p for layer in self.inner[1:] for p in layer.parameters()]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def _freeze(self):
        self.inner[0].requires_grad_(False)

    def thaw(self, layer=0, **settings):
        """Give a layer to the optimizer."""
        self.inner[layer].requires_grad_(True)
        group = {"params": [*self.inner[layer].parameters()], "lr": 0.003} | settings
        self.optimizer.add_param_group(group)

    def backward(self, step, factor=1.0):
        """Run forward and backward of a step's own data; return the loss."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        x = torch.randn(12, 8, generator=generator)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * factor
        loss.backward()
        return loss

    def bits(self):
        """Return this rank's part of the model and of the optimizer's state."""
        state = dict(self.inner.state_dict())
        for i, param in enumerate(p for g in self.optimizer.param_groups for p in g["params"]):
            held = self.optimizer.state.get(param, {})
            state |= {f"{i}.{name}": value for name, value in held.items()}
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        return {k: getattr(v, "to_local", lambda v=v: v)().clone() for k, v in tensors.items()}

    def run_bare(self, *, without=BAD, steps=STEPS, thaw=THAW):
        """Train without Vitals; leave the updates of some steps out."""
        for step in range(steps):
            if step == thaw:
                self.thaw()
            if step not in without:
                self.backward(step)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.bits()

    def run(
        self, monitor, *, bad=BAD, bad_rank=0, steps=STEPS, thaw=THAW, before=lambda step: None
    ):
        """Train watched; return the state, and the steps to which it went back."""
        back = []
        while monitor.step_index < steps:
            step = monitor.step_index
            before(step)
            if step == thaw and len(self.optimizer.param_groups) == 1:
                self.thaw()
            is_bad = step in bad and self.rank == bad_rank
            outcome = monitor.step(self.backward(step, float("nan") if is_bad else 1.0))
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
        return self.bits(), back

    def run_attached(
        self, attached, *, bad=BAD, bad_rank=0, steps=STEPS, thaw=THAW, before=lambda step: None
    ):
        """Train attached; return the state, and by how many steps it went back."""
        back = []
        attached.when_rolled_back(back.append)
        for step in range(steps):
            before(step)
            if step == thaw:
                self.thaw()
            is_bad = step in bad and self.rank == bad_rank
            attached.loss(self.backward(step, float("nan") if is_bad else 1.0))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.bits(), back


def alike(left, right):
    """Return whether two states are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(t, right[k]) for k, t in left.items())
