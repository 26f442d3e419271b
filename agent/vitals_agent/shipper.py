"""Sends the spool to the collector; deletes only batches that the collector has made durable.

Every batch is sent with a query whether earlier rows are missing. A collector that has fewer rows
than it had acknowledged, because it was restored from a backup, reports this. Then the spool is
read again from the oldest batch still in it, and for each stream the missing rows are resent. Rows
that the spool lacks too are skipped, and the collector counts them as lost. After an interruption
this continues at its position, if the collector still has the last batch shown to it.

A refused batch stops its own stream, because a resent batch may arrive intact. The other streams
continue. A batch that was only damaged in transit is retried indefinitely, any other ``MAX_TRIES``
times.

An acknowledgement above all rows ever spooled means that another sender wrote to the stream. That
stream stops as well, and none of its batches is deleted. The same applies if the collector knows
another writer key for it. A forged row must not delay the rows and commands of others.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trainvitals.errors import (
    DamagedBatchError,
    ForeignBatchError,
    FormatError,
    NewerVersionError,
    ServerIdentityError,
    TransportError,
    VitalsError,
    WriterKeyError,
)
from trainvitals.io.spool import Key, Spool, SpoolPosition
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.backoff import BacklogRateLimit, Backoff
from vitals_agent.faults import Faults

MAX_UNACKED_BATCHES = 4096
MAX_REQUEST_BATCHES = 256
MAX_REQUEST_BYTES = 1_000_000
"""A single batch may be larger. Most proxies accept up to 1 MiB by default."""
REFRESH_SECONDS = 1.0
MAX_TRIES = 5
"""Maximum attempts for a batch that is refused because of its content; then it is quarantined."""
MAX_RETRY_SECONDS = 60.0
MIN_TOLD_TRIES = 8
"""Refusals of one batch, about two minutes, before a report: most problems end sooner."""


class IngestClient(Protocol):
    """The shipper's interface of a collector."""

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> Sequence[IngestReply]:
        """Send the agent's batches to the collector; return one reply per batch.

        With ``asks`` a batch after a gap is not stored, but gets a reply with ``from_seq``.
        """
        ...

    def drop(self) -> None:
        """Close the agent's connections: the server is not the collector that it trusts."""
        ...


class _InFlightBatch(NamedTuple):
    """A batch in flight: between these positions, of this stream, up to this number."""

    start: SpoolPosition
    end: SpoolPosition
    key: Key
    last_seq: int
    num_rows: int


@dataclass(slots=True)
class _StoppedStream:
    """A stream that waits for one of its batches, which was refused."""

    batch: _InFlightBatch
    num_tries: int
    due: float


@dataclass(slots=True)
class _ShippingProgress:
    """Progress of one spool: sent batches, and those that the collector has made durable."""

    cursor: SpoolPosition
    pace: BacklogRateLimit
    writer_key: str = ""
    unacked: deque[_InFlightBatch] = field(default_factory=deque)
    durable: dict[Key, int] = field(default_factory=dict)
    all_sent: bool = False
    heard_at: float = 0.0
    stopped: dict[Key, _StoppedStream] = field(default_factory=dict)
    quarantined: set[SpoolPosition] = field(default_factory=set)
    """End positions of abandoned batches; within one process, and therefore few."""
    searched: dict[Key, int] = field(default_factory=dict)
    """Start of the gap for which a stream's batches were last searched."""
    is_rereading: bool = False
    """Whether the cursor reads everything still in the spool again."""
    reread_from: SpoolPosition | None = None
    last_reread: _InFlightBatch | None = None
    """The last batch up to which the collector has all batches that were read again."""
    is_resumed: bool = False
    """Whether it started at ``last_reread``, after a failure, and not at the oldest batch."""
    inherited: dict[Key, int | None] = field(default_factory=dict)
    """Streams of an earlier agent, which may have sent more than the disk kept: their durable
    numbers at the first report."""
    is_new: bool = True
    """Whether the collector may be another one, or may have lost rows since the last request."""

    def is_done(self, sent: _InFlightBatch, spool: Spool) -> bool:
        """Return whether a sent batch is durable, quarantined, or dropped by a full spool."""
        return self.is_settled(sent) or sent.end <= spool.acked

    def is_withheld(self, batch: _InFlightBatch) -> bool:
        """Return whether a spooled batch is not sent: settled, or its stream stopped."""
        return batch.key in self.stopped or self.is_settled(batch)

    def advance_past(self, batch: _InFlightBatch) -> None:
        """Advance past a batch of the spool; it stays pending until it is done.

        Not for a batch after the one that its stream waits for: it is read again later.
        """
        stopped = self.stopped.get(batch.key)
        if stopped is None or stopped.batch == batch:
            self.unacked.append(batch)
        self.cursor = batch.end

    def record_durable(self, sent: _InFlightBatch, durable_seq: int, spool: Spool) -> bool:
        """Record how much of a stream the collector has; False if more than was spooled."""
        key = sent.key
        inherited = self.inherited.get(key, -1)
        if inherited is None:
            self.inherited[key] = durable_seq
        elif durable_seq > max(inherited, sent.last_seq, spool.newest_seq(key)):
            return False
        self.durable[key] = max(durable_seq, self.durable.get(key, -1))
        return True

    def rewind(self, position: SpoolPosition) -> None:
        """Read the spool's batches after the position again, to resend them."""
        self.cursor = min(position, self.cursor)
        self.all_sent = False
        while self.unacked and self.unacked[-1].end > position:
            self.unacked.pop()

    def reread_spool(self, spool: Spool) -> None:
        """Resend everything still in the spool, because the collector lost rows."""
        self.is_rereading, self.last_reread, self.is_resumed = True, None, False
        self.reread_from = spool.kept_from
        self.durable.clear()
        self.rewind(self.reread_from)

    def note_reread(self, group: Sequence[_InFlightBatch]) -> None:
        """Note that the collector has the reread spool up to this group's end, if it does."""
        begins = self.reread_from if self.last_reread is None else self.last_reread.end
        if begins == group[0].start and all(map(self.is_settled, group)):
            self.last_reread = group[-1]

    def is_settled(self, batch: _InFlightBatch) -> bool:
        """Return whether the collector has the sent batch, or will never accept it."""
        return batch.last_seq <= self.durable.get(batch.key, -1) or batch.end in self.quarantined

    def start_over(self, spool: Spool) -> None:
        """Discard the collector's replies on sent batches: it may have lost the rows."""
        self.unacked.clear()
        self.durable.clear()
        self.searched.clear()
        self.is_new, self.all_sent = True, False
        if not self.is_rereading:
            self.cursor = spool.acked
        elif self.last_reread is None:
            self.cursor = self.reread_from = spool.kept_from
        else:
            self.cursor, self.is_resumed = self.last_reread.end, True


class Shipper:
    """Ships the spools of all runs, oldest batch first; waits while the collector is down.

    At least once: a batch may be sent again, and counts once in the store. One slow collector
    costs a cycle at most ``budget_seconds`` and one request's timeout.

    ``on_stopped`` is called with a stream that is not stored, and why; repeatedly while that lasts.
    """

    def __init__(
        self,
        client: IngestClient,
        *,
        backoff: Backoff,
        faults: Faults,
        budget_seconds: float = 1.0,
        new_pace: Callable[[], BacklogRateLimit] = BacklogRateLimit,
        stopwatch: Callable[[], float] = time.monotonic,
        on_stopped: Callable[[Key, str], None] = lambda key, text: None,
    ) -> None:
        self.num_errors = 0
        self.num_rows = 0
        self.num_refused_rows = 0
        self.num_resent_batches = 0
        """Batches that were refused, or missing in the collector despite an acknowledgement."""
        self._client = client
        self._backoff = backoff
        self._faults = faults
        self._budget = budget_seconds
        self._new_pace = new_pace
        self._stopwatch = stopwatch
        self._on_stopped = on_stopped
        self._progress: dict[str, _ShippingProgress] = {}

    def ship(self, run_id: str, spool: Spool, now: float, writer_key: str = "") -> None:
        """Send a spool's new batches, as long as the time budget and the rate limit allow."""
        if not self._backoff.due(now):
            return
        progress = self._progress.get(run_id)
        if progress is None:
            progress = _ShippingProgress(
                cursor=spool.acked,
                pace=self._new_pace(),
                writer_key=writer_key,
                heard_at=now,
                inherited=dict.fromkeys(spool.last_seqs()),
            )
            self._progress[run_id] = progress
        failure: VitalsError | None = None
        try:
            self._check_latest_stored(progress, spool)
            self._try_again(progress, spool, now)
            self._send_spool(progress, spool, now)
            self._query_durable_seqs(progress, spool, now)
        except VitalsError as error:
            failure = error
            self._note_failure(progress, error, now)
        else:
            self._backoff.record_success()
        try:
            self._ack_settled_batches(progress, spool, now)
        finally:
            if failure is not None:
                # A collector may have lost rows that were not durable: all are resent.
                progress.start_over(spool)

    def drained(self, run_id: str) -> bool:
        """Return whether the collector has everything that the spool held at the last call."""
        progress = self._progress.get(run_id)
        return progress is not None and progress.all_sent and not progress.unacked

    def forget(self, run_id: str) -> None:
        """Discard the shipping progress of a run that the agent released."""
        self._progress.pop(run_id, None)

    def _note_failure(self, progress: _ShippingProgress, error: VitalsError, now: float) -> None:
        """Record a failed request to the collector; wait longer before the next."""
        self.num_errors += 1
        retry_after = error.retry_after_seconds if isinstance(error, TransportError) else 0.0
        self._backoff.record_failure(now, retry_after=retry_after)
        progress.pace.failed()
        progress.all_sent = False
        self._faults.record("shipper", error)
        if isinstance(error, ServerIdentityError):
            self._client.drop()

    # -------------------------------------------------------------------------- sending

    def _send_spool(self, progress: _ShippingProgress, spool: Spool, now: float) -> None:
        """Send a spool's new batches until the time or the rate is used up."""
        progress.all_sent = False
        began = self._stopwatch()
        # A slow collector gets smaller requests, so that it can respond in time.
        max_bytes = min(MAX_REQUEST_BYTES, int(progress.pace.bytes_per_second))
        for group in _group_batches(spool, progress.cursor, max_bytes):
            elapsed = self._stopwatch() - began
            if len(progress.unacked) >= MAX_UNACKED_BATCHES or elapsed > self._budget:
                return
            if not progress.pace.due(now + elapsed):
                return
            num_bytes = sum(len(raw) for batch, raw in group if not progress.is_withheld(batch))
            if not self._send_together(progress, spool, group, now):
                progress.reread_spool(spool)
                return
            progress.note_reread([batch for batch, _ in group])
            answered = self._stopwatch() - began
            if num_bytes:
                progress.pace.sent(num_bytes, answered - elapsed, now + answered)
        progress.all_sent = True
        progress.is_rereading, progress.last_reread = False, None

    def _send_together(
        self,
        progress: _ShippingProgress,
        spool: Spool,
        group: list[tuple[_InFlightBatch, bytes]],
        now: float,
    ) -> bool:
        """Send the spooled batches that are due; False: the collector lacks acknowledged rows."""
        to_send = [each for each in group if not progress.is_withheld(each[0])]
        replies: dict[SpoolPosition, IngestReply] = {}
        if to_send:
            try:
                answers = self._ingest(progress, [raw for _, raw in to_send], asks=True)
            except NewerVersionError:
                raise  # it will accept them once it is upgraded
            except FormatError as error:
                if len(to_send) > 1:  # send them one by one to find the refused one
                    return all(self._send_together(progress, spool, [each], now) for each in group)
                answers = [_refusal_reply(error)]
            ends = [batch.end for batch, _ in to_send]
            replies = dict(zip(ends, answers, strict=True))
        for batch, raw in group:
            reply = replies.get(batch.end)
            if reply is None:
                pass  # it was not sent
            elif not self._process_reply(progress, spool, batch, raw, reply, now):
                return False
            progress.advance_past(batch)
        return True

    def _ingest(
        self, progress: _ShippingProgress, raws: Sequence[bytes], *, asks: bool = False
    ) -> Sequence[IngestReply]:
        """Send spooled batches of a run to the collector, with the agent's writer key."""
        return self._client.ingest_all(raws, asks=asks, writer_key=progress.writer_key)

    def _process_reply(
        self,
        progress: _ShippingProgress,
        spool: Spool,
        sent: _InFlightBatch,
        raw: bytes,
        reply: IngestReply,
        now: float,
    ) -> bool:
        """Process the collector's reply to a sent batch; False if earlier rows must go first."""
        if reply.code.startswith(NewerVersionError.code[:3]):
            raise NewerVersionError(reply.text, code=reply.code)
        if sent.key in progress.stopped and (reply.code or reply.from_seq >= 0):
            return True  # it is resent after the batch that its stream waits for
        if reply.code:
            self._stop_stream(progress, sent, reply, now)
            return True
        if reply.from_seq >= 0:
            was_searched = progress.searched.get(sent.key) == reply.from_seq
            has_looked = progress.is_rereading and not progress.is_resumed
            if not has_looked and not was_searched:
                progress.searched[sent.key] = reply.from_seq
                return False
            # No earlier rows are stored any longer: the missing ones are lost, and counted there.
            progress.searched[sent.key] = reply.from_seq
            reply = self._ingest(progress, [raw])[0]
            if reply.code:
                self._stop_stream(progress, sent, reply, now)
                return True
        if self._record_durable(progress, spool, sent, reply, now):
            self.num_rows += sent.num_rows
        return True

    def _record_durable(
        self,
        progress: _ShippingProgress,
        spool: Spool,
        sent: _InFlightBatch,
        reply: IngestReply,
        now: float,
    ) -> bool:
        """Record a stream's durable number; stop the stream, and only it, if it is impossible."""
        if progress.record_durable(sent, reply.durable_seq, spool):
            return True
        stream, newest = sent.key[2], spool.newest_seq(sent.key)
        text = (
            f"the collector acknowledges rows of {stream} up to {reply.durable_seq}, and there are "
            f"none after {newest}: another writer used this stream. Its rows are kept and not "
            "sent; other streams continue"
        )
        refusal = IngestReply(
            durable_seq=-1, num_new=0, num_duplicate=0, code=ServerIdentityError.code, text=text
        )
        self._stop_stream(progress, sent, refusal, now)
        return False

    # ------------------------------------------------------- refused and missing batches

    def _check_latest_stored(self, progress: _ShippingProgress, spool: Spool) -> None:
        """Send the latest acknowledged batch to a collector that was down, to detect lost rows."""
        if not progress.is_new:
            return
        last_reread = progress.last_reread
        raw = spool.last_acked() if last_reread is None else _read_batch(spool, last_reread)
        if raw is None:
            is_lacking = last_reread is not None  # no longer retained
        else:
            try:
                reply = self._ingest(progress, [raw], asks=True)[0]
            except FormatError as error:  # it was refused and quarantined before
                reply = _refusal_reply(error)
            is_lacking = not reply.code and (reply.from_seq >= 0 or reply.num_new > 0)
        if is_lacking:
            progress.reread_spool(spool)
        progress.is_new = False

    def _stop_stream(
        self, progress: _ShippingProgress, sent: _InFlightBatch, reply: IngestReply, now: float
    ) -> None:
        """Stop sending a stream whose batch the collector refused, until it is stored."""
        stopped = progress.stopped.setdefault(sent.key, _StoppedStream(sent, 0, now))
        stopped.num_tries += 1
        seconds = REFRESH_SECONDS * 2 ** (stopped.num_tries - 1)
        stopped.due = now + min(MAX_RETRY_SECONDS, seconds)
        error = FormatError(reply.text, code=reply.code)
        self._faults.record("shipper.refused", error)
        is_doubt = reply.code in (ServerIdentityError.code, WriterKeyError.code)
        may_be_taken = is_doubt or reply.code.startswith(
            (DamagedBatchError.code[:3], ForeignBatchError.code[:3])
        )
        is_given_up = not may_be_taken and stopped.num_tries >= MAX_TRIES
        is_news = stopped.num_tries.bit_count() == 1
        if is_given_up or (is_news and (is_doubt or stopped.num_tries >= MIN_TOLD_TRIES)):
            self._on_stopped(sent.key, reply.text)
        if is_given_up:
            self._quarantine(progress, sent)

    def _quarantine(self, progress: _ShippingProgress, sent: _InFlightBatch) -> None:
        """Quarantine a spooled batch that the collector never accepts, to send later ones."""
        self.num_refused_rows += sent.num_rows
        progress.quarantined.add(sent.end)
        progress.searched[sent.key] = sent.last_seq - sent.num_rows + 1  # only this spool had it
        progress.stopped.pop(sent.key, None)

    def _try_again(self, progress: _ShippingProgress, spool: Spool, now: float) -> None:
        """Resend refused batches that are due; a stream continues once its own batch is stored."""
        for key, stopped in list(progress.stopped.items()):
            if now < stopped.due:
                continue
            sent = stopped.batch
            raw = _read_batch(spool, sent)
            if raw is not None:
                self._resend_batch(progress, spool, sent, raw, now)
            else:
                del progress.stopped[key]
            if key not in progress.stopped:
                progress.rewind(sent.end)

    def _resend_batch(
        self,
        progress: _ShippingProgress,
        spool: Spool,
        sent: _InFlightBatch,
        raw: bytes,
        now: float,
    ) -> None:
        self.num_resent_batches += 1
        try:
            # Without a query: all earlier batches were sent before it.
            reply = self._ingest(progress, [raw])[0]
        except NewerVersionError:
            raise  # it will accept it once it is upgraded
        except FormatError as error:
            reply = _refusal_reply(error)
        if reply.code:
            self._stop_stream(progress, sent, reply, now)
            return
        if self._record_durable(progress, spool, sent, reply, now):
            del progress.stopped[sent.key]
            self.num_rows += sent.num_rows

    # -------------------------------------------------------------------- acknowledgements

    def _query_durable_seqs(self, progress: _ShippingProgress, spool: Spool, now: float) -> None:
        """Query what the collector has stored, by resending each stream's oldest batch.

        The query is the oldest batch of each stream again: the store knows it already.
        """
        if not progress.unacked or now - progress.heard_at < REFRESH_SECONDS:
            return
        progress.heard_at = now
        oldest: dict[Key, _InFlightBatch] = {}
        for each in progress.unacked:
            if not progress.is_done(each, spool) and each.key not in progress.stopped:
                oldest.setdefault(each.key, each)
        for waiting in oldest.values():
            raw = _read_batch(spool, waiting)
            if raw is not None:
                reply = self._ingest(progress, [raw])[0]
                self._record_durable(progress, spool, waiting, reply, now)

    def _ack_settled_batches(self, progress: _ShippingProgress, spool: Spool, now: float) -> None:
        """Release the spooled batches that the collector has, or never accepts."""
        # Settled batches of a stopped stream are not pending: they would fill the window.
        waiting = deque(each for each in progress.unacked if not progress.is_done(each, spool))
        if len(waiting) < len(progress.unacked):
            progress.heard_at = now
            spool.ack(waiting[0].start if waiting else progress.unacked[-1].end)
            progress.unacked = waiting
        if not progress.unacked and not progress.is_rereading:
            progress.durable.clear()


def _read_batch(spool: Spool, batch: _InFlightBatch) -> bytes | None:
    """Read a batch to send from the spool; None if the spool was full and dropped it."""
    read = next(spool.read(batch.start), None)
    return read[1] if read is not None and read[0] == batch.end else None


def _refusal_reply(error: FormatError) -> IngestReply:
    """Return the error of a batch that the collector refused as a reply to the agent."""
    return IngestReply(durable_seq=-1, num_new=0, num_duplicate=0, code=error.code, text=error.text)


def _group_batches(
    spool: Spool, start: SpoolPosition, max_bytes: int
) -> Iterator[list[tuple[_InFlightBatch, bytes]]]:
    """Yield the spool's batches after ``start`` in groups that are sent together."""
    group: list[tuple[_InFlightBatch, bytes]] = []
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
        group.append((_InFlightBatch(start, end, key, header.last_seq, header.num_rows), raw))
        num_bytes += len(raw)
        start = end
    if group:
        yield group
