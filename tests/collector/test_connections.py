"""A connection that says nothing, or never ends what it says, is ended; others never notice."""

import contextlib
import http.client
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.collector.rows import RUN, Writer
from tests.support.collectors import collector
from tests.support.collectors import connected as client_of
from tests.support.served import Served
from trainvitals.io.client import read_collector_file
from vitals_collector.api import auth
from vitals_collector.api.auth import (
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    PatientProtocol,
)

HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SECONDS = 0.4


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are waited for less long than in earnest."""
    monkeypatch.setattr(PatientProtocol, "head_seconds", SECONDS)
    monkeypatch.setattr(auth, "STALL_SECONDS", SECONDS)


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def status_of_reply(sock: socket.socket) -> int:
    """Read one whole response, whose head and body may come apart, and return its status."""
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    reply.read()
    return reply.status


def ended(sock: socket.socket, *, trickle: bytes = b"") -> bytes:
    """Return what comes until the other side ends the connection, sending bytes meanwhile."""
    answer, end = b"", time.monotonic() + 60
    sock.settimeout(SECONDS / 4)
    while time.monotonic() < end:
        try:
            part = sock.recv(65_536)
        except TimeoutError:
            part = b"\0"
        except ConnectionError:
            return answer
        if not part:
            return answer
        answer += part.strip(b"\0")
        try:
            sock.sendall(trickle)
        except OSError:
            return answer
    raise AssertionError(f"the connection still stands after 60 s; it said {answer!r}")


@pytest.mark.parametrize(
    ("begin", "trickle"),
    [
        (b"", b""),
        (b"", b"\r\n"),
        (HEAD, b""),
        (b"GET /healthz HTTP/1.1\r\nX-Slow: ", b"a"),
        (HEAD, b"X-Slow: a\r\n"),
        (HEAD + b"\r\n", b"\r\n"),
        (HEAD + b"\r\n" + HEAD, b""),
    ],
    ids=[
        "silence",
        "empty lines",
        "half a head",
        "a header by the byte",
        "headers one by one",
        "empty lines after a request",
        "half a second request",
    ],
)
def test_a_head_that_does_not_come_ends_the_connection(
    hasty: None, served: Served, begin: bytes, trickle: bytes
):
    with connected(served.url) as sock:
        sock.sendall(begin)
        answer = ended(sock, trickle=trickle)
    assert (b"200 OK" in answer) == (HEAD + b"\r\n" in begin)


def test_half_a_body_is_refused_in_time(hasty: None, served: Served):
    token = served.tokens.ingest.encode()
    with connected(served.url) as sock:
        sock.sendall(
            b"POST /v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
            b"Content-Type: application/octet-stream\r\nAuthorization: Bearer " + token
        )
        sock.sendall(b"\r\n\r\nTVB2")
        answer = ended(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_many_that_say_nothing_keep_nobody_out(hasty: None, served: Served):
    silent = [connected(served.url) for _ in range(200)]
    with served.client("ingest") as client:
        assert 1 == client.ingest(Writer().steps([0])).num_new
    for sock in silent:
        with sock:
            assert b"" == ended(sock)


def test_a_client_that_pauses_between_requests_is_kept(hasty: None, served: Served):
    with connected(served.url) as sock:
        for _ in range(3):
            sock.sendall(HEAD + b"\r\n")
            assert 200 == status_of_reply(sock)
            time.sleep(2 * SECONDS)


def test_a_head_without_end_is_refused_by_the_program_itself(tmp_path):
    with collector(tmp_path, "--allow-plain") as _, client_of(tmp_path, "ingest") as client:
        heads = [
            HEAD + b"X-Long: " + b"a" * (2 * MAX_HEAD_BYTES),
            HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(MAX_HEADERS + 1)),
        ]
        file = read_collector_file(tmp_path)
        assert file is not None
        for head in heads:
            with connected(file.url) as sock:
                sock.sendall(head)
                assert 400 == status_of_reply(sock)
        assert 1 == client.ingest(Writer(run=RUN).steps([0])).num_new


def test_a_request_that_comes_whole_at_once_may_be_longer_than_a_head(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auth, "MAX_HEAD_BYTES", 1_000)
    raw = Writer().steps(range(30))
    head = (
        f"POST /v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n"
        "Content-Type: application/octet-stream\r\n"
        f"Authorization: Bearer {served.tokens.ingest}\r\n\r\n"
    )
    assert len(head) < 1_000 < len(raw)
    with connected(served.plain) as sock:
        for _ in range(2):
            sock.sendall(head.encode() + raw)
            assert 200 == status_of_reply(sock)


def test_connections_above_the_limit_are_dropped_and_the_others_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PatientProtocol, "max_connections", 4)
    with contextlib.ExitStack() as opened:
        standing = [opened.enter_context(connected(served.plain)) for _ in range(4)]
        for sock in standing:
            sock.sendall(HEAD + b"\r\n")
            assert 200 == status_of_reply(sock)
        assert b"" == ended(opened.enter_context(connected(served.plain)))
        for sock in standing:
            sock.sendall(HEAD + b"\r\n")
            assert 200 == status_of_reply(sock)


@pytest.mark.nightly
def test_a_tls_handshake_that_does_not_come_ends_the_connection(tmp_path):
    with collector(tmp_path):
        where = urlsplit(read_collector_file(tmp_path).url)
        began = time.monotonic()
        with socket.create_connection((where.hostname, where.port), timeout=60) as silent:
            assert b"" == silent.recv(1)
        assert time.monotonic() - began > HEAD_SECONDS - 1
