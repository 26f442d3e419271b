"""The routes of the look back: heat maps, movers, incidents, annotations, tables."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from fastapi import Query as Parameter
from starlette.responses import Response

from trainvitals.clock import Clock
from trainvitals.views import (
    AnnotationRequest,
    AnnotationView,
    CellsReply,
    IncidentView,
    MoverView,
    TableReply,
    TableRequest,
)
from vitals_collector.alerts.annotations import annotate
from vitals_collector.api.auth import require
from vitals_collector.api.control import body_of, caller
from vitals_collector.api.web import answers, reply, takes
from vitals_collector.queries.heatmap import MAX_COLUMNS, MAX_ROWS
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

_INT64 = 2**63 - 1
_Step = Annotated[int, Parameter(ge=-_INT64, le=_INT64)]
_Bound = Annotated[int | None, Parameter(ge=-_INT64, le=_INT64)]


def lookback_routers(query: Query, store: Store, *, clock: Clock) -> tuple[APIRouter, APIRouter]:
    """Return the routes that read, and that which writes an annotation: scope ``control``."""
    reading = APIRouter(prefix="/v1", tags=["look back"], dependencies=[Depends(require("read"))])
    _add_maps(reading, query)
    _add_lists(reading, query)
    writing = APIRouter(
        prefix="/v1", tags=["look back"], dependencies=[Depends(require("control"))]
    )
    _add_annotate(writing, store, clock)
    return reading, writing


def _add_maps(router: APIRouter, query: Query) -> None:
    @router.get("/runs/{run_id}/cells", responses=answers(CellsReply))
    def show_cells(
        run_id: str,
        metric: str,
        points: Annotated[int, Parameter(ge=1, le=MAX_COLUMNS)] = 200,
        rows: Annotated[int, Parameter(ge=1, le=MAX_ROWS)] = 64,
        branch: Literal["lineage", "discarded", "all"] = "all",
        from_step: _Bound = None,
        to_step: _Bound = None,
    ) -> Response:
        """Return a heat map of one metric, ranks, GPUs, nodes or layers by steps."""
        cells = query.cells(
            run_id,
            metric,
            points=points,
            rows=rows,
            branch=branch,
            from_step=from_step,
            to_step=to_step,
        )
        return reply(cells)

    @router.get("/runs/{run_id}/movers", responses=answers(tuple[MoverView, ...]))
    def list_movers(run_id: str, step: _Step) -> Response:
        """Return the layers and ranks that moved most up to a step, the first of them first."""
        return reply(query.movers(run_id, step))


def _add_lists(router: APIRouter, query: Query) -> None:
    @router.get("/runs/{run_id}/incidents", responses=answers(tuple[IncidentView, ...]))
    def list_incidents(run_id: str) -> Response:
        """Return what went wrong, each whole and told as a story, the newest first."""
        return reply(query.incidents(run_id))

    @router.get("/runs/{run_id}/annotations", responses=answers(tuple[AnnotationView, ...]))
    def list_annotations(run_id: str) -> Response:
        """Return what people wrote and the training announced, by step."""
        return reply(query.annotations(run_id))

    @router.post("/tables", responses=answers(TableReply), openapi_extra=takes(TableRequest))
    def ask_table(body: Annotated[TableRequest, Depends(body_of(TableRequest))]) -> Response:
        """Return the rows of a table that meet conditions, ``COLUMN OP VALUE`` each."""
        return reply(query.table(body))


def _add_annotate(router: APIRouter, store: Store, clock: Clock) -> None:
    @router.post(
        "/runs/{run_id}/annotations",
        responses=answers(AnnotationView),
        openapi_extra=takes(AnnotationRequest),
    )
    def write_annotation(
        run_id: str,
        who: Annotated[str, Depends(caller)],
        body: Annotated[AnnotationRequest, Depends(body_of(AnnotationRequest))],
    ) -> Response:
        """Write a line at a step; it is kept as long as the run."""
        return reply(annotate(store, run_id, body, caller=who, now_unix_ns=clock.time_ns()))


__all__ = ["lookback_routers"]
