"""Describes an incident in paragraphs. Pure: recorded facts; anything else is "not known"."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from trainvitals import views
from trainvitals.detect.fleet.node import THROTTLES
from trainvitals.printable import printable
from trainvitals.records import Finding
from trainvitals.units import humanize, humanize_count, split_unit
from vitals_collector.live.restarts import Restart
from vitals_collector.queries import why
from vitals_collector.queries.evidence import THROTTLED, IncidentEvidence
from vitals_collector.queries.grouping import DEATHS
from vitals_collector.queries.top_changes import NONFINITE_SCORE, RUN, TopChange
from vitals_collector.queries.user_alerts import user_alert_episodes

_DONE = {
    "halt": "Halted",
    "restart": "Ended as it hung",
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
"""Maximum number of items of one kind in a paragraph; further ones are counted."""


class IncidentParts(msgspec.Struct, kw_only=True):
    """One incident and its records."""

    name: str
    attempt: int
    ordinal: int
    """Ordinal of the attempt in the run: its id has no meaning for users."""
    onset: int
    last: int
    started_unix_ns: int
    ended_unix_ns: int
    cause: str
    """Root cause, which is shown first."""
    rank: int
    findings: list[views.FindingView]
    decisions: list[views.DecisionView]
    alerts: list[views.AlertView]
    errors: list[views.EventView]
    """Events that start an incident themselves, the root first."""
    restarts: list[Restart]
    """Restarts after it that lost steps."""
    events: list[views.EventView] = []
    """The errors, and the events near them, by time."""
    ends: list[views.EventView] = []
    """Those near them about the end of the run or of a wait, by time."""
    data: list[tuple[int, views.StepData]] = []
    """Samples of its steps, with the step."""


def incident_title(incident: IncidentParts) -> str:
    """Describe an incident in one line: the action, its cause, and the step."""
    where = f" at step {incident.onset}" + (f", rank {incident.rank}" if incident.rank >= 0 else "")
    cause = incident.cause.replace("_", " ")
    is_hang = any(view.finding.kind == "hang" for view in incident.findings)
    if is_hang and incident.cause not in DEATHS:
        cause = "hang"  # a wait that became a hang
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


def explain_incident(incident: IncidentParts, evidence: IncidentEvidence) -> tuple[str, ...]:
    """Explain an incident in paragraphs: onset, first change, data, reason for the action.

    A paragraph is one line of plain text. The verdict contains the end and the cost.
    """
    parts = [_onset_paragraph(incident)]
    if evidence.is_gathered:
        parts += [
            _values_paragraph(incident, evidence.view),
            _movers_paragraph(incident, evidence),
            _batches_paragraph(incident, evidence.view),
            _gpu_paragraph(evidence),
        ]
    else:
        parts.append(
            "Too many incidents at once to show the numbers around each; see "
            f"`vitals why RUN {incident.onset}`."
        )
    parts += [_readings_paragraph(incident), _decisions_paragraph(incident)]
    return tuple(printable(" ".join(part.split())) for part in parts if part)


def _onset_paragraph(incident: IncidentParts) -> str:
    """Explain in a paragraph the start of an incident: alerts, findings and notes."""
    when = _time_phrase(incident.started_unix_ns)
    sentences = [f"Began at step {incident.onset} of attempt {incident.ordinal}, detected {when}."]
    alerts = user_alert_episodes(view.finding for view in incident.findings)
    sentences += _first_few([alert.text for alert in alerts], "custom alert")
    findings = _findings([view for view in incident.findings if not view.finding.severity])
    sentences += _first_few(findings, "finding")
    if not incident.findings:
        sentences.append("No finding about it is stored.")
    notes = [event for event in incident.events if event.kind in ("Note", "RunEnded")]
    sentences += _first_few([_note_sentence(event) for event in notes], "note")
    if not incident.findings and not incident.decisions:
        sentences += [
            f"Alert {alert.title}: {alert.summary.rstrip('.')}."
            for alert in incident.alerts[:MAX_TOLD]
        ]
    return " ".join(sentences)


def _findings(entries: Sequence[views.FindingView]) -> list[str]:
    """Return a sentence for each kind, metric and rank: a fault of many steps is one sentence."""
    groups: dict[tuple[str, str, int], list[Finding]] = {}
    for view in why.without_waits(entries):
        finding = view.finding
        key = (finding.kind, finding.cause or finding.reason, finding.rank)
        groups.setdefault(key, []).append(finding)
    return [
        _finding_group_sentence(sorted(group, key=lambda f: f.step)) for group in groups.values()
    ]


def _finding_group_sentence(findings: Sequence[Finding]) -> str:
    """Explain the findings of one kind in a sentence of an incident's story."""
    first, last = findings[0], findings[-1]
    reason = first.reason[:1].upper() + first.reason[1:]
    at = f"(step {first.step})"
    if first.step != last.step:
        at = f"(steps {first.step} to {last.step})"
    if len({finding.reason for finding in findings}) > 1:
        at = f"(step {first.step}; {len(findings) - 1} more up to step {last.step})"
    return f"{reason} {at}."


def _note_sentence(event: views.EventView) -> str:
    """Explain a note or the end of a run in a sentence of an incident's story."""
    text = event.text.rstrip(".")
    if event.kind == "RunEnded" and text.startswith("halted: "):
        return f"Halted by Vitals: {text.removeprefix('halted: ')}."
    return f"{event.source.replace(':', ' ')}: {text}."


def _values_paragraph(incident: IncidentParts, view: views.StepView | None) -> str:
    """Explain in a paragraph the values at an incident's onset: loss, norm, learning rate."""
    if view is None or not view.rows:
        return f"No row of step {incident.onset} is stored, so its numbers are missing."
    head = next((row for row in view.rows if row.source == "rank:0"), None)
    if head is None:
        return f"No row of rank 0 is stored for step {incident.onset}, so its numbers are missing."
    sentences = [f"Step {incident.onset}: {why.of_attempt(view, incident.attempt)}"]
    if "learning_rate" not in head.values:
        sentences.append("The learning rate was not recorded.")
    elif head.values.get("lr_factor") not in (None, 1, 1.0):
        sentences.append(f"Vitals had scaled the learning rate by {head.values['lr_factor']:g}.")
    return " ".join(sentences)


def _movers_paragraph(incident: IncidentParts, evidence: IncidentEvidence) -> str:
    """Explain in a paragraph an incident's changes besides the first, which the verdict names."""
    movers = evidence.movers
    layers = [mover for mover in movers if not _is_run_or_rank(mover.view.row)]
    ranks = [mover for mover in movers if mover.view.row.startswith("rank:")]
    of_run = [mover for mover in movers if mover.view.row == RUN]
    sentences = []
    if layers:
        sentences.append(f"Layers: {_sorted_movers_text(layers)}.")
    elif not evidence.has_layers:
        sentences.append("No layer metrics are stored around it.")
    if ranks:
        sentences.append(f"Ranks: {_sorted_movers_text(ranks)}.")
    if of_run:
        sentences.append(f"Whole run: {_movers_text(of_run)}.")
    if movers:
        sentences.insert(0, f"Largest changes up to step {incident.onset}:")
    return " ".join(sentences)


def _sorted_movers_text(movers: Sequence[TopChange]) -> str:
    """Describe the changes around an incident for its story, the largest first."""
    return _movers_text(sorted(movers, key=lambda mover: (-mover.view.score, mover.first_step)))


def _movers_text(movers: Sequence[TopChange]) -> str:
    """Describe the first of the changes around an incident, and count the rest."""
    shown = "; ".join(
        f"{_mover_name(mover.view)} {_change_text(mover)}" for mover in movers[:MAX_TOLD]
    )
    more = len(movers) - MAX_TOLD
    return shown + (f"; and {more} more" if more > 0 else "")


def _mover_name(view: views.MoverView) -> str:
    """Name a change in the story of an incident: its layer or rank, and the metric."""
    metric = split_unit(view.metric)[0].replace("grad norm", "gradient norm")
    if view.row == RUN:
        return metric
    row = view.row.replace(":", " ") if _is_run_or_rank(view.row) else f"`{view.row}`"
    return f"{row}: {metric}"


def _change_text(mover: TopChange) -> str:
    """Describe a change in an incident's story: peak, usual value and deviation."""
    view, unit = mover.view, split_unit(mover.view.metric)[1]
    usual = "" if view.before is None else f", usually {humanize(view.before, unit)}"
    if view.score >= NONFINITE_SCORE:
        return f"NaN or infinite at step {view.peak_step}{usual}"
    peak = math.nan if view.peak is None else view.peak
    if view.before is not None and view.before > 0.0 and peak > 0.0:
        usual = f", {peak / view.before:.3g}x its usual {humanize(view.before, unit)}"
    begun = f", since step {mover.first_step}" if mover.first_step < view.peak_step else ""
    return f"{humanize(peak, unit)} at step {view.peak_step}{usual} ({view.score:.3g} sigma{begun})"


def _is_run_or_rank(row: str) -> bool:
    """Return whether a change in an incident's story belongs to the run or to a rank."""
    return row == RUN or row.startswith("rank:")


def _batches_paragraph(incident: IncidentParts, view: views.StepView | None) -> str:
    """Explain in a paragraph which batches and samples an incident's steps trained on."""
    data = [samples for _, samples in incident.data] or list(view.data if view is not None else ())
    if data:
        sentences = [why.samples_sentence(samples, tells_attempt=False) for samples in data]
        return " ".join(_first_few(sentences, "batch", "batches"))
    batches = [
        f"{row.source.replace(':', ' ')} on batch {row.values['batch_index']} of epoch "
        f"{row.values.get('epoch') or 0}"
        for row in (view.rows if view is not None else ())
        if row.values.get("batch_index") is not None
    ]
    if batches:
        shown = ", ".join(batches[:MAX_TOLD])
        more = len(batches) - MAX_TOLD
        tail = f" and {more} more" if more > 0 else ""
        return f"Trained on: {shown}{tail}; their sample ids were not recorded."
    return "The batches were not recorded."


def _gpu_paragraph(evidence: IncidentEvidence) -> str:
    """Explain in a paragraph what the GPUs showed around an incident."""
    if not evidence.has_gpus:
        return "No GPU samples are stored around it."
    if not evidence.gpus:
        return "The GPUs showed nothing unusual compared with the ten minutes before."
    return f"GPUs: {'; '.join(_gpu_change_text(view) for view in evidence.gpus)}."


def _gpu_change_text(view: views.MoverView) -> str:
    """Describe a GPU's change, such as throttling, in the story of an incident."""
    if view.metric == THROTTLED:
        began = int(view.peak or 0) & ~int(view.before or 0)
        reasons = "; ".join(description for bit, description in THROTTLES.items() if began & bit)
        return f"{view.row} began to throttle ({reasons})"
    name, unit = split_unit(view.metric)
    before, peak = (
        "unknown" if value is None else humanize(value, unit) for value in (view.before, view.peak)
    )
    return f"{name} of {view.row} went from {before} to {peak}"


def _readings_paragraph(incident: IncidentParts) -> str:
    """Explain in a paragraph an incident's probe and evaluation results; or nothing."""
    readings = [f"{event.text}." for event in incident.events if event.kind == "StateRead"]
    return " ".join(_first_few(readings, "probe or evaluation result"))


def _decisions_paragraph(incident: IncidentParts) -> str:
    """Explain in a paragraph what Vitals did about an incident, and why."""
    if not incident.decisions:
        return "Vitals took no action."
    sentences = _first_few([why.decision_sentence(view) for view in incident.decisions], "decision")
    skipped = [event.text for event in incident.events if event.kind == "DataWindowSkipped"]
    sentences += [f"Data: {text}." for text in skipped[:MAX_TOLD]]
    return " ".join(sentences)


def _first_few(sentences: Sequence[str], name: str, plural: str = "") -> list[str]:
    """Return the first of the sentences that a story lists, and one that counts the others."""
    more = len(sentences) - MAX_TOLD
    text = humanize_count(more, f"more {name}", f"more {plural}" if plural else "")
    return [*sentences[:MAX_TOLD], *([f"And {text}."] if more > 0 else [])]


def _time_phrase(time_unix_ns: int) -> str:
    """Return a time as the story of an incident writes it."""
    try:
        when = datetime.fromtimestamp(time_unix_ns / 1e9, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
    return f"at {when:%Y-%m-%d %H:%M:%S} UTC"
