"""Writes a group's new rows and what the tables beside them say: one statement for each table."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, case, update

from trainvitals.rows import Schema, rows_of
from trainvitals.wire import Batch
from vitals_collector.ingest import projections
from vitals_collector.ingest.offsets import StreamOffset
from vitals_collector.ingest.validate import LAST, LIMITS, Summary, summarize
from vitals_collector.storage.prepared import Prepared
from vitals_collector.storage.schema import batches, measured_columns, row_schemas, sources, streams
from vitals_collector.storage.store import clean, insert


def place_batches(
    connection: Connection, fresh: Sequence[tuple[Batch, StreamOffset]], received_unix_ns: int
) -> None:
    """Store the rows as they came, move their streams' marks, and say what the sources do."""
    fresh_batches = [batch for batch, _ in fresh]
    marks = [mark for _, mark in fresh]
    summaries, schemas = summarize(fresh_batches)
    _note_columns(connection, marks, summaries, schemas)
    placed = [_row_of(*both) for both in zip(fresh_batches, summaries, strict=True)]
    _PLACE.execute(connection, placed)
    moved = {id(mark): mark for mark in marks}
    _MOVE.execute(connection, [_moved(mark) for mark in moved.values()])
    _note_sources(connection, marks, summaries, received_unix_ns)
    projections.note_processes(
        connection,
        (
            (header.identity.run_id, header.stream_schema, rows_of(header.stream_schema, rows))
            for header, rows in ((batch.header, batch.rows) for batch in fresh_batches)
            if header.stream == "process"
        ),
    )


def _note_columns(
    connection: Connection,
    marks: Sequence[StreamOffset],
    summaries: Sequence[Summary],
    schemas: Mapping[str, Schema],
) -> None:
    """Write down the schemas and the measured columns that are new in their streams."""
    used: set[str] = set()
    measured_bits: dict[tuple[str, str], int] = {}
    for mark, summary in zip(marks, summaries, strict=True):
        digest = summary.schema_digest
        if mark.schema_digest != digest:
            mark.schema_digest, mark.measured = digest, 0
            used.add(digest)
        if summary.measured & ~mark.measured:
            mark.measured |= summary.measured
            about = mark.key[0], digest
            measured_bits[about] = measured_bits.get(about, 0) | summary.measured
    bodies = {digest: msgspec.msgpack.encode(schemas[digest]) for digest in sorted(used)}
    if bodies:
        schema_rows = [{"digest": digest, "body": body} for digest, body in bodies.items()]
        connection.execute(insert(connection, row_schemas).on_conflict_do_nothing(), schema_rows)
    names = [
        {
            "run_id": run_id,
            "stream": schemas[digest].stream,
            "name": clean(column.name),
        }
        for (run_id, digest), bits in measured_bits.items()
        for i, column in enumerate(schemas[digest].columns)
        if bits >> i & 1
    ]
    if names:
        connection.execute(insert(connection, measured_columns).on_conflict_do_nothing(), names)


def _row_of(batch: Batch, summary: Summary) -> tuple[Any, ...]:
    header = batch.header
    identity = header.identity
    return (
        identity.run_id,
        identity.incarnation,
        identity.source,
        header.stream_schema.stream,
        summary.schema_digest,
        header.first_seq,
        header.num_rows,
        header.clock_offset_ns,
        batch.rows,
        zlib.crc32(batch.rows),
        *summary.limits,
    )


def _moved(mark: StreamOffset) -> tuple[Any, ...]:
    bits = f"{mark.measured:x}"
    return (*mark.key, mark.last_seq, mark.num_rows, mark.num_lost, mark.schema_digest, bits)


def _note_sources(
    connection: Connection,
    marks: Sequence[StreamOffset],
    summaries: Sequence[Summary],
    received_unix_ns: int,
) -> None:
    """Say when each writer was last heard, and what a rank's newest step was."""
    heard: dict[tuple[str, str], int] = {}
    newest: dict[tuple[str, str], Summary] = {}
    for mark, summary in zip(marks, summaries, strict=True):
        writer = mark.key[:2]
        heard[writer] = max(heard.get(writer, summary.newest_unix_ns), summary.newest_unix_ns)
        if summary.last is not None:
            newest[writer] = summary
    stepped, others = [], []
    for writer, seen in heard.items():
        latest = newest.get(writer)
        if latest is None or latest.last is None:
            others.append((*writer, seen, received_unix_ns))
        else:
            stepped.append((*writer, seen, received_unix_ns, *latest.last))
    _HEARD.execute(connection, others)
    _STEPPED.execute(connection, stepped)


_PLACE = Prepared(
    batches.insert(),
    (
        "run_id",
        "incarnation",
        "source",
        "stream",
        "schema_digest",
        "first_seq",
        "num_rows",
        "clock_offset_ns",
        "row_bytes",
        "row_crc",
        *LIMITS,
    ),
)
_MOVE = Prepared(
    update(streams)
    .where(
        streams.c.run_id == bindparam("of_run"),
        streams.c.incarnation == bindparam("of_writer"),
        streams.c.stream == bindparam("of_stream"),
    )
    .values(
        last_seq=bindparam("new_last_seq"),
        num_rows=streams.c.num_rows + bindparam("new_rows"),
        num_lost=streams.c.num_lost + bindparam("new_lost"),
        schema_digest=bindparam("new_digest"),
        measured=bindparam("new_measured"),
    ),
    (
        "of_run",
        "of_writer",
        "of_stream",
        "new_last_seq",
        "new_rows",
        "new_lost",
        "new_digest",
        "new_measured",
    ),
)
_HEAR = (
    update(sources)
    .where(sources.c.run_id == bindparam("of_run"), sources.c.incarnation == bindparam("of_writer"))
    .values(
        {
            column: case((column < bindparam(name), bindparam(name)), else_=column)
            for column, name in (
                (sources.c.last_seen_unix_ns, "seen"),
                (sources.c.last_received_unix_ns, "received"),
            )
        }
    )
)
_STEP = _HEAR.values({name: bindparam(f"new_{name}") for name in LAST})
_HEARD_NAMES = ("of_run", "of_writer", "seen", "received")
_HEARD = Prepared(_HEAR, _HEARD_NAMES)
_STEPPED = Prepared(_STEP, (*_HEARD_NAMES, *(f"new_{name}" for name in LAST)))

__all__ = ["place_batches"]
