"""``/metrics`` and ``/healthz``: read from the agent at scrape time, nothing is kept."""

import hmac
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from trainvitals.catalog import CATALOG, MetricSpec
from trainvitals.errors import UsageError

SPECS: Mapping[str, MetricSpec] = {metric.name: metric for metric in CATALOG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One value of one catalogued metric; the labels in the catalog's order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the cycle still turns."""

    ok: bool
    details: Mapping[str, object] = field(default_factory=dict)


class Exposed(Protocol):
    """What the server asks; both are called on its own threads, so they only read."""

    def readings(self) -> Iterable[Reading]:
        """Return the present values."""
        ...

    def health(self) -> Health:
        """Return whether the agent works."""
        ...


class AgentCollector(Collector):
    """Turns readings into families with the catalog's names, types and help."""

    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric that has a value now."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for reading in self._exposed.readings():
            spec = SPECS[reading.name]
            if reading.name not in families:
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                families[reading.name] = kind(spec.name, spec.help, labels=spec.labels)
            families[reading.name].add_metric(reading.labels, reading.value)
        yield from families.values()


class MetricsServer:
    """Serves one agent on its own threads until closed.

    ``/metrics`` needs the read token (nodes are shared, loopback is not private); ``/healthz`` is
    open and says nothing about a run.
    """

    def __init__(self, exposed: Exposed, *, host: str, port: int, token: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(exposed))
        handler = _handler(exposed, registry, token)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--listen {host}:{port} cannot be used: {error}",
                hint="port 0 takes a free one",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},  # how long ``close`` may take
            name="vitals-agent-http",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address it listens on."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop listening and wait for the listening thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(
    exposed: Exposed, registry: CollectorRegistry, token: str
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "vitals-agent"
        sys_version = ""
        timeout = 5.0

        def do_GET(self) -> None:
            routes: dict[str, Callable[[], None]] = {
                "/metrics": self._metrics,
                "/healthz": self._healthz,
            }
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                self._answer(404, "text/plain", b"there are /metrics and /healthz\n")
            else:
                route()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a scrape every few seconds is no news."""

        def _metrics(self) -> None:
            given = self.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                text = b"give the token in read.token of the agent's folder as a bearer token\n"
                self._answer(401, "text/plain", text, {"WWW-Authenticate": "Bearer"})
                return
            encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encoder(registry))

        def _healthz(self) -> None:
            health = exposed.health()
            body = {"status": "ok" if health.ok else "stalled", **health.details}
            self._answer(
                200 if health.ok else 503, "application/json", json.dumps(body).encode() + b"\n"
            )

        def _answer(
            self, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler
