"""A stub of the collector: an HTTP server that keeps what it is sent. It stores nothing durably."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import msgspec

from trainvitals.views import CommandView
from trainvitals.wire import (
    OWNED_ELSEWHERE,
    OWNER_HEADER,
    IngestReply,
    decode_batch,
    split_batches,
)


class StubCollector:
    """Answers ingest and commands; ``failing`` makes it answer 503, ``refusing`` 400 [V200].

    ``batches`` are those that held something new. With ``owner`` it answers that this is another
    collector's run: that of this address, where it is one.

    ``retry_after`` goes with each 503; while not ``durable``, nothing new is called that.
    """

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.requests: list[tuple[str, str]] = []
        self.commands: list[CommandView] = []
        self.delivered: list[int] = []
        self.failing = False
        self.refusing = False
        self.owner: str | None = None
        self.retry_after = 0
        self.durable = True
        self._stored: dict[tuple[str, str, str], int] = {}
        self._durable: dict[tuple[str, str, str], int] = {}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"insecure+http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, at the same port as before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def close(self) -> None:
        """Be away."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def ingest(self, raw: bytes) -> IngestReply:
        header = decode_batch(raw).header
        key = (header.identity.run_id, header.identity.incarnation, header.stream)
        if header.last_seq > self._stored.get(key, -1):
            self.batches.append(raw)
        self._stored[key] = max(header.last_seq, self._stored.get(key, -1))
        if self.durable:
            self._durable.update(self._stored)
        return IngestReply(
            durable_seq=self._durable.get(key, -1), num_new=header.num_rows, num_duplicate=0
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                path = urlsplit(self.path).path
                raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                stub.requests.append(("POST", path))
                if stub.failing:
                    self._answer(503, b"{}")
                elif path == "/v1/ingest" and stub.owner is not None:
                    problem = {"code": "V420", "text": "another collector takes the run"}
                    body = json.dumps(problem).encode()
                    self._answer(OWNED_ELSEWHERE, body)
                elif path == "/v1/ingest" and stub.refusing:
                    problem = {"code": "V200", "text": "the batch is damaged"}
                    self._answer(400, json.dumps(problem).encode())
                elif path == "/v1/ingest":
                    self._answer(
                        200, msgspec.json.encode([stub.ingest(each) for each in split_batches(raw)])
                    )
                else:
                    stub.delivered.append(int(path.split("/")[-2]))
                    self._answer(204, b"")

            def do_GET(self) -> None:
                stub.requests.append(("GET", urlsplit(self.path).path))
                if stub.failing:
                    self._answer(503, b"{}")
                else:
                    self._answer(200, msgspec.json.encode(stub.commands))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 503 and stub.retry_after:
                    self.send_header("Retry-After", str(stub.retry_after))
                if status == OWNED_ELSEWHERE and stub.owner:
                    self.send_header(OWNER_HEADER, stub.owner)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
