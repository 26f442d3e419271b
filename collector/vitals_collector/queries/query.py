"""Answers every question about runs from the store, in the bodies of ``trainvitals.views``.

One function for each question, and one class that HTTP routes, the command line and a folder read
without any server ask: they cannot answer differently.
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
from vitals_collector.numbers.interface import Curve, Drawn, Points, downsample, smooth
from vitals_collector.queries import series, tables
from vitals_collector.queries.annotations import annotations_of
from vitals_collector.queries.attribution import at_step
from vitals_collector.queries.difference import difference
from vitals_collector.queries.forecast import forecast
from vitals_collector.queries.goodput import GoodputCache
from vitals_collector.queries.heatmap import cells
from vitals_collector.queries.incidents import incidents, run_verdict
from vitals_collector.queries.ledger import (
    attempts_of,
    checkpoints_of,
    data_of,
    decisions_of,
    events_of,
    findings_of,
    readings_of,
    run_row,
    sources_of,
    stacks_of,
    step_rows,
)
from vitals_collector.queries.series import curve_reply
from vitals_collector.queries.shadow import with_hindsight
from vitals_collector.queries.top_changes import movers
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.retention.sizes import volume_of
from vitals_collector.storage.schema import RANKS, runs
from vitals_collector.storage.store import Moment, SteadyClock, Store, unknown_run

MAX_POINTS_AT_ONCE = 200_000
MAX_MARKS = 20_000
"""Non-finite values that a series names one by one; of more, evenly chosen ones."""


_OF_RUN = select(runs.c.run_id).where(runs.c.run_id == bindparam("run_id"), ~is_being_removed())
"""Made once: nearly every answer begins with it."""

A = TypeVar("A")
Config = dict[str, str | int | float | bool | None]

ANSWERS: dict[type[Question[Any]], Callable[["Query", Any], Any]] = {}
"""What answers each question."""


def answer_to(
    kind: type[Question[A]],
) -> Callable[[Callable[["Query", Any], A]], Callable[["Query", Any], A]]:
    """Return a decorator: that function answers questions of this kind, over HTTP and here."""

    def register(answer: Callable[["Query", Any], A]) -> Callable[["Query", Any], A]:
        ANSWERS[kind] = answer
        return answer

    return register


class Query:
    """Answers from a store. Each question reads one moment of it; none changes it.

    Args:
        store: what to read.
        clock: what "now" is, to tell a running run from a lost one.
        lost_after_seconds: how long a run may be silent.
        up_since_unix_ns: since when rows could have arrived; 0 where nothing arrives.
        volumes: what is kept of a run, to be said.
        gpu_hour_price: what a GPU costs for an hour; 0: nobody said.
        goodput: where sums are kept that others read as well.
    """

    newest_alerts_by: inbox.NewestBy = "updated_unix_ns"
    reach: frozenset[str] | None = None
    """The runs of which is answered; None: of all."""

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
        """Return the run's folder where that is what is read: a collector sees none."""
        return None

    def ask(self, question: Question[A]) -> A:
        """Return the answer.

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
    def read(self, *run_ids: str) -> Iterator[Moment]:
        """Give one moment of the store.

        Raises:
            UsageError: one of these runs is not in it.
        """
        with self.store.read() as connection:
            for run_id in run_ids:
                if connection.execute(_OF_RUN, {"run_id": run_id}).first() is None:
                    raise unknown_run(run_id)
            yield self.store.moment(connection)

    def raise_alerts(self) -> None:
        """Bring the store's alerts up to date; those of a collector are, as rows come."""

    def liveness(self) -> Liveness:
        """Return what tells a running run from a lost one."""
        now = self._steady.time_ns()
        return Liveness(
            now_unix_ns=now,
            up_since_unix_ns=max(self._up_since_unix_ns, self.store.hearing.since(now)),
            lost_after_seconds=self._lost_after_seconds,
        )


def within(query: Query, reach: frozenset[str] | None) -> Query:
    """Return one that answers of these runs alone; None: of all."""
    limited = copy.copy(query)
    limited.reach = reach
    return limited


# --------------------------------------------------------------------------------- the answers

_OF_ALL_RUNS = (RunsQuestion, ConfigsQuestion, AlertsQuestion, SilencesQuestion, TableQuestion)
"""Questions that may name no run: each answer leaves out what is not in ``Query.reach``."""


@answer_to(RunsQuestion)
def _runs(query: Query, _: RunsQuestion) -> tuple[RunSummary, ...]:
    with query.read() as moment:
        found = overview.summaries(moment.sql, query.liveness())
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
def _run(query: Query, asked: RunQuestion) -> RunDetail:
    with query.read() as moment:
        row = run_row(moment.sql, asked.run_id)
        return RunDetail(
            summary=overview.summaries(moment.sql, query.liveness(), asked.run_id)[0],
            info=overview.info_of(row),
            attempts=attempts_of(moment, asked.run_id),
            sources=sources_of(moment.sql, asked.run_id),
            metrics=series.names_of(moment.sql, asked.run_id),
            volume=volume_of(moment.numbers, row, query.volumes) if asked.volume else None,
        )


@answer_to(SeriesQuestion)
def _one_series(query: Query, asked: SeriesQuestion) -> SeriesReply:
    fields = asdict(asked)
    run_id = fields.pop("run_id")
    of_one = ManySeriesQuestion(run_id=run_id, series=(SeriesRequest(**fields),))
    return _many_series(query, of_one)[0]


@answer_to(ManySeriesQuestion)
def _many_series(query: Query, asked: ManySeriesQuestion) -> tuple[SeriesReply, ...]:
    run_id, requests = asked.run_id, asked.series
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
        chosen = [_selected(moment, run_id, request) for request in requests]
        attempts = series.attempt_rows(moment.sql, run_id)
        drawn: dict[int, Drawn] = {}
        for branch in {request.branch for request in requests}:
            which = [i for i, request in enumerate(requests) if request.branch == branch]
            curves = [chosen[i][1] for i in which]
            drawn |= zip(which, moment.numbers.curves(curves, attempts, branch), strict=True)
    return tuple(
        _series_reply(run_id, request, source, drawn[i])
        for i, (request, (source, _)) in enumerate(zip(requests, chosen, strict=True))
    )


@answer_to(CurveQuestion)
def _curve(query: Query, asked: CurveQuestion) -> CurveReply:
    run_id, metric, branch = asked.run_id, asked.metric, asked.branch
    with query.read(run_id) as moment:
        steps = (asked.from_step, asked.to_step)
        source, curve = series.curve_of(moment, run_id, metric, asked.source, steps)
        (drawn,) = moment.numbers.curves([curve], series.attempt_rows(moment.sql, run_id), branch)
    return curve_reply(run_id, metric, source, branch, drawn.points)


@answer_to(DifferenceQuestion)
def _difference(query: Query, asked: DifferenceQuestion) -> DifferenceReply:
    with query.read(asked.run_id, asked.other) as moment:
        return difference(moment, asked)


@answer_to(StepQuestion)
def _step(query: Query, asked: StepQuestion) -> StepView:
    run_id, step = asked.run_id, asked.step
    with query.read(run_id) as moment:
        found = findings_of(moment.sql, run_id, step)
        return StepView(
            run_id=run_id,
            step=step,
            rows=step_rows(moment, run_id, step),
            findings=found,
            moved_first=at_step(moment, run_id, step, found),
            decisions=with_hindsight(moment, run_id, decisions_of(moment.sql, run_id, step)),
            readings=readings_of(moment.sql, run_id, step),
            data=data_of(moment.sql, run_id, step),
            over_ranks=step_rows(moment, run_id, step, RANKS),
        )


@answer_to(DecisionsQuestion)
def _decisions(query: Query, asked: DecisionsQuestion) -> tuple[DecisionView, ...]:
    with query.read(asked.run_id) as moment:
        return with_hindsight(moment, asked.run_id, decisions_of(moment.sql, asked.run_id))


@answer_to(FindingsQuestion)
def _findings(query: Query, asked: FindingsQuestion) -> tuple[FindingView, ...]:
    with query.read(asked.run_id) as moment:
        return findings_of(moment.sql, asked.run_id)


@answer_to(CheckpointsQuestion)
def _checkpoints(query: Query, asked: CheckpointsQuestion) -> tuple[CheckpointView, ...]:
    with query.read(asked.run_id) as moment:
        return checkpoints_of(moment.sql, asked.run_id)


@answer_to(EventsQuestion)
def _events(query: Query, asked: EventsQuestion) -> tuple[EventView, ...]:
    with query.read(asked.run_id) as moment:
        return events_of(moment.sql, asked.run_id, asked.kind)


@answer_to(StacksQuestion)
def _stacks(query: Query, asked: StacksQuestion) -> tuple[StacksView, ...]:
    with query.read(asked.run_id) as moment:
        return stacks_of(moment.sql, asked.run_id)


@answer_to(AlertsQuestion)
def _alerts(query: Query, asked: AlertsQuestion) -> tuple[AlertView, ...]:
    query.raise_alerts()
    return inbox.listed(
        query.store,
        now_unix_ns=query.clock.time_ns(),
        run_id=asked.run_id,
        state=asked.state,
        newest_by=query.newest_alerts_by,
        reach=query.reach,
    )


@answer_to(SilencesQuestion)
def _silences(query: Query, _asked: SilencesQuestion) -> tuple[SilenceView, ...]:
    now = query.clock.time_ns()
    return inbox.silences_listed(query.store, now_unix_ns=now, reach=query.reach)


@answer_to(CommandsQuestion)
def _commands(query: Query, asked: CommandsQuestion) -> tuple[CommandView, ...]:
    now = query.clock.time_ns()
    return commands.listed(query.store, asked.run_id, now_unix_ns=now, status=asked.status)


@answer_to(CellsQuestion)
def _cells(query: Query, asked: CellsQuestion) -> CellsReply:
    with query.read(asked.run_id) as moment:
        return cells(moment, asked)


@answer_to(MoversQuestion)
def _movers(query: Query, asked: MoversQuestion) -> tuple[MoverView, ...]:
    with query.read(asked.run_id) as moment:
        return movers(moment, asked.run_id, asked.step)


@answer_to(IncidentsQuestion)
def _incidents(query: Query, asked: IncidentsQuestion) -> tuple[IncidentView, ...]:
    return _judged(query, asked.run_id, incidents)


@answer_to(VerdictQuestion)
def _verdict(query: Query, asked: VerdictQuestion) -> RunVerdict:
    return _judged(query, asked.run_id, run_verdict)


def _judged(query: Query, run_id: str, judge: Callable[..., A]) -> A:
    with query.read(run_id) as moment:
        run = overview.summaries(moment.sql, query.liveness(), run_id)[0]
        return judge(
            moment,
            run,
            price=query.gpu_hour_price,
            reach=query.reach,
            run_dir=query.run_dir(run_id),
        )


@answer_to(GoodputQuestion)
def _goodput(query: Query, asked: GoodputQuestion) -> GoodputView:
    with query.read(asked.run_id) as moment:
        run = overview.summaries(moment.sql, query.liveness(), asked.run_id)[0]
        return query.goodput.of(moment, run)


@answer_to(ForecastQuestion)
def _forecast(query: Query, asked: ForecastQuestion) -> ForecastView:
    others = (asked.other,) if asked.other else ()
    with query.read(asked.run_id, *others) as moment:
        ids = (asked.run_id, *others)
        runs = [overview.summaries(moment.sql, query.liveness(), run_id)[0] for run_id in ids]
        return forecast(moment, asked, runs, now_unix_ns=query.clock.time_ns())


@answer_to(AnnotationsQuestion)
def _annotations(query: Query, asked: AnnotationsQuestion) -> tuple[AnnotationView, ...]:
    with query.read(asked.run_id) as moment:
        return annotations_of(moment.sql, asked.run_id)


@answer_to(TableQuestion)
def _table(query: Query, asked: TableQuestion) -> TableReply:
    if asked.table == "alerts":
        query.raise_alerts()
    with query.read() as moment:
        return tables.ask(moment, asked, query.liveness(), query.reach)


def _selected(moment: Moment, run_id: str, asked: SeriesRequest) -> tuple[str, Curve]:
    steps = (asked.from_step, asked.to_step)
    source, curve = series.curve_of(moment, run_id, asked.metric, asked.source, steps)
    since, until = asked.from_time_unix_ns, series.behind(asked.to_time_unix_ns)
    span = curve.span._replace(from_unix_ns=since, to_unix_ns=until)
    if not asked.smoothing:
        return source, Curve(span, curve.column, asked.points)
    if span.from_step is not None:
        span = span._replace(from_step=max(0, span.from_step - _reach(asked.smoothing)))
    return source, Curve(span, curve.column)  # a mean of what is drawn is none of what is stored


def _reach(weight: float) -> int:
    """Return how many steps before the first drawn one are smoothed with it.

    What lies further back weighs less than a billionth, even if but one step in ten was measured.
    """
    return 10 * math.ceil(21 / (1 - weight))


def _smoothed(request: SeriesRequest, points: Points) -> Points:
    points = smooth(points, request.smoothing, request.branch)
    first = request.from_step
    return points if first is None else points.take(points.step >= first)


def _series_reply(run_id: str, request: SeriesRequest, source: str, curve: Drawn) -> SeriesReply:
    if request.smoothing:
        points = _smoothed(request, curve.points)
        curve = Drawn(points, len(points))
    drawn = downsample(curve.points, request.points, request.branch)
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
