"""One thread writes what all requests bring: what waits is stored together, then all are answered.

A commit costs by the call, hardly by the row: so there is one a second. Who comes after a pause is
stored at once, and so are events, for people may be waiting for what they say. The queue is bounded
by bytes and by number: what does not fit is refused at once, to be sent again, and nothing waits in
memory that was not asked for. An answer is given after the commit, never before.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainvitals.clock import Clock
from trainvitals.errors import StorageError, VitalsError
from trainvitals.wire import IngestReply
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.storage.store import Store

BUSY = "V304"
"""Error code: more came than is written; try again later."""

_GROUP_BYTES = 16 << 20
"""Taken into one transaction, beside a number of batches."""
COMMIT_SECONDS = 1.0
"""From one commit to the next: it costs by the commit, hardly by the row."""

_LOG = logging.getLogger("vitals.collector.intake")

Outcome = tuple[IngestReply, ...] | Exception
"""What became of a body: a reply for each batch, or why there is none."""

OnDone = Callable[[list[tuple["PendingBody", Outcome]]], None]
"""Takes the outcomes of a whole group at once; called in the writing thread."""


@dataclass(eq=False, slots=True)
class PendingBody:
    """One body's batches, and the future of the asker's event loop that is told the outcome."""

    raws: Sequence[bytes]
    num_bytes: int
    turn: "asyncio.Future[Outcome]"
    is_urgent: bool = False
    """Whether it must not wait for others: it may be what people are to be told."""
    asks: bool = False
    """Whether its sender would rather fill holes than have them counted as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLimits:
    """How much may wait, and how much is written together."""

    max_bytes: int = 64 << 20
    """Of bodies that wait or are being written; one body alone is always taken."""
    max_bodies: int = 4_096
    group_batches: int = 32_768
    """Taken into one transaction, so that it does not take long."""
    seconds: float = COMMIT_SECONDS
    """From one transaction to the next, but for a full group and what is urgent."""


class CommitQueue:
    """A queue of bodies and the thread that writes them. ``close`` writes what waits first.

    Args:
        store: where to.
        clock: says when a body was received.
        on_done: gives the answers on.
        limits: the bounds.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        on_done: OnDone,
        limits: CommitLimits | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_done = on_done
        self._limits = limits or CommitLimits()
        self._changed = threading.Condition()
        self._waiting: deque[PendingBody] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._is_urgent = False
        self._next_at = 0.0
        self._thread = threading.Thread(target=self._run, name="vitals-intake")

    @property
    def num_bytes(self) -> int:
        """Bytes that wait or are being written."""
        return self._num_bytes

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, waiting: PendingBody) -> None:
        """Queue a body; its outcome comes through ``on_done``. Never blocks.

        Raises:
            StorageError: there is no room, or the intake is closed; send it again later.
        """
        with self._changed:
            if self._is_closed:
                raise StorageError("the collector is shutting down", code=BUSY)
            is_full = self._num_bytes + waiting.num_bytes > self._limits.max_bytes
            if self._num_bytes and (is_full or len(self._waiting) >= self._limits.max_bodies):
                self._store.counters.defer()
                raise StorageError(
                    f"{len(self._waiting)} bodies wait to be stored, {self._num_bytes} bytes",
                    hint="try again later; agents keep their spools and retry by themselves",
                    code=BUSY,
                )
            self._num_bytes += waiting.num_bytes
            self._waiting.append(waiting)
            self._is_urgent = self._is_urgent or waiting.is_urgent
            # The thread waits for the first, and for what ends its wait for others.
            if len(self._waiting) == 1 or self._is_due():
                self._changed.notify()

    def close(self) -> None:
        """Take no more, store what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident is not None:  # was started
            self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            self._next_at = time.monotonic() + self._limits.seconds
            outcomes = self._store_group(group)
            with self._changed:  # before the answers: who has one sends again, and must find room
                self._num_bytes -= sum(waiting.num_bytes for waiting in group)
            try:
                self._on_done(list(zip(group, outcomes, strict=True)))
            except Exception:  # noqa: BLE001 - nobody may end this thread but close
                self._store.counters.fail("ingest")
                _LOG.exception("answers_not_given num=%d", len(group))

    def _next_group(self) -> list[PendingBody]:
        """Wait for something, and for others; then take what is there up to the bounds.

        None when closed. Who comes when nothing was written for a while waits for nobody.
        """
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            while not self._is_due() and (left := self._next_at - time.monotonic()) > 0:
                self._changed.wait(left)
            self._is_urgent = False
            group: list[PendingBody] = []
            num_bytes = num_batches = 0
            while self._waiting:
                waiting = self._waiting[0]
                num_bytes += waiting.num_bytes
                num_batches += len(waiting.raws)
                is_large = num_bytes > _GROUP_BYTES
                if group and (is_large or num_batches > self._limits.group_batches):
                    break
                group.append(self._waiting.popleft())
            return group

    def _is_due(self) -> bool:
        """Return whether what waits is to be written without waiting for more."""
        return self._is_closed or self._is_urgent or self._num_bytes >= _GROUP_BYTES

    def _store_group(self, group: Sequence[PendingBody]) -> Sequence[Outcome]:
        try:
            bodies, now = [waiting.raws for waiting in group], self._clock.time_ns()
            asking = [waiting.asks for waiting in group]
            with self._store.hearing.storing(self._clock):
                return ingest_bodies(self._store, bodies, now, asking)
        except VitalsError as error:
            return [error] * len(group)
        except Exception as error:  # noqa: BLE001 - said to every asker, and this thread goes on
            self._store.counters.fail("ingest")
            _LOG.exception("ingest_failed num=%d", len(group))
            return [error] * len(group)


__all__ = ["BUSY", "CommitLimits", "CommitQueue", "Outcome", "PendingBody"]
