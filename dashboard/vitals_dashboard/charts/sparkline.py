"""A word-sized curve as an image: non-finite values are gaps, and marked. Pure."""

import base64
import math
from collections.abc import Sequence

from trainvitals.views import SeriesReply
from vitals_dashboard.theme import VERMILLION, Palette

WIDTH, HEIGHT = 120, 28
"""Pixels."""
_EDGE = 3.0
"""Left free on every side, so that a mark at an end is whole."""


def sparkline(reply: SeriesReply | None, look: Palette) -> str:
    """Return a word-sized curve as the data URL of an image; "" without any value."""
    if reply is None or not reply.step:
        return ""
    xs = _scale_to_interval(reply.step, _EDGE, WIDTH - _EDGE)
    values = [math.nan if value is None else value for value in reply.value]
    ys = _scale_to_interval(values, HEIGHT - _EDGE, _EDGE)
    line, is_drawing = "", False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            # A line to its own position: a single point is a dot.
            line += f"L{x:.1f} {y:.1f}" if is_drawing else f"M{x:.1f} {y:.1f}h0"
        is_drawing = math.isfinite(y)
    gaps = dict.fromkeys(f"{x:.1f}" for x, y in zip(xs, ys, strict=True) if not math.isfinite(y))
    marks = "".join(f"M{x} {_EDGE}V{HEIGHT - _EDGE}" for x in gaps)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
        f'<path d="{line}" fill="none" stroke="{look.main}" stroke-width="1.5"'
        ' stroke-linejoin="round" stroke-linecap="round"/>'
        f'<path d="{marks}" stroke="{VERMILLION}" stroke-width="2"/></svg>'
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _scale_to_interval(values: Sequence[float], start: float, end: float) -> list[float]:
    """Scale a sparkline's values to an interval; non-finite ones are unchanged."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # Half of each, so that the distance of two floats is always a float.
    extent = (high / 2 - low / 2) or 1.0
    middle = 0.5 if low == high else 0.0
    return [start + (end - start) * (middle + (v / 2 - low / 2) / extent) for v in values]
