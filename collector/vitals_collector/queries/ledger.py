"""Reads the records of a run from its rows, as the views in responses."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Table, select

from trainvitals import records, views
from trainvitals.catalog import TURN_METRICS
from trainvitals.errors import UNREADABLE, UsageError
from trainvitals.identity import Source
from trainvitals.units import humanize_count
from vitals_collector.ingest.ingest import is_being_removed
from vitals_collector.ingest.tail_loss import num_lost_rows
from vitals_collector.numbers.interface import RANKS, Columns, NumberStoreReader, RowSpan
from vitals_collector.queries.series import curve_of, exclusive_end, kind_of
from vitals_collector.storage import schema
from vitals_collector.storage.store import ReadSnapshot, unknown_run

MAX_EVENTS = 10_000
MAX_STACKS = 256
"""Maximum number of ranks' stacks in a response: the latest."""
UNREAD = "unread"
"""Placeholder of a source whose rows were written, but could not be read."""
_SHOWN_ELSEWHERE = (
    "FindingRaised", "DecisionMade", "CheckpointChanged", "NamesDefined", "BatchNoted",
    "RanksStill",
)  # fmt: skip

_decision = msgspec.msgpack.Decoder(records.Decision).decode
_finding = msgspec.msgpack.Decoder(records.Finding).decode
_batch = msgspec.msgpack.Decoder(records.BatchNoted).decode
_stacks = msgspec.msgpack.Decoder(records.StacksTaken).decode
_expected = msgspec.msgpack.Decoder(records.ChangeExpected).decode
_reading = msgspec.msgpack.Decoder(records.StateRead).decode


def run_row(connection: Connection, run_id: str) -> Row[Any]:
    """Query the stored row of a run, or raise an error if there is none."""
    query = select(schema.runs).where(schema.runs.c.run_id == run_id, ~is_being_removed())
    row = connection.execute(query).one_or_none()
    if row is None:
        raise unknown_run(run_id)
    return row


def attempts_of(moment: ReadSnapshot, run_id: str) -> tuple[views.AttemptView, ...]:
    """Query all attempts of a run, the oldest first, as views."""
    query = (
        select(schema.attempts)
        .where(schema.attempts.c.run_id == run_id)
        .order_by(schema.attempts.c.id)
    )
    rows = moment.sql.execute(query).all()
    last = moment.numbers.last_steps(run_id)
    return tuple(
        views.AttemptView(
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


def sources_of(connection: Connection, run_id: str) -> tuple[views.SourceView, ...]:
    """Query every incarnation of a source; ``UNREAD`` marks those without a readable row."""
    columns = schema.streams.c
    query = select(
        columns.incarnation, columns.stream, columns.num_rows, num_lost_rows().label("num_lost")
    )
    by_incarnation = defaultdict(list)
    for row in connection.execute(query.where(columns.run_id == run_id)):
        by_incarnation[row.incarnation].append(row)
    query = select(schema.sources).where(schema.sources.c.run_id == run_id)
    rows = connection.execute(
        query.order_by(schema.sources.c.source, schema.sources.c.started_unix_ns)
    )
    entries = [_source_view(row._asdict(), by_incarnation.pop(row.incarnation, ())) for row in rows]
    unread = {"source": UNREAD, "node": "", "pid": 0, "started_unix_ns": 0, "last_seen_unix_ns": 0}
    for incarnation, stream_rows in sorted(by_incarnation.items()):
        entries.append(_source_view(unread | {"incarnation": incarnation}, stream_rows))
    return tuple(entries)


def _source_view(of: Mapping[str, Any], stream_rows: Sequence[Row[Any]]) -> views.SourceView:
    """Build the view of a source for a response: its node, process, times and rows."""
    return views.SourceView(
        source=of["source"],
        incarnation=of["incarnation"],
        node=of["node"],
        pid=of["pid"],
        started_unix_ns=of["started_unix_ns"],
        last_seen_unix_ns=of["last_seen_unix_ns"],
        num_rows=sum(stream.num_rows for stream in stream_rows),
        num_lost_rows=sum(stream.num_lost for stream in stream_rows),
        streams=tuple(sorted(stream.stream for stream in stream_rows)),
    )


def decisions_of(
    connection: Connection, run_id: str, step: int | None = None
) -> tuple[views.DecisionView, ...]:
    """Query the decision log of a run in order, or its entries about one step."""
    order = (schema.decisions.c.ledger_seq, schema.decisions.c.time_unix_ns)
    return tuple(
        views.DecisionView(run_id=run_id, time_unix_ns=time, decision=_decision(body))
        for time, body in _iter_bodies(connection, schema.decisions, run_id, step, order)
    )


def findings_of(
    connection: Connection, run_id: str, step: int | None = None
) -> tuple[views.FindingView, ...]:
    """Query the findings about one step of a run, or all, by step."""
    order = (schema.findings.c.step, schema.findings.c.time_unix_ns, schema.findings.c.seq)
    return tuple(
        views.FindingView(run_id=run_id, time_unix_ns=time, finding=_finding(body))
        for time, body in _iter_bodies(connection, schema.findings, run_id, step, order)
    )


def _iter_bodies(
    connection: Connection, table: Table, run_id: str, step: int | None, order: Sequence[Any]
) -> Iterator[tuple[int, bytes]]:
    """Yield time and body of the run's records, without damaged ones."""
    query = select(table.c.time_unix_ns, table.c.body).where(table.c.run_id == run_id)
    if step is not None:
        query = query.where(table.c.step == step)
    for time, body in connection.execute(query.order_by(*order)):
        if body:
            yield time, body


def decisions_with_hindsight(
    moment: ReadSnapshot, run_id: str, step: int | None = None
) -> tuple[views.DecisionView, ...]:
    """Return the decisions; those in mode ``observe`` with the outcome that the run shows."""
    entries = decisions_of(moment.sql, run_id, step)
    steps = [view.decision.step for view in entries if not view.decision.acted]
    if not steps:
        return entries
    from trainvitals.hindsight import AFTER, BEFORE, judge_decision_in_hindsight

    reach = (min(steps) - 2 * BEFORE, max(steps) + max(AFTER.values()))
    try:
        _, curve = curve_of(moment, run_id, "steps.loss", "", reach)
    except UsageError:
        return entries  # the run has no loss: the outcome is unknown
    (drawn,) = moment.numbers.curves([curve], (), "all")
    losses: dict[int, dict[int, float]] = defaultdict(dict)
    points = (drawn.points.step, drawn.points.attempt, drawn.points.value)
    for at, attempt, loss in zip(*(column.tolist() for column in points), strict=True):
        losses[attempt][at] = loss
    judged = (
        (view, judge_decision_in_hindsight(view.decision, losses[view.decision.attempt]))
        for view in entries
    )
    return tuple(
        msgspec.structs.replace(view, hindsight=hindsight or "") for view, hindsight in judged
    )


def samples_of_step(connection: Connection, run_id: str, step: int) -> tuple[views.StepData, ...]:
    """Query the samples of a bad step, from each rank that reported them."""
    table = schema.events.c
    query = (
        select(table.source, table.attempt, table.body)
        .where(table.run_id == run_id, table.kind == "BatchNoted", table.step == step)
        .order_by(table.attempt, table.source)
    )
    return tuple(
        views.StepData(source=source, attempt=attempt, batch=_batch(body))
        for source, attempt, body in connection.execute(query)
        if body
    )


def load_probe_readings(
    connection: Connection, run_id: str, step: int
) -> tuple[views.EventView, ...]:
    """Query the probe's results for every problem whose steps include this one."""
    table = schema.events.c
    query = (
        select(schema.events)
        .where(table.run_id == run_id, table.kind == "StateRead", table.step >= step)
        .order_by(table.step, table.time_unix_ns)
        .limit(MAX_EVENTS)
    )
    return tuple(
        event_view(row)
        for row in connection.execute(query)
        if row.body and _reading(row.body).onset_step <= step
    )


def checkpoints_of(connection: Connection, run_id: str) -> tuple[views.CheckpointView, ...]:
    """Query the latest state of each checkpoint and snapshot of a run, by step.

    Snapshots in memory end with their process, which cannot report that.
    """
    table = schema.checkpoints.c
    query = select(schema.checkpoints).where(table.run_id == run_id)
    rows = connection.execute(query.order_by(table.step, table.time_unix_ns)).all()
    in_memory_since = _rank0_process_start(connection, run_id)
    entries = []
    for row in rows:
        is_lost = row.place == "memory" and row.time_unix_ns < in_memory_since
        is_lost = is_lost and row.state not in ("retired", "bad")
        entries.append(
            views.CheckpointView(
                checkpoint_id=row.checkpoint_id,
                step=row.step,
                attempt=row.attempt,
                state="retired" if is_lost else row.state,
                where=row.place,
                num_bytes=row.num_bytes,
                detail="its process ended" if is_lost else row.detail,
                time_unix_ns=row.time_unix_ns,
            )
        )
    return tuple(entries)


def _rank0_process_start(connection: Connection, run_id: str) -> float:
    """Query when rank 0's process started, whose snapshots a response shows."""
    table = schema.sources.c
    query = (
        select(table.started_unix_ns, table.alive, table.ended_state)
        .where(table.run_id == run_id, table.source == "rank:0")
        .order_by(table.started_unix_ns.desc())
    )
    latest = connection.execute(query).first()
    if latest is None:
        return 0.0
    return math.inf if latest.ended_state or latest.alive == 0 else float(latest.started_unix_ns)


def events_of(connection: Connection, run_id: str, kind: str = "") -> tuple[views.EventView, ...]:
    """Query the latest other events of a run, all or of one kind, as text lines by time."""
    table = schema.events.c
    filters = [table.kind == kind] if kind else []
    filters += [table.kind.not_in(_SHOWN_ELSEWHERE)]
    query = (
        select(schema.events)
        .where(table.run_id == run_id, *filters)
        .order_by(table.time_unix_ns.desc(), table.id.desc())
        .limit(MAX_EVENTS)
    )
    return tuple(event_view(row) for row in reversed(connection.execute(query).all()))


def stacks_of(connection: Connection, run_id: str) -> tuple[views.StacksView, ...]:
    """Query the latest stacks of a run's ranks, by time."""
    table = schema.events.c
    query = (
        select(table.time_unix_ns, table.step, table.attempt, table.body)
        .where(table.run_id == run_id, table.kind == records.StacksTaken.__name__)
        .order_by(table.time_unix_ns.desc(), table.id.desc())
        .limit(MAX_STACKS)
    )
    entries = []
    for row in reversed(connection.execute(query).all()):
        with suppress(*UNREADABLE):  # skip rows of later versions
            taken = _stacks(row.body)
            entries.append(
                views.StacksView(
                    time_unix_ns=row.time_unix_ns,
                    step=row.step,
                    attempt=row.attempt,
                    rank=taken.rank,
                    stacks=taken.stacks,
                    collectives=taken.collectives,
                    detail=taken.detail,
                    command_number=taken.command_number,
                )
            )
    return tuple(entries)


def event_view(row: Row[Any]) -> views.EventView:
    """Return the text line of a row of ``events``."""
    return views.EventView(
        time_unix_ns=row.time_unix_ns,
        source=row.source,
        step=row.step,
        attempt=row.attempt,
        kind=row.kind,
        text=row.summary,
    )


def annotations_of(connection: Connection, run_id: str) -> tuple[views.AnnotationView, ...]:
    """Return annotations by step, then time, with only the latest of many announced changes."""
    table = schema.annotations.c
    fields = (table.step, table.time_unix_ns, table.text, table.written_by)
    written = connection.execute(select(*fields).where(table.run_id == run_id))
    entries = [views.AnnotationView(step=s, time_unix_ns=t, text=x, by=b) for s, t, x, b in written]
    columns = schema.events.c
    of_run = (columns.run_id == run_id, columns.kind == records.ChangeExpected.__name__)
    query = select(columns.step, columns.time_unix_ns, columns.body).where(*of_run)
    newest = query.order_by(columns.time_unix_ns.desc(), columns.id.desc()).limit(MAX_EVENTS)
    for step, time, body in connection.execute(newest):
        if not body:
            continue  # skip damaged rows
        change = _expected(body)
        text = f"{change.reason} (a change expected for {humanize_count(change.steps, 'step')})"
        entries.append(views.AnnotationView(step=step, time_unix_ns=time, text=text, by=""))
    return tuple(
        sorted(entries, key=lambda view: (view.step, view.time_unix_ns, view.by, view.text))
    )


def alerts_of(connection: Connection, run_id: str) -> tuple[views.AlertView, ...]:
    """Query the stored alerts of a run, the latest first."""
    from vitals_collector.alerts.inbox import alert_from_row

    query = (
        select(schema.alerts)
        .where(schema.alerts.c.run_id == run_id)
        .order_by(schema.alerts.c.started_unix_ns.desc(), schema.alerts.c.fingerprint)
        .limit(MAX_EVENTS)
    )
    return tuple(alert_from_row(row).view for row in connection.execute(query))


def step_rows(
    moment: ReadSnapshot, run_id: str, step: int, stream: str = "steps"
) -> tuple[views.StepRow, ...]:
    """Query the sources' rows of one step; if a row was rewritten, the latest.

    Rank 0's row also has the values of an optimizer that was stepped separately. They are scalars:
    ``loss/NAME`` and so on.
    """
    newest: dict[tuple[str, int], views.StepRow] = {}
    for row in _iter_step_rows(moment.numbers, run_id, step, stream):
        newest[row.source, row.attempt] = row
    if stream == "steps":
        for turn_rows in _iter_optimizer_rows(moment, run_id, step):
            whole_row = newest.get((turn_rows.source, turn_rows.attempt))
            if whole_row is not None:
                newest[turn_rows.source, turn_rows.attempt] = msgspec.structs.replace(
                    whole_row,
                    values={**whole_row.values, **turn_rows.values},
                    nonfinite=(*whole_row.nonfinite, *turn_rows.nonfinite),
                )
    return tuple(sorted(newest.values(), key=_by_attempt_and_rank))


def _iter_optimizer_rows(moment: ReadSnapshot, run_id: str, step: int) -> Iterator[views.StepRow]:
    """Query, as rows of a step, values of optimizers that are stepped separately."""
    query = select(schema.names.c.incarnation, schema.names.c.id, schema.names.c.name).where(
        schema.names.c.run_id == run_id, schema.names.c.stream == "scalars"
    )
    of_turns = {
        (incarnation, key): name
        for incarnation, key, name in moment.sql.execute(query)
        if name.partition("/")[0] in TURN_METRICS and "/" in name
    }
    if not any(name.startswith("skipped/") for name in of_turns.values()):
        return
    for row in _iter_step_rows(moment.numbers, run_id, step, "scalars"):
        name = of_turns.get((row.incarnation, int(row.values.get("name") or 0)))
        if name is not None and row.source == "rank:0":
            marks = tuple(mark.replace("value=", f"{name}=", 1) for mark in row.nonfinite)
            value = row.values.get("value")
            yield msgspec.structs.replace(row, values={name: value}, nonfinite=marks)


def _by_attempt_and_rank(row: views.StepRow) -> tuple[int, int]:
    """Return the order of rows in a response about a step: by attempt, then by rank."""
    return row.attempt, 0 if row.source == RANKS else Source.parse(row.source).rank or 0


def _iter_step_rows(
    numbers: NumberStoreReader, run_id: str, step: int, stream: str
) -> Iterator[views.StepRow]:
    """Query every source's rows of a step, the latest last."""
    kinds = numbers.kinds(run_id, stream)
    if not kinds:
        return
    number_names = sorted(name for name, kind in kinds.items() if kind != "S")
    span = RowSpan(run_id, stream, from_step=step, to_step=exclusive_end(step))
    columns = numbers.scan(span, [*number_names, "source", "incarnation"])
    rows = iter_rows(columns)
    for row in sorted(rows, key=lambda row: (row["time_unix_ns"], row["incarnation"])):
        yield _step_row(row, row.pop("source"), row.pop("incarnation"))


def iter_rows(columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of scanned columns by name; None for missing values."""
    cells = [
        [None if is_missing else value for value, is_missing in zip(*pair, strict=True)]
        for pair in ((c.values.tolist(), c.is_missing.tolist()) for c in columns.values())
    ]
    for row in zip(*cells, strict=True):
        yield dict(zip(columns, row, strict=True))


def _step_row(row: Mapping[str, Any], source: str, incarnation: str) -> views.StepRow:
    """Convert a stored row to the view of a step; non-finite values are listed by name."""
    values: dict[str, float | int | None] = {}
    nonfinite: list[str] = []
    for name, value in row.items():
        if value is None:
            continue
        is_finite = isinstance(value, int) or math.isfinite(value)
        values[name] = value if is_finite else None
        if not is_finite:
            nonfinite.append(f"{name}={kind_of(value)}")
    return views.StepRow(
        source=source,
        incarnation=incarnation,
        attempt=int(values.pop("attempt", 0) or 0),
        values=values,
        nonfinite=tuple(nonfinite),
    )
