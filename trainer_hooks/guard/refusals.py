"""Setups that cannot be guarded are refused with a clear error, at set-up or else at the step.

Two cases are invisible from outside: an optimizer that requests a closure only once it is called,
and a gradient hook that reaches its optimizer through a third-party function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_hooks.guard.hook_memory import comm_hook_states, comm_hooks
from trainer_hooks.stateful import HasStateDict
from trainer_hooks.tensors.optimizer_state import params_of
from trainvitals.errors import UsageError
from trainvitals.printable import name_type


def refuse_unguardable(
    model: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    state: Mapping[str, Any],
) -> None:
    """Refuse setups that would escape the guard.

    Raises:
        UsageError: an optimizer needs a closure or steps during backward, a scheduler needs a
            metric, or a registered object cannot be restored.
    """
    for optimizer in optimizers:
        _refuse_optimizer(optimizer)
    _refuse_schedulers(schedulers)
    _refuse_stepped_twice(schedulers)
    _refuse_in_backward(model, optimizers)
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state is {name_type(state)}; it must be a mapping",
            hint="give each object a name: state={'ema': average}",
        )
    for name, value in state.items():
        if not isinstance(value, HasStateDict) and not any(
            value is hook_state for hook_state in comm_hook_states(model)
        ):
            raise UsageError(
                f"state[{name!r}] is {name_type(value)}, which has no state_dict() and "
                "load_state_dict()",
                hint="register objects that have both, or the state of a communication hook on the "
                "module given to watch()",
            )


def _refuse_optimizer(optimizer: Any) -> None:
    """Refuse anything but a torch optimizer whose step needs no closure."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizers holds {name_type(optimizer)}; each must be a torch.optim.Optimizer",
            hint="pass the wrapped optimizer, or derive the wrapper from torch.optim.Optimizer",
        )
    # The class's step: a scheduler's wrapper in the instance adds `self` as an argument.
    needed = [
        parameter.name
        for parameter in [*inspect.signature(type(optimizer).step).parameters.values()][1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"{name}.step() needs {', '.join(needed)}: a closure runs backward again inside the "
            "step, where the ranks cannot agree on the result",
            hint="use an optimizer whose step() takes no closure",
        )


def _refuse_schedulers(schedulers: Sequence[Any]) -> None:
    """Refuse schedulers that no step can move with the update: no ``step()``, or a plateau's."""
    for scheduler in schedulers:
        is_class = isinstance(scheduler, type)
        if is_class or not callable(getattr(scheduler, "step", None)):
            name = f"{name_type(scheduler)}, which has no step()"
            if is_class:
                name = f"the class {scheduler.__name__}, not an instance"
            raise UsageError(
                f"schedulers holds {name}",
                hint="watch(model, optimizer, scheduler), or a list of schedulers",
            )
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers):
        raise UsageError(
            "ReduceLROnPlateau needs a metric and is not stepped at every update",
            hint="leave it out of watch(), step it yourself after each evaluation, and register it "
            "with watch(state={'plateau': scheduler}) so that a rollback restores it",
        )


def _refuse_stepped_twice(schedulers: Sequence[Any]) -> None:
    """Refuse an LR scheduler that is given twice to ``watch``."""
    seen: set[int] = set()
    for scheduler in schedulers:
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if id(part) in seen:
                raise UsageError(
                    f"schedulers holds {name_type(part)} twice, itself or as a part of "
                    "another: it would be stepped twice",
                    hint="pass only the outermost scheduler: a SequentialLR or ChainedScheduler "
                    "steps its parts",
                )
            seen.add(id(part))


def _refuse_in_backward(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for what in _steppers_in_backward(model, optimizers):
        raise UsageError(
            f"{what} steps an optimizer inside backward: the update happens before the ranks can "
            "check the step",
            hint="take the optimizer out of backward (one optimizer over all parameters, stepped "
            "by monitor.step()), or train this run with watch(..., mode='off')",
        )


def _steppers_in_backward(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield a description of each hook that steps an optimizer in backward."""
    for optimizer in optimizers:
        if getattr(optimizer, "_overlap_with_ddp", False):
            yield f"{type(optimizer).__name__}(overlap_with_ddp=True)"
    if any(steps_an_optimizer(hook) for hook, _ in comm_hooks(model)):
        yield "a DDP communication hook"
    param_names = {id(p): f"parameter {n!r}" for n, p in model.named_parameters()}
    for param in (*model.parameters(), *params_of(optimizers)):
        name = param_names.get(id(param), "a parameter")
        if getattr(param, "_in_backward_optimizers", None):
            yield f"_apply_optimizer_in_backward on {name}"
        hooks: Mapping[int, Callable[..., Any]] = (
            getattr(param, "_post_accumulate_grad_hooks", None) or {}
        )
        for hook in hooks.values():
            if steps_an_optimizer(hook):
                yield f"the post-accumulate-grad hook of {name}"


def steps_an_optimizer(hook: Callable[..., Any]) -> bool:
    """Return whether a hook names ``step`` and has an optimizer in its closure, globals or self.

    Hooks that only read gradients, or an optimizer's rate, are accepted.
    """
    referenced: list[object] = []
    while isinstance(hook, functools.partial):
        referenced += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if not inspect.isroutine(hook):
        owner, hook = hook, type(hook).__call__
    if owner is not None:
        referenced += [owner, *getattr(owner, "__dict__", {}).values()]
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    named = _referenced_names(code)
    referenced += [function.__globals__[name] for name in named if name in function.__globals__]
    referenced += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            referenced.append(cell.cell_contents)
        except ValueError:  # an empty cell: it holds nothing
            continue
    steps = bool({"step", "step_param"} & named)
    return steps and any(_is_or_holds_optimizer(value) for value in referenced)


def _referenced_names(code: CodeType) -> set[str]:
    """Return the names that a hook's code refers to, inner functions too, to refuse steps in it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*(_referenced_names(nested) for nested in inner))


def _is_or_holds_optimizer(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(part, Optimizer) for part in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(part, Optimizer) for part in value)
    # DDP's fusion of an optimizer with its buckets holds the optimizer in such a state.
    return isinstance(value, Optimizer) or type(value).__name__ == "_OptimizerHookState"


def joinables(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[Any, ...]:
    """Return objects whose ``Join`` context must be refused: DDP, ZeroRedundancyOptimizer."""
    everything = (*model.modules(), *optimizers)
    return tuple(candidate for candidate in everything if hasattr(candidate, "_join_config"))
