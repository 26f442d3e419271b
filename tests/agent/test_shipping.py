import random
from functools import partial

import pytest

from tests.agent.builders import OTHER_RUN, RUN, STEPS, rows_in
from tests.agent.stub_collector import StubCollector
from tests.collector.rows import Writer
from trainvitals.alerting import alerts_for_finding
from trainvitals.catalog import NODE_SCHEMA
from trainvitals.errors import FormatError, NewerVersionError, TransportError
from trainvitals.io.client import CollectorClient
from trainvitals.io.discovery import AWAY_FILE
from trainvitals.io.spool import Spool
from trainvitals.records import Finding, FindingRaised, decode_events
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.backoff import BacklogRateLimit, Backoff
from vitals_agent.faults import Faults
from vitals_agent.shipper import MAX_TRIES, Shipper


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


@pytest.fixture
def client(stub):
    with CollectorClient(stub.url, "token", timeout=60.0) as made:
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
    num_before = len(stub.requests)
    stub.durable = True
    agent.cycle(1.5)  # nothing new: it asks with a batch the store knows already
    assert num_before < len(stub.requests)
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
    rank.step(1)
    for second in (1.0, 3.0, 7.0, 15.0):
        assert 0 == agent.shipper.num_refused_rows
        agent.cycle(second)
    stub.refusing = False
    rank.step(2)
    agent.cycle(16.0)
    agent.cycle(40.0)
    assert [2] == [step for step in shipped_steps(stub.batches) if step > 1]
    assert agent.shipper.num_refused_rows > 0
    assert agent.drained is False  # the rank lives
    assert agent.shipper.drained(RUN)


ASKS_FROM_0, ASKS_FROM_1 = (
    IngestReply(durable_seq=seq - 1, num_new=0, num_duplicate=0, from_seq=seq) for seq in (0, 1)
)
KNOWN = IngestReply(durable_seq=0, num_new=0, num_duplicate=1)


class Scripted:
    """A client that answers requests from a list: an error to raise, or one answer for each batch.

    That it is shown a batch of another stream, which it acknowledged before, takes no answer.

    An answer is how far the batch's stream is durable, or the code of a refusal.
    """

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.seen: list[list[int]] = []

    def ingest_all(
        self, raws: list[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> list[IngestReply]:
        header = decode_batch(raws[0]).header
        if header.stream != "steps":
            return [IngestReply(durable_seq=header.last_seq, num_new=0, num_duplicate=1)]
        self.seen.append([decode_batch(raw).header.first_seq for raw in raws])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert len(raws) == len(answer)
        return [
            one
            if isinstance(one, IngestReply)
            else IngestReply(durable_seq=-1, num_new=0, num_duplicate=0, code=one, text="refused")
            if isinstance(one, str)
            else IngestReply(durable_seq=one, num_new=1, num_duplicate=0)
            for one in answer
        ]


def make_shipper(client, new_pace=BacklogRateLimit) -> Shipper:
    backoff = Backoff(first_seconds=1.0, rng=random.Random(1))
    return Shipper(
        client, backoff=backoff, faults=Faults(), new_pace=new_pace, stopwatch=lambda: 0.0
    )


def spool_with(world, *steps: int):
    """A spool that holds one batch for each step, and its steps' sequence numbers from 0."""
    rank = world.rank()
    agent = world.agent(sample_seconds=1e9)
    agent.cycle(0.0)
    for step in steps:
        rank.step(step)
        agent.cycle(0.0)
    agent.stop()
    spool = Spool(world.spool(), max_bytes=1 << 20, keep=False)
    while decode_batch(spool.pending(1)[0][1]).header.stream != "steps":
        spool.ack(spool.pending(1)[0][0])
    return spool


def test_only_the_part_below_durable_seq_is_let_go(world):
    spool = spool_with(world, 0, 1, 2)
    shipper = make_shipper(Scripted([-1, 0, 1]))
    shipper.ship(RUN, spool, 0.0)
    assert [2] == [decode_batch(raw).header.first_seq for _, raw in spool.pending(9)]
    spool.close()


def test_after_a_failure_the_batch_is_sent_again_and_not_passed_over(world):
    spool = spool_with(world, 0, 1)
    client = Scripted(TransportError("away"), [0, 1])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    assert not shipper.drained(RUN)
    shipper.ship(RUN, spool, 100.0)
    assert [[0, 1], [0, 1]] == client.seen
    assert [] == spool.pending(1)
    spool.close()


def test_a_collector_too_old_for_a_batch_gets_it_again_when_it_is_upgraded(world):
    spool = spool_with(world, 0)
    shipper = make_shipper(Scripted(NewerVersionError("newer"), [0]))
    shipper.ship(RUN, spool, 0.0)
    assert 1 == shipper.num_errors
    shipper.ship(RUN, spool, 100.0)
    assert ([], 0) == (spool.pending(1), shipper.num_refused_rows)
    spool.close()


def test_refused_rows_are_passed_over_in_their_order(world):
    spool = spool_with(world, 0, 1, 2)
    client = Scripted([0, "V200", ASKS_FROM_1], *[["V200"]] * (MAX_TRIES - 1), [2])
    shipper = make_shipper(client)
    for second in (0.0, 1.0, 3.0, 7.0, 15.0):
        assert (0, False) == (shipper.num_refused_rows, shipper.drained(RUN))
        shipper.ship(RUN, spool, second)
    assert [[0, 1, 2], [1], [1], [1], [1], [2]] == client.seen
    assert ([], 1) == (spool.pending(9), shipper.num_refused_rows)
    assert shipper.drained(RUN)
    spool.close()


def test_a_batch_that_was_damaged_on_its_way_comes_again_before_what_follows_it(world):
    spool = spool_with(world, 0, 1, 2)
    client = Scripted(["V230", ASKS_FROM_0, ASKS_FROM_0], [0], [1, 2])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    shipper.ship(RUN, spool, 0.5)
    assert [[0, 1, 2]] == client.seen
    shipper.ship(RUN, spool, 1.0)
    assert [[0, 1, 2], [0], [1, 2]] == client.seen
    assert ([], 0, 1) == (spool.pending(9), shipper.num_refused_rows, shipper.num_resent_batches)
    spool.close()


@pytest.mark.parametrize(
    "code", ["V230", "V240", "V241"], ids=["damage on its way", "a wrong token", "a wrong key"]
)
def test_a_batch_is_never_given_up_for_what_may_pass(world, code: str):
    spool = spool_with(world, 0)
    client = Scripted(*[[code]] * (3 * MAX_TRIES), [0])
    shipper = make_shipper(client)
    for number in range(3 * MAX_TRIES):
        shipper.ship(RUN, spool, 100.0 * number)
    assert (1, 0) == (len(spool.pending(9)), shipper.num_refused_rows)
    shipper.ship(RUN, spool, 1e5)
    assert [] == spool.pending(9)
    spool.close()


def test_where_all_are_refused_each_is_tried_alone(world):
    spool = spool_with(world, 0, 1, 2)
    client = Scripted(FormatError("too large together"), [0], FormatError("wrong"), [1], [2])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    shipper.ship(RUN, spool, 1.0)
    assert [[0, 1, 2], [0], [1], [1], [2]] == client.seen
    assert ([], 0, 0) == (spool.pending(9), shipper.num_refused_rows, shipper.num_errors)
    assert shipper.drained(RUN)
    spool.close()


def test_a_hole_of_which_nothing_is_there_any_more_is_passed_over_without_asking_twice(world):
    spool = spool_with(world, 0, 1)
    client = Scripted([ASKS_FROM_0, ASKS_FROM_0], [ASKS_FROM_0, 1], [0])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    shipper.ship(RUN, spool, 1.0)
    assert [[0, 1], [0, 1], [0]] == client.seen
    assert [] == spool.pending(9)
    spool.close()


def test_a_batch_that_is_too_new_beside_others_waits_and_what_was_before_it_is_let_go(world):
    spool = spool_with(world, 0, 1, 2)
    client = Scripted([0, "V210", 2], [KNOWN], [1, 2])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    assert (2, 1, 0) == (len(spool.pending(9)), shipper.num_errors, shipper.num_refused_rows)
    shipper.ship(RUN, spool, 100.0)
    assert [[0, 1, 2], [0], [1, 2]] == client.seen  # is it there that was acknowledged?
    assert [] == spool.pending(9)
    spool.close()


def test_what_was_stored_but_not_durable_is_sent_again_after_a_failure(world):
    spool = spool_with(world, 0, 1)
    client = Scripted([-1, -1], TransportError("it died"), [1, 1])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    shipper.ship(RUN, spool, 2.0)  # asks how far it is durable, and finds nobody there
    shipper.ship(RUN, spool, 100.0)
    assert [[0, 1], [0], [0, 1]] == client.seen
    assert [] == spool.pending(9)
    spool.close()


def test_what_a_full_spool_dropped_on_the_way_is_not_waited_for(world):
    spool = spool_with(world, 0, 1)
    shipper = make_shipper(Scripted([-1, -1]))
    shipper.ship(RUN, spool, 0.0)
    spool.ack(spool.pending(9)[-1][0])  # as if it had been dropped
    shipper.ship(RUN, spool, 2.0)
    assert shipper.drained(RUN)
    spool.close()


def test_a_backlog_travels_in_requests_of_bounded_size(world, monkeypatch):
    spool = spool_with(world, *range(7))
    monkeypatch.setattr("vitals_agent.shipper.MAX_REQUEST_BATCHES", 3)
    client = Scripted([2] * 3, [5] * 3, [6])
    shipper = make_shipper(client)
    shipper.ship(RUN, spool, 0.0)
    assert [[0, 1, 2], [3, 4, 5], [6]] == client.seen
    spool.close()


def test_a_slow_collector_gets_smaller_requests(world):
    spool = spool_with(world, *range(5))
    size = len(spool.pending(1)[0][1])
    client = Scripted([1] * 2, [3] * 2, [4])
    shipper = make_shipper(
        client, partial(BacklogRateLimit, slowest=2.5 * size, fastest=2.5 * size)
    )
    for second in range(4):
        shipper.ship(RUN, spool, 100.0 + second)
    assert [[0, 1], [2, 3], [4]] == client.seen
    spool.close()


def test_a_backlog_is_sent_no_faster_than_its_pace(world, monkeypatch):
    spool = spool_with(world, *range(4))
    monkeypatch.setattr("vitals_agent.shipper.MAX_REQUEST_BATCHES", 1)
    client = Scripted([0], [1], [2], [3])
    size = len(spool.pending(1)[0][1])
    shipper = make_shipper(client, partial(BacklogRateLimit, slowest=size, fastest=size))
    sent = []
    for second in range(5):
        shipper.ship(RUN, spool, 100.0 + second)
        sent.append(len(client.seen))
    assert [2, 3, 4, 4, 4] == sent
    assert shipper.drained(RUN)
    spool.close()


def test_a_collector_that_asks_to_be_left_alone_is(world, stub, client):
    rank = world.rank()
    agent = world.agent(client=client)
    stub.failing = True
    stub.retry_after = 40
    rank.step(0)
    agent.cycle(0.0)
    stub.failing = False
    agent.cycle(39.0)
    assert 1 == sum(path == "/v1/ingest" for _, path in stub.requests)
    assert [] == stub.batches
    agent.cycle(81.0)
    assert [0] == shipped_steps(stub.batches)


# -------------------------------------------------------------- what an ended run left on the node


def left_behind(world, stub, client, **config) -> None:
    """Have a run end here with rows that its agent could not send."""
    stub.failing = True
    rank = world.rank(run_id=OTHER_RUN, pid=0)
    rank.step(0, 1, 2)
    rank.close()
    first = world.agent(client=client, run_id=OTHER_RUN, start=False, **config)
    first.start()
    first.cycle(0.0)
    first.stop()
    stub.failing = False


BOUND = {"collector": "http://c:1", "takes_over": True}


def test_the_agent_of_a_later_run_sends_what_an_ended_one_left_once(world, stub, client):
    left_behind(world, stub, client, **BOUND)
    world.rank()
    for _ in range(2):
        agent = world.agent(client=client, run_id=RUN, start=False, **BOUND)
        agent.start()
        for now in range(3):
            agent.cycle(float(now))
        agent.stop()
    assert [0, 1, 2] == shipped_steps(stub.batches)


def test_what_ended_during_an_outage_is_looked_for_once_the_collector_is_back(world, stub, client):
    rank = world.rank()
    rank.step(6)
    agent = world.agent(client=client, run_id=RUN, **BOUND)
    agent.cycle(0.0)
    left_behind(world, stub, client, **BOUND)
    agent.cycle(61.0)
    assert [RUN] == list(agent.runs)
    stub.failing = True
    rank.step(7)
    agent.cycle(62.0)
    stub.failing = False
    for now in (130.0, 131.0, 132.0):
        agent.cycle(now)
    assert [0, 1, 2, 6, 7] == shipped_steps(stub.batches)


@pytest.mark.parametrize("collector", ["http://c:1", "http://d:1"])
def test_what_was_meant_for_this_collector_is_no_history_once_it_has_it(
    world, stub, client, collector
):
    left_behind(world, stub, client, **BOUND)
    agent = world.agent(client=client, collector=collector, keeps_history=False)
    agent.cycle(0.0)
    assert (collector != BOUND["collector"]) == agent.runs[OTHER_RUN].keeps_history


@pytest.mark.parametrize("other", [{"collector": "http://d:1"}, {"takes_over": False}])
def test_what_is_for_another_collector_or_not_asked_for_is_left_alone(world, stub, client, other):
    left_behind(world, stub, client, **BOUND)
    agent = world.agent(client=client, run_id=RUN, **{**BOUND, **other})
    agent.cycle(0.0)
    assert [] == shipped_steps(stub.batches)
    assert [] == list(agent.runs)


def test_a_run_with_a_living_rank_is_left_to_its_own_agent(world, stub, client):
    left_behind(world, stub, client, **BOUND)
    world.rank(1, run_id=OTHER_RUN)
    agent = world.agent(client=client, run_id=RUN, **BOUND)
    agent.cycle(0.0)
    assert [] == list(agent.runs)


def test_rows_that_no_agent_came_to_copy_are_taken_up_with_the_run(world, stub, client):
    left_behind(world, stub, client, **BOUND)
    killed = world.rank(1, run_id=OTHER_RUN, pid=0)
    killed.step(3, 4)
    agent = world.agent(client=client, run_id=RUN, **BOUND)
    for now in range(3):
        agent.cycle(float(now))
    assert [0, 1, 2, 3, 4] == shipped_steps(stub.batches)


def test_a_run_that_never_saw_a_collector_nobody_named_is_for_none(world, stub, client):
    unnamed = {**BOUND, "is_collector_named": False}
    stub.failing = True
    rank = world.rank(run_id=OTHER_RUN, pid=0)
    rank.step(0)
    rank.close()
    first = world.agent(client=client, run_id=OTHER_RUN, reachable=lambda now: False, **unnamed)
    first.cycle(0.0)
    assert "" == first.runs[OTHER_RUN].state_dir.destination()


def test_while_the_collector_is_away_a_file_in_memory_says_so(world, stub, client):
    stub.failing = True
    world.rank().step(0)
    agent = world.agent(client=client, run_id=RUN, **BOUND)
    note = world.base / RUN / AWAY_FILE
    agent.cycle(0.0)
    agent.cycle(1.0)
    assert "http://c:1" == note.read_text()
    stub.failing = False
    agent.cycle(100.0)
    agent.cycle(101.0)
    assert not note.exists()


# ------------------------------------------------------------- what nobody can have been sent


NODE_ROWS = [[0, 0, 0, 0, *[None] * (len(NODE_SCHEMA.columns) - 4)]]


class Store:
    """A client that stores everything; a forged row puts a stream far ahead of its writer."""

    def __init__(self) -> None:
        self.durable: dict[str, int] = {}
        self.sent: list[tuple[str, int]] = []
        self.codes: dict[str, str] = {}
        """Codes that batches of a stream are refused with."""

    def ingest_all(
        self, raws: list[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> list[IngestReply]:
        headers = [decode_batch(raw).header for raw in raws]
        for header in headers:
            self.sent.append((header.stream, header.first_seq))
            if header.stream in self.codes:
                continue
            newest = max(self.durable.get(header.stream, -1), header.last_seq)
            self.durable[header.stream] = newest
        return [
            IngestReply(durable_seq=-1, num_new=0, num_duplicate=0, code=code, text=code)
            if (code := self.codes.get(h.stream))
            else IngestReply(
                durable_seq=self.durable[h.stream], num_new=h.num_rows, num_duplicate=0
            )
            for h in headers
        ]


@pytest.fixture
def doubted(tmp_path):
    """A spool, its writer, a store and a shipper that sent two rows of steps and one of a node."""
    writer, spool = Writer(), Spool(tmp_path / "spool", max_bytes=1 << 20, keep=False)
    client, told = Store(), []
    backoff = Backoff(first_seconds=1.0, rng=random.Random(1))
    shipper = Shipper(
        client,
        backoff=backoff,
        faults=Faults(),
        stopwatch=lambda: 0.0,
        on_stopped=lambda key, text: told.append((key[2], text)),
    )
    shipper.ship(RUN, spool, 0.0)  # from here on it knows all that was ever sent
    spool.append(writer.steps([0, 1]))
    spool.append(writer.batch(NODE_SCHEMA, NODE_ROWS))
    spool.sync()
    shipper.ship(RUN, spool, 0.0)
    assert [] == spool.pending(1)
    yield writer, spool, client, shipper, told
    spool.close()


def test_an_acknowledgement_beyond_all_that_was_written_stops_that_stream_alone(doubted):
    writer, spool, client, shipper, told = doubted
    client.durable["steps"] = 1_000_000
    for second in range(1, 10):
        spool.append(writer.steps([1 + second]))
        spool.append(writer.batch(NODE_SCHEMA, NODE_ROWS))
        spool.sync()
        shipper.ship(RUN, spool, float(second))
    assert list(range(10)) == [seq for stream, seq in client.sent if stream == "node"]
    assert {2} == {seq for stream, seq in client.sent[2:] if stream == "steps"}
    assert not shipper.drained(RUN)
    assert 0 == shipper.num_errors
    kept = [decode_batch(raw).header for _, raw in spool.pending(99)]
    assert list(range(2, 11)) == [header.first_seq for header in kept if header.stream == "steps"]
    assert {"steps"} == {stream for stream, _ in told}
    assert "acknowledges rows of steps up to 1000000, and there are none after 2" in told[0][1]
    assert 3 == len(told), "at the 1st, 2nd and 4th try, not each time"


def test_a_stream_that_is_not_doubted_any_more_goes_on_where_it_stopped(doubted):
    writer, spool, client, shipper, _ = doubted
    client.durable["steps"] = 1_000_000
    for second in range(1, 6):
        spool.append(writer.steps([1 + second]))
        spool.sync()
        shipper.ship(RUN, spool, float(second))
    client.durable["steps"] = 1
    client.sent.clear()
    shipper.ship(RUN, spool, 100.0)
    assert list(range(2, 7)) == [seq for _, seq in client.sent]
    assert [] == spool.pending(1)
    assert shipper.drained(RUN)


def test_a_stream_with_another_writer_key_is_reported_at_once_and_others_continue(doubted):
    writer, spool, client, shipper, told = doubted
    client.codes["steps"] = "V241"
    for step in range(2, 5):
        spool.append(writer.steps([step]))
        spool.append(writer.batch(NODE_SCHEMA, NODE_ROWS))
        spool.sync()
        shipper.ship(RUN, spool, 0.5 * step)
    assert [("steps", "V241")] == told[:1]
    assert ("node", 3) == client.sent[-1]
    client.codes.clear()
    shipper.ship(RUN, spool, 100.0)
    shipper.ship(RUN, spool, 101.0)
    assert (4, []) == (client.durable["steps"], spool.pending(1))


def test_a_stream_that_stays_stopped_never_fills_the_window_of_the_others(doubted, monkeypatch):
    writer, spool, client, shipper, _ = doubted
    monkeypatch.setattr("vitals_agent.shipper.MAX_UNACKED_BATCHES", 8)
    client.durable["steps"] = 1_000_000
    for second in range(1, 40):
        spool.append(writer.steps([1 + second]))
        spool.append(writer.batch(NODE_SCHEMA, NODE_ROWS))
        spool.sync()
        shipper.ship(RUN, spool, float(second))
    assert 39 == client.durable["node"]


def test_what_an_agent_before_sent_and_its_disk_lost_is_no_forgery_but_bounds_what_follows(
    tmp_path,
):
    writer, spool = Writer(), Spool(tmp_path / "spool", max_bytes=1 << 20, keep=False)
    spool.append(writer.steps([0, 1]))
    spool.sync()
    shipper = make_shipper(Scripted([7], [8]))
    shipper.ship(RUN, spool, 0.0)
    assert [] == spool.pending(1)
    spool.append(writer.steps([2, 3]))
    spool.sync()
    shipper.ship(RUN, spool, 100.0)
    assert 1 == len(spool.pending(9))
    assert not shipper.drained(RUN)
    spool.close()


def test_a_stopped_stream_is_reported_as_a_finding_of_its_rank(world, stub, client):
    rank = world.rank()
    agent = world.agent(client=client)
    rank.step(0)
    agent.cycle(0.0)
    key = (RUN, rank.identity.incarnation, "steps")
    agent.shipper._on_stopped(key, "the collector acknowledges rows that nobody wrote")
    agent.cycle(1.0)
    (finding,) = findings_in(stub.batches)
    assert ("stream_stopped", 0, "steps") == (finding.kind, finding.rank, finding.cause)
    assert finding.reason.startswith("rank:0 on node-a: the collector acknowledges")
    assert ["StreamStopped"] == [a.name for a in alerts_for_finding(finding, run_id=RUN)]


def test_a_report_about_the_nodes_own_stream_does_not_wait_behind_it(world, stub, client):
    world.rank()
    agent = world.agent(client=client)
    agent.cycle(0.0)
    own = agent.runs[RUN].node_source.identity.incarnation
    agent.shipper._on_stopped((RUN, own, "events"), "refused")
    agent.cycle(1.0)
    last = decode_batch(stub.batches[-1]).header
    assert own != last.identity.incarnation
    assert ["stream_stopped"] == [finding.kind for finding in findings_in(stub.batches)]


def findings_in(raws: list[bytes]) -> list[Finding]:
    batches = [batch for raw in raws if (batch := decode_batch(raw)).header.stream == "events"]
    events = [row.event for b in batches for row in decode_events(b.header.stream_schema, b.rows)]
    return [event.finding for event in events if isinstance(event, FindingRaised)]
