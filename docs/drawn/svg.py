"""Draws panels of lines and marks as a small SVG image, the same bytes each time.

The image has a background that follows the reader's light or dark scheme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal
from xml.sax.saxutils import escape

from trainvitals.records import Finding

Role = Literal["value", "other", "limit"]
Point = tuple[float, float | None]

WIDTH = 760
_LEFT, _RIGHT, _TITLE, _HEIGHT, _FOOT = 68, 16, 26, 112, 40
_PLOT = WIDTH - _LEFT - _RIGHT
_CHAR = 6.0
"""Approximate width of an 11-pixel letter: only used to place labels."""
_LABEL_EVERY = 160.0
"""Minimum width for a mark's label; marks closer than that share one."""
_LANE = 12
"""Height at the top for the marks' labels."""

_LIGHT = {
    "b": "fill:#ffffff", "f": "fill:none;stroke:#d0d7de", "g": "stroke:#eaeef2",
    "value": "fill:none;stroke:#0969da;stroke-width:1.4",
    "other": "fill:none;stroke:#b1bac4;stroke-width:1.1",
    "limit": "fill:none;stroke:#9a6700;stroke-width:1.4;stroke-dasharray:5 3",
    "text": "fill:#57606a", "t": "fill:#1f2328", "w": "fill:#cf222e",
    "actionable": "fill:#cf222e;stroke:#cf222e;stroke-width:1.6",
    "advisory": "fill:#ffffff;stroke:#cf222e;stroke-width:1.8",
    "m": "stroke:#cf222e;stroke-width:.8;stroke-dasharray:2 3",
    "x": "stroke:#57606a;stroke-width:1.3",
}  # fmt: skip
_DARK = {
    "b": "fill:#0d1117", "f": "stroke:#3d444d", "g": "stroke:#21262d", "value": "stroke:#58a6ff",
    "other": "stroke:#6e7681", "limit": "stroke:#d29922", "text": "fill:#9198a1",
    "t": "fill:#e6edf3", "w": "fill:#ff7b72", "actionable": "fill:#ff7b72;stroke:#ff7b72",
    "advisory": "fill:#0d1117;stroke:#ff7b72", "m": "stroke:#ff7b72", "x": "stroke:#9198a1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: points in order; a point without a finite value is a gap."""

    label: str
    points: Sequence[Point]
    role: Role = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A finding; without a height, the value was non-finite; the label may be empty."""

    x: float
    y: float | None
    level: str
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One course of a run, and its findings."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    findings: Sequence[Finding] = ()
    """Findings of the marks."""
    log: bool = False


def draw(panels: Sequence[Panel], description: str) -> str:
    """Return the panels one below the other, as the text of an SVG file."""
    each = _TITLE + _HEIGHT + _FOOT
    height = len(panels) * each
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">',
        f"<desc>{escape(description)}</desc>",
        f"<style>{_style()}</style>",
        f'<rect class="b" width="{WIDTH}" height="{height}"/>',
    ]
    for place, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT},{place * each + _TITLE})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style() -> str:
    def rules(colors: dict[str, str]) -> str:
        return "".join(
            f"{name if name == 'text' else '.' + name}{{{rule}}}" for name, rule in colors.items()
        )

    fonts = "text{font:11px sans-serif}.t{font:bold 12px sans-serif}"
    return f"{fonts}{rules(_LIGHT)}@media(prefers-color-scheme:dark){{{rules(_DARK)}}}"


class _Axis:
    """Maps a value to a position between two ends, and selects the tick values."""

    def __init__(self, values: Sequence[float], size: int, *, log: bool, margin: float) -> None:
        values = [math.log10(v) for v in values if v > 0.0] if log else list(values)
        low, high = min(values, default=0.0), max(values, default=1.0)
        pad = margin * (high - low) if high > low else 0.5
        self._low, self._high, self._size, self._log = low - pad, high + pad, size, log

    def at(self, value: float) -> float:
        value = math.log10(max(value, 1e-300)) if self._log else value
        share = (value - self._low) / ((self._high - self._low) or 1.0)
        return self._size * min(max(share, -0.01), 1.01)

    def ticks(self, num: int) -> list[float]:
        if self._log:
            first, last = math.ceil(self._low), math.floor(self._high)
            if last - first >= 1:
                every = 1 + (last - first) // 5
                return [10.0**power for power in range(first, last + 1, every)]
            low, high = 10.0**self._low, 10.0**self._high
            return [n for p in (first - 1, first) for n in _ones(p) if low <= n <= high]
        stride = _nice((self._high - self._low) / num)
        first = math.ceil(self._low / stride)
        last = math.floor(self._high / stride)
        return [place * stride for place in range(first, last + 1)]


def _ones(power: int) -> list[float]:
    return [digit * 10.0**power for digit in (1, 2, 5)]


def _nice(stride: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20... that is not below a distance."""
    power = math.floor(math.log10(stride))
    return next(n for p in (power, power + 1) for n in _ones(p) if n >= stride * 0.999)


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    x = _Axis([at for at, _ in points], _PLOT, log=False, margin=0.0)
    heights = [value for _, value in points if value is not None and math.isfinite(value)]
    room = _HEIGHT - (_LANE if panel.marks else 0)
    y = _Axis(heights, room, log=panel.log, margin=0.07)
    parts = [*_ground(panel, x, y), f'<rect class="f" width="{_PLOT}" height="{_HEIGHT}"/>']
    for role in ("other", "value", "limit"):
        for line in panel.lines:
            if line.role == role:
                parts += _curve(line, x, y)
    return [*parts, *_marks(panel, x, y), *_legend(panel)]


def _ground(panel: Panel, x: _Axis, y: _Axis) -> list[str]:
    parts = [_text(0, -9, panel.title, kind="t")]
    for value in y.ticks(4):
        height = _HEIGHT - y.at(value)
        parts.append(f'<path class="g" d="M0 {_number(height)}h{_PLOT}"/>')
        parts.append(_text(-6, height + 4, _shown(value), anchor="end"))
    for value in x.ticks(8):
        at = x.at(value)
        anchor = "start" if at < 8 else "end" if at > _PLOT - 8 else "middle"
        parts.append(_text(at, _HEIGHT + 14, _shown(value), anchor=anchor))
    parts.append(_text(_PLOT / 2, _HEIGHT + 28, panel.x_label, anchor="middle"))
    label = panel.y_label + (" (log)" if panel.log else "")
    turned = f'transform="translate({8 - _LEFT + 4},{_HEIGHT // 2}) rotate(-90)"'
    return [*parts, f'<text {turned} text-anchor="middle">{escape(label)}</text>']


def _curve(line: Line, x: _Axis, y: _Axis) -> list[str]:
    """Return a curve with its gaps; a small cross at the top marks a non-finite value."""
    crosses = [_cross(x.at(at)) for at, v in line.points if v is not None and not math.isfinite(v)]
    places = [
        None if v is None or not math.isfinite(v) else (x.at(at), _HEIGHT - y.at(v))
        for at, v in line.points
    ]
    path, before = "", None
    for here, after in zip_longest(places, places[1:]):
        if here is not None and not (before and after and _is_straight(before, here, after)):
            path += f"{'L' if before else 'M'}{_number(here[0])} {_number(here[1])}"
        before = here
    return [f'<path class="{line.role}" d="{path}"/>', *crosses]


def _is_straight(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Return whether ``b`` is on the line from ``a`` to ``c``, so that it can be left out."""
    return abs((b[1] - a[1]) * (c[0] - b[0]) - (c[1] - b[1]) * (b[0] - a[0])) < 1e-6


def _cross(at: float) -> str:
    a, b = _number(at - 3), _number(at + 3)
    return f'<path class="x" d="M{a} 4L{b} 10M{a} 10L{b} 4"/>'


def _marks(panel: Panel, x: _Axis, y: _Axis) -> list[str]:
    parts: list[str] = []
    groups: list[list[Mark]] = []
    for mark in sorted(panel.marks, key=lambda mark: mark.x):
        at = _number(x.at(mark.x))
        parts.append(
            f'<path class="m" d="M{at} 0V{_HEIGHT}"/>'
            f'<circle class="{mark.level}" cx="{at}" cy="{_number(_top(mark, y))}" r="4"/>'
        )
        last = groups[-1][-1] if groups else None
        is_near = last is not None and x.at(mark.x) - x.at(last.x) < _LABEL_EVERY
        if last is not None and is_near and (mark.word, mark.level) == (last.word, last.level):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    ends = [*(x.at(group[0].x) for group in groups), float(_PLOT)][1:]
    return [*parts, *(_word(group, x, end) for group, end in zip(groups, ends, strict=True))]


def _top(mark: Mark, y: _Axis) -> float:
    return 7.0 if mark.y is None else _HEIGHT - y.at(mark.y)


def _word(group: Sequence[Mark], x: _Axis, end: float) -> str:
    """Return the label of a group of marks, right of it if there is space until ``end``."""
    if not group[-1].word:
        return ""
    words = f"{group[-1].word} ({group[-1].level})"
    is_right = x.at(group[-1].x) + 9 + _CHAR * len(words) < end
    at, anchor = (x.at(group[-1].x) + 8, "start") if is_right else (x.at(group[0].x) - 8, "end")
    return _text(at, 12, words, anchor=anchor, kind="w")


def _legend(panel: Panel) -> list[str]:
    parts, at = [], float(_PLOT)
    shown = {line.label: line.role for line in panel.lines if line.label}
    for label, role in reversed(shown.items()):
        at -= _CHAR * len(label)
        parts.append(_text(at, -9, label))
        parts.append(f'<path class="{role}" d="M{_number(at - 24)} -13h20"/>')
        at -= 36
    return parts


def _text(at: float, height: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    placed = f'x="{_number(at)}" y="{_number(height)}"'
    aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
    of = f' class="{kind}"' if kind else ""
    return f"<text {placed}{aligned}{of}>{escape(words)}</text>"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _shown(value: float) -> str:
    """Return a tick label: short, and never ``-0``."""
    words = f"{value + 0.0:g}" if 1e-4 <= abs(value) < 1e5 or not value else f"{value:.0e}"
    return words.replace("e+0", "e").replace("e-0", "e-")
