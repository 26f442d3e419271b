"""torchtitan: the ``Trainer``'s own train step under guard.

    attached = trainer_hooks.integrations.torchtitan.attach(trainer)   # then trainer.train()

Gradients are judged after the last ``forward_backward_step`` of a step, before torchtitan clips.
Only methods of these objects are replaced, and put back at the end; no class and no module is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Unpack

import torch

import trainer_hooks
from trainer_hooks._attach import Attached
from trainer_hooks.integrations.framework import Options, replace, require
from trainer_hooks.tensors.gradients import local_tensor
from trainvitals.errors import UsageError
from trainvitals.units import humanize_count

STATE = "vitals"
"""What the loop's state is called in torchtitan's checkpoints."""
_VALIDATION = "validation_metrics/"
_TRAIN = "guarded_train"
_OWN_STEPS = {
    "OptimizersInBackwardContainer": "its optimizers step inside backward; set "
    "optimizer.early_step_in_backward = false",
    "FTOptimizersContainer": "torchft decides whether a step is made; set "
    "fault_tolerance.enable = false",
}


def attach(trainer: Any, **options: Unpack[Options]) -> Attached:
    """Put a torchtitan ``Trainer`` under guard. Call on all ranks, before ``trainer.train()``.

    The run ends with ``train()``: finished, failed or interrupted. Its checkpoints carry the state
    of the guard, and what torchtitan logs is kept with the run.

    Args:
        trainer: torchtitan's, or one derived from it.
        options: those of ``trainer_hooks.attach``.

    Raises:
        MissingDependencyError: torchtitan is not installed, or too old.
        UsageError: this trainer cannot be guarded; the text says why.
        TrainingHalted: this run was stopped by its ladder and not resumed by a person.
    """
    _require()
    _refuse(trainer)
    attached = trainer_hooks.attach(trainer.model_parts[0], list(trainer.optimizers), **options)
    if isinstance(attached, Attached):  # and not off
        _follow(trainer, attached)
    return attached


def _require() -> None:
    try:
        version("torchtitan")
    except PackageNotFoundError:
        if find_spec("torchtitan") is not None:
            return  # run from its repository, as its own scripts do: that has no version
    require("torchtitan", "0.2.2", extra="torchtitan")


def _refuse(trainer: Any) -> None:
    """Refuse what steps in another way than ``Trainer.train_step`` does.

    Raises:
        UsageError: the text says which and why.
    """
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
    if trainer.parallel_dims.pp_enabled or len(trainer.model_parts) != 1:
        parts = humanize_count(len(trainer.model_parts), "model part")
        raise UsageError(
            f"{name} trains {parts} with pipeline parallelism: "
            "its ranks hold different layers and most of them have no loss; this cannot be guarded",
            hint="parallelism.pipeline_parallel_degree = 1, or train without attach()",
        )
    for base in type(trainer.optimizers).__mro__:
        if base.__name__ in _OWN_STEPS:
            raise UsageError(
                f"{base.__name__} cannot be guarded",
                hint=_OWN_STEPS[base.__name__],
            )


def _follow(trainer: Any, attached: Attached) -> None:
    """Stand in for the trainer's methods until the loop is closed."""
    steps = _StepJudge(trainer, attached)
    replace(attached, trainer, "forward_backward_step", steps.forward_backward_step)
    train = trainer.train

    def guarded_train(*args: Any, **kwargs: Any) -> Any:
        with attached:
            return train(*args, **kwargs)

    assert guarded_train.__name__ == _TRAIN
    replace(attached, trainer, "train", guarded_train)
    _keep_what_is_logged(trainer.metrics_processor.logger, attached)
    _keep_state(trainer.checkpointer, attached)


class _StepJudge:
    """Gives the losses on, and has the gradients judged after the last backward of a step."""

    def __init__(self, trainer: Any, attached: Attached) -> None:
        from torchtitan.components.loss import IGNORE_INDEX

        self._real = trainer.forward_backward_step
        self._trainer = trainer
        self._attached = attached
        self._ignored = IGNORE_INDEX
        self._at: object = None
        self._calls = 0
        # It would end the job, or on a GPU the process, before the step that we keep back.
        self._hide = _stops_by_itself(trainer) and attached._run.mode != "observe"

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        """Do it, and after the last one of a step measure, exchange and judge."""
        loss = self._real(*args, **kwargs)
        trainer, attached = self._trainer, self._attached
        if attached._closed:
            return loss
        at = (trainer.step, attached.step_index)
        self._at, self._calls = at, 1 + (self._calls if at == self._at else 0)
        is_given = False
        with attached._run.faults.fail_open("loss"):
            self._give(loss, **kwargs)
            is_given = True
        if self._calls == trainer.gradient_accumulation_steps:
            config = getattr(trainer, "job_config", None) or trainer.config
            attached.before_clip(config.training.max_norm)
        elif self._calls > trainer.gradient_accumulation_steps:
            self._judge_anew()
        if self._hide and is_given:
            self._hide_from_torchtitan(loss)
        return loss

    def _give(self, loss: Any, *, labels: Any, global_valid_tokens: Any, **_: Any) -> None:
        """Give this rank's own mean: what torchtitan returns is its part of all ranks' mean.

        The weights are the valid tokens, as often as the ranks share them: the ranks' weighted mean
        is ``global_avg_loss``, and the sum of the weights the step's tokens.
        """
        dims = self._trainer.parallel_dims
        tokens = (labels != self._ignored).sum()
        part = self._attached._parts.number("loss", loss)
        mean = part * global_valid_tokens * dims.cp / tokens.clamp(min=1)
        self._attached.loss(mean, tokens / (dims.cp * dims.tp))

    def _judge_anew(self) -> None:
        """Take back a judgement that came too early: the step is then judged after the clip.

        Raises:
            UsageError: in the first step. Later it is counted, and training goes on.
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
        with attached._run.faults.fail_open("forward_backward_step"):
            raise error

    @torch.no_grad()
    def _hide_from_torchtitan(self, loss: Any) -> None:
        """Let a step that is kept back pass torchtitan's own check that it is finite.

        The gradients are nobody's any more: the optimizer takes the verdict. Nothing is hidden
        where it was not judged: then torchtitan ends the job as it would without us.
        """
        local_tensor(loss.detach()).nan_to_num_(0.0, 0.0, 0.0)
        judged = self._attached._judged
        if judged is not None:
            bad = judged.orders.bad != 0
            for grad in judged.prepared.grads:
                grad.masked_fill_(bad.to(grad.device), 0.0)


def _stops_by_itself(trainer: Any) -> bool:
    """Return whether the train step looks for itself whether loss and norm are finite.

    Torchtitan 0.3 ends the job by the loss it logs; from August 2026 on it asserts both before each
    update.
    """
    steps = [vars(c)["train_step"] for c in type(trainer).__mro__ if "train_step" in vars(c)]
    codes = [getattr(inspect.unwrap(step), "__code__", None) for step in steps]
    return any(code is not None and "isfinite" in code.co_names for code in codes)


def _keep_what_is_logged(logger: Any, attached: Attached) -> None:
    """Keep with the run what torchtitan's metrics processor gives its loggers, once."""
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

    replace(attached, logger, "log", log)


class _LoopState:
    """The loop's state as one text: a checkpoint is loaded into the keys that there are now."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def state_dict(self) -> dict[str, str]:
        """Return the state; DCP calls it before a load as well."""
        return {"json": json.dumps(self._attached.state_dict())}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from the state."""
        self._attached.load_state_dict(json.loads(state["json"]))


def _keep_state(checkpointer: Any, attached: Attached) -> None:
    """Keep the loop's state with torchtitan's own; a checkpoint without one is loaded as it is."""
    states = getattr(checkpointer, "states", None)  # none in 0.3 where it makes no checkpoints
    if states is None or not hasattr(checkpointer, "dcp_load"):
        return
    states[STATE] = _LoopState(attached)
    real = checkpointer.dcp_load

    def dcp_load(state_dict: dict[str, Any], checkpoint_id: str, *rest: Any, **how: Any) -> Any:
        if STATE in state_dict and not _has_state(checkpoint_id):
            state_dict = {k: v for k, v in state_dict.items() if k != STATE}
        return real(state_dict, checkpoint_id, *rest, **how)

    replace(attached, checkpointer, "dcp_load", dcp_load)
    attached.when_closed(lambda: states.pop(STATE, None))


def _has_state(checkpoint_id: str) -> bool:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    return any(name.startswith(f"{STATE}.") for name in saved)
