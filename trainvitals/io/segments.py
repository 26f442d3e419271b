"""The segment: one file of one stream of a journal.

    magic 4 | version u32 | header length u32 | crc32 of the header u32 | header | pad to 64 | rows

The header is msgpack. Row ``first_seq + i`` is in slot ``i``; an unwritten slot is zero and fails
its checksum. A segment gets its name after its header is complete. It is sealed, and never written
again, as soon as a later one of its stream or the closed marker exists.
"""

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, UsageError
from trainvitals.identity import Identity
from trainvitals.io.private import open_private
from trainvitals.rows import FORMAT_VERSION, STREAMS, Schema, refuse_newer_version

MAGIC = b"TVJ1"
CLOSED = "closed"
_PREFIX = struct.Struct("<4sIII")
_MAX_HEADER_BYTES = 65_536


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a segment."""

    identity: Identity
    stream_schema: Schema
    first_seq: int
    index: int


class ClosedMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Last number of each stream of a closed journal; empty if written for a dead process."""

    next_seq: dict[str, int] = {}


def segment_name(stream: str, index: int) -> str:
    """Return the file name of a stream's segment."""
    return f"{stream}-{index:06d}.seg"


def list_names(directory: Path) -> list[str]:
    """Return the file names in a journal's directory; none if it does not exist."""
    try:
        return os.listdir(directory)  # noqa: PTH208 - a reader asks several times a second
    except FileNotFoundError:
        return []


def sort_segments(directory: Path, names: Iterable[str]) -> dict[str, list[tuple[int, Path]]]:
    """Return each stream's segment files as (index, path), oldest first."""
    by_stream: dict[str, list[tuple[int, Path]]] = {}
    for name in names:
        stream, _, rest = name.rpartition("-")
        number, dot, ending = rest.partition(".")
        if stream in STREAMS and dot and ending == "seg" and number.isdigit():
            by_stream.setdefault(stream, []).append((int(number), directory / name))
    for segments in by_stream.values():
        segments.sort()
    return by_stream


def encode_header(header: SegmentHeader) -> bytes:
    """Return the bytes before the first row, a multiple of 64."""
    body = msgspec.msgpack.encode(header)
    raw = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body), zlib.crc32(body)) + body
    return raw.ljust(-(-len(raw) // 64) * 64, b"\0")


def read_header(path: Path) -> tuple[SegmentHeader, int]:
    """Read the header of a segment file; return it with the offset of the first row.

    Raises:
        FileNotFoundError: it was deleted.
        FormatError: empty, torn or damaged.
        NewerVersionError: written by a newer format.
    """
    raw = read_bytes(path, 0, _PREFIX.size + _MAX_HEADER_BYTES)
    if len(raw) < _PREFIX.size:
        raise FormatError(f"{path}: {len(raw)} bytes are too short for a segment")
    magic, version, size, crc = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise FormatError(f"{path}: a segment begins with {MAGIC!r}; this one with {magic!r}")
    refuse_newer_version(version, path)
    body = raw[_PREFIX.size : _PREFIX.size + size]
    if size > _MAX_HEADER_BYTES or len(body) != size or zlib.crc32(body) != crc:
        raise FormatError(f"{path}: the segment's header is torn or damaged")
    try:
        header = msgspec.msgpack.decode(body, type=SegmentHeader)
        header.identity.check()
        header.stream_schema.check()
    except (*UNREADABLE, UsageError) as error:
        raise FormatError(f"{path}: the segment's header is invalid: {error}") from error
    return header, -(-(_PREFIX.size + size) // 64) * 64


def read_bytes(path: Path, offset: int, size: int) -> bytes:
    """Read up to ``size`` bytes of a private file from ``offset``, without mapping it."""
    return read_fd(open_private(path), offset, size)


def read_fd(fd: int, offset: int = 0, size: int = 1 << 20) -> bytes:
    """Read up to ``size`` bytes of an open file from ``offset``, and close it."""
    try:
        parts = []
        while size > 0 and (part := os.pread(fd, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def find_valid_rows(schema: Schema, raw: bytes, first_seq: int) -> Iterator[tuple[int, int]]:
    """Yield each run of valid rows in a segment file as (first slot, slot after the last).

    A row is valid if its checksum holds and its number is the one of its slot.
    """
    size = schema.row_size
    begin = -1
    num = len(raw) // size
    view = memoryview(raw)
    for slot in range(num):
        valid = schema.seq_of(view[slot * size : slot * size + size]) == first_seq + slot
        if valid and begin < 0:
            begin = slot
        if not valid and begin >= 0:
            yield begin, slot
            begin = -1
        if not valid and raw.startswith(bytes(len(raw) - slot * size), slot * size):
            return  # not written yet
    if begin >= 0:
        yield begin, num


class MappedSegment:
    """A preallocated and mapped file: a row costs one small copy and survives the process."""

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        temporary, fd = _create_temporary(path)
        try:
            # Before the map: no page to be had is an OSError here, and would be a SIGBUS later.
            os.posix_fallocate(fd, 0, num_bytes)
            self.map = mmap.mmap(fd, num_bytes)
            self.map[: len(header)] = header
            temporary.rename(path)
        except BaseException:
            temporary.unlink()
            raise
        finally:
            os.close(fd)

    def write(self, offset: int, row: bytes) -> None:
        """Copy the row into the mapped segment file at the offset."""
        self.map[offset : offset + len(row)] = row

    def close(self) -> None:
        """Unmap the segment file; written rows stay in it."""
        self.map.close()


class PlainSegment:
    """A file that is appended to: for disks, where a map can block for 100s of milliseconds."""

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        temporary, self._fd = _create_temporary(path)
        try:
            self.write(0, header)
            temporary.rename(path)
        except BaseException:
            os.close(self._fd)
            temporary.unlink()
            raise

    def write(self, offset: int, row: bytes) -> None:
        """Write the row into the segment file on disk at the offset."""
        if os.pwrite(self._fd, row, offset) != len(row):
            raise OSError(errno.ENOSPC, f"{self.path}: no space left")

    def close(self) -> None:
        """Close the segment file on disk; its rows stay."""
        os.close(self._fd)


SegmentFile = MappedSegment | PlainSegment
"""Target of rows: mapped memory, or a file that only the writing thread uses."""


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create the temporary file of a new journal segment."""
    temporary = path.with_suffix(".tmp")
    return temporary, open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
