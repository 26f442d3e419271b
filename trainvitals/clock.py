"""Time as a value that is handed in, so that no decision reads a clock of its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the edges read time from; tests hand in ``trainvitals.testing.ManualClock``."""

    def time_ns(self) -> int:
        """Wall time in nanoseconds since the Unix epoch; may jump. For display only."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds from an arbitrary start; never goes back. For durations."""
        ...


class SteadyClock:
    """Wall time that never jumps: the clock's at the start, counted on by its monotonic clock.

    For what is compared with itself within one process: arrivals, silence, holds. An hour by which
    somebody sets the clock is no silence of an hour.
    """

    def __init__(self, clock: Clock) -> None:
        self._offset_ns = clock.time_ns() - clock.monotonic_ns()
        self.monotonic_ns = clock.monotonic_ns

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as far as the clock was right at the start."""
        return self._offset_ns + self.monotonic_ns()


class SystemClock:
    """The machine's clocks."""

    time_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)
