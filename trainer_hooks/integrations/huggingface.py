"""Hugging Face ``Trainer``: a callback that guards the trainer's ``optimizer.step()``.

    trainer.add_callback(VitalsCallback(trainer))

The trainer clips through its accelerator before it calls any callback; gradients are judged there,
before the clip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import torch

import trainer_hooks
from trainer_hooks._attach import Attached
from trainer_hooks.integrations import accelerate
from trainer_hooks.integrations.framework import Options, is_off, require_version
from trainer_hooks.lifecycle.shutdown import EndState
from trainer_hooks.measures.labels import PROMPT_MASKS, LabelCounts, has_prompts
from trainvitals.detect.posttraining.names import task_of_class
from trainvitals.errors import UsageError
from trainvitals.printable import name_type

require_version("transformers", "5.0", extra="huggingface")

from transformers import Trainer  # noqa: E402
from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402

_LABEL_BATCHES = 8
"""Batches at the start of an SFT whose labels are counted."""
_FIRST_ROWS = 16
"""Rows of the dataset whose masks are read."""
_LOG = logging.getLogger("trainvitals")


class VitalsCallback(TrainerCallback, ExportableState):
    """Guards ``trainer.train()``: one run per call."""

    attached: Attached | None = None
    """Guard of the current training: ``run_id``, ``observe``, ``swallowed_errors``."""
    kept: Mapping[str, Any] | None = None
    """Set only if the trainer re-created this callback from a checkpoint."""

    def __init__(self, trainer: Any = None, **options: Unpack[Options]) -> None:
        """Guard the trainer's training.

        Args:
            trainer: trainer to which this callback is added. Without it, the losses and the norm
                before the clip are unknown: non-finite steps are still skipped, but outliers are
                not.
            options: as for ``trainer_hooks.attach``. Defaults of ``run`` and ``config`` are the
                trainer's; that of ``task`` follows from its class, if it is one of TRL's trainers
                or derived from one.
        """
        self._trainer = trainer
        self._options = options
        self._hooks: accelerate.AcceleratorHooks | None = None

    def state(self) -> dict[str, Any]:
        """Return the guard's state, which Hugging Face stores in ``trainer_state.json``."""
        attached_state = {} if self.attached is None else self.attached.state_dict()
        return {"args": {}, "attributes": {"kept": attached_state}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the trainer: the model is prepared, and a checkpoint was loaded.

        Raises:
            UsageError: the trainer trains in a way that cannot be guarded; the message says what to
                do.
            TrainingHalted: the escalation policy halted this run, and no operator resumed it.
        """
        self._end_run("failed", "another training started before this one ended")
        self._refuse_copy()
        options = Options(**self._options)
        options.setdefault("run", args.run_name)
        options.setdefault("config", args.to_sanitized_dict())
        options.setdefault("task", task_of_class(type(self._trainer)))
        if options["task"] is not None and state.is_world_process_zero:
            _LOG.info("vitals: the run is judged as task=%r", options["task"])
        scheduler = kwargs.get("lr_scheduler")
        if options.get("mode") == "heal":
            options.setdefault("schedulers", getattr(scheduler, "scheduler", scheduler))
        self.attached = self._attach(kwargs["model"], kwargs["optimizer"], options)
        if self._trainer is None and state.is_world_process_zero:
            _LOG.warning(
                "vitals: VitalsCallback() does not know its trainer, so neither losses nor "
                "outliers are judged; use trainer.add_callback(VitalsCallback(trainer))"
            )
        self.attached.left_open = ("failed", "the training raised an error or was left early")
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name) if state.global_step else None
        # Without an entry the trainer raises when it saves, if the run was resumed from a
        # checkpoint
        # that was written without this callback.
        state.stateful_callbacks.setdefault(name, self.state())
        if isinstance(saved, Mapping):
            self.attached.load_state_dict(saved["attributes"]["kept"])

    def _attach(self, model: Any, optimizer: Any, options: Options) -> Attached:
        """Attach the guard to the Hugging Face trainer's optimizer."""
        trainer = self._trainer
        if trainer is None:
            if not is_off(options):
                if not hasattr(optimizer, "accelerator_state"):
                    raise UsageError(
                        "VitalsCallback() does not know its trainer, which does not use the loop "
                        "of transformers.Trainer",
                        hint="trainer.add_callback(VitalsCallback(trainer))",
                    )
                accelerate.refuse_accelerate_loop(
                    optimizer.accelerator_state.distributed_type, [optimizer]
                )
            if options.get("mode") == "heal":
                raise UsageError(
                    "VitalsCallback(mode='heal') does not know its trainer, whose step goes back "
                    "with the state",
                    hint="trainer.add_callback(VitalsCallback(trainer, mode='heal'))",
                )
            plain = accelerate.unwrap_optimizer(optimizer)
            return trainer_hooks.attach(
                model, plain, scaler=getattr(optimizer, "scaler", None), **options
            )
        # TRL's PPO passes the optimizer that its accelerator was given, without the wrapper.
        prepared = getattr(trainer, "optimizer", None)
        if accelerate.unwrap_optimizer(prepared) is not accelerate.unwrap_optimizer(optimizer):
            raise UsageError(
                f"VitalsCallback was given {name_type(trainer)} which is not the trainer "
                "that it was added to",
                hint="trainer.add_callback(VitalsCallback(trainer))",
            )
        # Trainer.__init__, which PPO's trainer does not call, would have set it.
        has_own_loop = not hasattr(trainer, "model_wrapped")
        if has_own_loop and options.get("mode") == "heal":
            raise UsageError(
                f"mode='heal' cannot set the step of {name_type(trainer)} back, whose loop makes "
                "several updates in a step",
                hint="mode='guard', which skips bad updates",
            )
        attached, self._hooks = accelerate.guard_accelerator(
            trainer.accelerator,
            trainer.model if has_own_loop else trainer.model_wrapped,
            [prepared],
            options=options,
            parts=not has_own_loop,
        )
        if isinstance(attached, Attached):
            attached.when_rolled_back(self._rewind)
        # A custom loss may count its calls; with DeepSpeed the engine steps.
        if self._hooks is not None and type(trainer).compute_loss is Trainer.compute_loss:
            accelerate.replace_method(
                attached, trainer, "compute_loss", _TrainerBatchKeeper(trainer, attached)
            )
        if options.get("task") == "sft" and trainer.is_world_process_zero():
            accelerate.replace_method(
                attached, trainer, "training_step", _LabelReader(trainer, attached)
            )
        return attached

    def _rewind(self, num: int) -> None:
        """Set the trainer's step back; its data moves on, so it ends with that many updates less.

        Its mean loss is over the steps since the last log, whose number stays.
        """
        self._trainer.state.global_step -= num
        self._trainer._globalstep_last_logged -= num

    def _refuse_copy(self) -> None:
        """Refuse a callback that Hugging Face re-created from a checkpoint, without its trainer."""
        if self.kept is not None:
            raise UsageError(
                "restore_callback_states_from_checkpoint created a new VitalsCallback without its "
                "trainer and options",
                hint="turn that argument off; VitalsCallback finds its state in the checkpoint "
                "without it",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run of the Hugging Face trainer.

        Raises:
            TrainingHalted: the last step, whose numbers arrive only now, halts the run.
        """
        self._end_run("finished", "")

    def _end_run(self, how: EndState, reason: str) -> None:
        """End the run of ``trainer.train()``, and detach."""
        attached, self.attached, self._hooks = self.attached, None, None
        if isinstance(attached, Attached):
            attached.end(how, reason)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the loss, if the trainer did not clip through its accelerator."""
        if self._hooks is not None:
            self._hooks.give_loss()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the trainer's logged values; metrics of an evaluation are recorded separately."""
        if not state.is_world_process_zero:
            return
        logged = dict(logs or {})
        if any(name.startswith("eval_") for name in logged):
            logged.pop("epoch", None)  # Vitals records the epoch itself
        named = {_metric_name(name): value for name, value in logged.items()}
        accelerate.record_logged_numbers(self.attached, named)


class _TrainerBatchKeeper:
    """Keeps the trainer's batches for the probe, with the trainer's own loss."""

    def __init__(self, trainer: Any, attached: Attached) -> None:
        self._trainer = trainer
        self._attached = attached

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and model.training:
                self._attached.keep_batch(inputs, partial(self._loss_of, real, model))
            return real(model, inputs, *args, **kwargs)

        return compute_loss

    def _loss_of(self, real: Callable[..., Any], model: Any, inputs: Any) -> Any:
        """Return the trainer's mean loss over the batch, without its scaling by accumulation."""
        with self._trainer.compute_loss_context_manager():
            return real(model, inputs).mean()


class _LabelReader:
    """Counts the labels in the first batches of an SFT trainer, as the model gets them."""

    def __init__(self, trainer: Any, attached: Attached) -> None:
        self._trainer = trainer
        self._attached = attached
        self._counts: LabelCounts | None = None
        self._num_batches = 0

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._num_batches < _LABEL_BATCHES and isinstance(self._attached, Attached):
                self._num_batches += 1
                with self._attached._run.faults.fail_open("labels"):
                    self._read(inputs)
            return real(model, inputs, *args, **kwargs)

        return training_step

    def _read(self, inputs: Any) -> None:
        """Count the labels of a batch; after the last one record them."""
        trainer = self._trainer
        if self._counts is None:
            limit = getattr(trainer.args, "max_length", -1)
            self._counts = LabelCounts(_end_ids(trainer), None if limit == -1 else limit or 0)
        if isinstance(inputs, Mapping):
            self._counts.add(inputs)
        if self._num_batches == _LABEL_BATCHES:
            rows = _first_rows(trainer.train_dataset)
            self._attached.observe(**self._counts.shares(has_prompts(rows)))


def _end_ids(trainer: Any) -> set[int]:
    """Return all tokens that end a completion: of the tokenizer, the model and its generation."""
    processing = getattr(trainer, "processing_class", None)
    holders = [
        getattr(processing, "tokenizer", processing),
        getattr(trainer.model, "config", None),
        getattr(trainer.model, "generation_config", None),
    ]
    end_ids: set[int] = set()
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        end_ids |= {n for n in (ids if isinstance(ids, list | tuple) else [ids]) if n is not None}
    return end_ids


def _first_rows(dataset: Any) -> Mapping[str, Any]:
    """Return the masks of the first rows of a trainer's dataset, if it is stored.

    A dataset that transforms rows as they are read is left alone: it may draw random numbers.
    """
    names = getattr(dataset, "column_names", None) or ()
    masks = [name for name in PROMPT_MASKS if name in names]
    if not masks or getattr(dataset, "format", {}).get("type") == "custom":
        return {}
    if not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__"):
        return {}
    rows: Mapping[str, Any] = dataset.select_columns(masks)[:_FIRST_ROWS]
    return rows


def _metric_name(name: str) -> str:
    """Return the name under which a metric of the trainer is recorded."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else name
