"""The rungs: what each decision does to the ladder's memory, and its entry in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainvitals.policy.state import (
    CheckpointRef,
    Facts,
    LadderConfig,
    LadderState,
    Mode,
    lr_factor_at,
)
from trainvitals.records import CommandAck, Decision, Finding, StepRecord


class Verdict(NamedTuple):
    """What ``decide`` returns."""

    state: LadderState
    decision: Decision | None = None
    ack: CommandAck | None = None


class Case(NamedTuple):
    """One call's circumstances, handed down unchanged."""

    record: StepRecord
    decided_at_step: int
    checkpoints: Sequence[CheckpointRef]
    mode: Mode
    config: LadderConfig
    now_attempt_id: int

    @property
    def heals(self) -> bool:
        """Whether rolling back is the next rung: in heal mode, and observed where it could be."""
        return self.mode == "heal" or (self.mode == "observe" and bool(self.checkpoints))


def skip(
    state: LadderState, finding: Finding | None, reason: str, rule: str, case: Case
) -> Verdict:
    """Enter a step that was not applied: the device had skipped it before the host knew."""
    num = len(state.marks)
    if num > 1:
        reason = f"{reason} ({num} bad steps within {case.config.storm_window})"
    facts = replace(state.facts, num_skips=state.facts.num_skips + 1)
    return _enter(
        replace(state, facts=facts),
        case,
        finding,
        action="skip_step",
        reason=reason,
        rule=rule,
        acted=case.record.skipped,
    )


def accept(state: LadderState, finding: Finding, reason: str, rule: str, case: Case) -> Verdict:
    """Take what looked like outliers as the new level, and stop counting them as trouble."""
    state = replace(state, marks=(), skips_in_a_row=0)
    return _enter(
        state, case, finding, action="accept_level", reason=reason, rule=rule,
        acted=case.mode != "observe",
    )  # fmt: skip


def go_back(
    state: LadderState,
    case: Case,
    finding: Finding | None,
    target: CheckpointRef,
    *,
    facts: Facts,
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
        marks=(),
        skips_in_a_row=0,
        rolling_back=acted,
        first_step=state.first_step if acted else case.record.step,
    )
    return _enter(
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
    return _enter(
        replace(state, facts=replace(state.facts, halted=reason)),
        case,
        finding,
        action="halt",
        reason=reason,
        rule=rule,
        acted=case.mode != "observe",
        command_number=command_number,
    )


def budget_left(facts: Facts, config: LadderConfig) -> int:
    """Return how many rollbacks are left before one more must halt: the nearer of both budgets."""
    tries = config.max_tries - (facts.cause.tries if facts.cause else 0)
    return max(0, min(tries, config.max_causes - facts.num_causes))


def _enter(
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
    evidence = {"bad_steps": float(len(state.marks)), "in_a_row": float(state.skips_in_a_row)}
    for name in ("loss", "loss_limit", "grad_norm", "grad_norm_limit", "learning_rate"):
        value = getattr(record, name)
        if value is not None:
            evidence[name] = float(value)
    return evidence
