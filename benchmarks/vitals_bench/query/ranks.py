"""Questions across thousands of ranks: one step of all, and which rank is furthest away."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from trainvitals.clock import SystemClock
from trainvitals.views import CellsQuestion, StepQuestion
from vitals_bench import wide
from vitals_bench.measure import halves
from vitals_bench.numbers.commits import Case, Fleet
from vitals_bench.rows import Row, at_most
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.queries.query import Query

FULL, QUICK = Case(1, 4_096, 20), Case(1, 64, 20)
_NUM_COMMITS = 30
_ROUNDS = 5
_RECEIVED_NS = 1
STEP_MS = 130.0
"""Two thirds of the least that the store of chunks took, before the lake: 194 to 265 ms."""


def measure_ranks(*, quick: bool) -> Iterator[Row]:
    """Yield what questions across ranks cost, before and after merging."""
    yield from measure_case(QUICK if quick else FULL)


def measure_case(case: Case) -> Iterator[Row]:
    """Yield the rows for a run with this many ranks."""
    fleet = Fleet(case)
    (run_id,) = fleet.run_ids
    step = StepQuestion(run_id=run_id, step=_NUM_COMMITS * case.num_rows // 2)
    cells = CellsQuestion(run_id=run_id, metric="steps.rank_loss")
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "store") as store,
    ):
        for second in range(_NUM_COMMITS):
            ingest_bodies(store, fleet.bodies(second), _RECEIVED_NS)
        query = Query(store, clock=SystemClock())
        for when in ("never merged", "merged"):
            if when == "merged":
                wide.merge(store)
            answered = len(query.ask(step).rows), query.ask(cells).num_rows
            if answered != (case.num_ranks,) * 2:
                raise RuntimeError(f"of {case.num_ranks} ranks, answers have {answered}")
            name = f"one step of {case.num_ranks:,} ranks, {when}"
            yield _row(name, lambda: query.ask(step), STEP_MS)
            name = f"which of {case.num_ranks:,} ranks are furthest away, {when}"
            yield _row(name, lambda: query.ask(cells), None)


def _row(name: str, ask: Callable[[], object], limit_ms: float | None) -> Row:
    times = []
    for _ in range(_ROUNDS):
        begin = time.process_time()
        msgspec.json.encode(ask())
        times.append(time.process_time() - begin)
    return Row(
        name=name,
        ours=1e3 * statistics.median(times),
        unit="ms",
        goal=None if limit_ms is None else at_most(limit_ms),
        note=f"CPU, up to the answer's JSON; ours against itself {100 * halves(times):.0f} %",
    )
