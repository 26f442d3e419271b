"""Tables as rows of plain values: pure functions from the query API's replies."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainvitals.document.incident import incident_state
from trainvitals.goodput import BUCKETS
from trainvitals.hindsight import HINDSIGHT_WORDS
from trainvitals.records import SEVERITY_WORDS
from trainvitals.units import humanize_seconds
from trainvitals.views import (
    AlertView,
    AttemptView,
    CheckpointView,
    CommandView,
    DecisionView,
    EventView,
    FailingNode,
    FindingView,
    GoodputView,
    IncidentView,
    MoverView,
    RunSummary,
    SourceView,
    StepData,
)
from vitals_dashboard import formatting
from vitals_dashboard.theme import ACTIONS, ALERT_WORDS, CHECKPOINT_WORDS, HEALTH_WORDS, STATE_WORDS

Row = dict[str, Any]


def to_datetime(time_unix_ns: int) -> datetime | None:
    """Return a time for a table cell of the dashboard, or None if it is unknown."""
    return datetime.fromtimestamp(time_unix_ns / 1e9, tz=UTC) if time_unix_ns > 0 else None


def run_rows(
    runs: Sequence[RunSummary],
    *,
    now_unix_ns: int,
    curves: Mapping[str, str],
    verdicts: Mapping[str, str],
    hung: Collection[str] = (),
) -> list[Row]:
    """Return the rows of the dashboard's run list in the given order; ``hung`` are run ids.

    A table's numeric column cannot show NaN: losses are texts if one is non-finite. State and
    health are lists of one item, which a table shows as labels with a color.
    """
    are_numbers = all(math.isfinite(run.loss or 0.0) for run in runs)
    return [
        {
            "Run": formatting.run_label(run.name, run.run_id),
            "State": [STATE_WORDS["hung" if run.run_id in hung else run.state]],
            "Health": [HEALTH_WORDS[run.health]],
            "Verdict": verdicts.get(run.run_id, ""),
            "Alerts": run.num_firing_alerts,
            "Step": run.last_step,
            "Loss": run.loss if are_numbers else formatting.number(run.loss),
            "Loss curve": curves.get(run.run_id, ""),
            "Seen": formatting.age(run.last_seen_unix_ns, now_unix_ns) + " ago",
            "Skips": run.num_skips,
            "Rollbacks": run.num_rollbacks,
            "Ranks": run.world_size,
            "Project": formatting.plain(run.project, 60),
            "User": formatting.plain(run.user, 40),
            "Tags": formatting.plain(", ".join(run.tags), 120),
            "Started": to_datetime(run.started_unix_ns),
            "Id": run.run_id,
        }
        for run in runs
    ]


_HEALTH_ORDER = ("critical", "unguarded", "acting", "unknown", "healthy")
ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "newest first": lambda run: -run.started_unix_ns,
    "worst first": lambda run: (
        _HEALTH_ORDER.index(run.health),
        -run.num_firing_alerts,
        -run.started_unix_ns,
    ),
    "last seen first": lambda run: -run.last_seen_unix_ns,
    "most steps": lambda run: -run.last_step,
    "most skips": lambda run: (-run.num_skips, -run.num_rollbacks),
    "by name": lambda run: (run.name.casefold(), -run.started_unix_ns),
}
"""Sort orders of a list of runs, as in the URL."""


def sort_runs(runs: Iterable[RunSummary], order: str = "newest first") -> list[RunSummary]:
    """Sort the dashboard's run list by one of ``ORDERS``; for other names, latest first."""
    return sorted(runs, key=ORDERS.get(order, ORDERS["newest first"]))


def decision_rows(decisions: Sequence[DecisionView]) -> list[Row]:
    """Return the dashboard's table of the decision log, latest first."""
    rows = []
    for view in sorted(decisions, key=lambda v: v.decision.ledger_seq, reverse=True):
        decision = view.decision
        look = ACTIONS.get(decision.action)
        word = f"{look.icon} {look.word}" if look else str(decision.action)
        observed = ", ".join(filter(None, ("observed", HINDSIGHT_WORDS.get(view.hindsight, ""))))
        rows.append(
            {
                "Step": decision.step,
                "Action": word if decision.acted else f"{word} ({observed})",
                "Reason": formatting.plain(decision.reason, 400),
                "Rule": formatting.plain(decision.rule, 60),
                "Rank": decision.rank if decision.rank >= 0 else None,
                "Value": formatting.number(decision.value),
                "Limit": formatting.number(decision.limit),
                "Back to": decision.rollback_to_step if decision.rollback_to_step >= 0 else None,
                "Batches skipped": decision.skip_batches or None,
                "LR factor": decision.lr_factor,
                "Budget left": decision.budget_left if decision.budget_left >= 0 else None,
                "Cost": decision.cost_steps,
                "Checkpoint": formatting.plain(decision.checkpoint_id, 60),
                "When": to_datetime(view.time_unix_ns),
            }
        )
    return rows


def checkpoint_rows(checkpoints: Sequence[CheckpointView]) -> list[Row]:
    """Convert checkpoints and snapshots to rows of a table on a page, latest first."""
    newest = sorted(checkpoints, key=lambda c: c.time_unix_ns, reverse=True)
    return [
        {
            "Step": c.step,
            "State": CHECKPOINT_WORDS.get(c.state, formatting.plain(c.state, 20)),
            "Where": formatting.plain(c.where, 20),
            "Size": formatting.size(c.num_bytes) if c.num_bytes else "",
            "Id": formatting.plain(c.checkpoint_id, 60),
            "Detail": formatting.plain(c.detail, 200),
            "When": to_datetime(c.time_unix_ns),
        }
        for c in newest
    ]


def attempt_rows(attempts: Sequence[AttemptView]) -> list[Row]:
    """Convert a run's attempts to the rows that a page shows, latest first, with numbers."""
    ordinals = {attempt.id: attempt.ordinal for attempt in attempts}
    return [
        {
            "Attempt": a.ordinal,
            "Forked from": ordinals.get(a.parent) if a.parent is not None else None,
            "At step": a.fork_step,
            "Last step": a.last_step,
            "Reason": formatting.plain(a.reason, 300),
            "Started": to_datetime(a.started_unix_ns),
        }
        for a in sorted(attempts, key=lambda a: a.ordinal, reverse=True)
    ]


def goodput_rows(view: GoodputView) -> list[Row]:
    """Return the dashboard's table of how a run's wall time was used, without empty buckets."""
    wall = view.end_unix_ns - view.begin_unix_ns
    return [
        {
            "Bucket": bucket.replace("_", " "),
            "Time": humanize_seconds(taken / 1e9),
            "Share": formatting.share(taken / wall),
        }
        for bucket in BUCKETS
        if (taken := view.nanoseconds.get(bucket, 0))
    ]


def phone_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the run list in two columns, for a browser with a narrow screen."""
    return [
        {
            "Run": formatting.plain(row["Run"], 40),
            "Now": f"{row['State'][0]}, {row['Health'][0]}. Step {row['Step']:,}, loss "
            f"{row['Loss'] if isinstance(row['Loss'], str) else formatting.number(row['Loss'])}. "
            + (f"{formatting.count(row['Alerts'], 'firing alert')}. " if row["Alerts"] else "")
            + formatting.plain(row["Verdict"], 70),
        }
        for row in rows
    ]


def waiting_rows(runs: Sequence[tuple[RunSummary, GoodputView]]) -> list[Row]:
    """Return for a page what stragglers and hangs cost each run, the most expensive first.

    The time counts for each rank, as one GPU; runs without such a time are omitted.
    """
    costs: list[tuple[float, Row]] = []
    for run, view in runs:
        late, hung = (view.nanoseconds.get(name, 0) / 1e9 for name in ("straggler_wait", "hang"))
        if not late + hung:
            continue
        hours = (late + hung) * run.world_size / 3_600 if view.gpu_hours else None
        price = view.money / view.gpu_hours if view.money and view.gpu_hours else None
        wall_seconds = (view.end_unix_ns - view.begin_unix_ns) / 1e9
        row = {
            "Run": formatting.run_label(run.name, run.run_id),
            "Stragglers": humanize_seconds(late),
            "Hangs": humanize_seconds(hung),
            "Share": formatting.share((late + hung) / wall_seconds),
            "GPU-hours": formatting.number(hours, 3),
            "Price": formatting.number(hours * price if hours and price else None, 3),
        }
        costs.append(((late + hung) * run.world_size, row))
    return [row for _, row in sorted(costs, key=lambda cost: -cost[0])]


def failing_node_rows(nodes: Iterable[FailingNode]) -> list[Row]:
    """Return the fleet page's table of nodes that failed preflights, the latest failure first."""
    return [
        {
            "Node": formatting.plain(each.node),
            "Failed": f"{each.num_failed} of {each.num_checks}",
            "Last": to_datetime(each.last_unix_ns),
            "Faults": formatting.plain(", ".join(each.kinds)),
        }
        for each in sorted(nodes, key=lambda node: -node.last_unix_ns)
    ]


def alert_rows(alerts: Sequence[AlertView], names: dict[str, str]) -> list[Row]:
    """Return the dashboard's table of resolved and pending alerts, the latest change first."""
    return [
        {
            "Alert": formatting.plain(alert.title, 60),
            "State": ALERT_WORDS[alert.state],
            "Severity": SEVERITY_WORDS[alert.severity],
            "Run": formatting.run_label(names.get(alert.run_id, ""), alert.run_id, 60),
            "Step": alert.step if alert.step >= 0 else None,
            "Summary": formatting.plain(alert.summary, 300),
            "Acknowledged by": formatting.plain(alert.acknowledged_by, 40),
            "Began": to_datetime(alert.started_unix_ns),
            "Ended": to_datetime(alert.ended_unix_ns or 0),
        }
        for alert in sorted(alerts, key=lambda a: a.updated_unix_ns, reverse=True)
    ]


def finding_rows(findings: Sequence[FindingView]) -> list[Row]:
    """Convert findings to table rows for the dashboard, latest first."""
    return [
        {
            "Step": view.finding.step,
            "Kind": formatting.plain(view.finding.kind, 40),
            "Reason": formatting.plain(view.finding.reason, 400),
            "Rank": view.finding.rank if view.finding.rank >= 0 else None,
            "Value": formatting.number(view.finding.value),
            "Limit": formatting.number(view.finding.limit),
            "Since step": view.finding.onset_step if view.finding.onset_step >= 0 else None,
            "Level": view.finding.level,
            "When": to_datetime(view.time_unix_ns),
        }
        for view in sorted(findings, key=lambda v: v.time_unix_ns, reverse=True)
    ]


def mover_rows(movers: Sequence[MoverView]) -> list[Row]:
    """Return the changes before a step, in the given order: the largest first."""
    return [
        {
            "Layer or rank": formatting.plain(mover.row, 120),
            "Metric": formatting.plain(mover.metric, 60),
            "Before": formatting.number(mover.before),
            "Peak": formatting.number(mover.peak) if mover.peak is not None else "not finite",
            "At step": mover.peak_step,
            "Sigma": mover.score if mover.peak is not None else None,
        }
        for mover in movers
    ]


def source_rows(sources: Sequence[SourceView], *, now_unix_ns: int) -> list[Row]:
    """List ranks, GPUs and nodes in rows for a page, the latest report first."""
    return [
        {
            "Source": formatting.plain(source.source, 80),
            "Node": formatting.plain(source.node, 80),
            "Process": source.pid or None,
            "Seen": formatting.age(source.last_seen_unix_ns, now_unix_ns) + " ago",
            "Rows": source.num_rows,
            "Lost rows": source.num_lost_rows,
            "Streams": formatting.plain(", ".join(source.streams), 80),
            "Started": to_datetime(source.started_unix_ns),
        }
        for source in sorted(sources, key=lambda s: s.last_seen_unix_ns, reverse=True)
    ]


def event_rows(events: Sequence[EventView]) -> list[Row]:
    """Convert events to table rows for the browser, oldest first: a story is read that way."""
    return [
        {
            "Step": event.step if event.step >= 0 else None,
            "Source": formatting.plain(event.source, 60),
            "Kind": formatting.plain(event.kind, 40),
            "What": formatting.plain(event.text, 400),
            "When": to_datetime(event.time_unix_ns),
        }
        for event in sorted(events, key=lambda e: e.time_unix_ns)
    ]


def step_data_rows(data: Sequence[StepData]) -> list[Row]:
    """Return the dashboard's table of the batches and samples that fed the steps."""
    return [
        {
            "Source": formatting.plain(entry.source, 40),
            "Epoch": entry.batch.epoch,
            "First batch": entry.batch.first_batch,
            "Batches": entry.batch.num_batches,
            "Samples": entry.batch.num_samples if entry.batch.num_samples >= 0 else None,
            "Ids": formatting.plain(", ".join(str(i) for i in entry.batch.sample_ids[:50]), 300),
            "Kept in": formatting.plain(entry.batch.file, 200),
        }
        for entry in data
    ]


def command_rows(commands: Sequence[CommandView]) -> list[Row]:
    """Return the dashboard's table of manual commands and their results, latest first."""
    return [
        {
            "Action": view.command.action
            + (f" step {view.command.argument:,.0f}" if view.command.action == "accept" else ""),
            "Answer": view.status,
            "Reason": formatting.plain(view.command.reason, 300),
            "Detail": formatting.plain(view.detail, 300),
            "Step": view.step if view.step >= 0 else None,
            "Checkpoint": formatting.plain(view.command.checkpoint_id, 60),
            "By": formatting.plain(view.command.issued_by, 60),
            "When": to_datetime(view.command.issued_unix_ns),
        }
        for view in sorted(commands, key=lambda v: v.command.number, reverse=True)
    ]


def incident_rows(incidents: Sequence[IncidentView]) -> list[Row]:
    """Convert incidents to the rows of a page's table, in the given order."""
    return [
        {
            "Step": incident.onset_step,
            "To step": incident.last_step,
            "Incident": formatting.plain(incident.title, 200),
            "Severity": SEVERITY_WORDS[incident.severity],
            "State": incident_state(incident),
            "Lost": formatting.count(incident.cost_steps, "step"),
            "Actions": len(incident.decisions),
            "Alerts": len(incident.alerts),
            "Began": to_datetime(incident.started_unix_ns),
        }
        for incident in incidents
    ]
