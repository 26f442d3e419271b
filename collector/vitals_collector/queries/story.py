"""Tells an incident in paragraphs. Pure: it says what was recorded, and "not known" of the rest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from trainvitals.cli.output import printable
from trainvitals.detect.fleet.node import THROTTLES
from trainvitals.views import (
    AlertView,
    DecisionView,
    EventView,
    FindingView,
    MoverView,
    RunSummary,
    StepData,
    StepRow,
)
from vitals_collector.queries import why
from vitals_collector.queries.evidence import THROTTLED, Evidence
from vitals_collector.queries.grouping import domain_of
from vitals_collector.queries.top_changes import NONFINITE_SCORE, OF_SPEED, RUN, Moved
from vitals_collector.queries.user_alerts import Episode, episodes

_T = TypeVar("_T")

_DONE = {
    "halt": "Halted",
    "rollback": "Rolled back",
    "skip_step": "Skipped",
    "accept_level": "New level accepted",
}
_WOULD = {
    "halt": "would have halted",
    "rollback": "would have rolled back",
    "skip_step": "would have skipped",
}
_GRAVEST = tuple(_DONE)
MAX_TOLD = 6
"""Things of one kind that a paragraph names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryFacts:
    """All that a story is made of."""

    run: RunSummary
    attempt: int
    ordinal: int
    """Which of the run's attempts it is."""
    onset: int
    last: int
    started_unix_ns: int
    is_open: bool
    cause: str
    rank: int
    findings: Sequence[FindingView]
    decisions: Sequence[DecisionView]
    alerts: Sequence[AlertView]
    events: Sequence[EventView]
    data: Sequence[StepData]
    evidence: Evidence


def title(incident: StoryFacts) -> str:
    """Return the incident in a line: what was done, about what, where."""
    where = f" at step {incident.onset}" + (f", rank {incident.rank}" if incident.rank >= 0 else "")
    cause = incident.cause.replace("_", " ")
    for action in _GRAVEST:
        same = [view.decision for view in incident.decisions if view.decision.action == action]
        done = [decision for decision in same if decision.acted]
        if done:
            num = f" {len(done)} steps" if action == "skip_step" and len(done) > 1 else ""
            num = f" {len(done)} times" if action == "rollback" and len(done) > 1 else num
            return printable(f"{_DONE[action]}{num}: {cause}{where}")
        if same and action in _WOULD:
            return printable(f"Observed: {cause}{where}; {_WOULD[action]}")
    alone = incident.alerts[0].title if incident.alerts and not incident.findings else ""
    return printable(f"{alone or cause[:1].upper() + cause[1:]}{where}")


def tell(incident: StoryFacts) -> tuple[str, ...]:
    """Return the paragraphs: how it began, what moved first, what fed it, what was done, the cost.

    A paragraph is one line of plain text.
    """
    parts = [_began(incident)]
    if incident.evidence.is_gathered:
        parts += [_numbers(incident), _moved(incident), _fed(incident), _gpus(incident)]
    else:
        parts.append(
            "The numbers around it are not gathered for so many incidents at once; "
            f"`vitals why RUN {incident.onset}` tells them."
        )
    parts += [_state(incident), _decided(incident), _ended(incident), _cost(incident)]
    return tuple(printable(" ".join(part.split())) for part in parts if part)


def _began(incident: StoryFacts) -> str:
    when = _moment(incident.started_unix_ns)
    sentences = [
        f"It began at step {incident.onset} of attempt {incident.ordinal}; first told of {when}."
    ]
    alerts = episodes(view.finding for view in incident.findings)
    sentences += [_of_user(alert) for alert in _few(alerts)]
    sentences += _others(alerts, "alert of yours")
    findings = [view for view in incident.findings if not view.finding.severity]
    sentences += [f"{view.finding.detector} found {_of_finding(view)}." for view in _few(findings)]
    sentences += _others(findings, "finding")
    if not incident.findings:
        sentences.append("No detector raised a finding about it that is stored.")
    notes = [event for event in incident.events if event.kind in ("Note", "RunEnded")]
    sentences += [f"{event.source} said: {event.text.rstrip('.')}." for event in _few(notes)]
    sentences += _others(notes, "note")
    if not incident.findings and not incident.decisions:
        sentences += [
            f"Alert {alert.title}: {alert.summary.rstrip('.')}." for alert in _few(incident.alerts)
        ]
    return " ".join(sentences)


def _of_user(alert: Episode) -> str:
    where = f" on rank {alert.where}" if alert.ranks else ""
    until = f"s {alert.first} to {alert.last}" if alert.last > alert.first else f" {alert.first}"
    return f"Your alert{where} at step{until}: {alert.newest.reason}."


def _of_finding(view: FindingView) -> str:
    finding = view.finding
    where = f" on rank {finding.rank}" if finding.rank >= 0 else ""
    return f"{finding.kind.replace('_', ' ')}{where} at step {finding.step}: {finding.reason}"


def _numbers(incident: StoryFacts) -> str:
    view = incident.evidence.view
    if view is None or not view.rows:
        return f"What was measured at step {incident.onset} is not known: no row of it is stored."
    if _head(view.rows) is None:
        return (
            f"The run's numbers at step {incident.onset} are not known: no row of rank 0 is stored."
        )
    sentences = [f"At step {incident.onset} {why.of_attempt(view, incident.attempt)}"]
    head = _head(view.rows)
    if head is not None and "learning_rate" not in head.values:
        sentences.append("The learning rate is not known.")
    elif head is not None and head.values.get("lr_factor") not in (None, 1, 1.0):
        sentences.append(
            f"The ladder had put a factor of {head.values['lr_factor']:g} on the rate."
        )
    return " ".join(sentences)


def _head(rows: Iterable[StepRow]) -> StepRow | None:
    return next((row for row in rows if row.source == "rank:0"), None)


def _moved(incident: StoryFacts) -> str:
    movers = incident.evidence.movers
    layers = [mover for mover in movers if not _is_of_source(mover.view.row)]
    ranks = [mover for mover in movers if mover.view.row.startswith("rank:")]
    of_run = [mover for mover in movers if mover.view.row == RUN]
    sentences = []
    # A slow step is told below; it is no first sign of numbers that go wrong.
    is_of_speed = domain_of(incident.cause) == "speed"
    asked = [mover for mover in movers if (mover.view.metric in OF_SPEED) == is_of_speed]
    if asked:
        begun = min(mover.first_step for mover in asked)
        first = sorted(
            (mover for mover in asked if mover.first_step == begun),
            key=lambda mover: (-mover.view.score, mover.view.row == RUN, mover.view.row),
        )
        if len(first) == 1:
            sentences.append(f"What moved first was {_name(first[0].view)}: {_how(first[0])}.")
        else:
            sentences.append(
                f"What moved first, {len(first)} of them at step {begun}: {_list_of(first)}."
            )
    else:
        sentences.append(
            "None of the signals that could have shown it moved in the 50 steps before: which was "
            "first is not known."
        )
    sentences += _of_kind(layers, "Of the layers", incident.evidence.has_layers, "Which layer")
    sentences += _of_kind(ranks, "Of the ranks", True, "Which rank")
    if of_run:
        sentences.append(f"Of the whole run: {_list_of(of_run)}.")
    return " ".join(sentences)


def _of_kind(movers: Sequence[Moved], head: str, is_stored: bool, asked: str) -> list[str]:
    if movers:
        order = sorted(movers, key=lambda mover: (-mover.view.score, mover.first_step))
        return [f"{head}: {_list_of(order)}."]
    if not is_stored:
        return [f"{asked} it was is not known: no numbers of layers are stored around it."]
    return [f"{asked} it was is not known: none left its course."]


def _list_of(movers: Sequence[Moved]) -> str:
    shown = "; ".join(f"{_name(mover.view)}, {_how(mover)}" for mover in movers[:MAX_TOLD])
    more = len(movers) - MAX_TOLD
    return shown + (f"; and {more} more" if more > 0 else "")


def _name(view: MoverView) -> str:
    metric = view.metric.replace("_", " ")
    return f"the {metric}" if view.row == RUN else f"{metric} of {view.row.replace(':', ' ')}"


def _how(mover: Moved) -> str:
    view = mover.view
    before = "unknown before" if view.before is None else f"{view.before:.4g} before"
    if view.score >= NONFINITE_SCORE:
        return f"not finite at step {view.peak_step} ({before})"
    peak = math.nan if view.peak is None else view.peak
    begun = f", moving since step {mover.first_step}" if mover.first_step < view.peak_step else ""
    return f"{peak:.4g} at step {view.peak_step} ({before}, {view.score:.3g} scales{begun})"


def _is_of_source(row: str) -> bool:
    return row == RUN or row.startswith("rank:")


def _fed(incident: StoryFacts) -> str:
    view = incident.evidence.view
    data = list(incident.data) or list(view.data if view is not None else ())
    if data:
        sentences = [why.fed(step_data, tells_attempt=False) for step_data in _few(data)]
        return " ".join([*sentences, *_others(data, "batch of a rank")])
    batches = [
        f"{row.source.replace(':', ' ')} by batch {row.values['batch_index']} of epoch "
        f"{row.values.get('epoch') or 0}"
        for row in (view.rows if view is not None else ())
        if row.values.get("batch_index") is not None
    ]
    if batches:
        shown = ", ".join(batches[:MAX_TOLD])
        more = len(batches) - MAX_TOLD
        tail = f" and {more} more" if more > 0 else ""
        return f"Fed were {shown}{tail}; which samples those were is not known."
    return "Which samples fed it is not known."


def _gpus(incident: StoryFacts) -> str:
    if not incident.evidence.has_gpus:
        return "What the GPUs did is not known: no samples of them are stored around it."
    if not incident.evidence.gpus:
        return "The GPUs did nothing that they had not done in the ten minutes before."
    return f"The GPUs: {'; '.join(_of_gpu(view) for view in incident.evidence.gpus)}."


def _of_gpu(view: MoverView) -> str:
    if view.metric == THROTTLED:
        began = int(view.peak or 0) & ~int(view.before or 0)
        reasons = "; ".join(words for bit, words in THROTTLES.items() if began & bit)
        return f"{view.row} began to throttle ({reasons})"
    name = view.metric.replace("_", " ")
    return f"{name} of {view.row} went from {_plain(view.before)} to {_plain(view.peak)}"


def _plain(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g}"


def _state(incident: StoryFacts) -> str:
    """Say what the probe and evaluations said of the state; nothing where nobody asked."""
    readings = [event.text for event in incident.events if event.kind == "StateRead"]
    words = [f"{text}." for text in _few(readings)]
    return " ".join([*words, *_others(readings, "question to the state")])


def _decided(incident: StoryFacts) -> str:
    if not incident.decisions:
        return "Nothing was decided about it."
    sentences = [why.decided(view) for view in _few(incident.decisions)]
    sentences += _others(incident.decisions, "decision")
    skipped = [event.text for event in incident.events if event.kind == "DataWindowSkipped"]
    sentences += [f"Data: {text}." for text in _few(skipped)]
    return " ".join(sentences)


def _ended(incident: StoryFacts) -> str:
    last = f"its last trouble was at step {incident.last}"
    halted = any(
        view.decision.action == "halt" and view.decision.acted for view in incident.decisions
    )
    run = f"the run is {incident.run.state}, at step {incident.run.last_step}"
    if halted:
        return f"It ended with the run halted; {last}."
    if incident.is_open:
        return f"It is open: {last}, and {run}."
    if incident.run.last_step > incident.last:
        healthy = incident.run.last_step - incident.last
        return f"It is over: {last}, and the run went {healthy} steps beyond it without it."
    return f"It is over: {last}, and {run}."


def _cost(incident: StoryFacts) -> str:
    evidence = incident.evidence
    if not evidence.cost_steps:
        return "It cost no step."
    steps = f"{evidence.cost_steps} step" + ("s" if evidence.cost_steps > 1 else "")
    if evidence.cost_seconds is None:
        return f"It cost {steps}; how long they took is not known."
    return f"It cost {steps} trained in vain, {evidence.cost_seconds:.6g} seconds on rank 0."


def _few(things: Sequence[_T]) -> Sequence[_T]:
    return things[:MAX_TOLD]


def _others(things: Sequence[object], name: str) -> list[str]:
    more = len(things) - MAX_TOLD
    return [f"Further of this kind ({name}): {more}."] if more > 0 else []


def _moment(time_unix_ns: int) -> str:
    try:
        when = datetime.fromtimestamp(time_unix_ns / 1e9, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return "at a moment that is not known"
    return f"at {when:%Y-%m-%d %H:%M:%S} UTC"


__all__ = ["StoryFacts", "tell", "title"]
