"""The rungs: what each decision does to the ladder's memory, and its entry in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainvitals.detect.outliers import Level, LossKind
from trainvitals.policy.evidence import Ask, Reading
from trainvitals.policy.state import (
    CheckpointRef,
    LadderConfig,
    LadderMemory,
    LadderState,
    Mode,
    Outlier,
    lr_factor_at,
)
from trainvitals.policy.withholding import MAX_ACCEPTED, level_of
from trainvitals.records import CommandAck, Decision, Finding, StateRead, StepRecord


class Verdict(NamedTuple):
    """What ``decide`` returns."""

    state: LadderState
    decision: Decision | None = None
    ack: CommandAck | None = None
    findings: tuple[Finding, ...] = ()
    """What the policy itself has to say, beside the detectors."""
    readings: tuple[StateRead, ...] = ()
    """What the probe and an evaluation said."""
    accepted: tuple[Outlier, ...] = ()
    """Outliers whose values begin a new reference."""


class Course(NamedTuple):
    """Where the loss has been: the reference of the outlier rule."""

    level: float
    noise: float
    first: float


class Case(NamedTuple):
    """One call's circumstances, handed down unchanged."""

    record: StepRecord
    decided_at_step: int
    checkpoints: Sequence[CheckpointRef]
    mode: Mode
    config: LadderConfig
    now_attempt_id: int
    loss_kind: LossKind = "minimize"
    probe: Callable[[Ask], Reading] | None = None
    course: Callable[[], Course] = lambda: Course(0.0, 0.0, 0.0)

    @property
    def heals(self) -> bool:
        """Whether rolling back is the next rung: in heal mode, and observed where it could be."""
        return self.mode == "heal" or (self.mode == "observe" and bool(self.checkpoints))


def without_entry(verdict: Verdict) -> LadderState:
    """Return the verdict's state as if its decision had not been entered: one entry a step."""
    state = verdict.state
    if verdict.decision is None:
        return state
    return replace(state, facts=replace(state.facts, ledger_seq=state.facts.ledger_seq - 1))


def skip(
    state: LadderState, finding: Finding | None, reason: str, rule: str, case: Case
) -> Verdict:
    """Enter a step that was not applied: the device had skipped it before the host knew."""
    facts = replace(state.facts, num_skips=state.facts.num_skips + 1)
    return enter(
        replace(state, facts=facts),
        case,
        finding,
        action="skip_step",
        reason=reason,
        rule=rule,
        acted=case.record.skipped,
    )


def accept(
    state: LadderState,
    finding: Finding | None,
    reason: str,
    rule: str,
    case: Case,
    *,
    outliers: tuple[Outlier, ...],
    command_number: int = 0,
) -> Verdict:
    """Take outliers as a level that is normal: nothing up to their values is withheld again."""
    levels = _with_level(state.facts.accepted, level_of(outliers))
    state = replace(
        state,
        facts=replace(state.facts, accepted=levels),
        row=(),
        spent=False,
        accepted_at=case.record.step,
    )
    return enter(
        state, case, finding, action="accept_level", reason=reason, rule=rule,
        acted=case.mode != "observe", command_number=command_number,
    )  # fmt: skip


def _with_level(levels: tuple[Level, ...], level: Level) -> tuple[Level, ...]:
    """Return the levels with one more, without those it covers."""
    kept = [k for k in levels if k.loss > level.loss or k.grad_norm > level.grad_norm]
    return (*kept, level)[-MAX_ACCEPTED:]


def go_back(
    state: LadderState,
    case: Case,
    finding: Finding | None,
    target: CheckpointRef,
    *,
    facts: LadderMemory,
    reason: str,
    rule: str,
    skip_batches: int = 0,
    command_number: int = 0,
) -> Verdict:
    """Decide a rollback to ``target``, with what it spends already in ``facts``."""
    acted = case.mode == "heal"
    after = replace(
        state,
        facts=replace(facts, num_rollbacks=facts.num_rollbacks + 1),
        row=(),
        nonfinite=0,
        rolling_back=acted,
        first_step=state.first_step if acted else case.record.step,
    )
    return enter(
        after,
        case,
        finding,
        evidence=_evidence(case.record, state),
        action="rollback",
        reason=reason,
        rule=rule,
        acted=acted,
        checkpoint_id=target.id,
        rollback_to_step=target.step,
        new_attempt=case.now_attempt_id if acted else 0,
        skip_batches=skip_batches,
        lr_factor=lr_factor_at(facts, target.step),
        cost_steps=case.decided_at_step + 1 - target.step if acted else 0,
        command_number=command_number,
    )


def halt(
    state: LadderState,
    reason: str,
    rule: str,
    finding: Finding | None,
    case: Case,
    command_number: int = 0,
) -> Verdict:
    """Give up, with the reason."""
    return enter(
        replace(state, facts=replace(state.facts, halted=reason)),
        case,
        finding,
        action="halt",
        reason=reason,
        rule=rule,
        acted=case.mode != "observe",
        command_number=command_number,
    )


def spent_causes(facts: LadderMemory, config: LadderConfig) -> tuple[int, ...]:
    """Return when causes were treated by rollback, of those within the window."""
    return tuple(time for time in facts.causes if time > facts.clock - config.budget_window)


def budget_left(facts: LadderMemory, config: LadderConfig) -> int:
    """Return how many rollbacks are left before one more must halt: the nearer of both budgets."""
    tries = config.max_tries - (facts.cause.tries if facts.cause else 0)
    return max(0, min(tries, config.max_causes - len(spent_causes(facts, config))))


def enter(
    state: LadderState, case: Case, finding: Finding | None, *, rule: str, **fields: Any
) -> Verdict:
    """Write the ledger entry: the decision with everything it rests on."""
    facts = replace(state.facts, ledger_seq=state.facts.ledger_seq + 1)
    record = case.record
    fields.setdefault("cost_steps", int(record.skipped))
    fields.setdefault("evidence", _evidence(record, state))
    fields.setdefault("lr_factor", lr_factor_at(facts, record.step))
    decision = Decision(
        ledger_seq=facts.ledger_seq,
        step=record.step,
        decided_at_step=case.decided_at_step,
        attempt=record.attempt,
        rule=rule,
        cause=(finding.cause or finding.kind) if finding else rule,
        rank=finding.rank if finding else -1,
        value=finding.value if finding else None,
        limit=finding.limit if finding else None,
        mode=case.mode,
        budget_left=budget_left(facts, case.config),
        **fields,
    )
    return Verdict(replace(state, facts=facts), decision)


def _evidence(record: StepRecord, state: LadderState) -> dict[str, float]:
    evidence = {"in_a_row": float(max(len(state.row), state.nonfinite))}
    for name in ("loss", "loss_limit", "grad_norm", "grad_norm_limit", "learning_rate"):
        value = getattr(record, name)
        if value is not None:
            evidence[name] = float(value)
    return evidence
