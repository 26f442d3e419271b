"""Compares goodput with simulated jobs of known composition; times a million steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainvitals.clock import SystemClock
from trainvitals.goodput import BUCKETS, Bucket, EndedSteps, Floats, Launch, goodput
from trainvitals.identity import new_run_id
from trainvitals.views import GoodputQuestion, GoodputView
from vitals_bench.forecast.simulated import SimulatedRun
from vitals_bench.rows import Cell, Grid, Row, exactly, ratio_at_most
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import open_store

_TOLERANCE = 0.005
"""Of the wall time, for each bucket."""
_LIMIT_MS = 300.0
_NUM_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class _Held:
    """One simulated job and its computed goodput."""

    run: SimulatedRun
    said: GoodputView

    def off(self, bucket: Bucket) -> float:
        """Return how far a bucket is off, in parts of the wall time."""
        truth = self.run.truth.get(bucket, 0.0)
        said = self.said.nanoseconds.get(bucket, 0)
        return abs(said - truth) / self.run.wall_ns

    @property
    def is_exact(self) -> bool:
        """Whether the buckets add up to the wall time, and that to the attempts', exactly."""
        total = sum(self.said.nanoseconds.values())
        of_attempts = sum(sum(a.nanoseconds.values()) for a in self.said.attempts)
        return total == of_attempts == self.said.end_unix_ns - self.said.begin_unix_ns


def measure_goodput(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how far off the buckets of simulated jobs are, and what a million steps take."""
    held = [_hold(seed) for seed in range(5 if quick else 50)]
    yield Row(
        name=f"{len(held)} jobs: buckets that are off by more than 0.5 % of the wall time",
        ours=float(sum(each.off(bucket) > _TOLERANCE for each in held for bucket in BUCKETS)),
        unit="",
        goal=exactly(0),
        note=f"of {len(held) * len(BUCKETS)}",
    )
    yield Row(
        name="jobs whose buckets add up to the nanosecond",
        ours=sum(each.is_exact for each in held) / len(held),
        unit="",
        goal=exactly(1),
    )
    yield Row(
        name="jobs whose failures are counted right",
        ours=sum(e.said.num_failures == e.run.num_failures for e in held) / len(held),
        unit="",
        goal=exactly(1),
        note=f"{sum(each.run.num_failures for each in held)} failures",
    )
    yield _grid(held)
    yield _speed(3 if quick else 15)


def _hold(seed: int) -> _Held:
    run_id = new_run_id(time.time_ns())
    run = SimulatedRun(run_id, seed)
    store = open_store("sqlite://")
    try:
        ingest_all(store, list(run.batches()), 0)
        return _Held(run, Query(store, clock=SystemClock()).ask(GoodputQuestion(run_id=run_id)))
    finally:
        store.close()


def _grid(held: list[_Held]) -> Grid:
    def line(bucket: Bucket) -> tuple[Cell, ...]:
        shares = [100 * each.run.truth.get(bucket, 0.0) / each.run.wall_ns for each in held]
        off = [100 * each.off(bucket) for each in held]
        num = sum(share > 0 for share in shares)
        return bucket.replace("_", " "), num, statistics.mean(shares), f"{max(off):.4f}"

    return Grid(
        title="Where simulated jobs' time went, and the error of the answer",
        columns=("bucket", "jobs with it", "mean share, %", "most off, % of wall time"),
        rows=tuple(line(bucket) for bucket in BUCKETS),
        note="Jobs of 1 to 8 ranks and 1,500 steps, with up to five crashes, halts and hangs, "
        "rollbacks, skips, pauses, saves, evaluations, late ranks and waits for data.",
    )


def _speed(rounds: int) -> Row:
    """Return what the sums of a million steps in 10 launches take, of this thread's CPU time."""
    draw = np.random.default_rng(0)
    seconds = draw.uniform(0.9, 1.1, _NUM_STEPS)
    ends = np.rint(np.cumsum(seconds) * 1e9).astype(np.int64) + 10**18

    def part() -> Floats:
        return draw.uniform(0.0, 0.05, _NUM_STEPS)

    own = _NUM_STEPS // 10
    steps = EndedSteps(
        end_unix_ns=ends,
        launch=np.repeat(np.arange(10), own),
        attempt=np.repeat(np.arange(10), own) + 1,
        seconds=seconds,
        data_wait=part(),
        checkpoint=part(),
        evaluation=part(),
        wait=part() + 0.05,
        least_wait=part(),
        is_undone=draw.random(_NUM_STEPS) < 0.01,
        is_skipped=draw.random(_NUM_STEPS) < 0.01,
    )
    launches = [
        Launch(
            process_ns=int(ends[k * own]) - 3 * 10**9,
            ready_ns=int(ends[k * own]) - 2 * 10**9,
            end_ns=int(ends[(k + 1) * own - 1]),
            ended="failed",
            num_gpus=8,
        )
        for k in range(10)
    ]
    times = []
    for _ in range(rounds + 1):
        began = time.thread_time_ns()
        goodput(launches, steps)
        times.append((time.thread_time_ns() - began) / 1e6)
    return Row(
        name="a million steps: CPU time of the sums",
        ours=statistics.median(times[1:]),
        unit="ms",
        peer="limit",
        theirs=_LIMIT_MS,
        goal=ratio_at_most(1.0),
        note="columns in memory; 10 starts",
    )
