"""Answers every question about runs from the store, in the bodies of ``trainvitals.views``.

One function for each question, and one class that HTTP routes, the command line and a folder read
without any server ask: they cannot answer differently.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import asdict
from sqlalchemy import Connection

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
    IncidentsQuestion,
    IncidentView,
    ManySeriesQuestion,
    MoversQuestion,
    MoverView,
    RunDetail,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    SeriesQuestion,
    SeriesReply,
    SeriesRequest,
    StepQuestion,
    StepView,
    TableQuestion,
    TableReply,
)
from vitals_collector.alerts import commands, inbox
from vitals_collector.live import overview
from vitals_collector.live.run_status import Liveness
from vitals_collector.queries import metrics, series, tables
from vitals_collector.queries.annotations import annotations_of
from vitals_collector.queries.chunk_summary_cache import ChunkSummaryCache
from vitals_collector.queries.curve import curve_reply
from vitals_collector.queries.difference import difference
from vitals_collector.queries.heatmap import cells
from vitals_collector.queries.incidents import incidents
from vitals_collector.queries.ledger import (
    attempt_rows,
    attempts_of,
    checkpoints_of,
    data_of,
    decisions_of,
    events_of,
    findings_of,
    readings_of,
    run_row,
    sources_of,
    step_rows,
)
from vitals_collector.queries.load_curve import Outlined, Selection, load_curve, load_outlines
from vitals_collector.queries.shadow import with_hindsight
from vitals_collector.queries.top_changes import movers
from vitals_collector.retention.rollup import RANKS, VolumeSettings
from vitals_collector.retention.sizes import volume_of
from vitals_collector.storage.store import Store

MAX_POINTS_AT_ONCE = 200_000
MAX_MARKS = 20_000
"""Non-finite values that a series names one by one; of more, evenly chosen ones."""


A = TypeVar("A")

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
        outlines: what is remembered of compacted rows between questions; bounded by itself.
    """

    newest_alerts_by: inbox.NewestBy = "updated_unix_ns"

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        lost_after_seconds: float = 60.0,
        up_since_unix_ns: int = 0,
        volumes: VolumeSettings | None = None,
        outlines: ChunkSummaryCache | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.volumes = volumes or VolumeSettings()
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns
        self.outlines = outlines or ChunkSummaryCache()

    def ask(self, question: Question[A]) -> A:
        """Return the answer.

        Raises:
            UsageError: unknown run, metric or source, or a number out of bounds.
        """
        answer: A = ANSWERS[type(question)](self, question)
        return answer

    @contextmanager
    def read(self, *run_ids: str) -> Iterator[Connection]:
        """Give one moment of the store.

        Raises:
            UsageError: one of these runs is not in it.
        """
        with self.store.read() as connection:
            for run_id in run_ids:
                run_row(connection, run_id)
            yield connection

    def raise_alerts(self) -> None:
        """Bring the store's alerts up to date; those of a collector are, as rows come."""

    def liveness(self) -> Liveness:
        """Return what tells a running run from a lost one."""
        return Liveness(
            now_unix_ns=self.clock.time_ns(),
            up_since_unix_ns=self._up_since_unix_ns,
            lost_after_seconds=self._lost_after_seconds,
        )


# --------------------------------------------------------------------------------- the answers


@answer_to(RunsQuestion)
def _runs(query: Query, _: RunsQuestion) -> tuple[RunSummary, ...]:
    with query.read() as connection:
        return overview.summaries(connection, query.liveness())


@answer_to(RunQuestion)
def _run(query: Query, asked: RunQuestion) -> RunDetail:
    with query.store.read() as connection:
        row = run_row(connection, asked.run_id)
        return RunDetail(
            summary=overview.summaries(connection, query.liveness(), asked.run_id)[0],
            info=overview.info_of(row),
            attempts=attempts_of(connection, asked.run_id),
            sources=sources_of(connection, asked.run_id),
            metrics=metrics.names_of(connection, asked.run_id),
            volume=volume_of(connection, row, query.volumes),
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
    total = sum(request.points for request in requests)
    if total > MAX_POINTS_AT_ONCE:
        raise UsageError(
            f"{len(requests)} series are to have {total} points together; it must be at most "
            f"{MAX_POINTS_AT_ONCE}"
        )
    with query.read(run_id) as connection:
        chosen = [_selected(connection, run_id, request) for request in requests]
        outlined = [
            Outlined(selection, request.branch, request.points)
            for (_, selection), request in zip(chosen, requests, strict=True)
        ]
        attempts = attempt_rows(connection, run_id)
        curves = load_outlines(connection, outlined, attempts, query.outlines)
    return tuple(
        _series_reply(run_id, request, source, *curve)
        for request, (source, _), curve in zip(requests, chosen, curves, strict=True)
    )


@answer_to(CurveQuestion)
def _curve(query: Query, asked: CurveQuestion) -> CurveReply:
    run_id, metric, branch = asked.run_id, asked.metric, asked.branch
    with query.read(run_id) as connection:
        steps = (asked.from_step, asked.to_step)
        source, selection = metrics.select_rows(connection, run_id, metric, asked.source, steps)
        points = load_curve(connection, selection, attempt_rows(connection, run_id), branch)
    return curve_reply(run_id, metric, source, branch, points)


@answer_to(DifferenceQuestion)
def _difference(query: Query, asked: DifferenceQuestion) -> DifferenceReply:
    with query.read(asked.run_id, asked.other) as connection:
        return difference(connection, asked)


@answer_to(StepQuestion)
def _step(query: Query, asked: StepQuestion) -> StepView:
    run_id, step = asked.run_id, asked.step
    with query.read(run_id) as connection:
        return StepView(
            run_id=run_id,
            step=step,
            rows=step_rows(connection, run_id, step),
            findings=findings_of(connection, run_id, step),
            decisions=with_hindsight(connection, run_id, decisions_of(connection, run_id, step)),
            readings=readings_of(connection, run_id, step),
            data=data_of(connection, run_id, step),
            over_ranks=step_rows(connection, run_id, step, RANKS),
        )


@answer_to(DecisionsQuestion)
def _decisions(query: Query, asked: DecisionsQuestion) -> tuple[DecisionView, ...]:
    with query.read(asked.run_id) as connection:
        return with_hindsight(connection, asked.run_id, decisions_of(connection, asked.run_id))


@answer_to(FindingsQuestion)
def _findings(query: Query, asked: FindingsQuestion) -> tuple[FindingView, ...]:
    with query.read(asked.run_id) as connection:
        return findings_of(connection, asked.run_id)


@answer_to(CheckpointsQuestion)
def _checkpoints(query: Query, asked: CheckpointsQuestion) -> tuple[CheckpointView, ...]:
    with query.read(asked.run_id) as connection:
        return checkpoints_of(connection, asked.run_id)


@answer_to(EventsQuestion)
def _events(query: Query, asked: EventsQuestion) -> tuple[EventView, ...]:
    with query.read(asked.run_id) as connection:
        return events_of(connection, asked.run_id, asked.kind)


@answer_to(AlertsQuestion)
def _alerts(query: Query, asked: AlertsQuestion) -> tuple[AlertView, ...]:
    query.raise_alerts()
    return inbox.listed(
        query.store,
        now_unix_ns=query.clock.time_ns(),
        run_id=asked.run_id,
        state=asked.state,
        newest_by=query.newest_alerts_by,
    )


@answer_to(CommandsQuestion)
def _commands(query: Query, asked: CommandsQuestion) -> tuple[CommandView, ...]:
    now = query.clock.time_ns()
    return commands.listed(query.store, asked.run_id, now_unix_ns=now, status=asked.status)


@answer_to(CellsQuestion)
def _cells(query: Query, asked: CellsQuestion) -> CellsReply:
    with query.read(asked.run_id) as connection:
        return cells(connection, asked)


@answer_to(MoversQuestion)
def _movers(query: Query, asked: MoversQuestion) -> tuple[MoverView, ...]:
    with query.read(asked.run_id) as connection:
        return movers(connection, asked.run_id, asked.step)


@answer_to(IncidentsQuestion)
def _incidents(query: Query, asked: IncidentsQuestion) -> tuple[IncidentView, ...]:
    with query.read(asked.run_id) as connection:
        run = overview.summaries(connection, query.liveness(), asked.run_id)[0]
        return incidents(connection, run)


@answer_to(AnnotationsQuestion)
def _annotations(query: Query, asked: AnnotationsQuestion) -> tuple[AnnotationView, ...]:
    with query.read(asked.run_id) as connection:
        return annotations_of(connection, asked.run_id)


@answer_to(TableQuestion)
def _table(query: Query, asked: TableQuestion) -> TableReply:
    if asked.table == "alerts":
        query.raise_alerts()
    with query.read() as connection:
        return tables.ask(connection, asked, query.liveness())


def _selected(connection: Connection, run_id: str, asked: SeriesRequest) -> tuple[str, Selection]:
    steps = (asked.from_step, asked.to_step)
    source, selection = metrics.select_rows(connection, run_id, asked.metric, asked.source, steps)
    since, until = asked.from_time_unix_ns, asked.to_time_unix_ns
    return source, replace(selection, from_time_unix_ns=since, to_time_unix_ns=until)


def _series_reply(
    run_id: str, request: SeriesRequest, source: str, points: series.Points, num_total: int
) -> SeriesReply:
    drawn = series.downsample(points, request.points)
    values: list[float | None] = drawn.value.tolist()
    for i in np.flatnonzero(~np.isfinite(drawn.value)).tolist():
        values[i] = None
    return SeriesReply(
        run_id=run_id,
        metric=request.metric,
        source=source,
        unit=metrics.unit_of(request.metric),
        branch=request.branch,
        num_total=num_total,
        step=tuple(drawn.step.tolist()),
        time_unix_ns=tuple(drawn.time_unix_ns.tolist()),
        attempt=tuple(drawn.attempt.tolist()),
        value=tuple(values),
        nonfinite=series.nonfinite_marks(points, MAX_MARKS),
        num_nonfinite=series.num_nonfinite(points),
    )


__all__ = ["ANSWERS", "Query", "answer_to"]
