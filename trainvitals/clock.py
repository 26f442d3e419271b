"""Clocks are passed in, so that no decision reads a global one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for the outer layers; tests pass ``trainvitals.testing.ManualClock``."""

    def time_ns(self) -> int:
        """Return wall time in nanoseconds since the Unix epoch; it may jump. For display only."""
        ...

    def monotonic_ns(self) -> int:
        """Return nanoseconds from an arbitrary start, never set back. For durations."""
        ...


class SystemClock:
    """The machine's clocks."""

    time_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)
