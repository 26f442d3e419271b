"""``attach``: guards a loop that keeps its own clip, ``optimizer.step()`` and ``zero_grad()``.

    attached = trainvitals.attach(model, optimizer)

The first ``optimizer.step()`` of a step measures, exchanges and judges for all optimizers; the
order is the same as in ``Monitor.step``.
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

from trainer_hooks._watch import build_monitor_parts
from trainer_hooks.arguments import WatchArguments, as_list
from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.exchange.reduce_vector import Verdict
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.guard.optimizers import agree_on_overflow
from trainer_hooks.guard.step_interception import StepInterception
from trainer_hooks.lifecycle.added_groups import adopt_groups
from trainer_hooks.lifecycle.loop import MonitorBase
from trainer_hooks.measures.settings import SignalSettings
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.step.actions import carry_out
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.phases import Orders, Prepared, refuse_at_step
from trainer_hooks.step.run import judge_returned
from trainer_hooks.tensors.optimizer_state import params_of
from trainvitals.auto_clip import MaxNorm
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.posttraining.names import OnCollapse, Task
from trainvitals.errors import UsageError
from trainvitals.records import OnHang

_PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau
_PROBE_LINE = "attached.keep_batch(batch, loss_of) before each forward"


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    schedulers: Any | Sequence[Any] | None = None,
    *,
    run: str | None = None,
    mode: Literal["off", "observe", "guard", "heal"] = "guard",
    scaler: torch.amp.GradScaler | None = None,
    max_norm: MaxNorm | None = None,
    dir: str | Path | None = None,
    tokens_per_step: int | None = None,
    config: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    signals: SignalSettings | None = None,
    loss_kind: LossKind | None = None,
    task: Task | None = None,
    on_collapse: OnCollapse = "report",
    on_hang: OnHang = "alert",
    pipeline: Any = None,
) -> Attached:
    """Guard a loop that steps its optimizers itself. Call on all ranks, before the first step.

    The loop stays as it is. An update with NaN or Inf in its gradients is skipped on all ranks;
    also one with NaN or Inf in the loss, if the loop calls ``Attached.loss``. Outliers of the norm
    are judged only if the norm before the clip is known: with ``max_norm``, or if the loop calls
    ``Attached.before_clip`` or ``Attached.grad_norm``. If the run is halted, ``optimizer.step()``
    raises ``TrainingHalted``.

    In mode ``heal`` a damaged state goes back inside ``optimizer.step()``: parameters, buffers,
    optimizer state, scaler, ``schedulers`` and ``state``, from snapshots in memory. Data and random
    numbers move on, because the loop has its own loader, and the loop saves its own checkpoints.
    ``Attached.when_rolled_back`` can set its counters back. Damage that leaves the loss finite is
    only proven by ``Attached.keep_batch`` or ``Attached.evaluate``.

    Args:
        model: the module, wrapped (DDP, FSDP) or not.
        optimizers: one or several; all of them are stepped after the same backward. Mode ``heal``
            takes one.
        schedulers: learning-rate schedulers that the loop steps after ``optimizer.step()``, also
            ``ReduceLROnPlateau``; a rollback restores them.
        run: display name of the run.
        mode: ``guard`` skips and may stop the run, ``heal`` also rolls back, ``observe`` only
            decides and records, ``off`` does nothing. ``VITALS_MODE=off|observe`` lowers it.
        scaler: the loop's gradient scaler.
        max_norm: clip to this norm inside ``optimizer.step()``; the loop must not clip then.
            ``"auto"`` clips to a multiple of the recent median norm. Inf measures the norm and
            never clips.
        dir: parent of run directories; default ``VITALS_DIR``, otherwise ``./vitals_runs``.
        tokens_per_step: tokens of all ranks in one step, for throughput and utilization.
        config: hyperparameters to store with the run.
        tags: words to find the run by.
        state: an ``EMA`` (updated by each step), an ``AveragedModel``, or the state of a
            communication hook that a skip must not change, by name.
        signals: additional signals to measure, and how often. The noise scale needs the norm
            before the clip, as outliers do.
        loss_kind: meaning of the loss, as in ``watch``.
        task: kind of a post-training run, as in ``watch``.
        on_collapse: reaction to a collapse, as in ``watch``; no checkpoint is saved, because the
            loop has its own.
        on_hang: reaction to a hang, as in ``watch``.
        pipeline: the schedule that runs this rank's stages, as in ``watch``.

    Returns:
        The handle of the guarded loop; closing it restores the optimizers.

    Raises:
        UsageError: an argument is invalid; the text names it and the fix.
        TrainingHalted: this run was halted, and not resumed with ``vitals resume``.
    """
    stepped, state = split_schedulers(as_list(schedulers), state)
    arguments = WatchArguments(
        model=model,
        optimizers=tuple(as_list(optimizers)),
        schedulers=stepped,
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
        task=task,
        on_collapse=on_collapse,
        on_hang=on_hang,
        pipeline=pipeline,
        owns_clip=max_norm is not None,
        owns_step=False,
        max_norm=max_norm,
    )
    parts = build_monitor_parts(arguments)
    if parts is None:
        from trainer_hooks.noop import Unattached

        return cast(Attached, Unattached(arguments.optimizers, scaler, max_norm, state))
    return Attached(
        parts.device, parts.run, tokens_per_step=parts.tokens_per_step, max_norm=max_norm
    )


def split_schedulers(
    schedulers: Sequence[Any], state: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any] | None]:
    """Return a loop's schedulers without those that need a metric, which are restored as state."""
    plateaus = {f"scheduler.{i}": s for i, s in enumerate(schedulers) if isinstance(s, _PLATEAU)}
    if plateaus and isinstance(state or {}, Mapping):
        state = {**plateaus, **(state or {})}
    return tuple(s for s in schedulers if not isinstance(s, _PLATEAU)), state


class Judged(NamedTuple):
    """A step between its verdict and its end."""

    verdict: Verdict
    prepared: Prepared
    orders: Orders
    max_norm: MaxNorm | None
    before_clip: bool
    """Whether the loop clips after the measurement."""


class Attached(MonitorBase):
    """A guarded loop that steps its optimizers itself. Created by ``attach``."""

    def __init__(
        self,
        device: DeviceParts,
        run: RunContext,
        *,
        tokens_per_step: int | None,
        max_norm: MaxNorm | None,
    ) -> None:
        super().__init__(device, run, tokens_per_step=tokens_per_step)
        self._probe = run.features[ProbeFeature].probe
        self._max_norm = None if max_norm == math.inf else max_norm
        self._norm: Tensor | None = None
        self._orders: Orders | None = None
        self._judged: Judged | None = None
        self._measured: list[list[Callable[[], Tensor | None]]] = []
        self._num_batches = 0
        self._has_new_groups = False
        """Whether groups were added since the last step that was finished."""
        self._is_reported = False
        self._undo: list[Callable[[], None]] = []
        self._rewinds: list[Callable[[int], None]] = []
        self._followers = device.schedulers
        """Schedulers that are stepped after the guarded step."""
        self._held: list[tuple[Any, type]] = []
        """Those whose next step is left out, each with its class."""
        stepped = device.optimizers if device.engine.guards else ()
        self.route = StepInterception(stepped, device.scaler, self._step_one, run.faults)

    def loss(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Record the step's loss, so that it is judged. Call before ``optimizer.step()``.

        With gradient accumulation, call it once per micro-batch with the loss before the division.

        Args:
            loss: this rank's loss.
            weight: its weight in the mean, usually the number of tokens.
        """
        self._add_loss(loss, weight)
        if not self._is_reported and self._parts.is_never_stepped:
            self._report_never_stepped("20 losses were given")

    def grad_norm(self, norm: Tensor | float) -> None:
        """Report to ``attach``'s guard the norm of all gradients before the loop's clip.

        Call before ``optimizer.step()`` on all ranks, with the result of ``clip_grad_norm_``.

        Args:
            norm: global L2 norm.
        """
        full = getattr(norm, "full_tensor", None)
        whole = norm if full is None else full()
        with self._run.faults.fail_open("grad_norm"):
            self._norm = self._parts.number("norm", whole)

    def before_clip(self, max_norm: float | None = None) -> None:
        """Let ``attach``'s guard measure and judge the gradients before the loop's own clip.

        Call on all ranks after the last backward of the step and before the clip.
        ``optimizer.step()`` then applies the verdict. More exact than ``grad_norm``: a finite
        outlier is distinguished from non-finite values, and the norms of the layers are those
        before the clip.

        Args:
            max_norm: norm that the loop clips to, for the record; inf: it does not clip, None:
                unknown.
        """
        if self._run.halted is not None:
            raise self._run.halted
        self._judged = self._judge(max_norm, before_clip=True)
        self._parts.clock.start_loop_clip()

    def keep_batch(self, batch: Any, probe: LossOf) -> None:
        """Keep this batch of an attached loop for the probe, if it is due.

        Call before the forward of the batch, on all ranks and in every step. If the probe finds
        damaged weights, mode ``heal`` rolls back, and in ``guard`` an alert pages. The step's loss
        must be known (``loss``, or the adapter): the result of ``probe`` is compared with it.

        Args:
            batch: the argument for ``probe``.
            probe: loss of a batch, as in ``Monitor.batches``.
        """
        if not self._num_batches:
            self._probe.set_loss(probe, step=self._step, attempt=self.attempt)
        self._probe.keep(batch)
        self._num_batches += 1

    def when_rolled_back(self, rewind: Callable[[int], None]) -> None:
        """Call ``rewind`` at the end of ``optimizer.step()`` if the guard's state went back.

        Args:
            rewind: gets the number of steps by which the state went back, this step included.
        """
        self._rewinds.append(rewind)

    def when_closed(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when ``attach``'s guard closes, to restore what an adapter replaced."""
        self._undo.append(undo)

    # ---------------------------------------------------------------------------- one step

    def _step_one(self, index: int, begins: bool) -> None:
        """Step one optimizer of an attached loop; a step's first one judges it for all."""
        if self._run.halted is not None:
            raise self._run.halted
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
            self._parts.clock.end_loop_clip()
        self._orders = judged.orders
        self._parts.apply(guards, judged.orders)
        self._finish_step(judged)

    def _judge(self, max_norm: MaxNorm | None, *, before_clip: bool) -> Judged:
        """Measure, exchange and judge the current gradients of all optimizers of ``attach``."""
        run, device, parts = self._run, self._device, self._parts
        self._release_schedulers()
        refuse_at_step(None, device.joinables)
        first = self._step == self._first_step
        parts.clock.start_monitor_time()
        if first:
            run.features[ProbeFeature].report_missing(_PROBE_LINE)
        if first and not before_clip:
            self._report_unjudged_parts()
        norm = None if before_clip else self._norm
        clips_to = self._max_norm if run.given.owns_clip else max_norm
        clips_to = None if clips_to == math.inf else clips_to
        outcome = None
        if parts.has_new_groups:
            self._has_new_groups = True
            outcome = adopt_groups(run, parts, self._judge_unread_steps, step=self._step)
            parts.turn = device.turns[0]
        if outcome is None:
            prepared = parts.prepare(
                self._step, None, None, norm=norm, first=first, max_norm=clips_to
            )
            verdict = parts.exchange(self._max_norm)
        else:
            prepared, verdict = outcome
        self._measured = [_weak_gradient_refs(o) for o in device.optimizers] if first else []
        if self._num_batches:
            self._probe.fed(self._step, self._num_batches, attempt=self.attempt)
            self._num_batches = 0
        if self._probe.has_loss:
            self._probe.rehearse(self._step, parts.own_loss)
        orders = parts.orders(verdict, prepared, self._step, self._max_norm)
        if run.given.owns_clip:
            before_clip, max_norm = False, self._max_norm
        return Judged(verdict, prepared, orders, max_norm, before_clip)

    def _finish_step(self, judged: Judged) -> None:
        """Restore buffers after a bad step of an attached loop; report the step's numbers."""
        run, device, parts = self._run, self._device, self._parts
        attempted = self._step
        parts.settle(judged.orders)
        if self._has_new_groups:
            self._has_new_groups = False
            device.shadow.follow_modules(run.given.model)
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
        self._norm = None
        restored = None
        while ready is not None or (ready := parts.pop_urgent_numbers()) is not None:
            judgement = judge_returned(run, *ready, now_step=attempted)
            restored = carry_out(run, judgement, now_step=attempted)
            if restored is not None:
                self._after_rollback(restored.step)
                self._fit_what_follows(is_before_step=restored.step == self._first_step)
                break
            ready = None
        if device.sampler is not None:
            device.sampler.start_step(self._step)
        if run.features.has_pending_work:
            self._run_between_steps(attempted)
        if restored is not None:
            self._move_on(attempted)
        if run.recovery is not None:
            with run.times.checkpoint():
                # After the judgement: it may prove a snapshot that would be evicted before it.
                run.recovery.after_step(self._step, run.attempt, self._meta)

    def _fit_what_follows(self, *, is_before_step: bool) -> None:
        """Fit what an attached loop does after its step to the restored state.

        Snapshots are taken inside a step, before the loop's schedulers and averages; only the first
        one is from before a step, so that what follows is left out once.
        """
        if self._device.averages is not None:
            self._device.averages.reset_after_rollback(is_blocked=is_before_step)
        for scheduler in self._followers if is_before_step else ():
            kind = type(scheduler)
            self._held.append((scheduler, kind))
            # Not an attribute, which would be in the scheduler's state_dict().
            methods = {"step": lambda *_, **__: self._release_schedulers()}
            scheduler.__class__ = type(kind.__name__, (kind,), methods)

    def _release_schedulers(self) -> None:
        """Let the attached loop step its schedulers again."""
        for scheduler, kind in self._held:
            scheduler.__class__ = kind
        self._held.clear()

    def _move_on(self, attempted: int) -> None:
        """Record in an attached loop that the data moves on, and call ``rewind`` of its owner."""
        run, num = self._run, attempted + 1 - self._step
        text = (
            f"data: continues after the batch of step {attempted} (not exact: the loop has its own "
            "loader)"
        )
        run.emitter.note("data", text, step=self._step, attempt=run.attempt)
        for rewind in self._rewinds:
            with run.faults.fail_open("rewind"):
                rewind(num)

    def _report_never_stepped(self, evidence: str) -> None:
        """Report that the loop steps something else than the optimizers given to ``attach``."""
        self._is_reported = True
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        text = (
            f"{evidence}, but {names}.step() was never called, so no update is guarded: call "
            "attach() with the optimizer whose step() the loop or a wrapper calls, such as SAM's "
            "base_optimizer"
        )
        run = self._run
        with run.faults.fail_open("unguarded"):
            run.report_unguarded(text, step=self._step)

    def _report_unjudged_parts(self) -> None:
        """Note that a clip in the loop given to ``attach`` hides outliers of the gradient norm."""
        if not self._run.given.owns_clip and self._norm is None:
            text = (
                "gradient-norm outliers are not judged, because the loop's own clip hides them. "
                "Call attached.before_clip() before the clip, or pass the clip's result to "
                "attached.grad_norm(), or use attach(max_norm=...) and remove your clip"
            )
            self._run.emitter.note("norm_unknown", text, step=self._step, attempt=self.attempt)

    def _refuse_late_gradients(self, index: int) -> None:
        """In an attached loop's first step, reject gradients that appeared after the exchange."""
        if not self._measured:
            return
        now, measured = _weak_gradient_refs(self._device.optimizers[index]), self._measured[index]
        pairs = zip(now, measured, strict=False)
        is_late = any(current() is not None and current() is not was() for current, was in pairs)
        if is_late or len(now) > len(measured):
            raise UsageError(
                f"optimizer {index} got its gradients after optimizer.step() of another one, so "
                "they were not measured with the step",
                hint="if updates alternate (GANs, actor and critic), call attach() once per "
                "optimizer",
            )

    def _release(self) -> None:
        """Undo the adapters' replacements, and restore ``optimizer.step`` after ``attach``."""
        self._release_schedulers()
        for undo in reversed(self._undo):
            with self._run.faults.fail_open("close"):
                undo()
        self.route.close()
        super()._release()


def _weak_gradient_refs(optimizer: Optimizer) -> list[Callable[[], Tensor | None]]:
    """Return weak references to an attached loop's gradients, so that they are not kept alive."""
    grads = [param.grad for param in params_of([optimizer])]
    return [(lambda: None) if grad is None else weakref.ref(grad) for grad in grads]
