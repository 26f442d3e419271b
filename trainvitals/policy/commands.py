"""What becomes of a command: accepted or refused against the same budget as everything else."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from trainvitals.policy.rungs import Case, Verdict, go_back, halt
from trainvitals.policy.state import NEWEST, LadderState, Proposal
from trainvitals.policy.targets import commanded_checkpoint
from trainvitals.records import CommandAck


def answer(verdict: Verdict, before: LadderState, command: Proposal, case: Case) -> Verdict:
    """Accept or refuse a command against the same budget, on top of the step's own verdict."""
    own = verdict.decision
    refusal = _refusal(verdict, command, case)
    if refusal:
        return _acked(verdict, command, "refused", refusal, case)
    # The step's skip is part of the command's entry: one ledger entry a step.
    state = replace(before, facts=replace(before.facts, num_skips=verdict.state.facts.num_skips))
    also = f"; the step itself: {own.reason}" if own else ""
    if command.action == "halt":
        done = halt(state, f"commanded{also}", "command", None, case, command.number)
        return _acked(done, command, "done", "the run halts", case)
    target = commanded_checkpoint(command, case.checkpoints)
    assert target is not None, "refused above"
    words = f"back to {target.id}, before step {target.step}"
    done = go_back(
        state,
        case,
        None,
        target,
        facts=replace(state.facts, num_causes=state.facts.num_causes + 1),
        reason=f"commanded: {words}{also}",
        rule="command",
        command_number=command.number,
    )
    return _acked(done, command, "done", words, case)


def _refusal(verdict: Verdict, command: Proposal, case: Case) -> str:
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
        named = command.checkpoint_id
        if not named and command.argument != NEWEST:
            named = f"of step {command.argument:.0f}"
        return f"there is no healthy checkpoint {named}".rstrip()
    return ""


def _acked(
    verdict: Verdict, command: Proposal, status: Literal["done", "refused"], detail: str, case: Case
) -> Verdict:
    facts = replace(verdict.state.facts, last_command=command.number)
    ack = CommandAck(number=command.number, status=status, step=case.decided_at_step, detail=detail)
    return Verdict(replace(verdict.state, facts=facts), verdict.decision, ack)
