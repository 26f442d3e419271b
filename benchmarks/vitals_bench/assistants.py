"""What a coding assistant waits for: each tool of `vitals mcp` on a run of a million steps.

CPU time, not wall time: of this process, and of the collector that it reads.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import httpx

from trainvitals.clock import SystemClock
from trainvitals.io.client import CollectorClient, read_tokens
from vitals_bench import wide
from vitals_bench.measure import halves
from vitals_bench.processes import Started, free_port
from vitals_bench.query.filling import Filling, Size
from vitals_bench.rows import Row, at_most
from vitals_collector.api.app import TOKENS_FILE
from vitals_collector.live.live_monitor import LiveMonitor
from vitals_collector.queries.open import OpenedReader, open_folder
from vitals_collector.queries.query import Query
from vitals_plugins.bridges.assistants.answers import DEFAULT_KB
from vitals_plugins.bridges.assistants.sources import (
    RunSource,
    SharedSource,
    StillReadingError,
    start_shared_source,
)
from vitals_plugins.bridges.assistants.tools import RunTools

COLUMNS = (
    "loss", "grad_norm", "learning_rate", "step_duration_seconds", "rank_loss",
    "data_wait_seconds",
)  # fmt: skip
FULL = Size(num_steps=1_000_000, num_metrics=len(COLUMNS), num_ranks=8, rounds=5)
QUICK = Size(num_steps=20_000, num_metrics=len(COLUMNS), num_ranks=8, num_last=200, rounds=2)
LIMIT_MS = 300.0
LIMIT_BYTES = 1024 * DEFAULT_KB
CAUGHT_UP_SECONDS = 600.0
"""Time within which the fleet detectors process the run, on a slow machine."""

CpuSeconds = Callable[[], float]


@dataclass(frozen=True, slots=True)
class QuerySource:
    """The store as a source of runs: what a collector responds with, without the network."""

    query: Query

    @contextmanager
    def open(self) -> Iterator[OpenedReader]:
        """Provide the query object."""
        yield OpenedReader(self.query, lambda: None)


@dataclass(frozen=True, slots=True)
class ClientSource:
    """A collector as a source of runs, through HTTP."""

    client: CollectorClient

    @contextmanager
    def open(self) -> Iterator[OpenedReader]:
        """Provide the client."""
        yield OpenedReader(self.client, lambda: None)


def measure_assistants(*, quick: bool) -> Iterator[Row]:
    """Yield what each tool costs, and the largest response."""
    yield from measure_size(QUICK if quick else FULL)


def measure_size(size: Size) -> Iterator[Row]:
    """Yield the rows for a run of this size: in a store, in a directory, behind HTTP."""
    filling = Filling(size, COLUMNS)
    sizes: list[int] = []
    with TemporaryDirectory(prefix="vitals-bench-") as name:
        folder = Path(name)
        with wide.sqlite_store(folder, "store") as store:
            filling.fill(store)
            source = QuerySource(Query(store, clock=SystemClock()))
            yield from _tool_rows("store", source, filling, sizes, time.process_time)
        yield from _directory_rows(folder, filling, sizes)
        yield from _collector_rows(folder, filling, sizes)
    yield Row(
        name="largest response of a tool",
        ours=float(max(sizes)),
        unit="bytes",
        goal=at_most(LIMIT_BYTES),
    )


def _directory_rows(folder: Path, filling: Filling, sizes: list[int]) -> Iterator[Row]:
    """Yield the rows of a run directory: the first verdict, one after a restart, each tool."""
    runs = filling.fill_folder(folder / "runs")
    for name in ("first server", "next server"):
        children = _children_seconds()
        with (
            patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
            closing(start_shared_source(partial(open_folder, runs, waits=False))) as source,
        ):
            tools = RunTools(source=source)
            begin = time.process_time()
            while not _is_read(source):
                pass
            reading, begin = time.process_time() - begin, time.process_time()
            text = tools.run_summary()
            first = time.process_time() - begin
            num_calls, until = 1, time.monotonic() + CAUGHT_UP_SECONDS
            while "incomplete" in json.loads(text).get("findings", ""):
                if time.monotonic() > until:
                    raise RuntimeError("the run was not judged in time")
                time.sleep(0.5)
                text, num_calls = tools.run_summary(), num_calls + 1
            if name == "next server":
                yield from _tool_rows("directory", source, filling, sizes, time.process_time)
        yield Row(  # here, because the other process has ended
            name=f"{name} of a directory, first run_summary, {filling.size.num_steps:,} steps",
            ours=1e3 * first,
            unit="ms",
            goal=at_most(LIMIT_MS),
            note=f"CPU; {1e3 * reading:.0f} ms for reading from the start of the server, and for "
            f"the sum of the goodput; complete after {num_calls} calls and "
            f"{_children_seconds() - children:.1f} s of another process's CPU",
        )


def _is_read(source: SharedSource) -> bool:
    """Return whether the directory has been read, after at most the wait of a request."""
    try:
        with source.open():
            return True
    except StillReadingError:
        return False


def _children_seconds() -> float:
    """Return the CPU time of the processes that this one started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _collector_rows(folder: Path, filling: Filling, sizes: list[int]) -> Iterator[Row]:
    """Yield the rows of a collector in another process, over a run that it has processed."""
    data = folder / "store"
    with wide.sqlite_store(folder, "store") as store:  # now: its CPU time would be counted
        monitor = LiveMonitor(store)
        monitor.note(filling.run_id)
        while monitor.poll(now_ns=time.monotonic_ns(), running=()).has_more:
            pass
    listen = f"127.0.0.1:{free_port()}"
    url = f"https://{listen}"
    command = [sys.executable, "-m", "trainvitals", "collector"]
    command += ["--data", str(data), "--listen", listen]
    with Started("collector", command, folder) as collector:
        collector.wait_for(lambda: _is_healthy(url), 180.0)
        collector.settle()
        tokens = read_tokens(data / TOKENS_FILE)
        with CollectorClient(url, tokens.read, tls=tokens.tls, timeout=60.0) as client:
            source = ClientSource(client)

            def cpu_seconds() -> float:
                return time.process_time() + collector.cpu_seconds()

            yield from _tool_rows("collector by HTTPS", source, filling, sizes, cpu_seconds)


def _is_healthy(url: str) -> bool:
    """Return whether the collector responds."""
    try:
        return httpx.get(f"{url}/healthz", timeout=5.0, verify=False).is_success
    except httpx.TransportError:
        return False


def _tool_rows(
    where: str, source: RunSource, filling: Filling, sizes: list[int], cpu_seconds: CpuSeconds
) -> Iterator[Row]:
    """Yield a row for each tool over one source, and add the sizes of the responses."""
    for name, call in tool_calls(source, filling).items():
        seconds: list[float] = []
        wall: list[float] = []
        for _ in range(1 + filling.size.rounds):
            begin, began = cpu_seconds(), time.perf_counter()
            text = call()
            seconds.append(cpu_seconds() - begin)
            wall.append(time.perf_counter() - began)
        sizes.append(len(text.encode()))
        first, *later = seconds
        yield Row(
            name=f"{name}, {where}, {filling.size.num_steps:,} steps",
            ours=1e3 * statistics.median(later),
            unit="ms",
            goal=at_most(LIMIT_MS),
            note=f"CPU; wall time {1e3 * statistics.median(wall[1:]):.0f} ms; the first call "
            f"{1e3 * first:.0f} ms of CPU; {sizes[-1]:,} bytes; "
            f"ours against itself {100 * halves(later):.0f} %",
        )


def tool_calls(source: RunSource, filling: Filling) -> dict[str, Callable[[], str]]:
    """Return a call of each tool that reads runs, by its text."""
    tools = RunTools(source=source)
    at, total = filling.incident, 2 * filling.size.num_steps
    incident = _latest_incident(tools)
    return {
        "list_runs": tools.list_runs,
        "run_summary": tools.run_summary,
        "incidents": tools.incidents,
        "incidents of one id": lambda: tools.incidents(incident=incident),
        "why": lambda: tools.why(at),
        "series": tools.series,
        "series of 400 points": lambda: tools.series(metric="steps.grad_norm", points=400),
        "series around a step": lambda: tools.series(from_step=at - 100, to_step=at + 100),
        "ranks": lambda: tools.ranks(metric="steps.rank_loss"),
        "alerts": lambda: tools.alerts(state=""),
        "decisions": tools.decisions,
        "checkpoints": tools.checkpoints,
        "goodput": tools.goodput,
        "forecast": lambda: tools.forecast(total_steps=total),
        "search_docs": lambda: tools.search_docs("roll back a run"),
    }


def _latest_incident(tools: RunTools) -> str:
    """Return the id of the run's latest incident."""
    line = json.loads(tools.incidents())["incidents"][0]
    return str(line["incident_id"])
