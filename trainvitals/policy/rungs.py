"""Decisions of the escalation policy: effect on its memory, and log entry. Pure functions.

These are a skip, a rollback (its cause, count, target, and skipped batches), a halt, and the
response to a command: an operator's command is never refused because of a budget.

Certain evidence (non-finite parameters, an endless row of non-finite losses, an operator) leads to
an action at once, within budgets; without a budget the run halts. Finite evidence about the state
(the probe, an evaluation) can also come from a large optimizer spike: it has a cooldown, is spent
once per onset, and never halts a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from trainvitals.detect.outliers import LossKind
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import (
    FOREVER,
    NEWEST,
    TELL_AGAIN,
    AcceptedLevel,
    Cause,
    CheckpointRef,
    DurablePolicyState,
    LadderConfig,
    LadderState,
    Lasting,
    LrJump,
    Mode,
    Outlier,
    Proposal,
    SkippedWindow,
    Waiting,
    lr_factor_at,
)
from trainvitals.records import CommandAck, Decision, Finding, Profiled, StateRead, StepRecord

RULES: dict[str, str] = {
    "nonfinite": "a loss or gradient that is NaN or infinite",
    "outlier": "a finite outlier",
    "level_accepted": "many outliers in a row, accepted as a new level (older versions)",
    "recurring_level": "a recurring kind of outlier, accepted (older versions)",
    "operator_accepted": "accepted by a manual command",
    "nonfinite_params": "parameters that are NaN or infinite",
    "nonfinite_state": "optimizer state or buffers that are NaN or infinite",
    "nonfinite_streak": "too many NaN or infinite losses in a row",
    "replica_corrupted": "replicas that were not equal",
    "state_damaged": "the probe found the model damaged",
    "evaluation": "an evaluation found the model damaged",
    "lr_jump": "a learning-rate jump that damaged the model",
    "budget": "the rollback budget is used up",
    "no_checkpoint": "no healthy checkpoint to roll back to",
    "stuck": "rollbacks did not help",
    "command": "a manual command",
    "rollback_failed": "the rollback failed",
}
"""By ``Decision.rule``; a rule that is missing here is from an older version and shown as is."""


def rule_words(rule: str) -> str:
    """Return the display text of a rule; its name if there is none."""
    return RULES.get(rule, rule)


WAITS_UNTIL = "waits_until_step"
"""Key in the evidence of a rollback that waits for approval: step at which the default applies."""


class PolicyResult(NamedTuple):
    """Result of ``decide``."""

    state: LadderState
    decision: Decision | None = None
    ack: CommandAck | None = None
    findings: tuple[Finding, ...] = ()
    """Findings of the policy itself, in addition to those of the detectors."""
    readings: tuple[StateRead, ...] = ()
    """Results of the probe and of an evaluation."""


class LossTrend(NamedTuple):
    """Earlier level of the loss: the reference of the outlier rule."""

    level: float
    noise: float
    first: float


class DecisionContext(NamedTuple):
    """Circumstances of one call, passed on unchanged."""

    record: StepRecord
    decided_at_step: int
    checkpoints: Sequence[CheckpointRef]
    mode: Mode
    config: LadderConfig
    now_attempt_id: int
    loss_kind: LossKind = "minimize"
    probe: Callable[[Ask], ProbeResult] | None = None
    course: Callable[[], LossTrend] = lambda: LossTrend(0.0, 0.0, 0.0)
    lacks: Mapping[str, str] = MappingProxyType({})
    """Commands that this loop cannot carry out, with the reasons."""

    @property
    def heals(self) -> bool:
        """Whether a rollback is the next action: in heal mode, or in observe with checkpoints."""
        return self.mode == "heal" or (self.mode == "observe" and bool(self.checkpoints))


def without_entry(verdict: PolicyResult) -> LadderState:
    """Return the verdict's state as if its decision had no entry: at most one entry per step."""
    state = verdict.state
    if verdict.decision is None:
        return state
    return replace(state, facts=replace(state.facts, ledger_seq=state.facts.ledger_seq - 1))


def skip(
    state: LadderState, finding: Finding | None, reason: str, rule: str, case: DecisionContext
) -> PolicyResult:
    """Add an entry for a step that the device skipped before the host knew about it."""
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


def go_back(
    state: LadderState,
    case: DecisionContext,
    finding: Finding | None,
    target: CheckpointRef,
    *,
    facts: DurablePolicyState,
    reason: str,
    rule: str,
    skip_batches: int = 0,
    command_number: int = 0,
) -> PolicyResult:
    """Decide a rollback to ``target``; ``facts`` already contains the spent budget."""
    acted = case.mode == "heal"
    after = replace(
        state,
        facts=replace(
            facts,
            num_rollbacks=facts.num_rollbacks + 1,
            waiting=None if acted else facts.waiting,
        ),
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
    case: DecisionContext,
    command_number: int = 0,
) -> PolicyResult:
    """Halt the run, with the reason."""
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


def spent_causes(facts: DurablePolicyState, config: LadderConfig) -> tuple[int, ...]:
    """Return the times within the window at which causes were treated by rollback."""
    return tuple(time for time in facts.causes if time > facts.clock - config.budget_window)


def budget_left(facts: DurablePolicyState, config: LadderConfig) -> int:
    """Return the rollbacks left before the run must halt: the smaller of both budgets."""
    tries = config.max_tries - (facts.cause.tries if facts.cause else 0)
    return max(0, min(tries, config.max_causes - len(spent_causes(facts, config))))


def enter(
    state: LadderState, case: DecisionContext, finding: Finding | None, *, rule: str, **fields: Any
) -> PolicyResult:
    """Create the entry of the decision log: the decision with all its evidence."""
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
        skipped=record.skipped and not record.overflow,
        budget_left=budget_left(facts, case.config),
        **fields,
    )
    return PolicyResult(replace(state, facts=facts), decision)


def _evidence(record: StepRecord, state: LadderState) -> dict[str, float]:
    evidence = {"in_a_row": float(max(len(state.row), state.nonfinite))}
    for name in ("loss", "loss_limit", "grad_norm", "grad_norm_limit", "learning_rate"):
        value = getattr(record, name)
        if value is not None:
            evidence[name] = float(value)
    return evidence


# ---------------------------------------------------------------------------------------- targets


def newest_healthy(checkpoints: Sequence[CheckpointRef]) -> CheckpointRef | None:
    """Return the latest healthy checkpoint; None if there is none."""
    usable = _healthy(checkpoints, FOREVER)
    return usable[-1] if usable else None


def choose_checkpoint(
    checkpoints: Sequence[CheckpointRef], onset: int, margin: int, below: int | None
) -> tuple[CheckpointRef | None, str]:
    """Return the latest healthy checkpoint ``margin`` steps before the onset, and a description.

    The second attempt (``below`` is the step of the last target) takes an older one; if there is
    none, it takes the oldest suitable checkpoint again.
    """
    latest = max(0, onset - margin)
    usable = _healthy(checkpoints, latest)
    if not usable:
        return None, (
            f"none of {len(checkpoints)} checkpoints is healthy and at or before step {latest} "
            f"({margin} steps before the onset at {onset})"
        )
    older = [ref for ref in usable if below is None or ref.step < below]
    target = older[-1] if older else usable[0]
    text = f"rollback to step {target.step} ({target.id})"
    if below is not None:
        text += ", older than at the previous attempt" if older else "; no older one is left"
    return target, text


def commanded_checkpoint(
    command: Proposal, checkpoints: Sequence[CheckpointRef]
) -> CheckpointRef | None:
    """Return the healthy checkpoint of a command, by id, by step, or the latest."""
    if command.checkpoint_id:
        return newest_healthy([ref for ref in checkpoints if ref.id == command.checkpoint_id])
    if command.argument == NEWEST:
        return newest_healthy(checkpoints)
    return newest_healthy([ref for ref in checkpoints if ref.step == command.argument])


def _healthy(checkpoints: Sequence[CheckpointRef], at_most: float) -> list[CheckpointRef]:
    """Return the healthy ones, oldest first; ties by place, then id, never by the list's order."""
    return sorted(
        (ref for ref in checkpoints if ref.state == "healthy" and ref.step <= at_most),
        key=lambda ref: (ref.step, ref.where == "memory", ref.id),
    )


# -------------------------------------------------------------------------------------- rollbacks


MAX_SKIPPED_WINDOWS = 100
MAX_BLAMED = 100
_SAME_ONSET = 3
_GROUP_STEPS = 10
"""Steps without an outlier that end a group, for an operator who accepts one of them."""
_TOUCHES = 10
"""Steps after the skipped batches in which the same problem has the same cause."""


def for_certain(
    state: LadderState,
    case: DecisionContext,
    *,
    rule: str,
    kind: str,
    onset: int,
    reason: str,
    finding: Finding,
    plays_all: bool = False,
) -> PolicyResult:
    """Roll back on certain evidence, or halt if no budget or no checkpoint is left.

    Args:
        state: memory of the policy.
        case: the circumstances.
        rule: rule that decided.
        kind: kind of the cause; only overlapping problems of one kind have one cause.
        onset: first step of the problem.
        reason: explanation in plain text.
        finding: finding of the entry.
        plays_all: whether every batch is trained again because the cause is not the data.
    """
    config, facts = case.config, state.facts
    cause = _touched(facts, kind, onset)
    if cause is not None and cause.tries >= config.max_tries:
        reason = f"{reason}; {cause.tries} rollbacks (the limit) did not fix it"
        return halt(state, reason, "budget", finding, case)
    num_causes = len(spent_causes(facts, config))
    if cause is None and num_causes >= config.max_causes:
        reason = (
            f"{reason}; rollback budget used up: {num_causes} causes (the limit) were rolled back "
            f"within {config.budget_window} steps"
        )
        return halt(state, reason, "budget", finding, case)
    target, note, began = _target(case, cause, onset)
    if target is None:
        return halt(state, f"{reason}; {note}", "no_checkpoint", finding, case)
    facts = _spend(facts, case, cause, kind=kind, began=began, target=target)
    return decide_rollback(
        state, case, facts, target, rule=rule, onset=onset, reason=f"{reason}; {note}",
        finding=finding, plays_all=plays_all, why=reason,
    )  # fmt: skip


def for_hidden(
    state: LadderState, case: DecisionContext, *, reason: str, finding: Finding
) -> PolicyResult:
    """Roll back a non-finite state with a finite loss; otherwise report it and continue.

    It never halts: the losses are fine, and the model may write such buffers deliberately. If the
    state is non-finite again after every batch was trained again, a rollback does not fix it, and
    no further rollback is spent on it within the budget's window.
    """
    config, facts, note = case.config, state.facts, ""
    if not case.heals or case.mode == "observe":
        note = f"mode {case.mode!r} does not roll back"
    elif facts.clock < facts.uncured_until:
        note = "an earlier rollback did not fix it"
    elif _touched(facts, finding.kind, case.record.step) is not None:
        facts = replace(facts, uncured_until=facts.clock + config.budget_window)
        state, note = replace(state, facts=facts), "it is there again after a rollback"
    elif len(spent_causes(facts, config)) >= config.max_causes:
        note = f"the rollback budget is used up ({config.max_causes} causes)"
    return _train_again(state, case, "hidden", note, reason=reason, finding=finding)


def for_corrupted(
    state: LadderState, case: DecisionContext, *, reason: str, finding: Finding
) -> PolicyResult:
    """Roll back to the last equal state if replicas differ; halt if they differ again.

    One difference is a flipped bit, and training again fixes it. Two on one rank within the
    budget's window mean a faulty machine. Neither fixes a difference that recurs bit for bit: it is
    reported, and training continues.
    """
    config, facts, record = case.config, state.facts, case.record
    onset, rank, since = record.step, record.replica_rank, state.settings.since
    before = tuple(
        (when, who) for when, who in facts.corrupted if when > facts.clock - config.budget_window
    )
    note = ""
    if since >= 0 and onset - state.settings.told <= 2 * TELL_AGAIN:
        return PolicyResult(state)  # it follows from the reported difference in settings
    if since >= 0:
        note = f"ranks had other settings from step {since} on, which explains it"
    elif record.replayed_alike:
        note = (
            "the same difference recurred after a rollback, bit for bit: the cause is software, or "
            "a fault that repeats itself"
        )
    elif not case.heals or case.mode == "observe":
        note = f"mode {case.mode!r} does not roll back"
    elif any(-1 in (who, rank) or who == rank for _, who in before):
        when = facts.clock - before[-1][0]
        where = f"on rank {rank}" if rank >= 0 else "and two replicas cannot tell whose fault it is"
        text = f"{reason}; it is there again {when} steps after a rollback, {where}"
        text += ": a persistent fault"
        return halt(state, text, finding.kind, finding, case)
    elif len(spent_causes(facts, config)) >= config.max_causes:
        note = f"the rollback budget is used up ({config.max_causes} causes)"
    corrupted = (*before, (facts.clock, rank))
    return _train_again(
        state, case, "replicas", note, reason=reason, finding=finding, corrupted=corrupted
    )


def _train_again(
    state: LadderState,
    case: DecisionContext,
    lasting: Literal["hidden", "replicas"],
    note: str,
    *,
    reason: str,
    finding: Finding,
    **budget_update: Any,
) -> PolicyResult:
    """Roll back and train every batch again; with a note that says why not, report and continue.

    ``budget_update`` is added to the facts together with the rollback.
    """
    onset, target = case.record.step, None
    if not note:
        target, note, began = _target(case, None, onset)
    if target is None:
        report: Lasting | None = getattr(state, lasting).report(onset)
        if report is None:
            return PolicyResult(state)
        saves = case.heals or lasting == "replicas"
        text = f"{reason}; {note}, so training continues"
        text += "; no snapshot or checkpoint is made while it is so" if saves else ""
        finding = replace(finding, reason=text, onset_step=report.since)
        return PolicyResult(replace(state, **{lasting: report}), findings=(finding,))
    facts = _spend(state.facts, case, None, kind=finding.kind, began=began, target=target)
    return decide_rollback(
        state, case, replace(facts, **budget_update), target, rule=finding.kind, onset=onset,
        reason=f"{reason}; {note}", finding=finding, plays_all=True, why=reason,
    )  # fmt: skip


def for_finite(
    state: LadderState,
    case: DecisionContext,
    *,
    rule: str,
    onset: int,
    reason: str,
    finding: Finding,
) -> PolicyResult:
    """Roll back on finite evidence about the state; if not allowed, report it and continue.

    A jump of the learning rate immediately before the onset counts as the cause: then every batch
    is trained again with the earlier rate held.
    """
    config, facts = case.config, state.facts
    num_blamed = sum(abs(onset - blamed) <= _SAME_ONSET for blamed in facts.blamed)
    is_again = num_blamed == 1 and _touched(facts, "state", onset) is not None
    if num_blamed and not is_again:
        return PolicyResult(state)  # already acted on, or reported
    blamed = replace(facts, blamed=(*facts.blamed, onset)[-MAX_BLAMED:])
    blamed_state = replace(state, facts=blamed)
    if is_again:
        again = (
            f"{finding.reason}, as before the rollback: the data is at fault; training continues"
        )
        return PolicyResult(blamed_state, findings=(replace(finding, reason=again),))
    if not case.heals:
        repair = (
            f"{finding.reason}; mode {case.mode!r} does not roll back: stop the job and restart it "
            f"from a checkpoint before step {max(0, onset - config.margin)} (`vitals checkpoints "
            "list` shows them); mode 'heal' does this by itself"
        )
        return PolicyResult(blamed_state, findings=(replace(finding, reason=repair),))
    if facts.clock < facts.cooldown_until:
        text = f"{finding.reason}; the previous such rollback was under {config.finite_cooldown}"
        finding = replace(finding, reason=f"{text} steps ago, so training continues")
        return PolicyResult(blamed_state, findings=(finding,))
    jump = state.lr_jump if is_near_jump(state, onset, case) else None
    kind = "lr_jump" if jump is not None else "state"
    cause = _touched(facts, kind, onset)
    target, note, began = _target(case, cause, onset if jump is None else min(onset, jump.step))
    if target is None:
        finding = replace(finding, reason=f"{finding.reason}; {note}, so training continues")
        return PolicyResult(blamed_state, findings=(finding,))
    facts = replace(
        _spend(blamed, case, cause, kind=kind, began=began, target=target),
        cooldown_until=facts.clock + config.finite_cooldown,
    )
    why, reason = reason, f"{reason}; {note}"
    if jump is not None:
        rule = "lr_jump"
        raised_rate_note = (
            f"; the learning rate rose from {jump.before:.4g} to {jump.after:.4g} at step "
            f"{jump.step}; {jump.before:.4g} is held"
        )
        why, reason = f"{why}{raised_rate_note}", f"{reason}{raised_rate_note}"
        facts = replace(facts, lr_cap=jump.before, lr_cap_from=jump.step)
        state = replace(state, lr_jump=None)
    return decide_rollback(
        state, case, facts, target, rule=rule, onset=onset, reason=reason, finding=finding,
        plays_all=jump is not None, why=why, is_finite=True, jump=jump,
    )  # fmt: skip


def is_near_jump(state: LadderState, onset: int, case: DecisionContext) -> bool:
    """Return whether a jump of the learning rate may have caused a problem with this onset."""
    jump = state.lr_jump
    # The onset of a level is accurate to eight steps.
    return jump is not None and -8 <= onset - jump.step <= case.config.lr_jump_steps


def _touched(facts: DurablePolicyState, kind: str, onset: int) -> Cause | None:
    """Return the current cause if this is the same problem."""
    cause = facts.cause
    if cause is None or cause.kind != kind:
        return None
    return cause if cause.target_step <= onset < cause.until_step else None


def _target(
    case: DecisionContext, cause: Cause | None, onset: int
) -> tuple[CheckpointRef | None, str, int]:
    """Return the rollback target, its description, and the first step of the problem.

    A recurrence immediately after a checkpoint does not make that checkpoint part of the problem.
    """
    began = onset if cause is None else max(onset, cause.onset_step)
    below = None if cause is None else cause.target_step
    return *choose_checkpoint(case.checkpoints, began, case.config.margin, below), began


def _spend(
    facts: DurablePolicyState,
    case: DecisionContext,
    cause: Cause | None,
    *,
    kind: str,
    began: int,
    target: CheckpointRef,
) -> DurablePolicyState:
    """Return the facts with one more rollback spent.

    The rate is cut from the second rollback of a cause on: only if skipping batches did not help.
    """
    config = case.config
    margin = _leave_out_margin(case, 1 if cause is None else cause.tries + 1)
    until = case.record.step + 1 + margin + _TOUCHES
    treated = Cause(
        kind=kind,
        onset_step=began,
        until_step=until if cause is None else max(until, cause.until_step),
        tries=1 if cause is None else cause.tries + 1,
        target_step=target.step,
    )
    causes = spent_causes(facts, config)
    facts = replace(
        facts, cause=treated, causes=causes if cause is not None else (*causes, facts.clock)
    )
    if treated.tries < 2:
        return facts
    return replace(
        facts,
        lr_factor=config.lr_cut ** (treated.tries - 1),
        lr_hold_until=treated.until_step,
        lr_full_from=treated.until_step + config.lr_rewarm_steps,
    )


def _leave_out_margin(case: DecisionContext, tries: int) -> int:
    config = case.config
    return min(config.leave_out_margin << min(tries - 1, 20), config.max_leave_out_margin)


def decide_rollback(
    state: LadderState,
    case: DecisionContext,
    facts: DurablePolicyState,
    target: CheckpointRef,
    *,
    rule: str,
    onset: int,
    reason: str,
    finding: Finding,
    plays_all: bool,
    why: str,
    is_finite: bool = False,
    jump: LrJump | None = None,
    command_number: int = 0,
    is_answered: bool = False,
) -> PolicyResult:
    """Decide the rollback with its skipped batches, or request approval for it.

    Args:
        state: memory of the policy before anything is spent.
        case: the circumstances.
        facts: memory with the spent budget.
        target: target of the rollback.
        rule: rule that decided.
        onset: first step of the problem.
        reason: explanation in plain text, with the target.
        finding: finding of the entry.
        plays_all: whether every batch is trained again.
        why: the reason without the target, which is chosen again after an approval.
        is_finite: whether it is based on finite evidence.
        jump: learning-rate jump that caused the problem.
        command_number: number of the approving command.
        is_answered: whether an operator approved, or the default applies.
    """
    cause = facts.cause
    assert cause is not None, "it was spent"
    if not is_answered and _must_ask(case, cause, jump):
        waiting = Waiting(
            number=state.facts.ledger_seq + 1,
            until=state.facts.clock + case.config.ask_steps,
            rule=rule,
            kind=cause.kind,
            onset_step=onset,
            reason=why,
            finding=finding,
            plays_all=plays_all,
            is_finite=is_finite,
            jump=jump,
        )
        return _wait(state, case, facts, waiting, target, reason)
    num_batches = 0
    if plays_all:
        reason += "; all batches are trained again"
    else:
        margin = _leave_out_margin(case, cause.tries)
        first = max(onset - margin, target.step)
        num_batches = max(state.last_flagged, onset) + margin + 1 - first
        window = SkippedWindow(first, num_batches)
        facts = replace(
            facts, skipped_windows=(*facts.skipped_windows, window)[-MAX_SKIPPED_WINDOWS:]
        )
        reason += f"; skipping {num_batches} batches from step {first}"
    if cause.tries > 1:
        reason += f"; learning rate x {facts.lr_factor:.4g}"
    return go_back(
        state, case, finding, target, facts=facts, reason=reason, rule=rule,
        skip_batches=num_batches, command_number=command_number,
    )  # fmt: skip


# -------------------------------------------------------------------------------------- approvals


def _must_ask(case: DecisionContext, cause: Cause, jump: LrJump | None) -> bool:
    ask = case.config.ask
    cuts = cause.tries > 1 or jump is not None
    return case.mode == "heal" and ("rollback" in ask or (cuts and "lr_cut" in ask))


def _wait(
    state: LadderState,
    case: DecisionContext,
    facts: DurablePolicyState,
    waiting: Waiting,
    target: CheckpointRef,
    reason: str,
) -> PolicyResult:
    """Request approval once; until then the run continues without the withheld updates."""
    record, config = case.record, case.config
    # The onset of finite evidence counts as treated from the request on: it is reported once.
    state = replace(state, facts=replace(state.facts, blamed=facts.blamed))
    pending_request = state.facts.waiting
    if pending_request is not None:
        if pending_request.vetoed and state.nonfinite >= config.max_skips_in_a_row:
            text = f"{reason}; vetoed by an operator, and the run makes no progress"
            return halt(state, text, "stuck", waiting.finding, case)
        if not record.skipped or record.overflow:
            return PolicyResult(state)
        status = (
            "was vetoed"
            if pending_request.vetoed
            else f"{pending_request.number} waits for approval"
        )
        return skip(
            state, waiting.finding, f"{waiting.finding.reason}; the rollback {status}",
            waiting.finding.detector, case,
        )  # fmt: skip
    last = case.decided_at_step + config.ask_steps
    else_done = "it is done" if config.ask_default == "approve" else "it is vetoed"
    text = (
        f"{reason}; waits for approval (approve or veto {waiting.number}): without a reply by step "
        f"{last} {else_done}"
    )
    verdict = enter(
        replace(state, facts=replace(state.facts, waiting=waiting)),
        case,
        waiting.finding,
        action="rollback",
        reason=text,
        rule=waiting.rule,
        acted=False,
        checkpoint_id=target.id,
        rollback_to_step=target.step,
        evidence={**_evidence(record, state), WAITS_UNTIL: float(last)},
    )
    request = replace(
        waiting.finding,
        kind="approval_needed",
        level="advisory",
        detector="policy",
        reason=text,
        step=record.step,
        cause="approval_needed",
    )
    return verdict._replace(findings=(request,))


def on_timeout(state: LadderState, config: LadderConfig) -> tuple[LadderState, bool]:
    """Return the state after ``ask_steps`` without a response, and whether the default approves."""
    facts, waiting = state.facts, state.facts.waiting
    if waiting is None or facts.clock < waiting.until:
        return state, False
    if not waiting.vetoed and config.ask_default == "approve":
        return state, True
    over = None if waiting.vetoed else _vetoed(facts, waiting, config)
    return replace(state, facts=replace(facts, waiting=over)), False


def _vetoed(facts: DurablePolicyState, waiting: Waiting, config: LadderConfig) -> Waiting:
    return replace(waiting, vetoed=True, until=facts.clock + config.ask_steps)


def on_approved(state: LadderState, case: DecisionContext, command_number: int = 0) -> PolicyResult:
    """Roll back as requested, to a checkpoint that is healthy by now."""
    facts, waiting = state.facts, state.facts.waiting
    assert waiting is not None, "something waits"
    jump = waiting.jump
    cause = _touched(facts, waiting.kind, waiting.onset_step)
    onset = waiting.onset_step if jump is None else min(waiting.onset_step, jump.step)
    target, note, began = _target(case, cause, onset)
    if target is None:
        facts = replace(facts, waiting=None)
        text = f"{waiting.reason}; approved, but {note}, so training continues"
        report = replace(waiting.finding, level="advisory", reason=text, step=case.record.step)
        return PolicyResult(replace(state, facts=facts), findings=(report,))
    facts = _spend(facts, case, cause, kind=waiting.kind, began=began, target=target)
    if waiting.is_finite:
        facts = replace(facts, cooldown_until=facts.clock + case.config.finite_cooldown)
    if jump is not None:
        facts = replace(facts, lr_cap=jump.before, lr_cap_from=jump.step)
    by = "approved" if command_number else f"no answer in {case.config.ask_steps} steps"
    return decide_rollback(
        state, case, facts, target, rule=waiting.rule, onset=waiting.onset_step,
        reason=f"{waiting.reason}; {by}; {note}", finding=waiting.finding,
        plays_all=waiting.plays_all, why=waiting.reason, command_number=command_number,
        is_answered=True,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- commands


def answer(
    verdict: PolicyResult, before: LadderState, command: Proposal, case: DecisionContext
) -> PolicyResult:
    """Carry out a command or refuse it, on top of the step's own verdict."""
    decision = verdict.decision
    refusal = _refusal(verdict, command, case)
    if refusal:
        return _acked(verdict, command, "refused", refusal, case)
    if command.action == "accept":
        return _accept(verdict, command, case)
    if command.action == "approve":
        number = verdict.state.facts.num_skips
        state = replace(before, facts=replace(before.facts, num_skips=number))
        done = on_approved(state, case, command.number)
        status: Literal["done", "refused"] = "done" if done.decision is not None else "refused"
        reason = done.decision.reason if done.decision else done.findings[0].reason
        return _acked(done, command, status, reason, case)
    if command.action not in ("halt", "rollback"):
        return _set(verdict, command, case)
    # The step's skip is part of the command's entry: at most one log entry per step.
    state = replace(before, facts=replace(before.facts, num_skips=verdict.state.facts.num_skips))
    also = f"; this step: {decision.reason}" if decision else ""
    if command.action == "halt":
        done = halt(state, f"manual command{also}", "command", None, case, command.number)
        return _acked(done, command, "done", "the run was halted", case)
    target = commanded_checkpoint(command, case.checkpoints)
    assert target is not None, "refused above"
    reason = f"rollback to step {target.step} ({target.id})"
    done = go_back(
        state,
        case,
        None,
        target,
        facts=state.facts,
        reason=f"manual command: {reason}{also}",
        rule="command",
        command_number=command.number,
    )
    return _acked(done, command, "done", reason, case)


def _set(verdict: PolicyResult, command: Proposal, case: DecisionContext) -> PolicyResult:
    """Apply a command about later steps, or about actions outside the step; keep the verdict."""
    state, argument, first = verdict.state, command.argument, case.decided_at_step + 1
    facts, detail = state.facts, ""
    if command.action == "skip":
        last = first + int(argument) - 1
        facts = replace(facts, skip_attempt=facts.attempt, skip_first=first, skip_last=last)
        detail = f"the updates of steps {first} to {last} are skipped"
    elif command.action == "lr":
        facts = replace(facts, lr_held=argument, lr_scale=1.0)
        detail = f"the learning rate is {argument:.4g} from step {first} on"
    elif command.action == "lr_factor":
        facts = replace(facts, lr_held=0.0, lr_scale=argument)
        detail = f"the schedule's learning rate times {argument:.4g} from step {first} on"
    elif command.action == "checkpoint":
        detail = "the newest healthy snapshot is written to disk as soon as none is being written"
    elif command.action == "pause":
        detail = f"all ranks wait before step {first} until `vitals command RUN resume`"
    elif command.action == "resume":
        detail = f"training continues with step {first}"
    elif command.action == "profile":
        profiled = Profiled.of(argument)
        whose = (
            "the slowest rank and a typical one" if profiled.rank < 0 else f"rank {profiled.rank}"
        )
        detail = f"steps {first} to {first + profiled.num_steps - 1} of {whose} are profiled; the "
        detail += "traces come into the run's folder, below profiles"
    elif command.action == "veto" and facts.waiting is not None:
        detail = (
            f"the rollback {facts.waiting.number} is not made; approval is requested again after "
        )
        detail += f"at least {case.config.ask_steps} steps"
        facts = replace(facts, waiting=_vetoed(facts, facts.waiting, case.config))
    if command.action in ("lr", "lr_factor"):  # the command announces the jump: it is intended
        until = max(state.announced_until, first + case.config.lr_jump_steps)
        state = replace(state, announced_until=until, lr_jump=None)
    return _acked(
        verdict._replace(state=replace(state, facts=facts)), command, "done", detail, case
    )


def _accept(verdict: PolicyResult, command: Proposal, case: DecisionContext) -> PolicyResult:
    """Apply an operator's statement that a step, or its level, was healthy.

    Outliers there define a level from now on, and their onsets no longer count against the state.
    If no outlier is remembered, the statement is about the level: its detectors start again.
    """
    step, state = int(command.argument), verdict.state
    outliers = outliers_around(state, step)
    if not outliers:
        detail = f"the level at step {step} counts as normal; it has no recent outlier"
        text = f"manual command: {detail}"
    else:
        first, last = outliers[0].step, outliers[-1].step
        detail = f"{len(outliers)} outliers, steps {first} to {last}, count as normal"
        text = f"manual command: {detail}; values up to theirs are no longer withheld"
    decision = verdict.decision
    if decision is not None:
        text += f"; this step: {decision.reason}"
        if decision.action == "rollback":
            return _acked(
                verdict, command, "refused", f"rolled back in this step: {decision.reason}", case
            )
    state = without_entry(verdict)
    facts = state.facts
    blamed = (*facts.blamed, *(outlier.step for outlier in outliers))[-MAX_BLAMED:]
    accepted = _with_level(facts.accepted, outliers, case.record.turn)
    state = replace(
        state,
        facts=replace(facts, blamed=blamed, accepted=accepted),
        row=(),
        accepted_at=case.record.step,
    )
    done = enter(
        state, case, None, action="accept_level", reason=text, rule="operator_accepted",
        acted=case.mode != "observe", command_number=command.number,
        # A replay needs the step that the operator accepted.
        evidence={**_evidence(case.record, state), "accepted_step": float(step)},
    )  # fmt: skip
    done = done._replace(findings=verdict.findings, readings=verdict.readings)
    return _acked(done, command, "done", detail, case)


def _with_level(
    levels: tuple[AcceptedLevel, ...], outliers: Sequence[Outlier], turn: int
) -> tuple[AcceptedLevel, ...]:
    """Return the accepted levels, raised to the largest values of these outliers."""
    if not outliers:
        return levels
    before = [level for level in levels if level.turn == turn]
    level = AcceptedLevel(
        max([o.loss for o in outliers if o.loss is not None] + [b.loss for b in before] + [0.0]),
        max(
            [o.grad_norm for o in outliers if o.grad_norm is not None]
            + [b.grad_norm for b in before]
            + [0.0]
        ),
        turn,
    )
    return (*(level for level in levels if level.turn != turn), level)


def outliers_around(state: LadderState, step: int) -> tuple[Outlier, ...]:
    """Return the reported steps around a step that are close to each other."""
    groups: list[list[Outlier]] = []
    for outlier in state.recent:
        if not groups or outlier.step - groups[-1][-1].step > _GROUP_STEPS:
            groups.append([])
        groups[-1].append(outlier)
    for group in reversed(groups):
        if group[0].step - _GROUP_STEPS <= step <= group[-1].step + _GROUP_STEPS:
            return tuple(group)
    return ()


def _refusal(verdict: PolicyResult, command: Proposal, case: DecisionContext) -> str:
    decision = verdict.decision
    if case.mode == "observe":
        return "mode is 'observe': Vitals takes no action; restart in guard or heal"
    if decision is not None and decision.action == "halt":
        return f"the run is already halting: {decision.reason}"
    if command.action == "halt":
        return ""
    if command.action == "accept":
        return "" if command.argument >= 0 else f"there is no step {command.argument:.0f}"
    if decision is not None and decision.action == "rollback":
        return f"this step already leads to a rollback: {decision.reason}"
    if command.action in case.lacks:
        return case.lacks[command.action]
    if command.action == "profile":
        num_steps = Profiled.of(command.argument).num_steps
        return "" if num_steps >= 1 else "it takes a number of steps above 0"
    if command.action == "skip":
        return "" if 1 <= command.argument <= FOREVER else "it takes a number of steps above 0"
    if command.action in ("approve", "veto"):
        return _not_asked(verdict.state.facts.waiting, command)
    if command.action in ("lr", "lr_factor"):
        return "" if 0 < command.argument < FOREVER else "it takes a number above 0"
    if command.action != "rollback":
        return ""
    if case.mode != "heal":
        return f"mode is {case.mode!r}: a rollback needs mode 'heal' and checkpoints"
    if commanded_checkpoint(command, case.checkpoints) is None:
        named = command.checkpoint_id
        if not named and command.argument != NEWEST:
            named = f"of step {command.argument:.0f}"
        return f"there is no healthy checkpoint {named}".rstrip()
    return ""


def _not_asked(waiting: Waiting | None, command: Proposal) -> str:
    if waiting is None or waiting.vetoed:
        return "no decision waits for approval"
    if command.argument in (0.0, NEWEST, float(waiting.number)):
        return ""
    return f"decision {command.argument:.0f} does not wait for approval; {waiting.number} does"


def _acked(
    verdict: PolicyResult,
    command: Proposal,
    status: Literal["done", "refused"],
    detail: str,
    case: DecisionContext,
) -> PolicyResult:
    facts = replace(verdict.state.facts, last_command=command.number)
    ack = CommandAck(number=command.number, status=status, step=case.decided_at_step, detail=detail)
    return verdict._replace(state=replace(verdict.state, facts=facts), ack=ack)
