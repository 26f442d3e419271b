"""The losses of the micro-batches whose gradients make up the next step.

A loss counts as long as the gradients that it describes exist. A loop may drop them with
``zero_grad()`` and ``continue`` after an unwanted batch. Then the losses given before are dropped
too: otherwise the next step gets a wrong loss, and a NaN that the loop itself had dropped would
skip a clean update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.tensors.optimizer_state import params_of

MAX_FRESH = 64
"""Most losses since the last backward that are kept separate; a loop gives one per backward."""


class _MicroLoss(NamedTuple):
    part: Tensor
    """The loss times its weight."""
    weight: Tensor | float
    is_weighted: bool
    ran: list[bool] | None = None
    """Not empty once the loss's own backward has started; None if that is unknown."""

    @property
    def may_count(self) -> bool:
        """Return whether a micro-batch's loss may have had its backward: yes if unknown."""
        return self.ran is None or bool(self.ran)

    def plus(self, other: _MicroLoss) -> _MicroLoss:
        """Return the sum of two losses that both count."""
        is_weighted = self.is_weighted and other.is_weighted
        return _MicroLoss(self.part + other.part, self.weight + other.weight, is_weighted)


class MicroLosses:
    """Adds up the losses between two steps, and drops those whose gradients were dropped.

    It follows one parameter's gradient with a hook, which is registered at the first loss, and the
    optimizers' ``zero_grad``. The loop may give a loss before or after its backward. If no
    parameter can be followed (sharded ones get their gradients differently), all losses count.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._settled: _MicroLoss | None = None
        """Sum of the losses whose backward has run."""
        self._fresh: list[_MicroLoss] = []
        """Losses given before their backward."""
        self._last: Callable[[], object] = lambda: None
        self._gradient: Callable[[], object] = lambda: None
        self._is_followed = self._is_cleared = False
        self._ran = False
        """Whether a backward has run since the last step."""
        self._own_ran = False
        """Whether any loss given before its backward is known to have run."""
        self._comes_after = False
        """Whether the loop gives a loss after its backward."""
        self.num_given = self.num_windows = 0
        """Losses, and newly created gradients, since the last step."""
        self._undo: list[Callable[[], None]] = []

    def add(self, loss: object, part: Tensor, weight: Tensor | float, *, is_weighted: bool) -> None:
        """Add one micro-batch's loss; ``part`` is the loss times its weight, without its graph."""
        self.num_given += 1
        if not self._is_followed:
            self._follow()
        if self._settled is None and not self._fresh:
            self._comes_after = self._ran
        # A weak reference: a strong one would keep the graph of the loss too.
        self._last = weakref.ref(loss) if isinstance(loss, Tensor) else lambda: loss
        if self._comes_after:
            self._add_settled(_MicroLoss(part, weight, is_weighted))
            return
        ran: list[bool] | None = None
        if isinstance(loss, Tensor) and loss.requires_grad:
            ran = []
            loss.register_hook(lambda _: ran.append(True))
        if len(self._fresh) == MAX_FRESH:
            self._add_settled(self._fresh.pop(0))
        self._fresh.append(_MicroLoss(part, weight, is_weighted, ran))

    def is_last(self, loss: object) -> bool:
        """Return whether ``loss`` is the micro-batch's object that was added last."""
        return loss is self._last()

    def __bool__(self) -> bool:
        return self._settled is not None or bool(self._fresh)

    def clear(self) -> None:
        """Drop all micro-batches' losses: the step does not count."""
        self._settled, self._fresh, self._ran, self._own_ran = None, [], False, False

    def take(self) -> tuple[Tensor, Tensor | float, bool] | None:
        """Return the sum of the step's losses, and drop them; None if no loss counts.

        Returns:
            The sum of the losses times their weights, the sum of the weights, and whether the loop
            gave all weights.
        """
        if not self:
            self._ran = self._own_ran = False
            self.num_given = self.num_windows = 0
            return None
        # If only some of them ran, the loop abandoned the others before their backward.
        if self._own_ran or any(loss.ran for loss in self._fresh):
            self._fresh = [loss for loss in self._fresh if loss.may_count]
        for loss in self._fresh:
            self._add_settled(loss)
        total = self._settled
        self.clear()
        self.num_given = self.num_windows = 0
        return None if total is None else (total.part, total.weight, total.is_weighted)

    def close(self) -> None:
        """Remove the hooks that follow the micro-batches' backwards."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _add_settled(self, loss: _MicroLoss) -> None:
        """Add a micro-batch's loss, whose backward has run, to the step's sum."""
        self._settled = loss if self._settled is None else self._settled.plus(loss)

    def _follow(self) -> None:
        """Follow micro-batches by the first parameter whose gradient can be observed."""
        self._is_followed = True
        for param in params_of(self._optimizers):
            if param.requires_grad and param.is_leaf and not hasattr(param, "to_local"):
                self._ran = param.grad is not None
                self._gradient = _grad_reference(param)
                hook = _weakly(self._record_backward)
                self._undo.append(param.register_post_accumulate_grad_hook(hook).remove)
                break
        for optimizer in self._optimizers:
            self._watch_clearing(optimizer)

    def _watch_clearing(self, optimizer: Optimizer) -> None:
        """Record calls of ``zero_grad``: in place, or with DDP's views, the gradient stays."""
        real, reference = optimizer.zero_grad, weakref.ref(self)

        def zero_grad(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if (losses := reference()) is not None:
                losses._is_cleared = True
            real(*args, **kwargs)

        ours = MethodType(zero_grad, optimizer)
        optimizer.zero_grad = ours  # type: ignore[method-assign]

        def put_back() -> None:
            if vars(optimizer).get("zero_grad") is ours:
                del optimizer.zero_grad

        self._undo.append(put_back)

    def _record_backward(self, param: Tensor) -> None:
        """Record a backward that added to the followed gradient, or created a new one."""
        is_new = self._is_cleared or self._gradient() is not param.grad
        self._is_cleared, self._ran, self._gradient = False, True, _grad_reference(param)
        if is_new:
            self._settled = None
            self.num_windows += 1
        fresh, self._fresh = self._fresh, []
        for loss in fresh:
            # Several losses may wait for their backwards, one after the other.
            if loss.may_count:
                self._add_settled(loss)
                self._own_ran |= loss.ran is not None
            else:
                self._fresh.append(loss)


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook on micro-batches that calls the method as long as its object exists.

    A parameter that a live graph holds hides its hooks from the garbage collector: a strong hook
    would keep the monitor of a loop that dropped it.
    """
    reference = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        if (method := reference()) is not None:
            method(param)

    return hook


def _grad_reference(param: Tensor) -> Callable[[], object]:
    """Return a weak reference to the gradient by which micro-batches are followed."""
    return (lambda: None) if param.grad is None else weakref.ref(param.grad)
