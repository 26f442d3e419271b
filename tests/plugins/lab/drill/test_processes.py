"""Processes that a drill leaves: none, even if it is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from vitals_plugins.lab.drill.faults import VARIABLE
from vitals_plugins.lab.drill.processes import end_processes, find_processes, guarded

PARENT = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL).pid)"
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def start(directory, *command, **options):
    """Start a process of a drill in a session of its own, as ranks and agents have it."""
    environ = {**os.environ, VARIABLE: json.dumps({"record": f"{directory}/records.jsonl"})}
    return subprocess.Popen(command, env=environ, start_new_session=True, **options)


def test_a_process_that_its_parent_left_is_ended_with_the_drill(tmp_path):
    with guarded(tmp_path):
        parent = start(tmp_path, sys.executable, "-c", PARENT, *SLEEPER, stdout=subprocess.PIPE)
        orphan = psutil.Process(int(parent.communicate()[0]))
        assert [orphan] == find_processes(tmp_path)
    assert [] == find_processes(tmp_path)
    assert not tmp_path.exists()


def test_a_stopped_process_is_ended_and_that_of_another_training_continues(tmp_path):
    first, second = (start(tmp_path / name, *SLEEPER) for name in ("1", "10"))
    first.send_signal(signal.SIGSTOP)
    until(lambda: psutil.STATUS_STOPPED == psutil.Process(first.pid).status())
    end_processes(tmp_path / "1")
    assert first.wait() < 0
    assert [second.pid] == [each.pid for each in find_processes(tmp_path)]
    end_processes(tmp_path)
    assert second.wait() < 0


def working_below(directory: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is below this one."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if directory in Path(process.cwd()).parents:
                processes.append(process)
    return processes


@pytest.mark.dist
def test_a_killed_drill_leaves_no_process_and_no_directory(tmp_path):
    project, temporary = tmp_path / "project", tmp_path / "t"
    project.mkdir()
    temporary.mkdir()
    shutil.copy(Path(__file__).with_name("loop.py"), project)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py")
    vitals = (sys.executable, "-m", "trainvitals", "drill", "--unprotected", "--budget", "600")
    drill = subprocess.Popen(
        [*vitals, "--", sys.executable, *torchrun],
        cwd=project,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )

    def words() -> str:
        return "\n".join(" ".join(each.cmdline()) for each in find_processes(temporary))

    try:
        for word in ("trainvitals collector", "loop.py", "agent"):
            until(lambda word=word: word in words())
    finally:
        drill.kill()
        drill.wait()
    until(lambda: not find_processes(temporary) and not working_below(temporary))
    until(lambda: not list(temporary.glob("vd-*")))
