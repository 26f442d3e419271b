"""Takes bodies off the network: the way from a socket to the intake, and the answer back.

This is where every agent comes by, many at once after an outage. So the path stands in front of
FastAPI, whose routing and parsing cost more than storing a batch, and memory is given out before a
body is read: what finds no room waits its turn in the kernel's buffers, for a while, and is then
sent away with the word when to come back.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainvitals.clock import Clock
from trainvitals.errors import FormatError, StorageError, UsageError, VitalsError
from trainvitals.wire import ASK_HEADER, split_batches
from vitals_collector.api.auth import (
    MAX_INGEST_BYTES,
    Refused,
    announced_bytes,
    bug,
    check_scopes,
    hardened,
    problem,
    read_body,
)
from vitals_collector.ingest.group_commit import (
    BUSY,
    COMMIT_SECONDS,
    CommitLimits,
    CommitQueue,
    Outcome,
    PendingBody,
)
from vitals_collector.storage.store import Store

_MAX_BYTES = 64 << 20
"""Of bodies that are being read or stored."""
_MAX_WAITING = 4_096
_ASKS = ASK_HEADER.lower().encode()
_WAIT_SECONDS = 3.0
"""For room, before the client is told to come back: less than it waits for an answer."""


class ByteBudget:
    """Gives out bytes of memory in the order of asking. Of one event loop.

    Raises:
        StorageError: from ``take``: too many wait, or there was no room in time.
    """

    def __init__(self, max_bytes: int, *, max_waiting: int, wait_seconds: float) -> None:
        self._free = max_bytes
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Take the bytes, waiting for them in turn; ``give`` them back."""
        if not self._queue and self._free >= num_bytes:
            self._free -= num_bytes
            return
        if len(self._queue) >= self._max_waiting:
            raise _busy()
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(num_bytes)
            turn.cancel()
            self._hand_out()
            if isinstance(error, TimeoutError):
                raise _busy() from None
            raise

    def release(self, num_bytes: int) -> None:
        """Give bytes back, to whoever waits longest."""
        self._free += num_bytes
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue:
            num_bytes, turn = self._queue[0]
            if not turn.done():
                if self._free < num_bytes:
                    return
                self._free -= num_bytes
                turn.set_result(None)
            self._queue.popleft()


class IngestApp:
    """``POST /v1/ingest`` as an ASGI app of its own, behind the gate; ``start`` and ``close``."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        max_bytes: int = _MAX_BYTES,
        wait_seconds: float = _WAIT_SECONDS,
        commit_seconds: float = COMMIT_SECONDS,
    ) -> None:
        self._store = store
        self._room = ByteBudget(max_bytes, max_waiting=_MAX_WAITING, wait_seconds=wait_seconds)
        # What got room here always finds some there.
        limits = CommitLimits(max_bytes=max_bytes, max_bodies=_MAX_WAITING, seconds=commit_seconds)
        self.commits = CommitQueue(store, clock=clock, on_done=_tell, limits=limits)

    def start(self) -> None:
        """Start to store."""
        self.commits.start()

    def close(self) -> None:
        """Store what waits, and end."""
        self.commits.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that the gate has let through."""
        try:
            check_scopes(scope["state"]["scopes"], ("ingest",))
            response = await self._serve(scope, receive)
        except VitalsError as error:
            response = problem(error)
        except (Refused, ClientDisconnect):
            raise  # the gate's to answer
        except Exception as error:  # noqa: BLE001 - nothing stands before us that would answer
            response = bug(scope["path"], error)
        await response(scope, receive, hardened(send))

    async def answer(self, body: bytes, *, asks: bool = False) -> Response:
        """Store a body's batches; return the answer once they are durable.

        Args:
            body: the batches.
            asks: whether one behind a hole is answered by ``from_seq``, and not stored.

        Raises:
            FormatError: no batch of it can be stored.
            StorageError: nothing was stored; send it again.
        """
        try:
            raws = split_batches(body)
        except FormatError as error:
            self._store.counters.reject(error.code)
            raise
        turn: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.commits.put(PendingBody(raws, len(body), turn, asks))
        outcome = await turn
        if isinstance(outcome, Exception):
            raise outcome
        # Replies have no number that is not whole: nothing is to be looked for in them.
        return Response(msgspec.json.encode(outcome), media_type="application/json")

    async def _serve(self, scope: Scope, receive: Receive) -> Response:
        self._check_plain(scope)
        num_bytes = announced_bytes(scope, MAX_INGEST_BYTES)
        try:
            await self._room.acquire(num_bytes)
        except StorageError:
            self._store.counters.defer()
            raise
        try:
            body = await read_body(receive, MAX_INGEST_BYTES)
            return await self.answer(body, asks=(_ASKS, b"ask") in scope["headers"])
        finally:
            self._room.release(num_bytes)

    def _check_plain(self, scope: Scope) -> None:
        """Refuse what is compressed: its length would not say how much memory it takes."""
        codings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        coding = b", ".join(codings).decode("latin-1").strip().lower()
        if coding not in ("", "identity"):
            text = f"Content-Encoding is {coding[:32]!r}; batches are taken as they are"
            error = UsageError(text, hint="send the body without compression")
            self._store.counters.reject(error.code)
            raise Refused(415, error)


def _tell(outcomes: Sequence[tuple[PendingBody, Outcome]]) -> None:
    """Hand the outcomes of a group to the event loop, all by one call."""
    turns = [(waiting.turn, outcome) for waiting, outcome in outcomes]
    turns[0][0].get_loop().call_soon_threadsafe(_resolve, turns)


def _resolve(turns: Sequence[tuple[asyncio.Future[Outcome], Outcome]]) -> None:
    for turn, outcome in turns:
        if not turn.done():  # else its client has gone
            turn.set_result(outcome)


def _busy() -> StorageError:
    return StorageError(
        "the collector receives more than it can store",
        hint="try again later; agents keep their spools and retry by themselves",
        code=BUSY,
    )


__all__ = ["ByteBudget", "IngestApp"]
