"""Stores batches exactly once: the only way to store data, for HTTP and for directories.

The order guarantees this: decode and check, cut off rows that are already stored, make the rows
durable in one commit of the store of numbers, then write the events and the effects of both in one
transaction of the database, and only then acknowledge. Batches that arrive together are stored
together, so that they share the cost of a commit and of a statement. A refused batch changes
nothing and does not delay others.

A run belongs to the owner of the token that started it, and a writer's start to exactly that token:
batches with another one are refused. The token of the token file is an owner like others. If the
first batch of a start came with a writer key, later ones must have the same key, because several
agents may share a token. This is checked for new starts; for known ones it is stored with their
offset.

The stored offset of each writer's stream turns at-least-once into exactly once. The database
contains it, and for rows the store of numbers too, from the commit that holds them. A collector
that dies between the two commits has acknowledged nothing: batches that are resent are new to the
database, which then records all of them, and to the fleet detectors, while the store of numbers
ignores duplicates. With several collectors on one database, each run has one owner
(``cluster.owners``); SQLite has one writer at a time.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    String,
    TextClause,
    and_,
    bindparam,
    case,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from trainvitals.catalog import (
    GPU_SCHEMA,
    LAYERS_SCHEMA,
    NODE_SCHEMA,
    PROCESS_SCHEMA,
    ROW_COLUMNS,
    SCALARS_SCHEMA,
    steps_schema,
)
from trainvitals.errors import (
    ForeignBatchError,
    FormatError,
    NotOwnerError,
    VitalsError,
    WriterKeyError,
)
from trainvitals.identity import Identity
from trainvitals.records import EVENT_SCHEMA, EventRow, RunStarted, decode_events
from trainvitals.rows import Schema, column_of, rows_of
from trainvitals.wire import Batch, IngestReply, ResendableBatch, decode_batch
from vitals_collector.ingest import projections
from vitals_collector.numbers.interface import StreamKey
from vitals_collector.storage.schema import forgotten, measured_columns, runs, sources, streams
from vitals_collector.storage.store import (
    PreparedStatement,
    Store,
    StreamOffset,
    insert,
    remove_nul,
)
from vitals_collector.storage.tokens import OWN, Principal

_FOREIGN_KEY = "23503"
"""PostgreSQL's code for a row that refers to a missing row."""
_LOG = logging.getLogger("vitals.collector.ingest")
_MAX_SEQ = 2**53
"""Largest number of rows in a stream: sums with smaller numbers fit in 64 bits."""
_MAX_NAME = 255
"""Maximum characters of a column's name: no database indexes a name of unlimited length."""
_KINDS = {
    schema.stream: {column.name: column.kind for column in schema.columns}
    for schema in (
        *(steps_schema(), LAYERS_SCHEMA, SCALARS_SCHEMA),
        *(GPU_SCHEMA, NODE_SCHEMA, PROCESS_SCHEMA),
    )
}
"""Types of each stream's columns according to the catalog, which readers rely on."""

MOST_ROWS_PER_SECOND = 100_000
"""Maximum per stream: no writer reaches it, so no more rows can be lost."""
GAP_SECONDS = 10.0
"""Tolerance added to the time that has passed, because clocks are not exact."""

Checked = Batch | FormatError
"""A valid batch, or the error that makes it invalid."""
Named = Mapping[int, Principal]
"""Sender of a batch by the batch's ``id``, for senders that may not write to all runs."""


class RowsSummary(NamedTuple):
    """Data about batches' rows for the database; the lists have one item per batch."""

    newest_unix_ns: list[int]
    """Time of the last row."""
    last: list[tuple[int | float | str | None, ...] | None]
    """The latest row of a rank's steps with the columns of ``LAST``; None in other streams."""
    measured: set[tuple[str, str, str]]
    """Run, stream and name of each column that has a value in some row."""


LAST = ("last_step", "last_attempt", "last_step_unix_ns", "loss", "grad_norm")


class BatchResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one batch: response and new rows and events, or the error."""

    reply: IngestReply
    num_lost: int = 0
    expected_seq: int = -1
    """Number in the batch's stream up to which missing rows were counted before."""
    num_forgotten: int = 0
    """Rows of a removed run: not stored."""
    batch: Batch | None = None
    events: Sequence[EventRow] = ()
    error: FormatError | None = None


Answer = tuple[IngestReply, ...] | FormatError | NotOwnerError
"""Response to a body: one reply for each of its batches, or the first error if all were refused, or
the collector to send it to."""


def ingest(store: Store, raw: bytes, *, received_unix_ns: int = 0) -> IngestReply:
    """Store the batch and return once it is durable; a batch sent again changes nothing.

    ``received_unix_ns`` is this collector's clock, or 0 if the batch was found in a directory.

    Raises:
        FormatError: damaged, inconsistent, or of a newer version; nothing was stored.
        StorageError: the database refused; nothing was stored, send it again.
    """
    return ingest_all(store, [raw], received_unix_ns)[0]


def ingest_all(
    store: Store, raws: Sequence[bytes], received_unix_ns: int
) -> tuple[IngestReply, ...]:
    """Store batches that arrived together; a refused one does not delay the others.

    Raises:
        FormatError: all of them are refused: the first one's error.
        StorageError: the database refused; nothing was stored, send it again.
    """
    (answer,) = ingest_bodies(store, [raws], received_unix_ns)
    if isinstance(answer, VitalsError):
        raise answer
    return answer


def ingest_bodies(
    store: Store,
    bodies: Sequence[Sequence[bytes]],
    received_unix_ns: int,
    asking: Sequence[bool] = (),
    principals: Sequence[Principal] = (),
) -> list[Answer]:
    """Store the batches of all bodies in one transaction; return each body's response, in order.

    Arguments and errors as in ``store_bodies``.
    """
    stored = store_bodies(store, bodies, received_unix_ns, asking, principals)
    return [reply_to_body(of_body) for of_body in stored]


def store_bodies(
    store: Store,
    bodies: Sequence[Sequence[bytes]],
    received_unix_ns: int,
    asking: Sequence[bool] = (),
    principals: Sequence[Principal] = (),
) -> list[tuple[BatchResult, ...] | NotOwnerError]:
    """Store the batches of all bodies in one transaction; return the result of each, in order.

    ``asking`` has for each body whether its sender wants a query before a gap counts as lost;
    ``principals`` has its sender, and is empty if all of them may write to all runs.

    Raises:
        StorageError: the database refused; nothing was stored.
    """
    checked = iter(check_bodies(bodies, asking))
    by_body = [list(islice(checked, len(body))) for body in bodies]
    named: dict[int, Principal] = {}
    for of_body, principal in zip(by_body, principals, strict=bool(principals)):
        if principal.is_limited:
            of_body[:] = [_check_token_limits(batch, principal) for batch in of_body]
        if not principal.writes_all:
            named |= {id(batch): principal for batch in of_body}
    elsewhere = store.claims.claim(runs_in(chain.from_iterable(by_body)))
    away = [
        next((elsewhere[run_id] for run_id in runs_in(of_body) if run_id in elsewhere), None)
        if elsewhere
        else None
        for of_body in by_body
    ]
    local_bodies = [of_body for of_body, error in zip(by_body, away, strict=True) if error is None]
    every = [batch for of_body in local_bodies for batch in of_body]
    # Events do not wait for a merge of files: users may be waiting for them.
    of_rows = any(isinstance(batch, Batch) and batch.header.stream != EVENTS for batch in every)
    with store.write_rows() if of_rows else store.write() as connection:
        stored = store_batches(connection, store, every, received_unix_ns, named)
    announce(store, stored)
    outcomes = iter(stored)
    return [
        tuple(islice(outcomes, len(body))) if error is None else error
        for body, error in zip(by_body, away, strict=True)
    ]


def runs_in(checked: Iterable[Checked]) -> set[str]:
    """Return the runs of the verified batches."""
    return {batch.header.identity.run_id for batch in checked if isinstance(batch, Batch)}


def check_bodies(bodies: Sequence[Sequence[bytes]], asking: Sequence[bool] = ()) -> list[Checked]:
    """Return each batch of the bodies decoded and verified, in order, or its error."""
    checked = check_batches([raw for body in bodies for raw in body])
    if not any(asking):
        return checked
    asks = [body_asks for body, body_asks in zip(bodies, asking, strict=True) for _ in body]
    return [
        ResendableBatch(batch.header, batch.rows) if asks_it and isinstance(batch, Batch) else batch
        for batch, asks_it in zip(checked, asks, strict=True)
    ]


def store_batches(
    connection: Connection,
    store: Store,
    checked: Sequence[Checked],
    received_unix_ns: int = 0,
    named: Named = MappingProxyType({}),
) -> list[BatchResult]:
    """Store the valid batches. The caller commits, then calls ``announce``.

    Rows are durable when this returns, even if the caller's transaction fails: data about them is
    then written when they are resent. All batches except the ``named`` ones may belong to any run.
    """
    good = [batch for batch in checked if isinstance(batch, Batch)]
    lock_runs(connection, {batch.header.identity.run_id for batch in good})
    written = _IngestTarget(connection, store, received_unix_ns, named)
    stored = iter(_store_or_halve(written, good) if good else ())
    return [
        _refused_result(batch_or_error) if isinstance(batch_or_error, FormatError) else next(stored)
        for batch_or_error in checked
    ]


def announce(store: Store, stored: Iterable[BatchResult]) -> None:
    """Count stored batches, and pass their new rows to the ``after_ingest`` hooks.

    A hook's error is logged and counted, never raised: the rows are stored, and refusing the batch
    now would only cause it to be resent.
    """
    counters = store.counters
    new: list[tuple[Batch, Sequence[EventRow]]] = []
    with counters.lock:
        for outcome in stored:
            counters.num_rows += outcome.reply.num_new
            counters.num_duplicate += outcome.reply.num_duplicate
            counters.num_lost += outcome.num_lost
            counters.num_forgotten += outcome.num_forgotten
            if outcome.error is not None:
                code = outcome.error.code
                counters.rejected[code] = counters.rejected.get(code, 0) + 1
            if outcome.batch is not None:
                new.append((outcome.batch, outcome.events))
    for hook in store.after_ingest if new else ():
        try:
            hook(new)
        except Exception:  # noqa: BLE001 - the only place that counts errors of hooks
            counters.fail("after_ingest")
            _LOG.exception("after_ingest_failed run=%s", new[0][0].header.identity.run_id)


def reply_to_body(stored: Sequence[BatchResult] | NotOwnerError) -> Answer:
    """Return the response to an ingested body, from the results of its batches, in order."""
    if isinstance(stored, NotOwnerError):
        return stored
    first = stored[0].error
    if first is not None and all(outcome.error is not None for outcome in stored):
        return first
    return tuple(outcome.reply for outcome in stored)


def _refused_result(error: FormatError) -> BatchResult:
    reply = IngestReply(
        durable_seq=-1, num_new=0, num_duplicate=0, code=error.code, text=error.text
    )
    return BatchResult(reply, error=error)


class _IngestTarget(NamedTuple):
    """Target of the batches, and data about all of them."""

    connection: Connection
    store: Store
    received_unix_ns: int
    """0: they were found in a directory."""
    named: Named


def _store_or_halve(written: _IngestTarget, batches: Sequence[Batch]) -> list[BatchResult]:
    """Store the batches; if one cannot be stored, find it by bisection and refuse only it."""
    try:
        # A savepoint: a refused batch must be undone, but the transaction belongs to all batches.
        with written.connection.begin_nested():
            return _store_batches(written, batches)
    except _StaleOffsetError:
        written.store.offsets.clear()
        return _store_or_halve(written, batches)
    except (OverflowError, DataError) as error:
        if len(batches) == 1:
            text = f"the batch holds a value that no database stores: {error}"
            return [_refused_result(FormatError(text))]
    except Exception as error:
        if not _is_batch_error(error):
            raise
        if len(batches) == 1:
            _LOG.exception("batch_not_stored key=%s", key_of(batches[0]))
            text = f"the batch cannot be stored: {type(error).__name__}: {error}"
            return [_refused_result(FormatError(text))]
    half = len(batches) // 2
    return [
        *_store_or_halve(written, batches[:half]),
        *_store_or_halve(written, batches[half:]),
    ]


def _is_batch_error(error: Exception) -> bool:
    """Return whether storing a batch would always fail; otherwise a later attempt can succeed."""
    if isinstance(error, DBAPIError):
        # If another process is removing a run, its row is missing (foreign key): when the batch is
        # retried, it belongs to a removed run.
        is_race = getattr(error.orig, "sqlstate", "") == _FOREIGN_KEY
        return isinstance(error, (DataError, IntegrityError)) and not is_race
    return not isinstance(error, (MemoryError, VitalsError))


def _store_batches(written: _IngestTarget, batches: Sequence[Batch]) -> list[BatchResult]:
    """Store batches, their streams' offsets and their events in one transaction."""
    connection, store, received_unix_ns, named = written
    numbers = store.numbers
    keys = [key_of(batch) for batch in batches]
    offsets = _take_offsets(connection, store, keys)
    # Removed runs are looked up only for new streams: the removal deleted the known ones.
    unknown = [batch for batch, key in zip(batches, keys, strict=True) if key not in offsets]
    removed = _load_removed_runs(connection, unknown)
    unknown = [batch for batch in unknown if not is_of_removed_run(batch, removed)]
    foreign = _find_foreign_batches(connection, unknown, named)
    unknown = [batch for batch in unknown if id(batch) not in foreign]
    _register_streams(connection, store, offsets, unknown, named)
    run_ids = {run_id for run_id, _, stream in keys if stream != EVENTS}
    damaged = {run_id for run_id in run_ids if numbers.has_holes(run_id)}
    stored, rows = list[BatchResult](), list[Batch]()
    accepted: list[tuple[Batch, StreamOffset]] = []
    for batch, key in zip(batches, keys, strict=True):
        if removed and is_of_removed_run(batch, removed):
            stored.append(_acknowledge_removed(batch))
            continue
        if id(batch) in foreign:
            stored.append(_refused_result(foreign[id(batch)]))
            continue
        try:
            offset = _check_offset(batch, offsets.get(key), named.get(id(batch), OWN))
            if batch.header.first_seq > offset.last_seq + 1:
                _check_gap(batch, offset, received_unix_ns)
        except FormatError as error:
            stored.append(_refused_result(error))
            continue
        of_rows = key[2] != EVENTS
        missing = numbers.missing(key) if of_rows and key[0] in damaged else ()
        if missing and isinstance(batch, ResendableBatch):
            wanted = numbers.wanted(key, batch.header.first_seq)
            if wanted >= 0:
                stored.append(_request_missing_rows(offset, wanted))
                continue
        outcome = drop_stored_rows(batch, offset)
        if missing and outcome.batch is None:
            outcome = _acknowledge_up_to_hole(outcome, batch, missing)
        stored.append(outcome)
        if outcome.reply.from_seq >= 0:
            continue
        accepted.append((batch, offset))
        if of_rows:
            # Damaged rows are stored again; the fleet detectors have already seen them.
            is_again = missing and batch.header.first_seq <= missing[-1][1]
            rows += [batch] if is_again else [outcome.batch] if outcome.batch else []
    if accepted:
        # Includes rows stored before: their collector may have died before it recorded them.
        _record_batches(connection, accepted, received_unix_ns)
        stored_events = [
            (o.batch.header.identity, o.events) for o in stored if o.batch and o.events
        ]
        if stored_events:
            projections.apply_events(connection, stored_events)
    if rows:
        numbers.append(rows)  # last, after every check that may refuse a batch
    _cache_offsets(store, [offset for _, offset in accepted])
    return stored


def _acknowledge_removed(batch: Batch) -> BatchResult:
    """Acknowledge rows of a removed run, so that they are not resent."""
    header = batch.header
    reply = IngestReply(durable_seq=header.last_seq, num_new=0, num_duplicate=0)
    return BatchResult(reply, num_forgotten=header.num_rows)


def drop_stored_rows(batch: Batch, offset: StreamOffset) -> BatchResult:
    """Return the batch's rows that are not stored yet; advance its stream's offset past it."""
    header = batch.header
    num_ahead = header.first_seq - offset.last_seq - 1
    if num_ahead == 0 and header.stream_schema.stream != EVENTS:  # nearly always
        offset.last_seq = header.first_seq + header.num_rows - 1
        reply = IngestReply(durable_seq=offset.last_seq, num_new=header.num_rows, num_duplicate=0)
        return BatchResult(reply, expected_seq=offset.expected_seq, batch=batch)
    num_lost, num_known = max(0, num_ahead), min(header.num_rows, max(0, -num_ahead))
    if isinstance(batch, ResendableBatch) and num_lost > header.dropped:
        return _request_missing_rows(offset, offset.last_seq + 1)
    num_told = max(0, min(offset.expected_seq, header.first_seq - 1) - offset.last_seq)
    if num_known == header.num_rows:
        reply = IngestReply(durable_seq=offset.last_seq, num_new=0, num_duplicate=num_known)
        return BatchResult(reply, expected_seq=offset.expected_seq)
    if num_known:
        rest = msgspec.structs.replace(
            header, first_seq=header.first_seq + num_known, num_rows=header.num_rows - num_known
        )
        batch = Batch(rest, batch.rows[num_known * header.stream_schema.row_size :])
    num_new = batch.header.num_rows
    offset.last_seq = header.last_seq
    offset.num_lost += num_lost
    is_events = header.stream == EVENTS
    events = list(decode_events(header.stream_schema, batch.rows)) if is_events else ()
    reply = IngestReply(durable_seq=header.last_seq, num_new=num_new, num_duplicate=num_known)
    return BatchResult(
        reply,
        num_lost=num_lost - num_told,
        expected_seq=offset.expected_seq,
        batch=batch,
        events=events,
    )


def _request_missing_rows(offset: StreamOffset, first_seq: int) -> BatchResult:
    """Request the missing rows of a batch's stream instead of storing later ones.

    A collector that was restored from a backup, or whose disk has damaged a file, lacks rows that
    agents still have; a batch that was damaged in transit is resent.
    """
    reply = IngestReply(durable_seq=first_seq - 1, num_new=0, num_duplicate=0, from_seq=first_seq)
    return BatchResult(reply, expected_seq=offset.expected_seq)


def _acknowledge_up_to_hole(
    known: BatchResult, batch: Batch, missing: Sequence[tuple[int, int]]
) -> BatchResult:
    """Return the response to a batch of known rows before missing ones, which must be resent."""
    last = batch.header.last_seq
    first = min((max(low, last + 1) for low, end in missing if end - 1 > last), default=None)
    if first is None:
        return known
    reply = msgspec.structs.replace(known.reply, durable_seq=first - 1)
    return msgspec.structs.replace(known, reply=reply)


# -------------------------------------------------------------------- offsets of the streams

EVENTS = "events"
"""The stream whose rows are stored in the database."""
_MAX_INT64 = 2**63 - 1
_LOCK_SEED = 7_460_211
"""Separates our advisory locks from those of other programs in the same database."""


def key_of(batch: Batch) -> StreamKey:
    """Return the key of a batch's stream, by which ingest finds its offset."""
    header = batch.header
    identity = header.identity
    return identity.run_id, identity.incarnation, header.stream_schema.stream


class _StaleOffsetError(Exception):
    """A stream's offset differs from the cached one: another process wrote to it, or removed it."""


_MOST_REMEMBERED = 1 << 15
"""Maximum streams, about 300 bytes each; above it the cache is cleared."""


def _take_offsets(
    connection: Connection, store: Store, keys: Iterable[StreamKey]
) -> dict[StreamKey, StreamOffset]:
    """Return the offsets of batches' streams; an unknown stream has none.

    Their cache entries are removed until ``_cache_offsets``: after any error in between, the next
    call reads the database.
    """
    wanted = list(dict.fromkeys(keys))
    run_ids = {run_id for run_id, _, stream in wanted if stream != EVENTS}
    marks = store.numbers.marks(run_ids) if run_ids else {}
    offsets: dict[StreamKey, StreamOffset] = {}
    for key in wanted:
        offset = store.offsets.pop(key, None)
        if offset is not None and (
            key[2] == EVENTS or marks[key[0]].get(key[1:]) == offset.last_seq
        ):
            offsets[key] = offset
    if len(offsets) == len(wanted):
        return offsets
    # All in one parameter: a statement with one parameter per key costs more than the rows.
    missing_keys = [key for key in wanted if key not in offsets]
    query, keys_json = _OFFSETS[connection.dialect.name], msgspec.json.encode(missing_keys).decode()
    for row in connection.execute(query, {"keys": keys_json}).all():
        *key_parts, last_seq, promised, last_ns, source, started_ns, token_id, key_hash = row
        run_id, incarnation, stream = key = key_parts[0], key_parts[1], key_parts[2]
        # The store of numbers is ahead of the database if a collector died between the two commits;
        # it is behind if it was restored from an older backup.
        mark = last_seq
        if stream != EVENTS:
            mark = min(last_seq, marks[run_id].get((incarnation, stream), -1))
        newest_ns = last_ns if mark == last_seq else 0
        offsets[key] = StreamOffset(
            key, source, mark, newest_ns, started_ns, token_id, key_hash, 0, promised, last_seq
        )
    return offsets


def _cache_offsets(store: Store, offsets: Iterable[StreamOffset]) -> None:
    """Cache the offsets of streams, so that their next rows need no query."""
    if len(store.offsets) > _MOST_REMEMBERED:
        store.offsets.clear()
    for offset in offsets:
        offset.noted_seq, offset.num_lost = offset.last_seq, 0
        store.offsets[offset.key] = offset


def lock_runs(connection: Connection, run_ids: Iterable[str]) -> None:
    """Wait until no other collector stores rows of these runs; hold them in this transaction.

    In order, so that two collectors do not block each other; and briefly, because a collector that
    was stopped in between loses its transaction before its leases end.
    """
    if connection.dialect.name == "sqlite":
        return
    connection.exec_driver_sql(_BOUNDED)
    connection.execute(_LOCK, {"of_runs": sorted(run_ids)})


def _register_streams(
    connection: Connection,
    store: Store,
    offsets: dict[StreamKey, StreamOffset],
    new: Sequence[Batch],
    named: Named,
) -> None:
    """Create the rows that new streams refer to, and add the streams' offsets.

    A batch whose identity does not fit in a database is left out: it gets no offset.
    """
    new = [batch for batch in new if _fits_int64(batch.header.identity)]
    if not new:
        return
    started: dict[str, int] = {}
    writers: dict[tuple[str, str], tuple[Identity, Principal]] = {}
    begun_by: dict[str, Principal] = {}
    for batch in new:
        identity, principal = batch.header.identity, named.get(id(batch), OWN)
        earliest = started.get(identity.run_id, identity.started_unix_ns)
        started[identity.run_id] = min(earliest, identity.started_unix_ns)
        begun_by.setdefault(identity.run_id, principal)
        writers.setdefault((identity.run_id, identity.incarnation), (identity, principal))
    keys = sorted({key_of(batch) for batch in new})
    connection.execute(
        insert(connection, runs).on_conflict_do_nothing(),
        [
            {
                "run_id": run_id,
                "started_unix_ns": ns,
                "owner": begun_by[run_id].owner,
                "project": begun_by[run_id].project,
            }
            for run_id, ns in started.items()
        ],
    )
    connection.execute(
        insert(connection, sources).on_conflict_do_nothing(),
        [
            _source_row(identity) | {"token_id": by.token_id, "writer_key_hash": by.writer_key_hash}
            for identity, by in writers.values()
        ],
    )
    connection.execute(
        insert(connection, streams).on_conflict_do_nothing(),
        [{"run_id": run, "incarnation": inc, "stream": stream} for run, inc, stream in keys],
    )
    offsets.update(_take_offsets(connection, store, keys))


def _check_offset(batch: Batch, offset: StreamOffset | None, principal: Principal) -> StreamOffset:
    """Return the stream's offset if the batch may move it.

    Raises:
        FormatError: the incarnation is known as another source, or could not be introduced.
        ForeignBatchError: another token started it.
        WriterKeyError: it was started with another writer key.
    """
    identity = batch.header.identity
    if offset is None:
        raise FormatError("a number in the batch's header does not fit 64 bits")
    if offset.source != identity.source:
        raise FormatError(
            f"incarnation {identity.incarnation} is known as {offset.source}, "
            f"not {identity.source}",
            hint="each start of each source makes an incarnation of its own",
        )
    if offset.token_id != principal.token_id or offset.writer_key_hash != principal.writer_key_hash:
        begun_with = offset.token_id, offset.writer_key_hash
        if error := _foreign_incarnation_error(identity, principal, begun_with):
            raise error
    return offset


def _check_gap(batch: Batch, offset: StreamOffset, received_unix_ns: int) -> None:
    """Refuse a batch's rows that are further ahead than can have been lost since the last one.

    The time in between comes from the rows themselves, made by one clock, but is limited to the
    past by our clock. Otherwise one batch with a huge number would end its stream: all later rows
    would seem to be stored already.

    Raises:
        FormatError: more is missing than any writer writes.
    """
    header = batch.header
    num_missing = header.first_seq - offset.last_seq - 1
    if isinstance(batch, ResendableBatch) and num_missing > header.dropped:
        return  # the missing rows are requested
    schema = header.stream_schema
    newest = int(column_of(schema, rows_of(schema, batch.rows), "time_unix_ns")[0].max())
    until = min(newest, received_unix_ns or newest)
    since = offset.last_unix_ns or offset.started_unix_ns
    seconds = max(0.0, (until - since) / 1e9) + GAP_SECONDS
    if num_missing > MOST_ROWS_PER_SECOND * seconds:
        raise FormatError(
            f"rows of {schema.stream} jump to {header.first_seq} after {offset.last_seq}; no more "
            f"than {MOST_ROWS_PER_SECOND * seconds:.0f} can be missing after {seconds:.0f} s",
            hint="restart the writer: each start has its own sequence numbers",
        )


def _fits_int64(identity: Identity) -> bool:
    """Return whether the numbers of a batch's writer fit in database columns."""
    numbers = identity.pid, identity.rank, identity.local_rank, identity.world_size
    return all(-_MAX_INT64 <= n <= _MAX_INT64 for n in (*numbers, identity.started_unix_ns))


def _source_row(identity: Identity) -> dict[str, str | int]:
    """Return the row of ``sources`` for the writer of a batch."""
    return {
        "run_id": identity.run_id,
        "incarnation": identity.incarnation,
        "source": identity.source,
        "node": identity.node,
        "pid": identity.pid,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "gpu_uuid": remove_nul(identity.gpu_uuid),
        "metrics_url": remove_nul(identity.metrics_url),
        "started_unix_ns": identity.started_unix_ns,
    }


def _build_keyed_query(sql: str) -> dict[str, TextClause]:
    """Return an ingest statement about ``:keys``, a JSON list of lists, by dialect.

    All in one parameter: a statement with one parameter per key costs more than the rows.
    """
    sqlite = {f"k{i}": f"json_extract(k.value, '$[{i}]')" for i in range(3)}
    postgresql = {f"k{i}": f"k.value->>{i}" for i in range(3)}
    as_rows = "json_array_elements(CAST(:keys AS json)) k"
    return {
        "sqlite": text(sql.format(listed="json_each(:keys) k", **sqlite)),
        "postgresql": text(sql.format(listed=as_rows, **postgresql)),
    }


_OFFSETS = _build_keyed_query("""
SELECT s.run_id, s.incarnation, s.stream, s.last_seq, s.expected_seq, s.last_unix_ns,
w.source, w.started_unix_ns, w.token_id, w.writer_key_hash
FROM {listed} JOIN streams s ON s.run_id = {k0} AND s.incarnation = {k1} AND s.stream = {k2}
JOIN sources w ON w.run_id = s.run_id AND w.incarnation = s.incarnation
""")
_BEGUN_BY = _build_keyed_query("""
SELECT w.run_id, w.incarnation, w.token_id, w.writer_key_hash
FROM {listed} JOIN sources w ON w.run_id = {k0} AND w.incarnation = {k1}
""")
_LOCK = text(
    "SELECT pg_advisory_xact_lock(hashtextextended(run, :seed)) FROM unnest(:of_runs) AS run"
).bindparams(bindparam("seed", _LOCK_SEED, BigInteger), bindparam("of_runs", type_=ARRAY(String())))
_BOUNDED = (
    "SELECT set_config('lock_timeout', '3s', true),"
    " set_config('idle_in_transaction_session_timeout', '7s', true)"
)


# --------------------------------------------------------------------------- removed runs


def _load_removed_runs(connection: Connection, of: Iterable[Batch]) -> dict[str, int]:
    """Return which of the received batches' runs were removed, and when."""
    ids = sorted({batch.header.identity.run_id for batch in of})
    if not ids:
        return {}
    query = select(forgotten.c.run_id, forgotten.c.forgotten_unix_ns)
    removals = connection.execute(query.where(forgotten.c.run_id.in_(ids)))
    return {row.run_id: row.forgotten_unix_ns for row in removals}


def is_being_removed() -> ColumnElement[bool]:
    """Return the condition that a row of ``runs`` only waits until its batches are deleted."""
    begun = select(forgotten.c.run_id).where(
        forgotten.c.run_id == runs.c.run_id, forgotten.c.is_gone.is_(False)
    )
    later = select(streams.c.run_id).where(streams.c.run_id == runs.c.run_id)
    return and_(begun.exists(), ~later.exists())


def is_of_removed_run(batch: Batch, removed: Mapping[str, int]) -> bool:
    """Return whether a received batch belongs to a start before its run was removed."""
    identity = batch.header.identity
    return identity.run_id in removed and identity.started_unix_ns <= removed[identity.run_id]


# ---------------------------------------------------------------------------- owners of batches


def _check_token_limits(batch: Checked, principal: Principal) -> Checked:
    """Return the batch, or the error if its token is limited to another project or run."""
    if not isinstance(batch, Batch):
        return batch
    run_id = batch.header.identity.run_id
    if principal.run_id and run_id != principal.run_id:
        return ForeignBatchError(
            f"the batch belongs to run {run_id}; token {principal.name} is limited to run "
            f"{principal.run_id}"
        )
    if not principal.project or batch.header.stream != EVENTS:
        return batch
    for row in decode_events(batch.header.stream_schema, batch.rows):
        named = row.event.info.project if isinstance(row.event, RunStarted) else ""
        if named not in ("", principal.project):
            return ForeignBatchError(
                f"run {run_id} belongs to project {named!r}; token {principal.name} is "
                f"limited to project {principal.project!r}",
                hint="set VITALS_PROJECT to that, or use a token of the run's own project",
            )
    return batch


def _find_foreign_batches(
    connection: Connection, new: Sequence[Batch], named: Named
) -> dict[int, ForeignBatchError]:
    """Return the errors, by ``id``, of batches that would start what belongs to other tokens."""
    identities = [batch.header.identity for batch in new if id(batch) in named]
    if not identities:
        return {}
    run_ids = {identity.run_id for identity in identities}
    of_runs = select(runs.c.run_id, runs.c.owner, runs.c.project).where(runs.c.run_id.in_(run_ids))
    known = {row.run_id: (row.owner, row.project) for row in connection.execute(of_runs)}
    starts = sorted({(identity.run_id, identity.incarnation) for identity in identities})
    query, identities_json = (
        _BEGUN_BY[connection.dialect.name],
        msgspec.json.encode(starts).decode(),
    )
    begun_by = {
        (run_id, start): (token_id, key_hash)
        for run_id, start, token_id, key_hash in connection.execute(
            query, {"keys": identities_json}
        )
    }
    foreign: dict[int, ForeignBatchError] = {}
    for batch in new:
        identity, principal = batch.header.identity, named.get(id(batch), OWN)
        start = (identity.run_id, identity.incarnation)
        # An unknown run belongs to its first sender, in this order.
        of_run = known.setdefault(identity.run_id, (principal.owner, principal.project))
        if not principal.may_write(identity.run_id, *of_run):
            foreign[id(batch)] = _foreign_run_error(identity, principal)
            continue
        begun_with = begun_by.setdefault(start, (principal.token_id, principal.writer_key_hash))
        if error := _foreign_incarnation_error(identity, principal, begun_with):
            foreign[id(batch)] = error
    return foreign


def _foreign_run_error(identity: Identity, principal: Principal) -> ForeignBatchError:
    """Return the error for a batch of a run that belongs to another token."""
    limit = f" for project {principal.project!r}" if principal.project else ""
    return ForeignBatchError(
        f"run {identity.run_id} is not one of token {principal.name}{limit}",
        hint="all agents of a job use one token, or tokens of one owner or project",
    )


def _foreign_incarnation_error(
    identity: Identity, principal: Principal, begun_with: tuple[str, str]
) -> ForeignBatchError | None:
    """Return a batch's error if a sender with another token or key started its incarnation."""
    token_id, writer_key_hash = begun_with
    if principal.writes_all:
        return None
    if principal.token_id != token_id:
        return ForeignBatchError(
            f"incarnation {identity.incarnation} was begun with another token than "
            f"{principal.name}",
            hint="one that is rotated stays the same token; change to another when the job starts",
        )
    # One that started without a key needs none, so that an agent can be upgraded during a run.
    if writer_key_hash and principal.writer_key_hash != writer_key_hash:
        return WriterKeyError(
            f"{identity.source} of run {identity.run_id} (incarnation {identity.incarnation}) was "
            f"started by an agent with another writer key than this one, which has token "
            f"{principal.name}",
            hint="restore the file writer.key of the agent's directory, or restart the job",
        )
    return None


# ------------------------------------------------------- validity of batches, and their rows
#
# Schemas are shared objects: numpy works once on all rows of a schema, not once for each batch.


def check_batches(raws: Sequence[bytes]) -> list[Checked]:
    """Return each received batch decoded and verified, or its error in its place."""
    checked: list[Checked] = []
    for raw in raws:
        try:
            batch = decode_batch(raw)
            header = batch.header
            if header.last_seq > _MAX_SEQ:
                text = f"rows are numbered up to {header.last_seq}; no run comes beyond {_MAX_SEQ}"
                raise FormatError(text)
            checked.append(batch)
        except FormatError as error:
            checked.append(error)
    good = [batch for batch in checked if isinstance(batch, Batch)]
    places = [i for i, batch_or_error in enumerate(checked) if isinstance(batch_or_error, Batch)]
    for schema, which in _by_schema(good):
        schema_batches = [good[i] for i in which]
        for i, wrong in _find_row_errors(schema, schema_batches):
            checked[places[which[i]]] = wrong
    return checked


def summarize(batches: Sequence[Batch]) -> RowsSummary:
    """Return the data about received batches' rows."""
    summary = RowsSummary([0] * len(batches), [None] * len(batches), set())
    for schema, which in _by_schema(batches):
        of_schema = [batches[i] for i in which]
        rows, starts, counts = _join_rows(schema, of_schema)
        times, validity_bits = column_of(schema, rows, "time_unix_ns")[0], rows["validity"]
        newest_rows = rows
        if len(rows) > len(of_schema):
            times = np.maximum.reduceat(times, starts)
            validity_bits = np.bitwise_or.reduceat(validity_bits, starts, axis=0)
            newest_rows = rows[starts + counts - 1]
        for i, newest_ns in zip(which, times.tolist(), strict=True):
            summary.newest_unix_ns[i] = newest_ns
        if schema.stream == "steps":
            for i, last in zip(which, _last_step_values(schema, newest_rows), strict=True):
                summary.last[i] = last
        run_ids = [batch.header.identity.run_id for batch in of_schema]
        summary.measured.update(
            (run_id, schema.stream, remove_nul(column.name))
            for run_id, measured in set(zip(run_ids, _validity_as_ints(validity_bits), strict=True))
            for i, column in enumerate(schema.columns)
            if measured >> i & 1
        )
    return summary


def _by_schema(batches: Sequence[Batch]) -> Iterator[tuple[Schema, list[int]]]:
    """Yield every schema with the positions of its received batches."""
    places_by_schema: dict[int, list[int]] = {}
    schemas = [id(batch.header.stream_schema) for batch in batches]
    for schema, places in groupby(range(len(schemas)), schemas.__getitem__):
        places_by_schema.setdefault(schema, []).extend(places)
    for which in places_by_schema.values():
        yield batches[which[0]].header.stream_schema, which


def _last_step_values(
    schema: Schema, rows: npt.NDArray[np.void]
) -> Iterator[tuple[int | float | str | None, ...]]:
    """Yield received rows' numbers for the list of runs; NaN as text, which SQLite can store."""
    columns: list[list[Any]] = [
        column_of(schema, rows, name)[0].tolist() for name in ("step", "attempt", "time_unix_ns")
    ]
    for name in ("loss", "grad_norm"):
        values, is_valid = column_of(schema, rows, name)
        is_number = values.dtype.kind in "fi"
        numbers = values.astype(np.float64) if is_number else np.full(len(rows), np.nan)
        shown: list[Any] = numbers.tolist()
        for i in np.flatnonzero(np.isnan(numbers) | ~is_valid).tolist():
            shown[i] = "nan" if is_number and is_valid[i] else None
        columns.append(shown)
    return zip(*columns, strict=True)


def _join_rows(
    schema: Schema, batches: Sequence[Batch]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of batches joined, and the start and number of each batch's."""
    rows = np.frombuffer(b"".join([batch.rows for batch in batches]), schema.dtype)
    counts = np.array([batch.header.num_rows for batch in batches], np.int64)
    return rows, np.cumsum(counts) - counts, counts


def _validity_as_ints(bit_words: npt.NDArray[np.uint64]) -> list[int]:
    """Return the validity bits of each received row as one integer."""
    if bit_words.shape[1] == 1:
        numbers: list[int] = bit_words[:, 0].tolist()
        return numbers
    return [int.from_bytes(row.tobytes(), "little") for row in bit_words]


def _find_row_errors(schema: Schema, batches: Sequence[Batch]) -> Iterator[tuple[int, FormatError]]:
    """Yield the position and error of each batch whose rows do not match its header."""
    is_events = schema.stream == "events"
    required_columns = EVENT_SCHEMA.columns if is_events else ROW_COLUMNS
    missing = [column.name for column in required_columns if column not in schema.columns]
    if missing:
        text = f"rows of {schema.stream} lack the columns {', '.join(missing)}"
    else:
        text = _schema_error_text(schema)
    if text:
        yield from ((i, FormatError(text)) for i in range(len(batches)))
        return
    rows, starts, counts = _join_rows(schema, batches)
    firsts = np.array([batch.header.first_seq for batch in batches], np.int64)
    expected = np.repeat(firsts - starts, counts) + np.arange(len(rows))
    is_wrong = rows["seq"] != expected
    if is_wrong.any():
        text = "the rows' sequence numbers are not those the header gives"
        for row_index in np.flatnonzero(np.logical_or.reduceat(is_wrong, starts)):
            yield int(row_index), FormatError(text)
    for i, batch in enumerate(batches) if is_events else ():
        if not _has_valid_checksums(schema, batch.rows):
            yield i, FormatError("the checksum of an event's row does not hold")


def _schema_error_text(schema: Schema) -> str:
    """Return a sentence about an invalid column of a batch; empty if all are valid."""
    kinds = _KINDS.get(schema.stream, {})
    for name, kind in ((column.name, column.kind) for column in schema.columns):
        if len(name) > _MAX_NAME:
            text = f"has a name of {len(name)} characters; at most {_MAX_NAME} are stored"
            return f"column {name[:16]}... of {schema.stream} {text}"
        # The catalog's entry ``learning_rate`` applies to ``learning_rate.1`` too.
        catalog_kind = kinds.get(name.partition(".")[0], kind)
        # A whole number is valid where the catalog has a float.
        if kind != catalog_kind and (kind, catalog_kind) != ("i8", "f8"):
            return (
                f"column {name!r} of {schema.stream} is {kind}; by the catalog it is {catalog_kind}"
            )
    return ""


def _has_valid_checksums(schema: Schema, rows: bytes) -> bool:
    """Return whether the checksum of each row of a received batch matches."""
    size = schema.row_size
    return all(
        schema.seq_of(rows[start : start + size]) is not None for start in range(0, len(rows), size)
    )


# ------------------------------------------------------------------ records in the database


def _record_batches(
    connection: Connection, accepted: Sequence[tuple[Batch, StreamOffset]], received_unix_ns: int
) -> None:
    """Record stored batches: the streams' offsets and columns, and the sources' activity."""
    batches = [batch for batch, _ in accepted]
    offsets = [offset for _, offset in accepted]
    summary = summarize(batches)
    for offset, newest_ns in zip(offsets, summary.newest_unix_ns, strict=True):
        if received_unix_ns and newest_ns > received_unix_ns:
            newest_ns = received_unix_ns
        if newest_ns > offset.last_unix_ns:
            offset.last_unix_ns = newest_ns
    moved = {id(offset): offset for offset in offsets}  # batches of a stream share one offset
    parameters = [
        (*o.key, o.last_seq, o.num_lost, o.last_unix_ns, o.noted_seq, o.expected_seq)
        for o in moved.values()
    ]
    if len(moved) != _MOVE.execute(connection, parameters):
        raise _StaleOffsetError  # before any row refers to a removed run
    _note_columns(connection, summary.measured)
    _note_sources(connection, offsets, summary, received_unix_ns)
    processes = [
        (header.identity.run_id, schema, rows_of(schema, batch.rows))
        for batch in batches
        if (schema := (header := batch.header).stream_schema).stream == "process"
    ]
    if processes:
        projections.note_processes(connection, processes)


def _note_columns(connection: Connection, names: set[tuple[str, str, str]]) -> None:
    """Write the measured columns of stored batches; mostly known, so that nothing is written."""
    table = measured_columns.c
    query = select(table.run_id, table.stream, table.name)
    about_runs = sorted({run_id for run_id, _, _ in names})
    named = connection.execute(query.where(table.run_id.in_(about_runs))).all()
    if new := sorted(names.difference(map(tuple, named))):
        connection.execute(
            insert(connection, measured_columns).on_conflict_do_nothing(),
            [dict(zip(("run_id", "stream", "name"), row, strict=True)) for row in new],
        )


def _note_sources(
    connection: Connection,
    offsets: Sequence[StreamOffset],
    summary: RowsSummary,
    received_unix_ns: int,
) -> None:
    """Record the time of each writer's latest rows, and the latest step of a rank."""
    heard: dict[tuple[str, str], int] = {}
    newest: dict[tuple[str, str], tuple[int | float | str | None, ...]] = {}
    for offset, newest_unix_ns, last in zip(
        offsets, summary.newest_unix_ns, summary.last, strict=True
    ):
        writer = offset.key[:2]
        if heard.setdefault(writer, newest_unix_ns) < newest_unix_ns:
            heard[writer] = newest_unix_ns
        if last is not None:
            newest[writer] = last
    stepped, others = [], []
    for writer, seen in heard.items():
        latest = newest.get(writer)
        if latest is None:
            others.append((*writer, seen, received_unix_ns))
        else:
            stepped.append((*writer, seen, received_unix_ns, *latest))
    _HEARD.execute(connection, others)
    _STEPPED.execute(connection, stepped)


_MOVE = PreparedStatement(
    update(streams)
    .where(
        streams.c.run_id == bindparam("of_run"),
        streams.c.incarnation == bindparam("of_writer"),
        streams.c.stream == bindparam("of_stream"),
        streams.c.last_seq == bindparam("noted_seq"),
        streams.c.expected_seq == bindparam("noted_expected_seq"),
    )
    .values(
        last_seq=bindparam("new_last_seq"),
        last_unix_ns=bindparam("new_last_unix_ns"),
        num_lost=streams.c.num_lost + bindparam("new_lost"),
        # Rows that a collector stored before it died without recording them count once.
        num_rows=bindparam("new_last_seq")
        - streams.c.num_lost
        - bindparam("new_lost")
        + literal_column("1"),
    ),
    (
        *("of_run", "of_writer", "of_stream", "new_last_seq", "new_lost", "new_last_unix_ns"),
        *("noted_seq", "noted_expected_seq"),
    ),
)
# A spool may arrive late: an old batch must not make its writer look silent.
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
_HEARD = PreparedStatement(_HEAR, _HEARD_NAMES)
_STEPPED = PreparedStatement(_STEP, (*_HEARD_NAMES, *(f"new_{name}" for name in LAST)))
