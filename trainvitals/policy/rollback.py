"""Going back: for what, how often, to where, and which batches are left out. Pure.

Certain evidence (non-finite parameters, non-finite losses without end, an operator) is acted on at
once, within budgets; out of budget the run halts. Finite evidence about the state (the probe, an
evaluation) may be a large optimizer spike all the same: it has a cooldown, is spent once for an
onset, and never halts a run.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainvitals.policy.rungs import Case, Verdict, go_back, halt, spent_causes
from trainvitals.policy.state import Cause, CheckpointRef, LadderMemory, LadderState, SkippedWindow
from trainvitals.policy.targets import choose_checkpoint
from trainvitals.records import Finding

MAX_SKIPPED_WINDOWS = 100
MAX_BLAMED = 100
_SAME_ONSET = 3
_TOUCHES = 10
"""Steps behind what was left out in which the same trouble is the same cause."""


def for_certain(
    state: LadderState,
    case: Case,
    *,
    rule: str,
    kind: str,
    onset: int,
    reason: str,
    finding: Finding,
    plays_all: bool = False,
) -> Verdict:
    """Go back on certain evidence, or halt where no budget or no checkpoint is left.

    Args:
        state: the ladder's memory.
        case: the circumstances.
        rule: what decided.
        kind: kind of the cause; only faults of one kind that touch each other are one.
        onset: first step of the trouble.
        reason: in words.
        finding: what the entry names.
        plays_all: the cause lies outside of the data: every batch is trained again.
    """
    config, facts = case.config, state.facts
    cause = _touched(facts, kind, onset)
    if cause is not None and cause.tries >= config.max_tries:
        reason = f"{reason}; {cause.tries} rollbacks (the limit) did not fix it"
        return halt(state, reason, "budget", finding, case)
    num_causes = len(spent_causes(facts, config))
    if cause is None and num_causes >= config.max_causes:
        reason = (
            f"{reason}; {num_causes} causes were rolled back within {config.budget_window} steps, "
            "which is the limit"
        )
        return halt(state, reason, "budget", finding, case)
    target, note, began = _target(case, cause, onset)
    if target is None:
        return halt(state, f"{reason}; {note}", "no_checkpoint", finding, case)
    facts = _spend(facts, case, cause, kind=kind, began=began, target=target)
    return _leave(
        state, case, facts, target, rule=rule, onset=onset, reason=f"{reason}; {note}",
        finding=finding, plays_all=plays_all,
    )  # fmt: skip


def for_finite(
    state: LadderState,
    case: Case,
    *,
    rule: str,
    onset: int,
    reason: str,
    finding: Finding,
) -> Verdict:
    """Go back on finite evidence about the state; where that may not be, say it and go on.

    A jump of the learning rate right before the onset is taken to be the cause: then everything is
    trained again with the earlier rate held.
    """
    config, facts = case.config, state.facts
    if was_blamed(state, onset):
        return Verdict(state)  # it was acted on, or told
    blamed = replace(facts, blamed=(*facts.blamed, onset)[-MAX_BLAMED:])
    blamed_state = replace(state, facts=blamed)
    if not case.heals:
        return Verdict(blamed_state, findings=(finding,))
    if facts.clock < facts.cooldown_until:
        words = f"{finding.reason}; the last such rollback was less than {config.finite_cooldown}"
        finding = replace(finding, reason=f"{words} steps ago, so training continues")
        return Verdict(blamed_state, findings=(finding,))
    jump = state.lr_jump if is_near_jump(state, onset, case) else None
    kind = "lr_jump" if jump is not None else "state"
    cause = _touched(facts, kind, onset)
    target, note, began = _target(case, cause, onset if jump is None else min(onset, jump.step))
    if target is None:
        finding = replace(finding, reason=f"{finding.reason}; {note}, so training continues")
        return Verdict(blamed_state, findings=(finding,))
    facts = replace(
        _spend(blamed, case, cause, kind=kind, began=began, target=target),
        cooldown_until=facts.clock + config.finite_cooldown,
    )
    reason = f"{reason}; {note}"
    if jump is not None:
        rule = "lr_jump"
        reason = (
            f"{reason}; the learning rate rose from {jump.before:.4g} to {jump.after:.4g} at step "
            f"{jump.step}, and {jump.before:.4g} is held"
        )
        facts = replace(facts, lr_cap=jump.before, lr_cap_from=jump.step)
        state = replace(state, lr_jump=None)
    return _leave(
        state, case, facts, target, rule=rule, onset=onset, reason=reason, finding=finding,
        plays_all=jump is not None,
    )  # fmt: skip


def was_blamed(state: LadderState, onset: int) -> bool:
    """Return whether the state was read damaged at this onset before.

    If it is again after a rollback, a sound state came to the same: then it is the data.
    """
    return any(abs(onset - blamed) <= _SAME_ONSET for blamed in state.facts.blamed)


def is_near_jump(state: LadderState, onset: int, case: Case) -> bool:
    """Return whether trouble that began at ``onset`` may be the doing of a jump of the rate."""
    jump = state.lr_jump
    # The onset of a level is known to eight steps.
    return jump is not None and -8 <= onset - jump.step <= case.config.lr_jump_steps


def _touched(facts: LadderMemory, kind: str, onset: int) -> Cause | None:
    """Return the cause under treatment, if this is the same trouble."""
    cause = facts.cause
    if cause is None or cause.kind != kind:
        return None
    return cause if cause.target_step <= onset < cause.until_step else None


def _target(case: Case, cause: Cause | None, onset: int) -> tuple[CheckpointRef | None, str, int]:
    """Return where to go back to, the choice in words, and where the trouble first began.

    That it is there again right after a checkpoint does not make that checkpoint part of it.
    """
    began = onset if cause is None else max(onset, cause.onset_step)
    below = None if cause is None else cause.target_step
    return *choose_checkpoint(case.checkpoints, began, case.config.margin, below), began


def _spend(
    facts: LadderMemory,
    case: Case,
    cause: Cause | None,
    *,
    kind: str,
    began: int,
    target: CheckpointRef,
) -> LadderMemory:
    """Return the facts with one more rollback spent; from a cause's second try on the rate is cut.

    The rate is cut only where leaving batches out did not help.
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


def _leave_out_margin(case: Case, tries: int) -> int:
    config = case.config
    return min(config.leave_out_margin << min(tries - 1, 20), config.max_leave_out_margin)


def _leave(
    state: LadderState,
    case: Case,
    facts: LadderMemory,
    target: CheckpointRef,
    *,
    rule: str,
    onset: int,
    reason: str,
    finding: Finding,
    plays_all: bool,
) -> Verdict:
    """Decide the rollback, with the batches that are left out."""
    cause = facts.cause
    assert cause is not None, "it was spent"
    num_batches = 0
    if plays_all:
        reason += ", and all batches are trained again"
    else:
        margin = _leave_out_margin(case, cause.tries)
        first = max(onset - margin, target.step)
        num_batches = max(state.last_flagged, onset) + margin + 1 - first
        window = SkippedWindow(first, num_batches)
        facts = replace(
            facts, skipped_windows=(*facts.skipped_windows, window)[-MAX_SKIPPED_WINDOWS:]
        )
        reason += f", without {num_batches} batches from step {first}"
    if cause.tries > 1:
        reason += f", learning rate x {facts.lr_factor:.4g}"
    return go_back(
        state, case, finding, target, facts=facts, reason=reason, rule=rule,
        skip_batches=num_batches,
    )  # fmt: skip
