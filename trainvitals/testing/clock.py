"""A clock that tests move."""


class ManualClock:
    """A ``Clock`` that moves only when told to."""

    def __init__(self, *, time_ns: int = 1_700_000_000_000_000_000, monotonic_ns: int = 0) -> None:
        self._time_ns = time_ns
        self._monotonic_ns = monotonic_ns

    def time_ns(self) -> int:
        """Return the wall time that the test set, in nanoseconds since the Unix epoch."""
        return self._time_ns

    def monotonic_ns(self) -> int:
        """Return the test's nanoseconds that never go back."""
        return self._monotonic_ns

    def advance(self, seconds: float) -> None:
        """Advance both clocks of the test. Time does not go back: that is ``jump``."""
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s; use jump for the wall clock")
        nanoseconds = round(seconds * 1e9)
        self._time_ns += nanoseconds
        self._monotonic_ns += nanoseconds

    def jump(self, seconds: float) -> None:
        """Set the test's wall clock forward or back, as NTP does; durations do not change."""
        self._time_ns += round(seconds * 1e9)
