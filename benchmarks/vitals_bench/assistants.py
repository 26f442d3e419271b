"""What a coding assistant waits for: each tool of `vitals mcp` on a run of a million steps."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trainvitals.clock import SystemClock
from vitals_bench import wide
from vitals_bench.measure import halves
from vitals_bench.query.filling import Filling, Size
from vitals_bench.rows import Row, at_most
from vitals_collector.queries.open import OpenedReader
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store
from vitals_plugins.bridges.assistants.answers import DEFAULT_KB
from vitals_plugins.bridges.assistants.tools import RunTools

COLUMNS = (
    "loss", "grad_norm", "learning_rate", "step_duration_seconds", "rank_loss",
    "data_wait_seconds",
)  # fmt: skip
FULL = Size(num_steps=1_000_000, num_metrics=len(COLUMNS), num_ranks=8, rounds=5)
QUICK = Size(num_steps=20_000, num_metrics=len(COLUMNS), num_ranks=8, num_last=200, rounds=2)
LIMIT_MS = 300.0
LIMIT_BYTES = 1024 * DEFAULT_KB


@dataclass(frozen=True, slots=True)
class QuerySource:
    """The store as a source of runs: what a collector responds with, without the network."""

    query: Query

    @contextmanager
    def open(self) -> Iterator[OpenedReader]:
        """Provide the query object."""
        yield OpenedReader(self.query, lambda: None)


def measure_assistants(*, quick: bool) -> Iterator[Row]:
    """Yield what each tool costs, and the largest response."""
    yield from measure_size(QUICK if quick else FULL)


def measure_size(size: Size) -> Iterator[Row]:
    """Yield the rows for a run of this size."""
    filling = Filling(size, COLUMNS)
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "store") as store,
    ):
        filling.fill(store)
        largest = 0
        for name, call in tool_calls(store, filling).items():
            seconds: list[float] = []
            for _ in range(1 + size.rounds):
                begin = time.process_time()
                text = call()
                seconds.append(time.process_time() - begin)
            largest = max(largest, len(text.encode()))
            first, *later = seconds
            yield Row(
                name=f"{name}, {size.num_steps:,} steps",
                ours=1e3 * statistics.median(later),
                unit="ms",
                goal=at_most(LIMIT_MS),
                note=f"CPU, without the network; the first call {1e3 * first:.0f} ms; "
                f"ours against itself {100 * halves(later):.0f} %",
            )
        yield Row(
            name="largest response of a tool",
            ours=float(largest),
            unit="bytes",
            goal=at_most(LIMIT_BYTES),
        )


def tool_calls(store: Store, filling: Filling) -> dict[str, Callable[[], str]]:
    """Return a call of each tool that reads runs, by its text."""
    tools = RunTools(source=QuerySource(Query(store, clock=SystemClock())))
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
