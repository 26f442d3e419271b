"""Tables as rows of plain values: pure functions from the query API's replies."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainvitals.views import AlertView, AttemptView, CheckpointView, DecisionView, RunSummary
from vitals_dashboard import words
from vitals_dashboard.look import ACTIONS, ALERT_WORDS, HEALTH_WORDS, STATE_WORDS

Row = dict[str, Any]


def moment(time_unix_ns: int) -> datetime | None:
    """Return a time for a table cell, or None where it is not known."""
    return datetime.fromtimestamp(time_unix_ns / 1e9, tz=UTC) if time_unix_ns > 0 else None


def run_rows(
    runs: Sequence[RunSummary], *, now_unix_ns: int, curves: dict[str, list[float]]
) -> list[Row]:
    """Return the overview's rows, in the order given."""
    return [
        {
            "Run": words.run_label(run.name, run.run_id),
            "State": STATE_WORDS[run.state],
            "Health": HEALTH_WORDS[run.health],
            "Alerts": run.num_firing_alerts,
            "Step": run.last_step,
            "Loss": run.loss,
            "Loss curve": curves.get(run.run_id, []),
            "Skips": run.num_skips,
            "Rollbacks": run.num_rollbacks,
            "Last step": words.age(run.last_seen_unix_ns, now_unix_ns) + " ago",
            "Last decision": words.plain(run.last_decision, 160),
            "Ranks": run.world_size,
            "Project": words.plain(run.project, 60),
            "Started": moment(run.started_unix_ns),
            "Id": run.run_id,
        }
        for run in runs
    ]


def matching(runs: Sequence[RunSummary], text: str, state: str | None) -> list[RunSummary]:
    """Return the runs whose name, project, user, tags or id hold the text, newest first."""
    needle = text.strip().lower()
    chosen = [
        run
        for run in runs
        if (not state or run.state == state)
        and needle in " ".join((run.name, run.project, run.user, run.run_id, *run.tags)).lower()
    ]
    return sorted(chosen, key=lambda run: run.started_unix_ns, reverse=True)


def _observed(view: DecisionView) -> str:
    """Say that nothing was done, and whether it should have been."""
    return f"observed, {view.hindsight}" if view.hindsight in ("needed", "unneeded") else "observed"


def decision_rows(decisions: Sequence[DecisionView]) -> list[Row]:
    """Return the ledger, newest first."""
    rows = []
    for view in sorted(decisions, key=lambda v: v.decision.ledger_seq, reverse=True):
        decision = view.decision
        look = ACTIONS.get(decision.action)
        word = f"{look.icon} {look.word}" if look else str(decision.action)
        rows.append(
            {
                "Step": decision.step,
                "Action": word if decision.acted else f"{word} ({_observed(view)})",
                "Reason": words.plain(decision.reason, 400),
                "Rule": words.plain(decision.rule, 60),
                "Rank": decision.rank if decision.rank >= 0 else None,
                "Value": words.number(decision.value),
                "Limit": words.number(decision.limit),
                "Back to": decision.rollback_to_step if decision.rollback_to_step >= 0 else None,
                "Batches skipped": decision.skip_batches or None,
                "LR factor": decision.lr_factor,
                "Budget left": decision.budget_left if decision.budget_left >= 0 else None,
                "Cost": decision.cost_steps,
                "Checkpoint": words.plain(decision.checkpoint_id, 60),
                "When": moment(view.time_unix_ns),
            }
        )
    return rows


def checkpoint_rows(checkpoints: Sequence[CheckpointView]) -> list[Row]:
    """Return the checkpoints and snapshots, newest first."""
    newest = sorted(checkpoints, key=lambda c: c.time_unix_ns, reverse=True)
    return [
        {
            "Step": c.step,
            "State": words.plain(c.state, 20),
            "Where": words.plain(c.where, 20),
            "Size": words.size(c.num_bytes) if c.num_bytes else "",
            "Id": words.plain(c.checkpoint_id, 60),
            "Detail": words.plain(c.detail, 200),
            "When": moment(c.time_unix_ns),
        }
        for c in newest
    ]


def attempt_rows(attempts: Sequence[AttemptView]) -> list[Row]:
    """Return the branches of the lineage, newest first, with the numbers people give them."""
    ordinals = {attempt.id: attempt.ordinal for attempt in attempts}
    return [
        {
            "Attempt": a.ordinal,
            "Forked from": ordinals.get(a.parent) if a.parent is not None else None,
            "At step": a.fork_step,
            "Last step": a.last_step,
            "Reason": words.plain(a.reason, 300),
            "Started": moment(a.started_unix_ns),
        }
        for a in sorted(attempts, key=lambda a: a.ordinal, reverse=True)
    ]


def alert_rows(alerts: Sequence[AlertView], names: dict[str, str]) -> list[Row]:
    """Return resolved and pending alerts, the newest change first."""
    return [
        {
            "Alert": words.plain(alert.name, 60),
            "State": ALERT_WORDS[alert.state],
            "Severity": alert.severity,
            "Run": words.run_label(names.get(alert.run_id, ""), alert.run_id, 60),
            "Step": alert.step if alert.step >= 0 else None,
            "Summary": words.plain(alert.summary, 300),
            "Acknowledged by": words.plain(alert.acknowledged_by, 40),
            "Began": moment(alert.started_unix_ns),
            "Ended": moment(alert.ended_unix_ns or 0),
        }
        for alert in sorted(alerts, key=lambda a: a.updated_unix_ns, reverse=True)
    ]
