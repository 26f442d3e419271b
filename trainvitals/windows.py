"""Robust statistics over the newest samples, in pure Python and in a few microseconds.

A window only holds what its owner accepted: outliers, skipped steps and non-finite values are kept
out by never being pushed. Everything here is float64 arithmetic in a fixed order, so that every
rank, the collector and a replay get the same bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

SIGMA_PER_MAD = 1.4826
"""Standard deviations per median absolute deviation, where the samples are normal."""


class RobustWindow:
    """The newest ``size`` samples, kept in order of arrival and in order of value."""

    def __init__(self, size: int) -> None:
        self._arrived: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, value: float) -> None:
        """Add a finite sample; the oldest leaves when the window is full."""
        value += 0.0  # -0.0 becomes 0.0: equal values must also be equal bits
        arrived = self._arrived
        if len(arrived) == arrived.maxlen:
            del self._sorted[bisect_left(self._sorted, arrived[0])]
        arrived.append(value)
        insort(self._sorted, value)

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

    def upper(self, fraction: float) -> float:
        """Return the sample that only ``fraction`` of the window exceeds."""
        return self._sorted[-1 - int(len(self._sorted) * fraction)]

    def mad(self, center: float) -> float:
        """Return the median distance from ``center``, found by bisection."""
        low, high = self._half_around(center, math.inf)
        return max(center - low, high - center)

    def log_mad(self, center: float) -> float:
        """Return the median distance of the logarithms; every sample and ``center`` must be > 0."""
        low, high = self._half_around(center, 0.0)
        return max(
            math.log(center / low) if low < center else 0.0,
            math.log(high / center) if high > center else 0.0,
        )

    def _half_around(self, center: float, kind: float) -> tuple[float, float]:
        """Return the ends of the half of the samples that lies nearest to ``center``.

        The nearest half is contiguous in the sorted samples, so its start is found by bisection:
        while the sample that would be left behind is farther than the one that would be gained,
        the start moves on. ``kind`` 0 compares ratios, anything else differences.
        """
        ordered = self._sorted
        half = (len(ordered) >> 1) + 1
        start, end = 0, len(ordered) - half
        while start < end:
            probe = (start + end) >> 1
            left, gained = ordered[probe], ordered[probe + half]
            if kind == 0.0:
                farther = gained < center or center / left > gained / center
            else:
                farther = center - left > gained - center
            if farther:
                start = probe + 1
            else:
                end = probe
        return ordered[start], ordered[start + half - 1]
