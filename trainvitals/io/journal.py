"""Output of a rank: rows in bounded segments in shared memory, one small copy per step.

    <private base>/<run_id>/run.json
    <private base>/<run_id>/<source>-<incarnation>/<stream>-<NNNNNN>.seg, closed

Every failure during training is counted in ``dropped`` and never raised. The latest rows win: at
the bound the oldest sealed segment is deleted, samples before events, which may use half the bound.
"""

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainvitals.errors import StorageError, UsageError
from trainvitals.identity import Identity
from trainvitals.io.discovery import (
    JournalRef,
    announce_run,
    check_room,
    find_journals,
    journal_directory,
    mark_journal_closed,
)
from trainvitals.io.journal_reader import JournalReader
from trainvitals.io.private import ensure_private_dir, is_memory_backed
from trainvitals.io.segments import (
    MappedSegment,
    PlainSegment,
    SegmentFile,
    SegmentHeader,
    encode_header,
    segment_name,
)
from trainvitals.records import EVENT_SCHEMA, Event, encode_event
from trainvitals.rows import STREAMS, Schema, Value

__all__ = [
    "JournalReader",
    "JournalRef",
    "JournalWriter",
    "StreamWriter",
    "announce_run",
    "check_room",
    "find_journals",
    "journal_directory",
    "mark_journal_closed",
]

_PAGE = 4096
_MAX_QUEUED_ROWS = 2048
_CLOSE_SECONDS = 2.0
_RETRY_ROWS = 64
_MIN_ROWS = 8


class JournalWriter:
    """All streams of one writer. Thread-safe; closed in a forked child; cannot be pickled.

    Args:
        directory: created if missing (0700); must contain no journal.
        identity: stored in each segment's header.
        max_bytes: bound over all streams.
        segment_bytes: size of a segment, less if the bound is small.
        max_share: bound as a share of the free memory, which DataLoader workers need too.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        *,
        max_bytes: int = 1 << 20,
        segment_bytes: int = 1 << 16,
        max_share: float = 0.05,
    ) -> None:
        self.directory = ensure_private_dir(directory)
        self.identity = identity.check()
        if any(directory.iterdir()):
            raise StorageError(
                f"{directory} already holds a journal; each start needs a folder of its own"
            )
        self.in_memory = is_memory_backed(directory)
        self.max_bytes = max_bytes
        self.segment_bytes = segment_bytes
        self.max_share = max_share
        self.last_error: OSError | None = None
        self._streams: dict[str, StreamWriter] = {}
        self._segments: list[tuple[str, Path, int]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self._flusher = None if self.in_memory else _Flusher(self._streams)

    @property
    def closed(self) -> bool:
        """Return whether the journal is closed for writing; always so in a forked child."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def dropped(self) -> int:
        """Return how many rows could not be written to the journal, over all streams."""
        return sum(stream.dropped for stream in self._streams.values())

    def open_stream(self, schema: Schema) -> "StreamWriter":
        """Return the journal's writer of ``schema.stream``; other columns start a new file."""
        schema.check()
        with self._lock:
            stream = self._streams.get(schema.stream)
            if stream is None:
                stream = self._streams[schema.stream] = StreamWriter(self, schema, self._lock)
            else:
                stream._change_schema(schema)
            return stream

    def close(self) -> None:
        """Write queued rows and the closed marker, and unmap. A forked child does nothing."""
        if self.closed:
            return
        with self._lock:
            self._is_closed = True
            for stream in self._streams.values():
                stream._map = None
        if self._flusher is not None and not self._flusher.stop():
            return  # the disk blocks; its thread still holds the files
        for stream in self._streams.values():
            stream._close_segment()
        try:
            mark_journal_closed(
                self.directory, {s.schema.stream: s.next_seq for s in self._streams.values()}
            )
        except OSError as error:
            self.last_error = error

    def __reduce__(self) -> str:
        raise UsageError(
            "a journal cannot be pickled: it belongs to one process",
            hint="do not pass the monitor to DataLoader workers",
        )

    def _new_segment(
        self, schema: Schema, first_seq: int, index: int, num_rows: int
    ) -> "_OpenSegment":
        """Create a segment file with room for ``num_rows`` rows at least. May raise OSError."""
        header = encode_header(
            SegmentHeader(
                identity=self.identity, stream_schema=schema, first_seq=first_seq, index=index
            )
        )
        bound = self._current_max_bytes()
        needed = len(header) + num_rows * schema.row_size
        preferred_bytes = max(self.segment_bytes, len(header) + _MIN_ROWS * schema.row_size)
        # Room for two segments of each stream, so that a sealed one can always be deleted.
        share = bound // (2 * len(STREAMS)) // _PAGE * _PAGE
        size = -(-max(needed, min(preferred_bytes, share)) // _PAGE) * _PAGE
        self._delete_old_segments(size, bound)
        path = self.directory / segment_name(schema.stream, index)
        kind = MappedSegment if self.in_memory else PlainSegment
        file: SegmentFile = kind(path, header, size)
        self._segments.append((schema.stream, path, size))
        return _OpenSegment(file, schema, len(header), first_seq)

    def _current_max_bytes(self) -> int:
        """Return the current bound of the journal's files: free memory changes during training."""
        if not self.in_memory:
            return self.max_bytes
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize + self._used_bytes()
        return min(self.max_bytes, int(free * self.max_share))

    def _delete_old_segments(self, size: int, bound: int) -> None:
        """Delete the journal's oldest segments until a new one fits."""
        if size > bound // 2:
            text = f"{size} bytes are too much for a journal of {bound}, its share of what is free"
            raise OSError(errno.ENOSPC, text, str(self.directory))
        if self._used_bytes() + size > bound:  # the reader may have freed some
            self._segments = [entry for entry in self._segments if entry[1].exists()]
        while self._used_bytes() + size > bound:
            victim = self._find_deletable_segment(bound)
            if victim is None:
                raise OSError(errno.ENOSPC, f"the journal's bound of {bound} bytes is reached")
            victim[1].unlink(missing_ok=True)
            self._segments.remove(victim)

    def _used_bytes(self) -> int:
        """Return the bytes of the journal's segment files."""
        return sum(size for _, _, size in self._segments)

    def _find_deletable_segment(self, bound: int) -> tuple[str, Path, int] | None:
        """Return the oldest sealed segment file: of samples, unless events use too much."""
        events = EVENT_SCHEMA.stream
        active = {stream._segment_path for stream in self._streams.values()}
        sealed = [entry for entry in self._segments if entry[1] not in active]
        event_bytes = sum(size for name, _, size in self._segments if name == events)
        if event_bytes <= bound // 2:
            sealed = [entry for entry in sealed if entry[0] != events] or sealed
        else:
            sealed = [entry for entry in sealed if entry[0] == events] or sealed
        return sealed[0] if sealed else None


class _OpenSegment:
    """A segment file with the offset of its rows."""

    def __init__(self, file: SegmentFile, schema: Schema, offset: int, first_seq: int) -> None:
        self.file = file
        self.schema = schema
        self.offset = offset
        self.first_seq = first_seq
        self.end_seq = first_seq + (file.num_bytes - offset) // schema.row_size


class StreamWriter:
    """One stream of a journal; created by ``JournalWriter.open_stream``."""

    def __init__(self, journal: JournalWriter, schema: Schema, lock: threading.Lock) -> None:
        self.schema = schema
        self.dropped = 0
        self.next_seq = 0
        self.journal = journal
        self._lock = lock
        self._pid = os.getpid()
        self._slots: _OpenSegment | None = None
        # Used for each row while the mapped segment has space.
        self._pack = schema.pack
        self._map: mmap.mmap | None = None
        self._room_until = 0
        self._row_zero = 0
        self._index = 0
        self._retry_at = 0
        self._queue: deque[tuple[Schema, int, int, bytes]] = deque()
        self._num_queued = 0

    def append(self, values: Sequence[Value]) -> int:
        """Append one row to the journal; return its sequence number, or -1 if it is closed.

        Never raises for want of memory: the row is counted in ``dropped``, its number is used up.
        """
        if os.getpid() != self._pid:
            return -1
        with self._lock:
            seq = self.next_seq
            row = self._pack(seq, values)
            if self._map is None or seq >= self._room_until:
                return self._append_rows(1, row)
            self.next_seq = seq + 1
            offset = self._row_zero + seq * len(row)
            self._map[offset : offset + len(row)] = row
            return seq

    def append_event(
        self, event: Event, *, step: int, attempt: int, time_unix_ns: int, monotonic_ns: int
    ) -> int:
        """Append an event to the journal, in full or not at all; return its last row's number."""
        if os.getpid() != self._pid:
            return -1
        rows = encode_event(
            event, step=step, attempt=attempt, time_unix_ns=time_unix_ns, monotonic_ns=monotonic_ns
        )
        with self._lock:
            packed = [self._pack(self.next_seq + i, row) for i, row in enumerate(rows)]
            return self._append_rows(len(packed), b"".join(packed))

    def __reduce__(self) -> str:
        return self.journal.__reduce__()

    def _append_rows(self, num_rows: int, raw: bytes) -> int:
        """Write packed rows to the journal, or queue them if it is on a disk."""
        journal, seq = self.journal, self.next_seq
        if journal._is_closed:
            self.dropped += num_rows
            return -1
        self.next_seq = seq + num_rows
        if journal._flusher is None:
            self._write_rows(self.schema, seq, num_rows, raw)
        else:
            self._enqueue(seq, num_rows, raw)
        return seq + num_rows - 1

    def _write_rows(self, schema: Schema, seq: int, num_rows: int, raw: bytes) -> None:
        """Write packed rows to the journal's segment file; count them as dropped if it fails."""
        slots = self._slots
        try:
            if slots is None or seq + num_rows > slots.end_seq or slots.schema is not schema:
                slots = self._start_segment(schema, seq, num_rows)
                if slots is None:
                    self.dropped += num_rows
                    return
            slots.file.write(slots.offset + (seq - slots.first_seq) * schema.row_size, raw)
        except OSError as error:
            self.journal.last_error = error
            self.dropped += num_rows

    def _start_segment(self, schema: Schema, seq: int, num_rows: int) -> _OpenSegment | None:
        """Start a new segment file of the journal; None if one was refused a few rows ago."""
        self._close_segment()
        if seq < self._retry_at:
            return None
        self._retry_at = seq + _RETRY_ROWS
        slots = self.journal._new_segment(schema, seq, self._index, num_rows)
        self._retry_at = 0
        self._index += 1
        self._slots = slots
        if isinstance(slots.file, MappedSegment):
            self._map, self._room_until = slots.file.map, slots.end_seq
            self._row_zero = slots.offset - slots.first_seq * schema.row_size
        return slots

    def _enqueue(self, seq: int, num_rows: int, raw: bytes) -> None:
        """Queue packed rows for the thread that writes the journal; if full, drop the oldest."""
        flusher = self.journal._flusher
        assert flusher is not None
        self._queue.append((self.schema, seq, num_rows, raw))
        self._num_queued += num_rows
        while self._num_queued > _MAX_QUEUED_ROWS and len(self._queue) > 1:
            segment = self._queue.popleft()[2]
            self._num_queued -= segment
            self.dropped += segment
        flusher.wake()

    def _flush(self) -> None:
        """Write queued rows to the journal's files; only the writing thread calls this."""
        with self._lock:
            taken = list(self._queue)
            self._queue.clear()
            self._num_queued = 0
        for schema, seq, num_rows, raw in taken:
            self._write_rows(schema, seq, num_rows, raw)

    def _drop_queue(self) -> None:
        """Drop the rows that wait for the journal's writing thread, and count them as dropped."""
        with self._lock:
            self.dropped += self._num_queued
            self._queue.clear()
            self._num_queued = 0

    def _change_schema(self, schema: Schema) -> None:
        """Pack the journal's next rows with new columns; they start a segment."""
        if schema != self.schema:
            self.schema, self._pack, self._map = schema, schema.pack, None

    @property
    def _segment_path(self) -> Path | None:
        """Return the path of the journal's current segment file, or None."""
        return self._slots.file.path if self._slots is not None else None

    def _close_segment(self) -> None:
        """Close the journal's current segment file, if there is one."""
        self._map = None
        if self._slots is not None:
            self._slots.file.close()
            self._slots = None


class _Flusher:
    """The writing thread of a journal on disk."""

    def __init__(self, streams: Mapping[str, StreamWriter]) -> None:
        self._streams = streams
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="vitals-journal", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread that writes queued journal rows."""
        self._wake.set()

    def stop(self) -> bool:
        """Write the journal's queued rows and stop; drop and count them if the disk blocks."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            for stream in self._streams.values():
                stream._drop_queue()
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Write queued journal rows until stopped: the thread's function."""
        while True:
            self._wake.wait()
            self._wake.clear()
            last = self._stopping
            for stream in list(self._streams.values()):
                stream._flush()
            if last:
                return
