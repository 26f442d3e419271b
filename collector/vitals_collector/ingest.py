"""Stores one batch exactly once: the one way in, for HTTP and for folders alike.

The order is the promise: decode and check, cut off what is stored already, store the bytes and what
the events mean in one transaction, commit (which is fsynced), and only then answer. A refused batch
changes nothing.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, case, select, update
from sqlalchemy.exc import DataError

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.identity import Identity
from trainvitals.records import EVENT_SCHEMA, EventRow, decode_events
from trainvitals.rows import Schema, column_of, rows_of
from trainvitals.wire import Batch, BatchHeader, IngestReply, decode_batch
from vitals_collector import facts
from vitals_collector.schema import batches, measured_columns, row_schemas, runs, sources, streams
from vitals_collector.store import Store, insert

_LOG = logging.getLogger("vitals.collector.ingest")
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Stored:
    """What one batch came to: the answer, and its rows and events that were new."""

    reply: IngestReply
    num_lost: int = 0
    batch: Batch | None = None
    events: Sequence[EventRow] = ()


class _Mark(NamedTuple):
    last_seq: int
    schema_digest: str
    measured: str


def ingest(store: Store, raw: bytes, *, received_unix_ns: int = 0) -> IngestReply:
    """Store the batch and answer once that is durable; a batch sent again changes nothing.

    Args:
        store: where to.
        raw: one batch as ``trainvitals.wire`` defines it.
        received_unix_ns: this collector's clock, or 0 where the batch was found in a folder.

    Raises:
        FormatError: damaged, inconsistent, or of a newer version; nothing was stored.
        StorageError: the database refused; nothing was stored, send it again.
    """
    batch = check_batch(store, raw)
    with store.write() as connection:
        stored = store_batch(connection, batch, received_unix_ns)
    announce(store, [stored])
    return stored.reply


def ingest_all(store: Store, raws: Sequence[bytes], received_unix_ns: int) -> list[IngestReply]:
    """Store batches that came together; one that is refused does not keep the others back.

    Raises:
        FormatError: all of them are refused: the first one's error.
        StorageError: the database refused; nothing was stored, send it again.
    """
    replies: list[IngestReply] = []
    refused: list[FormatError] = []
    for raw in raws:
        try:
            replies.append(ingest(store, raw, received_unix_ns=received_unix_ns))
        except FormatError as error:
            refused.append(error)
            replies.append(
                IngestReply(
                    durable_seq=-1, num_new=0, num_duplicate=0, code=error.code, text=error.text
                )
            )
    if len(refused) == len(raws):
        raise refused[0]
    return replies


def check_batch(store: Store, raw: bytes) -> Batch:
    """Return the decoded batch, fit to be stored; count it where it is refused.

    Raises:
        FormatError: it is not.
    """
    try:
        batch = decode_batch(raw)
        _check_numbers(batch.header)
        _check_rows(batch)
    except FormatError as error:
        counts = store.counters.rejected
        counts[error.code] = counts.get(error.code, 0) + 1
        raise
    return batch


def store_batch(connection: Connection, batch: Batch, received_unix_ns: int = 0) -> Stored:
    """Store a checked batch inside the caller's transaction; the caller commits, then announces.

    Raises:
        FormatError: its incarnation is known as another source, or a number in an event is too
            large to be stored.
    """
    header = batch.header
    mark = _high_water_mark(connection, header)
    last_seq = mark.last_seq
    num_known = min(header.num_rows, max(0, last_seq + 1 - header.first_seq))
    if num_known == header.num_rows:
        return Stored(IngestReply(durable_seq=last_seq, num_new=0, num_duplicate=num_known))
    fresh = _cut(batch, num_known)
    is_events = header.stream == "events"
    events = list(decode_events(header.stream_schema, fresh.rows)) if is_events else []
    num_lost = max(0, header.first_seq - last_seq - 1)
    try:
        _store_rows(connection, fresh, mark, num_lost)
        _note_source(connection, fresh, received_unix_ns)
        facts.apply(connection, header.identity, events)
    except (OverflowError, DataError) as error:
        raise FormatError(f"the batch holds a value that no database stores: {error}") from error
    reply = IngestReply(
        durable_seq=header.last_seq, num_new=fresh.header.num_rows, num_duplicate=num_known
    )
    return Stored(reply, num_lost, fresh, events)


def announce(store: Store, stored: Iterable[Stored]) -> None:
    """Count what was committed and tell the store's ``after_ingest`` hooks of what was new.

    A hook's error is logged and counted, never raised: the rows are stored, and refusing the batch
    now would only have it sent again.
    """
    new: list[tuple[Batch, Sequence[EventRow]]] = []
    for one in stored:
        store.counters.num_rows += one.reply.num_new
        store.counters.num_duplicate += one.reply.num_duplicate
        store.counters.num_lost += one.num_lost
        if one.batch is not None:
            new.append((one.batch, one.events))
    for hook in store.after_ingest if new else ():
        try:
            hook(new)
        except Exception:  # noqa: BLE001 - the one place where a hook's error is counted
            store.counters.num_hook_errors += 1
            _LOG.exception("after_ingest_failed run=%s", new[0][0].header.identity.run_id)


def _check_numbers(header: BatchHeader) -> None:
    identity = header.identity
    numbers = (
        header.first_seq + header.num_rows,
        header.clock_offset_ns,
        identity.pid,
        identity.rank,
        identity.local_rank,
        identity.world_size,
        identity.started_unix_ns,
    )
    if not all(-_MAX_INT64 <= number <= _MAX_INT64 for number in numbers):
        raise FormatError("a number in the batch's header does not fit 64 bits")


def _check_rows(batch: Batch) -> None:
    schema = batch.header.stream_schema
    wanted = EVENT_SCHEMA.columns if schema.stream == "events" else ROW_COLUMNS
    missing = [column.name for column in wanted if column not in schema.columns]
    if missing:
        raise FormatError(f"rows of {schema.stream} lack the columns {', '.join(missing)}")
    seqs = rows_of(schema, batch.rows)["seq"]
    if not np.array_equal(seqs, batch.header.first_seq + np.arange(batch.header.num_rows)):
        raise FormatError("the rows' sequence numbers are not those the header gives")
    if schema.stream == "events":
        size = schema.row_size
        rows = (batch.rows[start : start + size] for start in range(0, len(batch.rows), size))
        if any(schema.seq_of(row) is None for row in rows):
            raise FormatError("the checksum of an event's row does not hold")


def _cut(batch: Batch, num_known: int) -> Batch:
    header = batch.header
    if num_known == 0:
        return batch
    rest = msgspec.structs.replace(
        header, first_seq=header.first_seq + num_known, num_rows=header.num_rows - num_known
    )
    return Batch(rest, batch.rows[num_known * header.stream_schema.row_size :])


def _high_water_mark(connection: Connection, header: BatchHeader) -> _Mark:
    """Return how far the stream is stored; make the rows it hangs on where it is new."""
    identity = header.identity
    # On PostgreSQL the row is locked, so that two requests with one batch store it once.
    query = (
        select(streams.c.last_seq, streams.c.schema_digest, streams.c.measured)
        .where(
            streams.c.run_id == identity.run_id,
            streams.c.incarnation == identity.incarnation,
            streams.c.stream == header.stream,
        )
        .with_for_update()
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        _introduce(connection, identity, header.stream)
        row = connection.execute(query).one()
    return _Mark(*row)


def _introduce(connection: Connection, identity: Identity, stream: str) -> None:
    keys = {"run_id": identity.run_id, "incarnation": identity.incarnation}
    started = {"run_id": identity.run_id, "started_unix_ns": identity.started_unix_ns}
    connection.execute(insert(connection, runs).values(started).on_conflict_do_nothing())
    about = {
        "source": identity.source,
        "node": identity.node,
        "pid": identity.pid,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "gpu_uuid": facts.clean(identity.gpu_uuid),
        "started_unix_ns": identity.started_unix_ns,
    }
    connection.execute(insert(connection, sources).values(keys | about).on_conflict_do_nothing())
    known = connection.execute(
        select(sources.c.source).where(*(sources.c[k] == v for k, v in keys.items()))
    ).scalar_one()
    if known != identity.source:
        raise FormatError(
            f"incarnation {identity.incarnation} is known as {known}, not {identity.source}",
            hint="each start of each source makes an incarnation of its own",
        )
    row = keys | {"stream": stream}
    connection.execute(insert(connection, streams).values(row).on_conflict_do_nothing())


def _store_rows(connection: Connection, batch: Batch, mark: _Mark, num_lost: int) -> None:
    header, identity = batch.header, batch.header.identity
    schema = header.stream_schema
    rows = rows_of(schema, batch.rows)
    digest, measured = _note_columns(connection, header, rows, mark)
    row = {
        "run_id": identity.run_id,
        "incarnation": identity.incarnation,
        "source": identity.source,
        "stream": header.stream,
        "schema_digest": digest,
        "first_seq": header.first_seq,
        "num_rows": header.num_rows,
        "clock_offset_ns": header.clock_offset_ns,
        "row_bytes": batch.rows,
    }
    for name in ("step", "attempt", "time_unix_ns"):
        values = column_of(schema, rows, name)[0]
        row |= {f"min_{name}": int(values.min()), f"max_{name}": int(values.max())}
    connection.execute(batches.insert().values(row))
    connection.execute(
        update(streams)
        .where(
            streams.c.run_id == identity.run_id,
            streams.c.incarnation == identity.incarnation,
            streams.c.stream == header.stream,
        )
        .values(
            last_seq=header.last_seq,
            num_rows=streams.c.num_rows + header.num_rows,
            num_lost=streams.c.num_lost + num_lost,
            schema_digest=digest,
            measured=measured,
        )
    )


def _note_columns(
    connection: Connection, header: BatchHeader, rows: npt.NDArray[np.void], mark: _Mark
) -> tuple[str, str]:
    """Return the schema's digest and the stream's measured bits; write down what is new in them."""
    schema = header.stream_schema
    body = msgspec.msgpack.encode(schema)
    digest = hashlib.sha256(body).hexdigest()
    is_known = digest == mark.schema_digest
    bits = int.from_bytes(np.bitwise_or.reduce(rows["validity"], axis=0).tobytes(), "little")
    before = int(mark.measured, 16) if is_known else 0
    if not is_known:
        known = {"digest": digest, "body": body}
        connection.execute(insert(connection, row_schemas).values(known).on_conflict_do_nothing())
    if bits & ~before:
        about = {"run_id": header.identity.run_id, "stream": header.stream}
        found = [
            about | {"name": facts.clean(column.name)}
            for i, column in enumerate(schema.columns)
            if bits >> i & 1
        ]
        connection.execute(insert(connection, measured_columns).on_conflict_do_nothing(), found)
    return digest, f"{bits | before:x}"


def _note_source(connection: Connection, batch: Batch, received_unix_ns: int) -> None:
    identity, schema = batch.header.identity, batch.header.stream_schema
    rows = rows_of(schema, batch.rows)
    newest = int(column_of(schema, rows, "time_unix_ns")[0].max())
    seen = {
        sources.c.last_seen_unix_ns: _at_least(sources.c.last_seen_unix_ns, newest),
        sources.c.last_received_unix_ns: _at_least(
            sources.c.last_received_unix_ns, received_unix_ns
        ),
    }
    last = _last_values(schema, rows[-1:]) if schema.stream == "steps" else {}
    connection.execute(
        update(sources)
        .where(sources.c.run_id == identity.run_id, sources.c.incarnation == identity.incarnation)
        .values(seen | {sources.c[name]: value for name, value in last.items()})
    )
    if schema.stream == "process":
        facts.note_processes(connection, identity.run_id, schema, rows)


def _at_least(column: ColumnElement[int], value: int) -> ColumnElement[int]:
    return case((column < value, value), else_=column)


def _last_values(schema: Schema, row: npt.NDArray[np.void]) -> dict[str, int | float | None]:
    """Return what the list of runs shows, from the newest row of a rank."""

    def number(name: str) -> float | None:
        values, valid = column_of(schema, row, name)
        value = float(values[0]) if valid[0] and values.dtype.kind in "fi" else math.nan
        return value if math.isfinite(value) else None

    last = {name: int(column_of(schema, row, name)[0][0]) for name in ("step", "attempt")}
    return {
        "last_step": last["step"],
        "last_attempt": last["attempt"],
        "last_step_unix_ns": int(column_of(schema, row, "time_unix_ns")[0][0]),
        "loss": number("loss"),
        "grad_norm": number("grad_norm"),
    }


__all__ = ["Stored", "announce", "check_batch", "ingest", "ingest_all", "store_batch"]
