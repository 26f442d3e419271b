"""Keeps what was just committed in memory until the watchers look: they need not ask the store.

The store stays the truth. What does not fit is forgotten, and read there: a writer's rows are
numbered, so whoever takes them sees the gap.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainvitals.wire import Batch

_BATCH_BYTES = 512
"""What a batch costs beside its rows."""


class Taken(NamedTuple):
    """What was committed of a run since it was last taken, in this order."""

    batches: tuple[Batch, ...]
    has_more: bool
    """More was stored than this."""


@dataclass(slots=True)
class _Kept:
    batches: deque[Batch] = field(default_factory=deque)
    num_bytes: int = 0
    has_more: bool = False


class RecentRows:
    """The newest rows of each run, in bounded memory. For any thread.

    Of the run that has most the oldest are dropped, and counted.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self.num_dropped = 0
        self._most = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._runs: dict[str, _Kept] = {}

    def add(self, batches: Iterable[Batch]) -> None:
        """Keep batches that were committed."""
        with self._lock:
            for batch in batches:
                run_id = batch.header.identity.run_id
                kept = self._runs.get(run_id)
                if kept is None:
                    kept = self._runs[run_id] = _Kept()
                kept.batches.append(batch)
                size = len(batch.rows) + _BATCH_BYTES
                kept.num_bytes += size
                self._num_bytes += size
            while self._num_bytes > self._most:
                self._drop(max(self._runs.values(), key=lambda kept: kept.num_bytes))

    def note(self, run_id: str) -> None:
        """Remember that the store has rows of the run that were not given to ``add``."""
        with self._lock:
            self._runs.setdefault(run_id, _Kept()).has_more = True

    def waiting(self) -> list[str]:
        """Return the runs that have something; who came first comes first."""
        with self._lock:
            return list(self._runs)

    def take(self, run_id: str) -> Taken:
        """Return what is kept of a run, and keep it no more."""
        with self._lock:
            kept = self._runs.pop(run_id, None)
            if kept is None:
                return Taken((), False)
            self._num_bytes -= kept.num_bytes
            return Taken(tuple(kept.batches), kept.has_more)

    def _drop(self, kept: _Kept) -> None:
        batch = kept.batches.popleft()
        size = len(batch.rows) + _BATCH_BYTES
        kept.num_bytes -= size
        self._num_bytes -= size
        kept.has_more = True
        self.num_dropped += batch.header.num_rows


__all__ = ["RecentRows", "Taken"]
