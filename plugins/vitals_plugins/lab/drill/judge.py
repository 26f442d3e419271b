"""Judges each fault of a drill: pure functions of the facts about its training."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from trainvitals.records import Decision, action_text, is_skip
from trainvitals.units import humanize_count
from vitals_plugins.lab.drill.facts import DrillFacts
from vitals_plugins.lab.drill.faults import (
    FAULT_STEP,
    POISONED_STEPS,
    DrillRecord,
    FaultSpec,
)
from vitals_plugins.lab.drill.receiver import ReceivedAlert

LOSS_STEPS = 10
"""Latest steps whose mean loss is compared with the undisturbed training."""
DrillOutcome = Literal["kept", "broken", "not protected", "not tested"]
_HEAL = 'trainvitals.watch(..., mode="heal", checkpoints=True)'
_OWN_LOOP = f"a loop of your own with {_HEAL}: attach and adapters roll nothing back"
_OWN_CHECKPOINTS = "checkpoints of the loop or its trainer, from which the next start resumes"
_GUARD = 'trainvitals.watch(..., mode="guard"), without VITALS_MODE=observe'
_PROBE = (
    'monitor.step(loss, max_norm="auto") without a clip of your own, or mode="heal" with '
    "checkpoints=True and monitor.batches(loader, probe=loss_of)"
)
_NORM = "attach(max_norm=...), or attached.before_clip() before the loop's clip"
_GONE = re.compile(r"rank (\d+) \(pid .*\[rank_gone\]$")
_RENDEZVOUS = (
    "torchrun --standalone or --rdzv-backend=c10d: a static rendezvous keeps the address of the "
    "killed rank, also without Vitals"
)
_MAX_DAMAGE, _FLOOR = 2.0, 0.02
"""The probe's limit: both losses get this part of the first losses added."""
_BATCHES = "for batch in monitor.batches(loader): ..."
MIN_REPEATED = 8
"""Repeated steps from which their losses are compared."""
MORE_RANKS = "torchrun --nproc-per-node 2, or more"


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one fault."""

    fault: str
    outcome: DrillOutcome
    injected_step: int | None = None
    seen: str = ""
    """Kind of the finding, decision or alert that reported the fault."""
    is_named_right: bool | None = None
    """Whether the right rank was named; None if the fault has none, or none was named."""
    action: str = ""
    seconds: float | None = None
    """From the injection to the report."""
    loss_ratio: float | None = None
    """Final loss divided by that of the undisturbed training at the same steps."""
    alert: str = ""
    """First alert that arrived at the drill's own receiver."""
    accepted_by: tuple[str, ...] = ()
    """The user's receivers that accepted this alert, with ``--receivers``."""
    reason: str = ""
    hint: str = ""
    """Line that would protect the loop, or the next command."""


class _Case(NamedTuple):
    """One injected fault and the facts about its training."""

    spec: FaultSpec
    facts: DrillFacts
    undisturbed: DrillFacts
    injected: DrillRecord
    mode: str

    @property
    def step(self) -> int:
        """Return the step of the fault of the drill."""
        return self.injected.step

    def row(
        self, outcome: DrillOutcome, reason: str = "", hint: str = "", **fields: Any
    ) -> DrillRow:
        """Return the row of this fault of the drill."""
        facts = self.facts
        alert = self.alert() or next(iter(facts.alerts), None)
        drilled, clean = (mean_loss(each, facts.end_step) for each in (facts, self.undisturbed))
        return DrillRow(
            fault=self.spec.name,
            outcome=outcome,
            reason=reason,
            hint=hint,
            injected_step=self.step,
            alert="" if alert is None else f"{alert.name} ({alert.severity})",
            accepted_by=() if alert is None else alert.accepted_by,
            loss_ratio=drilled / clean if drilled is not None and clean else None,
            **fields,
        )

    def seen(self, seen: str, action: str, time: int, rank: int | None = None) -> DrillRow:
        """Return the row of a reported fault of the drill; broken if it names the wrong rank."""
        is_right = None if rank is None or rank < 0 else rank == self.injected.rank
        reason = ""
        if is_right is False:
            reason = f"rank {rank} was named, and rank {self.injected.rank} had the fault"
        return self.row(
            "broken" if reason else "kept",
            reason,
            seen=seen,
            action=action,
            seconds=(time - self.injected.time_unix_ns) / 1e9 if time else None,
            is_named_right=is_right,
        )

    def decision(self, action: str) -> tuple[int, Decision] | None:
        """Return the first decision with this action since the fault of the drill."""
        for time, decision in self.facts.decisions:
            if decision.action == action and decision.step >= self.step:
                return time, decision
        return None

    def alert(self) -> ReceivedAlert | None:
        """Return the first promised alert that the drill's receiver got."""
        return next((each for each in self.facts.alerts if each.name in self.spec.alerts), None)

    def named_rank(self, *kinds: str) -> int | None:
        """Return the rank that the latest finding of these kinds named during the drill."""
        ranks = [f.rank for _, f in self.facts.findings if f.kind in kinds and f.rank >= 0]
        return ranks[-1] if ranks else None

    def note_time(self, code: str) -> int:
        """Return when the drilled run noted this code; 0 if it did not."""
        return next((time for time, _, text in self.facts.notes if f"[{code}]" in text), 0)

    @property
    def saves(self) -> bool:
        """Return whether the drilled training writes checkpoints."""
        return any(each.first_save_step >= 0 for each in self.facts.records)


def judge_fault(spec: FaultSpec, facts: DrillFacts, undisturbed: DrillFacts) -> DrillRow:
    """Return the row of a fault.

    Args:
        spec: the fault.
        facts: facts about the training in which it was injected.
        undisturbed: facts about the training without a fault.
    """
    injected, impossible = facts.first("injected"), facts.first("impossible")
    if injected is None or impossible is not None or facts.is_out_of_time:
        outcome, reason, hint = _why_not_injected(spec, facts)
        return DrillRow(fault=spec.name, outcome=outcome, reason=reason, hint=hint)
    started = facts.first("started")
    mode = "" if started is None else started.mode
    return _JUDGES[spec.name](_Case(spec, facts, undisturbed, injected, mode))


def _why_not_injected(spec: FaultSpec, facts: DrillFacts) -> tuple[DrillOutcome, str, str]:
    """Return outcome, reason and hint of a fault that has no result in this drill."""
    impossible = facts.first("impossible")
    if facts.is_out_of_time:
        text = "the budget ended before its outcome was known"
        return "not tested", text, "--budget SECONDS, or --only"
    if impossible is not None:
        hint = _checkpoint_hint(facts) if spec.is_restarted else ""
        return "not tested" if spec.name == "full_disk" else "not protected", impossible.text, hint
    if facts.first("killed") is not None:
        text = f"the second start did not resume, with exit code {facts.exit_code}"
        return "not tested", text, _RENDEZVOUS
    if facts.exit_code:
        text = f"the program failed before the fault, with exit code {facts.exit_code}"
    else:
        text = (
            f"the program ended before the fault, which is injected at step {FAULT_STEP} or later"
        )
    return "not tested", text, "run it longer"


def _checkpoint_hint(facts: DrillFacts) -> str:
    """Return the line with which a drilled loop would have checkpoints."""
    return _HEAL if facts.owns_step else _OWN_CHECKPOINTS


def mean_loss(facts: DrillFacts, end_step: int) -> float | None:
    """Return the mean loss of the last steps before ``end_step``; None if some are missing.

    Steps of a second optimizer have no loss.
    """
    steps = range(end_step - 2 * LOSS_STEPS, end_step)
    losses = [facts.losses.get(step) for step in steps]
    known = [loss for loss in losses if loss is not None][-LOSS_STEPS:]
    return statistics.fmean(known) if len(known) == LOSS_STEPS else None


def _change(row: DrillRow, outcome: DrillOutcome, reason: str, hint: str = "") -> DrillRow:
    return msgspec.structs.replace(row, outcome=outcome, reason=reason, hint=hint)


def _must_continue(case: _Case, row: DrillRow) -> DrillRow:
    """Return the row; broken if the drilled training did not reach its end with a loss."""
    facts = case.facts
    if row.outcome != "kept":
        return row
    if facts.end_step < 0:
        last = max(facts.steps, default=-1)
        text = f"training ended after step {last}, with exit code {facts.exit_code}"
        return _change(row, "broken", text)
    loss = mean_loss(facts, facts.end_step)
    if loss is None or not math.isfinite(loss):
        return _change(row, "broken", "the final loss is missing or not finite")
    return row


def _must_store_all(case: _Case, row: DrillRow) -> DrillRow:
    """Return the row; broken if a step of the drilled training is not stored."""
    missing = set(range(case.facts.end_step)) - case.facts.steps
    if missing or case.facts.num_lost_rows:
        lost = case.facts.num_lost_rows
        text = f"{humanize_count(len(missing), 'step')} missing, {lost} rows lost"
        return _change(row, "broken", text)
    return _must_continue(case, row)


def _judge_skip(case: _Case) -> DrillRow:
    """Judge a fault whose update must be skipped: only this update."""
    report = case.decision("skip_step")
    if report is None or report[1].step != case.step:
        if case.step in case.facts.overflow_steps:
            action = "update skipped by the gradient scaler"
            return _must_continue(case, case.seen("overflow", action, 0))
        if case.note_time("norm_unknown") and case.spec.name == "spike":
            text = "attach() does not know the gradient norm before the loop's clip"
            return case.row("not protected", text, _NORM)
        return case.row("broken", f"the update of step {case.step} was not skipped")
    time, decision = report
    row = case.seen(decision.rule, action_text(decision), time, decision.rank)
    if not decision.acted:
        return _change(row, "not protected", f"mode {case.mode!r} only records", _GUARD)
    return _must_continue(case, row)


def _judge_repair(case: _Case) -> DrillRow:
    """Judge a damaged state: ``heal`` rolls back, the other modes page."""
    rollback = case.decision("rollback")
    if rollback is not None and rollback[1].acted:
        time, decision = rollback
        rank = decision.rank if decision.rank >= 0 else case.named_rank("replica_named")
        row = case.seen(decision.rule, action_text(decision), time, rank)
        return _must_continue(case, row)
    if case.mode == "heal":
        return case.row("broken", "the damaged state was not rolled back")
    alert = case.alert()
    if alert is None:
        names = ", ".join(case.spec.alerts)
        return case.row("broken", f"the state is damaged, and no alert arrived ({names})")
    halt = case.decision("halt")
    kinds = ("nonfinite_params", "replica_corrupted", "replica_named")
    action = "paged" if halt is None else action_text(halt[1])
    seen = next((f.kind for _, f in case.facts.findings if f.kind in kinds), "")
    row = case.seen(seen, action, alert.received_unix_ns, case.named_rank(*kinds))
    text = f"mode {case.mode!r} pages for a damaged state, and does not repair it"
    return _change(row, "not protected", text, _HEAL if case.facts.owns_step else _OWN_LOOP)


def _judge_poison(case: _Case) -> DrillRow:
    """Judge damaged batches: outliers are reported, and the loss recovers."""
    reports = [(t, d.rule) for t, d in case.facts.decisions if d.step >= case.step]
    reports += [(t, f.kind) for t, f in case.facts.findings if f.step >= case.step]
    time, seen = min(reports, default=(0, ""))
    decisions = [d for _, d in case.facts.decisions if d.step >= case.step and d.acted]
    skips = sum(is_skip(decision) for decision in decisions)
    rollback = next((d for d in decisions if d.action == "rollback"), None)
    action = "reported" if seen else "none needed"
    if rollback is not None:
        action = action_text(rollback)
    elif skips:
        action = f"{humanize_count(skips, 'update')} skipped"
    row = case.seen(seen, action, time)
    before = mean_loss(case.facts, case.step)
    window = [case.facts.losses.get(case.step + i) for i in range(POISONED_STEPS)]
    if not seen and any(_is_damaged(case, loss, before) for loss in window):
        return _change(row, "broken", "the damaged batches were not reported")
    end = case.facts.end_step
    ended = _must_continue(case, row)
    reason = ended.reason
    if end < 0 and case.decision("halt") is None:
        return ended
    if not reason and _is_damaged(
        case, mean_loss(case.facts, end), mean_loss(case.undisturbed, end)
    ):
        reason = f"the final loss is more than {_MAX_DAMAGE:g} times the undisturbed one"
    if not reason:
        return row
    if case.mode == "heal" and case.injected.has_probe:
        return _change(row, "broken", reason)
    return _change(row, "not protected", reason, _PROBE)


def _is_damaged(case: _Case, loss: float | None, reference: float | None) -> bool:
    """Return whether a loss of the drilled training is far above its reference, as in the probe."""
    if loss is None or reference is None:
        return False
    floor = _FLOOR * abs(mean_loss(case.undisturbed, LOSS_STEPS) or 0.0)
    return loss + floor > _MAX_DAMAGE * (reference + floor)


def _judge_slow(case: _Case) -> DrillRow:
    """Judge a slow rank: it must be named."""
    for time, finding in case.facts.findings:
        if finding.kind == "straggler" and finding.step >= case.step:
            cause = finding.cause.removeprefix("straggler_")
            seen = f"straggler, {cause}" if cause else "straggler"
            return _must_continue(case, case.seen(seen, "reported", time, finding.rank))
    return case.row("broken", "the slow rank was not reported")


def _judge_stop(case: _Case) -> DrillRow:
    """Judge a stopped rank: it must be named by a page, and continue after SIGCONT."""
    alert = case.alert()
    if alert is None:
        return case.row("broken", "the hang was not paged")
    row = case.seen(alert.name, "paged", alert.received_unix_ns, case.named_rank("hang"))
    return _must_continue(case, row)


def _judge_kill(case: _Case) -> DrillRow:
    """Judge a killed rank: an alert, and a restart that continues from a checkpoint."""
    alert, facts = case.alert(), case.facts
    if alert is None:
        return case.row("broken", "no alert arrived for the killed rank")
    rank = next((int(match[1]) for _, _, text in facts.notes if (match := _GONE.match(text))), None)
    row = case.seen(alert.name, "reported", alert.received_unix_ns, rank)
    if row.outcome != "kept":
        return row
    if max(facts.steps, default=-1) < facts.last_step:
        return _change(row, "broken", "steps before the kill are not stored")
    if not case.saves:
        text = "without checkpoints a restart begins at step 0"
        return _change(row, "not protected", text, _checkpoint_hint(facts))
    if sum(each.kind == "started" and each.rank == 0 for each in facts.records) < 2:
        text = f"the second start ended with exit code {facts.exit_code}, before Vitals started"
        return _change(row, "not tested", text, _RENDEZVOUS)
    if facts.resumed_step <= 0:
        return _change(row, "broken", "a second start did not continue from a checkpoint")
    action = f"resumed from step {facts.resumed_step} after a new start"
    row = msgspec.structs.replace(row, action=action)
    if not facts.repeated_rates and facts.resumed_step < case.step - 1:
        text = "the steps after the new start are not stored, so they were not compared"
        return _change(row, "not tested", text)
    for step, (before, after) in sorted(facts.repeated_rates.items()):
        if not math.isclose(before, after, rel_tol=1e-3):
            text = f"the learning rate of step {step} was {before:.4g}, and is {after:.4g} after "
            return _change(row, "broken", f"{text}the new start")
    if _has_other_batches(facts.repeated_losses):
        text = "the steps after the new start got other batches than before"
        if any("continues exactly" in note for _, _, note in facts.notes):
            return _change(row, "broken", text)
        return _change(row, "not protected", text, _BATCHES)
    return _must_continue(case, row)


def _has_other_batches(losses: Mapping[int, tuple[float, float]]) -> bool:
    """Return whether a drilled step that was repeated differs as much as one step from the next."""
    pairs = [losses[step] for step in sorted(losses)]
    changes = [abs(after[0] - before[0]) for before, after in itertools.pairwise(pairs)]
    if len(changes) < MIN_REPEATED:
        return False
    differences = [abs(before - after) for before, after in pairs]
    return statistics.median(differences) > 0.3 * statistics.median(changes)


def _judge_forgotten(case: _Case) -> DrillRow:
    """Judge a learning rate that a second start did not restore: it is reported."""
    kinds = ("learning_rate", "lr_jump")
    reports = [(t, f.cause or f.kind) for t, f in case.facts.findings if f.kind in kinds]
    if not reports:
        return case.row("broken", "the learning rate of the second start was not reported")
    time, seen = min(reports)
    rollback = case.decision("rollback")
    action = "reported" if rollback is None else action_text(rollback[1])
    return _must_continue(case, case.seen(seen, action, time))


def _judge_agent(case: _Case) -> DrillRow:
    """Judge a killed agent: it is started again, and no row is lost."""
    time = case.note_time("agent_restarted")
    if not time:
        return case.row("broken", "the agent was not started again")
    return _must_store_all(case, case.seen("agent_restarted", "agent started again", time))


def _judge_collector(case: _Case) -> DrillRow:
    """Judge an unavailable collector: training continues, and its rows arrive later."""
    if case.facts.first("continued") is None:
        return case.row("broken", "training did not continue without it")
    return _must_store_all(case, case.seen("", "rows arrived later", 0))


def _judge_full_disk(case: _Case) -> DrillRow:
    """Judge a full disk: training continues, it is reported, and later all is stored."""
    time, continued = case.note_time("spool_in_memory"), case.facts.first("continued")
    if continued is None:
        return case.row("broken", "training did not continue without it")
    if not time:
        return case.row("broken", "the full disk was not reported")
    action, checkpoints = "rows sent from memory", case.facts.checkpoints
    row = case.seen("spool_in_memory", action, time)
    if case.saves:
        states = ("verified", "healthy")
        saved = [each.time_unix_ns for each in checkpoints if each.state in states]
        if max(saved, default=0) < continued.time_unix_ns:
            text = "no checkpoint was saved after the disk had space again"
            return _change(row, "broken", text)
        if any(each.detail.startswith("not saved") for each in checkpoints):
            row = msgspec.structs.replace(row, action=f"{action}, checkpoint saved later")
    return _must_store_all(case, row)


_JUDGES: dict[str, Callable[[_Case], DrillRow]] = {
    "nan_gradient": _judge_skip,
    "spike": _judge_skip,
    "poisoned_window": _judge_poison,
    "nan_parameters": _judge_repair,
    "bit_flip": _judge_repair,
    "slow_rank": _judge_slow,
    "stopped_rank": _judge_stop,
    "killed_rank": _judge_kill,
    "forgotten_lr": _judge_forgotten,
    "killed_agent": _judge_agent,
    "collector_down": _judge_collector,
    "full_disk": _judge_full_disk,
}
