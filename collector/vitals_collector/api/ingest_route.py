"""Receives bodies of rows, stores waiting ones together, and responds to all.

Every agent uses this route, many at once after an outage. It therefore comes before FastAPI, whose
routing and parsing cost more than storing a batch, and memory is reserved before a body is read: a
request without memory waits in the kernel's buffers for a while, and is then refused with a time to
retry.

Two threads write. A commit costs per call, hardly per row: so there is one commit of rows per
second, and a body that arrives after a pause is stored at once. Events have a separate lane,
because users may be waiting for them: they are stored as they arrive, even while rows wait for a
merge of files. The queue is bounded by bytes, number and time: a body that does not fit is refused
at once and sent again later. If more arrives than is written, senders would time out and send
everything again: so no rows are accepted while others have waited too long. The response to a body
is sent after the commits of everything in it.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainvitals.clock import Clock
from trainvitals.errors import (
    FormatError,
    StorageError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.wire import ASK_HEADER, WRITER_KEY_HEADER, IngestReply, is_of_events, split_batches
from vitals_collector.api import auth
from vitals_collector.ingest.ingest import BatchResult, reply_to_body, store_bodies
from vitals_collector.storage.store import SteadyClock, Store
from vitals_collector.storage.tokens import OWN, Principal

_MAX_BYTES = 64 << 20
"""Memory for bodies that are being read or stored."""
_MAX_WAITING = 4_096
_ASKS = ASK_HEADER.lower().encode()
_WRITER_KEY = WRITER_KEY_HEADER.lower().encode()
_WAIT_SECONDS = 3.0
"""For memory, or in the queue, before a client is told to retry: about its own timeout."""
BUSY = "V304"
"""Error code: more arrives than is written; retry later."""

_GROUP_BYTES = 16 << 20
"""Maximum size of one transaction, in addition to a number of batches."""
COMMIT_SECONDS = 1.0
"""From one commit of rows to the next: it costs by the commit, hardly by the row."""
_LOG = logging.getLogger("vitals.collector.intake")

Outcome = tuple[IngestReply, ...] | Exception
"""Result of a body: a reply for each batch, or the error."""

OnDone = Callable[[list[tuple["PendingBody", Outcome]]], None]
"""Gets the outcomes of a whole group at once; called in a writing thread."""


@dataclass(eq=False, slots=True)
class PendingBody:
    """One body's batches, and the future in the request's event loop that gets the outcome."""

    raws: Sequence[bytes]
    num_bytes: int
    turn: "asyncio.Future[Outcome]"
    accepts_resend: bool = False
    """Whether its sender would rather fill holes than have them counted as lost."""
    principal: Principal = OWN
    """The sender."""
    _stored: dict[int, BatchResult] = field(default_factory=dict)
    """By index, the result of a batch; each lane adds its own."""
    _error: Exception | None = None
    _num_left: int = field(init=False)
    """Number of batches without a result."""

    def __post_init__(self) -> None:
        self._num_left = len(self.raws)

    def record_results(
        self, places: Sequence[int], stored: Sequence[BatchResult] | Exception
    ) -> bool:
        """Note results of some of an upload's batches; return whether all are known."""
        if isinstance(stored, Exception):
            self._error = self._error or stored
        else:
            self._stored |= zip(places, stored, strict=True)
        self._num_left -= len(places)
        return self._num_left == 0

    @property
    def outcome(self) -> Outcome:
        """Return the response to the upload: replies, or an error."""
        if self._error is not None:
            return self._error
        return reply_to_body([self._stored[index] for index in range(len(self.raws))])


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLimits:
    """Limits of the queue and of one transaction."""

    max_bytes: int = _MAX_BYTES
    """Size of waiting and running bodies; a single body is always accepted."""
    max_bodies: int = _MAX_WAITING
    group_batches: int = 8_192
    """Batches in one transaction, about a second's work: after an outage all agents send at once.
    """
    wait_seconds: float = _WAIT_SECONDS
    """If rows have waited this long, no more are accepted."""
    seconds: float = COMMIT_SECONDS
    """Between two transactions with rows, unless a group is full."""


class _LaneBatches(NamedTuple):
    """Batches of one request's body for one writer thread."""

    body: PendingBody
    places: Sequence[int]
    num_bytes: int
    since: float


class _WriterLane:
    """Queue of one writer thread. All methods except ``pop_batches`` are called under ``lock``."""

    def __init__(self, lock: threading.Lock, seconds: float, limits: CommitLimits) -> None:
        self.waiting: deque[_LaneBatches] = deque()
        self._changed = threading.Condition(lock)
        self._seconds, self._limits = seconds, limits
        self._num_bytes = 0
        self._next_at = 0.0
        self._is_closed = False

    @property
    def waited_seconds(self) -> float:
        """Return how long the oldest uploaded body has waited."""
        return time.monotonic() - self.waiting[0].since if self.waiting else 0.0

    def enqueue(self, part: _LaneBatches) -> None:
        """Queue a part of an uploaded body for a writer thread."""
        self.waiting.append(part)
        self._num_bytes += part.num_bytes
        # The thread waits for the first, and for what ends its wait for others.
        if len(self.waiting) == 1 or self._is_due():
            self._changed.notify()

    def close(self) -> None:
        """Release the waiting uploads at once, and accept no further ones."""
        self._is_closed = True
        self._changed.notify()

    def pop_batches(self) -> list[_LaneBatches]:
        """Wait for uploaded batches; then pop them up to the limits.

        Nothing if closed. A body that arrives after a pause does not wait.
        """
        with self._changed:
            while not self.waiting and not self._is_closed:
                self._changed.wait()
            while not self._is_due() and (seconds_left := self._next_at - time.monotonic()) > 0:
                self._changed.wait(seconds_left)
            self._next_at = time.monotonic() + self._seconds
            group: list[_LaneBatches] = []
            num_bytes = num_batches = 0
            while self.waiting:
                part = self.waiting[0]
                num_bytes += part.num_bytes
                num_batches += len(part.places)
                is_large = num_bytes > _GROUP_BYTES
                if group and (is_large or num_batches > self._limits.group_batches):
                    break
                group.append(self.waiting.popleft())
                self._num_bytes -= part.num_bytes
            return group

    def _is_due(self) -> bool:
        """Return whether the waiting uploads are to be written without waiting for more."""
        return self._is_closed or self._num_bytes >= _GROUP_BYTES


class CommitQueue:
    """A queue of bodies and its writer threads. ``close`` writes waiting bodies first.

    ``clock`` gives the time at which a body is received; ``on_done`` is called with the outcomes.
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
        self._arrivals = SteadyClock(clock)
        self._on_done = on_done
        self._limits = limits or CommitLimits()
        self._lock = threading.Lock()
        self._rows = _WriterLane(self._lock, self._limits.seconds, self._limits)
        self._events = _WriterLane(self._lock, 0.0, self._limits)
        self._num_bytes = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"vitals-intake-{name}")
            for name, lane in (("rows", self._rows), ("events", self._events))
        ]

    @property
    def num_bytes(self) -> int:
        """Return the uploaded bytes that wait or are being written."""
        return self._num_bytes

    @property
    def is_running(self) -> bool:
        """Return whether the threads that store uploads were started and have not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the threads that store uploaded bodies."""
        for thread in self._threads:
            thread.start()

    def enqueue(self, body: PendingBody) -> None:
        """Queue an uploaded body; its outcome comes through ``on_done``. Never blocks.

        Raises:
            StorageError: there is no room, or the intake is closed; send it again later.
        """
        rows, events = list[int](), list[int]()
        for index, raw in enumerate(body.raws):
            (events if is_of_events(raw) else rows).append(index)
        with self._lock:
            if self._is_closed:
                raise StorageError("the collector is shutting down", code=BUSY)
            num_waiting = max(len(self._rows.waiting), len(self._events.waiting))
            is_full = self._num_bytes + body.num_bytes > self._limits.max_bytes
            waited = self._rows.waited_seconds if rows else 0.0
            is_late = waited > self._limits.wait_seconds
            if self._num_bytes and (is_full or is_late or num_waiting >= self._limits.max_bodies):
                self._store.counters.defer()
                raise StorageError(
                    f"{num_waiting} bodies wait to be stored, {self._num_bytes} bytes,"
                    f" for up to {waited:.1f} s",
                    hint="try again later; agents keep their spools and retry by themselves",
                    code=BUSY,
                )
            self._num_bytes += body.num_bytes
            now = time.monotonic()
            for lane, places in ((self._rows, rows), (self._events, events)):
                if places:
                    is_all = len(places) == len(body.raws)
                    num_bytes = body.num_bytes if is_all else sum(len(body.raws[i]) for i in places)
                    lane.enqueue(_LaneBatches(body, places, num_bytes, now))

    def close(self) -> None:
        """Stop accepting uploads, store waiting bodies, and stop the threads."""
        with self._lock:
            self._is_closed = True
            self._rows.close()
            self._events.close()
        for thread in self._threads:
            if thread.ident is not None:  # was started
                thread.join()

    def _run(self, lane: _WriterLane) -> None:
        """Store the uploaded bodies of one lane until the queue closes."""
        while group := lane.pop_batches():
            outcomes = self._store_group(group)
            # before the responses: a client sends again at once, and must find space
            with self._lock:
                done = [
                    part.body
                    for part, stored in zip(group, outcomes, strict=True)
                    if part.body.record_results(part.places, stored)
                ]
                self._num_bytes -= sum(body.num_bytes for body in done)
            if not done:
                continue
            try:
                self._on_done([(body, body.outcome) for body in done])
            except Exception:  # noqa: BLE001 - nobody may end this thread but close
                self._store.counters.fail("ingest")
                _LOG.exception("answers_not_given num=%d", len(done))

    def _store_group(
        self, group: Sequence[_LaneBatches]
    ) -> Sequence[Sequence[BatchResult] | Exception]:
        """Store a group of uploads together; return each one's results or error."""
        try:
            raws = [[part.body.raws[i] for i in part.places] for part in group]
            asking, now = [part.body.accepts_resend for part in group], self._arrivals.time_ns()
            principals = [part.body.principal for part in group]
            with self._store.ingest_uptime.storing(self._arrivals):
                return store_bodies(self._store, raws, now, asking, principals)
        except VitalsError as error:
            return [error] * len(group)
        except Exception as error:  # noqa: BLE001 - said to every asker, and this thread continues
            self._store.counters.fail("ingest")
            _LOG.exception("ingest_failed num=%d", len(group))
            return [error] * len(group)


# -------------------------------------------------------------------------------- off the network


class ByteBudget:
    """Reserves memory in order of request. For one event loop.

    Raises:
        StorageError: from ``acquire``: too many wait, or there was no room in time.
    """

    def __init__(self, max_bytes: int, *, max_waiting: int, wait_seconds: float) -> None:
        self._free = max_bytes
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Reserve memory for a request's bytes, waiting in order; ``release`` returns it."""
        if not self._queue and self._free >= num_bytes:
            self._free -= num_bytes
            return
        if len(self._queue) >= self._max_waiting:
            raise _busy_error()
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(num_bytes)
            turn.cancel()
            self._grant_waiting()
            if isinstance(error, TimeoutError):
                raise _busy_error() from None
            raise

    def release(self, num_bytes: int) -> None:
        """Return memory for bytes, to the request that has waited longest."""
        self._free += num_bytes
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Reserve memory for waiting requests, in order, as far as it suffices."""
        while self._queue:
            num_bytes, turn = self._queue[0]
            if not turn.done():
                if self._free < num_bytes:
                    return
                self._free -= num_bytes
                turn.set_result(None)
            self._queue.popleft()


class IngestApp:
    """``POST /v1/ingest`` as a separate ASGI app after the authentication."""

    def __init__(
        self, store: Store, *, clock: Clock, commit_seconds: float = COMMIT_SECONDS
    ) -> None:
        self._store = store
        self._room = ByteBudget(_MAX_BYTES, max_waiting=_MAX_WAITING, wait_seconds=_WAIT_SECONDS)
        # A body that got memory here always finds space there: the limits are the same.
        limits = CommitLimits(seconds=commit_seconds)
        self.commits = CommitQueue(store, clock=clock, on_done=_deliver_outcomes, limits=limits)

    def start(self) -> None:
        """Start to store uploaded bodies."""
        self.commits.start()

    def close(self) -> None:
        """Store waiting uploads, and stop."""
        self.commits.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one authenticated request."""
        try:
            auth.check_scopes(scope["state"]["scopes"], ("ingest",))
            response = await self._serve(scope, receive)
        except UnauthorizedError as error:
            self._store.counters.refuse(error.code)
            response = auth.problem_response(error)
        except VitalsError as error:
            response = auth.problem_response(error)
        except (auth.Refused, ClientDisconnect):
            raise  # the authentication handles it
        except Exception as error:  # noqa: BLE001 - nothing stands before us that would answer
            response = auth.unexpected_error_response(scope["path"], error)
        await response(scope, receive, auth.add_security_headers(send))

    async def ingest_body(
        self, body: bytes, principal: Principal, *, accepts_resend: bool = False
    ) -> Response:
        """Store an uploaded body's batches; return the response once they are durable.

        Args:
            body: the batches.
            principal: the sender.
            accepts_resend: for a batch after a hole, return ``from_seq`` instead of storing it.

        Raises:
            FormatError: no batch of it can be stored.
            StorageError: nothing was stored; send it again.
        """
        try:
            raws = split_batches(body)
        except FormatError as error:
            self._store.counters.reject(error.code)
            raise
        replies = await self._store_batches(
            raws, len(body), principal, accepts_resend=accepts_resend
        )
        # All numbers in replies are integers: no search for non-finite ones is needed.
        return Response(msgspec.json.encode(replies), media_type="application/json")

    async def store(self, raws: Sequence[bytes], principal: Principal) -> None:
        """Store batches that this server created; all are durable when this returns.

        Raises:
            FormatError: one of them is refused.
            StorageError: nothing was stored; retry later.
        """
        for reply in await self._store_batches(raws, sum(map(len, raws)), principal):
            if reply.code:
                raise FormatError(reply.text, code=reply.code)

    async def _store_batches(
        self,
        raws: Sequence[bytes],
        num_bytes: int,
        principal: Principal,
        *,
        accepts_resend: bool = False,
    ) -> tuple[IngestReply, ...]:
        """Queue an upload's batches, and wait until they are durable; return the replies."""
        turn: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.commits.enqueue(PendingBody(raws, num_bytes, turn, accepts_resend, principal))
        outcome = await turn
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _serve(self, scope: Scope, receive: Receive) -> Response:
        """Handle one ``POST /v1/ingest``: reserve memory, read the body, store it."""
        self._check_plain(scope)
        num_bytes = auth.announced_bytes(scope, auth.MAX_INGEST_BYTES)
        try:
            await self._room.acquire(num_bytes)
        except StorageError:
            self._store.counters.defer()
            raise
        try:
            body = await auth.read_body(receive, auth.MAX_INGEST_BYTES)
            accepts_resend = (_ASKS, b"ask") in scope["headers"]
            principal: Principal = scope["state"]["principal"]
            for name, value in scope["headers"]:
                if name == _WRITER_KEY:
                    principal = principal.with_writer_key(value)
            return await self.ingest_body(body, principal, accepts_resend=accepts_resend)
        finally:
            self._room.release(num_bytes)

    def _check_plain(self, scope: Scope) -> None:
        """Reject compressed uploads: their length would not limit the memory."""
        codings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        coding = b", ".join(codings).decode("latin-1").strip().lower()
        if coding not in ("", "identity"):
            text = f"Content-Encoding is {coding[:32]!r}; batches are taken as they are"
            error = UsageError(text, hint="send the body without compression")
            self._store.counters.reject(error.code)
            raise auth.Refused(415, error)


def _deliver_outcomes(outcomes: Sequence[tuple[PendingBody, Outcome]]) -> None:
    """Hand the outcomes of a group of uploads to the event loop, all by one call."""
    turns = [(waiting.turn, outcome) for waiting, outcome in outcomes]
    turns[0][0].get_loop().call_soon_threadsafe(_set_outcomes, turns)


def _set_outcomes(turns: Sequence[tuple[asyncio.Future[Outcome], Outcome]]) -> None:
    """Deliver the results of stored bodies to the requests that wait for them."""
    for turn, outcome in turns:
        if not turn.done():  # otherwise its client has disconnected
            turn.set_result(outcome)


def _busy_error() -> StorageError:
    """Return the error for a full queue of uploads: clients retry later."""
    return StorageError(
        "the collector receives more than it can store",
        hint="try again later; agents keep their spools and retry by themselves",
        code=BUSY,
    )
