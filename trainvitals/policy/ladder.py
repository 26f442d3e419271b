"""The ladder: CONTINUE, SKIP_STEP, ROLLBACK, an older ROLLBACK with a lower LR, HALT.

``decide`` is pure: a state, the findings of one step and what every rank knows alike go in, the
next state and at most one decision come out. Every decision says in words why, with its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from trainvitals.policy.commands import answer
from trainvitals.policy.rungs import Case, Verdict, accept, go_back, halt, skip
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
from trainvitals.policy.targets import choose_checkpoint
from trainvitals.records import Finding, StepRecord

MAX_SKIPPED_WINDOWS = 100
SAME_LEVEL_RULE = "same_level_again"
"""Rule of an acceptance that the detectors have to be told of: their reference starts anew."""
_OF_MANY_STEPS = ("divergence", "plateau", "grad_explosion")
"""Findings about a stretch of steps: none of them says that its last step was bad."""


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
    case = Case(
        record, decided_at_step, checkpoints, mode, config or LadderConfig(), now_attempt_id
    )
    state = _remember(state, findings, case)
    verdict = _judge_step(state, findings, case)
    if command is None or command.number <= state.facts.last_command:
        return verdict
    return answer(verdict, state, command, case)


# ------------------------------------------------------------------------------------ memory


def _remember(state: LadderState, findings: Sequence[Finding], case: Case) -> LadderState:
    """Take the step into the ladder's memory."""
    record, config = case.record, case.config
    bad = primary_finding(findings)
    horizon = record.step - config.storm_window
    marks = tuple(mark for mark in state.marks if mark.step > horizon)
    first = record.step if state.first_step < 0 else state.first_step
    if any(finding.kind == "divergence" for finding in findings):
        # No bad step, and yet nothing that was saved since is proven healthy by it.
        state = replace(state, last_unhealthy_step=record.step)
    unhealthy = bad is not None or (record.skipped and not record.overflow)
    if not unhealthy:
        state = replace(state, marks=marks, first_step=first, skips_in_a_row=0)
        return _recover_observed(state, case)
    if bad is not None:
        marks += (Mark(record.step, _onset_of(bad), bad.cause, bad.value),)
    skips = state.skips_in_a_row + 1
    return replace(
        state,
        marks=marks,
        first_step=first,
        skips_in_a_row=skips,
        last_unhealthy_step=record.step,
    )


def _recover_observed(state: LadderState, case: Case) -> LadderState:
    """Let an observed halt end when the run, which nobody stopped, has recovered by itself."""
    quiet = case.record.step - state.last_unhealthy_step
    if not state.facts.halted or quiet < case.config.progress_steps:
        return state
    facts = replace(state.facts, halted="", cause=None, num_causes=0)
    return replace(state, facts=facts)


def _onset_of(finding: Finding) -> int:
    return min(finding.step, finding.onset_step) if finding.onset_step >= 0 else finding.step


def primary_finding(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding a step is bad for: non-finite parameters first, then as detected."""
    acting = [f for f in findings if f.level == "act" and f.kind not in _OF_MANY_STEPS]
    for finding in acting:
        if finding.kind == "nonfinite_params":
            return finding
    return acting[0] if acting else None


# -------------------------------------------------------------------------------------- rungs


def _judge_step(state: LadderState, findings: Sequence[Finding], case: Case) -> Verdict:
    config = case.config
    bad = primary_finding(findings)
    shift = next((finding for finding in findings if finding.kind == "level_shift"), None)
    if state.facts.halted:
        return Verdict(state)  # observed: it would have stopped
    if bad is not None and bad.kind == "nonfinite_params":
        return _nonfinite_params(state, bad, case)
    if shift is not None:
        return accept(state, shift, shift.reason, "stable_level", case)
    if state.skips_in_a_row >= config.max_skips_in_a_row:
        reason = (
            f"{state.skips_in_a_row} steps in a row were bad, up to step {case.record.step}: going "
            "on trains nothing"
        )
        return halt(state, reason, "stuck", bad, case)
    diverged = next((f for f in findings if f.kind == "divergence" and f.level == "act"), None)
    if diverged is not None and case.heals and _can_go_back(state, diverged, case):
        return _rollback(state, diverged, diverged.reason, "divergence", case)
    if bad is None:
        return _device_skip(state, findings, case)
    if case.heals and len(state.marks) >= config.storm_skips:
        return _storm(state, bad, case)
    return skip(state, bad, bad.reason, bad.detector, case)


def _device_skip(state: LadderState, findings: Sequence[Finding], case: Case) -> Verdict:
    """Record a step that was skipped on the device for a reason that is no finding to act on."""
    if not case.record.skipped or case.record.overflow:
        return Verdict(state)
    finding = next((f for f in findings if f.kind not in _OF_MANY_STEPS), None)
    reason = finding.reason if finding else "the device skipped the step; no detector says why"
    return skip(state, finding, reason, finding.detector if finding else "device", case)


def _nonfinite_params(state: LadderState, bad: Finding, case: Case) -> Verdict:
    if case.heals:
        return _rollback(state, bad, bad.reason, "nonfinite_params", case)
    reason = (
        f"{bad.reason}: every further step is lost, and mode {case.mode!r} has no checkpoint to go "
        "back to"
    )
    return halt(state, reason, "nonfinite_params", bad, case)


def _can_go_back(state: LadderState, diverged: Finding, case: Case) -> bool:
    """Whether a rollback may treat a divergence: what may still recover is no reason to stop."""
    if _is_cooling_down(state, case):
        return False
    onset = _onset_of(diverged)
    cause = _cause_at(state.facts, onset)
    if cause is not None and cause.tries >= case.config.max_tries:
        return False
    if cause is None and state.facts.num_causes >= case.config.max_causes:
        return False
    below = None if cause is None else cause.target_step
    began = _beginning(cause, onset)
    return choose_checkpoint(case.checkpoints, began, case.config.margin, below)[0] is not None


def _is_cooling_down(state: LadderState, case: Case) -> bool:
    since = case.record.step - state.first_step
    return state.facts.num_rollbacks > 0 and since < case.config.cooldown_steps


def _storm(state: LadderState, bad: Finding, case: Case) -> Verdict:
    config, facts, record = case.config, state.facts, case.record
    num = len(state.marks)
    if _is_cooling_down(state, case):
        reason = f"{bad.reason}; the last rollback is less than {config.cooldown_steps} steps ago"
        return skip(state, bad, reason, bad.detector, case)
    onset = min(mark.onset for mark in state.marks)
    reason = (
        f"{num} bad steps from {onset} to {record.step} (a storm is {config.storm_skips} within "
    )
    reason += f"{config.storm_window}), the last because {bad.reason}"
    cause, level = _cause_at(facts, onset), loss_level(state.marks)
    if cause is not None and _same_level(cause.level, level, config.same_level_ratio):
        reason = (
            f"after the rollback, other data shows the same level again: loss {level:.4g}, before "
            f"{cause.level:.4g}; a shift of the data, not a fault"
        )
        return accept(state, bad, reason, SAME_LEVEL_RULE, case)
    return _rollback(state, bad, reason, "skip_storm", case)


def _cause_at(facts: Facts, onset: int) -> Cause | None:
    """Return the cause under treatment if trouble that began at ``onset`` is the same one."""
    return facts.cause if facts.cause is not None and onset < facts.cause.until_step else None


def _beginning(cause: Cause | None, onset: int) -> int:
    """Return where the trouble began that is treated: after a rollback, where it first did.

    That it is there again right after a checkpoint does not make that checkpoint part of it.
    """
    return onset if cause is None else max(onset, cause.onset_step)


def loss_level(marks: Sequence[Mark]) -> float:
    """Return the median loss of a storm that consists of finite loss outliers; else 0."""
    values = sorted(
        mark.value for mark in marks if mark.cause == "loss_outlier" and mark.value is not None
    )
    return values[len(values) // 2] if values and len(values) == len(marks) else 0.0


def _same_level(before: float, now: float, ratio: float) -> bool:
    return min(before, now) > 0.0 and max(before, now) <= ratio * min(before, now)


# ----------------------------------------------------------------------------------- rollback


def _rollback(state: LadderState, bad: Finding, reason: str, rule: str, case: Case) -> Verdict:
    """Go back for a root cause: the first time, once more and further, or not any more."""
    config, facts = case.config, state.facts
    onset = min([mark.onset for mark in state.marks] + [_onset_of(bad)])
    cause = _cause_at(facts, onset)
    if cause is not None and cause.tries >= config.max_tries:
        reason = f"{reason}; {cause.tries} rollbacks did not cure this cause, which is the limit"
        return halt(state, reason, "budget", bad, case)
    if cause is None and facts.num_causes >= config.max_causes:
        reason = f"{reason}; {facts.num_causes} causes were treated by rollback, which is the limit"
        return halt(state, reason, "budget", bad, case)
    below = cause.target_step if cause is not None else None
    began = _beginning(cause, onset)
    target, note = choose_checkpoint(case.checkpoints, began, config.margin, below)
    if target is None:
        return halt(state, f"{reason}; {note}", "no_checkpoint", bad, case)
    until = case.decided_at_step + config.progress_steps
    treated = Cause(
        kind=bad.cause or bad.kind,
        onset_step=began,
        until_step=until if cause is None else max(until, cause.until_step),
        tries=1 if cause is None else cause.tries + 1,
        target_step=target.step,
        level=loss_level(state.marks),
    )
    num_batches = min(config.skip_batches << min(treated.tries - 1, 20), config.max_skip_batches)
    window = SkippedWindow(onset, num_batches)
    facts = _spend(facts, treated, window, case, new_cause=cause is None)
    reason = f"{reason}; {note}"
    if num_batches:
        reason += f", and on past {num_batches} batches from step {onset}"
    if treated.tries > 1:
        reason += f", learning rate x {facts.lr_factor:.4g}"
    return go_back(
        state, case, bad, target, facts=facts, reason=reason, rule=rule, skip_batches=num_batches
    )


def _spend(
    facts: Facts, cause: Cause, window: SkippedWindow, case: Case, *, new_cause: bool
) -> Facts:
    config = case.config
    windows = facts.skipped_windows
    if window.num_batches:
        windows = (*windows, window)[-MAX_SKIPPED_WINDOWS:]
    facts = replace(
        facts, num_causes=facts.num_causes + new_cause, cause=cause, skipped_windows=windows
    )
    if cause.tries < 2:
        return facts
    return replace(
        facts,
        lr_factor=config.lr_cut ** (cause.tries - 1),
        lr_hold_until=cause.until_step,
        lr_full_from=cause.until_step + config.lr_rewarm_steps,
    )
