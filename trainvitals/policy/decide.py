"""The escalation policy: a skip needs evidence about the batch, a rollback about the state.

``decide`` is pure except for one query. Its inputs are a state, the findings of one step, and data
that all ranks share; it returns the next state and at most one decision. The query goes to the
probe, whose result is equal on all ranks too. Every decision contains its reason in plain text,
with numbers.

Certain evidence (non-finite parameters, an endless row of non-finite losses) leads to an action at
once, within budgets; without a budget the run halts. Finite evidence about the state (the probe, an
evaluation) can also come from a large optimizer spike: it has a cooldown, is spent once per onset,
and never halts a run.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from trainvitals.detect.reporter import make_finding
from trainvitals.policy.actions import (
    PolicyResult,
    halt_run,
    log_decision,
    log_skip,
    prepare_rollback,
    recurring_cause,
    state_without_entry,
    treated_cause_times,
)
from trainvitals.policy.approval import decide_rollback, expire_approval, roll_back_approved
from trainvitals.policy.commands import execute_command
from trainvitals.policy.evidence import (
    LATE_STEPS,
    DecisionContext,
    Trigger,
    damage_finding,
    describe_damage,
    is_near_jump,
    max_healthy_ratio,
    proves_damage,
    run_probe,
)
from trainvitals.policy.state import (
    MAX_BLAMED,
    REPORT_AGAIN_STEPS,
    LastingProblem,
    LrJump,
    PolicyConfig,
    PolicyState,
    RollbackPlan,
    is_outlier,
    next_probe_clock,
    note_outlier,
    note_reported,
    outliers_around,
    within_window,
)
from trainvitals.records import Finding, StateRead, StepRecord
from trainvitals.units import humanize_count

_LEVEL_STEPS = 8
_LEVEL_NOISE = 1.5
_LEVEL_LEAST = 0.05
"""The loss has risen after a jump if the median of 8 steps is above the earlier level by 1.5 times
its noise, and by 5% of the run's first losses."""
_SPIKES = frozenset({"spike", "grad_explosion"})
_LEVELS = frozenset({"level_shift", "divergence", "lost_progress", "plateau"})
"""Kinds of findings for which the probe runs."""
_KNOWN = 1.001
"""Multiple of the highest rate so far up to which a rate counts as already used."""
_SAME_ONSET_STEPS = 3
"""Onsets this close to each other are one onset."""
_JUMPS_AFTER = 20
"""Steps of a run before which a rising rate is its warm-up."""


def decide(
    state: PolicyState, findings: Sequence[Finding], context: DecisionContext
) -> PolicyResult:
    """Return the next state of the escalation policy, and its action for one step.

    At most one decision per step. After a halt, and until a decided rollback was reported done,
    there are no decisions.
    """
    record, command = context.record, context.inputs.command
    if state.rolling_back or (state.facts.halted and context.mode != "observe"):
        return PolicyResult(state)
    before = state
    state, is_approved = _advance_clock(state, context), False
    if state.facts.waiting is not None:
        state, is_approved = expire_approval(state, context.config)
    result = _judge_step(state, findings, context)
    if record.learning_rate is not None:
        result = _report_lr_jump(result, before, context)
    if context.inputs.evaluation is not None:
        result = _check_evaluation(result, before, context.inputs.evaluation, context)
    if record.nonfinite_state or record.snapshots_missed:
        result = _check_snapshots(result, context)
    if record.replicas_differ or record.settings_differ:
        result = _check_replicas(result, context)
    if is_approved and not _ends_attempt(result):
        result = _apply_rule(result, context, roll_back_approved)
    if context.inputs.collapse is not None and not _ends_attempt(result):
        result = _apply_rule(result, context, _halt_collapsed, context.inputs.collapse)
    if command is None or command.number <= state.facts.last_command:
        return result
    return execute_command(result, state, command, context)


def _halt_collapsed(state: PolicyState, context: DecisionContext, bad: Finding) -> PolicyResult:
    """Decide on a collapsed post-training run: halt, or only record it in ``observe``."""
    reason = f"{bad.reason} (on_collapse='stop')"
    if context.mode != "observe":
        return halt_run(state, context, bad, reason=reason, rule="post_training")
    # Not as halted: later steps are judged as usual.
    return log_decision(
        state, context, bad, action="halt", reason=reason, rule="post_training", acted=False
    )


def _advance_clock(state: PolicyState, context: DecisionContext) -> PolicyState:
    """Advance the policy's clock; end a hold of the learning rate when its cause has ended."""
    record, facts = context.record, state.facts
    facts = replace(facts, clock=facts.clock + 1)
    rate = record.learning_rate
    if facts.lr_cap and rate is not None and record.step >= facts.lr_cap_from:
        requested_rate = rate / record.lr_factor if record.lr_factor else rate
        if requested_rate < context.config.lr_jump * facts.lr_cap:
            facts = replace(facts, lr_cap=0.0)
    return replace(
        state,
        facts=facts,
        first_step=record.step if state.first_step < 0 else state.first_step,
        learning_rate=state.learning_rate if rate is None else rate,
        known_rate=state.rate_to_know,
    )


def _judge_step(
    state: PolicyState, findings: Sequence[Finding], context: DecisionContext
) -> PolicyResult:
    """Apply the escalation policy to the findings about one step."""
    record = context.record
    if state.facts.halted:
        return PolicyResult(_recover_observed(state, findings, context))
    bad = {f.kind: f for f in reversed(findings) if f.level == "actionable"} if findings else {}
    if (params := bad.get("nonfinite_params")) is not None:
        return _act_on_nonfinite_params(state, params, context)
    if (nonfinite := bad.get("nonfinite")) is not None:
        return _act_on_nonfinite_step(state, nonfinite, context)
    if is_outlier(record) and not record.overflow:
        return _probe_findings(_act_on_outlier(state, bad.get("spike"), context), findings, context)
    if record.skipped and record.commanded:
        return log_skip(state, context, None, reason="manual command: skip", rule="command")
    if record.overflow or record.failed_ranks:
        return _log_device_skip(state, findings, context)  # neither counts in a row nor ends it
    if state.row or state.nonfinite:
        state = replace(state, row=(), nonfinite=0, sound=False)
    if record.skipped:
        state = replace(state, last_unhealthy_step=record.step)
        return _log_device_skip(state, findings, context)
    if findings and any(finding.kind in _SPIKES for finding in findings):
        state = note_reported(state, record)
    return _probe_findings(PolicyResult(state), findings, context)


def _recover_observed(
    state: PolicyState, findings: Sequence[Finding], context: DecisionContext
) -> PolicyState:
    """Let the policy end an observed halt when the run has recovered on its own."""
    record = context.record
    if record.skipped or any(finding.level == "actionable" for finding in findings):
        return replace(state, last_unhealthy_step=record.step)
    quiet = record.step - state.last_unhealthy_step
    if quiet < context.config.max_skips_in_a_row:
        return state
    facts = replace(state.facts, halted="", cause=None, causes=())
    return replace(state, facts=facts, row=(), nonfinite=0)


def _log_device_skip(
    state: PolicyState, findings: Sequence[Finding], context: DecisionContext
) -> PolicyResult:
    """Log a decision for a step that the device skipped without an actionable finding."""
    if not context.record.skipped or context.record.overflow:
        return PolicyResult(state)
    finding = next((f for f in findings if f.kind == "rank_failed"), None)
    if finding is not None:
        return log_skip(state, context, finding, reason=finding.reason, rule=finding.detector)
    reason = "the device skipped the step; no detector gave a reason"
    return log_skip(state, context, None, reason=reason, rule="device")


# --------------------------------------------------------------------------- certain evidence


def _act_on_nonfinite_params(
    state: PolicyState, bad: Finding, context: DecisionContext
) -> PolicyResult:
    """Decide on non-finite parameters: roll back, or halt if the mode allows no rollback."""
    record = context.record
    onset = min(step for step in (record.step, _current_onset(state)) if step >= 0)
    state = replace(state, last_flagged=record.step, last_unhealthy_step=record.step)
    if context.can_roll_back:
        # A bit flip or a broken kernel: no batch caused it, so all batches are trained again.
        plan = RollbackPlan(
            rule="nonfinite_params", kind="nonfinite_params", onset_step=onset, reason=bad.reason,
            finding=bad, replay_all_batches=True,
        )  # fmt: skip
        return _act_on_certain_evidence(state, context, plan)
    reason = (
        f"{bad.reason}: all further steps would be lost, and mode {context.mode!r} has no "
        "checkpoint to roll back to; use mode 'heal'"
    )
    return halt_run(state, context, bad, reason=reason, rule="nonfinite_params")


def _current_onset(state: PolicyState) -> int:
    """Return the first step of the problem that the policy is acting on; -1 if there is none."""
    if state.row:
        return state.row[0].step
    return state.nonfinite_onset if state.nonfinite else -1


def _act_on_nonfinite_step(
    state: PolicyState, bad: Finding, context: DecisionContext
) -> PolicyResult:
    """Decide on a non-finite step: skip, query the probe, roll back or halt."""
    record, config = context.record, context.config
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
    onset = state.row[0].step if state.row else onset
    readings: tuple[StateRead, ...] = ()
    if num == config.ask_after:
        read = run_probe(state, "nonfinite", onset, context)
        readings = () if read is None else (read,)
        state = replace(state, sound=read is not None and read.verdict in ("sound", "worse"))
        if read is not None and read.verdict == "state":
            result = _act_on_damaged_state(state, read, bad, onset, context)
            return result._replace(readings=readings)
    return _act_on_nonfinite_row(state, bad, onset, context)._replace(readings=readings)


def _act_on_damaged_state(
    state: PolicyState, read: StateRead, bad: Finding, onset: int, context: DecisionContext
) -> PolicyResult:
    """Decide on a state that the probe found damaged: roll back, or log the skip."""
    finding = damage_finding(read, max_healthy_ratio(state, onset, context), context, bad.rank)
    if context.can_roll_back:
        reason = f"{bad.reason}; {finding.reason}"
        plan = RollbackPlan(
            rule="state_damaged", kind="nonfinite", onset_step=onset, reason=reason, finding=bad
        )
        return _act_on_certain_evidence(state, context, plan)
    result = log_skip(state, context, bad, reason=bad.reason, rule=bad.detector)
    return result._replace(findings=(finding,))


def _act_on_nonfinite_row(
    state: PolicyState, bad: Finding, onset: int, context: DecisionContext
) -> PolicyResult:
    """Decide on a row of non-finite steps: skip, roll back, or halt if nothing else helps."""
    config, num = context.config, state.nonfinite
    findings: tuple[Finding, ...] = ()
    if state.sound and num == config.nonfinite_in_a_row:
        text = (
            f"{num} non-finite steps in a row since step {state.nonfinite_onset}, but the model's "
            "loss on earlier batches is unchanged: the data are bad; each update is skipped"
        )
        findings = (replace(bad, kind="nonfinite_streak", level="advisory", reason=text),)
    elif not state.sound and context.can_roll_back and num >= config.nonfinite_in_a_row:
        reason = f"{num} non-finite steps in a row; the last: {bad.reason}"
        plan = RollbackPlan(
            rule="nonfinite_streak", kind="nonfinite", onset_step=onset, reason=reason, finding=bad
        )
        return _act_on_certain_evidence(state, context, plan)
    elif not state.sound and num >= config.max_skips_in_a_row:
        reason = (
            f"{num} non-finite steps in a row, up to step {context.record.step}: the run is making "
            "no progress"
        )
        return halt_run(state, context, bad, reason=reason, rule="stuck")
    reason = bad.reason if num == 1 else f"{bad.reason} ({num} non-finite steps in a row)"
    result = log_skip(state, context, bad, reason=reason, rule=bad.detector)
    return result._replace(findings=findings)


# ----------------------------------------------------------------------------- finite values


def _act_on_outlier(
    state: PolicyState, spike: Finding | None, context: DecisionContext
) -> PolicyResult:
    """Decide on an outlier: record that the device withheld it, or had to apply it."""
    record = context.record
    state = note_outlier(replace(state, nonfinite=0, sound=False), record, context.config)
    if spike is None or not record.withheld:
        return PolicyResult(state)
    num = len(state.row)
    reason = spike.reason if num == 1 else f"{spike.reason} ({num} outliers in a row)"
    return log_skip(state, context, spike, reason=reason, rule="outlier")


def _probe_findings(
    result: PolicyResult, findings: Sequence[Finding], context: DecisionContext
) -> PolicyResult:
    """Query the probe about reported findings; damage is evidence for an action."""
    state, config, step = result.state, context.config, context.record.step
    jump, suspected, written = state.lr_jump, state.suspected, context.inputs.written
    if not findings and jump is None and suspected < 0:
        return result
    if any(finding.kind == "divergence" for finding in findings):
        # Not a bad step, but no state saved since then is proven healthy by it.
        state = replace(state, last_unhealthy_step=step)
    if jump is not None and step - jump.step > config.lr_jump_steps + _LEVEL_STEPS:
        state = replace(state, lr_jump=None)
    result = result._replace(state=state)
    reported = [f for f in findings if f.kind in _SPIKES and not written]
    trigger: Trigger = "spike" if reported else "level"
    reported = [written] if written else reported or [f for f in findings if f.kind in _LEVELS]
    onsets = [f.onset_step if f.onset_step >= 0 else f.step for f in reported]
    if not onsets and _has_loss_risen(state.lr_jump, context):
        onsets = [step - _LEVEL_STEPS]
    is_late = not written and suspected >= 0 and step - suspected >= LATE_STEPS
    if is_late:
        onsets, trigger = [suspected], "level"
    if not onsets or context.inputs.probe is None or context.loss_kind != "minimize":
        return result
    onset, clock = min(onsets), state.facts.clock
    since = onset
    if (group := outliers_around(state, step)) and trigger == "spike":
        onset, since = min(onset, group[0].step), group[0].step
        if not context.record.clips and any(not o.withheld for o in group if o.step < step):
            since = -1  # one unclipped update on new data can be enough to forget the old data
    times = within_window(state.asked, clock, config)
    # A state that was asked about shortly before has had more updates on the new data since.
    asks = (step - clock + t for t in times if clock - t <= 4 * config.ask_pause)
    since = step if written else min([since, *(ask for ask in asks if ask >= state.first_step)])
    is_soon = is_late or is_near_jump(state, onset, context)
    pause_ends = times[-1] + _LEVEL_STEPS if is_soon and times else next_probe_clock(state, config)
    if clock < pause_ends and not written:
        return result
    read = run_probe(state, trigger, onset, context)
    if read is None:
        return result
    state = replace(state, asked=times if written else (*times[: -is_late or None], clock))
    if read.verdict != "abstained":
        state = replace(state, passes_until=clock + config.ask_pause)
    is_bad = read.verdict in {"state", "worse"}
    is_proven = read.verdict == "state" and proves_damage(read, since, state, context)
    is_suspected = is_bad and not is_proven and not written and step - onset < 2 * LATE_STEPS
    state = replace(state, suspected=onset if is_suspected else -1)
    result = result._replace(state=state, readings=(*result.readings, read))
    if not is_proven:
        return result
    finding = damage_finding(read, max_healthy_ratio(state, onset, context), context)
    what = reported[0].reason if reported else "the loss rose and stays high"
    plan = RollbackPlan(
        rule="state_damaged", kind="state", onset_step=onset, finding=finding, is_finite=True,
        reason=f"{what}; {describe_damage(read)}", replay_all_batches=bool(written),
    )  # fmt: skip
    return _apply_rule(result, context, _act_on_finite_evidence, plan)


# ------------------------------------------------------------------------- learning-rate jumps


def _has_loss_risen(jump: LrJump | None, context: DecisionContext) -> bool:
    """Return whether the latest losses after a jump have lost a large part of the progress."""
    if jump is None or context.record.step - jump.step < _LEVEL_STEPS:
        return False
    rise = context.loss_trend().recent - jump.level
    gain = max(jump.first - jump.level, 0.0)
    least = (context.config.level_rise * gain, _LEVEL_NOISE * jump.noise)
    return rise > max(*least, _LEVEL_LEAST * jump.first)


def is_lr_jump(record: StepRecord, last: float, config: PolicyConfig) -> bool:
    """Return whether a step's learning rate is many times the last one, as the policy judges."""
    rate = record.learning_rate
    return rate is not None and last > 0.0 and rate >= config.lr_jump * last


def is_lr_restart(record: StepRecord, state: PolicyState, config: PolicyConfig) -> bool:
    """Return whether the policy expects this jump of the rate: scheduled, or trained before."""
    rate = record.learning_rate or 0.0
    return is_lr_jump(record, state.learning_rate, config) and (
        record.rate_declared or rate <= _KNOWN * state.rate_to_know
    )


def _report_lr_jump(
    result: PolicyResult, before: PolicyState, context: DecisionContext
) -> PolicyResult:
    """Report a finding of the policy: an undeclared jump above every rate used so far."""
    record, config, state = context.record, context.config, result.state
    rate, last = record.learning_rate, before.learning_rate
    if rate is None or not is_lr_jump(record, last, config):
        return result
    if record.rate_declared or rate <= _KNOWN * state.known_rate:
        return result
    if state.facts.clock <= _JUMPS_AFTER or state.rolling_back:
        return result
    if record.step <= state.announced_until:
        return result
    jump = LrJump(record.step, last, rate, *context.loss_trend()[:3])
    reason = f"the learning rate rose from {last:.4g} to {rate:.4g} in one step"
    limit = config.lr_jump * last
    finding = make_finding(
        "learning_rate", record.step, reason, kind="lr_jump", limit=limit, value=rate
    )
    state = replace(state, lr_jump=jump)
    return result._replace(state=state, findings=(*result.findings, finding))


# ---------------------------------------------------------- snapshots, replicas and evaluations


def _check_snapshots(result: PolicyResult, context: DecisionContext) -> PolicyResult:
    """Apply the policy to what ranks report of states that they checked or could not copy."""
    record = context.record
    if record.snapshots_missed:
        result = _report_missed_snapshots(result, context)
    if not record.nonfinite_state or _ends_attempt(result):
        return result
    rank = record.nonfinite_state_rank
    where = f"rank {rank}" if rank >= 0 else "several ranks"
    reason = f"parameters, optimizer state or buffers are NaN or infinite on {where}"
    value = float(record.nonfinite_state)
    finding = make_finding(
        "snapshots", record.step, reason, kind="nonfinite_state", level="actionable", rank=rank,
        value=value,
    )  # fmt: skip
    result = _mark_unhealthy(result, record.step)
    return _apply_rule(result, context, _act_on_nonfinite_state, finding)


def _ends_attempt(result: PolicyResult) -> bool:
    """Return whether the policy's decision on the step is a rollback or a halt."""
    return result.decision is not None and result.decision.action in ("rollback", "halt")


def _apply_rule(
    result: PolicyResult, context: DecisionContext, rule: Callable[..., PolicyResult], *seen: Any
) -> PolicyResult:
    """Return ``result`` with that of a rule about the state: at most one entry per step."""
    done = rule(state_without_entry(result), context, *seen)
    if done.decision is None:
        facts = replace(done.state.facts, ledger_seq=result.state.facts.ledger_seq)
        state = replace(done.state, facts=facts)
        done = done._replace(state=state, decision=result.decision)
    return done._replace(findings=(*result.findings, *done.findings), readings=result.readings)


def _check_replicas(result: PolicyResult, context: DecisionContext) -> PolicyResult:
    """Apply the policy to ranks that differ where they must be equal."""
    record, rank = context.record, context.record.replica_rank
    if record.settings_differ:
        who = f"rank {rank}" if rank >= 0 else "a rank"
        since = result.state.settings.since
        since = record.step if since < 0 else since
        reason = f"{who} trained with other settings than the others"
        finding = make_finding(
            "replicas", record.step, reason, kind="settings_differ", rank=rank, onset_step=since
        )
        state = replace(result.state, settings=LastingProblem(record.step, since))
        result = result._replace(state=state, findings=(*result.findings, finding))
    if not record.replicas_differ or _ends_attempt(result):
        return result
    reason = "ranks that must hold the same parameters and optimizer state do not"
    reason += f": rank {rank} is wrong" if rank >= 0 else ""
    finding = make_finding(
        "replicas", record.step, reason, kind="replica_corrupted", level="actionable", rank=rank
    )
    result = _mark_unhealthy(result, record.step)
    return _apply_rule(result, context, _act_on_differing_replicas, finding)


def _mark_unhealthy(result: PolicyResult, step: int) -> PolicyResult:
    """Record in the policy's state that this step was unhealthy."""
    return result._replace(state=replace(result.state, last_unhealthy_step=step))


def _report_missed_snapshots(result: PolicyResult, context: DecisionContext) -> PolicyResult:
    """Report snapshots that could not be taken: the first, the second, the fourth, ..."""
    num = result.state.num_missed + 1
    result = result._replace(state=replace(result.state, num_missed=num))
    if num & (num - 1):
        return result
    reason = f"{num} {'snapshot' if num == 1 else 'snapshots'} in memory could not be taken: a "
    reason += "rollback would go further back"
    step = context.record.step
    finding = make_finding("snapshots", step, reason, kind="snapshot_missed", value=float(num))
    return result._replace(findings=(*result.findings, finding))


def _check_evaluation(
    result: PolicyResult, before: PolicyState, ratio: float, context: DecisionContext
) -> PolicyResult:
    """Judge an evaluation: it is evidence about the state if outliers came since the last one.

    Without an outlier the loss may have risen because of other data or forgetting, and after a
    level was accepted this is certain to be possible. An evaluation is sent with the next step:
    that step is the first one after it, so an outlier of the current step came too late.
    """
    state, record = result.state, context.record
    since, last = state.evaluated_at, before.last_flagged
    flagged = last >= since >= 0 and state.accepted_at < since
    result = result._replace(state=replace(state, evaluated_at=record.step))
    is_bad = context.loss_kind == "minimize" and (
        ratio > context.config.state_ratio or not math.isfinite(ratio)
    )
    read = StateRead(
        trigger="evaluation",
        onset_step=last if flagged else record.step,
        num_batches=1,
        ratio=ratio,
        verdict="state" if is_bad and flagged else "abstained" if is_bad else "sound",
        detail="" if flagged or not is_bad else "no outlier since the previous evaluation",
    )
    result = result._replace(readings=(*result.readings, read))
    if read.verdict != "state" or _ends_attempt(result):
        return result
    onset = min((o.step for o in before.recent if o.step >= since), default=last)
    reason = f"the evaluation loss is {ratio:.3g}x the previous one: the state is damaged"
    finding = damage_finding(read, context.config.state_ratio, context)
    finding = replace(finding, reason=reason, detector="evaluation")
    plan = RollbackPlan(
        rule="evaluation", kind="state", onset_step=onset, reason=reason, finding=finding,
        is_finite=True,
    )  # fmt: skip
    return _apply_rule(result, context, _act_on_finite_evidence, plan)


# ------------------------------------------------------------------------------------- rollbacks


def _act_on_certain_evidence(
    state: PolicyState, context: DecisionContext, plan: RollbackPlan
) -> PolicyResult:
    """Decide on certain evidence: roll back, or halt without a budget or a checkpoint."""
    config, facts = context.config, state.facts
    cause = recurring_cause(facts, plan.kind, plan.onset_step)
    num_causes, over = len(treated_cause_times(facts, config)), ""
    if cause is not None and cause.tries >= config.max_tries:
        over = f"{cause.tries} rollbacks (the limit) did not fix it"
    elif cause is None and num_causes >= config.max_causes:
        over = (
            f"rollback budget used up: {num_causes} causes (the limit) were rolled back within "
            f"{config.budget_window} steps"
        )
    if over:
        over = f"{plan.reason}; {over}"
        return halt_run(state, context, plan.finding, reason=over, rule="budget")
    rollback, note = prepare_rollback(facts, context, plan, cause)
    if rollback is None:
        reason = f"{plan.reason}; {note}"
        return halt_run(state, context, plan.finding, reason=reason, rule="no_checkpoint")
    return decide_rollback(state, context, plan, rollback)


def _act_on_nonfinite_state(
    state: PolicyState, context: DecisionContext, finding: Finding
) -> PolicyResult:
    """Decide on a non-finite state with a finite loss: roll back, otherwise report it.

    It never halts: the losses are fine, and the model may write such buffers deliberately. If the
    state is non-finite again after every batch was trained again, a rollback does not fix it, and
    no further rollback is spent on it within the budget's window.
    """
    config, facts, note = context.config, state.facts, ""
    if not context.can_roll_back or context.mode == "observe":
        note = f"mode {context.mode!r} does not roll back"
    elif facts.clock < facts.uncured_until:
        note = "an earlier rollback did not fix it"
    elif recurring_cause(facts, finding.kind, context.record.step) is not None:
        facts = replace(facts, uncured_until=facts.clock + config.budget_window)
        state, note = replace(state, facts=facts), "it is there again after a rollback"
    elif len(treated_cause_times(facts, config)) >= config.max_causes:
        note = f"the rollback budget is used up ({config.max_causes} causes)"
    return _replay_all_batches(state, context, finding, "hidden", note)


def _act_on_differing_replicas(
    state: PolicyState, context: DecisionContext, finding: Finding
) -> PolicyResult:
    """Decide on replicas that differ: roll back to the last equal state; halt if it recurs.

    One difference is a flipped bit, and training again fixes it. Two on one rank within the
    budget's window mean a faulty machine. Neither fixes a difference that recurs bit for bit: it is
    reported, and training continues.
    """
    config, facts, record = context.config, state.facts, context.record
    rank, since, note = record.replica_rank, state.settings.since, ""
    earlier = tuple(
        (when, who) for when, who in facts.corrupted if when > facts.clock - config.budget_window
    )
    if since >= 0 and record.step - state.settings.reported_step <= 2 * REPORT_AGAIN_STEPS:
        return PolicyResult(state)  # it follows from the reported difference in settings
    if since >= 0:
        note = f"ranks had other settings from step {since} on, which explains it"
    elif record.replayed_alike:
        note = (
            "the same difference recurred after a rollback, bit for bit: the cause is software, or "
            "a fault that repeats itself"
        )
    elif not context.can_roll_back or context.mode == "observe":
        note = f"mode {context.mode!r} does not roll back"
    elif any(-1 in (who, rank) or who == rank for _, who in earlier):
        when = humanize_count(facts.clock - earlier[-1][0], "step")
        where = f"on rank {rank}" if rank >= 0 else "and two replicas cannot tell whose fault it is"
        text = f"{finding.reason}; it is there again {when} after a rollback, {where}"
        text += ": a persistent fault"
        return halt_run(state, context, finding, reason=text, rule=finding.kind)
    elif len(treated_cause_times(facts, config)) >= config.max_causes:
        note = f"the rollback budget is used up ({config.max_causes} causes)"
    corrupted = (*earlier, (facts.clock, rank))
    return _replay_all_batches(state, context, finding, "replicas", note, corrupted=corrupted)


def _replay_all_batches(
    state: PolicyState,
    context: DecisionContext,
    finding: Finding,
    lasting: Literal["hidden", "replicas"],
    note: str,
    **budget_update: Any,
) -> PolicyResult:
    """Decide a rollback that trains every batch again; with a note why not, report instead.

    ``budget_update`` is added to the facts together with the rollback.
    """
    plan = RollbackPlan(
        rule=finding.kind, kind=finding.kind, onset_step=context.record.step,
        reason=finding.reason, finding=finding, replay_all_batches=True,
    )  # fmt: skip
    rollback = None
    if not note:
        rollback, note = prepare_rollback(state.facts, context, plan, None)
    if rollback is not None:
        facts = replace(rollback.facts, **budget_update)
        return decide_rollback(state, context, plan, rollback._replace(facts=facts))
    report: LastingProblem | None = getattr(state, lasting).report(context.record.step)
    if report is None:
        return PolicyResult(state)
    saves = context.can_roll_back or lasting == "replicas"
    text = f"{finding.reason}; {note}, so training continues"
    text += "; no snapshot or checkpoint is made while it is so" if saves else ""
    finding = replace(finding, reason=text, onset_step=report.since)
    return PolicyResult(replace(state, **{lasting: report}), findings=(finding,))


def _act_on_finite_evidence(
    state: PolicyState, context: DecisionContext, plan: RollbackPlan
) -> PolicyResult:
    """Decide on finite evidence about the state: roll back, or report it and continue.

    A jump of the learning rate immediately before the onset counts as the cause: then every batch
    is trained again with the earlier rate held.
    """
    config, facts, onset = context.config, state.facts, plan.onset_step
    num_blamed = sum(abs(onset - blamed) <= _SAME_ONSET_STEPS for blamed in facts.blamed)
    is_again = num_blamed == 1 and recurring_cause(facts, "state", onset) is not None
    if num_blamed and not is_again:
        return PolicyResult(state)  # already acted on, or reported
    facts = replace(facts, blamed=(*facts.blamed, onset)[-MAX_BLAMED:])
    why_not, suffix, rollback = "", "", None
    if is_again:
        why_not = ", as before the rollback: the data is at fault; training continues"
    elif not context.can_roll_back:
        why_not = (
            f"; mode {context.mode!r} does not roll back: stop the job and restart it from a "
            f"checkpoint before step {max(0, onset - config.margin)} (`vitals checkpoints list` "
            "shows them); mode 'heal' does this by itself"
        )
    elif facts.clock < facts.cooldown_until:
        why_not = (
            f"; the previous such rollback was under {config.finite_cooldown} steps ago, so "
            "training continues"
        )
    else:
        jump = state.lr_jump if is_near_jump(state, onset, context) else None
        if jump is not None:
            suffix = (
                f"; the learning rate rose from {jump.before:.4g} to {jump.after:.4g} at step "
                f"{jump.step}; {jump.before:.4g} is held"
            )
            plan = replace(plan, rule="lr_jump", kind="lr_jump", jump=jump, replay_all_batches=True)
        cause = recurring_cause(facts, plan.kind, onset)
        rollback, note = prepare_rollback(facts, context, plan, cause)
        why_not = f"; {note}, so training continues"
    if rollback is None:
        finding = replace(plan.finding, reason=plan.finding.reason + why_not)
        return PolicyResult(replace(state, facts=facts), findings=(finding,))
    state = state if plan.jump is None else replace(state, lr_jump=None)
    rollback = rollback._replace(reason=rollback.reason + suffix)
    return decide_rollback(state, context, replace(plan, reason=plan.reason + suffix), rollback)
