"""A person asks where the ranks stand now: real processes answer, on the agent's word alone."""

import sys
import time

import pytest

from tests.agent.builders import World
from tests.agent.stub_collector import StubCollector
from tests.support.agent_commands import NS, command, in_mailbox, pending
from tests.support.hung_ranks import Rank
from trainvitals.io.client import CollectorClient
from trainvitals.io.mailbox import sign_command
from trainvitals.records import CommandAck, CommandAcknowledged, Note, StacksTaken


@pytest.fixture
def ranks(world: World) -> list[Rank]:
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    return [Rank(world, 0), Rank(world, 1)]


@pytest.fixture
def stub(world):
    made = StubCollector()
    world.closers.append(made.close)
    return made


@pytest.fixture
def client(stub):
    with CollectorClient(stub.url, "token", timeout=60.0) as made:
        yield made


def cycle(agent, ranks: list[Rank], until: float, *, start: float = 0.0) -> float:
    now = start
    while now < until:
        for rank in ranks:
            rank.say(int(2 * now), step=int(2 * now))
        agent.cycle(now)
        time.sleep(0.02)
        now += 0.5
    return now


def answers(world: World) -> list[StacksTaken]:
    taken = [row.event for row in world.events() if isinstance(row.event, StacksTaken)]
    return sorted(taken, key=lambda event: event.rank)


def acks(world: World) -> list[CommandAck]:
    return [r.event.ack for r in world.events() if isinstance(r.event, CommandAcknowledged)]


def test_ranks_of_a_run_that_trains_say_where_they_stand_and_the_command_is_answered(
    world, ranks, stub, client
):
    agent = world.agent(client=client)
    now = cycle(agent, ranks, 3.0)
    stub.commands = pending(world, command(world, 7, action="stacks", ttl_seconds=60.0))
    cycle(agent, ranks, now + 6.0, start=now)
    assert [(0, 7), (1, 7)] == [(event.rank, event.command_number) for event in answers(world)]
    assert all("in load" in event.stacks for event in answers(world))
    (ack,) = acks(world)
    assert (7, "done", "2 of 2 ranks of this node answered") == (ack.number, ack.status, ack.detail)
    assert in_mailbox(world) is None, "the training is not asked"
    assert [] == stub.delivered, "agents of other nodes look for what is pending"


def test_one_that_is_stopped_is_named_and_the_others_answer(world, ranks, stub, client):
    agent = world.agent(client=client)
    now = cycle(agent, ranks, 3.0)
    ranks[1].stop()
    stub.commands = pending(world, command(world, 7, action="stacks"))
    cycle(agent, ranks, now + 5.0, start=now)
    mine = {event.rank: event for event in answers(world) if event.command_number == 7}
    assert "in load" in mine[0].stacks
    assert ("", "its process is stopped (SIGSTOP)") == (mine[1].stacks, mine[1].detail)
    assert "1 of 2 ranks of this node answered" == acks(world)[0].detail


def test_it_is_answered_while_another_command_waits_for_a_rank_that_hangs(
    world, ranks, stub, client
):
    agent = world.agent(client=client)
    now = cycle(agent, ranks, 3.0)
    stub.commands = pending(world, command(world, 7))
    now = cycle(agent, ranks, now + 2.0, start=now)
    stub.commands = pending(world, command(world, 8, action="stacks"), command(world, 9))
    cycle(agent, ranks, now + 6.0, start=now)
    assert {0, 1} == {event.rank for event in answers(world) if event.command_number == 8}
    assert 7 == in_mailbox(world).number


def test_an_agent_of_a_node_without_rank_0_answers_and_leaves_other_commands_alone(
    world, ranks, stub, client
):
    ranks[0].end()
    ranks[0].journal.directory.rename(world.base / "elsewhere")
    agent = world.agent(client=client)
    now = cycle(agent, ranks[1:], 3.0)
    stub.commands = pending(
        world, command(world, 7, action="stacks"), command(world, 8, action="halt")
    )
    cycle(agent, ranks[1:], now + 8.0, start=now)
    assert [1] == [event.rank for event in answers(world)]
    assert [] == acks(world), "the agent of rank 0 answers the command"
    assert [] == stub.delivered
    assert in_mailbox(world) is None


@pytest.mark.parametrize("how", ["not signed", "expired", "another run's"])
def test_what_nobody_signed_or_came_too_late_sends_no_signal(world, ranks, stub, client, how):
    agent = world.agent(client=client)
    now = cycle(agent, ranks, 3.0)
    asked = command(world, 7, action="stacks", ttl_seconds=5.0)
    if how == "another run's":
        asked = command(world, 7, action="stacks", run_id="01JD0000000000000000000001")
    stub.commands = pending(world, asked)
    if how == "not signed":
        bare = [view.command for view in stub.commands]
        stub.commands = [
            type(view)(command=type(each)(**_without_signature(each)), status="pending")
            for view, each in zip(stub.commands, bare, strict=True)
        ]
    if how == "expired":
        world.clock.now_ns += 6 * NS
    cycle(agent, ranks, now + 5.0, start=now)
    assert [] == answers(world)
    refused = [row.event for row in world.events() if isinstance(row.event, Note)]
    assert 1 == [note.code for note in refused].count("command_refused")


def _without_signature(asked) -> dict:
    return {name: getattr(asked, name) for name in asked.__struct_fields__} | {
        "control_signature": ""
    }


def test_the_owner_may_ask_through_the_run_s_folder(world, ranks):
    agent = world.agent()
    now = cycle(agent, ranks, 3.0)
    run_dir = world.run_dir()
    run_dir.put_command(sign_command(command(world, 7, action="stacks"), run_dir.command_key()))
    cycle(agent, ranks, now + 5.0, start=now)
    assert [7, 7] == [event.command_number for event in answers(world)]
