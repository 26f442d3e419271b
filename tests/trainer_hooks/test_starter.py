"""The agent as a rank's child: killed ones come back, within bounds, and no step pays for it."""

import logging
import os
import subprocess
import sys

import pytest

from tests.trainer_hooks.torchrun import wait_for_agents
from trainer_hooks.agent_starter import LIVED_NS, LOOK_EVERY_NS, NodeAgent, agent_restart_delay_ns
from trainer_hooks.failopen import FaultCounter
from trainvitals.io.spool import read_batches
from trainvitals.records import Note, RunEnded, decode_events
from trainvitals.wire import decode_batch

SECOND = 1_000_000_000


class Children:
    """Starts programs that end at once, as told; counts the starts."""

    directory = "/runs"

    def __init__(self, *ways):
        self.ways, self.pids, self.closed = list(ways), [], False
        self.reported = ""

    def notice(self):
        return self.reported

    def __call__(self):
        way = self.ways.pop(0)
        if way == "refused":
            raise BlockingIOError("no more processes")
        self.pids.append(os.posix_spawn("/bin/sh", ["sh", "-c", way], os.environ))
        return self.pids[-1]

    def close(self):
        self.closed = True


class Told:
    """Takes the run's events."""

    def __init__(self):
        self.codes, self.texts = [], []

    def event(self, event, *, step, attempt):
        assert ("warning", 7, 3) == (event.severity, step, attempt)
        self.codes.append(event.code)
        self.texts.append(event.text)


class Node:
    """A rank with its agent; ``look`` is a step at a time in seconds."""

    def __init__(self, *ways):
        self.children, self.told, self.faults = Children(*ways), Told(), FaultCounter()
        self.agent = NodeAgent(self.children, emitter=self.told, faults=self.faults, now_ns=0)

    def look(self, seconds, *, ended=True):
        """Look once the present child has ended; return the number of starts so far."""
        if ended and self.agent.pid is not None:
            os.waitid(os.P_PID, self.agent.pid, os.WEXITED | os.WNOWAIT)
        self.agent.restart_if_ended(round(seconds * SECOND), step=7, attempt=3)
        return len(self.children.pids)

    def close(self, seconds):
        self.agent.close(round(seconds * SECOND), step=7, attempt=3)
        return len(self.children.pids)


def test_what_the_agent_reports_is_logged_once(caplog):
    node = Node("sleep 60")
    node.children.reported = "the disk is full"
    for second in (1, 2, 3):
        node.look(second, ended=False)
    os.kill(node.agent.pid, 15)
    os.waitpid(node.agent.pid, 0)
    assert 1 == caplog.text.count("vitals: the disk is full")
    assert {} == dict(node.faults.counts)


KILLED, FAILED, STOPPED, TERMINATED = "kill -9 $$", "exit 3", "exit 0", "kill -15 $$"


@pytest.mark.parametrize("losses", range(1, 9))
def test_at_most_three_starts_lie_in_any_ten_minutes(losses):
    next_four = [agent_restart_delay_ns(later) for later in range(losses, losses + 4)]
    assert sum(next_four[1:]) >= 600 * SECOND
    assert agent_restart_delay_ns(1) == 0


def test_a_killed_agent_is_started_again_and_it_is_said(caplog):
    node = Node(KILLED, STOPPED)
    with caplog.at_level(logging.WARNING, logger="trainvitals"):
        assert node.look(1) == 2
    first, second = node.children.pids
    assert ["agent_restarted"] == node.told.codes
    text = (
        f"the node's agent (pid {first}) was killed by SIGKILL (possibly out of memory); "
        f"restarted as pid {second}"
    )
    assert [text] == node.told.texts
    assert [f"vitals: {text}"] == caplog.messages
    assert node.look(2) == 2  # takes the child's end in


@pytest.mark.parametrize("way", [STOPPED, TERMINATED], ids=["in good order", "told before it ran"])
def test_an_agent_that_ended_in_good_order_stays_away_without_a_word(way):
    node = Node(way)
    assert [1, 1, 1] == [node.look(1), node.look(3600), node.close(7200)]
    assert ([], None, True) == (node.told.codes, node.agent.pid, node.children.closed)


def test_between_two_looks_nobody_asks_after_the_child(monkeypatch):
    node = Node(KILLED, STOPPED)
    assert node.look(0) == 2
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "waitpid", lambda *given: asked.append(given) or (0, 0))
        for millisecond in range(2500):
            node.look(millisecond / 1000, ended=False)
    assert 2 == len(asked)
    assert LOOK_EVERY_NS == SECOND
    node.look(4)


def test_one_that_fails_again_and_again_is_tried_less_and_less_and_said_once(caplog):
    node = Node(*[FAILED] * 6, STOPPED)
    starts = {}
    with caplog.at_level(logging.WARNING, logger="trainvitals"):
        for second in range(1, 2400):
            starts.setdefault(node.look(second), second)
    assert {2: 1, 3: 12, 4: 73, 5: 674, 6: 1275, 7: 1876} == starts
    assert node.told.codes == ["agent_restarted"] * 3 + ["agent_gone"] + ["agent_restarted"] * 3
    gone = [
        text
        for text in caplog.messages
        if "this node's metrics are neither stored nor shipped" in text
    ]
    assert 1 == len(gone)
    assert "ended with exit code 3" in gone[0]
    assert "vitals agent --dir /runs" in gone[0]
    assert 5 == len(caplog.messages)  # then the log has heard all there is


def test_one_that_lived_long_is_started_again_at_once():
    lived = LIVED_NS // SECOND
    node = Node(*[KILLED] * 5, STOPPED)
    assert [node.look(1 + n * (lived + 1)) for n in range(6)] == [2, 3, 4, 5, 6, 6]
    assert {"agent_restarted"} == set(node.told.codes)


def test_a_machine_without_room_for_a_process_is_asked_again_later():
    node = Node(KILLED, "refused", STOPPED)
    assert [1, 1, 2] == [node.look(1), node.look(5), node.look(11)]
    assert {"agent.start": 1} == node.faults.counts
    assert node.told.texts == [
        f"the node's agent cannot be started: no more processes; restarted as pid "
        f"{node.children.pids[-1]}"
    ]
    node.look(13)


def test_at_the_end_it_is_started_at_once_to_take_in_the_last_rows():
    node = Node(FAILED, FAILED, STOPPED)
    assert [2, 2, 3] == [node.look(1), node.look(2), node.close(3)]
    assert node.children.closed
    os.waitpid(node.agent.pid, 0)


def test_where_somebody_else_takes_the_childs_end_it_is_started_again():
    node = Node(STOPPED, STOPPED)
    os.waitpid(node.agent.pid, 0)
    assert node.look(1, ended=False) == 2
    assert "its exit code is unknown" in node.told.texts[0]
    node.look(3)


def test_a_forked_child_does_not_look_after_it(monkeypatch):
    node = Node(KILLED)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        assert [1, 1] == [node.look(1), node.close(2)]
    os.waitpid(node.agent.pid, 0)


def test_what_goes_wrong_in_a_look_is_counted_and_stays_out_of_the_loop(monkeypatch):
    node = Node(KILLED)
    with monkeypatch.context() as patched:
        patched.setattr(os, "waitpid", lambda *given: 1 / 0)
        node.look(1)
    assert {"agent.look": 1} == node.faults.counts
    os.waitpid(node.agent.pid, 0)


KILLS = """
import os, signal, time
from pathlib import Path
from tests.support.inside import run_of
from tests.support.watched import Loop

def train(until, what):
    deadline = time.monotonic() + 60
    while not until():
        monitor.step(loop.forward(), max_norm=1.0)
        time.sleep(0.005)
        assert time.monotonic() < deadline, what

def spooled():
    return sum(p.stat().st_size for p in Path(os.environ["VITALS_DIR"]).glob("*/agents/*/spool/*"))

loop = Loop(mode="guard", run="killed")
with loop.monitor as monitor:
    agent = run_of(monitor).agent
    killed = agent.pid
    train(spooled, "the agent spools")
    os.kill(killed, signal.SIGKILL)
    train(lambda: agent.pid not in (killed, None), "it is started again")
    pid = agent.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(monitor.step_index, monitor.swallowed_errors)
"""


@pytest.mark.slow
def test_an_agent_killed_under_a_training_and_at_its_end_loses_and_doubles_nothing(tmp_path):
    (tmp_path / "shm").mkdir()
    environ = {
        **os.environ,
        "VITALS_SHM": str(tmp_path / "shm"),
        "VITALS_DIR": str(tmp_path / "runs"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLS], env=environ, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    num_steps, swallowed = done.stdout.split(maxsplit=1)
    assert swallowed == "{}\n"
    assert done.stderr.count("was killed by SIGKILL") == 2
    wait_for_agents(tmp_path / "runs")
    (spool,) = (tmp_path / "runs").glob("*/agents/*/spool")
    steps, events = [], []
    for _, raw in read_batches(spool):
        batch = decode_batch(raw)
        schema = batch.header.stream_schema
        if schema.stream == "steps":
            size = schema.row_size
            rows = [batch.rows[at : at + size] for at in range(0, len(batch.rows), size)]
            steps += [schema.unpack(row)["step"] for row in rows]
        elif schema.stream == "events":
            events += [row.event for row in decode_events(schema, batch.rows)]
    assert sorted(steps) == list(range(int(num_steps)))
    codes = [event.code for event in events if isinstance(event, Note)]
    assert codes.count("agent_restarted") == 2
    assert "rank_gone" not in codes
    assert ["finished"] == [event.state for event in events if isinstance(event, RunEnded)]
