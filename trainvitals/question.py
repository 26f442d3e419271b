"""One query is one struct: its fields are the parameters, and its type defines the response.

``route`` registers a query under its path. The struct defines the collector's route with its entry
in the OpenAPI document, the required scope, the client's request and the decoding of the response;
a directory is queried with the same struct. The queries are in ``trainvitals.views``, each next to
its response.
"""

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any, Generic, Literal, TypeVar, get_args
from urllib.parse import quote

import msgspec
from msgspec.structs import FieldInfo

A = TypeVar("A", covariant=True)
Q = TypeVar("Q", bound="Question[Any]")
TokenScope = Literal["read", "ingest", "control"]
Method = Literal["GET", "POST"]


class Question(msgspec.Struct, Generic[A], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query to a collector or a directory; ``A`` is the type of the response."""


class PerRunQuestion(Question[A], frozen=True, kw_only=True):
    """A query about one run."""

    run_id: str


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP mapping of a query: fields named in the path go there, the others into query or body."""

    kind: type[Question[Any]]
    answer: Any
    """Type of the response."""
    method: Method
    path: str
    scopes: tuple[TokenScope, ...]
    """A token with any of these may use it."""
    tag: str
    """Heading in the OpenAPI document."""
    in_path: tuple[FieldInfo, ...]
    others: tuple[FieldInfo, ...]
    """Parameters of a GET, the body of a POST."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A query as an HTTP request."""

    method: Method
    path: str
    params: Mapping[str, Any]
    body: bytes | None
    answer: Any
    """Type of the response."""


ROUTES: dict[type[Question[Any]], Route] = {}
"""All queries."""


def route(
    method: Method, path: str, *, tag: str = "query", scopes: tuple[TokenScope, ...] = ("read",)
) -> Callable[[type[Q]], type[Q]]:
    """Return a decorator that registers a query of the API; ``{field}`` is a field's position."""

    def register(kind: type[Q]) -> type[Q]:
        names = [name for _, name, _, _ in Formatter().parse(path) if name]
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
        ROUTES[kind] = Route(
            kind=kind,
            answer=get_args(base)[0],
            method=method,
            path=path,
            scopes=scopes,
            tag=tag,
            in_path=tuple(fields.pop(name) for name in names),
            others=tuple(fields.values()),
        )
        return kind

    return register


def build_http_request(question: Question[Any]) -> Asked:
    """Return a query of the API as the data of an HTTP request; nothing is sent here.

    A parameter that is empty by default, or a switch with its default, is omitted: a collector of
    an earlier version refuses unknown parameters.
    """
    route = ROUTES[type(question)]
    texts = {
        field.encode_name: quote(str(getattr(question, field.name)), safe="")
        for field in route.in_path
    }
    values = {field.encode_name: getattr(question, field.name) for field in route.others}
    is_body = route.method == "POST"
    left_out = {
        field.encode_name
        for field in route.others
        if (field.default in (None, "") and values[field.encode_name] in (None, ""))
        or (isinstance(field.default, bool) and values[field.encode_name] == field.default)
    }
    params = {name: value for name, value in values.items() if name not in left_out}
    return Asked(
        method=route.method,
        path=route.path.format(**texts),
        params={} if is_body else params,
        body=msgspec.json.encode(values) if is_body else None,
        answer=route.answer,
    )
