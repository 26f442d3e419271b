"""The queue on disk: batches one after another in files, as they travel.

    <directory>/<NNNNNN>.tvs     batches (``trainvitals.wire``), appended and fsynced, never mapped
    <directory>/state.json       what is acknowledged, and the last number of each stream

One owner appends; anyone may read, also over NFS while it grows. ``keep`` makes the spool the run's
history: nothing is removed, and what does not fit is refused. Without it the oldest goes.
``state.json`` may be lost or stale: then more is sent again, and the store knows it already.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainvitals.errors import FormatError, StorageError, UsageError
from trainvitals.io.rundir import replace_file, sync_folder
from trainvitals.wire import MAGIC, PREFIX, BatchHeader, batch_size, decode_batch, is_whole

FILE_BYTES = 8 << 20
GROWING_SECONDS = 30.0
_STATE = "state.json"


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in a spool: everything before ``offset`` of file number ``file`` is done."""

    file: int = 0
    offset: int = 0


class _State(msgspec.Struct, kw_only=True):
    acked: Position = Position()
    scanned: Position = Position()
    dropped_rows: int = 0
    last_seqs: list[tuple[str, str, str, int]] = []


class Spool:
    """Appends batches durably and gives them back until they are acknowledged; for one owner.

    Thread-safe: one thread may append and sync while another reads and acknowledges.

    Args:
        directory: made if missing.
        max_bytes: bound over all files.
        keep: never remove anything; refuse what does not fit.
        file_bytes: begin a new file above this size.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int, keep: bool, file_bytes: int = FILE_BYTES
    ) -> None:
        if max_bytes < 1:
            raise UsageError(f"a spool's max_bytes is {max_bytes}; it must be positive")
        self.directory = directory
        self.max_bytes = max_bytes
        self.keep = keep
        self._corrupt_at: set[Position] = set()
        self._lock = threading.RLock()
        self._file_bytes = max(1, min(file_bytes, max_bytes // 4))
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{directory}: the spool cannot be made: {error}") from error
        self._state = self._load_state()
        self._last = {(r, i, s): seq for r, i, s, seq in self._state.last_seqs}
        self._sizes = {number: path.stat().st_size for number, path in _files(directory)}
        self._file: BinaryIO | None = None
        self._recover()

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(list(self._sizes.values()))

    @property
    def dropped_rows(self) -> int:
        """Rows that were refused, or removed before they were acknowledged; kept over restarts."""
        return self._state.dropped_rows

    @property
    def corrupt(self) -> int:
        """Damaged stretches that were met and passed over; they stay in their file."""
        return len(self._corrupt_at)

    @property
    def acked(self) -> Position:
        """Up to where everything is acknowledged."""
        return self._state.acked

    def last_seqs(self) -> dict[tuple[str, str, str], int]:
        """Return the last sequence number ever appended by (run, incarnation, stream)."""
        with self._lock:
            return dict(self._last)

    def append(self, raw: bytes) -> bool:
        """Add a batch; durable after the next ``sync``. False: full (``keep``); counted.

        Raises:
            FormatError: it is no valid batch.
            StorageError: the disk refused; the spool is as it was before.
        """
        header = decode_batch(raw).header
        with self._lock:
            if not self._make_room(len(raw)):
                self._state.dropped_rows += header.num_rows
                return False
            file, number = self._current(len(raw))
            try:
                _write_all(file, raw)
            except OSError as error:
                file.truncate(self._sizes[number])
                file.seek(self._sizes[number])
                raise StorageError(
                    f"{self._path(number)}: {error.strerror}; nothing was added",
                    hint="free some space; what is in the journal is sent when there is room again",
                ) from error
            self._sizes[number] += len(raw)
            self._note(header)
            return True

    def sync(self) -> None:
        """Make everything appended so far durable."""
        with self._lock:
            if self._file is None:
                return
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise StorageError(f"{self._file.name}: cannot be made durable: {error}") from error

    def pending(self, limit: int) -> list[tuple[Position, bytes]]:
        """Return the oldest unacknowledged batches, each with the position to ``ack``."""
        found: list[tuple[Position, bytes]] = []
        for position, raw in _scan_folder(self.directory, self._state.acked):
            if raw is None:
                self._corrupt_at.add(position)
                continue
            found.append((position, raw))
            if len(found) >= limit:
                break
        return found

    def ack(self, position: Position) -> None:
        """Take note that everything before ``position`` is stored for good; free whole files."""
        with self._lock:
            if position <= self._state.acked:
                return
            self._state.acked = position
            if not self.keep:
                for number in [n for n in self._sizes if n < position.file]:
                    self._remove(number)
            self._save_state()

    def close(self) -> None:
        """Sync, save the state, close the file."""
        with self._lock:
            if self._file is not None:
                self._save_state()
                self._file.close()
                self._file = None

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:06d}.tvs"

    def _current(self, size: int) -> tuple[BinaryIO, int]:
        """Return the file to append to, beginning a new one where the present one is full."""
        number = max(self._sizes, default=-1)
        if self._file is not None and 0 < self._sizes[number] > self._file_bytes - size:
            self.close()
        if self._file is None:
            number = max(number, self._state.acked.file - 1, self._state.scanned.file - 1) + 1
            self._file = self._path(number).open("xb", buffering=0)
            self._sizes[number] = 0
            sync_folder(self.directory)
        return self._file, number

    def _make_room(self, size: int) -> bool:
        if self.keep:
            return self.num_bytes + size <= self.max_bytes
        while self._sizes and self.num_bytes + size > self.max_bytes:
            oldest = min(self._sizes)
            self._state.dropped_rows += self._num_unacked_rows(oldest)
            self._remove(oldest)
            if self._state.acked.file <= oldest:
                self._state.acked = Position(oldest + 1, 0)
            self._save_state()
        return size <= self.max_bytes

    def _num_unacked_rows(self, number: int) -> int:
        acked = self._state.acked
        if number < acked.file:
            return 0
        start = acked.offset if number == acked.file else 0
        with self._path(number).open("rb") as file:
            found = _scan_file(file, start, complete=True)
            headers = [_header(raw) for _, raw in found if raw is not None]
            return sum(header.num_rows for header in headers if header is not None)

    def _remove(self, number: int) -> None:
        if self._file is not None and number == max(self._sizes):
            self._file.close()
            self._file = None
        self._path(number).unlink(missing_ok=True)
        del self._sizes[number]

    def _note(self, header: BatchHeader) -> None:
        key = (header.identity.run_id, header.identity.incarnation, header.stream)
        self._last[key] = max(header.last_seq, self._last.get(key, -1))

    def _recover(self) -> None:
        """Find what was appended after the state was saved; cut the last file's torn tail off."""
        newest = max(self._sizes, default=-1)
        for number in sorted(self._sizes):
            scanned = self._state.scanned
            if number < scanned.file:
                continue
            start = scanned.offset if number == scanned.file else 0
            end = min(start, self._sizes[number])
            with self._path(number).open("rb") as file:
                for here, raw in _scan_file(file, end, complete=number < newest):
                    end = here
                    header = None if raw is None else _header(raw)
                    if raw is None:
                        self._corrupt_at.add(Position(number, here))
                    if header is not None:
                        self._note(header)
            if number == newest and end < self._sizes[number]:
                os.truncate(self._path(number), end)
                self._sizes[number] = end
        if newest >= 0:
            if self._state.acked.file == newest:
                offset = min(self._state.acked.offset, self._sizes[newest])
                self._state.acked = Position(newest, offset)
            self._file = self._path(newest).open("r+b", buffering=0)
            self._file.seek(0, os.SEEK_END)

    def _load_state(self) -> _State:
        try:
            return msgspec.json.decode((self.directory / _STATE).read_bytes(), type=_State)
        except (FileNotFoundError, msgspec.DecodeError):
            return _State()

    def _save_state(self) -> None:
        self.sync()  # the state must not speak of bytes that a crash could take
        newest = max(self._sizes, default=-1)
        if newest >= 0:
            self._state.scanned = Position(newest, self._sizes[newest])
        self._state.last_seqs = [(*key, seq) for key, seq in sorted(self._last.items())]
        try:
            replace_file(self.directory / _STATE, msgspec.json.encode(self._state))
        except OSError as error:
            raise StorageError(f"{self.directory / _STATE}: cannot be written: {error}") from error


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
            changed = (directory / f"{number:06d}.tvs").stat().st_mtime
        except FileNotFoundError:
            return True
        return now - changed > GROWING_SECONDS

    for position, raw in _scan_folder(directory, start or Position(), settled):
        if raw is not None:
            yield position, raw


def _scan_folder(
    directory: Path, start: Position, settled: Callable[[int], bool] = lambda number: True
) -> Iterator[tuple[Position, bytes | None]]:
    files = [(number, path) for number, path in _files(directory) if number >= start.file]
    for i, (number, path) in enumerate(files):
        is_newest = i + 1 == len(files)
        offset = start.offset if number == start.file else 0
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # acknowledged or dropped by its owner
        with file:
            for end, raw in _scan_file(file, offset, complete=not is_newest):
                if raw is None and is_newest and not settled(number):
                    return
                yield Position(number, end), raw


def _scan_file(
    file: BinaryIO, offset: int, *, complete: bool
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (end, batch) from ``offset`` on, and (end, None) for each damaged stretch.

    A tail that holds no batch is damage in a ``complete`` file; else it is torn or still growing,
    and nothing is said of it.
    """
    size = os.fstat(file.fileno()).st_size
    while offset < size:
        raw = _batch_at(file, offset)
        if raw is not None:
            offset += len(raw)
            yield offset, raw
            continue
        following = _next_batch(file, offset + 1)
        if following is None:
            if complete:
                yield size, None
            return
        offset = following
        yield offset, None


def _batch_at(file: BinaryIO, offset: int) -> bytes | None:
    file.seek(offset)
    prefix = file.read(PREFIX.size)
    try:
        size = batch_size(prefix)
    except FormatError:
        return None
    raw = prefix + file.read(size - len(prefix))
    return raw if is_whole(raw) else None


def _header(raw: bytes) -> BatchHeader | None:
    """The header of an intact batch; None where it is of a newer version, which is passed on."""
    try:
        return decode_batch(raw).header
    except FormatError:
        return None


def _next_batch(file: BinaryIO, offset: int) -> int | None:
    """The offset of the next valid batch: the next magic behind which one lies."""
    file.seek(offset)
    rest = file.read()
    found = rest.find(MAGIC)
    while found >= 0:
        if _batch_at(file, offset + found) is not None:
            return offset + found
        found = rest.find(MAGIC, found + 1)
    return None


def _files(directory: Path) -> list[tuple[int, Path]]:
    """The spool's files in order."""
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    return sorted((int(p.stem), p) for p in paths if p.suffix == ".tvs" and p.stem.isdigit())


def _write_all(file: BinaryIO, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        num = file.write(view)
        view = view[num:]
