"""Arguments of ``watch`` and ``attach``, validated before anything is created."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, cast, get_args

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_hooks.exchange.device import UpdateEngine
from trainer_hooks.guard.declared_schedule import Declared, DeclaredSchedule
from trainer_hooks.guard.schedules import SchedulerEvery
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.ranks import Ranks, check_same, on_every_rank
from trainer_hooks.recovery.manager import CheckpointSettings
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.tensors.gradients import NamedModels, unwrap
from trainer_hooks.tensors.pipeline import PipelineStages, name_stages, stages_of
from trainvitals.auto_clip import MaxNorm, refuse_max_norm
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.posttraining.names import (
    TASKS,
    OnCollapse,
    Task,
    is_task,
    loss_kind_of_task,
)
from trainvitals.early_stopping import EarlyStopping
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.io.rundir import RunDir
from trainvitals.printable import name_type
from trainvitals.records import OnHang

Mode = Literal["off", "observe", "guard", "heal"]
_MODES = ("off", "observe", "guard", "heal")
_OLDEST_TORCH = (2, 6)


class FrameworkEngine(UpdateEngine, Protocol):
    """A framework's engine, which keeps the training state in a form of its own."""

    def training_state(self, *args: Any, **kwargs: Any) -> TrainingState:
        """Return the state to snapshot and restore; arguments as for ``TrainingState``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchArguments:
    """Arguments documented at ``watch``, and those of a framework engine that owns the step."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...] = ()
    run: str | None
    mode: str
    scaler: torch.amp.GradScaler | None
    checkpoints: CheckpointSettings | str | Path | bool | None = None
    dir: str | Path | None
    tokens_per_step: int | None
    config: Mapping[str, object] | None
    tags: Sequence[str]
    state: Mapping[str, Any] | None
    signals: SignalSettings | None
    engine: FrameworkEngine | None = None
    early_stopping: EarlyStopping | None = None
    loss_kind: LossKind | None = None
    task: Task | None = None
    on_collapse: OnCollapse = "report"
    scheduler_every: SchedulerEvery = "step"
    on_hang: OnHang = "alert"
    total_steps: int | None = None
    schedule: Declared | None = None
    pipeline: Any = None
    """Schedule of ``torch.distributed.pipelining`` that runs the stages in the model."""
    names: tuple[str, ...] = ()
    """Names of the optimizers, if they may take turns (GAN)."""
    owns_clip: bool = True
    """Whether only Vitals clips; otherwise gradients may arrive clipped."""
    owns_step: bool = True
    """Whether Vitals controls the step of the loop, so that it can roll back."""
    max_norm: MaxNorm | None = None

    @property
    def takes_groups(self) -> bool:
        """Whether the loop may add parameter groups: no engine and no pipeline has its own."""
        return self.engine is None and self.pipeline is None

    @property
    def keeps_snapshots_only(self) -> bool:
        """Whether the loop saves its own checkpoints, and Vitals keeps states in memory only."""
        return self.mode == "heal" and not self.owns_step

    def stages(self) -> PipelineStages | None:
        """Return the rank's stages of the pipeline given to ``watch``; None without one."""
        return None if self.pipeline is None else PipelineStages.of(self.pipeline)

    def meaning_of_loss(self) -> LossKind:
        """Return the kind of loss; by default that of the task, otherwise of the models."""
        default: LossKind = "adversarial" if isinstance(self.model, NamedModels) else "minimize"
        return self.loss_kind or loss_kind_of_task(self.task) or default

    def tokens(self) -> int | None:
        """Return ``watch``'s argument ``tokens_per_step`` as a number; raise if invalid."""
        value: Any = self.tokens_per_step
        if value is None:
            return None
        if not isinstance(value, int | float | SupportsIndex) or not 0 < float(value) < 2**53:
            raise UsageError(
                f"tokens_per_step is {value!r}; it must be a number above 0",
                hint="the number of tokens of all ranks in one step; leave it out if it varies",
            )
        return int(value)

    def hyperparameters(self) -> Mapping[str, object]:
        """Return the configuration given to ``watch`` as a mapping; raise if invalid."""
        config: object = self.config
        if config is None:
            return {}
        if isinstance(config, Mapping):
            return config
        raise UsageError(
            f"config is {name_type(config)}; it must be a mapping",
            hint="vars(arguments), dataclasses.asdict(config), OmegaConf.to_container(config)",
        )

    def declared_schedule(self) -> DeclaredSchedule | None:
        """Return the declared schedule that learning rates are compared with; None without one.

        Call before a checkpoint is loaded: it starts at the current state of the schedulers.
        """
        total = self.total_steps
        if total is not None and (
            not isinstance(total, int) or isinstance(total, bool) or total < 1
        ):
            raise UsageError(
                f"total_steps is {total!r}; it must be a whole number of at least 1",
                hint="the optimizer steps of the whole run, those before a resume included",
            )
        if self.schedule is None:
            return None
        return DeclaredSchedule(
            self.schedule,
            self.optimizers,
            schedulers=self.schedulers,
            total_steps=total,
            every=self.scheduler_every,
        )

    def agreed_mode(self, ranks: Ranks, environ: Mapping[str, str]) -> Mode:
        """Return the mode after checking that all ranks watch with equal arguments. Collective."""

        def checked() -> tuple[Mode, bool, object, object, LossKind, tuple[object, object]]:
            _check_torch()
            _check_agent_choice(environ)
            _check_argument_types(self)
            _check_names_and_paths(self)
            self.tokens()
            self.hyperparameters()
            refuse_max_norm(self.max_norm)
            checkpoints = self.checkpoints
            settings = checkpoints if isinstance(checkpoints, CheckpointSettings) else None
            how = bool(checkpoints) if settings is None else replace(settings, directory=Path("/"))
            _check_early_stopping(self.early_stopping)
            _check_loss_kind(self.meaning_of_loss())
            _check_task(self.task)
            _check_on_collapse(self)
            _check_scheduler_every(self.scheduler_every)
            _check_on_hang(self.on_hang)
            self.declared_schedule()
            scaled = self.scaler is not None and self.scaler.is_enabled()
            mode = _effective_mode(self, environ)
            if mode != "off":
                _check_pipeline(self)
            reaction = (self.on_collapse, self.task if self.on_collapse == "stop" else None)
            return mode, scaled, how, self.early_stopping, self.meaning_of_loss(), reaction

        modes, scaled, checkpoint_settings, ends, kinds, reactions = zip(
            *on_every_rank(ranks, checked), strict=True
        )
        check_same("mode", modes, "VITALS_MODE and watch(mode=...) must be the same on all ranks")
        check_same("gradient scaler", scaled, "give the scaler on all ranks or on none")
        check_same(
            "checkpoints", checkpoint_settings, "give the same CheckpointSettings on all ranks"
        )
        check_same("early_stopping", ends, "give the same EarlyStopping on all ranks")
        check_same("loss_kind", kinds, "give the same loss_kind on all ranks")
        check_same("on_collapse", reactions, "give the same on_collapse and task on all ranks")
        return cast(Mode, modes[0])

    def checkpoint_settings(self, run_dir: RunDir) -> CheckpointSettings | None:
        """Return where and how ``watch`` stores checkpoints; None if they are off."""
        if self.keeps_snapshots_only:
            return CheckpointSettings(directory=run_dir.checkpoints_dir)
        if not self.checkpoints:
            return None
        if isinstance(self.checkpoints, CheckpointSettings):
            return self.checkpoints
        if isinstance(self.checkpoints, str | Path):
            return CheckpointSettings(directory=Path(self.checkpoints))
        return CheckpointSettings(directory=run_dir.checkpoints_dir)


def _check_argument_types(arguments: WatchArguments) -> None:
    """Refuse arguments of wrong types in ``watch`` and ``attach``."""
    # Any: users may pass any type, whatever the annotation says.
    model: Any = arguments.model
    optimizers: tuple[Any, ...] = arguments.optimizers
    order = "the argument order is watch(model, optimizer, scheduler, scaler=scaler)"
    hint = f"{order}; attach(model, optimizer, scaler=scaler)"
    if isinstance(model, Optimizer) and any(isinstance(o, nn.Module) for o in optimizers):
        raise UsageError(
            f"the model is {name_type(model)}, and the optimizer is "
            f"{name_type(optimizers[0])}: they are swapped",
            hint=hint,
        )
    if (
        arguments.owns_step
        and _is_model_collection(model)
        and (error := _wrong_models(model)) is not None
    ):
        raise error
    if _is_model_collection(model):
        raise UsageError(
            f"the model is {name_type(model)} of {len(model)}; it must be one module",
            hint="watch([a, b], [opt_a, opt_b]) takes several; attach() guards one model: pass "
            "nn.ModuleList([a, b])",
        )
    if not isinstance(model, nn.Module) and arguments.engine is None:
        raise UsageError(f"the model is {name_type(model)}; it must be an nn.Module", hint=hint)
    by_hand = (
        f"{hint}; if the loop updates weights itself, torch.optim.SGD(model.parameters(), lr=lr) "
        "makes the same update as p.add_(-lr * p.grad)"
    )
    for optimizer in optimizers:
        if isinstance(optimizer, type):
            raise UsageError(
                f"optimizers holds the class {optimizer.__name__}; each must be an instance",
                hint=f"optimizer = {optimizer.__name__}(model.parameters(), ...)",
            )
        other = isinstance(optimizer, nn.Module | LRScheduler | torch.amp.GradScaler)
        odd = arguments.engine is None and not _has_param_groups(optimizer)
        if other or odd or not hasattr(optimizer, "step"):
            raise UsageError(
                f"optimizers holds {name_type(optimizer)}; each must be a torch.optim.Optimizer",
                hint=by_hand if isinstance(optimizer, torch.Tensor) else hint,
            )
    if not optimizers:
        raise UsageError("no optimizer was given; at least one is needed", hint=by_hand)
    for scheduler in arguments.schedulers:
        if isinstance(scheduler, nn.Module | Optimizer | torch.amp.GradScaler):
            raise UsageError(
                f"schedulers holds {name_type(scheduler)}, which is not a learning-rate scheduler",
                hint=f"{hint}; several optimizers as a list: watch(model, [opt_a, opt_b])",
            )
    _check_scaler(arguments.scaler, hint)


def _has_param_groups(optimizer: Any) -> bool:
    """Return whether an optimizer given to ``watch`` has valid param_groups."""
    groups = getattr(optimizer, "param_groups", None)
    return isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Iterable) for group in groups
    )


def _check_scaler(scaler: object, hint: str) -> None:
    if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "unscale_")):
        raise UsageError(
            f"scaler is {name_type(scaler)}; it must be a torch.amp.GradScaler", hint=hint
        )


def _check_early_stopping(value: object) -> None:
    if value is not None and not isinstance(value, EarlyStopping):
        raise UsageError(
            f"early_stopping is {name_type(value)}; it must be an EarlyStopping",
            hint="watch(..., early_stopping=EarlyStopping(metric='loss', patience=5))",
        )


def _check_loss_kind(value: object) -> None:
    """Refuse a ``loss_kind`` given to ``watch`` that is not a known one."""
    if value not in get_args(LossKind):
        raise UsageError(
            f"loss_kind is {value!r}; it must be one of {', '.join(get_args(LossKind))}",
            hint="'minimize' for a loss that training minimizes, 'rl' or 'adversarial' otherwise",
        )


def _check_task(value: object) -> None:
    """Refuse a ``task`` given to ``watch`` that is not a kind of post-training, except None."""
    if value is not None and not is_task(value):
        raise UsageError(
            f"task is {value!r}; it must be one of {', '.join(TASKS)}",
            hint="the kind of post-training; leave it out for any other training",
        )


def _check_on_collapse(arguments: WatchArguments) -> None:
    """Refuse an ``on_collapse`` given to ``watch`` that cannot act as it says."""
    value: Any = arguments.on_collapse
    if value not in get_args(OnCollapse):
        raise UsageError(
            f"on_collapse is {value!r}; it must be 'report' or 'stop'",
            hint="'stop' halts a run whose policy collapsed, with a checkpoint",
        )
    if value == "report":
        return
    kinds = [name for name, spec in TASKS.items() if spec.samples]
    if arguments.task not in kinds:
        raise UsageError(
            f"on_collapse='stop' needs a task that can collapse, but task is {arguments.task!r}",
            hint=f"task={kinds[0]!r}; others are {', '.join(kinds[1:])}",
        )
    if arguments.owns_step and not arguments.checkpoints:
        raise UsageError(
            "on_collapse='stop' saves a checkpoint before it halts, so it needs checkpoints",
            hint="watch(..., on_collapse='stop', checkpoints=True) keeps them in the run directory",
        )


def _check_scheduler_every(value: object) -> None:
    """Refuse a ``scheduler_every`` given to ``watch`` other than step and epoch."""
    if value not in get_args(SchedulerEvery):
        raise UsageError(
            f"scheduler_every is {value!r}; it must be 'step' or 'epoch'",
            hint="'step' for schedulers that count updates, 'epoch' for those that count epochs",
        )


def _check_on_hang(value: object) -> None:
    """Refuse an ``on_hang`` given to ``watch`` other than alert and restart."""
    if value not in get_args(OnHang):
        raise UsageError(
            f"on_hang is {value!r}; it must be 'alert' or 'restart'",
            hint="'restart' ends a job that hangs, so that torchrun --max-restarts starts it again",
        )


def _check_pipeline(arguments: WatchArguments) -> None:
    """Refuse a ``pipeline`` that cannot be watched, and a stage that is watched without one."""
    stages = stages_of(arguments.model)
    if arguments.pipeline is None:
        if stages:
            raise UsageError(
                f"the model is {name_stages([number for number, _ in stages])} of a pipeline with "
                f"{stages[0][1]} stages",
                hint="watch(stage_module, optimizer, pipeline=schedule), or attach() with the same",
            )
        return
    watched = PipelineStages.of(arguments.pipeline)
    if isinstance(arguments.model, NamedModels):
        raise UsageError(
            "pipeline was given with several named models; the model must be one module",
            hint="watch(stage_module, optimizer, pipeline=schedule), for several stages with "
            "torch.nn.ModuleList(stage_modules)",
        )
    inside = {id(each) for each in arguments.model.modules()}
    outside = [number for number, each in watched.modules.items() if id(each) not in inside]
    if outside:
        raise UsageError(
            f"the model does not contain {name_stages(outside)} of this rank's schedule",
            hint="watch(stage_module, optimizer, pipeline=schedule), for several stages with "
            "torch.nn.ModuleList(stage_modules)",
        )
    signals = arguments.signals
    if getattr(signals, "noise_scale", False) or getattr(signals, "reduction", False):
        raise UsageError(
            "signals of each rank's own gradients are not measured in a pipeline, because its "
            "ranks hold different parameters",
            hint="leave noise_scale and reduction out of watch(signals=SignalSettings(...))",
        )


def _check_agent_choice(environ: Mapping[str, str]) -> None:
    """Let ``watch`` refuse a value of VITALS_AGENT other than auto and off."""
    choice = environ.get("VITALS_AGENT", "auto")
    if choice not in ("auto", "off"):
        raise UsageError(
            f"VITALS_AGENT is {choice!r}; it must be auto or off",
            hint="unset it so that the first rank of each node starts the agent",
        )


def _check_names_and_paths(arguments: WatchArguments) -> None:
    """Refuse names and paths of wrong types given to ``watch``; other tools read them."""
    # Any: users may pass any type, whatever the annotation says.
    run: Any = arguments.run
    tags: Any = arguments.tags
    if run is not None and not isinstance(run, str):
        raise UsageError(
            f"run is {name_type(run)}; it must be a name (text)",
            hint="watch(..., run='my-experiment')",
        )
    if not isinstance(tags, Iterable):  # a single string is one tag
        raise UsageError(
            f"tags is {tags!r:.100}; it must be a list or tuple of texts", hint="tags=('demo',)"
        )
    if arguments.dir is not None and not isinstance(arguments.dir, str | Path):
        raise UsageError(
            f"dir is {name_type(arguments.dir)}; it must be a directory",
            hint="dir='runs', or VITALS_DIR",
        )
    checkpoints = arguments.checkpoints
    if checkpoints is not None and not isinstance(
        checkpoints, bool | str | Path | CheckpointSettings
    ):
        raise UsageError(
            f"checkpoints is {name_type(checkpoints)}; it must be True, a directory or "
            "CheckpointSettings",
            hint="watch(..., checkpoints=True) keeps them in the run directory",
        )


def _effective_mode(arguments: WatchArguments, environ: Mapping[str, str]) -> Mode:
    """Return the mode of ``watch`` after ``VITALS_MODE``; refuse impossible ones."""
    mode: str = arguments.mode
    override = environ.get("VITALS_MODE") or None  # launchers may set it to an empty string
    if override is not None and override not in ("off", "observe"):
        raise UsageError(
            f"VITALS_MODE is {override!r}; the environment can only set off or observe",
            hint="choose guard and heal in the code: watch(..., mode='heal')",
        )
    if mode not in _MODES:
        raise UsageError(
            f"mode is {mode!r}; it must be one of {', '.join(_MODES)}",
            hint="observe only records, guard skips bad updates, heal also rolls back",
        )
    if mode == "heal" and not arguments.owns_step and len(arguments.optimizers) > 1:
        raise UsageError(
            f"attach() with {len(arguments.optimizers)} optimizers cannot roll back, because the "
            "loop steps them one after another",
            hint="use monitor = trainvitals.watch(..., mode='heal', checkpoints=True) and "
            "monitor.step(loss), or mode='guard'",
        )
    effective = mode if override is None else min(mode, override, key=_MODES.index)
    if effective == "heal" and arguments.owns_step and not arguments.checkpoints:
        raise UsageError(
            "mode 'heal' rolls back, so it needs checkpoints",
            hint="watch(..., mode='heal', checkpoints=True) keeps them in the run directory",
        )
    return cast(Mode, effective)


def _check_torch() -> None:
    """Refuse to watch a training whose torch is older than the oldest supported version."""
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(int(n) for n in numbers) < _OLDEST_TORCH:
        raise MissingDependencyError(
            f"torch is {torch.__version__}; at least 2.6 is needed",
            hint="upgrade torch the way your cluster installs it",
        )


def join_models(model: Any) -> Any:
    """Return the module to watch; several models become one with submodules by name.

    Invalid models are returned unchanged: they are refused later, on all ranks together.
    """
    if not _is_model_collection(model) or _wrong_models(model) is not None:
        return model
    return NamedModels(_models_by_name(model))


def _is_model_collection(model: Any) -> bool:
    """Return whether ``watch`` was given several models: a sequence or a mapping."""
    return isinstance(model, Sequence | Mapping) and not isinstance(model, nn.Module | str)


def _wrong_models(models: Any) -> UsageError | None:
    """Return the error of an invalid collection of models given to ``watch``, or None."""
    by_name = _models_by_name(models)
    if not by_name:
        return UsageError("the list of models is empty", hint="watch([a, b], [opt_a, opt_b])")
    for name, model in by_name.items():
        if not isinstance(model, nn.Module):
            return UsageError(
                f"models[{name!r}] is {name_type(model)}; each must be an nn.Module",
                hint="the argument order is "
                "watch([a, b], [opt_a, opt_b], [scheduler_a, scheduler_b])",
            )
        if not _NAME.fullmatch(name) or hasattr(nn.ModuleDict, name):
            return UsageError(
                f"a model is named {name!r}; a name has letters, digits and _, and must not be the "
                "name of a method",
                hint="watch({'generator': g, 'discriminator': d}, [opt_g, opt_d])",
            )
    return None


def _models_by_name(models: Any) -> dict[str, Any]:
    """Return several watched models by name: as given, or by class name if those differ."""
    if isinstance(models, Mapping):
        return {str(name): model for name, model in models.items()}
    classes = [type(unwrap(m)[0] if isinstance(m, nn.Module) else m).__name__ for m in models]
    by_class = len(set(classes)) == len(classes)
    names = [c.lower() if by_class else f"model{i}" for i, c in enumerate(classes)]
    return dict(zip(names, models, strict=True))


def turn_names(model: Any, optimizers: Sequence[Any]) -> list[str]:
    """Return names of watched optimizers that take turns: its model's, if it belongs to one."""
    owners: dict[int, str] = {}
    if _is_model_collection(model):
        for name, part in _models_by_name(model).items():
            if isinstance(part, nn.Module):
                owners |= {id(param): name for param in part.parameters()}
    names = []
    for i, optimizer in enumerate(optimizers):
        of: set[str] = set()
        with suppress(TypeError, KeyError):  # not an optimizer: refused later, on all ranks
            groups = getattr(optimizer, "param_groups", ())
            of = {owners.get(id(p), "") for group in groups for p in group["params"]} - {""}
        names.append(of.pop() if len(of) == 1 else f"optimizer{i}")
    unique = len(set(names)) == len(names)
    return names if unique else [f"optimizer{i}" for i in range(len(names))]


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_BELONGS = {
    **dict.fromkeys(("epochs", "probe", "sample_ids", "keep_batches"), "batches(loader, {}=...)"),
    **dict.fromkeys(("loss", "weight", "max_norm"), "step(loss, {}=...)"),
}
"""Arguments of the monitor's methods that users often pass to ``watch``."""


def refuse_misplaced(options: Mapping[str, object]) -> None:
    """Refuse arguments that ``watch`` does not have.

    Raises:
        UsageError: the argument belongs to another method, which the message names.
        TypeError: no method has an argument of that name.
    """
    for name in options:
        if name in _BELONGS:
            raise UsageError(
                f"watch() has no argument {name}",
                hint=f"it belongs to the loop: monitor.{_BELONGS[name].format(name)}",
            )
        raise TypeError(f"watch() got an unexpected keyword argument {name!r}")


def as_list(value: Any) -> list[Any]:
    """Return one or several optimizers, schedulers or models given to ``watch`` as a list."""
    if value is None:
        return []
    # A Sequential or a loader is iterable too, but must count as one object.
    single = (Optimizer, nn.Module, torch.Tensor, DataLoader, str)
    many = isinstance(value, Iterable) and not isinstance(value, single)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if many else [value]
