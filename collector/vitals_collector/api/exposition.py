"""``/metrics``: computed at scrape time from the store; bounded whatever the runs do.

Names, types and labels are the catalog's. There is no step label and no free text except a run's
own name, shortened; only the latest runs are exported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, get_args

from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Select, func, select
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from trainvitals.alerting import ALERTS
from trainvitals.catalog import STEP_METRICS, MetricSpec, find_metric
from trainvitals.detect.registry import ACTED_CAUSES, countable_cause
from trainvitals.errors import UnauthorizedError, VitalsError
from trainvitals.views import AlertView, CommandStatus, RunSummary
from vitals_collector.alerts import commands
from vitals_collector.alerts.inbox import alert_from_row
from vitals_collector.alerts.silences import load_active_silences
from vitals_collector.api.auth import FOREIGN_NAME, NO_SCOPE, require, require_unlimited_token
from vitals_collector.api.ingest_route import BUSY
from vitals_collector.live import overview
from vitals_collector.live.engine import AlertService
from vitals_collector.live.run_status import Liveness
from vitals_collector.numbers.interface import FULL, STORED_STREAMS, Reason, RowSpan
from vitals_collector.queries.goodput import GoodputReader
from vitals_collector.storage.schema import alerts, decisions, findings, sources, streams
from vitals_collector.storage.store import (
    LOCKED,
    PARTS,
    REMOVAL_REASONS,
    ReadSnapshot,
    Store,
)
from vitals_collector.storage.tokens import ENDED, LIMITED


def _error_codes(of: type[VitalsError]) -> set[str]:
    """Return the codes of an error class and its subclasses, as labels of ``/metrics``."""
    return {of.code}.union(*(_error_codes(error) for error in of.__subclasses__()))


MAX_RUNS = 50
"""Exported runs: the latest that are running, or ended a short while ago."""
SHOWN_AFTER_END_SECONDS = 3_600.0
"""How long an ended run keeps its series, so that alert rules see how it ended."""
_OF_RUN = tuple(metric for metric in STEP_METRICS if metric.scope == "run")
MAX_ALERTS = 500
"""Series of alerts that do not page. Those that page are limited only by their causes."""
TOLD_AFTER_END_SECONDS = 86_400.0
"""How long a resolved alert is exported as 0: alert rules treat an older 1 as firing for the same
time, so that the death of this process resolves nothing."""
_REJECTIONS = sorted(_error_codes(VitalsError) | {BUSY, FULL, LOCKED})
_REFUSALS = (UnauthorizedError.code, FOREIGN_NAME, NO_SCOPE, LIMITED, ENDED)
OUTCOMES = ("delivered", "retried", "failed", "dropped")
"""Results of messages to receivers, and of pushes by remote write."""
MAX_LABEL = 80
MAX_CAUSES, OTHER_CAUSES = 32, "others"
"""Causes per alert and run that are exported separately; the rest is exported as one, because a
training may generate names without end."""

_SAME_WRITER = (sources.c.run_id == streams.c.run_id) & (
    sources.c.incarnation == streams.c.incarnation
)

Labels = tuple[str, ...]
Samples = dict[Labels, float]


class StoreCollector(Collector):
    """Exports the content of the store; has no values of its own."""

    def __init__(
        self,
        store: Store,
        *,
        acting: AlertService,
        liveness: Callable[[], Liveness],
        goodput: GoodputReader,
    ) -> None:
        self._store = store
        self._acting = acting
        self._liveness = liveness
        self._goodput = goodput
        self._spent: Samples = {}
        """Exported values of the time spent."""
        self._fired: dict[Labels, int] = {}
        """Alerts exported as firing, and when last: a run may be removed while one of its alerts
        fires."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering ``/metrics`` must not read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family of ``/metrics``, also without samples, in the catalog's order."""
        when = self._liveness()
        now = when.now_unix_ns
        with self._store.read_transaction() as connection:
            shown = _exposed_runs(overview.load_run_summaries(connection, when), now)
            moment = self._store.snapshot_on(connection)
            families = _run_families(moment, shown)
            families["train_goodput_seconds_total"] = self._goodput_samples(shown)
            families |= _collector_families(self._store)
        families["collector_commands_total"] = _counts_by_label(
            get_args(CommandStatus), commands.count_commands(self._store)
        )
        watching = self._acting.engine.watching
        families["collector_unmerged_rows_total"] = {(): float(watching.num_unmerged)}
        families["collector_dropped_samples_total"] = {(): float(watching.num_dropped_samples)}
        families["collector_rows_left_to_store_total"] = {(): float(watching.num_left_to_store)}
        families["collector_alert_firing"] = self._alert_samples(now)
        families["collector_alerts_total"] = _with_zero_counts(
            ((alert.name, alert.severity) for alert in ALERTS), self._acting.inbox.fired().items()
        )
        families["collector_notifications_total"] = _with_zero_counts(
            product(self._acting.receivers, OUTCOMES), self._acting.dispatcher.outcomes().items()
        )
        for name, samples in families.items():
            yield _metric_family(find_metric(name), samples)

    def _goodput_samples(self, shown: Sequence[RunSummary]) -> Samples:
        """Return runs' time by bucket for ``/metrics``, as trained: a counter must not decrease.

        A run whose rows were not read yet is absent: 0 would look like a decrease.
        """
        before, self._spent = self._spent, {}
        for view in self._goodput.known(shown):
            for bucket, taken in view.nanoseconds.items():
                key = (view.run_id, bucket)
                seconds = (taken + view.undone.get(bucket, 0)) / 1e9
                # The usual duration of a step may change a little while a process is new.
                self._spent[key] = max(seconds, before.get(key, 0.0))
        return self._spent

    def _alert_samples(self, now_unix_ns: int) -> Samples:
        """Return 1 for firing alerts, 0 for those that no longer do; pages come first."""
        horizon = now_unix_ns - int(TOLD_AFTER_END_SECONDS * 1e9)
        by_alert: dict[Labels, list[tuple[int, str, bool]]] = {}
        samples: Samples = {}
        with self._store.read_transaction() as connection:
            silences = load_active_silences(connection, now_unix_ns)
            for row in connection.execute(_recent_alerts(horizon)):
                view = alert_from_row(row).view
                is_loud = row.state == "firing" and silences.silence_of(view) is None
                about: Labels = (row.run_id or "", row.name, row.severity)
                by_alert.setdefault(about, []).append(
                    (row.started_unix_ns, _cause_of(view), is_loud)
                )
        for about, alerts_of_it in by_alert.items():
            for (*_, is_loud), cause in zip(
                alerts_of_it, _limit_alert_causes(alerts_of_it), strict=True
            ):
                key = (*about, cause)
                samples[key] = max(float(is_loud), samples.get(key, 0.0))
        self._fired = {key: at for key, at in self._fired.items() if at >= horizon}
        self._fired |= {key: now_unix_ns for key, value in samples.items() if value}
        every = dict.fromkeys(self._fired, 0.0) | samples
        quiet = [item for item in every.items() if item[0][2] != "page"]
        quiet.sort(key=lambda item: -item[1])
        pages = [item for item in every.items() if item[0][2] == "page"]
        return dict(pages + quiet[:MAX_ALERTS])


def _cause_of(alert: AlertView) -> str:
    """Return the label that distinguishes a run's alert in ``/metrics``: rule, node or receiver."""
    about = {name: value for name, value in alert.labels.items() if name != "run"}
    return _clean_label(about.get("cause", ",".join(about[name] for name in sorted(about))))


def _limit_alert_causes(alerts_of_it: Sequence[tuple[int, str, bool]]) -> Iterator[str]:
    """Yield each alert's cause for ``/metrics``; the earliest ones keep their own."""
    first = dict.fromkeys(cause for _, cause, _ in sorted(alerts_of_it))
    shown_causes = set(list(first)[:MAX_CAUSES])
    return (cause if cause in shown_causes else OTHER_CAUSES for _, cause, _ in alerts_of_it)


def _recent_alerts(horizon_unix_ns: int) -> Select[Any]:
    """Return the query for the alerts in ``/metrics``: firing or lately resolved."""
    is_new = alerts.c.updated_unix_ns >= horizon_unix_ns
    return (
        select(alerts)
        .where(
            (alerts.c.state == "firing")
            | ((alerts.c.state == "resolved") & is_new & (alerts.c.severity != "log"))
        )
        .order_by(alerts.c.updated_unix_ns.desc())
    )


def _counts_by_label(labels: Iterable[str], counts: Mapping[str, float]) -> Samples:
    """Return counts with one label for ``/metrics``, with 0 for what has not happened yet."""
    return _with_zero_counts(product(labels), (((label,), n) for label, n in dict(counts).items()))


def _with_zero_counts(labels: Iterable[Labels], counts: Iterable[tuple[Labels, float]]) -> Samples:
    """Return the counts for ``/metrics``, with 0 for what has not happened yet.

    A counter that appears with its first event has none.
    """
    zeros: Samples = dict.fromkeys(labels, 0.0)
    return zeros | {key: float(num) for key, num in counts}


def metrics_router(collector: Collector) -> APIRouter:
    """Return the ``/metrics`` route over a separate registry."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    permitted = [Depends(require("read")), Depends(require_unlimited_token)]
    router = APIRouter(tags=["metrics"], dependencies=permitted)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """Return every metric, in OpenMetrics if requested, otherwise in Prometheus' format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return router


def _metric_family(metric: MetricSpec, samples: Samples) -> Metric:
    """Return a metric family for ``/metrics`` with its samples."""
    kinds: dict[str, Callable[..., CounterMetricFamily | GaugeMetricFamily]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "info": GaugeMetricFamily,  # the text format has no info: a gauge that is 1
    }
    family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(samples.items()):
        family.add_metric([_clean_label(text) for text in labels], value)
    return family


def _clean_label(text: str) -> str:
    """Return a label of ``/metrics``, short and printable: shown, joined on, and stored forever."""
    cut = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def _exposed_runs(every: Iterable[RunSummary], now_unix_ns: int) -> list[RunSummary]:
    """Return the runs in ``/metrics``: running ones first, then recent ones."""
    horizon = now_unix_ns - SHOWN_AFTER_END_SECONDS * 1e9
    recent = [r for r in every if r.state == "running" or r.last_seen_unix_ns >= horizon]
    newest = sorted(recent, key=lambda r: (r.state == "running", r.run_id), reverse=True)
    return newest[:MAX_RUNS]


# --------------------------------------------------------------------------------------- runs


def _run_families(moment: ReadSnapshot, shown: list[RunSummary]) -> dict[str, Samples]:
    """Return the metric families about runs in ``/metrics``."""
    connection = moment.sql
    ids = [run.run_id for run in shown]
    families: dict[str, Samples] = {metric.name: {} for metric in _OF_RUN}
    for run_id in ids:
        row = _last_row(moment, run_id)
        for metric in _OF_RUN:
            if metric.column in row:
                families[metric.name][run_id,] = row[metric.column]
    families["train_step"] = {(r.run_id,): float(r.last_step) for r in shown if r.last_step >= 0}
    families["train_steps_total"] = _step_counts(connection, ids)
    skips = overview.skips_by_cause(connection)
    families["train_skipped_steps_total"] = _counts_by_cause(ids, skips)
    families["train_rollbacks_total"] = _counts_by_cause(ids, _count_rollbacks(connection, ids))
    lost = overview.count_lost_steps(connection, ids)
    families["train_lost_steps_total"] = {(of,): float(steps) for of, (steps, _) in lost.items()}
    families["train_dropped_batches_total"] = {(of,): float(num) for of, (_, num) in lost.items()}
    families["train_nonfinite_total"] = _nonfinite_counts(connection, ids)
    families["train_run_state"] = {(r.run_id, r.state): 1.0 for r in shown}
    families["train_run_info"] = {(r.run_id, r.name, r.project, r.mode): 1.0 for r in shown}
    return families


def _last_row(moment: ReadSnapshot, run_id: str) -> dict[str, float]:
    """Return the values for ``/metrics`` in the latest row of rank 0's latest start."""
    newest = (
        select(streams.c.incarnation, streams.c.last_seq)
        .join(sources, _SAME_WRITER)
        .where(
            streams.c.run_id == run_id,
            streams.c.stream == "steps",
            streams.c.num_rows > 0,
            sources.c.source == "rank:0",
        )
        .order_by(sources.c.started_unix_ns.desc())
        .limit(1)
    )
    row = moment.sql.execute(newest).first()
    if row is None:
        return {}
    span = RowSpan(run_id, "steps", seqs={row.incarnation: (row.last_seq, row.last_seq + 1)})
    columns = moment.numbers.scan(span, [metric.column for metric in _OF_RUN])
    return {
        name: float(column.values[0])
        for name, column in columns.items()
        if len(column.values) and not column.is_missing[0] and column.values.dtype != object
    }


def _counts_by_run(connection: Connection, ids: list[str], query: Select[Any]) -> Samples:
    """Return the pairs of run and count of a query for ``/metrics``, with 0 for other runs."""
    counted: Samples = {(run_id,): 0.0 for run_id in ids}
    return counted | {(run_id,): float(num) for run_id, num in connection.execute(query)}


def _step_counts(connection: Connection, ids: list[str]) -> Samples:
    """Return the number of steps of each run in ``/metrics``, lost rows included."""
    query = (
        select(streams.c.run_id, func.sum(streams.c.num_rows + streams.c.num_lost))
        .join(sources, _SAME_WRITER)
        .where(
            streams.c.run_id.in_(ids),
            streams.c.stream == "steps",
            sources.c.source == "rank:0",
        )
        .group_by(streams.c.run_id)
    )
    return _counts_by_run(connection, ids, query)


def _count_rollbacks(connection: Connection, ids: list[str]) -> dict[tuple[str, str], int]:
    """Return the rollbacks of runs in ``/metrics``, by run and cause."""
    query = (
        select(decisions.c.run_id, decisions.c.cause, func.count())
        .where(decisions.c.run_id.in_(ids), decisions.c.action == "rollback", decisions.c.acted)
        .group_by(decisions.c.run_id, decisions.c.cause)
    )
    return {(run_id, cause): num for run_id, cause, num in connection.execute(query)}


def _counts_by_cause(ids: list[str], counts: Mapping[tuple[str, str], int]) -> Samples:
    """Return counts for ``/metrics`` by run and cause, each of which starts at 0."""
    samples: Samples = dict.fromkeys(product(ids, ACTED_CAUSES), 0.0)
    for (run_id, cause), num in counts.items():
        if run_id in ids:
            samples[run_id, countable_cause(cause)] += num
    return samples


def _nonfinite_counts(connection: Connection, ids: list[str]) -> Samples:
    """Return the number of non-finite findings of each run in ``/metrics``."""
    query = (
        select(findings.c.run_id, func.count())
        .where(findings.c.run_id.in_(ids), findings.c.kind == "nonfinite")
        .group_by(findings.c.run_id)
    )
    return _counts_by_run(connection, ids, query)


# ---------------------------------------------------------------------------------- collector


def _collector_families(store: Store) -> dict[str, Samples]:
    """Return the metric families about the collector itself in ``/metrics``."""
    counters = store.counters
    return {
        "collector_ingested_rows_total": {(): float(counters.num_rows)},
        "collector_duplicate_rows_total": {(): float(counters.num_duplicate)},
        "collector_lost_rows_total": {(): float(counters.num_lost)},
        "collector_damaged_stretches_total": {(): float(counters.num_damaged)},
        "collector_damaged_batches_total": {(): float(store.damage.num)},
        "collector_rejected_batches_total": _counts_by_label(_REJECTIONS, counters.rejected),
        "collector_refused_requests_total": _counts_by_label(_REFUSALS, counters.refused),
        "collector_thinned_rows_total": _with_zero_counts(
            product(STORED_STREAMS, get_args(Reason)), counters.thinned.items()
        ),
        "collector_removed_runs_total": _counts_by_label(REMOVAL_REASONS, counters.removed_runs),
        "collector_forgotten_rows_total": {(): float(counters.num_forgotten)},
        "collector_runs_over_cap": {(): float(len(counters.over_cap or ()))},
        "collector_deferred_bodies_total": {(): float(counters.num_deferred)},
        "collector_remote_writes_total": _counts_by_label(OUTCOMES, counters.remote_writes),
        "collector_part_failures_total": _counts_by_label(PARTS, counters.failures),
    }
