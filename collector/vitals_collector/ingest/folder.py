"""Reads run directories into the store, for setups in which nothing sends batches over HTTP.

The directory is only read. The position in each spool is kept in the store and moves in the
transaction that stores the rows, so a restart continues from it, and a lost position costs time but
no rows.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import select

from trainvitals.errors import NewerVersionError, StorageError, VitalsError
from trainvitals.io.rundir import RunDir, check_folder, is_run_id
from trainvitals.io.spool import SpoolPosition, read_batches
from trainvitals.io.spool_files import STATE_FILE
from vitals_collector.ingest.ingest import (
    BatchResult,
    announce,
    check_batches,
    runs_in,
    store_batches,
)
from vitals_collector.ingest.tail_loss import LostRowCounter
from vitals_collector.storage.schema import positions
from vitals_collector.storage.store import Store, upsert

_LOG = logging.getLogger("vitals.collector.folder")
_BATCHES_AT_ONCE = 256
_MAX_LOGGED = 4_096
_BYTES_AT_ONCE = 4 << 20
"""Maximum per transaction: enough to share its fsync, and short enough for HTTP to get its turn."""

Refused = Callable[[RunDir, Path, Exception], object]
"""Called for a run that cannot be read: with the run, the path, and the error."""


class FolderIngest:
    """Follows every spool in some directories, each a VITALS_DIR or one run directory.

    Raises:
        UsageError: a directory does not exist.
        StorageError: a directory may not be read.
    """

    def __init__(self, store: Store, folders: Sequence[Path]) -> None:
        self._store = store
        self._folders = [folder.expanduser().absolute() for folder in folders]
        self._logged: set[str] = set()
        self._tail_loss = LostRowCounter(store)
        self.unreadable: dict[str, str] = {}
        """By run that the last poll could not read completely: the reason."""
        for folder in self._folders:
            check_folder(folder)

    def poll(self, stop: threading.Event | None = None) -> int:
        """Store all new rows, or those until ``stop``; return the number of new rows.

        A run that cannot be read does not delay others: it is in ``unreadable`` afterward.

        Raises:
            StorageError: the store refused; the same rows are read again at the next poll.
        """
        self.unreadable.clear()
        return self._poll(stop or threading.Event(), self._note_unreadable)

    def follow(self, stop: threading.Event, *, interval_seconds: float = 0.5) -> None:
        """Store new rows until told to stop; log an error once and retry: a disk may come back."""
        while not stop.is_set():
            try:
                self._poll(
                    stop, lambda run_dir, where, error: self._log_failure(error, f"{where}: ")
                )
            except Exception as error:  # noqa: BLE001 - only ``stop`` ends this thread
                self._log_failure(error)
            stop.wait(interval_seconds)

    def _poll(self, stop: threading.Event, refused: Refused) -> int:
        """Store the new rows of every spool; an unreadable one does not delay others."""
        num_new = 0
        try:
            for run_dir in self._run_dirs():
                where = run_dir.path
                try:
                    for where in run_dir.spool_dirs().values():
                        num_new += self._store_spool(where, stop)
                except StorageError:
                    raise  # an error of the store: other runs would fail too
                except Exception as error:  # noqa: BLE001 - counted, reported, and retried
                    refused(run_dir, where, error)
        finally:
            self._store.is_importing = False
        return num_new

    def _run_dirs(self) -> Iterator[RunDir]:
        for folder in self._folders:
            yield from [RunDir(folder)] if is_run_id(folder.name) else RunDir.find_all(folder)

    def _note_unreadable(self, run_dir: RunDir, where: Path, error: Exception) -> None:
        if not isinstance(error, (VitalsError, OSError)):
            raise error
        why = f"{error.filename or where}: {error.strerror}" if isinstance(error, OSError) else ""
        self.unreadable[run_dir.run_id] = why or f"{where}: {error}"

    def _log_failure(self, error: Exception, where: str = "") -> None:
        """Count and log, once, an error of the import of directories."""
        self._store.counters.fail("folder")
        is_ours = isinstance(error, (VitalsError, OSError))
        self._log_once(f"{where}{error}", None if is_ours else error)

    def _store_spool(self, spool: Path, stop: threading.Event) -> int:
        """Store the new rows of one spool; return their number."""
        position, now = self._load_position(spool), time.time()
        if position == SpoolPosition():
            self._store.is_importing = True
        promised = self._tail_loss.read_new_state(spool)

        def damaged(begin: SpoolPosition, end: SpoolPosition) -> None:
            where = f"{spool}/{begin.file:06d}.tvs: bytes {begin.offset} to {end.offset}"
            self._count_spool_damage(f"{where} are damaged and skipped")

        # Left to the end, so that a file that grows faster than we read cannot block us here.
        positioned_batches = read_batches(spool, position, now=now, damaged=damaged)
        num_new = 0
        while not stop.is_set() and (group := _next_batch_group(positioned_batches)):
            stored, is_blocked = self._store_spool_batches(spool, group)
            announce(self._store, stored)
            num_new += sum(outcome.reply.num_new for outcome in stored)
            if is_blocked:
                return num_new
            position = group[-1][0]
        if promised is not None and not stop.is_set():
            version, state = promised
            if state is not None:
                self._tail_loss.count(spool, version, state, position, now)
            else:
                where = f"{spool / STATE_FILE} is damaged"
                self._count_spool_damage(
                    f"{where}: rows lost at the end of a stream are not counted"
                )
        return num_new

    def _count_spool_damage(self, text: str) -> None:
        """Count and log, once, damage in a spool whose rows are stored."""
        if self._log_once(text):
            with self._store.counters.lock:
                self._store.counters.num_damaged += 1

    def _store_spool_batches(
        self, spool: Path, group: Sequence[tuple[SpoolPosition, bytes]]
    ) -> tuple[list[BatchResult], bool]:
        """Store batches and the position after them; stop before one of a newer version."""
        checked = check_batches([raw for _, raw in group])
        is_newer = [isinstance(checked_batch, NewerVersionError) for checked_batch in checked]
        newer = is_newer.index(True) if True in is_newer else -1
        if newer >= 0:
            self._log_once(f"{spool}: {checked[newer]}")
            checked = checked[:newer]
        if not checked:
            return [], True
        run_ids = runs_in(checked)
        if elsewhere := self._store.claims.claim(run_ids):
            self._log_once(f"{spool}: {next(iter(elsewhere.values()))}")
            return [], True
        with self._store.write_rows() as connection:
            stored = store_batches(connection, self._store, checked)
            position = msgspec.msgpack.encode(group[len(checked) - 1][0])
            upsert(connection, positions, {"spool": str(spool), "position": position})
        for outcome in stored:
            if outcome.error is not None:
                self._log_once(f"{spool}: a batch is skipped: {outcome.error}")
        return stored, newer >= 0

    def _load_position(self, spool: Path) -> SpoolPosition:
        query = select(positions.c.position).where(positions.c.spool == str(spool))
        with self._store.read_transaction() as connection:
            body = connection.execute(query).scalar()
        if body is None:
            return SpoolPosition()
        position = msgspec.msgpack.decode(body, type=SpoolPosition)
        file = spool / f"{position.file:06d}.tvs"
        if file.exists() and file.stat().st_size < position.offset:
            return SpoolPosition()  # another spool replaced it; the store knows its own rows
        return position

    def _log_once(self, text: str, bug: Exception | None = None) -> bool:
        """Log a text about imported directories, unless it was logged before."""
        if text in self._logged:
            return False
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(text)
        _LOG.warning("%s", text, exc_info=bug)
        return True


def _next_batch_group(
    positioned_batches: Iterator[tuple[SpoolPosition, bytes]],
) -> list[tuple[SpoolPosition, bytes]]:
    """Return the batches to store in one transaction, up to a number and size; none at the end."""
    group: list[tuple[SpoolPosition, bytes]] = []
    num_bytes = 0
    for positioned_batch in positioned_batches:
        group.append(positioned_batch)
        num_bytes += len(positioned_batch[1])
        if len(group) == _BATCHES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            break
    return group
