"""Reads a journal during writes, and after its writer died at any point."""

import contextlib
import os
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, NewerVersionError
from trainvitals.identity import Identity
from trainvitals.io.segments import (
    CLOSED,
    ClosedMarker,
    SegmentHeader,
    find_valid_rows,
    list_names,
    read_bytes,
    read_header,
    sort_segments,
)
from trainvitals.records import EVENT_SCHEMA
from trainvitals.rows import Schema
from trainvitals.wire import MAX_BODY_BYTES, Batch, BatchHeader

_Known = tuple[SegmentHeader, int]
_Listing = dict[str, list[tuple[int, Path]]]


class JournalReader:
    """Tails the journal in one directory; its only reader deletes released segments.

    ``dropped`` counts rows that will never be read: overwritten before that, never
    written for want of memory, or damaged. ``unreadable_segments`` names segments that cannot be
    read at all.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dropped = 0
        self.unreadable_segments: set[Path] = set()
        self._closed_path = str(directory / CLOSED)
        self._known: dict[Path, _Known] = {}
        self._names: list[str] = []
        self._listing: _Listing = {}
        self._next: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._identity: Identity | None = None
        self._unsaid: NewerVersionError | None = None

    @property
    def identity(self) -> Identity | None:
        """Return the writer named in the journal's files; None until the first segment exists."""
        if self._identity is None:
            closed = self._is_closed()
            self._read_headers(self._list_segments(), closed=closed)
        return self._identity

    def resume_after(self, positions: dict[str, int]) -> None:
        """Continue in the journal after these sequence numbers; call before the first ``read``."""
        self._next.update({stream: seq + 1 for stream, seq in positions.items()})

    def read(self, *, max_rows: int = 1024) -> list[Batch]:
        """Read new rows from the journal's files, at most ``max_rows`` per stream.

        Raises:
            NewerVersionError: a segment has a later format; raised once, the next call continues
                with the others.
        """
        closed = self._is_closed()  # before the listing, so that all sealed segments are in it
        listing = self._list_segments()
        self._read_headers(listing, closed=closed)
        if self._unsaid is not None:
            error, self._unsaid = self._unsaid, None
            raise error
        batches: list[Batch] = []
        for _, segments in sorted(listing.items()):
            batches += self._read_stream(segments, max_rows)
        return batches

    def take_end(self) -> bool:
        """Return whether the journal is closed, or its writer dead, and all its files were read.

        Written rows that no longer exist are counted in ``dropped``, once.
        """
        if not self._is_closed():
            return False
        marker = self._read_closed_marker()
        listing = self._list_segments()
        self._read_headers(listing, closed=True)
        for segments in listing.values():
            if any(self._has_unread_rows(path) for _, path in segments):
                return False
        for stream, end in marker.next_seq.items():
            self.dropped += max(0, end - self._next.get(stream, 0))
            self._next[stream] = max(end, self._next.get(stream, 0))
        return True

    def release(self, stream: str, seq: int) -> None:
        """Delete the stream's sealed segment files whose rows are all at or below ``seq``."""
        closed = self._is_closed()
        if not closed and len(self._listing.get(stream, ())) == 1:
            return  # it is the one that is written to
        segments = self._list_segments().get(stream, [])
        self._read_headers({stream: segments}, closed=closed)
        for i, (_, path) in enumerate(segments):
            later = self._known.get(segments[i + 1][1]) if i + 1 < len(segments) else None
            if later is not None:
                done = later[0].first_seq - 1 <= seq
            else:
                done = closed and i + 1 == len(segments) and self._next.get(stream, 0) - 1 <= seq
                done = done and not self._has_unread_rows(path)
            if not done:
                return
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all files of the journal; call when it is finished and released."""
        with contextlib.suppress(FileNotFoundError):
            for path in list(self.directory.iterdir()):
                path.unlink(missing_ok=True)
            self.directory.rmdir()

    def _list_segments(self) -> _Listing:
        """Return the journal's segment files; drop the state of deleted ones."""
        names = list_names(self.directory)
        if names != self._names:
            self._names, self._listing = names, sort_segments(self.directory, names)
            there = {path for segments in self._listing.values() for _, path in segments}
            self._known = {path: segment for path, segment in self._known.items() if path in there}
            self.unreadable_segments &= there
        return self._listing

    def _is_closed(self) -> bool:
        """Return whether the journal's directory has the closed marker."""
        return os.path.exists(self._closed_path)  # noqa: PTH110 - a reader asks often

    def _read_closed_marker(self) -> ClosedMarker:
        """Read the writer's closed marker from its file. An empty one counts."""
        try:
            raw = read_bytes(self.directory / CLOSED, 0, 65_536)
            return msgspec.json.decode(raw, type=ClosedMarker)
        except (FileNotFoundError, *UNREADABLE):
            return ClosedMarker()

    def _read_headers(self, listing: _Listing, *, closed: bool) -> None:
        """Read the headers of new segment files, and note those that cannot be read."""
        for segments in listing.values():
            for i, (_, path) in enumerate(segments):
                if path in self._known or path in self.unreadable_segments:
                    continue
                try:
                    self._known[path] = read_header(path)
                    self._identity = self._known[path][0].identity
                except FileNotFoundError:
                    continue  # deleted by the writer in the meantime
                except NewerVersionError as error:
                    self.unreadable_segments.add(path)
                    self._unsaid = error
                except FormatError:
                    if closed or i + 1 < len(segments):
                        self.unreadable_segments.add(path)

    def _read_stream(self, segments: list[tuple[int, Path]], max_rows: int) -> list[Batch]:
        """Read new rows of one stream from its segment files, oldest first."""
        batches: list[Batch] = []
        for _, path in segments:
            max_left = max_rows - sum(b.header.num_rows for b in batches)
            if max_left <= 0 or path not in self._known:
                continue
            try:
                batches += self._read_segment(path, max_left)
            except FileNotFoundError:
                continue  # deleted by the writer; the next row's number shows how many were lost
        return batches

    def _read_segment(self, path: Path, max_rows: int) -> list[Batch]:
        """Return the unread rows of a segment file as batches."""
        header, base, raw = self._new_rows(path)
        schema = header.stream_schema
        size = schema.row_size
        runs = list(find_valid_rows(schema, raw, base))
        if len(runs) > 1 or (runs and runs[0][0] > 0):
            # A row that was copied during its write looks damaged; it was complete before a later
            # row was started, so a second read distinguishes the two.
            raw = self._new_rows(path)[2][: len(raw)]
            runs = list(find_valid_rows(schema, raw, base))
        batches: list[Batch] = []
        for begin, end in runs:
            for first, last in _split_rows(schema, raw, begin, end, max_rows):
                batches.append(
                    self._build_batch(header, base + first, raw[first * size : last * size])
                )
                max_rows -= last - first
                if max_rows <= 0:
                    return batches
        return batches

    def _new_rows(self, path: Path) -> tuple[SegmentHeader, int, bytes]:
        """Read a segment file's unread rows: its header, their first number, and their bytes."""
        header, offset = self._known[path]
        schema = header.stream_schema
        base = max(self._next.get(schema.stream, 0), header.first_seq)
        start = offset + (base - header.first_seq) * schema.row_size
        return header, base, read_bytes(path, start, max(0, path.stat().st_size - start))

    def _has_unread_rows(self, path: Path) -> bool:
        """Return whether complete rows of this segment file are still unread."""
        if path not in self._known:
            return False
        try:
            header, base, raw = self._new_rows(path)
        except FileNotFoundError:
            return False
        schema = header.stream_schema
        return any(
            True
            for begin, end in find_valid_rows(schema, raw, base)
            for _ in _split_rows(schema, raw, begin, end, end - begin)
        )

    def _build_batch(self, header: SegmentHeader, first_seq: int, rows: bytes) -> Batch:
        """Return rows read from a segment file as a batch; count those missing before it."""
        stream = header.stream_schema.stream
        num_rows = len(rows) // header.stream_schema.row_size
        gap = max(0, first_seq - self._next.get(stream, 0))
        seen = max(self._seen.get(stream, 0), self._next.get(stream, 0))
        self.dropped += max(0, first_seq - seen)  # read again after a failure, it counts once
        self._seen[stream] = max(seen, first_seq + num_rows)
        self._next[stream] = first_seq + num_rows
        return Batch(
            BatchHeader(
                identity=header.identity,
                stream_schema=header.stream_schema,
                first_seq=first_seq,
                num_rows=num_rows,
                dropped=gap,
            ),
            rows,
        )


def _split_rows(
    schema: Schema, raw: bytes, begin: int, end: int, max_rows: int
) -> list[tuple[int, int]]:
    """Split the rows of a segment file into batches; for events, only after an event's last row.

    The rows of an event that is not complete are left out: the rest comes, or its writer is dead.
    """
    limit = max(1, min(max_rows, MAX_BODY_BYTES // schema.row_size))
    if schema.stream != EVENT_SCHEMA.stream:
        return [(i, min(i + limit, end)) for i in range(begin, end, limit)]
    ends = [slot + 1 for slot in range(begin, end) if _ends_event(schema, raw, slot)]
    cuts: list[tuple[int, int]] = []
    first = begin
    for i, here in enumerate(ends):
        if i + 1 == len(ends) or ends[i + 1] - first > limit:
            cuts.append((first, here))
            first = here
    return cuts


def _ends_event(schema: Schema, raw: bytes, slot: int) -> bool:
    """Return whether the row in a slot of a segment file is the last one of its event."""
    fields = schema.unpack(memoryview(raw)[slot * schema.row_size : (slot + 1) * schema.row_size])
    return fields.get("part") == int(fields.get("num_parts") or 1) - 1
