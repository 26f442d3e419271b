"""``mode="off"``: the loop as it was before Vitals, through the same calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.guard import unscale
from trainer_hooks.outcome import StepOutcome


class Unwatched:
    """Has the methods of ``Monitor``; clips, steps, schedules and zeroes, and nothing else."""

    run_id = ""
    attempt = 0
    batch_position = None

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        schedulers: tuple[Any, ...],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._scaler = scaler
        self.step_index = 0
        self.swallowed_errors: dict[str, int] = {}

    def batches(self, loader: Iterable[Any], *, epochs: int = 1) -> Iterator[Any]:
        """Yield the loader's batches, epoch after epoch."""
        for epoch in range(epochs):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            yield from loader

    def micro(self, loss: Tensor, weight: Tensor | float = 1.0) -> None:
        """Do nothing."""

    def observe(self, **values: float) -> None:
        """Do nothing."""

    def evaluate(self, **values: float) -> None:
        """Do nothing."""

    def expect(self, reason: str, *, steps: int = 200) -> None:
        """Do nothing."""

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        max_norm: float | None = None,
    ) -> StepOutcome:
        """Clip, update, schedule and zero the gradients, whatever they are."""
        scaler = self._scaler
        if scaler is not None and scaler.is_enabled():
            unscale(scaler, self._optimizers)
        if max_norm is not None:
            groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], max_norm)
        for optimizer in self._optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
        self.step_index += 1
        return StepOutcome(step=self.step_index - 1, next_step=self.step_index)

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None
