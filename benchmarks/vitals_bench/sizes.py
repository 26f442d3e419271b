"""CPU and disk of a fleet of any size: a few figures measured, the rest calculated."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from vitals_bench import wide
from vitals_bench.ingest.records import ATTEMPT, NAMES
from vitals_bench.numbers.commits import Case, Fleet, stored
from vitals_bench.rows import Grid, Row
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.numbers.interface import StepWindow
from vitals_collector.numbers.lake import Lake
from vitals_collector.retention.settings import VolumeSettings

_DAY_SECONDS = 86_400
_GPUS = (1, 8, 64, 512, 4_096, 16_384, 100_000)
_STEP_SECONDS = (1.0, 10.0)
_FULL_CORE = 0.5
"""Share of a core that a collector may take: the other half is for questions and merges."""
_WINDOW = 512
_LEVELLED_RANKS = 16
FULL = ((Case(1, 1, 1), 58), (Case(1, 4_096, 1), 28))
"""One rank and many, each with how many commits there are between two merges."""
QUICK = ((Case(1, 1, 1), 4), (Case(1, 64, 1), 4))


class Costs(NamedTuple):
    """What was measured."""

    commit_seconds: float
    """CPU of a commit, without its rows."""
    row_seconds: float
    """CPU of a row in one."""
    row_bytes: float
    """Of a row in a merged file."""
    level_bytes: float
    """Of a step whose ranks became numbers over them."""


class Fleeting(NamedTuple):
    """What a fleet takes."""

    cores: float
    num_collectors: int
    whole_bytes: float
    """A day's rows, each as it came."""
    thinned_bytes: float
    """The same day's when they are old."""


def fleet_takes(num_gpus: int, step_seconds: float, costs: Costs) -> Fleeting:
    """Return what ranks on so many GPUs take that all take a step in that time."""
    settings = VolumeSettings()
    steps = _DAY_SECONDS / step_seconds
    commits = min(1.0, 1.0 / step_seconds)
    cores = commits * costs.commit_seconds + num_gpus / step_seconds * costs.row_seconds
    num_kept = min(num_gpus, 1 + settings.num_worst_ranks)
    level_bytes = costs.level_bytes if num_gpus > num_kept else 0.0
    return Fleeting(
        cores=cores,
        num_collectors=max(1, math.ceil(cores / _FULL_CORE)),
        whole_bytes=steps * num_gpus * costs.row_bytes,
        thinned_bytes=steps * (num_kept * costs.row_bytes + level_bytes),
    )


def measure_sizes(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield what was measured, and the table that is calculated from it."""
    costs = _costs(QUICK if quick else FULL)
    about = f"{len(NAMES)} values a row; decoding, SQL and merging included, HTTP not"
    yield Row(name="CPU of a commit", ours=1e3 * costs.commit_seconds, unit="ms", note=about)
    yield Row(name="CPU of a row in it", ours=1e6 * costs.row_seconds, unit="us", note=about)
    yield Row(name="bytes of a row, merged", ours=costs.row_bytes, unit="bytes")
    yield Row(name="bytes of a step of old ranks", ours=costs.level_bytes, unit="bytes")
    for seconds in _STEP_SECONDS:
        yield _table(seconds, costs)


def _table(step_seconds: float, costs: Costs) -> Grid:
    takes = {num: fleet_takes(num, step_seconds, costs) for num in _GPUS}
    return Grid(
        title=f"Calculated: a step each {step_seconds:g} s on every GPU",
        columns=(
            "GPUs",
            "cores",
            "collectors, of many runs",
            "GB of the last day",
            "GB of each day before",
        ),
        rows=tuple(
            (
                f"{num:,}",
                each.cores,
                each.num_collectors,
                each.whole_bytes / 1e9,
                each.thinned_bytes / 1e9,
            )
            for num, each in takes.items()
        ),
        note="Of the collectors' CPU HTTP, questions and alerts are not in it, nor are samples of"
        " hosts and layers in the bytes. A run has one owner: several collectors help several runs."
        " A run above --cap-gb is thinned before its day is over.",
    )


def _costs(cases: tuple[tuple[Case, int], ...]) -> Costs:
    runs = [stored(case, num_commits) for case, num_commits in cases]
    each = [
        statistics.mean(run.used) + run.merging / (num_commits + 2)
        for run, (_, num_commits) in zip(runs, cases, strict=True)
    ]
    num_ranks = cases[1][0].num_ranks
    row_seconds = max(0.0, each[1] - each[0]) / (num_ranks - 1)
    whole, thinned = _levelled()
    row_bytes = whole / (_LEVELLED_RANKS * _WINDOW)
    kept = (1 + VolumeSettings().num_worst_ranks) * _WINDOW * row_bytes
    return Costs(each[0], row_seconds, row_bytes, max(0.0, thinned - kept) / _WINDOW)


def _levelled() -> tuple[int, int]:
    """Return the bytes of a window's rows, and those that they take when they are old."""
    fleet = Fleet(Case(1, _LEVELLED_RANKS, _WINDOW))
    (run_id,) = fleet.run_ids
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "store") as store,
    ):
        ingest_bodies(store, fleet.bodies(0), time.time_ns())
        numbers, sizes = store.numbers, []
        assert isinstance(numbers, Lake)
        numbers.merge()
        sizes.append(numbers.num_bytes(run_id))
        num_worst = VolumeSettings().num_worst_ranks
        numbers.roll_up(run_id, StepWindow(ATTEMPT, 0, _WINDOW), num_worst)
        numbers.merge()
        sizes.append(numbers.num_bytes(run_id))
    return sizes[0], sizes[1]


PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {"sizes": measure_sizes}
"""Called with ``quick``; yields its rows and tables."""
