"""Draws the results of a replay as an SVG plot: curves, limits, findings and decisions.

A plot has several hundred columns. Each shows the minimum and maximum of its records, and marks
non-finite values, so that no spike is hidden in a long log.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from trainvitals.judged_log import JudgedStep
from trainvitals.printable import printable
from vitals_collector.report.curves import PlotColumn, ValueScale

COLUMNS = 940
_LEFT, _TOP, _HEIGHT, _GAP, _RIGHT = 70, 58, 210, 44, 20
_NUM_TICKS = 5

COLORS = {
    "line": "#3465a4", "limit": "#999999", "actionable": "#cc0000", "advisory": "#e67e00",
    "rollback": "#75507b", "halt": "#000000", "accept_level": "#2e8b3d",
}  # fmt: skip
LEGEND = (
    ("line", "value"), ("limit", "limit in force"), ("actionable", "to act on, skipped"),
    ("advisory", "told"),
    ("rollback", "rollback"), ("accept_level", "new level accepted"), ("halt", "halt"),
)  # fmt: skip


@dataclass(slots=True)
class _Panel:
    name: str
    columns: dict[int, PlotColumn] = field(default_factory=dict)

    def add(self, at: int, value: float | None, limit: float | None) -> None:
        if value is None:
            return
        column = self.columns.setdefault(at, PlotColumn())
        column.add(value)
        if limit is not None:
            column.limit = min(column.limit, limit)


class Drawing:
    """Adds judged records in order and returns a plot of bounded size."""

    def __init__(self, num_records: int, title: str) -> None:
        self._num = max(1, num_records)
        self._title = title
        self._taken = 0
        self._panels = (_Panel("loss"), _Panel("gradient norm"))
        self._steps: dict[int, int] = {}
        self._marks: dict[tuple[int, str], str] = {}
        """First label in each column, by color."""

    def add(self, judged: JudgedStep) -> None:
        """Add the next record."""
        at = self._taken * COLUMNS // self._num if self._num > COLUMNS else self._place()
        self._taken += 1
        record, judgement = judged.record, judged.judgement
        self._steps.setdefault(at, record.step)
        self._panels[0].add(at, record.loss, record.loss_limit)
        self._panels[1].add(at, record.grad_norm, record.grad_norm_limit)
        for finding in judgement.findings:
            text = f"step {finding.step}: {finding.kind}: {finding.reason}"
            self._marks.setdefault((at, finding.level), text)
        decision = judgement.decision
        if decision is not None and decision.action in COLORS:
            text = f"step {decision.step}: {decision.action}: {decision.reason}"
            self._marks.setdefault((at, decision.action), text)

    def _place(self) -> int:
        """Spread few records over the full width."""
        return self._taken * (COLUMNS - 1) // max(1, self._num - 1)

    def svg(self) -> str:
        """Return the plot."""
        panels = [panel for panel in self._panels if panel.columns]
        height = _TOP + len(panels) * (_HEIGHT + _GAP) + 6
        width = _LEFT + COLUMNS + _RIGHT
        parts = [svg_text(_LEFT, 20, self._title, size=15), *_legend()]
        for number, panel in enumerate(panels):
            top = _TOP + number * (_HEIGHT + _GAP)
            parts += [f'<g transform="translate({_LEFT},{top})">']
            parts += self._panel(panel, first=number == 0)
            parts += ["</g>"]
        return svg_document(width, height, parts)

    def _panel(self, panel: _Panel, *, first: bool) -> list[str]:
        scale = ValueScale(panel.columns.values())
        parts = [f'<rect width="{COLUMNS}" height="{_HEIGHT}" fill="none" stroke="#bbbbbb"/>']
        parts.append(svg_text(4, 14, panel.name + (" (logarithmic)" if scale.is_log else "")))
        parts += [
            svg_text(-6, _y(scale, value) + 4, f"{value:.4g}", anchor="end")
            for value in scale.ticks()
        ]
        shown = [at for at in self._steps if at in panel.columns]
        for number in range(_NUM_TICKS if len(shown) > 1 else len(shown)):
            at = shown[number * (len(shown) - 1) // (_NUM_TICKS - 1)]
            anchor = ("start", "middle", "middle", "middle", "end")[number]
            parts.append(svg_text(at, _HEIGHT + 16, f"step {self._steps[at]}", anchor=anchor))
        parts += self._decisions()
        parts.append(_limit_line(panel, scale))
        parts.append(_value_line(panel, scale))
        parts += self._findings(panel, scale) if first else []
        parts += [
            svg_cross(at, COLORS["actionable"], f"{column.num_nonfinite} not finite")
            for at, column in panel.columns.items()
            if column.num_nonfinite
        ]
        return parts

    def _decisions(self) -> list[str]:
        return [
            f'<line x1="{at}" x2="{at}" y1="0" y2="{_HEIGHT}" stroke="{COLORS[kind]}" '
            f'stroke-width="1.5"><title>{_clean(label)}</title></line>'
            for (at, kind), label in self._marks.items()
            if kind not in ("actionable", "advisory")
        ]

    def _findings(self, panel: _Panel, scale: ValueScale) -> list[str]:
        """Mark actionable findings at their value, advisory ones at the bottom."""
        parts = []
        for (at, kind), label in self._marks.items():
            if kind == "actionable":
                column = panel.columns.get(at, PlotColumn())
                y = _y(scale, column.high) if column.has_value else 0.0
                parts.append(_mark(at, y, COLORS[kind], label))
            elif kind == "advisory":
                parts.append(_mark(at, _HEIGHT - 4, COLORS[kind], label))
        return parts


def _y(scale: ValueScale, value: float) -> float:
    """Return the distance of the value from a panel's top, limited to the panel."""
    return round((1.0 - scale.part(value)) * (_HEIGHT - 28) + 22, 1)


def _value_line(panel: _Panel, scale: ValueScale) -> str:
    points = [
        f"{at},{y}"
        for at, column in panel.columns.items()
        if column.has_value
        for y in dict.fromkeys((_y(scale, column.low), _y(scale, column.high)))
    ]
    return f'<polyline fill="none" stroke="{COLORS["line"]}" points="{" ".join(points)}"/>'


def _limit_line(panel: _Panel, scale: ValueScale) -> str:
    points = [
        f"{at},{_y(scale, column.limit)}"
        for at, column in panel.columns.items()
        if column.limit < math.inf
    ]
    return (
        f'<polyline fill="none" stroke="{COLORS["limit"]}" stroke-dasharray="4 3" '
        f'points="{" ".join(points)}"/>'
    )


def _legend() -> list[str]:
    parts, x = [], _LEFT
    for kind, label in LEGEND:
        parts.append(f'<rect x="{x}" y="34" width="10" height="10" fill="{COLORS[kind]}"/>')
        parts.append(svg_text(x + 15, 43, label))
        x += 36 + 7 * len(label)
    return parts


def _mark(x: float, y: float, color: str, label: str) -> str:
    title = f"<title>{_clean(label)}</title>"
    return f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}">{title}</circle>'


def svg_document(width: float, height: float, parts: Sequence[str]) -> str:
    """Return an SVG file with a white background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
    ) + "\n".join([*parts, "</svg>\n"])


def svg_cross(x: float, color: str, label: str) -> str:
    """Return a cross at the top of a panel, for non-finite values."""
    return (
        f'<path d="M{x - 4},2l8,8m0,-8l-8,8" stroke="{color}" stroke-width="2" fill="none">'
        f"<title>{_clean(label)}</title></path>"
    )


def svg_text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return a label without characters that a terminal or an XML parser interprets."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{_clean(text)}</text>'


def _clean(text: str) -> str:
    return escape(printable(text))
