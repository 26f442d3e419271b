"""A node as it really is: journals of eight ranks, and the agent that ships them."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from trainvitals.io.journal import JournalWriter, announce_run, journal_directory
from trainvitals.io.private import private_base
from trainvitals.records import (
    EVENT_SCHEMA,
    AttemptStarted,
    Decision,
    DecisionMade,
    Event,
    RunInfo,
    RunStarted,
)
from vitals_bench.ingest.records import ATTEMPT, RANKS_PER_NODE, SCHEMA, Numbers, identity_of
from vitals_bench.processes import Started

NODE = "node-0"


class RealNode:
    """Ranks 0 to 7 of a run, written to journals by this process. Leaving the ``with`` ends it.

    Args:
        folder: for the run directory.
        shm: directory for journals.
        run_id: the run.
        world_size: ranks of the whole run.
    """

    def __init__(self, folder: Path, shm: Path, run_id: str, *, world_size: int) -> None:
        self.run_id = run_id
        self._folder, self._shm = folder, shm
        run_folder = announce_run(
            private_base({"VITALS_SHM": str(shm)}), run_id, folder / "runs" / run_id
        )
        identities = [
            identity_of(run_id, rank, world_size=world_size, node=NODE)
            for rank in range(RANKS_PER_NODE)
        ]
        self._journals = [
            JournalWriter(journal_directory(run_folder, identity), identity)
            for identity in identities
        ]
        self._streams = [journal.open_stream(SCHEMA) for journal in self._journals]
        self._events = self._journals[0].open_stream(EVENT_SCHEMA)
        self._numbers = Numbers(RANKS_PER_NODE, seed=2)
        self.num_rows = 0
        """Rows written so far, events included."""
        self._say(RunStarted(info=RunInfo(name="bench", world_size=world_size)))
        self._say(AttemptStarted(id=ATTEMPT, parent=None, fork_step=0, reason="start"))

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            journal.close()

    def __enter__(self) -> RealNode:
        return self

    def agent(self, url: str, tokens: Path) -> Started:
        """Start the real agent for the journals."""
        args = [
            *(sys.executable, "-m", "vitals_agent", "--dir", str(self._folder / "runs")),
            *("--run", self.run_id, "--collector", url, "--token-file", str(tokens)),
            *("--node", NODE),
        ]
        return Started("agent", args, self._folder, env={"VITALS_SHM": str(self._shm)})

    def step(self, step: int) -> None:
        """Write one row of each rank."""
        block = self._numbers.block(step, 1, begin_ns=0, step_ns=0)
        for stream, values in zip(self._streams, block.values[:, 0].tolist(), strict=True):
            stream.append([step, ATTEMPT, time.time_ns(), time.monotonic_ns(), *values])
            self.num_rows += 1

    def decide(self, step: int, cause: str) -> None:
        """Write a rollback into the ledger: its alert needs no hold."""
        decision = Decision(
            ledger_seq=step,
            action="rollback",
            step=step,
            decided_at_step=step,
            attempt=ATTEMPT,
            reason="a rollback of the bench",
            rule="bench",
            cause=cause,
            budget_left=5,
        )
        self._say(DecisionMade(decision=decision), step)

    def _say(self, event: Event, step: int = 0) -> None:
        now, monotonic = time.time_ns(), time.monotonic_ns()
        self._events.append_event(
            event, step=step, attempt=ATTEMPT, time_unix_ns=now, monotonic_ns=monotonic
        )
        self.num_rows += 1  # these are short: a row each


class _Alert(msgspec.Struct):
    labels: dict[str, str] = {}


class _Body(msgspec.Struct):
    alerts: list[_Alert]


class Receiver:
    """A small webhook receiver: notes when the alert of each cause first came."""

    def __init__(self) -> None:
        self.came_at: dict[str, float] = {}
        came_at = self.came_at

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                now = time.monotonic()
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                for alert in msgspec.json.decode(raw, type=_Body).alerts:
                    came_at.setdefault(alert.labels.get("cause", ""), now)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
