"""The escalation policy: a skip needs evidence about the batch, a rollback about the state.

``decide`` is pure but for one question: a state, the findings of one step and what every rank knows
alike go in; the next state and at most one decision come out. The question goes to the probe, and
its answer is as equal on all ranks as everything else. Every decision says in words why, with its
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace

from trainvitals.detect.outliers import Limits, LossKind
from trainvitals.policy.evidence import NO_READING, Ask, Reading
from trainvitals.policy.rungs import (
    Case,
    Course,
    Verdict,
    accept,
    after_silence,
    after_yes,
    answer,
    for_certain,
    for_corrupted,
    for_finite,
    for_hidden,
    halt,
    is_near_jump,
    skip,
    was_blamed,
    without_entry,
)
from trainvitals.policy.state import (
    CheckpointRef,
    LadderConfig,
    LadderState,
    LrJump,
    Mode,
    Proposal,
    is_new_level,
    is_outlier,
    note_outlier,
    recurring_level,
    with_outlier,
    withholding,
)
from trainvitals.records import Finding, StateRead, StepRecord

Rung = Callable[..., Verdict]
_LEVEL_STEPS = 8
_LEVEL_NOISE = 1.5
_LEVEL_LEAST = 0.05
_ABSURD = 1e5
"""Multiple of the run's first losses beyond which a state reads nothing but damaged."""
_JUMPS_AFTER = 20
"""Steps of a run before which a rate that rises is its warm-up."""


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
    probe: Callable[[Ask], Reading] | None = None,
    evaluation: float | None = None,
    usual: Limits | None = None,
    course: Callable[[], Course] = lambda: Course(0.0, 0.0, 0.0),
    lacks: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Return the next state and what to do about one step.

    At most one decision a step. ``now_attempt_id`` is the id the new branch gets if this call rolls
    back. After a halt, and until a decided rollback was reported done, nothing is decided.

    Args:
        state: what the last call returned.
        findings: what the detectors say about the step.
        record: the step.
        decided_at_step: the step in whose call this happens.
        checkpoints: what a rollback may go to, equal on all ranks.
        command: a person's or the collector's proposal.
        mode: how far it may go.
        config: its settings.
        now_attempt_id: id of the branch that a rollback would open.
        loss_kind: what the loss is good for.
        probe: asks the state; None where nothing can be asked.
        evaluation: an evaluation's loss over the one before, both with the floor; None: there was
            none with this step.
        usual: the limits without a recurring level in them.
        course: where the loss has been.
        lacks: commands that this loop cannot carry out, and why.
    """
    if state.rolling_back or (state.facts.halted and mode != "observe"):
        return Verdict(state)
    case = Case(
        record, decided_at_step, checkpoints, mode, config or LadderConfig(), now_attempt_id,
        loss_kind, probe, course, lacks,
    )  # fmt: skip
    before = state
    state = _tick(state, case)
    is_yes = False
    if state.facts.waiting is not None:
        state, is_yes = after_silence(state, case.config)
    verdict = _judge_step(state, findings, case, usual or Limits())
    if record.learning_rate is not None:
        verdict = _look_at_rate(verdict, before, case)
    if evaluation is not None:
        verdict = _look_at_evaluation(verdict, before, evaluation, case)
    if record.nonfinite_state or record.snapshots_missed:
        verdict = _look_at_snapshot(verdict, case)
    if record.replicas_differ or record.settings_differ:
        verdict = _look_at_replicas(verdict, case)
    if is_yes and not (verdict.decision and verdict.decision.action in ("rollback", "halt")):
        gone = after_yes(without_entry(verdict), case)
        if gone.decision is None:
            gone = gone._replace(decision=verdict.decision)
            facts = replace(gone.state.facts, ledger_seq=verdict.state.facts.ledger_seq)
            gone = gone._replace(state=replace(gone.state, facts=facts))
        verdict = gone._replace(
            findings=(*verdict.findings, *gone.findings),
            readings=verdict.readings,
            accepted=verdict.accepted,
        )
    if command is None or command.number <= state.facts.last_command:
        return verdict
    return answer(verdict, state, command, case)


def _tick(state: LadderState, case: Case) -> LadderState:
    """Let time go on, and a hold of the learning rate end with its cause."""
    record, facts = case.record, state.facts
    facts = replace(facts, clock=facts.clock + 1)
    rate = record.learning_rate
    if facts.lr_cap and rate is not None and record.step >= facts.lr_cap_from:
        asked = rate / record.lr_factor if record.lr_factor else rate
        if asked < case.config.lr_jump * facts.lr_cap:
            facts = replace(facts, lr_cap=0.0)
    return replace(
        state,
        facts=facts,
        first_step=record.step if state.first_step < 0 else state.first_step,
        learning_rate=state.learning_rate if rate is None else rate,
        known_rate=state.rate_to_know,
    )


def _judge_step(
    state: LadderState, findings: Sequence[Finding], case: Case, usual: Limits
) -> Verdict:
    record = case.record
    if state.facts.halted:
        return Verdict(_recover_observed(state, findings, case))
    bad = {finding.kind: finding for finding in reversed(findings) if finding.level == "actionable"}
    if (params := bad.get("nonfinite_params")) is not None:
        return _nonfinite_params(state, params, case)
    if (nonfinite := bad.get("nonfinite")) is not None:
        return _nonfinite(state, nonfinite, case)
    spike = bad.get("spike")
    if spike is not None and is_outlier(record):
        return _outlier(state, spike, case)
    if record.skipped and record.commanded:
        return skip(state, None, "manual command: skip", "command", case)
    if record.overflow or record.failed_ranks:
        return _device_skip(state, findings, case)  # neither counts in a row nor ends it
    if state.row or state.nonfinite:
        state = replace(state, row=(), nonfinite=0, sound=False)
    if record.skipped:
        state = replace(state, last_unhealthy_step=record.step)
        return _device_skip(state, findings, case)
    if state.facts.recurring is not None and _is_above(record, usual):
        state = replace(state, groups=with_outlier(state, record, case.config))
    return _level(state, findings, case)


def _is_above(record: StepRecord, limits: Limits) -> bool:
    pairs = ((record.loss, limits.loss), (record.grad_norm, limits.grad_norm))
    return any(x is not None and limit is not None and x > limit for x, limit in pairs)


def _recover_observed(state: LadderState, findings: Sequence[Finding], case: Case) -> LadderState:
    """Let an observed halt end when the run, which nobody stopped, has recovered by itself."""
    record = case.record
    if record.skipped or any(finding.level == "actionable" for finding in findings):
        return replace(state, last_unhealthy_step=record.step)
    quiet = record.step - state.last_unhealthy_step
    if quiet < case.config.max_skips_in_a_row:
        return state
    facts = replace(state.facts, halted="", cause=None, causes=())
    return replace(state, facts=facts, row=(), nonfinite=0)


def _device_skip(state: LadderState, findings: Sequence[Finding], case: Case) -> Verdict:
    """Record a step that was skipped on the device for a reason that is no finding to act on."""
    if not case.record.skipped or case.record.overflow:
        return Verdict(state)
    finding = next((f for f in findings if f.kind == "rank_failed"), None)
    reason = finding.reason if finding else "the device skipped the step; no detector gave a reason"
    return skip(state, finding, reason, finding.detector if finding else "device", case)


# --------------------------------------------------------------------------- certain evidence


def _nonfinite_params(state: LadderState, bad: Finding, case: Case) -> Verdict:
    record = case.record
    onset = min(step for step in (record.step, _onset_of_stretch(state)) if step >= 0)
    state = replace(state, last_flagged=record.step, last_unhealthy_step=record.step)
    if case.heals:
        # A bit flip, a broken kernel: no batch is to blame, so none is left out.
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
    """Return where the present stretch of trouble began; -1 where there is none."""
    if state.row:
        return state.row[0].step
    return state.nonfinite_onset if state.nonfinite else -1


def _nonfinite(state: LadderState, bad: Finding, case: Case) -> Verdict:
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
    state: LadderState, read: StateRead, bad: Finding, onset: int, case: Case
) -> Verdict:
    finding = _state_damaged(read, _blames(state, onset, case), case, bad.rank)
    if case.heals:
        return for_certain(
            state, case, rule="state_damaged", kind="nonfinite", onset=onset,
            reason=f"{bad.reason}; {finding.reason}", finding=bad,
        )  # fmt: skip
    return skip(state, bad, bad.reason, bad.detector, case)._replace(findings=(finding,))


def _nonfinite_row(state: LadderState, bad: Finding, onset: int, case: Case) -> Verdict:
    """Skip a non-finite step; where they do not end, go back, or halt where nothing else helps."""
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


# ----------------------------------------------------------------------------- finite outliers


def _outlier(state: LadderState, spike: Finding, case: Case) -> Verdict:
    record, config = case.record, case.config
    left = withholding(state, config, clips=record.clips).left
    state = note_outlier(replace(state, nonfinite=0, sound=False), record, config)
    if not record.clips and state.facts.recurring is None:
        level = recurring_level(state, config)
        if level is not None:
            return _recurring(state, spike, case)
    if is_new_level(state, config):
        return _new_level(state, spike, case)
    readings: tuple[StateRead, ...] = ()
    findings: tuple[Finding, ...] = ()
    if len(state.row) == config.ask_after:
        onset = state.row[0].step
        read = _ask(state, "row", onset, case)
        readings = () if read is None else (read,)
        again = was_blamed(state, onset)
        if read is not None and read.verdict == "state" and _is_evidence(read, state, case):
            finding = _state_damaged(read, _blames(state, onset, case), case)
            blamed = for_finite(
                state, case, rule="state_damaged", onset=onset, finding=finding,
                reason=f"{spike.reason}; {_in_words(read)}",
            )  # fmt: skip
            if blamed.decision is not None:
                return blamed._replace(readings=readings)
            state, findings = blamed.state, blamed.findings
        if read is not None and read.verdict in ("state", "worse") and not again:
            state = replace(state, passes_since=onset)
    if not left and not state.spent and state.row[0].step != state.passes_since:
        state = replace(state, spent=True)
        text = (
            f"{config.max_withheld} updates (the limit) were withheld within "
            f"{config.withheld_window} steps: outliers are applied until older ones expire"
        )
        spent = replace(spike, kind="withholding_spent", level="advisory", reason=text)
        findings = (*findings, spent)
    if not record.withheld:
        return Verdict(state, findings=findings, readings=readings)
    state = replace(state, spent=False) if left > 1 and state.spent else state
    num = len(state.row)
    reason = spike.reason if num == 1 else f"{spike.reason} ({num} outliers in a row)"
    return skip(state, spike, reason, "outlier", case)._replace(
        findings=findings, readings=readings
    )


def _is_evidence(read: StateRead, state: LadderState, case: Case) -> bool:
    """Return whether it is damage that was read, or may be forgetting: that is no evidence.

    What was learnt before reads worse after updates on new data. An outlier of the row was applied,
    but for the first, left to the clip; no forgetting leads to absurd losses.
    """
    applied = [not outlier.withheld for outlier in state.row]
    was_trained_on = any(applied[1:]) or (applied[0] and not case.record.clips)
    now = math.inf if read.now is None or not math.isfinite(read.now) else read.now
    return not was_trained_on or now > _ABSURD * case.course().first


def _new_level(state: LadderState, spike: Finding, case: Case) -> Verdict:
    row = state.row
    losses = sorted(o.loss for o in row if o.loss is not None)
    around = f", loss around {losses[len(losses) // 2]:.4g}" if losses else ""
    reason = (
        f"{len(row)} outliers in a row since step {row[0].step}{around}: accepted as the new "
        "level; values up to it are no longer withheld"
    )
    verdict = accept(state, spike, reason, "level_accepted", case, outliers=row)
    return verdict._replace(accepted=row)


def _recurring(state: LadderState, spike: Finding, case: Case) -> Verdict:
    config = case.config
    level = recurring_level(state, config)
    num = sum(group.num for group in state.groups)
    share = num / max(1, min(state.facts.clock, config.withheld_window))
    reason = (
        f"{len(state.groups)} short groups of outliers within {config.withheld_window} steps "
        f"({100 * share:.2g} % of them): a recurring kind of batch; from now on "
        "values up to twice theirs are applied"
    )
    state = replace(state, facts=replace(state.facts, recurring=level), row=())
    return accept(state, spike, reason, "recurring_level", case, outliers=())


# ---------------------------------------------------------------------- what is asked and told


def _ask(
    state: LadderState, trigger: Literal["row", "nonfinite", "level", "lr_jump"], onset: int,
    case: Case,
) -> StateRead | None:  # fmt: skip
    """Ask the probe; return its answer, None where there is no probe."""
    if case.probe is None:
        return None
    config = case.config
    floor = config.state_floor * case.course().first
    reading = case.probe(Ask(trigger=trigger, step=case.record.step, onset_step=onset, floor=floor))
    ratio = reading.ratio(floor)
    verdict: Literal["state", "worse", "sound", "abstained"] = "abstained"
    if ratio is not None:
        is_worse = ratio > config.state_ratio
        verdict = (
            "state" if ratio > _blames(state, onset, case) else "worse" if is_worse else "sound"
        )
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


def _blames(state: LadderState, onset: int, case: Case) -> float:
    """Return the ratio above which kept batches blame the state."""
    config = case.config
    if is_near_jump(state, onset, case):
        return config.state_ratio_jump
    return config.state_ratio if case.record.clips else config.state_ratio_unclipped


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(read: StateRead) -> str:
    """Return what the probe read, in words."""
    if read.ratio is None:
        return "the probe gave no verdict"
    return (
        f"the loss on {read.num_batches} earlier batches is {read.ratio:.3g}x what it was: the "
        "state is damaged"
    )


def _state_damaged(read: StateRead, limit: float, case: Case, rank: int = -1) -> Finding:
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


def _level(state: LadderState, findings: Sequence[Finding], case: Case) -> Verdict:
    """Ask about a level that rose: the answer acts beside a jump of the rate, else it is told."""
    if case.loss_kind != "minimize":
        return Verdict(state)
    diverged = next((f for f in findings if f.kind == "divergence"), None)
    if diverged is not None:
        # No bad step, and yet nothing that was saved since is proven healthy by it.
        state = replace(state, last_unhealthy_step=case.record.step)
    jump, onset = state.lr_jump, -1
    if jump is not None:
        since = case.record.step - jump.step
        if since > case.config.lr_jump_steps + _LEVEL_STEPS:
            return Verdict(replace(state, lr_jump=None, losses=()))
        loss = case.record.loss
        was_asked = state.losses[:1] == (math.inf,)
        if loss is not None and math.isfinite(loss) and not was_asked:
            state = replace(state, losses=(*state.losses, loss)[-_LEVEL_STEPS:])
        if _has_risen(state.losses, jump, case.config):
            onset = case.record.step - _LEVEL_STEPS
            state = replace(state, losses=(math.inf,))  # asked once a jump
    if onset < 0 and diverged is not None:
        onset = diverged.onset_step if diverged.onset_step >= 0 else diverged.step
    if onset < 0:
        return Verdict(state)
    read = _ask(state, "level", onset, case)
    if read is None:
        return Verdict(state)
    if read.verdict != "state" or not is_near_jump(state, onset, case):
        return Verdict(state, readings=(read,))
    state = replace(state, last_flagged=max(state.last_flagged, case.record.step))
    verdict = for_finite(
        state, case, rule="state_damaged", onset=onset,
        finding=_state_damaged(read, _blames(state, onset, case), case),
        reason=f"the loss rose after a jump of the learning rate; {_in_words(read)}",
    )  # fmt: skip
    return verdict._replace(readings=(read,))


def _has_risen(losses: tuple[float, ...], jump: LrJump, config: LadderConfig) -> bool:
    """Return whether the newest losses have given back a good part of the run's gain."""
    if len(losses) < _LEVEL_STEPS or math.isinf(losses[0]):
        return False
    rise = sorted(losses)[_LEVEL_STEPS // 2] - jump.level
    gain = max(jump.first - jump.level, 0.0)
    least = (config.level_rise * gain, _LEVEL_NOISE * jump.noise, _LEVEL_LEAST * jump.first)
    return rise > max(least)


def jumps(record: StepRecord, last: float, config: LadderConfig) -> bool:
    """Return whether a step's learning rate is many times the rate of the step before."""
    rate = record.learning_rate
    return rate is not None and last > 0.0 and rate >= config.lr_jump * last


def _look_at_rate(verdict: Verdict, before: LadderState, case: Case) -> Verdict:
    """Tell of a learning rate that jumps unannounced and undeclared, and ask about it."""
    record, config, state = case.record, case.config, verdict.state
    rate, last = record.learning_rate, before.learning_rate
    if rate is None or not jumps(record, last, config):
        return verdict
    if state.facts.clock <= _JUMPS_AFTER or state.rolling_back:
        return verdict
    if record.step <= state.announced_until or record.rate_declared:
        return verdict
    course = case.course()
    if rate > state.known_rate:
        # A warm restart goes back to a rate that the run did well with: told, and no evidence.
        jump = LrJump(record.step, last, rate, course.level, course.noise, course.first)
        state = replace(state, lr_jump=jump, losses=())
    finding = Finding(
        kind="lr_jump",
        level="advisory",
        step=record.step,
        detector="learning_rate",
        reason=f"the learning rate rose from {last:.4g} to {rate:.4g} in one step",
        value=rate,
        limit=config.lr_jump * last,
        onset_step=record.step,
        cause="lr_jump",
    )
    read = _ask(state, "lr_jump", record.step, case)
    readings = verdict.readings if read is None else (*verdict.readings, read)
    findings = (*verdict.findings, finding)
    return verdict._replace(state=state, findings=findings, readings=readings)


def _look_at_snapshot(verdict: Verdict, case: Case) -> Verdict:
    """Take in what the ranks said of the state that they looked at, or could not copy."""
    record = case.record
    if record.snapshots_missed:
        verdict = _missed(verdict, case)
    decision = verdict.decision
    if not record.nonfinite_state or (decision and decision.action in ("rollback", "halt")):
        return verdict
    rank = record.nonfinite_state_rank
    where = f"rank {rank}" if rank >= 0 else "several ranks"
    reason = f"parameters, optimizer state or buffers are NaN or infinite on {where}"
    finding = Finding(
        kind="nonfinite_state",
        level="actionable",
        step=record.step,
        detector="snapshots",
        reason=reason,
        rank=rank,
        value=float(record.nonfinite_state),
        onset_step=record.step,
        cause="nonfinite_state",
    )
    return _on_top(verdict, for_hidden, case, reason=reason, finding=finding)


def _on_top(verdict: Verdict, rung: Rung, case: Case, *, reason: str, finding: Finding) -> Verdict:
    """Take a rung about the state on top of the step's own verdict: one entry a step."""
    state = replace(verdict.state, last_unhealthy_step=case.record.step)
    without = without_entry(verdict._replace(state=state))
    done = rung(without, case, reason=reason, finding=finding)
    if done.decision is None:
        facts = replace(done.state.facts, ledger_seq=state.facts.ledger_seq)
        state = replace(done.state, facts=facts)
        done = done._replace(state=state, decision=verdict.decision)
    return done._replace(
        findings=(*verdict.findings, *done.findings),
        readings=verdict.readings,
        accepted=verdict.accepted,
    )


def _look_at_replicas(verdict: Verdict, case: Case) -> Verdict:
    """Take in that ranks do not hold alike what they must: settings, or the state itself."""
    record, rank = case.record, case.record.replica_rank
    if record.settings_differ:
        who = f"rank {rank}" if rank >= 0 else "a rank"
        since = verdict.state.settings_since
        since = record.step if since < 0 else since
        finding = Finding(
            kind="settings_differ",
            level="advisory",
            step=record.step,
            detector="replicas",
            reason=f"{who} trained with other settings than the others",
            rank=rank,
            onset_step=since,
            cause="settings_differ",
        )
        state = replace(verdict.state, settings_since=since, settings_told=record.step)
        verdict = verdict._replace(state=state, findings=(*verdict.findings, finding))
    decision = verdict.decision
    if not record.replicas_differ or (decision and decision.action in ("rollback", "halt")):
        return verdict
    reason = "ranks that must hold the same parameters and optimizer state do not"
    reason += f": rank {rank} is wrong" if rank >= 0 else ""
    finding = Finding(
        kind="replica_corrupted",
        level="actionable",
        step=record.step,
        detector="replicas",
        reason=reason,
        rank=rank,
        onset_step=record.step,
        cause="replica_corrupted",
    )
    return _on_top(verdict, for_corrupted, case, reason=reason, finding=finding)


def _missed(verdict: Verdict, case: Case) -> Verdict:
    """Tell of snapshots that could not be taken: of the first, the second, the fourth, ..."""
    num = verdict.state.num_missed + 1
    verdict = verdict._replace(state=replace(verdict.state, num_missed=num))
    if num & (num - 1):
        return verdict
    finding = Finding(
        kind="snapshot_missed",
        level="advisory",
        step=case.record.step,
        detector="snapshots",
        reason=f"{num} {'snapshot' if num == 1 else 'snapshots'} in memory could not be taken: a "
        "rollback would go further back",
        value=float(num),
        onset_step=case.record.step,
        cause="snapshot_missed",
    )
    return verdict._replace(findings=(*verdict.findings, finding))


def _look_at_evaluation(verdict: Verdict, before: LadderState, ratio: float, case: Case) -> Verdict:
    """Take in an evaluation: evidence about the state where outliers came since the one before.

    Without one the loss may have risen by other data or by forgetting, and after a level was
    accepted it surely may. An evaluation travels with the step behind it: that step is the first
    one after it, and an outlier of the present one came too late.
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
    blamed = for_finite(
        without_entry(verdict), case, rule="evaluation", onset=onset, reason=reason, finding=finding
    )
    if blamed.decision is None:
        facts = replace(blamed.state.facts, ledger_seq=state.facts.ledger_seq)
        state = replace(blamed.state, facts=facts)
        blamed = blamed._replace(state=state, decision=verdict.decision)
    return blamed._replace(
        findings=(*verdict.findings, *blamed.findings),
        readings=verdict.readings,
        accepted=verdict.accepted,
    )
