"""One logger in a process of its own: what a step costs the thread, and all threads and children.

    python -m vitals_bench.guard.sinks NAME STEPS FOLDER

Prints one line of JSON. A call every two milliseconds, as a training would make it: called in a
tight loop everything is in the cache, and a queue's thread never gets its turn.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

import trainer_hooks
from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.io.journal import JournalWriter
from trainvitals.io.private import private_base
from trainvitals.rows import Column, Schema, Value
from vitals_bench.peers.loggers import NAMES, open_logger
from vitals_bench.training import own_place

PAUSE_SECONDS = 0.002
WARM_UP = 100
_TICKS = os.sysconf("SC_CLK_TCK")


class Ours:
    """The emitter of a watched loop, with the numbers of a real step said again and again."""

    def __init__(self, *, agent: bool = False) -> None:
        self._leave = ExitStack()
        self._leave.enter_context(own_place(agent=agent))
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.monitor = trainer_hooks.watch(model, optimizer, tokens_per_step=512)
        self.emitter = self.monitor._run.emitter
        self._said: list[Any] = []
        with _patched(self.emitter, "step", lambda *arguments: self._said.append(arguments)):
            for _ in range(20):
                loss = model(torch.ones(4)).square().mean()
                loss.backward()
                self.monitor.step(loss, max_norm=1.0)
        host, record, extra = self._said[-1]
        self.step = partial(self.emitter.step, host, record, extra)
        """Gathers and writes the whole row of a step, from the numbers as the loop has them."""

    def row(self) -> Callable[[], object]:
        """Return what writes that row with its values in hand, as a gauge is given its value."""
        stream = self.emitter._steps
        assert stream is not None
        append = stream.append
        taken: list[Sequence[Value]] = []
        with _patched(stream, "append", taken.append):
            self.step()
        return partial(append, taken[0])

    def log(self, step: int, values: object = None) -> None:
        """Write the whole row of a step, from the numbers as the loop has them."""
        host, record, extra = self._said[-1]
        host.step = step
        self.emitter.step(host, record, extra)

    @property
    def journal(self) -> Path:
        """Where the rows are."""
        journal = self.emitter._journal
        assert journal is not None
        return journal.directory

    def close(self) -> None:
        """End the run, and let its agent end."""
        self.monitor.close()
        for _ in range(100):
            if not any(True for _ in _living(os.getpid())):
                break
            time.sleep(0.1)
        self._leave.close()


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class Twelve:
    """A journal of twelve columns."""

    def __init__(self) -> None:
        head = ("step", "attempt", "time_unix_ns", "monotonic_ns")
        columns = [*(Column(name, "i8") for name in head), *(Column(n, "f8") for n in NAMES)]
        identity = Identity(
            run_id=new_run_id(time.time_ns()),
            incarnation=new_incarnation(),
            source="rank:0",
            node="bench",
        )
        self._folder = Path(mkdtemp(prefix="vitals-bench-", dir=private_base(os.environ)))
        self._journal = JournalWriter(self._folder / "journal", identity)
        self._stream = self._journal.open_stream(Schema("steps", tuple(columns)))

    def log(self, step: int, values: Sequence[float]) -> None:
        """Write a row."""
        self._stream.append([step, 1, 2, 3, *values])

    def close(self) -> None:
        """Close the journal and remove it."""
        self._journal.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Nothing:
    """Says nothing: what the loop around costs by itself."""

    def log(self, step: int, values: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Measure and print."""
    name, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if name == "growth":
        measured: dict[str, float] = {"growth_bytes": growth(steps)}
    elif name == "kill":
        write_and_die(steps)
    else:
        measured = cost(name, steps, folder)
    print(json.dumps(measured), flush=True)  # noqa: T201 - for the bench


def cost(name: str, steps: int, folder: Path) -> dict[str, float]:
    """Return microseconds a step: of the thread's CPU, and of all threads' and children's."""
    sink = open_sink(name, folder)
    values = [step / 7 for step in range(len(NAMES))]
    for step in range(WARM_UP):
        _timed(sink.log, step, values)
    _settle()
    before = cpu_seconds()
    times = [_timed(sink.log, step, values) for step in range(WARM_UP, WARM_UP + steps)]
    used = cpu_seconds() - before
    sink.close()
    return {"thread_us": statistics.median(times) * 1e6, "cpu_us": used / steps * 1e6}


def open_sink(name: str, folder: Path, *, agent: bool = True) -> Any:
    """Return what takes a step, by name."""
    if name == "ours":
        return Ours(agent=agent)
    if name == "twelve":
        return Twelve()
    return Nothing() if name == "nothing" else open_logger(name, folder)


def _timed(call: Callable[..., object], step: int, values: list[float]) -> float:
    time.sleep(PAUSE_SECONDS)
    begin = time.thread_time_ns()
    call(step, values)
    return (time.thread_time_ns() - begin) / 1e9


def _settle() -> None:
    """Wait until the children have started: until they use less than a tenth of a core."""
    for _ in range(100):
        before = cpu_seconds()
        time.sleep(0.2)
        if cpu_seconds() - before < 0.02:
            return


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that descend from it, ended or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_living(os.getpid()))


def _living(root: int) -> Iterator[float]:
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended just now
        parents[int(entry.name)] = int(fields[1])
        seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            yield seconds[pid]


def growth(steps: int) -> int:
    """Return the bytes that this process grew by over so many steps."""
    sink = Ours()
    for step in range(2000):
        sink.log(step)
    before = _resident()
    for step in range(2000, 2000 + steps):
        sink.log(step)
    grown = _resident() - before
    sink.close()
    return grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_and_die(steps: int) -> None:
    """Write rows, say where, and be killed."""
    sink = Ours()
    for step in range(1000, 1000 + steps):
        sink.log(step)
    print(json.dumps({"journal": str(sink.journal)}), flush=True)  # noqa: T201 - for the bench
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
