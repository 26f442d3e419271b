"""Responds to every query about runs from the store, with the types of ``trainvitals.views``.

One function per query, and one class for HTTP routes, the command line, and reading a directory
without a server: their results cannot differ. A query about one matter imports its modules itself:
`vitals runs` needs few of them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import asdict
from sqlalchemy import bindparam, select

from trainvitals import views
from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.plugins import load_plugin
from trainvitals.question import Question
from vitals_collector.ingest.ingest import is_being_removed
from vitals_collector.live import overview
from vitals_collector.live.run_status import Liveness
from vitals_collector.numbers.interface import (
    RANKS,
    CurveRequest,
    DownsampledCurve,
    downsample,
    downsample_means,
    smooth,
)
from vitals_collector.queries import ledger, series
from vitals_collector.queries.goodput import GoodputCache
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.schema import runs
from vitals_collector.storage.store import ReadSnapshot, SteadyClock, Store, unknown_run

if TYPE_CHECKING:
    from vitals_collector.alerts.inbox import NewestBy
    from vitals_collector.queries.incidents import RunIncidents

MAX_POINTS_AT_ONCE = 200_000
MAX_MARKS = 20_000
"""Maximum number of non-finite values listed per series; with more, evenly chosen ones."""


_OF_RUN = select(runs.c.run_id).where(runs.c.run_id == bindparam("run_id"), ~is_being_removed())
"""Built once: nearly every query starts with it."""

A = TypeVar("A")
Config = dict[str, str | int | float | bool | None]

ANSWERS: dict[type[Question[Any]], Callable[["Query", Any], Any]] = {}
"""The function for each query."""


def answer_to(
    kind: type[Question[A]],
) -> Callable[[Callable[["Query", Any], A]], Callable[["Query", Any], A]]:
    """Register the decorated function as the one that responds to this type of query."""

    def register(answer: Callable[["Query", Any], A]) -> Callable[["Query", Any], A]:
        ANSWERS[kind] = answer
        return answer

    return register


def _answer_in_run(kind: type[Question[A]], answer: Callable[[ReadSnapshot, Any], A]) -> None:
    """Register a function for queries that need only a snapshot with their run."""

    @answer_to(kind)
    def in_snapshot(query: "Query", question: Any) -> A:
        with query.read(question.run_id) as moment:
            return answer(moment, question)


class Query:
    """Runs queries on a store. Each reads one snapshot of it; none changes it.

    A run without a row for ``lost_after_seconds`` is lost, but silence before ``up_since_unix_ns``
    does not count: no row could arrive. ``volumes`` are the limits of the data kept per run, for
    display. A ``gpu_hour_price`` of 0 is not set. ``goodput`` is a shared cache of the sums.
    ``folders`` are the directories of runs that are read, with the histories of nodes.
    """

    newest_alerts_by: "NewestBy" = "updated_unix_ns"
    reach: frozenset[str] | None = None
    """Runs that queries may read; None: all."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        lost_after_seconds: float = 60.0,
        up_since_unix_ns: int = 0,
        volumes: VolumeSettings | None = None,
        gpu_hour_price: float = 0.0,
        goodput: GoodputCache | None = None,
        folders: tuple[Path, ...] = (),
    ) -> None:
        self.store = store
        self.clock, self._steady = clock, SteadyClock(clock)
        self.volumes = volumes or VolumeSettings()
        self.gpu_hour_price = gpu_hour_price
        self.folders = folders
        self.goodput = goodput or GoodputCache(price=gpu_hour_price)
        self.read_goodput_soon: Callable[[views.RunSummary], None] | None = None
        """Reads the goodput of a run in a thread: it is often queried after the run's details."""
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns

    def run_dir(self, run_id: str) -> Path | None:
        """Return the directory of the queried run if a directory is read; None for a collector."""
        return None

    def ask(self, question: Question[A]) -> A:
        """Respond to a query about runs, from one snapshot of the store.

        Raises:
            UsageError: unknown run, metric or source, or a number out of bounds.
        """
        if self.reach is not None:
            named = {getattr(question, name, "") for name in ("run_id", "other")} - {""}
            if beyond := named - self.reach:
                raise unknown_run(min(beyond))
            if not named and type(question) not in _OF_ALL_RUNS:
                raise TypeError(f"{type(question).__name__} names no run, and leaves none out")
        answer: A = ANSWERS[type(question)](self, question)
        return answer

    @contextmanager
    def read(self, *run_ids: str) -> Iterator[ReadSnapshot]:
        """Provide the snapshot of the store from which one query reads.

        Raises:
            UsageError: one of these runs is not stored.
        """
        with self.store.read_transaction() as connection:
            for run_id in run_ids:
                if connection.execute(_OF_RUN, {"run_id": run_id}).first() is None:
                    raise unknown_run(run_id)
            yield self.store.snapshot_on(connection)

    def update_findings(self, run_id: str) -> None:
        """Update the fleet findings of a run, or of all, before a query for them.

        A collector's are updated as rows arrive.
        """

    def raise_alerts(self) -> None:
        """Update the alerts before a query for them; a collector's are updated as rows arrive."""

    def liveness(self) -> Liveness:
        """Return the criteria by which a response shows runs as running or lost."""
        now = self._steady.time_ns()
        return Liveness(
            now_unix_ns=now,
            up_since_unix_ns=max(self._up_since_unix_ns, self.store.ingest_uptime.since(now)),
            lost_after_seconds=self._lost_after_seconds,
        )


def within(query: Query, reach: frozenset[str] | None) -> Query:
    """Return a copy of the query object limited to the runs that a token reaches; None: all."""
    limited = copy.copy(query)
    limited.reach = reach
    return limited


# --------------------------------------------------------------------------------- the queries

_OF_ALL_RUNS = (
    views.RunsQuestion,
    views.ConfigsQuestion,
    views.FailingNodesQuestion,
    views.AlertsQuestion,
    views.SilencesQuestion,
    views.TableQuestion,
)
"""Queries that may name no run: each leaves out what is not in ``Query.reach``."""


@answer_to(views.RunsQuestion)
def _runs(query: Query, _: views.RunsQuestion) -> tuple[views.RunSummary, ...]:
    """Respond to the query for all runs that the token reaches."""
    with query.read() as moment:
        found = overview.load_run_summaries(moment.sql, query.liveness())
    return tuple(run for run in found if query.reach is None or run.run_id in query.reach)


@answer_to(views.ConfigsQuestion)
def _configs(query: Query, _: views.ConfigsQuestion) -> dict[str, Config]:
    """Respond to the query for the configuration of every run."""
    with query.read() as moment:
        rows = moment.sql.execute(select(runs).where(~is_being_removed())).all()
    return {
        row.run_id: overview.info_of(row).config
        for row in rows
        if query.reach is None or row.run_id in query.reach
    }


@answer_to(views.FailingNodesQuestion)
def _failing_nodes(query: Query, _: views.FailingNodesQuestion) -> tuple[views.FailingNode, ...]:
    """Respond to the query for nodes that failed preflights; a token for some runs gets none."""
    if query.reach is not None or not query.folders:
        return ()
    try:
        failing_nodes_in = load_plugin("preflight")
    except UsageError:  # this installation has no preflight
        return ()
    failing: tuple[views.FailingNode, ...] = failing_nodes_in(query.folders)
    return failing


@answer_to(views.RunQuestion)
def _run_detail(query: Query, question: views.RunQuestion) -> views.RunDetail:
    """Respond to the query for one run: summary, attempts, sources, metrics and volume."""
    from vitals_collector.retention.sizes import volume_of

    with query.read() as moment:
        row = ledger.run_row(moment.sql, question.run_id)
        summary = overview.load_run_summaries(moment.sql, query.liveness(), question.run_id)[0]
        if query.read_goodput_soon is not None:
            query.read_goodput_soon(summary)
        return views.RunDetail(
            summary=summary,
            info=overview.info_of(row),
            attempts=ledger.attempts_of(moment, question.run_id),
            sources=ledger.sources_of(moment.sql, question.run_id),
            metrics=series.names_of(moment.sql, question.run_id),
            volume=volume_of(moment.numbers, row, query.volumes) if question.volume else None,
        )


@answer_to(views.SeriesQuestion)
def _one_series(query: Query, question: views.SeriesQuestion) -> views.SeriesReply:
    """Respond to the query for a curve with few points."""
    fields = asdict(question)
    run_id = fields.pop("run_id")
    of_one = views.ManySeriesQuestion(run_id=run_id, series=(views.SeriesRequest(**fields),))
    return _many_series(query, of_one)[0]


@answer_to(views.ManySeriesQuestion)
def _many_series(query: Query, question: views.ManySeriesQuestion) -> tuple[views.SeriesReply, ...]:
    """Respond to the query for several curves of a run, each with few points."""
    run_id, requests = question.run_id, question.series
    for request in requests:
        if not 2 <= request.points <= views.MAX_POINTS:
            raise UsageError(f"points is {request.points}; it must be 2 to {views.MAX_POINTS}")
        if not 0.0 <= request.smoothing < 1.0:
            raise UsageError(f"smoothing is {request.smoothing}; it must be 0 to below 1")
    total = sum(request.points for request in requests)
    if total > MAX_POINTS_AT_ONCE:
        raise UsageError(
            f"{len(requests)} series are to have {total} points together; it must be at most "
            f"{MAX_POINTS_AT_ONCE}"
        )
    with query.read(run_id) as moment:
        selected_series = [_select_series(moment, run_id, request) for request in requests]
        attempts = series.attempt_rows(moment.sql, run_id)
        drawn: dict[int, DownsampledCurve] = {}
        for branch in {request.branch for request in requests}:
            which = [i for i, request in enumerate(requests) if request.branch == branch]
            curves = [selected_series[i][1] for i in which]
            drawn |= zip(which, moment.numbers.curves(curves, attempts, branch), strict=True)
    return tuple(
        _series_reply(run_id, request, source, drawn[i])
        for i, (request, (source, _)) in enumerate(zip(requests, selected_series, strict=True))
    )


@answer_to(views.CurveQuestion)
def _curve(query: Query, question: views.CurveQuestion) -> views.CurveReply:
    """Respond to the query for a curve with all points."""
    run_id, metric, branch = question.run_id, question.metric, question.branch
    with query.read(run_id) as moment:
        steps = (question.from_step, question.to_step)
        source, curve = series.curve_of(moment, run_id, metric, question.source, steps)
        (drawn,) = moment.numbers.curves([curve], series.attempt_rows(moment.sql, run_id), branch)
    return series.curve_reply(run_id, metric, source, branch, drawn.points)


@answer_to(views.DifferenceQuestion)
def _difference(query: Query, question: views.DifferenceQuestion) -> views.DifferenceReply:
    """Respond to the query for the difference of two runs' curves."""
    from vitals_collector.queries.difference import difference

    with query.read(question.run_id, question.other) as moment:
        return difference(moment, question)


@answer_to(views.StepQuestion)
def _step(query: Query, question: views.StepQuestion) -> views.StepView:
    """Respond to the query that explains one step: rows, findings, decisions, data."""
    from vitals_collector.queries.attribution import first_change_text

    run_id, step = question.run_id, question.step
    begun = _judge_run(query, run_id, lambda of_run: of_run.begun_at(step))
    with query.read(run_id) as moment:
        found = ledger.findings_of(moment.sql, run_id, step)
        return views.StepView(
            run_id=run_id,
            step=step,
            rows=ledger.step_rows(moment, run_id, step),
            findings=found,
            moved_first=first_change_text(moment, run_id, step, found, begun),
            decisions=ledger.decisions_with_hindsight(moment, run_id, step),
            readings=ledger.load_probe_readings(moment.sql, run_id, step),
            data=ledger.samples_of_step(moment.sql, run_id, step),
            over_ranks=ledger.step_rows(moment, run_id, step, RANKS),
        )


@answer_to(views.FindingsQuestion)
def _findings(query: Query, question: views.FindingsQuestion) -> tuple[views.FindingView, ...]:
    """Respond to the query for the findings of a run."""
    query.update_findings(question.run_id)
    with query.read(question.run_id) as moment:
        return ledger.findings_of(moment.sql, question.run_id)


@answer_to(views.MoversQuestion)
def _movers(query: Query, question: views.MoversQuestion) -> tuple[views.MoverView, ...]:
    """Respond to the query for the largest changes before a step."""
    from vitals_collector.queries.top_changes import top_change_views

    query.update_findings(question.run_id)
    with query.read(question.run_id) as moment:
        return top_change_views(moment, question.run_id, question.step)


_answer_in_run(views.DecisionsQuestion, lambda m, q: ledger.decisions_with_hindsight(m, q.run_id))
_answer_in_run(views.CheckpointsQuestion, lambda m, q: ledger.checkpoints_of(m.sql, q.run_id))
_answer_in_run(views.EventsQuestion, lambda m, q: ledger.events_of(m.sql, q.run_id, q.kind))
_answer_in_run(views.StacksQuestion, lambda m, q: ledger.stacks_of(m.sql, q.run_id))
_answer_in_run(views.AnnotationsQuestion, lambda m, q: ledger.annotations_of(m.sql, q.run_id))


@answer_to(views.CellsQuestion)
def _cells(query: Query, question: views.CellsQuestion) -> views.CellsReply:
    """Respond to the query for the cells of a heat map."""
    from vitals_collector.queries.heatmap import cells

    with query.read(question.run_id) as moment:
        return cells(moment, question)


@answer_to(views.AlertsQuestion)
def _alerts(query: Query, question: views.AlertsQuestion) -> tuple[views.AlertView, ...]:
    """Respond to the query for alerts, of one run or of all."""
    from vitals_collector.alerts import inbox

    query.raise_alerts()
    return inbox.list_alerts(
        query.store,
        now_unix_ns=query.clock.time_ns(),
        run_id=question.run_id,
        state=question.state,
        newest_by=query.newest_alerts_by,
        reach=query.reach,
    )


@answer_to(views.SilencesQuestion)
def _silences(query: Query, question: views.SilencesQuestion) -> tuple[views.SilenceView, ...]:
    """Respond to the query for silences of alerts."""
    from vitals_collector.alerts import inbox

    now = query.clock.time_ns()
    return inbox.list_silences(query.store, now_unix_ns=now, reach=query.reach)


@answer_to(views.CommandsQuestion)
def _commands(query: Query, question: views.CommandsQuestion) -> tuple[views.CommandView, ...]:
    """Respond to the query for the manual commands of a run."""
    from vitals_collector.alerts import commands

    now = query.clock.time_ns()
    return commands.list_commands(
        query.store, question.run_id, now_unix_ns=now, status=question.status
    )


@answer_to(views.IncidentsQuestion)
def _incidents(query: Query, question: views.IncidentsQuestion) -> tuple[views.IncidentView, ...]:
    """Respond to the query for the incidents of a run."""
    from vitals_collector.queries.incidents import incidents

    return _judge_run(query, question.run_id, lambda run: incidents(run, question.incident_id))


@answer_to(views.VerdictQuestion)
def _verdict(query: Query, question: views.VerdictQuestion) -> views.RunVerdict:
    """Respond to the query for the verdict on a run."""
    from vitals_collector.queries.incidents import list_incidents, run_verdict

    return _judge_run(query, question.run_id, run_verdict if question.judgement else list_incidents)


def _judge_run(query: Query, run_id: str, judge: Callable[["RunIncidents"], A]) -> A:
    """Run ``judge`` on a snapshot of the run, to query its incidents or its verdict."""
    from vitals_collector.queries.incidents import read_incidents

    query.update_findings(run_id)
    with query.read(run_id) as moment:
        run = overview.load_run_summaries(moment.sql, query.liveness(), run_id)[0]
        run_dir = query.run_dir(run_id)
        return judge(read_incidents(moment, run, query.gpu_hour_price, query.reach, run_dir))


@answer_to(views.GoodputQuestion)
def _goodput(query: Query, question: views.GoodputQuestion) -> views.GoodputView:
    """Respond to the query for a run's goodput."""
    with query.read(question.run_id) as moment:
        run = overview.load_run_summaries(moment.sql, query.liveness(), question.run_id)[0]
        return query.goodput.of(moment, run)


@answer_to(views.ForecastQuestion)
def _forecast(query: Query, question: views.ForecastQuestion) -> views.ForecastView:
    """Respond to the query for a run's forecast."""
    from vitals_collector.queries.forecast import forecast

    others = (question.other,) if question.other else ()
    with query.read(question.run_id, *others) as moment:
        ids = (question.run_id, *others)
        runs = [
            overview.load_run_summaries(moment.sql, query.liveness(), run_id)[0] for run_id in ids
        ]
        return forecast(moment, question, runs, now_unix_ns=query.clock.time_ns())


@answer_to(views.TableQuestion)
def _table(query: Query, question: views.TableQuestion) -> views.TableReply:
    """Respond to the query for rows of a table that match conditions."""
    from vitals_collector.queries import tables

    if question.table == "alerts":
        query.raise_alerts()
    elif question.table == "findings":
        query.update_findings(question.run_id)
    with query.read() as moment:
        return tables.query_table(moment, question, query.liveness(), query.reach)


def _select_series(
    moment: ReadSnapshot, run_id: str, request: views.SeriesRequest
) -> tuple[str, CurveRequest]:
    """Choose the stored rows for a queried curve; means and smoothing need more of them."""
    steps = (request.from_step, request.to_step)
    source, curve = series.curve_of(moment, run_id, request.metric, request.source, steps)
    since, until = request.from_time_unix_ns, series.exclusive_end(request.to_time_unix_ns)
    span = curve.span._replace(from_unix_ns=since, to_unix_ns=until)
    if not _has_means(request):
        return source, CurveRequest(span, curve.column, request.points)
    if span.from_step is not None and request.smoothing:
        # Earlier steps weigh less than 1e-9, even if only one step in ten was measured.
        reach = 10 * math.ceil(21 / (1 - request.smoothing))
        span = span._replace(from_step=max(0, span.from_step - reach))
    # All points: the mean of the drawn ones differs from that of the stored ones.
    return source, CurveRequest(span, curve.column)


def _has_means(request: views.SeriesRequest) -> bool:
    """Return whether the query for a curve wants means or smoothed values."""
    return request.mean or request.smoothing > 0.0


def _series_reply(
    run_id: str, request: views.SeriesRequest, source: str, curve: DownsampledCurve
) -> views.SeriesReply:
    """Build the response to the query for a curve: downsampled, with non-finite marks."""
    if request.smoothing:
        points = smooth(curve.points, request.smoothing, request.branch)
        if request.from_step is not None:
            points = points.take(points.step >= request.from_step)
        curve = DownsampledCurve(points, len(points))
    reduce = downsample_means if _has_means(request) else downsample
    drawn = reduce(curve.points, request.points, request.branch)
    values: list[float | None] = drawn.value.tolist()
    for i in np.flatnonzero(~np.isfinite(drawn.value)).tolist():
        values[i] = None
    return views.SeriesReply(
        run_id=run_id,
        metric=request.metric,
        source=source,
        unit=series.unit_of(request.metric),
        branch=request.branch,
        num_total=curve.num_values,
        step=tuple(drawn.step.tolist()),
        time_unix_ns=tuple(drawn.time_unix_ns.tolist()),
        attempt=tuple(drawn.attempt.tolist()),
        value=tuple(values),
        nonfinite=series.nonfinite_marks(curve.points, MAX_MARKS),
        num_nonfinite=series.num_nonfinite(curve.points),
    )
