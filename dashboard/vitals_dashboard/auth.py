"""The door: nobody reads a run without the token, on loopback neither (nodes are shared).

It lies around the whole app, so pages, files and the WebSocket are all behind it. The printed
address carries the token once; the door answers with a cookie and the same address without it, so
that what people copy and share holds no secret.
"""

import hashlib
import hmac
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = dict[str, Any]
HEALTH_PATH = "/_stcore/health"
"""Open: says only that the process is up; the launcher waits for it."""

CLOSED_PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Vitals</title>
<meta name="viewport" content="width=device-width"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:34rem;margin:18vh auto;padding:0 1rem;
color-scheme:light dark}code{font-size:.95em}input{font:inherit;width:18rem;padding:.2rem .4rem}
</style><h1>Vitals</h1><p>This dashboard needs its token.</p>
<p>The terminal in which <code>vitals dashboard</code> runs has printed an address that ends in
<code>?token=...</code>: open that one. Or give the token here:</p>
<form method="get" action="/"><input name="token" type="password" autocomplete="off" autofocus>
<button>Open</button></form></html>"""


def cookie_name(port: int) -> str:
    """Return the cookie's name; browsers do not keep the cookies of ports apart."""
    return f"vitals-{port}"


def cookie_value(door_token: str) -> str:
    """Return what the cookie must hold: proof of the token, not the token."""
    return hmac.new(door_token.encode(), b"vitals dashboard", hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def cookie_admits(cookie_header: str, door_token: str, port: int) -> bool:
    """Return whether the request's cookies prove the token.

    Every program on this host shares its cookies with us: whatever stands beside ours is passed
    over, where ``http.cookies`` would give up on all of them.
    """
    pairs = [part.strip().partition("=") for part in cookie_header.split(";")]
    expected = cookie_value(door_token)
    return any(name == cookie_name(port) and _same(value, expected) for name, _, value in pairs)


def take_token(query: str) -> tuple[str | None, str]:
    """Return the token in a query string and the query without it."""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = next((value for key, value in pairs if key == "token"), None)
    return given, urlencode([(k, v) for k, v in pairs if k != "token"])


class Gate:
    """ASGI middleware that lets through only who has shown the token."""

    def __init__(self, app: Any, *, door_token: str) -> None:
        if len(door_token) < 16:
            raise ValueError("the door's token is too short to keep anybody out")
        self._app = app
        self._token = door_token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass the request on, exchange the token for the cookie, or refuse."""
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        port = int((scope.get("server") or ("", 0))[1] or 0)
        given, rest = take_token(scope.get("query_string", b"").decode("latin-1"))
        if kind == "http" and given is not None and _same(given, self._token):
            await self._welcome(scope, send, port, rest)
        elif cookie_admits(headers.get("cookie", ""), self._token, port) or (
            kind == "http" and scope["path"] == HEALTH_PATH
        ):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, CLOSED_PAGE, [("content-type", "text/html; charset=utf-8")])

    async def _welcome(self, scope: Scope, send: Any, port: int, rest: str) -> None:
        cookie = f"{cookie_name(port)}={cookie_value(self._token)}; Path=/; HttpOnly; SameSite=Lax"
        # One leading slash only: "//host" would be an address elsewhere.
        path = "/" + scope["path"].lstrip("/\\")
        target = quote(path) + (f"?{rest}" if rest else "")
        await _answer(send, 303, b"", [("location", target), ("set-cookie", cookie)])


async def _answer(send: Any, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
    common = [
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("x-frame-options", "DENY"),
        ("content-length", str(len(body))),
    ]
    raw = [(k.encode(), v.encode("latin-1")) for k, v in headers + common]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
