import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from tests.agent.builders import RUN
from tests.agent.stub_collector import StubCollector
from tests.support.agent_clients import patient_client
from trainvitals.errors import ForeignBatchError, TransportError, UsageError
from trainvitals.io.client import CollectorAddress, CollectorTokens
from trainvitals.views import CommandsQuestion
from vitals_agent.collector_endpoint import (
    LOOK_SECONDS,
    AgentClient,
    CollectorEndpoint,
    make_collector_finder,
)


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


def address_file(data, url: str, **fields) -> None:
    data.mkdir(exist_ok=True)
    found = {"url": url, "pid": os.getpid(), "node": socket.gethostname()} | fields
    (data / "collector.json").write_text(json.dumps(found))
    (data / "collector.json").chmod(stat.S_IRUSR | stat.S_IWUSR)


def tokens_file(data, **tokens: str) -> None:
    (data / "tokens.json").write_text(json.dumps(tokens))
    (data / "tokens.json").chmod(stat.S_IRUSR | stat.S_IWUSR)


def test_a_collector_that_comes_later_gets_everything(world, stub, tmp_path):
    world.rank().step(0)
    link = CollectorEndpoint(
        make_collector_finder(str(tmp_path / "data"), None, {}), connect=patient_client
    )
    agent = world.agent(client=link, reachable=link.reachable)
    agent.cycle(0.0)
    assert ({}, 0) == (agent.faults.counts, agent.shipper.num_errors)
    address_file(tmp_path / "data", stub.url)
    agent.cycle(LOOK_SECONDS)
    assert stub.batches
    link.close()


def test_a_collector_that_came_back_at_another_port_is_found_again(world, stub, tmp_path):
    rank = world.rank()
    rank.step(0)
    address_file(tmp_path, stub.url)
    link = CollectorEndpoint(make_collector_finder(str(tmp_path), None, {}), connect=patient_client)
    agent = world.agent(client=link, reachable=link.reachable)
    agent.cycle(0.0)
    num_before = len(stub.batches)
    stub.close()
    rank.step(1)
    agent.cycle(10.0)
    assert 1 == agent.shipper.num_errors
    stub.port = 0
    stub.open()
    address_file(tmp_path, stub.url)
    agent.cycle(100.0)
    assert len(stub.batches) > num_before
    assert agent.io_loop.drained(agent.runs[RUN])
    link.close()


def test_a_token_that_was_renewed_is_read_again(tmp_path, stub):
    address_file(tmp_path, stub.url)
    tokens_file(tmp_path, ingest="old")
    find = make_collector_finder(str(tmp_path), None, {})
    assert CollectorAddress(url=stub.url, tokens=CollectorTokens(ingest="old")) == find()
    tokens_file(tmp_path, ingest="new")
    assert "new" == find().tokens.ingest


def test_it_is_looked_for_only_while_it_is_in_doubt_and_not_at_every_turn(stub):
    looked = []

    def find():
        looked.append(1)
        return CollectorAddress(url=stub.url)

    link = CollectorEndpoint(find, connect=patient_client)
    assert link.reachable(0.0)
    link.ask(CommandsQuestion(run_id=RUN, status="pending"))
    assert all(link.reachable(float(now)) for now in range(1, 60))
    assert 1 == len(looked)
    stub.close()
    with pytest.raises(TransportError):
        link.ask(CommandsQuestion(run_id=RUN, status="pending"))
    assert all(link.reachable(now / 2) for now in range(120, 141))
    assert 1 + 3 == len(looked)
    link.close()


def test_a_token_of_another_run_is_read_again_until_it_is_the_right_one(tmp_path, stub):
    address_file(tmp_path, stub.url)
    tokens_file(tmp_path, ingest="of another run")

    class Client:
        def __init__(self, address: CollectorAddress) -> None:
            self.token = address.tokens.ingest

        def ingest_all(self, raws, *, asks: bool = False, writer_key: str = ""):
            if self.token != "the right one":
                raise ForeignBatchError("the batch is of another run")
            return ()

        def close(self) -> None:
            """Do nothing."""

    link = CollectorEndpoint(make_collector_finder(str(tmp_path), None, {}), connect=Client)
    assert link.reachable(0.0)
    with pytest.raises(ForeignBatchError):
        link.ingest_all([])
    tokens_file(tmp_path, ingest="the right one")
    assert link.reachable(10.0)
    assert () == link.ingest_all([])


def test_a_collector_that_is_gone_is_talked_to_no_more(tmp_path, stub):
    address_file(tmp_path, stub.url)
    link = CollectorEndpoint(make_collector_finder(str(tmp_path), None, {}), connect=patient_client)
    assert link.reachable(0.0)
    (tmp_path / "collector.json").unlink()
    stub.close()
    with pytest.raises(TransportError):
        link.ingest_all([])
    assert not link.reachable(10.0)
    with pytest.raises(TransportError, match="no collector is known"):
        link.mark_delivered(RUN, 1, "a" * 16)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_a_loopback_address_that_another_node_wrote_is_nobodys(tmp_path, url):
    address_file(tmp_path, url, node="another-node")
    assert make_collector_finder(str(tmp_path), None, {})() is None
    address_file(tmp_path, url)
    assert url == make_collector_finder(str(tmp_path), None, {})().url


def test_the_port_of_a_collector_that_is_dead_is_nobodys_either(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, 0, -1, 1 << 70):
        address_file(tmp_path, "http://127.0.0.1:1", pid=pid)
        assert make_collector_finder(str(tmp_path), None, {})() is None


def test_an_address_that_all_can_reach_is_taken_from_any_node(tmp_path):
    address_file(tmp_path, "https://collector.example:8470", node="another-node", pid=1 << 20)
    assert "https://collector.example:8470" == make_collector_finder(str(tmp_path), None, {})().url


def test_without_a_name_it_is_the_users_own(tmp_path):
    (tmp_path / "trainvitals").mkdir()
    address_file(tmp_path / "trainvitals", "http://127.0.0.1:1")
    find = make_collector_finder("", None, {"XDG_DATA_HOME": str(tmp_path)})
    assert "http://127.0.0.1:1" == find().url


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_file_that_is_torn_is_no_collector(tmp_path, text):
    (tmp_path / "collector.json").write_text(text)
    (tmp_path / "collector.json").chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert make_collector_finder(str(tmp_path), None, {})() is None


def test_where_one_of_several_collectors_is_dead_the_next_has_the_turn(world, stub):
    other, rank = StubCollector(), world.rank()
    rank.step(0)
    link = CollectorEndpoint(
        make_collector_finder(f"{stub.url}, {other.url}", None, {}), connect=patient_client
    )
    agent = world.agent(client=link, reachable=link.reachable)
    agent.cycle(0.0)
    assert stub.batches
    assert not other.batches
    stub.close()
    rank.step(1)
    agent.cycle(10.0)
    agent.cycle(20.0)
    agent.cycle(30.0)
    assert agent.io_loop.drained(agent.runs[RUN])
    assert other.batches
    link.close()
    other.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_the_agent_goes_to_the_collector_that_takes_its_run(world, stub, is_told):
    others = [StubCollector(), StubCollector()]
    owner = others[1]
    stub.owner = owner.url if is_told else ""
    others[0].owner = ""
    world.rank().step(0)
    urls = ",".join([stub.url, *(other.url for other in others)])
    link = CollectorEndpoint(make_collector_finder(urls, None, {}), connect=patient_client)
    agent = world.agent(client=link, reachable=link.reachable)
    agent.cycle(0.0)
    assert owner.batches
    assert 0 == agent.shipper.num_errors, "it was asked in the same call"
    assert is_told == (not others[0].requests)
    link.close()
    for other in others:
        other.close()


def test_where_every_collector_says_that_it_is_another_s_run_the_agent_keeps_it(world, stub):
    other = StubCollector()
    stub.owner, other.owner = other.url, "http://elsewhere.example:8470"
    world.rank().step(0)
    link = CollectorEndpoint(
        make_collector_finder(f"{stub.url},{other.url}", None, {}), connect=patient_client
    )
    agent = world.agent(client=link, reachable=link.reachable)
    agent.cycle(0.0)
    assert 1 == agent.shipper.num_errors
    stub.owner = other.owner = None
    for second in (10.0, 20.0):
        agent.cycle(second)
    assert agent.io_loop.drained(agent.runs[RUN])
    assert len(stub.batches) + len(other.batches) > 0
    link.close()
    other.close()


def test_runs_are_spread_over_the_addresses_and_all_agents_of_one_begin_at_the_same():
    urls = [f"https://127.0.0.1:{port}" for port in range(8470, 8474)]
    first = [
        make_collector_finder(",".join(urls), None, {}, run_id=f"run {i}")().url for i in range(200)
    ]
    assert all(30 <= first.count(url) <= 70 for url in urls)
    assert first[7] == make_collector_finder(",".join(urls), None, {}, run_id="run 7")().url


def test_each_of_several_addresses_has_to_be_one():
    with pytest.raises(UsageError, match="it must be https://host:port"):
        make_collector_finder("https://127.0.0.1:8470,nonsense", None, {})


def test_what_is_no_address_is_refused_at_once():
    with pytest.raises(UsageError, match="it must be https://host:port"):
        make_collector_finder("nonsense", None, {})


def test_a_run_directory_keeps_what_a_collector_that_was_found_has_too(world, stub):
    rank = world.rank()
    rank.step(0)
    link = CollectorEndpoint(lambda: CollectorAddress(url=stub.url), connect=patient_client)
    agent = world.agent(client=link, reachable=link.reachable, keeps_history=True)
    agent.cycle(0.0)
    assert agent.io_loop.drained(agent.runs[RUN])
    assert agent.runs[RUN].spool.keep
    assert [0] == world.steps()
    link.close()


def test_what_is_sent_ahead_takes_a_connection_of_its_own(world, stub, tmp_path):
    address_file(tmp_path, stub.url)
    link = CollectorEndpoint(make_collector_finder(str(tmp_path), None, {}), connect=patient_client)
    link.send_ahead([b"nobody is known"])
    assert not stub.batches
    link.reachable(0.0)
    client = link._client
    assert isinstance(client, AgentClient)
    world.rank().step(0)
    agent = world.agent()
    agent.run_once(0.0)
    raw = next(raw for _, raw in agent.runs[RUN].spool.read(agent.runs[RUN].spool.acked))
    with client._lock:  # as while an answer is waited for
        link.send_ahead([raw])
    assert [raw] == list(stub.batches)
    link.close()
