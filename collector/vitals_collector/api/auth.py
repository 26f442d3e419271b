"""Authentication and responses: the middleware that every request passes before any route.

A node is shared, so loopback proves nothing: every route except ``/healthz`` needs a bearer token
with a scope. The middleware runs before the router and denies by default; ``require`` then checks
each route's scope. A browser cannot be tricked into a request: cookies are ignored, a foreign
``Host`` (DNS rebinding) or ``Origin`` is refused for every method, and bodies are JSON or rows.

Views are returned as JSON, and errors as a :class:`Problem` with a fitting status.
"""

import asyncio
import hmac
import ipaddress
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import msgspec
from fastapi import FastAPI
from sqlalchemy import select
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainvitals.errors import (
    UNREADABLE,
    FormatError,
    InsecurePathError,
    NewerVersionError,
    NotOwnerError,
    StorageError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.jsonable import to_json
from trainvitals.question import TokenScope
from trainvitals.views import Problem
from trainvitals.wire import OWNED_ELSEWHERE, OWNER_HEADER
from vitals_collector.storage.schema import runs
from vitals_collector.storage.store import Store, unknown_run
from vitals_collector.storage.tokens import LIMITED, Principal

OPEN_PATHS = frozenset({"/healthz"})
ACK_PATH = "/ack/"
"""Below it, the signed link itself is the permission."""
INGEST_PATH = "/v1/ingest"
OTLP_PATH = "/v1/metrics"
PROTOBUF = "application/x-protobuf"
MAX_INGEST_BYTES = 16 << 20
"""Per request: several batches, each at most about 4 MB."""
MAX_JSON_BYTES = 65_536
BODY_SECONDS = 30.0
"""A body that takes longer is a slow-loris, not a client."""
STALL_SECONDS = 10.0
"""Likewise if no data arrives for this long: it holds memory that others wait for."""
HEAD_SECONDS = 10.0
"""From the connection, or from a request's first byte, to the end of the request's head."""
MAX_CONNECTIONS = 10_000
"""Open connections; an agent has two or three."""
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100

FOREIGN_NAME = "V411"
"""Error code: ``Host`` or ``Origin`` is not this collector's."""
NO_SCOPE = "V412"
"""Error code: the token lacks the scope."""

_GRANTS: Mapping[str, frozenset[TokenScope]] = {
    "read": frozenset({"read"}),
    "ingest": frozenset({"ingest"}),
    "control": frozenset({"control", "read"}),
}
_ABOUT_LENGTH = (b"content-length", b"transfer-encoding")
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class ServerTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The three secrets of one collector; ``control`` may also read."""

    read: str
    ingest: str
    control: str

    def __repr__(self) -> str:
        return "Tokens(...)"

    def grants(self, presented: str) -> tuple[frozenset[TokenScope], str]:
        """Return a request token's scopes and its name; none if it is unknown."""
        granted: frozenset[TokenScope] = frozenset()
        named = ""
        presented_bytes = presented.encode()
        for name, scopes in _GRANTS.items():
            # All three are always compared: the duration does not show which one matched.
            if hmac.compare_digest(presented_bytes, getattr(self, name).encode()):
                granted |= scopes
                named = name
        return granted, named


def load_or_create_tokens(path: Path) -> ServerTokens:
    """Return the server's tokens in ``path``; create it (0600, never through a link) if missing.

    Raises:
        InsecurePathError: other users can access the file.
        FormatError: the file does not hold three tokens.
        StorageError: it cannot be read or created.
    """
    fresh = ServerTokens(**{name: secrets.token_urlsafe(32) for name in _GRANTS})
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_tokens(path)
    except OSError as error:
        raise StorageError(f"{path}: the token file cannot be created: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(fresh) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return fresh


def _read_tokens(path: Path) -> ServerTokens:
    """Read the server's token file; an error if others can read it, or if it is damaged."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise StorageError(f"{path}: the token file cannot be read: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InsecurePathError(
            f"{path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}; "
            "tokens must be yours alone (0600)",
            hint=f"others may have read it: rm {path}, then start again for new tokens",
        )
    try:
        tokens = msgspec.json.decode(raw, type=ServerTokens)
    except UNREADABLE as error:
        raise FormatError(
            f"{path} does not hold the three tokens: {error}",
            hint=f"rm {path}, then start again for new tokens",
        ) from error
    if min(len(tokens.read), len(tokens.ingest), len(tokens.control)) < 20:
        raise FormatError(
            f"{path}: a token is shorter than 20 characters; it could be guessed",
            hint=f"rm {path}, then start again for new tokens",
        )
    return tokens


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address that the server listens on."""
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return _bare(host) == "localhost"


def check_bind(host: str, *, allow_remote: bool) -> None:
    """Refuse to let the server listen to the network by accident.

    Raises:
        UsageError: ``host`` is not loopback and the flag does not confirm it.
    """
    if not allow_remote and not is_loopback(host):
        raise UsageError(
            f"--listen {host} can be reached from other machines; the default is 127.0.0.1",
            hint="if that is intended, add --allow-remote; otherwise use `ssh -L`",
        )


@lru_cache(maxsize=64)
def _bare(host: str) -> str:
    """Return a request's ``Host`` without port, brackets and case; "" if it is malformed."""
    if host.count(":") > 1 and "[" not in host:
        host = f"[{host}]"
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    extra = parts.username is not None or parts.path or parts.query or parts.fragment
    return "" if extra else (parts.hostname or "").lower()


class AuthMiddleware:
    """Rejects a request with a :class:`Problem` before any route sees it, or passes it on.

    In this order: Host, Origin, token, content type, size. The body is not read before the token is
    verified.

    Args:
        app: the next ASGI app; it gets each body in one piece.
        ingest: handles agents' posts before ``app``, whose routing and parsing cost more than
            storing them; it reads and limits the bodies itself.
        tokens: the secrets of this collector.
        find: returns the identity of any other secret.
        bound: address that the server listens on.
        hosts: further names in ``Host`` that are this server; ports do not matter (SSH forwards
            change them).
        origins: foreign origins that may send requests, such as ``https://vitals.example.org``.
        count: called with the code of each refusal for missing rights.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        ingest: ASGIApp,
        tokens: ServerTokens,
        find: Callable[[str], Principal] = lambda _secret: Principal(),
        bound: str = "127.0.0.1",
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        count: Callable[[str], object] = lambda _code: None,
    ) -> None:
        self._app = app
        self._ingest = ingest
        self._tokens = tokens
        self._find = find
        # A wildcard address is only for listening: no client uses it as a host name.
        bound_hosts = () if bound in ("0.0.0.0", "::", "") else (bound,)
        self._hosts = _LOOPBACK_NAMES | {_bare(name) for name in (*bound_hosts, *hosts)}
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; anything but HTTP and the lifespan is closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise UsageError(f"this server speaks HTTP only, not {scope['type']!r}")
        try:
            self._authenticate_request(scope)
            if scope["path"] == INGEST_PATH and scope["method"] == "POST":
                await self._ingest(scope, receive, send)
                return
            announced_bytes(scope, MAX_JSON_BYTES)
            body = await read_body(receive, MAX_JSON_BYTES)
        except Refused as refused:
            if isinstance(refused.error, UnauthorizedError):
                self._count(refused.error.code)
            await problem_response(refused.error, refused.status)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        await self._app(scope, _replay_body(body, receive), add_security_headers(send))

    def _authenticate_request(self, scope: Scope) -> None:
        """Check a request's host, origin, token and content type before any route sees it."""
        # One pass: for an agent's post, a search for each name took as long as all checks.
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1"))
        self._check_host(headers.get(b"host", []))
        self._check_origin(headers)
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(ACK_PATH)
        principal = Principal() if is_open else self._principal(headers)
        scope.setdefault("state", {})["principal"] = principal
        scope["state"]["scopes"] = principal.scopes
        scope["state"]["token_name"] = principal.name
        if not principal.scopes and not is_open:
            raise Refused(
                401,
                UnauthorizedError(
                    "this needs a token; there was none, or not one of this collector's",
                    hint="send `Authorization: Bearer TOKEN` with a token of the collector's "
                    "tokens.json (VITALS_TOKEN_FILE), or one that `vitals token create` made",
                ),
            )
        _check_content_type(scope, headers)

    def _check_host(self, values: list[str]) -> None:
        """Refuse a request to a host name that the server is not called."""
        if len(values) != 1 or _bare(values[0]) not in self._hosts:
            raise Refused(
                403,
                UnauthorizedError(
                    f"Host is {', '.join(values)!r}; this collector is not called that",
                    hint="start it with --allow-host NAME for each name it is reached by",
                    code=FOREIGN_NAME,
                ),
            )

    def _check_origin(self, headers: Mapping[bytes, Sequence[str]]) -> None:
        """Refuse a request from a web page of another origin."""
        for origin in headers.get(b"origin", ()):
            host = headers[b"host"][0].lower()
            is_same_origin = origin.lower() in (f"http://{host}", f"https://{host}")
            if not is_same_origin and origin.lower() not in self._origins:
                raise Refused(
                    403,
                    UnauthorizedError(
                        f"Origin is {origin!r}; pages from elsewhere may not call this collector",
                        code=FOREIGN_NAME,
                    ),
                )

    def _principal(self, headers: Mapping[bytes, Sequence[str]]) -> Principal:
        """Return the identity of a request's token; without scopes if it is unknown."""
        values = headers.get(b"authorization", ())
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            return Principal()
        granted, name = self._tokens.grants(token.strip())
        if granted:
            return Principal(granted, name)
        try:
            return self._find(token.strip())
        except UnauthorizedError as error:
            raise Refused(401, error) from None


class GatedApi(FastAPI):
    """The API with its authentication before FastAPI's own layers, which agents' posts skip."""

    gate: AuthMiddleware
    """Set before the first request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        await self.gate(scope, receive, send)

    async def handle_authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an authenticated request to the API."""
        await super().__call__(scope, receive, send)


def require(*scopes: TokenScope) -> Callable[[Request], None]:
    """Return a FastAPI dependency that accepts a caller with any of ``scopes``.

    The returned function has ``scopes`` so that a test can compare every route with its own.
    """

    def check(request: Request) -> None:
        check_scopes(getattr(request.state, "scopes", frozenset()), scopes)

    check.scopes = scopes  # type: ignore[attr-defined]
    return check


def check_scopes(granted: frozenset[TokenScope], scopes: Sequence[TokenScope]) -> None:
    """Raise UnauthorizedError unless a request's token has one of ``scopes``."""
    if granted.isdisjoint(scopes):
        raise UnauthorizedError(
            f"the token lacks the scope {' or '.join(scopes)}",
            hint="use the token of that name in the collector's tokens.json, or one that "
            "`vitals token create --scope` made for it",
            code=NO_SCOPE,
        )


def principal_of(request: Request) -> Principal:
    """Return the identity that the middleware found for a request."""
    principal: Principal = request.state.principal
    return principal


def check_run(store: Store, principal: Principal, run_id: str, scope: TokenScope) -> None:
    """Raise the error for an unknown run if a request's token does not reach the run.

    Raises:
        UsageError: no run of that id is there for this token.
    """
    with store.read_transaction() as connection:
        reach = principal.reach(connection, scope)
    if reach is not None and run_id not in reach:
        raise unreachable_run_error(store, run_id)


def unreachable_run_error(store: Store, run_id: str) -> UsageError:
    """Count the use of a token beyond its reach; return the error for an unknown run."""
    with store.read_transaction() as connection:
        is_there = connection.execute(select(runs.c.run_id).where(runs.c.run_id == run_id)).first()
    if is_there is not None:
        store.counters.refuse(LIMITED)
    return unknown_run(run_id)


def require_unlimited_token(request: Request) -> None:
    """Refuse a token limited to a project or run: a FastAPI dependency of routes."""
    principal = principal_of(request)
    if principal.is_limited:
        of_project = f"project {principal.project}"
        limit = of_project if principal.project else f"run {principal.run_id}"
        raise UnauthorizedError(
            f"the token is limited to {limit}; this is about all runs",
            hint="name a run of it (silences take the matcher run=RUN_ID), or use a token without "
            "--project and --run",
            code=LIMITED,
        )


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """Refuses a request with a status and a problem, before any route sees it."""

    def __init__(self, status: int, error: VitalsError) -> None:
        super().__init__(error.text)
        self.status = status
        self.error = error


def _check_content_type(scope: Scope, headers: Mapping[bytes, Sequence[str]]) -> None:
    """Refuse requests of types that a foreign page's form can send without asking first."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return
    kind = headers.get(b"content-type", ("",))[0].partition(";")[0].strip().lower()
    required_type = "application/json"
    if scope["path"] == INGEST_PATH:
        required_type = "application/octet-stream"
    elif scope["path"] == OTLP_PATH and kind == PROTOBUF:
        required_type = PROTOBUF
    elif scope["path"].startswith(ACK_PATH):
        required_type = "application/x-www-form-urlencoded"
    if kind == required_type:
        return
    length = headers.get(b"content-length", ("0",))[0]
    has_body = length != "0" or b"transfer-encoding" in headers
    if kind or has_body:
        raise Refused(
            415, UsageError(f"Content-Type is {kind or 'missing'!r}; this takes {required_type}")
        )


def announced_bytes(scope: Scope, limit: int) -> int:
    """Return the announced size of a request's body; ``limit`` if the client sends none.

    Raises:
        Refused: larger than ``limit``.
    """
    length_headers = {name: value for name, value in scope["headers"] if name in _ABOUT_LENGTH}
    length = length_headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > limit:
        raise _body_too_large(limit)
    return limit if b"transfer-encoding" in length_headers else int(length)


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the body of a request to the server, within limits of size and time.

    Raises:
        Refused: it is larger than ``limit``, or comes too slowly.
        ClientDisconnect: the client disconnected in the middle.
    """
    body = bytearray()
    loop = asyncio.get_running_loop()
    give_up = loop.time() + BODY_SECONDS
    try:
        async with asyncio.timeout(STALL_SECONDS) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _body_too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
                patience.reschedule(min(give_up, loop.time() + STALL_SECONDS))
    except TimeoutError:
        text = f"the body took over {BODY_SECONDS:g} s, or stalled for {STALL_SECONDS:g} s"
        raise Refused(408, UsageError(text)) from None


def _body_too_large(limit: int) -> Refused:
    """Return the refusal of a request whose body is too large."""
    return Refused(413, UsageError(f"the body is larger than {limit} bytes"))


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` that starts with an already read body."""
    is_replayed = False

    async def replay() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


_SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"))


def add_security_headers(send: Send) -> Send:
    """Return an ASGI ``send`` that adds the security headers of every response of the API."""

    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *_SECURITY_HEADERS]
            if not any(name.lower() == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
        await send(message)

    return hardened


# ------------------------------------------------------------------------------------------ answers

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


def json_response(body: object, status: int = 200) -> Response:
    """Return a view as a JSON response of the API."""
    return Response(to_json(body), status, media_type="application/json")


def problem_response(error: VitalsError, status: int = 0) -> Response:
    """Return an error as a JSON response, with this status or that of its type."""
    status = (
        status
        or _STATUS_BY_CODE.get(error.code)
        or next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    )
    soonest, latest = _RETRY_SECONDS.get(status, (0, 0))
    # Random, so that clients that were refused together do not retry together.
    headers = {"Retry-After": str(random.randint(soonest, latest))} if latest else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, NotOwnerError) and error.owner:
        headers[OWNER_HEADER] = error.owner
    body = msgspec.json.encode(Problem(code=error.code, text=error.text, hint=error.hint))
    return Response(body, status, headers, "application/json")


def unexpected_error_response(path: str, error: Exception) -> Response:
    """Log an unexpected error; return a response without its details."""
    _LOG.error("unexpected error in %s", path, exc_info=error)
    text = "internal error in the collector; see its log"
    return json_response(Problem(code="V000", text=text), 500)


# ------------------------------------------------------------------------------ before any request


class PatientProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with bounds to the time and the size of a request's head.

    Uvicorn itself waits forever for a request that never starts, or whose head never ends, be it
    one byte every few seconds or endless headers. A body that arrives too slowly is refused by
    ``read_body``; an idle connection between requests ends by uvicorn's keep-alive timeout.
    """

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the wait for the first request's head; drop a connection above the limit."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._in_head, self._has_head = True, False
        self._patience: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            _LOG.warning("connection_dropped: %d are open", self.max_connections)
            transport.abort()
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout of a closed connection to the server."""
        self._cancel_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reject a request's head that is too long; start the timeout of an incomplete one."""
        was_in_head, self._has_head = self._in_head, False
        super().data_received(data)
        if self.transport.is_closing() or not self._in_head:
            return
        # A whole request may arrive at once, including its body, which is not part of the head.
        self._num_head_bytes += len(data) if was_in_head and not self._has_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too long.")
        elif self.cycle is None or self.cycle.response_complete:
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a request's header, in the head or after a chunked body, up to a number.

        Raises:
            HttpParserError: they are too many.
        """
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancel the timeout of a request's head: the body has its own limits."""
        self._cancel_head_timer()
        self._in_head, self._has_head, self._num_head_bytes = False, True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's head."""
        self._in_head = True
        super().on_message_complete()

    def _start_head_timer(self) -> None:
        """Limit the time in which the client has to send a request's head."""
        if self._patience is None:
            self._patience = self.loop.call_later(self.head_seconds, self._close_slow_connection)

    def _cancel_head_timer(self) -> None:
        """Cancel the timeout of a request's head."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close_slow_connection(self) -> None:
        """Close the connection of a client that sends a request's head too slowly."""
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()
