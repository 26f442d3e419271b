"""The monitor's state on the device: filled, reduced, judged and applied without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.exchange.reduce_vector import (
    CORE_FIELDS,
    NUM_FIGURES,
    ReduceVector,
    ReduceVectorLayout,
    VectorFields,
)
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.guard.averages import GuardedAverages, refuse_averages, registered_averages
from trainer_hooks.guard.hook_memory import registered_hook_memory, unregistered_hook_warnings
from trainer_hooks.guard.misuse import (
    GIVEN_SCALERS,
    foreign_optimizers,
    foreign_schedulers,
    parameters_left_out,
)
from trainer_hooks.guard.optimizers import (
    BufferShadow,
    LoopOptimizers,
    ModelLoadHook,
    OptimizerGroup,
    OptimizerGuard,
    StepShadows,
)
from trainer_hooks.guard.refusals import joinables, refuse_unguardable
from trainer_hooks.measures.host import HostMeasurements, MemoryEstimate
from trainer_hooks.measures.sampled import SignalSampler
from trainer_hooks.measures.sections import SectionTimer, modules_to_hook
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.ranks import Ranks, check_same, on_every_rank
from trainer_hooks.stateful import HasStateDict
from trainer_hooks.tensors.events import AsyncCopy
from trainer_hooks.tensors.gradients import ALL, GradNorms
from trainer_hooks.tensors.pipeline import PipelineStages
from trainvitals.errors import UsageError
from trainvitals.printable import name_type


class UpdateEngine(Protocol):
    """Maker of the updates: the loop's own optimizers, or a framework's engine.

    An engine keeps its gradients elsewhere, steps or skips by itself, and has no ``guards``.
    """

    @property
    def guards(self) -> tuple[OptimizerGuard, ...]:
        """Return a guard for each optimizer that Vitals steps by the verdict on the device."""

    @property
    def reads_verdict(self) -> bool:
        """Return whether an optimizer needs the verdict on the host: then every rank reads it."""

    def norms(self, ranks: Ranks) -> GradNorms:
        """Return the object that measures the engine's gradients for the vector. Collective."""

    def overflow(self) -> Tensor | None:
        """Return this rank's flag of loss scaling for the step's vector: 0.0 or 1.0, or None."""

    def loss_scale(self) -> Tensor | None:
        """Return the gradients' scale for this step's vector, or None without loss scaling."""


@dataclass(slots=True, kw_only=True)
class DeviceParts:
    """The parts on the device, and the training that they act on."""

    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None
    norms: GradNorms
    packer: ReduceVector
    engine: UpdateEngine
    shadow: StepShadows
    after_load: ModelLoadHook
    averages: GuardedAverages | None
    """None if no average of the weights was registered."""
    joinables: tuple[Any, ...]
    extra: dict[str, HasStateDict]
    """State registered by ``watch(state=...)``, in the form that a rollback restores."""
    warnings: list[tuple[str, str]]
    """Likely mistakes in the arguments, each as the code and text of a note."""
    readback: AsyncCopy[HostMeasurements]
    sampler: SignalSampler | None
    """None if no signal is enabled."""
    sections: SectionTimer | None
    """None if forward, backward and waits cannot be distinguished, and in a single process."""
    memory: MemoryEstimate
    turns: tuple[OptimizerGroup, ...]
    """Turn of all optimizers; with several optimizers, then one turn for each."""

    def turn_of(self, optimizer: object) -> OptimizerGroup:
        """Return the turn of one optimizer, with its guard and its part of the vector.

        Raises:
            UsageError: the optimizer was not given to ``watch``.
        """
        if len(self.optimizers) > 1 and len(self.turns) == 1:
            raise UsageError(
                "monitor.step(optimizer=...) is not possible here: all optimizers step together",
                hint="monitor.step(loss)",
            )
        for turn in self.turns[1:] or self.turns:
            if turn.optimizers[0] is optimizer:
                return turn
        raise UsageError(
            f"monitor.step(optimizer=...) was given {type(optimizer).__name__}, which is not one "
            f"of the {len(self.optimizers)} optimizers given to watch()",
            hint="pass all optimizers of the loop: watch([a, b], [opt_a, opt_b])",
        )

    def release(self) -> None:
        """Restore the optimizers to their original state, and release the parts on the device."""
        for guard in self.engine.guards:
            guard.release()
        for optimizer in self.optimizers:
            vars(optimizer).pop("add_param_group", None)
        for part in (self.after_load, self.averages, self.sampler, self.sections):
            if part is not None:
                part.release()

    def adopt_groups(self, model: nn.Module, ranks: Ranks, faults: FaultCounter) -> None:
        """Measure and guard parameter groups that the loop has added. Collective.

        Call before the exchange of a step, after all earlier steps were read back: numbers in
        flight have the old layout. Buffers keep their copies from before the current forward.

        Raises:
            UsageError: a parameter is in two groups, or the new groups need the verdict on the
                host and the others do not (or the reverse).
        """
        engines: list[LoopOptimizers] = []

        def rebuild() -> None:
            was_read, guards = self.engine.reads_verdict, tuple(self.engine.guards)
            engines.append(LoopOptimizers(model, self.optimizers, self.scaler, guards=guards))
            if engines[0].reads_verdict != was_read:
                raise UsageError(
                    "a parameter group was added that is fused, but the others are not, or the "
                    "reverse: the host would read the steps' numbers at another time",
                    hint="leave `fused` out of the new group: it takes the optimizer's setting",
                )

        on_every_rank(ranks, rebuild)
        self.engine = engine = engines[0]
        self.norms = engine.norms(ranks)
        if self.sampler is not None:
            settings = self.sampler.settings
            self.sampler.release()
            self.sampler = _build_signal_sampler(
                settings, model, self.norms, ranks, faults, self.optimizers
            )
        fields, lag = self.packer.layout.fields, self.readback.lag
        layout, self.readback = _exchange_parts(self.norms, self.sampler, ranks, fields, lag)
        self.packer = ReduceVector(layout, self.norms.device)
        if self.averages is not None:
            self.averages.follow_groups(self.optimizers)
        self.memory = MemoryEstimate(model, self.optimizers, self.norms.device)
        names = [turn.name for turn in self.turns[1:]]
        has_all = self.norms.has_all
        self.turns = _optimizer_turns(self.optimizers, engine.guards, names if has_all else None)


def build_device_parts(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    schedulers: tuple[Any, ...],
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
    faults: FaultCounter,
    state: Mapping[str, Any] | None = None,
    signals: SignalSettings | None = None,
    engine: UpdateEngine | None = None,
    names: Sequence[str] = (),
    fields: VectorFields = CORE_FIELDS,
    *,
    takes_groups: bool = False,
    stages: PipelineStages | None = None,
) -> DeviceParts:
    """Create everything on the device, from vector to verdict. Collective: ranks compare parts.

    ``takes_groups``: the caller calls ``adopt_groups`` when the loop adds parameter groups.
    ``stages``: those of this rank in a pipeline.
    """
    state = state or {}
    steps_by_itself = engine is not None
    engine = _guard_optimizers(
        model, optimizers, schedulers, scaler, ranks, state, signals, engine, stages
    )
    norms = engine.norms(ranks)
    sampler = _build_signal_sampler(signals, model, norms, ranks, faults, optimizers)
    memories = registered_hook_memory(model, state)
    shadow = StepShadows(BufferShadow(model), *memories.values())
    # If one optimizer needs the verdict on the host, every step waits for it: no lag then.
    lag = 0 if engine.reads_verdict else 1
    layout, readback = _exchange_parts(norms, sampler, ranks, fields, lag)
    if scaler is not None:
        GIVEN_SCALERS.add(scaler)
    for optimizer in optimizers:
        guarded = MethodType(_add_group, optimizer) if takes_groups else _refuse_added_group
        optimizer.add_param_group = guarded  # type: ignore[method-assign]
    return DeviceParts(
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=scaler,
        norms=norms,
        packer=ReduceVector(layout, norms.device),
        engine=engine,
        shadow=shadow,
        after_load=ModelLoadHook(model, shadow),
        averages=registered_averages(state, optimizers),
        joinables=joinables(model, optimizers),
        extra={n: s if isinstance(s, HasStateDict) else memories[n] for n, s in state.items()},
        warnings=[]
        if steps_by_itself
        else _find_likely_mistakes(model, optimizers, schedulers, state),
        readback=readback,
        sampler=sampler,
        sections=None
        if steps_by_itself
        else _build_section_timer(model, ranks, norms.device, faults),
        memory=MemoryEstimate(model, optimizers, norms.device),
        turns=_optimizer_turns(optimizers, engine.guards, names if norms.has_all else None),
    )


def _exchange_parts(
    norms: GradNorms, sampler: SignalSampler | None, ranks: Ranks, fields: VectorFields, lag: int
) -> tuple[ReduceVectorLayout, AsyncCopy[HostMeasurements]]:
    """Return the layout of the reduce vector, and the queue in which its numbers are read back."""
    sampled, own_numbers = (0, 0) if sampler is None else (sampler.pack_size, sampler.own_size)
    layout = ReduceVectorLayout.of(len(norms.names), ranks, sampled, fields)
    size = layout.size + NUM_FIGURES + own_numbers
    return layout, AsyncCopy[HostMeasurements](lag=lag, size=size, device=norms.device)


def _optimizer_turns(
    optimizers: tuple[Optimizer, ...],
    guards: tuple[OptimizerGuard, ...],
    names: Sequence[str] | None,
) -> tuple[OptimizerGroup, ...]:
    """Return each possible step's optimizers and slice of the vector, in the optimizers' order.

    ``names`` is None if all optimizers step together.
    """
    turns = [OptimizerGroup(0, "", optimizers, guards, ALL)]
    if names is None or len(optimizers) < 2 or len(guards) != len(optimizers):
        return tuple(turns)
    start = 0
    for i, (optimizer, guard) in enumerate(zip(optimizers, guards, strict=True)):
        stop = start + sum(len(group["params"]) for group in optimizer.param_groups)
        name = names[i] if i < len(names) else f"optimizer{i}"
        turns.append(OptimizerGroup(i + 1, name, (optimizer,), (guard,), slice(start, stop)))
        start = stop
    return tuple(turns)


def _guard_optimizers(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    schedulers: tuple[Any, ...],
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
    state: Mapping[str, Any],
    signals: SignalSettings | None,
    engine: UpdateEngine | None,
    stages: PipelineStages | None,
) -> UpdateEngine:
    """Guard the optimizers by the verdict on the device; refuse unguardable setups. Collective."""
    engines = [] if engine is None else [engine]

    def local() -> list[str]:
        refuse_unguardable(model, optimizers, schedulers, state)
        refuse_averages(state, optimizers, has_engine=engine is not None)
        _refuse_guarded(optimizers)
        _refuse_signals(signals)
        if engine is not None:
            return [type(optimizer).__name__ for optimizer in optimizers]
        loop_optimizers = LoopOptimizers(model, optimizers, scaler, stages)
        engines.append(loop_optimizers)
        return [
            f"{type(g.optimizer).__name__}(found_inf={g.on_device})" for g in loop_optimizers.guards
        ]

    kinds = on_every_rank(ranks, local)
    check_same("optimizers", kinds, "create the same optimizers, fused or not, on all ranks")
    return engines[0]


def _find_likely_mistakes(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    state: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Return likely mistakes in the device's parts: state that skips cannot restore, mismatches."""
    foreign = foreign_optimizers(model, optimizers)
    texts_by_code = {
        "unseen_state": unregistered_hook_warnings(model, state),
        "foreign_parameters": foreign,
        "parameters_left_out": [] if foreign else parameters_left_out(model, optimizers),
        "foreign_scheduler": foreign_schedulers(schedulers, optimizers),
    }
    return [(code, text) for code, texts in texts_by_code.items() for text in texts]


def _build_section_timer(
    model: nn.Module, ranks: Ranks, device: torch.device, faults: FaultCounter
) -> SectionTimer | None:
    """Return the device's timer of forward and backward; None if ranks do not wait in them."""
    if ranks.world_size > 1:
        with faults.fail_open("sections"):
            wrappers = modules_to_hook(model)
            return SectionTimer(wrappers, device, faults) if wrappers else None
    return None


def _build_signal_sampler(
    settings: SignalSettings | None,
    model: nn.Module,
    norms: GradNorms,
    ranks: Ranks,
    faults: FaultCounter,
    optimizers: Sequence[Optimizer],
) -> SignalSampler | None:
    """Return the device's sampler of the enabled signals; on all ranks, or on none."""
    hint = "give the same watch(signals=...) on all ranks"
    check_same("signals", ranks.gather(settings or SignalSettings()), hint)
    if settings is None or not settings.measures:
        return None
    samplers: list[SignalSampler] = []
    on_every_rank(
        ranks,
        lambda: samplers.append(SignalSampler(settings, model, norms, ranks, faults, optimizers)),
    )
    return samplers[0]


def _refuse_signals(signals: object) -> None:
    if signals is not None and not isinstance(signals, SignalSettings):
        raise UsageError(
            f"signals is {name_type(signals)}; it must be a SignalSettings",
            hint="signals=trainvitals.SignalSettings(weight_norm=True)",
        )


def _refuse_guarded(optimizers: Iterable[Optimizer]) -> None:
    """Refuse device parts for optimizers that an open monitor guards already."""
    replaced = [vars(optimizer).get("add_param_group") for optimizer in optimizers]
    if any(getattr(m, "__func__", m) in (_refuse_added_group, _add_group) for m in replaced):
        raise UsageError(
            "the optimizer is already guarded: its step would be judged twice",
            hint="close() the earlier monitor first: monitor.close(), or leave its `with`",
        )


def _add_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    """Replace ``add_param_group`` as a mark of a guarded optimizer; the next step adopts it."""
    type(optimizer).add_param_group(optimizer, param_group)


def _refuse_added_group(param_group: dict[str, Any]) -> None:
    """Replace ``add_param_group``: the vector has no place to measure or guard its parameters."""
    raise UsageError(
        "a parameter group was added to the guarded optimizer of a pipeline or an engine",
        hint="add all groups before attach() or watch() (a learning rate of 0 keeps one "
        "unchanged); without a pipeline and an engine, such as DeepSpeed's, both take groups later",
    )
