"""A collector that answers with made-up views over real HTTP: the dashboard's other side."""

import math
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np

from tests.dashboard.samples import NOW_NS, SampleRun
from trainvitals.jsonable import to_json
from trainvitals.records import Command
from trainvitals.views import (
    AckRequest,
    AlertView,
    AnnotationRequest,
    AnnotationView,
    CellsReply,
    CommandRequest,
    CommandView,
    DifferenceReply,
    ManySeriesRequest,
    Problem,
    RunSummary,
    SeriesReply,
    SeriesRequest,
    TableReply,
    TableRequest,
)
from vitals_collector.queries.difference import Curve, subtract

READ, CONTROL = "read-token-0123456789", "control-token-0123456789"


@dataclass
class Stub:
    """What the stub knows; a test changes it while it runs."""

    runs: list[RunSummary] = field(default_factory=list)
    samples: dict[str, SampleRun] = field(default_factory=dict)
    alerts: list[AlertView] = field(default_factory=list)
    acks: list[tuple[str, AckRequest]] = field(default_factory=list)
    commands: list[tuple[str, CommandRequest]] = field(default_factory=list)
    questions: list[TableRequest] = field(default_factory=list)
    table: TableReply | Problem = field(
        default_factory=lambda: TableReply(columns=(), data=(), num_total=0)
    )
    broken: bool = False
    """Whether questions are answered with an error of the server."""
    num_series: int = 0
    url: str = ""

    def add(self, sample: SampleRun) -> None:
        """Serve a whole run."""
        self.runs.append(sample.summary)
        self.samples[sample.summary.run_id] = sample

    def annotate(self, run_id: str, raw: bytes) -> AnnotationView:
        """Keep what a person wrote at a step."""
        asked = msgspec.json.decode(raw, type=AnnotationRequest)
        made = AnnotationView(step=asked.step, text=asked.text, by=asked.by, time_unix_ns=NOW_NS)
        self.samples[run_id].annotations.append(made)
        return made

    def answer(self, path: str, query: dict[str, str]) -> object:
        """Return the body of a GET, or None for 404."""
        parts = path.strip("/").split("/")[1:]
        if parts == ["runs"]:
            return self.runs
        if parts == ["alerts"]:
            return self.alerts
        sample = self.samples.get(parts[1]) if parts[0] == "runs" and len(parts) > 1 else None
        if sample is None:
            line = next((r for r in self.runs if r.run_id in parts), None)
            if line is None or len(parts) < 3:
                return None
            return ()
        kind = parts[2] if len(parts) > 2 else "detail"
        if kind == "difference":
            return _difference(sample, self.samples[query["other"]], query)
        if kind == "cells":
            return _cells(sample, query)
        if kind == "events" and query.get("kind"):
            return [event for event in sample.events if event.kind == query["kind"]]
        return {"detail": sample.detail}.get(kind, getattr(sample, kind, None))

    def take(self, path: str, raw: bytes) -> object:
        """Return the body of a POST, and keep what was asked."""
        parts = path.strip("/").split("/")[1:]
        if parts == ["tables"]:
            self.questions.append(msgspec.json.decode(raw, type=TableRequest))
            return self.table
        if parts[-1] == "series":
            self.num_series += 1
            asked = msgspec.json.decode(raw, type=ManySeriesRequest)
            return [_series(self.samples.get(parts[1]), parts[1], one) for one in asked.series]
        if parts[-1] == "ack":
            self.acks.append((parts[1], msgspec.json.decode(raw, type=AckRequest)))
            return next(a for a in self.alerts if a.fingerprint == parts[1])
        if parts[-1] == "annotations":
            return self.annotate(parts[1], raw)
        asked = msgspec.json.decode(raw, type=CommandRequest)
        self.commands.append((parts[1], asked))
        return _sent(parts[1], asked, len(self.commands))


def _difference(base: SampleRun, other: SampleRun, query: dict[str, str]) -> DifferenceReply:
    """Return it at the points the stub has, by the collector's own arithmetic."""

    def curve(sample: SampleRun) -> Curve:
        reply = sample.series[query["metric"], "rank:0", "lineage"]
        x = np.array(reply.step, dtype=float)
        if query["along"] == "tokens":
            counted = sample.series["steps.tokens_seen", "rank:0", "lineage"]
            x = np.interp(x, counted.step, np.array(counted.value, dtype=float))
        return Curve(x, np.array(reply.value, dtype=float))

    found = subtract(curve(base), curve(other))
    return DifferenceReply(
        base=base.summary.run_id,
        other=other.summary.run_id,
        metric=query["metric"],
        along=query["along"],  # type: ignore[arg-type]
        num_total=len(found.x),
        is_interpolated=False,
        x=tuple(np.rint(found.x).astype(int).tolist()),
        value=tuple(v if math.isfinite(v) else None for v in found.value.tolist()),
    )


def _sent(run_id: str, asked: CommandRequest, number: int) -> CommandView:
    command = Command(
        number=number,
        run_id=run_id,
        action=asked.action,
        reason=asked.reason,
        issued_by="test",
        issued_unix_ns=1,
        expires_unix_ns=2,
        checkpoint_id=asked.checkpoint_id,
        argument=asked.argument or 0.0,
    )
    return CommandView(command=command, status="pending")


def _cells(sample: SampleRun, query: dict[str, str]) -> CellsReply | Problem:
    reply = sample.cells.get(query["metric"])
    if reply is None:
        return Problem(code="V101", text=f"there is no heat map of {query['metric']}")
    first, last = int(query.get("from_step", 0)), int(query.get("to_step", 1 << 60))
    keep = [i for i, step in enumerate(reply.step) if first <= step <= last]
    return msgspec.structs.replace(
        reply,
        step=tuple(reply.step[i] for i in keep),
        value=tuple(tuple(row[i] for i in keep) for row in reply.value),
        nonfinite=tuple((row, keep.index(c)) for row, c in reply.nonfinite if c in keep),
    )


def _series(sample: SampleRun | None, run_id: str, asked: SeriesRequest) -> SeriesReply:
    key = (asked.metric, asked.source or "rank:0", asked.branch)
    reply = None if sample is None else sample.series.get(key)
    if reply is None:
        return _empty(run_id, *key)
    first = -1 if asked.from_step is None else asked.from_step  # -1: of a GPU or a host
    last = 1 << 40 if asked.to_step is None else asked.to_step
    since, until = asked.from_time_unix_ns or 0, asked.to_time_unix_ns or 1 << 62
    keep = [
        i
        for i, (step, time) in enumerate(zip(reply.step, reply.time_unix_ns, strict=True))
        if first <= step <= last and since <= time <= until
    ]
    return msgspec.structs.replace(
        reply,
        num_total=len(keep) if len(keep) < len(reply.step) else reply.num_total,
        step=tuple(reply.step[i] for i in keep),
        time_unix_ns=tuple(reply.time_unix_ns[i] for i in keep),
        attempt=tuple(reply.attempt[i] for i in keep),
        value=tuple(reply.value[i] for i in keep),
        nonfinite=tuple(mark for mark in reply.nonfinite if first <= mark.step <= last),
    )


def _empty(run_id: str, metric: str, source: str, branch: str) -> SeriesReply:
    return SeriesReply(
        run_id=run_id,
        metric=metric,
        source=source,
        unit="",
        num_total=0,
        branch=branch,
        step=(),
        time_unix_ns=(),
        attempt=(),
        value=(),
        nonfinite=(),
    )  # type: ignore[arg-type]


class StubServer:
    """Serves a ``Stub`` on a free port, until closed."""

    def __init__(self, stub: Stub) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {key: value[0] for key, value in parse_qs(parts.query).items()}
                if self.headers.get("Authorization") not in (f"Bearer {READ}", f"Bearer {CONTROL}"):
                    self._send(401, Problem(code="V410", text="the token is wrong"))
                    return
                body = stub.answer(parts.path, query)
                self._say(body)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                only_reads = self.path.endswith(("/tables", "/series"))
                needed = (READ, CONTROL) if only_reads else (CONTROL,)
                if self.headers.get("Authorization") not in [f"Bearer {t}" for t in needed]:
                    self._send(403, Problem(code="V410", text="the token may not do this"))
                    return
                self._say(stub.take(self.path, raw))

            def _say(self, body: object) -> None:
                if stub.broken and self.path.endswith("/tables"):
                    self._send(500, Problem(code="V900", text="the store cannot be read"))
                    return
                if body is None:
                    self._send(404, Problem(code="V100", text="there is no such run"))
                else:
                    self._send(404 if isinstance(body, Problem) else 200, body)

            def _send(self, status: int, body: object) -> None:
                raw = to_json(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        stub.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
