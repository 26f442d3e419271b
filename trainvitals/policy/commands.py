"""What becomes of a command. An operator's is never refused for a budget."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from trainvitals.policy.rungs import Case, Verdict, accept, go_back, halt, without_entry
from trainvitals.policy.state import NEWEST, LadderState, Outlier, Proposal
from trainvitals.policy.targets import commanded_checkpoint
from trainvitals.records import CommandAck


def answer(verdict: Verdict, before: LadderState, command: Proposal, case: Case) -> Verdict:
    """Carry a command out or refuse it, on top of the step's own verdict."""
    own = verdict.decision
    refusal = _refusal(verdict, command, case)
    if refusal:
        return _acked(verdict, command, "refused", refusal, case)
    if command.action == "accept":
        return _accept(verdict, command, case)
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
        facts=state.facts,
        reason=f"commanded: {words}{also}",
        rule="command",
        command_number=command.number,
    )
    return _acked(done, command, "done", words, case)


def _accept(verdict: Verdict, command: Proposal, case: Case) -> Verdict:
    """Take an operator's word that a step, or the level it lies on, was healthy.

    What was an outlier there is a level from now on, and its onset is blamed on the state no more.
    Where no outlier is remembered, the level itself is meant: what tells of it starts anew.
    """
    step, state = int(command.argument), verdict.state
    outliers = _around(state, step, case.config.group_steps)
    if not outliers:
        detail = f"the level at step {step} counts as normal: no outlier is remembered there"
        words = f"commanded: {detail}"
    else:
        first, last = outliers[0].step, outliers[-1].step
        detail = f"{len(outliers)} outliers, steps {first} to {last}, count as normal"
        words = f"commanded: {detail}; nothing up to their values is withheld again"
    own = verdict.decision
    if own is not None:
        words += f"; the step itself: {own.reason}"
        if own.action == "rollback":
            return _acked(
                verdict, command, "refused", f"rolled back in this step: {own.reason}", case
            )
    state = without_entry(verdict)
    onsets = tuple(outlier.step for outlier in outliers)
    facts = replace(state.facts, blamed=(*state.facts.blamed, *onsets)[-100:])
    done = accept(
        replace(state, facts=facts), None, words, "operator_accepted", case, outliers=outliers,
        command_number=command.number,
    )  # fmt: skip
    if done.decision is not None:  # a replay needs to know which step was meant
        evidence = {**done.decision.evidence, "accepted_step": float(step)}
        done = done._replace(decision=replace(done.decision, evidence=evidence))
    done = done._replace(
        findings=verdict.findings, readings=verdict.readings, accepted=verdict.accepted
    )
    return _acked(done, command, "done", detail, case)


def _around(state: LadderState, step: int, distance: int) -> tuple[Outlier, ...]:
    """Return the outliers at a step and those that follow each other closely around it."""
    groups: list[list[Outlier]] = []
    for outlier in state.recent:
        if not groups or outlier.step - groups[-1][-1].step > distance:
            groups.append([])
        groups[-1].append(outlier)
    for group in reversed(groups):
        if group[0].step - distance <= step <= group[-1].step + distance:
            return tuple(group)
    return ()


def _refusal(verdict: Verdict, command: Proposal, case: Case) -> str:
    own = verdict.decision
    if case.mode == "observe":
        return "mode is 'observe': nothing is acted on"
    if own is not None and own.action == "halt":
        return f"the run halts already: {own.reason}"
    if command.action == "halt":
        return ""
    if command.action == "accept":
        return "" if command.argument >= 0 else f"there is no step {command.argument:.0f}"
    if command.action != "rollback":
        return f"action {command.action!r} is not offered by this version"
    if case.mode != "heal":
        return f"mode is {case.mode!r}: a rollback needs mode 'heal' and checkpoints"
    if own is not None and own.action == "rollback":
        return f"a rollback was decided in this step: {own.reason}"
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
    return verdict._replace(state=replace(verdict.state, facts=facts), ack=ack)
