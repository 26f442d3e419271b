"""``watch``: builds a monitor around a training loop. Collective; it may raise.

This module reads the environment, creates files, and talks to other ranks at startup.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from trainer_hooks.agent_starter import AgentStarter, NodeAgent, missing_packages
from trainer_hooks.arguments import (
    Mode,
    WatchArguments,
    as_list,
    join_models,
    refuse_misplaced,
    turn_names,
)
from trainer_hooks.exchange.device import DeviceParts, build_device_parts
from trainer_hooks.exchange.emit import Emitter, LayerAggregator, Rank0Columns, StepLog
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.features import FEATURES, vector_fields
from trainer_hooks.features.earlier_losses import RestartCheck, read_earlier_losses
from trainer_hooks.features.first_steps import FirstStepsFeature
from trainer_hooks.features.schedule import ScheduleFeature
from trainer_hooks.guard.declared_schedule import Declared
from trainer_hooks.guard.schedules import SchedulerEvery
from trainer_hooks.lifecycle.attributes import process_started_unix_ns, run_info
from trainer_hooks.lifecycle.shutdown import close_earlier
from trainer_hooks.measures.host import StepClock, Utilization
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.monitor import Monitor
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.manager import CheckpointSettings, RecoveryManager, Restored
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.recovery.replicas import Replicas
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.repro.capsule import CapsuleContext
from trainer_hooks.run_paths import RunPaths, open_inbox, open_journal, open_run
from trainer_hooks.step.actions import snapshot_meta, start_branch, take_meta
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import StepFeature, StepFeatures
from trainer_hooks.tensors.gradients import unwrap
from trainer_hooks.terminal import Terminal
from trainvitals.catalog import MAX_GROUPS
from trainvitals.clock import Clock, SystemClock
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.posttraining.names import OnCollapse, Task
from trainvitals.early_stopping import EarlyStopping
from trainvitals.plugins import load_plugin
from trainvitals.policy import Judge
from trainvitals.records import (
    AttemptStarted,
    Event,
    Note,
    OnHang,
    RankStarted,
    RunInfo,
    RunStarted,
)


def watch(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    schedulers: Any | Sequence[Any] | None = None,
    *,
    run: str | None = None,
    mode: Mode = "guard",
    scaler: torch.amp.GradScaler | None = None,
    checkpoints: CheckpointSettings | str | Path | bool | None = None,
    dir: str | Path | None = None,
    tokens_per_step: int | None = None,
    config: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    signals: SignalSettings | None = None,
    early_stopping: EarlyStopping | None = None,
    loss_kind: LossKind | None = None,
    task: Task | None = None,
    on_collapse: OnCollapse = "report",
    scheduler_every: SchedulerEvery = "step",
    on_hang: OnHang = "alert",
    total_steps: int | None = None,
    schedule: Declared | None = None,
    pipeline: Any = None,
    **misplaced: Never,
) -> Monitor:
    """Guard a training loop. Call on all ranks, after wrapping and before the first step.

    Rank 0 logs how the run starts, each action, and how it ends (logger ``trainvitals``; to the
    terminal if logging is not configured). ``VITALS_QUIET=1`` turns this off.

    Args:
        model: the module, wrapped (DDP, FSDP) or not; several as a list or a dict.
        optimizers: one or several. Each watched parameter belongs to exactly one. A skip does not
            call ``step()``, so state that a third-party optimizer keeps outside ``state`` and
            ``param_groups`` is unchanged; a rollback restores it only if ``state`` contains it.
            Optimizers that alternate are stepped by ``monitor.step(loss, optimizer=...)``. The
            loss and norm of the first one are those of the run; each also has its own scalars,
            such as ``loss/generator``.
        schedulers: stepped by ``monitor.step``, also if the update is skipped. The loop must not
            step them.
        run: display name of the run.
        mode: ``observe`` decides and records, ``guard`` also skips and may stop the run, ``heal``
            also rolls back (and needs ``checkpoints``), ``off`` only trains.
            ``VITALS_MODE=off|observe`` lowers it.
        scaler: the gradient scaler; do not call its ``unscale_``.
        checkpoints: directory of verified checkpoints; True: the run directory. A restarted run
            resumes from them, in every mode except ``off``.
        dir: parent of run directories; default ``VITALS_DIR``, otherwise ``./vitals_runs``.
        tokens_per_step: tokens of all ranks in one step, for throughput and utilization.
        config: hyperparameters to store with the run.
        tags: words to find the run by.
        state: further objects with ``state_dict`` and ``load_state_dict`` that a rollback restores.
            A skip also leaves three kinds bitwise unchanged: an ``EMA``, which the step updates
            itself, an ``AveragedModel`` (call ``update_parameters`` after ``monitor.step``), and
            the state of a communication hook (``PowerSGDState``; it needs no ``state_dict``).
        signals: additional signals to measure, and how often.
        early_stopping: ends the run if ``monitor.evaluate(...)`` does not improve: ``should_stop``
            becomes True, and ``monitor.batches`` ends. With ``checkpoints`` the best evaluated
            state is kept for ``monitor.restore_best()``.
        loss_kind: ``minimize`` for a loss that should fall. With ``rl`` (a policy loss) and
            ``adversarial`` (a GAN loss) the loss never withholds an update, and its level is only
            reported; gradient norms are judged as usual, with ``rl`` by ten times the limit. None:
            that of ``task``, otherwise ``minimize`` for one model, ``adversarial`` for several.
        task: kind of a post-training run: ``sft``, ``dpo``, ``cpo``, ``orpo``, ``kto``,
            ``reward_model``, ``grpo``, ``rloo`` or ``ppo``. Its scalars (``monitor.observe``) are
            then judged, such as reward, entropy and KL divergence. None: they are not.
        on_collapse: ``stop`` halts a ``grpo``, ``rloo`` or ``ppo`` run whose policy collapsed, or
            left its reference without a gain. It saves a checkpoint first, and the halt pages.
            ``report`` only reports.
        scheduler_every: ``step`` steps the schedulers once per attempted step; ``epoch`` when
            ``monitor.batches`` has finished an epoch, or at ``monitor.end_epoch()``.
        on_hang: ``restart``: the node's agent ends a hung job once the page has held for 60 s, so
            that its launcher (``torchrun --max-restarts``) starts it again; at most 3 times per
            day, and only if all ranks are on one node. ``alert`` only pages, and ``observe`` too.
        total_steps: optimizer steps of the whole run, including those before a resume.
        schedule: intended learning rates: a scheduler of torch, which is copied (with several
            optimizers a list), or a shape, ``LRSchedule(kind="cosine", warmup_steps=1000)`` or
            ``"cosine"``, ``"linear"``, ``"wsd"`` (with ``total_steps``) or ``"constant"``. A
            difference is reported once; Vitals does not act on it.
        pipeline: the schedule of ``torch.distributed.pipelining`` that runs this rank's stages;
            ``model`` is the module of the stage, or an ``nn.ModuleList`` of several. Ranks without
            the last stage call ``monitor.step()`` without a loss.
        misplaced: refused; the error names the method of the monitor that takes the argument.

    Returns:
        The monitor; use it as a context manager.

    Raises:
        UsageError: an argument is invalid; the text names it and the fix.
        TrainingHalted: this run was halted, and not resumed with ``vitals resume``.
    """
    refuse_misplaced(misplaced)
    listed = as_list(optimizers)
    names = list(optimizers) if isinstance(optimizers, Mapping) else turn_names(model, listed)
    whole = join_models(model)
    arguments = WatchArguments(
        model=whole,
        names=tuple(map(str, names)),
        optimizers=tuple(listed),
        schedulers=tuple(as_list(schedulers)),
        run=run,
        mode=mode,
        scaler=scaler,
        checkpoints=checkpoints,
        dir=dir,
        tokens_per_step=tokens_per_step,
        config=config,
        tags=tags,
        state=state,
        signals=signals,
        early_stopping=early_stopping,
        loss_kind=loss_kind,
        task=task,
        on_collapse=on_collapse,
        scheduler_every=scheduler_every,
        on_hang=on_hang,
        total_steps=total_steps,
        schedule=schedule,
        pipeline=pipeline,
    )
    parts = build_monitor_parts(arguments)
    if parts is None:
        from trainer_hooks.noop import NullMonitor

        schedulers = arguments.schedulers
        off = NullMonitor(arguments.optimizers, schedulers, scaler, state, scheduler_every)
        return cast(Monitor, off)
    return Monitor(
        parts.device,
        parts.run,
        tokens_per_step=parts.tokens_per_step,
        restored=parts.restored,
        sums_in_buckets=unwrap(whole)[1],
        scheduler_every=scheduler_every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorParts:
    """Parts of a guarded loop."""

    device: DeviceParts
    run: RunContext
    tokens_per_step: int | None
    restored: Restored | None


def build_monitor_parts(arguments: WatchArguments) -> MonitorParts | None:
    """Build the parts that ``watch`` and ``attach`` share, and start the run. Collective.

    Returns:
        The parts; None in mode ``off``.
    """
    environ = dict(os.environ)
    ranks, clock, faults = Ranks.join(), SystemClock(), FaultCounter()
    mode = arguments.agreed_mode(ranks, environ)
    kinds: list[type[StepFeature]] = FEATURES
    if environ.get("VITALS_DRILL"):  # `vitals drill` injects faults
        kinds = [*FEATURES, *load_plugin("drill")(mode)]
    if mode == "off":
        return None
    tokens, config = arguments.tokens(), arguments.hyperparameters()
    close_earlier(arguments.optimizers)
    device = build_device_parts(
        arguments.model,
        arguments.optimizers,
        arguments.schedulers,
        arguments.scaler,
        ranks,
        faults,
        arguments.state,
        arguments.signals,
        arguments.engine,
        arguments.names,
        vector_fields(),
        takes_groups=arguments.takes_groups,
        stages=arguments.stages(),
    )
    with ExitStack() as undo:
        undo.callback(device.release)  # a failed setup leaves the optimizers unchanged
        run_paths = open_run(ranks, environ, arguments.dir, clock, faults)
        features = StepFeatures(kinds)
        run = _run_context(
            mode, arguments, ranks, device, run_paths, environ, faults, clock, features
        )
        undo.callback(run.emitter.close)
        info = run_info(
            name=arguments.run or "",
            environ=environ,
            mode=mode,
            config=config,
            tags=arguments.tags,
            world_size=ranks.world_size,
            readback_lag=device.readback.lag,
            num_params=device.norms.num_parameters,
            run_dir=str(run_paths.run_dir.path),
            judge=run.judge.config,
            total_steps=arguments.total_steps or 0,
            schedule=run.features[ScheduleFeature].name,
            task=arguments.task or "",
        )
        restored = _start_run(run, run_paths, info)
        if ranks.rank == 0:
            run.terminal = Terminal.open(info, run_paths.run_dir.run_id, clock, environ)
        if run.terminal is not None:
            at = "" if restored is None else f"resumed at step {restored.step} from {restored.id}"
            run.terminal.started(at)
        for code, text in device.warnings:
            run.warn(code, text, step=run.first_step)
        if arguments.on_hang == "restart" and environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
            text = "on_hang='restart' ends a hung job, and torchrun does not start it again"
            hint = "torchrun --max-restarts 3 does"
            run.warn("no_max_restarts", f"{text}; {hint}", step=run.first_step)
        if run_paths.is_first:
            _start_agent(run, run_paths, environ)
        undo.pop_all()
    return MonitorParts(device=device, run=run, tokens_per_step=tokens, restored=restored)


def _open_emitter(
    ranks: Ranks, device: DeviceParts, run_paths: RunPaths, faults: FaultCounter, clock: Clock
) -> Emitter:
    """Open this rank's journal in ``watch``, and return its emitter."""
    return Emitter(
        open_journal(run_paths, ranks, faults, clock, device.norms.device),
        clock=clock,
        faults=faults,
        is_rank0=ranks.rank == 0,
        num_groups=sum(len(o.param_groups) for o in device.optimizers),
        layers=LayerAggregator(
            device.norms.names,
            () if device.sampler is None else device.sampler.measured_modules,
            tuple(turn.part for turn in device.turns),
        ),
    )


def _run_context(
    mode: Mode,
    given: WatchArguments,
    ranks: Ranks,
    device: DeviceParts,
    place: RunPaths,
    environ: Mapping[str, str],
    faults: FaultCounter,
    clock: Clock,
    features: StepFeatures,
) -> RunContext:
    """Build the run's parts for the monitor, with its earlier starts' budgets. Collective."""
    assert mode != "off", "an unwatched run has no host part"
    emitter = _open_emitter(ranks, device, place, faults, clock)
    plan = PlanJournal(
        plan=place.plan, run_dir=place.run_dir, is_rank0=ranks.rank == 0, faults=faults
    )
    checkpoints = given.checkpoint_settings(place.run_dir)
    state = _build_training_state(
        given, device, has_snapshots=checkpoints is not None, has_replicas=ranks.world_size > 1
    )
    replicas = Replicas.make(
        state,
        ranks=ranks,
        optimizers=given.optimizers,
        node=place.node,
        emitter=emitter,
        faults=faults,
    )
    recovery, stopping = None, given.early_stopping
    if checkpoints is not None:
        assert state is not None, "it was built, or an error was raised"
        recovery = RecoveryManager.make(
            checkpoints,
            device=device,
            ranks=ranks,
            plan=plan,
            emitter=emitter,
            clock=clock,
            state=state,
            replicas=replicas,
            keep_evaluated=stopping is not None and stopping.keep_best,
            is_on_disk=not given.keeps_snapshots_only,
        )
    config = msgspec.structs.replace(place.judge, loss_kind=given.meaning_of_loss())
    judge = Judge(config, mode, facts=msgspec.structs.replace(place.plan.facts, halted=""))
    norms, sampler = device.norms, device.sampler
    signals = given.signals or SignalSettings()
    utilization = Utilization(
        norms.num_parameters,
        ranks.world_size,
        norms.device,
        signals.flops_per_token,
        signals.peak_flops,
    )
    columns = Rank0Columns(utilization, sampler, ranks.world_size)
    log = StepLog(emitter, columns, faults, is_rank0=ranks.rank == 0)
    run = RunContext(
        mode=mode,
        given=given,
        ranks=ranks,
        device=device,
        judge=judge,
        emitter=emitter,
        log=log,
        run_dir=place.run_dir,
        plan=plan,
        faults=faults,
        clock=clock,
        inbox=open_inbox(place, ranks, environ, clock, faults),
        recovery=recovery,
        replicas=replicas,
        features=features,
        times=StepClock(clock),
        attempt=place.attempt,
        surroundings=CapsuleContext(given.model, given.optimizers, device.scaler),
    )
    features.build(run)
    return run


def _build_training_state(
    arguments: WatchArguments, device: DeviceParts, *, has_snapshots: bool, has_replicas: bool
) -> TrainingState | None:
    """Return the watched training state, in the form in which the loop or its engine keeps it.

    None if nothing needs it, or if only the replica checks do and it cannot be read.
    """
    if not (has_snapshots or has_replicas):
        return None
    engine = arguments.engine
    try:
        return (TrainingState if engine is None else engine.training_state)(
            arguments.model,
            device.optimizers,
            device.schedulers,
            scaler=device.scaler,
            extra=device.extra,
            is_stage=arguments.pipeline is not None,
            owns_step=arguments.owns_step,
        )
    except Exception:
        if has_snapshots:
            raise
        return None


def _start_run(run: RunContext, run_paths: RunPaths, info: RunInfo) -> Restored | None:
    """Load a watched run's latest checkpoint, if any; record the start; take the first snapshot."""
    recovery = run.recovery
    restored = recovery.resume() if recovery is not None else None
    attempt = AttemptStarted(id=run_paths.attempt, parent=None, fork_step=0, reason="start")
    if restored is not None:
        take_meta(run, restored.meta, step=restored.step)
        reason = f"resumed from {restored.id}"
        attempt = AttemptStarted(
            id=run_paths.attempt, parent=restored.attempt, fork_step=restored.step, reason=reason
        )
    if restored is None and run.plan.plan.branches:
        check = _build_restart_check(run, run_paths) if run.is_rank0 else None
        run.features[FirstStepsFeature].expect_again(check)
    run.first_step = attempt.fork_step
    start_branch(run, attempt, None if restored is None else restored.meta["judge"])
    _emit_start_events(run, run_paths, info, attempt)
    if recovery is not None:
        meta = restored.meta if restored is not None else snapshot_meta(run, None)
        recovery.take_first_snapshot(attempt.fork_step, run_paths.attempt, meta)
    if (replicas := run.replicas) is not None:
        drops = replicas.exclude_differing(attempt.fork_step, run_paths.attempt, run.emitter)
        if drops and recovery is not None:
            recovery.ring.forget_plans()
    return restored


def _build_restart_check(run: RunContext, run_paths: RunPaths) -> RestartCheck | None:
    """Return ``watch``'s comparison with the earlier starts; None without losses that fall."""
    earlier = None
    if run.judge.config.loss_kind == "minimize":
        with run.faults.fail_open("earlier_losses"):
            earlier = read_earlier_losses(run_paths.run_dir)
    return None if earlier is None else RestartCheck(earlier)


def _emit_start_events(
    run: RunContext, run_paths: RunPaths, info: RunInfo, attempt: AttemptStarted
) -> None:
    """Write ``watch``'s events about the start of this rank; rank 0 those of the run."""
    ranks, step = run.ranks, attempt.fork_step
    started = RankStarted(
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        pid=os.getpid(),
        node=run_paths.node,
        process_started_unix_ns=process_started_unix_ns(run.clock.time_ns()),
    )
    events: list[Event] = [started]
    if ranks.rank == 0:
        with run.faults.fail_open("run.json"):
            run_paths.run_dir.write_info(info)
        events += [RunStarted(info=info), attempt]
        if info.readback_lag == 0:
            text = "an optimizer is not fused, so each step waits for the host; pass fused=True"
            events.append(Note(code="host_path", text=text))
        if (num_groups := run.emitter.num_groups) > MAX_GROUPS:
            text = f"{num_groups} parameter groups: the rates of the first {MAX_GROUPS} are kept"
            events.append(Note(code="many_groups", text=text))
    for event in events:
        run.emitter.event(event, step=step, attempt=run_paths.attempt)


def _start_agent(run: RunContext, run_paths: RunPaths, environ: Mapping[str, str]) -> None:
    """Let ``watch`` start the node's agent, unless VITALS_AGENT is off or a package is missing."""
    if environ.get("VITALS_AGENT") == "off" or run_paths.folder is None:
        return
    missing = missing_packages()
    if missing:
        text = f"no agent: {', '.join(missing)} not installed; the journal alone is kept"
        note = Note(code="no_agent", text=text)  # for this node; this is its first rank
        run.emitter.event(note, step=0, attempt=run_paths.attempt)
        if run.terminal is not None:
            run.terminal.without_agent(missing)
        return
    with run.faults.fail_open("agent.start"):
        run.agent = NodeAgent(
            AgentStarter(run_paths, environ),
            emitter=run.emitter,
            faults=run.faults,
            now_ns=run.clock.monotonic_ns(),
        )
