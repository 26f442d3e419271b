"""A run as OpenTelemetry metrics, over OTLP/HTTP: a gauge of each curve, each value with its time.

Points that are sent again after a kill have the same series and time, and a store keeps one of
them. Metrics contain no decisions; ``vitals/skipped`` and the attribute ``attempt`` show them.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from trainvitals.errors import TransportError
from trainvitals.metrics import STEP_METRICS
from trainvitals.views import RunState
from vitals_plugins.bridges.mirrors.follow import ATTEMPT, Entry, TrackerRow
from vitals_plugins.bridges.mirrors.worker import RunDescription, TrackerTarget

_POINTS_AT_ONCE = 10_000
_MAX_ANSWER_BYTES = 64 << 10
"""The content of a response does not matter; a longer one is not read, and closes the
connection."""
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.\-/]")
_KNOWN = {f"train/{metric.column}": metric for metric in STEP_METRICS}


class Otlp:
    """Writes one run; see ``worker.Tracker``."""

    def __init__(
        self,
        target: TrackerTarget,
        about: RunDescription,
        saved_state: dict[str, Any],
        unclean: bool,
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.kept: dict[str, Any] = {}
        self._where = target.where
        self._export: Any = export
        url = target.where.rstrip("/")
        self._exporter = OTLPMetricExporter(
            endpoint=url if url.endswith("/v1/metrics") else f"{url}/v1/metrics",
            max_export_batch_size=_POINTS_AT_ONCE,
            session=_session(),
        )
        self._resource = Resource(
            {"service.name": "vitals", "vitals.run_name": about.name, **about.facts}
        )
        self._scope = InstrumentationScope("vitals", about.facts["vitals.version"])
        self._attributes = {"run": about.run_id, "project": about.project}
        self._started_unix_ns = about.started_unix_ns

    def write(self, entries: Sequence[Entry]) -> None:
        """Send the entries of a mirrored run as OTLP metrics.

        Raises:
            TransportError: they were not accepted.
        """
        points: dict[str, list[Any]] = {}
        for row in entries:
            if not isinstance(row, TrackerRow):
                continue
            attributes = {**self._attributes, "attempt": int(row.values.get(ATTEMPT, 0))}
            for name, value in {**row.values, "train/step": float(row.step)}.items():
                point = self._export.NumberDataPoint(
                    attributes, self._started_unix_ns, row.time_unix_ns, value
                )
                points.setdefault(name, []).append(point)
        if not points:
            return
        metrics = [self._otlp_metric(name, of_name) for name, of_name in points.items()]
        scope = self._export.ScopeMetrics(self._scope, metrics, "")
        data = self._export.MetricsData([self._export.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not self._export.MetricExportResult.SUCCESS:
            raise TransportError(f"{self._where} did not take the metrics; its answer is above")

    def _otlp_metric(self, name: str, points: list[Any]) -> Any:
        """Return the OTLP gauge of a mirrored curve, with its points."""
        spec = _KNOWN.get(name)
        gauge = self._export.Gauge(points)
        if spec is not None:
            return self._export.Metric(spec.name, spec.help, spec.unit, gauge)
        return self._export.Metric(otlp_name(name), "", "", gauge)

    def close(self, state: RunState) -> None:
        """Close the connection of the OTLP mirror."""
        self._exporter.shutdown()


def _session() -> Any:
    """Return an HTTP session for the OTLP mirror that reads little of each response.

    The exporter itself would hold all of it in memory. None if the environment names a provider of
    credentials, which makes its own session.
    """
    if any(name.endswith("_CREDENTIAL_PROVIDER") and value for name, value in os.environ.items()):
        return None
    import requests

    def read_some(response: Any, **_: object) -> None:
        response.raw.read(_MAX_ANSWER_BYTES)
        response.close()

    session = requests.Session()
    session.stream = True
    session.hooks["response"].append(read_some)
    return session


def otlp_name(name: str) -> str:
    """Return a mirrored name in OpenTelemetry: ``val_loss`` is ``train_scalar/val_loss``."""
    metric_name = name.replace("/", "_") if name.startswith(("train/", "vitals/")) else ""
    return metric_name or f"train_scalar/{_NOT_ALLOWED.sub('_', name)}"
