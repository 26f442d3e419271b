"""DeepSpeed: guards ``engine.step()``; the loop stays as it is.

    engine, *_ = deepspeed.initialize(...)
    attached = trainer_hooks.integrations.deepspeed.attach(engine)

A step is skipped with the engine's own mechanism for float16 overflow. Each of its optimizers
checks for overflow at one place; there Vitals measures the gradients, the ranks agree, and the
verdict replaces the result of the check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Unpack, cast

from torch.optim import Optimizer

from trainer_hooks._attach import Attached, Judged, split_schedulers
from trainer_hooks._watch import MonitorParts, build_monitor_parts
from trainer_hooks.arguments import WatchArguments, as_list
from trainer_hooks.exchange.reduce_vector import SHORT_FROM
from trainer_hooks.guard.optimizers import scaled_rates
from trainer_hooks.guard.step_interception import not_compiled
from trainer_hooks.integrations.framework import (
    Options,
    is_off,
    replace_while_attached,
    require_version,
)
from trainer_hooks.integrations.zero import (
    Bfloat16Adapter,
    DeepSpeedAdapter,
    EngineNumbers,
    HalfPrecisionAdapter,
    ZeroThree,
    ZeroTwo,
)
from trainer_hooks.noop import Unattached
from trainer_hooks.probe.probe import LossOf
from trainvitals.errors import UsageError
from trainvitals.printable import name_type

OLDEST = "0.19.8"


def attach(engine: Any, **options: Unpack[Options]) -> Attached:
    """Guard the steps of a DeepSpeed engine. Call on all ranks, before the first step.

    Args:
        engine: first result of ``deepspeed.initialize``.
        options: as for ``trainer_hooks.attach``.

    Raises:
        MissingDependencyError: DeepSpeed is not installed, or too old.
        UsageError: the engine steps in a way that cannot be guarded; the message names it.
        TrainingHalted: the escalation policy halted this run, and no operator resumed it.
    """
    require_version("deepspeed", OLDEST, extra="deepspeed")
    seat = None if is_off(options) else _engine_hook_of(engine)
    optimizer = _plain_optimizer(engine) if seat is None else seat.optimizer
    stepped = as_list(_scheduler_of(engine))
    stepped += [s for s in as_list(options.get("schedulers")) if s not in stepped]
    schedulers, state = split_schedulers(stepped, options.get("state"))
    if seat is not None and isinstance(state or {}, Mapping):
        state = {"deepspeed.engine": EngineNumbers(engine, seat.holder), **(state or {})}
    arguments = WatchArguments(
        model=getattr(engine, "module", engine),
        optimizers=tuple(as_list(optimizer)),
        schedulers=schedulers,
        scaler=None if seat is None else seat.scaler,
        engine=None if seat is None else seat.holder,
        run=options.get("run"),
        mode=options.get("mode", "guard"),
        dir=options.get("dir"),
        tokens_per_step=options.get("tokens_per_step"),
        config=options.get("config"),
        tags=options.get("tags", ()),
        state=state,
        signals=options.get("signals"),
        loss_kind=options.get("loss_kind"),
        task=options.get("task"),
        on_collapse=options.get("on_collapse", "report"),
        on_hang=options.get("on_hang", "alert"),
        owns_clip=False,
        owns_step=False,
    )
    parts = build_monitor_parts(arguments)
    if parts is None or seat is None:
        return cast(Attached, Unattached([], None, None))
    return DeepSpeedAttached(parts, engine, seat)


def _scheduler_of(engine: Any) -> Any:
    """Return the scheduler that a DeepSpeed engine steps, unwrapped; None without one."""
    scheduler = getattr(engine, "lr_scheduler", None)
    return getattr(scheduler, "scheduler", scheduler)


class DeepSpeedAttached(Attached):
    """A guarded engine, created by ``attach``; closing it restores all replaced methods."""

    def __init__(self, parts: MonitorParts, engine: Any, seat: _EngineHook) -> None:
        super().__init__(
            parts.device, parts.run, tokens_per_step=parts.tokens_per_step, max_norm=None
        )
        clip = float(engine.gradient_clipping() or 0.0)
        self._clips_to = clip if clip > 0 else math.inf
        self.holder = seat.holder
        self._optimizer = seat.optimizer
        self._rates = ExitStack()
        self._is_stepped = False
        self._engine = engine
        self._listen(engine)
        seat.hook(self, engine)
        if self.holder is not None:
            inner = _scheduler_of(engine)  # its step is part of the guarded one
            self._followers = tuple(s for s in self._followers if s is not inner)
            self.replace(engine, "step", self._around_engine_step)

    # --------------------------------------------------------------------- replaced methods

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method on the object until the end; ``make`` receives the current one."""
        replace_while_attached(self, owner, name, not_compiled(make(getattr(owner, name))))

    def _listen(self, engine: Any) -> None:
        """Get losses from the DeepSpeed engine's backward, and its logged scalars."""

        def backward(real: Any) -> Any:
            def ours(*args: Any, **kwargs: Any) -> Any:
                result = real(*args, **kwargs)
                if not self._closed:
                    with self._run.faults.fail_open("loss"):
                        loss = args[0] if args else kwargs["loss"]
                        # With scale_wrt_gas=False the caller has divided the loss already.
                        divided = not kwargs.get("scale_wrt_gas", True)
                        self.loss(loss * engine.gradient_accumulation_steps() if divided else loss)
                return result

            return ours

        def write_events(real: Any) -> Any:
            def ours(events: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                if not self._closed:
                    with self._run.faults.fail_open("scalars"):
                        self.observe(**{name: float(value) for name, value, *_ in events})
                return real(events, *args, **kwargs)

            return ours

        def load_checkpoint(real: Any) -> Any:
            def ours(*args: Any, **kwargs: Any) -> Any:
                result = real(*args, **kwargs)
                if self.step_index and not self._closed:
                    self.expect("engine.load_checkpoint() was called")
                return result

            return ours

        self.replace(engine, "backward", backward)
        self.replace(engine, "load_checkpoint", load_checkpoint)
        if getattr(engine, "monitor", None) is not None:
            self.replace(engine.monitor, "write_events", write_events)

    def keep_batch(self, batch: Any, probe: LossOf) -> None:
        """Keep a batch of the step for the probe; see ``Attached.keep_batch``.

        Raises:
            UsageError: the engine uses ZeRO 3.
        """
        if isinstance(self.holder, ZeroThree):
            raise UsageError(
                "keep_batch() does not work with ZeRO 3: a forward between steps gathers "
                "parameters and changes the rounding of the training",
                hint="remove keep_batch(), or train with ZeRO 2",
            )
        super().keep_batch(batch, probe)

    # ------------------------------------------------------------------------- in its step

    def judge_before_clip(self) -> None:
        """Judge the gradients of a plain optimizer before the engine clips them."""
        if not self._closed:
            self.before_clip(self._clips_to)

    def judge_and_decide_skip(self, overflowed: bool) -> bool:
        """Measure and judge the step; return whether all ranks skip it. Once per step, collective.

        ``overflowed`` is the result of the engine's own check, on this rank.
        """
        if self._closed:
            return overflowed
        assert self.holder is not None, "only an engine with a place of its own asks"
        self.holder.read_overflow_flag(overflowed=overflowed)
        self.before_clip(self._clips_to if self.holder.clips_to_config_norm else None)
        assert self._judged is not None, "it was judged just now"
        orders = self._judged.orders
        if orders.skip_on_host:
            return True
        if overflowed:
            self._mark_as_overflow(self._judged)
        self._rates.enter_context(scaled_rates(self._optimizer, orders.lr_factor))
        return overflowed

    def engine_would_skip(self) -> bool:
        """Return whether the engine itself would skip the judged step, because its norm overflows.

        The engine computes the norm in float32, and each rank checks its own. Ranks could decide
        differently, so all use the norm they agree on.
        """
        judged = self._judged
        if judged is None or float(judged.verdict.grad_norm) < SHORT_FROM:
            return False
        self._mark_as_overflow(judged)
        return True

    def _mark_as_overflow(self, judged: Judged) -> None:
        """Mark a step that DeepSpeed skips because its own norm, in float32, overflows."""
        verdict = self._parts.as_overflow(judged.verdict)
        orders = judged.orders._replace(bad=verdict.bad)
        self._judged = judged._replace(verdict=verdict, orders=orders)

    @property
    def overflow_agreed(self) -> bool:
        """Whether the loss scale overflowed on any rank in the step judged last."""
        return self._judged is not None and bool(self._judged.verdict.overflow.item())

    def around_step(self, real: Any) -> Any:
        """Return DeepSpeed's optimizer step at the rates of the verdict."""

        def ours(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                return real(*args, **kwargs)
            if self._run.halted is not None:
                raise self._run.halted
            self._is_stepped = True
            try:
                return real(*args, **kwargs)
            finally:
                self._rates.close()

        return ours

    def _around_engine_step(self, real: Any) -> Any:
        """Return the engine's step, followed by the end of the guarded step.

        Snapshots and rollbacks come after the engine's schedule and numbers of the step.
        """

        def ours(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if self._is_stepped and not self._closed:
                self._is_stepped = False
                self._end_step()
            return result

        return ours

    def _fit_what_follows(self, *, is_before_step: bool) -> None:
        """Fit also the step that an engine counts after its plain optimizer's step."""
        super()._fit_what_follows(is_before_step=is_before_step)
        if is_before_step and self.holder is None:
            self._engine.global_steps -= 1

    def _end_step(self) -> None:
        """Finish the engine's step that was judged."""
        judged, self._judged = self._judged, None
        if judged is not None:
            self._parts.clock.end_loop_clip()
            self._finish_step(judged)
            return
        error = UsageError(
            "DeepSpeed's optimizer made a step without checking its gradients, so that step was "
            "not guarded",
            hint="docs/integrations/deepspeed.md lists the tested versions",
        )
        if self._step == self._first_step:
            raise error
        self._run.faults.count("unguarded_step", error)


# -------------------------------------------------------------------- hooks of the optimizers


class _EngineHook(NamedTuple):
    """How an engine is guarded."""

    optimizer: Optimizer
    """The plain optimizer inside all wrappers."""
    hook: Callable[[DeepSpeedAttached, Any], None]
    holder: DeepSpeedAdapter | None = None
    scaler: Any = None


def _hook_plain(attached: DeepSpeedAttached, engine: Any) -> None:
    """Guard a DeepSpeed optimizer without ZeRO in float32; judge before the engine's clip."""
    name = "clip_fp32_gradients" if engine.gradient_clipping() > 0.0 else "_take_model_step"

    def before(real: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            attached.judge_before_clip()
            return real(*args, **kwargs)

        return ours

    attached.replace(engine, name, before)


def _hook_zero(attached: DeepSpeedAttached, engine: Any) -> None:
    """Guard ZeRO 1 to 3: judge as the loss scale is updated, just before the overflow decision."""
    zero = engine.optimizer

    def update_scale(real: Any) -> Any:
        def ours(has_overflow: bool = False) -> None:
            skip = attached.judge_and_decide_skip(bool(has_overflow))
            real(has_overflow)  # only real overflow: a spike must not lower the loss scale
            zero.overflow = skip

        return ours

    attached.replace(zero, "_update_scale", update_scale)
    attached.replace(zero, "step", attached.around_step)


def _hook_half(attached: DeepSpeedAttached, engine: Any) -> None:
    """Guard FP16_Optimizer and similar: replace the result of its overflow check."""
    zero = engine.optimizer
    holder = attached.holder
    assert isinstance(holder, HalfPrecisionAdapter), "made for this hook"
    skipped_by = {"ours": False}

    def has_overflow(real: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> bool:
            has_overflow_here = bool(real(*args, **kwargs))
            skip = attached.judge_and_decide_skip(has_overflow_here) or attached.engine_would_skip()
            skipped_by["ours"] = skip and not attached.overflow_agreed
            return skip

        return ours

    def update_scale(real: Any) -> Any:
        def ours(skip: bool) -> None:
            real(skip and not skipped_by["ours"])  # a spike must not lower the loss scale

        return ours

    def backward(real: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            holder.scales_losses = holder.is_scaled
            return real(*args, **kwargs)

        return ours

    attached.replace(zero, "backward", backward)
    attached.replace(zero.overflow_checker, "has_overflow", has_overflow)
    attached.replace(zero, "_update_scale", update_scale)
    attached.replace(zero, "step", attached.around_step)


def _hook_wide(attached: DeepSpeedAttached, engine: Any) -> None:
    """BF16_Optimizer has no overflow check: do not call its step, and clear what it would clear."""
    zero = engine.optimizer

    def guarded(real: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            zero.overflow = attached.judge_and_decide_skip(False) or attached.engine_would_skip()
            if not zero.overflow:
                return real(*args, **kwargs)
            zero._global_grad_norm = math.inf
            zero.clear_hp_grads()
            zero.clear_lp_grads()
            return None

        return ours

    attached.replace(zero, "step", lambda real: attached.around_step(guarded(real)))


_SEATS: dict[str, tuple[type[DeepSpeedAdapter], Callable[[DeepSpeedAttached, Any], None]]] = {
    "DeepSpeedZeroOptimizer": (ZeroTwo, _hook_zero),
    "DeepSpeedZeroOptimizer_Stage3": (ZeroThree, _hook_zero),
    "FP16_Optimizer": (HalfPrecisionAdapter, _hook_half),
    "FP16_UnfusedOptimizer": (HalfPrecisionAdapter, _hook_half),
    "BF16_Optimizer": (Bfloat16Adapter, _hook_wide),
}


def _engine_hook_of(engine: Any) -> _EngineHook:
    """Return how the engine is guarded; raise an error if it cannot be."""
    _refuse(engine)
    outer = engine.optimizer
    if isinstance(outer, Optimizer):
        scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
        return _EngineHook(outer, _hook_plain, scaler=scaler)
    holder, hook = _SEATS[type(outer).__name__]
    return _EngineHook(outer.optimizer, hook, holder(engine))


def _plain_optimizer(engine: Any) -> Any:
    """Return the optimizer inside a DeepSpeed engine's wrapper; None without one."""
    outer = getattr(engine, "optimizer", None)
    return getattr(outer, "optimizer", outer)


# ------------------------------------------------------------------------------------- refusals


def _refuse(engine: Any) -> None:
    """Refuse an engine whose skip may change state, or was not verified to be without effect."""
    if not hasattr(engine, "gradient_clipping") or not hasattr(engine, "optimizer"):
        raise UsageError(
            f"attach() was given {name_type(engine)}, which is not a DeepSpeed engine",
            hint="engine, *_ = deepspeed.initialize(...), and then attach(engine)",
        )
    for what, why in _reasons(engine):
        raise UsageError(
            f"DeepSpeed with {what} cannot be guarded: {why}",
            hint="docs/integrations/deepspeed.md lists what can; mode='off' (or VITALS_MODE=off) "
            "trains without the guard",
        )


_UNTESTED = "an exact skip has not been shown there"
_OTHER_PARTS = "its ranks hold different parameters, so there is no common gradient norm"


def _reasons(engine: Any) -> list[tuple[str, str]]:
    """Return features of a DeepSpeed engine that cannot be guarded, with reasons."""

    def has(name: str) -> bool:
        return bool(getattr(engine, name, False))

    tensor_parallel = getattr(engine, "autotp_size", lambda: 0)() or 0
    compiled = getattr(engine, "is_deepcompile_enabled", lambda: False)()
    seen = (
        (has("pipeline_parallelism"), "a pipeline", _OTHER_PARTS),
        (has("has_moe_layers"), "experts (MoE)", _OTHER_PARTS),
        (has("zenflow"), "ZenFlow", "it updates outside its step"),
        (has("mpu") or tensor_parallel > 1, "tensor parallelism (mpu, autotp)", _UNTESTED),
        (compiled, "DeepCompile", _UNTESTED),
        (type(engine).__name__ == "DeepSpeedHybridEngine", "its hybrid engine", _UNTESTED),
    )
    reasons = [(what, why) for applies, what, why in seen if applies]
    return reasons + _reasons_of(engine.optimizer)


def _reasons_of(outer: Any) -> list[tuple[str, str]]:
    """Return features of a DeepSpeed optimizer that cannot be guarded."""
    plain = getattr(outer, "optimizer", outer)
    name, is_plain = type(plain).__name__, isinstance(outer, Optimizer)
    kinds = {kind.__name__ for kind in type(plain).__mro__}

    def has(*names: str) -> bool:
        return any(getattr(outer, name, None) for name in names)

    seen = (
        (outer is None or name == "DummyOptim", "no optimizer", "there is no step"),
        (
            bool(kinds & {"OnebitAdam", "OnebitLamb", "ZeroOneAdam"}),
            f"the optimizer {name}",
            "it exchanges gradients within its step, after the verdict",
        ),
        (
            "Muon" in name and not is_plain,
            "Muon under ZeRO or in half precision",
            "it turns gradients into updates before they can be measured",
        ),
        (
            has("cpu_offload", "offload_optimizer", "offload_param"),
            "optimizer or parameter offload",
            _UNTESTED,
        ),
        (
            has("torch_autocast_gradscaler"),
            "float16 torch_autocast under ZeRO",
            "its scaler is updated during the step, once per group",
        ),
        (has("fused_adam_legacy", "fused_lamb_legacy"), "legacy fusion", _UNTESTED),
        (not is_plain and type(outer).__name__ not in _SEATS, type(outer).__name__, _UNTESTED),
    )
    return [(what, why) for applies, what, why in seen if applies]
