"""``vitals up`` and ``vitals run`` as a person uses them: exit codes, Ctrl-C, and nothing left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.builders import World
from tests.e2e.lab import Lab, open_lab, stored_rows, until
from tests.support.examples import one_in
from tests.trainer_hooks.short_demo import PACE, SMALL
from trainvitals.cli.supervise import MAX_REVIVALS, ChildProgram, ProgramStack
from trainvitals.identity import safe_node_id
from trainvitals.io.private import private_base

pytestmark = pytest.mark.dist

STOP_SECONDS = 60.0


@pytest.fixture
def lab(tmp_path):
    with open_lab(tmp_path) as opened:
        yield opened


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def home(lab: Lab, name: str = "home") -> tuple[str, Path]:
    return "--dir", lab.folder / name


def press_ctrl_c(process: subprocess.Popen[bytes]) -> int:
    """Send SIGINT to the foreground group, as a terminal does; return the exit code."""
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(STOP_SECONDS)


def assert_an_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    for word in ("error: ", *words):
        assert word in done.stderr


@pytest.mark.slow
def test_up_serves_until_ctrl_c_and_refuses_a_second_one_beside_it(lab):
    up = lab.start_vitals("up", *home(lab), "--control")
    until(lambda: "VITALS_DIR=" in lab.log("up").read_text(), "vitals up is up")
    said = re.search(r"^collector: https://\S+ \(data in (.+)\)$", lab.log("up").read_text(), re.M)
    assert said, lab.log("up").read_text()
    assert 0 == lab.vitals("alerts", "list", "--collector", said[1]).returncode
    names = " ".join(lab.alive().values())
    for program in ("trainvitals collector", "trainvitals agent", "trainvitals dashboard"):
        assert program in names
    assert "--control" in names, "the dashboard was told"

    second = lab.vitals("up", *home(lab))
    assert_an_error(second, str(lab.folder / "home"), "another")
    assert up.poll() is None

    os.killpg(up.pid, signal.SIGINT)
    with contextlib.suppress(AssertionError):
        until(lambda: up.poll() is not None, "it is ending", seconds=0.3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(up.pid, signal.SIGINT)  # an impatient person presses it again
    assert 130 == up.wait(STOP_SECONDS), lab.log("up").read_text()
    assert {} == lab.alive()
    assert "Traceback" not in lab.log("up").read_text()


@pytest.mark.slow
def test_the_agent_finds_a_collector_that_was_started_again_at_another_port(lab):
    environ = lab.environ()
    with ProgramStack(lab.folder / "home", environ) as stack, socket.socket() as squatter:
        first = stack.start_collector()
        stack.start_agent()
        rank = World(private_base(environ), stack.runs).rank(
            node=safe_node_id(socket.gethostname())
        )

        def num_stored() -> int:
            keys = [key for key, _ in stored_rows(stack.data)]
            return sum(key[2] == "steps" for key in keys)

        rank.step(0)
        until(lambda: num_stored() == 1, "the first collector has the row")
        (pid,) = [pid for pid, words in lab.alive().items() if "trainvitals collector" in words]
        os.kill(pid, signal.SIGKILL)
        until(lambda: (stack.find_ended_program() or pid) != pid, "the collector is gone")
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        assert first != stack.start_collector()
        rank.step(1)
        until(lambda: num_stored() == 2, "the second collector has the next row")
        rank.close()
    assert {} == lab.alive()


@pytest.mark.slow
def test_what_dies_beside_a_training_is_started_again_and_the_training_goes_on(lab):
    goes_on = lab.folder / "goes_on"
    goes_on.touch()
    program = "import os, sys, time\nwhile os.path.exists(sys.argv[1]): time.sleep(0.1)"
    run = lab.start_vitals("run", *home(lab), "--", sys.executable, "-c", program, str(goes_on))

    def agents() -> list[int]:
        return [pid for pid, words in lab.alive().items() if "trainvitals agent" in words]

    until(lambda: len(agents()) == 1, "the agent runs")
    (killed,) = agents()
    os.kill(killed, signal.SIGKILL)
    until(lambda: agents() not in ([], [killed]), "another agent has been started")
    goes_on.unlink()
    assert 0 == run.wait(STOP_SECONDS), lab.log("run").read_text()
    assert "the agent ended with exit code -9; it is started again" in lab.log("run").read_text()
    assert {} == lab.alive()


def test_what_dies_again_and_again_stays_away_and_it_is_said(lab):
    stack = ProgramStack(lab.folder / "home", lab.environ())
    stack.home.mkdir()
    (log := stack.home / "agent.log").touch()
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    stack._children.append(child := ChildProgram("agent", process, log, ("--no-such-option",)))
    said = []
    for _ in range(MAX_REVIVALS + 1):
        child.process.wait()
        said += stack.restart_ended_programs()
    assert ["started again"] * MAX_REVIVALS == [text[-13:] for text in said[:MAX_REVIVALS]]
    assert "it stays away. Its log is" in said[-1]
    assert [] == list(stack.restart_ended_programs())


def test_codes_that_the_dashboard_tells_are_shown_once_in_the_terminal_of_up(lab):
    stack = ProgramStack(lab.folder / "home", lab.environ())
    stack.home.mkdir()
    log = stack.home / "dashboard.log"
    log.write_text("http://x.localhost:1/?token=t\nControl code: AB-12  (asked for at 10:00:00)\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        stack._children.append(ChildProgram("dashboard", process, log))
        assert ["Control code: AB-12  (asked for at 10:00:00)"] == stack.control_codes()
        assert [] == stack.control_codes()
        with log.open("a") as more:
            more.write("Control code: CD-34  (asked for at 10:01:00)\n")
        assert ["Control code: CD-34  (asked for at 10:01:00)"] == stack.control_codes()


def test_what_lacks_a_package_is_not_started_again_and_it_is_said_in_a_line(lab):
    stack = ProgramStack(lab.folder / "home", lab.environ())
    stack.home.mkdir()
    (log := stack.home / "agent.log").write_text(
        "error: `vitals agent` needs the package psutil, which is not installed [V120]\n\n"
        "hint: pip install psutil\n"
    )
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    stack._children.append(ChildProgram("agent", process, log))
    assert [
        "no agent: `vitals agent` needs the package psutil, which is not installed; pip install "
        "psutil"
    ] == list(stack.restart_ended_programs())
    assert [] == list(stack.restart_ended_programs())


WITHOUT = """
import os, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] == os.environ.get("NOT_INSTALLED")
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A sitecustomize by which one package is as if it were not installed."""


@pytest.mark.parametrize(
    ("package", "line", "agent"),
    one_in(
        2,
        [
            ("uvicorn", "vitals: no collector and no dashboard: `vitals collector` needs", None),
            (
                "streamlit",
                "vitals: no dashboard: the dashboard needs streamlit; pip install",
                "off",
            ),
        ],
    ),
)
def test_run_trains_without_what_is_not_installed_and_says_so_in_a_line(lab, package, line, agent):
    (lab.folder / "sitecustomize.py").write_text(WITHOUT)
    paths = os.pathsep.join((str(lab.folder), os.environ.get("PYTHONPATH", "")))
    program = (
        "import os, sys; print(os.environ['VITALS_DIR'], os.environ.get('VITALS_AGENT'));"
        "print('to stderr', file=sys.stderr); sys.exit(7)"
    )
    done = lab.vitals(
        *("run", *home(lab), "--", sys.executable, "-c", program),
        PYTHONPATH=paths,
        NOT_INSTALLED=package,
    )
    assert (7, f"{lab.folder / 'home' / 'runs'} {agent}\n") == (done.returncode, done.stdout)
    assert "to stderr\n" in done.stderr, "the command's own output and exit code are kept"
    assert 1 == sum(text.startswith(line) for text in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr
    assert {} == lab.alive()


@pytest.mark.slow
def test_run_gives_128_and_the_number_of_the_signal_that_killed_the_command(lab):
    done = lab.vitals("run", *home(lab), "--", "sh", "-c", "kill -KILL $$")
    assert 128 + signal.SIGKILL == done.returncode, done.stderr
    assert {} == lab.alive()


def test_ctrl_c_ends_a_training_and_all_around_it(lab):
    training = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    script = ("-m", "tests.trainer_hooks.short_demo", "--steps", "100000", "--mode", "guard")
    words = ("--", sys.executable, *training, *script)
    run = lab.start_vitals("run", *home(lab), *words, **{PACE: "0.02", SMALL: "1"})
    lab.runs = lab.folder / "home" / "runs"
    run_id = lab.run_id()
    spool = lab.runs / run_id / "agents"
    until(lambda: list(spool.glob("*/spool/*.tvs")), "the agent keeps what the ranks write")
    assert 130 == press_ctrl_c(run), lab.log("run").read_text()
    assert {} == lab.alive()
    assert "got signal: 15" not in lab.log("run").read_text(), "torchrun was not let finish"
    shown = lab.vitals("runs", lab.runs, "--format", "json")
    assert (0, "") == (shown.returncode, shown.stderr)


@pytest.mark.slow
def test_sigterm_to_run_alone_ends_the_command_and_keeps_its_exit_code(lab):
    handles = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"
    waits = f"{handles}; print('on', flush=True); signal.pause()"
    run = lab.start_vitals("run", *home(lab), "--", sys.executable, "-c", waits)
    until(lambda: "on\n" in lab.log("run").read_text(), "the command runs")
    run.send_signal(signal.SIGTERM)
    assert 9 == run.wait(STOP_SECONDS), lab.log("run").read_text()
    assert {} == lab.alive()


def test_a_command_that_is_not_there_is_said(lab):
    done = lab.vitals("run", *home(lab), "--", "no-such-trainer", "--steps", "3")
    assert_an_error(done, "no-such-trainer", "cannot be run")
    assert 2 == done.returncode
    assert {} == lab.alive()


@pytest.mark.nightly
def test_a_port_that_is_taken_is_said_and_nothing_stays(lab):
    with taken_port() as port:
        done = lab.vitals("up", *home(lab), "--port", port)
    assert_an_error(done, str(port))
    assert {} == lab.alive()


@pytest.mark.parametrize("where", ["in a file", "not ours to write"])
def test_a_folder_that_cannot_be_used_is_said(lab, where):
    if where == "in a file":
        (lab.folder / "file").write_text("")
        folder = lab.folder / "file" / "home"
    else:
        folder = Path("/proc/vitals")  # nobody can, root neither
    done = lab.vitals("up", "--dir", folder)
    assert_an_error(done, str(folder), "cannot be used")
    assert {} == lab.alive()
