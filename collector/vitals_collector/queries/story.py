"""Tells an incident in paragraphs. Pure: it says what was recorded, and "not known" of the rest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from trainvitals.cli.output import printable
from trainvitals.detect.watch.node import THROTTLES
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
from vitals_collector.queries.movers import NONFINITE_SCORE, OF_SPEED, RUN, Moved

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
class Told:
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


def title(told: Told) -> str:
    """Return the incident in a line: what was done, about what, where."""
    where = f" at step {told.onset}" + (f", rank {told.rank}" if told.rank >= 0 else "")
    cause = told.cause.replace("_", " ")
    for action in _GRAVEST:
        same = [one.decision for one in told.decisions if one.decision.action == action]
        done = [one for one in same if one.acted]
        if done:
            num = f" {len(done)} steps" if action == "skip_step" and len(done) > 1 else ""
            num = f" {len(done)} times" if action == "rollback" and len(done) > 1 else num
            return printable(f"{_DONE[action]}{num}: {cause}{where}")
        if same and action in _WOULD:
            return printable(f"Observed: {cause}{where}; {_WOULD[action]}")
    alone = told.alerts[0].name if told.alerts and not told.findings else ""
    return printable(f"{alone or cause[:1].upper() + cause[1:]}{where}")


def tell(told: Told) -> tuple[str, ...]:
    """Return the paragraphs: how it began, what moved first, what fed it, what was done, the cost.

    A paragraph is one line of plain text.
    """
    parts = [_began(told)]
    if told.evidence.is_gathered:
        parts += [_numbers(told), _moved(told), _fed(told), _gpus(told)]
    else:
        parts.append(
            "The numbers around it are not gathered for so many incidents at once; "
            f"`vitals why RUN {told.onset}` tells them."
        )
    parts += [_state(told), _decided(told), _ended(told), _cost(told)]
    return tuple(printable(" ".join(part.split())) for part in parts if part)


def _began(told: Told) -> str:
    when = _moment(told.started_unix_ns)
    said = [f"It began at step {told.onset} of attempt {told.ordinal}; first told of {when}."]
    said += [f"{one.finding.detector} found {_of_finding(one)}." for one in _few(told.findings)]
    said += _others(told.findings, "finding")
    if not told.findings:
        said.append("No detector raised a finding about it that is stored.")
    notes = [one for one in told.events if one.kind in ("Note", "RunEnded")]
    said += [f"{one.source} said: {one.text.rstrip('.')}." for one in _few(notes)]
    said += _others(notes, "note")
    if not told.findings and not told.decisions:
        said += [f"Alert {one.name}: {one.summary.rstrip('.')}." for one in _few(told.alerts)]
    return " ".join(said)


def _of_finding(view: FindingView) -> str:
    finding = view.finding
    where = f" on rank {finding.rank}" if finding.rank >= 0 else ""
    return f"{finding.kind.replace('_', ' ')}{where} at step {finding.step}: {finding.reason}"


def _numbers(told: Told) -> str:
    view = told.evidence.view
    if view is None or not view.rows:
        return f"What was measured at step {told.onset} is not known: no row of it is stored."
    if _head(view.rows) is None:
        return f"The run's numbers at step {told.onset} are not known: no row of rank 0 is stored."
    said = [f"At step {told.onset} {why.of_attempt(view, told.attempt)}"]
    head = _head(view.rows)
    if head is not None and "learning_rate" not in head.values:
        said.append("The learning rate is not known.")
    elif head is not None and head.values.get("lr_factor") not in (None, 1, 1.0):
        said.append(f"The ladder had put a factor of {head.values['lr_factor']:g} on the rate.")
    return " ".join(said)


def _head(rows: Iterable[StepRow]) -> StepRow | None:
    return next((row for row in rows if row.source == "rank:0"), None)


def _moved(told: Told) -> str:
    movers = told.evidence.movers
    layers = [one for one in movers if not _is_of_source(one.view.row)]
    ranks = [one for one in movers if one.view.row.startswith("rank:")]
    of_run = [one for one in movers if one.view.row == RUN]
    said = []
    # A slow step is told below; it is no first sign of numbers that go wrong.
    is_of_speed = domain_of(told.cause) == "speed"
    asked = [one for one in movers if (one.view.metric in OF_SPEED) == is_of_speed]
    if asked:
        begun = min(one.first_step for one in asked)
        first = sorted(
            (one for one in asked if one.first_step == begun),
            key=lambda one: (-one.view.score, one.view.row == RUN, one.view.row),
        )
        if len(first) == 1:
            said.append(f"What moved first was {_name(first[0].view)}: {_how(first[0])}.")
        else:
            said.append(
                f"What moved first, {len(first)} of them at step {begun}: {_list_of(first)}."
            )
    else:
        said.append(
            "None of the signals that could have shown it moved in the 50 steps before: which was "
            "first is not known."
        )
    said += _of_kind(layers, "Of the layers", told.evidence.has_layers, "Which layer")
    said += _of_kind(ranks, "Of the ranks", True, "Which rank")
    if of_run:
        said.append(f"Of the whole run: {_list_of(of_run)}.")
    return " ".join(said)


def _of_kind(found: Sequence[Moved], head: str, is_stored: bool, asked: str) -> list[str]:
    if found:
        order = sorted(found, key=lambda one: (-one.view.score, one.first_step))
        return [f"{head}: {_list_of(order)}."]
    if not is_stored:
        return [f"{asked} it was is not known: no numbers of layers are stored around it."]
    return [f"{asked} it was is not known: none left its course."]


def _list_of(found: Sequence[Moved]) -> str:
    shown = "; ".join(f"{_name(one.view)}, {_how(one)}" for one in found[:MAX_TOLD])
    more = len(found) - MAX_TOLD
    return shown + (f"; and {more} more" if more > 0 else "")


def _name(view: MoverView) -> str:
    metric = view.metric.replace("_", " ")
    return f"the {metric}" if view.row == RUN else f"{metric} of {view.row.replace(':', ' ')}"


def _how(one: Moved) -> str:
    view = one.view
    before = "unknown before" if view.before is None else f"{view.before:.4g} before"
    if view.score >= NONFINITE_SCORE:
        return f"not finite at step {view.peak_step} ({before})"
    peak = math.nan if view.peak is None else view.peak
    begun = f", moving since step {one.first_step}" if one.first_step < view.peak_step else ""
    return f"{peak:.4g} at step {view.peak_step} ({before}, {view.score:.3g} scales{begun})"


def _is_of_source(row: str) -> bool:
    return row == RUN or row.startswith("rank:")


def _fed(told: Told) -> str:
    view = told.evidence.view
    data = list(told.data) or list(view.data if view is not None else ())
    if data:
        said = [why.fed(one, tells_attempt=False) for one in _few(data)]
        return " ".join([*said, *_others(data, "batch of a rank")])
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


def _gpus(told: Told) -> str:
    if not told.evidence.has_gpus:
        return "What the GPUs did is not known: no samples of them are stored around it."
    if not told.evidence.gpus:
        return "The GPUs did nothing that they had not done in the ten minutes before."
    return f"The GPUs: {'; '.join(_of_gpu(view) for view in told.evidence.gpus)}."


def _of_gpu(view: MoverView) -> str:
    if view.metric == THROTTLED:
        began = int(view.peak or 0) & ~int(view.before or 0)
        reasons = "; ".join(words for bit, words in THROTTLES.items() if began & bit)
        return f"{view.row} began to throttle ({reasons})"
    name = view.metric.replace("_", " ")
    return f"{name} of {view.row} went from {_plain(view.before)} to {_plain(view.peak)}"


def _plain(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g}"


def _state(told: Told) -> str:
    """Say what the probe and evaluations said of the state; nothing where nobody asked."""
    readings = [event.text for event in told.events if event.kind == "StateRead"]
    words = [f"{text}." for text in _few(readings)]
    return " ".join([*words, *_others(readings, "question to the state")])


def _decided(told: Told) -> str:
    if not told.decisions:
        return "Nothing was decided about it."
    said = [why.decided(one) for one in _few(told.decisions)]
    said += _others(told.decisions, "decision")
    skipped = [one.text for one in told.events if one.kind == "DataWindowSkipped"]
    said += [f"Data: {text}." for text in _few(skipped)]
    return " ".join(said)


def _ended(told: Told) -> str:
    last = f"its last trouble was at step {told.last}"
    halted = any(one.decision.action == "halt" and one.decision.acted for one in told.decisions)
    run = f"the run is {told.run.state}, at step {told.run.last_step}"
    if halted:
        return f"It ended with the run halted; {last}."
    if told.is_open:
        return f"It is open: {last}, and {run}."
    if told.run.last_step > told.last:
        healthy = told.run.last_step - told.last
        return f"It is over: {last}, and the run went {healthy} steps beyond it without it."
    return f"It is over: {last}, and {run}."


def _cost(told: Told) -> str:
    evidence = told.evidence
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


__all__ = ["Told", "tell", "title"]
