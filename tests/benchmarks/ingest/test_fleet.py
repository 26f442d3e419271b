"""The simulated fleet: its driver's connections, its figures, and a small one all the way."""

import pytest

from vitals_bench.ingest import fleet
from vitals_bench.ingest.driver import Node, Outcome
from vitals_bench.ingest.fleet import Seen, Size, growth

OUTCOME = Outcome(
    num_rows=9,
    num_posts=3,
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
        self.written.append(data)


def answer(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def node():
    made = Node("POST / HTTP/1.1\r\n")
    made.connection_made(Transport())
    return made


def test_while_a_node_waits_for_its_answer_the_next_bodies_gather_and_go_together(node):
    for body in (b"one", b"two", b"three"):
        node.post(body)
    assert [b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\none"] == node.transport.written
    node.data_received(answer(b'[{"durable_seq":0,"num_new":8,"num_duplicate":0}]'))
    assert b"POST / HTTP/1.1\r\nContent-Length: 8\r\n\r\ntwothree" == node.transport.written[1]
    assert (8, False) == (node.num_rows, node.is_done)
    node.data_received(answer(b'[{"durable_seq":0,"num_new":16,"num_duplicate":0}]'))
    assert (24, True, 2, []) == (node.num_rows, node.is_done, len(node.times), node.refused)


def test_an_answer_may_come_in_pieces(node):
    node.post(b"one")
    whole = answer(b'[{"durable_seq":0,"num_new":8,"num_duplicate":0}]')
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
    node.post(b"three")
    node.connection_lost(None)
    assert ['{"text":"no token"}', "torn", "connection lost: None"] == node.refused


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
