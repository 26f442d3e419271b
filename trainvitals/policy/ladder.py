"""The ladder: CONTINUE, SKIP_STEP, ROLLBACK, an older ROLLBACK with a lower LR, HALT.

``decide`` is pure: a state, the findings of one step and what every rank knows alike go in, the
next state and at most one decision come out. Every decision says in words why, with its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainvitals.policy.state import (
    Cause,
    CheckpointRef,
    Facts,
    LadderConfig,
    LadderState,
    Mark,
    Mode,
    Proposal,
    SkippedWindow,
)
from trainvitals.records import CommandAck, Decision, Finding, StepRecord

MAX_SKIPPED_WINDOWS = 100


class Verdict(NamedTuple):
    """What ``decide`` returns."""

    state: LadderState
    decision: Decision | None = None
    ack: CommandAck | None = None


class _Case(NamedTuple):
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


def decide(
    state: LadderState,
    findings: Sequence[Finding],
    *,
    record: StepRecord,
    decided_at_step: int,
    checkpoints: Sequence[CheckpointRef] = (),
    command: Proposal | None = None,
    mode: Mode = "guard",
    config: LadderConfig | None = None,
    now_attempt_id: int = 0,
) -> Verdict:
    """Return the next state and what to do about the findings of one step.

    At most one decision a step: the highest rung reached; its reason names a skip it includes.
    ``now_attempt_id`` is the id the new branch gets if this call rolls back. After a halt, and
    until a decided rollback was reported done, nothing is decided.
    """
    if state.rolling_back or (state.facts.halted and mode != "observe"):
        return Verdict(state)
    case = _Case(
        record, decided_at_step, checkpoints, mode, config or LadderConfig(), now_attempt_id
    )
    state = _remember(state, findings, case)
    verdict = _judge_step(state, findings, case)
    if command is None or command.number <= state.facts.last_command:
        return verdict
    return _answer(verdict, state, command, case)


# ------------------------------------------------------------------------------------ memory


def _remember(state: LadderState, findings: Sequence[Finding], case: _Case) -> LadderState:
    """Take the step into the ladder's memory."""
    record, config = case.record, case.config
    bad = primary_finding(findings)
    horizon = record.step - config.storm_window
    marks = tuple(mark for mark in state.marks if mark.step > horizon)
    first = record.step if state.first_step < 0 else state.first_step
    unhealthy = bad is not None or (record.skipped and not record.overflow)
    if not unhealthy:
        state = replace(state, marks=marks, first_step=first, skips_in_a_row=0)
        return _recover_observed(state, case)
    if bad is not None:
        marks += (Mark(record.step, bad.kind, bad.cause, bad.value),)
    skips = state.skips_in_a_row + 1
    return replace(
        state,
        marks=marks,
        first_step=first,
        skips_in_a_row=skips,
        last_unhealthy_step=record.step,
    )


def _recover_observed(state: LadderState, case: _Case) -> LadderState:
    """Let an observed halt end when the run, which nobody stopped, has recovered by itself."""
    quiet = case.record.step - state.last_unhealthy_step
    if not state.facts.halted or quiet < case.config.progress_steps:
        return state
    facts = replace(state.facts, halted="", cause=None, num_causes=0)
    return replace(state, facts=facts)


def primary_finding(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding a step is bad for: non-finite parameters first, then as detected."""
    acting = [finding for finding in findings if finding.level == "act"]
    for finding in acting:
        if finding.kind == "nonfinite_params":
            return finding
    return acting[0] if acting else None


# -------------------------------------------------------------------------------------- rungs


def _judge_step(state: LadderState, findings: Sequence[Finding], case: _Case) -> Verdict:
    config = case.config
    bad = primary_finding(findings)
    shift = next((finding for finding in findings if finding.kind == "level_shift"), None)
    if state.facts.halted:
        return Verdict(state)  # observed: it would have stopped
    if bad is not None and bad.kind == "nonfinite_params":
        return _nonfinite_params(state, bad, case)
    if shift is not None:
        return _accept(state, shift, shift.reason, "stable_level", case)
    if state.skips_in_a_row >= config.max_skips_in_a_row:
        reason = (
            f"{state.skips_in_a_row} steps in a row were skipped, up to step {case.record.step}: "
            f"no update was applied, so going on trains nothing"
        )
        return _halt(state, reason, "stuck", bad, case)
    if bad is None:
        return _device_skip(state, findings, case)
    if case.heals and len(state.marks) >= config.storm_skips:
        return _storm(state, bad, case)
    return _skip(state, bad, bad.reason, bad.detector, case)


def _device_skip(state: LadderState, findings: Sequence[Finding], case: _Case) -> Verdict:
    """Record a step that was skipped on the device for a reason that is no finding to act on."""
    if not case.record.skipped or case.record.overflow:
        return Verdict(state)
    finding = findings[0] if findings else None
    reason = finding.reason if finding else "the device skipped the step; no detector says why"
    return _skip(state, finding, reason, finding.detector if finding else "device", case)


def _skip(
    state: LadderState, finding: Finding | None, reason: str, rule: str, case: _Case
) -> Verdict:
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


def _accept(state: LadderState, finding: Finding, reason: str, rule: str, case: _Case) -> Verdict:
    """Take what looked like outliers as the new level, and stop counting them as trouble."""
    state = replace(state, marks=(), skips_in_a_row=0)
    return _enter(
        state, case, finding, action="accept_level", reason=reason, rule=rule,
        acted=case.mode != "observe",
    )  # fmt: skip


def _nonfinite_params(state: LadderState, bad: Finding, case: _Case) -> Verdict:
    if case.heals:
        return _rollback(state, bad, bad.reason, "nonfinite_params", case)
    reason = (
        f"{bad.reason}: every further step is lost, and mode {case.mode!r} has no checkpoint to go "
        "back to"
    )
    return _halt(state, reason, "nonfinite_params", bad, case)


def _storm(state: LadderState, bad: Finding, case: _Case) -> Verdict:
    config, facts, record = case.config, state.facts, case.record
    num = len(state.marks)
    if facts.num_rollbacks and record.step - state.first_step < config.cooldown_steps:
        reason = f"{bad.reason}; the last rollback is less than {config.cooldown_steps} steps ago"
        return _skip(state, bad, reason, bad.detector, case)
    onset = state.marks[0].step
    reason = (
        f"{num} bad steps from {onset} to {record.step} (a storm is {config.storm_skips} within "
    )
    reason += f"{config.storm_window}), the last because {bad.reason}"
    cause, level = facts.cause, loss_level(state.marks)
    same = cause is not None and onset < cause.until_step and cause.tries > 0
    if same and cause is not None and _same_level(cause.level, level, config.same_level_ratio):
        reason = (
            f"after the rollback, other data shows the same level again: loss {level:.4g}, before "
            f"{cause.level:.4g}; a shift of the data, not a fault"
        )
        return _accept(state, bad, reason, "same_level_again", case)
    return _rollback(state, bad, reason, "skip_storm", case)


def loss_level(marks: Sequence[Mark]) -> float:
    """Return the median loss of a storm that consists of finite loss outliers; else 0."""
    values = sorted(
        mark.value for mark in marks if mark.cause == "loss_outlier" and mark.value is not None
    )
    return values[len(values) // 2] if len(values) == len(marks) else 0.0


def _same_level(before: float, now: float, ratio: float) -> bool:
    return min(before, now) > 0.0 and max(before, now) <= ratio * min(before, now)


# ----------------------------------------------------------------------------------- rollback


def _rollback(state: LadderState, bad: Finding, reason: str, rule: str, case: _Case) -> Verdict:
    """Go back for a root cause: the first time, once more and further, or not any more."""
    config, facts = case.config, state.facts
    onset = min(
        [mark.step for mark in state.marks] + [bad.onset_step if bad.onset_step >= 0 else bad.step]
    )
    cause = facts.cause
    again = cause is not None and onset < cause.until_step
    tries = cause.tries if again and cause is not None else 0
    if tries >= config.max_tries:
        reason = f"{reason}; {tries} rollbacks did not cure this cause, and no more are allowed"
        return _halt(state, reason, "budget", bad, case)
    if not again and facts.num_causes >= config.max_causes:
        reason = f"{reason}; {facts.num_causes} causes were treated by rollback, and no more are"
        return _halt(state, f"{reason} allowed", "budget", bad, case)
    below = cause.target_step if again and cause is not None and tries else None
    target, note = choose_checkpoint(case.checkpoints, onset, config.margin, below)
    if target is None:
        return _halt(state, f"{reason}; {note}", "no_checkpoint", bad, case)
    storms = (cause.storms if again and cause is not None else 0) + 1
    treated = Cause(
        kind=bad.cause or bad.kind,
        onset_step=onset,
        until_step=max(
            case.decided_at_step,
            cause.until_step - config.progress_steps if again and cause is not None else 0,
        )
        + config.progress_steps,
        tries=tries + 1,
        storms=storms,
        target_step=target.step,
        level=loss_level(state.marks),
    )
    skip = min(config.skip_batches << min(storms - 1, 20), config.max_skip_batches)
    facts = _spend(facts, treated, skip, case, new_cause=not again)
    reason = f"{reason}; {note}, and on past {skip} batches from step {onset}"
    if facts.lr_factor < 1.0:
        reason += f", learning rate x {facts.lr_factor:.4g}"
    return _go_back(replace(state, facts=facts), case, bad, target, reason, rule, skip)


def choose_checkpoint(
    checkpoints: Sequence[CheckpointRef], onset: int, margin: int, below: int | None
) -> tuple[CheckpointRef | None, str]:
    """Return the newest healthy checkpoint that lies far enough back, and the choice in words.

    For a second try (``below`` is where the last one went) an older one; where none is, the oldest
    that qualifies once more. Equal steps are decided by place, then id, never by the list's order.
    """
    latest = max(0, onset - margin)
    usable = sorted(
        (ref for ref in checkpoints if ref.state == "healthy" and ref.step <= latest),
        key=lambda ref: (ref.step, ref.where == "memory", ref.id),
    )
    if not usable:
        return None, (
            f"none of {len(checkpoints)} checkpoints is healthy and at or before step {latest} "
            f"({margin} steps before the onset at {onset})"
        )
    older = [ref for ref in usable if below is None or ref.step < below]
    target = older[-1] if older else usable[0]
    words = f"back to {target.id}, before step {target.step}"
    if below is not None:
        words += ", older than the last try" if older else ", as no older one is left"
    return target, words


def _spend(facts: Facts, cause: Cause, skip: int, case: _Case, *, new_cause: bool) -> Facts:
    config = case.config
    window = SkippedWindow(cause.onset_step, skip)
    facts = replace(
        facts,
        num_causes=facts.num_causes + new_cause,
        cause=cause,
        skipped_windows=(*facts.skipped_windows, window)[-MAX_SKIPPED_WINDOWS:],
    )
    if cause.tries < 2:
        return facts
    return replace(
        facts,
        lr_factor=config.lr_cut ** (cause.tries - 1),
        lr_hold_until=cause.until_step,
        lr_full_from=cause.until_step + config.lr_rewarm_steps,
    )


def _go_back(
    state: LadderState,
    case: _Case,
    finding: Finding | None,
    target: CheckpointRef,
    reason: str,
    rule: str,
    skip: int,
    command: int = 0,
) -> Verdict:
    facts = replace(state.facts, num_rollbacks=state.facts.num_rollbacks + 1)
    acted = case.mode == "heal"
    state = replace(
        state,
        facts=facts,
        marks=(),
        skips_in_a_row=0,
        rolling_back=acted,
        first_step=state.first_step if acted else case.record.step,
    )
    return _enter(
        state,
        case,
        finding,
        action="rollback",
        reason=reason,
        rule=rule,
        acted=acted,
        checkpoint_id=target.id,
        rollback_to_step=target.step,
        new_attempt=case.now_attempt_id if acted else 0,
        skip_batches=skip,
        cost_steps=case.decided_at_step + 1 - target.step if acted else 0,
        command_number=command,
    )


def _halt(
    state: LadderState,
    reason: str,
    rule: str,
    finding: Finding | None,
    case: _Case,
    command: int = 0,
) -> Verdict:
    facts = replace(state.facts, halted=reason)
    return _enter(
        replace(state, facts=facts), case, finding, action="halt", reason=reason, rule=rule,
        acted=case.mode != "observe", command_number=command,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ commands


def _answer(verdict: Verdict, before: LadderState, command: Proposal, case: _Case) -> Verdict:
    """Accept or refuse a command against the same budget, on top of the step's own verdict."""
    own = verdict.decision
    refusal = _refusal(verdict, command, case)
    if refusal:
        return _acked(verdict, command, "refused", refusal, case)
    # The step's skip is part of the command's entry: one ledger entry a step.
    state = replace(before, facts=replace(before.facts, num_skips=verdict.state.facts.num_skips))
    also = f"; the step itself: {own.reason}" if own else ""
    if command.action == "halt":
        done = _halt(state, f"commanded{also}", "command", None, case, command.number)
        return _acked(done, command, "done", "the run halts", case)
    target = commanded_checkpoint(command, case.checkpoints)
    assert target is not None, "refused above"
    facts = replace(state.facts, num_causes=state.facts.num_causes + 1)
    reason = f"commanded: back to {target.id}, before step {target.step}{also}"
    state = replace(state, facts=facts)
    done = _go_back(state, case, None, target, reason, "command", 0, command.number)
    return _acked(done, command, "done", f"back to {target.id}, before step {target.step}", case)


def _refusal(verdict: Verdict, command: Proposal, case: _Case) -> str:
    facts = verdict.state.facts
    own = verdict.decision
    if case.mode == "observe":
        return "mode is 'observe': nothing is acted on"
    if own is not None and own.action == "halt":
        return f"the run halts already: {own.reason}"
    if command.action == "halt":
        return ""
    if command.action != "rollback":
        return f"action {command.action!r} is not offered by this version"
    if case.mode != "heal":
        return f"mode is {case.mode!r}: a rollback needs mode 'heal' and checkpoints"
    if own is not None and own.action == "rollback":
        return f"a rollback was decided in this step: {own.reason}"
    if facts.num_causes >= case.config.max_causes:
        return f"the budget of {case.config.max_causes} rollback causes is spent"
    if commanded_checkpoint(command, case.checkpoints) is None:
        named = command.checkpoint_id or f"of step {command.argument:.0f}"
        return (
            f"there is no healthy checkpoint {named}"
            if (command.checkpoint_id or command.argument >= 0)
            else "there is no healthy checkpoint"
        )
    return ""


def commanded_checkpoint(
    command: Proposal, checkpoints: Sequence[CheckpointRef]
) -> CheckpointRef | None:
    """Return the healthy checkpoint a command names, by id, by step, or the newest."""
    healthy = sorted(
        (ref for ref in checkpoints if ref.state == "healthy"),
        key=lambda ref: (ref.step, ref.where == "memory", ref.id),
    )
    if command.checkpoint_id:
        healthy = [ref for ref in healthy if ref.id == command.checkpoint_id]
    elif command.argument >= 0:
        healthy = [ref for ref in healthy if ref.step == command.argument]
    return healthy[-1] if healthy else None


def _acked(verdict: Verdict, command: Proposal, status: Any, detail: str, case: _Case) -> Verdict:
    facts = replace(verdict.state.facts, last_command=command.number)
    ack = CommandAck(number=command.number, status=status, step=case.decided_at_step, detail=detail)
    return Verdict(replace(verdict.state, facts=facts), verdict.decision, ack)


# -------------------------------------------------------------------------------------- ledger


def budget_left(facts: Facts, config: LadderConfig) -> int:
    """Return how many rollbacks are left before one more must halt: the nearer of both budgets."""
    tries = config.max_tries - (facts.cause.tries if facts.cause else 0)
    return max(0, min(tries, config.max_causes - facts.num_causes))


def _enter(
    state: LadderState, case: _Case, finding: Finding | None, *, rule: str, **fields: Any
) -> Verdict:
    """Write the ledger entry: the decision with everything it rests on."""
    facts = replace(state.facts, ledger_seq=state.facts.ledger_seq + 1)
    record = case.record
    fields.setdefault("cost_steps", int(record.skipped))
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
        lr_factor=facts.lr_factor,
        budget_left=budget_left(facts, case.config),
        evidence=_evidence(record, state),
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
