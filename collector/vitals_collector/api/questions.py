"""The routes that read, made from the questions of ``trainvitals.views``: one each.

Plain functions, so that FastAPI runs them in its threads: a query never holds up an ingest.
"""

import re
from inspect import Parameter, Signature
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from fastapi import APIRouter, Depends, Path
from fastapi import Query as QueryParameter
from msgspec.structs import FieldInfo
from starlette.responses import Response

from trainvitals.question import ROUTES, Question, Route
from vitals_collector.api.auth import require
from vitals_collector.api.web import answers, body_of, reply, takes
from vitals_collector.queries.query import Query

_BODY = "body"


def question_router(query: Query) -> APIRouter:
    """Return a route for each question; ``query`` answers."""
    router = APIRouter()
    for route in ROUTES.values():
        _add(router, route, query)
    return router


def _add(router: APIRouter, route: Route, query: Query) -> None:
    body: Any = _body_type(route) if route.method == "POST" else None
    parameters = [_parameter(field, Path) for field in route.in_path]
    if body is None:
        parameters += [_parameter(field, QueryParameter) for field in route.others]
    else:
        decoded = Annotated[body, Depends(body_of(body))]
        parameters.append(Parameter(_BODY, Parameter.KEYWORD_ONLY, annotation=decoded))
    of_address = route.in_path if body is not None else (*route.in_path, *route.others)

    def endpoint(**values: Any) -> Response:
        sent = values.get(_BODY) if body is not None else None
        if isinstance(sent, route.kind):
            return reply(query.ask(sent))
        fields = {field.name: values[field.encode_name] for field in of_address}
        if sent is not None:
            fields |= {field.name: getattr(sent, field.name) for field in route.others}
        return reply(query.ask(route.kind(**fields)))

    # FastAPI reads what a route takes from its function's signature.
    endpoint.__signature__ = Signature(parameters, return_annotation=Response)  # type: ignore[attr-defined]
    router.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        name=_name(route.kind),
        description=route.kind.__doc__,
        tags=[route.tag],
        dependencies=[Depends(require(*route.scopes))],
        responses=answers(route.answer),
        openapi_extra=None if body is None else takes(body),
    )


def _body_type(route: Route) -> type[Any]:
    """Return what a body is decoded as: the question itself, or what of it is not in the path."""
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


def _parameter(field: FieldInfo, place: Any) -> Parameter:
    """Return a field as FastAPI wants it: its type, and its bounds beside it."""
    kind, bounds = _without_meta(field.type)
    return Parameter(
        field.encode_name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if field.required else field.default,
        annotation=Annotated[kind, place(**bounds)],
    )


def _without_meta(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Return a type without msgspec's bounds, and the bounds."""
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)
        bounds = {name: getattr(meta, name) for name in ("ge", "gt", "le", "lt")}
        return kind, {name: bound for name, bound in bounds.items() if bound is not None}
    if get_origin(kind) in (Union, UnionType):
        members = [_without_meta(member) for member in get_args(kind)]
        merged = {name: bound for _, bounds in members for name, bound in bounds.items()}
        return Union[*(member for member, _ in members)], merged
    return kind, {}


def _name(kind: type[Question[Any]]) -> str:
    """Return what the document calls the route: ``many_series`` of ``ManySeriesQuestion``."""
    words = re.findall("[A-Z][a-z]*", kind.__name__.removesuffix("Question"))
    return "_".join(words).lower()


__all__ = ["question_router"]
