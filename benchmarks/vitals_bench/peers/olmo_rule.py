"""OLMo-core's skip-step optimizer, written from its published description and not from its code.

It keeps the last 128 losses and gradient norms. From the 64th step on, a step counts only if both
are below their mean plus six standard deviations; the update is multiplied by 1 or by 0.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

WINDOW = 128
UNGUARDED = 64
SIGMAS = 6.0


class SpikeRule:
    """Decides on one step at a time."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def factor(self, loss: float, norm: float) -> float:
        """Return 1.0 for a step that counts and 0.0 for one that does not, and take it in."""
        good = _is_usual(loss, self._losses) and _is_usual(norm, self._norms)
        self._losses.append(loss)
        self._norms.append(norm)
        return float(good)


def _is_usual(value: float, window: deque[float]) -> bool:
    if len(window) < UNGUARDED:
        return True
    if not all(map(math.isfinite, window)):
        return False  # mean and deviation are NaN, and nothing is at most NaN
    return value - statistics.fmean(window) <= SIGMAS * statistics.stdev(window)


class SkipStepAdamW(torch.optim.Optimizer):
    """AdamW whose update is multiplied by the rule's factor."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.rule = SpikeRule()
        self.num_skipped = 0
        self.latest_loss = math.nan
        self.latest_norm = math.nan

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter, by nothing where the rule says so."""
        factor = self.rule.factor(self.latest_loss, self.latest_norm)
        self.num_skipped += factor == 0.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group, factor)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], factor: float) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0.0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += factor
        state["mean"].add_(factor * 0.1 * (grad - state["mean"]))
        state["square"].add_(factor * 0.001 * (grad * grad - state["square"]))
        step = max(state["step"], 1.0)
        mean, square = state["mean"] / (1 - 0.9**step), state["square"] / (1 - 0.999**step)
        update = mean / (square.sqrt() + 1e-8) + group["weight_decay"] * param
        param.add_(-group["lr"] * factor * update)
