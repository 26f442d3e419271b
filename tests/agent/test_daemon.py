import errno
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.support.agent_clients import Stalled
from vitals_agent.daemon import AgentStopCondition, LoopConfig, deliver_when_reachable, run

CALM = {
    "num_living": 0,
    "has_served": False,
    "drained": True,
    "parent_alive": True,
    "num_signals": 0,
}


def ends(config: LoopConfig, *timeline: dict) -> list[bool]:
    """Whether the end is reached at second 0, 1, 2, ..."""
    ending = AgentStopCondition(config)
    return [ending.reached(float(now), **{**CALM, **at}) for now, at in enumerate(timeline)]


CHILD = LoopConfig(child=True, drain_grace_seconds=3.0, stop_grace_seconds=2.0)


def test_a_standalone_agent_waits_for_runs_for_ever():
    assert not any(ends(LoopConfig(), {}, {"has_served": True}, {"parent_alive": False}))


def test_a_standalone_agent_ends_at_the_first_signal():
    assert [False, True] == ends(
        LoopConfig(), {"num_living": 1}, {"num_living": 1, "num_signals": 1}
    )


SENDER = """
import os, sys, time
for _ in range(5000):
    os.kill(int(sys.argv[1]), 15)
    time.sleep(1e-4)
"""
WAITING_UNDER_SIGNALS = """
import os, subprocess, sys
from vitals_agent.daemon import StopSignals
with StopSignals() as signals:
    sender = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
    while sender.poll() is None:
        signals.wait(1e-6)
    print(sender.returncode, signals.count > 100)
"""


def test_a_signal_at_any_point_of_a_pause_leaves_the_agent_able_to_end():
    """The lock of an event can be held when the handler runs: it then waited for itself."""
    program = [sys.executable, "-c", WAITING_UNDER_SIGNALS, SENDER]
    told = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert "0 True\n" == told.stdout, told.stderr[-2000:]


def test_once_ends_after_one_cycle():
    assert [True] == ends(LoopConfig(once=True), {"num_living": 2})


def test_a_child_ends_when_its_ranks_are_gone_and_everything_is_drained():
    served = {"has_served": True}
    timeline = [{}, {"num_living": 2, **served}, {**served, "drained": False}, served]
    assert [False, False, False, True] == ends(CHILD, *timeline)


def test_a_child_waits_for_its_first_rank_only_while_its_parent_lives():
    assert [False, False, True] == ends(CHILD, {}, {}, {"parent_alive": False})


def test_a_child_without_its_parent_stays_while_another_rank_lives():
    orphan = {"has_served": True, "parent_alive": False}
    assert [False, False, True] == ends(
        CHILD, {"num_living": 1, **orphan}, {"num_living": 1, **orphan}, orphan
    )


def test_a_child_does_not_wait_for_ever_for_a_collector_that_is_away():
    stuck = {"has_served": True, "drained": False}
    assert [False, False, False, True] == ends(CHILD, stuck, stuck, stuck, stuck)


def test_a_rank_that_comes_back_ends_the_waiting():
    stuck = {"has_served": True, "drained": False}
    back = {**stuck, "num_living": 1}
    assert not any(ends(CHILD, stuck, stuck, back, stuck, stuck, stuck))


@pytest.mark.parametrize("num_living", [0, 1])
def test_a_child_that_is_told_to_stop_waits_a_little_for_its_ranks(num_living):
    told = {"num_living": num_living, "has_served": True, "num_signals": 1}
    expected = [True, True, True] if num_living == 0 else [False, False, True]
    assert expected == ends(CHILD, told, told, told)


def test_a_child_that_is_told_twice_ends_at_once():
    assert [True] == ends(CHILD, {"num_living": 1, "num_signals": 2})


QUICK = LoopConfig(
    child=True,
    interval_seconds=0.01,
    drain_grace_seconds=0.05,
    last_turn_seconds=0.05,
    lock_wait_seconds=0.0,
)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_child_whose_disk_takes_no_more_ends_and_says_what_it_could_not_keep(
    world, monkeypatch, caplog, call
):
    dead = world.rank(1, pid=0)
    dead.step(*range(7))

    real = getattr(os, call)

    def refuse(fd, *rest):
        if "/spool/" in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115 - a descriptor
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, *rest)

    monkeypatch.setattr(os, call, refuse)
    run(world.agent(start=False), QUICK)
    (said,) = [r.getMessage() for r in caplog.records if "rows not spooled" in r.getMessage()]
    assert f"rows=7 run={dead.identity.run_id}" in said
    assert str(dead.directory) in said
    monkeypatch.undo()
    run(world.agent(start=False), QUICK)  # with room again, the next agent takes them up
    assert list(range(7)) == world.steps(1)
    assert 1 == world.notes().count("rank_gone")


def test_a_child_that_has_all_in_its_spool_leaves_nothing_behind(world, caplog):
    rank = world.rank()
    rank.step(0)
    rank.close()
    run(world.agent(start=False), QUICK)
    assert [0] == world.steps()
    assert [] == [r for r in caplog.records if "not spooled" in r.getMessage()]


def test_the_end_waits_for_a_collector_that_stalls_no_longer_than_it_may(world, caplog):
    rank = world.rank()
    rank.step(0)
    rank.close()
    client = Stalled()
    try:
        run(world.agent(client=client, start=False), QUICK)
    finally:
        client.go_on.set()
    assert [0] == world.steps()
    assert any("collector is busy" in record.getMessage() for record in caplog.records)


def test_without_threads_once_takes_up_what_is_there(world):
    rank = world.rank()
    rank.step(0)
    run(world.agent(start=False), LoopConfig(once=True))
    assert [0] == world.steps()


# --------------------------------------------------------------- a run that ended, and no collector


class Away:
    """A collector that answers from some second on, and what waits for it; sleeping is time."""

    def __init__(self, *, answers_from: float, outcomes: list[str]) -> None:
        self.now, self.answers_from, self.outcomes = 0.0, answers_from, outcomes
        self.asked_at: list[float] = []
        self.is_waiting = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def answers(self, now: float) -> bool:
        self.asked_at.append(now)
        return now >= self.answers_from

    def deliver(self) -> str:
        self.is_waiting = len(self.outcomes) > 1
        return self.outcomes.pop(0)

    def wait(self, seconds: float = 86_400.0) -> None:
        deliver_when_reachable(
            self.deliver,
            is_waiting=lambda: self.is_waiting,
            answers=self.answers,
            seconds=seconds,
            stopwatch=lambda: self.now,
            sleep=self.sleep,
        )


def test_it_asks_ever_more_rarely_and_still_within_the_minute_that_a_collector_gives():
    away = Away(answers_from=40_000.0, outcomes=["ended"])
    away.wait()
    pauses = [later - earlier for earlier, later in pairwise(away.asked_at)]
    assert 2.0 < sum(pauses) / len(pauses)
    assert max(pauses) <= 22.0
    assert away.now < 40_000.0 + 44.0
    assert [] == away.outcomes


def test_what_could_not_be_sent_whole_is_tried_again_and_a_signal_ends_it():
    away = Away(answers_from=0.0, outcomes=["elsewhere", "ended", "stopped", "ended"])
    away.wait()
    assert ["ended"] == away.outcomes


def test_after_its_time_it_leaves_the_rows_to_other_agents():
    away = Away(answers_from=1e9, outcomes=["ended"])
    away.wait(seconds=3_600.0)
    assert 3_600.0 <= away.now < 3_602.0
    assert ["ended"] == away.outcomes


def test_where_another_agent_delivered_it_or_the_folder_is_gone_it_ends_without_asking():
    away = Away(answers_from=0.0, outcomes=["ended"])
    away.is_waiting = False
    away.wait()
    assert [] == away.asked_at


def test_a_lock_that_was_inherited_is_let_go_and_what_is_its_own_is_not(tmp_path):
    script = (
        "import os, sys; from vitals_agent.daemon import close_inherited\n"
        "own = os.open(os.devnull, os.O_RDONLY)\n"
        "close_inherited(); os.fstat(own); os.fstat(1)\n"
        "try: os.fstat(int(sys.argv[1]))\n"
        "except OSError: print('closed')"
    )
    with (tmp_path / "lock").open("w") as lock:
        command = [sys.executable, "-c", script, str(lock.fileno())]
        done = subprocess.run(command, pass_fds=[lock.fileno()], capture_output=True, text=True)
    assert ("closed\n", "") == (done.stdout, done.stderr)
