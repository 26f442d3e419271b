"""Stores batches exactly once: the one way in, for HTTP and for folders alike.

The order is the promise: decode and check, cut off what is stored already, store the bytes and what
the events mean in one transaction, commit (which is fsynced), and only then answer. What came
together is stored together, so that a commit and a statement cost once for all of it. A refused
batch changes nothing and keeps no other back.
"""

import logging
from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from trainvitals.errors import FormatError, VitalsError
from trainvitals.records import EventRow, decode_events
from trainvitals.wire import Batch, IngestReply
from vitals_collector.ingest import projections
from vitals_collector.ingest.insert import place_batches
from vitals_collector.ingest.offsets import (
    StreamOffset,
    check_mark,
    key_of,
    lock_runs,
    read_marks,
    register_streams,
)
from vitals_collector.ingest.tombstones import forgotten_runs, is_forgotten, without_forgotten
from vitals_collector.ingest.validate import Checked, check_batches
from vitals_collector.storage.store import Store

_FOREIGN_KEY = "23503"
"""PostgreSQL's word for a row that hangs on one which is not there."""
_LOG = logging.getLogger("vitals.collector.ingest")


class Stored(msgspec.Struct, frozen=True):
    """What one batch came to: the answer, and its rows and events that were new, or the error."""

    reply: IngestReply
    num_lost: int = 0
    expected_seq: int = -1
    """Of the batch's stream: up to there, what is missing was counted before."""
    num_forgotten: int = 0
    """Rows of a run that was removed: not stored."""
    batch: Batch | None = None
    events: Sequence[EventRow] = ()
    error: FormatError | None = None


Answer = tuple[IngestReply, ...] | FormatError
"""To a body: one reply for each of its batches, or the first error where all were refused."""


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
    return ingest_all(store, [raw], received_unix_ns)[0]


def ingest_all(
    store: Store, raws: Sequence[bytes], received_unix_ns: int
) -> tuple[IngestReply, ...]:
    """Store batches that came together; one that is refused does not keep the others back.

    Raises:
        FormatError: all of them are refused: the first one's error.
        StorageError: the database refused; nothing was stored, send it again.
    """
    (answer,) = ingest_bodies(store, [raws], received_unix_ns)
    if isinstance(answer, FormatError):
        raise answer
    return answer


def ingest_bodies(
    store: Store, bodies: Sequence[Sequence[bytes]], received_unix_ns: int
) -> list[Answer]:
    """Store the batches of all bodies in one transaction; return each body's answer, in order.

    Raises:
        StorageError: the database refused; nothing was stored.
    """
    checked = check_batches([raw for body in bodies for raw in body])
    with store.write() as connection:
        stored = store_batches(connection, checked, received_unix_ns)
    announce(store, stored)
    return answers_of(bodies, stored)


def store_batches(
    connection: Connection, checked: Sequence[Checked], received_unix_ns: int = 0
) -> list[Stored]:
    """Store what is fit for it inside the caller's transaction, who commits, then announces."""
    good = [batch for batch in checked if isinstance(batch, Batch)]
    lock_runs(connection, good)
    stored = iter(_store_or_halve(connection, good, received_unix_ns) if good else ())
    return [
        _refused(batch_or_error) if isinstance(batch_or_error, FormatError) else next(stored)
        for batch_or_error in checked
    ]


def announce(store: Store, stored: Iterable[Stored]) -> None:
    """Count what was committed and tell the store's ``after_ingest`` hooks of what was new.

    A hook's error is logged and counted, never raised: the rows are stored, and refusing the batch
    now would only have it sent again.
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
        except Exception:  # noqa: BLE001 - the one place where a hook's error is counted
            counters.fail("after_ingest")
            _LOG.exception("after_ingest_failed run=%s", new[0][0].header.identity.run_id)


def answers_of(bodies: Sequence[Sequence[bytes]], stored: Iterable[Stored]) -> list[Answer]:
    """Return what is said to each body, from what all their batches came to, in order."""
    outcomes = iter(stored)
    return [_answer_of([next(outcomes) for _ in body]) for body in bodies]


def _answer_of(stored: Sequence[Stored]) -> Answer:
    first = stored[0].error
    if first is not None and all(outcome.error is not None for outcome in stored):
        return first
    return tuple(outcome.reply for outcome in stored)


def _refused(error: FormatError) -> Stored:
    reply = IngestReply(
        durable_seq=-1, num_new=0, num_duplicate=0, code=error.code, text=error.text
    )
    return Stored(reply, error=error)


def _store_or_halve(
    connection: Connection, batches: Sequence[Batch], received_unix_ns: int
) -> list[Stored]:
    """Store the batches; where one cannot be stored, find it by halves and refuse it alone."""
    try:
        with connection.begin_nested():
            return _store(connection, batches, received_unix_ns)
    except (OverflowError, DataError) as error:
        if len(batches) == 1:
            text = f"the batch holds a value that no database stores: {error}"
            return [_refused(FormatError(text))]
    except Exception as error:
        if not _is_of_a_batch(error):
            raise
        if len(batches) == 1:
            _LOG.exception("batch_not_stored key=%s", key_of(batches[0]))
            text = f"the batch cannot be stored: {type(error).__name__}: {error}"
            return [_refused(FormatError(text))]
    half = len(batches) // 2
    return [
        *_store_or_halve(connection, batches[:half], received_unix_ns),
        *_store_or_halve(connection, batches[half:], received_unix_ns),
    ]


def _is_of_a_batch(error: Exception) -> bool:
    """Return whether it would come again with the same batch, for ever; else a later try helps."""
    if isinstance(error, DBAPIError):
        # Where another process removes a run just now its row is missing (foreign key): tried again
        # the batch is one of a removed run.
        is_race = getattr(error.orig, "sqlstate", "") == _FOREIGN_KEY
        return isinstance(error, (DataError, IntegrityError)) and not is_race
    return not isinstance(error, (MemoryError, VitalsError))


def _store(connection: Connection, batches: Sequence[Batch], received_unix_ns: int) -> list[Stored]:
    marks = read_marks(connection, batches)
    keys = [key_of(batch) for batch in batches]
    unknown = [batch for batch, key in zip(batches, keys, strict=True) if key not in marks]
    removed = forgotten_runs(connection, unknown)
    register_streams(connection, marks, without_forgotten(unknown, removed))
    stored: list[Stored] = []
    fresh: list[tuple[Batch, StreamOffset]] = []
    for batch, key in zip(batches, keys, strict=True):
        if is_forgotten(batch, removed):
            stored.append(_pass_over(batch))
            continue
        try:
            mark = check_mark(batch, marks.get(key))
        except FormatError as error:
            stored.append(_refused(error))
            continue
        outcome = cut_off_known(batch, mark)
        stored.append(outcome)
        if outcome.batch is not None:
            fresh.append((outcome.batch, mark))
    if fresh:
        place_batches(connection, fresh, received_unix_ns)
        projections.apply(
            connection,
            [
                (outcome.batch.header.identity, outcome.events)
                for outcome in stored
                if outcome.batch and outcome.events
            ],
        )
    return stored


def _pass_over(batch: Batch) -> Stored:
    """Acknowledge rows of a run that was removed: nobody is to send them again."""
    header = batch.header
    reply = IngestReply(durable_seq=header.last_seq, num_new=0, num_duplicate=0)
    return Stored(reply, num_forgotten=header.num_rows)


def cut_off_known(batch: Batch, mark: StreamOffset) -> Stored:
    """Return what is new in the batch, and move its stream's mark behind it."""
    header = batch.header
    num_ahead = header.first_seq - mark.last_seq - 1
    num_lost, num_known = max(0, num_ahead), min(header.num_rows, max(0, -num_ahead))
    num_told = max(0, min(mark.expected_seq, header.first_seq - 1) - mark.last_seq)
    if num_known == header.num_rows:
        reply = IngestReply(durable_seq=mark.last_seq, num_new=0, num_duplicate=num_known)
        return Stored(reply, expected_seq=mark.expected_seq)
    if num_known:
        rest = msgspec.structs.replace(
            header, first_seq=header.first_seq + num_known, num_rows=header.num_rows - num_known
        )
        batch = Batch(rest, batch.rows[num_known * header.stream_schema.row_size :])
    num_new = batch.header.num_rows
    mark.last_seq = header.last_seq
    mark.num_rows += num_new
    mark.num_lost += num_lost
    is_events = header.stream == "events"
    events = list(decode_events(header.stream_schema, batch.rows)) if is_events else ()
    reply = IngestReply(durable_seq=header.last_seq, num_new=num_new, num_duplicate=num_known)
    return Stored(
        reply,
        num_lost=num_lost - num_told,
        expected_seq=mark.expected_seq,
        batch=batch,
        events=events,
    )


__all__ = [
    "Answer",
    "Stored",
    "announce",
    "answers_of",
    "cut_off_known",
    "ingest",
    "ingest_all",
    "ingest_bodies",
    "store_batches",
]
