"""Ends connections that hold memory and say nothing: uvicorn itself waits for a head for ever.

A body that comes too slowly is refused by ``auth.read_body``; a connection that rests between
requests ends by uvicorn's keep-alive. Left are those on which a request never begins, or never ends
its head, be it by a byte every few seconds, or by headers without end.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0
"""From the connection, or from a request's first byte, to the end of the request's head."""
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100


class PatientProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with bounds to the time and the size of a request's head."""

    head_seconds = HEAD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's head, for a while."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; refuse a head that is too long, and begin to wait for one that is not whole."""
        was_in_head = self._in_head
        super().data_received(data)
        if self.transport.is_closing() or not self._in_head:
            return
        self._num_head_bytes += len(data) if was_in_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too long.")
        elif self.cycle is None or self.cycle.response_complete:
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, in the head or behind a body in pieces, as long as they are few.

        Raises:
            HttpParserError: they are too many.
        """
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Wait no more: what follows has its own bounds."""
        self._disarm()
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._in_head = True
        super().on_message_complete()

    def _arm(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.head_seconds, self._give_up)

    def _disarm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()
