"""Compacts in the background: a thread that does little at a time and lets writers go first."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from trainvitals.clock import Clock, SystemClock
from trainvitals.errors import VitalsError
from trainvitals.records import EventRow
from trainvitals.wire import Batch
from vitals_collector.storage.compaction import FIRST_ROWS, Compacted, Key, compact_writer, writers
from vitals_collector.storage.store import Store

IDLE_SECONDS = 60.0
"""A writer that was silent for so long is compacted whatever it has."""
_INTERVAL_SECONDS = 1.0
_PAUSE = 2.0
"""How long to rest after a writer's turn, in times of what the turn took."""
_MAX_FREE = 0.25
"""Share of free pages in an SQLite file from which some are given back."""

_LOG = logging.getLogger("vitals.collector.compactor")


class Compactor:
    """Hears what is stored and compacts writers that have enough, or that fell silent.

    It remembers a number and a time for each writer that was heard since its last compaction.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        upkeep: Callable[[threading.Event], None] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._upkeep = upkeep
        """Does other work of this thread after each look, until it is told to stop."""
        self._lock = threading.Lock()
        self._waiting: dict[Key, tuple[int, int]] = {}
        """Rows that came since, and when the last of them did."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-compactor")
        self._told: set[str] = set()
        self.done = Compacted()
        store.after_ingest.append(self._note)

    def start(self) -> None:
        """Begin with what lies in the store already, then follow what comes."""
        self._thread.start()

    def close(self) -> None:
        """End after the writer whose turn it is; what was compacted stays compacted."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look_around(self) -> None:
        """Take up what an earlier collector left as it came.

        Raises:
            StorageError: the store refused.
        """
        now = self._clock.monotonic_ns()
        with self._lock:
            for key, num_rows in writers(self._store).items():
                self._waiting.setdefault(key, (num_rows, now))

    def compact_due(self) -> None:
        """Compact every writer that has enough rows or fell silent, one after the other."""
        before = self.done.num_after
        for key, is_over in self._due():
            began = time.monotonic()
            self._take(key, is_over=is_over)
            try:
                compact_writer(self._store, key, self.done, is_over=is_over)
            except VitalsError as error:
                self._put_back(key, is_over=is_over)
                self._tell(key, error)
                return  # a full disk or a lock; all writers wait for the next time
            except Exception as error:  # noqa: BLE001 - one writer's rows must not end the thread
                self._tell(key, error)
            if self._stop.wait(_PAUSE * (time.monotonic() - began)):
                return
        if self.done.num_after > before:
            self._store.reclaim(above=_MAX_FREE)

    def _run(self) -> None:
        is_new = True
        while not self._stop.is_set():
            try:
                if is_new:
                    self.look_around()
                    is_new = False
                self.compact_due()
                if self._upkeep is not None:
                    self._upkeep(self._stop)
            except VitalsError as error:
                self._tell(None, error)
            self._stop.wait(_INTERVAL_SECONDS)

    def _note(self, new: Sequence[tuple[Batch, Sequence[EventRow]]]) -> None:
        now = self._clock.monotonic_ns()
        with self._lock:
            for batch, _ in new:
                header = batch.header
                if header.stream != "events":
                    key = header.identity.run_id, header.identity.incarnation, header.stream
                    num_rows = self._waiting.get(key, (0, 0))[0]
                    self._waiting[key] = num_rows + header.num_rows, now

    def _due(self) -> list[tuple[Key, bool]]:
        silent = self._clock.monotonic_ns() - int(IDLE_SECONDS * 1e9)
        with self._lock:
            return [
                (key, heard <= silent)
                for key, (num_rows, heard) in self._waiting.items()
                if num_rows >= FIRST_ROWS or heard <= silent
            ]

    def _take(self, key: Key, *, is_over: bool) -> None:
        """Forget the rows that wait: what comes from now on waits anew."""
        with self._lock:
            _, heard = self._waiting.pop(key)
            if not is_over:
                self._waiting[key] = 0, heard  # it is looked at again once it falls silent

    def _put_back(self, key: Key, *, is_over: bool) -> None:
        with self._lock:
            _, heard = self._waiting.get(key, (0, 0))
            self._waiting[key] = FIRST_ROWS, 0 if is_over else heard

    def _tell(self, key: Key | None, error: Exception) -> None:
        self._store.counters.fail("compaction")
        if str(error) not in self._told and len(self._told) < 100:
            self._told.add(str(error))
            _LOG.warning("compaction_failed writer=%s: %s", key, error, exc_info=True)


__all__ = ["IDLE_SECONDS", "Compactor"]
