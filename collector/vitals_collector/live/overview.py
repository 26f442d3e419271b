"""The list of runs: one line each, in a number of queries that does not grow with the runs."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Row, Select, and_, func, select

from trainvitals.alerting import ABSENCE_ALERTS
from trainvitals.records import Decision, RunInfo, is_skip
from trainvitals.views import RunSummary
from vitals_collector.ingest.ingest import is_being_removed
from vitals_collector.live.restarts import restarts_of
from vitals_collector.live.run_status import Liveness, SourceState, health, last_seen, run_state
from vitals_collector.storage.schema import alerts, attempts, decisions, findings, runs, sources

RECENT_STEPS = 50
"""Steps for which an action makes a run ``acting``."""
_LAST_STEPS = 5
"""A run that ended so few steps after a step was skipped ended in trouble."""
_NONFINITE_STATE, _UNGUARDED = "nonfinite_state", "unguarded"
_SAID_AGAIN_STEPS = 600
"""A non-finite state is reported every 50 steps, or at each snapshot if that is later."""
_UNGUARDED_STEPS = 100
"""While steps are not measured, that is reported every 50 steps."""

_decision = msgspec.msgpack.Decoder(Decision).decode
_info = msgspec.msgpack.Decoder(RunInfo).decode


def load_run_summaries(
    connection: Connection, when: Liveness, run_id: str | None = None
) -> tuple[RunSummary, ...]:
    """Load the list of runs with their current states, or one of them; the latest first."""
    shown = select(runs).where(~is_being_removed())
    rows = connection.execute(
        _filter_by_run(shown, runs.c.run_id, run_id).order_by(runs.c.run_id.desc())
    ).all()
    by_run = defaultdict(list)
    for source in connection.execute(_filter_by_run(select(sources), sources.c.run_id, run_id)):
        by_run[source.run_id].append(source)
    last = _last_decisions(connection, run_id)
    counts = _RunCounts(connection, run_id)
    return tuple(_run_summary(row, by_run[row.run_id], last, counts, when) for row in rows)


def skips_by_cause(connection: Connection, run_id: str | None = None) -> dict[tuple[str, str], int]:
    """Return how many updates the runs have skipped so far, by run and cause.

    The step of a rollback or a halt is not counted: its update was not applied either, but the
    decision log shows the rollback or the halt for it.
    """
    columns = decisions.c
    query = select(columns.run_id, columns.cause).where(
        columns.action == "skip_step", columns.acted
    )
    counts = (
        _filter_by_run(query, columns.run_id, run_id)
        .add_columns(func.count())
        .group_by(columns.run_id, columns.cause)
    )
    return {(of, cause): num for of, cause, num in connection.execute(counts)}


def count_lost_steps(connection: Connection, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Count the steps that each run has lost so far, each once, and the batches dropped."""
    columns = decisions.c
    query = select(columns.run_id, columns.body).where(
        columns.run_id.in_(ids), columns.action != "continue"
    )
    lost: dict[str, set[tuple[int, int]]] = {run_id: set() for run_id in ids}
    batches = Counter[str]()
    for run_id, body in connection.execute(query):
        if not body:
            continue  # damaged: its content is unknown
        decision = _decision(body)
        if is_skip(decision):
            lost[run_id].add((decision.attempt, decision.step))
        if decision.acted and decision.action == "rollback":
            discarded = range(decision.rollback_to_step, decision.decided_at_step + 1)
            lost[run_id].update((decision.attempt, step) for step in discarded)
            batches[run_id] += decision.skip_batches
    for run_id, restarts in restarts_of(connection, ids).items():
        for attempt, low, high in (span for restart in restarts for span in restart.lost):
            lost[run_id].update((attempt, step) for step in range(low, high + 1))
    return {run_id: (len(steps), batches[run_id]) for run_id, steps in lost.items()}


def info_of(row: Row[Any]) -> RunInfo:
    """Return the attributes of a row of ``runs``; the defaults if none arrived yet."""
    return _info(row.info) if row.info else RunInfo(mode="", world_size=row.world_size)


class _RunCounts:
    """Numbers of skips, rollbacks, attempts and alerts by run, for the list of runs."""

    def __init__(self, connection: Connection, run_id: str | None) -> None:
        of_decision, of_alert = decisions.c, alerts.c
        is_firing = of_alert.state == "firing"
        self.rollbacks = _count_rows(
            connection,
            run_id,
            [of_decision.run_id],
            of_decision.acted,
            of_decision.action == "rollback",
        )
        self.skips = Counter[str]()
        for (of, _), num in skips_by_cause(connection, run_id).items():
            self.skips[of] += num
        self.attempts = _count_rows(connection, run_id, [attempts.c.run_id])
        self.firing = _count_rows(
            connection, run_id, [of_alert.run_id, of_alert.severity], is_firing
        )
        absences = _filter_by_run(
            select(of_alert.run_id, of_alert.labels), of_alert.run_id, run_id
        ).where(is_firing, of_alert.name.in_(ABSENCE_ALERTS))
        self.missing: dict[str, list[str]] = defaultdict(list)
        """By run, the lost nodes, agents and ranks."""
        for of, labels in connection.execute(absences):
            self.missing[of].append(msgspec.json.decode(labels, type=dict[str, str])["cause"])
        damaged = _filter_by_run(
            select(
                findings.c.run_id, findings.c.attempt, findings.c.kind, func.max(findings.c.step)
            ),
            findings.c.run_id,
            run_id,
        ).where(findings.c.kind.in_((_NONFINITE_STATE, _UNGUARDED)))
        self.damaged = {
            (of, attempt, kind): step
            for of, attempt, kind, step in connection.execute(
                damaged.group_by(findings.c.run_id, findings.c.attempt, findings.c.kind)
            )
        }
        """By run, attempt and kind, the last step at which its state was reported as not finite, or
        its steps as unmeasured."""


def _count_rows(
    connection: Connection,
    run_id: str | None,
    by: Sequence[Column[Any]],
    *conditions: ColumnElement[bool],
) -> dict[tuple[str, ...], int]:
    """Count rows of all runs, or one, by columns, of which the first is the run's id."""
    query = select(*by, func.count()).where(*conditions).group_by(*by)
    rows = connection.execute(_filter_by_run(query, by[0], run_id))
    return {tuple(row[:-1]): int(row[-1]) for row in rows}


def _filter_by_run(query: Select[Any], column: Column[Any], run_id: str | None) -> Select[Any]:
    """Limit a query of the list of runs to one run, if one is given."""
    return query if run_id is None else query.where(column == run_id)


def _last_decisions(connection: Connection, run_id: str | None) -> dict[str, Decision]:
    newest = (
        _filter_by_run(
            select(decisions.c.run_id, func.max(decisions.c.ledger_seq).label("ledger_seq")),
            decisions.c.run_id,
            run_id,
        )
        .group_by(decisions.c.run_id)
        .subquery()
    )
    joined = and_(
        decisions.c.run_id == newest.c.run_id, decisions.c.ledger_seq == newest.c.ledger_seq
    )
    rows = connection.execute(select(decisions.c.run_id, decisions.c.body).join(newest, joined))
    return {of: _decision(body) for of, body in rows if body}


def _run_summary(
    row: Row[Any],
    of_run: Sequence[Row[Any]],
    decided: dict[str, Decision],
    counts: _RunCounts,
    when: Liveness,
) -> RunSummary:
    """Return one line of the list of runs: the run's current state, health and numbers."""
    run_id = row.run_id
    states = [_source_state(source) for source in of_run]
    state = run_state(states, when)
    head = _head(of_run)
    loss = None if head is None else _stored_float(head.loss)
    last = decided.get(run_id)
    num_pages = counts.firing.get((run_id, "page"), 0)
    missing = tuple(sorted(counts.missing.get(run_id, ())))
    return RunSummary(
        run_id=run_id,
        name=row.name,
        project=row.project,
        user=row.user_name,
        tags=info_of(row).tags,
        mode=row.mode,
        state=state,
        health=health(
            state,
            has_steps=head is not None,
            recent_action=head is not None and _is_recent(last, head.last_step),
            ended_in_trouble=head is not None and _is_recent(last, head.last_step, _LAST_STEPS),
            lr_factor=1.0 if last is None else last.lr_factor,
            firing_pages=num_pages,
            is_partial=bool(missing),
            is_broken=(loss is not None and not math.isfinite(loss))
            or _has_recent_finding(_NONFINITE_STATE, _SAID_AGAIN_STEPS, run_id, head, counts),
            is_unguarded=_has_recent_finding(_UNGUARDED, _UNGUARDED_STEPS, run_id, head, counts),
        ),
        world_size=row.world_size or max((source.world_size for source in of_run), default=0),
        started_unix_ns=row.started_unix_ns,
        last_seen_unix_ns=last_seen(states),
        last_step=-1 if head is None else head.last_step,
        loss=loss,
        grad_norm=None if head is None else _stored_float(head.grad_norm),
        num_skips=counts.skips[run_id],
        num_rollbacks=counts.rollbacks.get((run_id,), 0),
        num_attempts=max(1, counts.attempts.get((run_id,), 0)),
        num_firing_alerts=sum(num for key, num in counts.firing.items() if key[0] == run_id),
        missing=missing,
        last_decision="" if last is None else f"{last.action} at step {last.step}: {last.reason}",
    )


def _has_recent_finding(
    kind: str, steps: int, run_id: str, head: Row[Any] | None, counts: _RunCounts
) -> bool:
    """Return whether such a finding of the latest attempt is at most ``steps`` old: it recurs."""
    if head is None:
        return False
    told_at = counts.damaged.get((run_id, head.last_attempt, kind))
    return told_at is not None and head.last_step - told_at <= steps


def _stored_float(stored: float | str | None) -> float | None:
    """Return a number in the list of runs; SQLite holds NaN as text."""
    return None if stored is None else float(stored)


def _head(of_run: Sequence[Row[Any]]) -> Row[Any] | None:
    """Return rank 0's incarnation with the latest step, whose values the list of runs shows."""
    heads = [source for source in of_run if source.source == "rank:0" and source.last_step >= 0]
    return max(heads, key=lambda source: source.last_step_unix_ns, default=None)


def _is_recent(last: Decision | None, step: int, steps: int = RECENT_STEPS) -> bool:
    """Return whether the run's last decision acted so recently that its health depends on it."""
    return last is not None and last.acted and abs(step - last.decided_at_step) <= steps


def _source_state(source: Row[Any]) -> SourceState:
    """Convert a row of ``sources`` to the state of a part of a run."""
    return SourceState._make(getattr(source, name) for name in SourceState._fields)
