"""A collector that answers with made-up views over real HTTP: the dashboard's other side."""

import math
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import numpy as np

from tests.dashboard.samples import NOW_NS, SampleRun
from trainvitals.jsonable import to_json
from trainvitals.question import ROUTES, Question
from trainvitals.records import Command
from trainvitals.views import (
    AckRequest,
    AlertsQuestion,
    AlertView,
    AnnotationRequest,
    AnnotationView,
    CellsQuestion,
    CellsReply,
    CommandView,
    ConfigsQuestion,
    DifferenceQuestion,
    DifferenceReply,
    EventsQuestion,
    FailingNode,
    FailingNodesQuestion,
    IncidentLine,
    ManySeriesQuestion,
    Problem,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    RunVerdict,
    SeriesReply,
    SeriesRequest,
    TableQuestion,
    TableReply,
    VerdictQuestion,
    VerdictView,
)
from vitals_collector.numbers.interface import Points, smooth
from vitals_collector.queries.difference import SampledCurve, subtract

READ, CONTROL = "read-token-0123456789", "control-token-0123456789"


@dataclass
class Stub:
    """What the stub knows; a test changes it while it runs."""

    runs: list[RunSummary] = field(default_factory=list)
    samples: dict[str, SampleRun] = field(default_factory=dict)
    alerts: list[AlertView] = field(default_factory=list)
    failing_nodes: list[FailingNode] = field(default_factory=list)
    acks: list[tuple[str, AckRequest]] = field(default_factory=list)
    commands: list[tuple[str, Command]] = field(default_factory=list)
    questions: list[TableQuestion] = field(default_factory=list)
    table: TableReply | Problem = field(
        default_factory=lambda: TableReply(columns=(), data=(), num_total=0)
    )
    broken: bool = False
    """Whether questions are answered with an error of the server."""
    num_series: int = 0
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
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

    def ask(self, question: Question[Any]) -> object:
        """Return the answer, or None for 404."""
        match question:
            case RunsQuestion():
                return self.runs
            case AlertsQuestion():
                return self.alerts
            case ConfigsQuestion():
                return self.configs
            case FailingNodesQuestion():
                return self.failing_nodes
            case TableQuestion():
                self.questions.append(question)
                return self.table
            case ManySeriesQuestion(run_id=run_id, series=requests):
                self.num_series += 1
                return [_series(self.samples.get(run_id), run_id, one) for one in requests]
        run_id = question.run_id  # type: ignore[attr-defined]
        sample = self.samples.get(run_id)
        if isinstance(question, VerdictQuestion):
            return _verdict(run_id, sample)
        if sample is None:
            is_listed = any(run.run_id == run_id for run in self.runs)
            return () if is_listed and not isinstance(question, RunQuestion) else None
        return self._of(sample, question)

    def _of(self, sample: SampleRun, question: Question[Any]) -> object:
        match question:
            case RunQuestion():
                return sample.detail
            case DifferenceQuestion():
                return _difference(sample, self.samples[question.other], question)
            case CellsQuestion():
                return _cells(sample, question)
            case EventsQuestion(kind=kind):
                return [event for event in sample.events if kind in ("", event.kind)]
        name = type(question).__name__.removesuffix("Question").lower()
        return getattr(sample, name, None)

    def take(self, path: str, raw: bytes) -> object:
        """Return what becomes of an order, and keep it."""
        parts = path.strip("/").split("/")[1:]
        if parts[-1] == "ack":
            self.acks.append((parts[1], msgspec.json.decode(raw, type=AckRequest)))
            return next(a for a in self.alerts if a.fingerprint == parts[1])
        if parts[-1] == "annotations":
            return self.annotate(parts[1], raw)
        asked = msgspec.json.decode(raw, type=Command)
        self.commands.append((parts[1], asked))
        return CommandView(command=asked, status="pending")


def question_of(method: str, url: str, raw: bytes) -> Question[Any] | None:
    """Return the question that a request asks; None where it asks none."""
    parts = urlsplit(url)
    for route in ROUTES.values():
        place = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path), parts.path)
        if place is None or route.method != method:
            continue
        values = {name: unquote(value) for name, value in place.groupdict().items()}
        values |= dict(parse_qsl(parts.query)) | (msgspec.json.decode(raw) if raw else {})
        return msgspec.convert(values, route.kind, strict=False)
    return None


def _verdict(run_id: str, sample: SampleRun | None) -> RunVerdict:
    """Return that on its first incident; without any it is a healthy one."""
    every = [] if sample is None else sample.incidents
    lines = tuple(
        IncidentLine(
            alerts=tuple(alert.fingerprint for alert in one.alerts),
            **{name: getattr(one, name) for name in IncidentLine.__struct_fields__[:-1]},
        )
        for one in every
    )
    healthy = VerdictView(state="Running at step 420. No incidents.")
    return RunVerdict(
        run_id=run_id, verdict=every[0].verdict if every else healthy, incidents=lines
    )


def _difference(base: SampleRun, other: SampleRun, asked: DifferenceQuestion) -> DifferenceReply:
    """Return it at the points the stub has, by the collector's own arithmetic."""

    def curve(sample: SampleRun) -> SampledCurve:
        reply = sample.series[asked.metric, "rank:0", "lineage"]
        x = np.array(reply.step, dtype=float)
        if asked.along == "tokens":
            counted = sample.series["steps.tokens_seen", "rank:0", "lineage"]
            x = np.interp(x, counted.step, np.array(counted.value, dtype=float))
        if asked.along == "time":
            x = (np.array(reply.time_unix_ns) - reply.time_unix_ns[0]) / 1e6
        return SampledCurve(x, np.array(reply.value, dtype=float))

    found = subtract(curve(base), curve(other))
    return DifferenceReply(
        base=base.summary.run_id,
        other=other.summary.run_id,
        metric=asked.metric,
        along=asked.along,
        num_total=len(found.x),
        is_interpolated=False,
        x=tuple(np.rint(found.x).astype(int).tolist()),
        value=tuple(v if math.isfinite(v) else None for v in found.value.tolist()),
    )


def _cells(sample: SampleRun, asked: CellsQuestion) -> CellsReply | Problem:
    reply = sample.cells.get(asked.metric)
    if reply is None:
        return Problem(code="V101", text=f"there is no heat map of {asked.metric}")
    first = 0 if asked.from_step is None else asked.from_step
    last = 1 << 60 if asked.to_step is None else asked.to_step
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
    values = reply.value
    if asked.smoothing:
        at = (reply.step, reply.attempt, reply.time_unix_ns)
        whole = Points(*map(np.array, at), np.array(values, dtype=np.float64))
        means = smooth(whole, asked.smoothing).value.tolist()
        values = tuple(None if math.isnan(mean) else mean for mean in means)
    return msgspec.structs.replace(
        reply,
        num_total=len(keep) if len(keep) < len(reply.step) else reply.num_total,
        step=tuple(reply.step[i] for i in keep),
        time_unix_ns=tuple(reply.time_unix_ns[i] for i in keep),
        attempt=tuple(reply.attempt[i] for i in keep),
        value=tuple(values[i] for i in keep),
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
                if self.headers.get("Authorization") not in (f"Bearer {READ}", f"Bearer {CONTROL}"):
                    self._send(401, Problem(code="V410", text="the token is wrong"))
                    return
                question = question_of("GET", self.path, b"")
                self._say(None if question is None else stub.ask(question))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                question = question_of("POST", self.path, raw)
                needed = (CONTROL,) if question is None else (READ, CONTROL)
                if self.headers.get("Authorization") not in [f"Bearer {t}" for t in needed]:
                    self._send(403, Problem(code="V410", text="the token may not do this"))
                    return
                self._say(stub.take(self.path, raw) if question is None else stub.ask(question))

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
        stub.url = f"insecure+http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
