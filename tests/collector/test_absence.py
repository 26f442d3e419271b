"""Who is gone of a job that goes on, and who only seems to be."""

import pytest

from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.two_nodes import AHEAD, TwoNodes
from trainvitals.alerting import alerts_for_absence
from trainvitals.records import RunEnded
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.run_status import (
    AbsentParts,
    Liveness,
    SourceState,
    find_absent_parts,
    find_ranks_behind,
)
from vitals_collector.storage.store import Store


def rank(
    number: int,
    *,
    node: str = "a",
    heard: int,
    step: int = 100,
    stepped: int | None = None,
    started: int = 0,
    ended: str = "",
    alive: int = 1,
    world: int = 4,
) -> SourceState:
    """Return a rank; all times in seconds of the collector's clock."""
    ahead = AHEAD if node == "b" else 0
    return SourceState(
        source=f"rank:{number}",
        started_unix_ns=START + started * SECOND + ahead,
        last_seen_unix_ns=START + heard * SECOND + ahead,
        last_received_unix_ns=START + heard * SECOND,
        alive=alive,
        ended_state=ended,
        world_size=world,
        node=node,
        last_step=step,
        last_step_unix_ns=START + (heard if stepped is None else stepped) * SECOND + ahead,
    )


def agent(node: str, heard: int) -> SourceState:
    at = START + heard * SECOND
    return SourceState(f"node:{node}", START, at, at, -1, "", node=node)


def job(*, a: int, b: int, agent_a: int, agent_b: int, **of_b: int) -> list[SourceState]:
    """Return two nodes of two ranks; when their ranks and their agents were last heard of."""
    ranks_a = [rank(0, heard=a), rank(1, heard=a)]
    ranks_b = [rank(2, node="b", heard=b, **of_b), rank(3, node="b", heard=b, **of_b)]
    return [*ranks_a, *ranks_b, agent("a", agent_a), agent("b", agent_b)]


def without(number: int, **changed: SourceState) -> list[SourceState]:
    every = job(a=1_000, b=1_000, agent_a=1_000, agent_b=1_000)
    return [source for source in every if source.source != f"rank:{number}"] + [*changed.values()]


NOW = 1_000
CASES = {
    "all steps pass": (job(a=1_000, b=1_000, agent_a=1_000, agent_b=1_000), AbsentParts()),
    "all evaluate for three minutes": (
        job(a=820, b=820, agent_a=999, agent_b=999),
        AbsentParts(),
    ),
    "rank 0 evaluates and all wait": (
        [*job(a=820, b=820, agent_a=999, agent_b=999)[1:], rank(0, heard=998, stepped=820)],
        AbsentParts(),
    ),
    "a node was killed": (
        job(a=932, b=930, agent_a=999, agent_b=930),
        AbsentParts(nodes=("b",)),
    ),
    "the last rows of a killed node were still on its disk": (
        job(a=936, b=930, agent_a=999, agent_b=930, step=90),
        AbsentParts(nodes=("b",)),
    ),
    "a node was killed a moment ago": (job(a=945, b=945, agent_a=999, agent_b=945), AbsentParts()),
    "an agent is gone and steps pass": (
        job(a=999, b=930, agent_a=999, agent_b=930, step=50),
        AbsentParts(agents=("b",)),
    ),
    "an agent is gone and then all evaluate": (
        job(a=820, b=700, agent_a=999, agent_b=700, step=50),
        AbsentParts(agents=("b",)),
    ),
    "others say something that is no step": (
        [
            rank(0, heard=990, stepped=931),
            *job(a=930, b=930, agent_a=999, agent_b=930, step=99)[1:],
        ],
        AbsentParts(nodes=("b",)),
    ),
    "a process was killed on a node that speaks": (
        without(3, dead=rank(3, node="b", heard=930, alive=0)),
        AbsentParts(ranks=(3,)),
    ),
    "a process ended a moment ago and its last rows are on their way": (
        without(3, dead=rank(3, node="b", heard=980, alive=0)),
        AbsentParts(),
    ),
    "ranks end one by one and their node's agent with them": (
        [
            rank(0, heard=1_000),
            rank(1, heard=1_000),
            rank(2, node="b", heard=900, ended="finished", alive=0),
            rank(3, node="b", heard=905, ended="finished", alive=0),
            agent("a", 1_000),
            agent("b", 906),
        ],
        AbsentParts(),
    ),
    "a requeue whose ranks come one by one": (
        [
            rank(0, heard=500),
            rank(1, heard=500),
            rank(0, heard=1_000, started=990),
            rank(1, heard=1_000, started=991),
            rank(2, node="b", heard=500, alive=0),
            rank(3, node="b", heard=500),
            agent("a", 1_000),
            agent("b", 500),
        ],
        AbsentParts(),
    ),
    "a requeue without its rank 0 so far": (
        [
            rank(0, heard=500),
            rank(1, node="b", heard=500, world=2),
            rank(1, node="b", heard=1_000, started=990, world=2),
            agent("a", 500),
            agent("b", 1_000),
        ],
        AbsentParts(),
    ),
    "a relaunch on fewer ranks": (
        [
            rank(0, heard=1_000, started=800, world=2),
            rank(1, heard=1_000, started=800, world=2),
            rank(2, node="b", heard=500),
            rank(3, node="b", heard=500),
            agent("a", 1_000),
            agent("b", 500),
        ],
        AbsentParts(),
    ),
    "two of four never reported": (
        [rank(0, heard=1_000), rank(1, heard=1_000), agent("a", 1_000)],
        AbsentParts(never_heard=(2, 3)),
    ),
    "a node was killed and another's rows came late, or its clock was set back": (
        [
            rank(0, heard=999)._replace(last_seen_unix_ns=START + 10 * SECOND),
            *job(a=930, b=930, agent_a=999, agent_b=930)[1:],
        ],
        AbsentParts(nodes=("b",)),
    ),
    "only rank 0 is monitored": ([rank(0, heard=1_000), agent("a", 1_000)], AbsentParts()),
    "no agent ever spoke for a node": (
        [rank(0, heard=1_000, world=2), rank(1, node="b", heard=500, world=2)],
        AbsentParts(),
    ),
    "nothing is there": ([], AbsentParts()),
}


@pytest.mark.parametrize(("sources", "gone"), CASES.values(), ids=CASES)
def test_who_is_gone_follows_from_what_was_heard(sources: list[SourceState], gone: AbsentParts):
    assert gone == find_absent_parts(sources, Liveness(now_unix_ns=START + NOW * SECOND))


def test_nobody_is_gone_for_the_collector_was_away():
    sources = job(a=300, b=290, agent_a=300, agent_b=290)
    when = Liveness(now_unix_ns=START + NOW * SECOND, up_since_unix_ns=START + 950 * SECOND)
    assert AbsentParts() == find_absent_parts(sources, when)


def test_nobody_is_gone_while_a_folder_is_being_read():
    when = Liveness(now_unix_ns=START + NOW * SECOND, is_reading_in=True)
    assert AbsentParts() == find_absent_parts(job(a=1_000, b=5, agent_a=1_000, agent_b=5), when)


def test_the_ranks_that_others_wait_for_are_those_without_the_newest_step():
    ranks = [rank(0, heard=10), rank(1, heard=10, step=99), rank(2, heard=10, step=40)]
    assert (1, 2) == find_ranks_behind([*ranks, rank(3, heard=10, step=1, ended="finished")])
    assert () == find_ranks_behind(ranks[:1])


# ------------------------------------------------------------------------------- to the pager


@pytest.fixture
def two(store: Store) -> TwoNodes:
    return TwoNodes(store)


def test_a_killed_node_pages_within_the_limit_by_its_name_and_is_back_when_it_speaks(
    two: TwoNodes,
):
    assert [] == two.pass_time(120)
    assert ("healthy", ()) == (two.summary().health, two.summary().missing)
    assert [] == two.pass_time(60, ranks=(), agents=(0,))
    assert ["NodeLost firing"] == two.pass_time(5, ranks=(), agents=(0,))
    (page,) = two.place.heard.alerts
    assert ("page", "node-b", True) == (
        page.severity,
        page.labels["cause"],
        "node-b" in page.summary,
    )
    assert ("running", "critical", ("node-b",)) == (
        two.summary().state,
        two.summary().health,
        two.summary().missing,
    )
    assert ["NodeLost firing", "NodeLost resolved"] == two.pass_time(5)
    assert () == two.summary().missing


def test_a_node_whose_agent_alone_is_gone_is_told_and_pages_nobody(two: TwoNodes):
    two.pass_time(60)
    assert ["AgentLost firing"] == two.pass_time(120, ranks=(0,), agents=(0,))
    assert "notify" == two.place.heard.alerts[0].severity
    assert ("unknown", ("node-b",)) == (two.summary().health, two.summary().missing)


def test_a_killed_process_on_a_living_node_pages_by_its_rank(two: TwoNodes):
    two.pass_time(60)
    two.place.send(two.agents[1].process_rows(two.second, {1: (100, 0)}))
    assert ["RankLost firing"] == two.pass_time(70, ranks=())
    assert ("page", "rank 1") == (
        two.place.heard.alerts[0].severity,
        two.place.heard.alerts[0].labels["cause"],
    )


def test_an_evaluation_of_three_minutes_pages_nobody(two: TwoNodes):
    two.pass_time(60)
    assert [] == two.pass_time(180, ranks=())
    assert "healthy" == two.summary().health


def test_a_collector_that_was_away_for_an_hour_pages_nobody_for_it(two: TwoNodes):
    two.pass_time(60)
    two.place.clock.advance(3_600)
    two.place.restart()
    two.place.look()
    assert [] == two.pass_time(120)


def restarted_agent(two: TwoNodes, *, clock_behind_seconds: int = 0) -> None:
    """Have the agent of node b start anew, with the spool's rows behind it."""
    started = START + (two.second - clock_behind_seconds) * SECOND + AHEAD
    two.agents[1] = Writer("node:node-b", node="node-b", started=started)


def test_a_short_restart_of_an_agent_is_told_to_nobody(two: TwoNodes):
    two.pass_time(60)
    two.pass_time(50, ranks=(0,), agents=(0,))
    restarted_agent(two)
    assert [] == two.pass_time(120)


@pytest.mark.parametrize(("ranks", "clock_behind_seconds"), [((0, 1), 0), ((0,), 3_600)])
def test_an_agent_that_was_gone_is_one_word_and_one_end_when_it_is_heard_again(
    two: TwoNodes, ranks: tuple[int, ...], clock_behind_seconds: int
):
    two.pass_time(60)
    two.pass_time(120, ranks=(0,), agents=(0,))
    restarted_agent(two, clock_behind_seconds=clock_behind_seconds)
    assert ["AgentLost firing", "AgentLost resolved"] == two.pass_time(120, ranks=ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "agents"),
    [("AgentLost", (0,), (0,)), ("NodeLost", (), (0,)), ("RunLost", (), ())],
)
def test_a_restart_of_the_collector_neither_resolves_who_is_gone_nor_tells_it_again(
    two: TwoNodes, name: str, ranks: tuple[int, ...], agents: tuple[int, ...]
):
    two.pass_time(60)
    two.pass_time(100, ranks=ranks, agents=agents)
    two.place.restart()
    assert [f"{name} firing"] == two.pass_time(120, ranks=ranks, agents=agents)
    assert [f"{name} firing", f"{name} resolved"] == two.pass_time(5)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("name", ["NodeLost", "RankLost"])
def test_who_is_gone_is_not_back_for_the_rest_is_gone_too(
    two: TwoNodes, name: str, is_restarted: bool
):
    two.pass_time(60)
    agents: tuple[int, ...] = (0,)
    if name == "RankLost":
        two.place.send(two.agents[1].process_rows(two.second, {1: (100, 0)}))
        agents = (0, 1)
    assert [f"{name} firing"] == two.pass_time(70, ranks=(), agents=agents)
    told = [f"{name} firing", "RunLost firing"]
    assert told == two.pass_time(120, ranks=(), agents=())
    if is_restarted:
        two.place.restart()
        assert told == two.pass_time(120, ranks=(), agents=())
    back = two.pass_time(5)
    assert (told, {f"{name} resolved", "RunLost resolved"}) == (back[:2], set(back[2:]))
    assert 4 == len(back)


def test_a_lost_rank_is_not_back_for_its_agent_is_gone_too(two: TwoNodes):
    two.pass_time(60)
    two.place.send(two.agents[1].process_rows(two.second, {1: (100, 0)}))
    assert ["RankLost firing"] == two.pass_time(70, ranks=())
    assert ["RankLost firing"] == two.pass_time(180, ranks=(), agents=(0,))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_node_whose_death_made_the_run_fail_pages_by_its_name(two: TwoNodes, is_restarted: bool):
    two.pass_time(60)
    two.pass_time(5, ranks=(), agents=(0,))
    two.place.send(two.ranks[0].events(RunEnded(state="failed", reason="connection closed")))
    assert ["RunFailed firing"] == two.pass_time(50, ranks=(), agents=(0,))
    assert ["RunFailed firing", "NodeLost firing"] == two.pass_time(60, ranks=(), agents=(0,))
    if is_restarted:
        two.place.restart()
    assert ["RunFailed firing", "NodeLost firing"] == two.pass_time(200, ranks=(), agents=())
    assert "node-b" in two.place.heard.alerts[1].summary
    restarted_agent(two)
    assert "NodeLost resolved" == two.pass_time(5, ranks=(), agents=(1,))[-1]


def test_a_lost_node_is_not_back_for_the_others_failed_of_it(two: TwoNodes):
    two.pass_time(60)
    assert ["NodeLost firing"] == two.pass_time(120, ranks=(), agents=(0,))
    two.place.send(two.ranks[0].events(RunEnded(state="failed", reason="the watchdog ended it")))
    assert ["NodeLost firing", "RunFailed firing"] == two.pass_time(600, ranks=(), agents=())


def test_nodes_that_were_ended_for_a_rank_had_failed_are_not_lost(two: TwoNodes):
    two.pass_time(60)
    two.place.send(two.ranks[0].events(RunEnded(state="failed", reason="out of memory")))
    two.pass_time(5, ranks=())
    assert ["RunFailed firing"] == two.pass_time(400, ranks=(), agents=())


def test_a_stall_is_not_told_beside_the_loss_that_causes_it_and_told_once_that_is_over(
    two: TwoNodes,
):
    two.pass_time(60)
    lost = two.pass_time(4_000, ranks=(), agents=(0,), every=20)
    assert ["NodeLost firing"] == lost
    back = two.pass_time(5, ranks=())
    assert ["NodeLost resolved", "TrainingStalled firing"] == sorted(back[1:])


def test_a_stall_that_was_told_is_not_over_for_a_node_is_lost_as_well(two: TwoNodes):
    two.pass_time(60)
    assert ["TrainingStalled firing"] == two.pass_time(3_700, ranks=(), every=50)
    words = two.pass_time(120, ranks=(), agents=(0,))
    assert ["TrainingStalled firing", "NodeLost firing"] == words
    assert {"NodeLost resolved", "TrainingStalled resolved"} == set(two.pass_time(5)[2:])


def test_who_comes_back_while_the_collector_starts_resolves_at_once(two: TwoNodes):
    two.pass_time(60)
    two.pass_time(100, ranks=(0,), agents=(0,))
    two.place.restart()
    assert ["AgentLost firing", "AgentLost resolved"] == two.pass_time(5)


def test_a_rank_relaunched_on_a_node_whose_clock_is_behind_is_heard(two: TwoNodes):
    two.ranks.append(Writer("rank:2", node="node-b", started=START + AHEAD, world_size=3))
    two.ranks[0] = Writer("rank:0", node="node-a", world_size=3)
    two.pass_time(60, ranks=(0, 1, 2))
    two.ranks = [
        Writer("rank:0", node="node-a", started=START + 60 * SECOND, world_size=3),
        Writer("rank:1", node="node-a", started=START + 60 * SECOND, world_size=3),
        Writer("rank:2", node="node-a", started=START + 60 * SECOND, world_size=3),
    ]
    assert [] == two.pass_time(180, ranks=(0, 1, 2), agents=(0,))


def test_ranks_that_never_reported_are_one_word_that_ends_with_the_last_of_them(two: TwoNodes):
    started = [Writer(f"rank:{rank}", world_size=12) for rank in range(12)]
    two.ranks = started
    assert ["AgentLost firing"] == two.pass_time(100, ranks=(0, 1), agents=(0,))
    assert "ranks 2, 3, 4, 5, 6, 7, 8, 9, 10, 11: no report" in two.place.heard.alerts[0].summary
    assert ["AgentLost firing"] == two.pass_time(20, ranks=(0, 1, 2, 3), agents=(0,))
    everybody = tuple(range(12))
    words = two.pass_time(20, ranks=everybody, agents=(0,))
    assert ["AgentLost firing", "AgentLost resolved"] == words


def test_a_run_that_ends_rank_by_rank_pages_nobody(two: TwoNodes):
    two.pass_time(60)
    two.place.send(two.ranks[1].events(RunEnded(state="finished")))
    assert [] == two.pass_time(120, ranks=(0,), agents=(0,))
    two.place.send(two.ranks[0].events(RunEnded(state="finished")))
    assert [] == two.pass_time(300, ranks=(), agents=())


def test_nodes_in_a_folder_are_judged_by_when_their_words_appeared(two: TwoNodes):
    two.place.send = lambda *raws: ingest_all(two.place.store, raws, 0)  # type: ignore[method-assign]
    assert [] == two.pass_time(120)
    assert ["NodeLost firing"] == two.pass_time(70, ranks=(), agents=(0,))


def test_of_many_lost_nodes_the_first_few_page_each_and_all_others_together():
    nodes = [f"node-{i}" for i in range(20)]
    raised = alerts_for_absence("NodeLost", nodes, run_id=RUN, step=1, what="silent")
    assert (9, "others", "12 more: silent") == (
        len(raised),
        raised[-1].labels["cause"],
        raised[-1].summary,
    )
