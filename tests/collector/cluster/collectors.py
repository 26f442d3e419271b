"""Real collectors on one PostgreSQL, a receiver of their alerts, and what kills and stops them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sqlalchemy import select

from tests.collector.alerting import decision
from tests.collector.rows import Writer
from tests.e2e.lab import until
from tests.support.forked import COMMANDS
from trainvitals.identity import new_run_id
from trainvitals.io.client import collector_on, open_collector_client
from vitals_collector.cluster.leases import PAGER
from vitals_collector.storage.schema import alerts, leases
from vitals_collector.storage.store import Store


class Receiver:
    """Counts which alerts were posted to it, by run and state, and keeps the deliveries' ids."""

    def __init__(self) -> None:
        self.posted: Counter[tuple[str, str]] = Counter()
        self.ids: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        posted, ids = self.posted, self.ids

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    posted[alert["run_id"], alert["state"]] += 1
                    ids[alert["run_id"], alert["state"]].add(alert["delivery_id"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler

    @contextlib.contextmanager
    def listening(self) -> Iterator["Receiver"]:
        """Answer while the context lasts."""
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


class RealCollector:
    """One `vitals collector` with a data folder of its own."""

    url = ""

    def __init__(self, data: Path, database: str, webhook: str = "", listen: str = "") -> None:
        self.data = data
        clean = {key: v for key, v in os.environ.items() if not key.startswith("VITALS_")}
        # Long enough for no run to be lost meanwhile: that is another alert.
        options = ["--data", str(data), "--lost-after", "3600"]
        options += ["--listen", listen] if listen else []
        self.log = data.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = COMMANDS.Popen(
                [sys.executable, "-m", "trainvitals", "collector", *options],
                env={
                    **clean,
                    "VITALS_COLLECTOR_DATABASE": database,
                    "VITALS_COLLECTOR_WEBHOOK": webhook,
                },
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_until_it_answers(self) -> None:
        """Wait for its address, and take it; one that was killed has left its own there."""
        until(lambda: self._address() or self.process.poll() is not None, "it answers", 60.0)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self._address()

    def _address(self) -> str:
        try:
            address = json.loads((self.data / "collector.json").read_text())
        except FileNotFoundError:
            return ""
        return str(address["url"]) if address["pid"] == self.process.pid else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this very process."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, also where it is stopped."""
        self.process.kill()
        self.process.wait()

    def take_decision(self, action: str = "rollback") -> str:
        """Have it store a decision of a new run, of which one alert is told; return the run."""
        run_id = new_run_id(time.time_ns())
        self.take(Writer(run=run_id).events(decision(action=action)))
        return run_id

    def take(self, raw: bytes) -> None:
        """Have it store a batch; raises TransportError where another one owns the run."""
        collector = collector_on(self.data)
        assert collector is not None
        with open_collector_client(collector, "ingest", timeout=60.0) as client:
            client.ingest(raw)


def pager_of(store: Store, collectors: list[RealCollector]) -> RealCollector | None:
    """Return which of them holds the lease of the pager now, by the database."""
    with store.read_transaction() as connection:
        query = select(leases.c.holder).where(leases.c.name == PAGER)
        holder = connection.execute(query).scalar() or "//"
    pid = holder.split("/")[1]
    return next((one for one in collectors if str(one.process.pid) == pid), None)


def num_settled(store: Store) -> int:
    """Return of how many alerts every notifier is known to have had the present state."""
    with store.read_transaction() as connection:
        query = select(alerts.c.fingerprint).where(alerts.c.notified_unix_ns > 0)
        return len(connection.execute(query).all())
