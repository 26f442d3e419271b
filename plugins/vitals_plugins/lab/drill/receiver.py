"""A local receiver of alerts: the webhook to which the collector of a drill posts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from trainvitals.errors import UNREADABLE
from trainvitals.views import AlertView
from vitals_plugins.lab.drill.forwarding import UserReceiver


class ReceivedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as the webhook got it."""

    name: str
    run_id: str
    severity: str
    received_unix_ns: int = 0
    accepted_by: tuple[str, ...] = ()
    """Receivers of the user that accepted it, if the drill forwards alerts."""


class _Body(msgspec.Struct, frozen=True):
    alerts: tuple[AlertView, ...]


class LocalReceiver(ThreadingHTTPServer):
    """Stores what the collector posts, and forwards it to the user's receivers, if there are any.

    Alerts without a run are those of the drill's collector itself, and are not forwarded.
    """

    daemon_threads = True

    def __init__(self, forwards_to: Sequence[UserReceiver] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _AlertHandler)
        self.forwards_to = forwards_to
        self._alerts: list[tuple[int, AlertView]] = []

    @property
    def url(self) -> str:
        """Return the URL for the collector of the drill."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def add(self, alerts: Sequence[AlertView]) -> None:
        """Store alerts that the collector of the drill has posted, and forward them."""
        now = time.time_ns()
        self._alerts.extend((now, alert) for alert in alerts)
        for receiver in self.forwards_to:
            for alert in alerts:
                if alert.run_id and alert.severity != "log":
                    receiver.send(alert)

    def alerts(self) -> list[AlertView]:
        """Return all alerts that arrived, those of ended ones too."""
        return [alert for _, alert in self._alerts]

    def firing(self, run_id: str) -> list[AlertView]:
        """Return the alerts of a drilled run that have fired, in the order of arrival."""
        return [alert for _, alert in self._firing(run_id)]

    def received(self, run_id: str) -> tuple[ReceivedAlert, ...]:
        """Return these alerts with their time and the receivers that accepted them, once known."""
        return tuple(
            ReceivedAlert(
                name=alert.name,
                run_id=run_id,
                severity=alert.severity,
                received_unix_ns=now,
                accepted_by=tuple(
                    each.name for each in self.forwards_to if each.has_accepted(run_id, alert.name)
                ),
            )
            for now, alert in self._firing(run_id)
        )

    def _firing(self, run_id: str) -> list[tuple[int, AlertView]]:
        return [(t, a) for t, a in self._alerts if a.run_id == run_id and a.state == "firing"]


class _AlertHandler(BaseHTTPRequestHandler):
    server: LocalReceiver

    def do_POST(self) -> None:
        """Store the alerts of a request of the drill's collector."""
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except UNREADABLE:
            self.send_error(400)
            return
        self.server.add(body.alerts)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing about the drill's requests."""


@contextmanager
def local_receiver(forwards_to: Sequence[UserReceiver] = ()) -> Iterator[LocalReceiver]:
    """Run the receiver of a drill in a thread."""
    with LocalReceiver(forwards_to) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
