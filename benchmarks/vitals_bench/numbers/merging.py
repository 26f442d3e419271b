"""Response time of a commit during a merge of files."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from vitals_bench import wide
from vitals_bench.numbers.commits import Case, Fleet
from vitals_bench.rows import Row, at_most
from vitals_collector.ingest.ingest import ingest_bodies

FULL, QUICK = Case(1, 4_096, 1), Case(1, 64, 1)
_NUM_COMMITS = 120
_PAUSE_SECONDS = 0.2
_RECEIVED_NS = 1


def measure_merging(*, quick: bool) -> Iterator[Row]:
    """Yield the slowest commit during a merge of two minutes of rows."""
    yield measure_case(QUICK if quick else FULL, 10 if quick else _NUM_COMMITS)


def measure_case(case: Case, num_commits: int) -> Row:
    """Return the row for a fleet of this size, after ``num_commits`` unmerged commits."""
    fleet, alone, beside = Fleet(case), list[float](), list[float]()
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "store") as store,
    ):

        def commit(second: int) -> float:
            bodies = fleet.bodies(second)
            begin = time.monotonic()
            ingest_bodies(store, bodies, _RECEIVED_NS)
            return time.monotonic() - begin

        alone = [commit(second) for second in range(num_commits)]
        merging = threading.Thread(target=wide.merge, args=(store,))
        merging.start()
        begin = time.monotonic()
        while merging.is_alive():
            beside.append(commit(num_commits + len(beside)))
            merging.join(_PAUSE_SECONDS)
        seconds = time.monotonic() - begin
    return Row(
        name=f"answer to a commit while files are merged, at worst, {case.words}",
        ours=max(beside),
        unit="s",
        goal=at_most(2.0),
        note=f"wall time; {len(beside)} commits in {seconds:.1f} s of merging, median"
        f" {statistics.median(beside):.2f} s; before it {statistics.median(alone):.2f} s,"
        f" {max(alone):.2f} at most",
    )
