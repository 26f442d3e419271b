"""The simulated fleet: its driver's connections, its figures, and a small one all the way."""

import asyncio
import contextlib

import pytest

from vitals_bench.ingest import driver, fleet
from vitals_bench.ingest.driver import Node, Outcome
from vitals_bench.ingest.fleet import Seen, Size, growth

pytestmark = pytest.mark.nightly

OUTCOME = Outcome(
    num_rows=9,
    num_posts=3,
    num_again=0,
    num_unanswered=0,
    refused=(),
    late_seconds=0.004,
    reply_seconds=(0.002, 0.03),
    cpu_share=0.2,
)


class Transport:
    def __init__(self):
        self.written = []

    def write(self, data):
        self.written.append(data.partition(b"\r\n\r\n")[2])


def answer(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def stored(num_rows):
    return answer(b'[{"durable_seq":0,"num_new":%d,"num_duplicate":0}]' % num_rows)


@pytest.fixture
def node():
    made = Node(["127.0.0.1:1"], "token")
    made.connection_made(Transport())
    return made


def written(node):
    return node._transport.written


def test_while_a_node_waits_for_its_answer_the_next_bodies_gather_and_go_together(node):
    for body in (b"one", b"two", b"three"):
        node.post(body)
    assert [b"one"] == written(node)
    node.data_received(stored(8))
    assert b"twothree" == written(node)[1]
    assert (8, False) == (node.num_rows, node.is_done)
    node.data_received(stored(16))
    assert (24, True, 2, []) == (node.num_rows, node.is_done, len(node.times), node.refused)


def test_an_answer_may_come_in_pieces(node):
    node.post(b"one")
    whole = stored(8)
    for i in range(len(whole)):
        assert 0 == node.num_rows
        node.data_received(whole[i : i + 1])
    assert (8, True) == (node.num_rows, node.is_done)


def test_what_is_refused_is_kept_in_its_own_words(node):
    node.post(b"one")
    node.data_received(answer(b'{"text":"no token"}', "401 Unauthorized"))
    node.post(b"two")
    reply = b'[{"durable_seq":-1,"num_new":0,"num_duplicate":0,"code":"V200","text":"torn"}]'
    node.data_received(answer(reply))
    assert ['{"text":"no token"}', "torn"] == node.refused


async def _serve(replies, heard):
    """Answer each post with the next reply; None ends the connection without one."""

    async def each(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.rsplit(b"Content-Length: ")[1].split()[0])
                heard.append(await reader.readexactly(length))
                reply = replies.pop(0)
                if reply is None:
                    break
                writer.write(reply)
        writer.close()

    server = await asyncio.start_server(each, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_a_node_goes_to_the_owner_and_to_the_next_collector_where_no_answer_comes(monkeypatch):
    monkeypatch.setattr(driver, "_AGAIN_SECONDS", 0.01)

    async def play():
        heard = [], []
        owner, at = await _serve([None], heard[1])
        moved = f"HTTP/1.1 421 Moved\r\nVitals-Owner: http://{at}\r\nContent-Length: 0\r\n\r\n"
        first, begin = await _serve([moved.encode(), stored(3)], heard[0])
        node = Node([begin, at], "token")
        await node.connect()
        node.post(b"rows")
        for _ in range(200):
            await asyncio.sleep(0.01)
            if node.is_done:
                break
        node.close()
        first.close()
        owner.close()
        await asyncio.sleep(0.05)  # for what they served to end
        return heard, node

    heard, node = asyncio.run(play())
    assert ([b"rows", b"rows"], [b"rows"]) == heard
    assert (3, 2, []) == (node.num_rows, node.num_again, node.refused)


@pytest.mark.parametrize(
    ("values", "grown"),
    [([5.0] * 9, 0.0), ([0.0, 1.0, 2.0, 3.0], 3.0), ([3.0, 1.0, 3.0, 1.0, 3.0], 0.0), ([1.0], 0.0)],
)
def test_growth_is_what_a_line_through_the_values_rises_by(values, grown):
    assert grown == pytest.approx(growth(values), abs=1e-9)


def test_the_figures_are_of_what_was_seen_after_the_warm_up():
    seen = Seen(
        cpu=[(float(s), 9.0 if s < 5 else 10.0 + 0.5 * (s - 5)) for s in range(16)],
        resident=[100_000_000] * 8 + [200_000_000] * 8,
        queryable=[0.5] * 99 + [3.0],
        alerted=[0.25] * 100,
        stored_share=0.99,
        outcome=OUTCOME,
    )
    figures = fleet.rows_of(Size(num_steps=16, num_probes=100), seen)
    cpu, replied, memory, queryable, alerted, lost = figures
    assert (50.0, False) == (cpu.ours, cpu.met)
    assert (0.03, True) == (replied.ours, replied.met)
    assert (pytest.approx(0.0), True) == (memory.ours, memory.met)
    assert (pytest.approx(0.525), True) == (queryable.ours, queryable.met)
    assert (0.25, True) == (alerted.ours, alerted.met)
    assert (0.0, True) == (lost.ours, lost.met)
    assert "4,096 ranks" in cpu.name
    assert "not answered" not in cpu.note


def test_the_cpu_of_a_collector_that_fell_behind_is_void():
    seen = Seen(
        cpu=[(float(s), float(s)) for s in range(8)],
        resident=[1] * 8,
        queryable=[0.5],
        alerted=[0.5],
        stored_share=0.5,
        outcome=OUTCOME,
    )
    cpu, *_ = fleet.rows_of(Size(num_steps=8, num_probes=1), seen)
    assert (None, None) == (cpu.ours, cpu.met)
    assert cpu.note.startswith("void, it fell behind: rows of 4.0 s were on")


@pytest.mark.slow
def test_a_small_fleet_goes_through_journals_agent_wire_collector_and_webhook(monkeypatch):
    monkeypatch.setattr(fleet, "_CONNECT_SECONDS", 2.0)
    rows = list(fleet.measure_size(Size(num_nodes=3, num_steps=8, num_probes=3)))
    _, replied, _, queryable, alerted, lost = rows
    assert all(0.0 < row.ours < fleet._GIVE_UP_SECONDS for row in (replied, queryable, alerted))
    assert 0 == lost.ours
