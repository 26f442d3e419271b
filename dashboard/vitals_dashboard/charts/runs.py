"""Charts of several runs: their curves over each other, and what lies between them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vitals_dashboard.charts.lines import (
    Line,
    Point,
    Spec,
    curve_series,
    line_series,
    points,
    said_below,
)
from vitals_dashboard.charts.marks import APART, mark_series, nonfinite_marks, num_lanes
from vitals_dashboard.charts.scale import STEPS, Scale
from vitals_dashboard.charts.sheet import Sheet, x_axis
from vitals_dashboard.look import Palette

RUNS_HEIGHT, DIFFERENCE_HEIGHT = 380, 240


def runs_chart(
    title: str,
    lines: Sequence[Line],
    *,
    look: Palette,
    log: bool = False,
    smoothing: float = 0.0,
    height: int = RUNS_HEIGHT,
) -> Spec:
    """Return the runs' curves over each other; every line knows where its own steps are."""
    marks = [m for line in lines for m in nonfinite_marks([line.reply], line.scale or STEPS)]
    curves = curve_series(lines, STEPS, look, log=log, smoothing=smoothing)
    sheet = Sheet(
        title=title,
        below=said_below(lines, log=log, smoothing=smoothing),
        along=_scale(lines).unit,
        look=look,
        height=height,
        lanes=num_lanes(marks),
        log=log,
        legend=[line.label for line in lines],
    )
    found = [point[0] for series in curves for point in series["data"]]
    width = max(found) - min(found) if found else 0.0
    heads = mark_series(marks, width * APART, sheet.plot_height)
    return sheet.spec([*curves, *heads], x_axis(_scale(lines), None))


def difference_chart(
    title: str, lines: Sequence[Line], *, look: Palette, height: int = DIFFERENCE_HEIGHT
) -> Spec:
    """Return what each run but the first has more than the first, where both have steps."""
    first, *rest = lines
    base = points(first.reply, scale=first.scale or STEPS)
    colours = look.lines[1:]
    curves: list[Spec] = []
    for i, line in enumerate(rest):
        curve = difference(base, points(line.reply, scale=line.scale or STEPS))
        curves += line_series(line.label, curve, colours[i % len(colours)], z=3)
    sheet = Sheet(
        title=title,
        below=f"above 0: more than {first.label}; interpolated where steps differ",
        along=_scale(lines).unit,
        look=look,
        height=height,
        legend=[line.label for line in rest],
    )
    return sheet.spec(curves, x_axis(_scale(lines), None))


def difference(base: Sequence[Point], other: Sequence[Point]) -> list[Point]:
    """Return ``other`` less ``base`` at every x of either that both reach; a gap of one is one."""
    mine, theirs = _finite(base), _finite(other)
    if not len(mine[0]) or not len(theirs[0]):
        return []
    low, high = max(mine[0][0], theirs[0][0]), min(mine[0][-1], theirs[0][-1])
    gaps = {x for curve in (base, other) for x, y in curve if y is None}
    xs = np.union1d(np.union1d(mine[0], theirs[0]), np.asarray(sorted(gaps)))
    xs = xs[(xs >= low) & (xs <= high)]
    values = np.interp(xs, *theirs) - np.interp(xs, *mine)
    return [
        (x, None if x in gaps else value)
        for x, value in zip(xs.tolist(), values.tolist(), strict=True)
    ]


def _finite(curve: Sequence[Point]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    known = [(x, y) for x, y in curve if y is not None]
    return np.asarray([x for x, _ in known]), np.asarray([y for _, y in known])


def _scale(lines: Sequence[Line]) -> Scale:
    return next((line.scale for line in lines if line.scale is not None), STEPS)
