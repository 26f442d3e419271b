"""A TCP proxy before a collector, on which bits of what agents send flip."""

import contextlib
import socket
import threading
from collections.abc import Callable

Flips = Callable[[bytes], int | None]
"""Which bit of a body is to flip; None leaves it as it is."""


class FlippingProxy:
    """Hands each request on, body by body, and the answers as they are."""

    def __init__(self, port: int, flips: Flips) -> None:
        self.flips = flips
        self.num_bodies = self.num_flipped = 0
        self._port = port
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"insecure+http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Cut every connection."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # it was cut already
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                agent, _ = self._listener.accept()
            except OSError:
                return  # closed
            collector = socket.create_connection(("127.0.0.1", self._port))
            self._open += [agent, collector]
            self._start(self._requests, agent, collector)
            self._start(_answers, collector, agent)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _requests(self, agent: socket.socket, collector: socket.socket) -> None:
        with agent.makefile("rb") as incoming, contextlib.suppress(OSError):  # one of them has gone
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = incoming.readline()
                    if not line:
                        collector.shutdown(socket.SHUT_WR)
                        return
                    head += line
                fields = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:-2])
                body = incoming.read(int(fields.get(b"content-length", b"0")))
                collector.sendall(head + self._on_its_way(body))

    def _on_its_way(self, body: bytes) -> bytes:
        if not body:
            return body
        with self._lock:
            self.num_bodies += 1
            bit = self.flips(body)
            if bit is None:
                return body
            self.num_flipped += 1
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)


def _answers(collector: socket.socket, agent: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one of the two has gone
        while raw := collector.recv(1 << 16):
            agent.sendall(raw)
        agent.shutdown(socket.SHUT_RDWR)
