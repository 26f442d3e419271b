"""The escalation policy: a skip needs evidence about the batch, a rollback about the state.

``decide`` is pure except for one query. Its inputs are a state, the findings of one step, and data
that all ranks share; it returns the next state and at most one decision. The query goes to the
probe, whose result is equal on all ranks too. Every decision contains its reason in plain text,
with numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from trainvitals.detect.outliers import LossKind
from trainvitals.policy.evidence import NO_READING, NONFINITE_GRADIENT, Ask, ProbeResult
from trainvitals.policy.rungs import (
    DecisionContext,
    LossTrend,
    PolicyResult,
    answer,
    for_certain,
    for_corrupted,
    for_finite,
    for_hidden,
    halt,
    is_near_jump,
    on_approved,
    on_timeout,
    outliers_around,
    skip,
    without_entry,
)
from trainvitals.policy.state import (
    CheckpointRef,
    LadderConfig,
    LadderState,
    Lasting,
    LrJump,
    Mode,
    Proposal,
    ask_from,
    is_outlier,
    note_outlier,
    note_reported,
    within_window,
)
from trainvitals.records import Finding, StateRead, StepRecord

Rung = Callable[..., PolicyResult]
_LEVEL_STEPS = 8
_LEVEL_NOISE = 1.5
_LEVEL_LEAST = 0.05
_ABSURD = 1e5
"""Multiple of the run's first losses above which a reading can only mean a damaged state."""
_FRESH_STEPS = 8
"""Steps after the first report in which a worse reading is damage; later it can be forgetting."""
_WORSE = 1.25
"""Minimum ratio at which lost progress counts as damage."""
_LEAST_UNDONE = 0.1
"""Share of the progress below which no multiple of the loss counts: on memorized data one large
step raises the loss 2 to 3.5 times, and it soon recovers."""
_UNCLIPPED = 1.5
"""Multiple of the share of lost progress without a clip: healthy states spike higher there."""
_SPIKES = frozenset({"spike", "grad_explosion"})
_LEVELS = frozenset({"level_shift", "divergence", "lost_progress", "plateau"})
"""Kinds of findings for which the probe runs."""
_KNOWN = 1.001
"""Multiple of the highest rate so far up to which a rate counts as already used."""
_JUMPS_AFTER = 20
"""Steps of a run before which a rising rate is its warm-up."""


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
    loss_kind: LossKind = "minimize",
    probe: Callable[[Ask], ProbeResult] | None = None,
    evaluation: float | None = None,
    course: Callable[[], LossTrend] = lambda: LossTrend(0.0, 0.0, 0.0),
    lacks: Mapping[str, str] = MappingProxyType({}),
) -> PolicyResult:
    """Return the next state and the action for one step.

    At most one decision per step. After a halt, and until a decided rollback was reported done,
    there are no decisions.

    Args:
        state: state that the last call returned.
        findings: findings of the detectors about the step.
        record: the step.
        decided_at_step: the step in whose call this happens.
        checkpoints: possible targets of a rollback, equal on all ranks.
        command: proposal of an operator or the collector.
        mode: mode of the run: its most severe action.
        config: settings of the policy.
        now_attempt_id: id of the new attempt if this call decides a rollback.
        loss_kind: meaning of the loss.
        probe: evaluates the state; None if there is no probe.
        evaluation: ratio of an evaluation's loss to the previous one, both with the floor; None if
            this step has no evaluation.
        course: returns the earlier level of the loss.
        lacks: commands that this loop cannot carry out, with the reasons.
    """
    if state.rolling_back or (state.facts.halted and mode != "observe"):
        return PolicyResult(state)
    case = DecisionContext(
        record, decided_at_step, checkpoints, mode, config or LadderConfig(), now_attempt_id,
        loss_kind, probe, course, lacks,
    )  # fmt: skip
    before = state
    state = _tick(state, case)
    is_yes = False
    if state.facts.waiting is not None:
        state, is_yes = on_timeout(state, case.config)
    verdict = _judge_step(state, findings, case)
    if record.learning_rate is not None:
        verdict = _look_at_rate(verdict, before, case)
    if evaluation is not None:
        verdict = _look_at_evaluation(verdict, before, evaluation, case)
    if record.nonfinite_state or record.snapshots_missed:
        verdict = _look_at_snapshot(verdict, case)
    if record.replicas_differ or record.settings_differ:
        verdict = _look_at_replicas(verdict, case)
    if is_yes and not (verdict.decision and verdict.decision.action in ("rollback", "halt")):
        verdict = _on_top(verdict, on_approved, case)
    if command is None or command.number <= state.facts.last_command:
        return verdict
    return answer(verdict, state, command, case)


def _tick(state: LadderState, case: DecisionContext) -> LadderState:
    """Advance the clock, and end a hold of the learning rate when its cause has ended."""
    record, facts = case.record, state.facts
    facts = replace(facts, clock=facts.clock + 1)
    rate = record.learning_rate
    if facts.lr_cap and rate is not None and record.step >= facts.lr_cap_from:
        requested_rate = rate / record.lr_factor if record.lr_factor else rate
        if requested_rate < case.config.lr_jump * facts.lr_cap:
            facts = replace(facts, lr_cap=0.0)
    return replace(
        state,
        facts=facts,
        first_step=record.step if state.first_step < 0 else state.first_step,
        learning_rate=state.learning_rate if rate is None else rate,
        known_rate=state.rate_to_know,
    )


def _judge_step(
    state: LadderState, findings: Sequence[Finding], case: DecisionContext
) -> PolicyResult:
    record = case.record
    if state.facts.halted:
        return PolicyResult(_recover_observed(state, findings, case))
    bad = {finding.kind: finding for finding in reversed(findings) if finding.level == "actionable"}
    if (params := bad.get("nonfinite_params")) is not None:
        return _nonfinite_params(state, params, case)
    if (nonfinite := bad.get("nonfinite")) is not None:
        return _nonfinite(state, nonfinite, case)
    if is_outlier(record) and not record.overflow:
        return _look_at_findings(_outlier(state, bad.get("spike"), case), findings, case)
    if record.skipped and record.commanded:
        return skip(state, None, "manual command: skip", "command", case)
    if record.overflow or record.failed_ranks:
        return _device_skip(state, findings, case)  # neither counts in a row nor ends it
    if state.row or state.nonfinite:
        state = replace(state, row=(), nonfinite=0, sound=False)
    if record.skipped:
        state = replace(state, last_unhealthy_step=record.step)
        return _device_skip(state, findings, case)
    if any(finding.kind in _SPIKES for finding in findings):
        state = note_reported(state, record)
    return _look_at_findings(PolicyResult(state), findings, case)


def _recover_observed(
    state: LadderState, findings: Sequence[Finding], case: DecisionContext
) -> LadderState:
    """End an observed halt when the run, which was not stopped, has recovered by itself."""
    record = case.record
    if record.skipped or any(finding.level == "actionable" for finding in findings):
        return replace(state, last_unhealthy_step=record.step)
    quiet = record.step - state.last_unhealthy_step
    if quiet < case.config.max_skips_in_a_row:
        return state
    facts = replace(state.facts, halted="", cause=None, causes=())
    return replace(state, facts=facts, row=(), nonfinite=0)


def _device_skip(
    state: LadderState, findings: Sequence[Finding], case: DecisionContext
) -> PolicyResult:
    """Record a step that the device skipped for a reason without an actionable finding."""
    if not case.record.skipped or case.record.overflow:
        return PolicyResult(state)
    finding = next((f for f in findings if f.kind == "rank_failed"), None)
    reason = finding.reason if finding else "the device skipped the step; no detector gave a reason"
    return skip(state, finding, reason, finding.detector if finding else "device", case)


# --------------------------------------------------------------------------- certain evidence


def _nonfinite_params(state: LadderState, bad: Finding, case: DecisionContext) -> PolicyResult:
    record = case.record
    onset = min(step for step in (record.step, _onset_of_stretch(state)) if step >= 0)
    state = replace(state, last_flagged=record.step, last_unhealthy_step=record.step)
    if case.heals:
        # A bit flip or a broken kernel: no batch caused it, so all batches are trained again.
        return for_certain(
            state, case, rule="nonfinite_params", kind="nonfinite_params", onset=onset,
            reason=bad.reason, finding=bad, plays_all=True,
        )  # fmt: skip
    reason = (
        f"{bad.reason}: all further steps would be lost, and mode {case.mode!r} has no checkpoint "
        "to roll back to; use mode 'heal' with checkpoints"
    )
    return halt(state, reason, "nonfinite_params", bad, case)


def _onset_of_stretch(state: LadderState) -> int:
    """Return the first step of the current problem; -1 if there is none."""
    if state.row:
        return state.row[0].step
    return state.nonfinite_onset if state.nonfinite else -1


def _nonfinite(state: LadderState, bad: Finding, case: DecisionContext) -> PolicyResult:
    record, config = case.record, case.config
    num = state.nonfinite + 1
    onset = record.step if num == 1 else state.nonfinite_onset
    state = replace(
        state,
        nonfinite=num,
        nonfinite_onset=onset,
        sound=state.sound and num > 1,
        last_flagged=record.step,
        last_unhealthy_step=record.step,
    )
    began = state.row[0].step if state.row else onset
    readings: tuple[StateRead, ...] = ()
    if num == config.ask_after:
        read = _ask(state, "nonfinite", began, case)
        readings = () if read is None else (read,)
        state = replace(state, sound=read is not None and read.verdict in ("sound", "worse"))
        if read is not None and read.verdict == "state":
            verdict = _nonfinite_by_state(state, read, bad, began, case)
            return verdict._replace(readings=readings)
    return _nonfinite_row(state, bad, began, case)._replace(readings=readings)


def _nonfinite_by_state(
    state: LadderState, read: StateRead, bad: Finding, onset: int, case: DecisionContext
) -> PolicyResult:
    finding = _state_damaged(read, _blames(state, onset, case), case, bad.rank)
    if case.heals:
        return for_certain(
            state, case, rule="state_damaged", kind="nonfinite", onset=onset,
            reason=f"{bad.reason}; {finding.reason}", finding=bad,
        )  # fmt: skip
    return skip(state, bad, bad.reason, bad.detector, case)._replace(findings=(finding,))


def _nonfinite_row(
    state: LadderState, bad: Finding, onset: int, case: DecisionContext
) -> PolicyResult:
    """Skip a non-finite step; in a long row roll back, or halt if nothing else helps."""
    config, num = case.config, state.nonfinite
    findings: tuple[Finding, ...] = ()
    if state.sound and num == config.nonfinite_in_a_row:
        text = (
            f"{num} non-finite steps in a row since step {state.nonfinite_onset}, but the model's "
            "loss on earlier batches is unchanged: the data are bad; each update is skipped"
        )
        findings = (replace(bad, kind="nonfinite_streak", level="advisory", reason=text),)
    elif not state.sound and case.heals and num >= config.nonfinite_in_a_row:
        reason = f"{num} non-finite steps in a row; the last: {bad.reason}"
        return for_certain(
            state, case, rule="nonfinite_streak", kind="nonfinite", onset=onset, reason=reason,
            finding=bad,
        )  # fmt: skip
    elif not state.sound and num >= config.max_skips_in_a_row:
        reason = (
            f"{num} non-finite steps in a row, up to step {case.record.step}: the run is making "
            "no progress"
        )
        return halt(state, reason, "stuck", bad, case)
    reason = bad.reason if num == 1 else f"{bad.reason} ({num} non-finite steps in a row)"
    return skip(state, bad, reason, bad.detector, case)._replace(findings=findings)


# ----------------------------------------------------------------------------- finite values


def _outlier(state: LadderState, spike: Finding | None, case: DecisionContext) -> PolicyResult:
    """Record an outlier that the device withheld, or applied because a bound was reached."""
    record = case.record
    state = note_outlier(replace(state, nonfinite=0, sound=False), record, case.config)
    if spike is None or not record.withheld:
        return PolicyResult(state)
    num = len(state.row)
    reason = spike.reason if num == 1 else f"{spike.reason} ({num} outliers in a row)"
    return skip(state, spike, reason, "outlier", case)


def _look_at_findings(
    verdict: PolicyResult, findings: Sequence[Finding], case: DecisionContext
) -> PolicyResult:
    """Run the probe for reported findings. Any result ends the hold; damage leads to an action."""
    state, config, step = verdict.state, case.config, case.record.step
    if any(finding.kind == "divergence" for finding in findings):
        # Not a bad step, but no state saved since then is proven healthy by it.
        state = replace(state, last_unhealthy_step=step)
    state = _follow_jump(state, case)
    verdict = verdict._replace(state=state)
    reported = [f for f in findings if f.kind in _SPIKES]
    trigger: Literal["spike", "level"] = "spike" if reported else "level"
    reported = reported or [f for f in findings if f.kind in _LEVELS]
    onsets = [f.onset_step if f.onset_step >= 0 else f.step for f in reported]
    if not onsets and _has_risen(state, config):
        onsets = [step - _LEVEL_STEPS]
    if not onsets or case.probe is None or case.loss_kind != "minimize":
        return verdict
    onset, clock = min(onsets), state.facts.clock
    since = onset
    if (group := outliers_around(state, step)) and trigger == "spike":
        onset, since = min(onset, group[0].step), group[0].step
        if not case.record.clips and any(not outlier.withheld for outlier in group):
            since = -1  # one unclipped update on new data can be enough to forget the old data
    recent_requests = within_window(state.asked, clock, config)
    is_near = is_near_jump(state, onset, case)
    if clock < (
        recent_requests[-1] + _LEVEL_STEPS
        if is_near and recent_requests
        else ask_from(state, config)
    ):
        return verdict
    read = _ask(state, trigger, onset, case)
    if read is None:
        return verdict
    state = replace(state, asked=(*recent_requests, clock))
    if read.verdict != "abstained":
        state = replace(state, passes_until=clock + config.ask_pause)
    verdict = verdict._replace(state=state, readings=(*verdict.readings, read))
    if read.verdict != "state" or not _is_evidence(read, since, state, case):
        return verdict
    finding = _state_damaged(read, _blames(state, onset, case), case)
    what = reported[0].reason if reported else "the loss rose after a jump of the learning rate"
    return _on_top(
        verdict, for_finite, case, rule="state_damaged", onset=onset, finding=finding,
        reason=f"{what}; {_in_words(read)}",
    )  # fmt: skip


def _is_evidence(read: StateRead, since: int, state: LadderState, case: DecisionContext) -> bool:
    """Return whether the reading is damage; it may be forgetting, which proves nothing.

    Earlier batches read worse after updates on new data. A few updates do not cause forgetting, and
    forgetting never leads to absurd losses or to non-finite gradients.
    """
    now = math.inf if read.now is None or not math.isfinite(read.now) else read.now
    if math.isinf(read.ratio or 0.0) or now > _ABSURD * case.course().first:
        return True
    is_fresh = since >= 0 and case.record.step - since <= _FRESH_STEPS
    return is_fresh or is_near_jump(state, read.onset_step, case)


# ---------------------------------------------------------------------- probe and its findings


def _ask(
    state: LadderState,
    trigger: Literal["spike", "nonfinite", "level"],
    onset: int,
    case: DecisionContext,
) -> StateRead | None:
    """Run the probe and return its result; None if there is no probe."""
    if case.probe is None:
        return None
    config, first = case.config, case.course().first
    floor = config.state_floor * first
    reading = case.probe(Ask(trigger=trigger, step=case.record.step, onset_step=onset, floor=floor))
    ratio = reading.ratio(floor)
    verdict: Literal["state", "worse", "sound", "abstained"] = "abstained"
    if ratio is not None:
        gain = first - reading.then
        undone = (reading.now - reading.then) / gain if gain > 0.0 else 0.0
        most = config.state_progress * (1.0 if case.record.clips else _UNCLIPPED)
        is_undone = undone > most and ratio > _WORSE
        # Without a clip one update on new data can undo enough progress to read as damage.
        least = _LEAST_UNDONE if case.record.clips else most
        is_far = ratio > _blames(state, onset, case) and (gain <= 0.0 or undone > least)
        is_damaged = math.isinf(ratio) or is_far or is_undone
        is_worse = ratio > config.state_ratio
        verdict = "state" if is_damaged else "worse" if is_worse else "sound"
    return StateRead(
        trigger=trigger,
        onset_step=onset,
        num_batches=reading.num_batches,
        ratio=ratio,
        then=_finite(reading.then),
        now=reading.now if reading is not NO_READING else None,
        verdict=verdict,
        detail=reading.detail,
    )


def _blames(state: LadderState, onset: int, case: DecisionContext) -> float:
    """Return the ratio above which kept batches show a damaged state."""
    config = case.config
    if is_near_jump(state, onset, case):
        return config.state_ratio_jump
    return config.state_ratio if case.record.clips else config.state_ratio_unclipped


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(read: StateRead) -> str:
    """Return a sentence about the result of the probe."""
    if read.ratio is None:
        return "the probe gave no verdict"
    if read.detail.startswith(NONFINITE_GRADIENT):
        return f"{NONFINITE_GRADIENT}: the state is damaged"
    return (
        f"the loss on {read.num_batches} earlier batches is {read.ratio:.3g}x what it was: the "
        "state is damaged"
    )


def _state_damaged(read: StateRead, limit: float, case: DecisionContext, rank: int = -1) -> Finding:
    return Finding(
        kind="state_damaged",
        level="actionable",
        step=case.record.step,
        detector="probe",
        reason=_in_words(read),
        rank=rank,
        value=read.ratio,
        limit=limit,
        onset_step=read.onset_step,
        cause="state_damaged",
    )


def _follow_jump(state: LadderState, case: DecisionContext) -> LadderState:
    """Collect the losses after a jump of the learning rate, while damage is attributed to it."""
    jump, loss = state.lr_jump, case.record.loss
    if jump is None:
        return state
    if case.record.step - jump.step > case.config.lr_jump_steps + _LEVEL_STEPS:
        return replace(state, lr_jump=None, losses=())
    if loss is None or not math.isfinite(loss):
        return state
    return replace(state, losses=(*state.losses, loss)[-_LEVEL_STEPS:])


def _has_risen(state: LadderState, config: LadderConfig) -> bool:
    """Return whether the latest losses after a jump have lost a large part of the progress."""
    jump, losses = state.lr_jump, state.losses
    if jump is None or len(losses) < _LEVEL_STEPS:
        return False
    rise = sorted(losses)[_LEVEL_STEPS // 2] - jump.level
    gain = max(jump.first - jump.level, 0.0)
    least = (config.level_rise * gain, _LEVEL_NOISE * jump.noise, _LEVEL_LEAST * jump.first)
    return rise > max(least)


def jumps(record: StepRecord, last: float, config: LadderConfig) -> bool:
    """Return whether a step's learning rate is many times the rate of the step before."""
    rate = record.learning_rate
    return rate is not None and last > 0.0 and rate >= config.lr_jump * last


def is_restart(record: StepRecord, state: LadderState, config: LadderConfig) -> bool:
    """Return whether the rate jumps to an expected value: scheduled, or already trained with."""
    rate = record.learning_rate or 0.0
    is_known = record.rate_declared or rate <= _KNOWN * state.rate_to_know
    return is_known and jumps(record, state.learning_rate, config)


def _look_at_rate(
    verdict: PolicyResult, before: LadderState, case: DecisionContext
) -> PolicyResult:
    """Report an undeclared jump of the learning rate above every rate used so far."""
    record, config, state = case.record, case.config, verdict.state
    rate, last = record.learning_rate, before.learning_rate
    if rate is None or not jumps(record, last, config):
        return verdict
    if record.rate_declared or rate <= _KNOWN * state.known_rate:
        return verdict
    if state.facts.clock <= _JUMPS_AFTER or state.rolling_back:
        return verdict
    if record.step <= state.announced_until:
        return verdict
    course = case.course()
    jump = LrJump(record.step, last, rate, course.level, course.noise, course.first)
    reason = f"the learning rate rose from {last:.4g} to {rate:.4g} in one step"
    limit = config.lr_jump * last
    finding = _found(
        record, "lr_jump", "learning_rate", reason, "advisory", limit=limit, value=rate
    )
    state = replace(state, lr_jump=jump, losses=())
    return verdict._replace(state=state, findings=(*verdict.findings, finding))


def _look_at_snapshot(verdict: PolicyResult, case: DecisionContext) -> PolicyResult:
    """Add the ranks' reports about a state that they checked, or could not copy."""
    record = case.record
    if record.snapshots_missed:
        verdict = _missed(verdict, case)
    decision = verdict.decision
    if not record.nonfinite_state or (decision and decision.action in ("rollback", "halt")):
        return verdict
    rank = record.nonfinite_state_rank
    where = f"rank {rank}" if rank >= 0 else "several ranks"
    reason = f"parameters, optimizer state or buffers are NaN or infinite on {where}"
    value = float(record.nonfinite_state)
    finding = _found(record, "nonfinite_state", "snapshots", reason, rank=rank, value=value)
    verdict = _unhealthy(verdict, record.step)
    return _on_top(verdict, for_hidden, case, reason=reason, finding=finding)


def _found(
    record: StepRecord,
    kind: str,
    detector: str,
    reason: str,
    level: Literal["actionable", "advisory"] = "actionable",
    **fields: Any,
) -> Finding:
    """Return a finding of the policy about this step, which is its own cause."""
    return Finding(
        kind=kind, level=level, step=record.step, detector=detector, reason=reason,
        onset_step=record.step, cause=kind, **fields,
    )  # fmt: skip


def _on_top(
    verdict: PolicyResult, rung: Rung, case: DecisionContext, **overrides: Any
) -> PolicyResult:
    """Apply a rule about the state on top of the step's verdict: at most one entry per step."""
    done = rung(without_entry(verdict), case, **overrides)
    if done.decision is None:
        facts = replace(done.state.facts, ledger_seq=verdict.state.facts.ledger_seq)
        state = replace(done.state, facts=facts)
        done = done._replace(state=state, decision=verdict.decision)
    return done._replace(findings=(*verdict.findings, *done.findings), readings=verdict.readings)


def _look_at_replicas(verdict: PolicyResult, case: DecisionContext) -> PolicyResult:
    """Add reports of ranks that differ where they must be equal: settings, or the state itself."""
    record, rank = case.record, case.record.replica_rank
    if record.settings_differ:
        who = f"rank {rank}" if rank >= 0 else "a rank"
        since = verdict.state.settings.since
        since = record.step if since < 0 else since
        reason = f"{who} trained with other settings than the others"
        finding = _found(record, "settings_differ", "replicas", reason, "advisory", rank=rank)
        finding = replace(finding, onset_step=since)
        state = replace(verdict.state, settings=Lasting(record.step, since))
        verdict = verdict._replace(state=state, findings=(*verdict.findings, finding))
    decision = verdict.decision
    if not record.replicas_differ or (decision and decision.action in ("rollback", "halt")):
        return verdict
    reason = "ranks that must hold the same parameters and optimizer state do not"
    reason += f": rank {rank} is wrong" if rank >= 0 else ""
    finding = _found(record, "replica_corrupted", "replicas", reason, rank=rank)
    verdict = _unhealthy(verdict, record.step)
    return _on_top(verdict, for_corrupted, case, reason=reason, finding=finding)


def _unhealthy(verdict: PolicyResult, step: int) -> PolicyResult:
    return verdict._replace(state=replace(verdict.state, last_unhealthy_step=step))


def _missed(verdict: PolicyResult, case: DecisionContext) -> PolicyResult:
    """Report snapshots that could not be taken: the first, the second, the fourth, ..."""
    num = verdict.state.num_missed + 1
    verdict = verdict._replace(state=replace(verdict.state, num_missed=num))
    if num & (num - 1):
        return verdict
    reason = f"{num} {'snapshot' if num == 1 else 'snapshots'} in memory could not be taken: a "
    reason += "rollback would go further back"
    record, value = case.record, float(num)
    finding = _found(record, "snapshot_missed", "snapshots", reason, "advisory", value=value)
    return verdict._replace(findings=(*verdict.findings, finding))


def _look_at_evaluation(
    verdict: PolicyResult, before: LadderState, ratio: float, case: DecisionContext
) -> PolicyResult:
    """Add an evaluation: evidence about the state if outliers came since the previous one.

    Without an outlier the loss may have risen because of other data or forgetting, and after a
    level was accepted this is certain to be possible. An evaluation is sent with the next step:
    that step is the first one after it, so an outlier of the current step came too late.
    """
    state, record = verdict.state, case.record
    since, last = state.evaluated_at, before.last_flagged
    flagged = last >= since >= 0 and state.accepted_at < since
    state = replace(state, evaluated_at=record.step)
    verdict = verdict._replace(state=state)
    is_bad = case.loss_kind == "minimize" and (
        ratio > case.config.state_ratio or not math.isfinite(ratio)
    )
    read = StateRead(
        trigger="evaluation",
        onset_step=last if flagged else record.step,
        num_batches=1,
        ratio=ratio,
        verdict="state" if is_bad and flagged else "abstained" if is_bad else "sound",
        detail="" if flagged or not is_bad else "no outlier since the previous evaluation",
    )
    verdict = verdict._replace(readings=(*verdict.readings, read))
    busy = verdict.decision is not None and verdict.decision.action in ("rollback", "halt")
    if read.verdict != "state" or busy:
        return verdict
    onset = min((o.step for o in before.recent if o.step >= since), default=last)
    reason = f"the evaluation loss is {ratio:.3g}x the previous one: the state is damaged"
    finding = _state_damaged(read, case.config.state_ratio, case)
    finding = replace(finding, reason=reason, detector="evaluation")
    return _on_top(
        verdict, for_finite, case, rule="evaluation", onset=onset, reason=reason, finding=finding
    )
