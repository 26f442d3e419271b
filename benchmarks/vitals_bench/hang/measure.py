"""Real torchrun jobs on gloo that hang in a known way; a real agent looks at them.

The agent runs in the benchmark's own process, as `vitals agent` would: the benchmark reads what it
wrote.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainvitals.detect.hang import HangConfig
from trainvitals.errors import VitalsError
from trainvitals.io.spool import read_batches
from trainvitals.records import EventRow, Finding, FindingRaised, Note, StacksTaken, decode_events
from trainvitals.wire import decode_batch
from vitals_agent.agent import Agent, AgentConfig
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most, exactly

NODE = "bench"
START_SECONDS = 90.0
"""A job of some ranks may take this long until it steps, on a busy machine."""
PAUSE_SECONDS = 6.0
"""Steps before the fault: what is usual must be known."""
SHORTENED = HangConfig(computing_seconds=12.0)
"""For most trials of a rank that computes: the limit is 180 s for users, as in the others."""
TRIALS = 10
_MOST_SECONDS = 60.0
"""A trial is watched for so long, one with the users' limit for computing ranks until 200 s."""
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to hang."""

    title: str
    name: str
    place: str = ""
    rank: int = 1
    reason: str = ""
    """As the verdict calls it; "" where several are right."""
    seconds: float = 0.0
    is_of_launch: bool = False
    config: HangConfig = field(default_factory=HangConfig)
    trials: int = TRIALS
    training: Literal["ddp", "nccl", "pipeline"] = "ddp"
    """DDP with gloo, DDP with NCCL on a GPU per rank, or a pipeline with a stage per rank."""

    @property
    def watched_seconds(self) -> float:
        """How long one is watched for after it began, while nobody is paged."""
        is_long = self.name == "spin" and self.config == HangConfig()
        return 200.0 if is_long else _MOST_SECONDS


FAULTS = (
    Fault(title="SIGSTOP", name="stop", reason="stopped"),
    Fault(title="sleeps in the loader", name="block", place="loader", reason="blocked"),
    Fault(title="sleeps in forward", name="block", place="forward", reason="blocked"),
    Fault(title="sleeps in a backward hook", name="block", place="backward", reason="blocked"),
    Fault(title="sleeps before a collective", name="block", place="collective", reason="blocked"),
    Fault(title="waits for a lock", name="lock", place="between", reason="blocked"),
    Fault(title="holds the interpreter in C", name="hold", place="forward", reason="interpreter"),
    Fault(
        title="endless Python loop",
        name="spin",
        place="forward",
        reason="computing",
        trials=3,
    ),
    Fault(
        title=f"the same, its limit {SHORTENED.computing_seconds:g} s instead of 180",
        name="spin",
        place="forward",
        reason="computing",
        config=SHORTENED,
        trials=TRIALS - 3,
    ),
    Fault(title="wrong order of collectives", name="wrong", place="collective"),
    Fault(title="process killed", name="die", place="between", reason="gone"),
    Fault(
        title="sleeps in the stage of a pipeline",
        name="block",
        place="forward",
        reason="blocked",
        training="pipeline",
    ),
)
HEALTHY = (
    Fault(
        title="rank 0 alone evaluates for 60 s, unannounced",
        name="evaluate",
        place="between",
        rank=0,
        seconds=60.0,
    ),
    Fault(
        title="rank 0 alone saves for 120 s, unannounced",
        name="save",
        place="between",
        rank=0,
        seconds=120.0,
    ),
    Fault(
        title="a first step of 50 s",
        name="sleep",
        place="forward",
        rank=0,
        seconds=50.0,
        is_of_launch=True,
    ),
    Fault(title="the whole job has a tenth of a core for 60 s", name="starve", seconds=60.0),
    Fault(title="the whole job stopped for 12 s, and continued", name="stop all", seconds=12.0),
    Fault(title="a debugger on rank 1 for 30 s", name="debug", seconds=30.0),
    Fault(title="nothing at all, 30 s", name="none", seconds=30.0),
)
HOUR = Fault(title="nothing at all, an hour", name="none", seconds=3600.0)


@dataclass(slots=True)
class Trial:
    """What became of one fault."""

    fault: Fault
    ranks: int
    shown: float | None = None
    paged: float | None = None
    culprits: set[int] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    stacks: float | None = None
    """When those of all ranks that can answer were there."""
    texts: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether the culprit is named; of a wrong order by two, both are."""
        if self.fault.name == "wrong":
            return self.fault.rank in self.culprits
        return self.culprits == {self.fault.rank}


class Job:
    """One torchrun job, and the agent that looks at it."""

    def __init__(self, folder: Path, *, ranks: int, fault: Fault) -> None:
        self._folder = folder
        self._fault = fault
        self.ranks = ranks
        for name in ("shm", "runs", "keys"):
            (folder / name).mkdir()
        os.mkfifo(folder / "release")
        # Open as long as the job lives: a writer finds a reader.
        self._pipe = os.open(folder / "release", os.O_RDWR)
        if fault.is_of_launch:
            self._order()
        base = folder / "shm" / f"trainvitals-{os.getuid()}"
        base.mkdir(mode=0o700)
        self.agent = Agent(
            AgentConfig(
                vitals_dir=folder / "runs",
                base=base,
                keys=folder / "keys",
                node=NODE,
                hang=fault.config,
            )
        )
        self.agent.start()
        environ = {
            **os.environ,
            "VITALS_SHM": str(folder / "shm"),
            "VITALS_DIR": str(folder / "runs"),
            "VITALS_NODE": NODE,
            "VITALS_AGENT": "off",
            "VITALS_QUIET": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "vitals_bench.hang.train"]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, str(folder), str(fault.seconds), fault.training],
            env=environ,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def _turn(self) -> None:
        while not self._ending.wait(0.5):  # as the agent's own loop
            self.agent.cycle(time.monotonic())

    def begin(self) -> float:
        """Wait for steps, have the fault; return when it began, in seconds since the epoch."""
        if self._fault.is_of_launch:
            self._wait(lambda: (self._folder / "begun").exists(), START_SECONDS)
            return float((self._folder / "begun").read_text()) / 1e9
        self._wait(lambda: min(self._steps(), default=-1) >= 3, START_SECONDS)
        time.sleep(PAUSE_SECONDS)
        if self._fault.place:
            self._order()
            self._wait(lambda: (self._folder / "begun").exists(), START_SECONDS)
            time.sleep(0.05)
            return float((self._folder / "begun").read_text()) / 1e9
        began = time.time()
        if self._fault.name == "stop":
            os.kill(self.pids()[self._fault.rank], signal.SIGSTOP)
        if self._fault.name == "stop all":
            self._signal_all(signal.SIGSTOP)
            time.sleep(self._fault.seconds)
            self._signal_all(signal.SIGCONT)
        if self._fault.name == "starve":
            with _starved(self.pids().values()):
                time.sleep(self._fault.seconds)
        if self._fault.name == "debug":
            _debug(self.pids()[self._fault.rank], self._fault.seconds)
        return began

    def _order(self) -> None:
        order = {"name": self._fault.name, "place": self._fault.place, "rank": self._fault.rank}
        temporary = self._folder / "fault.tmp"
        temporary.write_text(json.dumps(order))
        temporary.rename(self._folder / "fault.json")

    def pids(self) -> dict[int, int]:
        """Return the ranks' processes."""
        tails = [tail for run in self.agent.runs.values() for tail in run.tails.values()]
        return {tail.identity.rank: tail.identity.pid for tail in tails}

    def _steps(self) -> list[int]:
        tails = [tail for run in self.agent.runs.values() for tail in run.tails.values()]
        return [tail.last.step for tail in tails] if len(tails) == self.ranks else []

    def _signal_all(self, number: int) -> None:
        for pid in self.pids().values():
            os.kill(pid, number)

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > until:
                raise VitalsError(f"the job did not come to its fault: {self.output()[-2000:]}")
            time.sleep(0.1)

    def output(self) -> str:
        """Return what the ranks printed."""
        return (self._folder / "log").read_text(errors="replace")

    def events(self) -> list[EventRow]:
        """Return what the agent wrote of its own."""
        rows: list[EventRow] = []
        for run_id in list(self.agent.runs):
            spool = self._folder / "runs" / run_id / "agents" / NODE / "spool"
            for _, raw in read_batches(spool):
                batch = decode_batch(raw)
                header = batch.header
                if header.stream == "events" and header.identity.source.startswith("node:"):
                    rows += decode_events(header.stream_schema, batch.rows)
        return rows

    def close(self) -> None:
        """End the job, whatever it stands in, and the agent."""
        for pid in self.pids().values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait(30.0)
        self._ending.set()
        self._thread.join(30.0)
        self.agent.stop()
        self._log.close()
        os.close(self._pipe)


@contextmanager
def _starved(pids: Iterable[int]) -> Iterator[None]:
    """Give the processes a tenth of a core between them, by a control group of version 1 or 2."""
    controller = _GROUPS / "cpu"
    group = (controller if controller.is_dir() else _GROUPS) / f"vitals-bench-{os.getpid()}"
    try:
        group.mkdir()
        if controller.is_dir():
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise VitalsError(f"cannot limit the job's CPU by a control group: {error}") from error
    try:
        yield
    finally:
        for inside in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(inside)
        group.rmdir()


def _debug(pid: int, seconds: float) -> None:
    """Look at a process for a while in gdb, which stops it."""
    command = ["gdb", "-p", str(pid), "-batch", "-ex", f"shell sleep {seconds:g}", "-ex", "detach"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=seconds + 120.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise VitalsError(f"gdb did not attach: {error}") from error


def run_trial(fault: Fault, *, ranks: int, watch_seconds: float) -> Trial:
    """Return what the agent said of one fault, for so long or until it paged."""
    with tempfile.TemporaryDirectory(prefix="vitals-hang-", dir="/dev/shm") as folder:
        job = Job(Path(folder), ranks=ranks, fault=fault)
        try:
            began = job.begin()
            trial = Trial(fault, ranks)
            until = time.monotonic() + watch_seconds
            while time.monotonic() < until:
                time.sleep(0.5)
                _take_in(trial, job.events(), began)
                is_dead = fault.name == "die" and trial.shown is not None
                if is_dead or (trial.paged is not None and trial.stacks is not None):
                    break
            return trial
        finally:
            job.close()


def _take_in(trial: Trial, rows: list[EventRow], began: float) -> None:
    """Add the reports after the fault started."""
    trial.texts.clear()
    trial.reasons.clear()
    stacks: set[int] = set()
    for row in rows:
        seconds = row.time_unix_ns / 1e9 - began
        if isinstance(row.event, Note) and row.event.code != "gpu_absent":
            trial.texts.append(row.event.text)
        if seconds < 0:
            continue
        if isinstance(row.event, Note) and "ended without a clean exit" in row.event.text:
            # A peer that died breaks the others' connections: the job ends before anybody waits.
            trial.shown = seconds if trial.shown is None else trial.shown
            # Who was killed comes before who broke off for it.
            if not trial.culprits or "SIGKILL" in row.event.text:
                trial.culprits = {int(row.event.text.split()[1])}
        if isinstance(row.event, FindingRaised):
            finding = row.event.finding
            trial.texts.append(f"{seconds:.1f} s: {finding.kind}: {finding.reason}")
            if finding.kind == "waiting":
                trial.shown = seconds if trial.shown is None else trial.shown
                trial.culprits = _named(finding)
            if finding.kind == "hang":
                trial.paged = seconds if trial.paged is None else trial.paged
                trial.culprits = _named(finding)
                trial.reasons.append(finding.cause.removeprefix("hang_"))
        if isinstance(row.event, StacksTaken) and row.event.stacks:
            stacks.add(row.event.rank)
            if len(stacks) >= trial.ranks - (trial.fault.name in ("stop", "die")):
                trial.stacks = seconds if trial.stacks is None else trial.stacks


def _named(finding: Finding) -> set[int]:
    """Return whom a verdict names: of a disagreement of two ranks, both."""
    return {0, 1} if finding.rank < 0 and "disagree" in finding.reason else {finding.rank}


def measure_hangs(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield per fault: culprit right, time to shown and to page, stacks there."""
    trials: list[Trial] = []
    faults = [f for f in FAULTS if f.name in ("stop", "hold")] if quick else FAULTS
    for index, fault in enumerate(faults):
        for nth in range(1 if quick else fault.trials):
            ranks = 2 if quick else 2 + (index + nth) % 3
            trials.append(run_trial(fault, ranks=ranks, watch_seconds=fault.watched_seconds))
            _show(trials[-1])
    yield _grid(trials)
    shown = [trial.shown for trial in trials if trial.shown is not None]
    blocked = [t.paged for t in trials if t.paged is not None and t.fault.name != "spin"]
    computing = [t for t in trials if t.fault.name == "spin" and t.fault.config == HangConfig()]
    num = len(trials)
    right = sum(trial.is_right for trial in trials) / num
    with_stacks = [t for t in trials if t.fault.name != "die"]
    yield Row(name="culprit right", ours=right, unit="", goal=at_least(0.98), note=f"{num} trials")
    yield Row(
        name="shown within (median)",
        ours=statistics.median(shown) if shown else None,
        unit="s",
        goal=at_most(8.0),
    )
    yield Row(name="shown within (most)", ours=max(shown, default=None), unit="s", goal=at_most(10))
    yield Row(
        name="stopped, blocked, dead: paged within (most)",
        ours=max(blocked, default=None),
        unit="s",
        goal=at_most(10.0),
    )
    if computing:
        yield Row(
            name="endless loop: paged within (most)",
            ours=_most([trial.paged for trial in computing]),
            unit="s",
            goal=at_most(200.0),
            note=f"{len(computing)} trials",
        )
    yield Row(
        name="stacks of all ranks that can answer",
        ours=sum(t.stacks is not None for t in with_stacks) / max(1, len(with_stacks)),
        unit="",
        goal=exactly(1.0),
    )


def _show(trial: Trial) -> None:
    lines = "\n".join(f"  {text}" for text in trial.texts)
    sys.stderr.write(f"{trial.fault.title}, {trial.ranks} ranks\n{lines}\n")


def _grid(trials: list[Trial]) -> Grid:
    lines: list[tuple[Cell, ...]] = []
    for title in dict.fromkeys(trial.fault.title for trial in trials):
        of_fault = [trial for trial in trials if trial.fault.title == title]
        right = sum(trial.is_right for trial in of_fault)
        shown, paged, stacks = (
            _most([getattr(trial, name) for trial in of_fault])
            for name in ("shown", "paged", "stacks")
        )
        lines.append((title, f"{right} of {len(of_fault)}", shown, paged, stacks))
    return Grid(
        title="Hangs: who, and how soon (s, the slowest)",
        columns=("fault", "culprit right", "shown", "paged", "stacks"),
        rows=tuple(lines),
        note="A killed peer breaks the others' connections: the job fails by itself, and is "
        "reported as failed.",
    )


def _most(values: list[float | None]) -> float | None:
    """Return the largest; None where one is missing."""
    there = [value for value in values if value is not None]
    return max(there) if len(there) == len(values) else None


def measure_healthy(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how often somebody was paged for what is no hang; waits are shown all the same."""
    for fault in HEALTHY[-1:] if quick else HEALTHY:
        yield _pages(fault)


def measure_hour(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how often somebody was paged in an hour of training."""
    if not quick:
        yield _pages(HOUR)


def _pages(fault: Fault) -> Row:
    trial = run_trial(fault, ranks=2, watch_seconds=max(10.0, fault.seconds + 4.0))
    _show(trial)
    paged = float(trial.paged is not None)
    return Row(name=f"paged: {fault.title}", ours=paged, unit="", goal=exactly(0.0))
