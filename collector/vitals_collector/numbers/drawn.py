"""Curves out of columns of rows: measured values, as points of a branch in their order. Pure."""

from collections.abc import Sequence

import numpy as np

from trainvitals.errors import FormatError
from trainvitals.views import Branch
from vitals_collector.numbers.interface import HOST_STREAMS, Columns, Drawn
from vitals_collector.numbers.points import AttemptRow, Points, by_time, ends, is_of_lineage, stitch

POINT = ("step", "attempt", "time_unix_ns")
"""What a point has of its row, beside the value."""


def points_of(columns: Columns, name: str) -> Points:
    """Return the measured values of a column; ``POINT`` are there as well.

    Raises:
        FormatError: the column is text.
    """
    column = columns[name]
    if column.values.dtype == object:
        raise FormatError(f"{name} is text; a curve has numbers")
    step, attempt, time_unix_ns = (
        columns[key].values.astype(np.int64, copy=False) for key in POINT
    )
    points = Points(step, attempt, time_unix_ns, column.values.astype(np.float64, copy=False))
    return points.take(~column.is_missing) if column.is_missing.any() else points


def on_branch(
    points: Points, stream: str, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    """Return those of the branch, as they lie; of streams whose rows have no step, all."""
    if stream in HOST_STREAMS or branch == "all":
        return points
    is_kept = is_of_lineage(points.attempt, points.step, ends(attempts))
    if branch == "discarded":
        is_kept = ~is_kept
    return points if is_kept.all() else points.take(is_kept)


def arranged(points: Points, stream: str, attempts: Sequence[AttemptRow], branch: Branch) -> Points:
    """Return the curve: by step and stitched, or by time where the rows have no step."""
    return by_time(points) if stream in HOST_STREAMS else stitch(points, attempts, branch)


def whole_curve(
    columns: Columns, name: str, stream: str, attempts: Sequence[AttemptRow], branch: Branch
) -> Drawn:
    """Return every point of a curve whose rows lie in order.

    Raises:
        FormatError: the column is text.
    """
    points = on_branch(points_of(columns, name), stream, attempts, branch)
    return Drawn(arranged(points, stream, attempts, branch), len(points))
