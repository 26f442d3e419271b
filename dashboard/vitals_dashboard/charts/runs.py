"""Charts of several runs: their curves over each other, and what lies between them."""

from collections.abc import Sequence

from trainvitals.views import DifferenceReply
from vitals_dashboard.charts.chart_base import Sheet, x_axis
from vitals_dashboard.charts.lines import (
    Line,
    Spec,
    curve_series,
    line_series,
    said_below,
)
from vitals_dashboard.charts.marks import APART, mark_series, nonfinite_marks, num_lanes
from vitals_dashboard.charts.scale import STEPS, Scale, token_size
from vitals_dashboard.theme import Palette

RUNS_HEIGHT, DIFFERENCE_HEIGHT = 380, 240


def runs_chart(
    title: str,
    lines: Sequence[Line],
    *,
    look: Palette,
    log: bool = False,
    height: int = RUNS_HEIGHT,
) -> Spec:
    """Return the runs' curves over each other; every line knows where its own steps are."""
    marks = [
        m
        for line in lines
        if line.role == "main"
        for m in nonfinite_marks([line.reply], line.scale or STEPS)
    ]
    curves = curve_series(lines, STEPS, look, log=log)
    sheet = Sheet(
        title=title,
        below=said_below(lines, log=log),
        along=_scale(lines).unit,
        look=look,
        height=height,
        lanes=num_lanes(marks),
        log=log,
        legend=[line.label for line in lines if line.role == "main"],
    )
    xs = [point[0] for series in curves for point in series["data"]]
    width = max(xs) - min(xs) if xs else 0.0
    heads = mark_series(marks, width * APART, sheet.plot_height)
    return sheet.spec([*curves, *heads], x_axis(_scale(lines), None))


def difference_chart(
    title: str,
    lines: Sequence[Line],
    differences: Sequence[DifferenceReply],
    *,
    look: Palette,
    height: int = DIFFERENCE_HEIGHT,
) -> Spec:
    """Return what each run but the first has more than the first, where both have steps.

    Args:
        title: what is drawn.
        lines: the runs' curves, the first one first.
        differences: of each of the others to the first.
        look: colours.
        height: of the chart, in pixels.
    """
    first, *rest = lines
    scale = _scale(lines)
    colours = look.lines[1:]
    curves: list[Spec] = []
    for i, (line, difference) in enumerate(zip(rest, differences, strict=True)):
        places = (
            [x / token_size(scale.unit) for x in difference.x]
            if difference.along == "tokens"
            else difference.x
        )
        curve = list(zip(places, difference.value, strict=True))
        curves += line_series(line.label, curve, colours[i % len(colours)], z=3)
    note = f"above 0: more than {first.label}"
    note += "; interpolated where steps differ" * any(
        difference.is_interpolated for difference in differences
    )
    sheet = Sheet(
        title=title,
        below=note,
        along=scale.unit,
        look=look,
        height=height,
        legend=[line.label for line in rest],
    )
    return sheet.spec(curves, x_axis(scale, None))


def _scale(lines: Sequence[Line]) -> Scale:
    return next((line.scale for line in lines if line.scale is not None), STEPS)
