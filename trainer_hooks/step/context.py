"""Parts of a run on one rank, which its steps and features share."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_hooks.agent_starter import NodeAgent
from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.exchange.emit import Emitter, StepLog
from trainer_hooks.exchange.reduce_vector import ReducedNumbers
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.host import StepClock
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.manager import RecoveryManager
from trainer_hooks.recovery.plan_journal import PlanJournal
from trainer_hooks.recovery.replicas import Replicas
from trainer_hooks.repro.capsule import CapsuleContext
from trainer_hooks.step.feature import ReturnedStep, StepFeatures
from trainer_hooks.terminal import Terminal
from trainvitals.clock import Clock
from trainvitals.errors import TrainingHalted
from trainvitals.io.mailbox import CommandInbox
from trainvitals.io.rundir import RunDir
from trainvitals.policy import Judge, Judgement
from trainvitals.records import Finding, FindingRaised, Note, StepRecord

if TYPE_CHECKING:
    from trainer_hooks.arguments import WatchArguments

_LOG = logging.getLogger("trainvitals")


@dataclass(slots=True, kw_only=True)
class RunContext:
    """Parts of a run on this rank that its features share."""

    mode: str
    given: WatchArguments
    """Arguments of ``watch`` or ``attach``."""
    ranks: Ranks
    device: DeviceParts
    judge: Judge
    emitter: Emitter
    log: StepLog
    run_dir: RunDir
    plan: PlanJournal
    faults: FaultCounter
    clock: Clock
    inbox: CommandInbox | None
    """Source of commands; only on rank 0."""
    recovery: RecoveryManager | None
    """Snapshots and checkpoints; None without them."""
    replicas: Replicas | None
    """Compares the ranks with each other; None if they hold nothing in common."""
    features: StepFeatures
    """The run's features; complete once all of them are built."""
    times: StepClock
    attempt: int
    first_step: int = -1
    """First step of this start, until it was judged: it must have gradients."""
    last_step: int = -1
    """The latest step that was judged."""
    halted: TrainingHalted | None = None
    """Error of the halt that ended training."""
    checks_parameters: bool = False
    """Whether the next step reports if parameters are finite: only after a bad step."""
    judged: tuple[StepRecord, ReducedNumbers] | None = None
    """The latest step that was judged."""
    surroundings: CapsuleContext | None = None
    """Information about model and optimizers for the repro capsule of a bad step."""
    agent: NodeAgent | None = None
    terminal: Terminal | None = None
    """Messages to the user at the terminal; only on rank 0, and None if it must be quiet."""

    @property
    def is_rank0(self) -> bool:
        """Return whether this is global rank 0, for a step and its features."""
        return self.ranks.rank == 0

    def judged_step(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Remember the latest judged step."""
        record = step.record
        self.last_step, self.judged = step.step, (record, step.reduced)
        findings = judgement.findings
        self.checks_parameters = bool(record.nonfinite_ranks) or (
            bool(findings) and any(finding.kind == "nonfinite" for finding in findings)
        )

    def warn(self, code: str, text: str, *, step: int) -> None:
        """Report a likely mistake at a step once, in rank 0's log and among the run's events."""
        if self.is_rank0:
            _LOG.warning("vitals: %s", text)
            self.emitter.note(code, text, "warning", step=step, attempt=self.attempt)

    def note_of_rank(self, code: str, text: str, *, step: int) -> None:
        """Write a note on a step to this rank's events, for information that only it has."""
        note = Note(code=code, text=text, severity="warning")
        self.emitter.event(note, step=step, attempt=self.attempt)

    def report_unguarded(self, text: str, *, step: int) -> None:
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
        self.emitter.run_event(FindingRaised(finding=finding), step=step, attempt=self.attempt)
        if self.is_rank0:
            _LOG.warning("vitals: NOT GUARDED: %s", text)

    def report_no_clip(self) -> None:
        """Report once, before any step has gone wrong, that the loop does not clip gradients."""
        if self.mode != "observe":
            text = (
                "this loop does not clip gradients, so one outlier can move the weights far; "
                'monitor.step(loss, max_norm="auto") clips to '
                f"{self.judge.config.auto_clip.multiple:g} times the recent median norm, and "
                "max_norm=math.inf measures the norm without this message"
            )
            step = max(self.first_step, 0)
            self.emitter.note("no_clip", text, step=step, attempt=self.attempt)
            if self.terminal is not None:
                self.terminal.hint(text)

    def report_unprotected(self, judgement: Judgement) -> None:
        """Report a step's lost protection at the terminal, unless the decision is a rollback."""
        decision = judgement.decision
        rules = ("nonfinite_state", "replica_corrupted")
        if self.terminal is None or (decision is not None and decision.rule in rules):
            return
        with self.faults.fail_open("terminal"):
            self.terminal.unprotected(judgement.findings)
