"""Answers every question about runs from the store, in the bodies of ``trainvitals.views``.

One class for the HTTP routes, the command line and a folder read without any server: they cannot
answer differently.
"""

import math
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, func, select

from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.records import BatchNoted, Decision, Finding
from trainvitals.rows import Schema
from trainvitals.views import (
    AttemptView,
    Branch,
    CheckpointView,
    CurveReply,
    DecisionView,
    EventView,
    FindingView,
    RunDetail,
    RunSummary,
    SeriesReply,
    SourceView,
    StepData,
    StepRow,
    StepView,
)
from vitals_collector.keeping.sizes import volume_of
from vitals_collector.keeping.thinning import RANKS, VolumeSettings
from vitals_collector.queries import metrics, series
from vitals_collector.queries.curve import curve_reply
from vitals_collector.queries.loading import load_curve, load_outline
from vitals_collector.queries.shadow import with_hindsight
from vitals_collector.storage.columns import whole
from vitals_collector.storage.schema import (
    attempts,
    batches,
    checkpoints,
    decisions,
    events,
    findings,
    runs,
    sources,
    streams,
)
from vitals_collector.storage.store import Store, unknown_run
from vitals_collector.storage.stored import read_pages, rows_at_step
from vitals_collector.watch import overview
from vitals_collector.watch.state import Liveness

MAX_POINTS = 20_000
MAX_MARKS = 20_000
"""Non-finite values that a series names one by one; of more, evenly chosen ones."""
MAX_EVENTS = 10_000
_SHOWN_ELSEWHERE = (
    "FindingRaised", "DecisionMade", "CheckpointChanged", "NamesDefined", "BatchNoted",
)  # fmt: skip

_decision = msgspec.msgpack.Decoder(Decision).decode
_finding = msgspec.msgpack.Decoder(Finding).decode
_batch = msgspec.msgpack.Decoder(BatchNoted).decode


class Query:
    """The questions. Each reads one moment of the store; none changes it.

    Args:
        store: what to read.
        clock: what "now" is, to tell a running run from a lost one.
        lost_after_seconds: how long a run may be silent.
        up_since_unix_ns: since when rows could have arrived; 0 where nothing arrives.
        volumes: what is kept of a run, to be said.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        lost_after_seconds: float = 60.0,
        up_since_unix_ns: int = 0,
        volumes: VolumeSettings | None = None,
    ) -> None:
        self._store = store
        self._volumes = volumes or VolumeSettings()
        self._clock = clock
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        with self._store.read() as connection:
            return overview.summaries(connection, self._liveness())

    def run(self, run_id: str) -> RunDetail:
        """Return everything about one run that is not a curve."""
        with self._store.read() as connection:
            row = _run_row(connection, run_id)
            return RunDetail(
                summary=overview.summaries(connection, self._liveness(), run_id)[0],
                info=overview.info_of(row),
                attempts=_attempts(connection, run_id),
                sources=_sources(connection, run_id),
                metrics=metrics.names_of(connection, run_id),
                volume=volume_of(connection, row, self._volumes),
            )

    def series(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        points: int = 1_000,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> SeriesReply:
        """Return one curve, downsampled to about ``points`` points.

        Args:
            run_id: of which run.
            metric: ``stream.column``, ``scalars.NAME``, ``layers.NAME``, or another column of a
                layer, ``layers.NAME:weight_norm``.
            source: whose rows; "" is rank 0, or the first GPU or node there is.
            branch: GPU, node and process rows have no step: they come by time, on every branch.
            points: at most about this many.
            from_step: first step wanted.
            to_step: last step wanted, inclusive.

        Raises:
            UsageError: unknown run, metric or source, or a number out of bounds.
        """
        if not 2 <= points <= MAX_POINTS:
            raise UsageError(f"points is {points}; it must be 2 to {MAX_POINTS}")
        with self._store.read() as connection:
            _run_row(connection, run_id)
            steps = (from_step, to_step)
            chosen, wanted = metrics.select_rows(connection, run_id, metric, source, steps)
            forks = _attempt_rows(connection, run_id)
            found, num_total = load_outline(connection, wanted, forks, branch, points)
        drawn = series.downsample(found, points)
        return SeriesReply(
            run_id=run_id,
            metric=metric,
            source=chosen,
            unit=metrics.unit_of(metric),
            branch=branch,
            num_total=num_total,
            step=tuple(drawn.step.tolist()),
            time_unix_ns=tuple(drawn.time_unix_ns.tolist()),
            attempt=tuple(drawn.attempt.tolist()),
            value=tuple(v if math.isfinite(v) else None for v in drawn.value.tolist()),
            nonfinite=series.nonfinite_marks(found, MAX_MARKS),
            num_nonfinite=series.num_nonfinite(found),
        )

    def curve(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> CurveReply:
        """Return every point of one curve; the arguments are those of ``series``.

        Raises:
            UsageError: unknown run, metric or source, or too many points for one answer.
        """
        with self._store.read() as connection:
            _run_row(connection, run_id)
            steps = (from_step, to_step)
            chosen, wanted = metrics.select_rows(connection, run_id, metric, source, steps)
            found = load_curve(connection, wanted, _attempt_rows(connection, run_id), branch)
        return curve_reply(run_id, metric, chosen, branch, found)

    def step(self, run_id: str, step: int) -> StepView:
        """Return what is known of one step, on every attempt that trained it."""
        with self._store.read() as connection:
            _run_row(connection, run_id)
            return StepView(
                run_id=run_id,
                step=step,
                rows=_step_rows(connection, run_id, step),
                findings=_findings(connection, run_id, step),
                decisions=with_hindsight(connection, run_id, _decisions(connection, run_id, step)),
                data=_data(connection, run_id, step),
                over_ranks=_step_rows(connection, run_id, step, RANKS),
            )

    def decisions(self, run_id: str) -> tuple[DecisionView, ...]:
        """Return the run's ledger in its order."""
        with self._store.read() as connection:
            _run_row(connection, run_id)
            return with_hindsight(connection, run_id, _decisions(connection, run_id))

    def findings(self, run_id: str) -> tuple[FindingView, ...]:
        """Return what the run's detectors said, by step."""
        with self._store.read() as connection:
            _run_row(connection, run_id)
            return _findings(connection, run_id)

    def checkpoints(self, run_id: str) -> tuple[CheckpointView, ...]:
        """Return the latest state of each checkpoint and snapshot, by step."""
        table = checkpoints.c
        query = select(checkpoints).where(table.run_id == run_id)
        with self._store.read() as connection:
            _run_row(connection, run_id)
            rows = connection.execute(query.order_by(table.step, table.time_unix_ns)).all()
        return tuple(
            CheckpointView(
                checkpoint_id=row.checkpoint_id,
                step=row.step,
                attempt=row.attempt,
                state=row.state,
                where=row.place,
                num_bytes=row.num_bytes,
                detail=row.detail,
                time_unix_ns=row.time_unix_ns,
            )
            for row in rows
        )

    def events(self, run_id: str) -> tuple[EventView, ...]:
        """Return every other event as a line for people, by time; the newest, if they are many."""
        table = events.c
        query = (
            select(events)
            .where(table.run_id == run_id, table.kind.not_in(_SHOWN_ELSEWHERE))
            .order_by(table.time_unix_ns.desc(), table.id.desc())
            .limit(MAX_EVENTS)
        )
        with self._store.read() as connection:
            _run_row(connection, run_id)
            rows = connection.execute(query).all()
        return tuple(
            EventView(
                time_unix_ns=row.time_unix_ns,
                source=row.source,
                step=row.step,
                attempt=row.attempt,
                kind=row.kind,
                text=row.summary,
            )
            for row in reversed(rows)
        )

    def _liveness(self) -> Liveness:
        return Liveness(
            now_unix_ns=self._clock.time_ns(),
            up_since_unix_ns=self._up_since_unix_ns,
            lost_after_seconds=self._lost_after_seconds,
        )


def _run_row(connection: Connection, run_id: str) -> Row[Any]:
    row = connection.execute(select(runs).where(runs.c.run_id == run_id)).one_or_none()
    if row is None:
        raise unknown_run(run_id)
    return row


def _attempt_rows(connection: Connection, run_id: str) -> list[series.AttemptRow]:
    table = attempts.c
    query = select(table.id, table.parent, table.fork_step).where(table.run_id == run_id)
    return [series.AttemptRow(*row) for row in connection.execute(query.order_by(table.id))]


def _attempts(connection: Connection, run_id: str) -> tuple[AttemptView, ...]:
    query = select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.id)
    rows = connection.execute(query).all()
    last = _last_steps(connection, run_id)
    return tuple(
        AttemptView(
            id=row.id,
            ordinal=ordinal,
            parent=row.parent,
            fork_step=row.fork_step,
            started_unix_ns=row.started_unix_ns,
            last_step=last.get(row.id, -1),
            reason=row.reason,
        )
        for ordinal, row in enumerate(rows, start=1)
    )


def _last_steps(connection: Connection, run_id: str) -> dict[int, int]:
    """Return each attempt's last step; only the few batches that hold two attempts are decoded."""
    table = batches.c
    of_steps = (table.run_id == run_id, table.stream == "steps")
    is_pure = table.min_attempt == table.max_attempt
    query = select(table.min_attempt, func.max(table.max_step)).where(*of_steps, is_pure)
    last = {row[0]: row[1] for row in connection.execute(query.group_by(table.min_attempt))}
    for page in read_pages(connection, *of_steps, ~is_pure):
        steps, ids = (whole(page.schema, page.rows, name) for name in ("step", "attempt"))
        for attempt in np.unique(ids).tolist():
            step = int(steps[ids == attempt].max())
            last[attempt] = max(last.get(attempt, -1), step)
    return last


def _sources(connection: Connection, run_id: str) -> tuple[SourceView, ...]:
    by_incarnation = defaultdict(list)
    for row in connection.execute(select(streams).where(streams.c.run_id == run_id)):
        by_incarnation[row.incarnation].append(row)
    query = select(sources).where(sources.c.run_id == run_id)
    rows = connection.execute(query.order_by(sources.c.source, sources.c.started_unix_ns))
    return tuple(
        SourceView(
            source=row.source,
            incarnation=row.incarnation,
            node=row.node,
            pid=row.pid,
            started_unix_ns=row.started_unix_ns,
            last_seen_unix_ns=row.last_seen_unix_ns,
            num_rows=sum(stream.num_rows for stream in by_incarnation[row.incarnation]),
            num_lost_rows=sum(stream.num_lost for stream in by_incarnation[row.incarnation]),
            streams=tuple(sorted(stream.stream for stream in by_incarnation[row.incarnation])),
        )
        for row in rows
    )


def _decisions(
    connection: Connection, run_id: str, step: int | None = None
) -> tuple[DecisionView, ...]:
    table = decisions.c
    query = select(table.time_unix_ns, table.body).where(table.run_id == run_id)
    if step is not None:
        query = query.where(table.step == step)
    rows = connection.execute(query.order_by(table.ledger_seq, table.time_unix_ns))
    return tuple(
        DecisionView(run_id=run_id, time_unix_ns=time, decision=_jsonable(_decision(body)))
        for time, body in rows
    )


def _jsonable(decision: Decision) -> Decision:
    """Return the decision without evidence that JSON cannot say; its reason names it in words."""
    evidence = {name: v for name, v in decision.evidence.items() if math.isfinite(v)}
    return msgspec.structs.replace(decision, evidence=evidence)


def _findings(
    connection: Connection, run_id: str, step: int | None = None
) -> tuple[FindingView, ...]:
    table = findings.c
    query = select(table.time_unix_ns, table.body).where(table.run_id == run_id)
    if step is not None:
        query = query.where(table.step == step)
    rows = connection.execute(query.order_by(table.step, table.time_unix_ns, table.seq))
    return tuple(
        FindingView(run_id=run_id, time_unix_ns=time, finding=_finding(body)) for time, body in rows
    )


def _data(connection: Connection, run_id: str, step: int) -> tuple[StepData, ...]:
    table = events.c
    query = (
        select(table.source, table.attempt, table.body)
        .where(table.run_id == run_id, table.kind == "BatchNoted", table.step == step)
        .order_by(table.attempt, table.source)
    )
    return tuple(
        StepData(source=source, attempt=attempt, batch=_batch(body))
        for source, attempt, body in connection.execute(query)
    )


def _step_rows(
    connection: Connection, run_id: str, step: int, stream: str = "steps"
) -> tuple[StepRow, ...]:
    found: dict[tuple[str, int], StepRow] = {}
    for page, row in rows_at_step(connection, run_id, step, stream):
        one = _step_row(page.schema, row, page.source, page.incarnation)
        found[one.source, one.attempt] = one  # of one written again, the newest
    return tuple(sorted(found.values(), key=_by_attempt_and_rank))


def _by_attempt_and_rank(row: StepRow) -> tuple[int, int]:
    return row.attempt, 0 if row.source == RANKS else Source.parse(row.source).rank or 0


def _step_row(schema: Schema, raw: bytes, source: str, incarnation: str) -> StepRow:
    values: dict[str, float | int | None] = {}
    nonfinite: list[str] = []
    fields = schema.unpack(raw)
    for name, value in fields.items():
        if isinstance(value, bytes) or value is None:
            continue
        is_finite = isinstance(value, int) or math.isfinite(value)
        values[name] = value if is_finite else None
        if not is_finite:
            nonfinite.append(f"{name}={series.kind_of(value)}")
    return StepRow(
        source=source,
        incarnation=incarnation,
        attempt=int(values.pop("attempt", 0) or 0),
        values=values,
        nonfinite=tuple(nonfinite),
    )


__all__ = ["Branch", "Query"]
