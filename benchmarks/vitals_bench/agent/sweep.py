"""Cost of the agents of a sweep: many small jobs on one node, each with its own agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.io.journal import JournalWriter, announce_run, journal_directory
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.rows import Value
from vitals_bench.agent.rank import NODE
from vitals_bench.processes import cpu_seconds_of, pss_bytes
from vitals_bench.rows import Row, at_most

NUM_JOBS = 50
GOAL_BYTES = 60e6
GOAL_PER_CENT = 0.5
_START_SECONDS = 120.0


class SweepCost(msgspec.Struct, kw_only=True):
    """What one agent of the sweep used, on average."""

    pss_bytes: float
    """Its memory, with its share of the pages that it has in common with others."""
    idle: float
    """CPU seconds per second while no job takes a step."""
    busy: float
    """CPU seconds per second while each job takes a step a second."""


def sweep_cost(num_jobs: int, *, seconds: float) -> SweepCost:
    """Start an agent for each job as a rank does, and return what one of them uses.

    This process is the one rank of every job: it writes rows of a real step's columns.

    Args:
        num_jobs: jobs on this node.
        seconds: how long each of the two states is measured.
    """
    shm = tempfile.mkdtemp(dir=private_base(os.environ))
    try:
        with tempfile.TemporaryDirectory() as runs, contextlib.ExitStack() as started:
            env = {**os.environ, "VITALS_SHM": shm, "VITALS_NODE": NODE, "XDG_DATA_HOME": shm}
            base = private_base(env)
            jobs = [_Job(Path(runs), base, number) for number in range(num_jobs)]
            agents = [started.enter_context(_agent(job.run_dir, env)) for job in jobs]
            spooled = [job.run_dir.agent_dir(NODE) / "spool" for job in jobs]
            _take_steps(jobs)
            _wait(lambda: all(map(_has_rows, spooled)))
            idle = _cpu_per_second(agents, lambda: time.sleep(1.0), seconds)

            def step() -> None:
                _take_steps(jobs)
                time.sleep(1.0)

            busy = _cpu_per_second(agents, step, seconds)
            pss = sum(pss_bytes(agent.pid) for agent in agents)
            for job in jobs:
                job.journal.close()
            return SweepCost(pss_bytes=pss / num_jobs, idle=idle / num_jobs, busy=busy / num_jobs)
    finally:
        shutil.rmtree(shm, ignore_errors=True)


class _Job:
    """A run of one rank, which is this process."""

    def __init__(self, runs: Path, base: Path, number: int) -> None:
        self.run_dir = RunDir.create(runs, new_run_id(number))
        self.run_dir.command_key(create=True)
        identity = Identity(
            run_id=self.run_dir.run_id,
            incarnation=new_incarnation(),
            source="rank:0",
            node=NODE,
            pid=os.getpid(),
            rank=0,
            local_rank=0,
            world_size=1,
            started_unix_ns=time.time_ns(),
            started_monotonic_ns=time.monotonic_ns(),
        )
        folder = announce_run(base, self.run_dir.run_id, self.run_dir.path)
        Mailbox.create(folder / "mailbox").close()
        self.journal = JournalWriter(journal_directory(folder, identity), identity)
        self._schema = steps_schema()
        self._stream = self.journal.open_stream(self._schema)
        self._step = 0

    def take_step(self) -> None:
        columns = enumerate(self._schema.columns)
        row: list[Value] = [i if column.kind == "i8" else i / 7 for i, column in columns]
        row[0] = self._step
        self._stream.append(row)
        self._step += 1


def _take_steps(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.take_step()


@contextlib.contextmanager
def _agent(run_dir: RunDir, env: dict[str, str]) -> Iterator[psutil.Process]:
    """Run an agent as the first rank of a node starts it."""
    module = (sys.executable, "-m", "vitals_agent")
    told = ("--dir", str(run_dir.path.parent), "--run", run_dir.run_id, "--child")
    with (run_dir.agent_dir(NODE) / "agent.log").open("w") as log:
        process = subprocess.Popen([*module, *told], env=env, stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def _has_rows(spool: Path) -> bool:
    return any(path.stat().st_size for path in spool.glob("*.tvs"))


def _wait(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"not every agent had rows after {_START_SECONDS:.0f} s")
        time.sleep(0.5)


def _cpu_per_second(
    agents: Sequence[psutil.Process], turn: Callable[[], None], seconds: float
) -> float:
    """Return the CPU seconds per second of all of them together while ``turn`` is repeated."""
    began, before = time.monotonic(), sum(map(cpu_seconds_of, agents))
    while time.monotonic() - began < seconds:
        turn()
    return (sum(map(cpu_seconds_of, agents)) - before) / (time.monotonic() - began)


def measure_sweep(*, quick: bool) -> Iterator[Row]:
    """Yield the memory and the share of a core of one agent among those of a whole sweep."""
    num_jobs = 2 if quick else NUM_JOBS
    cost = sweep_cost(num_jobs, seconds=3.0 if quick else 60.0)
    name = f"one agent of {num_jobs} jobs on a node"
    yield Row(
        name=f"{name}: memory",
        ours=cost.pss_bytes / 1e6,
        unit="MB",
        goal=at_most(GOAL_BYTES / 1e6),
        note=f"PSS; all together {cost.pss_bytes * num_jobs / 1e6:,.0f} MB",
    )
    for state, used in (("no steps", cost.idle), ("a step a second", cost.busy)):
        yield Row(
            name=f"{name}: {state}",
            ours=100 * used,
            unit="% of a core",
            goal=at_most(GOAL_PER_CENT),
            note=f"all together {100 * used * num_jobs:.1f} % of a core; no GPUs",
        )
