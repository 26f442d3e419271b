"""torchtitan: guards the train step of a ``Trainer``.

    attached = trainer_hooks.integrations.torchtitan.attach(trainer)   # then trainer.train()

Gradients are judged after the last ``forward_backward_step`` of a step, before torchtitan clips.
Methods are replaced on these objects only, never on a class or module, and restored at the end.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Unpack

import torch
from torch import nn

import trainer_hooks
from trainer_hooks._attach import Attached
from trainer_hooks.integrations.framework import Options, replace_while_attached, require_version
from trainer_hooks.tensors.gradients import local_tensor
from trainvitals.errors import UsageError

STATE = "vitals"
"""Key of the state in torchtitan's checkpoints."""
_VALIDATION = "validation_metrics/"
_TRAIN = "guarded_train"
_OWN_STEPS = {
    "OptimizersInBackwardContainer": "its optimizers step inside backward; set "
    "optimizer.early_step_in_backward = false",
    "FTOptimizersContainer": "torchft decides whether a step is made; set "
    "fault_tolerance.enable = false",
}


def attach(trainer: Any, **options: Unpack[Options]) -> Attached:
    """Guard a torchtitan ``Trainer``. Call on all ranks, before ``trainer.train()``.

    The run ends with ``train()``: finished, failed or interrupted. torchtitan's checkpoints include
    the state of the guard, and its logged metrics are recorded.

    Args:
        trainer: torchtitan's trainer, or a subclass.
        options: as for ``trainer_hooks.attach``.

    Raises:
        MissingDependencyError: torchtitan is not installed, or too old.
        UsageError: this trainer cannot be guarded; the message says why.
        TrainingHalted: the escalation policy halted this run, and no operator resumed it.
    """
    _require_torchtitan()
    _refuse(trainer)
    parts = trainer.model_parts
    if options.get("mode") == "heal":
        options.setdefault("schedulers", list(trainer.lr_schedulers))
    attached = trainer_hooks.attach(
        parts[0] if len(parts) == 1 else nn.ModuleList(parts),
        list(trainer.optimizers),
        pipeline=trainer.pp_schedule if trainer.parallel_dims.pp_enabled else None,
        **options,
    )
    if isinstance(attached, Attached):  # otherwise it is off
        _hook_trainer(trainer, attached)

        def rewind(num: int) -> None:
            trainer.step -= num  # it trains to its last step, on data that moves on

        attached.when_rolled_back(rewind)
    return attached


def _require_torchtitan() -> None:
    """Refuse a torchtitan that is missing or too old; a source checkout has no version."""
    try:
        version("torchtitan")
    except PackageNotFoundError:
        if find_spec("torchtitan") is not None:
            return  # run from its repository, without an installed version
    require_version("torchtitan", "0.2.2", extra="torchtitan")


def _refuse(trainer: Any) -> None:
    """Refuse torchtitan trainers that step differently from their train_step."""
    name = type(trainer).__name__
    needed = ("forward_backward_step", "train", "gradient_accumulation_steps", "parallel_dims")
    missing = [word for word in needed if not hasattr(trainer, word)]
    if missing:
        raise UsageError(
            f"{name} has no {', '.join(missing)}: it is not a torchtitan Trainer",
            hint="attach(trainer) before trainer.train(); guard your own loop with "
            "trainvitals.attach(model, optimizer)",
        )
    if getattr(trainer.train, "__name__", "") == _TRAIN:
        raise UsageError(f"this {name} is already guarded", hint="call attach(trainer) once")
    for base in type(trainer.optimizers).__mro__:
        if base.__name__ in _OWN_STEPS:
            raise UsageError(
                f"{base.__name__} cannot be guarded",
                hint=_OWN_STEPS[base.__name__],
            )


def _hook_trainer(trainer: Any, attached: Attached) -> None:
    """Replace the trainer's methods until the loop is closed."""
    steps = _StepJudge(trainer, attached)
    replace_while_attached(attached, trainer, "forward_backward_step", steps.forward_backward_step)
    train = trainer.train

    def guarded_train(*args: Any, **kwargs: Any) -> Any:
        with attached:
            return train(*args, **kwargs)

    assert guarded_train.__name__ == _TRAIN
    replace_while_attached(attached, trainer, "train", guarded_train)
    _record_logged_values(trainer.metrics_processor.logger, attached)
    _keep_state(trainer.checkpointer, attached)


class _StepJudge:
    """Passes on the losses, and has gradients judged after the last backward of a step."""

    def __init__(self, trainer: Any, attached: Attached) -> None:
        from torchtitan.components.loss import IGNORE_INDEX

        self._real = trainer.forward_backward_step
        self._trainer = trainer
        self._attached = attached
        self._ignored = IGNORE_INDEX
        self._at: object = None
        self._calls = 0
        # torchtitan's check would end the job, or on a GPU the process, before the step is skipped.
        self._hide = _stops_by_itself(trainer) and attached._run.mode != "observe"

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call torchtitan's real method; after the last call of a step, measure and judge."""
        loss = self._real(*args, **kwargs)
        trainer, attached = self._trainer, self._attached
        if attached._closed:
            return loss
        at = (trainer.step, attached.step_index)
        self._at, self._calls = at, 1 + (self._calls if at == self._at else 0)
        is_given = False
        with attached._run.faults.fail_open("loss"):
            if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
                self._give(loss, **kwargs)
            is_given = True
        if self._calls == trainer.gradient_accumulation_steps:
            config = getattr(trainer, "job_config", None) or trainer.config
            attached.before_clip(config.training.max_norm)
        elif self._calls > trainer.gradient_accumulation_steps:
            self._discard_early_judgement()
        if self._hide and is_given:
            self._hide_from_torchtitan(loss)
        return loss

    def _give(self, loss: Any, *, labels: Any, global_valid_tokens: Any, **_: Any) -> None:
        """Pass on torchtitan's local mean loss, weighted by its valid tokens.

        The weight is the number of valid tokens, divided by the ranks that share them. So the
        weighted mean over ranks is ``global_avg_loss``, and the weights add up to the tokens of the
        step.
        """
        dims = self._trainer.parallel_dims
        tokens = (labels != self._ignored).sum()
        part = self._attached._parts.number("loss", loss)
        mean = part * global_valid_tokens * dims.cp / tokens.clamp(min=1)
        self._attached.loss(mean, tokens / (dims.cp * dims.tp))

    def _discard_early_judgement(self) -> None:
        """Discard a verdict that came too early; the step is then judged after the clip.

        Raises in the first step; later it is only counted.
        """
        attached = self._attached
        attached._judged = None
        error = UsageError(
            f"forward_backward_step was called {self._calls} times in a step, of which "
            f"gradient_accumulation_steps says {self._trainer.gradient_accumulation_steps}",
            hint="set trainer.gradient_accumulation_steps to the number of calls of each step",
        )
        if attached.step_index == attached._first_step:
            raise error
        attached._run.faults.count("forward_backward_step", error)

    @torch.no_grad()
    def _hide_from_torchtitan(self, loss: Any) -> None:
        """Make a skipped step's loss and gradients pass torchtitan's check for finite values.

        The gradients are no longer needed: the optimizer uses the verdict. Without a verdict
        nothing is hidden, and torchtitan ends the job as it would without Vitals.
        """
        local_tensor(loss.detach()).nan_to_num_(0.0, 0.0, 0.0)
        judged = self._attached._judged
        if judged is not None:
            bad = judged.orders.bad != 0
            for grad in judged.prepared.grads:
                grad.masked_fill_(bad.to(grad.device), 0.0)


def _stops_by_itself(trainer: Any) -> bool:
    """Return whether torchtitan's train step itself checks that loss and norm are finite.

    torchtitan 0.3 ends the job if the logged loss is not finite; since August 2026 it asserts both
    before each update.
    """
    steps = [vars(c)["train_step"] for c in type(trainer).__mro__ if "train_step" in vars(c)]
    codes = [getattr(inspect.unwrap(step), "__code__", None) for step in steps]
    return any(code is not None and "isfinite" in code.co_names for code in codes)


def _record_logged_values(logger: Any, attached: Attached) -> None:
    """Record what torchtitan's metrics processor passes to its loggers, once per step."""
    if not attached._run.is_rank0:
        return
    real = logger.log

    def log(metrics: Mapping[str, Any], step: int) -> None:
        real(metrics, step)
        with attached._run.faults.fail_open("log"):
            numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            validation = {k for k in numbers if k.startswith(_VALIDATION)}
            attached.observe(**{k: v for k, v in numbers.items() if k not in validation})
            attached.evaluate(**{k.removeprefix(_VALIDATION): numbers[k] for k in validation})

    replace_while_attached(attached, logger, "log", log)


class _TorchtitanState:
    """State of the loop as one string: DCP loads only keys that exist at load time."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def state_dict(self) -> dict[str, str]:
        """Return the state for torchtitan's checkpoint; DCP also calls this before a load."""
        return {"json": json.dumps(self._attached.state_dict())}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Continue from the state in torchtitan's checkpoint."""
        self._attached.load_state_dict(json.loads(state["json"]))


def _keep_state(checkpointer: Any, attached: Attached) -> None:
    """Add the loop's state to torchtitan's checkpoints; checkpoints without it still load."""
    states = getattr(checkpointer, "states", None)  # absent in 0.3 if it makes no checkpoints
    if states is None or not hasattr(checkpointer, "dcp_load"):
        return
    states[STATE] = _TorchtitanState(attached)
    real = checkpointer.dcp_load

    def dcp_load(state_dict: dict[str, Any], checkpoint_id: str, *rest: Any, **how: Any) -> Any:
        if STATE in state_dict and not _has_state(checkpoint_id):
            state_dict = {k: v for k, v in state_dict.items() if k != STATE}
        return real(state_dict, checkpoint_id, *rest, **how)

    replace_while_attached(attached, checkpointer, "dcp_load", dcp_load)
    attached.when_closed(lambda: states.pop(STATE, None))


def _has_state(checkpoint_id: str) -> bool:
    """Return whether a torchtitan checkpoint contains the guard's state."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    return any(name.startswith(f"{STATE}.") for name in saved)
