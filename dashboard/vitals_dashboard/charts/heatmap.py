"""Heat maps as ECharts options: ranks or layers by steps. Pure.

A cell with a NaN or Inf is marked by a shape, a red cross, not by a color. A value that was not
measured is an empty cell. Names are only axis labels and tooltip values, which ECharts shows as
plain text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainvitals.views import CellsReply, DecisionView
from vitals_dashboard import formatting
from vitals_dashboard.theme import ACTIONS, NON_FINITE_COLOUR, SEQUENTIAL, UNITS, Palette

Spec = dict[str, Any]
Floats = npt.NDArray[np.float64]
Shade = Literal["size", "change", "others"]
"""Meaning of the color: the value; its ratio to the row's own median; or to the median of all rows
at that step."""

CROSS = "path://M2 0L5 3L8 0L10 2L7 5L10 8L8 10L5 7L2 10L0 8L3 5L0 2Z"
ROW_PIXELS, MIN_HEIGHT, MAX_HEIGHT, AROUND = 17, 170, 1_200, 96
WIDE = 1.5
"""Powers of ten between the smallest and the largest value from which the color scale is
logarithmic."""
MOST, TINY = 1e300, 1e-300
"""Values above the first are drawn as the first; below the second no ratio is computed."""
CALM, WILD = 0.25, 1_000.0
"""Minimum and maximum of a diverging scale, as log2: noise must not look significant."""
CALM_SHARE = 0.1
"""Minimum span of a scale of values, as a share of the largest value, for the same reason."""
MAX_MARKS = 200
MAX_CROSSES = 5_000
LABEL_PIXELS = 230


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key of the rows of a heat map: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"(\d{1,18})", name)
    return [(0, int(p), "") if p.isdigit() and p.isascii() else (1, 0, p) for p in parts]


def cells_of(reply: CellsReply) -> Floats:
    """Return a heat map's cells in the unit that the dashboard shows; NaN for an empty one."""
    factor = UNITS.get(reply.unit, ("", 1.0))[1]
    shape = (len(reply.rows), len(reply.step))
    cells = np.array(
        [[np.nan if v is None else v for v in row] for row in reply.value], dtype=np.float64
    )
    return np.clip(cells.reshape(shape) * factor, -MOST, MOST)


def median_along_axis(cells: Floats, axis: int) -> Floats:
    """Return the median of heat map cells along an axis; NaN if nothing was measured."""
    none = np.isnan(cells).all(axis=axis, keepdims=True)
    medians = np.nanmedian(np.where(none, 0.0, cells), axis=axis, keepdims=True)
    result: Floats = np.where(none, np.nan, medians)
    return result


def color_values(cells: Floats, shade: Shade) -> Floats:
    """Return the values that a heat map's colors show: as measured, or ratios to the median.

    If values may be zero or negative, it is the difference to the median instead.
    """
    if shade == "size":
        return np.log10(cells) if _is_wide(cells) else cells.copy()
    centre = median_along_axis(cells, 1 if shade == "change" else 0)
    if _all_positive(cells):
        return np.log2(cells) - np.log2(centre)
    return cells - centre


def _all_positive(cells: Floats) -> bool:
    """Return whether the dashboard's heat map can use logarithms: all values are positive."""
    finite = cells[np.isfinite(cells)]
    return bool(finite.size) and bool((finite > TINY).all())


def _is_wide(cells: Floats) -> bool:
    """Return whether the dashboard's heat map needs a log scale: positive values of wide range."""
    finite = cells[np.isfinite(cells)]
    return _all_positive(cells) and bool(np.log10(finite.max()) - np.log10(finite.min()) > WIDE)


def color_scale(cells: Floats, shade: Shade, unit: str, look: Palette) -> Spec:
    """Return the heat map's color scale with labels; outliers do not compress the rest."""
    shaded = color_values(cells, shade)
    finite = shaded[np.isfinite(shaded)]
    low, high = (0.0, 1.0) if not finite.size else np.percentile(finite, (0.5, 99.5)).tolist()
    if shade == "size":
        colours: Sequence[str] = SEQUENTIAL
        if not _is_wide(cells):
            low = min(low, high - CALM_SHARE * max(abs(low), abs(high)))
        ends = [10.0**v if _is_wide(cells) else v for v in (high, low)]
        text = [f"{formatting.number(v, 3)} {unit}".strip() for v in ends]
    else:
        colours = look.diverging
        high = max(abs(low), abs(high), CALM if _all_positive(cells) else 0.0)
        high = min(high, WILD) if _all_positive(cells) else high
        low = -high
        if _all_positive(cells):
            text = [f"{2**high:.3g}x the median", f"{2**low:.2g}x"]
        else:
            text = [f"{formatting.number(v, 3)} {unit}".strip() for v in (high, low)]
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    return {
        "type": "continuous",
        "seriesIndex": 0,
        "dimension": "shade",
        "min": low,
        "max": high,
        "calculable": False,
        "hoverLink": False,
        "orient": "horizontal",
        "right": 10,
        "top": 4,
        "itemWidth": 10,
        "itemHeight": 120,
        "text": [text[0], text[1]],
        "textStyle": {"color": look.quiet, "fontSize": 11},
        "inRange": {"color": list(colours)},
    }


def heat_map(
    title: str,
    reply: CellsReply,
    *,
    shade: Shade,
    look: Palette,
    decisions: Iterable[DecisionView] = (),
    names: Sequence[str] = (),
) -> Spec:
    """Return a heat map for a dashboard page as ECharts options.

    Args:
        title: one of our own texts.
        reply: the cells; its rows are drawn in natural order.
        shade: meaning of the color.
        look: colors of the theme.
        decisions: marked above the column of their step.
        names: names of the rows, if they differ from their own.
    """
    unit = UNITS.get(reply.unit, (reply.unit, 1.0))[0]
    order = sorted(range(len(reply.rows)), key=lambda i: natural_sort_key(reply.rows[i]))
    called = _distinct([formatting.plain((names or reply.rows)[i], 90) for i in order])
    cells = cells_of(reply)[order]
    steps = [f"{step:,}" for step in reply.step]
    quiet = {"color": look.quiet, "fontSize": 11}
    scale = color_scale(cells, shade, unit, look)
    return {
        "animation": False,
        "dataset": [{"source": _build_cell_frame(cells, shade, scale, called, steps)}],
        "title": {
            "text": f"{title}, {unit}" if unit else title,
            "left": 2,
            "top": 2,
            "textStyle": {"fontSize": 13, "fontWeight": 600},
        },
        "grid": {"left": 6, "right": 14, "top": 48, "bottom": 4, "containLabel": True},
        "xAxis": _category_axis(steps, quiet | {"hideOverlap": True}) | {"name": ""},
        "yAxis": _category_axis(called, quiet | {"width": LABEL_PIXELS, "overflow": "truncate"})
        | {"inverse": True},
        "visualMap": scale,
        "tooltip": {"trigger": "item", "confine": True},
        "series": [
            {
                "type": "heatmap",
                "datasetIndex": 0,
                "encode": {"x": "step", "y": "row", "value": "shade"},
                "progressive": 0,
                "tooltip": {
                    "formatter": f"{{@row}}<br>from step {{@step}}: <b>{{@value}}</b> {unit}"
                },
                "emphasis": {"itemStyle": {"borderColor": look.over, "borderWidth": 1}},
                "markLine": _decision_lines(decisions, reply.step, look),
            },
            *_crosses(reply, order),
        ],
    }


def _distinct(names: Sequence[str]) -> list[str]:
    """Return unique row names for a heat map; the axis identifies its rows by name."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def _category_axis(names: Sequence[str], label: Spec) -> Spec:
    return {
        "type": "category",
        "data": list(names),
        "axisLabel": label,
        "axisTick": {"show": False},
        "axisLine": {"show": False},
        "splitLine": {"show": False},
        "splitArea": {"show": False},
    }


def _build_cell_frame(
    cells: Floats, shade: Shade, scale: Spec, called: Sequence[str], steps: Sequence[str]
) -> pd.DataFrame:
    rows, columns = np.nonzero(np.isfinite(cells))
    shaded = np.clip(color_values(cells, shade), scale["min"], scale["max"])[rows, columns]
    values = cells[rows, columns]
    return pd.DataFrame(
        {
            "step": pd.Categorical.from_codes(columns, categories=list(steps)),
            "row": pd.Categorical.from_codes(rows, categories=list(called)),
            "shade": np.nan_to_num(shaded),
            "value": np.array([formatting.number(v) for v in values.tolist()], dtype=object),
        }
    )


def _crosses(reply: CellsReply, order: Sequence[int]) -> list[Spec]:
    """Return the crosses at a heat map's non-finite cells, because color is not accessible.

    It is small if all such values were rolled back.
    """
    rolled_back = set(reply.nonfinite_rolled_back)
    current = [cell for cell in reply.nonfinite if cell not in rolled_back]
    crosses = [_cross_series("not finite", 11, "NaN or infinite", current, order)]
    if rolled_back:
        tooltip = "NaN or infinite, only in steps that were rolled back"
        crosses.append(
            _cross_series("not finite, rolled back", 7, tooltip, reply.nonfinite_rolled_back, order)
        )
    return crosses


def _cross_series(
    name: str, size: int, tooltip: str, cells: Iterable[tuple[int, int]], order: Sequence[int]
) -> Spec:
    row_index = {row: at for at, row in enumerate(order)}
    seen = [[column, row_index[row]] for row, column in cells if row in row_index]
    return {
        "type": "scatter",
        "name": name,
        "symbol": CROSS,
        "symbolSize": size,
        "z": 4,
        "itemStyle": {"color": NON_FINITE_COLOUR, "borderColor": "#FFFFFF", "borderWidth": 1},
        "tooltip": {"formatter": tooltip},
        "data": seen[:MAX_CROSSES],
    }


def _decision_lines(decisions: Iterable[DecisionView], steps: Sequence[int], look: Palette) -> Spec:
    """Return the heat map's lines at the columns of decisions, with the sign of each action."""
    marks: dict[tuple[int, str], Spec] = {}
    for view in decisions:
        action = ACTIONS.get(view.decision.action)
        column = step_column(view.decision.step, steps)
        if action is None or column is None:
            continue
        marks[column, action.word] = {
            "xAxis": column,
            "lineStyle": {"type": "dashed", "color": look.quiet, "width": 1.2},
            "label": {
                "position": "start",
                "formatter": action.icon,
                "color": action.colour,
                "fontSize": 12,
            },
        }
    return {
        "silent": True,
        "symbol": "none",
        "animation": False,
        "data": list(marks.values())[:MAX_MARKS],
    }


def step_column(step: int, steps: Sequence[int]) -> int | None:
    """Return the column of a step in the dashboard's heat map; None if it is outside."""
    if not steps or step < steps[0]:
        return None
    column = int(np.searchsorted(np.asarray(steps), step, side="right")) - 1
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return column if step < steps[-1] + max(1, width) else None
