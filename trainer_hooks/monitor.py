"""The monitor of a training loop: one call per step, in the order of docs/ARCHITECTURE.md."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.callbacks.early_stopping import RestoredBest, no_best_state_error
from trainer_hooks.data.loader import BatchIndex
from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.exchange.reduce_vector import Verdict
from trainer_hooks.features.early_stopping import EarlyStoppingFeature
from trainer_hooks.features.first_steps import FirstStepsFeature
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.features.schedule import ScheduleFeature
from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.guard.misuse import BackwardCounter, is_of_one_backward, scale_of_unknown_scaler
from trainer_hooks.guard.optimizers import OptimizerGroup, UnguardedStepDetector, update_scaler
from trainer_hooks.guard.schedules import SchedulerEvery, SchedulerStepper, end_epoch_error
from trainer_hooks.guard.step_interception import not_compiled
from trainer_hooks.lifecycle.added_groups import adopt_groups
from trainer_hooks.lifecycle.data_position import AfterRollback, DataPosition, SampleIds
from trainer_hooks.lifecycle.loop import MonitorBase
from trainer_hooks.lifecycle.shutdown import EXIT_CODE, exits_by_itself
from trainer_hooks.measures.host import HostMeasurements
from trainer_hooks.outcome import StepOutcome
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.recovery.manager import Meta, Restored
from trainer_hooks.step.actions import carry_out, snapshot_meta
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.phases import Prepared, refuse_at_step, refuse_probe
from trainer_hooks.step.run import judge_returned
from trainer_hooks.tensors.clearing import GradientClearing
from trainer_hooks.tensors.rng import capture_rng, restore_rng
from trainvitals.auto_clip import MaxNorm
from trainvitals.errors import UsageError
from trainvitals.policy import Judgement
from trainvitals.records import Decision

_LOG = logging.getLogger("trainvitals")
_PROBE_LINE = "for batch in monitor.batches(loader, probe=lambda batch: loss_of(model, batch)):"


class Monitor(MonitorBase):
    """Guard of one training loop. Created by ``watch``; use it as a context manager."""

    def __init__(
        self,
        device: DeviceParts,
        run: RunContext,
        *,
        tokens_per_step: int | None,
        restored: Restored | None = None,
        sums_in_buckets: bool = False,
        scheduler_every: SchedulerEvery = "step",
    ) -> None:
        first_step = 0 if restored is None else restored.step
        super().__init__(device, run, tokens_per_step=tokens_per_step, first_step=first_step)
        waited, lag = self._parts.clock.waited_for_data, device.readback.lag
        self._first_steps = run.features[FirstStepsFeature]
        self._probe = run.features[ProbeFeature].probe
        self._schedules: SchedulerStepper | None = None
        if device.schedulers:
            self._schedules = SchedulerStepper(device.schedulers, scheduler_every, run.warn)
        by_epoch = self._schedules if scheduler_every == "epoch" else None
        self._feed = DataPosition(run, waited, lag=lag, restored=restored, schedules=by_epoch)
        self._own_steps = UnguardedStepDetector(device.optimizers, run.faults)
        self._clearing = GradientClearing(device.optimizers)
        self._best: RestoredBest | None = None
        self._epochs_checked = False
        self._backwards: BackwardCounter | None = BackwardCounter(device.optimizers)
        self._primes = sums_in_buckets and restored is not None
        self._begun: set[int] = set()
        """Optimizer groups that have made their first step."""
        self._rng_after_abort: dict[str, Any] | None = None
        """RNG state to continue with at the next batch, if the rest of this batch is dropped
        because the state was restored in the middle of it.
        """
        self._snapshot_waits = False
        """Whether other optimizers still step on this batch, so that a snapshot has to wait."""

    @property
    def batch_position(self) -> BatchIndex | None:
        """Epoch and index of the latest batch from ``batches``."""
        return self._feed.position

    @property
    def should_stop(self) -> bool:
        """Whether early stopping ends the run; equal on all ranks."""
        stopping = self._run.features.get(EarlyStoppingFeature)
        return stopping is not None and stopping.evaluations.should_stop

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
        """Yield the batches of ``loader``, without those that a rollback skips.

        Owns the epochs and calls ``sampler.set_epoch``. After a restart it continues with the next
        batch, in the same order. With a map-style ``DataLoader`` skipped batches are not loaded. A
        loader with ``state_dict`` and ``load_state_dict`` is restored by them. If neither can be
        exact, the run's events say ``not exact`` and why. Random numbers that workers draw
        themselves are not restored.

        Args:
            loader: any iterable of batches.
            epochs: number of iterations over ``loader``.
            after_rollback: ``replay`` yields the batches after the restored state again, in the
                same order, without the skipped ones, if the loader can; ``move_on`` continues after
                them.
            sample_ids: function that returns the ids of a batch's samples, which are stored for
                every step in the run directory; True stores their indices in the dataset. By
                default the indices are stored only for bad steps, if the sampler knows them.
            keep_batches: whether bad steps are stored with their batch in the run directory, for
                ``vitals repro``. Only you can read these files.
            probe: function that returns the loss of a batch, the same that the loop trains on, as
                one number. ``step()`` calls it on earlier batches, without gradients, to find out
                whether the state is damaged. It must not change anything. In a pipeline it calls
                ``schedule.eval(...)``, on all ranks; results of ranks without a loss are ignored.

        Yields:
            The batches.

        Raises:
            UsageError: ``epochs`` is not a whole number, ``probe`` is not a function, or another
                argument is invalid.
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
        """Yield the batches until early stopping ends the run."""
        try:
            for batch in stream:
                step = self._step
                yield batch
                self._end_batch()
                if self.should_stop and self._step != step:
                    return
        finally:
            # The loop left in the middle of a batch: later steps do not belong to it.
            if self._rng_after_abort is not None and not self._closed:
                self._end_batch()

    def micro(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Add the loss of one micro-batch to the step. Call once per backward when accumulating.

        The step's loss is the mean: pass each loss before the division by the number of
        micro-batches.

        Args:
            loss: loss of the micro-batch.
            weight: its weight, usually the number of tokens; without weights all count equally.
        """
        self._add_loss(loss, weight)

    def end_epoch(self) -> None:
        """Step the schedulers of ``watch(scheduler_every="epoch")`` at the end of an epoch.

        Only for loops without ``batches``, which does this itself.

        Raises:
            UsageError: the schedulers are stepped at every update.
        """
        schedules = self._schedules
        if schedules is None:
            return
        if schedules.every == "step":
            raise end_epoch_error()
        if not schedules.sees_epochs:
            schedules.step_schedulers()
        elif not self._epochs_checked:
            self._epochs_checked = True
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
        """Clip the gradients, step optimizer and scheduler, and clear the gradients.

        Skips the update if it would damage the model. Call after ``backward()``; it replaces
        ``clip_grad_norm_``, ``optimizer.step()``, ``scheduler.step()`` and ``zero_grad()``.

        Optimizers that alternate (GAN, actor and critic) have one call each, right after the
        backward of their loss: ``monitor.step(loss_d, optimizer=opt_d)``. Each is judged, clipped
        and skipped by its own loss and norm, and each call is a step.

        Args:
            loss: this rank's loss, a 0-dim tensor (not read on the host) or a number. After
                ``micro`` it counts as one more micro-batch, unless it is the tensor of the last
                ``micro``.
            weight: weight in the mean over ranks, usually the rank's number of tokens.
            max_norm: gradient norm to clip to. ``"auto"`` clips to a multiple of the recent median
                norm (``[auto_clip]``), inf measures and never clips, and None does not clip.
            optimizer: the optimizer to step; None: all. The gradients of all optimizers are
                cleared, so gradients that one loss leaves in other parameters are dropped.

        Returns:
            The attempted step, the next one, and the decision that was applied, if any.

        Raises:
            TrainingHalted: the run was halted; the only error once training runs.
            SystemExit: with checkpoints, a rank received SIGTERM, and all ranks have saved.
            UsageError: at the first step no parameter has a gradient, or ``max_norm`` is
                neither a number above 0 nor ``"auto"``; the loss is a closure, the loop runs inside
                ``Join``, or the optimizer was not given to ``watch``.
        """
        self._refuse_after_the_end()
        refuse_at_step(loss, self._device.joinables)
        device = self._device
        turn = device.turns[0] if optimizer is None else device.turn_of(optimizer)
        if turn.number:
            refuse_probe(self._probe.has_loss)
        if self._rng_after_abort is not None:
            return self._drop_update()
        if self._primes and self._prime_ddp_buckets():
            self._skip_rest_of_batch(turn)
            return StepOutcome(step=self._step, next_step=self._step)
        run, parts, attempted = self._run, self._parts, self._step
        parts.turn = turn
        first = turn.number not in self._begun
        self._begun.add(turn.number)
        if self._backwards is not None and turn.is_headline:
            self._count_backwards(self._backwards, loss)
        if self._schedules is not None:
            self._look_at_schedulers(self._schedules)
        never_clips = max_norm is None
        max_norm = parts.usable(max_norm, first=first)
        parts.clock.start_monitor_time()
        outcome = None
        if has_new_groups := parts.has_new_groups:
            outcome = adopt_groups(run, parts, self._judge_unread_steps, step=attempted)
            turn = parts.turn = device.turns[turn.number]
        if outcome is None:
            prepared = parts.prepare(attempted, loss, weight, first=first, max_norm=max_norm)
            verdict = parts.exchange(max_norm)
        else:
            prepared, verdict = outcome
        position, samples = self._feed.record_step(attempted, run.attempt)
        if attempted == self._first_step:
            if not turn.number:
                run.features[ProbeFeature].report_missing(_PROBE_LINE)
                if never_clips:
                    run.report_no_clip()
            if self._schedules is not None and position is not None:
                with run.faults.fail_open("schedules"):  # a third-party class may lack much
                    self._schedules.check_epoch_schedule(
                        attempted, *self._feed.epochs, position.num_batches
                    )
        if self._probe.has_loss:
            self._probe.rehearse(attempted, parts.own_loss)
        self._update(verdict, prepared, max_norm)
        if has_new_groups:
            device.shadow.follow_modules(run.given.model)
        ready = parts.report(
            verdict,
            prepared,
            step=attempted,
            max_norm=max_norm,
            position=position,
            samples=samples,
        )
        self._step += 1
        decision, restored = self._judge_returned_steps(ready, attempted)
        if self._device.sampler is not None:
            self._device.sampler.start_step(self._step)
        if run.features.has_pending_work:
            self._run_between_steps(attempted)
        if restored is not None:
            self._skip_rest_of_batch(turn)
        # Other optimizers may still step on this batch: a state to restore is between two batches.
        self._snapshot_waits = bool(turn.number) and self._feed.is_within_batch
        if not self._snapshot_waits:
            self._keep_state()
        back = None if restored is None else restored.step
        return StepOutcome(
            step=attempted, next_step=self._step, decision=decision, rolled_back_to=back
        )

    def _keep_state(self) -> None:
        """Save a checkpoint and exit after SIGTERM; take a snapshot if one is due."""
        run = self._run
        if run.recovery is None:
            return
        with run.times.checkpoint():
            if run.features[SigtermFeature].is_stopping:
                self._save_and_stop()
            # After the judgement: it may prove a snapshot healthy that would be evicted before it.
            run.recovery.after_step(self._step, run.attempt, self._meta)

    def _skip_rest_of_batch(self, turn: OptimizerGroup) -> None:
        """Make no further update on this batch, because the state was restored."""
        if turn.number and self._feed.is_within_batch:
            self._rng_after_abort = capture_rng()

    def _drop_update(self) -> StepOutcome:
        """Drop an update without any effect on the state."""
        self._parts.micro.clear()
        self._device.shadow.put_back(torch.ones((), device=self._device.norms.device))
        self._clearing.clear()
        return StepOutcome(step=self._step, next_step=self._step)

    def _end_batch(self) -> None:
        """Finish the batch when the loop requests the next one."""
        if self._rng_after_abort is not None:
            self._drop_update()
            restore_rng(self._rng_after_abort)
            self._rng_after_abort = None
        elif self._snapshot_waits and not self._closed:
            self._snapshot_waits = False
            self._keep_state()

    def _refuse_after_the_end(self) -> None:
        """Refuse a step after the monitor has halted, was closed or has restored the best state."""
        if self._run.halted is not None:
            raise self._run.halted
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

    def _prime_ddp_buckets(self) -> bool:
        """Run the first batch after a restart twice, and discard the first backward.

        DDP uses provisional gradient buckets until one backward has shown their order. Other
        buckets round differently, and the interrupted run already had the final ones.
        """
        self._primes = False
        recovery = self._run.recovery
        # If one rank's loader cannot, no rank does: a collective follows.
        if recovery is None or not all(self._run.ranks.gather(self._feed.can_replay())):
            return False
        self._feed.replay()
        recovery.restart()
        self._parts.micro.clear()
        self._start_again()
        if self._schedules is not None:
            self._schedules.restore_counts(self._feed.next_epoch)
        return True

    def _count_backwards(self, backwards: BackwardCounter, loss: object) -> None:
        """In the first two steps, warn if a step has several backwards but one loss."""
        count, backwards.count = backwards.count, 0
        is_one = count > 1 and not self._parts.micro and is_of_one_backward(loss)
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

    def _look_for_scaler(self, grad_norm: float, loss: float | None) -> None:
        """After the first step, warn about a gradient scaler that was not given to ``watch``."""
        with self._run.faults.fail_open("scaler"):
            scale = scale_of_unknown_scaler(grad_norm, loss)
            if scale is None or self._device.scaler is not None or not self._run.is_rank0:
                return
            text = (
                f"the first gradient norm is {grad_norm:.3g}, and a GradScaler (scale {scale:g}) "
                "scales losses here that was not given to watch(): the gradients are clipped, "
                "judged and applied while still scaled; pass watch(..., scaler=scaler), which "
                "unscales them, and keep scaler.scale(loss).backward() in the loop"
            )
            self._warn("unknown_scaler", text)

    def _look_at_schedulers(self, schedules: SchedulerStepper) -> None:
        """Refuse a loop that steps its schedulers itself; with several ranks, rank 0 decides."""
        error = None
        with self._run.faults.fail_open("schedules"):
            error = schedules.check_double_stepping(self._step)
        if error is not None and self._run.ranks.world_size == 1:
            raise error
        if error is not None:
            self._run.features[ScheduleFeature].stepped_twice = error

    def _warn(self, code: str, text: str) -> None:
        """Report a likely mistake in the loop at the monitor's current step."""
        self._run.warn(code, text, step=self._step)

    def _save_and_stop(self) -> None:
        """After SIGTERM, save on all ranks and end the process.

        A loop with its own signal handler is saved and continues, because it decides how to end.
        """
        run = self._run
        self.shutdown.cancel_lone_save()
        assert run.recovery is not None, "only a run with checkpoints is told to stop by its ranks"
        name = run.recovery.save_now(self._step, self.attempt, self._meta())
        run.features[SigtermFeature].on_saved()
        if not exits_by_itself():
            if name and run.is_rank0:
                text = "vitals: SIGTERM: saved %s; a start with VITALS_RUN_ID=%s continues from it"
                _LOG.warning(text, name, self.run_id)
            self.end("interrupted", f"SIGTERM; saved {name}" if name else "SIGTERM")
            raise SystemExit(EXIT_CODE)

    def _meta(self) -> Meta:
        """Return the part of the monitor's snapshot other than tensors, with the data position."""
        return snapshot_meta(self._run, self._feed.state())

    def restore_best(self) -> RestoredBest:
        """Restore the best evaluated state after training. Collective.

        Call on all ranks after the last step and inside the ``with``; no step may follow. A last
        ``evaluate`` counts too. Waits for the disk.

        Returns:
            The restored checkpoint, its step and the value of the metric.

        Raises:
            UsageError: the run keeps no best state, or none was evaluated.
            CheckpointCorruptError: the checkpoint is damaged; nothing has changed.
            CheckpointError: a rank could not read it.
            TrainingHalted: the last step, which is judged only now, halts the run.
        """
        if self._closed:
            raise no_best_state_error("the monitor is closed")
        if self._device.averages is not None:
            self._device.averages.refuse_swapped()
        self._judge_unread_steps(patience_seconds=None)
        stopping = self._run.features.get(EarlyStoppingFeature)
        if stopping is None:
            raise no_best_state_error("the run has no early stopping, so no best state is known")
        self._best = stopping.evaluations.restore_best(
            step=self._step, attempt=self.attempt, meta=self._evaluated
        )
        return self._best

    # ---------------------------------------------------------------------------- one step

    def _update(self, verdict: Verdict, prepared: Prepared, max_norm: MaxNorm | None) -> None:
        """Apply the verdict: clip, optimizers, scaler, schedulers; then clear the gradients."""
        device, parts, turn = self._device, self._parts, self._parts.turn
        orders = parts.orders(verdict, prepared, self._step, max_norm)
        with self._own_steps:
            parts.apply(turn.guards, orders)
        parts.settle(orders)
        update_scaler(device.scaler, turn.optimizers, verdict.overflow)
        if self._schedules is not None:
            with parts.clock.optimizer_time():
                self._schedules.note_update(turn.optimizers if turn.number else ())
        self._clearing.clear()

    def _release(self) -> None:
        """Remove the monitor's hooks, and restore the optimizers."""
        self._own_steps.close()
        self._clearing.release()
        if self._backwards is not None:
            self._backwards.close()
        self._feed.close()
        super()._release()

    def _judge_returned_steps(
        self, ready: tuple[list[float], HostMeasurements] | None, attempted: int
    ) -> tuple[Decision | None, Restored | None]:
        """Judge the steps that have reached the host; in a row of bad steps, this one too."""
        decision = restored = None
        while ready is not None or (ready := self._parts.pop_urgent_numbers()) is not None:
            judgement = judge_returned(self._run, *ready, now_step=attempted)
            self._feed.report_step_data(ready[1].step, judgement)
            if (record := self._first_steps.pop_first_record()) is not None:
                norm = math.nan if record.grad_norm is None else record.grad_norm
                self._look_for_scaler(norm, record.loss)
            judgement = self._save_before_halt(judgement)
            decision = judgement.decision or decision
            window = self._feed.window_of(judgement.decision)
            restored = carry_out(self._run, judgement, now_step=attempted, window=window)
            if restored is not None and judgement.decision is not None:
                self._after_rollback(restored.step)
                data = restored.meta.get("data")
                goes_back = self._feed.rewind_after_rollback(
                    judgement.decision, data, window, step=self._step
                )
                if self._schedules is not None:
                    self._schedules.restore_counts(self._feed.next_epoch if goes_back else None)
                break
            ready = None
        return decision, restored

    def _save_before_halt(self, judgement: Judgement) -> Judgement:
        """Save a checkpoint before ``on_collapse="stop"`` halts, and name it. Collective.

        Other halts follow damage, after which the live state is not worth a checkpoint.
        """
        decision, recovery = judgement.decision, self._run.recovery
        halts = decision is not None and decision.action == "halt" and decision.acted
        if recovery is None or decision is None or not (halts and decision.rule == "post_training"):
            return judgement
        if self._parts.turn.number and self._feed.is_within_batch:
            return judgement  # other optimizers still step on this batch
        with self._run.times.checkpoint():
            name = recovery.save_now(self._step, self.attempt, self._meta())
        text = f"{decision.reason}; saved {name}" if name else decision.reason
        return judgement._replace(decision=replace(decision, reason=text))

    def _start_again(self) -> None:
        """Reset what depends on the state before a rollback, the monitor's gradients too."""
        super()._start_again()
        if self._device.averages is not None:
            self._device.averages.reset_after_rollback(is_blocked=True)
        self._clearing.clear()
