"""Small guarded loops, equal at each start, for the parts of the GPU check."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import trainvitals

HAS_CUDA = torch.cuda.is_available()
DEVICE = (
    torch.device("cuda", int(os.environ.get("GPU_CHECK_INDEX", "0")))
    if HAS_CUDA
    else torch.device("cpu")
)
NAN, INF = float("nan"), float("inf")
HUGE = 1e18
"""Finite, but the sum of a million squares of it overflows float32."""
SINGLE, HALF = torch.float32, torch.bfloat16


def make_model(width: int = 64, depth: int = 2, dtype: torch.dtype = SINGLE) -> nn.Sequential:
    """Return a network with the same weights at each call; batch norm gives it buffers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 8)).to(DEVICE, dtype)


def make_batches(num: int, width: int = 64, dtype: torch.dtype = SINGLE) -> list[Tensor]:
    """Return the same batches at each call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, width, generator=generator).to(DEVICE, dtype) for _ in range(num)]


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss that decreases in training."""
    loss: Tensor = model(batch).float().square().mean()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW, default": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


class GuardedLoop:
    """A loop under ``watch`` or ``attach``. Leaving the ``with`` closes it.

    Args:
        model: network to train; None: the small one.
        make_optimizer: called with the parameters; None: fused AdamW.
        options: those of the guard; also ``guard``, which is ``trainvitals.watch`` by default, and
            ``ema``, which is registered as a state.

    Raises:
        AssertionError: at the end, if Vitals caught an error of its own.
    """

    def __init__(
        self, model: nn.Module | None = None, make_optimizer: Any = None, **options: Any
    ) -> None:
        self.model = make_model() if model is None else model
        self.ema: trainvitals.EMA | None = options.pop("ema", None)
        make_optimizer = make_optimizer or OPTIMIZERS["AdamW, fused"]
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.model.parameters())
        options |= {} if self.ema is None else {"state": {"ema": self.ema}}
        guard = options.pop("guard", trainvitals.watch)
        self._is_attached = guard is trainvitals.attach
        self._scaler = options.get("scaler")
        self.monitor: Any = guard(self.model, self.optimizer, **options)

    def step(self, batch: Tensor, factor: float = 1.0) -> Any:
        """Train one step; the loss is multiplied by ``factor``."""
        self.optimizer.zero_grad()
        loss = compute_loss(self.model, batch) * factor
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return self.update(loss)

    def update(self, loss: Tensor) -> Any:
        """Apply the gradients that exist."""
        if not self._is_attached:
            return self.monitor.step(loss, max_norm=None if self._scaler else 1.0)
        self.monitor.loss(loss)
        return self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return copies of parameters, buffers, optimizer state and EMA weights, by name."""
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        for i, moments in enumerate(self.optimizer.state.values()):
            named |= {f"optim.{i}.{k}": v for k, v in moments.items() if isinstance(v, Tensor)}
        named |= {f"ema.{n}": t for n, t in self.ema.named_buffers()} if self.ema else {}
        return {name: tensor.detach().clone() for name, tensor in named.items()}

    def __enter__(self) -> GuardedLoop:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.monitor.__exit__(kind, error, trace)
        swallowed = self.monitor.swallowed_errors
        assert error is not None or not swallowed, f"Vitals caught its own errors: {swallowed}"


def find_differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are missing or differ in a bit."""
    equal = set()
    for name in first.keys() & second.keys():
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (first[name], second[name])]
        equal |= {name} if torch.equal(*bits) else set()
    return sorted((first.keys() | second.keys()) - equal)
