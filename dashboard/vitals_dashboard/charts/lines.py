"""Curves as ECharts series: every point that came is drawn, and a gap where there is no value."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from trainvitals.views import SeriesReply
from vitals_dashboard import formatting
from vitals_dashboard.charts.scale import STEPS, Scale
from vitals_dashboard.theme import UNITS, Palette

Spec = dict[str, Any]
Point = tuple[float, float | None]
Role = Literal["main", "mean", "limit", "discarded"]
"""``mean``: a smoothed curve, drawn over the one it is of."""

_PYECHARTS = "--x_x--"
"""Streamlit refuses a whole chart in which a text begins and ends with this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart."""

    name: str
    reply: SeriesReply
    role: Role = "main"
    scale: Scale | None = None
    """Where its steps are, if not where the chart's are: of another run."""

    @property
    def label(self) -> str:
        """The name, fit for a chart."""
        return chart_text(self.name, 48)


@lru_cache(maxsize=4_096)
def chart_text(text: str, limit: int = 120) -> str:
    """Return somebody's text so that a chart takes it as text."""
    return formatting.plain(text, limit).replace(_PYECHARTS, "--x-x--")


def points(
    reply: SeriesReply, *, scale: Scale = STEPS, factor: float = 1.0, log: bool = False
) -> list[Point]:
    """Return the curve's points; None is a gap: a non-finite value, or one no log axis can show."""
    return [
        (at, None if value is None or (log and value <= 0) else value * factor)
        for at, value in zip(scale.xs(reply), reply.value, strict=True)
    ]


def branches(reply: SeriesReply, **how: Any) -> list[Point]:
    """Return the points with a gap wherever the attempt changes: no line joins two branches."""
    result: list[Point] = []
    previous: int | None = None
    for attempt, point in zip(reply.attempt, points(reply, **how), strict=True):
        if previous is not None and attempt != previous:
            result.append((point[0], None))
        result.append(point)
        previous = attempt
    return result


def lone(curve: Sequence[Point]) -> list[Point]:
    """Return the points between two gaps, which a line alone would not show."""
    values = [None, *[y for _, y in curve], None]
    if values.count(None) == 2 < len(values) - 1:
        return []
    return [
        point
        for i, point in enumerate(curve, start=1)
        if point[1] is not None and values[i - 1] is None and values[i + 1] is None
    ]


def line_series(name: str, curve: Sequence[Point], colour: str, **more: Any) -> list[Spec]:
    """Return a curve, and dots for what no line can show."""
    base: Spec = {
        "name": name,
        "type": "line",
        "showSymbol": False,
        "connectNulls": False,
        "lineStyle": {"width": 1.5, "color": colour},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
        "data": curve,
    } | more
    single = lone(curve)
    if not single:
        return [base]
    dots: Spec = {
        "name": name,
        "type": "scatter",
        "symbolSize": 4,
        "itemStyle": {"color": colour},
        "data": single,
        "tooltip": {"show": False},
    }
    return [base, dots]


def curve_series(
    lines: Sequence[Line], scale: Scale, look: Palette, *, log: bool = False
) -> list[Spec]:
    """Return all curves of a chart; limits, discarded branches and smoothed curves are faint.

    Of several discarded branches each has its own curve's colour, thin and pale.
    """
    factor = display_unit(lines[0].reply.unit)[1] if lines else 1.0
    num_discarded = sum(line.role == "discarded" for line in lines)
    own: dict[tuple[str, str, str], str] = {}
    smoothed = {_of(line) for line in lines if line.role == "mean"}
    colours = iter(look.lines * (1 + len(lines) // len(look.lines)))
    result: list[Spec] = []
    for line in lines:
        how: dict[str, Any] = {"scale": line.scale or scale, "factor": factor, "log": log}
        if line.role == "main":
            z = 3 if result else 4  # the first one is seen where others are equal
            colour = own[_of(line)] = next(colours)
            style = {"width": 1, "color": colour, "opacity": 0.4}
            faint = {"lineStyle": style} if _of(line) in smoothed else {}
            result += line_series(line.label, points(line.reply, **how), colour, z=z, **faint)
        elif line.role == "mean":
            colour = own.get(_of(line), look.faint)
            style = {"width": 2, "color": colour}
            curve = points(line.reply, **how)
            result += line_series(line.label, curve, colour, z=5, lineStyle=style)
        elif line.role == "limit":
            style = {"width": 1, "type": "dashed", "color": look.faint}
            curve = points(line.reply, **how)
            result += line_series(line.label, curve, look.faint, z=2, lineStyle=style, step="end")
        else:
            of_its_own = own.get(_of(line), look.faint)
            colour, opacity = (of_its_own, 0.35) if num_discarded > 1 else (look.faint, 0.8)
            style = {"width": 1, "color": colour, "opacity": opacity}
            item = {"color": colour, "opacity": opacity}  # of the legend
            curve = branches(line.reply, **how)
            result += line_series(line.label, curve, colour, z=1, lineStyle=style, itemStyle=item)
    return result


def _of(line: Line) -> tuple[str, str, str]:
    """Return what a curve shares with its mean and with what rollbacks left behind of it."""
    return line.reply.run_id, line.reply.metric, line.reply.source


def display_unit(unit: str) -> tuple[str, float]:
    """Return the unit people read and the factor to it from the base unit."""
    return UNITS.get(unit, (unit, 1.0))


def said_below(lines: Sequence[Line], *, log: bool = False) -> str:
    """Return what of the stored points is drawn, and what cannot be seen of it."""
    main = [line.reply for line in lines if line.role == "main"]
    drawn, total = sum(len(r.step) for r in main), sum(r.num_total for r in main)
    parts = [f"{drawn:,} of {formatting.count(total, 'point')}"]
    marked, bad = sum(len(r.nonfinite) for r in main), sum(r.num_nonfinite for r in main)
    if bad > marked:
        parts.append(f"{marked:,} of {bad:,} non-finite ones are marked")
    if log and (hidden := sum(v is not None and v <= 0 for r in main for v in r.value)):
        parts.append(f"{hidden:,} at or below 0, which no log axis shows")
    if any(line.role == "mean" for line in lines):
        parts.append(
            "smoothed over every value; the raw curve is behind, and decisions read only that"
        )
    return "; ".join(parts)
