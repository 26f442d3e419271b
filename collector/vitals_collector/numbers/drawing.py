"""What is drawn of a curve where it has more points than are wanted. Pure.

It is cut into columns, each a power of two steps wide (nanoseconds where rows have no step) and
counted from 0: they stay where they are while a run grows. Of each column the least and the
greatest value are drawn, and that there was one that is not finite.
"""

import numpy as np

from trainvitals.views import Branch
from vitals_collector.numbers.interface import Floats, Ints, Points


def downsample(points: Points, num_points: int, branch: Branch = "lineage") -> Points:
    """Return at least ``num_points`` points where there are as many, and about twice that at most.

    Of each column the first of its least values, the last of its greatest ones and the first that
    is not finite, and both ends of the curve. Branches that were left have columns of their own,
    and come one after the other.

    Args:
        points: in the order of their steps, or of their times where they have none.
        num_points: how many are wanted.
        branch: which they are.
    """
    points, attempt = _by_branch(points, branch)
    if len(points) <= num_points:
        return points
    power = column_power(points, num_points, branch)
    column = _columns(attempt, _along(points), power or 0)
    is_finite = np.isfinite(points.value)
    finite, others = np.flatnonzero(is_finite), np.flatnonzero(~is_finite)
    chosen = [others[_starts(column[others])], finite[:1], finite[-1:]]
    if len(finite):
        chosen += _extremes(column[finite], points.value[finite], finite)
    return points.take(np.unique(np.concatenate(chosen)))


def column_power(points: Points, num_points: int, branch: Branch = "lineage") -> int | None:
    """Return how wide columns may be, as a power of two, and have so many points together.

    None: even columns of one step have fewer.
    """
    points, attempt = _by_branch(points, branch)
    if not len(points):
        return None
    along = _along(points)
    is_finite = np.isfinite(points.value)
    extent = int(along.max()) - int(along.min())
    most = 3 * (1 + np.count_nonzero(np.diff(attempt)))
    power = extent.bit_length()
    while power and most * ((extent >> power) + 2) < num_points:
        power -= 1
    for narrower in range(power, -1, -1):
        starts = _starts(_columns(attempt, along, narrower))
        num = np.diff(starts, append=len(along))
        num_finite = np.add.reduceat(is_finite, starts, dtype=np.int64)
        if np.minimum(num_finite, 2).sum() + np.count_nonzero(num_finite < num) >= num_points:
            return narrower
    return None


def smooth(points: Points, weight: float, branch: Branch = "lineage") -> Points:
    """Return the debiased exponential mean over all points; what is not finite stays as it is.

    Args:
        points: as ``downsample`` takes them; branches that were left each have a mean of their own.
        weight: of what was before, 0 to below 1.
        branch: which they are.
    """
    points, attempt = _by_branch(points, branch)
    value = points.value.copy()
    at = np.flatnonzero(np.isfinite(value))
    for own in np.split(at, _starts(attempt[at])):
        if len(own):
            value[own] = _decayed(value[own], weight) / _decayed(np.ones(len(own)), weight)
    return Points(points.step, points.attempt, points.time_unix_ns, value)


_BLOCK = 64


def _decayed(values: Floats, weight: float) -> Floats:
    """Return y[i] = weight * y[i - 1] + (1 - weight) * values[i], from 0, a block at a time."""
    padded = np.zeros(-(-len(values) // _BLOCK) * _BLOCK)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, _BLOCK)
    apart = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    own = np.where(apart >= 0, (1 - weight) * weight ** np.maximum(apart, 0), 0.0)
    means = blocks @ own.T
    decay = weight ** np.arange(1, _BLOCK + 1)
    before = 0.0
    for block in means:
        block += before * decay
        before = block[-1]
    decayed: Floats = means.reshape(-1)[: len(values)]
    return decayed


def _by_branch(points: Points, branch: Branch) -> tuple[Points, Ints]:
    """Return the points, and which branch each is of; of the lineage all are of one."""
    if branch == "lineage" or not len(points) or points.step[-1] < 0:
        return points, np.zeros(len(points), np.int64)
    if np.any(np.diff(points.attempt) < 0):
        points = points.take(np.lexsort((points.step, points.attempt)))
    return points, points.attempt


def _along(points: Points) -> Ints:
    return points.step if points.step[-1] >= 0 else points.time_unix_ns


def _columns(attempt: Ints, along: Ints, power: int) -> Ints:
    """Return the number of each point's column."""
    column = along >> power
    is_new = (np.diff(column) != 0) | (np.diff(attempt) != 0)
    return np.concatenate(([0], np.cumsum(is_new)))


def _starts(column: Ints) -> Ints:
    """Return where another column begins; numbers are 0 or more."""
    return np.flatnonzero(np.diff(column, prepend=-1))


def _extremes(column: Ints, value: Floats, at: Ints) -> list[Ints]:
    """Return where each column has its least value first, and its greatest last."""
    starts = _starts(column)
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(column)))
    is_low = np.flatnonzero(value == np.minimum.reduceat(value, starts)[group])
    is_high = np.flatnonzero(value == np.maximum.reduceat(value, starts)[group])
    ends = np.flatnonzero(np.diff(group[is_high], append=-1))
    return [at[is_low[_starts(group[is_low])]], at[is_high[ends]]]
