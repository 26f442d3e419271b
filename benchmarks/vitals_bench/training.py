"""Trainings of benchmarks: GPTs of a size, monitored loops, an optimizer without effect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_hooks
from trainer_hooks.demo.model import VOCABULARY, ByteGPT
from trainer_hooks.monitor import Monitor
from vitals_bench.peers.loggers import NAMES, Logger

WIDTHS = {1: (128, 5), 5: (256, 6), 10: (320, 8), 50: (512, 16)}
"""Millions of parameters, about: the width and the number of layers."""
CONTEXT = 128


def gpt(millions: int) -> ByteGPT:
    """Return a GPT of about so many parameters, the same each time."""
    width, num_layers = WIDTHS[millions]
    torch.manual_seed(0)
    return ByteGPT(width=width, num_layers=num_layers, num_heads=4, context=CONTEXT)


def tokens(batch: int) -> Tensor:
    """Return a batch of random bytes."""
    return torch.randint(0, VOCABULARY, (batch, CONTEXT + 1))


def size_of(model: nn.Module) -> str:
    """Return the number of parameters as text."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters"


class Loop:
    """A model with its optimizer, and the step that everybody writes."""

    def __init__(self, millions: int, batch: Tensor) -> None:
        self.model = gpt(millions)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = batch
        self.clip_seconds: list[float] = []
        """CPU time of the thread in each clip."""

    def backward(self) -> Tensor:
        """Return the loss after its backward."""
        loss: Tensor = self.model(self.batch)
        loss.backward()
        return loss

    def step(self) -> tuple[Tensor, Tensor]:
        """Train one step; return loss and norm, unread."""
        loss, begin = self.backward(), time.thread_time()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.clip_seconds.append(time.thread_time() - begin)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def step_as_in_tutorials(self) -> None:
        """Train one step with a norm of each parameter, each read by itself."""
        loss = self.backward()
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.norm(2).item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()

    def logged_by(self, logger: Logger) -> Callable[[], None]:
        """Return the step with twelve scalars told to a logger, two of them read for it."""
        steps = iter(range(1_000_000))

        def step() -> None:
            loss, norm = self.step()
            logger.log(next(steps), [loss.item(), norm.item(), *([0.5] * (len(NAMES) - 2))])

        return step


class Nothing(Optimizer):
    """An optimizer whose step does nothing: what is left of ``monitor.step`` is ours."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Gradients:
    """Gradients that are given back after each step, as another backward would."""

    def __init__(self, params: Sequence[nn.Parameter], *, filled: bool = True) -> None:
        self._params = list(params)
        if filled:
            for param in self._params:
                param.grad = torch.randn_like(param)
        self._grads = [param.grad for param in self._params]

    def give_back(self) -> None:
        """Put them where a backward leaves them."""
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad


@contextmanager
def own_place(*, agent: bool = False) -> Iterator[Path]:
    """Give runs and journals folders that are gone afterwards; no agent unless asked for."""
    shared = Path("/dev/shm")
    memory = shared if os.access(shared, os.W_OK) else None
    options: Any = {"prefix": "vitals-bench-", "ignore_cleanup_errors": True}
    with TemporaryDirectory(**options) as runs, TemporaryDirectory(dir=memory, **options) as shm:
        variables = {
            "VITALS_DIR": runs,
            "VITALS_SHM": shm,
            "VITALS_AGENT": None if agent else "off",
        }
        before = {name: os.environ.get(name) for name in variables}
        _set(variables)
        try:
            yield Path(runs)
        finally:
            _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextmanager
def watched(model: nn.Module, optimizer: Optimizer, **options: Any) -> Iterator[Monitor]:
    """Watch a loop in a place of its own."""
    with own_place(), trainer_hooks.watch(model, optimizer, **options) as monitor:
        yield monitor
