"""Returns a run's new rows: from memory if they were just committed, otherwise from the store.

Committed rows are held in bounded memory until the next poll, so that it need not read the store.
The store remains authoritative: rows that do not fit are dropped, and read there; a writer's rows
are numbered, so a reader notices the gap.

Rows of many writers come as one block, because the cost is mostly per call. Each writer's rows come
once and in order.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, select

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity
from trainvitals.rows import Column, Schema, rows_of
from trainvitals.wire import Batch
from vitals_collector.live.step_join import BEFORE_ALL, Key, RowWriters, Writer
from vitals_collector.numbers.interface import Columns, NumberStoreReader, RowSpan
from vitals_collector.storage.schema import names, sources, streams

_BATCH_BYTES = 512
"""Memory of a batch in addition to its rows."""


class CommittedRows(NamedTuple):
    """Rows of a run that were committed since the last call, in this order."""

    batches: tuple[Batch, ...]
    has_more: bool
    """More was stored than this."""


class _BufferedRows(msgspec.Struct):
    """Committed batches of a run that the fleet detectors have not processed."""

    batches: deque[Batch] = msgspec.field(default_factory=deque)
    num_bytes: int = 0
    has_more: bool = False


class RecentRows:
    """The latest rows of each run, in bounded memory. Thread-safe.

    The oldest rows of the run with most rows are dropped, and counted.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self.num_dropped = 0
        self._most = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._runs: dict[str, _BufferedRows] = {}

    def add(self, batches: Iterable[Batch]) -> None:
        """Add batches that were just committed, for the fleet detectors to process."""
        with self._lock:
            for batch in batches:
                run_id = batch.header.identity.run_id
                buffered = self._runs.get(run_id)
                if buffered is None:
                    buffered = self._runs[run_id] = _BufferedRows()
                buffered.batches.append(batch)
                size = len(batch.rows) + _BATCH_BYTES
                buffered.num_bytes += size
                self._num_bytes += size
            while self._num_bytes > self._most:
                self._drop_oldest_batch(
                    max(self._runs.values(), key=lambda buffered: buffered.num_bytes)
                )

    def note(self, run_id: str) -> None:
        """Record that the detectors have to read rows of the run that were not given to ``add``."""
        with self._lock:
            self._runs.setdefault(run_id, _BufferedRows()).has_more = True

    def waiting(self) -> list[str]:
        """Return the runs with rows that the detectors have not processed, oldest first."""
        with self._lock:
            return list(self._runs)

    def pop(self, run_id: str) -> CommittedRows:
        """Return and drop the new rows of a run, which the detectors process now."""
        with self._lock:
            buffered = self._runs.pop(run_id, None)
            if buffered is None:
                return CommittedRows((), False)
            self._num_bytes -= buffered.num_bytes
            return CommittedRows(tuple(buffered.batches), buffered.has_more)

    def _drop_oldest_batch(self, buffered: _BufferedRows) -> None:
        """Drop a run's oldest new batch from memory; the detectors read it from the store."""
        batch = buffered.batches.popleft()
        size = len(batch.rows) + _BATCH_BYTES
        buffered.num_bytes -= size
        self._num_bytes -= size
        buffered.has_more = True
        self.num_dropped += batch.header.num_rows


# --------------------------------------------------------------------------------------- of one run

STEPS = ("steps", "layers")
HOSTS = ("node", "gpu")
WATCHED = frozenset((*STEPS, *HOSTS))
"""The streams whose rows are returned."""
_WRITERS_AT_ONCE = 500
_LEAST_WINDOW = 128
"""Rows of a writer that are read at once: a stored page may hold hundreds."""


class StreamProgress(msgspec.Struct, eq=False):
    """One writer's stream, its read position, and the last number known to be stored."""

    writer: Writer
    source: str
    node: str
    rank: int
    world_size: int
    started_unix_ns: int
    number: int
    """Number by which rows refer to it."""
    read_seq: int
    last_seq: int = -1
    position: Key = BEFORE_ALL
    """For steps and layers the key, for hosts the monotonic time, up to which the store was
    read."""


class RowBlock(NamedTuple):
    """Rows of one schema, of one or several streams one after the other."""

    streams: Sequence[StreamProgress]
    counts: Sequence[int]
    schema: Schema
    rows: npt.NDArray[np.void]

    @property
    def origin(self) -> RowWriters:
        """Return the writer of each new row in the block."""
        of = [(s.rank, s.world_size, s.number) for s in self.streams]
        rank, world_size, writer = np.repeat(np.array(of, dtype=np.int64), self.counts, axis=0).T
        return RowWriters(rank, world_size.copy(), writer)

    def by_stream(self) -> Iterator[tuple[StreamProgress, npt.NDArray[np.void]]]:
        """Yield the new rows of each stream in the block."""
        first = 0
        for stream, num in zip(self.streams, self.counts, strict=True):
            yield stream, self.rows[first : first + num]
            first += num


class _OpenBlock(msgspec.Struct):
    schema: Schema
    streams: list[StreamProgress] = []
    counts: list[int] = []
    raws: list[bytes] = []


class _RowBlockBuilder:
    """Puts rows of the same schema together; one stream's stay in their order."""

    def __init__(self) -> None:
        self._closed: list[RowBlock] = []
        self._open: dict[int, _OpenBlock] = {}
        self._schema_of: dict[int, int] = {}

    def add(self, stream: StreamProgress, schema: Schema, raw: bytes, num_rows: int) -> None:
        """Add new rows of a stream to the block of their schema."""
        which = id(schema)
        if self._schema_of.setdefault(stream.number, which) != which:
            self._close_open_blocks()
            self._schema_of[stream.number] = which
        open_block = self._open.get(which)
        if open_block is None:
            open_block = self._open[which] = _OpenBlock(schema)
        open_block.streams.append(stream)
        open_block.counts.append(num_rows)
        open_block.raws.append(raw)

    def all(self) -> list[RowBlock]:
        """Return all blocks of new rows, for the fleet detectors."""
        self._close_open_blocks()
        return self._closed

    def _close_open_blocks(self) -> None:
        """Convert the collected new rows to blocks, one for each schema."""
        self._closed += [
            RowBlock(
                open_block.streams,
                open_block.counts,
                open_block.schema,
                rows_of(open_block.schema, b"".join(open_block.raws)),
            )
            for open_block in self._open.values()
        ]
        self._open.clear()
        self._schema_of.clear()


class TailReader:
    """Read position in a run's streams, and the rows to read next.

    ``done`` has by ``incarnation/stream`` the sequence number up to which nothing need be read;
    ``number_of`` returns the number by which rows refer to a writer.
    """

    def __init__(
        self, run_id: str, done: Mapping[str, int], number_of: Callable[[Writer], int]
    ) -> None:
        self.names: dict[str, dict[int, str]] = {}
        """By incarnation, the names of its layers by number."""
        self.gpus: dict[int, str] = {}
        """By rank, the UUID of the GPU of its latest start."""
        self._placed: dict[int, int] = {}
        self._run_id = run_id
        self._done = done
        self._number_of = number_of
        self._streams: dict[Writer, StreamProgress] = {}
        self._behind: dict[Writer, StreamProgress] = {}
        self._nameless: dict[Writer, StreamProgress] = {}
        self._schemas: dict[tuple[Column, ...], Schema] = {}
        self._head: tuple[int, int] = (-1, 0)
        self._largest = 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the latest start of rank 0, as far as known."""
        return self._head[1] or self._largest

    def behind(self, kinds: Sequence[str]) -> list[StreamProgress]:
        """Return the streams with stored rows that the fleet detectors have not read."""
        return [stream for stream in self._behind.values() if stream.writer[1] in kinds]

    @property
    def is_read(self) -> bool:
        """Return whether the fleet detectors got all rows known to be stored."""
        return not self._behind

    # --------------------------------------------------------------------------------- from memory

    def add_committed(self, committed: Iterable[Batch], *, is_full: bool = False) -> list[RowBlock]:
        """Return rows that were just committed, in the form that the detectors read.

        If rows before them were not returned, both are left to the store; if ``is_full``, all are.
        """
        blocks, stream_of = _RowBlockBuilder(), self._streams
        for batch in committed:
            header = batch.header
            kind, incarnation = header.stream_schema.stream, header.identity.incarnation
            stream = stream_of.get((incarnation, kind))
            if stream is None:
                if kind not in WATCHED:
                    continue
                stream = self._add_stream((incarnation, kind), header.identity)
            last = header.first_seq + header.num_rows - 1
            if last <= stream.read_seq:
                continue
            is_next = header.first_seq == stream.read_seq + 1
            if not is_next or is_full or (kind == "layers" and not self.names.get(incarnation)):
                self._note_stored_rows(stream, last)
                continue
            stream.read_seq = last
            blocks.add(stream, header.stream_schema, batch.rows, header.num_rows)
            if self._behind and last >= stream.last_seq:
                self._behind.pop(stream.writer, None)
        return blocks.all()

    def _add_stream(
        self, writer: Writer, about: "Identity | Row[*tuple[Any, ...]]"
    ) -> StreamProgress:
        """Start to follow a writer's new rows, after those that detectors have processed.

        ``about`` is the identity of the writer, or its row in ``sources``.
        """
        rank, world_size, started = about.rank, about.world_size, about.started_unix_ns
        done = self._done.get("/".join(writer), -1)
        number = self._number_of(writer)
        stream = StreamProgress(
            writer, about.source, about.node, rank, world_size, started, number, done
        )
        self._streams[writer] = stream
        self._largest = max(self._largest, world_size)
        if about.gpu_uuid and writer[1] == "steps" and started >= self._placed.get(rank, 0):
            self.gpus[rank], self._placed[rank] = about.gpu_uuid, started
        if about.source == "rank:0" and writer[1] == "steps" and started >= self._head[0]:
            self._head = (started, world_size)
        return stream

    def _note_stored_rows(self, stream: StreamProgress, last_seq: int) -> None:
        """Record up to which row a writer's stream is stored, and can be read by detectors."""
        stream.last_seq = max(last_seq, stream.last_seq)
        if stream.last_seq > stream.read_seq:
            self._behind[stream.writer] = stream

    # ------------------------------------------------------------------------------ from the store

    def find_streams(self, connection: Connection) -> None:
        """Find the writers of a followed run, and the last stored row of each."""
        at = (streams.c.run_id == sources.c.run_id) & (
            streams.c.incarnation == sources.c.incarnation
        )
        table = sources.c
        query = (
            select(
                streams.c.incarnation,
                streams.c.stream,
                streams.c.last_seq,
                *(table.source, table.node, table.rank, table.world_size, table.started_unix_ns),
                table.gpu_uuid,
            )
            .join(sources, at)
            .where(streams.c.run_id == self._run_id, streams.c.stream.in_(sorted(WATCHED)))
            .order_by(table.started_unix_ns)
        )
        for row in connection.execute(query):
            writer = (row.incarnation, row.stream)
            stream = self._streams.get(writer) or self._add_stream(writer, row)
            if writer not in self._nameless:
                self._note_stored_rows(stream, row.last_seq)

    def read_stored(
        self, connection: Connection, numbers: NumberStoreReader, kinds: Sequence[str], budget: int
    ) -> list[RowBlock]:
        """Read more rows for the detectors from the store, of the writers furthest behind.

        About ``budget`` rows; none if there are none.
        """
        self._load_layer_names(connection)
        blocks = _RowBlockBuilder()
        while front := self._streams_furthest_behind(kinds):
            for kind in kinds:
                kind_streams = [stream for stream in front if stream.writer[1] == kind]
                if kind_streams:
                    window = budget // len(front)
                    schema = self._schema(numbers, kind)
                    self._read_kind(numbers, schema, kind_streams, window, blocks)
            for stream in front:
                if stream.read_seq >= stream.last_seq:
                    self._behind.pop(stream.writer, None)
            if blocks_read := blocks.all():
                return blocks_read
        return []

    def _streams_furthest_behind(self, kinds: Sequence[str]) -> list[StreamProgress]:
        """Return the writers for whose rows steps wait most: the furthest behind, and near ones."""
        behind = self.behind(kinds)
        if behind and behind[0].writer[1] in STEPS:
            attempt, step = min(stream.position for stream in behind)
            near = (attempt, step + _LEAST_WINDOW)
            behind = [stream for stream in behind if stream.position < near]
        return behind[:_WRITERS_AT_ONCE]

    def _schema(self, numbers: NumberStoreReader, kind: str) -> Schema:
        """Return the schema of rows that the fleet detectors read: no text columns."""
        kinds = {c.name: c.kind for c in ROW_COLUMNS} | numbers.kinds(self._run_id, kind)
        columns = tuple(Column(name, kinds[name]) for name in kinds if kinds[name] != "S")
        return self._schemas.setdefault(columns, Schema(kind, columns))

    def _read_kind(
        self,
        numbers: NumberStoreReader,
        schema: Schema,
        kind_streams: Sequence[StreamProgress],
        window: int,
        blocks: _RowBlockBuilder,
    ) -> None:
        """Read about ``window`` new rows of each stream; those at one position together."""
        unread_streams = sorted(kind_streams, key=lambda stream: stream.read_seq)
        while unread_streams:
            until = unread_streams[0].read_seq + max(_LEAST_WINDOW, window)
            alike = [stream for stream in unread_streams if stream.read_seq < until]
            unread_streams = unread_streams[len(alike) :]
            self._read_window(numbers, schema, alike, until, blocks)

    def _read_window(
        self,
        numbers: NumberStoreReader,
        schema: Schema,
        alike: Sequence[StreamProgress],
        until: int,
        blocks: _RowBlockBuilder,
    ) -> None:
        """Read new rows of some streams of one kind, up to the number ``until``."""
        seqs = {stream.writer[0]: (stream.read_seq + 1, until + 1) for stream in alike}
        span = RowSpan(self._run_id, schema.stream, seqs=seqs)
        columns = numbers.scan(span, [*schema.index, "seq", "incarnation"])
        which_of = {stream.writer[0]: i for i, stream in enumerate(alike)}
        incarnations = columns.pop("incarnation").values.tolist()
        writer = np.array([which_of[name] for name in incarnations], dtype=np.int64)
        order = np.lexsort((columns["seq"].values, writer))
        rows = _packed(schema, columns)[order]
        bounds = np.searchsorted(writer[order], np.arange(len(alike) + 1)).tolist()
        for stream, (begin, end) in zip(alike, pairwise(bounds), strict=True):
            if begin < end:
                writer_rows = rows[begin:end]
                stream.read_seq = int(writer_rows["seq"][-1])
                stream.position = max(stream.position, _last_position(schema, writer_rows))
                blocks.add(stream, schema, writer_rows.tobytes(), end - begin)
            elif stream.last_seq > until:
                self._skip_deleted_rows(numbers, schema.stream, stream, until)
            stream.read_seq = max(stream.read_seq, min(until, stream.last_seq))

    def _skip_deleted_rows(
        self, numbers: NumberStoreReader, kind: str, stream: StreamProgress, until: int
    ) -> None:
        """Continue at the next existing row: the rows before it are no longer in the store."""
        seqs = {stream.writer[0]: (until + 1, stream.last_seq + 1)}
        remaining_seqs = numbers.scan(RowSpan(self._run_id, kind, seqs=seqs), ["seq"])["seq"].values
        stream.read_seq = int(remaining_seqs.min()) - 1 if len(remaining_seqs) else stream.last_seq

    def _load_layer_names(self, connection: Connection) -> None:
        """Hold back layers' rows until their names, which come in another stream, arrive."""
        for stream in [*self._nameless.values(), *self.behind(("layers",))]:
            writer = stream.writer
            if not self.names.get(writer[0]):
                query = select(names.c.id, names.c.name).where(
                    names.c.run_id == self._run_id,
                    names.c.incarnation == writer[0],
                    names.c.stream == "layers",
                )
                self.names[writer[0]] = {row.id: row.name for row in connection.execute(query)}
            has, lacks = self._behind, self._nameless
            if not self.names[writer[0]]:
                has, lacks = lacks, has
            lacks.pop(writer, None)
            has[writer] = stream


def _packed(schema: Schema, columns: Columns) -> npt.NDArray[np.void]:
    """Pack stored columns as rows of the schema, like those that arrive in batches."""
    rows = np.zeros(len(columns["seq"].values), schema.dtype)
    rows["seq"] = columns["seq"].values
    for i, name in enumerate(schema.index):
        rows[f"c{i}"] = columns[name].values
        bit = np.uint64(1 << (i % 64))
        rows["validity"][:, i // 64] |= np.where(columns[name].is_missing, np.uint64(0), bit)
    return rows


def _last_position(schema: Schema, rows: npt.NDArray[np.void]) -> Key:
    def last(name: str) -> int:
        return int(rows[f"c{schema.index[name]}"][-1])

    if schema.stream in HOSTS:
        return last("monotonic_ns"), 0
    return last("attempt"), last("step")
