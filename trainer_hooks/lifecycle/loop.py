"""Base of a guarded loop: identity, records between steps, and the end of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, Self, get_args

from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.features.commands import CommandsFeature
from trainer_hooks.features.early_stopping import EarlyStoppingFeature
from trainer_hooks.features.expected_change import ExpectedChangeFeature
from trainer_hooks.features.post_training import PostTrainingFeature
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.features.user_alerts import UserAlertsFeature
from trainer_hooks.lifecycle.heartbeat import HeartbeatThread
from trainer_hooks.lifecycle.resume import loop_state, read_loop_state
from trainer_hooks.lifecycle.shutdown import EndState, Shutdown, track_monitor, untrack_monitor
from trainer_hooks.recovery.manager import Meta, RecoveryManager
from trainer_hooks.step.actions import carry_out_at_end, resume, run_between_steps, snapshot_meta
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.phases import StepPhases
from trainer_hooks.step.run import judge_returned
from trainvitals.detect.user_alerts import MAX_MESSAGE, alert_level_error, refuse_alert
from trainvitals.errors import TrainingHalted, UsageError
from trainvitals.records import AttemptStarted, Severity

AnnouncedPhase = Literal["data", "checkpoint", "evaluate", "other"]
ANNOUNCED_PHASES: tuple[str, ...] = get_args(AnnouncedPhase)


class MonitorBase:
    """Common part of ``Monitor`` and ``Attached``; a context manager."""

    def __init__(
        self,
        device: DeviceParts,
        run: RunContext,
        *,
        tokens_per_step: int | None,
        first_step: int = 0,
    ) -> None:
        self._device = device
        self._run = run
        self._parts = StepPhases(device, run, tokens_per_step=tokens_per_step)
        self._first_step = self._step = first_step
        if device.sampler is not None:
            device.sampler.start_step(first_step)
        self._closed = False
        self.left_open: tuple[EndState, str] = ("finished", "")
        """State and reason recorded if it is never closed."""
        self.shutdown = Shutdown(run)
        self._heartbeat = self._begin_heartbeat(first_step)
        track_monitor(self)

    def _begin_heartbeat(self, first_step: int) -> HeartbeatThread | None:
        """Start the heartbeat thread; None without a journal, which contains the heartbeat."""
        run, clock = self._run, self._parts.clock
        clock.step, directory = first_step, run.emitter.directory
        if directory is None:
            return None
        with run.faults.fail_open("heartbeat"):
            return HeartbeatThread(
                directory,
                clock,
                left_out=run.ranks.side,
                faults=run.faults,
                place=self._device.norms.place,
                # In observe mode, nothing may end the job.
                on_hang="alert" if run.mode == "observe" else run.given.on_hang,
            )
        return None

    def __del__(self) -> None:
        """End a loop whose monitor was dropped; a halt found now is in its marker file."""
        if not getattr(self, "_closed", True):
            with suppress(TrainingHalted):
                self.end(*self.left_open)

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise UsageError(f"{name}: it belongs to one process and cannot be pickled")

    @property
    def step_index(self) -> int:
        """Return the index of the next update. Skipped ones count; a rollback sets it back."""
        return self._step

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Return the guarded optimizers of the loop."""
        return self._device.optimizers

    @property
    def run_id(self) -> str:
        """Return the ULID of the loop's run, equal on all ranks."""
        return self._run.run_dir.run_id

    @property
    def attempt(self) -> int:
        """Return the id of the loop's current attempt."""
        return self._run.attempt

    @property
    def swallowed_errors(self) -> dict[str, int]:
        """Return the number of Vitals' internal errors that did not reach the loop, by place."""
        return dict(self._run.faults.counts)

    # ------------------------------------------------------------------- between the steps

    def observe(self, **values: float) -> None:
        """Record your own scalars at ``step_index``.

        Before the update that is the current step, after it the next one.

        Args:
            values: numbers by name.
        """
        self._run.emitter.scalars(values, step=self._step, attempt=self.attempt)

    def observe_samples(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        rewards: Sequence[float | None],
    ) -> None:
        """Keep three completions of the current step in memory: low, median and high reward.

        For post-training. If a problem of the policy began at this step, they are written to a
        private file in the run directory, which ``vitals why`` shows. They are sent nowhere. Call
        it before ``step``; only rank 0 keeps them. A tensor of rewards is read, which waits for
        its device.

        Args:
            prompts: prompt of each completion: text, or what ``str`` makes text.
            completions: the completions, likewise.
            rewards: reward of each completion; None or NaN if it has none.
        """
        run = self._run
        if not run.is_rank0:
            return
        with run.faults.fail_open("observe_samples"):
            watched = run.features.get(PostTrainingFeature)
            if watched is None:
                raise UsageError(
                    "observe_samples() keeps nothing: this run declares no kind of post-training",
                    hint="watch(..., task='grpo'); with sft no completions are kept",
                )
            to_list = getattr(rewards, "tolist", None)
            numbers = rewards if to_list is None else to_list()
            watched.observe_samples(
                prompts, completions, numbers, step=self._step, attempt=self.attempt
            )

    def evaluate(self, **values: float) -> None:
        """Record validation metrics at the current step, as ``eval/NAME``.

        A metric whose name is or ends in ``loss`` is evidence about the state: a value that more
        than doubles between two calls, with outliers in between. Evaluate the same data each time.

        Call between two steps. With early stopping call it on all ranks at the same step: rank 0's
        value counts, and each rank copies its part of the state. Call it after ``with
        ema.swap():``, not inside.

        Args:
            values: numbers by name.
        """
        self._parts.clock.evaluated()
        self.observe(**{f"eval/{name}": value for name, value in values.items()})
        with self._run.faults.fail_open("evaluate"):
            if self._run.is_rank0:
                self._run.features[ProbeFeature].loss_evaluations.add(values)
            stopping = self._run.features.get(EarlyStoppingFeature)
            if stopping is not None:
                with self._run.times.checkpoint():  # copies the best state
                    stopping.evaluations.evaluated(
                        values, step=self._step, attempt=self.attempt, meta=self._evaluated
                    )

    def alert(
        self,
        name: str,
        *,
        when: Tensor | bool | None = None,
        level: Severity = "notify",
        value: Tensor | float | None = None,
        message: str = "",
    ) -> None:
        """Raise a custom alert, which works like the built-in alerts.

        With ``when`` the alert is a condition: call it at every step or less often. It fires when
        the condition becomes true, stays one alert, and resolves 100 healthy steps after the
        condition was last true. Without ``when`` it is an event of this step. Any rank may call it;
        an alert of the same name on several ranks is one alert that lists the ranks.

        Device tensors cause no synchronization: they are evaluated within the next steps.

        Args:
            name: name of the alert, the same in every call; at most 100 names per run.
            when: whether the condition holds; a tensor must have one element.
            level: ``page`` (someone must act now), ``notify`` (no urgency) or ``log`` (only
                stored). A name keeps its first level.
            value: number to show with the alert.
            message: text to show instead of the value.

        Raises:
            UsageError: an argument is invalid; only before the first update. Later the error is
                logged and training continues.
        """
        faults = self._run.faults
        numbers: tuple[Tensor | float | None, Tensor | float | None] = (when, value)
        if self._step == self._first_step:
            refuse_alert(name, level)
            numbers = self._to_plain_numbers(when, value)
        with faults.fail_open("alert"):
            if wrong := alert_level_error(level):
                # The call may be for a rare event, so raise the alert anyway.
                faults.count("alert", UsageError(f"alert {name!r}: {wrong}; it is notify now"))
                level = "notify"
            refuse_alert(name, level)
            holds, number = self._to_plain_numbers(*numbers)
            self._run.features[UserAlertsFeature].alerts().call(
                name,
                holds,
                level=level,
                value=number,
                message=str(message)[:MAX_MESSAGE],
                step=self._step,
                attempt=self.attempt,
            )

    def _to_plain_numbers(
        self, when: Tensor | float | None, value: Tensor | float | None
    ) -> tuple[Tensor | float | None, Tensor | float | None]:
        """Return the loop's arguments of ``alert`` as plain numbers; None stays None."""
        plain = self._parts.plain
        return None if when is None else plain("when", when), (
            None if value is None else plain("value", value)
        )

    def _evaluated(self) -> Meta:
        """Return a snapshot's metadata for the loop's ``evaluate``; refuse swapped averages."""
        averages = self._device.averages
        if averages is not None and averages.is_swapped:
            raise UsageError(
                "the model held its averages during the call: leave `with ema.swap():` before "
                "evaluate()"
            )
        return self._meta()

    def _meta(self) -> Meta:
        """Return the part of a snapshot of the loop other than tensors."""
        return snapshot_meta(self._run, None)

    def expect(self, reason: str, *, steps: int = 200) -> None:
        """Announce a planned change: the limits for finite values start again at the next step.

        Rank 0's call counts, for all ranks.

        Args:
            reason: text for the record.
            steps: number of steps for which finite values are not judged.
        """
        if self._run.is_rank0:
            expected = self._run.features[ExpectedChangeFeature]
            expected.announce(reason, steps, step=self._step)

    def phase(self, name: AnnouncedPhase) -> AbstractContextManager[None]:
        """Announce that the body takes long on this rank or on all ranks.

        While others wait for this rank, no alert pages because it computes in the body, for example
        in an evaluation, a save or a download. A stopped, dead or blocked rank still pages.

        Args:
            name: ``evaluate``, ``checkpoint``, ``data`` or ``other``.

        Raises:
            UsageError: ``name`` is not one of these.
        """
        if name not in ANNOUNCED_PHASES:
            raise UsageError(
                f"monitor.phase({name!r}): the name must be one of {', '.join(ANNOUNCED_PHASES)}"
            )
        return self._parts.clock.within(name)

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the FLOPs of the forward and backward in the body, for utilization from then on.

        Use it once, around all forwards and backwards of one step, which becomes slow.
        Recomputation by activation checkpointing is counted.
        """
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self._parts.add_flops(counter.get_total_flops())

    def _run_between_steps(self, step: int) -> None:
        """Run operator requests between two steps of the loop; their time belongs to no step."""
        was_paused = self._run.features[CommandsFeature].is_paused
        run_between_steps(self._run, step, self._device.norms.device)
        if was_paused:
            self._parts.clock.restart()

    def _after_rollback(self, step: int) -> None:
        """Continue the loop at a restored step; record the steps in flight, and discard them.

        They belong to the old attempt.
        """
        self._step = step
        while (remaining := self._device.readback.pop()) is not None:
            judge_returned(self._run, *remaining, now_step=step)
        self._start_again()

    def _start_again(self) -> None:
        """Reset the loop's parts that depend on the state before a rollback."""
        for feature in self._run.features:
            feature.on_restored(self._step)
        self._device.shadow.keep_restored()
        if self._device.sampler is not None:
            self._device.sampler.discard_copies()
        self._parts.forget_row()
        self._parts.clock.restart()

    def _add_loss(self, loss: Tensor | float, weight: Tensor | float | None) -> None:
        """Add a micro-batch's loss to the loop's step; an internal error is only counted."""
        with self._run.faults.fail_open("micro"):
            self._parts.add_loss(loss, weight)

    # ----------------------------------------------------------------------------- its state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that guards a resumed run from its first step, as plain data.

        Equal on all ranks; store it in the loop's own checkpoint. With fused optimizers it lacks
        the latest step. It does not contain the spent budgets: no restore gives a budget back.
        """
        return loop_state(self._run, self._step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the loop from ``state``: its step, its limits, its tokens.

        Call on all ranks, after loading the model and the optimizers and before the first step. The
        run continues as a new attempt from that step. An empty state changes nothing.

        Args:
            state: result of ``state_dict``.

        Raises:
            FormatError: ``state`` is not such a state, or was written by a newer version of Vitals.
            UsageError: the loop has made steps, or resumed from a checkpoint of Vitals.
        """
        run = self._run
        if self._step:
            raise UsageError(
                f"load_state_dict() was called at step {self._step}",
                hint="call it before the first step; a run that resumed from its own checkpoint "
                "already has its limits",
            )
        loop_state = read_loop_state(state, run.judge.config)
        if loop_state is None:
            return
        attempt = AttemptStarted(
            id=self.attempt + 1,
            parent=loop_state.attempt if loop_state.run_id == self.run_id else self.attempt,
            fork_step=loop_state.step,
            reason=f"resumed at step {loop_state.step} from the loop's own checkpoint",
        )
        self._first_step = self._step = run.first_step = loop_state.step
        self._parts.clock.step = loop_state.step
        resume(run, attempt, loop_state.detectors, loop_state.tokens, loop_state.features)
        self._device.shadow.keep()
        if self._device.sampler is not None:
            self._device.sampler.start_step(self._step)

    # ------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Record the steps in flight and end the run. Enters no collective.

        Raises:
            TrainingHalted: the last step, which is judged only now, halts the run.
        """
        self.end("finished", "")

    def end(self, state: EndState, reason: str) -> None:
        """Close, and record how the loop ended. Does nothing in a forked child."""
        if self._closed or not self.shutdown.is_ours:
            return
        self._closed = True
        run = self._run
        for feature in run.features:
            feature.stop_collectives()
        try:
            self._judge_unread_steps(patience_seconds=2.0)
        finally:
            if self.shutdown.sigterm.is_received:
                state, reason = "interrupted", f"SIGTERM; {reason}" if reason else "SIGTERM"
                self.shutdown.save_alone()
            for feature in run.features:
                feature.close()
            with run.faults.fail_open("close"):
                if run.recovery is not None:
                    run.recovery.close()
            if self._heartbeat is not None:
                with run.faults.fail_open("heartbeat"):
                    self._heartbeat.close()
            away = ""
            if run.agent is not None:
                now = run.clock.monotonic_ns()
                away = run.agent.close(now, step=self._step, attempt=self.attempt)
            self.shutdown.record_end(state, reason)
            if run.terminal is not None:
                how = "was stopped" if run.halted is not None else state
                with run.faults.fail_open("terminal"):
                    run.terminal.ended(how, run.last_step + 1)
                    if away and run.agent is not None:
                        run.terminal.agent_still_sending(away, run.agent.pid)
            self._release()
            untrack_monitor(self)

    def end_by(self, error: BaseException) -> None:
        """End the run because of an error; after Ctrl-C, print how to continue."""
        if self._closed or not self.shutdown.is_ours:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        text = f"{type(error).__name__}: {error}"[:500]
        self.end("interrupted" if interrupted else "failed", text)
        terminal, recovery = self._run.terminal, self._run.recovery
        saves = recovery is not None and recovery.is_on_disk
        if interrupted and terminal is not None and recovery is not None and saves:
            with self._run.faults.fail_open("terminal"):
                terminal.interrupted(self._newest_on_disk(recovery), recovery.settings.directory)

    def _newest_on_disk(self, recovery: RecoveryManager) -> int | None:
        """Return the step from which a restart would resume; uses no disk and no collective."""
        steps = [ref.step for ref in recovery.refs() if ref.where == "disk"]
        step, attempt = recovery.newest_saved
        # A save may have completed after the last step that reported it to all ranks.
        if attempt and self._run.plan.plan.is_in_lineage(step, attempt):
            steps.append(step)
        return max(steps, default=None)

    def _judge_unread_steps(self, *, patience_seconds: float | None) -> None:
        """Judge and record the loop's last steps, whose numbers have not been read back yet."""
        run, readback = self._run, self._device.readback
        while run.halted is None:
            remaining = readback.pop(patience_seconds=patience_seconds)
            if remaining is None:
                return
            carry_out_at_end(run, judge_returned(run, *remaining, now_step=self._step))

    def _release(self) -> None:
        """Remove the hooks of the guarded loop, and restore its optimizers."""
        self._parts.micro.close()
        self._device.release()

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
        # The loop's own exception propagates; a halt found only now is in its marker file.
        with suppress(TrainingHalted):
            self.end_by(error)
