"""What is drawn of a curve: few enough points, and marks of what is not finite.

What is lost on the way to the screen is points that say nothing new: each bucket keeps its minimum
and its maximum, and non-finite values stay as marks.
"""

import math
from itertools import pairwise
from typing import Literal

import numpy as np

from trainvitals.views import NonFiniteMark
from vitals_collector.numbers.interface import Ints, Points


def downsample(points: Points, num_points: int) -> Points:
    """Return about ``num_points`` points: of each bucket its minimum and maximum, and the ends.

    Non-finite values do not take part; the first of each unbroken row of them stays, so that the
    curve has its gap (of more than ``num_points`` such gaps, evenly spaced ones).
    """
    if len(points) <= num_points:
        return points
    is_finite = np.isfinite(points.value)
    finite = np.flatnonzero(is_finite)
    begins = ~is_finite & np.concatenate(([True], is_finite[:-1]))
    is_drawn = np.zeros(len(points), dtype=np.bool_)
    is_drawn[_extremes(points, finite, num_points)] = True
    is_drawn[_evenly(np.flatnonzero(begins), num_points)] = True
    return points.take(is_drawn)


def _extremes(points: Points, finite: Ints, num_points: int) -> Ints:
    """Return where the finite points are that draw the curve; some of them more than once."""
    num_out = max(4, num_points - 2) // 2 * 2
    if len(finite) <= num_out + 2:
        return finite
    # Buckets are equally wide, not equally full: some of the points may be few that stand for many.
    is_by_step = points.step[-1] > points.step[0]
    along = (points.step if is_by_step else points.time_unix_ns)[finite]
    bounds = np.searchsorted(along, np.linspace(along[0], along[-1], num_out // 2 + 1))
    bounds[0], bounds[-1] = 0, len(along)  # nanoseconds are rounded in float64
    value = points.value[finite]
    chosen = [0, len(finite) - 1]
    for begin, end in pairwise(bounds.tolist()):
        if begin < end:
            chosen += (
                begin + int(value[begin:end].argmin()),
                begin + int(value[begin:end].argmax()),
            )
    return finite[chosen]


def _evenly(which: Ints, num: int) -> Ints:
    """Return at most ``num`` of them, evenly chosen, the first and the last among them."""
    if len(which) <= num:
        return which
    return which[np.linspace(0, len(which) - 1, num).astype(np.int64)]


def nonfinite_marks(points: Points, max_marks: int) -> tuple[NonFiniteMark, ...]:
    """Return a mark for each NaN and infinity, or for ``max_marks`` of them, evenly chosen."""
    which = _evenly(np.flatnonzero(~np.isfinite(points.value)), max_marks)
    chosen = points.take(which)
    rows = zip(chosen.step.tolist(), chosen.attempt.tolist(), chosen.value.tolist(), strict=True)
    return tuple(NonFiniteMark(step, attempt, kind_of(value)) for step, attempt, value in rows)


def num_nonfinite(points: Points) -> int:
    """Return how many values are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(points.value)))


def kind_of(value: float) -> Literal["nan", "+inf", "-inf"]:
    """Return the name of a non-finite number."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"
