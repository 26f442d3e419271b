"""Charts of one run: over its steps, its time or its tokens, with all that happened."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from trainvitals.views import DecisionView
from vitals_dashboard.charts.chart_base import Sheet, x_axis
from vitals_dashboard.charts.lines import Line, Spec, curve_series, display_unit, said_below
from vitals_dashboard.charts.marks import (
    APART,
    APART_LOW,
    ChartMark,
    decision_marks,
    mark_series,
    nonfinite_marks,
    num_lanes,
)
from vitals_dashboard.charts.scale import STEPS, TIMES, Scale
from vitals_dashboard.theme import Palette

Legend = Literal["lines", "marks"]
"""Name the lines where there are several; or everything drawn, decisions included."""


def step_chart(
    title: str,
    lines: Sequence[Line],
    *,
    look: Palette,
    decisions: Sequence[DecisionView] = (),
    others: Sequence[ChartMark] = (),
    attempts: Mapping[int, int] = MappingProxyType({}),
    log: bool = False,
    extent: tuple[int, int] | None = None,
    show_unit: bool = True,
    legend: Legend = "lines",
    scale: Scale = STEPS,
    zoom: bool = False,
    height: int = 210,
) -> Spec:
    """Return a chart over steps, with decisions, other marks and non-finite steps on it.

    Args:
        title: what is drawn.
        lines: the curves.
        look: colours.
        decisions: drawn as marks; those outside the extent are left out, as the others are.
        others: marks of other kinds.
        attempts: their numbers by their ids, where a step that is not finite is to name its own.
        log: whether y is logarithmic.
        extent: first and last step shown.
        show_unit: whether the title names the unit.
        legend: what is named.
        scale: where steps are along x.
        zoom: whether dragging chooses a range.
        height: of the chart, in pixels.
    """
    marks = [*decision_marks(decisions, scale), *others]
    measured = [line.reply for line in lines if line.role in ("main", "discarded")]
    marks += nonfinite_marks(measured, scale, attempts)
    places = None
    if extent is not None:
        marks = [mark for mark in marks if extent[0] <= mark.step <= extent[1]]
        places = _places(scale, extent, lines, marks)
    curves = curve_series(lines, scale, look, log=log)
    sheet = Sheet(
        title=_with_unit(title, lines if show_unit else ()),
        below=said_below(lines, log=log),
        along=scale.unit,
        look=look,
        height=height,
        lanes=num_lanes(marks),
        log=log,
        zoom=zoom,
        legend=_named(lines, curves, marks, legend),
    )
    apart = APART if legend == "marks" else APART_LOW
    heads = mark_series(marks, _width(places, curves) * apart, sheet.plot_height)
    return sheet.spec([*curves, *heads], x_axis(scale, places))


def time_chart(
    title: str,
    lines: Sequence[Line],
    *,
    look: Palette,
    extent: tuple[float, float] | None = None,
    height: int = 210,
) -> Spec:
    """Return a chart over wall time: of a GPU's or a node's samples, which have no step.

    Args:
        title: what is drawn.
        lines: the curves.
        look: colours.
        extent: first and last time shown, in milliseconds.
        height: of the chart, in pixels.
    """
    curves = curve_series(lines, TIMES, look)
    sheet = Sheet(
        title=_with_unit(title, lines),
        below=said_below(lines),
        along=TIMES.unit,
        look=look,
        height=height,
        legend=_named(lines, curves, (), "lines"),
    )
    return sheet.spec(curves, x_axis(TIMES, extent))


def _places(
    scale: Scale, extent: tuple[int, int], lines: Sequence[Line], marks: Sequence[ChartMark]
) -> tuple[float, float] | None:
    """Return where the extent's ends are; in time, what was left behind may be outside of them."""
    if scale.axis == "time" and not scale.steps:
        return None
    first, last = scale.place([extent[0], max(extent[1], extent[0] + 1)])
    if scale.axis == "time":
        xs = [x for line in lines for x in scale.xs(line.reply)]
        xs += [mark.place for mark in marks]
        first, last = min([first, *xs]), max([last, *xs])
    return (first, last) if last > first else None


def _width(places: tuple[float, float] | None, curves: Sequence[Spec]) -> float:
    if places is not None:
        return places[1] - places[0]
    xs = [point[0] for series in curves for point in series["data"]]
    return max(xs) - min(xs) if xs else 0.0


def _with_unit(title: str, lines: Sequence[Line]) -> str:
    unit = display_unit(lines[0].reply.unit)[0] if lines else ""
    return f"{title}, {unit}" if unit else title


def _named(
    lines: Sequence[Line], curves: Sequence[Spec], marks: Sequence[ChartMark], legend: Legend
) -> list[str]:
    drawn = {str(series["name"]) for series in curves}
    own = [name for name in dict.fromkeys(line.label for line in lines) if name in drawn]
    if legend == "marks":
        looks = sorted((mark.look for mark in marks), key=lambda k: (k.lane, k.word))
        return [*own, *dict.fromkeys(look.word for look in looks)]
    return own if len(own) > 1 else []
