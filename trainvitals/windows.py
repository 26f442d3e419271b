"""Robust statistics over the newest samples, in pure Python and in a few microseconds.

A window only holds what its owner accepted: outliers, skipped steps and non-finite values are kept
out by never being pushed. Everything here is float64 arithmetic in a fixed order, so that every
rank, the collector and a replay get the same bits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

SIGMA_PER_MAD = 1.4826
"""Standard deviations per median absolute deviation, where the samples are normal."""


class RobustWindow:
    """The newest ``size`` samples, kept in order of arrival and in order of value."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, value: float) -> None:
        """Add a finite sample; the oldest leaves when the window is full."""
        value += 0.0  # -0.0 becomes 0.0: equal values must also be equal bits
        arrived, ordered = self._arrived, self._sorted
        if len(ordered) == self._size:
            del ordered[bisect_left(ordered, arrived[0])]
        arrived.append(value)
        insort(ordered, value)

    def clear(self) -> None:
        """Forget every sample."""
        self._arrived.clear()
        self._sorted.clear()

    def values(self) -> list[float]:
        """Return the samples, oldest first."""
        return list(self._arrived)

    def restore(self, values: Iterable[float]) -> None:
        """Hold exactly these samples, oldest first; the newest stay where they are too many."""
        self.clear()
        self._arrived.extend(values)
        self._sorted.extend(sorted(self._arrived))

    @property
    def smallest(self) -> float:
        """The smallest sample. The window must not be empty."""
        return self._sorted[0]

    def median(self) -> float:
        """Return the median (the upper one of two). The window must not be empty."""
        return self._sorted[len(self._sorted) >> 1]

    def mad(self) -> float:
        """Return the median absolute deviation from the median. The window must not be empty.

        The half that lies nearest to the median is a stretch of the ordered samples: the stretch
        that reaches least far, found by bisection.
        """
        ordered = self._sorted
        half = len(ordered) >> 1
        median = ordered[half]
        low, high = 0, len(ordered) - 1 - half
        while low < high:
            middle = (low + high) >> 1
            if median - ordered[middle] > ordered[middle + half] - median:
                low = middle + 1
            else:
                high = middle
        reach = max(median - ordered[low], ordered[low + half] - median)
        if low:
            reach = min(reach, max(median - ordered[low - 1], ordered[low - 1 + half] - median))
        return reach

    def upper(self, fraction: float) -> float:
        """Return the sample that only ``fraction`` of the window exceeds."""
        return self._sorted[-1 - int(len(self._sorted) * fraction)]
