"""One chart as plain data: of a run over its steps, time or tokens, or of several runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trainvitals.views import DecisionView, DifferenceReply
from vitals_dashboard.charts.lines import (
    ChartCurve,
    ChartLine,
    chart_text,
    curves_of,
    display_unit,
    group_curves,
)
from vitals_dashboard.charts.marks import ChartMark, decision_marks, merge_marks, nonfinite_marks
from vitals_dashboard.charts.scale import STEPS, TIMES, Axis, StepScale, token_size

Size = Literal["full", "half", "quarter"]
"""Relative to the width of the page; on a phone, one chart per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart."""

    title: str
    curves: Sequence[ChartCurve]
    marks: Sequence[ChartMark] = ()
    """Marks of this chart, including its non-finite values if they are far enough apart to be
    visible."""
    axis: Axis = "step"
    unit: str = "step"
    """Unit of x."""
    ends: tuple[float, float] | None = None
    """First and last x shown; None: those of the points."""
    log: bool = False
    exact: bool = False
    """Every value is to be seen, however far from the others: the y axis holds them all."""
    note: str = ""
    """Shown below, next to the number of points."""
    size: Size = "full"
    height: int = 220
    """Pixels of the curves' area with its axis."""

    @property
    def num_points(self) -> int:
        """Return the number of the chart's points and marks that the browser gets."""
        return sum(len(curve.x) for curve in self.curves) + len(self.marks)


def step_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    decisions: Iterable[DecisionView] = (),
    others: Sequence[ChartMark] = (),
    attempts: Mapping[int, int] = MappingProxyType({}),
    log: bool = False,
    exact: bool = False,
    note: str = "",
    extent: tuple[int, int] | None = None,
    show_unit: bool = True,
    scale: StepScale = STEPS,
    size: Size = "full",
    height: int = 220,
) -> Chart:
    """Return a chart over steps, with decisions, other marks and non-finite steps on it.

    Args:
        title: title of the chart.
        lines: the curves; those of the role ``limit`` are drawn as limits.
        decisions: drawn as marks; those outside the extent are omitted, as others are.
        others: marks of other kinds.
        attempts: numbers by id, for the text of non-finite steps.
        log: whether y is logarithmic.
        exact: whether the y axis must hold every value.
        note: shown next to the number of points.
        extent: first and last step shown.
        show_unit: whether the title names the unit.
        scale: positions of steps along x.
        size: its part of the page's width.
        height: of the curves' area with its axis, in pixels.
    """
    marks = [*decision_marks(decisions, scale), *others]
    measured = [line.reply for line in lines if line.role in ("main", "part", "discarded")]
    marks += nonfinite_marks(measured, scale, attempts)
    ends = None
    if extent is not None:
        marks = [mark for mark in marks if extent[0] <= mark.step <= extent[1]]
        ends = _ends(scale, extent, marks)
    curves = curves_of(lines, scale, log=log)
    return Chart(
        title=_with_unit(title, lines if show_unit else ()),
        curves=curves,
        marks=merge_marks(marks, _axis_width(ends, curves)),
        axis=scale.axis,
        unit=scale.unit,
        ends=ends,
        log=log,
        exact=exact,
        note=note,
        size=size,
        height=height,
    )


def time_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    extent: tuple[float, float] | None = None,
    size: Size = "quarter",
    height: int = 150,
) -> Chart:
    """Return a chart over wall time: of a GPU's or a node's samples, which have no step.

    Args:
        title: title of the chart.
        lines: the curves.
        extent: first and last time shown, in milliseconds.
        size: its part of the page's width.
        height: of the curves' area with its axis, in pixels.
    """
    return Chart(
        title=_with_unit(title, lines),
        curves=curves_of(lines, TIMES),
        axis="time",
        unit=TIMES.unit,
        ends=extent,
        size=size,
        height=height,
    )


def runs_chart(
    title: str, lines: Sequence[ChartLine], *, log: bool = False, height: int = 380
) -> Chart:
    """Return the runs' curves in one chart; every line has its own scale of steps."""
    marks = [
        mark
        for line in lines
        if line.role == "main"
        for mark in nonfinite_marks([line.reply], line.scale or STEPS)
    ]
    scale = _scale_of(lines)
    curves = curves_of(lines, log=log)
    return Chart(
        title=chart_text(title),
        curves=curves,
        marks=merge_marks(marks, _axis_width(None, curves)),
        axis=scale.axis,
        unit=scale.unit,
        log=log,
        height=height,
    )


def groups_chart(
    title: str,
    groups: Sequence[tuple[str, Sequence[ChartLine]]],
    *,
    log: bool = False,
    height: int = 380,
) -> Chart:
    """Return a chart of each group of runs: the mean, and a band from lowest to highest run."""
    scale = _scale_of([line for _, lines in groups for line in lines])
    return Chart(
        title=chart_text(title),
        curves=[
            curve
            for colour, (name, lines) in enumerate(groups)
            for curve in group_curves(name, lines, colour=colour, log=log)
        ],
        axis=scale.axis,
        unit=scale.unit,
        log=log,
        note="where all runs of a group have values",
        height=height,
    )


def difference_chart(
    title: str,
    lines: Sequence[ChartLine],
    differences: Sequence[DifferenceReply],
    *,
    height: int = 240,
) -> Chart:
    """Return a chart of each other run's difference to the first, where both have steps.

    ``lines`` starts with the first run.
    """
    first, *rest = lines
    scale = _scale_of(lines)
    note = f"above 0: more than {first.label}"
    # The divisor of x for an axis in tokens or in hours.
    sizes = {"tokens": token_size(scale.unit), "time": 3.6e6}
    note += "; interpolated where steps differ" * any(d.is_interpolated for d in differences)
    return Chart(
        title=chart_text(title),
        curves=[
            ChartCurve(
                name=line.label,
                colour=number,
                x=[x / sizes.get(difference.along, 1.0) for x in difference.x],
                y=difference.value,
                num_total=difference.num_total,
            )
            for number, (line, difference) in enumerate(
                zip(rest, differences, strict=True), start=1
            )
        ],
        axis=scale.axis,
        unit=scale.unit,
        note=note,
        height=height,
    )


def _scale_of(lines: Sequence[ChartLine]) -> StepScale:
    """Return the step scale of a chart: that of the first line that has one."""
    return next((line.scale for line in lines if line.scale is not None), STEPS)


def _ends(
    scale: StepScale, extent: tuple[int, int], marks: Sequence[ChartMark]
) -> tuple[float, float] | None:
    """Return the ends of a chart's x-axis; over time, events may widen it."""
    if scale.axis == "time" and not scale.steps:
        return None
    first, last = scale.x_of([extent[0], max(extent[1], extent[0] + 1)])
    if scale.axis == "time":
        places = [mark.place for mark in marks]
        first, last = min([first, *places]), max([last, *places])
    return (first, last) if last > first else None


def _axis_width(ends: tuple[float, float] | None, curves: Sequence[ChartCurve]) -> float:
    """Return the visible width of a chart's x-axis."""
    if ends is not None:
        return ends[1] - ends[0]
    xs = [x for curve in curves if curve.x for x in (curve.x[0], curve.x[-1])]
    return max(xs) - min(xs) if xs else 0.0


def _with_unit(title: str, lines: Sequence[ChartLine]) -> str:
    unit = display_unit(lines[0].reply.unit)[0] if lines else ""
    return chart_text(f"{title}, {unit}" if unit else title)
