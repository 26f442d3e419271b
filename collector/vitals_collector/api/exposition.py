"""``/metrics``: computed at scrape time from the store; bounded whatever the runs do.

Names, types and labels are the catalog's. There is no step label and no free text but a run's own
name, cut short; runs that are not among the newest do not appear.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select
from starlette.responses import PlainTextResponse, Response

from trainvitals.catalog import STEP_METRICS, MetricSpec, spec
from trainvitals.clock import Clock
from trainvitals.rows import Value
from trainvitals.views import RunSummary
from vitals_collector.alerts import commands
from vitals_collector.api.auth import require
from vitals_collector.live import overview
from vitals_collector.live.engine import Acting
from vitals_collector.live.run_status import Liveness
from vitals_collector.storage.read_rows import read_pages
from vitals_collector.storage.schema import alerts, batches, decisions, findings, sources, streams
from vitals_collector.storage.store import Store

MAX_RUNS = 50
"""Runs that appear: the newest that run, or ended a short while ago."""
SHOWN_AFTER_END_SECONDS = 3_600.0
"""How long a run that ended keeps its series, so that rules see how it ended."""
MAX_REASONS = 20
MAX_ALERTS = 500
MAX_LABEL = 80

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Samples = dict[Labels, float]


class StoreCollector(Collector):
    """Reports what the store holds; keeps no numbers of its own."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        acting: Acting,
        lost_after_seconds: float = 60.0,
        up_since_unix_ns: int = 0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._acting = acting
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registration must not read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also those without samples, in the catalog's order."""
        now = self._clock.time_ns()
        when = Liveness(
            now_unix_ns=now,
            up_since_unix_ns=self._up_since_unix_ns,
            lost_after_seconds=self._lost_after_seconds,
        )
        # As it is, without placing what waits: who watches must see it on a full disk as well.
        with self._store.read(settled=False) as connection:
            shown = _shown(overview.summaries(connection, when), now)
            families = _run_families(connection, shown) | _own_families(connection, self._store)
        families["collector_commands_total"] = {
            (status,): num for status, num in commands.counts(self._store).items()
        }
        watching = self._acting.engine.watching
        families["collector_unmerged_rows_total"] = {(): float(watching.num_unmerged)}
        families["collector_dropped_samples_total"] = {(): float(watching.num_dropped_samples)}
        families["collector_rows_left_to_store_total"] = {(): float(watching.num_left_to_store)}
        fired, notifications = self._acting.inbox.fired(), self._acting.dispatcher.outcomes()
        families["collector_alerts_total"] = {key: float(num) for key, num in fired.items()}
        families["collector_notifications_total"] = {
            key: float(num) for key, num in notifications.items()
        }
        for name, samples in families.items():
            yield _family(spec(name), samples)


def metrics_router(collector: Collector) -> APIRouter:
    """Return the ``/metrics`` route over a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    router = APIRouter(tags=["metrics"], dependencies=[Depends(require("read"))])

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Return every metric in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return router


def _family(metric: MetricSpec, samples: Samples) -> Metric:
    kinds: dict[str, Callable[..., CounterMetricFamily | GaugeMetricFamily]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "info": GaugeMetricFamily,  # the text format has no info: a gauge that is 1
    }
    family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(samples.items()):
        family.add_metric([_label(text) for text in labels], value)
    return family


def _label(text: str) -> str:
    """Return the text short and printable: a label is shown, joined on, and kept for ever."""
    cut = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def _shown(every: Iterable[RunSummary], now_unix_ns: int) -> list[RunSummary]:
    horizon = now_unix_ns - SHOWN_AFTER_END_SECONDS * 1e9
    recent = [r for r in every if r.state == "running" or r.last_seen_unix_ns >= horizon]
    newest = sorted(recent, key=lambda r: (r.state == "running", r.run_id), reverse=True)
    return newest[:MAX_RUNS]


# --------------------------------------------------------------------------------------- runs


def _run_families(connection: Connection, shown: list[RunSummary]) -> dict[str, Samples]:
    ids = [run.run_id for run in shown]
    families: dict[str, Samples] = {m.name: {} for m in STEP_METRICS if m.scope == "run"}
    for run_id in ids:
        row = _last_row(connection, run_id)
        for metric in STEP_METRICS:
            value = row.get(metric.column) if metric.scope == "run" else None
            if isinstance(value, int | float):
                families[metric.name][run_id,] = float(value)
    families["train_step"] = {(r.run_id,): float(r.last_step) for r in shown if r.last_step >= 0}
    families["train_steps_total"] = _step_counts(connection, ids)
    families["train_skipped_steps_total"] = _reasons(connection, ids, "skip_step")
    families["train_rollbacks_total"] = _reasons(connection, ids, "rollback")
    families["train_nonfinite_total"] = _nonfinite_counts(connection, ids)
    families["train_run_state"] = {(r.run_id, r.state): 1.0 for r in shown}
    families["train_run_info"] = {(r.run_id, r.name, r.project, r.mode): 1.0 for r in shown}
    return families


def _last_row(connection: Connection, run_id: str) -> dict[str, Value]:
    """Return the newest row of rank 0's newest start."""
    newest = (
        select(batches.c.id)
        .join(
            sources,
            (sources.c.run_id == batches.c.run_id)
            & (sources.c.incarnation == batches.c.incarnation),
        )
        .where(
            batches.c.run_id == run_id,
            batches.c.stream == "steps",
            batches.c.source == "rank:0",
        )
        .order_by(sources.c.started_unix_ns.desc(), batches.c.first_seq.desc())
        .limit(1)
    )
    newest_id = connection.execute(newest).scalar()
    for page in read_pages(connection, batches.c.id == newest_id, pick=_last_of):
        return page.schema.unpack(bytes(page.rows[-1]))
    return {}


def _last_of(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    return np.array([len(steps) - 1])


def _step_counts(connection: Connection, ids: list[str]) -> Samples:
    query = (
        select(streams.c.run_id, func.sum(streams.c.num_rows + streams.c.num_lost))
        .join(
            sources,
            (sources.c.run_id == streams.c.run_id)
            & (sources.c.incarnation == streams.c.incarnation),
        )
        .where(
            streams.c.run_id.in_(ids),
            streams.c.stream == "steps",
            sources.c.source == "rank:0",
        )
        .group_by(streams.c.run_id)
    )
    return {(run_id,): float(num) for run_id, num in connection.execute(query)}


def _reasons(connection: Connection, ids: list[str], action: str) -> Samples:
    """Return acted decisions by cause. Causes are few; what is not like one is ``other``."""
    query = (
        select(decisions.c.run_id, decisions.c.cause, func.count())
        .where(decisions.c.run_id.in_(ids), decisions.c.action == action, decisions.c.acted)
        .group_by(decisions.c.run_id, decisions.c.cause)
        .order_by(decisions.c.run_id, decisions.c.cause)
    )
    samples: Samples = {}
    num_reasons: Counter[str] = Counter()
    for run_id, cause, num in connection.execute(query):
        is_name = cause.isascii() and cause.replace("_", "").isalnum() and len(cause) <= 40
        num_reasons[run_id] += 1
        key = (run_id, cause if is_name and num_reasons[run_id] <= MAX_REASONS else "other")
        samples[key] = samples.get(key, 0.0) + num
    return samples


def _nonfinite_counts(connection: Connection, ids: list[str]) -> Samples:
    query = (
        select(findings.c.run_id, func.count())
        .where(findings.c.run_id.in_(ids), findings.c.kind == "nonfinite")
        .group_by(findings.c.run_id)
    )
    counted: Samples = {(run_id,): 0.0 for run_id in ids}
    return counted | {(run_id,): float(num) for run_id, num in connection.execute(query)}


# ---------------------------------------------------------------------------------- collector


def _own_families(connection: Connection, store: Store) -> dict[str, Samples]:
    counters = store.counters
    query = (
        select(alerts.c.run_id, alerts.c.name, alerts.c.severity)
        .where(alerts.c.state == "firing")
        .order_by(alerts.c.updated_unix_ns.desc())
        .limit(MAX_ALERTS)
    )
    rejected = counters.rejected.items()
    removed = counters.removed_runs.items()
    failures = counters.failures.items()
    return {
        "collector_ingested_rows_total": {(): float(counters.num_rows)},
        "collector_duplicate_rows_total": {(): float(counters.num_duplicate)},
        "collector_lost_rows_total": {(): float(counters.num_lost)},
        "collector_damaged_stretches_total": {(): float(counters.num_damaged)},
        "collector_damaged_batches_total": {(): float(store.damage.num)},
        "collector_rejected_batches_total": {(code,): float(num) for code, num in rejected},
        "collector_thinned_rows_total": {key: float(n) for key, n in counters.thinned.items()},
        "collector_removed_runs_total": {(reason,): float(num) for reason, num in removed},
        "collector_forgotten_rows_total": {(): float(counters.num_forgotten)},
        "collector_runs_over_cap": {(): float(len(counters.over_cap or ()))},
        "collector_deferred_bodies_total": {(): float(counters.num_deferred)},
        "collector_part_failures_total": {(part,): float(num) for part, num in failures},
        "collector_alert_firing": {tuple(row): 1.0 for row in connection.execute(query)},
    }


__all__ = ["CONTENT_TYPE", "StoreCollector", "metrics_router"]
