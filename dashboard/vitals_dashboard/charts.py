"""Curves as ECharts options: pure functions from the query API's replies to a dictionary.

What must be seen is always there: every bucket's minimum and maximum as the collector sent them,
a red mark for every non-finite step, a mark for every decision, a gap where there is no value.
Names and reasons become tooltip values and legend texts only, which ECharts shows as plain text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainvitals.views import DecisionView, SeriesReply
from vitals_dashboard import words
from vitals_dashboard.look import ACTIONS, NON_FINITE_COLOUR, UNITS, Palette

Spec = dict[str, Any]
Point = tuple[float, float | None]
Legend = Literal["lines", "marks"]
"""Name the lines where there are several; or everything drawn, decisions included."""

CROSS = "path://M2 0L5 3L8 0L10 2L7 5L10 8L8 10L5 7L2 10L0 8L3 5L0 2Z"

MARK_AXIS = {"type": "value", "show": False, "min": 0, "max": 1}
"""Marks stand on an axis of their own, so that they never stretch the curve's."""
ABOVE, BELOW = 1.05, -0.025
"""Heights of marks: just outside the curves' area, where pointing at one shows its own tooltip and
not that of the nearest point of a curve."""

TOOLTIP_STYLE = "max-width:26rem;white-space:normal;overflow-wrap:anywhere;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart."""

    name: str
    reply: SeriesReply
    role: Literal["main", "limit", "discarded"] = "main"


def points(
    reply: SeriesReply, *, x: Literal["step", "time"], factor: float = 1.0, log: bool = False
) -> list[Point]:
    """Return the curve's points; None is a gap: a non-finite value, or one no log axis can show."""
    xs: Iterable[float] = reply.step if x == "step" else (t / 1_000_000 for t in reply.time_unix_ns)
    return [
        (at, None if value is None or (log and value <= 0) else value * factor)
        for at, value in zip(xs, reply.value, strict=True)
    ]


def branches(reply: SeriesReply, **how: Any) -> list[Point]:
    """Return the points with a gap wherever the attempt changes: no line joins two branches."""
    result: list[Point] = []
    previous: int | None = None
    for attempt, point in zip(reply.attempt, points(reply, x="step", **how), strict=True):
        if previous is not None and attempt != previous:
            result.append((point[0], None))
        result.append(point)
        previous = attempt
    return result


def lone(curve: Sequence[Point]) -> list[Point]:
    """Return the points between two gaps, which a line alone would not show."""
    values = [None, *(y for _, y in curve), None]
    return [
        point
        for i, point in enumerate(curve, start=1)
        if point[1] is not None and values[i - 1] is None and values[i + 1] is None
    ]


def mark_text(view: DecisionView) -> str:
    """Return a decision in words: what was done, when, and why."""
    decision = view.decision
    look = ACTIONS[decision.action]
    done = look.word if decision.acted else f"{look.word} (observed only)"
    where = f" to step {decision.rollback_to_step:,}" if decision.rollback_to_step >= 0 else ""
    return words.plain(f"{done}{where} at step {decision.step:,}: {decision.reason}", 320)


def decision_series(decisions: Sequence[DecisionView]) -> list[Spec]:
    """Return a series per kind of action: a vertical line and a head that carries the reason."""
    result: list[Spec] = []
    for action, look in ACTIONS.items():
        chosen = [d for d in decisions if d.decision.action == action]
        if not chosen:
            continue
        lines = {"type": look.line, "color": look.colour, "width": look.width, "opacity": 0.75}
        result.append(
            _marks(
                look.word,
                [[d.decision.step, ABOVE, mark_text(d)] for d in chosen],
                symbol=look.symbol,
                colour=look.colour,
                size=10,
            )
            | {
                "markLine": {
                    "silent": True,
                    "symbol": "none",
                    "animation": False,
                    "label": {"show": False},
                    "lineStyle": lines,
                    "data": [{"xAxis": step} for step in sorted({d.decision.step for d in chosen})],
                },
            }
        )
    return result


def non_finite_series(replies: Sequence[SeriesReply]) -> list[Spec]:
    """Return the rug of non-finite steps, one mark for each, or nothing where there are none."""
    seen = sorted({(m.step, m.kind, r.source) for r in replies for m in r.nonfinite})
    if not seen:
        return []
    data: list[list[Any]] = [
        [step, BELOW, f"{kind} at step {step:,} ({words.plain(source, 40)})"]
        for step, kind, source in seen
    ]
    return [_marks("non-finite", data, symbol=CROSS, colour=NON_FINITE_COLOUR, size=9)]


def _marks(name: str, data: list[list[Any]], *, symbol: str, colour: str, size: int) -> Spec:
    return {
        "name": name,
        "type": "scatter",
        "yAxisIndex": 1,
        "clip": False,
        "symbol": symbol,
        "symbolSize": size,
        "itemStyle": {"color": colour, "opacity": 1},
        "dimensions": ["step", "height", {"name": "why", "type": "ordinal"}],
        "encode": {"x": 0, "y": 1, "tooltip": [2]},
        "tooltip": {"trigger": "item"},
        "data": data,
        "z": 5,
    }


def _line(name: str, curve: list[Point], colour: str, **more: Any) -> list[Spec]:
    base: Spec = {
        "name": name,
        "type": "line",
        "showSymbol": False,
        "connectNulls": False,
        "lineStyle": {"width": 1.5, "color": colour},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
        "data": [list(point) for point in curve],
    } | more
    single = lone(curve)
    if not single:
        return [base]
    dots: Spec = {
        "name": name,
        "type": "scatter",
        "symbolSize": 4,
        "itemStyle": {"color": colour},
        "data": [list(point) for point in single],
        "tooltip": {"show": False},
    }
    return [base, dots]


def _curves(
    lines: Sequence[Line], x: Literal["step", "time"], log: bool, look: Palette
) -> list[Spec]:
    factor = display_unit(lines[0].reply.unit)[1] if lines else 1.0
    colours = iter(look.lines * (1 + len(lines) // len(look.lines)))
    result: list[Spec] = []
    for line in lines:
        if line.role == "main":
            curve = points(line.reply, x=x, factor=factor, log=log)
            result += _line(line.name, curve, next(colours), z=3)
        elif line.role == "limit":
            curve = points(line.reply, x=x, factor=factor, log=log)
            style = {"width": 1, "type": "dashed", "color": look.faint}
            result += _line(line.name, curve, look.faint, z=2, lineStyle=style, step="end")
        else:
            curve = branches(line.reply, factor=factor, log=log)
            style = {"width": 1, "color": look.faint, "opacity": 0.8}
            result += _line(line.name, curve, look.faint, z=1, lineStyle=style)
    return result


def display_unit(unit: str) -> tuple[str, float]:
    """Return the unit people read and the factor to it from the base unit."""
    return UNITS.get(unit, (unit, 1.0))


def drawn_of_total(lines: Sequence[Line]) -> str:
    """Return how many of the stored points are drawn."""
    main = [line.reply for line in lines if line.role == "main"]
    drawn, total = sum(len(r.step) for r in main), sum(r.num_total for r in main)
    return f"{drawn:,} of {words.count(total, 'point')}"


def step_chart(
    title: str,
    lines: Sequence[Line],
    *,
    look: Palette,
    decisions: Sequence[DecisionView] = (),
    log: bool = False,
    extent: tuple[int, int] | None = None,
    show_unit: bool = True,
    legend: Legend = "lines",
) -> Spec:
    """Return a chart over steps, with decisions and non-finite steps marked."""
    curves = _curves(lines, "step", log, look)
    marks = decision_series(_within(decisions, extent))
    marks += non_finite_series([line.reply for line in lines if line.role != "limit"])
    whole = {"label": {"precision": 0}}  # "step 265", not "265.00", above the tooltip
    axis: Spec = {"type": "value", "scale": True, "axisPointer": whole}
    if extent is not None:
        axis |= {"min": extent[0], "max": max(extent[1], extent[0] + 1)}
    unit = display_unit(lines[0].reply.unit)[0] if lines and show_unit else ""
    heading = f"{title}, {unit}" if unit else title
    return _frame(heading, lines, curves + marks, axis, log=log, look=look, legend=legend)


def time_chart(title: str, lines: Sequence[Line], *, look: Palette) -> Spec:
    """Return a chart over wall time: of a GPU's or a node's samples, which have no step."""
    unit = display_unit(lines[0].reply.unit)[0] if lines else ""
    heading = f"{title}, {unit}" if unit else title
    return _frame(heading, lines, _curves(lines, "time", False, look), {"type": "time"}, look=look)


def _within(
    decisions: Sequence[DecisionView], extent: tuple[int, int] | None
) -> list[DecisionView]:
    if extent is None:
        return list(decisions)
    return [d for d in decisions if extent[0] <= d.decision.step <= extent[1]]


def _frame(
    title: str,
    lines: Sequence[Line],
    series: list[Spec],
    x_axis: Spec,
    *,
    look: Palette,
    log: bool = False,
    legend: Legend = "lines",
) -> Spec:
    quiet = {"color": look.quiet, "fontSize": 11}
    rule = {"lineStyle": {"color": look.grid}}
    drawn = list(dict.fromkeys(str(s["name"]) for s in series))
    own = [line.name for line in lines if line.name in drawn]
    names = drawn if legend == "marks" else own if len(own) > 1 else []
    return {
        "animation": False,
        "title": {
            # Only our own words are in here, so its rich-text braces cannot be anybody's text.
            "text": f"{title}  {{quiet|{drawn_of_total(lines)}}}",
            "left": 2,
            "top": 2,
            "textStyle": {"fontSize": 13, "fontWeight": 600, "rich": {"quiet": quiet}},
        },
        "legend": {
            "show": bool(names),
            "data": names,
            "right": 10,
            "top": 2,
            "itemWidth": 14,
            "itemHeight": 8,
            "itemGap": 10,
            "textStyle": quiet,
        },
        "grid": {"left": 6, "right": 14, "top": 34, "bottom": 4, "containLabel": True},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "valueFormatter": "%.5g",
            "extraCssText": TOOLTIP_STYLE,
        },
        "xAxis": x_axis
        | {
            "axisLabel": quiet | {"showMaxLabel": False},
            "splitLine": {"show": False},
        },
        "yAxis": [
            {
                "type": "log" if log else "value",
                "scale": True,
                "axisLabel": quiet,
                "splitLine": rule,
            },
            MARK_AXIS,
        ],
        "dataZoom": [{"type": "inside", "filterMode": "none"}],
        "series": series,
    }
