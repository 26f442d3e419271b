"""Documents about an incident. Pure.

Tickets, post-mortems, the dashboard and the command line show these: a new fact needs only a line
in ``verdict_facts``.
"""

from datetime import UTC, datetime

from trainvitals.document.blocks import (
    CommandLines,
    Heading,
    KeyFacts,
    Paragraph,
    TableBlock,
    TextBlock,
)
from trainvitals.records import SEVERITY_WORDS
from trainvitals.views import IncidentLine, IncidentView, RunSummary, VerdictView


def incident_state(incident: IncidentView | IncidentLine) -> str:
    """Return the state of an incident as a word: open, resolved or unresolved."""
    if incident.is_open:
        return "open"
    return "resolved" if incident.is_resolved else "unresolved"


def verdict_facts(verdict: VerdictView) -> KeyFacts:
    """Return the facts of a verdict as a block for any document, without empty ones."""
    pairs = (
        ("State", verdict.state),
        ("Cause", verdict.cause),
        ("Action taken", verdict.action),
        ("Cost", verdict.cost),
        ("Before", verdict.before),
        ("Next", verdict.next),
        ("Repro", verdict.played),
    )
    return KeyFacts([(name, text) for name, text in pairs if text])


def verdict_blocks(verdict: VerdictView) -> list[TextBlock]:
    """Return a verdict as blocks of a document: its facts, and the commands to copy."""
    commands = [CommandLines(verdict.commands)] if verdict.commands else []
    return [verdict_facts(verdict), *commands]


def timeline_blocks(verdict: VerdictView) -> list[TextBlock]:
    """Return the timeline of an incident as a table block; empty without one."""
    rows = [
        (
            datetime.fromtimestamp(entry.time_unix_ns / 1e9, tz=UTC),
            entry.step if entry.step >= 0 else None,
            entry.text,
        )
        for entry in verdict.timeline
    ]
    return [TableBlock(("time", "step", "what happened"), rows)] if rows else []


def incident_blocks(incident: IncidentView, run: RunSummary | None = None) -> list[TextBlock]:
    """Return the summary of an incident as blocks of text, for tickets, pages and terminals.

    Args:
        incident: the incident.
        run: its run; None if the document is about this run.
    """
    severity = SEVERITY_WORDS[incident.severity]
    state = incident_state(incident)
    blocks: list[TextBlock] = [
        Heading(2, incident.title or f"Incident {incident.incident_id}"),
        Paragraph(f"Incident {incident.incident_id}. Severity: {severity}. State: {state}."),
    ]
    if run is not None:
        name = f"{run.name} ({run.run_id})" if run.name else run.run_id
        blocks.append(Paragraph(f"Run: {name}"))
    return [*blocks, *verdict_blocks(incident.verdict), *timeline_blocks(incident.verdict)]
