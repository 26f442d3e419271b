"""Statements about a run as a user reads them: `vitals postmortem --format json`, `vitals why`.

This module asks the reader that both commands use.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from trainvitals.views import IncidentView, MoversQuestion, StepQuestion
from vitals_collector.queries.open import Reader, open_folder
from vitals_collector.report.postmortem.report_data import gather_report_data


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One incident of the report, with `why` of its first step."""

    incident_id: str
    title: str
    onset: int
    last: int
    cause: str
    """Name of the cause, as in the incident's id."""
    sentence: str
    """The verdict's cause, with the first mover."""
    state: str
    next: str
    why: str = ""
    """First mover as `vitals why` shows it for the first step."""


def read_statements(folder: Path) -> list[Statement]:
    """Return the incidents of the one run in a directory, by step."""
    with open_folder(folder) as opened:
        reader = opened.reader
        report = gather_report_data(reader, folder.name, now_unix_ns=time.time_ns())
        statements = [_statement(reader, incident) for incident in report.all_incidents]
    return sorted(statements, key=lambda each: (each.onset, each.incident_id))


def _statement(reader: Reader, incident: IncidentView) -> Statement:
    step = max(0, incident.onset_step)
    view = reader.ask(StepQuestion(run_id=incident.run_id, step=step))
    return Statement(
        incident_id=incident.incident_id,
        title=incident.title,
        onset=incident.onset_step,
        last=incident.last_step,
        cause=incident.incident_id.split("-", 2)[2].rstrip("_"),
        sentence=incident.verdict.cause,
        state=incident.verdict.state,
        next=incident.verdict.next,
        why=view.moved_first or "",
    )


def read_quiet(folder: Path, steps: list[int]) -> tuple[int, int]:
    """Return at how many steps of a healthy run `why`, and "Largest changes", name something."""
    by_why = by_changes = 0
    with open_folder(folder) as opened:
        for step in steps:
            view = opened.reader.ask(StepQuestion(run_id=folder.name, step=step))
            by_why += bool(view.moved_first or view.findings)
            by_changes += bool(opened.reader.ask(MoversQuestion(run_id=folder.name, step=step)))
    return by_why, by_changes


__all__ = ["Statement", "read_quiet", "read_statements"]
