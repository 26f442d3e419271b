"""Mistakes of a loop that only its first steps show; checked only there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.tensors.optimizer_state import params_of

_SUSPICIOUS_NORM = 100.0
"""First gradient norm above which the process is searched for a gradient scaler."""
_SCALED_NORM = 0.05
"""Part of a scale that the norm must reach, per unit of a loss above 1, if the scaler itself has
scaled nothing: a loss times ``scaler.get_scale()`` leaves no other trace. A norm that is large
because the loss is large is normal."""
GIVEN_SCALERS: WeakSet[torch.amp.GradScaler] = WeakSet()
"""Scalers given to a monitor of this process."""


class BackwardCounter:
    """Counts the backwards that are summed in one parameter's gradient.

    It uses a hook on that parameter, which stays only for the first steps.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.count = 0
        self._grad: Callable[[], object] = lambda: None
        self._hook = None
        for param in params_of(optimizers):
            # A sharded parameter's part gets its gradient in a different way.
            if param.requires_grad and param.is_leaf and not hasattr(param, "to_local"):
                self._hook = param.register_post_accumulate_grad_hook(self._count_backward)
                return

    def _count_backward(self, param: Tensor) -> None:
        """Count a backward that adds to the observed parameter's gradient, to detect misuse."""
        is_added = param.grad is not None and self._grad() is param.grad
        self.count = self.count + 1 if is_added else 1
        self._grad = (lambda: None) if param.grad is None else weakref.ref(param.grad)

    def close(self) -> None:
        """Remove the hook that counted backwards to detect misuse."""
        if self._hook is not None:
            self._hook.remove()


def is_of_one_backward(loss: object) -> bool:
    """Return whether a loss seems to belong to a single backward, to detect misuse.

    A number, a tensor without its graph, and a sum or mean of several losses may describe all
    backwards of a step.
    """
    node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
    while node is not None and node.name().startswith(("Mean", "Sum", "Div", "Mul")):
        node = node.next_functions[0][0]
    return node is not None and not node.name().startswith(("Add", "Stack", "Cat"))


def scale_of_unknown_scaler(grad_norm: float, loss: float | None) -> float | None:
    """Return the initial scale of a gradient scaler that was not given to ``watch``, if any.

    It checks all objects of the process, so it only does so if the norm is suspicious.
    """
    if grad_norm <= _SUSPICIOUS_NORM:
        return None
    for candidate in gc.get_objects():
        # Check the type only: attribute access can run third-party code.
        is_scaler = issubclass(type(candidate), torch.amp.GradScaler)
        if not is_scaler or candidate in GIVEN_SCALERS or not candidate._enabled:
            continue
        scaled = _SCALED_NORM * candidate._init_scale * max(1.0, abs(loss or 0.0))
        by_hand = candidate._scale is None and grad_norm >= scaled
        if by_hand or _is_never_updated(candidate):
            return float(candidate._init_scale)
    return None


def _is_never_updated(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a misused scaler has scaled a loss, and its ``update()`` was never called."""
    if not scaler._enabled or scaler._scale is None or scaler._growth_tracker is None:
        return False
    return not scaler._growth_tracker.item() and scaler._scale.item() == scaler._init_scale


def foreign_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[str]:
    """Return a warning about each torch optimizer that holds none of the model's parameters.

    Third-party wrappers may hold copies of them.
    """
    model_params = {id(param) for param in model.parameters()}
    return [
        f"{type(optimizer).__name__} holds none of the model's parameters: create it from "
        "model.parameters() after the model was moved, wrapped and sharded"
        for optimizer in optimizers
        if type(optimizer).__module__.startswith("torch.optim")
        and not any(id(p) in model_params for p in params_of([optimizer]))
    ]


def parameters_left_out(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return a warning if parameters need gradients and are in none of the torch optimizers.

    Third-party wrappers may hold copies of them.
    """
    if not all(type(optimizer).__module__.startswith("torch.optim") for optimizer in optimizers):
        return []
    optimizer_params = set(map(id, params_of(optimizers)))
    names = [
        n for n, p in model.named_parameters() if p.requires_grad and id(p) not in optimizer_params
    ]
    if not optimizer_params or not names:
        return []
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return [
        f"parameter {names[0]!r}{more} in no optimizer, so not trained: add them, or freeze them "
        "with requires_grad_(False), which also saves computing their gradients"
    ]


def foreign_schedulers(schedulers: Iterable[Any], optimizers: Sequence[Optimizer]) -> list[str]:
    """Return a warning about each scheduler whose optimizer shares no group with the given ones."""
    group_ids = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    pairs = [(scheduler, getattr(scheduler, "optimizer", None)) for scheduler in schedulers]
    others = [(scheduler, other) for scheduler, other in pairs if isinstance(other, Optimizer)]
    return [
        f"{type(scheduler).__name__} sets the rates of another {type(other).__name__} than the one "
        "given to watch(), whose rates stay unchanged: create it from that one, "
        f"{type(scheduler).__name__}(optimizer, ...)"
        for scheduler, other in others
        if not any(id(group) in group_ids for group in other.param_groups)
    ]
