import asyncio
import gzip
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collector.rows import Writer, num_stored
from tests.support.examples import examples
from tests.support.served import Served
from trainvitals.errors import StorageError
from vitals_collector.api import auth
from vitals_collector.api.app import CollectorSettings
from vitals_collector.api.ingest_route import ByteBudget
from vitals_collector.storage.store import DATABASE_FILE, open_data_store

OCTETS = {"Content-Type": "application/octet-stream"}


def post(served: Served, body: bytes) -> httpx.Response:
    return served.request("POST", "/v1/ingest", "ingest", content=body, headers=OCTETS)


def num_of(served: Served) -> int:
    return num_stored(served.store)


def begin(served: Served, announced: int, body: bytes) -> socket.socket:
    """Return a connection on which a part of a body was sent, and nothing more will be."""
    host, port = served.plain.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/ingest HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {served.tokens.ingest}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {announced}\r\n\r\n"
    )
    opened.sendall(head.encode() + body)
    return opened


# ------------------------------------------------------------------------------- slow clients


def test_a_client_that_stops_in_the_middle_of_a_body_is_given_up_and_stores_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auth, "STALL_SECONDS", 0.05)
    raw = Writer().steps(range(10))
    with begin(served, len(raw), raw[:-1]) as half:
        assert half.recv(1_000).startswith(b"HTTP/1.1 408 ")
    assert 200 == post(served, raw).status_code
    assert 10 == num_of(served)


def test_clients_that_hang_or_vanish_in_a_body_hinder_no_other(served: Served):
    raw = Writer().steps(range(3))
    with begin(served, len(raw), raw[:50]), begin(served, len(raw), raw[:50]) as vanishing:
        vanishing.close()
        assert 200 == post(served, raw).status_code
    assert {} == served.store.counters.rejected


STOPPED = """
import socket, sys
host, port, announced = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
opened = socket.create_connection((host, port))
opened.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
opened.recv(1)
"""


def test_a_client_that_is_stopped_by_a_signal_hinders_no_other(served: Served):
    raw = Writer().steps(range(3))
    host, port = served.plain.removeprefix("http://").split(":")
    command = [sys.executable, "-c", STOPPED, host, port, str(len(raw))]
    head = (
        f"POST /v1/ingest HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {served.tokens.ingest}"
        f"\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(head.encode() + raw[:100])
        client.stdin.close()
        assert b"sent\n" == client.stdout.readline()
        os.kill(client.pid, signal.SIGSTOP)
        assert 200 == post(served, raw).status_code
        client.kill()
    assert 3 == num_of(served)


# ------------------------------------------------------------------------------------- memory


def test_what_finds_no_room_is_sent_away_with_the_word_when_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    gate: ByteBudget = served.app.state.ingest._room
    monkeypatch.setattr(gate, "_free", 0)
    monkeypatch.setattr(gate, "_wait_seconds", 0.01)
    raw = Writer().steps([0])
    answer = post(served, raw)
    assert (503, "V304") == (answer.status_code, answer.json()["code"])
    assert 1 <= int(answer.headers["retry-after"]) <= 5
    assert 1 == served.store.counters.num_deferred
    monkeypatch.setattr(gate, "_free", 1 << 20)
    assert 200 == post(served, raw).status_code


def test_a_body_without_a_length_takes_the_room_of_the_largest(served: Served):
    raw = Writer().steps([0])
    assert 200 == post(served, iter([raw[:40], raw[40:]])).status_code  # type: ignore[arg-type]
    assert 1 == num_of(served)


def test_room_is_given_in_the_order_of_asking():
    async def story() -> list[str]:
        room = ByteBudget(10, max_waiting=4, wait_seconds=30)
        said: list[str] = []

        async def ask(name: str, num_bytes: int) -> None:
            await room.acquire(num_bytes)
            said.append(name)

        await room.acquire(10)
        tasks = [asyncio.ensure_future(ask(*one)) for one in (("large", 8), ("small", 1))]
        await asyncio.sleep(0)
        room.release(5)
        await asyncio.sleep(0)
        said.append("not yet")
        room.release(5)
        await asyncio.gather(*tasks)
        return said

    assert ["not yet", "large", "small"] == asyncio.run(story())


def test_who_no_longer_waits_for_room_leaves_none_missing():
    async def story() -> None:
        room = ByteBudget(10, max_waiting=1, wait_seconds=30)
        await room.acquire(10)
        waiting = asyncio.ensure_future(room.acquire(10))
        await asyncio.sleep(0)
        with pytest.raises(StorageError, match="the collector receives more than it can store"):
            await room.acquire(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        room.release(10)
        await room.acquire(10)
        late = asyncio.ensure_future(room.acquire(10))
        await asyncio.sleep(0)
        room.release(10)  # it has its room, and is cancelled before it knows
        late.cancel()
        await asyncio.wait([late])
        await room.acquire(10)

    asyncio.run(story())


# ------------------------------------------------------------------------------- the database


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Served]:
    """A collector that waits for a locked database only a moment."""
    store = open_data_store(tmp_path / "data", busy_seconds=0.05)
    with Served(CollectorSettings(data=tmp_path / "data"), store=store) as collector:
        yield collector


def test_while_another_process_holds_the_database_all_are_told_to_come_back(hasty: Served):
    raws = [Writer(f"rank:{i}").steps([0]) for i in range(4)]
    other = sqlite3.connect(hasty.settings.data / DATABASE_FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda raw=raw: answers.append(post(hasty, raw))) for raw in raws
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(503, "V303")] * 4 == [(one.status_code, one.json()["code"]) for one in answers]
    assert all(1 <= int(one.headers["retry-after"]) <= 5 for one in answers)
    other.execute("ROLLBACK")
    other.close()
    assert [200] * 4 == [post(hasty, raw).status_code for raw in raws]
    assert 4 == num_of(hasty)


# ------------------------------------------------------------------------------ any bytes at all


WHOLE = [Writer(f"rank:{i}").steps(range(2)) for i in range(3)]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return bytes of all kinds: noise, batches cut, joined, and with a bit turned."""
    parts = [
        draw(st.one_of(st.binary(max_size=80), st.sampled_from(WHOLE)))
        for _ in range(draw(st.integers(0, 4)))
    ]
    body = bytearray(b"".join(parts))
    if body and draw(st.booleans()):
        body[draw(st.integers(0, len(body) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(body[: draw(st.integers(0, len(body)))] if draw(st.booleans()) else body)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(bodies())
def test_any_bytes_are_stored_or_refused_and_never_a_fault(served: Served, body: bytes):
    answer = post(served, body)
    assert answer.status_code in (200, 400, 422), answer.text
    if answer.status_code == 200:
        assert all(one["num_new"] >= 0 for one in answer.json())
    else:
        assert answer.json()["code"].startswith("V2")


def test_a_body_that_is_too_large_is_refused_by_its_length(served: Served):
    with begin(served, auth.MAX_INGEST_BYTES + 1, b"") as opened:
        assert opened.recv(1_000).startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_refused_in_words(served: Served):
    raw = Writer().steps(range(3))
    headers = OCTETS | {"Content-Encoding": "gzip"}
    url, body = "/v1/ingest", gzip.compress(raw)
    answer = served.request("POST", url, "ingest", content=body, headers=headers)
    assert 415 == answer.status_code
    assert "Content-Encoding is 'gzip'; batches are taken as they are" == answer.json()["text"]
    assert {answer.json()["code"]: 1} == served.store.counters.rejected
    plain = OCTETS | {"Content-Encoding": "identity"}
    assert 200 == served.request("POST", url, "ingest", content=raw, headers=plain).status_code


def test_what_waits_when_the_collector_ends_is_stored(tmp_path: Path):
    raws = [Writer(f"rank:{i}").steps([0]) for i in range(8)]
    done: list[int] = []
    with Served(CollectorSettings(data=tmp_path / "data")) as served:
        threads = [
            threading.Thread(target=lambda raw=raw: done.append(post(served, raw).status_code))
            for raw in raws
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [200] * 8 == done
    store = open_data_store(tmp_path / "data")
    assert 8 == num_stored(store)
    store.close()
