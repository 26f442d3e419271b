"""Sends the spool to the collector; lets go only of what the collector has made durable."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainvitals.errors import FormatError, NewerVersionError, VitalsError
from trainvitals.io.spool import Position, read_batches
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.backoff import Backoff
from vitals_agent.faults import Faults

MAX_UNACKED_BATCHES = 4096
REFRESH_SECONDS = 1.0

Key = tuple[str, str, str]


class Ingests(Protocol):
    """What the shipper needs of a collector."""

    def ingest(self, raw: bytes) -> IngestReply:
        """Store one batch, or raise TransportError."""
        ...


class Ships(Protocol):
    """What the shipper needs of a spool."""

    directory: Path

    @property
    def acked(self) -> Position:
        """Up to where everything is acknowledged."""
        ...

    def ack(self, position: Position) -> None:
        """Let go of everything before ``position``."""
        ...


@dataclass(slots=True)
class _Progress:
    """How far one spool is sent, and how far the collector has made it durable."""

    cursor: Position
    unacked: deque[tuple[Position, Key, int]] = field(default_factory=deque)
    durable: dict[Key, int] = field(default_factory=dict)
    newest: dict[Key, bytes] = field(default_factory=dict)
    all_sent: bool = False
    heard_at: float = 0.0


class Shipper:
    """Ships the spools of all runs, oldest batch first; while the collector is away, it waits.

    At least once: a batch may be sent again, and counts once in the store. One slow collector
    costs a cycle at most ``budget_seconds`` and one request's timeout.
    """

    def __init__(
        self,
        client: Ingests,
        *,
        backoff: Backoff,
        faults: Faults,
        budget_seconds: float = 1.0,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_errors = 0
        self.num_rows = 0
        self.num_refused_rows = 0
        self._client = client
        self._backoff = backoff
        self._faults = faults
        self._budget = budget_seconds
        self._stopwatch = stopwatch
        self._progress: dict[str, _Progress] = {}

    def ship(self, run_id: str, spool: Ships, now: float) -> None:
        """Send what is new in the spool, for as long as the budget lasts."""
        if not self._backoff.due(now):
            return
        progress = self._progress.setdefault(run_id, _Progress(cursor=spool.acked, heard_at=now))
        try:
            self._send(progress, spool)
            self._refresh(progress, now)
        except VitalsError as error:
            self.num_errors += 1
            self._backoff.failed(now)
            self._faults.record("shipper", error)
        else:
            self._backoff.succeeded()
        self._ack(progress, spool, now)

    def drained(self, run_id: str) -> bool:
        """Return whether the collector holds everything that was in the spool at the last call."""
        progress = self._progress.get(run_id)
        return progress is not None and progress.all_sent and not progress.unacked

    def forget(self, run_id: str) -> None:
        """Drop what is known of a run that is not served any more."""
        self._progress.pop(run_id, None)

    def _send(self, progress: _Progress, spool: Ships) -> None:
        progress.all_sent = False
        began = self._stopwatch()
        for position, raw in read_batches(spool.directory, progress.cursor):
            if len(progress.unacked) >= MAX_UNACKED_BATCHES:
                return
            if self._stopwatch() - began > self._budget:
                return
            self._send_one(progress, position, raw)
            progress.cursor = position
        progress.all_sent = True

    def _send_one(self, progress: _Progress, position: Position, raw: bytes) -> None:
        header = decode_batch(raw).header
        key = (header.identity.run_id, header.identity.incarnation, header.stream)
        try:
            reply = self._client.ingest(raw)
        except NewerVersionError:
            raise  # it will take it once it is upgraded
        except FormatError as error:
            # The collector will never take it: it must not keep back what comes after it.
            self.num_refused_rows += header.num_rows
            self._faults.record("shipper.refused", error)
            progress.unacked.append((position, key, -1))
            return
        self.num_rows += header.num_rows
        progress.unacked.append((position, key, header.last_seq))
        progress.newest[key] = raw
        progress.durable[key] = max(reply.durable_seq, progress.durable.get(key, -1))

    def _refresh(self, progress: _Progress, now: float) -> None:
        """Ask how far it is durable, where nothing new is sent that would be answered with that.

        The question is the newest batch of each stream once more: the store knows it already.
        """
        if not progress.unacked or now - progress.heard_at < REFRESH_SECONDS:
            return
        progress.heard_at = now
        for key in {key for _, key, seq in progress.unacked if seq > progress.durable.get(key, -1)}:
            reply = self._client.ingest(progress.newest[key])
            progress.durable[key] = max(reply.durable_seq, progress.durable.get(key, -1))

    def _ack(self, progress: _Progress, spool: Ships, now: float) -> None:
        done: Position | None = None
        while progress.unacked:
            position, key, last_seq = progress.unacked[0]
            if last_seq > progress.durable.get(key, -1):
                break
            progress.unacked.popleft()
            done = position
        if done is not None:
            progress.heard_at = now
            spool.ack(done)
