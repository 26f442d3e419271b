"""The agent's looks at real processes: stopped, gone, blocked, and asked for their stacks."""

import os
import subprocess
import sys
import time

from tests.agent.builders import NODE
from tests.support.hung_ranks import Rank, told, train
from trainvitals.records import FindingRaised, Note, RanksStill, StacksTaken
from vitals_agent.hang import ExitWatch, exit_of


def stand(agent, ranks: list[Rank], now: float, seconds: float, *, behind: int = 1) -> float:
    until = now + seconds
    while now < until:
        for number, rank in enumerate(ranks):
            rank.say(99 - (number == behind), step=60)
        agent.run_once(now)
        time.sleep(0.02)
        now += 0.5
    return now


def test_a_rank_that_is_behind_and_blocked_is_told_and_both_give_their_stacks(world, ranks):
    agent = world.agent()
    now = train(agent, ranks, 30.0)
    assert [] == told(world)
    now = stand(agent, ranks, now, 4.5)
    assert [("waiting", 1)] == told(world)
    now = stand(agent, ranks, now, 4.0)
    assert [("waiting", 1), ("hang", 1)] == told(world)
    stacks = [row.event for row in world.events() if isinstance(row.event, StacksTaken)]
    assert {0, 1} == {event.rank for event in stacks}
    assert all("in load" in event.stacks for event in stacks)
    rows = [r for r in world.events() if isinstance(r.event, FindingRaised | StacksTaken)]
    assert {60} == {row.step for row in rows}
    train(agent, ranks, 3.0)
    over = [row.event for row in world.events() if isinstance(row.event, Note)]
    assert "wait_over" in [note.code for note in over]


def test_a_stopped_rank_is_named_at_once_and_is_sent_no_signal(world, ranks):
    agent = world.agent()
    now = train(agent, ranks, 10.0)
    ranks[1].stop()
    now = stand(agent, ranks, now, 2.5, behind=-1)
    assert [("waiting", 1)] == told(world)
    stand(agent, ranks, now, 5.0, behind=-1)
    assert [("waiting", 1), ("hang", 1)] == told(world)
    stacks = {row.event.rank for row in world.events() if isinstance(row.event, StacksTaken)}
    assert {0} == stacks
    ranks[1].go_on()
    assert ranks[1].process.poll() is None


def test_all_stopped_and_continued_is_no_hang(world, ranks):
    agent = world.agent()
    now = train(agent, ranks, 10.0)
    for rank in ranks:
        rank.stop()
    until = now + 60.0
    while now < until:
        agent.run_once(now)
        now += 0.5
    for rank in ranks:
        rank.go_on()
    train(agent, ranks, now + 5.0, start=now)
    assert [] == told(world)


def test_how_a_rank_was_killed_is_kept(world, ranks):
    agent = world.agent()
    now = train(agent, ranks, 10.0)
    ranks[1].process.kill()
    until = time.monotonic() + 60.0
    while not agent._exits.exit_text(ranks[1].process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    stand(agent, ranks[:1], now, 8.0)
    findings = [r.event.finding for r in world.events() if isinstance(r.event, FindingRaised)]
    assert ["waiting", "hang"] == [finding.kind for finding in findings]
    assert findings[0].reason.startswith("Rank 1 ended without a word (signal 9, SIGKILL)")
    assert "rank_gone" in [r.event.code for r in world.events() if isinstance(r.event, Note)]


def test_where_ranks_are_on_other_nodes_they_are_told_of_and_nobody_is_named(world):
    rank = Rank(world, 0)
    agent = world.agent()
    now = train(agent, [rank], 10.0)
    events = [row.event for row in world.events()]
    assert not [event for event in events if isinstance(event, RanksStill)]
    now = stand(agent, [rank], now, 8.0, behind=-1)
    train(agent, [rank], 2.0)
    still = [row.event for row in world.events() if isinstance(row.event, RanksStill)]
    assert [1, 1, 1, 0] == [len(event.ranks) for event in still]
    assert NODE == still[0].ranks[0].node and 5.0 == still[0].limits.page["forward_backward"]
    assert [] == told(world)


def test_ranks_of_an_earlier_vitals_have_no_heartbeat_and_are_left_alone(world):
    world.rank(0).step(0)
    agent = world.agent()
    for second in range(20):
        agent.run_once(float(second))
    assert [] == told(world)


def test_an_exit_code_is_read_in_the_moment_before_the_parent_takes_it():
    exits = ExitWatch()
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"], stdin=subprocess.PIPE
    )
    exits.watch(process.pid)
    process.stdin.close()
    until = time.monotonic() + 60.0
    while not exits.exit_text(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert "exit code 7" == exits.exit_text(process.pid)
    assert 7 == process.wait()
    exits.close()
    exits.close()


def test_how_a_process_ended_is_known_where_its_parent_was_quicker():
    process = subprocess.Popen(["sleep", "60"])
    fd = os.pidfd_open(process.pid)
    assert "" == exit_of(process.pid, fd)
    process.kill()
    process.wait()
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert ("signal 9, SIGKILL" if release >= (6, 15) else "") == exit_of(process.pid, fd)
    os.close(fd)
