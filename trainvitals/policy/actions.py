"""Actions of the escalation policy: effect on its memory, and log entry. Pure functions.

These are a skip, a rollback (its target, budget and skipped batches), and a halt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainvitals.policy.evidence import DecisionContext
from trainvitals.policy.state import (
    FOREVER,
    NEWEST,
    Cause,
    CheckpointRef,
    DurablePolicyState,
    PolicyConfig,
    PolicyState,
    Proposal,
    RollbackPlan,
    SkippedWindow,
    lr_factor_at,
)
from trainvitals.records import CommandAck, Decision, Finding, StateRead, StepRecord
from trainvitals.units import humanize_count

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
    "post_training": "a policy that is lost, with on_collapse='stop'",
    "budget": "the rollback budget is used up",
    "no_checkpoint": "no healthy checkpoint to roll back to",
    "stuck": "rollbacks did not help",
    "command": "a manual command",
    "rollback_failed": "the rollback failed",
}
"""By ``Decision.rule``; a rule that is missing here is from an older version and shown as is."""


def rule_words(rule: str) -> str:
    """Return the display text of a rule of the escalation policy; its name if there is none."""
    return RULES.get(rule, rule)


class PolicyResult(NamedTuple):
    """Result of ``decide``."""

    state: PolicyState
    decision: Decision | None = None
    ack: CommandAck | None = None
    findings: tuple[Finding, ...] = ()
    """Findings of the policy itself, in addition to those of the detectors."""
    readings: tuple[StateRead, ...] = ()
    """Results of the probe and of an evaluation."""


class Rollback(NamedTuple):
    """A rollback with its target. The budget for it is spent in ``facts``."""

    target: CheckpointRef
    facts: DurablePolicyState
    rule: str
    reason: str
    finding: Finding | None = None
    skip_batches: int = 0
    command_number: int = 0


# ------------------------------------------------------------------------------------- log entries


def log_decision(
    state: PolicyState, context: DecisionContext, finding: Finding | None, **fields: Any
) -> PolicyResult:
    """Create the entry of the decision log: the decision with all its evidence.

    Args:
        state: memory of the policy after the action.
        context: all data about the step.
        finding: finding that led to the action.
        fields: fields of ``Decision``; at least ``action``, ``reason``, ``rule`` and ``acted``.
    """
    facts = replace(state.facts, ledger_seq=state.facts.ledger_seq + 1)
    record = context.record
    fields.setdefault("cost_steps", int(record.skipped))
    fields.setdefault("evidence", evidence_of(record, state))
    fields.setdefault("lr_factor", lr_factor_at(facts, record.step))
    decision = Decision(
        ledger_seq=facts.ledger_seq,
        step=record.step,
        decided_at_step=context.inputs.decided_at_step,
        attempt=record.attempt,
        cause=(finding.cause or finding.kind) if finding else fields["rule"],
        rank=finding.rank if finding else -1,
        value=finding.value if finding else None,
        limit=finding.limit if finding else None,
        mode=context.mode,
        skipped=record.skipped and not record.overflow,
        budget_left=budget_left(facts, context.config),
        **fields,
    )
    return PolicyResult(replace(state, facts=facts), decision)


def state_without_entry(result: PolicyResult) -> PolicyState:
    """Return the policy's state as if the decision had no entry: at most one per step."""
    state = result.state
    if result.decision is None:
        return state
    return replace(state, facts=replace(state.facts, ledger_seq=state.facts.ledger_seq - 1))


def evidence_of(record: StepRecord, state: PolicyState) -> dict[str, float]:
    """Return the step's numbers that a decision of the policy shows as evidence."""
    evidence = {"in_a_row": float(max(len(state.row), state.nonfinite))}
    for name in ("loss", "loss_limit", "grad_norm", "grad_norm_limit", "learning_rate"):
        value = getattr(record, name)
        if value is not None:
            evidence[name] = float(value)
    return evidence


# ------------------------------------------------------------------------------------- actions


def log_skip(
    state: PolicyState, context: DecisionContext, finding: Finding | None, *, reason: str, rule: str
) -> PolicyResult:
    """Log as a decision of the policy that the device skipped a step before the host knew."""
    return log_decision(
        replace(state, facts=replace(state.facts, num_skips=state.facts.num_skips + 1)),
        context, finding, action="skip_step", reason=reason, rule=rule,
        acted=context.record.skipped,
    )  # fmt: skip


def halt_run(
    state: PolicyState,
    context: DecisionContext,
    finding: Finding | None,
    *,
    reason: str,
    rule: str,
    command_number: int = 0,
) -> PolicyResult:
    """Halt the run as an action of the policy, with the reason."""
    return log_decision(
        replace(state, facts=replace(state.facts, halted=reason)), context, finding, action="halt",
        reason=reason, rule=rule, acted=context.mode != "observe", command_number=command_number,
    )  # fmt: skip


def roll_back(state: PolicyState, context: DecisionContext, rollback: Rollback) -> PolicyResult:
    """Decide a rollback; outside of heal mode its entry reports what heal mode would do."""
    acted, record, target = context.mode == "heal", context.record, rollback.target
    facts, num = rollback.facts, rollback.facts.num_rollbacks + 1
    after = replace(
        state,
        facts=replace(facts, num_rollbacks=num, waiting=None if acted else facts.waiting),
        row=(),
        nonfinite=0,
        rolling_back=acted,
        first_step=state.first_step if acted else record.step,
    )
    return log_decision(
        after,
        context,
        rollback.finding,
        evidence=evidence_of(record, state),
        action="rollback",
        reason=rollback.reason,
        rule=rollback.rule,
        acted=acted,
        checkpoint_id=target.id,
        rollback_to_step=target.step,
        new_attempt=context.inputs.next_attempt if acted else 0,
        skip_batches=rollback.skip_batches,
        lr_factor=lr_factor_at(facts, target.step),
        cost_steps=context.inputs.decided_at_step + 1 - target.step if acted else 0,
        command_number=rollback.command_number,
    )


def roll_back_as_planned(
    state: PolicyState, context: DecisionContext, plan: RollbackPlan, rollback: Rollback
) -> PolicyResult:
    """Decide a rollback that trains every batch again, or skips those around the problem."""
    facts, cause = rollback.facts, rollback.facts.cause
    assert cause is not None, "the budget was spent on it"
    num_batches, text = 0, "" if context.inputs.moves_on else "; no batch caused it"
    if not (plan.replay_all_batches or context.inputs.moves_on):
        margin = _leave_out_margin(context.config, cause.tries)
        first = max(plan.onset_step - margin, rollback.target.step)
        num_batches = max(state.last_flagged, plan.onset_step) + margin + 1 - first
        windows = (*facts.skipped_windows, SkippedWindow(first, num_batches))
        facts = replace(facts, skipped_windows=windows[-MAX_SKIPPED_WINDOWS:])
        text = f"; skipping {humanize_count(num_batches, 'batch', 'batches')} from step {first}"
    if cause.tries > 1:
        text += f"; learning rate x {facts.lr_factor:.4g}"
    reason = rollback.reason + text
    rollback = rollback._replace(facts=facts, reason=reason, skip_batches=num_batches)
    return roll_back(state, context, rollback)


# ------------------------------------------------------------------------------------- budgets


MAX_SKIPPED_WINDOWS = 100
_SAME_CAUSE_STEPS = 10
"""Steps after the skipped batches in which the same problem has the same cause."""


def treated_cause_times(facts: DurablePolicyState, config: PolicyConfig) -> tuple[int, ...]:
    """Return when causes were treated by rollback within the window of the budget."""
    return tuple(time for time in facts.causes if time > facts.clock - config.budget_window)


def budget_left(facts: DurablePolicyState, config: PolicyConfig) -> int:
    """Return how many rollbacks the policy's budgets allow before the run must halt."""
    tries = config.max_tries - (facts.cause.tries if facts.cause else 0)
    return max(0, min(tries, config.max_causes - len(treated_cause_times(facts, config))))


def recurring_cause(facts: DurablePolicyState, kind: str, onset: int) -> Cause | None:
    """Return the cause that the budget counts if a problem is the same one; otherwise None."""
    cause = facts.cause
    if cause is None or cause.kind != kind:
        return None
    return cause if cause.target_step <= onset < cause.until_step else None


def prepare_rollback(
    facts: DurablePolicyState, context: DecisionContext, plan: RollbackPlan, cause: Cause | None
) -> tuple[Rollback | None, str]:
    """Choose the checkpoint for a rollback, and count it against the policy's budget.

    Args:
        facts: state that has the budgets; changed.
        context: all data about the step.
        plan: the problem to undo: its onset, its kind.
        cause: the cause of the rollback before, if this is the same problem again.

    Returns:
        The rollback, and the description of its target; None and the reason if there is no target.
    """
    config, jump = context.config, plan.jump
    onset = plan.onset_step if jump is None else min(plan.onset_step, jump.step)
    # A recurrence right after a checkpoint does not make that checkpoint part of the problem.
    onset = onset if cause is None else max(onset, cause.onset_step)
    below = None if cause is None else cause.target_step
    target, note = choose_checkpoint(context.inputs.checkpoints, onset, config.margin, below)
    if target is None:
        return None, note
    tries = 1 if cause is None else cause.tries + 1
    until = context.record.step + 1 + _leave_out_margin(config, tries) + _SAME_CAUSE_STEPS
    treated = Cause(
        kind=plan.kind,
        onset_step=onset,
        until_step=until if cause is None else max(until, cause.until_step),
        tries=tries,
        target_step=target.step,
    )
    causes = treated_cause_times(facts, config)
    causes = causes if cause is not None else (*causes, facts.clock)
    facts = replace(facts, cause=treated, causes=causes)
    if tries > 1:  # only if skipping batches did not help
        facts = replace(
            facts,
            lr_factor=config.lr_cut ** (tries - 1),
            lr_hold_until=treated.until_step,
            lr_full_from=treated.until_step + config.lr_rewarm_steps,
        )
    if plan.is_finite:
        facts = replace(facts, cooldown_until=facts.clock + config.finite_cooldown)
    if jump is not None:
        facts = replace(facts, lr_cap=jump.before, lr_cap_from=jump.step)
    return Rollback(target, facts, plan.rule, f"{plan.reason}; {note}", plan.finding), note


def _leave_out_margin(config: PolicyConfig, tries: int) -> int:
    """Return the number of batches that the policy's rollback leaves out on each side."""
    return min(config.leave_out_margin << min(tries - 1, 20), config.max_leave_out_margin)


# ------------------------------------------------------------------------------------- targets


def newest_healthy(checkpoints: Sequence[CheckpointRef]) -> CheckpointRef | None:
    """Return the latest healthy checkpoint to which the policy may roll back; or None."""
    usable = _list_healthy_checkpoints(checkpoints, FOREVER)
    return usable[-1] if usable else None


def choose_checkpoint(
    checkpoints: Sequence[CheckpointRef], onset: int, margin: int, below: int | None
) -> tuple[CheckpointRef | None, str]:
    """Return the latest healthy checkpoint ``margin`` steps before the onset, and a description.

    If none is that old, as soon after a start, it takes the oldest one before the onset. The second
    attempt (``below`` is the step of the last target) takes an older one; if there is none, it
    takes the oldest suitable checkpoint again.
    """
    latest = max(0, onset - margin)
    usable = _list_healthy_checkpoints(checkpoints, latest)
    usable = usable or _list_healthy_checkpoints(checkpoints, onset)[:1]
    if not usable:
        num = len(checkpoints)
        none_is = "the only checkpoint is not" if num == 1 else f"none of {num} checkpoints is"
        return None, f"{none_is} healthy and at or before the onset at step {onset}"
    older = [ref for ref in usable if below is None or ref.step < below]
    target = older[-1] if older else usable[0]
    text = f"rollback to step {target.step} ({target.id})"
    if below is not None:
        text += ", older than at the previous attempt" if older else "; no older one is left"
    return target, text


def commanded_checkpoint(
    command: Proposal, checkpoints: Sequence[CheckpointRef]
) -> CheckpointRef | None:
    """Return the healthy checkpoint that a command to roll back names: id, step or latest."""
    if command.checkpoint_id:
        return newest_healthy([ref for ref in checkpoints if ref.id == command.checkpoint_id])
    if command.argument == NEWEST:
        return newest_healthy(checkpoints)
    return newest_healthy([ref for ref in checkpoints if ref.step == command.argument])


def _list_healthy_checkpoints(
    checkpoints: Sequence[CheckpointRef], at_most: float
) -> list[CheckpointRef]:
    """Return the healthy ones, oldest first; ties by place, then id, never by the list's order."""
    return sorted(
        (ref for ref in checkpoints if ref.state == "healthy" and ref.step <= at_most),
        key=lambda ref: (ref.step, ref.where == "memory", ref.id),
    )
