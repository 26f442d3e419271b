"""Time of the next request to the collector after a failure, and the rate of sending a backlog.

Both are pure: they read no clock and never sleep. Hundreds of agents lose a collector together, and
find it again together: each retries at a different time, and then adapts to the available capacity.
"""

import math
import random


class Backoff:
    """Decides when an attempt is due: exponential, with full jitter, bounded.

    Full jitter (a uniform share of the whole delay) keeps agents from retrying at the same time.
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
        """Return whether the agent may try again at ``now`` (monotonic seconds)."""
        return self.num_failures == 0 or now >= self._not_before

    def record_failure(self, now: float, *, retry_after: float = 0.0) -> None:
        """Postpone the agent's next request, after the time that the collector requested.

        It requests the same of everyone, so the requested time is spread as well.
        """
        ceiling = min(self._max, self._first * 2 ** min(self.num_failures, 30))
        self.num_failures += 1
        self._not_before = now + retry_after + self._rng.uniform(0.0, max(ceiling, retry_after))

    def record_success(self) -> None:
        """Allow the agent's next request to the collector immediately."""
        self.num_failures = 0


class BacklogRateLimit:
    """Limits the bytes per second of a backlog: up by a step after success, down by half.

    Additive increase and multiplicative decrease share a collector fairly among agents that do not
    know each other. A failure, or a slow response, means that it is overloaded. New rows are far
    below the slowest pace: only a backlog is ever limited.

    Args:
        slowest: bytes per second that are always allowed.
        fastest: bytes per second that are never exceeded.
        slow_seconds: duration above which the collector counts as busy.
    """

    def __init__(
        self, *, slowest: float = 1 << 18, fastest: float = 1 << 25, slow_seconds: float = 1.0
    ) -> None:
        self.bytes_per_second = min(fastest, 16 * slowest)
        self._slowest = slowest
        self._fastest = fastest
        self._slow_seconds = slow_seconds
        self._free_at = -math.inf

    def due(self, now: float) -> bool:
        """Return whether the agent may send more rows at ``now`` (monotonic seconds)."""
        return now >= self._free_at

    def sent(self, num_bytes: int, seconds: float, now: float) -> None:
        """Adapt the rate of sending a spool's backlog to a request's size and response time."""
        if seconds > self._slow_seconds:
            self.failed()
        else:
            self.bytes_per_second = min(self._fastest, self.bytes_per_second + self._slowest)
        # Up to a second of unused time may be used later: a cycle is shorter than that.
        self._free_at = max(self._free_at, now - 1.0) + num_bytes / self.bytes_per_second

    def failed(self) -> None:
        """Halve the agent's sending rate after a request that was refused or got no response."""
        self.bytes_per_second = max(self._slowest, self.bytes_per_second / 2)
