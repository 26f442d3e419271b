"""Serves the MCP server over streamable HTTP on loopback, with a token for each request."""

import hmac
import json
import re
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mcp.server.mcpserver import MCPServer

from trainvitals.errors import UsageError
from vitals_plugins.bridges.assistants.sources import request_token

PATH = "/mcp"
_TOKEN = re.compile(rb"[!-~]{1,512}")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def parse_listen(listen: str) -> tuple[str, int]:
    """Return the MCP server's host and port of ``[HOST:]PORT``; the host has to be this machine.

    Raises:
        UsageError: it is another host, or the port is not a number from 0 to 65535.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or LOOPBACK[0]
    if host not in LOOPBACK:
        raise UsageError(
            f"--http is {listen!r}; tokens are sent unencrypted, so the host must be 127.0.0.1",
            hint="from another machine, use ssh -L PORT:127.0.0.1:PORT",
        )
    if not (port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise UsageError(f"--http is {listen!r}; it must be [HOST:]PORT", hint="--http 8765")
    return host, int(port)


class TokenGate:
    """Refuses requests without a token, and keeps the token for the tools.

    With the token "", the collector checks the token of each query.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        is_valid = kind.lower() == b"bearer" and _TOKEN.fullmatch(token.strip()) is not None
        if is_valid and self._token:
            is_valid = hmac.compare_digest(token.strip(), self._token)
        if not is_valid:
            await _refuse(send)
            return
        reset = request_token.set(token.strip().decode("ascii"))
        try:
            await self._app(scope, receive, send)
        finally:
            request_token.reset(reset)


async def _refuse(send: Send) -> None:
    """Respond 401 to a request to the MCP server without a valid token."""
    text = "send a valid token: Authorization: Bearer TOKEN"
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    body = json.dumps({"error": "invalid_token", "error_description": text}).encode()
    await send({"type": "http.response.body", "body": body})


def serve_mcp_http(server: MCPServer, listen: str, *, token: str = "") -> None:
    """Serve MCP until Ctrl-C; print the URL, and the token if it is not one of a collector."""
    import uvicorn

    host, port = parse_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"--http is {listen!r}; the port cannot be used: {error.strerror}",
            hint="give another port, or 0 for a free one",
        ) from error
    with listener:
        shown_host = f"[{host}]" if ":" in host else host
        url = f"http://{shown_host}:{listener.getsockname()[1]}{PATH}"
        sys.stderr.write(f"vitals mcp: {url}\n")
        if token:
            sys.stderr.write(f"token: {token}\n")
        sys.stderr.flush()
        config = uvicorn.Config(build_app(server, token), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


def build_app(server: MCPServer, token: str) -> TokenGate:
    """Return the MCP server's HTTP app; without sessions, so that each request needs its token.

    Requests whose Host or Origin is another machine's are refused: a page in a browser cannot
    reach it.
    """
    app = server.streamable_http_app(
        streamable_http_path=PATH, stateless_http=True, json_response=True
    )
    return TokenGate(app, token)
