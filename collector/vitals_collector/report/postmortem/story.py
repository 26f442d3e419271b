"""Converts the gathered data to blocks: run, incidents, decision log, and data sources."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from trainvitals.cli.output import format_time
from trainvitals.document.blocks import Block, Fold, Heading, Paragraph, TableBlock
from trainvitals.document.incident import incident_blocks, incident_state
from trainvitals.records import SEVERITY_WORDS, Finding
from trainvitals.units import humanize_count
from trainvitals.views import AlertView, IncidentView, MoverView, StepData
from vitals_collector.ingest.projections import describe_samples
from vitals_collector.queries.cost import total_lost_work
from vitals_collector.queries.verdict import verdict_cost_line
from vitals_collector.report import run_tables
from vitals_collector.report.charts import CurvePlot, HeatMap
from vitals_collector.report.curves import CurveMark, decision_marks
from vitals_collector.report.postmortem.report_data import HEAT_MAPS, IncidentFacts, ReportData

MAX_LINES = 200
"""Maximum number of rows in a table; the number of omitted rows is shown."""
_MOVERS = 10
_LISTED = 8
"""Incidents in the first table."""
_TITLE = 120

Row = Sequence[object]
T = TypeVar("T")


def report_blocks(facts: ReportData) -> list[Block]:
    """Return the blocks of the post-mortem page: incidents, decision log, run and settings."""
    summary = facts.detail.summary
    curve_marks = decision_marks(facts.ledger)
    spans = [(incident.onset_step, incident.last_step) for incident in facts.all_incidents]
    ordinals = {attempt.id: attempt.ordinal for attempt in facts.detail.attempts}
    gravest = min(facts.incidents, key=_severity_sort_key, default=None)
    return [
        Heading(1, f"Post-mortem of {_truncate_title(summary.name or summary.run_id)}"),
        Paragraph(_summary_text(facts)),
        *_incident_list_section(facts),
        *chain.from_iterable(
            _incident_section(each, curve_marks, ordinals, is_folded=each is not gravest)
            for each in facts.incidents
        ),
        Heading(2, "The run"),
        TableBlock(("what", "value"), _run_fact_rows(facts)),
        *(CurvePlot(curve, curve_marks, spans) for curve in facts.curves),
        *_folded(_decisions_section(facts)),
        *_folded(_timeline_section(facts)),
        *_folded(_checkpoints_section(facts)),
        *_folded(_settings_section(facts)),
        *_closing_section(facts),
    ]


def _severity_sort_key(incident_facts: IncidentFacts) -> tuple[int, int]:
    """Return the sort key of incidents in the post-mortem: the worst first."""
    incident = incident_facts.incident
    return list(SEVERITY_WORDS).index(incident.severity), -incident.started_unix_ns


def _folded(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield each section of the post-mortem as a fold, unless it has only sentences.

    A section starts with its heading.
    """
    sections: list[tuple[Heading, list[Block]]] = []
    for block in blocks:
        if isinstance(block, Heading):
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    for heading, section in sections:
        if all(isinstance(block, Paragraph) for block in section):
            yield from (heading, *section)
        else:
            yield Fold(heading.level, heading.text, section)


def _truncate_title(name: str) -> str:
    """Shorten the name of a run in the title of its post-mortem."""
    return name if len(name) <= _TITLE else f"{name[: _TITLE - 3]}..."


def _summary_text(facts: ReportData) -> str:
    """Return the post-mortem's first paragraph: state, incidents and lost work."""
    summary, num = facts.detail.summary, len(facts.all_incidents)
    text = f"Run {summary.state} at step {summary.last_step}. Health: {summary.health}. "
    if not num:
        return text + "No incidents."
    states = Counter(map(incident_state, facts.all_incidents))
    lost = total_lost_work([incident.verdict.lost for incident in facts.all_incidents])
    text += humanize_count(num, "incident")
    if states["resolved"] == num:
        text += ", all resolved"
    text += f", {states['open']} still open" if states["open"] else ""
    text += f", {states['unresolved']} unresolved" if states["unresolved"] else ""
    return f"{text}. {verdict_cost_line(lost, summary.world_size)}"


def _run_fact_rows(facts: ReportData) -> list[Row]:
    """Return the facts of the run in the post-mortem, without empty ones."""
    rows = run_tables.run_facts(facts.detail, facts.ledger)
    named = [(name, "not measured" if value is None else value) for name, value in rows]
    return [row for row in named if row[1] != ""]


def _incident_list_section(facts: ReportData) -> Iterator[Block]:
    """Yield the post-mortem's list of incidents, the older ones folded."""
    if not facts.all_incidents:
        return
    yield Heading(2, "Incidents")
    shown = facts.all_incidents[:MAX_LINES]
    yield _incident_table(shown[:_LISTED])
    if older := shown[_LISTED:]:
        left_out = _omitted_note(len(facts.all_incidents) - len(shown), "older incidents")
        yield Fold(3, "Older incidents", [_incident_table(older), *left_out])
    if len(facts.incidents) < len(facts.all_incidents):
        yield Paragraph(
            f"Details of {len(facts.incidents)} of them follow; for another: --incident ID."
        )


def _incident_table(incidents: Sequence[IncidentView]) -> TableBlock:
    """Return the post-mortem's table of incidents: cause, action, severity and cost."""
    return TableBlock(
        ("incident", "cause", "action", "severity", "steps", "began", "state", "lost work"),
        [
            (
                incident.incident_id,
                incident.verdict.cause,
                incident.verdict.action,
                SEVERITY_WORDS[incident.severity],
                _step_range_text(incident),
                format_time(incident.started_unix_ns),
                incident_state(incident),
                humanize_count(incident.cost_steps, "step"),
            )
            for incident in incidents
        ],
    )


def _step_range_text(incident: IncidentView) -> str:
    """Return the steps of an incident in the post-mortem's table."""
    alone = incident.onset_step == incident.last_step
    return str(incident.onset_step) if alone else f"{incident.onset_step} to {incident.last_step}"


def _omitted_note(num: int, what: str) -> list[Block]:
    """Return the post-mortem's line on entries that it leaves out."""
    return [Paragraph(f"and {num} more {what}")] if num > 0 else []


def _incident_section(
    incident_facts: IncidentFacts,
    curve_marks: Sequence[CurveMark],
    ordinals: Mapping[int, int],
    *,
    is_folded: bool,
) -> list[Block]:
    """Return the post-mortem's section on one incident; folded unless it is the worst."""
    title, *summary = incident_blocks(incident_facts.incident)
    blocks = [*summary, *_incident_evidence(incident_facts, curve_marks, ordinals)]
    if is_folded and isinstance(title, Heading):
        return [Fold(title.level, title.text, blocks)]
    return [title, *blocks]


def _incident_evidence(
    incident_facts: IncidentFacts, curve_marks: Sequence[CurveMark], ordinals: Mapping[int, int]
) -> Iterator[Block]:
    """Yield the evidence of an incident in the post-mortem: curves, maps, changes."""
    incident = incident_facts.incident
    yield Heading(3, "Evidence")
    for paragraph in incident.story:
        yield Paragraph(paragraph)
    span = (incident.onset_step, incident.last_step)
    for curve in incident_facts.curves:
        yield CurvePlot(curve, curve_marks, (span,))
    for reply in incident_facts.heat_maps:
        yield HeatMap(HEAT_MAPS.get(reply.metric, reply.metric), reply, incident.onset_step)
    if incident_facts.movers:
        yield Heading(3, "Largest changes")
        header = ("layer or rank", "metric", "before", "peak", "at step", "sigma")
        yield TableBlock(header, [_mover_row(mover) for mover in incident_facts.movers[:_MOVERS]])
    yield from _folded([*_evidence_section(incident), *_events_section(incident, ordinals)])


def _mover_row(mover: MoverView) -> Row:
    if mover.peak is None:
        return (mover.row, mover.metric, mover.before, "not finite", mover.peak_step, None)
    score = round(mover.score, 1)
    return (mover.row, mover.metric, mover.before, mover.peak, mover.peak_step, score)


def _capped_section(
    heading: Heading, items: Sequence[T], table: Callable[[Sequence[T]], TableBlock], what: str
) -> Iterator[Block]:
    """Yield a heading, and a table of the first items; nothing without items."""
    if items:
        yield heading
        yield table(items[:MAX_LINES])
        yield from _omitted_note(len(items) - MAX_LINES, what)


def _evidence_section(incident: IncidentView) -> Iterator[Block]:
    """Yield the post-mortem's tables of an incident's actions, findings and alerts."""
    actions = Heading(3, "Actions and their evidence")
    yield from _capped_section(actions, incident.decisions, run_tables.decision_table, "actions")
    findings = [view.finding for view in incident.findings]
    yield from _capped_section(Heading(3, "Findings"), findings, _finding_table, "findings")
    yield from _capped_section(Heading(3, "Alerts"), incident.alerts, _alert_table, "alerts")


def _finding_table(findings: Sequence[Finding]) -> TableBlock:
    return TableBlock(
        ("step", "level", "finding", "rank", "value", "limit", "reason"),
        [
            (f.step, f.level, f.kind, run_tables.rank_text(f.rank), f.value, f.limit, f.reason)
            for f in findings
        ],
    )


def _alert_table(alerts: Sequence[AlertView]) -> TableBlock:
    return TableBlock(
        ("alert", "severity", "state", "step", "began", "ended", "acknowledged by", "what"),
        [
            (
                a.title, SEVERITY_WORDS[a.severity], a.state, a.step,
                format_time(a.started_unix_ns), format_time(a.ended_unix_ns or 0),
                a.acknowledged_by, a.summary,
            )
            for a in alerts
        ],
    )  # fmt: skip


def _events_section(incident: IncidentView, ordinals: Mapping[int, int]) -> Iterator[Block]:
    def batch_table(data: Sequence[StepData]) -> TableBlock:
        return TableBlock(
            ("source", "attempt", "epoch", "batch", "samples", "file"),
            [
                (
                    d.source, ordinals.get(d.attempt, d.attempt), d.batch.epoch,
                    d.batch.first_batch, describe_samples(d.batch), d.batch.file,
                )
                for d in data
            ],
        )  # fmt: skip

    yield from _capped_section(
        Heading(3, "Events"), incident.events, run_tables.event_table, "events"
    )
    batches = Heading(3, "Batches of the bad steps")
    yield from _capped_section(batches, incident.data, batch_table, "batches")


def _decisions_section(facts: ReportData) -> Iterator[Block]:
    """Yield the post-mortem's section with all actions of the run."""
    yield Heading(2, "All actions")
    if not facts.ledger:
        yield Paragraph("Vitals took no action.")
        return
    yield run_tables.decision_table(facts.ledger[-MAX_LINES:])
    yield from _omitted_note(len(facts.ledger) - MAX_LINES, "earlier actions")


def _timeline_section(facts: ReportData) -> Iterator[Block]:
    """Yield the post-mortem's timeline: events, notes, decisions and alerts by time."""
    rows: list[tuple[int, str, int, str]] = [
        (e.time_unix_ns, e.source, e.step, e.text) for e in facts.events
    ]
    rows += [(n.time_unix_ns, n.by or "training", n.step, n.text) for n in facts.annotations]
    rows += [
        (d.time_unix_ns, "decision", d.decision.step, f"{d.decision.action}: {d.decision.reason}")
        for d in facts.ledger
    ]
    alerts = {a.fingerprint: a for incident in facts.all_incidents for a in incident.alerts}
    for alert in alerts.values():
        rows.append((alert.started_unix_ns, "alert", alert.step, f"{alert.name} firing"))
        if alert.ended_unix_ns:
            rows.append((alert.ended_unix_ns, "alert", -1, f"{alert.name} resolved"))
    rows.sort(key=lambda row: row[0])
    if not rows:
        return
    yield Heading(2, "Timeline")
    yield from _omitted_note(len(rows) - MAX_LINES, "earlier lines")
    shown = [
        (format_time(time), who, step if step >= 0 else None, text)
        for time, who, step, text in rows[-MAX_LINES:]
    ]
    yield TableBlock(("time", "source", "step", "message"), shown)


def _checkpoints_section(facts: ReportData) -> Iterator[Block]:
    """Yield the post-mortem's table of checkpoints, the latest ones."""
    if not facts.checkpoints:
        return
    yield Heading(2, "Checkpoints")
    yield from _omitted_note(len(facts.checkpoints) - MAX_LINES, "earlier checkpoints")
    yield run_tables.checkpoint_table(facts.checkpoints[-MAX_LINES:])


def _settings_section(facts: ReportData) -> Iterator[Block]:
    """Yield the post-mortem's tables of the configuration and the judge's settings."""
    info = facts.detail.info
    if info.config:
        yield Heading(2, "Configuration")
        yield TableBlock(("key", "value"), [*info.config.items()][:MAX_LINES])
        yield from _omitted_note(len(info.config) - MAX_LINES, "keys")
    judged: list[Row] = []
    for section, settings in info.judge.items():
        if isinstance(settings, dict):
            judged += [(f"{section}.{key}", value) for key, value in settings.items()]
        else:
            judged.append((section, settings))
    if judged:
        yield Heading(2, "Detector settings")
        yield TableBlock(("setting", "value"), judged[:MAX_LINES])


def _closing_section(facts: ReportData) -> Iterator[Block]:
    """Yield the end of the post-mortem: missing data, and the version."""
    if facts.missing:
        yield Heading(2, "Not in this report")
        for missing in facts.missing:
            yield Paragraph(f"{missing}.")
    version = facts.detail.info.vitals_version
    by = f"Vitals {version}" if version else "Vitals"
    yield Paragraph(
        f"Written by `vitals postmortem` at {format_time(facts.made_unix_ns)}; recorded by {by}.",
        is_dim=True,
    )
