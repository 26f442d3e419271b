"""A small training whose every number depends on all of its state."""

import random

import numpy as np
import torch
from torch import nn

from trainer_hooks.recovery.state import TrainingState

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd-momentum-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-momentum-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
FROM_ZEROS = sorted(set(OPTIMIZERS) - {"sgd-dampening", "nadam", "asgd", "rprop"})


class Training:
    """BatchNorm, dropout, a tied module, a mask of -inf, an expanded buffer; random data."""

    def __init__(self, optimizer="adamw", *, seed=0, scaler=None, schedule=None, extra=None):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Linear(6, 6)
        )
        self.model[4].weight = nn.Parameter(torch.randn(6, 6))
        self.model.register_module("tied", self.model[3])
        self.model[0].register_buffer("mask", torch.full((2, 2), float("-inf")))
        if extra is None:  # torch's own AveragedModel cannot keep one
            self.model[0].register_buffer("expanded", torch.ones(1).expand(5))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        make = schedule or (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50))
        self.scheduler = make(self.optimizer)
        self.scaler = scaler
        self.extra = extra(self.model) if extra else {}
        self.state = TrainingState(
            self.model, [self.optimizer], [self.scheduler], scaler=scaler, extra=self.extra
        )

    def step(self, loss_factor=1.0):
        """Train one step on data that three generators draw; return the loss's bits."""
        x = torch.randn(16, 6) * random.uniform(0.5, 1.5) + float(np.random.normal())
        loss = self.model[:5](x).square().mean() * loss_factor
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.detach())
        else:
            self.scheduler.step()
        return loss.item()

    def run(self, steps):
        """Train and return the losses."""
        return [self.step() for _ in range(steps)]

    def bits(self):
        """Return everything that must come back, in a form that compares bit for bit."""
        tensors = {
            k: torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1).view(torch.uint8).tolist()
            for k, t in self.state.tensors().items()
        }
        return tensors, repr(self.state.host_state())
