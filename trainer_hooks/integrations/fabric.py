"""Lightning Fabric: ``attach`` for a loop that trains through a ``Fabric``.

    model, optimizer = fabric.setup(model, optimizer)
    attached = attach(fabric, model, optimizer)

``optimizer.step()`` is guarded, ``fabric.backward`` provides the loss, and
``fabric.clip_gradients`` measures and judges before it clips. The methods are replaced on the
objects, until ``close()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from inspect import signature
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_hooks
from trainer_hooks._attach import Attached
from trainer_hooks.arguments import as_list
from trainer_hooks.guard.optimizers import unscale
from trainer_hooks.integrations.framework import Options, replace_while_attached, require_version
from trainvitals.auto_clip import MaxNorm
from trainvitals.errors import UsageError

_GUARDED = "_vitals_attached"


def attach(
    fabric: Any,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    max_norm: MaxNorm | None = None,
    loss_divisor: float = 1.0,
    **options: Unpack[Options],
) -> Attached:
    """Guard a Fabric loop's ``optimizer.step()``. Call on all ranks, after ``fabric.setup``.

    Gradient norm outliers are detected if the loop calls ``fabric.clip_gradients``, or with
    ``max_norm``. A clip without an explicit ``error_if_nonfinite`` no longer raises: the step is
    skipped instead. An explicit True raises as before.

    Args:
        fabric: the Fabric, launched.
        model: result of ``fabric.setup`` or ``fabric.setup_module``.
        optimizers: results of ``fabric.setup``; all are stepped after the same backward.
        max_norm: clip to this norm in ``optimizer.step()``, for a loop that does not clip:
            ``"auto"`` clips to a multiple of the recent median norm; inf does not clip.
        loss_divisor: number by which the loop divides each loss before ``fabric.backward``, for
            gradient accumulation.
        options: as for ``trainer_hooks.attach``.

    Raises:
        UsageError: an argument is invalid; the message says which and what to do.
        MissingDependencyError: Fabric is too old.
        TrainingHalted: the escalation policy halted this run, and no operator resumed it.
    """
    _require(fabric)
    _check_fabric_supported(fabric, loss_divisor)
    bare = [getattr(optimizer, "optimizer", optimizer) for optimizer in as_list(optimizers)]
    attached = trainer_hooks.attach(
        getattr(model, "_forward_module", model),
        bare,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        max_norm=max_norm,
        **options,
    )
    if isinstance(attached, Attached):  # otherwise it is off
        replace_while_attached(attached, fabric, _GUARDED, True)
        _pass_losses(fabric, attached, loss_divisor)
        _judge_before_clips(fabric, attached, bare, refused=max_norm is not None)
        _unscale_once(fabric.strategy.precision, attached)
        _record_logged_values(fabric, attached)
    return attached


def _require(fabric: Any) -> None:
    """Refuse a Fabric that is too old; PyTorch Lightning contains its own copy."""
    package = type(fabric).__mro__[-2].__module__.partition(".")[0]
    named = ("lightning",) if package == "lightning" else ("lightning-fabric", "pytorch-lightning")
    present = [name for name in named if any(distributions(name=name))]
    require_version((present or named)[0], "2.4", extra="lightning")


def _check_fabric_supported(fabric: Any, loss_divisor: float) -> None:
    """Refuse a Fabric that is guarded or cannot be guarded, and an invalid ``loss_divisor``."""
    for name in (kind.__name__ for kind in type(fabric.strategy).__mro__):
        if name in ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy"):
            raise UsageError(
                f"{name} makes the update in its own engine, where Vitals cannot skip a step",
                hint="use strategy='ddp', FSDPStrategy or ModelParallelStrategy; for DeepSpeed "
                "without Fabric there is trainer_hooks.integrations.deepspeed",
            )
    if not 0 < loss_divisor < math.inf:
        raise UsageError(
            f"loss_divisor is {loss_divisor!r}; it must be a number above 0",
            hint="the N of fabric.backward(loss / N); leave it out if losses are not divided",
        )
    if _GUARDED in vars(fabric):
        raise UsageError(
            "this Fabric is already guarded, and its losses cannot be assigned to one of two "
            "guards",
            hint="attached.close() ends the first. If updates alternate (GANs), guard each with "
            "trainvitals.attach(model, optimizer.optimizer) and pass its losses with "
            "attached.loss(loss)",
        )


def _pass_losses(fabric: Any, attached: Attached, divisor: float) -> None:
    """Replace ``fabric.backward``, so that it passes on the loss."""
    real: Callable[..., None] = fabric.backward

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        attached._judged = None  # the verdict was on gradients before this backward
        attached.loss(tensor.detach() * divisor)
        real(tensor, *args, **kwargs)

    replace_while_attached(attached, fabric, "backward", backward)


def _judge_before_clips(
    fabric: Any, attached: Attached, optimizers: Sequence[Optimizer], *, refused: bool
) -> None:
    """Replace ``fabric.clip_gradients``, so that the step is judged before it."""
    real: Callable[..., Tensor | None] = fabric.clip_gradients
    arguments_of = signature(real)
    places = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
    clipped: set[int] = set()

    def clip_gradients(*args: Any, **kwargs: Any) -> Tensor | None:
        bound_arguments = arguments_of.bind(*args, **kwargs).arguments
        optimizer = bound_arguments["optimizer"]
        index = places.get(id(getattr(optimizer, "optimizer", optimizer)))
        if index is not None:
            if refused:
                raise UsageError(
                    "attach() was given max_norm, and the loop calls fabric.clip_gradients() too",
                    hint="remove one of them; without max_norm the guard reads the loop's own clip",
                )
            stepped = (
                attached.route._round
            )  # judge once for several optimizers, which may be stepped in between
            is_next = not stepped or index in stepped
            if is_next and (attached._judged is None or index in clipped):
                clipped.clear()
                attached.before_clip(_norm_of(bound_arguments) if len(optimizers) == 1 else None)
            clipped.add(index)
        if "error_if_nonfinite" not in bound_arguments and attached._run.mode != "observe":
            kwargs["error_if_nonfinite"] = False
        return real(*args, **kwargs)

    replace_while_attached(attached, fabric, "clip_gradients", clip_gradients)


def _norm_of(bound_arguments: Mapping[str, Any]) -> float | None:
    """Return the norm that Fabric clips to; None for a clip by value."""
    max_norm = bound_arguments.get("max_norm")
    return (
        None if max_norm is None or bound_arguments.get("norm_type", 2.0) != 2 else float(max_norm)
    )


def _unscale_once(precision: Any, attached: Attached) -> None:
    """Let Fabric's clip skip unscaling if gradients are unscaled already: a scaler would raise."""
    real: Callable[..., None] = precision.unscale_gradients

    def unscale_gradients(optimizer: Any) -> None:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            real(optimizer)  # raises for precisions in which Fabric cannot clip scaled gradients
        else:
            unscale(precision.scaler, [optimizer])

    if getattr(precision, "scaler", None) is not None:
        replace_while_attached(attached, precision, "unscale_gradients", unscale_gradients)


def _record_logged_values(fabric: Any, attached: Attached) -> None:
    """Record Fabric's logged values; ``fabric.log`` also calls this and waits for each value."""
    real: Callable[..., None] = fabric.log_dict

    def log_dict(metrics: Mapping[str, Any], step: int | None = None) -> None:
        real(metrics, step)
        with attached._run.faults.fail_open("observe"):
            bare = {n: v.detach() if isinstance(v, Tensor) else v for n, v in metrics.items()}
            numbers = {n: float(v) for n, v in bare.items() if isinstance(v, int | float | Tensor)}
            attached.observe(**numbers)

    replace_while_attached(attached, fabric, "log_dict", log_dict)
