"""The host's part of a step: judge it, act on the judgement, have it written down.

Runs on every rank with the same reduced numbers, so every rank decides alike; rank 0 alone writes
what is equal on all. Nothing here enters a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from trainer_hooks.callbacks.early_stopping import Evaluations
from trainer_hooks.data.loader import DataState
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.lifecycle.agent_starter import NodeAgent
from trainer_hooks.lifecycle.terminal import Terminal
from trainer_hooks.measures.host import HostMeasurements, StepClock
from trainer_hooks.measures.sampled import Sampler
from trainer_hooks.probe.probe import LossEvaluations, Probe
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.manager import Meta, RecoveryManager, Restored
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.recovery.replicas import NO_ORDER, Difference, Replicas
from trainer_hooks.recovery.state import StateCheck
from trainer_hooks.repro.capsule import Surroundings
from trainer_hooks.step.beside import paused_round
from trainer_hooks.step.emit import Emitter, StepLog, TokenCount
from trainer_hooks.step.gradients import no_gradients
from trainer_hooks.step.profiling import Profiling
from trainer_hooks.step.reduce_vector import (
    NUM_FIGURES,
    Derived,
    PackLayout,
    Rank0Values,
    Reduced,
    dissenters,
    step_record,
)
from trainer_hooks.step.user_alerts import RankAlerts
from trainvitals.auto_clip import AutoClip, MaxNorm
from trainvitals.clock import Clock
from trainvitals.detect import Limits
from trainvitals.errors import CheckpointError, TrainingHalted, UsageError
from trainvitals.identity import new_attempt_id
from trainvitals.io.mailbox import CommandInbox
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.policy import Judge, Judgement, Proposal
from trainvitals.policy.plan import Branch, Window
from trainvitals.policy.state import FOREVER, is_outlier
from trainvitals.records import (
    COMMAND_CODES,
    AttemptStarted,
    Command,
    CommandAck,
    CommandAcknowledged,
    CommandAction,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    Note,
    OnHang,
    Profiled,
    RunEnded,
    StepRecord,
    TrainingPaused,
)

_LOG = logging.getLogger("trainvitals")
_NAMED = 4
"""Tensors that are named of those that are not finite."""
_IS_MEANT = (
    "; no optimizer has it, so it counts as intended from now on: snapshots continue with it"
)
_NO_CLIP = 10.0
"""Multiple of the norm's limit from which a clip is none."""
_COMPARED = frozenset({"replica_corrupted", "settings_differ"})
"""Findings about ranks that do not hold alike what they must."""
_ENTERED = frozenset({"halt", "rollback", "approve", "accept"})
"""Commands that lead to an entry in the ledger: they are judged with a step."""
_ACTIONS = {code: cast(CommandAction, name) for name, code in COMMAND_CODES.items()}


@dataclass(slots=True, kw_only=True)
class StepController:
    """What a rank keeps between steps on the host."""

    mode: str
    ranks: Ranks
    layout: PackLayout
    judge: Judge
    recovery: RecoveryManager | None
    emitter: Emitter
    inbox: CommandInbox | None
    """Where commands come in: on rank 0 alone."""
    run_dir: RunDir
    plan: PlanJournal
    faults: FaultCounter
    clock: Clock
    sampler: Sampler | None
    probe: Probe
    log: StepLog
    attempt: int
    evaluations: Evaluations | None
    """Of early stopping; None without it."""
    on_hang: OnHang
    """What the node's agent shall do about a hang that pages."""
    owns_clip: bool
    """Whether gradients are measured before any clip; else a finite norm is the loop's to give."""
    replicas: Replicas | None = None
    """What compares the ranks with each other; None where they have nothing in common."""
    loss_evaluations: LossEvaluations = field(default_factory=LossEvaluations)
    agent: NodeAgent | None = None
    terminal: Terminal | None = None
    """What is said to the person at the terminal: on rank 0 alone, unless it is to be quiet."""
    probe_parameters: bool = False
    """Whether the next pack should say if parameters are finite: after a bad step only."""
    digest: int = 0
    halted: TrainingHalted | None = None
    expecting: int = 0
    """Steps of an announced change that the packs have not brought back yet; on rank 0."""
    first_step: int = -1
    """The step this start begins with, until it was judged: it must bring gradients."""
    starts_again: bool = False
    """Whether the run has been started before, and this start found nothing to go on from."""
    told_to_stop: bool = False
    """Whether this rank was sent SIGTERM; it tells all ranks with the next step."""
    stopping: bool = False
    """Whether some rank was: known on all ranks at the same step."""
    last_step: int = -1
    """The newest step that was judged."""
    _next_attempt: int = 0
    """Id for the branch that a rollback would open."""
    first_record: StepRecord | None = None
    """The first step, until the monitor has looked at it."""
    judged: tuple[StepRecord, Reduced] | None = None
    """The newest step that was judged."""
    data_order: Callable[[], tuple[int, int]] | None = None
    """Gives the seed and the epoch by which the data is shared out, in a loop over batches."""
    surroundings: Surroundings | None = None
    """What a bad step's capsule tells of model and optimizers."""
    stepped_twice: UsageError | None = None
    """What is wrong with who steps the schedulers, until all ranks know of it by rank 0."""
    state_check: StateCheck | None = None
    """Looks at the state where no snapshot does."""
    turn_names: tuple[str, ...] = ("",)
    """Of the optimizers that may be stepped by themselves, behind that of all together."""
    is_paused: bool = False
    """Whether all ranks wait, before the next step, for a person's word."""
    has_work_beside: bool = False
    """Whether ``work_beside`` has anything to do."""
    lacks: dict[str, str] = field(default_factory=dict)
    """Commands that this loop cannot carry out, and why; equal on all ranks."""
    times: StepClock = field(init=False)
    """What the step's time is made of."""
    _profiling: Profiling = field(init=False)
    _begun: set[int] = field(default_factory=set)
    """Turns that have brought a step."""
    _auto_clips: dict[int, AutoClip] = field(default_factory=dict)
    """Norms behind the limits of ``max_norm="auto"``, by turn; empty if it is not used."""
    _was_announced: bool = False
    _rate: float = 0.0
    """The first group's in the step before, as the loop asked for it."""
    _disagreed: bool = False
    _bad_names: str = ""
    """Tensors of this rank that were not finite when it was last told."""

    def __post_init__(self) -> None:
        self.times = StepClock(self.clock)
        self._profiling = Profiling(
            self.run_dir.profiles_dir, self.ranks, self.log.lateness, self.faults, self._profiled
        )
        self._tell_pause()
        if self.recovery is None:
            self.lacks["checkpoint"] = "the run makes no checkpoints: watch(checkpoints=...) does"

    @property
    def is_rank0(self) -> bool:
        """Whether this is global rank 0."""
        return self.ranks.rank == 0

    # ------------------------------------------------------------------------ before a step

    def rank0_values(
        self,
        step: int,
        max_norm: MaxNorm | None,
        turn: int = 0,
        rates: Sequence[float | None] = (),
        is_scheduled: bool = False,
    ) -> Rank0Values | None:
        """Return rank 0's limits and its verified command; None on the other ranks.

        Args:
            step: the step that begins its exchange.
            max_norm: what the loop clips to; None where it does not, or nobody knows.
            turn: whose step it is.
            rates: what the loop asks for, by parameter group.
            is_scheduled: whether a scheduler given to ``watch`` has set the first of them.
        """
        if not self.is_rank0:
            return None
        number, action, target = self._command_words(step)
        limits = self.judge.limits(turn) if not self.expecting else Limits()
        # A clip at a thousand times the usual norm takes nothing from an outlier.
        usual = limits.grad_norm
        auto_max_norm = self._auto_clip(turn).limit(step) if max_norm == "auto" else None
        clip = auto_max_norm if max_norm == "auto" else max_norm
        clips = clip is not None and (usual is None or clip <= _NO_CLIP * usual)
        recovery = self.recovery
        ratio, self.loss_evaluations.ratio = self.loss_evaluations.ratio, 0.0
        evaluation = None
        if self.evaluations is not None:
            evaluation = self.evaluations.root_value(step, self.attempt)
        rate_declared = False
        if turn <= 1 and rates and rates[0] is not None:  # the rate in the row is the first one's
            rate_declared = is_scheduled and rates[0] > self._rate
            self._rate = rates[0]
        if self.log.schedule is not None and not turn:
            with self.faults.fail_open("schedule"):
                rate_declared |= self.log.schedule.has_rise(step, rates)
        saved_step, saved_attempt = (0, 0) if recovery is None else recovery.newest_saved
        return Rank0Values(
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
            clips=clips,
            max_row=self.judge.max_row(turn),
            skips=self.judge.facts.is_skipped(step),
            command_number=int(number),
            command_action=int(action),
            command_argument=target,
            next_attempt=self._next_attempt,
            expect_steps=self.expecting,
            saved_step=saved_step,
            saved_attempt=saved_attempt,
            save_due=recovery is not None and recovery.save_due,
            saving=recovery is not None and recovery.is_saving,
            evaluation=evaluation,
            evaluation_ratio=ratio,
            stepped_twice=self.stepped_twice is not None,
            rate_declared=rate_declared,
            auto_max_norm=auto_max_norm,
        )

    def _auto_clip(self, turn: int) -> AutoClip:
        """Return the norms of one optimizer's turn, or of all optimizers together."""
        if turn not in self._auto_clips:
            self._auto_clips[turn] = AutoClip(self.judge.config.auto_clip)
        return self._auto_clips[turn]

    def auto_clip_state(self) -> dict[str, Any] | None:
        """Return the norms behind the limits of ``max_norm="auto"``; None if it is not used."""
        clips = self._auto_clips.items()
        return {str(turn): clip.state_dict() for turn, clip in clips} if clips else None

    def load_auto_clip_state(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue the limits of ``max_norm="auto"`` from ``step``."""
        state = state or {}
        for turn in self._auto_clips.keys() | {int(turn) for turn in state}:
            self._auto_clip(turn).roll_back(step, state.get(str(turn)))

    def _command_words(self, step: int) -> tuple[float, float, float]:
        """Return rank 0's waiting command as number, code and argument; zeros where none waits."""
        command = self._waiting_command(step)
        if command is None:
            return 0.0, 0.0, -1.0
        target = -1.0
        if command.action != "rollback":
            target = command.argument
        elif command.checkpoint_id and self.recovery is not None:
            target = float(self.recovery.step_of(command.checkpoint_id))
        return float(command.number), float(COMMAND_CODES[command.action]), target

    def _waiting_command(self, step: int) -> Command | None:
        """Return the command that waits for its answer, a new one if there is one.

        It is in every pack until it is answered: one that a rollback overtakes is judged no more.
        """
        inbox = self.inbox
        if inbox is None:
            return self._own_order()
        with self.faults.fail_open("mailbox"):
            refusal = inbox.poll(step=step)
            if refusal is not None:
                if refusal.status == "expired":
                    self.plan.add(self.judge.facts, expired=refusal.number)
                self.acknowledge(refusal, step=step)
        if inbox.waiting is not None and inbox.waiting.number <= self.judge.facts.last_command:
            inbox.waiting = None
        return inbox.waiting or self._own_order()

    def _own_order(self) -> Command | None:
        """Return the profile that the run orders by itself, as it got slower, if any."""
        slowdowns = self.log.slowdowns
        if slowdowns is None:
            return None
        newest, now_ns = self.judge.facts.last_command, self.clock.monotonic_ns()
        return slowdowns.command(self.run_dir.run_id, newest=newest, now_ns=now_ns)

    def holds_evaluated(self, step: int) -> bool:
        """Return whether this rank has a copy of the state that was evaluated before ``step``."""
        return self.evaluations is not None and self.evaluations.holds(step, self.attempt)

    @property
    def probe_ready(self) -> bool:
        """Whether this rank has what it takes to ask the state."""
        return self.probe.has_loss and self.probe.is_ready

    def nonfinite_state(self, step: int) -> Tensor | None:
        """Return how many of this rank's tensors are not finite, where ``step`` brings a look.

        On the device, and without waiting for it.
        """
        if self.recovery is not None:
            return self.recovery.flag(step)
        if self.state_check is not None:
            with self.faults.fail_open("state_check"):
                return self.state_check.flag(step)
        return None

    def replicas_word(
        self, step: int, max_norm: MaxNorm | None, turn: int
    ) -> Tensor | float | None:
        """Return what this rank is compared by in ``step``; None: it says nothing."""
        replicas, recovery = self.replicas, self.recovery
        if replicas is None or (recovery is not None and recovery.missed(step)):
            return None
        with self.faults.fail_open("replicas"):
            snapshot = None if recovery is None else recovery.fingerprint(step)
            order = NO_ORDER if self.data_order is None else self.data_order()
            return replicas.word(step, max_norm=max_norm, turn=turn, order=order, snapshot=snapshot)
        return None

    def acknowledge(self, ack: CommandAck, *, step: int) -> None:
        """Say what became of a command; rank 0 speaks for all."""
        self.emitter.of_run(CommandAcknowledged(ack=ack), step=step, attempt=self.attempt)

    # ------------------------------------------------------------------------- after a step

    def handle(
        self, numbers: list[float], measured: HostMeasurements, *, now_step: int
    ) -> Judgement:
        """Judge one step's numbers and write its row; return what is to be carried out.

        A step of a branch that was left is written down and judged no more.

        Args:
            numbers: the reduced pack and the device's own figures.
            measured: what this rank measured in that step.
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
        if measured.attempt != self.attempt:
            # It was in flight while the run went back: the judge has forgotten what came before it.
            self.log.write(measured, record, reduced, derived, samples, Judgement(), name)
            return Judgement()
        if measured.step == self.first_step or (name and measured.turn not in self._begun):
            self._begun.add(measured.turn)
            if not reduced.has_gradients and not record.failed_ranks:
                raise no_gradients(name)  # known on all ranks alike
        if reduced.root["stepped_twice"]:
            raise self.stepped_twice or UsageError(
                "rank 0's loop steps a scheduler that was given to watch()",
                hint="take scheduler.step() out of the loop",
            )
        if measured.step == self.first_step:
            self.first_record = record
            if self.starts_again and not measured.step:
                self._tell_second_start()
        self.first_step = -1
        # What travelled with the step comes before its judgement: the ladder chooses among the
        # checkpoints, and asks the probe, as all ranks know them by this step.
        difference = None
        if self.replicas is not None:
            difference = self._compare(self.replicas, reduced, record, at=now_step + 1)
            record = _with_difference(record, difference)
        if self.recovery is not None:
            differ = () if self.replicas is None else self.replicas.unresolved
            if difference is not None:
                differ = difference.vote.apart or differ
            self.recovery.returned(
                reduced,
                step=measured.step,
                attempt=self.attempt,
                differ=differ,
                is_shared=difference is None or difference.kind in ("state", "settings"),
            )
            self.stopping = reduced.total("terminating") != 0
        if self.evaluations is not None:
            self.evaluations.returned(reduced, step=measured.step, attempt=measured.attempt)
        if self.probe.has_loss:
            self.probe.returned(reduced.total("probe_ready"))
        self._announced(int(reduced.root["expect_steps"]))
        judgement = self.judge.judge(
            record,
            decided_at_step=now_step,
            checkpoints=() if self.recovery is None else self.recovery.refs(),
            command=_proposal(reduced),
            now_attempt_id=int(reduced.root["next_attempt"]),
            probe=self.probe.read if self.probe.is_on else None,
            evaluation=reduced.root["evaluation_ratio"] or None,
            lacks=self.lacks,
        )
        if name:
            judgement = of_turn(judgement, name)
        if record.nonfinite_state or record.snapshots_missed:
            if self.state_check is not None:
                self.state_check.every = self.state_check.AGAIN
            judgement = self._name_what_is_bad(record, reduced, judgement)
            self._tell_unprotected(judgement)
        if self.replicas is not None:
            judgement = self._name_replicas(self.replicas, difference, record, judgement)
        if judgement.decision is not None and judgement.decision.command_number:
            judgement = judgement._replace(decision=self._with_reason(judgement.decision))
        if record.failed_ranks:
            judgement = self._name_unguarded(record, judgement)
        if measured.clips_automatically:
            measured.auto_max_norm = reduced.limit("auto_max_norm")
            if not (record.skipped or record.failed_ranks or record.grad_norm is None):
                self._auto_clip(measured.turn).add(measured.step, record.grad_norm)
        self.last_step, self.judged = measured.step, (record, reduced)
        self._after_judgement(record, reduced, judgement)
        self.log.write(measured, record, reduced, derived, samples, judgement, name)
        if self.recovery is not None:
            with self.times.checkpoint():
                self.recovery.promote(measured.step, self.judge.last_unhealthy_step)
        return judgement

    def _tell_second_start(self) -> None:
        """Say what a loop lacks that resumes from a checkpoint of its own: all begins at step 0.

        By a schedule that begins there too such a loop is not judged: its rates are of a later one.
        """
        text = (
            f"run {self.run_dir.run_id} was started before, and this start counts from step 0, "
            "with new limits. If the loop loaded a checkpoint of its own, keep "
            "monitor.state_dict() in it and call monitor.load_state_dict(state) before the first "
            "step; for a new training set another VITALS_RUN_ID"
        )
        if self.log.schedule is not None:
            self.log.schedule.follower.expect(FOREVER)
            text += ". The declared schedule is not checked in this start"
        self.warn("starts_again", text, step=0)

    def _name_unguarded(self, record: StepRecord, judgement: Judgement) -> Judgement:
        """Count a step that was not measured, and give a finding about it this rank's own error."""
        if self.terminal is not None:
            self.terminal.num_unguarded += 1
        finding = next((f for f in judgement.findings if f.kind == "unguarded"), None)
        if finding is None or self.ranks.rank not in record.failed_ranks:
            return judgement
        error = self.faults.last.get("prepare", "unknown")
        self._note_own("unguarded", f"the step could not be measured: {error}", record.step)
        named = replace(finding, reason=f"{finding.reason} ({error})")
        findings = tuple(named if f is finding else f for f in judgement.findings)
        judgement = judgement._replace(findings=findings)
        self._tell_unprotected(judgement)
        return judgement

    def _name_what_is_bad(
        self, record: StepRecord, reduced: Reduced, judgement: Judgement
    ) -> Judgement:
        """Have each rank write down which of its own tensors, or what error, a finding is about.

        Returned with rank 0's in its words: what is said of the run is written by rank 0.
        """
        rank = self.ranks.rank
        decision = judgement.decision
        rolls_back = decision is not None and decision.rule == "nonfinite_state"
        kinds = {finding.kind for finding in judgement.findings}
        if "snapshot_missed" in kinds and rank in reduced.ranks_where("snapshot_missed"):
            assert self.recovery is not None, "snapshots are its own"
            text = f"rank {rank} could not take a snapshot: {self.recovery.failure}"
            self._note_own("snapshot_missed", text, record.step)
        is_own = rank in reduced.ranks_where("nonfinite_state")
        if not is_own or not (rolls_back or "nonfinite_state" in kinds):
            return judgement
        if rolls_back or any(f.onset_step == f.step for f in judgement.findings):
            # Once a stretch: it reads all of the state, on the host.
            names = self._names_of_bad()
            self._bad_names = _shown_names(names)
            text = f"rank {rank}: NaN or infinite: {self._bad_names}"
            if not rolls_back and self._is_meant(names):
                self._bad_names += _IS_MEANT
                text += _IS_MEANT
            self._note_own("nonfinite_state", text, record.step)
        shown = self._bad_names
        findings = tuple(
            replace(f, reason=f"{f.reason} ({shown})") if f.kind == "nonfinite_state" else f
            for f in judgement.findings
        )
        if decision is not None and rolls_back:
            decision = replace(decision, reason=f"{decision.reason} ({shown})")
        return judgement._replace(findings=findings, decision=decision)

    def _compare(
        self, replicas: Replicas, reduced: Reduced, record: StepRecord, *, at: int
    ) -> Difference | None:
        """Return what differs between ranks, if their words do. Collective then, on all alike."""
        by_words = replicas.votes(reduced.words())
        if not by_words.apart:
            replicas.agreed(record.step)
            return None
        difference = replicas.diagnose(record.step, by_words, at=at)
        if difference.kind == "untied":
            self.warn("replicas_not_alike", difference.text, step=record.step)
        return difference

    def _name_replicas(
        self,
        replicas: Replicas,
        difference: Difference | None,
        record: StepRecord,
        judgement: Judgement,
    ) -> Judgement:
        """Return what was judged with the names of what differs, and what a replay has said."""
        findings, decision = judgement.findings, judgement.decision
        if difference is not None:
            findings = tuple(
                replace(f, reason=f"{f.reason}: {difference.text}") if f.kind in _COMPARED else f
                for f in findings
            )
            if decision is not None and decision.rule == "replica_corrupted":
                decision = replace(decision, reason=f"{decision.reason} ({difference.text})")
            judgement = judgement._replace(findings=findings, decision=decision)
            self._tell_unprotected(judgement)
        if (named := replicas.replayed(record.step)) is not None:
            finding = Finding(
                kind="replica_named",
                level="advisory",
                step=record.step,
                detector="replicas",
                reason=named.text,
                rank=named.rank,
                onset_step=record.step,
                cause="replica_named",
            )
            judgement = judgement._replace(findings=(*judgement.findings, finding))
        return judgement

    def _tell_unprotected(self, judgement: Judgement) -> None:
        """Say at the terminal what protection has lost, unless it is rolled back."""
        decision = judgement.decision
        rules = ("nonfinite_state", "replica_corrupted")
        if self.terminal is None or (decision is not None and decision.rule in rules):
            return
        with self.faults.fail_open("terminal"):
            self.terminal.unprotected(judgement.findings)

    def _is_meant(self, names: Sequence[str]) -> bool:
        """Have snapshots go on where the model itself must have made it: no rollback cured it."""
        is_meant = False
        if self.recovery is not None:
            with self.faults.fail_open("state_check"):
                is_meant = self.recovery.accept(names)
        return is_meant

    def _names_of_bad(self) -> list[str]:
        """Return which of this rank's tensors are not finite."""
        with self.faults.fail_open("state_check"):
            source = self.recovery if self.recovery is not None else self.state_check
            return [] if source is None else source.nonfinite_names()
        return []

    def _note_own(self, code: str, text: str, step: int) -> None:
        """Write what this rank alone knows into its own events."""
        note = Note(code=code, text=text, severity="warning")
        self.emitter.event(note, step=step, attempt=self.attempt)

    def _with_reason(self, decision: Decision) -> Decision:
        """Return a manual command's decision with the person's reason, which rank 0 alone knows."""
        command = None if self.inbox is None else self.inbox.waiting
        if command is None or command.number != decision.command_number or not command.reason:
            return decision
        return replace(
            decision, reason=f"{decision.reason} ({command.issued_by}: {command.reason})"
        )

    def _before_clip(self, reduced: Reduced, derived: Derived, measured: HostMeasurements) -> bool:
        """Return whether the norm is that before the clip; the row is told the one after it."""
        if self.owns_clip or measured.before_clip:
            return True
        is_given = reduced.total("norm_before_clip") != 0
        after = reduced.of_slot("norm_before_clip")
        measured.norm_after_clip = after if is_given else derived.grad_norm
        measured.after_clip = not is_given
        return is_given

    def tell_without_probe(self, line: str) -> None:
        """Say once, where something acts, that nobody can ask the state, and what would change it.

        Args:
            line: the loop's line that would give a probe.
        """
        if self.mode != "observe" and not self.probe.has_loss:
            text = "no probe, so Vitals cannot check whether the weights are damaged; add one: "
            text += line
            self._note("no_probe", text, max(self.first_step, 0), "info")

    def tell_without_clip(self) -> None:
        """Report once, before anything has gone wrong, that the loop does not clip gradients."""
        if self.mode != "observe":
            text = (
                "this loop does not clip gradients, so one outlier can move the weights far; "
                'monitor.step(loss, max_norm="auto") clips to '
                f"{self.judge.config.auto_clip.multiple:g} times the recent median norm, and "
                "max_norm=math.inf measures the norm without this message"
            )
            self._note("no_clip", text, max(self.first_step, 0), "info")
            if self.terminal is not None:
                self.terminal.hint(text)

    def _announced(self, steps: int) -> None:
        """Take in, on all ranks at the same step, the change that rank 0's pack announced."""
        if steps and not self._was_announced:
            self.judge.rebaseline(steps)
            if self.log.schedule is not None:
                self.log.schedule.follower.expect(steps)
            self.expecting = 0
        self._was_announced = steps > 0

    def _after_judgement(self, record: StepRecord, reduced: Reduced, judgement: Judgement) -> None:
        self.probe_parameters = bool(record.nonfinite_ranks) or any(
            f.kind == "nonfinite" for f in judgement.findings
        )
        self.digest = self.judge.digest()
        if self.probe.has_loss:
            bad = any(finding.level == "actionable" for finding in judgement.findings)
            if bad or record.skipped or is_outlier(record):
                self.probe.dropped(record.step)
            else:
                own_loss = reduced.losses()[self.layout.rank]
                self.probe.accepted(record.step, record.attempt, own_loss)
        if not self._disagreed and (others := dissenters(reduced)):
            self._disagreed = True
            shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
            self._note(
                "split_verdict",
                f"{len(others)} of {self.layout.world_size} ranks disagree with the others on the "
                f"verdict of step {record.step - 1}: {shown}",
                record.step,
                "error",
            )

    # ------------------------------------------------------------------------------ acting

    def carry_out(
        self, judgement: Judgement, *, now_step: int, window: Window | None = None
    ) -> Restored | None:
        """Do what was judged; return what was restored, if it was a rollback.

        The plan journal is written before the deed, so that a relaunch finds what was meant and no
        command is taken twice; a command is answered after it. A skip alone is not written: it must
        not wait for a disk, and a relaunch is a new attempt, so entries of the ledger stay apart.

        Args:
            judgement: of one step.
            now_step: the step in whose call this happens.
            window: the data that a rollback passes over.

        Raises:
            TrainingHalted: the decision is to stop.
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
        if self.terminal is not None and (decision is not None or self.terminal.in_row):
            self._tell_person(decision, restored)
        if judgement.order is not None:
            self._do(judgement.order, now_step)
        if ack is not None:
            self.acknowledge(ack, step=now_step)
        if deed == "halt" and decision is not None:
            self._halt(decision)
        return restored

    def _do(self, order: Proposal, now_step: int) -> None:
        """Begin what a command asks for beside the steps; on all ranks at the same step."""
        if order.action == "checkpoint" and self.recovery is not None:
            self.recovery.save_soon()
            self.recovery.promote(self.last_step, self.judge.last_unhealthy_step)
        elif order.action in ("pause", "resume"):
            self._pause(order.action == "pause", "manual command")
        elif order.action == "profile":
            profiled = Profiled.of(order.argument)
            self._profiling.order(now_step + 1, profiled)
            self.has_work_beside = True
            if profiled.by_itself and self.log.slowdowns is not None:
                text = f"Vitals profiles {profiled.num_steps} steps: {self.log.slowdowns.reason}"
                self._note("profile_begun", text, now_step, "info")

    def _profiled(self, text: str) -> None:
        """Say where this rank's trace is; called by a thread of its own."""
        note = Note(code="profile_written", text=text)
        self.emitter.event(note, step=self.last_step, attempt=self.attempt)

    def _pause(self, is_paused: bool, reason: str) -> None:
        self.is_paused = is_paused
        self.has_work_beside = is_paused or self._profiling.has_work
        self._tell_pause()
        event = TrainingPaused(is_paused=is_paused, reason=reason)
        self.emitter.of_run(event, step=self.last_step, attempt=self.attempt)

    def _tell_pause(self) -> None:
        """Say which of the two commands cannot be now."""
        here = ("pause", "resume") if self.is_paused else ("resume", "pause")
        self.lacks.pop(here[1], None)
        self.lacks[here[0]] = f"the run is {'' if self.is_paused else 'not '}paused"

    def work_beside(self, step: int, device: torch.device) -> None:
        """Do what a person asked for beside the steps: end a profile, or wait. Collective.

        While it waits, a command that needs no step is answered here; one that does ends the pause
        and is judged with the next step, as ever. So does SIGTERM.

        Args:
            step: the one that was just made.
            device: where tensors of the ranks' group lie.
        """
        self._profiling.work(device)
        self.has_work_beside = self._profiling.has_work or self.is_paused
        while self.is_paused:
            words = self._command_words(step) if self.is_rank0 else (0.0, 0.0, 0.0)
            (number, code, argument), stops = paused_round(
                self.ranks, words, self.told_to_stop, device
            )
            if stops:
                self.stopping = self.recovery is not None
                self._pause(False, "SIGTERM")
            elif number:
                action = _ACTIONS[int(code)]
                proposal = Proposal(number=int(number), action=action, argument=argument)
                if action in _ENTERED:
                    self._pause(False, f"a {action} was asked for")
                    return
                judgement = self.judge.command(proposal, decided_at_step=step, lacks=self.lacks)
                self.carry_out(judgement, now_step=step)

    def carry_out_at_end(self, judgement: Judgement) -> None:
        """Record what was judged after the loop's last step; a halt still leaves its marker.

        Nobody is left to go back, so a rollback is entered as not done.

        Raises:
            TrainingHalted: the decision is to stop.
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
        """Say at the terminal what was done; before a halt, whose error may be caught."""
        if decision is not None and restored is not None:
            decision = replace(decision, rollback_to_step=restored.step)
        if self.terminal is not None:
            with self.faults.fail_open("terminal"):
                self.terminal.judged(decision)

    def _enter(self, decision: Decision) -> None:
        """Write the ledger's entry."""
        event = DecisionMade(decision=decision)
        self.emitter.of_run(event, step=decision.step, attempt=decision.attempt)

    def _go_back(self, decision: Decision) -> Restored:
        """Restore the decision's checkpoint and open its branch."""
        assert self.recovery is not None, "only a run with checkpoints rolls back"
        try:
            restored = self.recovery.roll_back(decision)
        except CheckpointError as error:
            # On this rank alone, perhaps: it cannot go on, and the marker keeps all from doing so.
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
        """Leave the durable marker first: torchrun starts a rank again whatever its exit code."""
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
            with self.faults.fail_open("halt.marker"):  # without one the halt itself still holds
                self.run_dir.write_halted(marker)
            event = RunEnded(state="halted", reason=decision.reason)
            self.emitter.event(event, step=decision.step, attempt=decision.attempt)
        self.halted = halted
        raise halted

    def begin_attempt(self, attempt: AttemptStarted, detectors: dict[str, Any] | None) -> None:
        """Go on as a new branch, with the detectors of the state it starts from."""
        self.attempt = attempt.id
        if self.emitter.alerts is not None:
            self.emitter.alerts.begin(attempt.id, attempt.fork_step)
        # A clock may go backwards; a branch is newer than the one it leaves all the same.
        self._next_attempt = max(new_attempt_id(self.clock.time_ns()), attempt.id + 1)
        self.judge.rolled_back(detector_state=detectors, attempt=attempt.id, step=attempt.fork_step)
        if self.replicas is not None:
            self.replicas.rolled_back(attempt.fork_step)
        self.probe_parameters, self.digest, self._was_announced = False, 0, False

    def start_branch(self, attempt: AttemptStarted, detectors: dict[str, Any] | None) -> None:
        """Begin a branch at the start of the loop, and write it down."""
        branch = Branch(attempt.id, attempt.parent, attempt.fork_step)
        self.begin_attempt(attempt, detectors)
        self.plan.add(self.judge.facts, branch=branch)

    def resume(
        self,
        attempt: AttemptStarted,
        detectors: dict[str, Any],
        tokens: TokenCount,
        auto_clip: dict[str, Any] | None,
    ) -> None:
        """Go on, before the first step, from a state that the loop itself kept. Collective.

        Where there are snapshots, the first is taken anew, of this branch.
        """
        self.log.tokens = tokens
        self.load_auto_clip_state(auto_clip, step=attempt.fork_step)
        self.start_branch(attempt, detectors)
        self.emitter.of_run(attempt, step=attempt.fork_step, attempt=attempt.id)
        if self.recovery is not None:  # it is of this branch, and of what the loop has loaded
            self.recovery.first(attempt.fork_step, attempt.id, self.snapshot_meta(None))

    def user_alerts(self) -> RankAlerts:
        """Return what says a person's own alerts, made at the first that there is."""
        alerts = self.emitter.alerts
        if alerts is None:
            alerts = self.emitter.alerts = RankAlerts(
                self.judge.config.rules,
                emitter=self.emitter,
                faults=self.faults,
                rank=self.ranks.rank,
                world_size=self.ranks.world_size,
            )
            alerts.begin(self.attempt, 0)
        return alerts

    def snapshot_meta(self, data: DataState | None) -> Meta:
        """Return what a snapshot keeps besides tensors. The ladder's facts are not in it."""
        schedule = self.log.schedule
        return {
            "judge": self.judge.detector_state(),
            "tokens_seen": self.log.tokens.seen,
            "tokens_trained": self.log.tokens.trained,
            "data": data,
            "stopping": self.stopping_state(),
            "alerts": None if self.emitter.alerts is None else self.emitter.alerts.state_dict(),
            "schedule": None if schedule is None else schedule.follower.state_dict(),
            "auto_clip": self.auto_clip_state(),
        }

    def take_meta(self, meta: Meta, *, step: int) -> None:
        """Set the counts to what they were at ``step``; consumed tokens stay consumed."""
        kept = TokenCount(int(meta["tokens_seen"]), int(meta["tokens_trained"]))
        self.log.tokens.go_back(kept)
        if self.emitter.alerts is not None:
            self.emitter.alerts.load_state_dict(meta.get("alerts"))
        if self.evaluations is not None:
            self.evaluations.load_state_dict(meta.get("stopping"))
        if self.log.schedule is not None:
            self.log.schedule.follower.load_state_dict(meta.get("schedule"))
        self.load_auto_clip_state(meta.get("auto_clip"), step=step)

    def close_profile(self) -> None:
        """Write a profile that has not come to its end."""
        with self.faults.fail_open("profile"):
            self._profiling.close()

    def stopping_state(self) -> dict[str, Any] | None:
        """Return the state of early stopping; None without it."""
        return None if self.evaluations is None else self.evaluations.state_dict()

    def tell_unguarded(self, text: str, *, step: int) -> None:
        """Page for a loop whose updates do not come by us, so that no step tells of it."""
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

    def warn(self, code: str, text: str, *, step: int) -> None:
        """Say once, in rank 0's log and among the run's events, what is likely a mistake."""
        if self.is_rank0:
            _LOG.warning("vitals: %s", text)
            self._note(code, text, step, "warning")

    def _note(
        self, code: str, text: str, step: int, severity: Literal["info", "warning", "error"]
    ) -> None:
        self.emitter.note(code, text, severity, step=step, attempt=self.attempt)


def _shown_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "unknown") + more


def of_turn(judgement: Judgement, name: str) -> Judgement:
    """Return what was said about one optimizer's step with its name in front.

    What a person asks for, but for a word about a step, is of the run.
    """
    findings = tuple(replace(f, reason=f"{name}: {f.reason}") for f in judgement.findings)
    decision = judgement.decision
    if decision is not None and decision.rule != "command":
        decision = replace(decision, reason=f"{name}: {decision.reason}")
    return judgement._replace(findings=findings, decision=decision)


def _with_difference(record: StepRecord, difference: Difference | None) -> StepRecord:
    """Return the step with what the ranks found out together."""
    if difference is None or difference.kind not in ("state", "settings"):
        return record
    rank = difference.vote.rank
    if difference.kind == "settings":
        return replace(record, settings_differ=True, replica_rank=rank)
    return replace(
        record,
        replicas_differ=max(1, len(difference.vote.suspects)),
        replica_rank=rank,
        replayed_alike=difference.is_again,
    )


def _branch_of(decision: Decision, fork_step: int) -> Branch:
    return Branch(decision.new_attempt, decision.attempt, fork_step)


def _proposal(reduced: Reduced) -> Proposal | None:
    number = int(reduced.root["command_number"])
    if not number:
        return None
    action = _ACTIONS[int(reduced.root["command_action"])]
    argument = reduced.root["command_argument"]
    return Proposal(number=number, action=action, argument=argument)
