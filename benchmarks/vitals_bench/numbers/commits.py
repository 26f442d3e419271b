"""CPU of a row that is stored: in commits of several sizes, and in what tidies up behind them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from trainvitals.identity import new_run_id
from vitals_bench import wide
from vitals_bench.ingest.records import NAMES, Numbers, Writers
from vitals_bench.measure import halves
from vitals_bench.rows import Row, at_most
from vitals_collector.ingest.ingest import ingest_bodies

_STEP_NS = 1_000_000_000
_BEGIN_NS = 1_700_000_000_000_000_000
_RECEIVED_NS = 1
_RANKS_A_BODY = 8
_JUDGED_BY_ROW = 1_000
"""Rows of a commit from which on it is judged by the row."""
_A_MINUTE = 58
"""Commits after the first two: files are merged once a minute. Fewer large ones are enough."""
_MANY_ROWS = 10_000
COMMIT_MS = 40.0
"""4% of a core at one a second."""
ROW_US = 23.0
"""What the store of chunks took at most, before the lake."""


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
        return (
            f"{runs}{self.num_ranks:,} rank{'s' * (self.num_ranks > 1)},"
            f" {self.num_rows} row{'s' * (self.num_rows > 1)} each"
        )

    @property
    def total(self) -> int:
        """Rows of a commit."""
        return self.num_runs * self.num_ranks * self.num_rows


CASES = (
    *(Case(runs, ranks, rows) for runs in (1, 100) for ranks in (1, 8) for rows in (1, 10, 100)),
    Case(1, 4_096, 1),
)
QUICK = (Case(1, 1, 1), Case(1, 8, 10), Case(100, 8, 10))


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
            bodies += [
                batches[i : i + _RANKS_A_BODY] for i in range(0, len(batches), _RANKS_A_BODY)
            ]
        return bodies


def measure_commits(*, quick: bool) -> Iterator[Row]:
    """Yield a row for each size of a commit."""
    for case in QUICK if quick else CASES:
        yield _row(case, 6 if quick else _A_MINUTE if case.total <= _MANY_ROWS else 8)


class Stored(NamedTuple):
    """What a case took."""

    used: list[float]
    """CPU seconds of each commit but the first two."""
    wall: list[float]
    merging: float


def stored(case: Case, num_commits: int) -> Stored:
    """Store the rows of ``num_commits`` seconds, and of two before them, and merge them.

    Raises:
        RuntimeError: rows were not stored.
    """
    fleet, used, wall = Fleet(case), list[float](), list[float]()
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "store") as store,
    ):
        for second in range(num_commits + 2):
            bodies = fleet.bodies(second)
            begin, wall_begin = time.process_time(), time.monotonic()
            answers = ingest_bodies(store, bodies, _RECEIVED_NS)
            used.append(time.process_time() - begin)
            wall.append(time.monotonic() - wall_begin)
            replies = [reply for answer in answers if isinstance(answer, tuple) for reply in answer]
            num_new = sum(reply.num_new for reply in replies)
            if num_new != case.total:
                raise RuntimeError(f"{case.total} rows were sent, {num_new} were stored")
        begin = time.process_time()
        wide.merge(store)
        merging = time.process_time() - begin
    return Stored(used[2:], wall[2:], merging)  # the first makes the tables


def _row(case: Case, num_commits: int) -> Row:
    used, wall, merging = stored(case, num_commits)
    by_row = case.total >= _JUDGED_BY_ROW
    each = statistics.mean(used) + merging / (num_commits + 2)
    return Row(
        name=f"CPU of a {'row of 20 values' if by_row else 'commit'}, {case.words}",
        ours=1e6 * each / case.total if by_row else 1e3 * each,
        unit="us" if by_row else "ms",
        goal=at_most(ROW_US if by_row else COMMIT_MS),
        note=f"{len(NAMES)} values a row; decoding, SQL and tidying up included, HTTP not;"
        f" {merging / (merging + sum(used)):.0%} of it is merging;"
        f" answered in {1e3 * statistics.median(wall):.0f} ms, {1e3 * max(wall):.0f} at most;"
        f" ours against itself {100 * halves(used):.0f} %",
    )
