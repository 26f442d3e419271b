"""A collector that stores nothing and calls all of it durable: what it costs the agent to ship."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from trainvitals.wire import IngestReply, decode_batch, split_batches


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        replies = []
        for raw in split_batches(body):
            header = decode_batch(raw).header
            replies.append(
                IngestReply(durable_seq=header.last_seq, num_new=header.num_rows, num_duplicate=0)
            )
        self._answer(msgspec.json.encode(replies))

    def do_GET(self) -> None:
        self._answer(b"[]")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def collector_stub() -> Iterator[str]:
    """Listen while the block runs; give the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"insecure+http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
