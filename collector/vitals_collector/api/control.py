"""The routes that act: commands to runs, and the alerts' inbox."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Path
from starlette.requests import Request
from starlette.responses import Response

from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.views import AckRequest, AlertView, CommandRequest, CommandView
from vitals_collector.alerts import commands
from vitals_collector.alerts.inbox import Inbox
from vitals_collector.api.auth import require
from vitals_collector.api.web import answers, reply, takes
from vitals_collector.storage.store import Store

T = TypeVar("T")
_STATUS = Literal["", "pending", "delivered", "done", "refused", "expired", "invalid"]
_STATE = Literal["", "pending", "firing", "resolved"]


def control_router(
    store: Store, inbox: Inbox, *, clock: Clock, folders: Sequence[FilePath] = ()
) -> APIRouter:
    """Return the routes for commands and alerts.

    Args:
        store: where commands are kept.
        inbox: the alerts.
        clock: when "now" is.
        folders: run directories this collector watches, from its own command line: a command for a
            run there is signed and left in place.
    """
    router = APIRouter(prefix="/v1")
    _add_commands(router, store, clock, tuple(folders))
    _add_delivery(router, store, clock)
    _add_alerts(router, inbox)
    return router


def _add_commands(
    router: APIRouter, store: Store, clock: Clock, folders: tuple[FilePath, ...]
) -> None:
    @router.post(
        "/runs/{run_id}/commands",
        tags=["commands"],
        dependencies=[Depends(require("control"))],
        responses=answers(CommandView),
        openapi_extra=takes(CommandRequest),
    )
    def send_command(
        run_id: str,
        who: Annotated[str, Depends(caller)],
        body: Annotated[CommandRequest, Depends(body_of(CommandRequest))],
    ) -> Response:
        """Propose something to the run's ladder; it is stored before this answers."""
        view = commands.issue(
            store,
            run_id,
            body,
            issued_by=who,
            now_unix_ns=clock.time_ns(),
            folders=folders,
        )
        return reply(view)

    @router.get(
        "/runs/{run_id}/commands",
        tags=["commands"],
        dependencies=[Depends(require("read", "ingest"))],
        responses=answers(tuple[CommandView, ...]),
    )
    def list_commands(run_id: str, status: _STATUS = "") -> Response:
        """Return the run's commands, newest first; ``pending`` is what an agent has to deliver."""
        return reply(commands.listed(store, run_id, now_unix_ns=clock.time_ns(), status=status))


def _add_delivery(router: APIRouter, store: Store, clock: Clock) -> None:
    @router.post(
        "/runs/{run_id}/commands/{number}/delivered",
        tags=["commands"],
        dependencies=[Depends(require("ingest"))],
        responses=answers(CommandView),
    )
    def mark_delivered(
        run_id: str,
        number: Annotated[int, Path(ge=0, le=2**63 - 1)],
        who: Annotated[str, Depends(caller)],
    ) -> Response:
        """Note that a command lies in the run's mailbox."""
        view = commands.mark_delivered(store, run_id, number, by=who, now_unix_ns=clock.time_ns())
        return reply(view)


def _add_alerts(router: APIRouter, inbox: Inbox) -> None:
    @router.get(
        "/alerts",
        tags=["alerts"],
        dependencies=[Depends(require("read"))],
        responses=answers(tuple[AlertView, ...]),
    )
    def list_alerts(run: str = "", state: _STATE = "") -> Response:
        """Return the inbox, newest first: all of it, one run's, or one state's."""
        return reply(inbox.listed(run_id=run, state=state))

    @router.post(
        "/alerts/{fingerprint}/ack",
        tags=["alerts"],
        dependencies=[Depends(require("control"))],
        responses=answers(AlertView),
        openapi_extra=takes(AckRequest),
    )
    def acknowledge_alert(
        fingerprint: str, body: Annotated[AckRequest, Depends(body_of(AckRequest))]
    ) -> Response:
        """Acknowledge an alert, or silence it where ``silence_seconds`` is given."""
        return reply(inbox.acknowledge(fingerprint, body))


def caller(request: Request) -> str:
    """Return who asks, as far as a token can say: where the request came from."""
    return f"api from {request.client.host if request.client else 'this process'}"


def body_of(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Return a dependency that decodes the body strictly: no unknown field, no wrong type."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    async def decode(request: Request) -> T:
        try:
            decoded: T = decoder.decode(await request.body())
        except msgspec.DecodeError as error:
            raise UsageError(f"the body is no {kind.__name__}: {error}") from error
        return decoded

    return decode


__all__ = ["body_of", "caller", "control_router"]
