"""Draws the loss along a line, or on a plane, as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitals_collector.report.curves import PlotColumn, ValueScale
from vitals_collector.report.drawing import svg_cross, svg_document, svg_text

if TYPE_CHECKING:
    from vitals_plugins.lab.landscape.surface import Losses

_SIZE, _LEFT, _TOP, _BELOW, _RIGHT = 420, 80, 60, 56, 110
_COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis, from the lowest loss to the highest."""
_NOT_FINITE = "#cc0000"


def picture(
    places: Sequence[float], losses: Losses, *, title: str, along: str, lines: Sequence[str] = ()
) -> str:
    """Return the plot: a curve for one row, a color map for several.

    Args:
        places: along each direction.
        losses: rows of the second direction; one row is a line.
        title: above it.
        along: label of the x-axis.
        lines: sentences below that.
    """
    finite = PlotColumn()
    for loss in (loss for row in losses for loss in row if math.isfinite(loss)):
        finite.add(loss)
    axis = ValueScale([finite])
    is_plane = len(losses) > 1
    width = max(_LEFT + _SIZE + _RIGHT, 40 + round(6.2 * max(map(len, (title, *lines)))))
    height = _TOP + _SIZE + _BELOW + 18 * len(lines)
    parts = [
        _text(20, 24, title, size=15),
        f'<g transform="translate({_LEFT},{_TOP})">',
        *(_plane(places, losses, axis) if is_plane else _curve(places, losses[0], axis)),
        *_below(places, along),
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#bbbbbb"/>',
        "</g>",
    ]
    parts += [
        _text(20, _TOP + _SIZE + _BELOW + 18 * number, line) for number, line in enumerate(lines)
    ]
    return svg_document(width, height, parts)


def _curve(places: Sequence[float], losses: Sequence[float], axis: ValueScale) -> list[str]:
    what = "loss (logarithmic)" if axis.is_log else "loss"
    parts = [_text(4, -8, what)]
    parts += [_text(-6, _y(axis, tick) + 4, f"{tick:.4g}", anchor="end") for tick in axis.ticks()]
    stretch: list[str] = []
    for at, loss in zip(_spread(places), losses, strict=True):
        if math.isfinite(loss):
            stretch.append(f"{at:.1f},{_y(axis, loss):.1f}")
            continue
        parts += _polyline(stretch)
        stretch = []
        parts.append(svg_cross(round(at, 1), _NOT_FINITE, "not finite"))
    parts += _polyline(stretch)
    parts += [
        f'<circle cx="{at:.1f}" cy="{_y(axis, loss):.1f}" r="2.5" fill="#3465a4">'
        f"<title>{coord:+.4g}: {loss:.6g}</title></circle>"
        for at, coord, loss in zip(_spread(places), places, losses, strict=True)
        if math.isfinite(loss)
    ]
    return parts


def _polyline(points: Sequence[str]) -> list[str]:
    if not points:
        return []
    return [f'<polyline fill="none" stroke="#3465a4" points="{" ".join(points)}"/>']


def _plane(places: Sequence[float], losses: Losses, axis: ValueScale) -> list[str]:
    size = _SIZE / len(places)
    parts = []
    for up, (row, second) in enumerate(zip(losses, places, strict=True)):
        for right, (loss, first) in enumerate(zip(row, places, strict=True)):
            color = _color(axis.part(loss)) if math.isfinite(loss) else _NOT_FINITE
            parts.append(
                f'<rect x="{right * size:.2f}" y="{_SIZE - (up + 1) * size:.2f}" '
                f'width="{size + 0.3:.2f}" height="{size + 0.3:.2f}" fill="{color}">'
                f"<title>{first:+.3g}, {second:+.3g}: {loss:.6g}</title></rect>"
            )
    middle = _SIZE / 2
    parts.append(f'<circle cx="{middle}" cy="{middle}" r="4" fill="none" stroke="white"/>')
    parts += [
        _text(-6, _SIZE * (1 - (coord - places[0]) / (places[-1] - places[0])) + 4, f"{coord:.3g}",
              anchor="end")
        for coord in (places[0], 0.0, places[-1])
    ]  # fmt: skip
    legend = _SIZE + 14
    for step in range(40):
        parts.append(
            f'<rect x="{legend}" y="{_SIZE * (1 - (step + 1) / 40):.1f}" width="14" '
            f'height="{_SIZE / 40 + 0.3:.1f}" fill="{_color((step + 0.5) / 40)}"/>'
        )
    parts += [
        _text(legend + 18, _SIZE * (1 - axis.part(tick)) + 4, f"{tick:.4g}")
        for tick in axis.ticks()
    ]
    parts.append(_text(legend - 10, -8, "loss (log)" if axis.is_log else "loss"))
    return parts


def _below(places: Sequence[float], along: str) -> list[str]:
    shown = dict.fromkeys((places[0], places[len(places) // 2], places[-1]))
    span = places[-1] - places[0]
    parts = [
        _text(_SIZE * (coord - places[0]) / span, _SIZE + 16, f"{coord:.3g}", anchor="middle")
        for coord in shown
    ]
    return [*parts, _text(_SIZE / 2, _SIZE + 32, along, anchor="middle")]


def _spread(places: Sequence[float]) -> list[float]:
    return [_SIZE * (coord - places[0]) / (places[-1] - places[0]) for coord in places]


def _y(axis: ValueScale, loss: float) -> float:
    return 10 + (1.0 - axis.part(loss)) * (_SIZE - 20)


def _color(part: float) -> str:
    at = min(max(part, 0.0), 1.0) * (len(_COLORS) - 1)
    low = min(int(at), len(_COLORS) - 2)
    pairs = zip(_COLORS[low], _COLORS[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return svg_text(round(x, 1), round(y, 1), text, anchor=anchor, size=size)
