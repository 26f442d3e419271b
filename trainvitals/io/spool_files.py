"""Reads a spool's files: while they grow, with damage in them, also over NFS."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainvitals.errors import FormatError
from trainvitals.wire import MAGIC, PREFIX, batch_size, is_whole

GROWING_SECONDS = 30.0
SKEWED_SECONDS = 600.0
_CHUNK_BYTES = 1 << 20


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in a spool: everything before ``offset`` of file number ``file`` is done."""

    file: int = 0
    offset: int = 0


def read_batches(
    directory: Path, start: Position | None = None, *, now: float | None = None
) -> Iterator[tuple[Position, bytes]]:
    """Yield the batches after ``start``, each with the position after it, as far as there are any.

    For any reader, while the spool grows, also over NFS: call again from the last position. What is
    damaged is passed over where the file is not growing; in one changed within the last 30 seconds
    before ``now`` (wall time; None: nothing grows) it may be a page that did not arrive yet.
    """

    def settled(number: int) -> bool:
        if now is None:
            return True
        try:
            age = now - (directory / f"{number:06d}.tvs").stat().st_mtime
        except FileNotFoundError:
            return True
        # A little in the future is a file server's clock; far in it is a clock that was set back.
        return not -SKEWED_SECONDS <= age <= GROWING_SECONDS

    for position, raw in scan_folder(directory, start or Position(), settled):
        if raw is not None:
            yield position, raw


def spool_files(directory: Path) -> list[tuple[int, Path]]:
    """Return the spool's files in order."""
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    return sorted((int(p.stem), p) for p in paths if p.suffix == ".tvs" and p.stem.isdigit())


def scan_folder(
    directory: Path, start: Position, settled: Callable[[int], bool] = lambda number: True
) -> Iterator[tuple[Position, bytes | None]]:
    """Yield (end, batch) from ``start`` on, and (end, None) for each damaged stretch."""
    files = [(number, path) for number, path in spool_files(directory) if number >= start.file]
    for i, (number, path) in enumerate(files):
        is_newest = i + 1 == len(files)
        offset = start.offset if number == start.file else 0
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # acknowledged or dropped by its owner
        with file:
            for end, raw in scan_file(file, offset, complete=not is_newest):
                if raw is None and is_newest and not settled(number):
                    return
                yield Position(number, end), raw


def scan_file(file: BinaryIO, offset: int, *, complete: bool) -> Iterator[tuple[int, bytes | None]]:
    """Yield (end, batch) from ``offset`` on, and (end, None) for each damaged stretch.

    A tail that holds no batch is damage in a ``complete`` file; else it is torn or still growing,
    and nothing is said of it.
    """
    size = os.fstat(file.fileno()).st_size
    while offset < size:
        raw = _batch_at(file, offset, size)
        if raw is not None:
            offset += len(raw)
            yield offset, raw
            continue
        following = _next_batch(file, offset + 1, size)
        if following is None:
            if complete:
                yield size, None
            return
        offset = following
        yield offset, None


def _batch_at(file: BinaryIO, offset: int, end: int) -> bytes | None:
    file.seek(offset)
    prefix = file.read(PREFIX.size)
    try:
        size = batch_size(prefix)
    except FormatError:
        return None
    if offset + size > end:
        return None
    raw = prefix + file.read(size - len(prefix))
    return raw if is_whole(raw) else None


def _next_batch(file: BinaryIO, offset: int, end: int) -> int | None:
    """The offset of the next valid batch: the next magic behind which one lies."""
    while offset + PREFIX.size <= end:
        file.seek(offset)
        chunk = file.read(min(_CHUNK_BYTES, end - offset))
        found = chunk.find(MAGIC)
        while found >= 0:
            if _batch_at(file, offset + found, end) is not None:
                return offset + found
            found = chunk.find(MAGIC, found + 1)
        if len(chunk) < len(MAGIC):
            return None
        offset += len(chunk) - len(MAGIC) + 1
    return None
