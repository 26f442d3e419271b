"""The routes for reading, generated from the queries of ``trainvitals.views``, and their document.

One route for each query. Plain functions, so that FastAPI runs them in its threads: a query never
blocks an ingest.
"""

import functools
import re
from collections.abc import Awaitable, Callable
from inspect import Parameter, Signature
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path
from fastapi import Query as QueryParameter
from fastapi.openapi.utils import get_openapi
from msgspec.structs import FieldInfo
from starlette.requests import Request
from starlette.responses import Response

from trainvitals import __version__
from trainvitals.errors import UNREADABLE, UsageError
from trainvitals.question import ROUTES, Question, Route
from trainvitals.records import Decision, Finding
from trainvitals.views import Problem, RunSummary
from vitals_collector.api.auth import json_response, principal_of, require, unreachable_run_error
from vitals_collector.queries.query import Query, within
from vitals_collector.storage.tokens import Principal

_BODY, _ASKER = "body", "request"
T = TypeVar("T")


@functools.cache
def question_router() -> APIRouter:
    """Return an HTTP route for each query; the ``query`` of the app's state executes it.

    Cached for all apps of a process: creating it is half the cost of an app.
    """
    router = APIRouter()
    for route in ROUTES.values():
        _add_route(router, route)
    return router


def _add_route(router: APIRouter, route: Route) -> None:
    """Add the HTTP route of a query, with its parameters or its body."""
    body: Any = _body_type(route) if route.method == "POST" else None
    parameters = [Parameter(_ASKER, Parameter.KEYWORD_ONLY, annotation=Request)]
    parameters += [_parameter(field, Path) for field in route.in_path]
    if body is None:
        parameters += [_parameter(field, QueryParameter) for field in route.others]
    else:
        decoded = Annotated[body, Depends(body_decoder(body))]
        parameters.append(Parameter(_BODY, Parameter.KEYWORD_ONLY, annotation=decoded))
    of_address = route.in_path if body is not None else (*route.in_path, *route.others)

    def endpoint(**values: Any) -> Response:
        asker: Request = values[_ASKER]
        query, principal = asker.app.state.query, principal_of(asker)
        sent = values.get(_BODY) if body is not None else None
        if isinstance(sent, route.kind):
            return json_response(ask_within_reach(query, principal, route, sent))
        fields = {field.name: values[field.encode_name] for field in of_address}
        if sent is not None:
            fields |= {field.name: getattr(sent, field.name) for field in route.others}
        return json_response(ask_within_reach(query, principal, route, route.kind(**fields)))

    # FastAPI reads a route's parameters from its function's signature.
    endpoint.__signature__ = Signature(parameters, return_annotation=Response)  # type: ignore[attr-defined]
    router.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        name=_route_name(route.kind),
        description=route.kind.__doc__,
        tags=[route.tag],
        dependencies=[Depends(require(*route.scopes))],
        responses=openapi_responses(route.answer),
        openapi_extra=None if body is None else openapi_request_body(body),
    )


def ask_within_reach(query: Query, principal: Principal, route: Route, question: Question[T]) -> T:
    """Return the response for the runs that a request's token reaches; to it, no others exist.

    Raises:
        UsageError: as in ``Query.ask``.
    """
    scope = next(scope for scope in route.scopes if scope in principal.scopes)
    reach = None
    if principal.token_id:
        with query.store.read_transaction() as connection:
            reach = principal.reach(connection, scope)
    for name in ("run_id", "other"):
        run_id = getattr(question, name, "")
        if reach is not None and run_id and run_id not in reach:
            raise unreachable_run_error(query.store, run_id)
    return within(query, reach).ask(question)


def _body_type(route: Route) -> type[Any]:
    """Return the type of an HTTP body: the query, or its fields that are not in the path."""
    if not route.in_path:
        return route.kind
    fields = [
        (
            field.name,
            field.type,
            msgspec.field(  # type: ignore[call-overload]
                name=field.encode_name,
                default=field.default,
                default_factory=field.default_factory,
            ),
        )
        for field in route.others
    ]
    return msgspec.defstruct(
        route.kind.__name__,
        fields,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": route.kind.__doc__},
    )


def _parameter(field: FieldInfo, location: Any) -> Parameter:
    """Return a field of an HTTP route as FastAPI needs it: its type with its bounds."""
    kind, bounds = _without_meta(field.type)
    return Parameter(
        field.encode_name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if field.required else field.default,
        annotation=Annotated[kind, location(**bounds)],
    )


def _without_meta(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Return the type of a route's field without msgspec's bounds, and the bounds."""
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)
        bounds = {name: getattr(meta, name) for name in ("ge", "gt", "le", "lt")}
        return kind, {name: bound for name, bound in bounds.items() if bound is not None}
    if get_origin(kind) in (Union, UnionType):
        members = [_without_meta(member) for member in get_args(kind)]
        merged = {name: bound for _, bounds in members for name, bound in bounds.items()}
        return Union[*(member for member, _ in members)], merged
    return kind, {}


def _route_name(kind: type[Question[Any]]) -> str:
    """Return an HTTP route's name in the document: ``many_series`` of ``ManySeriesQuestion``."""
    name_words = re.findall("[A-Z][a-z]*", kind.__name__.removesuffix("Question"))
    return "_".join(name_words).lower()


_TYPES: dict[str, Any] = {}
_REF = "#/components/schemas/{name}"
_WORDS = {"type": "string", "enum": ["nan", "inf", "-inf"]}


def openapi_responses(body: Any) -> dict[int | str, dict[str, Any]]:
    """Return a route's OpenAPI ``responses``: its view, and a problem."""
    return {
        200: _openapi_response("The answer.", body),
        "4XX": _openapi_response("A problem.", Problem),
    }


def openapi_request_body(body: Any, media_type: str = "application/json") -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its body, if FastAPI does not parse it."""
    schema = {"type": "string", "format": "binary"} if body is bytes else _schema_ref(body)
    content = {media_type: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def body_decoder(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Return a route's dependency that decodes a body strictly: no unknown field or wrong type."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    async def decode(request: Request) -> T:
        try:
            decoded: T = decoder.decode(await request.body())
        except UNREADABLE as error:
            raise UsageError(f"the body is not a valid {kind.__name__}: {error}") from error
        return decoded

    return decode


def add_openapi_document(app: FastAPI) -> None:
    """Give the app an OpenAPI document with the schema of every view."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
            _, components = msgspec.json.schema_components(_TYPES.values(), ref_template=_REF)
            for kind in (RunSummary, Finding, Decision):
                _allow_nonfinite_strings(components[kind.__name__]["properties"])
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _allow_nonfinite_strings(properties: dict[str, Any]) -> None:
    """Allow a string for each number of the OpenAPI document, for non-finite values."""
    for name, of in properties.items():
        kinds = of.get("anyOf", [of])
        if {"type": "number"} in kinds:
            of["anyOf"] = [*kinds, _WORDS]
        elif name == "evidence":
            of["additionalProperties"] = {"anyOf": [{"type": "number"}, _WORDS]}


def _openapi_response(text: str, body: Any) -> dict[str, Any]:
    """Return a response of the OpenAPI document, with its schema."""
    return {"description": text, "content": {"application/json": {"schema": _schema_ref(body)}}}


@functools.cache
def _schema_ref(body: Any) -> dict[str, Any]:
    """Return the reference to a type's schema in the OpenAPI document."""
    _TYPES[str(body)] = body
    (schema,), _ = msgspec.json.schema_components([body], ref_template=_REF)
    return schema
