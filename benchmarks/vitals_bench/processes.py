"""Servers that a benchmark starts: CPU time and memory, children included, and their end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_LOOK_SECONDS = 0.25
_IDLE_SECONDS = 0.011
"""CPU time between two looks that counts as idle: a tick of the kernel's clock."""


class Started:
    """A program with its log in a folder. Leaving the ``with`` ends it."""

    def __init__(
        self, name: str, args: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("w") as file:
            self.popen = subprocess.Popen(
                args, cwd=folder, stdout=file, stderr=file, env={**os.environ, **(env or {})}
            )
        self._process = psutil.Process(self.popen.pid)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        children = self._process.children(recursive=True) if self._process.is_running() else []
        self.popen.terminate()
        try:
            self.popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def wait_for(self, ready: Callable[[], bool], seconds: float = _START_SECONDS) -> None:
        """Return once it is ready.

        Raises:
            RuntimeError: it ended or took too long; with the end of its log.
        """
        until = time.monotonic() + seconds
        while self.popen.poll() is None and time.monotonic() < until:
            if ready():
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} is not ready: {self.log.read_text()[-2000:]}")

    def cpu_seconds(self) -> float:
        """Return the user's and system's time so far, of it and of all that it started."""
        return cpu_seconds_of(self._process)

    def resident_bytes(self) -> int:
        """Return its resident memory; that of its children too."""
        return sum(
            process.memory_info().rss
            for process in (self._process, *self._process.children(recursive=True))
        )

    def file_bytes(self) -> int:
        """Return how much of that are pages of files, which the system can drop: libraries."""
        return sum(
            process.memory_info().shared
            for process in (self._process, *self._process.children(recursive=True))
        )

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until it uses no CPU any more, for at most so long."""
        until, quiet, before = time.monotonic() + seconds, 0, self.cpu_seconds()
        while quiet < 2 and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            now = self.cpu_seconds()
            quiet = quiet + 1 if now - before <= _IDLE_SECONDS else 0
            before = now


def cpu_seconds_of(process: psutil.Process) -> float:
    """Return the CPU time of a process and of its children, ended ones included."""
    used = 0.0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of the pages that others have as well."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line of Pss")


def free_port() -> int:
    """Return a port of loopback that was free just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def program(name: str) -> str:
    """Return the path of a program on PATH or next to this Python, or ""."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) or ""


def said_by(args: Sequence[str]) -> str:
    """Return what a program prints, such as its version."""
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr
