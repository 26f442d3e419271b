"""Times a callable: many rounds, median and 95th percentile, so that one hiccup changes nothing."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Cost(NamedTuple):
    """What one call takes, in microseconds."""

    what: str
    median_us: float
    p95_us: float


def measure(what: str, call: Callable[[], object], *, rounds: int, inner: int = 1) -> Cost:
    """Return the cost of one call; `inner` calls are timed together where one is too short."""
    call()
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(inner):
            call()
        times.append((time.perf_counter_ns() - start) / inner / 1e3)
    return summarize(what, times)


def summarize(what: str, times_us: list[float]) -> Cost:
    """Return the median and the 95th percentile of measured times."""
    ordered = sorted(times_us)
    return Cost(what, statistics.median(ordered), ordered[math.ceil(0.95 * (len(ordered) - 1))])
