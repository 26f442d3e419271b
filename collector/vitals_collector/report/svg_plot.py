"""Draws curves and heat maps as SVG that takes its colors from the page, light or dark.

A curve has one column per pixel: its minimum and maximum, and a cross for non-finite values.
Decisions are letters above their line, so that nothing depends on color.
"""

from collections import Counter
from collections.abc import Sequence

from trainvitals.document.page import write_svg
from trainvitals.document.tree import Node, make_element
from trainvitals.printable import printable
from trainvitals.units import humanize_count
from trainvitals.views import CellsReply, SeriesReply
from vitals_collector.report.curves import (
    KINDS,
    CurveMark,
    PlotColumn,
    PlottedCurve,
    ValueScale,
    plot_column_index,
    plot_columns,
)

WIDTH, HEIGHT = 880, 170
_LEFT, _TOP, _RIGHT, _BELOW = 70, 22, 14, 24
_NUM_TICKS = 5
NUM_SHADES = 9
_CELL = 14
_NAMES = 190
_NAME_CHARACTERS = 28
_LETTERS = 24
"""Minimum distance of letters above a curve."""
_COLUMNS = (
    "A curve shows the minimum and the maximum of each of its columns, so no spike is hidden."
)
_SYMBOLS = "A cross is a non-finite value, gray is a discarded attempt, dashed the limit in force"


def draw_curve(
    curve: PlottedCurve, marks: Sequence[CurveMark], spans: Sequence[tuple[int, int]] = ()
) -> Node:
    """Plot a stored run's curve as SVG; the steps in ``spans`` are shaded."""
    size = f"0 0 {_LEFT + WIDTH + _RIGHT} {_TOP + HEIGHT + _BELOW}"
    group = _curve_group(curve, marks, spans, _TOP)
    return make_element("svg", group, viewBox=size, role="img", aria_label=caption(curve))


def curves_file(title: str, curves: Sequence[PlottedCurve], marks: Sequence[CurveMark]) -> str:
    """Return an SVG file that plots the curves of a run, one below the other."""
    notes = (_COLUMNS, f"{_SYMBOLS}.", _letters(marks))
    inside = [make_element("text", title, class_="title", x=_LEFT, y=20)]
    inside += [make_element("text", note, x=_LEFT, y=40 + 16 * at) for at, note in enumerate(notes)]
    top = 96
    for curve in curves:
        inside.append(make_element("text", caption(curve), x=_LEFT, y=top + 4))
        inside.append(_curve_group(curve, marks, (), top + _TOP + 6))
        top += _TOP + HEIGHT + _BELOW + 20
    return write_svg(_LEFT + WIDTH + _RIGHT, top, inside)


def _curve_group(
    curve: PlottedCurve, marks: Sequence[CurveMark], spans: Sequence[tuple[int, int]], top: int
) -> Node:
    """Plot one of a run's curves as a group in the SVG, with frame, ticks and marks."""
    span = curve.span
    lineage, discarded, scale = _plotted_columns(curve)
    inside = [
        *_incident_shading(spans, span),
        make_element("rect", class_="frame", width=WIDTH, height=HEIGHT),
        *_value_ticks([lineage, *discarded], scale),
        *_step_ticks(span),
        *_decision_lines(marks, span),  # below the curves: a spike covers its mark's line
        _limit(curve.limit, span, scale),
        *(
            make_element("path", class_="left", d=_curve_path(branch, scale))
            for branch in discarded
        ),
        make_element("path", class_="line", d=_curve_path(lineage, scale)),
        *_nonfinite_marks([lineage, *discarded]),
    ]
    return make_element("g", *inside, transform=f"translate({_LEFT},{top})")


def legend(marks: Sequence[CurveMark]) -> str:
    """Return the meaning of all marks in the SVG plots of a run."""
    return f"{_COLUMNS} {_SYMBOLS}, shaded an incident. {_letters(marks)}".strip()


def _letters(marks: Sequence[CurveMark]) -> str:
    """Return the legend of the letters that mark decisions in a run's SVG plot."""
    kinds = {mark.kind for mark in marks}
    named = [f"{letter} {label}" for kind, (letter, label) in KINDS.items() if kind in kinds]
    return f"Letters: {', '.join(named)}. Point at one to read why." if named else ""


def caption(curve: PlottedCurve) -> str:
    """Return the caption of a run's SVG plot: metric, steps, non-finite and discarded ones."""
    series, scale = curve.series, _plotted_columns(curve)[2]
    text = f"{curve.name}{', logarithmic' if scale.is_log else ''}: "
    text += f"{humanize_count(series.num_total, 'step')}, {series.num_nonfinite} of them not finite"
    if curve.discarded is not None and curve.discarded.num_total:
        text += f"; {curve.discarded.num_total} discarded by rollbacks"
    return text


def _plotted_columns(
    curve: PlottedCurve,
) -> tuple[dict[int, PlotColumn], list[dict[int, PlotColumn]], ValueScale]:
    """Return the SVG plot's columns of the lineage and of discarded attempts, and their scale."""
    lineage = plot_columns(curve.series, curve.span, WIDTH)
    discarded = curve.discarded_columns(WIDTH)
    columns = [column for branch in (lineage, *discarded) for column in branch.values()]
    return lineage, discarded, ValueScale(columns)


def draw_cells(reply: CellsReply, onset_step: int) -> Node:
    """Plot a run's heat map as SVG, with a mark above the column of ``onset_step``."""
    num_columns = max(1, len(reply.step))
    wide = (WIDTH + _LEFT - _NAMES) / num_columns
    scale = shades(reply)
    paths: dict[int, list[str]] = {}
    for row, values in enumerate(reply.value):
        for at, value in enumerate(values):
            if value is not None:
                shade = min(NUM_SHADES - 1, int(scale.part(value) * NUM_SHADES))
                paths.setdefault(shade, []).append(_cell_path(at, row, wide))
    inside = [
        make_element("path", class_=f"q{shade}", d="".join(d)) for shade, d in sorted(paths.items())
    ]
    crosses = "".join(
        f"M{round((at + 0.5) * wide - 3, 1)},{row * _CELL + 3}l6,6m0,-6l-6,6"
        for row, at in reply.nonfinite
    )
    high = len(reply.rows) * _CELL
    inside += [
        make_element("path", class_="nan", d=crosses),
        *(_row_name(name, row) for row, name in enumerate(reply.rows)),
        *_onset_mark(reply, onset_step, wide, high),
    ]
    inside += [
        make_element("text", str(reply.step[at]), x=round(at * wide, 1), y=high + 14)
        for at in sorted({i * num_columns // _NUM_TICKS for i in range(_NUM_TICKS)})
        if at < len(reply.step)
    ]
    picture = make_element("g", *inside, transform=f"translate({_NAMES},{_TOP})")
    size = f"0 0 {_LEFT + WIDTH + _RIGHT} {_TOP + high + _BELOW}"
    return make_element("svg", picture, viewBox=size, role="img", aria_label=reply.metric)


def shades(reply: CellsReply) -> ValueScale:
    """Return the scale that maps a run's heat map to the shades of its SVG plot."""
    every = PlotColumn()
    for values in reply.value:
        for value in values:
            if value is not None:
                every.add(value)
    return ValueScale([every])


def _y_position(scale: ValueScale, value: float) -> float:
    """Return the vertical position of a value in a run's SVG plot."""
    return round((1.0 - scale.part(value)) * (HEIGHT - 20) + 10, 1)


def _curve_path(branch: dict[int, PlotColumn], scale: ValueScale) -> str:
    """Return the line of a run's curve in the SVG plot, with gaps at non-finite values."""
    parts, is_broken = [], True
    for at in sorted(branch):
        column = branch[at]
        if column.has_value:
            ends = dict.fromkeys((_y_position(scale, column.low), _y_position(scale, column.high)))
            points = [f"{at},{y}" for y in ends]
            parts.append(f"M{points[0]}l0,0" if is_broken else f"L{points[0]}")
            parts += [f"L{point}" for point in points[1:]]
            is_broken = False
        is_broken = is_broken or bool(column.num_nonfinite)
    return "".join(parts)


def _limit(limit: SeriesReply | None, span: tuple[int, int], scale: ValueScale) -> Node | None:
    """Return the line of a metric's limit in a run's SVG plot, within the plotted range."""
    if limit is None:
        return None
    parts, before = [], None
    top = scale.ticks()[-1]
    for at, column in sorted(plot_columns(limit, span, WIDTH).items()):
        if column.has_value and column.low <= top:
            parts.append(f"{'L' if before else 'M'}{at},{_y_position(scale, column.low)}")
            before = at
        else:
            before = None
    return make_element("path", class_="limit", d="".join(parts)) if parts else None


def _value_ticks(branches: Sequence[dict[int, PlotColumn]], scale: ValueScale) -> list[Node]:
    """Return the labels of the value axis in a run's SVG plot."""
    if not any(column.has_value for branch in branches for column in branch.values()):
        return []
    return [
        make_element(
            "text", f"{value:.4g}", x=-6, y=_y_position(scale, value) + 4, text_anchor="end"
        )
        for value in scale.ticks()
    ]


def _step_ticks(span: tuple[int, int]) -> list[Node]:
    """Return the labels of the step axis in a run's SVG plot."""
    first, last = span
    num = min(_NUM_TICKS, last - first + 1)
    shown = [first + i * (last - first) // max(1, num - 1) for i in range(num)]
    return [
        make_element(
            "text",
            f"step {step}" if number == 0 else str(step),
            x=plot_column_index(step, span, WIDTH),
            y=HEIGHT + 15,
            text_anchor="start" if number == 0 else "end" if number == num - 1 else "middle",
        )
        for number, step in enumerate(shown)
    ]


def _incident_shading(spans: Sequence[tuple[int, int]], span: tuple[int, int]) -> list[Node]:
    """Return the rectangles that shade incidents in a run's SVG plot."""
    rectangles = []
    for first, last in spans:
        if last < span[0] or first > span[1]:
            continue
        x, end = (
            plot_column_index(min(max(s, span[0]), span[1]), span, WIDTH) for s in (first, last)
        )
        rectangles.append(
            make_element(
                "rect", class_="incident", x=x - 1, width=max(3, end - x + 2), height=HEIGHT
            )
        )
    return rectangles


def _nonfinite_marks(branches: Sequence[dict[int, PlotColumn]]) -> list[Node]:
    """Return a cross in a run's SVG plot for each column with non-finite values."""
    lost = Counter[int]()
    for branch in branches:
        lost.update({at: c.num_nonfinite for at, c in branch.items() if c.num_nonfinite})
    return [
        make_element(
            "path",
            make_element("title", f"{num} not finite"),
            class_="nan",
            d=f"M{at - 4},{HEIGHT - 10}l8,8m0,-8l-8,8",
        )
        for at, num in sorted(lost.items())
    ]


def _decision_lines(marks: Sequence[CurveMark], span: tuple[int, int]) -> list[Node]:
    """Return a line in a run's SVG plot at each decision, with letters if there is space."""
    order = list(KINDS)
    by_column: dict[int, list[CurveMark]] = {}
    for mark in marks:
        if span[0] <= mark.step <= span[1]:
            by_column.setdefault(plot_column_index(mark.step, span, WIDTH), []).append(mark)
    nodes, groups = [], list[tuple[int, list[CurveMark]]]()
    for at, here in sorted(by_column.items()):
        kind = min((mark.kind for mark in here), key=order.index)
        title = make_element("title", "; ".join(mark.words for mark in here[:5]))
        line = make_element("line", x1=at, x2=at, y1=0, y2=HEIGHT)
        nodes.append(make_element("g", title, line, class_=f"mark {kind}"))
        if groups and at - groups[-1][0] < _LETTERS:
            groups[-1][1].extend(here)
        else:
            groups.append((at, list(here)))
    for at, here in groups:
        kinds = dict.fromkeys(mark.kind for mark in here)
        letters = "".join(KINDS[kind][0] for kind in kinds)
        title = make_element("title", "; ".join(mark.words for mark in here[:5]))
        text = make_element("text", letters, title, x=at, y=-5, text_anchor="middle")
        nodes.append(make_element("g", text, class_=f"mark {min(kinds, key=order.index)}"))
    return nodes


def _cell_path(at: int, row: int, wide: float) -> str:
    """Return the outline of a cell in the SVG plot of a run's heat map."""
    x = round(at * wide, 1)
    across = round((at + 1) * wide - x, 1)
    return f"M{x},{row * _CELL}h{across}v{_CELL - 1}h-{across}z"


def _row_name(name: str, row: int) -> Node:
    """Return the label of a row in a run's SVG heat map; the full name is a tooltip."""
    text = printable(name)
    is_long = len(text) > _NAME_CHARACTERS
    short = f"...{text[3 - _NAME_CHARACTERS :]}" if is_long else text
    title = make_element("title", text) if is_long else None
    return make_element("text", short, title, x=-6, y=row * _CELL + 11, text_anchor="end")


def _onset_mark(reply: CellsReply, onset_step: int, wide: float, high: int) -> list[Node]:
    """Return the mark of an incident's onset in a run's SVG heat map."""
    before = [at for at, step in enumerate(reply.step) if step <= onset_step]
    if not before:
        return []
    x = round(before[-1] * wide, 1)
    return [
        make_element("text", "onset", x=x, y=-6, text_anchor="middle", class_="onset"),
        make_element("path", class_="onset", d=f"M{x},-4V{high}"),
    ]
