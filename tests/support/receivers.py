"""Receivers of alerts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.collector.rows import RUN
from trainvitals.alerting import Alert
from trainvitals.views import AlertView

SECOND = 1_000_000_000


def alert(fingerprint: str = "f1", state: str = "firing", **changes) -> AlertView:
    fields = {
        "fingerprint": fingerprint,
        "name": "RunHalted",
        "run_id": RUN,
        "severity": "page",
        "state": state,
        "summary": "out of budget",
        "labels": {"rank": "1"},
        "step": 40,
        "started_unix_ns": 1_700_000_000 * SECOND,
        "updated_unix_ns": 1_700_000_000 * SECOND,
        "ended_unix_ns": 1_700_000_060 * SECOND if state == "resolved" else None,
    }
    return AlertView(**{**fields, **changes})


class Receiver(ThreadingHTTPServer):
    """Answers with the given statuses, then 200; keeps what was posted."""

    daemon_threads = True

    def __init__(self, statuses: list[int], headers: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = statuses
        self.answer_headers = headers
        self.headers: list[dict[str, str]] = []
        self.posted: list[tuple[str, str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?key=s3cret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Host"], body))
        self.server.headers.append(dict(self.headers))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        for name, value in self.server.answer_headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def receiver(*statuses: int, **headers: str) -> Iterator[Receiver]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with Receiver(list(statuses), named) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


ALERT = Alert(
    name="StateDamaged",
    severity="page",
    labels={"run": RUN},
    summary="the weights are damaged",
    step=5,
    point=True,
)
