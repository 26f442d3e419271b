"""Says where values lie in a picture: the least and the greatest of each column, and the axis."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_FROM = 20.0
"""Greatest over least value from which an axis is logarithmic."""


@dataclass(slots=True)
class Column:
    """The values that one column of a picture stands for."""

    low: float = math.inf
    high: float = -math.inf
    limit: float = math.inf
    num_nonfinite: int = 0

    def add(self, value: float) -> None:
        """Take a value in; one that is not finite is counted."""
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.num_nonfinite += 1

    @property
    def has_value(self) -> bool:
        """Whether any value was finite."""
        return self.low <= self.high


class Scale:
    """Maps values to an axis, logarithmically where they span much and are positive."""

    def __init__(self, columns: Iterable[Column]) -> None:
        finite = [column for column in columns if column.has_value]
        self._low = min((c.low for c in finite), default=0.0)
        self._high = max((c.high for c in finite), default=1.0)
        self.is_log = self._low > 0.0 and self._high / LOG_FROM > self._low

    def part(self, value: float) -> float:
        """Return how far up the axis the value lies, 0 to 1."""
        low, high = self._at(self._low), self._at(self._high)
        part = (self._at(value) - low) / (high - low) if high > low else 0.5
        return min(max(part, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return the values to be written at the axis, from the least to the greatest."""
        if not self.is_log:
            return list(dict.fromkeys((self._low, self._low / 2 + self._high / 2, self._high)))
        return [self._low, math.sqrt(self._low) * math.sqrt(self._high), self._high]

    def _at(self, value: float) -> float:
        # Half of each, so that the distance of two floats is always a float.
        return math.log(max(value, self._low)) if self.is_log else value / 2
