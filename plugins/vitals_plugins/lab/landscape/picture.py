"""Draws the loss along a line, or on a plane, as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainvitals.document.page import write_svg
from trainvitals.document.tree import Node, make_element
from vitals_collector.report.curves import PlotColumn, ValueScale

if TYPE_CHECKING:
    from vitals_plugins.lab.landscape.surface import Losses

_SIZE, _LEFT, _TOP, _BELOW, _RIGHT = 420, 80, 60, 56, 110
_COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis, from the lowest loss to the highest."""
_NOT_FINITE = "#cc0000"


def draw_landscape(
    places: Sequence[float], losses: Losses, *, title: str, along: str, lines: Sequence[str] = ()
) -> str:
    """Return a loss landscape's plot: a curve for one row, a color map for several.

    ``losses`` are rows of the second direction; one row is a line. ``along`` is the label of the
    x-axis, and ``lines`` are sentences below it.
    """
    finite = PlotColumn()
    for loss in (loss for row in losses for loss in row if math.isfinite(loss)):
        finite.add(loss)
    axis = ValueScale([finite])
    is_plane = len(losses) > 1
    width = max(_LEFT + _SIZE + _RIGHT, 40 + round(6.2 * max(map(len, (title, *lines)))))
    height = _TOP + _SIZE + _BELOW + 18 * len(lines)
    inside = [
        *(
            _draw_heatmap(places, losses, axis)
            if is_plane
            else _draw_curve(places, losses[0], axis)
        ),
        *_draw_x_axis(places, along),
        make_element("rect", class_="frame", width=_SIZE, height=_SIZE),
    ]
    return write_svg(
        width,
        height,
        [
            make_element("text", title, class_="title", x=20, y=24),
            make_element("g", *inside, transform=f"translate({_LEFT},{_TOP})"),
            *(
                _draw_text(20, _TOP + _SIZE + _BELOW + 18 * number, line)
                for number, line in enumerate(lines)
            ),
        ],
    )


def _draw_curve(places: Sequence[float], losses: Sequence[float], axis: ValueScale) -> list[Node]:
    what = "loss (logarithmic)" if axis.is_log else "loss"
    parts = [_draw_text(4, -8, what)]
    parts += [
        _draw_text(-6, _y_position(axis, tick) + 4, f"{tick:.4g}", anchor="end")
        for tick in axis.ticks()
    ]
    path, dots, is_broken = "", [], True
    for place, loss in zip(places, losses, strict=True):
        x = round(_x_position(places, place), 1)
        if math.isfinite(loss):
            y = round(_y_position(axis, loss), 1)
            path += f"{'M' if is_broken else 'L'}{x},{y}"
            title = make_element("title", f"{place:+.4g}: {loss:.6g}")
            dots.append(make_element("circle", title, cx=x, cy=y, r=2.5, fill="#0072b2"))
        else:
            title = make_element("title", "not finite")
            dots.append(make_element("path", title, class_="nan", d=f"M{x - 4},2l8,8m0,-8l-8,8"))
        is_broken = not math.isfinite(loss)
    return [*parts, make_element("path", class_="line", d=path), *dots]


def _draw_heatmap(places: Sequence[float], losses: Losses, axis: ValueScale) -> list[Node]:
    """Return the SVG nodes of a loss landscape on a plane, a colored square per point."""
    size = _SIZE / len(places)
    parts = []
    for up, (row, second) in enumerate(zip(losses, places, strict=True)):
        for right, (loss, first) in enumerate(zip(row, places, strict=True)):
            color = _color(axis.part(loss)) if math.isfinite(loss) else _NOT_FINITE
            title = make_element("title", f"{first:+.3g}, {second:+.3g}: {loss:.6g}")
            x, y = round(right * size, 2), round(_SIZE - (up + 1) * size, 2)
            edge = round(size + 0.3, 2)
            parts.append(make_element("rect", title, x=x, y=y, width=edge, height=edge, fill=color))
    middle = _SIZE / 2
    parts.append(make_element("circle", cx=middle, cy=middle, r=4, fill="none", stroke="white"))
    parts += [
        _draw_text(-6, _SIZE - _x_position(places, place) + 4, f"{place:.3g}", anchor="end")
        for place in (places[0], 0.0, places[-1])
    ]
    legend = _SIZE + 14
    for step in range(40):
        y, high = round(_SIZE * (1 - (step + 1) / 40), 1), _SIZE / 40 + 0.3
        color = _color((step + 0.5) / 40)
        parts.append(make_element("rect", x=legend, y=y, width=14, height=high, fill=color))
    parts += [
        _draw_text(legend + 18, _SIZE * (1 - axis.part(tick)) + 4, f"{tick:.4g}")
        for tick in axis.ticks()
    ]
    parts.append(_draw_text(legend - 10, -8, "loss (log)" if axis.is_log else "loss"))
    return parts


def _draw_x_axis(places: Sequence[float], along: str) -> list[Node]:
    """Return the SVG nodes of a loss landscape's horizontal axis: a label and three positions."""
    shown = dict.fromkeys((places[0], places[len(places) // 2], places[-1]))
    parts = [
        _draw_text(_x_position(places, place), _SIZE + 16, f"{place:.3g}", anchor="middle")
        for place in shown
    ]
    return [*parts, _draw_text(_SIZE / 2, _SIZE + 32, along, anchor="middle")]


def _x_position(places: Sequence[float], place: float) -> float:
    """Return the x of a position in a loss landscape's plot."""
    return _SIZE * (place - places[0]) / (places[-1] - places[0])


def _y_position(axis: ValueScale, loss: float) -> float:
    return 10 + (1.0 - axis.part(loss)) * (_SIZE - 20)


def _color(part: float) -> str:
    """Return the color of a loss on a landscape's map, for a part from 0 to 1."""
    at = min(max(part, 0.0), 1.0) * (len(_COLORS) - 1)
    low = min(int(at), len(_COLORS) - 2)
    pairs = zip(_COLORS[low], _COLORS[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def _draw_text(x: float, y: float, text: str, *, anchor: str = "start") -> Node:
    """Return an SVG text for a loss landscape's plot."""
    return make_element("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor)
