"""``attach``: guards a loop that keeps its own clip, ``optimizer.step()`` and ``zero_grad()``.

    attached = trainvitals.attach(model, optimizer)

The first ``optimizer.step()`` of a round measures, exchanges and judges for all optimizers; the
order is that of ``Monitor.step``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks._watch import set_up
from trainer_hooks.arguments import Arguments, as_list
from trainer_hooks.guard.optimizers import agree_on_overflow
from trainer_hooks.guard.route import Route
from trainer_hooks.lifecycle.loop import Loop
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.step.controller import StepController
from trainer_hooks.step.device import Device
from trainer_hooks.step.phases import Orders, Prepared, refuse_at_step
from trainer_hooks.step.reduce_vector import Verdict
from trainvitals.auto_clip import MaxNorm
from trainvitals.detect.outliers import LossKind
from trainvitals.errors import UsageError
from trainvitals.records import OnHang

_PROBE_LINE = "attached.keep_batch(batch, loss_of) before each forward"


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    run: str | None = None,
    mode: Literal["off", "observe", "guard"] = "guard",
    scaler: torch.amp.GradScaler | None = None,
    max_norm: MaxNorm | None = None,
    dir: str | Path | None = None,
    tokens_per_step: int | None = None,
    config: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    signals: SignalSettings | None = None,
    loss_kind: LossKind = "minimize",
    on_hang: OnHang = "alert",
) -> Attached:
    """Put ``optimizer.step()`` of a loop under guard. Call on all ranks, before the first step.

    The loop stays as it is. An update with a NaN or Inf in its gradients (or in the loss, where
    ``Attached.loss`` is given it) is skipped on all ranks, without a trace. Outliers of the norm
    are skipped only where the norm is known as it was before the clip: with ``max_norm``, where the
    loop calls ``Attached.before_clip``, or where it gives the norm to ``Attached.grad_norm``. There
    is no rollback: that is ``watch``. Where the ladder stops the run, ``optimizer.step()`` raises
    ``TrainingHalted``.

    Args:
        model: the module, wrapped (DDP) or not.
        optimizers: one or several; all of them are stepped after the same backward.
        run: a name for people.
        mode: ``guard`` skips, ``observe`` only decides and records, ``off`` does nothing.
            ``VITALS_MODE=off|observe`` overrides the code.
        scaler: the loop's own gradient scaler.
        max_norm: clip to this norm within ``optimizer.step()``: the loop then must not clip.
            ``"auto"`` clips to a multiple of the recent median norm. Inf measures the norm and
            never clips.
        dir: where run directories go; else ``VITALS_DIR``, else ``./vitals_runs``.
        tokens_per_step: tokens of all ranks in one step, for throughput and utilization.
        config: hyperparameters to keep with the run.
        tags: words to find the run by.
        state: an ``EMA`` (each step updates it), an ``AveragedModel`` or a communication hook's
            state that a skip must leave as it was, by a name.
        signals: what to measure beside what costs nothing, and how often. The noise scale needs the
            norm as it was before the clip, as the outliers' rule does.
        loss_kind: what the loss is good for, as in ``watch``.
        on_hang: what is done about a hang, as in ``watch``.

    Raises:
        UsageError: an argument cannot work; the text says which and what to do.
        TrainingHalted: this run was stopped by its ladder and not resumed by a person.
    """
    given = Arguments(
        model=model,
        optimizers=tuple(as_list(optimizers)),
        run=run,
        mode=mode,
        scaler=scaler,
        dir=dir,
        tokens_per_step=tokens_per_step,
        config=config,
        tags=tags,
        state=state,
        signals=signals,
        loss_kind=loss_kind,
        on_hang=on_hang,
        owns_clip=max_norm is not None,
        owns_step=False,
        max_norm=max_norm,
    )
    made = set_up(given)
    if made is None:
        from trainer_hooks.noop import Unattached

        return cast(Attached, Unattached(given.optimizers, scaler, max_norm, state))
    return Attached(
        made.device, made.controller, tokens_per_step=made.tokens_per_step, max_norm=max_norm
    )


class Judged(NamedTuple):
    """A step between its verdict and its end."""

    verdict: Verdict
    prepared: Prepared
    orders: Orders
    max_norm: MaxNorm | None
    before_clip: bool
    """Whether the loop's own clip came, or comes, after the measurement."""


class Attached(Loop):
    """A loop under guard that steps by itself. Made by ``attach``; closing it gives all back."""

    def __init__(
        self,
        device: Device,
        controller: StepController,
        *,
        tokens_per_step: int | None,
        max_norm: MaxNorm | None,
    ) -> None:
        super().__init__(device, controller, tokens_per_step=tokens_per_step)
        self._max_norm = None if max_norm == math.inf else max_norm
        self._norm: Tensor | None = None
        self._orders: Orders | None = None
        self._judged: Judged | None = None
        self._measured: list[list[Callable[[], Tensor | None]]] = []
        self._num_batches = 0
        self._is_told = False
        self._undo: list[Callable[[], None]] = []
        stepped = device.optimizers if device.engine.guards else ()
        self._route = Route(stepped, device.scaler, self._step_one, controller.faults)

    def loss(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Give the step's loss, so that the loss rules work; when accumulating, each one's.

        Call before ``optimizer.step()``. Weights are numbers of tokens.
        """
        self._add_loss(loss, weight)
        if not self._is_told and self._parts.is_never_stepped:
            self._tell_never_stepped("20 losses were given")

    def grad_norm(self, norm: Tensor | float) -> None:
        """Give the norm of all gradients as it was before the loop's own clip.

        Call before ``optimizer.step()`` on all ranks, with what ``clip_grad_norm_`` returned.
        """
        full = getattr(norm, "full_tensor", None)
        whole = norm if full is None else full()
        with self._controller.faults.fail_open("grad_norm"):
            self._norm = self._parts.number("norm", whole)

    def before_clip(self, max_norm: float | None = None) -> None:
        """Measure and judge the gradients as they are before the loop's own clip.

        Call on all ranks after the step's last backward and before the clip: ``optimizer.step()``
        then carries the verdict out. In place of ``grad_norm``, and more exact: a finite outlier is
        told from what is not finite, and every layer's norm is the true one.

        Args:
            max_norm: what the loop clips to, for the record: inf where it does not clip, None where
                nobody knows.
        """
        if self._controller.halted is not None:
            raise self._controller.halted
        self._judged = self._judge(max_norm, before_clip=True)
        self._parts.clock.leave()

    def keep_batch(self, batch: Any, probe: LossOf) -> None:
        """Have a batch of the step kept, if it is one to be kept, so that the state can be asked.

        Call before the batch's forward, on all ranks and in every step. Nothing is rolled back
        here: where the state is damaged somebody is paged. The step's loss must be known too
        (``loss``, or the adapter): what ``probe`` gives is held against it.

        Args:
            batch: whatever ``probe`` takes.
            probe: gives the loss of a batch, as ``Monitor.batches`` takes it.
        """
        controller = self._controller
        if not self._num_batches:
            controller.probe.use(probe, step=self._step, attempt=self.attempt)
        controller.probe.keep(batch)
        self._num_batches += 1

    def when_closed(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` called when this closes: it puts back what an adapter replaced."""
        self._undo.append(undo)

    # ---------------------------------------------------------------------------- one step

    def _step_one(self, index: int, begins: bool) -> None:
        """Step one optimizer; the first of a round is judged, and finished, for all."""
        if self._controller.halted is not None:
            raise self._controller.halted
        guards = (self._device.engine.guards[index],)
        if not begins:
            self._refuse_late_gradients(index)
            assert self._orders is not None, "a round begins with orders"
            self._parts.apply(guards, self._orders)
            return
        judged, self._judged = self._judged, None
        if judged is None:
            judged = self._judge(self._max_norm, before_clip=False)
        else:
            self._parts.clock.come_back()
        self._orders = judged.orders
        self._parts.apply(guards, judged.orders)
        self._finish(judged)

    def _judge(self, max_norm: MaxNorm | None, *, before_clip: bool) -> Judged:
        """Measure, exchange and judge the gradients of all optimizers as they are now."""
        controller, device, parts = self._controller, self._device, self._parts
        refuse_at_step(None, device.joinables)
        first = self._step == self._first_step
        parts.clock.enter()
        if first:
            controller.tell_without_probe(_PROBE_LINE)
        if first and not before_clip:
            self._say_what_is_not_judged()
        norm = None if before_clip else self._norm
        clips_to = self._max_norm if controller.owns_clip else max_norm
        prepared = parts.prepare(
            self._step, None, None, norm=norm, first=first, max_norm=_finite(clips_to)
        )
        self._measured = [_gradients(o) for o in device.optimizers] if first else []
        verdict = parts.exchange()
        if self._num_batches:
            controller.probe.fed(self._step, self._num_batches, attempt=self.attempt)
            self._num_batches = 0
        if controller.probe.has_loss:
            controller.probe.rehearse(self._step, parts.own_loss)
        orders = parts.orders(verdict, prepared, self._step, self._max_norm)
        if controller.owns_clip:
            before_clip, max_norm = False, self._max_norm
        return Judged(verdict, prepared, orders, max_norm, before_clip)

    def _finish(self, judged: Judged) -> None:
        """Put back what forward wrote in a bad step, and hand the step's numbers on."""
        controller, device, parts = self._controller, self._device, self._parts
        attempted = self._step
        parts.settle(judged.orders)
        agree_on_overflow(device.scaler, device.optimizers, judged.verdict.overflow)
        ready = parts.report(
            judged.verdict,
            judged.prepared,
            step=attempted,
            max_norm=judged.max_norm,
            position=None,
            before_clip=judged.before_clip,
        )
        self._step += 1
        if device.sampler is not None:
            device.sampler.begin(self._step)
        self._norm = None
        while ready is not None or (ready := parts.waited_for()) is not None:
            judgement = controller.handle(*ready, now_step=attempted)
            controller.carry_out(judgement, now_step=attempted)
            ready = None
        if controller.has_work_beside:
            self._work_beside(attempted)

    def _tell_never_stepped(self, evidence: str) -> None:
        """Report that the loop steps something else than the optimizers given to ``attach``."""
        self._is_told = True
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        text = (
            f"{evidence}, but {names}.step() was never called, so no update is guarded: call "
            "attach() with the optimizer whose step() the loop or a wrapper calls, such as SAM's "
            "base_optimizer"
        )
        controller = self._controller
        with controller.faults.fail_open("unguarded"):
            controller.tell_unguarded(text, step=self._step)

    def _say_what_is_not_judged(self) -> None:
        if not self._controller.owns_clip and self._norm is None:
            text = (
                "gradient-norm outliers are not judged, because the loop's own clip hides them. "
                "Call attached.before_clip() before the clip, or pass the clip's result to "
                "attached.grad_norm(), or use attach(max_norm=...) and remove your clip"
            )
            self._controller.emitter.note(
                "norm_unknown", text, step=self._step, attempt=self.attempt
            )

    def _refuse_late_gradients(self, index: int) -> None:
        """Refuse, in the first round, gradients that came after the exchange: nobody judged them.

        Raises:
            UsageError: this optimizer had none when the round began, or others.
        """
        if not self._measured:
            return
        now, measured = _gradients(self._device.optimizers[index]), self._measured[index]
        pairs = zip(now, measured, strict=True)
        if any(current() is not None and current() is not was() for current, was in pairs):
            raise UsageError(
                f"optimizer {index} got its gradients after optimizer.step() of another one, so "
                "they were not measured with the step",
                hint="if updates alternate (GANs, actor and critic), call attach() once per "
                "optimizer",
            )

    def _release(self) -> None:
        for undo in reversed(self._undo):
            with self._controller.faults.fail_open("close"):
                undo()
        self._route.close()
        super()._release()


def _finite(max_norm: MaxNorm | None) -> MaxNorm | None:
    """Return what the loop clips to; an infinite norm is no clip."""
    return None if max_norm == math.inf else max_norm


def _gradients(optimizer: Optimizer) -> list[Callable[[], Tensor | None]]:
    """Return which gradients there are, without keeping them alive."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [_nothing if grad is None else weakref.ref(grad) for grad in grads]


def _nothing() -> None:
    return None
