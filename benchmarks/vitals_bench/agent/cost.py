"""CPU time of a whole agent process while eight ranks train, with its parts' shares."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trainvitals.identity import new_run_id
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from vitals_bench.agent.stub import collector_stub
from vitals_bench.rows import Row, at_most

NUM_RANKS = 8
NUM_GPUS = 8
STEPS_PER_SECOND = 4.0
GOAL_PER_CENT = 1.0


class Cost(msgspec.Struct, kw_only=True):
    """What an agent used in a stretch of its life."""

    seconds: float
    """Of the wall clock."""
    cpu_seconds: float
    """User's and system's, of the whole process."""
    parts: dict[str, float]
    """CPU seconds of each part; what is left is the loop, HTTP threads and the interpreter."""
    num_rows: int
    """Rows of the ranks that were spooled meanwhile."""
    pss_bytes: int
    """Its memory at the end, with its share of the pages that others have as well."""

    @property
    def cpu_per_second(self) -> float:
        """CPU seconds per second: 0.01 is 1% of a core."""
        return self.cpu_seconds / self.seconds


def agent_cost(*, seconds: float, warm_up_seconds: float = 4.0, ships: bool = False) -> Cost:
    """Run an agent with default settings next to eight ranks, and return its resource use.

    The ranks are processes that write a row of a real step's columns four times a second. The GPUs
    are played back (``vitals_bench.agent.replayed_nvml``): what a real driver's calls cost is not
    in it.

    Args:
        seconds: how long it is measured.
        warm_up_seconds: how long it runs before that.
        ships: to a collector that answers at once; else the run directory is all there is.
    """
    shm = tempfile.mkdtemp(dir=private_base(os.environ))
    try:
        with (
            tempfile.TemporaryDirectory() as runs,
            contextlib.ExitStack() as started,
        ):
            run_dir = RunDir.create(Path(runs), new_run_id(0))
            run_dir.command_key(create=True)
            url = started.enter_context(collector_stub()) if ships else ""
            env = {**os.environ, "VITALS_SHM": shm, "XDG_DATA_HOME": shm}
            ranks = []
            for rank in range(NUM_RANKS):
                args = ("rank", str(run_dir.path), str(rank), str(STEPS_PER_SECOND))
                ranks.append(started.enter_context(_process(*args, env=env)))
            for each in ranks:
                assert each.stdout is not None
                each.stdout.readline()  # it writes
            served = ("served", runs, str(warm_up_seconds), str(seconds), url)
            agent = started.enter_context(_process(*served, env=env))
            assert agent.stdout is not None
            return msgspec.json.decode(agent.stdout.read(), type=Cost)
    finally:
        shutil.rmtree(shm, ignore_errors=True)


@contextlib.contextmanager
def _process(module: str, *args: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", f"vitals_bench.agent.{module}", *args],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def measure_agent(*, quick: bool) -> Iterator[Row]:
    """Yield the agent's share of a core, without and with a collector, and its parts'."""
    seconds = 5.0 if quick else 60.0
    for ships, where in ((False, "run directory"), (True, "shipping to a collector")):
        cost = agent_cost(seconds=seconds, ships=ships)
        yield Row(
            name=f"agent: {NUM_RANKS} ranks, {NUM_GPUS} GPUs, {where}",
            ours=100 * cost.cpu_per_second,
            unit="% of a core",
            goal=at_most(GOAL_PER_CENT),
            note=f"{cost.num_rows / cost.seconds:.0f} rows of ranks a second; the GPUs are played "
            "back, the driver's own CPU is not in it",
        )
        yield Row(
            name=f"memory of an agent with {NUM_RANKS} ranks and {NUM_GPUS} GPUs, {where}",
            ours=cost.pss_bytes / 1e6,
            unit="MB",
            note="PSS",
        )
        for part, used in sorted(cost.parts.items(), key=lambda item: -item[1]):
            share = 100 * used / cost.seconds
            yield Row(name=f"of that, {part}", ours=share, unit="% of a core")
