"""The page that a link in a message opens: looking changes nothing, its button acknowledges."""

from html import escape
from urllib.parse import parse_qs

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from trainvitals.errors import UsageError
from trainvitals.views import AlertView
from vitals_collector.alerts.ack_links import PATH, AckLinks
from vitals_collector.alerts.inbox import Inbox

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # the address is the permission; the form needs its origin
}
_FORM = """<form method="post"><label>Your name <input name="by" required maxlength="100"></label>
<button>Acknowledge</button></form>"""


def ack_router(links: AckLinks, inbox: Inbox) -> APIRouter:
    """Return the acknowledge page's routes, without a token: the signed link is the permission."""
    router = APIRouter(include_in_schema=False)

    @router.get(PATH + "{token}")
    def show(token: str) -> Response:
        """Show the alert; mail scanners follow links, so nothing changes here."""
        try:
            return _alert_response(links.alert_of(token))
        except UsageError as error:
            return _error_response(error)

    @router.post(PATH + "{token}")
    async def acknowledge(token: str, request: Request) -> Response:
        """Acknowledge the alert under the name in the form."""
        fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=10)
        by = fields.get("by", [""])[0]
        try:
            return _alert_response(await run_in_threadpool(links.acknowledge, token, by, inbox))
        except UsageError as error:
            return _error_response(error)

    return router


def _alert_response(view: AlertView) -> Response:
    """Return the page of a link to acknowledge: the alert, and a form if it fires."""
    if view.acknowledged_by:
        end = f"<p>Acknowledged by {escape(view.acknowledged_by)}.</p>"
    elif view.state != "firing":
        end = "<p>Resolved.</p>"
    else:
        end = _FORM
    return _html_response(f"<h1>{escape(view.title)}</h1><p>{escape(view.summary)}</p>{end}", 200)


def _error_response(error: UsageError) -> Response:
    """Return an error as the HTML page of a link to acknowledge."""
    return _html_response(f"<p>{escape(error.text)}. {escape(error.hint or '')}</p>", 400)


def _html_response(body: str, status: int) -> Response:
    """Return an HTML page of a link to acknowledge an alert."""
    head = (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    return HTMLResponse(f"{head}<title>Vitals</title>{body}", status, _HEADERS)
