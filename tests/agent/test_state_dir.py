"""The folder of an agent on a file system that has no locks, and agents that are about to leave."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.agent.builders import NODE
from trainvitals.errors import UsageError
from vitals_agent import state_dir as home_module
from vitals_agent.daemon import wait_for_release
from vitals_agent.state_dir import AgentInfo, AgentStateDir


@pytest.fixture
def no_locks(tmp_path, monkeypatch):
    """A folder of runs whose file system refuses flock, as Lustre without that option does."""
    folder = tmp_path / "lustre"
    real = fcntl.flock

    def flock(fd, operation):
        if str(folder) in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSYS, "Function not implemented")
        real(fd, operation)

    monkeypatch.setattr(home_module.fcntl, "flock", flock)
    return folder / "agents" / "node"


def test_without_locks_the_nodes_own_folder_keeps_a_second_agent_out(no_locks, world):
    first, second = AgentStateDir(no_locks, world.base), AgentStateDir(no_locks, world.base)
    first.acquire()
    with pytest.raises(UsageError, match="serves this folder on this node"):
        second.acquire()
    AgentStateDir(no_locks.with_name("other"), world.base).acquire()
    first.release()
    second.acquire()
    assert AgentStateDir(no_locks, world.base).is_held_by_another()


def test_to_ask_whether_an_agent_has_a_folder_changes_nothing_there(world):
    folder = world.vitals_dir / "agents" / "node"
    asking = AgentStateDir(folder, world.base)
    assert (False, False) == (asking.is_held_by_another(), folder.exists())
    holder = AgentStateDir(folder, world.base)
    holder.acquire()
    holder.publish(AgentInfo(pid=1, node=NODE, url="", token_file=""))
    assert asking.is_held_by_another()
    holder.release()
    (folder / "agent.json").write_text("left by one that was killed")
    before = sorted(path.name for path in folder.iterdir())
    assert not asking.is_held_by_another()
    assert before == sorted(path.name for path in folder.iterdir())


def test_without_locks_the_nodes_own_lock_tells_whether_a_folder_is_held(no_locks, world):
    holder, asking = AgentStateDir(no_locks, world.base), AgentStateDir(no_locks, world.base)
    assert not asking.is_held_by_another()
    holder.acquire()
    assert asking.is_held_by_another()
    holder.release()
    assert not asking.is_held_by_another()


def wait(world, *, giving_back: AgentStateDir) -> int:
    """Wait for agents that leave; return how many looks it took; the third gives it back."""
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            giving_back.release()

    wait_for_release(world.base, world.vitals_dir, sleep=look, stopwatch=lambda: len(looks))
    return len(looks)


def test_an_agent_whose_ranks_are_gone_is_waited_for(world):
    world.rank(pid=0).step(0)
    holder = AgentStateDir(world.run_dir().agent_dir(NODE), world.base)
    holder.acquire()
    assert 3 == wait(world, giving_back=holder)


def test_an_agent_with_a_rank_that_lives_is_not_waited_for(world):
    world.rank(pid=0).step(0)
    world.rank(rank=1, pid=os.getpid()).step(0)
    holder = AgentStateDir(world.run_dir().agent_dir(NODE), world.base)
    holder.acquire()
    assert 0 == wait(world, giving_back=holder)
    holder.release()


def test_an_agent_that_never_leaves_is_not_waited_for_without_end(world):
    world.rank(pid=0).step(0)
    holder = AgentStateDir(world.run_dir().agent_dir(NODE), world.base)
    holder.acquire()
    assert 20 == wait(world, giving_back=AgentStateDir(world.base, world.base))
    holder.release()


def test_an_agent_over_a_folder_without_locks_copies_all_and_leaves_the_journal_free(
    world, no_locks
):
    world.vitals_dir = no_locks.parents[1]
    rank = world.rank()
    agent = world.agent()
    rank.step(*range(5))
    agent.cycle(0.0)
    assert list(range(5)) == world.steps()
