"""Times what is to be compared in turns, so that whatever else the machine does meets all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Call = Callable[[], object]


def interleave(
    arms: Mapping[str, Call],
    *,
    rounds: int,
    warm_up: int = 2,
    between: Call | None = None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Return each arm's times in seconds; in each round all take a turn, in a new order.

    In one order, an arm would always find the cache as the same other one left it.

    Args:
        arms: what is timed, by name.
        rounds: times of each arm that count.
        warm_up: rounds before, which do not.
        between: called before each call and not timed.
        clock_ns: wall time, or the CPU time of the thread.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    names, order = list(arms), random.Random(0)
    for i in range(warm_up + rounds):
        order.shuffle(names)
        for name in names:
            if between is not None:
                between()
            begin = clock_ns()
            arms[name]()
            end = clock_ns()
            if i >= warm_up:
                times[name].append((end - begin) / 1e9)
    return times


def medians(times: Mapping[str, list[float]], *, scale: float = 1.0) -> dict[str, float]:
    """Return each arm's median, times ``scale``."""
    return {name: statistics.median(values) * scale for name, values in times.items()}


def halves(times: Sequence[float]) -> float:
    """Return the difference between the times of odd and even rounds, as a share."""
    return spread(statistics.median(times[::2]), statistics.median(times[1::2]))


def spread(first: float, second: float) -> float:
    """Return the difference between two measurements of the same thing, as a share."""
    return abs(first / second - 1.0)
