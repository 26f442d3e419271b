"""The agent's own way of asking: the same words and errors as ``CollectorClient``, for less."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainvitals.errors import TransportError, VitalsError
from trainvitals.io.client import CollectorAddress, CollectorClient, CollectorTokens
from trainvitals.views import CommandsQuestion
from vitals_agent.collector_endpoint import AgentClient

RUN = "01JD0000000000000000000000"
PENDING = CommandsQuestion(run_id=RUN, status="pending")


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"insecure+http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def say(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.rfile.read(int(handler.headers.get("Content-Length", "0")))
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def ours(url: str, **how: float) -> AgentClient:
    return AgentClient(CollectorAddress(url=url, tokens=CollectorTokens(ingest="secret")), **how)


def test_one_connection_is_kept_and_the_token_goes_along_below_the_addresses_path() -> None:
    seen: list[tuple[object, str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.client_address, handler.path, handler.headers["Authorization"]))
        say(handler, 200, b"[]")

    with serving(answer) as url, ours(f"{url}/vitals/") as client:
        for _ in range(3):
            assert () == client.ask(PENDING)
        client.mark_delivered(RUN, 7, "a" * 16)
    assert 1 == len({address for address, _, _ in seen})
    assert {"Bearer secret"} == {token for _, _, token in seen}
    asked = f"/vitals/v1/runs/{RUN}/commands"
    assert [f"{asked}?status=pending"] * 3 + [f"{asked}/7/delivered"] == [p for _, p, _ in seen]


def test_a_kept_connection_that_was_closed_meanwhile_is_opened_again_and_a_dead_one_is_said() -> (
    None
):
    num_asked = []

    def closes(handler: BaseHTTPRequestHandler) -> None:
        num_asked.append(1)
        if len(num_asked) <= 3:
            say(handler, 200, b"[]")
        handler.close_connection = True  # and nobody was told

    with serving(closes) as url, ours(url) as client:
        for _ in range(3):
            assert () == client.ask(PENDING)
        with pytest.raises(TransportError, match="cannot be reached"):
            client.ask(PENDING)
        assert 3 < len(num_asked) <= 5
    with pytest.raises(TransportError, match="cannot be reached"):
        ours(url).ask(PENDING)


def test_a_collector_that_says_nothing_is_waited_for_no_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ours(f"insecure+http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)
        with client, pytest.raises(TransportError, match="did not answer in time"):
            client.ask(PENDING)


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (401, b'{"code": "V150", "text": "no such token"}', {}),
        (503, b"{}", {"Retry-After": "40"}),
        (400, b'{"code": "V200", "text": "damaged"}', {}),
        (413, b"<html>too large</html>", {}),
        (302, b"", {"Location": "http://127.0.0.1:1/elsewhere"}),
        (200, b"<html>a page</html>", {}),
    ],
)
def test_an_answer_means_what_it_means_to_every_client(
    status: int, body: bytes, headers: dict[str, str]
) -> None:
    def error_of(client: CollectorClient) -> tuple[type[VitalsError], str, float]:
        with client, pytest.raises(VitalsError) as raised:
            client.ingest(b"TVB2")
        error = raised.value
        return type(error), str(error), getattr(error, "retry_after_seconds", 0.0)

    with serving(lambda handler: say(handler, status, body, **headers)) as url:
        assert error_of(CollectorClient(url)) == error_of(ours(url))
