"""Ends the processes of a drill: its trainings, their agents, and all that these started.

A process belongs to a drill if its variable ``VITALS_DRILL`` names the drill's directory, or if it
is a descendant of such a process. Ranks and agents have sessions of their own, and lose their
parents; the variable stays.

``python -m vitals_plugins.lab.drill.processes DIRECTORY`` is the guardian of a drill: it waits for
the end of its input, which is that of the drill, even by SIGKILL. Then it ends what is left, and
deletes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from vitals_plugins.lab.drill.faults import VARIABLE

STOP_SECONDS = 10.0
LOOK_SECONDS = 0.05
MAX_ROUNDS = 10
"""Scans for processes that were started during the scan before."""


def find_processes(directory: Path) -> list[psutil.Process]:
    """Return the processes of a drill whose variable names a path in this directory."""
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to another user
            if f"{directory}/" in process.environ().get(VARIABLE, ""):
                children = process.children(recursive=True)
                processes |= {each.pid: each for each in (process, *children)}
    processes.pop(os.getpid(), None)
    return [each for each in processes.values() if _is_running(each)]


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process of the drill runs; its parent may not have waited for its end."""
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def end_processes(directory: Path, seconds: float = STOP_SECONDS) -> None:
    """End the processes of a drill in this directory; SIGTERM first, SIGKILL after ``seconds``."""
    for turn in range(MAX_ROUNDS):
        processes = find_processes(directory)
        if not processes:
            return
        # A stopped rank must continue to end.
        numbers = (signal.SIGKILL,) if turn else (signal.SIGTERM, signal.SIGCONT)
        for number in numbers:
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(number)
        end = time.monotonic() + seconds
        while any(map(_is_running, processes)) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)


@contextmanager
def guarded(directory: Path) -> Iterator[None]:
    """End the processes of a drill at the end, also if the drill is killed."""
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    try:
        yield
    finally:
        guardian.stdin.close()
        guardian.wait()


def main(directory: Path) -> None:
    """Wait for the end of a drill, then end its processes and delete its directory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(directory, seconds=1.0)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
