"""HTTP client of a collector: ingest for agents, queries and commands for users.

Bodies are ``trainvitals.views``. What goes wrong is one of our errors: TransportError where trying
again may help, UnauthorizedError for the token, else what the collector says (FormatError for bytes
it will never take, UsageError for what cannot be done as asked). No proxy is used and no redirect
followed: the token goes to the address that was given and nowhere else, once the server there has
proved that it is the collector (``trainvitals.io.server_identity``).
"""

import hashlib
import hmac
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from trainvitals.errors import (
    UNREADABLE,
    DamagedBatchError,
    ForeignBatchError,
    FormatError,
    NewerVersionError,
    NotOwnerError,
    ServerIdentityError,
    TransportError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.io.control_key import sign_manual_command
from trainvitals.io.private import open_private
from trainvitals.io.segments import read_fd
from trainvitals.io.server_identity import UNIX, TlsTrust, not_connected, parse_url, tls_context
from trainvitals.io.setting_paths import collector_urls, default_data_dir
from trainvitals.jsonable import from_json
from trainvitals.question import Question, build_http_request
from trainvitals.views import (
    AckRequest,
    AlertView,
    AnnotationRequest,
    AnnotationView,
    CommandRequest,
    CommandsQuestion,
    CommandView,
    DeliveredRequest,
    EndSilenceRequest,
    Problem,
    SilenceRequest,
    SilenceView,
)
from trainvitals.wire import (
    ASK_HEADER,
    OWNED_ELSEWHERE,
    OWNER_HEADER,
    WRITER_KEY_HEADER,
    IngestReply,
)

# httpx, and the libraries that it imports, are loaded by the first client: a program that reads a
# directory, or only needs the tokens of a collector, has none.
if TYPE_CHECKING:
    import httpx

A = TypeVar("A")
T = TypeVar("T")

MAX_RETRY_AFTER_SECONDS = 300
_SETTLED = frozenset({400, 404, 405, 409, 410, 413, 415, 422})


class CollectorTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A token file: a collector's tokens by scope, and its certificates.

    A token that a program has not is empty.
    """

    read: str = ""
    ingest: str = ""
    control: str = ""
    tls: TlsTrust = TlsTrust()

    @property
    def scrape(self) -> str:
        """Token for the agents' ``/metrics`` only; "" without a token for reading.

        Agents and Prometheus derive it in the same way. Prometheus sends it in plain HTTP to every
        target that a sender has named: with the reading token itself, such a sender could read.
        """
        if not self.read:
            return ""
        return hmac.new(self.read.encode(), b"scrape agents", hashlib.sha256).hexdigest()


class CollectorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """URL, tokens and certificates of a collector."""

    url: str
    tokens: CollectorTokens = CollectorTokens()


COLLECTOR_FILE = "collector.json"


class CollectorFile(msgspec.Struct, frozen=True, kw_only=True):
    """``collector.json`` in a data directory: its collector's address, for local programs."""

    url: str
    pid: int = 0
    node: str = ""
    """The machine it runs on: a home is shared by many, and a loopback address means one."""
    socket: str = ""
    """Name of the Unix socket next to this file, for programs on that machine; "": none."""
    version: str = ""


class CollectorClient:
    """A collector's API. Thread-safe; close it, or use it in a ``with``.

    Args:
        url: ``https://host:port``, or ``unix:`` and the path of a socket.
        token: with the scope of the calls; sent only to a verified server.
        tls: identifies the server, as in its token file.
        timeout: seconds for each of connecting, sending and waiting.
        transport: for tests.

    Raises:
        UsageError: ``url`` is invalid, or plain HTTP.
        ConfigError: ``tls`` holds no certificates.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        tls: TlsTrust = TlsTrust(),  # noqa: B008 - frozen
        timeout: float = 5.0,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        import httpx

        self.url = url.rstrip("/")
        self._address = parse_url(self.url)
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if transport is None and self._address.socket is not None:
            from trainvitals.io.unix_transport import UnixTransport

            transport = UnixTransport(self._address.socket)
        self._http = httpx.Client(
            base_url=self._address.base,
            timeout=timeout,
            trust_env=False,
            verify=tls_context(tls) if self._address.is_tls else False,
            transport=transport,
        )

    # -------------------------------------------------------------------------- for agents

    def ingest(self, raw: bytes) -> IngestReply:
        """Send one batch over HTTP; the collector has committed it when this returns."""
        return self.ingest_all([raw])[0]

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> tuple[IngestReply, ...]:
        """Send batches in one HTTP request; accepted ones are committed when this returns.

        Args:
            raws: the batches.
            asks: for a batch after a hole, return ``from_seq`` instead of storing it.
            writer_key: secret that the first batch of each incarnation was sent with, if any.

        Returns:
            One reply for each batch. If all are refused, the first one's error is raised.
        """
        headers = {"Content-Type": "application/octet-stream"}
        if asks:
            headers[ASK_HEADER] = "ask"
        if writer_key:
            headers[WRITER_KEY_HEADER] = writer_key
        content = b"".join(raws)
        answer = tuple[IngestReply, ...]
        replies = self._send_and_decode(
            answer, "POST", "/v1/ingest", content=content, headers=headers
        )
        if len(replies) != len(raws):
            raise TransportError(
                f"{self.url}/v1/ingest gave {len(replies)} replies to {len(raws)} batches",
                hint="check that the agent and the collector have the same version",
            )
        return replies

    def mark_delivered(self, run_id: str, number: int, incarnation: str) -> None:
        """Report over HTTP that a command is in the mailbox, for this incarnation of rank 0."""
        path = _url_path("runs", run_id, "commands", str(number), "delivered")
        request = DeliveredRequest(incarnation=incarnation)
        self._send("POST", path, **_json_body_kwargs(msgspec.json.encode(request)))

    # ------------------------------------------------------------------------- for readers

    def answers(self) -> bool:
        """Return whether the collector responds to HTTP; with a full disk (503) it can be read.

        Raises:
            ServerIdentityError: a server responds that cannot prove to be the collector.
        """
        import httpx

        try:
            return self._http.get("/healthz").status_code in (200, 503)  # without the token
        except httpx.HTTPError as error:
            failure = not_connected(self.url, self._tls, error)
            if isinstance(failure, ServerIdentityError):
                raise failure from error
            return False

    def ask(self, question: Question[A]) -> A:
        """Send a query as an HTTP request; return the collector's decoded response."""
        request = build_http_request(question)
        body = request.body
        how = {"params": request.params} if body is None else _json_body_kwargs(body)
        answer: A = self._send_and_decode(request.answer, request.method, request.path, **how)
        return answer

    # -------------------------------------------------------------------------- for orders

    def annotate(self, run_id: str, request: AnnotationRequest) -> AnnotationView:
        """Post a note at a step over HTTP; it is shown on the curves, permanently."""
        return self._post(AnnotationView, request, "runs", run_id, "annotations")

    def ack_alert(self, fingerprint: str, request: AckRequest) -> AlertView:
        """Acknowledge an alert over HTTP, or silence it if ``silence_seconds`` is given."""
        return self._post(AlertView, request, "alerts", fingerprint, "ack")

    def silence(self, request: SilenceRequest) -> SilenceView:
        """Silence all alerts that fit the matchers, with one HTTP request."""
        return self._post(SilenceView, request, "silences")

    def end_silence(self, silence_id: int, request: EndSilenceRequest) -> SilenceView:
        """End a silence early, with one HTTP request."""
        return self._post(SilenceView, request, "silences", str(silence_id), "end")

    def send_command(
        self, run_id: str, request: CommandRequest, *, issued_by: str, keys: Path
    ) -> CommandView:
        """Sign a command with the control key here, and post it over HTTP.

        Args:
            run_id: the run.
            request: the command.
            issued_by: name of the user.
            keys: the directory of ``control.key``.
        """
        listed = self.ask(CommandsQuestion(run_id=run_id))
        now = time.time_ns()
        newest = max((view.command.number for view in listed), default=0)
        command = sign_manual_command(
            request.command(run_id, issued_by=issued_by, now_unix_ns=now, after=newest), keys
        )
        return self._post(CommandView, command, "runs", run_id, "commands")

    # ---------------------------------------------------------------------------- plumbing

    def close(self) -> None:
        """Close the HTTP connections."""
        self._http.close()

    def __enter__(self) -> "CollectorClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _post(self, answer: type[T], body: msgspec.Struct, *path: str) -> T:
        """Send a struct as JSON, and return the decoded response."""
        how = _json_body_kwargs(msgspec.json.encode(body))
        return self._send_and_decode(answer, "POST", _url_path(*path), **how)

    def _send_and_decode(self, answer: type[T], method: str, path: str, **how: Any) -> T:
        """Send an HTTP request to the collector, and return the decoded response."""
        raw = self._send(method, path, **how)
        try:
            return from_json(raw, answer)
        except UNREADABLE as error:
            raise TransportError(
                f"{self.url}{path} did not answer like a collector: {error}",
                hint="check that this is a collector's address and that both sides have the same "
                "version",
            ) from error

    def _send(self, method: str, path: str, **how: Any) -> bytes:
        """Send an HTTP request to the collector, and return the response's body."""
        import httpx

        headers = {**self._headers, **how.pop("headers", {})}
        try:
            response = self._http.request(method, path, headers=headers, **how)
        except httpx.TimeoutException as error:
            raise TransportError(
                f"the collector at {self.url} did not answer in time",
                hint="it may be overloaded; spooled rows are not lost",
            ) from error
        except httpx.HTTPError as error:
            raise not_connected(self.url, self._tls, error) from error
        if response.is_success:
            return response.content
        raise response_error(self.url, path, response)


def open_collector_client(
    collector: CollectorAddress, scope: str = "read", *, timeout: float = 5.0
) -> CollectorClient:
    """Return an HTTP client with the token of a scope; for "" without a token.

    Raises:
        UnauthorizedError: the token file has no token of that scope.
    """
    tokens = collector.tokens
    token = getattr(tokens, scope) if scope else ""
    if scope == "read":
        token = token or tokens.control  # which includes this scope
    scopes = [name for name in ("ingest", "read", "control") if getattr(tokens, name)]
    if scope and scopes and not token:
        raise UnauthorizedError(
            f"the token file allows {' and '.join(scopes)} only; this needs {scope}",
            hint="on the collector's machine, `vitals token create NAME --scope "
            f"{scope} --output FILE` makes a token file for it: give that with --token-file",
        )
    return CollectorClient(collector.url, token, tls=collector.tokens.tls, timeout=timeout)


def discover_collector(environ: Mapping[str, str]) -> CollectorAddress | None:
    """Find the URL for HTTP clients in the environment or this user's files; None without one.

    ``VITALS_COLLECTOR_URL`` and ``VITALS_TOKEN_FILE`` come first, then the files that a collector
    writes into its data directory. Whether it responds is checked only if several are named.
    """
    url = environ.get("VITALS_COLLECTOR_URL", "")
    token_file = environ.get("VITALS_TOKEN_FILE", "")
    if url:
        tokens = read_tokens(token_file) if token_file else CollectorTokens()
        return CollectorAddress(url=first_responding_url(url, tokens.tls), tokens=tokens)
    return collector_on(default_data_dir(environ), token_file)


def first_responding_url(named: str, tls: TlsTrust) -> str:
    """Return the first of the named URLs that responds to HTTP, otherwise the first one."""
    urls = collector_urls(named)
    for url in urls if len(urls) > 1 else ():
        with CollectorClient(url, tls=tls) as client:
            try:
                if client.answers():
                    return url
            except ServerIdentityError:
                continue  # not a collector; if none is, the first reports why when it is used
    return urls[0]


def collector_on(data: Path, token_file: Path | str = "") -> CollectorAddress | None:
    """Return the collector that a data directory's files name; None: none runs there.

    On its machine its socket is used, elsewhere its URL if that is not loopback.

    Raises:
        InsecurePathError: another user could have written the file.
    """
    url = url_in(data)
    if not url:
        return None
    path = Path(token_file or data / "tokens.json")
    return CollectorAddress(
        url=url, tokens=read_tokens(path) if path.exists() else CollectorTokens()
    )


def url_in(data: Path) -> str:
    """Read the local socket or URL of a data directory's collector from its file; "" for none.

    Raises:
        InsecurePathError: another user could have written it.
    """
    file = read_collector_file(data)
    if file is None:
        return ""
    is_here = file.node in ("", socket.gethostname())
    if is_here and file.socket and os.sep not in file.socket:
        return f"{UNIX}{data.absolute() / file.socket}"
    try:
        host = urlsplit(file.url).hostname or ""
    except ValueError:  # a damaged file: no address at all
        return ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return file.url if not is_loopback or (is_here and _is_alive(file.pid)) else ""


def read_collector_file(data: Path) -> CollectorFile | None:
    """Read the private file in a collector's data directory; None if it is unreadable.

    Raises:
        InsecurePathError: another user could have written it.
    """
    try:
        raw = read_fd(open_private(data / COLLECTOR_FILE))
        return msgspec.json.decode(raw, type=CollectorFile)
    except (OSError, *UNREADABLE):
        return None


def _is_alive(pid: int) -> bool:
    """Return whether the process that a collector's file names lives: its port may be reused."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return pid > 0


def read_tokens(path: Path | str) -> CollectorTokens:
    """Read the tokens in a private file, which only this user may read.

    Raises:
        UsageError: it is missing or not a token file.
        InsecurePathError: others may read it.
    """
    hint = "the collector creates it (mode 0600) at its first start"
    try:
        return msgspec.json.decode(read_fd(open_private(Path(path))), type=CollectorTokens)
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}", hint=hint) from error
    except UNREADABLE as error:
        raise UsageError(f"{path} is not a token file: {error}", hint=hint) from error


def _url_path(*parts: str) -> str:
    """Return the path of an HTTP request to the collector, with its parts quoted."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _json_body_kwargs(body: bytes) -> dict[str, Any]:
    """Return the httpx arguments of an HTTP request with a JSON body."""
    return {"content": body, "headers": {"Content-Type": "application/json"}}


def response_error(url: str, path: str, response: "httpx.Response") -> VitalsError:
    """Return the error for an HTTP response other than 2xx from the collector."""
    status = response.status_code
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except UNREADABLE:
        text = f"{url}{path} answered {status} {response.reason_phrase}"
        problem = Problem(code="", text=text)
    if status in (401, 403):
        hint = problem.hint or "give the collector's token file with --token-file"
        return UnauthorizedError(problem.text, hint=hint, code=problem.code)
    if status == OWNED_ELSEWHERE:
        owner = response.headers.get(OWNER_HEADER, "")
        return NotOwnerError(problem.text, hint=problem.hint, owner=owner)
    kind: type[VitalsError] = TransportError
    if status in _SETTLED and problem.code:
        families = {
            "V21": NewerVersionError,
            "V23": DamagedBatchError,
            "V24": ForeignBatchError,
            "V2": FormatError,
            "V1": UsageError,
        }
        kind = next((k for p, k in families.items() if problem.code.startswith(p)), TransportError)
    elif status == 413:
        kind = FormatError
    error = kind(problem.text, hint=problem.hint, code=problem.code)
    if isinstance(error, TransportError):
        error.retry_after_seconds = _retry_after(response)
    return error


def _retry_after(response: "httpx.Response") -> float:
    """Return the seconds that an HTTP response requests; ignore other forms of the header."""
    text = response.headers.get("Retry-After", "").strip()
    if not text.isascii() or not text.isdigit():
        return 0.0
    return float(min(int(text[:9]), MAX_RETRY_AFTER_SECONDS))
