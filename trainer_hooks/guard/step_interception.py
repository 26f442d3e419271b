"""Interception of the steps of a loop that keeps its own ``optimizer.step()``.

``step`` of each optimizer, and of the gradient scaler, is replaced on the object itself and
restored at the end. A step hook alone is not enough: it cannot skip an update, and a compiled step
drops what it sets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.guard.optimizers import is_state_initialization, is_stepped
from trainvitals.errors import UsageError

Guarded = Callable[[int, bool], None]
"""Called with the optimizer's index, and whether its step starts a round of all optimizers."""

Function = TypeVar("Function", bound=Callable[..., Any])
_SCHEDULED = "_wrapped_by_lr_sched"
"""A scheduler's mark on ``step``: without it, the scheduler warns that its count was lost."""


def not_compiled(function: Function) -> Function:
    """Exclude a guarded function from compiled graphs: it reads clocks and runs collectives.

    With ``fullgraph=True`` torch raises an error instead, and prints the reason.
    """
    reason = (
        "monitor.step() talks to other ranks and reads clocks, so it must stay outside the "
        "compiled graph: compile the model, or forward and backward, and keep monitor.step() out "
        "of fullgraph=True"
    )
    disable: Any = torch.compiler.disable
    keywords = {"reason": reason} if "reason" in signature(disable).parameters else {}
    return cast(Function, disable(function, **keywords))


class StepInterception:
    """Replaces ``step`` until it is closed; ``guarded`` still calls the real one.

    A round ends when an optimizer is stepped a second time.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        guarded: Guarded,
        faults: FaultCounter,
    ) -> None:
        self._guarded = guarded
        self._faults = faults
        self.runs_closures = False
        """Whether a closure is called, once and before the step, instead of being refused."""
        self._round: set[int] = set()
        self._inside = self._closed = False
        self._undo: list[Callable[[], None]] = []
        for index, optimizer in enumerate(optimizers):
            self._replace_optimizer_step(index, optimizer)
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may lack them
                hook = optimizer.register_step_pre_hook(not_compiled(self._check_bypassing_step))
                self._undo.append(hook.remove)
        if scaler is not None and scaler.is_enabled():
            self._replace_scaler_step(scaler, optimizers)

    def close(self) -> None:
        """Restore every ``step``; if our wrapper was wrapped since, it only calls the original."""
        self._closed = True
        for undo in self._undo:
            undo()

    def _replace_optimizer_step(self, index: int, optimizer: Optimizer) -> None:
        """Replace ``optimizer.step`` by a call of the guarded step."""
        real = optimizer.step

        @not_compiled
        def route(*args: Any, **kwargs: Any) -> Any:
            scaled = getattr(optimizer, "found_inf", None) is not None
            if self._inside or self._closed or scaled or is_state_initialization(optimizer, kwargs):
                return real(*args, **kwargs)
            return self._intercept_step(index, args, kwargs)

        # Without marks: with the mark of a compiled step, a compiler would trace through ours.
        @functools.wraps(getattr(real, "__func__", real), updated=())
        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return route(*args, **kwargs)

        step.stands_in_for = vars(optimizer).get("step")  # type: ignore[attr-defined]
        if hasattr(real, _SCHEDULED):
            setattr(step, _SCHEDULED, True)
        self._replace_step(optimizer, MethodType(step, optimizer))

    def _replace_scaler_step(
        self, scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer]
    ) -> None:
        """Route ``scaler.step`` around its own verdict, so that a skipped step is seen as well.

        All ranks then enter the exchange, and an overflow on one is an overflow on all.
        """
        real, position = scaler.step, {id(optimizer): i for i, optimizer in enumerate(optimizers)}

        @not_compiled
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            index = position.get(id(optimizer))
            ours = not (self._inside or self._closed or is_stepped(scaler, optimizer))
            if ours and index is not None:
                return self._intercept_step(index, args, kwargs)
            return real(optimizer, *args, **kwargs)

        self._replace_step(scaler, step)

    def _replace_step(self, owner: Any, ours: Callable[..., Any]) -> None:
        """Replace the ``step`` of an optimizer or scaler by ours until ``close``."""
        before = vars(owner).get("step")

        def put_back() -> None:
            if vars(owner).get("step") is ours:
                vars(owner).pop("step")
                if before is not None:
                    owner.step = before

        owner.step = ours
        self._undo.append(put_back)

    def _intercept_step(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the guarded step instead of ``optimizer.step``; run or refuse a closure."""
        present = [value for value in (*args, *kwargs.values()) if value is not None]
        if self.runs_closures and len(present) == 1 and callable(present[0]):
            with torch.enable_grad():
                result = present[0]()
            self._intercept_step(index, (), {})
            return result
        if present:
            raise UsageError(
                "optimizer.step() was given a closure or other arguments, which attach() does not "
                "support",
                hint="run forward and backward before optimizer.step(), and call it without them",
            )
        begins = not self._round or index in self._round
        self._round = {index} if begins else self._round | {index}
        self._inside = True
        try:
            self._guarded(index, begins)
        finally:
            self._inside = False
        return None

    def _check_bypassing_step(
        self, optimizer: Optimizer, _args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a step that bypassed the route before any guarded step; later only count it."""
        if self._inside or self._closed or is_state_initialization(optimizer, kwargs):
            return
        name = type(optimizer).__name__
        error = UsageError(
            f"{name}.step was saved before attach(), so it is not guarded",
            hint="call attach() first and torch.compile(optimizer.step) after it; or to keep the "
            "step itself compiled, optimizer.step = torch.compile(optimizer.step) and then "
            "attach()",
        )
        if getattr(optimizer, "found_inf", None) is not None:
            error = UsageError(
                f"{name} is stepped by a gradient scaler that was not given to attach()",
                hint="attach(model, optimizer, scaler=scaler)",
            )
        if not self._round:
            raise error
        self._faults.count("unguarded_step", error)
