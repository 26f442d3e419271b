"""httpx over a Unix socket, whose owner is checked at every connect."""

import select
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpcore
import httpx

from trainvitals.io.server_identity import connect_unix


class UnixTransport(httpx.HTTPTransport):
    """Sends every request to the socket at ``path``, whatever host it names."""

    def __init__(self, path: Path) -> None:
        super().__init__(uds=str(path), trust_env=False)
        # httpx has no argument for it: with the path above it never falls back to a host.
        self._pool = httpcore.ConnectionPool(uds=str(path), network_backend=_UnixBackend())


class _UnixBackend(httpcore.SyncBackend):
    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """Connect httpx to a Unix socket whose owner is checked."""
        try:
            return _UnixStream(connect_unix(Path(path), timeout))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


class _UnixStream(httpcore.NetworkStream):
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive up to ``max_bytes`` from the Unix socket, with httpx's errors."""
        try:
            self._socket.settimeout(timeout)
            return self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all bytes through the Unix socket, with httpx's errors."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        """Close the Unix socket."""
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Return whether the idle Unix socket is readable: then its connection has ended."""
        if info != "is_readable":
            return None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))
