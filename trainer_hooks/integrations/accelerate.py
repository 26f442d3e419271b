"""Accelerate: guards the ``optimizer.step()`` of a prepared loop.

    attached = attach(accelerator, model, optimizer)

If the loop clips through the accelerator, gradients are judged before the clip; otherwise in
``optimizer.step()``.
"""

from __future__ import annotations

import functools
import json
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_hooks
from trainer_hooks._attach import Attached
from trainer_hooks.arguments import as_list
from trainer_hooks.guard.optimizers import ModelLoadHook
from trainer_hooks.integrations import framework
from trainer_hooks.integrations.framework import Options, is_off, require_version
from trainer_hooks.tensors.optimizer_state import params_of
from trainvitals.auto_clip import MaxNorm
from trainvitals.errors import UsageError

OLDEST = "1.4"
_ELSEWHERE = {
    "DEEPSPEED": "accelerator.prepare() makes the engine that does: call attach() after it; in "
    "Hugging Face's Trainer, trainer.add_callback(VitalsCallback(trainer)) finds it",
    "MEGATRON_LM": "guard Megatron's own loop with trainvitals.attach()",
    "XLA": "trainer_hooks guards CPU and CUDA devices only",
}


def attach(
    accelerator: Any,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    max_norm: MaxNorm | None = None,
    **options: Unpack[Options],
) -> Attached:
    """Guard a loop that trains with Accelerate. Call on all ranks, after ``prepare``.

    The loop stays as it is. ``accelerator.backward`` provides the loss, ``clip_grad_norm_`` the
    norm of the clip, and ``log`` the scalars; ``save_state`` and ``load_state`` include the state
    of the guard; ``end_training`` ends the run.

    Args:
        accelerator: accelerator that prepared the model and the optimizer.
        model: the prepared model, or several.
        optimizer: the prepared optimizer, or several that are stepped after the same backward.
        max_norm: only for a loop that does not clip: inf measures the norm without a clip, any
            other number clips to it in ``optimizer.step()``, and ``"auto"`` clips to a multiple of
            the recent median norm.
        options: as for ``trainer_hooks.attach``.

    Raises:
        UsageError: the loop trains in a way that cannot be guarded; the message says what to do.
        TrainingHalted: the escalation policy halted this run, and no operator resumed it.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    guarded = guard_accelerator(
        accelerator, whole, as_list(optimizer), max_norm=max_norm, options=options
    )
    attached, _ = guarded
    if isinstance(cast(Any, attached), Attached):
        _AccelerateLoop(accelerator, attached, _state_file(accelerator, optimizer))
        for each in models if len(models) > 1 else ():
            attached.when_closed(ModelLoadHook(each, attached._device.shadow).release)
    return attached


def guard_accelerator(
    accelerator: Any,
    model: nn.Module,
    optimizers: Sequence[Any],
    *,
    options: Options,
    max_norm: MaxNorm | None = None,
    parts: bool = False,
) -> tuple[Attached, AcceleratorHooks | None]:
    """Attach to the optimizers, and get losses and clip norm from the accelerator.

    The accelerator's methods are replaced until the guard is closed. With ``parts``, the losses of
    a step's micro-batches are parts of its loss, to be added.
    """
    require_version("accelerate", OLDEST, extra="accelerate")
    if not is_off(options):
        engine = accelerator.deepspeed_engine_wrapped if _is_deepspeed(accelerator) else None
        if engine is not None:
            return _guard_engine(engine.engine, max_norm, options), None
        refuse_accelerate_loop(accelerator.distributed_type, optimizers)
    attached: Any = trainer_hooks.attach(
        model,
        [unwrap_optimizer(optimizer) for optimizer in optimizers],
        scaler=accelerator.scaler,
        max_norm=max_norm,
        **options,
    )
    if not isinstance(attached, Attached):  # off
        return attached, None
    owns_clip = max_norm is not None
    return attached, AcceleratorHooks(
        accelerator, optimizers, attached, owns_clip=owns_clip, parts=parts
    )


def _is_deepspeed(accelerator: Any) -> bool:
    """Return whether Accelerate trains with DeepSpeed."""
    return getattr(accelerator.distributed_type, "value", "") == "DEEPSPEED"


def _guard_engine(engine: Any, max_norm: MaxNorm | None, options: Options) -> Attached:
    """Guard DeepSpeed's engine, which receives the losses, clips and steps."""
    from trainer_hooks.integrations import deepspeed

    if max_norm is not None:
        raise UsageError(
            f"max_norm is {max_norm}, but DeepSpeed's engine clips as its own settings say",
            hint="leave max_norm out of attach(), and give gradient_clipping to DeepSpeed",
        )
    return deepspeed.attach(engine, **options)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Accelerate's wrapper."""
    while hasattr(optimizer, "accelerator_state"):
        optimizer = optimizer.optimizer
    return cast(Optimizer, optimizer)


def refuse_accelerate_loop(distributed_type: Any, optimizers: Sequence[Any]) -> None:
    """Refuse loops of Accelerate that cannot be guarded correctly."""
    kind = str(getattr(distributed_type, "value", distributed_type)).upper()
    if kind in _ELSEWHERE:
        raise UsageError(
            f"Accelerate trains with {kind}, which makes the updates itself",
            hint=_ELSEWHERE[kind],
        )
    if not all(hasattr(optimizer, "accelerator_state") for optimizer in optimizers):
        raise UsageError(
            "an optimizer was given to attach() that accelerator.prepare() has not returned",
            hint="model, optimizer = accelerator.prepare(model, optimizer), and then attach()",
        )
    names = [type(unwrap_optimizer(optimizer)).__name__ for optimizer in optimizers]
    unguarded = {"Lomo", "AdaLomo", "LayerWiseDummyOptimizer"}.intersection(names)
    if unguarded:
        raise UsageError(
            f"{unguarded.pop()} updates parameters inside backward, before their gradients can be "
            "checked",
            hint="use an optimizer whose step() makes the update",
        )
    scaled = any(getattr(optimizer, "scaler", None) is not None for optimizer in optimizers)
    if scaled and len(optimizers) > 1:
        raise UsageError(
            f"{len(optimizers)} optimizers with one gradient scaler: Accelerate updates the scaler "
            "after each of them, so the scale of the others' gradients is lost",
            hint="mixed_precision='bf16' needs no scaler; or give all parameters to one optimizer",
        )


def replace_method(
    attached: Attached, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]
) -> None:
    """Replace a framework's method on the object itself; restore it when the guard is closed.

    If other code has wrapped the replacement since, it stays, but then only calls the original.
    """
    real = getattr(owner, name)
    ours, closed = make(real), False

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (real if closed else ours)(*args, **kwargs)

    def close() -> None:
        nonlocal closed
        closed = True

    framework.replace_while_attached(attached, owner, name, call)
    attached.when_closed(close)


class AcceleratorHooks:
    """Gets a step's losses and clip norm from the accelerator's methods."""

    def __init__(
        self,
        accelerator: Any,
        optimizers: Sequence[Any],
        attached: Attached,
        *,
        owns_clip: bool,
        parts: bool,
    ) -> None:
        self._accelerator = accelerator
        self._attached = attached
        self._optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._owns_clip = owns_clip
        self._parts = parts
        self._sum: Tensor | None = None
        self._sees_backward = False
        others = {unwrap_optimizer(optimizer) for optimizer in accelerator._optimizers}
        # With unguarded optimizers, a loss may belong to one of them.
        self._learns_loss = others <= set(self._optimizers)
        replace_method(attached, accelerator, "backward", self._wrap_backward)
        replace_method(attached, accelerator, "clip_grad_norm_", self._clip_grad_norm)
        replace_method(attached, accelerator, "clip_grad_value_", self._clip_grad_value)
        scaler = accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            replace_method(attached, accelerator, "unscale_gradients", self._unscale_gradients)
        elif scaler is not None:
            for optimizer in optimizers:
                self._step_without_scaler(optimizer)

    # --------------------------------------------------------------------------- the losses

    def _wrap_backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(loss, *args, **kwargs)
            self._sees_backward = True
            # A verdict that was not used in optimizer.step() belongs to other gradients.
            self._attached._judged = None
            if not self._learns_loss:
                return result
            if not self._parts:
                self._attached.loss(loss)
                return result
            with self._attached._run.faults.fail_open("loss"):
                part = loss.detach()
                self._sum = part if self._sum is None else self._sum + part
            return result

        return backward

    def give_loss(self) -> None:
        """Pass the summed loss of the accelerator's backwards on to the guard, once."""
        if self._sum is not None:
            self._attached.loss(self._sum)
            self._sum = None

    # ----------------------------------------------------------------------------- the clip

    def _clip_grad_norm(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            clipped = _as_parameters(parameters)
            norm_type = args[0] if args else kwargs.get("norm_type", 2)
            self._before_clip(clipped, float(max_norm) if norm_type == 2 else None)
            clipped_params = parameters if isinstance(parameters, Tensor) else clipped
            return real(clipped_params, max_norm, *args, **kwargs)

        return clip_grad_norm_

    def _clip_grad_value(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            clipped = _as_parameters(parameters)
            # Judge first: clipping by value turns an Inf into a normal number.
            self._before_clip(clipped, None)
            clipped_params = parameters if isinstance(parameters, Tensor) else clipped
            return real(clipped_params, *args, **kwargs)

        return clip_grad_value_

    def _before_clip(self, clipped: list[Tensor], max_norm: float | None) -> None:
        """Judge the gradients if the loop clips all of them after the step's last backward."""
        attached, owned = self._attached, self._trainable_param_ids()
        if self._owns_clip:
            self._refuse_clip()
            return
        if not self._accelerator.sync_gradients or not owned <= {id(p) for p in clipped}:
            return
        if any(p.grad is not None for p in clipped if id(p) not in owned):
            max_norm = None  # the clip's norm includes gradients that no optimizer updates
        judged = attached._judged
        if judged is not None and self._sees_backward:  # clipped twice
            both_given = None not in (judged.max_norm, max_norm)
            tighter = (
                min(cast(float, judged.max_norm), cast(float, max_norm)) if both_given else None
            )
            attached._judged = judged._replace(max_norm=tighter)
            return
        self.give_loss()
        attached.before_clip(max_norm)

    def _trainable_param_ids(self) -> set[int]:
        """Return the ids of the trainable parameters of Accelerate's optimizers."""
        return {id(p) for p in params_of(self._optimizers) if p.requires_grad}

    def _refuse_clip(self) -> None:
        """Refuse a clip through the accelerator in a loop that was declared to not clip."""
        error = UsageError(
            "the loop clips through the accelerator, and attach(max_norm=...) said that it does "
            "not",
            hint="remove max_norm from attach(); the guard reads the loop's own clip",
        )
        if self._attached.step_index == self._attached._first_step:
            raise error
        self._attached._run.faults.count("clip", error)

    # --------------------------------------------------------------------------- the scaler

    def _unscale_gradients(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Skip optimizers that are already unscaled: a second time is an error of the scaler."""
        from torch.amp.grad_scaler import OptState

        accelerator = self._accelerator

        def unscale_gradients(optimizer: Any = None) -> Any:
            states = accelerator.scaler._per_optimizer_states
            optimizers = accelerator._optimizers if optimizer is None else as_list(optimizer)
            still_scaled = [
                o for o in optimizers if states[id(unwrap_optimizer(o))]["stage"] is OptState.READY
            ]
            return real(still_scaled)

        return unscale_gradients

    def _step_without_scaler(self, optimizer: Any) -> None:
        """Call the guarded step directly: with a disabled scaler, Accelerate would not call it."""
        scaler, optimizer.scaler = optimizer.scaler, None
        self._attached.when_closed(functools.partial(setattr, optimizer, "scaler", scaler))


class _AccelerateLoop:
    """Connects a user's loop: its scalars, its checkpoints and its end."""

    def __init__(self, accelerator: Any, attached: Attached, state_file: str) -> None:
        self._accelerator = accelerator
        self._state_file = state_file
        self._attached = attached
        replace_method(attached, accelerator, "log", self._wrap_log)
        replace_method(attached, accelerator, "end_training", self._end_training)
        for register, hook in (
            (accelerator.register_save_state_pre_hook, self._write_state_file),
            (accelerator.register_load_state_pre_hook, self._load),
        ):
            attached.when_closed(register(hook).remove)

    def _wrap_log(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def log(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            if self._accelerator.is_main_process:
                record_logged_numbers(self._attached, values)
            return real(values, *args, **kwargs)

        return log

    def _end_training(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def end_training(*args: Any, **kwargs: Any) -> None:
            try:
                self._attached.close()
            finally:
                real(*args, **kwargs)

        return end_training

    def _write_state_file(self, _models: Any, _weights: Any, output_dir: str) -> None:
        """Write the guard's state next to ``accelerator.save_state``'s files."""
        if self._accelerator.is_main_process:
            with self._attached._run.faults.fail_open("save_state"):
                state = json.dumps(self._attached.state_dict())
                Path(output_dir, self._state_file).write_text(state)

    def _load(self, _models: Any, input_dir: str) -> None:
        """Load the guard's state with an accelerator's; mid-run, start a new baseline."""
        attached = self._attached
        if attached.step_index:
            attached.expect("accelerator.load_state() was called")
            return
        path = Path(input_dir, self._state_file)
        state: Any = {}
        with attached._run.faults.fail_open("load_state"):
            if self._accelerator.is_main_process and path.exists():
                state = json.loads(path.read_text())
        attached.load_state_dict(self._from_root(state))

    def _from_root(self, state: Any) -> Any:
        """Return rank 0's state: only its node may have the accelerator's directory."""
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([state])[0]


def record_logged_numbers(attached: Any, values: Mapping[str, Any]) -> None:
    """Record the numbers in a framework's log; do nothing if the guard is off."""
    if not isinstance(attached, Attached):
        return
    with attached._run.faults.fail_open("observe"):
        attached.observe(**{name: float(v) for name, v in values.items() if _is_number(v)})


def _is_number(value: Any) -> bool:
    """Return whether a value in Accelerate's log is one number, for example a 0-dim tensor."""
    if isinstance(value, Tensor | np.ndarray):
        return bool(value.ndim == 0)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _state_file(accelerator: Any, optimizer: Any) -> str:
    """Return the file name of the state in ``save_state``'s directory; each guard has one."""
    first = unwrap_optimizer(as_list(optimizer)[0])
    index = [unwrap_optimizer(o) for o in accelerator._optimizers].index(first)
    return f"vitals_{index}.json" if index else "vitals.json"


def _as_parameters(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return what Accelerate clips as a list: an iterator can be used only once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
