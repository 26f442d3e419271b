"""Which agents the collector offers to Prometheus' service discovery, and to whom."""

import socket
import time

import httpx
import pytest
from sqlalchemy import case, update

from tests.agent.builders import OTHER_RUN, RUN, World
from tests.agent.conftest import world  # noqa: F401 - a fixture
from tests.collector.rows import SECOND, START, Writer
from tests.support.served import Served
from tests.support.two_nodes import TwoNodes
from trainvitals.errors import UnauthorizedError
from trainvitals.identity import safe_node_id
from trainvitals.io.client import CollectorClient
from trainvitals.records import RunEnded
from trainvitals.views import RunsQuestion
from vitals_agent.agent import Agent
from vitals_collector.api.discovery import AgentAddress, TargetGroup, scrapable, target_groups
from vitals_collector.queries.query import Query
from vitals_collector.storage.schema import sources

HERE = safe_node_id(socket.gethostname())


@pytest.fixture
def node(world: World, served: Served) -> World:  # noqa: F811 - the imported fixture
    """This machine, with an agent's rank to be."""
    world.clock.now_ns = time.time_ns()
    return world


def shipping(node: World, served: Served) -> Agent:
    """An agent of this machine that has shipped what its ranks wrote."""
    with served.client("ingest") as client:
        agent = node.agent(client=client, node=HERE, scrape_token=served.tokens.scrape)
        agent.cycle(0.0)
    return agent


def offered(served: Served, scope: str = "read") -> list[dict]:
    answer = served.request("GET", "/v1/sd/agents", scope)
    assert "application/json" == answer.headers["content-type"]
    return answer.json()


def test_an_agent_that_ships_is_offered_and_answers_there_with_the_agents_token(node, served):
    node.rank(node=HERE).step(0)
    agent = shipping(node, served)
    address = agent.info.url.removeprefix("http://")
    assert [{"targets": [address], "labels": {"node": HERE, "run": RUN}}] == offered(served)
    headers = {"Authorization": f"Bearer {served.tokens.scrape}"}
    page = httpx.get(f"http://{address}/metrics", headers=headers, trust_env=False)
    assert "agent_shipped_rows_total" in page.text
    client = CollectorClient(served.url, served.tokens.scrape)
    with client, pytest.raises(UnauthorizedError, match="not one of this collector's"):
        client.ask(RunsQuestion())


def test_an_agent_of_several_runs_is_one_target_without_a_run(node, served):
    for run in (RUN, OTHER_RUN):
        node.rank(node=HERE, run_id=run).step(0)
    shipping(node, served)
    (target,) = offered(served)
    assert {"node": HERE} == target["labels"]


def test_an_agent_that_was_silent_for_long_is_no_target_any_more(node, served):
    node.rank(node=HERE).step(0)
    shipping(node, served)
    long_ago = time.time_ns() - 3600 * 10**9
    with served.store.write() as connection:
        connection.execute(update(sources).values(last_received_unix_ns=long_ago))
    assert [] == offered(served)


def test_the_agent_of_a_run_that_is_over_is_no_target_any_more(node, served):
    rank = node.rank(node=HERE)
    rank.step(0)
    agent = shipping(node, served)
    assert 1 == len(offered(served))
    with served.client("ingest") as client:
        client.ingest(Writer(run=RUN, started=time.time_ns()).events(RunEnded(state="finished")))
    assert [] == offered(served)
    assert agent.info is not None


def test_an_agent_that_is_gone_stays_a_target_while_its_run_goes_on_and_misses_it(store):
    job = TwoNodes(store)
    job.pass_time(60)
    with store.write() as connection:
        url = "http://10.0.0." + case((sources.c.node == "node-a", "1"), else_="2") + ":9400"
        connection.execute(update(sources).values(metrics_url=url))
    job.pass_time(1_200, ranks=(0,), agents=(0,), every=20)
    assert {"node-a", "node-b"} == nodes_offered(job)
    job.pass_time(60)
    job.ranks[0] = Writer("rank:0", node="node-a", started=START + 1_300 * SECOND, world_size=1)
    job.pass_time(1_200, ranks=(0,), agents=(0,), every=20)
    assert {"node-a"} == nodes_offered(job)


def nodes_offered(job: TwoNodes) -> set[str]:
    query = Query(job.place.store, clock=job.place.clock)
    with job.place.store.read_transaction() as connection:
        return {agent.node for agent in scrapable(connection, query.liveness())}


def test_before_any_agent_ships_there_is_an_empty_list(served):
    assert [] == offered(served)


def test_what_listens_on_loopback_is_offered_on_its_own_machine_only():
    agents = [
        AgentAddress(RUN, "a", "http://127.0.0.1:9400"),
        AgentAddress(RUN, "b", "http://[::1]:9400"),
        AgentAddress(RUN, "c", "http://10.0.0.7:9400"),
    ]
    everywhere = TargetGroup(("10.0.0.7:9400",), {"node": "c", "run": RUN})
    assert [everywhere] == target_groups(agents, this_node="")
    here = TargetGroup(("127.0.0.1:9400",), {"node": "a", "run": RUN})
    assert [everywhere, here] == target_groups(agents, this_node="a")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "http://10.0.0.7",
        "https://10.0.0.7:1",
        "http://a@b:1",
        "http://a:1/x",
        "http://[:1",
        "http://169.254.169.254:80",
        "http://[::ffff:169.254.169.254]:80",
        "http://0.0.0.0:9400",
        "http://[::]:9400",
        "http://224.0.0.1:9400",
        "http://no-such-host.invalid:9400",
    ],
)
def test_what_is_no_address_of_an_agent_is_never_a_target(url):
    assert [] == target_groups([AgentAddress(RUN, "a", url)], this_node="a")


@pytest.mark.parametrize("host", ["127.1", "2130706433", "[::ffff:127.0.0.1]", "localhost"])
def test_an_address_that_leads_to_loopback_by_another_name_is_offered_on_its_machine_only(host):
    agents = [AgentAddress(RUN, "a", f"http://{host}:22")]
    assert [] == target_groups(agents, this_node="")
    assert [(f"{host}:22",)] == [group.targets for group in target_groups(agents, this_node="a")]


def test_a_name_that_leads_to_a_metadata_address_is_never_a_target(monkeypatch):
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert [] == target_groups([AgentAddress(RUN, "a", "http://node-a:80")], this_node="a")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via"])
def test_who_asks_through_a_proxy_of_this_machine_is_told_of_no_loopback(node, served, header):
    node.rank(node=HERE).step(0)
    shipping(node, served)
    token = {"Authorization": f"Bearer {served.tokens.read}"}
    asked = {
        name: httpx.get(
            f"{served.plain}/v1/sd/agents", headers=token | more, trust_env=False
        ).json()
        for name, more in (("here", {}), ("proxy", {header: "for=203.0.113.9"}))
    }
    assert (1, []) == (len(asked["here"]), asked["proxy"])
