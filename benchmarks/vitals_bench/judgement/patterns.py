"""A small convolutional network that tells noisy patterns apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitals_bench.judgement.tasks import Batch, Poison, Task

CLASSES, SIDE = 8, 12


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return functional.relu(x + cast(Tensor, self.body(x)))


@dataclass(frozen=True, kw_only=True)
class PatternsTask(Task):
    """Eight patterns of 12 x 12 in noise; with label flips the loss cannot reach 0."""

    lr: float = 3e-3
    examples: int = 16
    noise: float = 1.2
    flips: float = 0.1
    """Share of labels that are redrawn."""
    restart: int = 0
    """Steps of a cosine after which the rate jumps up again."""
    epoch: int = 0
    """Batches of an epoch over the same examples; its last batch has two examples."""
    hard: float = 0.0
    """Share of batches with four times the noise."""
    heavy_weights: float = 0.0
    """Share of batches whose loss counts eight times."""
    residual: bool = False
    """Whether the network is a small ResNet with batch norm."""

    def model(self) -> nn.Module:
        """Return the untrained network."""
        if self.residual:
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                Residual(8), Residual(8), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
                nn.Linear(72, CLASSES),
            )  # fmt: skip
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, CLASSES),
        )  # fmt: skip

    def learning_rate(self, index: int) -> float:
        """Return the schedule's rate, with warm restarts where they are asked for."""
        if not self.restart:
            return super().learning_rate(index)
        way = index % self.restart / self.restart
        return self.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * way)))

    def _patterns(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 99)
        return torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)

    def batch(self, index: int) -> Batch:
        """Return pictures, labels, and a weight where there are any."""
        evaluating = self.is_evaluation(index)
        if self.epoch and not evaluating:
            return self._of_epoch(index)
        generator, examples = self.generator(index), self.examples
        y = torch.randint(0, CLASSES, (examples,), generator=generator)
        hard = index % 4 == 0 if evaluating else self.chance(index, self.hard)
        noise = self.noise * (4 if self.hard and hard else 1)
        x = self._patterns()[y] + noise * torch.randn(examples, 1, SIDE, SIDE, generator=generator)
        if self.flips:
            flipped = torch.rand(examples, generator=generator) < self.flips
            drawn = torch.randint(0, CLASSES, (examples,), generator=generator)
            y = torch.where(flipped, drawn, y)
        if self.heavy_weights:
            heavy = not evaluating and self.chance(index, self.heavy_weights)
            return x, y, torch.full((examples,), 8.0 if heavy else 1.0)
        return x, y

    def _of_epoch(self, index: int) -> Batch:
        at, shuffle = index % self.epoch, self.generator(index // self.epoch, 4)
        total = self.epoch * self.examples
        generator = torch.Generator().manual_seed(self.seed * 31 + 1)
        classes = torch.randint(0, CLASSES, (total,), generator=generator)
        noise = torch.randn(total, 1, SIDE, SIDE, generator=generator)
        flipped = torch.rand(total, generator=generator) < self.flips / 2
        labels = torch.where(flipped, (classes + 3) % CLASSES, classes)
        begin, size = at * self.examples, 2 if at == self.epoch - 1 else self.examples
        chosen = torch.randperm(total, generator=shuffle)[begin : begin + size]
        return self._patterns()[classes[chosen]] + self.noise * noise[chosen], labels[chosen]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of each picture."""
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each * batch[2] if len(batch) > 2 else each

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return redrawn labels, a constant, far too bright images, or NaN."""
        x, y = batch[:2]
        if kind == "nan":
            return torch.full_like(x, torch.nan), y
        if kind == "shuffle":
            return x, torch.randint(0, CLASSES, y.shape, generator=self.generator(index, 9))
        if kind == "x50":
            return x * 50, y
        return torch.full_like(x, 3.0), torch.zeros_like(y)
