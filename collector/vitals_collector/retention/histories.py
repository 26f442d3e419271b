"""Reads the part of a run's history that decides which rows are deleted."""

from sqlalchemy import Connection, select

from vitals_collector.live.live_monitor import load_suspended_runs, load_watch_progress
from vitals_collector.retention.rollup import CurrentStep, RunHistory
from vitals_collector.storage.schema import attempts, decisions, findings, sources
from vitals_collector.storage.store import Store


def load_run_history(store: Store, connection: Connection, run_id: str) -> RunHistory:
    """Return the current step of a run, and what happened in it."""
    head = connection.execute(
        select(sources.c.last_attempt, sources.c.last_step)
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .order_by(sources.c.started_unix_ns.desc())
        .limit(1)
    ).first()
    steps, times = _load_incident_times(connection, run_id)
    finding_steps = select(findings.c.step).where(findings.c.run_id == run_id).distinct()
    is_aside = run_id in load_suspended_runs(connection)
    return RunHistory(
        run_id,
        sorted(store.numbers.last_steps(run_id)),
        None if head is None or head.last_step < 0 else CurrentStep(*head),
        sorted(steps),
        _num_ranks(connection, run_id),
        near_layers=sorted(steps | set(connection.execute(finding_steps).scalars())),
        near_unix_ns=sorted(times),
        watched=None if is_aside else load_watch_progress(connection, run_id),
    )


def _num_ranks(connection: Connection, run_id: str) -> int:
    names = select(sources.c.source).where(
        sources.c.run_id == run_id, sources.c.source.like("rank:%"), sources.c.source != "rank:0"
    )
    return len(set(connection.execute(names).scalars()))


def _load_incident_times(connection: Connection, run_id: str) -> tuple[set[int], set[int]]:
    """Return the steps and the times of decisions, of findings that acted and of forks."""
    decided, raised, forks = decisions.c, findings.c, attempts.c
    steps: set[int] = set()
    times: set[int] = set()
    query = select(decided.step, decided.decided_at_step, decided.time_unix_ns)
    for step, at, when in connection.execute(query.where(decided.run_id == run_id)):
        steps |= {step, at}
        times.add(when)
    acted = select(raised.step, raised.time_unix_ns)
    for step, when in connection.execute(
        acted.where(raised.run_id == run_id, raised.level == "actionable")
    ):
        steps.add(step)
        times.add(when)
    query = select(forks.fork_step).where(forks.run_id == run_id, forks.parent.is_not(None))
    steps |= set(connection.execute(query).scalars())
    return steps, times
