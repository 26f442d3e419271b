"""The queue on disk: batches one after another in files, with a header each time it changes.

    <directory>/<NNNNNN>.tvs     batches (``spool_files``), appended and fsynced, never mapped
    <directory>/state.json       what is acknowledged, and the last number of each stream

One owner appends; anyone may read, also over NFS while it grows. ``keep`` makes the spool the run's
history: nothing is removed, and what does not fit is refused. Without it the oldest goes, and what
is acknowledged stays for ``retain_seconds``: a collector restored from a backup asks for it.
``state.json`` may be lost or stale: then more is sent again, and the store knows it already.

Invariants after a crash, or a disk error, at any point:

- A batch that ``sync`` made durable stays, in its order, until it is acknowledged or dropped.
- ``last_seqs`` names no row that the spool did not store: its writer would not send it again.
- Dropped rows are counted first. Only unsynced rows may be lost without a count.
- A byte that a reader may have seen is never replaced: a truncated file is not appended to any
  more, and each owner starts a new file.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainvitals.errors import FormatError, StorageError, UsageError
from trainvitals.io.private import (
    FileOwner,
    ensure_own_dir,
    open_own,
    replace_file,
    stream_own,
    sync_folder,
    write_all,
)
from trainvitals.io.rundir import is_full
from trainvitals.io.spool_files import (
    STATE_FILE,
    SpoolHeaders,
    SpoolPosition,
    encode_state,
    load_state,
    own_files,
    read_batches,
    scan_file,
    scan_spool,
    spool_files,
)
from trainvitals.wire import BatchHeader, decode_batch

__all__ = ["Spool", "SpoolPosition", "read_batches", "read_unacknowledged_headers"]

FILE_BYTES = 8 << 20
SAVE_BYTES = 1 << 18
"""The state is written when this much was acknowledged since: it may be stale."""
_CHUNK_BYTES = 1 << 20
MAX_WRITERS = 1024
"""Streams whose last number is remembered; the oldest ones are dropped."""
_LOG = logging.getLogger("trainvitals")
_HINT = "free some space; rows wait in the journal until then"

Key = tuple[str, str, str]


class Spool:
    """Appends batches durably and returns them until they are acknowledged; for one owner.

    Thread-safe: one thread may append and sync while another reads and acknowledges.

    Args:
        directory: created if missing.
        max_bytes: bound over all files.
        keep: never delete anything; refuse batches that do not fit.
        file_bytes: start a new file above this size.
        retain_seconds: how long a file stays after it was acknowledged.
        retain_bytes: bound of such files; the oldest is deleted first.
        now: wall time.

    Raises:
        StorageError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        keep: bool,
        file_bytes: int = FILE_BYTES,
        retain_seconds: float = 0.0,
        retain_bytes: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 1:
            raise UsageError(f"a spool's max_bytes is {max_bytes}; it must be positive")
        self.directory = directory
        self.max_bytes = max_bytes
        self.keep = keep
        self._file_bytes = max(1, min(file_bytes, max_bytes // 4))
        self._retain_seconds = retain_seconds
        self._retain_bytes = retain_bytes
        self._now = now
        self._lock = threading.RLock()
        self._num_corrupt = 0
        self._corrupt_at: set[SpoolPosition] = set()
        self._fd = -1  # of the latest file, while it is appended to
        self._number = -1
        self._headers = SpoolHeaders()
        self._synced_size = 0
        self._unsynced: dict[Key, int] = {}
        self._refused: dict[Key, int] = {}  # dealt with once their count is saved
        self._gave_up = False
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            self._owner = FileOwner.from_directory(ensure_own_dir(directory))
            files = self._own_files()
            self._state = self._saved = load_state(directory / STATE_FILE)
            self._last = {(r, i, s): seq for r, i, s, seq in self._state.last_seqs}
            self._sizes = {number: status.st_size for number, _, status in files}
            # If the clock was set back, they must not be retained for longer.
            self._retained = {
                n: min(at, now()) for n, at in self._state.retained if n in self._sizes
            }
            self._num_bytes = sum(self._sizes.values())
            self._recover()
        except OSError as error:
            self._close_file()
            raise StorageError(f"{directory}: the spool cannot be created: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the spool's files on disk."""
        return self._num_bytes

    @property
    def retained_bytes(self) -> int:
        """Return the bytes of spool files that stay though they are completely acknowledged."""
        with self._lock:
            return sum(self._sizes[number] for number in self._retained)

    @property
    def kept_from(self) -> SpoolPosition:
        """Return the position of the oldest batch in the spool's files, acknowledged or not."""
        with self._lock:
            return SpoolPosition(min(self._sizes, default=self._state.acked.file))

    @property
    def dropped_rows(self) -> int:
        """Return how many rows the spool refused, or deleted unacknowledged, over restarts."""
        return self._state.dropped_rows

    @property
    def corrupt(self) -> int:
        """Return how many damaged ranges of the spool's files were skipped."""
        return self._num_corrupt + len(self._corrupt_at)

    @property
    def acked(self) -> SpoolPosition:
        """Return the position in the spool's files before which everything is acknowledged."""
        return self._state.acked

    def last_seqs(self) -> dict[Key, int]:
        """Return the last durable sequence number in the files by (run, incarnation, stream)."""
        with self._lock:
            return dict(self._last)

    def newest_seq(self, key: Key) -> int:
        """Return the last sequence number of a stream that was ever put in, durable or not."""
        with self._lock:
            return max(seqs.get(key, -1) for seqs in (self._last, self._unsynced, self._refused))

    def append(self, raw: bytes) -> bool:
        """Add a batch to the file; durable after ``sync``. False: full (``keep``); counted.

        A durable batch is not added twice: a writer goes back to its own last ``sync``, and the
        spool may have synced some later ones itself, or deleted acknowledged ones.

        Raises:
            FormatError: it is not a valid batch.
            StorageError: the disk refused; the batch was not added. Call ``sync`` before the next
                try: it reports whether earlier ones have to be added again first.
        """
        header = decode_batch(raw).header
        with self._lock, self._translate_disk_errors("nothing was added"):
            if self._gave_up:
                raise OSError("rows added earlier were lost before they reached the disk")
            key = (header.identity.run_id, header.identity.incarnation, header.stream)
            if header.last_seq <= self._last.get(key, -1):
                return True
            has_room = key not in self._refused and self._drop_until_fits(len(raw))
            if has_room:
                self._write_freeing_retained(raw)
            else:
                self._update_state(dropped_rows=self._state.dropped_rows + header.num_rows)
            added = self._unsynced if has_room else self._refused
            added[key] = max(header.last_seq, added.get(key, -1))
            return has_room

    def sync(self) -> None:
        """Make everything appended to the spool's files so far durable on disk.

        Raises:
            StorageError: the disk refused; batches since the last sync are dropped, and can be
                appended again.
        """
        with self._lock, self._translate_disk_errors("cannot be made durable"):
            try:
                self._sync_file()
            finally:
                gave_up, self._gave_up = self._gave_up, False
            if gave_up:
                raise OSError("a leftover file could not be synced to disk")
            if self._state.dropped_rows != self._saved.dropped_rows:
                self._save_dropped_count()

    def read(self, start: SpoolPosition) -> Iterator[tuple[SpoolPosition, bytes]]:
        """Yield the batches in the files after ``start``, each with the position after it."""
        with self._translate_disk_errors("cannot be read"):
            for position, raw in scan_spool(self.directory, start):
                if raw is None:
                    with self._lock:
                        self._corrupt_at.add(position)
                else:
                    yield position, raw

    def pending(self, limit: int) -> list[tuple[SpoolPosition, bytes]]:
        """Return the oldest unacknowledged batches, each with the position to ``ack``."""
        return list(islice(self.read(self._state.acked), limit))

    def ack(self, position: SpoolPosition) -> None:
        """Record that everything before ``position`` is acknowledged; free files that are done."""
        with self._lock, self._translate_disk_errors("the acknowledged position cannot be saved"):
            if position <= self._state.acked:
                return
            self._update_state(acked=position)
            done = self._retain()
            saved = self._saved.acked
            if done or position.file != saved.file or position.offset - saved.offset > SAVE_BYTES:
                try:
                    self._save_state()
                finally:
                    self._delete_expired_files()

    def last_acked(self) -> bytes | None:
        """Return the last acknowledged batch from the files; None if it was deleted."""
        acked = self._state.acked
        files = [n for n in self._sizes if n < acked.file or (n == acked.file and acked.offset)]
        newest = None
        for end, raw in self.read(SpoolPosition(max(files))) if files else ():
            if end > acked:
                break
            newest = raw
        return newest

    def may_be_asked_for(self) -> bool:
        """Return whether a restored collector may still request spooled batches."""
        with self._lock, self._translate_disk_errors("cannot be read"):
            if self._retained or not self._sizes:
                return bool(self._retained)
            age = self._now() - self._file_path(max(self._sizes)).stat().st_mtime
            return age < self._retain_seconds

    def close(self) -> None:
        """Sync the spool's current file, save the state, and close the file."""
        with self._lock, self._translate_disk_errors("the spool's last state was not saved"):
            try:
                if self._fd >= 0 or self._unsynced or self._state != self._saved:
                    self._save_state()
            finally:
                self._close_file()

    # ---------------------------------------------------------- acknowledged and still there

    def _retain(self) -> list[int]:
        """Start the retention time of each fully acknowledged file; return those."""
        if self.keep:
            return []
        done = [n for n in self._sizes if n < self._state.acked.file and n not in self._retained]
        self._retained |= dict.fromkeys(done, self._now())
        return done

    def _delete_expired_files(self) -> None:
        """Delete acknowledged spool files after their retention time, or above their bound."""
        oldest = self._now() - self._retain_seconds
        for number in self._deletable():
            if self._retained[number] > oldest and self.retained_bytes <= self._retain_bytes:
                return
            self._remove_file(number)

    def _deletable(self) -> list[int]:
        """Return the acknowledged spool files that may be deleted, the oldest first.

        Those whose last sequence numbers are in the saved state: a restart after a crash could not
        read the others' numbers anywhere, and a writer would use them again.
        """
        return sorted(n for n in self._retained if n < self._saved.scanned.file)

    # -------------------------------------------------------------------------- writing

    def _write_freeing_retained(self, raw: bytes) -> None:
        """Write the batch; on a full disk, delete acknowledged files, the oldest first."""
        while True:
            try:
                return self._append_batch(raw)
            except (OSError, StorageError) as error:
                deletable = self._deletable()
                if not is_full(error) or not deletable:
                    raise
                self._remove_file(deletable[0])

    def _append_batch(self, raw: bytes) -> None:
        """Append a batch to the current spool file, or to a new one."""
        if self._fd >= 0 and 0 < self._sizes[self._number] > self._file_bytes - len(raw):
            self._save_state()
            self._close_file()
        if self._fd < 0:
            self._start_file()
        fd, size = self._fd, self._sizes[self._number]
        stored = self._headers.stored(raw, size)
        try:
            write_all(fd, stored, size)
        except OSError:
            with contextlib.suppress(OSError):  # the next batch overwrites it
                os.ftruncate(fd, size)
            raise
        self._record_file_size(self._number, size + len(stored))
        if stored is raw:
            self._headers.remember(raw, size)

    def _start_file(self) -> None:
        """Start a new file of the spool; its number was never used before."""
        self._number += 1
        path = self._file_path(self._number)
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            sync_folder(self.directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        empty = [number for number, size in self._sizes.items() if not size]
        self._fd, self._synced_size, self._headers = fd, 0, SpoolHeaders()
        self._sizes[self._number] = 0
        for number in empty:
            self._remove_file(number)

    def _close_file(self) -> None:
        """Stop appending to the current file of the spool."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _sync_file(self) -> None:
        """Sync the current spool file; its batches now count as durable."""
        size = self._sizes[self._number] if self._fd >= 0 else 0
        if self._fd >= 0 and size != self._synced_size:
            try:
                os.fsync(self._fd)
            except OSError:
                self._give_up_unsynced()
                raise
            self._synced_size = size
        for key, seq in self._unsynced.items():
            _record_last_seq(self._last, key, seq)
        self._unsynced.clear()

    def _give_up_unsynced(self) -> None:
        """Truncate batches that could not be made durable, and continue in a new file.

        The kernel may drop pages that it failed to write, and report success when asked again. A
        reader may have seen the bytes, so they must never be replaced.
        """
        self._unsynced.clear()
        self._clear_refused()
        self._gave_up = True
        fd, number, size = self._fd, self._number, self._synced_size
        with contextlib.suppress(OSError):  # otherwise they stay: duplicate rows count once
            os.ftruncate(fd, size)
            self._record_file_size(number, size)
        self._close_file()

    def _drop_until_fits(self, size: int) -> bool:
        """Drop the spool's oldest files until a batch fits; return whether it does."""
        if self.keep or size > self.max_bytes:
            return self._num_bytes + size <= self.max_bytes
        while self._sizes and self._num_bytes + size > self.max_bytes:
            self._drop_oldest_file()
        return True

    def _drop_oldest_file(self) -> None:
        """Delete the oldest spool file, after its unacknowledged rows were counted as dropped."""
        oldest = min(self._sizes)
        acked, num_dropped = self._state.acked, self._state.dropped_rows
        num_rows = self._num_unacked_rows(oldest)
        self._update_state(
            acked=max(acked, SpoolPosition(oldest + 1)), dropped_rows=num_dropped + num_rows
        )
        try:
            self._save_state()  # first: otherwise rows would be lost without a count
        except (OSError, StorageError):
            self._update_state(acked=acked, dropped_rows=num_dropped)
            raise
        self._remove_file(oldest)

    def _num_unacked_rows(self, number: int) -> int:
        """Return how many rows in a spool file are not acknowledged."""
        acked = self._state.acked
        if number < acked.file:
            return 0
        start = acked.offset if number == acked.file else 0
        num_rows = 0
        try:
            with self._open_file(number) as file:
                for _, raw in scan_file(file, start, complete=True):
                    header = None if raw is None else _decode_header(raw)
                    num_rows += header.num_rows if header is not None else 0
        except OSError:
            self._num_corrupt += 1  # it is unreadable, and has to be deleted anyway
        return num_rows

    def _remove_file(self, number: int) -> None:
        """Delete a file of the spool, with its recorded size and positions."""
        if number not in self._sizes:
            return
        self._file_path(number).unlink(missing_ok=True)
        if number == self._number:
            self._close_file()
        self._record_file_size(number, 0)
        del self._sizes[number]
        self._retained.pop(number, None)
        positions = {position for position in self._corrupt_at if position.file == number}
        self._corrupt_at -= positions
        self._num_corrupt += len(positions)

    def _record_file_size(self, number: int, size: int) -> None:
        """Record the new size of a file in the spool."""
        self._num_bytes += size - self._sizes[number]
        self._sizes[number] = size

    def _own_files(self) -> list[tuple[int, Path, os.stat_result]]:
        """Return the spool's files that this user wrote; rename those of other users."""
        files = spool_files(self.directory)
        writer_files = own_files(self.directory, files)
        refused = {path for _, path in files} - {path for _, path, _ in writer_files}
        state = self.directory / STATE_FILE
        if os.path.lexists(state) and not self._owner.owns(state.lstat()):
            refused.add(state)
        for path in refused:
            path.rename(path.with_name(f"refused-{path.name}"))
            _LOG.warning("vitals: %s is another user's, or no file; nothing of it is read", path)
        return writer_files

    def _open_file(self, number: int) -> BinaryIO:
        """Open a file of the spool for reading, if this user owns it."""
        return stream_own(self._file_path(number), owner=self._owner)

    def _file_path(self, number: int) -> Path:
        """Return the path of the spool file with this number."""
        return self.directory / f"{number:06d}.tvs"

    # ------------------------------------------------------------------ state, restarts

    def _update_state(self, **changes: object) -> None:
        """Change the spool's state in memory; ``_save_state`` writes it."""
        self._state = msgspec.structs.replace(self._state, **changes)

    def _save_state(self) -> None:
        """Sync the spool file, then replace ``state.json``."""
        self._sync_file()  # the state must not contain bytes that a crash could lose
        newest = max(self._sizes, default=-1)
        scanned = SpoolPosition(newest, self._sizes[newest]) if newest >= 0 else self._state.scanned
        last = dict(self._last)
        for key, seq in self._refused.items():
            _record_last_seq(last, key, seq)
        last_seqs = [(*key, seq) for key, seq in last.items()]
        retained = sorted(self._retained.items())
        self._update_state(scanned=scanned, last_seqs=last_seqs, retained=retained)
        with self._translate_disk_errors("cannot be written", self.directory / STATE_FILE):
            replace_file(self.directory / STATE_FILE, encode_state(self._state))
        self._saved, self._last = self._state, last
        self._refused.clear()

    def _save_dropped_count(self) -> None:
        """Save how many rows the spool dropped; if that fails, count them later."""
        try:
            self._save_state()
        except StorageError:
            self._clear_refused()
            raise

    def _clear_refused(self) -> None:
        """Discard which batches a full spool refused: they are resent, and counted then."""
        self._refused.clear()
        if self.keep:
            self._update_state(dropped_rows=self._saved.dropped_rows)

    def _recover(self) -> None:
        """Find batches appended after the state was saved; truncate the last file's torn tail."""
        newest = max(self._sizes, default=-1)
        scanned = self._state.scanned
        if self._sizes.get(scanned.file, scanned.offset) < scanned.offset:
            scanned = SpoolPosition()  # the disk lost synced data: use no number
            self._last.clear()
        for number in [n for n in sorted(self._sizes) if n >= scanned.file]:
            start = scanned.offset if number == scanned.file else 0
            end = self._rescan(number, start, complete=number < newest)
            if number == newest and end < self._sizes[number]:
                fd = open_own(self._file_path(number), os.O_RDWR, owner=self._owner)
                os.ftruncate(fd, end)
                os.close(fd)
                self._record_file_size(number, end)
        used = (self._state.acked, self._state.scanned)
        self._number = max(newest, *(p.file if p.offset else p.file - 1 for p in used))
        # the last writes of a killed owner exist, but may not be synced
        sync_folder(self.directory)
        if newest >= 0:
            self._rewrite(newest, scanned.offset if newest == scanned.file else 0)
        self._retain()
        self._delete_expired_files()

    def _rescan(self, number: int, start: int, *, complete: bool) -> int:
        """Record the batches of a spool file after ``start``; return the end of the last one.

        After damage in the last file nothing is recorded: it may never have been synced, and its
        writer has to send it again.
        """
        end, is_noted = start, True
        with self._open_file(number) as file:
            for here, raw in scan_file(file, start, complete=complete):
                end = here
                header = None if raw is None else _decode_header(raw)
                if raw is None:
                    self._corrupt_at.add(SpoolPosition(number, here))
                    is_noted = complete
                if header is not None and is_noted:
                    identity = header.identity
                    key = (identity.run_id, identity.incarnation, header.stream)
                    _record_last_seq(self._last, key, header.last_seq)
        return end

    def _rewrite(self, number: int, start: int) -> None:
        """Make a spool file durable after ``start``, even if a sync failed before.

        Another fsync is not enough after a failed write: the kernel may treat the pages as written.
        A reader has seen the same bytes at the same place.
        """
        fd = open_own(self._file_path(number), os.O_RDWR, owner=self._owner)
        try:
            while part := os.pread(fd, _CHUNK_BYTES, start):
                write_all(fd, part, start)
                start += len(part)
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _translate_disk_errors(self, outcome: str, path: Path | None = None) -> Iterator[None]:
        """Translate the system's errors on spool files to ours."""
        try:
            yield
        except OSError as error:
            where = path or (self._file_path(self._number) if self._fd >= 0 else self.directory)
            text = f"{where}: {error.strerror or error}; {outcome}"
            raise StorageError(text, hint=_HINT) from error


def read_unacknowledged_headers(directory: Path) -> Iterator[BatchHeader]:
    """Yield the header of each intact, unacknowledged batch in a spool, for any reader.

    Raises:
        OSError: the directory cannot be read.
    """
    for _, raw in read_batches(directory, load_state(directory / STATE_FILE).acked):
        header = _decode_header(raw)
        if header is not None:
            yield header


def _record_last_seq(last: dict[Key, int], key: Key, seq: int) -> None:
    """Record a stream's last number in the spool; drop the stream that wrote longest ago."""
    last[key] = max(seq, last.pop(key, -1))
    while len(last) > MAX_WRITERS:
        del last[next(iter(last))]


def _decode_header(raw: bytes) -> BatchHeader | None:
    """Return the header of an intact batch in a spool file; None if it has a later version."""
    try:
        return decode_batch(raw).header
    except FormatError:
        return None
