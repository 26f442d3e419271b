"""When the collector is asked again after a failure, and how fast a backlog is sent to it.

Both are pure: they read no clock and never sleep. Hundreds of agents lose a collector together, and
find it again together: each comes back at a moment of its own, and then takes what it is given.
"""

import math
import random


class Backoff:
    """Tells whether a try is due: exponential, with full jitter, bounded.

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

    def failed(self, now: float, *, retry_after: float = 0.0) -> None:
        """Put the next try off, behind what the other side asked for.

        It says the same to everyone, so that what it asks for is spread as well.
        """
        ceiling = min(self._max, self._first * 2 ** min(self.num_failures, 30))
        self.num_failures += 1
        self._not_before = now + retry_after + self._rng.uniform(0.0, max(ceiling, retry_after))

    def succeeded(self) -> None:
        """Let the next try be made at once."""
        self.num_failures = 0


class Pace:
    """Bounds the bytes per second of a backlog: up by a step while all is well, down by half.

    Additive increase and multiplicative decrease share a collector fairly among agents that know
    nothing of each other. A failure, or an answer that is slow, says that it has too much to do.
    What is written now is far below the slowest pace: only a backlog is ever held back.

    Args:
        slowest: bytes per second that are sent whatever happens.
        fastest: bytes per second that are never exceeded.
        slow_seconds: an answer that takes longer is one of a busy collector.
    """

    def __init__(
        self,
        *,
        slowest: float = 1 << 18,
        fastest: float = 1 << 25,
        slow_seconds: float = 1.0,
    ) -> None:
        self.bytes_per_second = min(fastest, 16 * slowest)
        self._slowest = slowest
        self._fastest = fastest
        self._slow_seconds = slow_seconds
        self._free_at = -math.inf

    def due(self, now: float) -> bool:
        """Return whether more may be sent at ``now`` (monotonic seconds)."""
        return now >= self._free_at

    def sent(self, num_bytes: int, seconds: float, now: float) -> None:
        """Take note of a request that was answered after ``seconds``."""
        if seconds > self._slow_seconds:
            self.failed()
        else:
            self.bytes_per_second = min(self._fastest, self.bytes_per_second + self._slowest)
        # Up to a second that was not used may be made up for: a cycle is shorter than that.
        self._free_at = max(self._free_at, now - 1.0) + num_bytes / self.bytes_per_second

    def failed(self) -> None:
        """Take note of a request that was refused or never answered."""
        self.bytes_per_second = max(self._slowest, self.bytes_per_second / 2)
