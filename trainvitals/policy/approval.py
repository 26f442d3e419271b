"""Approval of rollbacks: request, veto, and the default without a response."""

from msgspec.structs import replace

from trainvitals.policy.actions import (
    PolicyResult,
    Rollback,
    evidence_of,
    halt_run,
    log_decision,
    log_skip,
    prepare_rollback,
    recurring_cause,
    roll_back_as_planned,
)
from trainvitals.policy.evidence import DecisionContext
from trainvitals.policy.state import DurablePolicyState, PolicyConfig, PolicyState, RollbackPlan

WAITS_UNTIL = "waits_until_step"
"""Key in the evidence of a rollback that waits for approval: step at which the default applies."""


def decide_rollback(
    state: PolicyState, context: DecisionContext, plan: RollbackPlan, rollback: Rollback
) -> PolicyResult:
    """Decide a rollback, or request an operator's approval if the settings require it.

    Args:
        state: memory of the policy before the budget is spent.
        context: all data about the step.
        plan: the rollback without its target.
        rollback: the rollback with its target and the spent budget.
    """
    cause, ask = rollback.facts.cause, context.config.ask
    cuts_lr = plan.jump is not None or (cause is not None and cause.tries > 1)
    if context.mode == "heal" and ("rollback" in ask or (cuts_lr and "lr_cut" in ask)):
        return _request_approval(state, context, plan, rollback)
    return roll_back_as_planned(state, context, plan, rollback)


def _request_approval(
    state: PolicyState, context: DecisionContext, plan: RollbackPlan, rollback: Rollback
) -> PolicyResult:
    """Request approval once; until then the run continues without the withheld updates."""
    record, config, pending = context.record, context.config, state.facts.waiting
    finding = plan.finding
    # The onset of finite evidence counts as treated from the request on: it is reported once.
    state = replace(state, facts=replace(state.facts, blamed=rollback.facts.blamed))
    if pending is not None:
        if pending.vetoed and state.nonfinite >= config.max_skips_in_a_row:
            text = f"{rollback.reason}; vetoed by an operator, and the run makes no progress"
            return halt_run(state, context, finding, reason=text, rule="stuck")
        if not record.skipped or record.overflow:
            return PolicyResult(state)
        status = "was vetoed" if pending.vetoed else f"{pending.number} waits for approval"
        text = f"{finding.reason}; the rollback {status}"
        return log_skip(state, context, finding, reason=text, rule=finding.detector)
    number, until = state.facts.ledger_seq + 1, state.facts.clock + config.ask_steps
    last = context.inputs.decided_at_step + config.ask_steps
    default = "it is done" if config.ask_default == "approve" else "it is vetoed"
    text = (
        f"{rollback.reason}; waits for approval (approve or veto {number}): without a reply by "
        f"step {last} {default}"
    )
    waiting = replace(plan, number=number, until=until)
    result = log_decision(
        replace(state, facts=replace(state.facts, waiting=waiting)),
        context,
        finding,
        action="rollback",
        reason=text,
        rule=plan.rule,
        acted=False,
        checkpoint_id=rollback.target.id,
        rollback_to_step=rollback.target.step,
        evidence={**evidence_of(record, state), WAITS_UNTIL: float(last)},
    )
    request = replace(
        finding, kind="approval_needed", level="advisory", detector="policy", reason=text,
        step=record.step, cause="approval_needed",
    )  # fmt: skip
    return result._replace(findings=(request,))


def expire_approval(state: PolicyState, config: PolicyConfig) -> tuple[PolicyState, bool]:
    """Return the state after ``ask_steps`` without a response, and if the default approves."""
    facts, waiting = state.facts, state.facts.waiting
    if waiting is None or facts.clock < waiting.until:
        return state, False
    if not waiting.vetoed and config.ask_default == "approve":
        return state, True
    over = None if waiting.vetoed else veto_rollback(facts, waiting, config)
    return replace(state, facts=replace(facts, waiting=over)), False


def veto_rollback(
    facts: DurablePolicyState, plan: RollbackPlan, config: PolicyConfig
) -> RollbackPlan:
    """Return a vetoed rollback: no approval is requested for ``ask_steps``."""
    return replace(plan, vetoed=True, until=facts.clock + config.ask_steps)


def roll_back_approved(
    state: PolicyState, context: DecisionContext, command_number: int = 0
) -> PolicyResult:
    """Roll back after approval, to a checkpoint that is healthy by now."""
    facts, plan = state.facts, state.facts.waiting
    assert plan is not None, "a rollback waits"
    cause = recurring_cause(facts, plan.kind, plan.onset_step)
    rollback, note = prepare_rollback(facts, context, plan, cause)
    if rollback is None:
        facts = replace(facts, waiting=None)
        text = f"{plan.reason}; approved, but {note}, so training continues"
        report = replace(plan.finding, level="advisory", reason=text, step=context.record.step)
        return PolicyResult(replace(state, facts=facts), findings=(report,))
    by = "approved" if command_number else f"no answer in {context.config.ask_steps} steps"
    reason = f"{plan.reason}; {by}; {note}"
    rollback = rollback._replace(reason=reason, command_number=command_number)
    return roll_back_as_planned(state, context, plan, rollback)
