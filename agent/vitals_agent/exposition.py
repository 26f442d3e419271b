"""``/metrics`` and ``/healthz``: read from the agent's parts at scrape time, without a cache."""

import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from trainvitals.catalog import (
    CATALOG,
    GPU_METRICS,
    NODE_METRICS,
    PROCESS_METRICS,
    STEP_METRICS,
    MetricSpec,
)
from trainvitals.detect.registry import ACTED_CAUSES
from trainvitals.errors import UsageError
from trainvitals.rows import Value
from vitals_agent.command_delivery import CommandDelivery
from vitals_agent.faults import PARTS, Faults
from vitals_agent.run import ServedRun
from vitals_agent.sampling import Sampling
from vitals_agent.shipper import Shipper
from vitals_agent.tailer import JournalTail

SPECS: Mapping[str, MetricSpec] = {metric.name: metric for metric in CATALOG}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One value of one metric in the catalog; the labels in the catalog's order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the agent's cycle is still running."""

    ok: bool
    details: Mapping[str, object] = field(default_factory=dict)


class MetricsSource(Protocol):
    """Interface for the server, which calls both on its own threads, so they only read."""

    def readings(self) -> Iterable[MetricSample]:
        """Return the samples that the agent exposes on ``/metrics``."""
        ...

    def health(self) -> Health:
        """Return the agent's health, which ``/healthz`` shows."""
        ...


class AgentCollector(Collector):
    """Turns readings into families with the catalog's names, types and help."""

    def __init__(self, exposed: MetricsSource) -> None:
        self._exposed = exposed

    def collect(self) -> Iterable[Metric]:
        """Yield the agent's metrics for one scrape: a family per metric that has a value now."""
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

    ``/metrics`` needs the token (nodes are shared, and loopback is not private); ``/healthz`` is
    open and contains no data of a run.
    """

    def __init__(self, exposed: MetricsSource, *, host: str, port: int, token: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(exposed))
        handler = _build_handler_class(exposed, registry, token)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--listen {host}:{port} cannot be used: {error}", hint="port 0 takes a free one"
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
        """Return the URL at which the agent's ``/metrics`` can be scraped."""
        host, port = str(self._server.server_address[0]), self._server.server_address[1]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop the agent's HTTP server for scrapes, and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _build_handler_class(
    exposed: MetricsSource, registry: CollectorRegistry, token: str
) -> type[BaseHTTPRequestHandler]:
    """Return the HTTP handler of the agent's ``/metrics`` and ``/healthz``."""

    class Handler(BaseHTTPRequestHandler):
        server_version = "vitals-agent"
        sys_version = ""
        timeout = 5.0

        def do_GET(self) -> None:
            routes: dict[str, Callable[[], None]] = {
                "/metrics": self._send_metrics,
                "/healthz": self._send_health,
            }
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                self._write_response(404, "text/plain", b"there are /metrics and /healthz\n")
            else:
                route()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a scrape every few seconds needs no log line."""

        def _send_metrics(self) -> None:
            authorization = self.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
                text = b"give the token in read.token of the agent's folder as a bearer token\n"
                self._write_response(401, "text/plain", text, {"WWW-Authenticate": "Bearer"})
                return
            encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._write_response(200, content_type, encoder(registry))

        def _send_health(self) -> None:
            health = exposed.health()
            body = {"status": "ok" if health.ok else "stalled", **health.details}
            self._write_response(
                200 if health.ok else 503, "application/json", json.dumps(body).encode() + b"\n"
            )

        def _write_response(
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


# --------------------------------------------------------------- values of the agent's parts


def _samples_from_columns(
    specs: Iterable[MetricSpec], values: Mapping[str, Value], labels: tuple[str, ...]
) -> Iterator[MetricSample]:
    for spec in specs:
        value = values.get(spec.column)
        if isinstance(value, int | float):  # an unmeasured column has no sample at all
            yield MetricSample(name=spec.name, value=float(value), labels=labels)


def agent_readings(
    runs: Sequence[ServedRun],
    *,
    counted: Mapping[str, int],
    relay: CommandDelivery,
    shipper: Shipper | None,
    faults: Faults,
) -> Iterator[MetricSample]:
    """Yield the agent's own numbers; ``counted`` contains those of runs already released."""
    numbers: dict[str, float] = {
        "agent_spool_bytes": sum(run.spool.num_bytes for run in runs),
        "agent_memory_spools": sum(run.in_memory for run in runs),
        "agent_spooled_rows_total": counted["rows"] + sum(run.num_rows for run in runs),
        "agent_dropped_rows_total": counted["dropped"] + sum(run.num_dropped for run in runs),
        "agent_corrupt_rows_total": counted["corrupt"] + sum(r.spool.corrupt for r in runs),
        "agent_commands_total": relay.num_delivered,
    }
    if shipper is not None:
        numbers["agent_shipped_rows_total"] = shipper.num_rows
        numbers["agent_ship_errors_total"] = shipper.num_errors
        numbers["agent_corrupt_rows_total"] += shipper.num_refused_rows
    for name, value in numbers.items():
        yield MetricSample(name=name, value=value)
    # Starts at 0: a counter that appears with its first event shows no increase.
    for part, count in (dict.fromkeys(PARTS, 0) | faults.counts).items():
        yield MetricSample(name="agent_part_failures_total", value=count, labels=(part,))


def sample_readings(sampling: Sampling, node: str) -> Iterator[MetricSample]:
    """Yield the latest samples of node and GPUs for the agent's ``/metrics``."""
    yield from _samples_from_columns(NODE_METRICS, sampling.node, (node,))
    for uuid, values in sampling.gpus.items():
        yield from _samples_from_columns(GPU_METRICS, values, (node, uuid))


_RUN_METRICS = tuple(m for m in STEP_METRICS if m.scope == "run")
_RANK_METRICS = tuple(m for m in STEP_METRICS if m.scope == "rank")


def run_readings(run: ServedRun) -> Iterator[MetricSample]:
    """Yield the last step's values of the ranks here: only of the latest start of each rank."""
    newest: dict[int, JournalTail] = {}
    for tail in list(run.tails.values()):
        other = newest.get(tail.identity.rank)
        if other is None or other.identity.started_unix_ns <= tail.identity.started_unix_ns:
            newest[tail.identity.rank] = tail
    for rank, tail in newest.items():
        labels = (run.run_id, str(rank))
        yield from _samples_from_columns(PROCESS_METRICS, tail.process_values, labels)
        yield from _samples_from_columns(_RANK_METRICS, tail.last.values, labels)
    if 0 in newest:  # only rank 0 writes values that are equal on all ranks
        yield from _run_level_readings(run, newest[0])


def _run_level_readings(run: ServedRun, tail: JournalTail) -> Iterator[MetricSample]:
    """Yield rank 0's values and counters of a run for the agent's ``/metrics``."""
    last, label = tail.last, (run.run_id,)
    yield from _samples_from_columns(_RUN_METRICS, last.values, label)
    if last.step >= 0:
        yield MetricSample(name="train_step", value=last.step, labels=label)
    # Counters are summed over the starts of rank 0: a restarted rank must not set them back.
    lasts = [t.last for t in list(run.tails.values()) if t.identity.rank == 0]
    steps = sum(each.num_steps for each in lasts)
    yield MetricSample(name="train_steps_total", value=steps, labels=label)
    bad = sum(each.num_nonfinite for each in lasts)
    yield MetricSample(name="train_nonfinite_total", value=bad, labels=label)
    for name, counts in (
        ("train_skipped_steps_total", [each.skips for each in lasts]),
        ("train_rollbacks_total", [each.rollbacks for each in lasts]),
    ):
        for cause in ACTED_CAUSES:
            total = sum(count.get(cause, 0) for count in counts)
            yield MetricSample(name=name, value=total, labels=(*label, cause))
