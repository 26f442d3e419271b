"""Answers every question about runs from the store, in the bodies of ``trainvitals.views``.

One class for the HTTP routes, the command line and a folder read without any server: they cannot
answer differently.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sqlalchemy import Connection

from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.views import (
    AlertView,
    Along,
    AnnotationView,
    Branch,
    CellsReply,
    CheckpointView,
    CurveReply,
    DecisionView,
    DifferenceReply,
    EventView,
    FindingView,
    IncidentView,
    MoverView,
    RunDetail,
    RunSummary,
    SeriesReply,
    SeriesRequest,
    StepView,
    TableReply,
    TableRequest,
)
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
    alerts_of,
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

MAX_POINTS = 20_000
MAX_POINTS_AT_ONCE = 200_000
MAX_MARKS = 20_000
"""Non-finite values that a series names one by one; of more, evenly chosen ones."""


class Query:
    """The questions. Each reads one moment of the store; none changes it.

    Args:
        store: what to read.
        clock: what "now" is, to tell a running run from a lost one.
        lost_after_seconds: how long a run may be silent.
        up_since_unix_ns: since when rows could have arrived; 0 where nothing arrives.
        volumes: what is kept of a run, to be said.
        outlines: what is remembered of compacted rows between questions; bounded by itself.
    """

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
        self._store = store
        self._volumes = volumes or VolumeSettings()
        self._clock = clock
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = up_since_unix_ns
        self._outlines = outlines or ChunkSummaryCache()

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        with self._store.read() as connection:
            return overview.summaries(connection, self._liveness())

    def run(self, run_id: str) -> RunDetail:
        """Return everything about one run that is not a curve."""
        with self._store.read() as connection:
            row = run_row(connection, run_id)
            return RunDetail(
                summary=overview.summaries(connection, self._liveness(), run_id)[0],
                info=overview.info_of(row),
                attempts=attempts_of(connection, run_id),
                sources=sources_of(connection, run_id),
                metrics=metrics.names_of(connection, run_id),
                volume=volume_of(connection, row, self._volumes),
            )

    def series(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        points: int = 1_000,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> SeriesReply:
        """Return one curve, downsampled to about ``points`` points; ``SeriesRequest`` says more.

        Raises:
            UsageError: unknown run, metric or source, or a number out of bounds.
        """
        request = SeriesRequest(
            metric=metric,
            source=source,
            branch=branch,
            points=points,
            from_step=from_step,
            to_step=to_step,
        )
        return self.many_series(run_id, [request])[0]

    def many_series(
        self, run_id: str, requests: Sequence[SeriesRequest]
    ) -> tuple[SeriesReply, ...]:
        """Return several curves of one moment, in the order of the requests.

        Raises:
            UsageError: unknown run, metric or source, or a number out of bounds.
        """
        for request in requests:
            if not 2 <= request.points <= MAX_POINTS:
                raise UsageError(f"points is {request.points}; it must be 2 to {MAX_POINTS}")
        total = sum(request.points for request in requests)
        if total > MAX_POINTS_AT_ONCE:
            raise UsageError(
                f"{len(requests)} series are to have {total} points together; it must be at most "
                f"{MAX_POINTS_AT_ONCE}"
            )
        with self._store.read() as connection:
            run_row(connection, run_id)
            chosen = [_selected(connection, run_id, request) for request in requests]
            outlined = [
                Outlined(selection, request.branch, request.points)
                for (_, selection), request in zip(chosen, requests, strict=True)
            ]
            attempts = attempt_rows(connection, run_id)
            curves = load_outlines(connection, outlined, attempts, self._outlines)
        return tuple(
            _series_reply(run_id, request, source, *curve)
            for request, (source, _), curve in zip(requests, chosen, curves, strict=True)
        )

    def curve(
        self,
        run_id: str,
        metric: str,
        *,
        source: str = "",
        branch: Branch = "lineage",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> CurveReply:
        """Return every point of one curve; the arguments are those of ``series``.

        Raises:
            UsageError: unknown run, metric or source, or too many points for one answer.
        """
        with self._store.read() as connection:
            run_row(connection, run_id)
            steps = (from_step, to_step)
            chosen, selection = metrics.select_rows(connection, run_id, metric, source, steps)
            points = load_curve(connection, selection, attempt_rows(connection, run_id), branch)
        return curve_reply(run_id, metric, chosen, branch, points)

    def difference(
        self, base: str, other: str, metric: str, *, along: Along = "step", points: int = 1_000
    ) -> DifferenceReply:
        """Return what a metric of ``other`` has more than that of ``base``."""
        with self._store.read() as connection:
            run_row(connection, base)
            run_row(connection, other)
            return difference(connection, base, other, metric, along=along, points=points)

    def step(self, run_id: str, step: int) -> StepView:
        """Return what is known of one step, on every attempt that trained it."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return StepView(
                run_id=run_id,
                step=step,
                rows=step_rows(connection, run_id, step),
                findings=findings_of(connection, run_id, step),
                decisions=with_hindsight(
                    connection, run_id, decisions_of(connection, run_id, step)
                ),
                readings=readings_of(connection, run_id, step),
                data=data_of(connection, run_id, step),
                over_ranks=step_rows(connection, run_id, step, RANKS),
            )

    def decisions(self, run_id: str) -> tuple[DecisionView, ...]:
        """Return the run's ledger in its order."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return with_hindsight(connection, run_id, decisions_of(connection, run_id))

    def findings(self, run_id: str) -> tuple[FindingView, ...]:
        """Return what the run's detectors said, by step."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return findings_of(connection, run_id)

    def checkpoints(self, run_id: str) -> tuple[CheckpointView, ...]:
        """Return the latest state of each checkpoint and snapshot, by step."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return checkpoints_of(connection, run_id)

    def events(self, run_id: str, kind: str = "") -> tuple[EventView, ...]:
        """Return other events, all or of one kind, as lines for people, by time; the newest."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return events_of(connection, run_id, kind)

    def alerts(self, *, run_id: str = "", state: str = "") -> tuple[AlertView, ...]:
        """Return the alerts that the store has, the newest first."""
        with self._store.read() as connection:
            return alerts_of(connection, run_id=run_id, state=state)

    def cells(
        self,
        run_id: str,
        metric: str,
        *,
        points: int = 200,
        rows: int = 64,
        branch: Branch = "all",
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> CellsReply:
        """Return a heat map of one metric; ``queries.cells`` says more."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return cells(
                connection,
                run_id,
                metric,
                points=points,
                rows=rows,
                branch=branch,
                from_step=from_step,
                to_step=to_step,
            )

    def movers(self, run_id: str, step: int) -> tuple[MoverView, ...]:
        """Return which layers and ranks moved most up to a step."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return movers(connection, run_id, step)

    def incidents(self, run_id: str) -> tuple[IncidentView, ...]:
        """Return what went wrong, each whole and told as a story, the newest first."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            run = overview.summaries(connection, self._liveness(), run_id)[0]
            return incidents(connection, run)

    def annotations(self, run_id: str) -> tuple[AnnotationView, ...]:
        """Return what people wrote and the training announced, by step."""
        with self._store.read() as connection:
            run_row(connection, run_id)
            return annotations_of(connection, run_id)

    def table(self, request: TableRequest) -> TableReply:
        """Return the rows that meet the request's conditions."""
        with self._store.read() as connection:
            return tables.ask(connection, request, self._liveness())

    def _liveness(self) -> Liveness:
        return Liveness(
            now_unix_ns=self._clock.time_ns(),
            up_since_unix_ns=self._up_since_unix_ns,
            lost_after_seconds=self._lost_after_seconds,
        )


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


__all__ = ["Branch", "Query"]
