"""Sends the spool to the collector; lets go only of what the collector has made durable."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trainvitals.errors import FormatError, NewerVersionError, TransportError, VitalsError
from trainvitals.io.spool import Position
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.backoff import Backoff, Pace
from vitals_agent.faults import Faults

MAX_UNACKED_BATCHES = 4096
MAX_REQUEST_BATCHES = 256
MAX_REQUEST_BYTES = 1_000_000
"""A batch alone may be larger. Proxies mostly take up to 1 MiB unless they are told otherwise."""
REFRESH_SECONDS = 1.0

Key = tuple[str, str, str]


class Ingests(Protocol):
    """What the shipper needs of a collector."""

    def ingest_all(self, raws: Sequence[bytes]) -> Sequence[IngestReply]:
        """Store batches and answer each; raise a VitalsError where none was taken."""
        ...


class Ships(Protocol):
    """What the shipper needs of a spool."""

    @property
    def acked(self) -> Position:
        """Up to where everything is acknowledged."""
        ...

    def read(self, start: Position) -> Iterator[tuple[Position, bytes]]:
        """Yield the batches after ``start``, each with the position after it."""
        ...

    def ack(self, position: Position) -> None:
        """Let go of everything before ``position``."""
        ...


class _Waiting(NamedTuple):
    """A batch on its way: between these positions, of this stream, up to this number.

    ``last_seq`` is -1 where it was refused for good: nothing is waited for.
    """

    start: Position
    end: Position
    key: Key
    last_seq: int
    num_rows: int


@dataclass(slots=True)
class _Progress:
    """How far one spool is sent, and how far the collector has made it durable."""

    cursor: Position
    pace: Pace
    unacked: deque[_Waiting] = field(default_factory=deque)
    durable: dict[Key, int] = field(default_factory=dict)
    all_sent: bool = False
    heard_at: float = 0.0

    def is_done(self, sent: _Waiting, spool: Ships) -> bool:
        """Return whether nothing is waited for: it is durable, refused, or a full spool's loss."""
        return sent.last_seq <= self.durable.get(sent.key, -1) or sent.end <= spool.acked


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
        new_pace: Callable[[], Pace] = Pace,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_errors = 0
        self.num_rows = 0
        self.num_refused_rows = 0
        self._client = client
        self._backoff = backoff
        self._faults = faults
        self._budget = budget_seconds
        self._new_pace = new_pace
        self._stopwatch = stopwatch
        self._progress: dict[str, _Progress] = {}

    def ship(self, run_id: str, spool: Ships, now: float) -> None:
        """Send what is new in the spool, for as long as the budget and the pace allow."""
        if not self._backoff.due(now):
            return
        progress = self._progress.get(run_id)
        if progress is None:
            progress = _Progress(cursor=spool.acked, pace=self._new_pace(), heard_at=now)
            self._progress[run_id] = progress
        failure: VitalsError | None = None
        try:
            self._send(progress, spool, now)
            self._refresh(progress, spool, now)
        except VitalsError as error:
            failure = error
            self._note_failure(progress, error, now)
        else:
            self._backoff.succeeded()
        try:
            self._ack(progress, spool, now)
        finally:
            if failure is not None:
                # What comes back may have lost what was not durable: all of that goes again.
                progress.unacked.clear()
                progress.cursor = spool.acked

    def drained(self, run_id: str) -> bool:
        """Return whether the collector holds everything that was in the spool at the last call."""
        progress = self._progress.get(run_id)
        return progress is not None and progress.all_sent and not progress.unacked

    def forget(self, run_id: str) -> None:
        """Drop what is known of a run that is not served any more."""
        self._progress.pop(run_id, None)

    def _note_failure(self, progress: _Progress, error: VitalsError, now: float) -> None:
        self.num_errors += 1
        retry_after = error.retry_after_seconds if isinstance(error, TransportError) else 0.0
        self._backoff.failed(now, retry_after=retry_after)
        progress.pace.failed()
        progress.all_sent = False
        self._faults.record("shipper", error)

    # -------------------------------------------------------------------------- sending

    def _send(self, progress: _Progress, spool: Ships, now: float) -> None:
        progress.all_sent = False
        began = self._stopwatch()
        # A collector that is slow gets less to answer at a time, so that it can in time.
        max_bytes = min(MAX_REQUEST_BYTES, int(progress.pace.bytes_per_second))
        for group in _requests(spool, progress.cursor, max_bytes):
            spent = self._stopwatch() - began
            if len(progress.unacked) >= MAX_UNACKED_BATCHES or spent > self._budget:
                return
            if not progress.pace.due(now + spent):
                return
            self._send_together(progress, group)
            answered = self._stopwatch() - began
            num_bytes = sum(len(raw) for _, raw in group)
            progress.pace.sent(num_bytes, answered - spent, now + answered)
        progress.all_sent = True

    def _send_together(self, progress: _Progress, group: list[tuple[_Waiting, bytes]]) -> None:
        try:
            replies = self._client.ingest_all([raw for _, raw in group])
        except NewerVersionError:
            raise  # it will take them once it is upgraded
        except FormatError as error:
            if len(group) == 1:
                self._pass_over(progress, group[0][0], error)
                return
            for each in group:  # which of them is it?
                self._send_together(progress, [each])
            return
        for (waiting, _), reply in zip(group, replies, strict=True):
            self._absorb(progress, waiting, reply)

    def _absorb(self, progress: _Progress, sent: _Waiting, reply: IngestReply) -> None:
        """Take in the answer to one batch."""
        if reply.code.startswith(NewerVersionError.code[:3]):
            raise NewerVersionError(reply.text, code=reply.code)
        if reply.code:
            self._pass_over(progress, sent, FormatError(reply.text, code=reply.code))
            return
        self.num_rows += sent.num_rows
        progress.unacked.append(sent)
        progress.cursor = sent.end
        progress.durable[sent.key] = max(reply.durable_seq, progress.durable.get(sent.key, -1))

    def _pass_over(self, progress: _Progress, sent: _Waiting, error: FormatError) -> None:
        """The collector will never take it: it must not keep back what comes after it."""
        self.num_refused_rows += sent.num_rows
        self._faults.record("shipper.refused", error)
        progress.unacked.append(sent._replace(last_seq=-1))
        progress.cursor = sent.end

    # -------------------------------------------------------------------- letting go

    def _refresh(self, progress: _Progress, spool: Ships, now: float) -> None:
        """Ask how far it is durable, where nothing new is sent that would be answered with that.

        The question is the oldest batch of each stream once more: the store knows it already.
        """
        if not progress.unacked or now - progress.heard_at < REFRESH_SECONDS:
            return
        progress.heard_at = now
        oldest: dict[Key, _Waiting] = {}
        for each in progress.unacked:
            if not progress.is_done(each, spool):
                oldest.setdefault(each.key, each)
        for key, waiting in oldest.items():
            batch = next(spool.read(waiting.start), None)
            if batch is not None and batch[0] == waiting.end:  # else a full spool dropped it
                reply = self._client.ingest_all([batch[1]])[0]
                progress.durable[key] = max(reply.durable_seq, progress.durable.get(key, -1))

    def _ack(self, progress: _Progress, spool: Ships, now: float) -> None:
        done: Position | None = None
        while progress.unacked and progress.is_done(progress.unacked[0], spool):
            done = progress.unacked.popleft().end
        if not progress.unacked:
            progress.durable.clear()
        if done is not None:
            progress.heard_at = now
            spool.ack(done)


def _requests(
    spool: Ships, start: Position, max_bytes: int
) -> Iterator[list[tuple[_Waiting, bytes]]]:
    """Yield what is spooled after ``start`` in groups that travel together."""
    group: list[tuple[_Waiting, bytes]] = []
    num_bytes = 0
    for end, raw in spool.read(start):
        if group and (num_bytes + len(raw) > max_bytes or len(group) == MAX_REQUEST_BATCHES):
            yield group
            group, num_bytes = [], 0
        try:
            header = decode_batch(raw).header
        except NewerVersionError:
            if group:
                yield group
            raise
        key = (header.identity.run_id, header.identity.incarnation, header.stream)
        group.append((_Waiting(start, end, key, header.last_seq, header.num_rows), raw))
        num_bytes += len(raw)
        start = end
    if group:
        yield group
