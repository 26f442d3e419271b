"""The host's part of a step: judge it, carry out the judgement, and write its row.

Runs on every rank with the same reduced numbers, so all ranks make the same decisions; only rank 0
writes values that are equal on all ranks. Methods are not collective unless they say so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from msgspec.structs import replace

from trainer_hooks.data.loader import DataState
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.lifecycle.agent_starter import NodeAgent
from trainer_hooks.lifecycle.earlier_losses import RestartCheck
from trainer_hooks.measures.host import HostMeasurements
from trainer_hooks.measures.sampled import Sampler
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.manager import Meta, RecoveryManager, Restored
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.repro.capsule import Surroundings
from trainer_hooks.step.emit import Emitter, StepLog, TokenCount
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, RunContext, StepFeatures
from trainer_hooks.step.gradients import no_gradients
from trainer_hooks.step.reduce_vector import (
    NUM_FIGURES,
    Derived,
    PackLayout,
    Rank0Values,
    Reduced,
    step_record,
)
from trainvitals.clock import Clock
from trainvitals.detect import Limits
from trainvitals.errors import CheckpointError, TrainingHalted
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.policy import Judge, Judgement
from trainvitals.policy.plan import Branch, Window
from trainvitals.records import (
    AttemptStarted,
    CommandAck,
    CommandAcknowledged,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    OnHang,
    RunEnded,
    StepRecord,
)

_LOG = logging.getLogger("trainvitals")
_NO_CLIP = 10.0
"""Multiple of the norm's limit from which a clip has no effect on an outlier."""


@dataclass(slots=True, kw_only=True)
class StepController:
    """Host state of a rank between steps."""

    mode: str
    ranks: Ranks
    layout: PackLayout
    judge: Judge
    recovery: RecoveryManager | None
    emitter: Emitter
    run_dir: RunDir
    plan: PlanJournal
    faults: FaultCounter
    clock: Clock
    sampler: Sampler | None
    run: RunContext
    features: StepFeatures
    log: StepLog
    on_hang: OnHang
    """Action of the node's agent for a hang that pages."""
    owns_clip: bool
    """Whether gradients are measured before any clip; otherwise the loop provides a finite norm."""
    agent: NodeAgent | None = None
    probe_parameters: bool = False
    """Whether the next pack reports if parameters are finite: only after a bad step."""
    halted: TrainingHalted | None = None
    starts_again: bool = False
    """Whether the run was started before, and this start found no state to continue from."""
    restart_check: RestartCheck | None = None
    """Compares the first losses with the earlier starts of the run; only on rank 0."""
    first_record: StepRecord | None = None
    """Record of the first step, until it was checked."""
    judged: tuple[StepRecord, Reduced] | None = None
    """The latest step that was judged."""
    surroundings: Surroundings | None = None
    """Information about model and optimizers for the repro capsule of a bad step."""
    turn_names: tuple[str, ...] = ("",)
    """Names of the optimizers that may be stepped alone, after the name of all together."""
    _begun: set[int] = field(default_factory=set)
    """Turns that have had a step."""

    @property
    def attempt(self) -> int:
        """Id of the current attempt."""
        return self.run.attempt

    @property
    def is_rank0(self) -> bool:
        """Whether this is global rank 0."""
        return self.ranks.rank == 0

    # ------------------------------------------------------------------------ before a step

    def rank0_values(self, outgoing: OutgoingStep) -> Rank0Values | None:
        """Return rank 0's limits and its verified command; None on the other ranks."""
        if not self.is_rank0:
            return None
        turn, values = outgoing.turn, self.features.rank0_values(outgoing)
        limits = self.judge.limits(turn) if not values["expect_steps"] else Limits()
        # A clip at a thousand times the usual norm does not reduce any outlier.
        usual, clip = limits.grad_norm, outgoing.max_norm
        if clip == "auto":
            clip = values["auto_max_norm"]
        return Rank0Values(
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
            clips=clip is not None
            and clip != math.inf
            and (usual is None or clip <= _NO_CLIP * usual),
            max_row=self.judge.max_row(turn),
            skips=self.judge.facts.is_skipped(outgoing.step),
            values=values,
        )

    def acknowledge(self, ack: CommandAck, *, step: int) -> None:
        """Report the outcome of a command; rank 0 writes it for all."""
        self.emitter.of_run(CommandAcknowledged(ack=ack), step=step, attempt=self.attempt)

    # ------------------------------------------------------------------------- after a step

    def handle(
        self, numbers: list[float], measured: HostMeasurements, *, now_step: int
    ) -> Judgement:
        """Judge one step's numbers and write its row; return the judgement to carry out.

        A step of a discarded attempt is written but not judged.

        Args:
            numbers: the reduced pack and the device's own figures.
            measured: measurements of this rank in that step.
            now_step: the step in whose call this happens.
        """
        reduced = Reduced(self.layout, numbers[: self.layout.size])
        own = numbers[self.layout.size + NUM_FIGURES :]
        derived = Derived.of(numbers[self.layout.size : self.layout.size + NUM_FIGURES])
        samples = None if self.sampler is None else self.sampler.read(reduced.sampled, own)
        record = step_record(
            reduced,
            derived,
            step=measured.step,
            attempt=measured.attempt,
            skipped=derived.blocked(self.mode),
            learning_rate=measured.learning_rates[0] if measured.turn <= 1 else None,
            lr_factor=measured.lr_factor,
            before_clip=self._before_clip(reduced, derived, measured),
            turn=measured.turn,
        )
        name = self.turn_names[measured.turn]
        returned = ReturnedStep(reduced, measured, record, now_step)
        if measured.attempt != self.attempt:
            # It was in flight during a rollback: the judge no longer knows the steps before it.
            returned.columns = self.log.write(
                measured, record, reduced, derived, samples, Judgement(), name
            )
            self.features.on_row_written(returned)
            return Judgement()
        if measured.step == self.run.first_step or (name and measured.turn not in self._begun):
            self._begun.add(measured.turn)
            if not reduced.has_gradients and not record.failed_ranks:
                raise no_gradients(name)  # known on all ranks
        if measured.step == self.run.first_step:
            self.first_record = record
            if self.starts_again and not measured.step:
                self._tell_second_start()
        if self.restart_check is not None and (text := self.restart_check.add(record)):
            self.run.warn("weights_not_restored", text, step=measured.step)
        self.run.first_step = -1
        # Data sent with the step is handled before its judgement: the escalation policy chooses
        # among checkpoints, and runs the probe, as all ranks know them at this step.
        self.features.complete(returned)
        self.features.on_reduced(returned)
        record = returned.record
        judgement = self.judge.judge(
            record,
            decided_at_step=now_step,
            checkpoints=returned.checkpoints,
            command=returned.command,
            now_attempt_id=returned.next_attempt,
            probe=returned.probe,
            evaluation=returned.evaluation,
            lacks=returned.unavailable_commands,
        )
        if name:
            judgement = of_turn(judgement, name)
        judgement = self.features.annotate(returned, judgement)
        if record.failed_ranks:
            judgement = self._name_unguarded(record, judgement)
        self.run.last_step, self.judged = measured.step, (record, reduced)
        self.probe_parameters = bool(record.nonfinite_ranks) or any(
            f.kind == "nonfinite" for f in judgement.findings
        )
        self.features.on_judged(returned, judgement)
        returned.columns = self.log.write(
            measured, record, reduced, derived, samples, judgement, name
        )
        self.features.on_row_written(returned)
        self.log.write_readings(measured, judgement)
        self.features.on_step_done(returned)
        return judgement

    def _tell_second_start(self) -> None:
        """Warn a loop that resumes from its own checkpoint without our state: step starts at 0.

        Its rates are not compared with the declared schedule, which would start at step 0 too.
        """
        text = (
            f"run {self.run_dir.run_id} was started before, and this start counts from step 0, "
            "with new limits. If the loop loaded a checkpoint of its own, keep "
            "monitor.state_dict() in it and call monitor.load_state_dict(state) before the first "
            "step; for a new training set another VITALS_RUN_ID"
        )
        self.run.warn("starts_again", text + self.features.on_second_start(), step=0)

    def _name_unguarded(self, record: StepRecord, judgement: Judgement) -> Judgement:
        """Count an unmeasured step, and add this rank's error to a finding about it."""
        if self.run.terminal is not None:
            self.run.terminal.num_unguarded += 1
        finding = next((f for f in judgement.findings if f.kind == "unguarded"), None)
        if finding is None or self.ranks.rank not in record.failed_ranks:
            return judgement
        error = self.faults.last.get("prepare", "unknown")
        self.run.note_of_rank(
            "unguarded", f"the step could not be measured: {error}", step=record.step
        )
        named = replace(finding, reason=f"{finding.reason} ({error})")
        findings = tuple(named if f is finding else f for f in judgement.findings)
        judgement = judgement._replace(findings=findings)
        self.run.report_unprotected(judgement)
        return judgement

    def _before_clip(self, reduced: Reduced, derived: Derived, measured: HostMeasurements) -> bool:
        """Return whether the norm is from before the clip; the row gets the norm after the clip."""
        if self.owns_clip or measured.before_clip:
            return True
        is_given = reduced.total("norm_before_clip") != 0
        after = reduced.of_slot("norm_before_clip")
        measured.norm_after_clip = after if is_given else derived.grad_norm
        measured.after_clip = not is_given
        return is_given

    def tell_without_clip(self) -> None:
        """Report once, before anything has gone wrong, that the loop does not clip gradients."""
        if self.mode != "observe":
            text = (
                "this loop does not clip gradients, so one outlier can move the weights far; "
                'monitor.step(loss, max_norm="auto") clips to '
                f"{self.judge.config.auto_clip.multiple:g} times the recent median norm, and "
                "max_norm=math.inf measures the norm without this message"
            )
            self._note("no_clip", text, max(self.run.first_step, 0), "info")
            if self.run.terminal is not None:
                self.run.terminal.hint(text)

    # ------------------------------------------------------------------------------ actions

    def carry_out(
        self, judgement: Judgement, *, now_step: int, window: Window | None = None
    ) -> Restored | None:
        """Carry out a judgement; return the restored state if it was a rollback.

        The plan journal is written before the action, so that a relaunch finds the intended action
        and no command is applied twice. The response to a command is written after it. A skip on
        its own is not written: it must not wait for a disk, and because a relaunch is a new
        attempt, entries of the decision log stay distinct.

        Args:
            judgement: judgement of one step.
            now_step: the step in whose call this happens.
            window: the data that a rollback skips.

        Raises:
            TrainingHalted: the decision is a halt.
        """
        decision, ack = judgement.decision, judgement.ack
        deed = decision.action if decision is not None and decision.acted else ""
        restored = None
        if deed == "rollback" and decision is not None:
            branch = _branch_of(decision, decision.rollback_to_step)
            self.plan.add(self.judge.facts, branch=branch, window=window)
        elif deed in ("halt", "accept_level") or ack is not None:
            self.plan.add(self.judge.facts)
        if decision is not None:
            self._enter(decision)
            if deed == "rollback":
                restored = self._go_back(decision)
        if self.run.terminal is not None and (decision is not None or self.run.terminal.in_row):
            self._tell_person(decision, restored)
        if judgement.order is not None:
            self.features.on_command(judgement.order, now_step=now_step)
        if ack is not None:
            self.acknowledge(ack, step=now_step)
        if deed == "halt" and decision is not None:
            self._halt(decision)
        return restored

    def run_between_steps(self, step: int, device: torch.device) -> None:
        """Let the features work between two steps. Collective.

        Args:
            step: the latest completed step.
            device: device of the group's tensors.
        """
        for judgement in self.features.run_between_steps(step, device):
            self.carry_out(judgement, now_step=step)

    def carry_out_at_end(self, judgement: Judgement) -> None:
        """Record the judgement of the loop's last step; a halt still leaves its marker.

        Training is over, so a rollback is entered as not carried out.

        Raises:
            TrainingHalted: the decision is a halt.
        """
        decision, ack = judgement.decision, judgement.ack
        if decision is not None and decision.action == "rollback":
            decision = replace(
                decision,
                acted=False,
                new_attempt=0,
                cost_steps=0,
                reason=f"{decision.reason}; not carried out: the loop had ended",
            )
            if ack is not None:
                ack = replace(ack, status="refused", detail="the loop had ended")
        if ack is not None and judgement.order is not None and decision is None:
            ack = replace(ack, status="refused", detail="the loop had ended")
        self.carry_out(Judgement(judgement.findings, decision, ack), now_step=-1)

    def _tell_person(self, decision: Decision | None, restored: Restored | None) -> None:
        """Report the action at the terminal; before a halt, because its error may be caught."""
        if decision is not None and restored is not None:
            decision = replace(decision, rollback_to_step=restored.step)
        if self.run.terminal is not None:
            with self.faults.fail_open("terminal"):
                self.run.terminal.judged(decision)

    def _enter(self, decision: Decision) -> None:
        """Write the entry of the decision log."""
        event = DecisionMade(decision=decision)
        self.emitter.of_run(event, step=decision.step, attempt=decision.attempt)

    def _go_back(self, decision: Decision) -> Restored:
        """Restore the decision's checkpoint and start its attempt."""
        assert self.recovery is not None, "only a run with checkpoints rolls back"
        try:
            restored = self.recovery.roll_back(decision)
        except CheckpointError as error:
            # Maybe only this rank: it cannot continue, and the marker stops all ranks.
            reason = f"{decision.reason}; the restore failed: {error.text}"
            decision = replace(decision, action="halt", rule="rollback_failed", reason=reason)
            self._tell_person(decision, None)
            self._halt(decision)
        if restored.step != decision.rollback_to_step:
            text = f"{decision.checkpoint_id} could not be read; used {restored.id} instead"
            self._note("older_checkpoint", text, decision.step, "warning")
            self.plan.add(self.judge.facts, branch=_branch_of(decision, restored.step))
        self.take_meta(restored.meta, step=restored.step)
        attempt = AttemptStarted(
            id=decision.new_attempt,
            parent=decision.attempt,
            fork_step=restored.step,
            reason=decision.reason,
        )
        self.begin_attempt(attempt, restored.meta["judge"])
        self.emitter.of_run(attempt, step=attempt.fork_step, attempt=attempt.id)
        return restored

    def _halt(self, decision: Decision) -> NoReturn:
        """Write the durable marker first: torchrun restarts a rank whatever its exit code."""
        halted = TrainingHalted(
            f"halted by Vitals at step {decision.step}: {decision.reason}",
            hint=f"`vitals why {self.run_dir.run_id} {decision.step}` explains; "
            f"`vitals resume {self.run_dir.run_id}` allows a restart",
        )
        if self.is_rank0 or decision.rule == "rollback_failed":
            marker = HaltMarker(
                reason=decision.reason,
                step=decision.step,
                attempt=decision.attempt,
                time_unix_ns=self.clock.time_ns(),
            )
            with self.faults.fail_open("halt.marker"):  # the halt itself works without a marker
                self.run_dir.write_halted(marker)
            event = RunEnded(state="halted", reason=decision.reason)
            self.emitter.event(event, step=decision.step, attempt=decision.attempt)
        self.halted = halted
        raise halted

    def begin_attempt(self, attempt: AttemptStarted, detectors: dict[str, Any] | None) -> None:
        """Continue as a new attempt, with the detectors of its start state."""
        self.run.attempt = attempt.id
        self.features.on_attempt(attempt)
        self.judge.rolled_back(detector_state=detectors, attempt=attempt.id, step=attempt.fork_step)
        self.probe_parameters = False

    def start_branch(self, attempt: AttemptStarted, detectors: dict[str, Any] | None) -> None:
        """Start an attempt at the start of the loop, and write it to the plan journal."""
        branch = Branch(attempt.id, attempt.parent, attempt.fork_step)
        self.begin_attempt(attempt, detectors)
        self.plan.add(self.judge.facts, branch=branch)

    def resume(
        self,
        attempt: AttemptStarted,
        detectors: dict[str, Any],
        tokens: TokenCount,
        features: Mapping[str, Any],
    ) -> None:
        """Continue, before the first step, from a state that the loop itself saved. Collective.

        If there are snapshots, the first one is replaced by one of this attempt.
        """
        self.log.tokens = tokens
        self.features.resume(features, step=attempt.fork_step)
        self.start_branch(attempt, detectors)
        self.emitter.of_run(attempt, step=attempt.fork_step, attempt=attempt.id)
        if self.recovery is not None:  # a snapshot of this attempt, with the state the loop loaded
            self.recovery.first(attempt.fork_step, attempt.id, self.snapshot_meta(None))

    def snapshot_meta(self, data: DataState | None) -> Meta:
        """Return the data of a snapshot except tensors. The policy's facts are not included."""
        return {
            "judge": self.judge.detector_state(),
            "tokens_seen": self.log.tokens.seen,
            "tokens_trained": self.log.tokens.trained,
            "data": data,
            **self.features.state_dict(),
        }

    def take_meta(self, meta: Meta, *, step: int) -> None:
        """Set the counts to those at ``step``; consumed tokens stay consumed."""
        kept = TokenCount(int(meta["tokens_seen"]), int(meta["tokens_trained"]))
        self.log.tokens.go_back(kept)
        self.features.load_state_dict(meta, step=step)

    def tell_unguarded(self, text: str, *, step: int) -> None:
        """Page for a loop whose updates bypass Vitals, so that no step could report it."""
        finding = Finding(
            kind="unguarded",
            level="advisory",
            step=step,
            detector="guard",
            reason=text,
            onset_step=step,
            cause="unguarded",
        )
        self.emitter.of_run(FindingRaised(finding=finding), step=step, attempt=self.attempt)
        if self.is_rank0:
            _LOG.warning("vitals: NOT GUARDED: %s", text)

    def _note(
        self, code: str, text: str, step: int, severity: Literal["info", "warning", "error"]
    ) -> None:
        self.emitter.note(code, text, severity, step=step, attempt=self.attempt)


def of_turn(judgement: Judgement, name: str) -> Judgement:
    """Return the findings about one optimizer's step prefixed with its name.

    A command of an operator applies to the run, unless it accepts a step.
    """
    findings = tuple(replace(f, reason=f"{name}: {f.reason}") for f in judgement.findings)
    decision = judgement.decision
    if decision is not None and decision.rule != "command":
        decision = replace(decision, reason=f"{name}: {decision.reason}")
    return judgement._replace(findings=findings, decision=decision)


def _branch_of(decision: Decision, fork_step: int) -> Branch:
    return Branch(decision.new_attempt, decision.attempt, fork_step)
