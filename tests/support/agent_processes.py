"""Ranks and agents in processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

from tests.agent.builders import NODE, RUN, World
from tests.support.forked import COMMANDS

DEADLINE_SECONDS = 60.0


class Node:
    """Starts ranks and agents as processes on one world; kills what is left at the end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started: list[subprocess.Popen] = []

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        environment = {
            **os.environ,
            "VITALS_SHM": str(self.world.base.parent),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        process = COMMANDS.Popen(
            [sys.executable, "-m", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.started.append(process)
        return process

    def rank(self, number: int, *arguments: str) -> subprocess.Popen:
        where = (str(self.world.base), str(self.world.vitals_dir), str(number))
        process = self.start("tests.agent.rank_main", *where, *arguments)
        assert "ready\n" == process.stdout.readline()
        return process

    def agent(self, *arguments: str, **options) -> subprocess.Popen:
        where = ("--dir", str(self.world.vitals_dir), "--node", NODE)
        return self.start("vitals_agent", *where, *arguments, **options)

    def num_steps(self, rank: int) -> int:
        path = self.world.vitals_dir / RUN / f"{rank}.progress"
        return int.from_bytes(path.read_bytes(), "little")

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)
