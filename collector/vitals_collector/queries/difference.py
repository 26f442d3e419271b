"""Difference of two runs' curves, from all points, and only then downsampled.

The difference of two downsampled curves would be wrong: if one keeps a bucket's minimum and the
other its maximum, noise is doubled and a spike appears twice.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trainvitals.errors import UsageError
from trainvitals.views import Along, DifferenceQuestion, DifferenceReply
from vitals_collector.numbers.interface import HOST_STREAMS, Floats, Points, downsample
from vitals_collector.queries import series
from vitals_collector.queries.series import attempt_rows
from vitals_collector.storage.store import ReadSnapshot

TOKENS = "steps.tokens_seen"


class SampledCurve(NamedTuple):
    """Values at ascending positions along x; NaN if there is no finite value."""

    x: Floats
    value: Floats


def difference(moment: ReadSnapshot, question: DifferenceQuestion) -> DifferenceReply:
    """Return ``other`` minus ``base`` at the steps that both have.

    Raises:
        UsageError: a run lacks the metric, or the metric has no steps.
    """
    base, other, metric, along = question.run_id, question.other, question.metric, question.along
    if metric.partition(".")[0] in HOST_STREAMS:
        raise UsageError(f"{metric[:200]!r} has no steps: runs can be compared by their steps only")
    first, theirs = (_load_sampled_curve(moment, run_id, metric, along) for run_id in (base, other))
    delta = subtract(first, theirs)
    step_positions = np.rint(delta.x).astype(np.int64)
    zero = np.zeros(len(step_positions), dtype=np.int64)
    drawn = downsample(Points(step_positions, zero, zero, delta.value), question.points)
    values = drawn.value.tolist()
    return DifferenceReply(
        base=base,
        other=other,
        metric=metric,
        along=along,
        num_total=len(step_positions),
        is_interpolated=len(delta.x) > len(np.intersect1d(first.x, theirs.x)),
        x=tuple(drawn.step.tolist()),
        value=tuple(value if math.isfinite(value) else None for value in values),
    )


def subtract(base: SampledCurve, other: SampledCurve) -> SampledCurve:
    """Return ``other`` minus ``base`` at every x of either that both cover; a gap in one is a gap.

    Curves are linear between their points. Pure.
    """
    finite = [
        SampledCurve(c.x[np.isfinite(c.value)], c.value[np.isfinite(c.value)])
        for c in (base, other)
    ]
    if any(not len(curve.x) for curve in finite):
        return SampledCurve(np.zeros(0), np.zeros(0))
    low, high = max(c.x[0] for c in finite), min(c.x[-1] for c in finite)
    xs = np.union1d(base.x, other.x)
    xs = xs[(xs >= low) & (xs <= high)]
    values = np.interp(xs, *finite[1]) - np.interp(xs, *finite[0])
    for curve in (base, other):
        values[np.isin(xs, curve.x[~np.isfinite(curve.value)])] = np.nan
    return SampledCurve(xs, values)


def _load_sampled_curve(
    moment: ReadSnapshot, run_id: str, metric: str, along: Along
) -> SampledCurve:
    """Load a run's curve along steps, tokens or time, to query its difference to another."""
    attempts = attempt_rows(moment.sql, run_id)

    def load(name: str) -> Points:
        _, curve = series.curve_of(moment, run_id, name, "")
        (drawn,) = moment.numbers.curves([curve], attempts, "lineage")
        return drawn.points

    points = load(metric)
    x = points.step.astype(np.float64)
    if along == "tokens":
        x = tokens_at_steps(load, x)
    elif along == "time":
        x = (points.time_unix_ns - points.time_unix_ns[:1]) / 1e6
    is_placed = np.isfinite(x)
    # A step without tokens has the position of the previous one: the last of them counts.
    x, value = np.maximum.accumulate(x[is_placed]), points.value[is_placed]
    is_last = np.append(x[1:] > x[:-1], True) if len(x) else np.zeros(0, dtype=np.bool_)
    return SampledCurve(x[is_last], value[is_last])


def tokens_at_steps(load: Callable[[str], Points], steps: Floats) -> Floats:
    """Return the tokens seen at each step, interpolated; NaN outside the steps that count them."""
    counted = load(TOKENS)
    counted = counted.take(np.isfinite(counted.value))
    if not len(counted):
        return np.full(len(steps), np.nan)
    at = counted.step.astype(np.float64)
    return np.interp(steps, at, counted.value, left=np.nan, right=np.nan)
