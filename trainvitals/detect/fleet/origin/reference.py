"""Reference of a series: its quiet values, and the range that a first change leaves."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SIGMAS = 8.0
"""Robust sigmas from which a series is out."""
OF_LARGEST = 1.5
"""Multiple of the reference's largest deviation that it must exceed as well."""
REFERENCE = 200
"""Quiet values of a series in its reference."""
LAG = 20
"""Values whose median a new one is compared with; an episode ends after as many quiet steps."""
LEAST = 16
"""Minimum number of values of a reference, which must also span ``SPAN`` steps. Layers are written
every 10th step by default."""
SPAN = 100
"""Minimum number of steps of a reference."""
_WRITTEN = 1e-9
"""Relative change from which a tensor was written. Untouched tensors have exactly 0."""
_RENEWED = 16
"""Values after which the figures of the reference are computed again."""
FEW_RANKS = 32
"""Up to this number of ranks, the median of the others is exact."""


class SeriesReference:
    """One series in plain Python, which costs a tenth of ``SeriesArrayReference`` here."""

    __slots__ = (
        "_age", "_at", "_away", "_floor", "_largest", "_limit", "_now", "_ordered", "_quiet",
        "_raw", "_scale", "_since", "middle",
    )  # fmt: skip

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._raw: deque[float] = deque(maxlen=LAG)
        self._ordered: list[float] = []
        self._away: list[float] = []
        self._at = self._quiet = self._age = 0
        self._scale = self._largest = self._limit = math.inf
        self._since: int | None = None
        self._now = 0.0
        self.middle = 0.0

    @property
    def is_judged(self) -> bool:
        """Return whether the series has a normal range, which a first change would leave."""
        return self._scale < math.inf

    @property
    def peak(self) -> float:
        """Return the distance from the middle that no quiet value has exceeded."""
        return max(self._largest, SIGMAS / 2 * self._scale)

    @property
    def sigmas(self) -> float:
        """Return the distance of the step's value from the middle, in sigmas."""
        return self._now / self._scale

    @property
    def distance(self) -> float:
        """Return the distance of the step's value from the middle."""
        return abs(self._now)

    def sigmas_beyond_limit(self, value: float) -> float:
        """Return by how many sigmas the step's value left its series' range, otherwise 0."""
        ordered = self._ordered
        num = len(ordered)
        if not num or value - value != 0.0:
            self.middle, self._now = value, math.nan
            return 0.0
        middle = self.middle = (ordered[(num - 1) >> 1] + ordered[num >> 1]) / 2
        away = self._now = value - middle
        if -self._limit <= away <= self._limit:
            return 0.0
        if self._age:
            self._refresh_scale()
        return away / self._scale if abs(away) > self._limit else 0.0

    def add(self, value: float, step: int, *, is_quiet: bool) -> None:
        """Add the step's value that was just checked for a first change."""
        if value - value != 0.0:
            return
        raw, ordered = self._raw, self._ordered
        if len(raw) == LAG:
            del ordered[bisect_left(ordered, raw[0])]
        raw.append(value)
        insort(ordered, value)
        if self._since is None or step < self._since:
            self._since = step
        if not is_quiet or len(raw) < LAG // 2 or self._now != self._now:
            return
        if len(self._away) < REFERENCE:
            self._away.append(self._now)
        else:
            self._away[self._at] = self._now
        self._at = (self._at + 1) % REFERENCE
        self._age += 1
        if abs(self._now) > self._largest:
            self._largest = abs(self._now)
            self._limit = max(self._limit, OF_LARGEST * self._largest)
        if self._age >= _RENEWED and step - self._since >= SPAN:
            self._refresh_scale()

    def _refresh_scale(self) -> None:
        """Compute the normal range of the series again from its quiet steps."""
        self._age = 0
        if len(self._away) < LEAST:
            return
        middle = sorted_median(sorted(self._away))
        far = sorted_median(sorted([abs(away - middle) for away in self._away]))
        self._scale = max(1.4826 * far, self._floor)
        self._largest = max(max(self._away), -min(self._away))
        self._limit = max(SIGMAS / 2 * self._scale, OF_LARGEST * self._largest)


def sorted_median(ordered: Sequence[float]) -> float:
    """Return the median of sorted values, from which a first change is measured."""
    return (ordered[(len(ordered) - 1) >> 1] + ordered[len(ordered) >> 1]) / 2


class SeriesArrayReference:
    """Series of one kind: latest values of each, and the deviations of its quiet values."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        """Smallest scale: a series that is constant to the last digit has no sigma."""
        self.num = 0
        self._raw = np.empty((0, LAG))
        self._away = np.empty((0, REFERENCE), dtype=np.float32)
        self._count = np.empty(0, dtype=np.int64)
        self._quiet = np.empty(0, dtype=np.int64)
        self._scale = self._largest = np.empty(0)
        self._age = 0
        self._spans = False
        self._since: int | None = None
        """Step of the first value: a reference must span ``SPAN`` steps."""

    def grow_to(self, num: int) -> None:
        """Make room for this number of series, one per rank or layer that may change first."""
        more = num - self.num
        if more <= 0:
            return
        self.num = num
        self._raw = np.pad(self._raw, ((0, more), (0, 0)))
        self._away = np.pad(self._away, ((0, more), (0, 0)), constant_values=np.nan)
        self._count, self._quiet = np.pad(self._count, (0, more)), np.pad(self._quiet, (0, more))
        self._scale = np.pad(self._scale, (0, more), constant_values=np.inf)
        self._largest = np.pad(self._largest, (0, more), constant_values=np.inf)

    def sigmas_beyond_limit(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the sigmas of series that are out, 0 elsewhere, and the middle of each series."""
        lower, upper = LAG // 2 - 1, LAG // 2
        parted = np.partition(self._raw, (lower, upper), axis=1)
        middle = (parted[:, lower] + parted[:, upper]) / 2
        away = values - middle
        self._now = away
        with np.errstate(invalid="ignore"):  # infinite values of a scale that is unknown yet
            sigmas = away / self._scale
        is_out = np.abs(sigmas) > SIGMAS / 2
        if is_out.any():  # outdated figures are sufficient to find candidates
            if self._age:
                self._refresh_scale()
                sigmas = away / self._scale
            is_out = np.abs(away) > OF_LARGEST * self._largest
        return np.where(is_out & np.isfinite(sigmas), sigmas, 0.0), middle

    def add(self, values: Floats, step: int, *, is_quiet: bool) -> None:
        """Add the step's values, just checked for a first change; missing ones are NaN."""
        there = np.flatnonzero(np.isfinite(values))
        if not len(there):
            return
        if self._since is None or step < self._since:
            self._since = step
        self._spans = step - self._since >= SPAN
        new = there[self._count[there] == 0]
        if len(new):
            self._raw[new] = values[new, None]
        self._raw[there, self._count[there] % LAG] = values[there]
        if is_quiet:
            filled = there[self._count[there] >= LAG // 2]
            self._away[filled, self._quiet[filled] % REFERENCE] = self._now[filled]
            self._quiet[filled] += 1
            self._age += len(filled) > 0
            if self._age >= _RENEWED:
                self._refresh_scale()
            elif len(filled):
                grown = np.where(np.isinf(self._largest[filled]), 0.0, np.abs(self._now[filled]))
                self._largest[filled] = np.maximum(self._largest[filled], grown)
        self._count[there] += 1

    @property
    def is_judged(self) -> bool:
        """Return whether any series has a normal range, which a first change would leave."""
        return bool(np.isfinite(self._scale).any())

    def _refresh_scale(self) -> None:
        """Compute the normal range of each series again from its quiet steps."""
        self._age = 0
        num = np.minimum(self._quiet, REFERENCE)
        away = self._away.astype(np.float64)
        far = np.abs(away - _median(away, num)[:, None])
        scale = np.maximum(1.4826 * _median(far, num), self._floor)
        largest = np.nan_to_num(np.abs(away)).max(axis=1, initial=0.0)
        has_reference = (num >= LEAST) & self._spans
        self._scale = np.where(has_reference, scale, np.inf)
        self._largest = np.where(has_reference, largest, np.inf)


def _median(rows: Floats, num: npt.NDArray[np.int64]) -> Floats:
    """Return the median of each series' first ``num`` values in order; NaN are sorted last."""
    ordered = np.sort(rows, axis=1)
    at = np.maximum(num - 1, 0)[:, None]
    low, high = (np.take_along_axis(ordered, index, 1)[:, 0] for index in (at // 2, (at + 1) // 2))
    return np.asarray((low + high) / 2)


class WriteRatioPeaks:
    """The largest of the last 100 to 200 values of each of many series that are mostly 0."""

    def __init__(self) -> None:
        self._now, self._before, self._num = np.empty(0), np.empty(0), 0

    def find_outliers(self, values: Floats) -> npt.NDArray[np.bool_]:
        """Return the series with a write outside the optimizer step, larger than usual."""
        more = len(values) - len(self._now)
        if more > 0:
            self._now, self._before = np.pad(self._now, (0, more)), np.pad(self._before, (0, more))
        usual = np.maximum(self._now, self._before)
        is_out: npt.NDArray[np.bool_] = (values > _WRITTEN) & (values > OF_LARGEST * usual)
        return is_out

    def add(self, values: Floats) -> None:
        """Add the write ratios of a quiet step, to which later ones are compared."""
        np.fmax(self._now, values, out=self._now)
        self._num += 1
        if self._num >= REFERENCE // 2:
            self._before, self._now, self._num = self._now, np.zeros_like(self._now), 0


def logarithms(values: Floats) -> Floats:
    """Return the logarithms that the detector judges of a step's series; NaN without one."""
    is_positive = values > 0.0
    return np.log(np.where(is_positive, values, np.nan))


def logarithm(value: float | None) -> float:
    """Return the logarithm that the detector judges of a step's number; NaN without one."""
    return math.log(value) if value is not None and value > 0.0 else math.nan


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each series the median of the others: a change that all share came not first."""
    num = len(values)
    if num > FEW_RANKS:
        return [sorted_median(sorted(values))] * num
    order = sorted(range(num), key=values.__getitem__)
    ordered = [values[i] for i in order]
    low, high = (num - 2) >> 1, (num - 1) >> 1
    others = [0.0] * num
    for position, i in enumerate(order):
        others[i] = (ordered[low + (position <= low)] + ordered[high + (position <= high)]) / 2
    return others
