"""An incident's summary as Markdown and as HTML, to be pasted into a ticket. Pure."""

import html
from datetime import UTC, datetime

from trainvitals.printable import escape_markdown, printable
from trainvitals.views import IncidentView, RunSummary, TimelineEntry, VerdictView


def facts(verdict: VerdictView) -> list[tuple[str, str]]:
    """Return the verdict's named parts, without empty ones."""
    pairs = (
        ("State", verdict.state),
        ("Cause", verdict.cause),
        ("Action taken", verdict.action),
        ("Cost", verdict.cost),
        ("Before", verdict.before),
        ("Next", verdict.next),
        ("Played again", verdict.played),
    )
    return [(name, text) for name, text in pairs if text]


def entry_time(line: TimelineEntry, *, has_date: bool = True) -> str:
    """Return when a line of the timeline was, and at which step."""
    when = datetime.fromtimestamp(line.time_unix_ns / 1e9, tz=UTC)
    step = f", step {line.step:,}" if line.step >= 0 else ""
    return f"{when:{'%Y-%m-%d ' if has_date else ''}%H:%M:%S} UTC{step}"


def markdown(run: RunSummary, incident: IncidentView) -> str:
    """Return the summary as Markdown; external text is escaped."""
    verdict, text = incident.verdict, escape_markdown
    lines = [f"## {text(incident.title)}", "", f"Run: {text(_label(run))}", ""]
    lines += [f"- **{name}**: {text(description)}" for name, description in facts(verdict)]
    if verdict.commands:
        lines += ["", "```sh", *map(printable, verdict.commands), "```"]
    lines += ["", "| When | What |", "|---|---|"]
    lines += [f"| {entry_time(line)} | {text(line.text)} |" for line in verdict.timeline]
    return "\n".join(lines) + "\n"


def page(run: RunSummary, incident: IncidentView) -> str:
    """Return the summary as HTML; external text is escaped."""
    verdict, text = incident.verdict, html.escape
    rows = "".join(
        f"<tr><th>{name}</th><td>{text(description)}</td></tr>"
        for name, description in facts(verdict)
    )
    times = "".join(
        f"<tr><td>{entry_time(line)}</td><td>{text(line.text)}</td></tr>"
        for line in verdict.timeline
    )
    commands = "\n".join(text(printable(command)) for command in verdict.commands)
    return (
        f"<h2>{text(incident.title)}</h2>\n<p>Run: {text(_label(run))}</p>\n"
        f"<table>{rows}</table>\n<pre>{commands}</pre>\n<table>{times}</table>\n"
    )


def _label(run: RunSummary) -> str:
    return f"{run.name} ({run.run_id})" if run.name else run.run_id
