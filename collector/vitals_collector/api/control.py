"""The routes that write: commands to runs, responses to alerts, and notes at a step."""

from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.requests import Request
from starlette.responses import Response

from trainvitals import views
from trainvitals.clock import Clock
from trainvitals.question import TokenScope
from trainvitals.records import Command
from vitals_collector.alerts import commands
from vitals_collector.alerts.annotations import annotate
from vitals_collector.alerts.inbox import Inbox, check_alert, check_silence
from vitals_collector.alerts.silences import names_run
from vitals_collector.api.auth import (
    check_run,
    json_response,
    principal_of,
    require,
    require_unlimited_token,
)
from vitals_collector.api.questions import body_decoder, openapi_request_body, openapi_responses
from vitals_collector.storage.store import Store


def control_router(
    store: Store,
    inbox: Inbox,
    *,
    clock: Clock,
    keys: FilePath,
    folders: Sequence[FilePath] = (),
) -> APIRouter:
    """Return the HTTP routes that change something: commands, alerts, notes.

    ``keys`` is the directory of ``control.pub``. ``folders`` are the run directories that this
    collector watches, from its own command line: a command for a run there is signed and delivered
    in place.
    """
    router = APIRouter(prefix="/v1")
    _add_command_routes(router, store, clock, keys, tuple(folders))
    _add_delivery_route(router, store, clock)
    _add_alert_routes(router, store, inbox)
    _add_annotation_routes(router, store, clock)
    return router


def _add_command_routes(
    router: APIRouter, store: Store, clock: Clock, keys: FilePath, folders: tuple[FilePath, ...]
) -> None:
    @router.post(
        "/runs/{run_id}/commands",
        tags=["commands"],
        dependencies=[Depends(require("control")), Depends(require_run_reach(store, "control"))],
        responses=openapi_responses(views.CommandView),
        openapi_extra=openapi_request_body(Command),
    )
    def send_command(
        run_id: str, body: Annotated[Command, Depends(body_decoder(Command))]
    ) -> Response:
        """Send a signed command to the run's policy; it is stored before the response."""
        view = commands.issue(
            store, run_id, body, keys=keys, now_unix_ns=clock.time_ns(), folders=folders
        )
        return json_response(view)


def _add_delivery_route(router: APIRouter, store: Store, clock: Clock) -> None:
    @router.post(
        "/runs/{run_id}/commands/{number}/delivered",
        tags=["commands"],
        dependencies=[Depends(require("ingest")), Depends(require_run_reach(store, "ingest"))],
        responses=openapi_responses(views.CommandView),
        openapi_extra=openapi_request_body(views.DeliveredRequest),
    )
    def mark_delivered(
        run_id: str,
        number: Annotated[int, Path(ge=0, le=2**63 - 1)],
        who: Annotated[str, Depends(caller_name)],
        body: Annotated[views.DeliveredRequest, Depends(body_decoder(views.DeliveredRequest))],
    ) -> Response:
        """Record that a command is in the run's mailbox; called by the agent that holds the run."""
        view = commands.mark_delivered(
            store,
            run_id,
            number,
            by=who,
            incarnation=body.incarnation,
            now_unix_ns=clock.time_ns(),
        )
        return json_response(view)


def _add_alert_routes(router: APIRouter, store: Store, inbox: Inbox) -> None:
    @router.post(
        "/alerts/{fingerprint}/ack",
        tags=["alerts"],
        dependencies=[Depends(require("control"))],
        responses=openapi_responses(views.AlertView),
        openapi_extra=openapi_request_body(views.AckRequest),
    )
    def acknowledge_alert(
        fingerprint: str,
        request: Request,
        body: Annotated[views.AckRequest, Depends(body_decoder(views.AckRequest))],
    ) -> Response:
        """Acknowledge an alert, or silence it where ``silence_seconds`` is given."""
        check_alert(store, fingerprint, _reachable_runs(store, request))
        return json_response(inbox.acknowledge(fingerprint, body, caller=caller_name(request)))

    @router.post(
        "/silences",
        tags=["alerts"],
        dependencies=[Depends(require("control"))],
        responses=openapi_responses(views.SilenceView),
        openapi_extra=openapi_request_body(views.SilenceRequest),
    )
    def silence_alerts(
        request: Request,
        body: Annotated[views.SilenceRequest, Depends(body_decoder(views.SilenceRequest))],
    ) -> Response:
        """Silence all alerts that fit the matchers, now or in a maintenance window."""
        reach = _reachable_runs(store, request)
        if reach is not None and not names_run(body.matchers, reach):
            require_unlimited_token(request)
        return json_response(inbox.silence(body, caller=caller_name(request)))

    @router.post(
        "/silences/{silence_id}/end",
        tags=["alerts"],
        dependencies=[Depends(require("control"))],
        responses=openapi_responses(views.SilenceView),
        openapi_extra=openapi_request_body(views.EndSilenceRequest),
    )
    def end_silence(
        silence_id: Annotated[int, Path(ge=0, le=2**31 - 1)],
        request: Request,
        body: Annotated[views.EndSilenceRequest, Depends(body_decoder(views.EndSilenceRequest))],
    ) -> Response:
        """End a silence that is in force or to come."""
        check_silence(store, silence_id, _reachable_runs(store, request))
        return json_response(inbox.end_silence(silence_id, body, caller=caller_name(request)))


def _add_annotation_routes(router: APIRouter, store: Store, clock: Clock) -> None:
    @router.post(
        "/runs/{run_id}/annotations",
        tags=["look back"],
        dependencies=[Depends(require("control")), Depends(require_run_reach(store, "control"))],
        responses=openapi_responses(views.AnnotationView),
        openapi_extra=openapi_request_body(views.AnnotationRequest),
    )
    def write_annotation(
        run_id: str,
        who: Annotated[str, Depends(caller_name)],
        body: Annotated[views.AnnotationRequest, Depends(body_decoder(views.AnnotationRequest))],
    ) -> Response:
        """Write a line at a step; it is kept as long as the run."""
        return json_response(annotate(store, run_id, body, caller=who, now_unix_ns=clock.time_ns()))


def caller_name(request: Request) -> str:
    """Return who sent a request, as far as a token can say: its name. An address is nobody."""
    return f"{getattr(request.state, 'token_name', '') or 'no'} token"


def require_run_reach(store: Store, scope: TokenScope) -> Callable[[str, Request], None]:
    """Return a FastAPI dependency: the token reaches the run that the path names."""

    def check(run_id: str, request: Request) -> None:
        check_run(store, principal_of(request), run_id, scope)

    return check


def _reachable_runs(store: Store, request: Request) -> frozenset[str] | None:
    """Return the runs that a request's token with the scope ``control`` reaches; None: all."""
    with store.read_transaction() as connection:
        return principal_of(request).reach(connection, "control")
