"""What is trained in a bench: GPTs of a size, loops that are watched, an optimizer of no effect."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
    """Return the number of parameters in words."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters"


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
        wanted = {"VITALS_DIR": runs, "VITALS_SHM": shm, "VITALS_AGENT": None if agent else "off"}
        before = {name: os.environ.get(name) for name in wanted}
        _set(wanted)
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
