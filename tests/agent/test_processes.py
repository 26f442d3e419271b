"""Real processes, killed at any moment: what was written is in the spool, every row once."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.agent.builders import NODE, RUN, STEPS, World
from tests.agent.rank_main import row
from tests.support.agent_processes import DEADLINE_SECONDS, Node, until


@pytest.fixture
def node(world):
    made = Node(world)
    yield made
    made.close()


def assert_every_row_once(world: World, rank: int, num_steps: int) -> None:
    """The spool holds each step the rank wrote, byte for byte, once.

    A rank that was killed may have written one row more than it could count.
    """
    found = {
        (seq, raw): count
        for (source, stream, seq, raw), count in world.spooled().items()
        if (source, stream) == (f"rank:{rank}", "steps")
    }
    num_found = len(found)
    assert num_found in (num_steps, num_steps + 1)
    expected = {(seq, STEPS.pack(seq, row(seq))): 1 for seq in range(num_found)}
    assert expected == found


def no_traceback(process: subprocess.Popen) -> str:
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert "Traceback" not in errors
    return errors


def test_ranks_killed_in_mid_step_leave_every_row_in_the_spool_once(node, world):
    ranks = [node.rank(0), node.rank(1)]
    agent = node.agent()
    until(lambda: len(world.steps(0)) > 50, "the agent spools")
    for rank in ranks:
        rank.kill()
        rank.wait()
    until(lambda: world.notes().count("rank_gone") == 2, "the agent says that the ranks are gone")
    agent.terminate()
    assert 0 == agent.wait(DEADLINE_SECONDS)
    no_traceback(agent)
    for number in (0, 1):
        assert_every_row_once(world, number, node.num_steps(number))
    assert [] == [path.name for path in (world.base / RUN).glob("rank-*")]


@pytest.mark.nightly
def test_an_agent_killed_again_and_again_loses_and_doubles_nothing(node, world):
    rank = node.rank(0)
    for pause in (0.9, 0.55, 1.2, 0.7):
        agent = node.agent()
        until(lambda: any(world.spool().glob("*.tvs")), "the agent spools")
        agent_until = time.monotonic() + pause
        until(lambda at=agent_until: time.monotonic() >= at, "a moment to be killed at")
        agent.kill()
        agent.communicate()
    rank.communicate("stop\n")
    assert 0 == rank.returncode
    last = node.agent("--once")
    no_traceback(last)
    assert 0 == last.returncode
    assert_every_row_once(world, 0, node.num_steps(0))
    assert "rank_gone" not in world.notes()
    assert ["RunEnded"] == [type(row.event).__name__ for row in world.events("rank:0")]


def test_while_the_agent_is_stopped_ranks_go_on_and_nothing_is_missing_afterwards(node, world):
    rank = node.rank(0)
    agent = node.agent()
    until(lambda: len(world.steps(0)) > 10, "the agent spools")
    agent.send_signal(signal.SIGSTOP)
    before = node.num_steps(0)
    until(lambda: node.num_steps(0) > before + 200, "the rank goes on")
    agent.send_signal(signal.SIGCONT)
    rank.communicate("stop\n")
    agent.terminate()
    no_traceback(agent)
    assert 0 == agent.returncode
    assert_every_row_once(world, 0, node.num_steps(0))


def test_a_ranks_child_ends_by_itself_when_its_rank_is_killed_and_all_is_spooled(node, world):
    rank = node.rank(0, "--agent")
    until(lambda: len(world.steps(0)) > 10, "the child spools")
    address = world.spool().parent / "agent.json"
    rank.kill()
    rank.wait()
    until(lambda: not address.exists(), "the child ends")
    assert_every_row_once(world, 0, node.num_steps(0))
    assert 1 == world.notes().count("rank_gone")


def test_a_ranks_child_ends_by_itself_when_its_rank_says_goodbye(node, world):
    rank = node.rank(0, "--agent")
    until(lambda: len(world.steps(0)) > 10, "the child spools")
    rank.stdin.write("stop\n")
    rank.stdin.flush()
    until(lambda: rank.poll() is not None, "the rank ends")
    assert 0 == rank.returncode
    until(lambda: not (world.spool().parent / "agent.json").exists(), "the child ends")
    assert_every_row_once(world, 0, node.num_steps(0))
    assert "rank_gone" not in world.notes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_is_told_to_stop_drains_and_ends(node, world, number):
    rank = node.rank(0)
    agent = node.agent()
    until(lambda: len(world.steps(0)) > 10, "the agent spools")
    rank.communicate("stop\n")
    agent.send_signal(number)
    assert 0 == agent.wait(DEADLINE_SECONDS)
    no_traceback(agent)
    assert_every_row_once(world, 0, node.num_steps(0))


def test_a_second_agent_says_who_is_there_and_a_second_child_leaves_quietly(node, world):
    first = node.agent()
    home = world.vitals_dir / "agents" / NODE
    until((home / "agent.json").exists, "the first agent listens")
    second, child = node.agent(), node.agent("--child")
    errors = no_traceback(second)
    assert 2 == second.returncode
    assert f"an agent (pid {first.pid}," in errors
    assert "" == no_traceback(child)
    assert 0 == child.returncode


def test_a_disk_that_refuses_is_counted_and_nothing_is_lost_when_it_has_room_again(node, world):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

    rank = node.rank(0)
    agent = node.agent(preexec_fn=small_files)
    until(lambda: "part failed part=tailer" in agent.stderr.readline(), "the disk refuses")
    stuck = len(world.steps(0))
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    until(lambda: len(world.steps(0)) > stuck + 200, "the agent goes on")
    rank.communicate("stop\n")
    agent.terminate()
    no_traceback(agent)
    assert 0 == agent.returncode
    assert_every_row_once(world, 0, node.num_steps(0))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "nonsense"], "--listen is 'nonsense'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "it must be HOST:PORT"),
        (["--listen", "203.0.113.7:0"], "--listen 203.0.113.7:0 cannot be used"),
        (["--run", "../../etc"], "run id is '../../etc'; it must be a ULID"),
        (["--node", "a/b"], "call themselves a-b"),
        (["--node", "a:b"], "--node is 'a:b'"),
        (["--collector", "nonsense"], "it must be https://host:port"),
        (["--collector", "https://127.0.0.1:9", "--token-file", "/absent"], "/absent"),
        (["--colector", "x"], "No such option"),
    ],
)
def test_a_mistake_is_answered_with_its_value_and_a_way_out(node, arguments, text):
    agent = node.agent(*arguments, "--once")
    errors = no_traceback(agent)
    assert 2 == agent.returncode
    assert text in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--collector", "nonsense"],
        ["--collector", "https://127.0.0.1:9", "--token-file", "/absent"],
    ],
)
def test_a_child_that_cannot_ship_says_so_in_the_run_and_keeps_everything(node, world, arguments):
    rank = node.rank(0)
    child = node.agent("--child", *arguments)
    until(lambda: len(world.steps(0)) > 10, "the child spools")
    rank.communicate("stop\n")
    assert "nothing is shipped" in no_traceback(child)
    assert 1 == world.notes().count("not_shipped")
    assert_every_row_once(world, 0, node.num_steps(0))


def test_a_folder_that_cannot_be_made_is_said(node, tmp_path):
    (tmp_path / "file").write_text("")
    agent = node.start("vitals_agent", "--dir", str(tmp_path / "file" / "runs"), "--once")
    errors = no_traceback(agent)
    assert 1 == agent.returncode
    assert "cannot be used" in errors


def test_a_missing_package_is_said_with_what_to_install():
    code = "import sys; sys.modules['psutil'] = None; from vitals_agent.cli import main; main()"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code, "--once"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert "pip install trainvitals\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert 2 == done.returncode


def test_help_ends_with_an_example(node):
    agent = node.agent("--help")
    text, _ = agent.communicate(timeout=DEADLINE_SECONDS)
    assert (0, True) == (agent.returncode, "Example: vitals agent --dir" in text)


def test_the_command_is_light_and_the_agent_brings_no_server_packages(node):
    code = (
        "import sys, vitals_agent.cli\n"
        "heavy = {'prometheus_client', 'psutil', 'httpx', 'numpy', 'pynvml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import vitals_agent.agent\n"
        "banned = {'sqlalchemy', 'fastapi', 'torch', 'httpx', 'pynvml'} & set(sys.modules)\n"
        "assert not banned, banned"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths}
    )
