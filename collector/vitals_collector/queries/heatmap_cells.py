"""Cells of a heat map: minimum, maximum and middle of the values in each, and the one to show."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitals_collector.numbers.interface import Floats, Ints, Mask, Points

_NEIGHBOURS = 9
"""Columns whose median a cell is compared with."""
_MIN_FOLDED = 256


class CellExtremes(NamedTuple):
    """Minimum, maximum and middle of each cell's finite values, and whether it has others."""

    low: Floats
    high: Floats
    middle: Floats
    is_marked: Mask
    is_left: Mask
    """Whether only discarded rows have them."""

    def take(self, rows: Sequence[int]) -> "CellExtremes":
        """Return the cells of the rows that a heat map shows."""
        which = np.array(rows, dtype=np.int64)
        return CellExtremes._make(part[which] for part in self)

    def with_discarded(self, discarded: "CellExtremes") -> "CellExtremes":
        """Add the values of discarded steps to the heat map's cells of the lineage.

        The middle stays that of the lineage if it has one: a middle of two attempts' values is on
        the curve of neither, and a cell could not show which attempt left it.
        """
        return CellExtremes(
            np.fmin(self.low, discarded.low),
            np.fmax(self.high, discarded.high),
            np.where(np.isnan(self.middle), discarded.middle, self.middle),
            self.is_marked | discarded.is_marked,
            discarded.is_marked & ~self.is_marked,
        )


class HeatmapRows(NamedTuple):
    """All rows of a heat map."""

    names: Sequence[str]
    starts: Ints
    """First step of each column."""
    cells: CellExtremes
    rolled_back: tuple[int, int] | None
    """First and last step with a discarded value."""


class HeatmapGrid:
    """Cells that accept values in any order; rows are added on demand."""

    def __init__(self, starts: Ints, num_rows: int = 0) -> None:
        self.starts = starts
        self._low = self._high = self._sum = self._num = np.zeros(0)
        self._is_marked = np.zeros(0, dtype=np.bool_)
        self._grow(num_rows)

    def add(self, row: Ints, step: Ints, value: Floats) -> None:
        """Add values to the heat map's cells: the row of each, and its step."""
        if not len(value):
            return
        self._grow(int(row.max()) + 1)
        is_finite = np.isfinite(value)
        if not is_finite.all():
            is_marked = ~is_finite
            self._is_marked[self._cells(row[is_marked], step[is_marked])] = True
            row, step, value = row[is_finite], step[is_finite], value[is_finite]
        num = self._add_repeated_rows(row, step, value)
        if num < len(row):
            at, rest = self._cells(row[num:], step[num:]), value[num:]
            self._update_cells(at, rest, rest, rest, np.ones(len(rest)))

    def extremes(self, num_rows: int) -> CellExtremes:
        """Return the cells of the heat map's first rows; NaN in those without a finite value."""
        shape = (num_rows, len(self.starts))
        self._grow(num_rows)
        end = num_rows * len(self.starts)
        parts = (self._low, self._high, self._sum, self._num)
        low, high, total, num = (part[:end].reshape(shape) for part in parts)
        low, high = (np.where(num > 0, values, np.nan) for values in (low, high))
        half = low / 2 + high / 2  # halves first: no overflow
        with np.errstate(over="ignore", invalid="ignore"):
            rest = (total - low - high) / np.maximum(num - 2, 1)  # a single spike is not part of it
        middle = np.where((num > 2) & np.isfinite(rest), np.clip(rest, low, high), half)
        is_marked = self._is_marked[:end].reshape(shape)
        return CellExtremes(low, high, middle, is_marked, np.zeros_like(is_marked))

    def _add_repeated_rows(self, row: Ints, step: Ints, value: Floats) -> int:
        """Add to a heat map values that share one column and repeat one order of rows.

        Returns:
            Number of values added: ten times as fast as one by one.
        """
        if len(row) < _MIN_FOLDED:
            return 0
        again = np.flatnonzero(row[1:] == row[0])
        period = int(again[0]) + 1 if len(again) else len(row)
        first, last = np.searchsorted(self.starts, (step.min(), step.max()), side="right")
        if 2 * period > len(row) or first != last or (row[period:] != row[:-period]).any():
            return 0
        num = len(row) // period
        folded = value[: num * period].reshape(num, period)
        with np.errstate(over="ignore"):
            total = folded.sum(axis=0)
        at = row[:period] * len(self.starts) + (first - 1)
        low, high = folded.min(axis=0), folded.max(axis=0)
        self._update_cells(at, low, high, total, np.full(period, float(num)))
        return num * period

    def _update_cells(
        self, at: Ints, low: Floats, high: Floats, total: Floats, num: Floats
    ) -> None:
        """Update the minimum, maximum and sum of the heat map's cells that got values."""
        np.minimum.at(self._low, at, low)
        np.maximum.at(self._high, at, high)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(self._sum, at, total)
        np.add.at(self._num, at, num)

    def _cells(self, row: Ints, step: Ints) -> Ints:
        """Return the index of the heat-map cell of each value."""
        begins = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1])))
        columns = np.searchsorted(self.starts, step[begins], side="right") - 1
        return row * len(self.starts) + np.repeat(columns, np.diff(begins, append=len(step)))

    def _grow(self, num_rows: int) -> None:
        """Add empty cells for further rows of the heat map."""
        missing = num_rows * len(self.starts) - len(self._low)
        if missing <= 0:
            return
        missing = max(missing, len(self._low))  # doubled, so that rows are rarely copied
        self._low = np.concatenate([self._low, np.full(missing, np.inf)])
        self._high = np.concatenate([self._high, np.full(missing, -np.inf)])
        self._sum = np.concatenate([self._sum, np.zeros(missing)])
        self._num = np.concatenate([self._num, np.zeros(missing)])
        self._is_marked = np.concatenate([self._is_marked, np.zeros(missing, dtype=np.bool_)])


def even_starts(first: int, last: int, points: int) -> Ints:
    """Return the first step of each of at most ``points`` equally wide columns."""
    width = -(-(last - first + 1) // points)
    return np.arange(first, last + 1, width, dtype=np.int64)


def starts_of(curves: Sequence[Points], points: int) -> Ints:
    """Return the first step of each heat-map column: one per step if few enough."""
    if not curves:
        return np.zeros(0, dtype=np.int64)
    if all(len(curve) <= points for curve in curves):
        there = np.unique(np.concatenate([curve.step for curve in curves]))
        if len(there) <= points:
            return there
    first = min(int(curve.step.min()) for curve in curves)
    last = max(int(curve.step.max()) for curve in curves)
    return even_starts(first, last, points)


def of_curves(curves: Sequence[Points], starts: Ints) -> CellExtremes:
    """Return the heat-map cells of curves, one row each."""
    grid = HeatmapGrid(starts, len(curves))
    for i, curve in enumerate(curves):
        grid.add(np.full(len(curve), i, dtype=np.int64), curve.step, curve.value)
    return grid.extremes(len(curves))


def most_deviating_values(extremes: CellExtremes) -> Floats:
    """Return the value that each heat-map cell shows: the extreme furthest from its neighbors."""
    if not extremes.low.size:
        return extremes.low
    middle = nanmedian(_around(extremes.middle))
    with np.errstate(over="ignore"):
        is_low = middle - extremes.low > extremes.high - middle
    return np.where(is_low, extremes.low, extremes.high)


def _around(values: Floats) -> Floats:
    """Return each heat-map cell with its neighbors in the row, as a last axis.

    At the edges the row is continued with the same slope, by point reflection at its last cell.
    With neighbors on one side only, the start of a falling loss would look like a spike, and would
    hide spikes in it.
    """
    num = min(_NEIGHBOURS, values.shape[1])
    half = num // 2
    around = ((0, 0), (half, num - 1 - half))
    with np.errstate(over="ignore", invalid="ignore"):
        padded = np.pad(values, around, mode="reflect", reflect_type="odd")
    padded[~np.isfinite(padded)] = np.nan
    return np.lib.stride_tricks.sliding_window_view(padded, num, axis=1)


def nanmedian(values: Floats) -> Floats:
    """Return the median of heat-map cells along the last axis; NaN if there is no value."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    num = np.count_nonzero(~np.isnan(ordered), axis=-1, keepdims=True)
    low, high = np.maximum(num - 1, 0) // 2, np.minimum(num // 2, values.shape[-1] - 1)
    pick = np.take_along_axis
    return (pick(ordered, low, axis=-1) / 2 + pick(ordered, high, axis=-1) / 2)[..., 0]
