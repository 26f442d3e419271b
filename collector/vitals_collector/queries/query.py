"""Responds to every query about runs from the store, with the types of ``trainvitals.views``.

One function per query, and one class for HTTP routes, the command line, and reading a directory
without a server: their results cannot differ.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import asdict
from sqlalchemy import bindparam, select

from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.question import Question
from trainvitals.views import (
    MAX_POINTS,
    AlertsQuestion,
    AlertView,
    AnnotationsQuestion,
    AnnotationView,
    CellsQuestion,
    CellsReply,
    CheckpointsQuestion,
    CheckpointView,
    CommandsQuestion,
    CommandView,
    ConfigsQuestion,
    CurveQuestion,
    CurveReply,
    DecisionsQuestion,
    DecisionView,
    DifferenceQuestion,
    DifferenceReply,
    EventsQuestion,
    EventView,
    FindingsQuestion,
    FindingView,
    ForecastQuestion,
    ForecastView,
    GoodputQuestion,
    GoodputView,
    IncidentsQuestion,
    IncidentView,
    ManySeriesQuestion,
    MoversQuestion,
    MoverView,
    RunDetail,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    RunVerdict,
    SeriesQuestion,
    SeriesReply,
    SeriesRequest,
    SilencesQuestion,
    SilenceView,
    StacksQuestion,
    StacksView,
    StepQuestion,
    StepView,
    TableQuestion,
    TableReply,
    VerdictQuestion,
)
from vitals_collector.alerts import commands, inbox
from vitals_collector.ingest.ingest import is_being_removed
from vitals_collector.live import overview
from vitals_collector.live.run_status import Liveness
from vitals_collector.numbers.interface import (
    RANKS,
    CurveRequest,
    DownsampledCurve,
    Points,
    downsample,
    downsample_means,
    smooth,
)
from vitals_collector.queries import series, tables
from vitals_collector.queries.annotations import annotations_of
from vitals_collector.queries.attribution import first_change_text
from vitals_collector.queries.difference import difference
from vitals_collector.queries.forecast import forecast
from vitals_collector.queries.goodput import GoodputCache
from vitals_collector.queries.heatmap import cells
from vitals_collector.queries.incidents import incidents, run_verdict
from vitals_collector.queries.ledger import (
    attempts_of,
    checkpoints_of,
    decisions_of,
    events_of,
    findings_of,
    load_probe_readings,
    run_row,
    samples_of_step,
    sources_of,
    stacks_of,
    step_rows,
)
from vitals_collector.queries.series import curve_reply
from vitals_collector.queries.shadow import add_observed_outcomes
from vitals_collector.queries.top_changes import top_change_views
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.retention.sizes import volume_of
from vitals_collector.storage.schema import runs
from vitals_collector.storage.store import ReadSnapshot, SteadyClock, Store, unknown_run

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
    """Return a decorator that registers a function for queries of this type, over HTTP and here."""

    def register(answer: Callable[["Query", Any], A]) -> Callable[["Query", Any], A]:
        ANSWERS[kind] = answer
        return answer

    return register


class Query:
    """Runs queries on a store. Each reads one snapshot of it; none changes it.

    Args:
        store: the store.
        clock: the current time, to distinguish a running run from a lost one.
        lost_after_seconds: time without a row after which a run is lost.
        up_since_unix_ns: time since which rows could arrive; 0 if none can.
        volumes: limits of the data kept per run, for display.
        gpu_hour_price: price of a GPU-hour; 0: not set.
        goodput: shared cache of the goodput sums.
    """

    newest_alerts_by: inbox.NewestBy = "updated_unix_ns"
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
    ) -> None:
        self.store = store
        self.clock, self._steady = clock, SteadyClock(clock)
        self.volumes = volumes or VolumeSettings()
        self.gpu_hour_price = gpu_hour_price
        self.goodput = goodput or GoodputCache(price=gpu_hour_price)
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns

    def run_dir(self, run_id: str) -> Path | None:
        """Return the run's directory if a directory is read; None for a collector."""
        return None

    def ask(self, question: Question[A]) -> A:
        """Return the response.

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
        """Provide one snapshot of the store.

        Raises:
            UsageError: one of these runs is not stored.
        """
        with self.store.read_transaction() as connection:
            for run_id in run_ids:
                if connection.execute(_OF_RUN, {"run_id": run_id}).first() is None:
                    raise unknown_run(run_id)
            yield self.store.snapshot_on(connection)

    def raise_alerts(self) -> None:
        """Update the store's alerts; a collector's are updated as rows arrive."""

    def liveness(self) -> Liveness:
        """Return the criteria for running and lost runs."""
        now = self._steady.time_ns()
        return Liveness(
            now_unix_ns=now,
            up_since_unix_ns=max(self._up_since_unix_ns, self.store.ingest_uptime.since(now)),
            lost_after_seconds=self._lost_after_seconds,
        )


def within(query: Query, reach: frozenset[str] | None) -> Query:
    """Return a query limited to the runs that a token reaches; None: all."""
    limited = copy.copy(query)
    limited.reach = reach
    return limited


# --------------------------------------------------------------------------------- the queries

_OF_ALL_RUNS = (RunsQuestion, ConfigsQuestion, AlertsQuestion, SilencesQuestion, TableQuestion)
"""Queries that may name no run: each leaves out what is not in ``Query.reach``."""


@answer_to(RunsQuestion)
def _runs(query: Query, _: RunsQuestion) -> tuple[RunSummary, ...]:
    with query.read() as moment:
        found = overview.load_run_summaries(moment.sql, query.liveness())
    return tuple(run for run in found if query.reach is None or run.run_id in query.reach)


@answer_to(ConfigsQuestion)
def _configs(query: Query, _: ConfigsQuestion) -> dict[str, Config]:
    with query.read() as moment:
        rows = moment.sql.execute(select(runs).where(~is_being_removed())).all()
    return {
        row.run_id: overview.info_of(row).config
        for row in rows
        if query.reach is None or row.run_id in query.reach
    }


@answer_to(RunQuestion)
def _run_detail(query: Query, question: RunQuestion) -> RunDetail:
    with query.read() as moment:
        row = run_row(moment.sql, question.run_id)
        return RunDetail(
            summary=overview.load_run_summaries(moment.sql, query.liveness(), question.run_id)[0],
            info=overview.info_of(row),
            attempts=attempts_of(moment, question.run_id),
            sources=sources_of(moment.sql, question.run_id),
            metrics=series.names_of(moment.sql, question.run_id),
            volume=volume_of(moment.numbers, row, query.volumes) if question.volume else None,
        )


@answer_to(SeriesQuestion)
def _one_series(query: Query, question: SeriesQuestion) -> SeriesReply:
    fields = asdict(question)
    run_id = fields.pop("run_id")
    of_one = ManySeriesQuestion(run_id=run_id, series=(SeriesRequest(**fields),))
    return _many_series(query, of_one)[0]


@answer_to(ManySeriesQuestion)
def _many_series(query: Query, question: ManySeriesQuestion) -> tuple[SeriesReply, ...]:
    run_id, requests = question.run_id, question.series
    for request in requests:
        if not 2 <= request.points <= MAX_POINTS:
            raise UsageError(f"points is {request.points}; it must be 2 to {MAX_POINTS}")
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


@answer_to(CurveQuestion)
def _curve(query: Query, question: CurveQuestion) -> CurveReply:
    run_id, metric, branch = question.run_id, question.metric, question.branch
    with query.read(run_id) as moment:
        steps = (question.from_step, question.to_step)
        source, curve = series.curve_of(moment, run_id, metric, question.source, steps)
        (drawn,) = moment.numbers.curves([curve], series.attempt_rows(moment.sql, run_id), branch)
    return curve_reply(run_id, metric, source, branch, drawn.points)


@answer_to(DifferenceQuestion)
def _difference(query: Query, question: DifferenceQuestion) -> DifferenceReply:
    with query.read(question.run_id, question.other) as moment:
        return difference(moment, question)


@answer_to(StepQuestion)
def _step(query: Query, question: StepQuestion) -> StepView:
    run_id, step = question.run_id, question.step
    with query.read(run_id) as moment:
        found = findings_of(moment.sql, run_id, step)
        return StepView(
            run_id=run_id,
            step=step,
            rows=step_rows(moment, run_id, step),
            findings=found,
            moved_first=first_change_text(moment, run_id, step, found),
            decisions=add_observed_outcomes(moment, run_id, decisions_of(moment.sql, run_id, step)),
            readings=load_probe_readings(moment.sql, run_id, step),
            data=samples_of_step(moment.sql, run_id, step),
            over_ranks=step_rows(moment, run_id, step, RANKS),
        )


@answer_to(DecisionsQuestion)
def _decisions(query: Query, question: DecisionsQuestion) -> tuple[DecisionView, ...]:
    with query.read(question.run_id) as moment:
        return add_observed_outcomes(
            moment, question.run_id, decisions_of(moment.sql, question.run_id)
        )


@answer_to(FindingsQuestion)
def _findings(query: Query, question: FindingsQuestion) -> tuple[FindingView, ...]:
    with query.read(question.run_id) as moment:
        return findings_of(moment.sql, question.run_id)


@answer_to(CheckpointsQuestion)
def _checkpoints(query: Query, question: CheckpointsQuestion) -> tuple[CheckpointView, ...]:
    with query.read(question.run_id) as moment:
        return checkpoints_of(moment.sql, question.run_id)


@answer_to(EventsQuestion)
def _events(query: Query, question: EventsQuestion) -> tuple[EventView, ...]:
    with query.read(question.run_id) as moment:
        return events_of(moment.sql, question.run_id, question.kind)


@answer_to(StacksQuestion)
def _stacks(query: Query, question: StacksQuestion) -> tuple[StacksView, ...]:
    with query.read(question.run_id) as moment:
        return stacks_of(moment.sql, question.run_id)


@answer_to(AlertsQuestion)
def _alerts(query: Query, question: AlertsQuestion) -> tuple[AlertView, ...]:
    query.raise_alerts()
    return inbox.list_alerts(
        query.store,
        now_unix_ns=query.clock.time_ns(),
        run_id=question.run_id,
        state=question.state,
        newest_by=query.newest_alerts_by,
        reach=query.reach,
    )


@answer_to(SilencesQuestion)
def _silences(query: Query, question: SilencesQuestion) -> tuple[SilenceView, ...]:
    now = query.clock.time_ns()
    return inbox.list_silences(query.store, now_unix_ns=now, reach=query.reach)


@answer_to(CommandsQuestion)
def _commands(query: Query, question: CommandsQuestion) -> tuple[CommandView, ...]:
    now = query.clock.time_ns()
    return commands.list_commands(
        query.store, question.run_id, now_unix_ns=now, status=question.status
    )


@answer_to(CellsQuestion)
def _cells(query: Query, question: CellsQuestion) -> CellsReply:
    with query.read(question.run_id) as moment:
        return cells(moment, question)


@answer_to(MoversQuestion)
def _movers(query: Query, question: MoversQuestion) -> tuple[MoverView, ...]:
    with query.read(question.run_id) as moment:
        return top_change_views(moment, question.run_id, question.step)


@answer_to(IncidentsQuestion)
def _incidents(query: Query, question: IncidentsQuestion) -> tuple[IncidentView, ...]:
    return _judge_run(query, question.run_id, incidents)


@answer_to(VerdictQuestion)
def _verdict(query: Query, question: VerdictQuestion) -> RunVerdict:
    return _judge_run(query, question.run_id, run_verdict)


def _judge_run(query: Query, run_id: str, judge: Callable[..., A]) -> A:
    """Call ``judge`` on a snapshot of the run, for its incidents or its verdict."""
    with query.read(run_id) as moment:
        run = overview.load_run_summaries(moment.sql, query.liveness(), run_id)[0]
        return judge(
            moment,
            run,
            price=query.gpu_hour_price,
            reach=query.reach,
            run_dir=query.run_dir(run_id),
        )


@answer_to(GoodputQuestion)
def _goodput(query: Query, question: GoodputQuestion) -> GoodputView:
    with query.read(question.run_id) as moment:
        run = overview.load_run_summaries(moment.sql, query.liveness(), question.run_id)[0]
        return query.goodput.of(moment, run)


@answer_to(ForecastQuestion)
def _forecast(query: Query, question: ForecastQuestion) -> ForecastView:
    others = (question.other,) if question.other else ()
    with query.read(question.run_id, *others) as moment:
        ids = (question.run_id, *others)
        runs = [
            overview.load_run_summaries(moment.sql, query.liveness(), run_id)[0] for run_id in ids
        ]
        return forecast(moment, question, runs, now_unix_ns=query.clock.time_ns())


@answer_to(AnnotationsQuestion)
def _annotations(query: Query, question: AnnotationsQuestion) -> tuple[AnnotationView, ...]:
    with query.read(question.run_id) as moment:
        return annotations_of(moment.sql, question.run_id)


@answer_to(TableQuestion)
def _table(query: Query, question: TableQuestion) -> TableReply:
    if question.table == "alerts":
        query.raise_alerts()
    with query.read() as moment:
        return tables.query_table(moment, question, query.liveness(), query.reach)


def _select_series(
    moment: ReadSnapshot, run_id: str, request: SeriesRequest
) -> tuple[str, CurveRequest]:
    steps = (request.from_step, request.to_step)
    source, curve = series.curve_of(moment, run_id, request.metric, request.source, steps)
    since, until = request.from_time_unix_ns, series.exclusive_end(request.to_time_unix_ns)
    span = curve.span._replace(from_unix_ns=since, to_unix_ns=until)
    if not _has_means(request):
        return source, CurveRequest(span, curve.column, request.points)
    if span.from_step is not None and request.smoothing:
        span = span._replace(
            from_step=max(0, span.from_step - _smoothing_reach_steps(request.smoothing))
        )
    return source, CurveRequest(
        span, curve.column
    )  # the mean of the drawn points differs from that of the stored ones


def _has_means(request: SeriesRequest) -> bool:
    """Return whether a query of a series wants means or smoothed values."""
    return request.mean or request.smoothing > 0.0


def _smoothing_reach_steps(weight: float) -> int:
    """Return the number of steps before the first drawn one that smoothing needs.

    Earlier steps weigh less than 1e-9, even if only one step in ten was measured.
    """
    return 10 * math.ceil(21 / (1 - weight))


def _smooth_points(request: SeriesRequest, points: Points) -> Points:
    points = smooth(points, request.smoothing, request.branch)
    first = request.from_step
    return points if first is None else points.take(points.step >= first)


def _series_reply(
    run_id: str, request: SeriesRequest, source: str, curve: DownsampledCurve
) -> SeriesReply:
    if request.smoothing:
        points = _smooth_points(request, curve.points)
        curve = DownsampledCurve(points, len(points))
    reduce = downsample_means if _has_means(request) else downsample
    drawn = reduce(curve.points, request.points, request.branch)
    values: list[float | None] = drawn.value.tolist()
    for i in np.flatnonzero(~np.isfinite(drawn.value)).tolist():
        values[i] = None
    return SeriesReply(
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


__all__ = ["ANSWERS", "Query", "answer_to", "within"]
