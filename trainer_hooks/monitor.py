"""The monitor of a training loop: one call a step, in the order of DESIGN section 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from trainer_hooks.batches import Batches, Position
from trainer_hooks.device import Device
from trainer_hooks.guard import update_scaler
from trainer_hooks.host import Host
from trainer_hooks.loop import Loop, not_compiled
from trainer_hooks.outcome import StepOutcome
from trainer_hooks.parts import Prepared
from trainer_hooks.refusals import refuse_at_step
from trainer_hooks.route import OwnSteps
from trainer_hooks.signals import HostStep
from trainer_hooks.snapshots import Meta, Restored
from trainer_hooks.verdict import Verdict
from trainvitals.errors import UsageError
from trainvitals.records import DataWindowSkipped, Decision


class Monitor(Loop):
    """Guards one training loop. Made by ``watch``; use it as a context manager."""

    def __init__(
        self,
        device: Device,
        host: Host,
        *,
        tokens_per_step: int | None,
        restored: Restored | None = None,
    ) -> None:
        first_step = 0 if restored is None else restored.step
        super().__init__(device, host, tokens_per_step=tokens_per_step, first_step=first_step)
        position = None if restored is None else restored.meta["position"]
        self._start_at = Position(0, 0) if position is None else Position(position[0], position[1])
        self._batches: Batches | None = None
        self._positions: dict[int, Position] = {}
        self._own_steps = OwnSteps(device.optimizers, host.faults)

    @property
    def batch_position(self) -> Position | None:
        """Epoch and index of the batch that ``batches`` handed out last."""
        return None if self._batches is None else self._batches.position

    # ------------------------------------------------------------------------- the loop's calls

    def batches(self, loader: Iterable[Any], *, epochs: int = 1) -> Iterator[Any]:
        """Yield batches of ``loader``, timing the wait; goes on past a poisoned window.

        Owns the epochs and calls ``sampler.set_epoch``. After a rollback it moves on: the window is
        passed over by index and never loaded.
        """
        waited = self._parts.clock.waited_for_data
        clock, start = self._host.clock, self._start_at
        stream = Batches(loader, epochs=epochs, clock=clock, waited=waited, start=start)
        self._start_at = Position(0, 0)
        outer, self._batches = self._batches, stream
        if outer is None or outer.ended:
            outer = None
            self._positions.clear()  # they count the batches of a loop that is over
        return self._handed_out(stream, outer)

    def _handed_out(self, stream: Batches, outer: Batches | None) -> Iterator[Any]:
        try:
            yield from stream
        finally:
            if outer is not None and self._batches is stream:
                self._batches = outer  # a loop within the loop, such as a validation

    def micro(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Add one micro-batch's loss to the step; call once per backward when accumulating.

        The step's loss is their mean: give each as it is, not divided by their number. Weights are
        numbers of tokens; without them, the micro-batches count alike.
        """
        self._add_loss(loss, weight)

    @not_compiled
    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        max_norm: float | None = None,
    ) -> StepOutcome:
        """Clip, update, schedule and zero the gradients, unless the update would do harm.

        Call after ``backward()``; it replaces ``clip_grad_norm_``, ``optimizer.step()``,
        ``scheduler.step()`` and ``zero_grad()``.

        Args:
            loss: this rank's loss, a 0-dimensional tensor (not read on the host) or a number. After
                ``micro`` it counts as one more micro-batch, unless it is the tensor that ``micro``
                was given last.
            weight: its weight in the mean over ranks, usually the rank's number of tokens.
            max_norm: the gradient norm to clip to; None does not clip.

        Raises:
            TrainingHalted: the ladder stopped the run; the only error raised once training runs.
            UsageError: at the very first step no parameter has a gradient, or ``max_norm`` is no
                number above 0; the loss is a closure, or the loop runs within ``Join``.
        """
        if self._host.halted is not None:
            raise self._host.halted
        if self._closed:
            raise UsageError(
                "this monitor is closed, so the step would not be guarded",
                hint="keep the loop inside `with watch(...) as monitor:`, or close it at the end",
            )
        refuse_at_step(loss, self._device.joinables)
        parts, attempted = self._parts, self._step
        first = attempted == self._first_step
        max_norm = parts.usable(max_norm, first=first)
        parts.clock.enter()
        prepared = parts.prepare(attempted, loss, weight, first=first)
        verdict = parts.exchange()
        self._update(verdict, prepared, max_norm)
        position = self._noted_position()
        ready = parts.report(
            verdict,
            prepared,
            step=attempted,
            max_norm=max_norm,
            position=position,
            samples=None if self._batches is None else self._batches.take_samples(),
        )
        self._step += 1
        decision = self._host_side(ready, attempted)
        self._device.sampler.begin(self._step)
        if self._host.healer is not None:
            # After the judgement: what it proves healthy must not be evicted just before it.
            self._host.healer.after_step(self._step, self.attempt, self._meta)
        return StepOutcome(step=attempted, next_step=self._step, decision=decision)

    def _meta(self) -> Meta:
        """Return what a snapshot keeps besides tensors: the data goes on after the last batch."""
        last = self.batch_position
        return self._host.snapshot_meta(None if last is None else (last.epoch, last.batch + 1))

    # ---------------------------------------------------------------------------- one step

    def _update(self, verdict: Verdict, prepared: Prepared, max_norm: float | None) -> None:
        """Clip and step every optimizer under the verdict; then scaler, schedulers, gradients."""
        device, parts = self._device, self._parts
        orders = parts.orders(verdict, prepared, self._step, max_norm)
        with self._own_steps:
            parts.apply(device.guards, orders)
        parts.settle(orders)
        update_scaler(device.scaler, device.optimizers, verdict.overflow)
        with parts.clock.not_ours():
            for scheduler in device.schedulers:
                scheduler.step()
        for optimizer in device.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _release(self) -> None:
        self._own_steps.close()
        super()._release()

    def _noted_position(self) -> Position | None:
        """Return the step's place in the data, and remember it for a rollback to come."""
        position = self.batch_position
        if position is not None:
            self._positions[self._step] = position
            self._positions.pop(self._step - 4096, None)
        return position

    def _host_side(
        self, ready: tuple[list[float], HostStep] | None, attempted: int
    ) -> Decision | None:
        if ready is None:
            return None
        judgement = self._host.handle(*ready, now_step=attempted)
        self._step = self._host.carry_out(judgement, now_step=attempted)
        decision = judgement.decision
        if decision is not None and decision.acted and decision.action == "rollback":
            self._after_rollback(decision)
        return decision

    def _after_rollback(self, decision: Decision) -> None:
        """Write down what was in flight and move the data on past the poisoned window."""
        while (left := self._device.readback.pop()) is not None:
            self._host.handle(*left, now_step=self._step)
        self._device.shadow.keep()
        self._device.sampler.forget()
        self._device.averages.rolled_back()
        self._parts.clock.restart()
        for optimizer in self._device.optimizers:
            optimizer.zero_grad(set_to_none=True)
        stream = self._batches
        if stream is None or stream.position is None or not decision.skip_batches:
            return
        here = stream.position
        onset_step = self._host.judge.facts.skipped_windows[-1].onset_step
        onset = self._positions.get(onset_step, here)
        first = Position(here.epoch, here.batch + 1)
        past = Position(onset.epoch, onset.batch + decision.skip_batches)
        target = stream.move_to(max(first, past))
        if self._host.is_root:
            event = DataWindowSkipped(
                epoch=onset.epoch,
                first_batch=onset.batch,
                last_batch=target.batch,
                reason=decision.reason,
            )
            self._host.emitter.event(event, step=self._step, attempt=self.attempt)
