"""Finds what of a run may be thinned: how far it is, what happened in it, and its oldest rows.

Each writer's rows are thinned in their order, and how far lies in ``thinned_to``: so the next ones
are found without looking at the others.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, ScalarSelect, Select, and_, func, literal, or_, select

from vitals_collector.live.live_monitor import runs_aside, watched_to
from vitals_collector.retention.rollup import Batch, Present, VolumeSettings
from vitals_collector.storage.schema import (
    attempts,
    batch_columns,
    batches,
    decisions,
    findings,
    sources,
    streams,
    thinned_to,
)

REMOVED = "~"
"""Before a stream's name: rows that are gone for every reader, whose room is not free yet."""
HOSTS = ("gpu", "node", "process")
_UNWATCHED = ("process",)
"""Streams that no watcher reads."""
_IDS_AT_ONCE = 256


class RunAt(NamedTuple):
    """What thinning needs to know of a run."""

    run_id: str
    present: Present | None
    """None where rank 0 never wrote: then nobody knows how far the run is."""
    done: dict[str, int]
    """By ``incarnation/stream``: how far the watchers are done with the rows."""
    is_aside: bool
    """The watchers have set it aside: its rows wait for them no more."""
    near: list[int]
    """Steps of decisions, of findings that acted and of forks: what is near stays whole."""
    near_layers: list[int]
    """The same, and the steps of all other findings."""
    near_ns: list[int]
    """When those were."""
    num_ranks: int
    """Ranks beside 0 that ever wrote."""

    def is_done(self, writer: str, stream: str, last_seq: int) -> bool:
        """Return whether the watchers are done with all rows up to that one."""
        if self.is_aside or stream in _UNWATCHED:
            return True
        return last_seq <= self.done.get(f"{writer}/{stream}", -1)


def look(connection: Connection, run_id: str) -> RunAt:
    """Return how far a run is, and what happened in it."""
    head = connection.execute(
        select(sources.c.last_attempt, sources.c.last_step)
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .order_by(sources.c.started_unix_ns.desc())
        .limit(1)
    ).first()
    steps, times = _incidents(connection, run_id)
    finding_steps = select(findings.c.step).where(findings.c.run_id == run_id).distinct()
    return RunAt(
        run_id,
        None if head is None or head.last_step < 0 else Present(*head),
        watched_to(connection, run_id),
        run_id in runs_aside(connection),
        sorted(steps),
        sorted(steps | set(connection.execute(finding_steps).scalars())),
        sorted(times),
        len(_ranks(connection, run_id)),
    )


def _ranks(connection: Connection, run_id: str) -> list[str]:
    names = select(sources.c.source).where(
        sources.c.run_id == run_id,
        sources.c.source.like("rank:%"),
        sources.c.source != "rank:0",
    )
    return sorted(set(connection.execute(names).scalars()))


def _incidents(connection: Connection, run_id: str) -> tuple[set[int], set[int]]:
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


def next_batches(
    connection: Connection, run: RunAt, stream: str, settings: VolumeSettings
) -> list[Batch]:
    """Return each writer's oldest batch that was not thinned yet; of steps not those of rank 0."""
    table, marks = batches.c, thinned_to.c
    mine = and_(table.run_id == streams.c.run_id, table.incarnation == streams.c.incarnation)
    other = batches.alias()
    first = (
        select(func.min(other.c.first_seq))
        .where(
            other.c.run_id == streams.c.run_id,
            other.c.incarnation == streams.c.incarnation,
            other.c.stream == streams.c.stream,
            other.c.first_seq > func.coalesce(marks.last_seq, -1),
        )
        .correlate(streams, thinned_to)
        .scalar_subquery()
    )
    query = (
        _batch_query(settings)
        .select_from(streams)
        .outerjoin(thinned_to, _of_stream(marks))
        .join(batches, and_(mine, table.stream == streams.c.stream, table.first_seq == first))
        .where(streams.c.run_id == run.run_id, streams.c.stream == stream)
    )
    if stream == "steps":
        query = query.where(table.source != "rank:0")
    return [Batch._make(row) for row in connection.execute(query)]


def in_window(
    connection: Connection, run: RunAt, batch: Batch, settings: VolumeSettings
) -> list[Batch]:
    """Return every batch of the ranks but 0 that begins in a batch's window and was not thinned."""
    size = settings.window_steps
    first, attempt = batch.first_step // size * size, batch.attempt
    table = batches.c
    mark: ScalarSelect[Any] = (
        select(thinned_to.c.last_seq)
        .where(
            thinned_to.c.run_id == table.run_id,
            thinned_to.c.incarnation == table.incarnation,
            thinned_to.c.stream == table.stream,
        )
        .correlate(batches)
        .scalar_subquery()
    )
    window_batches: list[Batch] = []
    for rank_sources in in_parts(_ranks(connection, run.run_id)):
        query = _batch_query(settings).where(
            table.run_id == run.run_id,
            table.stream == "steps",
            table.source.in_(rank_sources),
            table.min_step >= first,
            table.min_step < first + size,
            table.max_attempt >= attempt,
            table.min_attempt <= attempt,
            table.first_seq > func.coalesce(mark, -1),
        )
        window_batches += [Batch._make(row) for row in connection.execute(query)]
    return window_batches


def _batch_query(settings: VolumeSettings) -> Select[Any]:
    table, size = batches.c, literal(settings.window_steps)
    # Not "/": SQLite and PostgreSQL agree about what is left over, not about how to divide.
    first, last = (step - step % size for step in (table.min_step, table.max_step))
    return select(
        table.id,
        table.incarnation,
        table.min_attempt,
        table.min_step,
        table.max_step,
        table.num_rows,
        table.min_time_unix_ns,
        table.max_time_unix_ns,
        (table.first_seq + table.num_rows - 1).label("last_seq"),
        (~or_(table.min_attempt != table.max_attempt, first != last)).label("is_pure"),
    )


def _of_stream(marks: Any) -> Any:
    return and_(
        marks.run_id == streams.c.run_id,
        marks.incarnation == streams.c.incarnation,
        marks.stream == streams.c.stream,
    )


def in_parts(every: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield a few at a time of what a statement is to name one by one."""
    for start in range(0, len(every), _IDS_AT_ONCE):
        yield every[start : start + _IDS_AT_ONCE]


# ------------------------------------------------------------------------------------- sizes


def run_bytes(connection: Connection, run_id: str) -> int:
    """Return the bytes of a run's rows as they lie; indexes and keys come on top."""
    return _sum(connection, (batches.c.run_id == run_id) & ~batches.c.stream.startswith(REMOVED))


def bytes_of(connection: Connection, ids: Sequence[int]) -> int:
    """Return the bytes of some batches."""
    return sum(_sum(connection, batches.c.id.in_(part_ids)) for part_ids in in_parts(ids))


def _sum(connection: Connection, where: Any) -> int:
    table = batch_columns.c
    columns = (table.body, table.valid, table.summary, table.marks)
    lengths = sum((func.length(column) for column in columns[1:]), func.length(columns[0]))
    columnar = select(func.sum(lengths)).join(batches, batches.c.id == table.batch_id)
    raw = select(func.sum(func.length(batches.c.row_bytes)))
    total = [connection.execute(query.where(where)).scalar() or 0 for query in (columnar, raw)]
    return sum(int(num_bytes) for num_bytes in total)


__all__ = [
    "HOSTS",
    "REMOVED",
    "RunAt",
    "bytes_of",
    "in_parts",
    "in_window",
    "look",
    "next_batches",
    "run_bytes",
]
