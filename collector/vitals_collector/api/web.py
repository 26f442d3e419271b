"""How a route answers: views as JSON, errors as problems, and both in the OpenAPI document."""

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from trainvitals import __version__
from trainvitals.errors import (
    UNREADABLE,
    FormatError,
    NewerVersionError,
    NotOwnerError,
    StorageError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.jsonable import to_json
from trainvitals.records import Decision, Finding
from trainvitals.views import Problem, RunSummary
from trainvitals.wire import OWNED_ELSEWHERE, OWNER_HEADER

T = TypeVar("T")
_LOG = logging.getLogger("vitals.collector")
_STATUS_BY_CODE = {"V101": 404, "V102": 409, "V302": 507}
"""Nothing of that name; it does not allow this now; there is no room left."""
_STATUS: tuple[tuple[type[VitalsError], int], ...] = (
    (NewerVersionError, 422),
    (FormatError, 400),
    (UnauthorizedError, 403),
    (NotOwnerError, OWNED_ELSEWHERE),
    (UsageError, 400),
    (StorageError, 503),
)
_RETRY_SECONDS = {503: (1, 5), 507: (10, 30)}
_TYPES: dict[str, Any] = {}
_REF = "#/components/schemas/{name}"
_WORDS = {"type": "string", "enum": ["nan", "inf", "-inf"]}


def reply(body: object, status: int = 200) -> Response:
    """Return a view as the JSON answer."""
    return Response(to_json(body), status, media_type="application/json")


def problem(error: VitalsError) -> Response:
    """Return an error as the JSON answer, with the status that fits it."""
    status = _STATUS_BY_CODE.get(error.code) or next(
        (status for kind, status in _STATUS if isinstance(error, kind)), 500
    )
    soonest, latest = _RETRY_SECONDS.get(status, (0, 0))
    # Not the same for all: what was sent away together must not come back together.
    headers = {"Retry-After": str(random.randint(soonest, latest))} if latest else {}
    if isinstance(error, NotOwnerError) and error.owner:
        headers[OWNER_HEADER] = error.owner
    body = msgspec.json.encode(Problem(code=error.code, text=error.text, hint=error.hint))
    return Response(body, status, headers, "application/json")


def bug(path: str, error: Exception) -> Response:
    """Log an error that nobody thought of; return an answer that tells nothing of it."""
    _LOG.error("unexpected error in %s", path, exc_info=error)
    text = "internal error in the collector; see its log"
    return reply(Problem(code="V000", text=text), 500)


async def problem_of(_request: Request, error: Exception) -> Response:
    """Answer a VitalsError: the exception handler of the app."""
    assert isinstance(error, VitalsError)
    return problem(error)


def answers(body: Any) -> dict[int | str, dict[str, Any]]:
    """Return a route's ``responses``: the view it answers with, and a problem."""
    return {200: _documented("The answer.", body), "4XX": _documented("A problem.", Problem)}


def takes(body: Any, media_type: str = "application/json") -> dict[str, Any]:
    """Return a route's ``openapi_extra``: the body it takes, where FastAPI does not parse it."""
    schema = {"type": "string", "format": "binary"} if body is bytes else _refer(body)
    content = {media_type: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def body_of(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Return a dependency that decodes the body strictly: no unknown field, no wrong type."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    async def decode(request: Request) -> T:
        try:
            decoded: T = decoder.decode(await request.body())
        except UNREADABLE as error:
            raise UsageError(f"the body is no {kind.__name__}: {error}") from error
        return decoded

    return decode


def document(app: FastAPI) -> None:
    """Give the app an OpenAPI document that knows the schema of every view."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
            _, components = msgspec.json.schema_components(_TYPES.values(), ref_template=_REF)
            for kind in (RunSummary, Finding, Decision):
                _allow_words(components[kind.__name__]["properties"])
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _allow_words(properties: dict[str, Any]) -> None:
    """Say of each number that it may be a word, where it is not finite."""
    for name, of in properties.items():
        kinds = of.get("anyOf", [of])
        if {"type": "number"} in kinds:
            of["anyOf"] = [*kinds, _WORDS]
        elif name == "evidence":
            of["additionalProperties"] = {"anyOf": [{"type": "number"}, _WORDS]}


def _documented(text: str, body: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _refer(body)}}}


def _refer(body: Any) -> dict[str, Any]:
    _TYPES[str(body)] = body
    (schema,), _ = msgspec.json.schema_components([body], ref_template=_REF)
    return schema
