"""A collector that answers with made-up views over real HTTP: the dashboard's other side."""

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

from tests.dashboard.samples import NOW_NS, SampleRun
from trainvitals.views import (
    AckRequest,
    AlertView,
    AnnotationRequest,
    AnnotationView,
    Problem,
    RunSummary,
    SeriesReply,
)

READ, CONTROL = "read-token-0123456789", "control-token-0123456789"


@dataclass
class Stub:
    """What the stub knows; a test changes it while it runs."""

    runs: list[RunSummary] = field(default_factory=list)
    samples: dict[str, SampleRun] = field(default_factory=dict)
    alerts: list[AlertView] = field(default_factory=list)
    acks: list[tuple[str, AckRequest]] = field(default_factory=list)
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
            return _bare_series(line, query) if line and parts[-1] == "series" else None
        kind = parts[2] if len(parts) > 2 else "detail"
        if kind == "series":
            return _series(sample, query)
        return {"detail": sample.detail}.get(kind, getattr(sample, kind, None))


def _series(sample: SampleRun, query: dict[str, str]) -> SeriesReply:
    key = (query["metric"], query.get("source", "rank:0"), query.get("branch", "lineage"))
    reply = sample.series.get(key)
    if reply is None:
        return _empty(sample.summary.run_id, *key)
    first, last = int(query.get("from_step", 0)), int(query.get("to_step", 1 << 40))
    keep = [i for i, step in enumerate(reply.step) if first <= step <= last]
    return msgspec.structs.replace(
        reply,
        step=tuple(reply.step[i] for i in keep),
        time_unix_ns=tuple(reply.time_unix_ns[i] for i in keep),
        attempt=tuple(reply.attempt[i] for i in keep),
        value=tuple(reply.value[i] for i in keep),
    )


def _bare_series(line: RunSummary, query: dict[str, str]) -> SeriesReply:
    return _empty(line.run_id, query["metric"], "rank:0", "lineage")


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
                if body is None:
                    self._send(404, Problem(code="V100", text="there is no such run"))
                else:
                    self._send(200, body)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                fingerprint = self.path.split("/")[-2]
                if self.headers.get("Authorization") != f"Bearer {CONTROL}":
                    self._send(403, Problem(code="V410", text="the token may not do this"))
                    return
                if self.path.endswith("/annotations"):
                    self._send(200, stub.annotate(self.path.split("/")[-2], raw))
                    return
                stub.acks.append((fingerprint, msgspec.json.decode(raw, type=AckRequest)))
                self._send(200, next(a for a in stub.alerts if a.fingerprint == fingerprint))

            def _send(self, status: int, body: object) -> None:
                raw = msgspec.json.encode(body)
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
