"""Curves for the browser: every received point, and a gap for a missing value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainvitals.views import SeriesReply
from vitals_dashboard import formatting
from vitals_dashboard.charts.scale import STEPS, StepScale
from vitals_dashboard.theme import UNITS

Floats = npt.NDArray[np.float64]
Point = tuple[float, float | None]
Role = Literal["main", "mean", "limit", "discarded", "part", "band"]
"""``mean``: a smoothed curve, drawn over the one it is of. ``part``: drawn on top of the parts
after it. ``band``: an upper end, or the lower end that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One series of a chart."""

    name: str
    reply: SeriesReply
    role: Role = "main"
    scale: StepScale | None = None
    """Scale of its steps, if it differs from the chart's: for another run."""
    num_replaced: int | None = None
    """The browser has the series except for the reply, which replaces this many of its last points;
    None: the reply is the whole series. For a discarded series, 0 means that the browser has all of
    it."""

    @property
    def label(self) -> str:
        """Return the name of the line as one short text for the chart's legend."""
        return chart_text(self.name, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartCurve:
    """One curve of a chart: positions along x, and the values in the displayed unit."""

    name: str
    role: Role = "main"
    colour: int = 0
    """Index of the palette's line color; -1 is faint."""
    x: Sequence[float]
    y: Sequence[float | None]
    """None is a gap: a non-finite value, or one that a log axis cannot show."""
    num_total: int
    """Points that are stored."""
    num_nonfinite: int = 0
    num_replaced: int | None = None
    """As ``ChartLine.num_replaced``."""


@lru_cache(maxsize=4_096)
def chart_text(text: str, limit: int = 120) -> str:
    """Return external text for a chart as one line, without control characters or markup."""
    return formatting.plain(text, limit)


def series_points(
    reply: SeriesReply, *, scale: StepScale = STEPS, factor: float = 1.0, log: bool = False
) -> list[Point]:
    """Return the points of a curve; None is a gap: a non-finite value, or one no log axis shows."""
    return [
        (at, None if value is None or (log and value <= 0) else value * factor)
        for at, value in zip(scale.xs(reply), reply.value, strict=True)
    ]


def curves_of(
    lines: Sequence[ChartLine], scale: StepScale = STEPS, *, log: bool = False
) -> list[ChartCurve]:
    """Return the curves of a chart; each attempt that was rolled back is a separate curve.

    A mean has the color of its curve, and several discarded series have one color each.
    """
    factor = display_unit(lines[0].reply.unit)[1] if lines else 1.0
    num_discarded = sum(line.role == "discarded" for line in lines)
    curve_indices: dict[tuple[str, str, str], int] = {}
    result: list[ChartCurve] = []
    for line in lines:
        reply = line.reply
        series = (reply.run_id, reply.metric, reply.source)
        colour = -1
        if line.role in ("main", "part"):
            colour = curve_indices[series] = len(curve_indices)
        elif line.role == "mean" or (line.role == "discarded" and num_discarded > 1):
            colour = curve_indices.get(series, -1)
        drawn = series_points(reply, scale=line.scale or scale, factor=factor, log=log)
        result += [
            ChartCurve(
                name=line.label,
                role=line.role,
                colour=colour,
                x=[x for x, _ in part],
                y=[y for _, y in part],
                num_total=reply.num_total,
                num_nonfinite=reply.num_nonfinite,
                num_replaced=line.num_replaced,
            )
            for part in (_by_attempt(line, drawn) if line.role == "discarded" else [drawn])
        ]
    return result


def group_curves(
    name: str, lines: Sequence[ChartLine], *, colour: int, log: bool = False
) -> list[ChartCurve]:
    """Return the curves of a group of runs: a band from lowest to highest, and the mean.

    Runs are linear between their points. The curves cover what all of them cover; one run has no
    band.
    """
    runs = [
        np.array([(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None])
        for curve in curves_of(lines, log=log)
    ]
    if not all(map(len, runs)):
        return []
    xs = np.unique(np.concatenate([run[:, 0] for run in runs]))
    xs = xs[(xs >= max(run[0, 0] for run in runs)) & (xs <= min(run[-1, 0] for run in runs))]
    values = np.stack([np.interp(xs, run[:, 0], run[:, 1]) for run in runs])
    band = chart_text(f"{name}, lowest to highest", 80)
    ends: list[tuple[str, Role, Floats]] = [
        (band, "band", values.max(axis=0)),
        (band, "band", values.min(axis=0)),
        (chart_text(name, 48), "main", values.mean(axis=0)),
    ]
    return [
        ChartCurve(
            name=text, role=role, colour=colour, x=xs.tolist(), y=y.tolist(), num_total=len(xs)
        )
        for text, role, y in (ends if len(runs) > 1 else ends[2:])
    ]


def _by_attempt(line: ChartLine, drawn: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the points of a curve by attempt: no line joins two branches, which may overlap."""
    attempts = line.reply.attempt
    for attempt in sorted(set(attempts)):
        attempt_points = [point for of, point in zip(attempts, drawn, strict=True) if of == attempt]
        yield attempt_points if line.num_replaced is None else []


def display_unit(unit: str) -> tuple[str, float]:
    """Return the unit in which a chart shows its curves, and the factor from the base unit."""
    return UNITS.get(unit, (unit, 1.0))
