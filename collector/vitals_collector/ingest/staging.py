"""Takes batches in at the price of one row for all that came together, and places them later.

A row in ``batches``, with its indexes and its stream's offset, costs ten times what checking a
small batch costs. So batches of streams that are known are written into ``arrivals`` as they came,
all of a commit as one row, and are acknowledged. Every few seconds, or before somebody reads, those
that follow on one another are joined and go the way of all batches (``store_batches``): in one
transaction they are placed, their offsets move and their arrivals go. That way cuts off what is
stored already, so it may begin anew at any point: each row is stored once, whoever dies in between.

What says more than numbers goes that way at once: events, and batches of a stream that is new, has
other columns, or is another source's. Only one process may take arrivals in, for it alone knows
how far each stream has come; to place what was left (``recover``) is for anyone.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, delete, select

from trainvitals.errors import FormatError
from trainvitals.wire import MAX_BODY_BYTES, Batch, BatchHeader, split_batches
from vitals_collector.ingest.ingest import (
    Answer,
    Stored,
    StreamKey,
    StreamOffset,
    announce,
    answers_of,
    cut_off_known,
    key_of,
    store_batches,
)
from vitals_collector.ingest.validate import Checked, check_batches
from vitals_collector.storage.schema import arrivals
from vitals_collector.storage.store import Store

WAIT_SECONDS = 5.0
_LARGE_BYTES = 8_192
"""Batches of more, on average, are placed at once: to write them twice costs more than that."""
_AT_ONCE = 256
"""Batches that are placed in one transaction: what comes in meanwhile waits for it."""
_PAUSE_SECONDS = 0.001
"""Between two of them: a lock that is taken again at once is never another's."""
_LOG = logging.getLogger("vitals.collector.arrivals")

Waiting = dict[StreamKey, list[Batch]]
"""What is to be placed, each stream's in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAheadConfig:
    """What may wait to be placed."""

    seconds: float = WAIT_SECONDS
    """How long, where nobody reads."""
    max_bytes: int = 16 << 20
    """So much is placed before more is taken in."""
    max_streams: int = 65_536
    """Streams whose offsets are remembered; all are forgotten, and asked for again, beyond."""


class WriteAheadBuffer:
    """Takes bodies in and places them; the store asks it before it reads. For any thread.

    The order of the locks is: placing, taking in, the store's own turn.
    """

    def __init__(self, store: Store, config: WriteAheadConfig | None = None) -> None:
        self._store = store
        self._config = config or WriteAheadConfig()
        self._placing = threading.RLock()
        self._taking = threading.RLock()
        self._offsets: dict[StreamKey, tuple[BatchHeader, StreamOffset]] = {}
        self._waiting: Waiting = {}
        self._ids: list[int] = []
        self._num_bytes = 0
        self._received_unix_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-arrivals")
        store.flush, store.exclusive, store.note_stored = self.flush, self.exclusive, self._follow
        store.forget_marks = self._forget
        self._take_over()

    def _take_over(self) -> None:
        """Let wait what an earlier process left: its streams go on behind it once there is room."""
        with self._store.read(settled=False) as connection:
            for row in connection.execute(select(arrivals).order_by(arrivals.c.id)):
                _let_wait(self._store, self._waiting, row.body)
                self._ids.append(row.id)
                self._num_bytes += len(row.body)

    def start(self) -> None:
        """Start the thread that places what nobody reads."""
        self._thread.start()

    def close(self) -> None:
        """Place what waits and end the thread; what cannot be placed stays for the next start."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._settle_or_tell()

    # ----------------------------------------------------------------------------- taking in

    def ingest_bodies(
        self, bodies: Sequence[Sequence[bytes]], received_unix_ns: int
    ) -> list[Answer]:
        """Make the batches of all bodies durable; return each body's answer, in order.

        Raises:
            StorageError: the database refused; send all of it again.
        """
        if self._num_bytes >= self._config.max_bytes:
            self.flush()
        raws = [raw for body in bodies for raw in body]
        checked = check_batches(raws)
        if sum(map(len, raws)) >= _LARGE_BYTES * len(raws):
            stored = self._store_at_once(checked, received_unix_ns)
            return answers_of(bodies, stored)
        offsets = self._offsets_of_those_that_wait(checked)
        stored_by_place: dict[int, Stored] = {}
        at_once = [i for i, offset in enumerate(offsets) if offset is None]
        if at_once:
            stored = self._store_at_once([checked[i] for i in at_once], received_unix_ns)
            stored_by_place |= zip(at_once, stored, strict=True)
        later = [
            (i, (raws[i], batch, offset))
            for i, (batch, offset) in enumerate(zip(checked, offsets, strict=True))
            if offset is not None and isinstance(batch, Batch)
        ]
        if later:
            places, batches_to_keep = zip(*later, strict=True)
            stored_by_place |= zip(
                places, self._keep(batches_to_keep, received_unix_ns), strict=True
            )
        return answers_of(bodies, [stored_by_place[i] for i in range(len(raws))])

    def _offsets_of_those_that_wait(self, checked: Sequence[Checked]) -> list[StreamOffset | None]:
        """Return the offset of each batch that may wait; of one stream either all may or none."""
        offsets: list[StreamOffset | None] = []
        at_once: set[StreamKey] = set()
        for batch_or_error in checked:
            header_and_offset = (
                self._offsets.get(key_of(batch_or_error))
                if isinstance(batch_or_error, Batch)
                else None
            )
            if header_and_offset is None or not isinstance(batch_or_error, Batch):
                offsets.append(None)
            elif _is_alike(header_and_offset[0], batch_or_error.header):
                offsets.append(header_and_offset[1])
            else:
                offsets.append(None)
                at_once.add(header_and_offset[1].key)
        if not at_once:
            return offsets
        return [None if offset is None or offset.key in at_once else offset for offset in offsets]

    def _store_at_once(self, checked: Sequence[Checked], received_unix_ns: int) -> list[Stored]:
        """Store what may not wait, after what waits: its streams' offsets must be right."""
        streams = [batch for batch in checked if isinstance(batch, Batch) and not _is_event(batch)]
        with self.exclusive() if streams else nullcontext():
            with self._store.write() as connection:
                stored = store_batches(connection, checked, received_unix_ns)
            for batch_or_error, done in zip(checked, stored, strict=True):
                is_kept = done.error is None and not done.num_forgotten
                if isinstance(batch_or_error, Batch) and is_kept and not _is_event(batch_or_error):
                    self._remember(batch_or_error.header, done)
        announce(self._store, stored)
        return stored

    def _remember(self, header: BatchHeader, done: Stored) -> None:
        if len(self._offsets) >= self._config.max_streams:
            self._offsets.clear()
        identity = header.identity
        key = identity.run_id, identity.incarnation, header.stream
        last, promised = done.reply.durable_seq, done.expected_seq
        self._offsets[key] = header, StreamOffset(key, identity.source, last, expected_seq=promised)

    def _keep(
        self, batches_to_keep: Sequence[tuple[bytes, Batch, StreamOffset]], received_unix_ns: int
    ) -> list[Stored]:
        """Write down what is new, as it came; from then on it is in memory and on disk."""
        # One at a time: offsets move before the commit, and the next group is cut by them.
        with self._taking:
            try:
                stored = [cut_off_known(batch, offset) for _, batch, offset in batches_to_keep]
                new = [
                    raw
                    for (raw, _, _), outcome in zip(batches_to_keep, stored, strict=True)
                    if outcome.batch
                ]
                if new:
                    body = b"".join(new)
                    with self._store.write() as connection:
                        # Past SQLAlchemy: its INSERT costs more than this row does.
                        done = connection.exec_driver_sql(_KEEP, (body,))
                    self._ids.append(done.lastrowid)
                    self._num_bytes += len(body)
                    self._received_unix_ns = received_unix_ns
            except BaseException:
                self._offsets.clear()  # the offsets were moved: they are read again
                raise
            for (_, _, offset), outcome in zip(batches_to_keep, stored, strict=True):
                if outcome.batch is not None:
                    self._waiting.setdefault(offset.key, []).append(outcome.batch)
        announce(self._store, stored)
        return stored

    def _follow(self, new: Sequence[Batch]) -> None:
        """Follow what was stored past us, from a folder, while ``exclusive`` keeps the rest out.

        An offset that stays behind would have what comes again counted, and told to hooks, again.
        """
        with self._taking:
            for batch in new:
                header_and_offset = self._offsets.get(key_of(batch))
                if header_and_offset is not None:
                    header_and_offset[1].last_seq = max(
                        header_and_offset[1].last_seq, batch.header.last_seq
                    )

    def _forget(self, keys: Iterable[StreamKey]) -> None:
        """Ask for these offsets again: what was promised of their streams lies beside them now."""
        with self._taking:
            for key in keys:
                self._offsets.pop(key, None)

    # ------------------------------------------------------------------------------- placing

    def flush(self) -> None:
        """Place all that was taken in before this call.

        Raises:
            StorageError: the database refused; it waits on.
        """
        with self._placing:
            with self._taking:
                waiting, ids, num_bytes = self._waiting, self._ids, self._num_bytes
                self._waiting, self._ids, self._num_bytes = {}, [], 0
            if not ids:
                return
            try:
                refused = _place(self._store, waiting, ids, self._received_unix_ns)
            except BaseException:
                with self._taking:
                    for key, batches in self._waiting.items():
                        waiting.setdefault(key, []).extend(batches)
                    self._waiting, self._ids = waiting, ids + self._ids
                    self._num_bytes += num_bytes
                raise
            if refused:
                self._give_up(refused)

    def _give_up(self, refused: Sequence[Batch]) -> None:
        """Count rows no more that were acknowledged and not stored; ask for their offsets again."""
        counters = self._store.counters
        num_rows = sum(batch.header.num_rows for batch in refused)
        with self._taking, counters.lock:
            # What an earlier process acknowledged was not counted in this one.
            counters.num_rows = max(0, counters.num_rows - num_rows)
            for batch in refused:
                self._offsets.pop(key_of(batch), None)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Place all that was taken in, and take nothing in before the context ends."""
        with self._placing, self._taking:
            self.flush()
            yield

    def _run(self) -> None:
        while not self._stop.wait(self._config.seconds):
            self._settle_or_tell()

    def _settle_or_tell(self) -> None:
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001 - what waits is on disk, and is tried again
            self._store.counters.fail("arrivals")
            _LOG.warning("arrivals_not_placed num=%d: %s", len(self._ids), error)


def recover(store: Store) -> None:
    """Place what a collector has taken in and not placed; one that runs is not disturbed by it.

    Raises:
        StorageError: the database refused.
    """
    while True:
        with store.read(settled=False) as connection:
            query = select(arrivals).order_by(arrivals.c.id).limit(_AT_ONCE)
            rows = connection.execute(query).all()
        if not rows:
            return
        waiting: Waiting = {}
        for row in rows:
            _let_wait(store, waiting, row.body)
        _place(store, waiting, [row.id for row in rows], 0)


def _let_wait(store: Store, waiting: Waiting, body: bytes) -> None:
    for batch in _batches_of(body):
        if isinstance(batch, Batch):
            waiting.setdefault(key_of(batch), []).append(batch)
        else:
            _tell_refused(store, batch)


def _batches_of(body: bytes) -> list[Checked]:
    try:
        return check_batches(split_batches(body))
    except FormatError as error:
        return [error]


def join_batches(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield one stream's batches, those that follow on one another as one."""
    first, parts, num_rows, num_bytes = batches[0].header, list[bytes](), 0, 0
    for batch in batches:
        header = batch.header
        is_next = (
            header.first_seq == first.first_seq + num_rows
            and header.clock_offset_ns == first.clock_offset_ns
            and num_bytes + len(batch.rows) <= MAX_BODY_BYTES
            and _is_alike(first, header)
        )
        if parts and not is_next:
            yield _joined(first, parts, num_rows)
            first, parts, num_rows, num_bytes = header, [], 0, 0
        parts.append(batch.rows)
        num_rows += header.num_rows
        num_bytes += len(batch.rows)
    yield _joined(first, parts, num_rows)


def _joined(first: BatchHeader, parts: Sequence[bytes], num_rows: int) -> Batch:
    return Batch(msgspec.structs.replace(first, num_rows=num_rows), b"".join(parts))


def _place(
    store: Store,
    waiting: Mapping[StreamKey, Sequence[Batch]],
    ids: Sequence[int],
    received_unix_ns: int,
) -> list[Batch]:
    """Store the batches, and take away the arrivals that they came in with the last of them.

    Returns:
        Those that were refused, or came of removed runs: they are counted as such.
    """
    refused: list[Batch] = []
    num_forgotten = 0
    batches = [
        batch for stream_batches in waiting.values() for batch in join_batches(stream_batches)
    ]
    for first in range(0, len(batches), _AT_ONCE):
        if first:
            time.sleep(_PAUSE_SECONDS)
        is_last = first + _AT_ONCE >= len(batches)
        joined = batches[first : first + _AT_ONCE]
        with store.write() as connection:
            stored = _store_or_part(connection, joined, waiting, received_unix_ns)
            if is_last:
                _take_away(connection, ids)
        for batch, outcome in stored:
            if outcome.error is not None:
                _tell_refused(store, outcome.error)
            if outcome.error is not None or outcome.num_forgotten:
                refused.append(batch)
                num_forgotten += outcome.num_forgotten
    if not batches:
        with store.write() as connection:
            _take_away(connection, ids)
    with store.counters.lock:
        store.counters.num_forgotten += num_forgotten
    return refused


def _store_or_part(
    connection: Connection,
    joined: Sequence[Batch],
    waiting: Mapping[StreamKey, Sequence[Batch]],
    received_unix_ns: int,
) -> list[tuple[Batch, Stored]]:
    """Store what was joined; where that is refused, as it came: one refused batch stays alone."""
    with connection.begin_nested() as attempt:
        stored = store_batches(connection, joined, received_unix_ns)
        if all(outcome.error is None for outcome in stored):
            return list(zip(joined, stored, strict=True))
        attempt.rollback()
    parts = [batch for key in dict.fromkeys(map(key_of, joined)) for batch in waiting[key]]
    return list(zip(parts, store_batches(connection, parts, received_unix_ns), strict=True))


def _tell_refused(store: Store, error: FormatError) -> None:
    store.counters.reject(error.code)
    _LOG.error("acknowledged_rows_refused: %s", error)


def _take_away(connection: Connection, ids: Sequence[int]) -> None:
    connection.execute(delete(arrivals).where(arrivals.c.id.in_(ids)))


def _is_alike(a: BatchHeader, b: BatchHeader) -> bool:
    """Return whether a stream's batches are of the same source, and have the same columns."""
    # Mostly they are the same objects: a header that was read once is remembered.
    return (a.stream_schema is b.stream_schema or a.stream_schema == b.stream_schema) and (
        a.identity is b.identity or a.identity == b.identity
    )


def _is_event(batch: Batch) -> bool:
    return batch.header.stream_schema.stream == "events"


_KEEP = "INSERT INTO arrivals (body) VALUES (?)"

__all__ = ["WAIT_SECONDS", "WriteAheadBuffer", "WriteAheadConfig", "join_batches", "recover"]
