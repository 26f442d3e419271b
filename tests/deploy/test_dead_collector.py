"""What reaches a pager through a real Prometheus and Alertmanager, set up by `vitals deploy`."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from trainvitals.io.server_identity import TlsTrust
from vitals_deploy import prometheus
from vitals_deploy.cli import write_files
from vitals_deploy.templates import alertmanager_files

pytestmark = [
    pytest.mark.servers("prometheus", "prometheus-alertmanager"),
    pytest.mark.slow,
]

FIRING = 'collector_alert_firing{run="R",alert="TrainingHalted",severity="page"}'
DEADLINE_SECONDS = 60.0


class Pager(BaseHTTPRequestHandler):
    """Takes Alertmanager's webhook, and keeps each alert's name and status."""

    told: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told += [
            (alert["labels"].get("alert", alert["labels"]["alertname"]), alert["status"])
            for alert in body["alerts"]
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Metrics(BaseHTTPRequestHandler):
    """Answers as a collector does whose page fires, or no longer."""

    value = 1

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(f"{FIRING} {type(self).value}\n".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def running(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}; told: {Pager.told}"
        time.sleep(0.1)


def in_seconds(text: str) -> str:
    """Return the configuration with its intervals a tenth and less: a test has no minutes."""
    for long in ("interval: 15s", "interval: 30s", "interval: 1m", "for: 30s"):
        text = text.replace(long, f"{long.split(':')[0]}: 1s")
    return text


@contextmanager
def deployed(folder: Path, collector: int, pager: int) -> Iterator[None]:
    """Run both servers over the generated files."""
    server, am, gossip = free_ports(3)
    url = f"http://127.0.0.1:{pager}/page"
    made = prometheus.prometheus_files(
        collector=f"127.0.0.1:{collector}", alertmanager=f"127.0.0.1:{am}", tls=TlsTrust()
    ) | alertmanager_files(page_url=url, notify_url=url)
    write_files(folder, {name: in_seconds(plain(text)) for name, text in made.items()})
    with (
        running(
            "prometheus-alertmanager",
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'am'}",
            f"--web.listen-address=127.0.0.1:{am}",
            f"--cluster.listen-address=127.0.0.1:{gossip}",
        ),
        running(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{server}",
        ),
    ):
        yield


def plain(text: str) -> str:
    """The stand-in for a collector speaks no TLS."""
    return text.replace("scheme: https", "scheme: http")


def test_a_collector_that_dies_while_a_page_fires_resolves_nothing_until_its_own_word(tmp_path):
    collector, pager = free_ports(2)
    firing, resolved = ("TrainingHalted", "firing"), ("TrainingHalted", "resolved")
    with serving(Pager, pager), deployed(tmp_path, collector, pager):
        with serving(Metrics, collector):
            until(lambda: firing in Pager.told, "the page arrives")
        until(lambda: ("VitalsCollectorDown", "firing") in Pager.told, "its death is paged")
        quiet_until = time.monotonic() + 5.0  # five evaluations, five intervals of the group
        until(lambda: time.monotonic() > quiet_until, "time passes")
        assert resolved not in Pager.told
        Metrics.value = 0
        with serving(Metrics, collector):
            until(lambda: resolved in Pager.told, "its own word resolves it")
