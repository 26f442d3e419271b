"""What of the monitor lives on the device: filled, summed, judged and applied without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.agree import check_same, on_every_rank
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.guard.averages import Averages, refuse_averages
from trainer_hooks.guard.hook_memory import registered, unregistered
from trainer_hooks.guard.optimizers import (
    AfterLoad,
    BufferShadow,
    OptimizerGuard,
    Shadows,
    overflow_flag,
)
from trainer_hooks.guard.refusals import joinables, refuse_unguardable
from trainer_hooks.measures.host import HostMeasurements, MemoryEstimate
from trainer_hooks.measures.sampled import Sampler
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.state import Stateful
from trainer_hooks.step.gradients import GradNorms, Piece, flat_pieces, named_parameters, reshard
from trainer_hooks.step.reduce_vector import NUM_FIGURES, AsyncCopy, PackLayout, ReduceVector
from trainvitals.errors import UsageError


class Engine(Protocol):
    """A framework's engine that keeps its gradients elsewhere, and steps or skips by itself."""

    def norms(self, ranks: Ranks) -> GradNorms:
        """Return what measures the gradients where they are. Collective."""

    def overflow(self) -> Tensor | None:
        """Return the flag of the engine's own loss scaling in this step, 0.0 or 1.0, or None."""

    def loss_scale(self) -> Tensor | None:
        """Return what the gradients are scaled by, or None where there is no scaling."""


@dataclass(slots=True, kw_only=True)
class Device:
    """The parts, and the training they act on."""

    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None
    norms: GradNorms
    packer: ReduceVector
    guards: tuple[OptimizerGuard, ...]
    """One for each optimizer; none where an engine steps them."""
    engine: Engine | None
    shadow: Shadows
    after_load: AfterLoad
    averages: Averages
    joinables: tuple[Any, ...]
    extra: dict[str, Stateful]
    """What ``watch(state=...)`` registered, in the form that a rollback restores."""
    warnings: list[str]
    """What of the training a skip cannot put back."""
    readback: AsyncCopy[HostMeasurements]
    sampler: Sampler
    memory: MemoryEstimate

    def release(self) -> None:
        """Leave the optimizers as they were found."""
        for guard in self.guards:
            guard.release()
        for optimizer in self.optimizers:
            vars(optimizer).pop("add_param_group", None)
        self.after_load.release()
        self.averages.release()
        self.sampler.release()

    @property
    def reads_verdict(self) -> bool:
        """Whether an optimizer needs the verdict on the host: then every rank reads it at once."""
        return self.engine is not None or not all(guard.on_device for guard in self.guards)

    def overflow(self) -> Tensor | None:
        """Return this rank's flag of the loss scaling on the device, or None without one."""
        if self.engine is not None:
            return self.engine.overflow()
        return overflow_flag(self.scaler, self.optimizers, self.norms.device)

    def loss_scale(self) -> Tensor | None:
        """Return the loss scale where it lies, or None where there is no scaling."""
        if self.engine is not None:
            return self.engine.loss_scale()
        return getattr(self.scaler, "_scale", None)


def lay_out(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    schedulers: tuple[Any, ...],
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
    faults: FaultCounter,
    state: Mapping[str, Any] | None = None,
    signals: SignalSettings | None = None,
    engine: Engine | None = None,
) -> Device:
    """Lay out what works on the device. Collective: the ranks compare what each holds."""
    state = state or {}
    params, pieces, guards = _take_hold(
        model, optimizers, schedulers, scaler, ranks, state, signals, engine
    )
    norms = GradNorms(params, ranks, pieces) if engine is None else engine.norms(ranks)
    sampler = _sampler(signals or SignalSettings(), model, norms, ranks, faults)
    layout = PackLayout.of(len(norms.names), ranks, sampler.pack_size)
    memories = registered(model, state)
    shadow = Shadows(BufferShadow(model), *memories.values())
    # One optimizer that needs the verdict on the host makes every step wait for it: no lag then.
    lag = 1 if engine is None and all(guard.on_device for guard in guards) else 0
    size = layout.size + NUM_FIGURES + sampler.own_size
    for optimizer in optimizers:
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]
    return Device(
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=scaler,
        norms=norms,
        packer=ReduceVector(layout, norms.device),
        guards=tuple(guards),
        engine=engine,
        shadow=shadow,
        after_load=AfterLoad(model, shadow),
        averages=Averages(state, optimizers),
        joinables=joinables(model, optimizers),
        extra={n: s if isinstance(s, Stateful) else memories[n] for n, s in state.items()},
        warnings=unregistered(model, state),
        readback=AsyncCopy[HostMeasurements](lag=lag, size=size, device=norms.device),
        sampler=sampler,
        memory=MemoryEstimate(model, optimizers, norms.device),
    )


def _take_hold(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    schedulers: tuple[Any, ...],
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
    state: Mapping[str, Any],
    signals: SignalSettings | None,
    engine: Engine | None,
) -> tuple[dict[str, Tensor], dict[int, Piece], list[OptimizerGuard]]:
    """Refuse what cannot be guarded, find the parameters, and guard the optimizers. Collective."""
    params: dict[str, Tensor] = {}
    pieces: dict[int, Piece] = {}
    guards: list[OptimizerGuard] = []

    def local() -> list[str]:
        refuse_unguardable(model, optimizers, schedulers, state)
        refuse_averages(state, optimizers, has_engine=engine is not None)
        _refuse_guarded(optimizers)
        _refuse_signals(signals)
        if engine is not None:
            return [type(optimizer).__name__ for optimizer in optimizers]
        reshard(model)
        pieces.update(flat_pieces(model))
        params.update(named_parameters(model, optimizers))
        guards.extend(OptimizerGuard(o, scaler) for o in optimizers)
        return [f"{type(g.optimizer).__name__}(found_inf={g.on_device})" for g in guards]

    kinds = on_every_rank(ranks, local)
    check_same("optimizers", kinds, "make the same optimizers, fused or not, on all ranks")
    return params, pieces, guards


def _sampler(
    settings: SignalSettings,
    model: nn.Module,
    norms: GradNorms,
    ranks: Ranks,
    faults: FaultCounter,
) -> Sampler:
    """Return what measures the signals that were opted in; on all ranks, or on none."""
    hint = "give the same watch(signals=...) on all ranks"
    check_same("signals", ranks.gather(settings), hint)
    made: list[Sampler] = []
    on_every_rank(ranks, lambda: made.append(Sampler(settings, model, norms, ranks, faults)))
    return made[0]


def _refuse_signals(signals: object) -> None:
    if signals is not None and not isinstance(signals, SignalSettings):
        raise UsageError(
            f"signals is a {type(signals).__name__}; it must be a SignalSettings",
            hint="signals=trainer_hooks.SignalSettings(weight_norm=True)",
        )


def _refuse_guarded(optimizers: Iterable[Optimizer]) -> None:
    if any(vars(optimizer).get("add_param_group") is _refuse_group for optimizer in optimizers):
        raise UsageError(
            "the optimizer is guarded already: its step would be judged twice",
            hint="close() the earlier monitor first",
        )


def _refuse_group(param_group: dict[str, Any]) -> None:
    """Stand in for ``add_param_group``: what it adds would be neither measured nor guarded."""
    raise UsageError(
        "a parameter group was added after watch()",
        hint="add all groups first (a rate of 0 keeps one still), or close this monitor and watch "
        "again",
    )
