"""The end of a job that hangs: real processes, the agent's own looks, and nothing else ended."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.agent.builders import World
from tests.support.hung_ranks import Rank, told, train
from trainvitals.detect.hang import HangConfig
from trainvitals.records import DecisionMade, Note
from vitals_agent.process import holds_files
from vitals_agent.restart import GRACE_SECONDS, JobProcess, process_start_ticks

HELD = 10.0
CONFIG = HangConfig(computing_seconds=10.0, restart_seconds=HELD)


@pytest.fixture
def ranks(world: World) -> list[Rank]:
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    return [Rank(world, 0), Rank(world, 1)]


def stand(
    agent, ranks: list[Rank], now: float, seconds: float, *, on_hang: str = "restart", **fields
) -> float:
    """Let rank 1 wait for nobody and rank 0 for rank 1."""
    until = now + seconds
    while now < until:
        for number, rank in enumerate(ranks):
            if rank.process.poll() is None:
                rank.say(99 - number, step=60, on_hang=on_hang, **fields)
        agent.run_once(now)
        time.sleep(0.02)
        now += 0.5
    return now


def ended(ranks: list[Rank]) -> list[int | None]:
    for rank in ranks:
        for _ in range(6_000):
            if rank.process.poll() is not None:
                break
            time.sleep(0.01)
    return [rank.process.poll() for rank in ranks]


def decided(world: World) -> list[DecisionMade]:
    return [row.event for row in world.events() if isinstance(row.event, DecisionMade)]


def notes(world: World) -> list[str]:
    return [row.event.code for row in world.events() if isinstance(row.event, Note)]


def test_a_hang_that_pages_for_long_enough_is_ended_and_the_ledger_says_why(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    now = stand(agent, ranks, now, HELD)
    assert [] == decided(world)
    assert [None, None] == [rank.process.poll() for rank in ranks]
    stand(agent, ranks, now, 8.0)
    assert [-signal.SIGTERM, -signal.SIGTERM] == ended(ranks)
    (event,) = decided(world)
    decision = event.decision
    assert ("restart", "hang", "hang_blocked", 1, 60) == (
        decision.action,
        decision.rule,
        decision.cause,
        decision.rank,
        decision.step,
    )
    assert decision.reason.startswith("Rank 1 is blocked; rank 0 waits for it")
    assert 2 == decision.budget_left
    assert 1 == len(world.run_dir().restarts())


def test_whoever_only_wants_to_be_told_is_not_ended(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    stand(agent, ranks, now, HELD + 20.0, on_hang="alert")
    assert [] == decided(world)
    assert [None, None] == [rank.process.poll() for rank in ranks]


def test_a_stopped_rank_is_killed_once_the_others_have_ended(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 10.0)
    ranks[1].stop()
    stand(agent, ranks, now, HELD + 10.0)
    assert [-signal.SIGTERM, -signal.SIGKILL] == ended(ranks)


def test_one_that_does_not_listen_is_killed_after_its_time_of_grace(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 10.0)
    deaf = Rank(world, 0, prelude="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    both = [deaf, ranks[1]]
    ranks[0].end()
    now = train(agent, both, now + 20.0, start=now)
    now = stand(agent, both, now, HELD + 8.0)
    assert 1 == len(decided(world))
    assert deaf.process.poll() is None
    stand(agent, both, now, GRACE_SECONDS)
    assert [-signal.SIGKILL, -signal.SIGTERM] == ended(both)
    assert [("waiting", 1), ("hang", 1)] == told(world), "that rank 1 has ended is no news"


def test_a_rank_that_goes_on_in_time_is_left_alone(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    now = stand(agent, ranks, now, HELD + 2.0)
    now = train(agent, ranks, now + 2.0, start=now)
    now = stand(agent, ranks, now, HELD + 2.0)
    assert [] == decided(world)
    assert [None, None] == [rank.process.poll() for rank in ranks]


def test_time_in_which_the_agent_itself_stood_still_does_not_count(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    now = stand(agent, ranks, now, HELD)
    stand(agent, ranks, now + 600.0, HELD - 1.0)
    assert [] == decided(world)


def test_the_budget_of_a_day_is_kept_and_said(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    hour = 3600 * 10**9
    spent = [world.clock.now_ns - n * hour for n in (30, 3, 2, 1)]
    (world.run_dir().path / "restarts.json").write_text(json.dumps(spent))
    stand(agent, ranks, now, HELD + 20.0)
    assert [] == decided(world)
    assert 1 == notes(world).count("restart_budget")
    assert [None, None] == [rank.process.poll() for rank in ranks]


def test_a_budget_that_cannot_be_read_is_not_guessed(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    (world.run_dir().path / "restarts.json").write_text("[1, 2")
    stand(agent, ranks, now, HELD + 20.0)
    assert [None, None] == [rank.process.poll() for rank in ranks]
    assert 1 == agent.faults.counts["restart"]


def test_a_job_of_which_ranks_are_elsewhere_only_pages(world, ranks):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks[:1], 20.0)
    ranks[1].journal.directory.rename(world.base / "elsewhere")
    stand(agent, ranks[:1], now, HELD + 20.0)
    assert ranks[0].process.poll() is None
    assert 1 == notes(world).count("no_restart")


def test_a_process_that_has_another_s_number_is_sent_nothing(ranks):
    pid = ranks[0].process.pid
    JobProcess(pid, process_start_ticks(pid) + 1, "alive").send_signal(signal.SIGKILL)
    time.sleep(0.05)
    assert ranks[0].process.poll() is None
    JobProcess(pid, process_start_ticks(pid), "alive").send_signal(signal.SIGKILL)
    assert -signal.SIGKILL == ranks[0].process.wait(60.0)
    JobProcess(pid, 1, "alive").send_signal(signal.SIGKILL)
    assert 0 == process_start_ticks(pid)


def test_a_process_of_another_container_with_a_ranks_number_is_sent_nothing(
    world, ranks, monkeypatch
):
    """It shares the memory that journals lie in, and has process ids of its own."""
    stranger = ranks[0].process.pid
    monkeypatch.setattr("vitals_agent.restart.holds_files", lambda pid, _: pid != stranger)
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    stand(agent, ranks, now, HELD + 20.0)
    assert [None, None] == [rank.process.poll() for rank in ranks]
    assert ([], 1) == (decided(world), notes(world).count("no_restart"))


def test_a_job_in_a_container_costs_no_process_that_has_a_ranks_number_here(world):
    """The ranks share the memory with the agent, and have process ids of their own."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("process namespaces are not permitted here")
    neighbors = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in "ab"
    ]
    try:
        ranks = [Rank(world, i, pid_inside=process.pid) for i, process in enumerate(neighbors)]
        agent = world.agent(hang=CONFIG)
        now = train(agent, ranks, 20.0)
        stand(agent, ranks, now, HELD + 20.0)
        assert ("hang", 1) in told(world)
        assert ([], 1) == (decided(world), notes(world).count("no_restart"))
        assert [None, None] == [process.poll() for process in neighbors]
        assert [None, None] == [rank.process.poll() for rank in ranks]
    finally:
        for process in neighbors:
            process.communicate()


def test_only_a_process_with_a_file_of_the_journal_open_is_its_rank(ranks):
    directory = ranks[0].journal.directory
    assert holds_files(ranks[0].process.pid, directory)
    assert not holds_files(ranks[1].process.pid, directory)
    assert not holds_files(0, directory)


@pytest.mark.parametrize("fields", [{"is_announced": True}, {"is_debugged": True}])
def test_one_that_said_so_or_is_debugged_is_never_ended(world, ranks, fields):
    agent = world.agent(hang=CONFIG)
    now = train(agent, ranks, 20.0)
    stand(agent, ranks, now, HELD + 25.0, **fields)
    assert [] == decided(world)
    assert [None, None] == [rank.process.poll() for rank in ranks]
