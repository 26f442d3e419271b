"""Files of a spool: their format and reading, and the spool's state file.

They are read while they grow, if they are damaged, and over NFS. A batch is stored as it is sent,
or short: with the offset of its header in the same file instead of the header, which is most of a
batch of one row. Its checksum is that of the whole batch.
"""

import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, InsecurePathError
from trainvitals.io.private import FileOwner, read_own, stream_own
from trainvitals.wire import MAGIC, PREFIX, batch_size, is_intact_batch

GROWING_SECONDS = 30.0
SKEWED_SECONDS = 600.0
_CHUNK_BYTES = 1 << 20
_IN_VAIN_BYTES = 64 << 20

SHORT = b"TVS2"
"""Magic of a short batch: prefix | offset of its header u32 | rows."""
HEADER_EVERY_BYTES = 1 << 18
"""A header is written again after this much of a file: damage to it costs no more than that."""
_PLACE = struct.Struct("<I")
_BEGINNING = re.compile(re.escape(MAGIC) + b"|" + re.escape(SHORT))
_MAX_HEADERS = 256
MAX_FILE_BYTES = 64 << 20
"""Bytes of a spool's file that are read. No valid one is larger, and a sparse one may seem to have
terabytes."""
_MAX_STATE_BYTES = 16 << 20
_FILE = re.compile(r"(\d{6,12})\.tvs\Z", re.ASCII)


class SpoolPosition(msgspec.Struct, frozen=True, order=True):
    """A position in a spool: everything before ``offset`` of file number ``file`` is done."""

    file: int = 0
    offset: int = 0


def read_batches(
    directory: Path,
    start: SpoolPosition | None = None,
    *,
    now: float | None = None,
    damaged: Callable[[SpoolPosition, SpoolPosition], object] = lambda begin, end: None,
) -> Iterator[tuple[SpoolPosition, bytes]]:
    """Yield the batches in a spool's files after ``start``, each with the position after it.

    For any reader, while the spool grows, also over NFS: call again from the last position. Damage
    is skipped if the file is not growing; in one changed within the last 30 seconds before ``now``
    (wall time; None: nothing grows) it may be a page that has not arrived yet.

    Args:
        directory: the spool's.
        start: position before the batches; None is the beginning.
        now: wall time.
        damaged: called with the start and end of each skipped range.
    """
    here = start or SpoolPosition()
    for end, raw in scan_spool(directory, here, lambda number: is_settled(directory, number, now)):
        if raw is None:
            damaged(here if here.file == end.file else SpoolPosition(end.file), end)
        else:
            yield end, raw
        here = end


def is_settled(directory: Path, number: int, now: float | None) -> bool:
    """Return whether the missing part will not arrive any more at ``now`` (wall time)."""
    return now is None or is_unchanged(directory / f"{number:06d}.tvs", now)


def is_unchanged(path: Path, now: float) -> bool:
    """Return whether a spool file has not changed for a while, or does not exist."""
    try:
        age = now - path.stat().st_mtime
    except FileNotFoundError:
        return True
    # A little in the future is a file server's clock; far in it is a clock that was set back.
    return not -SKEWED_SECONDS <= age <= GROWING_SECONDS


def spool_files(directory: Path) -> list[tuple[int, Path]]:
    """Return the files in a spool's directory in order, of any owner."""
    try:
        names = os.listdir(directory)  # noqa: PTH208 - a reader asks several times a second
    except FileNotFoundError:
        return []
    return sorted((int(m[1]), directory / name) for name in names if (m := _FILE.match(name)))


def own_files(
    directory: Path, files: list[tuple[int, Path]]
) -> list[tuple[int, Path, os.stat_result]]:
    """Return the spool files of the directory's owner; ignore other users' files."""
    owner = FileOwner.from_directory(directory) if files else FileOwner.current_user()
    spool_files = []
    for number, path in files:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # acknowledged or dropped by its owner
        if owner.owns(status) and stat.S_ISREG(status.st_mode):
            spool_files.append((number, path, status))
    return spool_files


def scan_spool(
    directory: Path, start: SpoolPosition, settled: Callable[[int], bool] = lambda number: True
) -> Iterator[tuple[SpoolPosition, bytes | None]]:
    """Yield (end, batch) from ``start`` on, and (end, None) for each damaged range."""
    named = [(number, path) for number, path in spool_files(directory) if number >= start.file]
    files = own_files(directory, named)
    for i, (number, path, _) in enumerate(files):
        is_newest = i + 1 == len(files)
        offset = start.offset if number == start.file else 0
        try:
            file = stream_own(path, owner=FileOwner.from_directory(directory))
        except FileNotFoundError:
            continue  # acknowledged or dropped by its owner
        with file:
            for end, raw in scan_file(file, offset, complete=not is_newest):
                if raw is None and is_newest and not settled(number):
                    return
                yield SpoolPosition(number, end), raw


class SpoolHeaders:
    """Offsets of the headers in the file being written; ``stored`` shortens batches by them."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}

    def stored(self, raw: bytes, offset: int) -> bytes:
        """Return how the spool file stores the batch at ``offset``: short, or as it is."""
        header_offset = self._places.get(_header_bytes(raw))
        if header_offset is None or offset - header_offset > HEADER_EVERY_BYTES:
            return raw
        rows = memoryview(raw)[PREFIX.size + len(_header_bytes(raw)) :]
        prefix = memoryview(raw)[len(MAGIC) : PREFIX.size]
        return b"".join((SHORT, prefix, _PLACE.pack(header_offset), rows))

    def remember(self, raw: bytes, offset: int) -> None:
        """Record a batch that was written in full, for short ones in the same spool file."""
        header_offset = offset + PREFIX.size
        if header_offset < 1 << 32:
            self._places[_header_bytes(raw)] = header_offset


def _header_bytes(raw: bytes) -> bytes:
    """Return the header of a batch, which a spool file stores once for many batches."""
    return raw[PREFIX.size : PREFIX.size + int(PREFIX.unpack_from(raw)[2])]


def scan_file(file: BinaryIO, offset: int, *, complete: bool) -> Iterator[tuple[int, bytes | None]]:
    """Yield (end, batch) from ``offset`` on, and (end, None) for each damaged range.

    A tail without a valid batch is damage in a ``complete`` file; otherwise it is torn or still
    growing, and is not reported.
    """
    scan = _SpoolFileScan(file)
    while offset < scan.end:
        batch = scan.batch_at(offset)
        if batch is not None:
            offset, raw = batch
            yield offset, raw
            continue
        following = scan.next_batch(offset + 1)
        if following is None:
            if complete:
                yield scan.end, None
            return
        offset = following
        yield offset, None


class _SpoolFileScan:
    """Search for batches in one file, with bounded cost.

    A damaged batch costs its own size once. A forged file of batch headers, each of which claims
    the rest of the file, would cost its size squared: the search gives up on it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.end = min(os.fstat(file.fileno()).st_size, MAX_FILE_BYTES)
        self._file = file
        self._headers: dict[int, bytes] = {}
        self._num_bytes_left = 4 * self.end + _IN_VAIN_BYTES

    def batch_at(self, offset: int) -> tuple[int, bytes] | None:
        """Return the end of the batch at ``offset`` of the spool file, and the batch; or None."""
        file = self._file
        file.seek(offset)
        prefix = file.read(PREFIX.size)
        is_short = prefix.startswith(SHORT)
        if is_short:
            prefix = MAGIC + prefix[len(SHORT) :]
        try:
            size = batch_size(prefix)
        except FormatError:
            return None
        header_size = int(PREFIX.unpack_from(prefix)[2])
        if is_short:
            size += _PLACE.size - header_size
        self._num_bytes_left -= size
        if offset + size > self.end:
            return None
        rest = file.read(size - len(prefix))
        if not is_short:
            raw = prefix + rest
            return (offset + size, raw) if is_intact_batch(raw) else None
        header_offset = int.from_bytes(rest[: _PLACE.size], "little")
        if header_offset not in self._headers:
            file.seek(header_offset)
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            self._headers[header_offset] = file.read(header_size)
        raw = b"".join((prefix, self._headers[header_offset], memoryview(rest)[_PLACE.size :]))
        if is_intact_batch(raw):
            return offset + size, raw
        del self._headers[header_offset]  # its content may still be arriving
        return None

    def next_batch(self, offset: int) -> int | None:
        """Return the offset of the spool file's next valid batch; None if none is found."""
        while offset + PREFIX.size <= self.end:
            self._file.seek(offset)
            chunk = self._file.read(min(_CHUNK_BYTES, self.end - offset))
            for beginning in _BEGINNING.finditer(chunk):
                if self._num_bytes_left < 0:
                    return None
                if self.batch_at(offset + beginning.start()) is not None:
                    return offset + beginning.start()
            if len(chunk) < len(MAGIC):
                return None
            offset += len(chunk) - len(MAGIC) + 1
        return None


# ----------------------------------------------------------------------------- what is remembered


STATE_FILE = "state.json"


class SpoolState(msgspec.Struct, kw_only=True):
    """The content of ``state.json``; it may be stale, and then more is sent again."""

    acked: SpoolPosition = SpoolPosition()
    scanned: SpoolPosition = SpoolPosition()
    """``last_seqs`` includes the batches before it, which are all durable."""
    dropped_rows: int = 0
    last_seqs: list[tuple[str, str, str, int]] = []
    retained: list[tuple[int, float]] = []
    """Files that stay though all of them is acknowledged, each with the wall time since when."""


class _Sealed(msgspec.Struct):
    """The state with its checksum: a flipped digit would silently skip rows."""

    crc: int
    state: msgspec.Raw


def load_state(path: Path) -> SpoolState:
    """Read a spool's state from its file; a new state if it is missing or damaged."""
    return read_state(path) or SpoolState()


def read_state(path: Path) -> SpoolState | None:
    """Read a spool's state from its file; a new state if it is missing, None if it is damaged."""
    try:
        raw = read_own(
            path, owner=FileOwner.from_directory(path.parent), max_bytes=_MAX_STATE_BYTES
        )
        sealed = msgspec.json.decode(raw, type=_Sealed)
        if sealed.crc != zlib.crc32(sealed.state):
            return None
        return msgspec.json.decode(sealed.state, type=SpoolState)
    except FileNotFoundError:
        return SpoolState()
    except (FormatError, InsecurePathError, *UNREADABLE):
        return None


def encode_state(state: SpoolState) -> bytes:
    """Return the bytes of a spool's ``state.json``, with a checksum."""
    raw = msgspec.json.encode(state)
    return msgspec.json.encode(_Sealed(zlib.crc32(raw), msgspec.Raw(raw)))
