"""Lightning's ``Trainer``: a callback that guards its ``optimizer.step()``.

    trainer = lightning.Trainer(callbacks=[VitalsCallback()])

Lightning's closure (forward, backward, its hooks and the clip) runs before the guarded step. The
gradients are measured and judged in ``on_before_optimizer_step``, before the clip.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Unpack

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from trainer_hooks._attach import Attached, attach
from trainer_hooks.integrations.framework import Options, is_off, require_version
from trainvitals.errors import TrainingHalted, UsageError

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Top-level packages of the two distributions, and the modules of their ``Callback``."""


def _callback_class() -> Any:
    """Return Lightning's base class of the imported package; of both, which either accepts."""
    present = [name for name in _PACKAGES if find_spec(name) is not None]
    package_name = next((name for name in present if _PACKAGES[name] in sys.modules), None)
    package = package_name or (present[0] if present else "lightning")
    require_version(package.replace("_", "-"), "2.4", extra="lightning")
    return import_module(_PACKAGES[package]).Callback


_Callback: Any = _callback_class()


class VitalsCallback(_Callback):
    """Guards ``trainer.fit()``: one run per call."""

    attached: Attached | None = None
    """Guard of the current fit, or of the last one: ``run_id``, ``observe``,
    ``swallowed_errors``."""

    def __init__(self, *, optimizer: int | None = None, **options: Unpack[Options]) -> None:
        """Guard the trainer's optimizer.

        Args:
            optimizer: index in the result of ``configure_optimizers``, if there are several; each
                needs its own callback, and has its own run.
            options: as for ``trainer_hooks.attach``.
        """
        super().__init__()
        self._index = optimizer
        self._options = options
        self._guards = self._has_gradients = False
        self._optimizer: Optimizer | None = None
        self._state: Mapping[str, Any] = {}

    @property
    def state_key(self) -> str:
        """Return the key of the callback's state in Lightning's checkpoint."""
        name = type(self).__qualname__
        return name if self._index is None else f"{name}{{'optimizer': {self._index}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that guards a resumed run from its first step, for the .ckpt."""
        if self._guards and self.attached is not None:
            return self.attached.state_dict()
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep Lightning's saved state until training starts and the guard exists."""
        self._state = state_dict

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Discard the state of an earlier fit; Lightning loads a checkpoint's state after this."""
        self._state = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to Lightning: optimizers exist and are restored, and the model is wrapped.

        Raises:
            UsageError: the loop trains in a way that cannot be guarded.
        """
        if is_off(self._options):
            return
        _refuse_strategy(trainer.strategy)
        options: Options = {**self._options}
        options["state"] = {**_averages(trainer.callbacks), **(options.get("state") or {})}
        if options.get("mode") == "heal":
            if not pl_module.automatic_optimization:
                raise UsageError(
                    "mode 'heal' cannot roll back in manual optimization, because the module steps "
                    "its optimizers and schedulers itself",
                    hint="use mode='guard', or automatic optimization",
                )
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            options.setdefault("schedulers", schedulers)
        self._optimizer = self._select_optimizer(trainer.optimizers)
        self.attached = attached = attach(
            trainer.strategy.model, self._optimizer, scaler=_scaler(trainer), **options
        )
        self._guards = True
        attached.route.runs_closures = True
        attached.when_rolled_back(partial(_rewind, trainer))
        attached.load_state_dict(self._state)
        self._listen(trainer, attached)

    def _select_optimizer(self, optimizers: Sequence[Optimizer]) -> Optimizer:
        """Return the Lightning trainer's optimizer to guard; refuse a wrong index."""
        if self._index is None and len(optimizers) == 1:
            return optimizers[0]
        if self._index is None or not 0 <= self._index < len(optimizers):
            raise UsageError(
                f"the trainer has {len(optimizers)} optimizers, and VitalsCallback(optimizer="
                f"{self._index}) does not say which of them to guard",
                hint="callbacks=[VitalsCallback(optimizer=0), VitalsCallback(optimizer=1)] guard "
                "two that are stepped in turns, each as its own run",
            )
        return optimizers[self._index]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run of Lightning's trainer.

        Raises:
            TrainingHalted: the last step, whose numbers arrive only now, halts the run.
        """
        self._end_run(lambda attached: attached.end("finished", ""))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End Lightning's run as failed or interrupted; the exception propagates."""
        if type(exception).__name__ == "SIGTERMException":  # a SystemExit without a code
            with suppress(TrainingHalted):
                self._end_run(lambda attached: attached.end("interrupted", "SIGTERM"))
            return
        self._end_run(lambda attached: attached.__exit__(type(exception), exception, None))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End a run of Lightning that is still open, for example after a tuner."""
        self.on_train_end(trainer, pl_module)

    def _end_run(self, how: Any) -> None:
        """End the guarded run of Lightning's trainer, and keep its state for a checkpoint."""
        attached, guards, self._guards = self.attached, self._guards, False
        if attached is None or not guards:
            return
        try:
            how(attached)
        finally:
            self._state, self._optimizer = attached.state_dict(), None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reset: this batch of Lightning has had no backward yet."""
        self._has_gradients = False

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Record the loss of the micro-batch, without Lightning's division and scaling.

        In manual optimization it is unknown what the loop did to the loss.
        """
        if not self._guards or self.attached is None or not pl_module.automatic_optimization:
            return
        self._has_gradients = True
        whole, scaler = loss.detach() * trainer.accumulate_grad_batches, _scaler(trainer)
        if scaler is not None and scaler.is_enabled():
            whole = whole / scaler._scale  # on the device: get_scale() would wait for it
        self.attached.loss(whole)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure and judge the gradients; in manual optimization the loop has clipped already."""
        if not self._guards or self.attached is None or not pl_module.automatic_optimization:
            return
        if not self._has_gradients and _scaler(trainer) is not None:
            return  # a training_step without a loss; with a scaler, no step follows
        if getattr(optimizer, "optimizer", optimizer) is self._optimizer:
            self.attached.before_clip(_max_norm(trainer, pl_module))
            return
        error = UsageError(
            "the trainer's optimizer was replaced after training began: its steps are not guarded",
            hint="replace it before trainer.fit(), in configure_optimizers",
        )
        self.attached._run.faults.count("unguarded_step", error)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Exclude Lightning's validation from the time of the next step."""
        if self._guards and self.attached is not None:
            self.attached._parts.clock.restart()

    def _listen(self, trainer: Any, attached: Attached) -> None:
        """Record values when Lightning passes them to its loggers, and metrics of each validation.

        Both come after the update, and belong to the step before the next one.
        """
        connector = trainer._logger_connector
        real, run = connector.log_metrics, attached._run

        def log_metrics(metrics: Any, step: int | None = None) -> None:
            real(metrics, step)
            validates = trainer.validating
            # Without a logger nothing waits for the training metrics, so Vitals must not either.
            if (validates and step is not None) or not (validates or trainer.loggers):
                return
            with run.faults.fail_open("observe"):
                prefix = "eval/" if validates else ""
                values = {prefix + name: float(value) for name, value in metrics.items()}
                at = max(0, attached.step_index - 1)
                run.emitter.scalars(values, step=at, attempt=attached.attempt)

        connector.log_metrics = log_metrics
        attached.when_closed(lambda: vars(connector).pop("log_metrics", None))


def _rewind(trainer: Any, num: int) -> None:
    """Set Lightning's ``global_step`` back; its data moves on. This step is not counted yet."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready -= num
    steps.completed -= num
    loop._batches_that_stepped -= num


def _refuse_strategy(strategy: Any) -> None:
    """Refuse Lightning strategies that make the update in their own engine."""
    for name in (kind.__name__ for kind in type(strategy).__mro__):
        if name in ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"):
            raise UsageError(
                f"{name} makes the update in its own engine, where Vitals cannot skip a step",
                hint="use strategy='ddp', FSDPStrategy or ModelParallelStrategy; for DeepSpeed "
                "without Lightning there is trainer_hooks.integrations.deepspeed",
            )


def _averages(callbacks: Iterable[Any]) -> dict[str, AveragedModel]:
    """Return averaged models of callbacks (``WeightAveraging``), which a skip must not update."""
    return {
        f"{type(callback).__name__}.{name}": value
        for callback in callbacks
        for name, value in vars(callback).items()
        if isinstance(value, AveragedModel)
    }


def _scaler(trainer: Any) -> Any:
    """Return the gradient scaler of Lightning's precision plugin; None without."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _max_norm(trainer: Any, pl_module: Any) -> float | None:
    """Return the norm to which Lightning clips: inf if it does not clip, None if unknown."""
    name = "configure_gradient_clipping"
    owner = next((kind for kind in type(pl_module).__mro__ if name in vars(kind)), type(None))
    if name in vars(pl_module) or owner.__module__.partition(".")[0] not in _PACKAGES:
        return None
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if clip is None or clip <= 0:
        return math.inf
    by_norm = getattr(algorithm, "value", algorithm) in (None, "norm")
    return float(clip) if by_norm else None
