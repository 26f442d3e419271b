"""When to try again after a failure: exponential, with full jitter, bounded."""

import random


class Backoff:
    """Tells whether a try is due; reads no clock, sleeps never.

    Full jitter (a uniform share of the whole delay) keeps many agents from coming back as one.
    """

    def __init__(
        self, *, first_seconds: float = 0.5, max_seconds: float = 30.0, rng: random.Random
    ) -> None:
        self._first = first_seconds
        self._max = max_seconds
        self._rng = rng
        self._not_before = 0.0
        self.num_failures = 0

    def due(self, now: float) -> bool:
        """Return whether a try may be made at ``now`` (monotonic seconds)."""
        return self.num_failures == 0 or now >= self._not_before

    def failed(self, now: float) -> None:
        """Put the next try off."""
        ceiling = min(self._max, self._first * 2 ** min(self.num_failures, 30))
        self.num_failures += 1
        self._not_before = now + self._rng.uniform(0.0, ceiling)

    def succeeded(self) -> None:
        """Let the next try be made at once."""
        self.num_failures = 0
