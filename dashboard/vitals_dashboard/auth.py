"""Authentication of the dashboard: all access needs a token, also on loopback (nodes are shared).

The middleware wraps the whole app: pages, files and the WebSocket. The printed URL contains the
token once; the response sets a session cookie and redirects to the URL without the token, so that
copied and shared URLs contain no secret.

Browsers send the cookies of a host to every port of it, and any user of a node can listen on one:
a cookie of ``localhost`` is theirs after one click. So the printed address has a host name of its
own that nobody can guess, and only sessions opened under such a name may ever control a run.
"""

import base64
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Scope = dict[str, Any]
HEALTH_PATH = "/_stcore/health"
"""Public: shows only that the process is running; the launcher waits for it."""

NONCE_HEADER, PROOF_HEADER = "vitals-nonce", "vitals-proof"
LOOK_HOSTS = ("localhost", "127.0.0.1")
"""Host names shared with other programs: read-only, never control."""

IDLE_SECONDS = 24 * 3600.0
"""A session ends this long after its last request; a page that refreshes itself sends requests."""
SESSION_SECONDS = 7 * 24 * 3600.0
"""And this long after the token was shown, even if it is in use."""
CONTROL_SECONDS = 3600.0
CODE_SECONDS = 120.0
CODE_TRIES = 3
CODE_PAUSE_SECONDS = 10.0
"""Between two codes of one dashboard: 3 guesses in 10 seconds at one of 2^40."""
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
MAX_SESSIONS = 1000


def security_headers(page: str) -> dict[str, str]:
    """Return the security headers of the dashboard: its pages load nothing from other hosts.

    Args:
        page: Streamlit's own page; only its inline scripts may run.
    """
    inline = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    policy = {
        "default-src": "'self'",
        "script-src": " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)]),
        "style-src": "'self' 'unsafe-inline'",  # Streamlit styles its widgets one by one
        "img-src": "'self' data: blob:",
        "font-src": "'self' data:",
        "media-src": "'self' data: blob:",
        "worker-src": "'self' blob:",
        "object-src": "'none'",
        "base-uri": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
    }


_HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Vitals</title>'
    '<meta name="viewport" content="width=device-width">'
)
CLOSED_PAGE = f"""{_HEAD}<style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:34rem;margin:18vh auto;padding:0 1rem;
color-scheme:light dark}}code{{font-size:.95em}}
input{{font:inherit;width:18rem;padding:.2rem .4rem}}
</style><h1>Vitals</h1><p>This dashboard needs its token.</p>
<p>The terminal in which <code>vitals dashboard</code> runs has printed an address that ends in
<code>?token=...</code>: open that one. Or give the token here:</p>
<form method="get" action="./"><input name="token" type="password" autocomplete="off" autofocus>
<button>Open</button></form></html>""".encode()
AGAIN_PAGE = f'{_HEAD}<meta http-equiv="refresh" content="0"></html>'.encode()
"""Reloads itself: after a click on a link, a browser omits a SameSite=Strict cookie."""


def _is_equal_secret(candidate: str, expected: str) -> bool:
    """Compare two dashboard tokens in constant time."""
    return hmac.compare_digest(candidate.encode(), expected.encode())


def host_name(host: str) -> str:
    """Return the name in a Host header or Origin, without the port; "" if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def take_token(query: str) -> tuple[str | None, str]:
    """Return the sign-in token of a dashboard URL's query, and the query without it."""
    pairs = parse_qsl(query, keep_blank_values=True)
    token = next((value for key, value in pairs if key == "token"), None)
    return token, urlencode([(k, v) for k, v in pairs if k != "token"])


def proof(door_token: str, nonce: str) -> str:
    """Return the dashboard's response to a nonce; only a token holder can compute it."""
    return hmac.new(door_token.encode(), f"proof {nonce}".encode(), hashlib.sha256).hexdigest()


# ----------------------------------------------------------------------------------- sessions


@dataclass(slots=True, eq=False)
class BrowserSession:
    """One browser that has shown the token, at one host name."""

    key: str
    host: str
    opened: float
    last_seen: float
    code: str = ""
    code_until: float = 0.0
    tries_left: int = 0
    control_until: float = 0.0


class BrowserSessions:
    """The sessions of one dashboard process; they end with it. Thread-safe.

    Args:
        announce: prints a line in the terminal of the user who started the dashboard; None if it
            was started without control, so that no session ever gets it.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self,
        announce: Callable[[str], None] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announce = announce
        self._now = now
        self._sessions: dict[str, BrowserSession] = {}
        self._next_code = 0.0
        self._lock = threading.Lock()

    def open(self, host: str) -> BrowserSession:
        """Start a dashboard session for a browser that has shown the token."""
        now = self._now()
        session = BrowserSession(
            key=secrets.token_urlsafe(32), host=host, opened=now, last_seen=now
        )
        with self._lock:
            while len(self._sessions) >= MAX_SESSIONS:
                oldest = min(self._sessions.values(), key=lambda each: each.last_seen)
                del self._sessions[oldest.key]
            self._sessions[session.key] = session
        return session

    def find(self, key: str, host: str) -> BrowserSession | None:
        """Return the dashboard session of a browser's cookie, and record its use; None if ended."""
        now = self._now()
        with self._lock:
            session = self._sessions.get(key)
            if session is None or session.host != host:
                return None
            if now - session.last_seen >= IDLE_SECONDS or now - session.opened >= SESSION_SECONDS:
                del self._sessions[key]
                return None
            session.last_seen = now
        return session

    def end(self, session: BrowserSession) -> None:
        """Sign a browser out of the dashboard: its cookie becomes invalid."""
        with self._lock:
            self._sessions.pop(session.key, None)
            session.control_until = 0.0

    def control_seconds(self, session: BrowserSession) -> float:
        """Return for how long the browser may still send commands; 0 if it has no control."""
        return max(0.0, session.control_until - self._now())

    def send_code(self, session: BrowserSession) -> str:
        """Show a new code for this session in the terminal; return why that failed, or "".

        Only the session that requested it can use it: another user's code is useless.
        """
        if self._announce is None or session.host in LOOK_HOSTS:
            return "This session is read-only."
        with self._lock:
            now = self._now()
            if now < self._next_code:
                return f"A code was shown just now; wait {self._next_code - now:.0f} seconds."
            self._next_code = now + CODE_PAUSE_SECONDS
            code = "".join(secrets.choice(CODE_LETTERS) for _ in range(8))
            session.code, session.tries_left = code, CODE_TRIES
            session.code_until = now + CODE_SECONDS
        self._announce(f"{code[:4]}-{code[4:]}")
        return ""

    def has_code(self, session: BrowserSession) -> bool:
        """Return whether the browser's user can still enter its control code."""
        return bool(session.code) and self._now() < session.code_until

    def redeem(self, session: BrowserSession, token: str) -> bool:
        """Let the browser send commands if its control code is right; it is valid once."""
        text = "".join(token.split()).replace("-", "").upper()
        with self._lock:
            if not self.has_code(session):
                return False
            session.tries_left -= 1
            is_right = _is_equal_secret(text, session.code)
            if is_right or not session.tries_left:
                session.code = ""
            if is_right and session.key in self._sessions:
                session.control_until = self._now() + CONTROL_SECONDS
            return is_right


# --------------------------------------------------------------------------------------- doors


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardHosts:
    """Host names of a dashboard, and the role that each gives."""

    token: str
    own_host: str
    """``NAME.localhost`` with a NAME of 128 random bits."""
    public_url: str = ""
    """URL of a TLS proxy in front of it; "" without one."""
    signs_on: bool = False
    """Whether an OpenID provider signs users in at the public URL, instead of the token."""

    def __post_init__(self) -> None:
        if len(self.token) < 16:
            raise ValueError("the token is too short; it must have at least 16 characters")

    @property
    def public_host(self) -> str:
        """Return the host name in the dashboard's public URL; "" without one."""
        return urlsplit(self.public_url).hostname or ""

    @property
    def public_path(self) -> str:
        """Return the path of the dashboard's public URL, with a slash at its end."""
        return urlsplit(self.public_url).path.rstrip("/") + "/"

    def is_known(self, host: str) -> bool:
        """Return whether the dashboard has this host name; if not, a page rebound its own name."""
        return bool(host) and host in (self.own_host, self.public_host, *LOOK_HOSTS)

    def may_control(self, host: str) -> bool:
        """Return whether a session under this name can ever control.

        A public address with a path shares its host, and so its cookies, with other programs.
        """
        return host == self.own_host or (host == self.public_host and self.public_path == "/")

    def is_signed_on(self, host: str) -> bool:
        """Return whether the sign-on provider authenticates visitors of this host name."""
        return self.signs_on and host == self.public_host

    def cookie_name(self, host: str) -> str:
        """Return the cookie's name, unique for this dashboard, because ports share cookies."""
        # Not ``proof``: that is public for any nonce.
        digest = hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()
        name = f"vitals-{digest[:12]}"
        if not self.is_secure(host):
            return name
        return f"{'__Host' if self.public_path == '/' else '__Secure'}-{name}"

    def cookie(self, host: str, value: str) -> str:
        """Return the Set-Cookie header; an empty value deletes the cookie."""
        path = self.public_path if host == self.public_host else "/"
        cookie = f"{self.cookie_name(host)}={value}; Path={path}; HttpOnly; SameSite=Strict"
        cookie += "; Secure" if self.is_secure(host) else ""
        return cookie if value else f"{cookie}; Max-Age=0"

    def session_key(self, cookie_header: str, host: str) -> str:
        """Return the value of the dashboard's cookie; "" if it is missing.

        Every program on this host shares its cookies with us: others are ignored, while
        ``http.cookies`` would reject all of them.
        """
        pairs = [part.strip().partition("=") for part in cookie_header.split(";")]
        name = self.cookie_name(host)
        return next((value for key, _, value in pairs if key == name), "")

    def is_secure(self, host: str) -> bool:
        """Return whether browsers use HTTPS at this host name of the dashboard."""
        return host == self.public_host and self.public_url.startswith("https:")


class TokenMiddleware:
    """ASGI middleware that passes only requests that have shown the token."""

    def __init__(
        self,
        app: Any,
        *,
        doors: DashboardHosts,
        sessions: BrowserSessions,
        page: str = "",
        redirect_file: Path | None = None,
    ) -> None:
        self._app = app
        self._headers = security_headers(page)
        self._doors = doors
        self._sessions = sessions
        self._redirect_file = redirect_file

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass the request on, exchange the token for a session, or refuse."""
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        host = host_name(headers.get("host", ""))
        if kind == "http":
            send = self._add_security_headers(send, headers, host)
        if refusal := self._refusal_response(scope, headers, host):
            await _send_refusal(kind, send, *refusal)
            return
        token, rest = take_token(scope.get("query_string", b"").decode("latin-1"))
        key = self._doors.session_key(headers.get("cookie", ""), host)
        is_signed_on = self._doors.is_signed_on(host)
        is_open = is_signed_on or self._sessions.find(key, host) is not None
        if kind == "websocket":
            if is_open:
                receive = self._receive_while_signed_in(receive, send, key, host)
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif token is not None and not is_signed_on and _is_equal_secret(token, self._doors.token):
            await self._send_session_redirect(scope, send, key, host, rest)
        elif is_open or scope["path"] == HEALTH_PATH:
            await self._app(scope, receive, send)
        elif headers.get("sec-fetch-site") == "cross-site" and _is_page(headers):
            await _send_response(send, 200, AGAIN_PAGE)
        else:
            cookie = [("set-cookie", self._doors.cookie(host, ""))] if key else []
            await _send_response(send, 401, CLOSED_PAGE, cookie)

    def _refusal_response(
        self, scope: Scope, headers: Mapping[str, str], host: str
    ) -> tuple[int, bytes] | None:
        """Return the dashboard's refusal of a foreign host or origin: status and text, or None."""
        if not self._doors.is_known(host):
            return 400, b"This dashboard has no such host name."
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        origin = urlsplit(headers.get("origin", ""))
        if not is_read and (
            origin.scheme not in ("http", "https") or origin.netloc != headers["host"]
        ):
            return 403, b"The request comes from a page of another origin."
        return None

    def _receive_while_signed_in(self, receive: Any, send: Any, key: str, host: str) -> Any:
        """Close a page's WebSocket once the browser is signed out: it would continue to query."""

        async def checked() -> Any:
            message = await receive()
            if (
                message["type"] == "websocket.receive"
                and not self._doors.is_signed_on(host)
                and self._sessions.find(key, host) is None
            ):
                await send({"type": "websocket.close", "code": 1008})
                return {"type": "websocket.disconnect", "code": 1008}
            return message

        return checked

    def _add_security_headers(self, send: Any, headers: Mapping[str, str], host: str) -> Any:
        """Wrap ``send``, so that each response of the dashboard has the security headers."""
        extra_headers = dict(self._headers)
        if nonce := headers.get(NONCE_HEADER):
            extra_headers[PROOF_HEADER] = proof(self._doors.token, nonce)
        is_tls = self._doors.is_secure(host)

        async def hardened(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                sent_headers = [
                    (k, v + b"; Secure")
                    if is_tls and k.lower() == b"set-cookie" and b"secure" not in v.lower()
                    else (k, v)
                    for k, v in message.get("headers", [])
                    if k.decode("latin-1").lower() not in extra_headers
                ]
                message["headers"] = sent_headers + [
                    (k.encode(), v.encode()) for k, v in extra_headers.items()
                ]
            await send(message)

        return hardened

    async def _send_session_redirect(
        self, scope: Scope, send: Any, key: str, host: str, rest: str
    ) -> None:
        """Sign a browser in to the dashboard, and redirect it to the URL without the token."""
        if self._redirect_file is not None:
            self._redirect_file.unlink(missing_ok=True)
        # Opening the URL again keeps the session, including control.
        session = self._sessions.find(key, host) or self._sessions.open(host)
        # Relative, because a proxy may serve us under a path; "./" prevents "//host".
        page = quote(scope["path"].rpartition("/")[2])
        target = f"./{page}" + (f"?{rest}" if rest else "")
        cookie = self._doors.cookie(host, session.key)
        await _send_response(send, 303, b"", [("location", target), ("set-cookie", cookie)])


def _is_page(headers: Mapping[str, str]) -> bool:
    """Return whether a browser requests a whole dashboard page, not a file of it."""
    return headers.get("sec-fetch-mode") == "navigate"


async def _send_refusal(kind: str, send: Any, status: int, body: bytes) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _send_response(send, status, body)


async def _send_response(
    send: Any, status: int, body: bytes, headers: list[tuple[str, str]] | None = None
) -> None:
    kind = "text/html" if body.startswith(b"<") else "text/plain"
    common = [
        ("content-type", f"{kind}; charset=utf-8"),
        ("cache-control", "no-store"),
        ("content-length", str(len(body))),
    ]
    raw = [(k.encode(), v.encode("latin-1")) for k, v in (headers or []) + common]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
