"""The monitor of a training loop: one call a step, in the order of DESIGN section 4.

prepare (fails open) -> exchange (one collective) -> verdict and update, on the device -> the host
handles the step of ``lag`` steps ago (``trainer_hooks.host``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor

from trainer_hooks.batches import Batches, Position
from trainer_hooks.device import Device
from trainer_hooks.goodbye import EndState, Goodbye, closed, opened
from trainer_hooks.guard import overflow_flag, update_scaler
from trainer_hooks.host import Host
from trainer_hooks.norms import no_gradients, scale
from trainer_hooks.outcome import StepOutcome
from trainer_hooks.pack import Local
from trainer_hooks.signals import HostStep, StepClock, device_memory, learning_rates
from trainer_hooks.snapshots import Meta, Restored
from trainer_hooks.verdict import Verdict, clip_coefficient, judge_on_device
from trainvitals.errors import TrainingHalted, UsageError
from trainvitals.records import ChangeExpected, DataWindowSkipped, Decision

Function = TypeVar("Function", bound=Callable[..., Any])


def _not_compiled(function: Function) -> Function:
    """Keep a function out of graphs: it reads clocks and talks to other ranks."""
    return cast(Function, torch.compiler.disable(function))


class _Prepared(NamedTuple):
    """What a rank brings out of its part before the exchange."""

    grads: list[Tensor]
    weighted: bool
    """Whether the losses' weights are numbers of tokens."""
    failed: bool


class Monitor:
    """Guards one training loop. Made by ``watch``; use it as a context manager."""

    def __init__(
        self,
        device: Device,
        host: Host,
        *,
        tokens_per_step: int | None,
        restored: Restored | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._clock = StepClock(host.clock)
        self._tokens_per_step = tokens_per_step
        self._first_step = self._step = 0 if restored is None else restored.step
        position = None if restored is None else restored.meta["position"]
        self._start_at = Position(0, 0) if position is None else Position(position[0], position[1])
        self._micro: tuple[Tensor, Tensor | float, bool] | None = None
        self._batches: Batches | None = None
        self._positions: dict[int, Position] = {}
        self._closed = False
        self.goodbye = Goodbye(host)
        opened(self)

    def __del__(self) -> None:
        """End a loop whose monitor was dropped; a halt found now has its marker."""
        if not getattr(self, "_closed", True):
            with suppress(TrainingHalted):
                self.end("finished", "")

    def __reduce__(self) -> Any:
        raise UsageError("a Monitor belongs to one process and cannot be pickled")

    @property
    def step_index(self) -> int:
        """Index of the next update; counts skipped ones, is set back by a rollback."""
        return self._step

    @property
    def run_id(self) -> str:
        """The run's ULID, equal on all ranks."""
        return self._host.run_dir.run_id

    @property
    def attempt(self) -> int:
        """Id of the present branch of the run."""
        return self._host.attempt

    @property
    def batch_position(self) -> Position | None:
        """Epoch and index of the batch that ``batches`` handed out last."""
        return None if self._batches is None else self._batches.position

    @property
    def swallowed_errors(self) -> dict[str, int]:
        """Errors of ours that were kept from the loop, by place."""
        return dict(self._host.faults.counts)

    # ------------------------------------------------------------------------- the loop's calls

    def batches(self, loader: Iterable[Any], *, epochs: int = 1) -> Iterator[Any]:
        """Yield batches of ``loader``, timing the wait; goes on past a poisoned window.

        Owns the epochs and calls ``sampler.set_epoch``. After a rollback it moves on: the window is
        passed over by index and never loaded.
        """
        waited = self._clock.waited_for_data
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

        Weights are numbers of tokens; without them, the micro-batches count alike.
        """
        with self._host.faults.fail_open("micro"):
            # Added to 0.0: the loop may go on counting in the tensor it gave us.
            share = 0.0 + (1.0 if weight is None else weight)
            part = self._on_device(loss).detach().to(torch.float64) * share
            before, so_far, weighted = self._micro or (0.0, 0.0, True)
            self._micro = (before + part, so_far + share, weighted and weight is not None)

    def _on_device(self, loss: Tensor | float) -> Tensor:
        """Return the loss as a tensor; a number is written by a kernel, so that nothing waits."""
        if isinstance(loss, Tensor):
            return loss
        return torch.full((), loss, dtype=torch.float64, device=self._device.norms.device)

    def observe(self, **values: float) -> None:
        """Record scalars of your own at the present step."""
        self._host.emitter.scalars(values, step=self._step, attempt=self.attempt)

    def evaluate(self, **values: float) -> None:
        """Record validation metrics at the present step, as ``eval/NAME``."""
        self.observe(**{f"eval/{name}": value for name, value in values.items()})

    def expect(self, reason: str, *, steps: int = 200) -> None:
        """Announce a planned change: from the next step the finite rules take a new baseline.

        Rank 0's word counts, and reaches all ranks with the step's numbers.
        """
        if self._host.is_root:
            self._host.expecting = max(1, steps)
            event = ChangeExpected(reason=reason, steps=steps)
            self._host.emitter.event(event, step=self._step, attempt=self.attempt)

    @_not_compiled
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
            loss: this rank's loss, a 0-dimensional tensor (not read on the host) or a number.
            weight: its weight in the mean over ranks, usually the rank's number of tokens.
            max_norm: the gradient norm to clip to; None does not clip.

        Raises:
            TrainingHalted: the ladder stopped the run; the only error raised once training runs.
            UsageError: no parameter has a gradient at the very first step.
        """
        if self._host.halted is not None:
            raise self._host.halted
        if self._closed:
            raise UsageError(
                "this monitor is closed, so the step would not be guarded",
                hint="keep the loop inside `with watch(...) as monitor:`, or close it at the end",
            )
        self._clock.enter()
        device = self._device
        prepared = self._prepare(loss, weight)
        self._host.ranks.reduce(device.packer.pack)
        verdict = judge_on_device(device.packer.layout, device.packer.pack)
        self._update(verdict, prepared, max_norm)
        attempted = self._step
        ready = device.readback.push(
            torch.cat((device.packer.pack, verdict.derived(), self._loss_scale())),
            self._host_step(max_norm, prepared.weighted),
        )
        self._step += 1
        decision = self._host_side(ready, attempted)
        if self._host.healer is not None:
            # After the judgement: what it proves healthy must not be evicted just before it.
            self._host.healer.after_step(self._step, self.attempt, self._meta)
        return StepOutcome(step=attempted, next_step=self._step, decision=decision)

    def _meta(self) -> Meta:
        """Return what a snapshot keeps besides tensors: the data goes on after the last batch."""
        last = self.batch_position
        return self._host.snapshot_meta(None if last is None else (last.epoch, last.batch + 1))

    # ---------------------------------------------------------------------------- one step

    def _prepare(self, loss: Tensor | float | None, weight: Tensor | float | None) -> _Prepared:
        """Fill the pack. A fault of ours leaves this rank's failure flag in it, and no more."""
        device, host = self._device, self._host
        root = host.root_words(self._step)
        overflow = overflow_flag(device.scaler, device.optimizers, device.norms.device)
        grads: list[Tensor] | None = None
        failed, weighted = True, weight is not None and loss is not None
        with host.faults.fail_open("prepare"):
            where, grads = device.norms.gradients()
            if self._micro is not None:
                (total, weight, weighted), self._micro = self._micro, None
                loss = total / weight
            device.packer.clear()
            device.norms.squares_into(device.packer.squares, where, grads)
            device.packer.fill(self._local(loss, weight, len(grads), overflow), root)
            failed = False
        if failed:
            # Short of its numbers, this rank still unscales, clips and steps as the others do.
            self._micro = None
            local = Local(loss=None, weight=0.0, overflow=overflow, failed=True, digest=host.digest)
            device.packer.clear()
            device.packer.fill(local, root)
        elif not grads and self._step == self._first_step and host.ranks.world_size == 1:
            raise no_gradients()
        return _Prepared(device.norms.untouched() if grads is None else grads, weighted, failed)

    def _local(
        self,
        loss: Tensor | float | None,
        weight: Tensor | float | None,
        num_gradients: int,
        overflow: Tensor | None,
    ) -> Local:
        norms, host = self._device.norms, self._host
        return Local(
            loss=None if loss is None else self._on_device(loss),
            weight=1.0 if weight is None else weight,
            overflow=overflow,
            nonfinite_params=norms.nonfinite_parameters() if host.probe_parameters else None,
            num_gradients=num_gradients,
            snapshot_wrong=None if host.healer is None else host.healer.flag(self._step),
            digest=host.digest,
        )

    def _update(self, verdict: Verdict, prepared: _Prepared, max_norm: float | None) -> None:
        """Clip and step every optimizer under the verdict; then scaler, schedulers, gradients."""
        device = self._device
        guarding = self._host.mode != "observe"
        # Observing takes nothing from the loop, and so not the scaler's own skip either.
        bad = verdict.bad if guarding else verdict.overflow
        skip_on_host = bool(bad.item()) if device.reads_verdict else None
        if max_norm is not None and prepared.grads and not skip_on_host:
            self._clip(verdict, prepared, max_norm)
        if self._host.healer is not None:
            self._host.healer.before_update()
        factor = self._host.judge.lr_factor_at(self._step)
        with self._clock.not_ours():
            for guard in device.guards:
                guard.apply(bad, skip_on_host=skip_on_host, lr_factor=factor)
        if guarding:
            device.shadow.put_back(bad)
        device.shadow.keep()
        update_scaler(device.scaler, device.optimizers, verdict.overflow)
        with self._clock.not_ours():
            for scheduler in device.schedulers:
                scheduler.step()
        for optimizer in device.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _clip(self, verdict: Verdict, prepared: _Prepared, max_norm: float) -> None:
        """Scale the gradients by the ranks' norm; where none could measure, by this rank's own.

        Replicas hold the same gradients, so their own norms are the same.
        """
        norm = verdict.grad_norm
        if prepared.failed:
            with self._host.faults.fail_open("clip"):
                own = torch.nn.utils.get_total_norm(prepared.grads).to(norm)
                norm = torch.where(verdict.measured, norm, own)
        scale(prepared.grads, clip_coefficient(norm, max_norm))

    def _loss_scale(self) -> Tensor:
        """Return the scaler's scale as it lies on the device; NaN where there is no scaler."""
        loss_scale = getattr(self._device.scaler, "_scale", None)
        if loss_scale is None:
            device = self._device.norms.device
            return torch.full((1,), float("nan"), dtype=torch.float64, device=device)
        found: Tensor = loss_scale.detach().to(self._device.norms.device, torch.float64)
        return found.reshape(1)

    def _host_step(self, max_norm: float | None, weighted: bool) -> HostStep:
        clock = self._host.clock
        duration, wait, inside = self._clock.finish()
        allocated, peak = device_memory(self._device.norms.device)
        position = self.batch_position
        if position is not None:
            self._positions[self._step] = position
            self._positions.pop(self._step - 4096, None)
        return HostStep(
            step=self._step,
            attempt=self.attempt,
            time_unix_ns=clock.time_ns(),
            monotonic_ns=clock.monotonic_ns(),
            duration_seconds=duration,
            data_wait_seconds=wait,
            monitor_seconds=inside,
            learning_rates=learning_rates(self._device.optimizers),
            lr_factor=self._host.judge.lr_factor_at(self._step),
            max_norm=max_norm,
            tokens=self._tokens_per_step,
            weighted=weighted,
            memory_allocated_bytes=allocated,
            memory_peak_bytes=peak,
            epoch=None if position is None else position.epoch,
            batch_index=None if position is None else position.batch,
        )

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
        self._clock.restart()
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

    # ------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Write down what is still in flight and say goodbye. Enters no collective.

        Raises:
            TrainingHalted: the last step's numbers came back only now, and say so.
        """
        self.end("finished", "")

    def end(self, state: EndState, reason: str) -> None:
        """Close, and say how the loop ended. Does nothing in a forked child."""
        if self._closed or not self.goodbye.is_ours:
            return
        self._closed = True
        host, readback = self._host, self._device.readback
        try:
            while host.halted is None and (left := readback.pop(patience_seconds=2.0)) is not None:
                host.carry_out_at_end(host.handle(*left, now_step=self._step))
        finally:
            with host.faults.fail_open("close"):
                if host.healer is not None:
                    host.healer.close()
            self.goodbye.say(state, reason)
            self._device.release()
            closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.end("finished", "")
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        text = f"{type(error).__name__}: {error}"[:500]
        # What the loop raised goes on; a halt that is found only now is in its marker.
        with suppress(TrainingHalted):
            self.end("interrupted" if interrupted else "failed", text)
