"""The verdict on an incident: state, cause, action, cost, precedent and the next command.

Pure. ``incidents`` gathers the facts; the dashboard, reports and the command line show this text.
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from msgspec.structs import replace

from trainvitals import views
from trainvitals.detect.registry import KINDS
from trainvitals.policy.approval import WAITS_UNTIL
from trainvitals.printable import printable
from trainvitals.records import ActionName, Decision, Finding
from trainvitals.units import humanize, humanize_count, humanize_seconds, name_ranks
from vitals_collector.live.restarts import Restart
from vitals_collector.queries.advice import advice
from vitals_collector.queries.grouping import DEATHS
from vitals_collector.queries.stacks import capital
from vitals_collector.queries.story import IncidentParts

MAX_TIMELINE = 8
"""Maximum number of timeline entries; those in the middle are counted."""
MAX_CAUSES = 3
"""Maximum number of causes shown for an incident; further ones are counted."""
SETTLED_STEPS = 10
"""Healthy steps after which an incident counts as resolved."""
MAX_NAMED = 3
"""Maximum number of other runs named; further ones are counted."""

_NONFINITE = {
    "nonfinite_loss": "loss was",
    "nonfinite_gradient": "gradients were",
    "nonfinite_params": "parameters were",
    "nonfinite_state": "optimizer state or buffers were",
}
_OUTLIERS = {"loss_outlier": "loss", "grad_norm_outlier": "gradient norm"}
_CAUSES_IN_LOOP = frozenset({"lr_jump", "learning_rate", "schedule", "weight_decay"})
"""Causes that recur until the loop is changed, also after Vitals repaired the run."""
_FINITE_RULES = frozenset({"outlier", "state_damaged", "evaluation", "lr_jump"})
"""Rules about finite values: the user may accept those as healthy."""
_WAITS = frozenset({"waiting", "hang"})
"""Kinds of findings while no step ends: only the second one pages."""
_CODE = re.compile(r" \[\w+\]$")
"""End of a note's text."""
_FOR = re.compile(r" \(for [^()]+\)$")
_ENDED = {
    "halted": "Halted at step {}",
    "failed": "Failed after step {}",
    "interrupted": "Interrupted after step {}",
    "finished": "Finished after step {}",
    "lost": "Lost after step {}: no process reports",
}


class Precedent(msgspec.Struct, frozen=True):
    """Earlier incidents of the same cause."""

    steps: Sequence[int] = ()
    """Onsets of earlier ones in the same run."""
    runs: Sequence[str] = ()
    """Names of other runs with one."""
    num_asked: int = 0
    """Number of other runs searched."""


class VerdictFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a verdict."""

    run: views.RunSummary
    incident: IncidentParts
    run_dir: str = ""
    """The run's directory, as reported at its start."""
    next_onset: int = -1
    """Onset of the next incident; -1 for none."""
    is_open: bool = False
    is_lasting: bool = False
    """Whether the condition of a finding still held at the last step."""
    lost: views.LostWork = msgspec.field(default_factory=views.LostWork)
    late_seconds: float = 0.0
    """Time that the other ranks waited for a straggler."""
    precursor: str | None = None
    """Sentence about the first change; empty: no series left its quiet range; None: not searched,
    or unknown."""
    blamed_rank: int = -1
    """Rank whose data or gradients changed first; -1: none, or there is only one."""
    precedent: Precedent = msgspec.field(default_factory=Precedent)
    capsule_step: int = -1
    """Its first step with a repro capsule; -1: none."""
    played: str = ""
    """Result of the repro."""

    @property
    def events(self) -> list[views.EventView]:
        """Events that start the incident, then other ends of the run and of waits."""
        return [*self.incident.errors, *self.incident.ends]


class _Hang(msgspec.Struct, frozen=True):
    """A hang that lasts."""

    step: int
    ranks: Sequence[int]
    seconds: float
    """Duration, up to the latest row of the run."""


def _hang(facts: VerdictFacts) -> _Hang | None:
    """Return the hang that the verdict is about; None if steps continue, or the run ended."""
    waits = _wait_findings(facts)
    if not waits or not facts.is_open or facts.run.state != "running":
        return None
    step = max(view.finding.step for view in waits)
    if facts.run.last_step >= step:
        return None
    ranks = sorted({view.finding.rank for view in waits if view.finding.rank >= 0})
    seconds = max(0.0, (facts.run.last_seen_unix_ns - _wait_start_ns(waits)) / 1e9)
    return _Hang(step, ranks, seconds)


def _wait_findings(facts: VerdictFacts) -> list[views.FindingView]:
    """Return the findings about waits and hangs, on which the verdict reports."""
    return [view for view in facts.incident.findings if view.finding.kind in _WAITS]


def _wait_start_ns(waits: Sequence[views.FindingView]) -> int:
    """Return since when the verdict counts a hang: the time of the last progress."""
    return min(v.time_unix_ns - int((v.finding.value or 0.0) * 1e9) for v in waits)


def verdict(facts: VerdictFacts) -> views.VerdictView:
    """Return the verdict on an incident: state, cause, action, cost, next command."""
    text, commands = _next(facts)
    if facts.capsule_step >= 0:
        play = f"vitals repro {facts.run.run_id} {facts.capsule_step} --entry train.py:build"
        commands = (*commands, play)
    hang = _hang(facts)
    return views.VerdictView(
        incident_id=facts.incident.name,
        state=_one_line(verdict_state_line(facts)),
        is_hung=hang is not None,
        cause=_one_line(verdict_cause_line(facts)),
        action=_one_line(verdict_action_line(facts.incident.decisions, facts.incident.restarts)),
        cost=_one_line(_cost_with_waits(facts, hang)),
        before=_one_line(precedent_line(facts.precedent)),
        next=_one_line(text),
        played=_one_line(facts.played),
        commands=tuple(_one_line(command) for command in commands),
        lost=facts.lost,
        timeline=incident_timeline(facts),
    )


def of_healthy(run: views.RunSummary) -> views.VerdictView:
    """Return the verdict on a run without any incident."""
    commands = (f"vitals tail {run.run_id} --follow",) if run.state == "running" else ()
    return views.VerdictView(state=f"{_run_state_text(run)}. No incidents.", commands=commands)


def _one_line(text: str) -> str:
    """Return the text of a verdict as one printable line."""
    return printable(" ".join(text.split()))


# --------------------------------------------------------------------------------------- state


def verdict_state_line(facts: VerdictFacts) -> str:
    """Return the verdict's line on the state of the run and of the incident."""
    if (hang := _hang(facts)) is not None:
        lasted = humanize_seconds(hang.seconds)
        return f"Hung in step {hang.step:,}: no step has ended for {lasted}."
    return f"{_run_state_text(facts.run)}. {incident_end_text(facts)}"


def _run_state_text(run: views.RunSummary) -> str:
    """Return the start of the verdict's line on the state: the run and its last step."""
    if run.state == "running":
        missing = f"; missing: {', '.join(run.missing)}" if run.missing else ""
        return f"Running at step {run.last_step:,}{missing}"
    return _ENDED[run.state].format(f"{run.last_step:,}")


def incident_end_text(facts: VerdictFacts) -> str:
    """Return the verdict's sentence on whether the incident is over, and for how long."""
    decided = [view.decision for view in facts.incident.decisions]
    if facts.run.state == "halted" and any(d.action == "halt" and d.acted for d in decided):
        return f"This incident stopped it; last bad step {facts.incident.last:,}."
    if facts.is_open:
        if facts.run.state == "finished":
            last = min(facts.incident.last, facts.run.last_step)
            return f"Unresolved: no healthy step after step {last:,}."
        return f"Open: last bad step {facts.incident.last:,}."
    if facts.next_onset >= 0:
        healthy = facts.next_onset - facts.incident.last - 1
        until = f", until the next incident at step {facts.next_onset:,}"
    else:
        healthy, until = facts.run.last_step - facts.incident.last, ""
    if healthy < SETTLED_STEPS:
        steps = humanize_count(healthy, "healthy step") if healthy > 0 else "no healthy step"
        return f"Last bad step {facts.incident.last:,}, with {steps} after it{until}."
    steps = humanize_count(healthy, "healthy step")
    return f"Resolved: {steps} since step {facts.incident.last:,}{until}."


# --------------------------------------------------------------------------------------- cause


def verdict_cause_line(facts: VerdictFacts) -> str:
    """Return the verdict's line on the cause, with ranks and steps."""
    sentences = list(dict.fromkeys(_causes(facts)))
    # Deaths are in the order of events: the root is first. An alert may be about the error of a
    # rank that only lost its peer.
    texts = [_death(e, facts.run.world_size) for e in facts.events if _is_death(e)]
    if not sentences:
        texts += [alert.summary for alert in facts.incident.alerts]
        texts += [_restart_text(each) for each in facts.incident.restarts]
        texts += [event.text for event in facts.events]
    if not sentences or facts.incident.cause in DEATHS:
        first = [f"{capital(text.rstrip('.'))}." for text in texts[:1]]
        sentences = [*first, *sentences] or ["Not recorded."]
    elif facts.blamed_rank >= 0 and "rank" not in sentences[0].lower():
        sentences[0] = f"{sentences[0].rstrip('.')}, because of rank {facts.blamed_rank}."
    more = len(sentences) - MAX_CAUSES
    parts = [sentences[0], *(f"Then: {text}" for text in sentences[1:MAX_CAUSES])]
    if more > 0:
        parts.append(f"And {humanize_count(more, 'more finding')}.")
    if facts.precursor is not None:
        parts.append(facts.precursor or f"No precursor before step {facts.incident.onset:,}.")
    return " ".join(parts)


class _CauseRecords(msgspec.Struct):
    """Records of one cause."""

    name: str
    steps: set[int]
    ranks: set[int]
    values: list[float]
    limits: list[float]
    reasons: list[str]
    is_acted_on: bool = False
    kind: str = ""

    def add(self, record: Finding | Decision) -> None:
        """Add a finding or decision to the cause that the verdict names."""
        self.steps.add(record.step)
        self.reasons.append(record.reason)
        if record.rank >= 0 or isinstance(record, Finding):
            self.ranks.add(record.rank)
        self.values += [] if record.value is None else [record.value]
        self.limits += [] if record.limit is None else [record.limit]


def _causes(facts: VerdictFacts) -> list[str]:
    """Return the verdict's sentence for each cause: the root first, then those with an action."""
    triggers: dict[str, _CauseRecords] = {}

    def trigger(record: Finding | Decision, name: str) -> _CauseRecords:
        return triggers.setdefault(name, _CauseRecords(name, set(), set(), [], [], []))

    for view in facts.incident.findings:
        name = view.finding.cause or view.finding.kind
        if view.finding.kind in _WAITS:  # a wait that pages is recorded twice
            name = f"wait for {view.finding.rank}"
        cause_text = trigger(view.finding, name)
        cause_text.kind = cause_text.kind or view.finding.kind
        cause_text.add(view.finding)
    for decided in facts.incident.decisions:
        decision = decided.decision
        cause_text = trigger(decision, decision.cause or decision.rule)
        cause_text.is_acted_on |= decision.action != "continue"
        # A rollback or a halt has the step of its decision: the bad steps precede it.
        if decision.action == "skip_step" or not cause_text.steps:
            cause_text.add(decision)
    ordered = sorted(
        triggers.values(),
        key=lambda each: (each.name != facts.incident.cause, not each.is_acted_on, min(each.steps)),
    )
    sentences = [_trigger_sentence(each) for each in ordered]
    root = ordered[0] if ordered else None
    incident = facts.incident
    if root is not None and root.name == "nonfinite_params" == incident.cause and len(ordered) > 1:
        found_by = f"before step {incident.onset:,}, found by the check {_steps(root.steps)}"
        sentences[0] = sentences[0].replace(_steps(root.steps), found_by)
    return sentences


def is_about_wait(event: views.EventView) -> bool:
    """Return whether an event in the verdict is about a wait: it ended, or forbids a restart."""
    return event.text.endswith(("[wait_over]", "[restart_budget]"))


def _is_death(event: views.EventView) -> bool:
    """Return whether an event in an incident is the end of a rank or of the run."""
    if event.kind == "RunEnded":
        return event.text.startswith("failed")
    return event.kind == "Note" and not is_about_wait(event)


def _death(event: views.EventView, world_size: int) -> str:
    """Return the verdict's text on how a run ended, with the failed rank."""
    text = _CODE.sub("", event.text)
    is_of_rank = world_size > 1 and event.kind == "RunEnded" and event.source.startswith("rank:")
    return f"{event.source.replace(':', ' ')} {text}" if is_of_rank else text


def _restart_text(restart: Restart) -> str:
    """Return the verdict's sentence on a restart as a cause."""
    return f"The run ended after step {restart.last_step:,} and was restarted"


def _trigger_sentence(trigger: _CauseRecords) -> str:
    """Return the verdict's sentence on one cause: its values, limits, ranks and steps."""
    at = _steps(trigger.steps)
    # If all ranks had the fault, do not name the one that also reported it.
    ranks = [] if -1 in trigger.ranks else sorted(trigger.ranks)
    whose = ""
    if ranks:
        whose = f"{name_ranks(ranks)}: " if len(ranks) > 1 else f"rank {ranks[0]}'s "
    if trigger.name in _NONFINITE:
        return f"{capital(f'{whose}{_NONFINITE[trigger.name]}')} {_nonfinite(trigger)} {at}."
    if trigger.name in _OUTLIERS and trigger.values:
        limit = f" (limit {max(trigger.limits):.4g})" if trigger.limits else ""
        reached = f"{_OUTLIERS[trigger.name]} reached {max(trigger.values):.4g}{limit}"
        return f"{capital(whose + reached)} {at}."
    reason = capital(trigger.reasons[0].rstrip("."))
    if trigger.kind in _WAITS:  # the duration at that time: the wait continues
        reason = _FOR.sub("", capital(trigger.reasons[-1].rstrip(".")))
    if trigger.kind == "user_alert":
        reason = f"Your alert {trigger.name}: {trigger.reasons[-1].rstrip('.')}"
    return f"{reason}." if f"step {min(trigger.steps)}" in reason else f"{reason} ({at[3:]})."


def _nonfinite(trigger: _CauseRecords) -> str:
    """Return NaN or infinite for the verdict, from the values; otherwise from the reason."""
    kinds = {
        "NaN" if math.isnan(value) else "infinite"
        for value in trigger.values
        if not math.isfinite(value)
    }
    if not kinds:
        reasons = " ".join(trigger.reasons).casefold()
        spellings = {"nan": "NaN", "inf": "infinite"}
        kinds = {
            kind for spelling, kind in spellings.items() if re.search(rf"\b{spelling}\b", reasons)
        }
    return kinds.pop() if len(kinds) == 1 else "NaN or infinite"


def _steps(steps: Iterable[int]) -> str:
    """Return ``at step 540``, ``at steps 540 to 542`` or ``at 7 steps from 540 to 600``."""
    ordered = sorted(steps)
    first, last = ordered[0], ordered[-1]
    if first == last:
        return f"at step {first:,}"
    if len(ordered) == last - first + 1:
        return f"at steps {first:,} to {last:,}"
    return f"at {len(ordered):,} steps from {first:,} to {last:,}"


# -------------------------------------------------------------------------------------- action

_OBSERVED: dict[ActionName, str] = {
    "skip_step": "skipped {}",
    "rollback": "rolled back",
    "halt": "halted the run",
    "accept_level": "accepted a new level",
}


def verdict_action_line(
    decisions: Sequence[views.DecisionView], restarts: Sequence[Restart] = ()
) -> str:
    """Return the verdict's line on the actions of Vitals, done or only observed."""
    if restarts:
        decided = verdict_action_line(decisions) if decisions else ""
        resumed = " ".join(_resumed(each) for each in restarts)
        return f"{decided} {resumed}".strip()
    actions = [view.decision for view in decisions if view.decision.action != "continue"]
    done = [decision for decision in actions if decision.acted]
    if not done:
        would = [
            _observed_action_text(name, [d for d in actions if d.action == name])
            for name in _OBSERVED
        ]
        listed = " and ".join(text for text in would if text)
        waits = any(WAITS_UNTIL in decision.evidence for decision in actions)
        why = "Vitals waits for an answer; it would have" if waits else "Observed only; would have"
        return f"{why} {listed}." if listed else "Vitals took no action."
    sentences = [
        _applied_action_text(name, list(same)) for name, same in groupby(done, lambda d: d.action)
    ]
    more = len(sentences) - MAX_TIMELINE
    if more > 0:
        sentences = [*sentences[: MAX_TIMELINE - 1], f"And {more} more actions.", sentences[-1]]
    last = done[-1]
    if last.action == "rollback" and last.mode == "heal" and last.budget_left >= 0:
        sentences.append(
            f"{humanize_count(last.budget_left, 'rollback')} left."
            if last.budget_left
            else "Rollback budget used up."
        )
    return " ".join(sentences)


def _resumed(restart: Restart) -> str:
    """Return the verdict's sentence on the step from which a restarted run continued."""
    if not restart.step:
        return (
            f"The restarted run counts from step 0; its last step had been {restart.last_step:,}. "
            "If the loop loaded its own checkpoint, give monitor.load_state_dict() its state."
        )
    where = f"Resumed the run at step {restart.step:,}"
    return f"{where} after it was restarted; its last step had been {restart.last_step:,}."


def _observed_action_text(name: ActionName, same: Sequence[Decision]) -> str:
    """Return the verdict's text on actions that mode ``observe`` only recorded."""
    if not same:
        return ""
    times = "" if len(same) == 1 or name == "skip_step" else f" {len(same)} times"
    return _OBSERVED[name].format(humanize_count(len(same), "update")) + times


def _applied_action_text(name: ActionName, same: Sequence[Decision]) -> str:
    """Return the verdict's text on actions that Vitals carried out."""
    if name == "skip_step":
        return (
            f"Skipped {humanize_count(len(same), 'update')} ({_steps(d.step for d in same)[3:]})."
        )
    return " ".join(_single_action_text(decision) for decision in same)


def _single_action_text(decision: Decision) -> str:
    """Return the verdict's sentence on one rollback, halt or other action."""
    if decision.action == "rollback":
        text = f"Rolled back to step {decision.rollback_to_step:,}"
        if decision.skip_batches:
            text += f"; skipped {humanize_count(decision.skip_batches, 'batch', 'batches')}"
        if decision.lr_factor != 1.0:
            text += f"; learning rate x{decision.lr_factor:g}"
        return f"{text}."
    if decision.action == "halt":
        return (
            f"Halted the run at step {decision.decided_at_step:,}: {decision.reason.rstrip('.')}."
        )
    if decision.action == "restart":
        budget_text = humanize_count(decision.budget_left, "restart")
        when = f"at step {decision.step:,}"
        return f"Ended the hung job {when}, to be restarted; {budget_text} left today."
    return f"Accepted a new level at step {decision.step:,}."


# ---------------------------------------------------------------------------------------- cost


def _cost_with_waits(facts: VerdictFacts, hang: _Hang | None) -> str:
    """Return the verdict's line on the cost, with the time that ranks waited."""
    world_size = facts.run.world_size
    text = verdict_cost_line(facts.lost, world_size, 0.0 if hang is None else hang.seconds)
    if not facts.late_seconds:
        return text
    others = humanize_count(max(1, world_size - 1), "other rank")
    waited = f"{capital(others)} waited {humanize_seconds(facts.late_seconds)} for it."
    return f"{text} {waited}" if facts.lost.steps or facts.lost.down_seconds else waited


def verdict_cost_line(lost: views.LostWork, world_size: int, idle_seconds: float = 0.0) -> str:
    """Return the verdict's line on the cost; unmeasured values are left out."""
    ranks = humanize_count(world_size, "rank")
    if lost.down_seconds:
        rest = verdict_cost_line(replace(lost, down_seconds=None), world_size, idle_seconds)
        down = humanize_seconds(lost.down_seconds)
        return f"{rest} Down for {down} x {ranks} until the next step."
    if idle_seconds:
        idle = f"Idle so far: {humanize_seconds(idle_seconds)} x {ranks}."
        return f"{idle} {verdict_cost_line(lost, world_size)}" if lost.steps else idle
    if not lost.steps:
        return "Lost work: none."
    details = []
    if lost.tokens:
        details.append(f"{humanize(lost.tokens, 'tokens')} tokens")
    if lost.seconds is not None:
        details.append(f"{humanize_seconds(lost.seconds)} x {ranks}")
    if lost.gpu_hours is not None:
        details.append(f"{lost.gpu_hours:.2g} GPU-hours")
    if lost.money is not None and lost.gpu_hours:
        details.append(f"{lost.money:,.2f} at {lost.money / lost.gpu_hours:g} a GPU-hour")
    text = f"Lost work: {humanize_count(lost.steps, 'step')}"
    text += f" ({', '.join(details)})" if details else ""
    if lost.batches:
        text += f"; {humanize_count(lost.batches, 'batch', 'batches')} dropped"
    return f"{text}."


# -------------------------------------------------------------------------------------- before


def precedent_line(precedent: Precedent) -> str:
    """Return the verdict's line on earlier incidents, in this run and in others."""
    num = len(precedent.steps)
    text = "First time in this run."
    if num:
        newest = f", last at step {max(precedent.steps):,}"
        text = f"{humanize_count(num, 'earlier incident')} of this cause in this run{newest}."
    if not precedent.num_asked:
        return text
    if not precedent.runs:
        return f"{text} In no other run ({precedent.num_asked:,} looked at)."
    named = ", ".join(precedent.runs[:MAX_NAMED])
    more = len(precedent.runs) - MAX_NAMED
    named += f" and {more} more" if more > 0 else ""
    return f"{text} Also in {len(precedent.runs)} of {precedent.num_asked} other runs: {named}."


# ---------------------------------------------------------------------------------------- next


def _next(facts: VerdictFacts) -> tuple[str, tuple[str, ...]]:
    """Return the verdict's recommended action and its commands: the next one first."""
    run = facts.run
    report = f"vitals postmortem {run.run_id} --incident {shlex.quote(facts.incident.name)}"
    why = f"vitals why {run.run_id} {max(facts.incident.onset, 0)}"
    names = [facts.incident.cause]
    names += [n for v in facts.incident.findings for n in (v.finding.cause, v.finding.kind)]
    todo = advice(names, run.run_id, facts.incident.onset)
    if run.state == "halted":
        where = shlex.quote(facts.run_dir) if facts.run_dir else run.run_id
        text = f"{todo or 'Fix the cause.'} Then resume, and restart the job with VITALS_RUN_ID="
        text = f"{text}{run.run_id}."
        return text, (f"vitals resume {where}", report)
    if run.state in ("lost", "failed"):
        text = f"Check its nodes and its log, then restart with VITALS_RUN_ID={run.run_id}."
        return text, (f"vitals tail {run.run_id}", report)
    if any(view.finding.kind == "unguarded" for view in facts.incident.findings):
        text = "Fix the error that measuring ended with, or report it. Check the weights before "
        return f"{text}you use them: nothing checked these updates.", (why, report)
    if run.state != "running" and facts.is_open:
        text = "Check the weights before you use them, or use a checkpoint from before step "
        return f"{text}{max(facts.incident.onset, 0):,}. {todo}".rstrip(), (why, report)
    if run.state != "running" and facts.is_lasting and todo:
        return todo, (why, report)
    if not facts.is_open and names[0] in _CAUSES_IN_LOOP:
        return f"Before the next run: {todo}", (why, report)
    if run.state != "running" or not facts.is_open:
        return "Nothing to do.", (report, why)
    return _open_incident_action(facts, why, report, todo)


def _open_incident_action(
    facts: VerdictFacts, why: str, report: str, todo: str
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict's advice and commands for an incident that is open."""
    run = facts.run
    command = f"vitals command {run.run_id}"
    if run.missing:
        return f"Check {', '.join(run.missing)}, then restart the job.", (why, report)
    decisions = (view.decision for view in facts.incident.decisions)
    decided = [decision for decision in decisions if decision.action != "continue"]
    newest = max(decided, key=lambda d: d.ledger_seq, default=None)
    waiting = None if newest is None or newest.acted else newest
    if waiting is not None and WAITS_UNTIL in waiting.evidence:
        until = int(waiting.evidence[WAITS_UNTIL])
        number = waiting.ledger_seq
        veto = f'{command} veto {number} --reason "..."'
        text = f"Approve or veto the proposed rollback before step {until:,}."
        return text, (f"{command} approve {number}", veto, why)
    if newest is not None and run.mode != "observe" and newest.rule in _FINITE_RULES:
        accept = f'{command} accept {newest.step} --reason "..."'
        return "If this level is expected, accept it; else nothing to do.", (accept, why)
    if newest is not None and newest.action == "rollback" and newest.budget_left == 0:
        text = "Rollback budget used up: the next fault of this cause halts the run."
        return text, (why, f'{command} halt --reason "..."')
    if run.mode == "observe" and newest is not None:
        text = 'Vitals only observes this run: restart it with mode="guard" to have it act.'
        return text, (why, report)
    machine = _suspect_machine_text(facts.incident.findings)
    if (hang := _hang(facts)) is not None:
        whose = f"{name_ranks(hang.ranks)} and its node" if hang.ranks else "every rank"
        text = f"Check {whose}; if it stays hung, end the job and restart it with"
        return f"{text} VITALS_RUN_ID={run.run_id}.", (f"vitals stacks {run.run_id}", why, report)
    if machine:
        return f"Check {machine}. {todo}".rstrip(), (why, report)
    return todo or "Nothing to do yet: Vitals keeps watching.", (why, report)


def _suspect_machine_text(findings: Sequence[views.FindingView]) -> str:
    """Return the ranks that the verdict advises to check: findings name their machine."""
    ranks = {
        view.finding.rank
        for view in findings
        if view.finding.rank >= 0
        and (kind := KINDS.get(view.finding.kind)) is not None
        and kind.subject == "machine"
    }
    return f"{name_ranks(ranks)} and its node" if ranks else ""


# ------------------------------------------------------------------------------------ timeline


def incident_timeline(facts: VerdictFacts) -> tuple[views.TimelineEntry, ...]:
    """Return the verdict's timeline by time: first finding, actions, pages, the end."""
    lines: list[views.TimelineEntry] = []
    if waits := _wait_findings(facts):
        lines.append(_timeline_entry(_wait_start_ns(waits), waits[0].finding.step, "Last progress"))
    findings = facts.incident.findings
    ours = [view for view in findings if not view.finding.severity] or findings
    if ours:
        first = min(ours, key=lambda view: (view.time_unix_ns, view.finding.step))
        text = f"Detected: {first.finding.reason}"
        lines.append(_timeline_entry(first.time_unix_ns, first.finding.step, text))
    actions = [view for view in facts.incident.decisions if view.decision.action != "continue"]
    for (name, acted), same in groupby(actions, lambda v: (v.decision.action, v.decision.acted)):
        group = list(same)
        if acted and name != "skip_step":
            lines += [
                _timeline_entry(v.time_unix_ns, v.decision.step, _single_action_text(v.decision))
                for v in group
            ]
            continue
        decided = [view.decision for view in group]
        text = (
            _applied_action_text(name, decided)
            if acted
            else f"Would have {_observed_action_text(name, decided)}."
        )
        lines.append(_timeline_entry(group[0].time_unix_ns, decided[0].step, text))
    for alert in facts.incident.alerts:
        if alert.severity == "page":
            text = f"Paged: {alert.title}"
            lines.append(_timeline_entry(alert.started_unix_ns, alert.step, text))
        if alert.acknowledged_by:
            text = f"{alert.title} acknowledged by {alert.acknowledged_by}"
            lines.append(_timeline_entry(alert.updated_unix_ns, alert.step, text))
    lines += [
        _timeline_entry(each.started_unix_ns, each.step, _resumed(each))
        for each in facts.incident.restarts
    ]
    notes = [e for e in facts.events if e.text.endswith("[rank_gone]") or is_about_wait(e)]
    lines += [
        _timeline_entry(e.time_unix_ns, e.step, capital(_CODE.sub("", e.text))) for e in notes
    ]
    # Every rank reports it; the first one's text represents all.
    ended = {event.text: event for event in reversed(facts.events) if event.kind == "RunEnded"}
    lines += [
        _timeline_entry(e.time_unix_ns, e.step, f"Run ended: {e.text}") for e in ended.values()
    ]
    lines.sort(key=lambda line: line.time_unix_ns)
    more = len(lines) - MAX_TIMELINE
    if more <= 0:
        return tuple(lines)
    middle = lines[MAX_TIMELINE // 2]
    left_out = views.TimelineEntry(
        time_unix_ns=middle.time_unix_ns, step=-1, text=f"and {more + 1} more lines"
    )
    half = MAX_TIMELINE // 2
    return (*lines[:half], left_out, *lines[-(MAX_TIMELINE - half - 1) :])


def _timeline_entry(time_unix_ns: int, step: int, text: str) -> views.TimelineEntry:
    """Return a line of the verdict's timeline."""
    return views.TimelineEntry(time_unix_ns=time_unix_ns, step=step, text=_one_line(text))
