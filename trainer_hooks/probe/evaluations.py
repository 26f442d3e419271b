"""The loop's own evaluations as evidence: how a validation loss compares with the one before."""

from __future__ import annotations

import math
from collections.abc import Mapping

_FLOOR = 0.02
"""Part of the metric's first value that is added to both sides, as for the probe."""
_LARGEST = 1e9


class LossEvaluations:
    """Rank 0's validation losses; the ratio of the newest travels with the next step's numbers.

    Every name that is or ends in ``loss`` counts: of an accuracy more is better, and of what nobody
    named nothing is known.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._ratio = 0.0

    def given(self, values: Mapping[str, float]) -> None:
        """Take an evaluation in."""
        for name, value in values.items():
            if name.lower().rpartition("_")[2] == "loss" and isinstance(value, int | float):
                self._ratio = max(self._ratio, self._one(name, float(value)))

    def _one(self, name: str, value: float) -> float:
        """Return the ratio of one metric's value; 1 where there is nothing to compare with."""
        if name not in self._last:
            if math.isfinite(value):
                self._first[name] = self._last[name] = value
            return 1.0
        floor = _FLOOR * abs(self._first[name])
        before = self._last[name] + floor
        if not math.isfinite(value):
            return _LARGEST
        self._last[name] = value
        return min((value + floor) / before, _LARGEST) if before > 0.0 else 1.0

    def take_ratio(self) -> float:
        """Return the largest ratio since the last call, to travel with a step; 0: none."""
        ratio, self._ratio = self._ratio, 0.0
        return ratio
