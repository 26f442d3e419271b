"""Rows in memory that are rolled up as in a lake: the reference of its roll-ups."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import ROW_COLUMNS
from vitals_collector.numbers.interface import (
    RANKS,
    Columns,
    ColumnValues,
    DeletedRows,
    DueWindow,
    Reason,
    RollUpResult,
    RowSpan,
    StepWindow,
)
from vitals_collector.numbers.memory import MemoryNumberStore
from vitals_collector.numbers.rank_rollup import (
    DURATION,
    LOSS,
    NUM_RANKS,
    STATISTICS,
    order_worst_ranks,
    ranks_batch,
)

_READ = ("step", "attempt", "rank", "source", "incarnation", "seq", "time_unix_ns")


class RolledMemory(MemoryNumberStore):
    """Hides the rows that a roll-up deletes."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: dict[str, set[tuple[str, int]]] = defaultdict(set)
        """By run, the incarnation and number of each deleted row."""
        self._rolled_up_to: dict[tuple[str, int], int] = {}
        self._reports: dict[str, list[DeletedRows]] = defaultdict(list)

    def scan(self, span: RowSpan, names: Sequence[str]) -> Columns:
        """Return columns of the remaining rows in the span, in order."""
        rows = super().scan(span, [*dict.fromkeys((*names, "incarnation", "seq"))])
        keys = zip(rows["incarnation"].values.tolist(), rows["seq"].values.tolist(), strict=True)
        dropped = self._dropped[span.run_id] if span.stream == "steps" else set()
        is_left = np.array([key not in dropped for key in keys], np.bool_)
        return {name: rows[name].take(is_left) for name in names}

    def num_rows(self, span: RowSpan) -> int:
        """Return how many rows the span has."""
        return len(self.scan(span, ["seq"])["seq"].values)

    def next_window(self, run_id: str, attempt: int, size: int) -> DueWindow | None:
        """Return the oldest steps that are not rolled up yet."""
        first_step = self._rolled_up_to.get((run_id, attempt))
        rows = self.scan(RowSpan(run_id, "steps", from_step=first_step), _READ)
        step, times = rows["step"].values, rows["time_unix_ns"].values
        is_mine = (rows["attempt"].values == attempt) & (rows["rank"].values > 0)
        if not is_mine.any():
            return None
        first = int(step[is_mine].min()) // size * size
        is_in = is_mine & (step >= first) & (step < first + size)
        writers, seqs = rows["incarnation"].values[is_in], rows["seq"].values[is_in]
        last_seqs = _extreme_by_key(writers, seqs, max)
        window = StepWindow(attempt, first, first + size)
        return DueWindow(window, int(times[is_in].max()), last_seqs)

    def roll_up(
        self,
        run_id: str,
        window: StepWindow,
        num_worst: int,
        *,
        is_whole: bool = False,
        reason: Reason = "age",
    ) -> RollUpResult:
        """Replace most ranks' rows by statistics over the ranks."""
        row_columns = {column.name for column in ROW_COLUMNS}
        kinds = self.kinds(run_id, "steps")
        names = [name for name, kind in kinds.items() if kind != "S" and name not in row_columns]
        span = RowSpan(run_id, "steps", from_step=window.first_step, to_step=window.end_step)
        rows = self.scan(span, [*_READ, *names])
        is_mine = (rows["attempt"].values == window.attempt) & (rows["rank"].values > 0)
        if not is_mine.any():
            return RollUpResult(0, ())
        rows = {name: column.take(is_mine) for name, column in rows.items()}
        sources = rows["source"].values
        kept = sorted(set(sources)) if is_whole else worst_ranks(rows, names, num_worst)
        first_seq = self.mark((run_id, RANKS, RANKS)) + 1
        numbers = rank_statistics(rows, names)
        self.append([ranks_batch(run_id, window.attempt, names, numbers, first_seq)])
        self._rolled_up_to[run_id, window.attempt] = window.end_step
        is_taken = ~np.isin(sources.astype(str), kept)
        writers, seqs = (rows[name].values[is_taken].tolist() for name in ("incarnation", "seq"))
        self._dropped[run_id].update(zip(writers, seqs, strict=True))
        if seqs:
            report = DeletedRows("steps", reason, len(seqs), window.end_step - 1, 0)
            self._reports[run_id].append(report)
        return RollUpResult(len(seqs), tuple(kept))

    def deleted_rows(self, run_id: str) -> list[DeletedRows]:
        """Return the numbers of deleted rows of the run, by stream and reason."""
        by_reason: dict[tuple[str, Reason], list[DeletedRows]] = defaultdict(list)
        for part in self._reports[run_id]:
            by_reason[part.stream, part.reason].append(part)
        return [
            DeletedRows(*key, sum(p.num_rows for p in parts), max(p.to_step for p in parts), 0)
            for key, parts in sorted(by_reason.items())
        ]

    def delete(self, run_id: str, exclude: Collection[str] = ()) -> None:
        """Delete the run's rows; its last sequence numbers stay."""
        super().delete(run_id, exclude)
        self._reports.pop(run_id, None)


def worst_ranks(rows: Columns, names: Iterable[str], num: int) -> list[str]:
    """Return the sources of the worst ranks among rows, which have source and step."""
    source, step = rows["source"].values, rows["step"].values
    is_broken = np.zeros(len(step), np.bool_)
    for name in names:
        is_broken |= ~rows[name].is_missing & ~_is_finite(rows[name])
    broken = _extreme_by_key(source[is_broken], step[is_broken], min)
    slow, far = dict[str, float](), dict[str, float]()
    if DURATION in rows:
        is_there = _is_finite(rows[DURATION])
        slow = _extreme_by_key(source[is_there], rows[DURATION].values[is_there], max)
    if LOSS in rows:
        is_there = _is_finite(rows[LOSS])
        losses = rows[LOSS].values[is_there].astype(np.float64)
        of_step = step[is_there]
        medians = {s: np.median(losses[of_step == s]) for s in np.unique(of_step).tolist()}
        distance = np.abs(losses - np.array([medians[s] for s in of_step.tolist()]))
        far = _extreme_by_key(source[is_there], distance, max)
    return order_worst_ranks(broken, slow, far, num)


def rank_statistics(rows: Columns, names: Sequence[str]) -> Columns:
    """Return the statistics over ranks: one row per step, in step order."""
    steps, at = np.unique(rows["step"].values, return_inverse=True)
    num = len(steps)
    newest = np.zeros(num, np.int64)
    np.maximum.at(newest, at, rows["time_unix_ns"].values)
    whole = {"step": steps, "time_unix_ns": newest, NUM_RANKS: np.bincount(at, minlength=num)}
    numbers = {name: ColumnValues(v, np.zeros(num, np.bool_)) for name, v in whole.items()}
    for name in names:
        numbers |= _column_statistics(name, rows[name], at, num)
    return numbers


def _column_statistics(name: str, column: ColumnValues, at: npt.NDArray[Any], num: int) -> Columns:
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


def _is_finite(column: ColumnValues) -> npt.NDArray[np.bool_]:
    return np.isfinite(column.values) & ~column.is_missing


def _extreme_by_key(
    keys: npt.NDArray[Any], values: npt.NDArray[Any], extreme: Any
) -> dict[str, Any]:
    extremes: dict[str, Any] = {}
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        extremes[key] = extreme(value, extremes.get(key, value))
    return extremes
