import random

import pytest

from tests.agent.builders import RUN, STEPS, rows_in
from tests.agent.stub_collector import StubCollector
from trainvitals.errors import FormatError, NewerVersionError, TransportError
from trainvitals.io.client import CollectorClient
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.backoff import Backoff
from vitals_agent.faults import Faults
from vitals_agent.shipper import Shipper


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


@pytest.fixture
def client(stub):
    with CollectorClient(stub.url, "token", timeout=5.0) as made:
        yield made


def shipped_steps(batches: list[bytes]) -> list[int]:
    rows = [row for _, stream, _, row in rows_in(batches) if stream == "steps"]
    return sorted(STEPS.unpack(row)["step"] for row in rows)


def test_what_is_spooled_is_shipped_and_then_let_go(world, stub, client):
    rank = world.rank()
    agent = world.agent(client=client)
    rank.step(0, 1, 2)
    agent.cycle(0.0)
    assert [0, 1, 2] == shipped_steps(stub.batches)
    assert [] == agent.runs[RUN].spool.pending(1)
    assert agent.shipper.drained(RUN)


def test_while_the_collector_is_away_rows_wait_and_then_come_once_each(world, stub, client):
    rank = world.rank()
    agent = world.agent(client=client)
    rank.step(0)
    agent.cycle(0.0)
    stub.close()
    for number in range(1, 20):
        rank.step(number)
        agent.cycle(float(number))
    assert not agent.drained
    assert 1 <= agent.shipper.num_errors < 19  # it backs off: not one try a cycle
    stub.open()
    agent.cycle(100.0)
    assert list(range(20)) == shipped_steps(stub.batches)
    assert [1] * 20 == [
        count for (_, stream, _, _), count in rows_in(stub.batches).items() if stream == "steps"
    ]
    assert [] == agent.runs[RUN].spool.pending(1)


def test_training_data_is_safe_before_the_collector_has_it(world, stub, client):
    stub.failing = True
    rank = world.rank()
    rank.step(*range(10))
    agent = world.agent(client=client)
    agent.cycle(0.0)
    assert list(range(10)) == world.steps()
    assert [] == stub.batches


def test_rows_that_are_stored_but_not_durable_are_not_let_go(world, stub, client):
    stub.durable = False
    rank = world.rank()
    agent = world.agent(client=client)
    rank.step(0, 1)
    agent.cycle(0.0)
    agent.cycle(0.5)
    assert 0 < len(agent.runs[RUN].spool.pending(100))
    assert not agent.shipper.drained(RUN)
    num_before = len(stub.batches)
    stub.durable = True
    agent.cycle(1.5)  # nothing new: it asks with a batch the store knows already
    assert num_before < len(stub.batches)
    assert [] == agent.runs[RUN].spool.pending(1)
    assert agent.shipper.drained(RUN)


def test_an_agent_that_is_restarted_ships_what_was_not_acknowledged(world, stub, client):
    stub.failing = True
    rank = world.rank()
    first = world.agent(client=client)
    rank.step(0, 1)
    first.cycle(0.0)
    first.stop()
    stub.failing = False
    rank.step(2)
    world.agent(client=client).cycle(0.0)
    assert [0, 1, 2] == shipped_steps(stub.batches)


def test_rows_acknowledged_and_freed_before_a_restart_are_not_sent_again_nor_called_lost(
    world, stub, client
):
    rank = world.rank()
    first = world.agent(client=client)
    rank.step(0, 1)
    first.cycle(0.0)
    first.stop()
    stub.batches.clear()
    rank.step(2)
    again = world.agent(client=client)
    again.cycle(0.0)
    assert [2] == shipped_steps(stub.batches)
    assert 0 == again.runs[RUN].num_dropped


def test_a_run_that_ended_while_the_collector_was_away_is_shipped_by_the_next_agent(
    world, stub, client
):
    rank = world.rank()
    rank.step(0, 1)
    rank.close()
    alone = world.agent()
    alone.cycle(0.0)
    alone.stop()
    later = world.agent(client=client)
    later.cycle(0.0)
    assert [0, 1] == shipped_steps(stub.batches)
    assert [0, 1] == world.steps()  # it may be the run's only history


def test_a_batch_that_the_collector_refuses_is_counted_and_does_not_hold_up_the_rest(
    world, stub, client
):
    rank = world.rank()
    agent = world.agent(client=client)
    stub.refusing = True
    rank.step(0)
    agent.cycle(0.0)
    stub.refusing = False
    rank.step(1)
    agent.cycle(0.5)
    assert [1] == shipped_steps(stub.batches)
    assert agent.shipper.num_refused_rows > 0
    assert agent.drained is False  # the rank lives
    assert agent.shipper.drained(RUN)


class Scripted:
    """A client that answers from a list: an error to raise, or how far all is durable."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.seen: list[int] = []

    def ingest(self, raw: bytes) -> IngestReply:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.seen.append(decode_batch(raw).header.first_seq)
        return IngestReply(durable_seq=answer, num_new=1, num_duplicate=0)


def make_shipper(client) -> Shipper:
    backoff = Backoff(first_seconds=1.0, rng=random.Random(1))
    return Shipper(client, backoff=backoff, faults=Faults(), stopwatch=lambda: 0.0)


def spool_with(world, *steps: int):
    """A spool that holds one batch for each step, and its steps' sequence numbers from 0."""
    rank = world.rank()
    agent = world.agent(sample_seconds=1e9)
    agent.cycle(0.0)
    for step in steps:
        rank.step(step)
        agent.cycle(0.0)
    agent.stop()
    from trainvitals.io.spool import Spool

    spool = Spool(world.spool(), max_bytes=1 << 20, keep=False)
    while decode_batch(spool.pending(1)[0][1]).header.stream != "steps":
        spool.ack(spool.pending(1)[0][0])
    return spool


def test_only_the_part_below_durable_seq_is_let_go(world):
    spool = spool_with(world, 0, 1, 2)
    shipper = make_shipper(Scripted(-1, 0, 1))
    shipper.ship(RUN, spool, 0.0)
    assert [2] == [decode_batch(raw).header.first_seq for _, raw in spool.pending(9)]
    spool.close()


def test_after_a_failure_the_batch_is_sent_again_and_not_passed_over(world):
    spool = spool_with(world, 0, 1)
    client = Scripted(0, TransportError("away"), 1)
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    shipper.ship(RUN, spool, 100.0)
    assert [0, 1] == client.seen
    assert [] == spool.pending(1)
    spool.close()


def test_a_collector_too_old_for_a_batch_gets_it_again_when_it_is_upgraded(world):
    spool = spool_with(world, 0)
    shipper = make_shipper(Scripted(NewerVersionError("newer"), 0))
    shipper.ship(RUN, spool, 0.0)
    assert 1 == shipper.num_errors
    shipper.ship(RUN, spool, 100.0)
    assert ([], 0) == (spool.pending(1), shipper.num_refused_rows)
    spool.close()


def test_refused_rows_are_passed_over_in_their_order(world):
    spool = spool_with(world, 0, 1, 2)
    shipper = make_shipper(Scripted(-1, FormatError("damaged"), -1, 2))
    shipper.ship(RUN, spool, 0.0)
    assert 3 == len(spool.pending(9))
    shipper.ship(RUN, spool, 2.0)
    assert [] == spool.pending(9)
    spool.close()
