"""Commands of operators: executed or refused, and never refused because of a budget."""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from trainvitals.policy.actions import (
    PolicyResult,
    Rollback,
    commanded_checkpoint,
    evidence_of,
    halt_run,
    log_decision,
    roll_back,
    state_without_entry,
)
from trainvitals.policy.approval import roll_back_approved, veto_rollback
from trainvitals.policy.evidence import DecisionContext
from trainvitals.policy.state import (
    FOREVER,
    MAX_BLAMED,
    NEWEST,
    AcceptedLevel,
    Outlier,
    PolicyState,
    Proposal,
    RollbackPlan,
    outliers_around,
)
from trainvitals.records import CommandAck, ProfileArgument


def execute_command(
    result: PolicyResult, before: PolicyState, command: Proposal, context: DecisionContext
) -> PolicyResult:
    """Carry out an operator's command or refuse it, after the policy's verdict on the step."""
    decision = result.decision
    refusal = _refusal_reason(result, command, context)
    if refusal:
        return _acknowledge_command(result, command, "refused", refusal, context)
    if command.action == "accept":
        return _accept_level(result, command, context)
    if command.action not in ("approve", "halt", "rollback"):
        return _apply_command(result, command, context)
    # The step's skip is part of the command's entry: at most one log entry per step.
    state = replace(before, facts=replace(before.facts, num_skips=result.state.facts.num_skips))
    if command.action == "approve":
        done = roll_back_approved(state, context, command.number)
        status: Literal["done", "refused"] = "done" if done.decision is not None else "refused"
        reason = done.decision.reason if done.decision else done.findings[0].reason
        return _acknowledge_command(done, command, status, reason, context)
    suffix = f"; this step: {decision.reason}" if decision else ""
    if command.action == "halt":
        done = halt_run(
            state, context, None, reason=f"manual command{suffix}", rule="command",
            command_number=command.number,
        )  # fmt: skip
        return _acknowledge_command(done, command, "done", "the run was halted", context)
    target = commanded_checkpoint(command, context.inputs.checkpoints)
    assert target is not None, "refused above"
    reason = f"rollback to step {target.step} ({target.id})"
    rollback = Rollback(
        target, state.facts, "command", f"manual command: {reason}{suffix}",
        command_number=command.number,
    )  # fmt: skip
    done = roll_back(state, context, rollback)
    return _acknowledge_command(done, command, "done", reason, context)


def _apply_command(
    result: PolicyResult, command: Proposal, context: DecisionContext
) -> PolicyResult:
    """Apply an operator's command about later steps or other actions; keep the policy's verdict."""
    state, argument, first = result.state, command.argument, context.inputs.decided_at_step + 1
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
        profiled = ProfileArgument.from_argument(argument)
        last = first + profiled.num_steps - 1
        ranks = (
            f"rank {profiled.rank}" if profiled.rank >= 0 else "the slowest rank and a typical one"
        )
        detail = (
            f"steps {first} to {last} of {ranks} are profiled; the traces come into the run's "
            "folder, below profiles"
        )
    elif command.action == "veto" and facts.waiting is not None:
        detail = (
            f"the rollback {facts.waiting.number} is not made; approval is requested again after "
            f"at least {context.config.ask_steps} steps"
        )
        facts = replace(facts, waiting=veto_rollback(facts, facts.waiting, context.config))
    if command.action in ("lr", "lr_factor"):  # the command announces the jump: it is intended
        until = max(state.announced_until, first + context.config.lr_jump_steps)
        state = replace(state, announced_until=until, lr_jump=None, suspected=-1)
    result = result._replace(state=replace(state, facts=facts))
    return _acknowledge_command(result, command, "done", detail, context)


def _accept_level(
    result: PolicyResult, command: Proposal, context: DecisionContext
) -> PolicyResult:
    """Apply an operator's command that accepts a step, or its level, as healthy.

    Outliers there define a level from now on, and their onsets no longer count against the state.
    If no outlier is remembered, the statement is about the level: its detectors start again.
    """
    step, state = int(command.argument), result.state
    outliers = outliers_around(state, step)
    if not outliers:
        detail = f"the level at step {step} counts as normal; it has no recent outlier"
        text = f"manual command: {detail}"
    else:
        first, last = outliers[0].step, outliers[-1].step
        detail = f"{len(outliers)} outliers, steps {first} to {last}, count as normal"
        text = f"manual command: {detail}; values up to theirs are no longer withheld"
    decision = result.decision
    if decision is not None:
        text += f"; this step: {decision.reason}"
        if decision.action == "rollback":
            return _acknowledge_command(
                result, command, "refused", f"rolled back in this step: {decision.reason}", context
            )
    state = state_without_entry(result)
    facts = state.facts
    blamed = (*facts.blamed, *(outlier.step for outlier in outliers))[-MAX_BLAMED:]
    accepted = _raise_accepted_levels(facts.accepted, outliers, context.record.turn)
    state = replace(
        state,
        facts=replace(facts, blamed=blamed, accepted=accepted),
        row=(),
        accepted_at=context.record.step,
        suspected=-1,
    )
    done = log_decision(
        state, context, None, action="accept_level", reason=text, rule="operator_accepted",
        acted=context.mode != "observe", command_number=command.number,
        # A replay needs the step that the operator accepted.
        evidence={**evidence_of(context.record, state), "accepted_step": float(step)},
    )  # fmt: skip
    done = done._replace(findings=result.findings, readings=result.readings)
    return _acknowledge_command(done, command, "done", detail, context)


def _raise_accepted_levels(
    levels: tuple[AcceptedLevel, ...], outliers: Sequence[Outlier], turn: int
) -> tuple[AcceptedLevel, ...]:
    """Raise the levels that an operator's command accepted to these outliers' values."""
    if not outliers:
        return levels
    before = [level for level in levels if level.turn == turn]
    losses = [o.loss for o in outliers if o.loss is not None] + [b.loss for b in before]
    norms = [o.grad_norm for o in outliers if o.grad_norm is not None]
    norms += [b.grad_norm for b in before]
    level = AcceptedLevel(max([*losses, 0.0]), max([*norms, 0.0]), turn)
    return (*(level for level in levels if level.turn != turn), level)


def _refusal_reason(result: PolicyResult, command: Proposal, context: DecisionContext) -> str:
    """Return why the policy refuses a manual command; "" if it accepts."""
    decision = result.decision
    if context.mode == "observe":
        return "mode is 'observe': Vitals takes no action; restart in guard or heal"
    if decision is not None and decision.action == "halt":
        return f"the run is already halting: {decision.reason}"
    if command.action == "halt":
        return ""
    if command.action == "accept":
        return "" if command.argument >= 0 else f"there is no step {command.argument:.0f}"
    if decision is not None and decision.action == "rollback":
        return f"this step already leads to a rollback: {decision.reason}"
    if command.action in context.inputs.unavailable_commands:
        return context.inputs.unavailable_commands[command.action]
    if command.action == "profile":
        num_steps = ProfileArgument.from_argument(command.argument).num_steps
        return "" if num_steps >= 1 else "it takes a number of steps above 0"
    if command.action == "skip":
        return "" if 1 <= command.argument <= FOREVER else "it takes a number of steps above 0"
    if command.action in ("approve", "veto"):
        return _approval_refusal_reason(result.state.facts.waiting, command)
    if command.action in ("lr", "lr_factor"):
        return "" if 0 < command.argument < FOREVER else "it takes a number above 0"
    if command.action != "rollback":
        return ""
    if context.mode != "heal":
        return f"mode is {context.mode!r}: a rollback needs mode 'heal' and checkpoints"
    if commanded_checkpoint(command, context.inputs.checkpoints) is None:
        name = command.checkpoint_id
        if not name and command.argument != NEWEST:
            name = f"of step {command.argument:.0f}"
        return f"there is no healthy checkpoint {name}".rstrip()
    return ""


def _approval_refusal_reason(waiting: RollbackPlan | None, command: Proposal) -> str:
    """Return why an approval or veto by command is refused; "" if it is accepted."""
    if waiting is None or waiting.vetoed:
        return "no decision waits for approval"
    if command.argument in (0.0, NEWEST, float(waiting.number)):
        return ""
    return f"decision {command.argument:.0f} does not wait for approval; {waiting.number} does"


def _acknowledge_command(
    result: PolicyResult,
    command: Proposal,
    status: Literal["done", "refused"],
    detail: str,
    context: DecisionContext,
) -> PolicyResult:
    """Return the policy's result with its acknowledgement of an operator's command."""
    facts = replace(result.state.facts, last_command=command.number)
    ack = CommandAck(
        number=command.number, status=status, step=context.inputs.decided_at_step, detail=detail
    )
    return result._replace(state=replace(result.state, facts=facts), ack=ack)
