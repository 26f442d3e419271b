"""The mirrors that an agent starts: where rank 0 is, once a run, and never in its way."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.agent.builders import NODE, OTHER_RUN, RUN, World
from vitals_agent import mirrors


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What each mirror that was started was told, a line each; it ends with code 7."""
    log = tmp_path / "started"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho gone >&2\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setattr(mirrors.sys, "executable", str(program))
    return log


def turned(agent, *, seconds: float = 60.0, until) -> None:
    for turn in range(int(seconds * 20)):
        agent.run_once(turn / 2)
        if until():
            return
        time.sleep(0.05)
    raise AssertionError("it does not come")


def test_each_run_with_its_rank_0_here_is_mirrored_once_and_a_failure_is_told(world, started):
    world.rank().step(0)
    world.rank(1, run_id=OTHER_RUN).step(0)
    agent = world.agent(mirrors=("tensorboard:/tb", "wandb:mine"))
    turned(agent, until=lambda: "mirror_ended" in codes(world))
    for turn in range(10):
        agent.run_once(100.0 + turn)
    folder = world.run_dir().path
    assert [
        f"-m trainvitals mirror {folder} --to tensorboard:/tb --to wandb:mine"
    ] == started.read_text().splitlines()
    (log,) = folder.glob("agents/*/mirror.log")
    assert "gone\n" == log.read_text()
    assert 0o600 == log.stat().st_mode & 0o777


def test_a_tracker_that_prints_without_end_does_not_fill_the_disk(world, started, tmp_path, caplog):
    go_on = tmp_path / "go-on"
    (tmp_path / "python").write_text(
        f"#!/bin/sh\nhead -c {mirrors.MAX_LOG_BYTES + 1} /dev/zero >&2\n"
        f"while ! test -e {go_on}; do sleep 0.05; done\necho later >&2\nexit 7\n"
    )
    rank = world.rank()
    rank.step(0)
    agent = world.agent(mirrors=("wandb",))
    log = world.run_dir().path / "agents" / NODE / "mirror.log"
    turned(agent, until=lambda: "mirror_log_emptied" in caplog.text)
    go_on.touch()
    turned(agent, until=lambda: "mirror_ended" in codes(world))
    assert "later\n" == log.read_text()
    assert [0] == world.steps()


def codes(world: World) -> list[str]:
    return [getattr(row.event, "code", "") for row in world.events()]


def test_a_run_that_only_the_collector_has_is_read_from_there(world, started):
    world.rank().step(0)
    agent = world.agent(mirrors=("wandb",), mirror_source=("--collector", "https://c:1"))
    turned(agent, until=lambda: "mirror_ended" in codes(world))
    assert (
        f"-m trainvitals mirror {RUN} --collector https://c:1 --to wandb\n" == started.read_text()
    )


def test_by_default_nothing_is_started(world, started):
    world.rank().step(0)
    agent = world.agent()
    for turn in range(5):
        agent.run_once(turn / 2)
    assert not started.exists()


def test_a_mirror_that_cannot_be_started_keeps_nothing_from_the_spool(world, monkeypatch):
    monkeypatch.setattr(mirrors.sys, "executable", "/nowhere/python")
    world.rank().step(0, 1)
    agent = world.agent(mirrors=("wandb",))
    agent.cycle(0.0)
    assert [0, 1] == world.steps()
    assert 1 == agent.faults.counts["mirror"]


def test_a_real_mirror_goes_on_when_the_agent_stops(world, tmp_path):
    """It waits for nothing of the agent's, and ends where it is told to."""
    world.rank().step(0)
    agent = world.agent(mirrors=("mlflow:http://127.0.0.1:1",))
    turned(agent, until=lambda: bool(list(world.run_dir().path.glob("agents/*/mirror.log"))))
    pid = agent._mirrors._pids[RUN]
    assert pid is not None
    agent.stop()
    try:
        assert (0, 0) == os.waitpid(pid, os.WNOHANG)
        assert os.getsid(pid) != os.getsid(0)
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
