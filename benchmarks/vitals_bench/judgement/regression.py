"""An MLP that learns what a teacher says, with the noise that regressions meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitals_bench.judgement.tasks import Batch, Poison, Task, mlp

INPUTS = 16


@dataclass(frozen=True, kw_only=True)
class RegressionTask(Task):
    """Squared error of a network of tanh units against a smaller one with noise."""

    lr: float = 3e-3
    examples: int = 32
    noise: float = 0.1
    heavy_tails: bool = False
    """Whether targets have noise of Student's t with two degrees of freedom."""
    batch_ramp: bool = False
    """Four examples in the first and the last third, 64 between."""
    hard: float = 0.0
    """Share of batches with inputs four times and targets three times as large: about 10x loss."""
    every: int = 0
    """Every so many batches a hard one."""
    burst: int = 0
    """Three consecutive hard batches per ``burst`` batches."""
    fixed: int = 0
    """Number of batches that come again and again; with a large rate the optimizer spikes."""
    new: int = 0
    """Batch from which on another teacher speaks."""
    heavy_weights: float = 0.0
    """Share of batches whose loss counts eight times."""
    hinge: bool = False
    """Whether the loss is zero within 0.3 of the target, so that many gradients are 0."""

    @property
    def changes(self) -> tuple[int, ...]:
        """Another teacher, or another batch size, begins here."""
        ramp = (self.steps // 3, 2 * self.steps // 3) if self.batch_ramp else ()
        return (*ramp, self.new) if self.new else ramp

    def model(self) -> nn.Module:
        """Return the untrained network."""
        return mlp(INPUTS, 64, 1)

    def _teacher(self, x: Tensor, gain: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 77)
        hidden = torch.randn(INPUTS, 32, generator=generator) * 0.5
        out = torch.randn(32, 1, generator=generator) * 0.5
        return torch.tanh(x @ hidden * gain) @ out

    def batch(self, index: int) -> Batch:
        """Return inputs, targets, and a weight where there are any."""
        evaluating = self.is_evaluation(index)
        index = index % self.fixed if self.fixed and not evaluating else index
        generator, examples = self.generator(index), self._examples(index)
        x = torch.randn(examples, INPUTS, generator=generator)
        y = self._teacher(x)
        if self.new and (evaluating or index >= self.new):
            y = self._teacher(x.flip(1), 1.5) + 0.5
        y = y + self.noise * torch.randn(examples, 1, generator=generator)
        if self.heavy_tails and not evaluating:
            normal = torch.randn(examples, 1, generator=generator)
            squares = torch.randn(2, examples, 1, generator=generator).square().mean(0)
            y = y + 0.3 * normal / squares.sqrt()
        if self._is_hard(index):
            x = x * 4
            y = self._teacher(x) * 3
        if self.heavy_weights:
            heavy = not evaluating and self.chance(index, self.heavy_weights)
            return x, y, torch.full((examples,), 8.0 if heavy else 1.0)
        return x, y

    def _examples(self, index: int) -> int:
        if not self.batch_ramp or self.is_evaluation(index):
            return self.examples
        return 64 if self.steps // 3 <= index < 2 * self.steps // 3 else 4

    def _is_hard(self, index: int) -> bool:
        if self.is_evaluation(index):
            return bool(self.hard or self.every or self.burst) and index % 4 == 0
        return (
            self.chance(index, self.hard)
            or (self.every > 0 and index % self.every == self.every - 1)
            or (self.burst > 0 and index % self.burst >= self.burst - 3)
        )

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return squared errors, or what of the errors is beyond the hinge."""
        error: Tensor = (model(batch[0]) - batch[1]).squeeze(1)
        each = (error.abs() - 0.3).clamp(min=0.0) if self.hinge else error.square()
        return each * batch[2] if len(batch) > 2 else each

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return targets of other inputs, a constant, far too large inputs, or NaN."""
        x, y = batch[:2]
        if kind == "nan":
            return torch.full_like(x, torch.nan), y
        if kind == "shuffle":
            return x, y[torch.randperm(len(y), generator=self.generator(index, 9))]
        if kind == "x50":
            return x * 50, y
        return torch.full_like(x, 1.0), torch.full_like(y, 100.0)
