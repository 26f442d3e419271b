import pytest

from tests.agent.builders import RUN
from tests.agent.stub_collector import StubCollector
from tests.support.agent_clients import Stalled
from trainvitals.errors import TransportError
from trainvitals.io.client import CollectorClient
from trainvitals.records import Note, decode_events
from trainvitals.wire import decode_batch
from vitals_agent.io_loop import IoThread


@pytest.fixture
def stalled():
    made = Stalled()
    yield made
    made.go_on.set()


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


def test_while_the_collector_keeps_the_io_loop_waiting_journals_are_copied_and_ranks_buried(
    world, stalled
):
    rank, dead = world.rank(), world.rank(1, pid=0)
    rank.step(0)
    dead.step(0)
    agent = world.agent(client=stalled)
    agent.run_once(0.0)
    io_thread = IoThread(agent.io_loop, interval_seconds=0.0)
    assert stalled.asked.wait(20.0)
    rank.step(1, 2)
    agent.run_once(1.0)
    agent.run_once(2.0)
    assert [0, 1, 2] == world.steps()
    assert 1 == world.notes().count("rank_gone")
    assert not agent.drained
    stalled.go_on.set()
    assert io_thread.end(20.0)


def test_a_run_is_not_closed_under_the_io_loop_that_serves_it(world, stalled):
    rank = world.rank()
    rank.step(0)
    agent = world.agent(client=stalled)
    agent.run_once(0.0)
    io_thread = IoThread(agent.io_loop, interval_seconds=0.0)
    assert stalled.asked.wait(20.0)
    assert not io_thread.end(0.0)
    agent.stop()
    assert {RUN} == set(agent.runs)  # its lock ends with the process
    stalled.go_on.set()
    assert io_thread.end(20.0)
    agent.stop()
    assert {} == agent.runs


def test_what_is_written_after_a_delivery_is_not_called_drained(world, stub):
    rank = world.rank(1)
    rank.step(0)
    with CollectorClient(stub.url, timeout=60.0) as client:
        agent = world.agent(client=client)
        agent.cycle(0.0)
        run = agent.runs[RUN]
        assert agent.io_loop.drained(run)
        rank.step(1)
        agent.run_once(0.5)
        assert not agent.io_loop.drained(run)
        agent.io_loop.serve_runs(0.5)
        assert agent.io_loop.drained(run)


def test_a_run_that_was_let_go_and_taken_up_again_is_drained_anew(world, stub):
    rank = world.rank()
    rank.step(0)
    rank.close()
    with CollectorClient(stub.url, timeout=60.0) as client:
        agent = world.agent(client=client, retire_seconds=0.0)
        agent.cycle(0.0)
        agent.cycle(1.0)
        assert {} == agent.runs
        world.rank().step(1)
        agent.run_once(2.0)
        assert not agent.io_loop.drained(agent.runs[RUN])
        agent.io_loop.serve_runs(2.0)
        assert agent.io_loop.drained(agent.runs[RUN])


def test_without_a_collector_to_talk_to_everything_is_drained_and_nothing_is_tried(world, stub):
    world.rank().step(0)
    with CollectorClient(stub.url, timeout=60.0) as client:
        agent = world.agent(client=client, reachable=lambda now: now >= 10.0)
        agent.run_once(0.0)
        assert not agent.io_loop.drained(agent.runs[RUN])  # nobody has looked yet
        agent.io_loop.serve_runs(0.0)
        assert agent.io_loop.drained(agent.runs[RUN])
        assert [] == stub.requests
        agent.cycle(10.0)
        assert stub.batches


def test_runs_that_ended_before_a_collector_came_are_shipped_when_it_comes(world, stub):
    rank = world.rank()
    rank.step(0, 1)
    rank.close()
    alone = world.agent()
    alone.cycle(0.0)
    alone.stop()
    with CollectorClient(stub.url, timeout=60.0) as client:
        agent = world.agent(client=client, reachable=lambda now: 10.0 <= now < 1e6)
        agent.cycle(1.0)
        assert {} == agent.runs
        agent.cycle(10.0)
        agent.cycle(11.0)
        assert any(decode_batch(raw).header.stream == "steps" for raw in stub.batches)


def test_an_io_loop_that_fails_is_counted_and_turns_again(world):
    world.rank().step(0)
    agent = world.agent(client=Stalled(), reachable=lambda now: 1 / 0)
    agent.cycle(0.0)
    agent.cycle(1.0)
    assert agent.faults.counts["shipper"] >= 2
    assert [0] == world.steps()


def test_while_the_spool_waits_for_an_answer_events_are_sent_ahead_of_it(world, stalled):
    sent: list[bytes] = []
    rank, dead = world.rank(), world.rank(1, pid=0)
    rank.step(0)
    dead.step(0)
    agent = world.agent(client=stalled, ahead=lambda raws, key: sent.extend(raws))
    agent.run_once(0.0)
    io_thread = IoThread(agent.io_loop, interval_seconds=0.0)
    assert stalled.asked.wait(20.0)
    sent.clear()
    rank.step(1)
    agent.run_once(1.0)
    agent.run_once(2.0)
    assert 1 == world.notes().count("rank_gone")
    agent.ahead.send_pending()
    batches = [decode_batch(raw) for raw in sent]
    assert {"events"} == {batch.header.stream for batch in batches}
    notes = [row.event for b in batches for row in decode_events(b.header.stream_schema, b.rows)]
    assert "rank_gone" in [event.code for event in notes if isinstance(event, Note)]
    stalled.go_on.set()
    assert io_thread.end(20.0)


def test_events_that_cannot_be_sent_ahead_are_left_to_the_spool(world, stub):
    def refuse(raws, writer_key):
        raise TransportError("away")

    world.rank(1, pid=0).step(0)
    client = CollectorClient(stub.url, "token", timeout=60.0)
    agent = world.agent(client=client, ahead=refuse)
    for now in range(3):
        agent.run_once(float(now))
    agent.ahead.send_pending()
    agent.io_loop.serve_runs(3.0)
    assert 1 == agent.faults.counts["shipper.events"]
    assert "events" in {decode_batch(raw).header.stream for raw in stub.batches}
    client.close()
