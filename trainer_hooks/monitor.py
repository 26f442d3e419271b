"""The monitor of a training loop: one call a step, in the order of DESIGN section 4."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.callbacks.early_stopping import RestoredBest, nothing_kept
from trainer_hooks.data.loader import Position
from trainer_hooks.data.position import AfterRollback, DataPosition, SampleIds
from trainer_hooks.guard.misuse import Backwards, is_of_one_backward, scale_of_unknown_scaler
from trainer_hooks.guard.optimizers import OwnSteps, Turn, update_scaler
from trainer_hooks.guard.schedules import SchedulerEvery, Schedules, every_update
from trainer_hooks.lifecycle.loop import Loop, not_compiled
from trainer_hooks.lifecycle.shutdown import EXIT_CODE, exits_by_itself
from trainer_hooks.measures.host import HostMeasurements
from trainer_hooks.outcome import StepOutcome
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.recovery.manager import Meta, Restored
from trainer_hooks.recovery.rng import capture_rng, restore_rng
from trainer_hooks.step.controller import StepController
from trainer_hooks.step.device import Device
from trainer_hooks.step.phases import Prepared, refuse_at_step, refuse_probe
from trainer_hooks.step.reduce_vector import Verdict
from trainvitals.auto_clip import MaxNorm
from trainvitals.errors import UsageError
from trainvitals.records import Decision

_LOG = logging.getLogger("trainvitals")
_PROBE_LINE = "for batch in monitor.batches(loader, probe=lambda batch: loss_of(model, batch)):"


class Monitor(Loop):
    """Guards one training loop. Made by ``watch``; use it as a context manager."""

    def __init__(
        self,
        device: Device,
        controller: StepController,
        *,
        tokens_per_step: int | None,
        restored: Restored | None = None,
        sums_in_buckets: bool = False,
        scheduler_every: SchedulerEvery = "step",
    ) -> None:
        first_step = 0 if restored is None else restored.step
        super().__init__(device, controller, tokens_per_step=tokens_per_step, first_step=first_step)
        waited, lag = self._parts.clock.waited_for_data, device.readback.lag
        self._schedules: Schedules | None = None
        if device.schedulers:
            self._schedules = Schedules(device.schedulers, scheduler_every, controller.warn)
        by_epoch = self._schedules if scheduler_every == "epoch" else None
        self._feed = DataPosition(
            controller, waited, lag=lag, restored=restored, schedules=by_epoch
        )
        self._own_steps = OwnSteps(device.optimizers, controller.faults)
        self._best: RestoredBest | None = None
        self._is_told_of_epochs = False
        self._backwards: Backwards | None = Backwards(device.optimizers)
        self._primes = sums_in_buckets and restored is not None
        self._begun: set[int] = set()
        """Turns whose first step was made."""
        self._void: dict[str, Any] | None = None
        """The generators' state to go on with at the next batch, where the rest of this batch's
        updates is not made: the state was put back in the middle of it."""
        self._snapshot_waits = False
        """Whether a step was made on its own, after which other optimizers take this batch."""

    @property
    def batch_position(self) -> Position | None:
        """Epoch and index of the batch that ``batches`` handed out last."""
        return self._feed.position

    @property
    def should_stop(self) -> bool:
        """Whether early stopping ends the run: on all ranks at the same step."""
        evaluations = self._controller.evaluations
        return evaluations is not None and evaluations.should_stop

    # ------------------------------------------------------------------------- the loop's calls

    def batches(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        after_rollback: AfterRollback = "replay",
        sample_ids: SampleIds | bool | None = None,
        keep_batches: bool = False,
        probe: LossOf | None = None,
    ) -> Iterator[Any]:
        """Yield batches of ``loader``, timing the wait; never those of a poisoned window again.

        Owns the epochs and calls ``sampler.set_epoch``. A relaunch goes on with the next batch, in
        the order that the epoch had. Over a map-style ``DataLoader`` what is passed over is never
        loaded; a loader with ``state_dict`` and ``load_state_dict`` goes back by those; where
        neither can be exact, the run's events say ``not exact`` and why. What workers draw at
        random for themselves is not part of that.

        Args:
            loader: any iterable of batches.
            epochs: how often it is iterated.
            after_rollback: ``replay`` hands out again what followed the checkpoint, in the same
                order, without the window that is left out, and moves on where the loader cannot;
                ``move_on`` goes on ahead of that window.
            sample_ids: gives the ids (numbers or words) of a batch's samples, to be kept of every
                step in the run directory; True keeps their indices in the dataset. Without it the
                indices are told of bad steps, where the loader's sampler knows them.
            keep_batches: whether bad steps are kept in the run directory, batch and all, to be
                played again by ``vitals repro``. The batch is your data: nobody else may read it.
            probe: gives the loss of a batch, the very one that the loop trains on, as one number.
                ``step()`` calls it on batches of earlier steps, without gradients and without a
                trace in the training, where it must be known whether the state is to blame.

        Raises:
            UsageError: an argument is none that can be.
        """
        stream = self._feed.batches(
            loader,
            epochs=epochs,
            after_rollback=after_rollback,
            sample_ids=sample_ids,
            keep_batches=keep_batches,
            step=self._step,
            probe=probe,
        )
        return self._until_stopped(stream)

    def _until_stopped(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches on, and end once a step was made of a run that shall end."""
        try:
            for batch in stream:
                step = self._step
                yield batch
                self._end_batch()
                if self.should_stop and self._step != step:
                    return
        finally:
            # Left in the middle of a batch: what is stepped from now on is none of its updates.
            if self._void is not None and not self._closed:
                self._end_batch()

    def micro(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Add one micro-batch's loss to the step; call once per backward when accumulating.

        The step's loss is their mean: give each as it is, not divided by their number. Weights are
        numbers of tokens; without them, the micro-batches count alike.
        """
        self._add_loss(loss, weight)

    def end_epoch(self) -> None:
        """Step the schedulers of ``watch(scheduler_every="epoch")``, once an epoch is over.

        For loops over data of their own: where ``batches`` yields the batches trained on, it does
        so itself, and this does nothing.

        Raises:
            UsageError: the schedulers are stepped at every update.
        """
        schedules = self._schedules
        if schedules is None:
            return
        if schedules.every == "step":
            raise every_update()
        if not schedules.sees_epochs:
            schedules.end_epoch()
        elif not self._is_told_of_epochs:
            self._is_told_of_epochs = True
            text = "monitor.end_epoch() does nothing here: monitor.batches() ends the epochs itself"
            self._warn("end_epoch", text)

    @not_compiled
    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        max_norm: MaxNorm | None = None,
        optimizer: Optimizer | None = None,
    ) -> StepOutcome:
        """Clip, update, schedule and zero the gradients, unless the update would do harm.

        Call after ``backward()``; it replaces ``clip_grad_norm_``, ``optimizer.step()``,
        ``scheduler.step()`` and ``zero_grad()``.

        Optimizers that take turns (a GAN's two, an actor's and its critic's) are stepped by a call
        each, right after the backward of their own loss: ``monitor.step(loss_d, optimizer=opt_d)``.
        Each is judged, clipped and skipped by its own loss and norm, and each call is a step.

        Args:
            loss: this rank's loss, a 0-dimensional tensor (not read on the host) or a number. After
                ``micro`` it counts as one more micro-batch, unless it is the tensor that ``micro``
                was given last.
            weight: its weight in the mean over ranks, usually the rank's number of tokens.
            max_norm: gradient norm to clip to. ``"auto"`` clips to a multiple of the recent median
                norm (``[auto_clip]``), inf measures and never clips, and None does not clip.
            optimizer: the one to step, of those given to ``watch``; None steps all. The gradients
                of all are cleared either way: what one loss left in the others' parameters is not
                theirs.

        Raises:
            TrainingHalted: the ladder stopped the run; the only error raised once training runs.
            SystemExit: with checkpoints, a rank was sent SIGTERM, and all have saved.
            UsageError: at the very first step no parameter has a gradient, or ``max_norm`` is
                neither a number above 0 nor ``"auto"``; the loss is a closure, the loop runs within
                ``Join``, or the optimizer was not given to ``watch``.
        """
        self._refuse_after_the_end()
        refuse_at_step(loss, self._device.joinables)
        device = self._device
        turn = device.turns[0] if optimizer is None else device.turn_of(optimizer)
        if turn.number:
            refuse_probe(self._controller.probe.has_loss)
        if self._void is not None:
            return self._pass_over()
        if self._primes and self._prime():
            self._leave_out_rest(turn)
            return StepOutcome(step=self._step, next_step=self._step)
        controller, parts, attempted = self._controller, self._parts, self._step
        parts.turn = turn
        first = turn.number not in self._begun
        self._begun.add(turn.number)
        if self._backwards is not None and turn.is_headline:
            self._count_backwards(self._backwards, loss)
        if self._schedules is not None:
            self._look_at_schedulers(self._schedules)
        never_clips = max_norm is None
        max_norm = parts.usable(max_norm, first=first)
        parts.clock.enter()
        prepared = parts.prepare(attempted, loss, weight, first=first, max_norm=max_norm)
        verdict = parts.exchange()
        position, samples = self._feed.take(attempted, controller.attempt)
        if attempted == self._first_step:
            if not turn.number:
                controller.tell_without_probe(_PROBE_LINE)
                if never_clips:
                    controller.tell_without_clip()
            if self._schedules is not None and position is not None:
                with controller.faults.fail_open("schedules"):  # a stranger's class may lack much
                    self._schedules.of_epochs(attempted, *self._feed.epochs, position.num_batches)
        if controller.probe.has_loss:
            controller.probe.rehearse(attempted, parts.own_loss)
        self._update(verdict, prepared, max_norm)
        ready = parts.report(
            verdict,
            prepared,
            step=attempted,
            max_norm=max_norm,
            position=position,
            samples=samples,
        )
        self._step += 1
        decision, restored = self._host_side(ready, attempted)
        if self._device.sampler is not None:
            self._device.sampler.begin(self._step)
        if controller.has_work_beside:
            self._work_beside(attempted)
        if restored is not None:
            self._leave_out_rest(turn)
        # Others may take their turn on this batch: a state to go back to lies between two batches.
        self._snapshot_waits = bool(turn.number) and self._feed.is_within_batch
        if not self._snapshot_waits:
            self._keep_state()
        back = None if restored is None else restored.step
        return StepOutcome(
            step=attempted, next_step=self._step, decision=decision, rolled_back_to=back
        )

    def _keep_state(self) -> None:
        """Save and end where a rank was sent SIGTERM; take a snapshot where one is due."""
        controller = self._controller
        if controller.recovery is None:
            return
        with controller.times.checkpoint():
            if controller.stopping:
                self._save_and_stop()
            # After the judgement: what it proves healthy must not be evicted just before it.
            controller.recovery.after_step(self._step, controller.attempt, self._meta)

    def _leave_out_rest(self, turn: Turn) -> None:
        """Make no further update of this batch: the data goes on elsewhere, with this state."""
        if turn.number and self._feed.is_within_batch:
            self._void = capture_rng()

    def _pass_over(self) -> StepOutcome:
        """Leave no trace of an update that is not made."""
        self._parts.drop_losses()
        self._device.shadow.put_back(torch.ones((), device=self._device.norms.device))
        for optimizer in self._device.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return StepOutcome(step=self._step, next_step=self._step)

    def _end_batch(self) -> None:
        """Do what waited for the last update on a batch: the loop asks for the next one."""
        if self._void is not None:
            self._pass_over()
            restore_rng(self._void)
            self._void = None
        elif self._snapshot_waits and not self._closed:
            self._snapshot_waits = False
            self._keep_state()

    def _refuse_after_the_end(self) -> None:
        if self._controller.halted is not None:
            raise self._controller.halted
        if self._closed:
            raise UsageError(
                "this monitor is closed, so the step would not be guarded",
                hint="keep the loop inside `with watch(...) as monitor:`, or close it at the end",
            )
        if self._best is not None:
            raise UsageError(
                f"restore_best() has restored the state of step {self._best.step}, so no step can "
                "follow",
                hint="call it after training",
            )

    def _prime(self) -> bool:
        """Let the first backward after a relaunch count for nothing, and take its batch again.

        DDP sums the gradients in buckets of its own guess until a backward has shown their order,
        and other buckets round otherwise: the run that was interrupted had got beyond that.
        """
        self._primes = False
        recovery = self._controller.recovery
        # What one rank's loader cannot do, no rank does: the next is a collective.
        if recovery is None or not all(self._controller.ranks.gather(self._feed.can_go_again())):
            return False
        self._feed.again()
        recovery.restart()
        self._parts.drop_losses()
        self._start_again()
        if self._schedules is not None:
            self._schedules.restored(self._feed.next_epoch)
        return True

    def _count_backwards(self, backwards: Backwards, loss: object) -> None:
        """Say, in the first two steps, where one loss of several backwards was given."""
        count, backwards.count = backwards.count, 0
        is_one = count > 1 and not self._parts.has_micro and is_of_one_backward(loss)
        if is_one:
            text = (
                f"step {self._step} is the sum of {count} backward passes, but monitor.step(loss) "
                "got the loss of one, so only that one is recorded and judged; call "
                "monitor.micro(loss) after each backward, and monitor.step() without a loss"
            )
            self._warn("micro_batches", text)
        if is_one or self._step > self._first_step:
            backwards.close()
            self._backwards = None

    def _look_for_scaler(self, grad_norm: float) -> None:
        """Say, after the first step, that its gradients are scaled by a scaler we do not know."""
        with self._controller.faults.fail_open("scaler"):
            scale = scale_of_unknown_scaler(grad_norm)
            if scale is None or self._device.scaler is not None or not self._controller.is_rank0:
                return
            text = (
                f"the first gradient norm is {grad_norm:.3g}, and a GradScaler (scale {scale:g}) "
                "scales losses here that was not given to watch(): the gradients are clipped, "
                "judged and applied while still scaled; pass watch(..., scaler=scaler), which "
                "unscales them, and keep scaler.scale(loss).backward() in the loop"
            )
            self._warn("unknown_scaler", text)

    def _look_at_schedulers(self, schedules: Schedules) -> None:
        """Refuse a loop that steps its schedulers too: in a job of several ranks by rank 0's word.

        Raises:
            UsageError: it does, and this is the second step of a single process.
        """
        error = None
        with self._controller.faults.fail_open("schedules"):
            error = schedules.look(self._step)
        if error is not None and self._controller.ranks.world_size == 1:
            raise error
        if error is not None:
            self._controller.stepped_twice = error

    def _warn(self, code: str, text: str) -> None:
        self._controller.warn(code, text, step=self._step)

    def _save_and_stop(self) -> None:
        """Save on all ranks together, as one of them was sent SIGTERM, and end the process.

        A loop with a handler of its own is saved and goes on: it knows how it ends.
        """
        controller = self._controller
        self.shutdown.met()
        assert controller.recovery is not None, (
            "only a run with checkpoints is told to stop by its ranks"
        )
        name = controller.recovery.save_now(self._step, self.attempt, self._meta())
        controller.stopping = controller.told_to_stop = (
            False  # one that came meanwhile is answered too
        )
        if not exits_by_itself():
            if name and controller.is_rank0:
                text = "vitals: SIGTERM: saved %s; a start with VITALS_RUN_ID=%s continues from it"
                _LOG.warning(text, name, self.run_id)
            self.end("interrupted", f"SIGTERM; saved {name}" if name else "SIGTERM")
            raise SystemExit(EXIT_CODE)

    def _meta(self) -> Meta:
        """Return what a snapshot keeps besides tensors: the data goes on after the last batch."""
        return self._controller.snapshot_meta(self._feed.state())

    def restore_best(self) -> RestoredBest:
        """Put back the best state that was evaluated, once training is over. Collective.

        Call on all ranks after the last step, and within the ``with``; no step follows. A last
        ``evaluate`` counts although no step has carried its value. It waits for the disk.

        Raises:
            UsageError: this run keeps no best state, or none of its states was.
            CheckpointCorruptError: it is damaged; nothing has changed.
            CheckpointError: it could not be read on some rank.
            TrainingHalted: the last step's numbers came back only now, and say so.
        """
        if self._closed:
            raise nothing_kept("the monitor is closed")
        if self._device.averages is not None:
            self._device.averages.refuse_swapped()
        self._take_in_what_is_left(patience_seconds=None)
        evaluations = self._controller.evaluations
        if evaluations is None:
            raise nothing_kept("the run has no early stopping, so no best state is known")
        self._best = evaluations.restore_best(
            step=self._step, attempt=self.attempt, meta=self._evaluated
        )
        return self._best

    # ---------------------------------------------------------------------------- one step

    def _update(self, verdict: Verdict, prepared: Prepared, max_norm: MaxNorm | None) -> None:
        """Clip and step every optimizer under the verdict; then scaler, schedulers, gradients."""
        device, parts, turn = self._device, self._parts, self._parts.turn
        orders = parts.orders(verdict, prepared, self._step, max_norm)
        with self._own_steps:
            parts.apply(turn.guards, orders)
        parts.settle(orders)
        update_scaler(device.scaler, turn.optimizers, verdict.overflow)
        with parts.clock.not_ours():
            if self._schedules is not None:
                self._schedules.stepped(turn.optimizers if turn.number else ())
        for optimizer in device.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _release(self) -> None:
        self._own_steps.close()
        if self._backwards is not None:
            self._backwards.close()
        self._feed.close()
        super()._release()

    def _host_side(
        self, ready: tuple[list[float], HostMeasurements] | None, attempted: int
    ) -> tuple[Decision | None, Restored | None]:
        """Judge what has come back; while the judge is suspicious, this step's numbers as well."""
        decision = restored = None
        while ready is not None or (ready := self._parts.waited_for()) is not None:
            judgement = self._controller.handle(*ready, now_step=attempted)
            self._feed.judged(ready[1].step, judgement)
            if (norm := self._controller.first_norm) is not None:
                self._controller.first_norm = None
                self._look_for_scaler(norm)
            decision = judgement.decision or decision
            window = self._feed.window_of(judgement.decision)
            restored = self._controller.carry_out(judgement, now_step=attempted, window=window)
            if restored is not None and judgement.decision is not None:
                self._step = restored.step
                self._after_rollback()
                data = restored.meta.get("data")
                goes_back = self._feed.rolled_back(
                    judgement.decision, data, window, step=self._step
                )
                if self._schedules is not None:
                    self._schedules.restored(self._feed.next_epoch if goes_back else None)
                break
            ready = None
        return decision, restored

    def _after_rollback(self) -> None:
        """Write down what was in flight, and forget it."""
        while (left := self._device.readback.pop()) is not None:
            self._controller.handle(*left, now_step=self._step)
        self._start_again()

    def _start_again(self) -> None:
        """Take the state, which was put back, for the one that the next step begins with."""
        self._controller.probe.rolled_back(self._step)
        self._device.shadow.keep()
        if self._device.sampler is not None:
            self._device.sampler.forget()
        if self._device.averages is not None:
            self._device.averages.rolled_back()
        self._parts.forget_row()
        self._parts.clock.restart()
        for optimizer in self._device.optimizers:
            optimizer.zero_grad(set_to_none=True)
