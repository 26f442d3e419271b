"""Opens runs for a request: one directory or collector for all, or one client per token."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Protocol

from trainvitals.errors import UnauthorizedError, VitalsError
from trainvitals.io.client import CollectorAddress, CollectorClient
from trainvitals.views import GoodputQuestion
from vitals_collector.queries.open import OpenedReader, find_run

request_token: ContextVar[str] = ContextVar("request_token", default="")
"""Bearer token of the HTTP request that is processed; "" without one."""


class RunSource(Protocol):
    """Where a tool reads runs."""

    def open(self) -> contextlib.AbstractContextManager[OpenedReader]:
        """Provide a reader with the latest data, for one request of an assistant."""
        ...


WAIT_SECONDS = 2.0
"""Time that a tool waits for a directory to be read: some HTTP clients cancel after 5 seconds."""


class StillReadingError(Exception):
    """A directory is not read yet: the assistant has to repeat the call."""


class SharedSource:
    """One reader for all requests; a request waits for the previous one.

    A directory is read in a thread of its own: a client expects the start of the server within
    seconds, and the reading continues if a request ends without a result.

    Args:
        opens: opens the reader.
        prepare: runs once after the first reading, so that the first requests are fast.
        wait_seconds: time that a request waits for the reader to have the latest rows; None: no
            limit.
    """

    def __init__(
        self,
        opens: Callable[[], contextlib.AbstractContextManager[OpenedReader]],
        *,
        prepare: Callable[[OpenedReader], object] | None = None,
        wait_seconds: float | None = None,
    ) -> None:
        self._opens = opens
        self._prepare = prepare
        self._wait_seconds = wait_seconds
        self._stack = contextlib.ExitStack()
        self._opened: OpenedReader | None = None
        self._thread = ThreadPoolExecutor(1)
        self._reading: Future[OpenedReader] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to read before the first request."""
        with self._lock:
            if self._reading is None:
                self._reading = self._thread.submit(self._read)

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenedReader]:
        """Provide the reader that all MCP requests share, after it has read new rows.

        Raises:
            StillReadingError: it has not read all of them in time.
        """
        with self._lock:
            if self._reading is None:
                self._reading = self._thread.submit(self._read)
            wait([self._reading], self._wait_seconds)
            if not self._reading.done():
                raise StillReadingError
            reading, self._reading = self._reading, None
            yield reading.result()

    def _read(self) -> OpenedReader:
        """Open the reader of all MCP requests, or let it read new rows."""
        if self._opened is None:
            self._opened = self._stack.enter_context(self._opens())
            if self._prepare is not None:
                self._prepare(self._opened)
        else:
            self._opened.refresh()
        return self._opened

    def close(self) -> None:
        """Close the reader that all requests to the MCP server share."""
        with self._lock:
            self._thread.shutdown()
            self._stack.close()


def prepare_latest_run(opened: OpenedReader) -> None:
    """Query the goodput of the latest run: slow at first, then cached.

    Not its verdict: it would start to judge a long run, though the assistant may ask nothing.
    """
    with contextlib.suppress(VitalsError):  # the request that needs it reports the error
        opened.reader.ask(GoodputQuestion(run_id=find_run(opened.reader, "").run_id))


def start_shared_source(
    opens: Callable[[], contextlib.AbstractContextManager[OpenedReader]],
) -> SharedSource:
    """Return a source of the MCP server that has begun to read."""
    source = SharedSource(opens, prepare=prepare_latest_run, wait_seconds=WAIT_SECONDS)
    source.start()
    return source


class TokenSource:
    """A collector that checks the token of each request: its scopes and projects apply."""

    def __init__(self, collector: CollectorAddress) -> None:
        self._collector = collector

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenedReader]:
        """Provide a client with the token of an MCP request, never with one of this process.

        Raises:
            UnauthorizedError: the request has no token.
        """
        token = request_token.get()
        if not token:
            raise UnauthorizedError(
                "the request has no token",
                hint="send a token of the collector with the scope read: Authorization: Bearer",
            )
        address = self._collector
        with CollectorClient(address.url, token, tls=address.tokens.tls) as client:
            yield OpenedReader(client, lambda: None)
