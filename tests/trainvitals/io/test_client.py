import json
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.orders import keys
from tests.trainvitals.io.builders import RUN_ID, a_command
from trainvitals.errors import (
    FormatError,
    InsecurePathError,
    NewerVersionError,
    TransportError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)
from trainvitals.io import client as client_module
from trainvitals.io.client import (
    CollectorAddress,
    CollectorClient,
    CollectorTokens,
    discover_collector,
)
from trainvitals.views import (
    AckRequest,
    AlertsQuestion,
    CheckpointsQuestion,
    CommandRequest,
    CommandsQuestion,
    CommandView,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    Problem,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    SeriesReply,
    StepQuestion,
)
from trainvitals.wire import IngestReply

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler, token: str = "secret") -> CollectorClient:
    transport = httpx.MockTransport(handler)
    return CollectorClient("https://collector:1", token, transport=transport)


def answer(value: object, status: int = 200) -> Handler:
    return lambda request: httpx.Response(status, content=msgspec.json.encode(value))


def problem(code: str, status: int, hint: str = "") -> Handler:
    return answer(Problem(code=code, text="it went wrong", hint=hint), status)


def test_a_batch_is_sent_raw_with_the_token() -> None:
    seen: list[httpx.Request] = []
    reply = IngestReply(durable_seq=5, num_new=2, num_duplicate=1)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=msgspec.json.encode([reply]))

    with client_of(handle) as client:
        assert reply == client.ingest(b"\x00raw\xff")
    assert ("POST", "/v1/ingest") == (seen[0].method, seen[0].url.path)
    assert b"\x00raw\xff" == seen[0].content
    assert "Bearer secret" == seen[0].headers["authorization"]


def test_commands_are_fetched_and_marked() -> None:
    view = CommandView(command=a_command(), status="pending")
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, content=msgspec.json.encode([view]))

    with client_of(handle) as client:
        assert (view,) == client.ask(CommandsQuestion(run_id=RUN_ID, status="pending"))
        client.mark_delivered(RUN_ID, 17, "a" * 16)
    assert [
        f"GET /v1/runs/{RUN_ID}/commands?status=pending",
        f"POST /v1/runs/{RUN_ID}/commands/17/delivered",
    ] == seen


def test_a_series_is_asked_for_with_what_was_given() -> None:
    reply = SeriesReply(
        run_id=RUN_ID,
        metric="steps.loss",
        source="rank:0",
        unit="",
        branch="all",
        num_total=1,
        step=(1,),
        time_unix_ns=(2,),
        attempt=(3,),
        value=(None,),
        nonfinite=(),
    )
    seen: list[httpx.URL] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url)
        return httpx.Response(200, content=msgspec.json.encode(reply))

    with client_of(handle) as client:
        assert reply == client.ask(
            SeriesQuestion(run_id=RUN_ID, metric="steps.loss", branch="all", from_step=3)
        )
    expected = {"metric": "steps.loss", "branch": "all", "points": "1000", "from_step": "3"}
    assert expected == dict(seen[0].params)


def test_orders_are_json() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, content=b"[]")
        seen.append(request)
        view = CommandView(command=a_command(), status="pending")
        return httpx.Response(200, content=msgspec.json.encode(view))

    with client_of(handle) as client:
        client.send_command(
            RUN_ID, CommandRequest(action="halt", reason="enough"), issued_by="me", keys=keys()
        )
        with pytest.raises(TransportError, match="did not answer like a collector"):
            client.ack_alert("a/b?c", AckRequest(by="me"))
    assert "halt" == json.loads(seen[0].content)["action"]
    assert "application/json" == seen[0].headers["content-type"]
    assert b"/v1/alerts/a%2Fb%3Fc/ack" == seen[1].url.raw_path


def test_every_reader_asks_its_own_route() -> None:
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        return httpx.Response(200, content=b"[]")

    with client_of(handle) as client:
        assert ((),) * 6 == (
            client.ask(RunsQuestion()),
            client.ask(DecisionsQuestion(run_id="R")),
            client.ask(FindingsQuestion(run_id="R")),
            client.ask(CheckpointsQuestion(run_id="R")),
            client.ask(EventsQuestion(run_id="R")),
            client.ask(CommandsQuestion(run_id="R")),
        )
        assert () == client.ask(AlertsQuestion(run_id="R", state="firing"))
        for call in (
            lambda: client.ask(RunQuestion(run_id="R")),
            lambda: client.ask(StepQuestion(run_id="R", step=5)),
        ):
            with pytest.raises(TransportError):
                call()
    assert [
        "/v1/runs",
        "/v1/runs/R/decisions",
        "/v1/runs/R/findings",
        "/v1/runs/R/checkpoints",
        "/v1/runs/R/events",
        "/v1/runs/R/commands",
        "/v1/alerts?run=R&state=firing",
        "/v1/runs/R",
        "/v1/runs/R/steps/5",
    ] == seen


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (problem("V410", 401), UnauthorizedError),
        (problem("V410", 403), UnauthorizedError),
        (problem("V200", 400), FormatError),
        (problem("V210", 422), NewerVersionError),
        (problem("V100", 404), UsageError),
        (problem("V110", 422), UsageError),
        (problem("V300", 503), TransportError),
        (problem("V200", 500), TransportError),
        (problem("V400", 429), TransportError),
        (answer({"detail": "not found"}, 404), TransportError),
        (answer("<html>", 413), FormatError),
        (answer("moved", 307), TransportError),
        (answer("nonsense"), TransportError),
    ],
)
def test_each_refusal_is_the_right_error(handler: Handler, kind: type[VitalsError]) -> None:
    with client_of(handler) as client, pytest.raises(VitalsError) as caught:
        client.ingest(b"x")
    assert kind is type(caught.value)


def test_a_refusal_keeps_the_collectors_words() -> None:
    handler = problem("V101", 409, hint="do something else")
    with client_of(handler) as client, pytest.raises(UsageError) as caught:
        client.ask(RunsQuestion())
    assert ("it went wrong", "do something else", "V101") == (
        caught.value.text,
        caught.value.hint,
        caught.value.code,
    )


def test_without_a_token_the_way_out_is_said() -> None:
    with client_of(problem("V410", 401), "") as client, pytest.raises(UnauthorizedError) as caught:
        client.ask(RunsQuestion())
    assert "--token-file" in caught.value.hint


def test_a_collector_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        url = f"https://127.0.0.1:{taken.getsockname()[1]}"
        with CollectorClient(url) as client:
            assert not client.answers()
            with pytest.raises(TransportError, match=url) as caught:
                client.ask(RunsQuestion())
    assert "vitals collector" in caught.value.hint


def test_a_collector_that_does_not_answer_is_given_up() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too slow")

    with client_of(handle) as client, pytest.raises(TransportError, match="did not answer in time"):
        client.ask(RunsQuestion())


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://", "http://x:abc", "//x"])
def test_an_address_that_is_none_is_a_users_error(url: str) -> None:
    with pytest.raises(UsageError, match="must be https://host:port"):
        CollectorClient(url)


class _Redirect(BaseHTTPRequestHandler):
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(200 if self.path == "/healthz" else 302)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


def test_the_token_goes_through_no_proxy_and_follows_no_redirect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    _Redirect.seen = []
    with HTTPServer(("127.0.0.1", 0), _Redirect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with CollectorClient(
                f"insecure+http://127.0.0.1:{server.server_port}/", "secret"
            ) as client:
                assert client.answers()
                with pytest.raises(TransportError, match="302"):
                    client.ask(RunsQuestion())
        finally:
            server.shutdown()
            thread.join()
    assert ["/healthz", "/v1/runs"] == _Redirect.seen


# ---------------------------------------------------------------------------- discovery


def write_data(data: Path, *, mode: int = 0o600, url: str = "https://127.0.0.1:5") -> None:
    data.mkdir(parents=True, exist_ok=True)
    address = {"url": url, "pid": os.getpid()}
    (data / "collector.json").write_text(json.dumps(address))
    (data / "collector.json").chmod(0o600)
    (data / "tokens.json").write_text('{"read": "r", "ingest": "i", "control": "c"}')
    (data / "tokens.json").chmod(mode)


def test_this_users_own_collector_is_found(tmp_path: Path) -> None:
    write_data(tmp_path / "trainvitals")
    found = discover_collector({"XDG_DATA_HOME": str(tmp_path)})
    assert found is not None
    assert ("https://127.0.0.1:5", CollectorTokens(read="r", ingest="i", control="c")) == (
        found.url,
        found.tokens,
    )


@pytest.mark.parametrize(
    ("tokens", "scope", "says"),
    [
        (CollectorTokens(ingest="i"), "read", "allows ingest only; this needs read"),
        (
            CollectorTokens(ingest="i", read="r"),
            "control",
            "ingest and read only; this needs control",
        ),
    ],
)
def test_a_token_file_without_the_scope_says_what_it_may_and_how_to_get_one(tokens, scope, says):
    collector = CollectorAddress(url="https://127.0.0.1:5", tokens=tokens)
    with pytest.raises(UnauthorizedError, match=says) as caught:
        client_module.open_collector_client(collector, scope)
    assert f"`vitals token create NAME --scope {scope} --output FILE`" in caught.value.hint


def test_a_control_token_reads_too() -> None:
    collector = CollectorAddress(url="https://127.0.0.1:5", tokens=CollectorTokens(control="c"))
    with client_module.open_collector_client(collector) as reader:
        assert "Bearer c" == reader._headers["Authorization"]


def test_the_environment_comes_first(tmp_path: Path) -> None:
    write_data(tmp_path / "trainvitals")
    token_file = tmp_path / "tokens"
    token_file.write_text('{"read": "other"}')
    token_file.chmod(0o600)
    environ = {"XDG_DATA_HOME": str(tmp_path), "VITALS_TOKEN_FILE": str(token_file)}
    found = discover_collector(environ)
    assert found is not None
    assert "other" == found.tokens.read
    found = discover_collector({**environ, "VITALS_COLLECTOR_URL": "https://far:1"})
    assert found is not None
    assert ("https://far:1", "other") == (found.url, found.tokens.read)


def test_no_collector_is_none(tmp_path: Path) -> None:
    assert discover_collector({"HOME": str(tmp_path)}) is None
    data = tmp_path / ".local/share/trainvitals"
    data.mkdir(parents=True)
    (data / "collector.json").write_text("{torn")
    (data / "collector.json").chmod(0o600)
    assert discover_collector({"HOME": str(tmp_path)}) is None


def test_tokens_that_others_can_read_are_not_used(tmp_path: Path) -> None:
    write_data(tmp_path / "trainvitals", mode=0o644)
    with pytest.raises(InsecurePathError, match="mode 0644"):
        discover_collector({"XDG_DATA_HOME": str(tmp_path)})


@pytest.mark.parametrize("content", [None, "{torn", "[]"])
def test_a_wrong_token_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    environ = {"VITALS_COLLECTOR_URL": "https://far:1", "VITALS_TOKEN_FILE": str(path)}
    with pytest.raises(UsageError, match="token"):
        discover_collector(environ)


@pytest.mark.parametrize("status", [429, 503, 507])
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("5", 5.0),
        (" 0 ", 0.0),
        ("86400", 300.0),
        ("9" * 400, 300.0),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("\u00b2".encode().decode("latin-1"), 0.0),
        (None, 0.0),
    ],
    ids=["5", "0", "a day", "digits", "date", "negative", "fraction", "no ascii", "none"],
)
def test_what_a_busy_collector_asks_for_comes_with_the_error(
    status: int, header: str | None, seconds: float
) -> None:
    headers = [] if header is None else [(b"Retry-After", header.encode("latin-1"))]

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=b"{}")

    with client_of(handle) as client, pytest.raises(TransportError) as caught:
        client.ingest(b"raw")
    assert seconds == caught.value.retry_after_seconds
