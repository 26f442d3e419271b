"""Converts views to the rows and facts of a response."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from trainvitals.catalog import CATALOG
from trainvitals.cli.output import format_time
from trainvitals.io.rundir import is_run_id
from trainvitals.records import action_text
from trainvitals.views import (
    AlertView,
    DecisionView,
    IncidentLine,
    IncidentView,
    NonFiniteMark,
    RunDetail,
    RunSummary,
    SourceView,
    VerdictView,
)
from vitals_collector.queries.verdict import SETTLED_STEPS
from vitals_plugins.bridges.assistants.answers import Fixed, Point, Story, redacted_pairs

_SERIES = frozenset(f"{metric.stream}.{metric.column}" for metric in CATALOG if metric.stream)
"""Series of Vitals; others have names from the run."""


def series_names(names: Sequence[str]) -> list[str]:
    """Return the names of series for an MCP tool; only those from the run are marked as data."""
    return [Fixed(name) if name in _SERIES else name for name in names]


def number_or_none(value: int) -> int | None:
    """Return a rank or step for an MCP tool; None if there is none."""
    return value if value >= 0 else None


def utc_time(unix_ns: int) -> Fixed:
    """Return a time in UTC for an MCP tool; "" for none."""
    return Fixed(format_time(unix_ns))


def run_id_text(run_id: str) -> str:
    """Return a run id for an MCP tool: not marked as data if it has the form of an id."""
    return Fixed(run_id) if is_run_id(run_id) else run_id


def summary_row(run: RunSummary) -> dict[str, Any]:
    """Return one run of an MCP tool's list."""
    return {
        "run_id": run_id_text(run.run_id),
        "name": run.name,
        "project": run.project,
        "state": Fixed(run.state),
        "health": Fixed(run.health),
        "mode": run.mode,
        "last_step": run.last_step,
        "loss": run.loss,
        "ranks": run.world_size,
        "skips": run.num_skips,
        "rollbacks": run.num_rollbacks,
        "firing_alerts": run.num_firing_alerts,
        "started": utc_time(run.started_unix_ns),
        "last_seen": utc_time(run.last_seen_unix_ns),
    }


def verdict_facts(verdict: VerdictView) -> dict[str, Any]:
    """Return the verdict for an assistant; its commands are for the operator."""
    names = ("incident_id", "state", "cause", "action", "cost", "before", "next", "played")
    texts = {name: Story(getattr(verdict, name)) for name in names if getattr(verdict, name)}
    return {**texts, "is_hung": verdict.is_hung, "commands_for_the_operator": verdict.commands[:6]}


def incident_state(incident: IncidentLine | IncidentView) -> Fixed:
    """Return whether an incident is over, for an MCP tool."""
    if incident.is_open:
        return Fixed("open")
    if incident.is_resolved:
        return Fixed("resolved")
    return Fixed(f"ended without {SETTLED_STEPS} healthy steps after it")


def incident_row(line: IncidentLine) -> dict[str, Any]:
    """Return one incident of an MCP tool's list."""
    return {
        "incident_id": line.incident_id,
        "title": line.title,
        "severity": Fixed(line.severity),
        "state": incident_state(line),
        "onset_step": line.onset_step,
        "last_step": line.last_step,
    }


def decision_row(view: DecisionView) -> dict[str, Any]:
    """Return a decision with its evidence, as a row of an MCP tool's response."""
    decision = view.decision
    return {
        "number": decision.ledger_seq,
        "step": decision.step,
        "decided_at_step": decision.decided_at_step,
        "attempt": decision.attempt,
        "action": action_text(decision),
        "acted": decision.acted,
        "reason": decision.reason,
        "rule": decision.rule,
        "cause": decision.cause,
        "rank": number_or_none(decision.rank),
        "value": decision.value,
        "limit": decision.limit,
        "hindsight": view.hindsight,
        "time": utc_time(view.time_unix_ns),
        "evidence": redacted_pairs(dict(islice(decision.evidence.items(), 16))) or None,
    }


def alert_row(view: AlertView) -> dict[str, Any]:
    """Return one alert of an MCP tool's list."""
    return {
        "alert": view.title,
        "run_id": run_id_text(view.run_id),
        "severity": Fixed(view.severity),
        "state": Fixed(view.state),
        "step": number_or_none(view.step),
        "started": utc_time(view.started_unix_ns),
        "acknowledged_by": view.acknowledged_by,
        "summary": view.summary,
    }


def node_rows(sources: Sequence[SourceView]) -> list[dict[str, Any]]:
    """Return the nodes for an MCP tool: those with lost rows first."""
    nodes: dict[str, dict[str, Any]] = {}
    for source in sources:
        node = nodes.setdefault(
            source.node, {"node": source.node, "num_sources": 0, "lost_rows": 0, "seen": 0}
        )
        node["num_sources"] += 1
        node["lost_rows"] += source.num_lost_rows
        node["seen"] = max(node["seen"], source.last_seen_unix_ns)
    rows = sorted(nodes.values(), key=lambda node: -node["lost_rows"])
    return [{**row, "seen": utc_time(row["seen"])} for row in rows]


def config_differences(first: RunDetail, second: RunDetail) -> list[tuple[str, Any, Any]]:
    """Return name and both values of each setting that differs, for an MCP tool."""
    ours, theirs = (dict(redacted_pairs(detail.info.config)) for detail in (first, second))
    return [
        (name, ours.get(name), theirs.get(name))
        for name in sorted(ours.keys() | theirs.keys())
        if first.info.config.get(name) != second.info.config.get(name)
    ]


def curve_points(
    steps: Sequence[int], values: Sequence[float | None], marks: Sequence[NonFiniteMark]
) -> list[Point]:
    """Return the points of an MCP tool's curve, with the names of its non-finite values."""
    kinds = {mark.step: mark.kind for mark in marks}
    return [
        (step, kinds.get(step) if value is None else value)
        for step, value in zip(steps, values, strict=True)
    ]
