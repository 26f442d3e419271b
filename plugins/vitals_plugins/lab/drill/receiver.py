"""A local receiver of alerts: the webhook to which the collector of a drill posts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from trainvitals.errors import UNREADABLE


class ReceivedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as the webhook got it."""

    name: str
    run_id: str
    severity: str
    state: str
    summary: str = ""
    received_unix_ns: int = 0


class _Body(msgspec.Struct, frozen=True):
    alerts: tuple[ReceivedAlert, ...]


class LocalReceiver(ThreadingHTTPServer):
    """Stores what the collector posts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _AlertHandler)
        self.alerts: list[ReceivedAlert] = []

    @property
    def url(self) -> str:
        """Return the URL for the collector of the drill."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def firing(self, run_id: str) -> list[ReceivedAlert]:
        """Return the alerts of a drilled run that have fired, in the order of arrival."""
        return [each for each in self.alerts if each.run_id == run_id and each.state == "firing"]


class _AlertHandler(BaseHTTPRequestHandler):
    server: LocalReceiver

    def do_POST(self) -> None:
        """Store the alerts of a request of the drill's collector."""
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        now = time.time_ns()
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except UNREADABLE:
            self.send_error(400)
            return
        alerts = [msgspec.structs.replace(each, received_unix_ns=now) for each in body.alerts]
        self.server.alerts.extend(alerts)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing about the drill's requests."""


@contextmanager
def local_receiver() -> Iterator[LocalReceiver]:
    """Run the receiver of a drill in a thread."""
    with LocalReceiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
