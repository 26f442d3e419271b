"""Statistics over the ranks per step, which replace most ranks' rows. Pure.

Rank 0 is not among them: its rows stay, and are the run's curves.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity
from trainvitals.rows import Column as RowColumn
from trainvitals.rows import Schema
from trainvitals.wire import Batch, BatchHeader
from vitals_collector.numbers.interface import RANKS, Columns, ColumnValues

STATISTICS = ("min", "mean", "max", "num", "nonfinite")
"""Statistics of a column: of its finite values, their number, and the number of non-finite ones."""
NUM_RANKS = "num_ranks"
"""Column: number of ranks in the statistics of a step."""
DURATION, LOSS = "step_duration_seconds", "rank_loss"
"""Columns that determine the worst ranks."""
_COUNTS = ("num", "nonfinite")


def order_worst_ranks(
    broken: Mapping[str, int], slow: Mapping[str, float], far: Mapping[str, float], num: int
) -> list[str]:
    """Return the worst ranks' sources, at most ``num``.

    First the ranks with a NaN or Inf, by first step. Then alternately the rank with the longest
    step and the one whose loss was furthest from the ranks' median.

    Args:
        broken: by source, its first step with a value that is not finite.
        slow: by source, its longest step.
        far: by source, largest distance of its loss from the median.
        num: wanted number.
    """
    firsts = sorted(broken, key=lambda source: (broken[source], source))
    orders = (
        sorted(of_source, key=lambda source: (-of_source[source], source))
        for of_source in (slow, far)
    )
    turns = (source for pair in zip_longest(*orders) for source in pair if source is not None)
    return list(dict.fromkeys([*firsts, *turns]))[:num]


def worst_ranks(rows: Columns, names: Iterable[str], num: int) -> list[str]:
    """Return the sources of the worst ranks among rows, which have source and step."""
    source, step = rows["source"].values, rows["step"].values
    is_broken = np.zeros(len(step), np.bool_)
    for name in names:
        is_broken |= ~rows[name].is_missing & ~_is_finite(rows[name])
    broken = _extreme_by_source(source[is_broken], step[is_broken], min)
    slow, far = dict[str, float](), dict[str, float]()
    if DURATION in rows:
        is_there = _is_finite(rows[DURATION])
        slow = _extreme_by_source(source[is_there], rows[DURATION].values[is_there], max)
    if LOSS in rows:
        is_there = _is_finite(rows[LOSS])
        losses = rows[LOSS].values[is_there].astype(np.float64)
        of_step = step[is_there]
        medians = {s: np.median(losses[of_step == s]) for s in np.unique(of_step).tolist()}
        distance = np.abs(losses - np.array([medians[s] for s in of_step.tolist()]))
        far = _extreme_by_source(source[is_there], distance, max)
    return order_worst_ranks(broken, slow, far, num)


def _extreme_by_source(
    sources: npt.NDArray[Any], values: npt.NDArray[Any], extreme: Any
) -> dict[str, Any]:
    """Return the smallest or largest value of each rank's source."""
    extremes: dict[str, Any] = {}
    for source, value in zip(sources.tolist(), values.tolist(), strict=True):
        extremes[source] = extreme(value, extremes.get(source, value))
    return extremes


def _is_finite(column: ColumnValues) -> npt.NDArray[np.bool_]:
    is_finite: npt.NDArray[np.bool_] = np.isfinite(column.values) & ~column.is_missing
    return is_finite


def compute_rank_statistics(rows: Columns, names: Sequence[str]) -> Columns:
    """Return the statistics over ranks: one row per step, in step order.

    Args:
        rows: with ``step`` and ``time_unix_ns``.
        names: the columns of numbers.
    """
    steps, at = np.unique(rows["step"].values, return_inverse=True)
    num = len(steps)
    newest = np.zeros(num, np.int64)
    np.maximum.at(newest, at, rows["time_unix_ns"].values)
    numbers = {
        "step": _complete_column(steps),
        "time_unix_ns": _complete_column(newest),
        NUM_RANKS: _complete_column(np.bincount(at, minlength=num)),
    }
    for name in names:
        numbers |= _column_statistics(name, rows[name], at, num)
    return numbers


def _complete_column(values: npt.NDArray[Any]) -> ColumnValues:
    return ColumnValues(values, np.zeros(len(values), np.bool_))


def _column_statistics(name: str, column: ColumnValues, at: npt.NDArray[Any], num: int) -> Columns:
    """Return a metric's statistics over the ranks at each rolled-up step."""
    is_finite = _is_finite(column)
    places, finite = at[is_finite], column.values[is_finite].astype(np.float64)
    low, high = np.full(num, np.inf), np.full(num, -np.inf)
    np.minimum.at(low, places, finite)
    np.maximum.at(high, places, finite)
    nums = np.bincount(places, minlength=num)
    nonfinite = np.bincount(at[~is_finite & ~column.is_missing], minlength=num)
    is_missing = nums == 0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.bincount(places, finite, num) / np.maximum(nums, 1)
    values = dict(zip(STATISTICS, (low, mean, high, nums, nonfinite), strict=True))
    missing = dict.fromkeys(("min", "mean", "max"), is_missing)
    none = is_missing & (nonfinite == 0)
    return {
        f"{name}:{what}": ColumnValues(values[what], missing.get(what, none)) for what in STATISTICS
    }


def ranks_schema(names: Iterable[str]) -> Schema:
    """Return the columns of the numbers over ranks of some columns."""
    statistics = (
        RowColumn(f"{name}:{what}", "i8" if what in _COUNTS else "f8")
        for name in sorted(names)
        for what in STATISTICS
    )
    return Schema(RANKS, (*ROW_COLUMNS, RowColumn(NUM_RANKS, "i8"), *statistics))


def ranks_batch(
    run_id: str, attempt: int, names: Sequence[str], numbers: Columns, first_seq: int
) -> Batch:
    """Return numbers over ranks as rows of the stream ``ranks``.

    The mean of values that overflow together is the nearest of their ends.
    """
    schema = ranks_schema(names)
    for name in names:
        low, mean, high = (numbers[f"{name}:{what}"].values for what in ("min", "mean", "max"))
        is_missing = numbers[f"{name}:mean"].is_missing
        numbers[f"{name}:mean"] = ColumnValues(np.minimum(high, np.maximum(low, mean)), is_missing)
    num = len(numbers["step"].values)
    key_columns = {"attempt": np.full(num, attempt), "monotonic_ns": np.zeros(num, np.int64)}
    columns = [numbers.get(c.name) or _complete_column(key_columns[c.name]) for c in schema.columns]
    listed = [
        [
            None if is_missing else value
            for value, is_missing in zip(
                column.values.tolist(), column.is_missing.tolist(), strict=True
            )
        ]
        for column in columns
    ]
    rows = b"".join(
        schema.pack(first_seq + i, row) for i, row in enumerate(zip(*listed, strict=True))
    )
    who = Identity(
        run_id=run_id,
        incarnation=RANKS,
        source=RANKS,
        node="",
        pid=0,
        rank=0,
        local_rank=0,
        world_size=0,
    )
    header = BatchHeader(identity=who, stream_schema=schema, first_seq=first_seq, num_rows=num)
    return Batch(header, rows)
