"""A task of the benchmark: model, batches by number, loss per example, final result."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
Poison = Literal["shuffle", "const", "x50", "nan"]
LossKind = Literal["minimize", "rl", "adversarial"]

EVALUATIONS = 12
"""Batches of an evaluation, numbered from here on, and never trained on."""
FIRST_EVALUATION = 1_000_000
WARM_UP = 30
"""Steps in which a rate climbs to its height."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A training whose every batch depends on the seed and its own number alone."""

    seed: int
    steps: int = 700
    lr: float = 2e-3
    loss_kind: LossKind = "minimize"
    ranks: int = 1
    """Ranks among which a batch is thought to be dealt out; one process computes them all."""

    @property
    def is_on_policy(self) -> bool:
        """Whether a batch is made by the present model; such a task has nothing for a probe."""
        return False

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the untrained model, drawn from torch's own generator."""

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """Return the batch of this number; from FIRST_EVALUATION on one to evaluate with."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each example."""

    def collect(self, model: nn.Module, index: int) -> Batch:
        """Return the batch that the present model makes; on-policy tasks alone."""
        raise NotImplementedError

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return the batch with something wrong in it."""
        raise NotImplementedError(f"{type(self).__name__} cannot be poisoned")

    @property
    def changes(self) -> tuple[int, ...]:
        """Batches from which on the task is another one: what a person would announce."""
        return ()

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of the trained parameters."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.01, fused=True)

    def backward(self, model: nn.Module, loss: Tensor, batch: Batch) -> None:
        """Leave the gradients of the batch, whose loss is ``loss``."""
        loss.backward()

    def learning_rate(self, index: int) -> float:
        """Return the schedule's rate."""
        return self.lr * min(1.0, (index + 1) / WARM_UP)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        return self.losses(model, batch).mean()

    def evaluate(self, model: nn.Module) -> float:
        """Return how well the model does; less is better. Draws no random numbers."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            batches = (self.batch(FIRST_EVALUATION + i) for i in range(EVALUATIONS))
            value = statistics.fmean(self.loss(model, batch).item() for batch in batches)
        model.train(was_training)
        return value if math.isfinite(value) else math.inf

    def is_evaluation(self, index: int) -> bool:
        """Return whether a batch of this number is one to evaluate with."""
        return index >= FIRST_EVALUATION

    def generator(self, index: int, salt: int = 0) -> torch.Generator:
        """Return the generator of one batch; ``salt`` parts what is drawn for different ends."""
        mixed = (self.seed * 1_000_003 + index * 7_919 + salt * 104_729) % 2**31
        return torch.Generator().manual_seed(mixed)

    def chance(self, index: int, share: float) -> bool:
        """Return True for about this share of the batches, the same ones each time."""
        return share > 0 and torch.rand(1, generator=self.generator(index, 3)).item() < share


def mlp(inputs: int, width: int, outputs: int, *, layers: int = 2) -> nn.Sequential:
    """Return a small network of tanh units."""
    modules: list[nn.Module] = []
    for i in range(layers):
        modules += [nn.Linear(inputs if i == 0 else width, width), nn.Tanh()]
    return nn.Sequential(*modules, nn.Linear(width, outputs))
