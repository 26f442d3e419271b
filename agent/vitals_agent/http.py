"""A client for what is asked several times a second for months: a third of the processor time.

httpx does much for each request that an agent has no use for (redirects, cookies, queries, pools).
What is said, and what every answer means, stays with ``CollectorClient``.
"""

import http.client
import ssl
import threading
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from trainvitals.errors import TransportError
from trainvitals.io.client import CollectorAddress, CollectorClient, refusal

TIMEOUT_SECONDS = 3.0


class AgentClient(CollectorClient):
    """A collector's API over one connection that is kept. Thread-safe: one request at a time.

    Args:
        address: where the collector is; the token for ingest goes along.
        timeout: seconds for each of connecting, sending and waiting.
    """

    def __init__(self, address: CollectorAddress, *, timeout: float = TIMEOUT_SECONDS) -> None:
        token = address.tokens.ingest
        super().__init__(address.url, token, timeout=timeout)
        parts = urlsplit(self.url)
        self._prefix = parts.path
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(
                parts.hostname or "",
                parts.port,
                timeout=timeout,
                context=ssl.create_default_context(),
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        )

    def close(self) -> None:
        """Close the connection, also under a request that does not end."""
        self._connection.close()
        super().close()

    def _send(self, method: str, path: str, **how: Any) -> bytes:
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
                hint="it may be overloaded; what is spooled is not lost",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(
                f"the collector at {self.url} cannot be reached: {error or type(error).__name__}",
                hint="start one with `vitals collector`, or give its address with --collector",
            ) from error
        if 200 <= response.status < 300:
            return body
        httpx_response = httpx.Response(
            response.status, headers=dict(response.getheaders()), content=body
        )
        raise refusal(self.url, path, httpx_response)

    def _exchange(
        self, method: str, target: str, content: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Ask, and once more where the kept connection turns out to be closed: all may come twice.

        A batch that is stored twice counts once, and so does a delivery.
        """
        connection = self._connection
        was_open = connection.sock is not None
        try:
            return _ask(connection, method, target, content, headers)
        except (ConnectionError, http.client.BadStatusLine):
            if not was_open:
                raise
        return _ask(connection, method, target, content, headers)


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    content: bytes,
    headers: dict[str, str],
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request(method, target, content or None, headers)
        response = connection.getresponse()
        return response, response.read()
    except BaseException:
        connection.close()  # what is half said, or half heard, belongs to no other request
        raise
