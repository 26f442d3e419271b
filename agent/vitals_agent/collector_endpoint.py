"""Connection to a collector: search, loss, another search if it moved, and its requests."""

import http.client
import itertools
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import httpx

from trainvitals.errors import ForeignBatchError, NotOwnerError, TransportError
from trainvitals.io.client import (
    CollectorAddress,
    CollectorClient,
    CollectorTokens,
    collector_on,
    read_tokens,
    response_error,
)
from trainvitals.io.server_identity import (
    UNPROVEN,
    connect_unix,
    not_connected,
    parse_url,
    tls_context,
)
from trainvitals.io.setting_paths import collector_folder, collector_urls, default_data_dir
from trainvitals.question import Question
from trainvitals.wire import IngestReply

TIMEOUT_SECONDS = 3.0


class AgentClient(CollectorClient):
    """A collector's API over one persistent connection. Thread-safe: one request at a time.

    Args:
        address: URL and ingest token of the collector.
        timeout: seconds for each of connecting, sending and waiting.
    """

    def __init__(self, address: CollectorAddress, *, timeout: float = TIMEOUT_SECONDS) -> None:
        tls = address.tokens.tls
        super().__init__(address.url, address.tokens.ingest, tls=tls, timeout=timeout)
        self._prefix = urlsplit(self._address.base).path
        self._lock = threading.Lock()
        self._connection = self._new_connection(timeout)

    def _new_connection(self, timeout: float) -> http.client.HTTPConnection:
        """Create the agent's connection to the collector: Unix socket, TLS or plain HTTP."""
        if self._address.socket is not None:
            return _UnixConnection(self._address.socket, timeout)
        parts = urlsplit(self._address.base)
        host, port = parts.hostname or "", parts.port
        if self._address.is_tls:
            context = tls_context(self._tls)
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def close(self) -> None:
        """Close the agent's connection to the collector, even during a request that hangs."""
        self._connection.close()
        super().close()

    def _send(self, method: str, path: str, **how: Any) -> bytes:
        """Send one of the agent's requests on its kept connection; return the response's body."""
        query = f"?{urlencode(how['params'])}" if how.get("params") else ""
        headers = {**self._headers, **how.get("headers", {})}
        try:
            with self._lock:
                response, body = self._exchange(
                    method, f"{self._prefix}{path}{query}", how.get("content", b""), headers
                )
        except TimeoutError as error:
            raise TransportError(
                f"the collector at {self.url} did not answer in time",
                hint="it may be overloaded; spooled rows are not lost",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise not_connected(self.url, self._tls, error) from error
        if 200 <= response.status < 300:
            return body
        httpx_response = httpx.Response(
            response.status, headers=dict(response.getheaders()), content=body
        )
        raise response_error(self.url, path, httpx_response)

    def _exchange(
        self, method: str, target: str, content: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request of the agent, and retry if the kept connection was closed.

        A batch that is stored twice counts once; the same applies to a delivery.
        """
        connection = self._connection
        was_open = connection.sock is not None
        try:
            return _send_request(connection, method, target, content, headers)
        except (ConnectionError, ssl.SSLEOFError, http.client.BadStatusLine):
            if not was_open:
                raise
        return _send_request(connection, method, target, content, headers)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect the agent only to a local collector of this user, or of root."""
        self.sock = connect_unix(self._path, self.timeout)


def _send_request(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    content: bytes,
    headers: dict[str, str],
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send a request on the agent's connection to the collector; close it after an error."""
    try:
        connection.request(method, target, content or None, headers)
        response = connection.getresponse()
        return response, response.read()
    except BaseException:
        connection.close()  # a partial request or response must not mix with the next one
        raise


# ----------------------------------------------------------------------- a changing collector


LOOK_SECONDS = 5.0
_MOST_HOPS = 3
"""Maximum redirects between collectors in one call: their leases may change in the meantime."""

T = TypeVar("T")
Find = Callable[[], CollectorAddress | None]


class CollectorEndpoint:
    """A collector that may start, stop, and start again elsewhere. Thread-safe.

    It is searched for while none is known, and again once one did not respond, no longer knew our
    token, or found that the run does not belong to that token: it may have been started again at
    another port, and the token file may contain another token.

    Args:
        find: returns the current URL of a collector; None if there is none.
        connect: makes a client for that URL.
    """

    def __init__(
        self, find: Find, *, connect: Callable[[CollectorAddress], CollectorClient] | None = None
    ) -> None:
        self._find = find
        self._connect = connect or AgentClient
        self._address: CollectorAddress | None = None
        self._client: CollectorClient | None = None
        self._ahead: tuple[CollectorAddress, CollectorClient] | None = None
        self._lock = threading.Lock()
        self._looked_at: float | None = None
        self._is_doubtful = True

    def reachable(self, now: float) -> bool:
        """Return whether the agent knows a collector, after a search if that is uncertain."""
        with self._lock:
            is_due = self._looked_at is None or now - self._looked_at >= LOOK_SECONDS
            if self._is_doubtful and is_due:
                self._looked_at = now
                self._connect_to(self._find())
            return self._client is not None

    def answers(self, now: float) -> bool:
        """Return whether a collector responds to the agent now; if not, try the next one later."""
        client = self._client if self.reachable(now) else None
        if client is not None and client.answers():
            return True
        self._is_doubtful = True
        return False

    def ingest(self, raw: bytes) -> IngestReply:
        """Send one spooled batch to the collector, which stores it."""
        return self._call_collector(lambda client: client.ingest(raw))

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> tuple[IngestReply, ...]:
        """Send spooled batches to the collector in one request; return one reply per batch."""
        return self._call_collector(
            lambda client: client.ingest_all(raws, asks=asks, writer_key=writer_key)
        )

    def send_ahead(self, raws: Sequence[bytes], writer_key: str = "") -> None:
        """Send batches before the spool's backlog, on a separate connection to the collector.

        If earlier rows of a stream are not stored yet, these are not stored either.
        """
        with self._lock:
            address = self._address
            if address is None:
                return
            if self._ahead is None or self._ahead[0] != address:
                self._close_ahead_connection()
                self._ahead = address, self._connect(address)
            client = self._ahead[1]
        client.ingest_all(raws, asks=True, writer_key=writer_key)

    def ask(self, question: Question[T]) -> T:
        """Return the collector's response to a query of the agent."""
        return self._call_collector(lambda client: client.ask(question))

    def mark_delivered(self, run_id: str, number: int, incarnation: str) -> None:
        """Report to the collector that the agent has put a command into the mailbox."""
        self._call_collector(lambda client: client.mark_delivered(run_id, number, incarnation))

    def drop(self) -> None:
        """Close the agent's connections, and search for the collector again."""
        self.close()
        self._address, self._is_doubtful = None, True

    def close(self) -> None:
        """Close the agent's connections to the collector."""
        with self._lock:
            self._close_ahead_connection()
            if self._client is not None:
                self._client.close()
                self._client = None

    def _close_ahead_connection(self) -> None:
        """Close the separate connection on which the agent sends events early."""
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def _call_collector(self, call: Callable[[CollectorClient], T]) -> T:
        """Make a request of the agent to its collector; after an error, search for it again."""
        client = self._client
        if client is None:
            raise TransportError(
                "no collector is known", hint="start one with `vitals collector`, or name one"
            )
        try:
            answer = self._call_owner(client, call)
        except (TransportError, ForeignBatchError):
            self._is_doubtful = True
            raise
        self._is_doubtful = False
        return answer

    def _call_owner(self, client: CollectorClient, call: Callable[[CollectorClient], T]) -> T:
        """Make a request of the agent, and follow to the collector that owns the run."""
        for _ in range(_MOST_HOPS):
            try:
                return call(client)
            except NotOwnerError as error:
                with self._lock:
                    self._turn_to(error.owner)
                    if self._client is None:
                        raise
                    client = self._client
        return call(client)

    def _turn_to(self, owner: str) -> None:
        """Connect the agent to the run owner if its URL is known, otherwise to the next URL."""
        address = first = self._find()
        owner = owner.removeprefix(UNPROVEN)
        while owner and address is not None and address.url.removeprefix(UNPROVEN) != owner:
            address = self._find()
            if address == first:  # all were tried
                address = self._find()
                break
        self._address = None  # one URL may have several collectors: use a new connection
        self._connect_to(address)

    def _connect_to(self, address: CollectorAddress | None) -> None:
        """Connect the agent to this collector; close the previous connection."""
        if address == self._address:
            return
        if self._client is not None:
            self._client.close()
        self._client = None if address is None else self._connect(address)
        self._address = address


# ------------------------------------------------------------------------------- search


def make_collector_finder(
    collector: str, token_file: Path | None, environ: Mapping[str, str], *, run_id: str = ""
) -> Find:
    """Return the agent's search for a collector: at URLs, in a data directory, or this user's.

    Files are read again at each search. With several URLs each search returns the next one; the run
    determines the first, so that runs are spread and the agents of a run start with the same one.

    Raises:
        UsageError: ``collector`` is neither a list of URLs nor a directory.
    """
    data = collector_folder(collector) if collector else default_data_dir(environ)
    if data is None:
        urls = collector_urls(collector)
        for url in urls:
            parse_url(url)
        first = zlib.crc32(run_id.encode()) % len(urls)
        turns = itertools.cycle([*urls[first:], *urls[:first]])
        return lambda: CollectorAddress(
            url=next(turns), tokens=read_tokens(token_file) if token_file else CollectorTokens()
        )
    return lambda: collector_on(data, token_file or "")
