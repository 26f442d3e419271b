"""The routes that read: runs, curves, steps, the ledger. All need a token with scope ``read``.

Plain functions, so that FastAPI runs them in its threads: a query never holds up an ingest.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path
from fastapi import Query as Parameter
from starlette.responses import Response

from trainvitals.views import (
    Along,
    CheckpointView,
    CurveReply,
    DecisionView,
    DifferenceReply,
    EventView,
    FindingView,
    ManySeriesRequest,
    RunDetail,
    RunSummary,
    SeriesReply,
    StepView,
)
from vitals_collector.api.control import body_of
from vitals_collector.api.web import answers, reply, takes
from vitals_collector.queries.query import MAX_POINTS, Query

_INT64 = 2**63 - 1
_FromStep = Annotated[int | None, Parameter(ge=-_INT64, le=_INT64)]
_Points = Annotated[int, Parameter(ge=2, le=MAX_POINTS)]
_OneStep = Annotated[int, Path(ge=-_INT64, le=_INT64)]


def query_router(query: Query, *, guard: Callable[..., Any]) -> APIRouter:
    """Return the routes over one query; ``guard`` is the dependency that checks the token."""
    router = APIRouter(prefix="/v1/runs", tags=["query"], dependencies=[Depends(guard)])

    @router.get("", responses=answers(tuple[RunSummary, ...]))
    def list_runs() -> Response:
        """Return every run, the newest first."""
        return reply(query.runs())

    @router.get("/{run_id}", responses=answers(RunDetail))
    def show_run(run_id: str) -> Response:
        """Return everything about one run that is not a curve."""
        return reply(query.run(run_id))

    _add_series(router, query)
    _add_curves(router, query)
    _add_lists(router, query)
    return router


def _add_series(router: APIRouter, query: Query) -> None:
    @router.get("/{run_id}/series", responses=answers(SeriesReply))
    def show_series(
        run_id: str,
        metric: str,
        source: str = "",
        branch: Literal["lineage", "discarded", "all"] = "lineage",
        points: _Points = 1_000,
        from_step: _FromStep = None,
        to_step: _FromStep = None,
    ) -> Response:
        """Return one curve, downsampled so that no extreme and no non-finite value is lost."""
        series = query.series(
            run_id,
            metric,
            source=source,
            branch=branch,
            points=points,
            from_step=from_step,
            to_step=to_step,
        )
        return reply(series)

    @router.post(
        "/{run_id}/series",
        responses=answers(tuple[SeriesReply, ...]),
        openapi_extra=takes(ManySeriesRequest),
    )
    def show_many_series(
        run_id: str, body: Annotated[ManySeriesRequest, Depends(body_of(ManySeriesRequest))]
    ) -> Response:
        """Return several curves of one moment, in the order they are asked for."""
        return reply(query.many_series(run_id, body.series))


def _add_curves(router: APIRouter, query: Query) -> None:
    @router.get("/{run_id}/difference", responses=answers(DifferenceReply))
    def show_difference(
        run_id: str,
        other: str,
        metric: str,
        along: Along = "step",
        points: _Points = 1_000,
    ) -> Response:
        """Return what another run's curve has more than this one's."""
        return reply(query.difference(run_id, other, metric, along=along, points=points))

    @router.get("/{run_id}/curve", responses=answers(CurveReply))
    def show_curve(
        run_id: str,
        metric: str,
        source: str = "",
        branch: Literal["lineage", "discarded", "all"] = "lineage",
        from_step: _FromStep = None,
        to_step: _FromStep = None,
    ) -> Response:
        """Return every point of one curve, for programs."""
        curve = query.curve(
            run_id, metric, source=source, branch=branch, from_step=from_step, to_step=to_step
        )
        return reply(curve)


def _add_lists(router: APIRouter, query: Query) -> None:
    @router.get("/{run_id}/steps/{step}", responses=answers(StepView))
    def show_step(run_id: str, step: _OneStep) -> Response:
        """Return what is known of one step."""
        return reply(query.step(run_id, step))

    @router.get("/{run_id}/decisions", responses=answers(tuple[DecisionView, ...]))
    def list_decisions(run_id: str) -> Response:
        """Return the run's ledger."""
        return reply(query.decisions(run_id))

    @router.get("/{run_id}/findings", responses=answers(tuple[FindingView, ...]))
    def list_findings(run_id: str) -> Response:
        """Return what the run's detectors said."""
        return reply(query.findings(run_id))

    @router.get("/{run_id}/checkpoints", responses=answers(tuple[CheckpointView, ...]))
    def list_checkpoints(run_id: str) -> Response:
        """Return the latest state of each checkpoint."""
        return reply(query.checkpoints(run_id))

    @router.get("/{run_id}/events", responses=answers(tuple[EventView, ...]))
    def list_events(run_id: str, kind: str = "") -> Response:
        """Return other events, all or of one kind, as lines for people."""
        return reply(query.events(run_id, kind))
