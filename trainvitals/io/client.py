"""Speaks to a collector over HTTP: ingest for agents, queries and orders for people.

Bodies are ``trainvitals.views``. What goes wrong is one of our errors: TransportError where trying
again may help, UnauthorizedError for the token, else what the collector says (FormatError for bytes
it will never take, UsageError for what cannot be done as asked). No proxy is used and no redirect
followed: the token goes to the address that was given and nowhere else.
"""

import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from trainvitals.errors import (
    UNREADABLE,
    DamagedBatchError,
    FormatError,
    NewerVersionError,
    NotOwnerError,
    TransportError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.io.control_key import sign_order
from trainvitals.io.private import open_private
from trainvitals.io.segments import read_fd
from trainvitals.io.setting_paths import collector_urls, default_data_dir
from trainvitals.jsonable import from_json
from trainvitals.question import Question, as_request
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
from trainvitals.wire import ASK_HEADER, OWNED_ELSEWHERE, OWNER_HEADER, IngestReply

A = TypeVar("A")
T = TypeVar("T")

MAX_RETRY_AFTER_SECONDS = 300
_SETTLED = frozenset({400, 404, 405, 409, 410, 413, 415, 422})


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a collector, by scope; what a program was not given is empty."""

    read: str = ""
    ingest: str = ""
    control: str = ""


class CollectorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a collector is and what may be done there."""

    url: str
    tokens: Tokens = Tokens()


class _CollectorFile(msgspec.Struct, frozen=True):
    url: str
    pid: int = 0


class CollectorClient:
    """A collector's API. Thread-safe; close it, or use it in a ``with``.

    Args:
        url: ``http://host:port``.
        token: of the scope that the calls need.
        timeout: seconds for each of connecting, sending and waiting.
        transport: for tests.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        timeout: float = 5.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(
                f"the collector's address is {url!r}; it must be http://host:port, or a folder",
                hint="`vitals collector` prints its address when it starts; write a data folder "
                "with a slash, such as ./collector",
            )
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout,
            trust_env=False,
            verify=ssl.create_default_context() if parsed.scheme == "https" else False,
            transport=transport,
        )

    # -------------------------------------------------------------------------- for agents

    def ingest(self, raw: bytes) -> IngestReply:
        """Store one batch; committed when this returns."""
        return self.ingest_all([raw])[0]

    def ingest_all(self, raws: Sequence[bytes], *, asks: bool = False) -> tuple[IngestReply, ...]:
        """Store batches together; what is not refused is committed when this returns.

        Args:
            raws: the batches.
            asks: whether one behind a hole is not to be stored, but answered by ``from_seq``.

        Returns:
            One reply for each batch. Where all are refused, the first one's error is raised.
        """
        headers = {"Content-Type": "application/octet-stream"}
        if asks:
            headers[ASK_HEADER] = "ask"
        content = b"".join(raws)
        answer = tuple[IngestReply, ...]
        replies = self._call(answer, "POST", "/v1/ingest", content=content, headers=headers)
        if len(replies) != len(raws):
            raise TransportError(
                f"{self.url}/v1/ingest gave {len(replies)} replies to {len(raws)} batches",
                hint="check that the agent and the collector have the same version",
            )
        return replies

    def mark_delivered(self, run_id: str, number: int, incarnation: str) -> None:
        """Say that a command lies in the run's mailbox, beside this incarnation of its rank 0."""
        path = _path("runs", run_id, "commands", str(number), "delivered")
        request = DeliveredRequest(incarnation=incarnation)
        self._send("POST", path, **_json(msgspec.json.encode(request)))

    # ------------------------------------------------------------------------- for readers

    def answers(self) -> bool:
        """Return whether the collector answers; one without room to write (503) can be read."""
        try:
            return self._http.get("/healthz").status_code in (200, 503)
        except httpx.HTTPError:
            return False

    def ask(self, question: Question[A]) -> A:
        """Return the collector's answer."""
        asked = as_request(question)
        how = {"params": asked.params} if asked.body is None else _json(asked.body)
        answer: A = self._call(asked.answer, asked.method, asked.path, **how)
        return answer

    # -------------------------------------------------------------------------- for orders

    def annotate(self, run_id: str, request: AnnotationRequest) -> AnnotationView:
        """Write a line at a step; it is drawn on the curves and kept for ever."""
        path = _path("runs", run_id, "annotations")
        return self._call(AnnotationView, "POST", path, **_json(msgspec.json.encode(request)))

    def ack_alert(self, fingerprint: str, request: AckRequest) -> AlertView:
        """Acknowledge an alert, or silence it where ``silence_seconds`` is given."""
        path = _path("alerts", fingerprint, "ack")
        return self._call(AlertView, "POST", path, **_json(msgspec.json.encode(request)))

    def silence(self, request: SilenceRequest) -> SilenceView:
        """Silence all alerts that fit the matchers."""
        body = _json(msgspec.json.encode(request))
        return self._call(SilenceView, "POST", _path("silences"), **body)

    def end_silence(self, silence_id: int, request: EndSilenceRequest) -> SilenceView:
        """End a silence early."""
        body = _json(msgspec.json.encode(request))
        return self._call(SilenceView, "POST", _path("silences", str(silence_id), "end"), **body)

    def send_command(
        self, run_id: str, request: CommandRequest, *, issued_by: str, keys: Path
    ) -> CommandView:
        """Propose something to the run's ladder, signed here.

        Args:
            run_id: the run.
            request: what is asked for.
            issued_by: who asks.
            keys: the folder of ``control.key``.
        """
        listed = self.ask(CommandsQuestion(run_id=run_id))
        now = time.time_ns()
        newest = max((view.command.number for view in listed), default=0)
        command = sign_order(
            request.command(run_id, issued_by=issued_by, now_unix_ns=now, after=newest), keys
        )
        path = _path("runs", run_id, "commands")
        return self._call(CommandView, "POST", path, **_json(msgspec.json.encode(command)))

    # ---------------------------------------------------------------------------- plumbing

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> "CollectorClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, answer: type[T], method: str, path: str, **how: Any) -> T:
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
        try:
            response = self._http.request(method, path, **how)
        except httpx.TimeoutException as error:
            raise TransportError(
                f"the collector at {self.url} did not answer in time",
                hint="it may be overloaded; spooled rows are not lost",
            ) from error
        except httpx.HTTPError as error:
            raise TransportError(
                f"the collector at {self.url} cannot be reached: {error}",
                hint="start one with `vitals collector`, or give its address with --collector",
            ) from error
        if response.is_success:
            return response.content
        raise refusal(self.url, path, response)


def discover_collector(environ: Mapping[str, str]) -> CollectorAddress | None:
    """Return the collector that the environment names, else this user's own; None: there is none.

    ``VITALS_COLLECTOR_URL`` and ``VITALS_TOKEN_FILE`` come first, then the files that a collector
    writes into its data folder. Whether it is alive is asked only where several are named.
    """
    url = environ.get("VITALS_COLLECTOR_URL", "")
    token_file = environ.get("VITALS_TOKEN_FILE", "")
    if url:
        url = first_that_answers(url)
        return CollectorAddress(url=url, tokens=read_tokens(token_file) if token_file else Tokens())
    return collector_on(default_data_dir(environ), token_file)


def first_that_answers(named: str) -> str:
    """Return the address; of several, that of the first collector that answers, else the first."""
    urls = collector_urls(named)
    for url in urls if len(urls) > 1 else ():
        with CollectorClient(url) as client:
            if client.answers():
                return url
    return urls[0]


def collector_on(data: Path, token_file: str = "") -> CollectorAddress | None:
    """Return the collector that wrote its address into its data folder; None: none is there."""
    try:
        collector_file = msgspec.json.decode(
            (data / "collector.json").read_bytes(), type=_CollectorFile
        )
    except (OSError, *UNREADABLE):
        return None
    path = Path(token_file) if token_file else data / "tokens.json"
    return CollectorAddress(
        url=collector_file.url, tokens=read_tokens(path) if path.exists() else Tokens()
    )


def read_tokens(path: Path | str) -> Tokens:
    """Return the tokens in a file that only this user may read.

    Raises:
        UsageError: it is missing or is no token file.
        InsecurePathError: others may read it.
    """
    hint = "the collector creates it (mode 0600) at its first start"
    try:
        return msgspec.json.decode(read_fd(open_private(Path(path))), type=Tokens)
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}", hint=hint) from error
    except UNREADABLE as error:
        raise UsageError(f"{path} is not a token file: {error}", hint=hint) from error


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _json(body: bytes) -> dict[str, Any]:
    return {"content": body, "headers": {"Content-Type": "application/json"}}


def refusal(url: str, path: str, response: httpx.Response) -> VitalsError:
    """Return the error that an answer other than 2xx is."""
    status = response.status_code
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except UNREADABLE:
        text = f"{url}{path} answered {status} {response.reason_phrase}"
        problem = Problem(code="", text=text)
    if status in (401, 403):
        hint = problem.hint or "give the collector's token file with --token-file"
        return UnauthorizedError(problem.text, hint=hint)
    if status == OWNED_ELSEWHERE:
        owner = response.headers.get(OWNER_HEADER, "")
        return NotOwnerError(problem.text, hint=problem.hint, owner=owner)
    kind: type[VitalsError] = TransportError
    if status in _SETTLED and problem.code:
        families = {
            "V21": NewerVersionError,
            "V23": DamagedBatchError,
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


def _retry_after(response: httpx.Response) -> float:
    """The seconds that the answer asks for; what else the header may hold is not obeyed."""
    text = response.headers.get("Retry-After", "").strip()
    if not text.isascii() or not text.isdigit():
        return 0.0
    return float(min(int(text[:9]), MAX_RETRY_AFTER_SECONDS))
