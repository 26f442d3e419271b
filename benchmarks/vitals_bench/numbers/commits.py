"""CPU of a row that is stored: in commits of several sizes, and in what tidies up behind them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from trainvitals.identity import new_run_id
from trainvitals.wire import Batch
from vitals_bench import wide
from vitals_bench.ingest.records import NAMES, Numbers, Writers
from vitals_bench.measure import halves
from vitals_bench.rows import Row, at_most, ratio_at_most
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.ingest.validate import check_batches
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage.compaction import Compacted, compact, compact_writer, writers
from vitals_collector.storage.store import Store

PEER = "the store of chunks"
_STEP_NS = 1_000_000_000
_BEGIN_NS = 1_700_000_000_000_000_000
_PLACED_EVERY = 3
"""Commits after which the store of chunks places what came: every few seconds."""


class Case(NamedTuple):
    """What comes in a second."""

    num_runs: int
    num_ranks: int
    """Of each run."""
    num_rows: int
    """Of each rank."""

    @property
    def words(self) -> str:
        """Its name for people."""
        runs = f"{self.num_runs} runs of " * (self.num_runs > 1)
        plural = "s" * (self.num_rows > 1)
        return f"{runs}{self.num_ranks:,} ranks, {self.num_rows} row{plural} each"

    @property
    def total(self) -> int:
        """Rows of a commit."""
        return self.num_runs * self.num_ranks * self.num_rows


CASES = (
    Case(1, 1, 1), Case(1, 8, 5), Case(1, 64, 1), Case(1, 64, 10), Case(1, 64, 100),
    Case(100, 8, 1), Case(100, 8, 10), Case(1, 4_096, 1),
)  # fmt: skip


class Fleet:
    """Writes the batches of each second."""

    def __init__(self, case: Case) -> None:
        self.case = case
        now = time.time_ns()
        self.run_ids = [new_run_id(now + i * 1_000_000) for i in range(case.num_runs)]
        ranks = range(case.num_ranks)
        self._writers = [Writers(run, ranks, world_size=case.num_ranks) for run in self.run_ids]
        self._numbers = [Numbers(case.num_ranks, seed=i) for i in range(case.num_runs)]

    def bodies(self, second: int) -> list[list[bytes]]:
        """Return the posts of one second, of eight ranks each."""
        first, num = second * self.case.num_rows, self.case.num_rows
        bodies = []
        for writer, numbers in zip(self._writers, self._numbers, strict=True):
            block = numbers.block(first, num, begin_ns=_BEGIN_NS, step_ns=_STEP_NS)
            batches = writer.batches(block)
            bodies += [batches[i : i + 8] for i in range(0, len(batches), 8)]
        return bodies


def decoded(bodies: Sequence[Sequence[bytes]]) -> list[Batch]:
    """Return the batches of all posts, checked as they are when they come."""
    checked = check_batches([raw for body in bodies for raw in body])
    return [batch for batch in checked if isinstance(batch, Batch)]


def measure_commits(*, quick: bool) -> Iterator[Row]:
    """Yield a row for each size of a commit, and what lies on disk afterwards."""
    for case in CASES[:3] if quick else CASES:
        yield from _rows(case, 8 if quick else 60)


def _rows(case: Case, num_commits: int) -> Iterator[Row]:
    fleet = Fleet(case)
    mine, theirs, mine_wall = list[float](), list[float](), list[float]()
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "chunks") as store,
    ):
        lake = Lake(Path(folder) / "lake")
        for second in range(num_commits + 2):
            bodies = fleet.bodies(second)
            begin, wall = time.process_time(), time.monotonic()
            num_new = sum(lake.append(decoded(bodies)))
            between, mine_wall = time.process_time(), [*mine_wall, time.monotonic() - wall]
            ingest_bodies(store, bodies, 1)
            if second % _PLACED_EVERY == 0:
                store.try_to_settle()
            if second > 1:  # the first makes the tables
                mine.append(between - begin)
                theirs.append(time.process_time() - between)
            if num_new != case.total:
                raise RuntimeError(f"{case.total} rows were sent, the lake stored {num_new}")
        begin = time.process_time()
        lake.merge()
        between = time.process_time()
        _tidy(store)
        upkeep = between - begin, time.process_time() - between
        lake.close()
        files = (Path(folder) / "lake" / "data").rglob("*.parquet")
        sizes = sum(file.stat().st_size for file in files), wide.used_bytes(store)
    each = [
        (statistics.mean(used) + rest / len(used)) / case.total * 1e6
        for used, rest in zip((mine, theirs), upkeep, strict=True)
    ]
    ours_ms = 1e3 * statistics.median(mine)
    is_lone = case.total < 1_000
    yield Row(
        name=f"CPU of a stored row of {len(NAMES)} values, {case.words}",
        ours=each[0],
        unit="us",
        peer=PEER,
        theirs=each[1],
        goal=None if is_lone else ratio_at_most(1.5),
        spread=halves(theirs),
        note=f"decoding and tidying up included, HTTP not; of ours {upkeep[0] / sum(mine):.0%} is"
        f" merging; answered in {1e3 * statistics.median(mine_wall):.0f} ms,"
        f" {1e3 * max(mine_wall[2:]):.0f} at most",
    )
    if is_lone:
        yield Row(
            name=f"CPU of a commit, {case.words}",
            ours=ours_ms,
            unit="ms",
            peer=PEER,
            theirs=1e3 * statistics.median(theirs),
            goal=at_most(40.0),
            note=f"4 % of a core at one a second; ours against itself {100 * halves(mine):.0f} %",
        )
    if case.total >= 640:
        num = (num_commits + 2) * case.total * len(NAMES)
        yield Row(
            name=f"bytes of a value, merged, {case.words}",
            ours=sizes[0] / num,
            unit="bytes",
            peer=PEER,
            theirs=sizes[1] / num,
            goal=ratio_at_most(1.5),
            note="what was merged away but is kept for readers is in ours",
        )


def _tidy(store: Store) -> None:
    for key in writers(store):
        compact_writer(store, key, Compacted(), is_over=False)
    compact(store)
