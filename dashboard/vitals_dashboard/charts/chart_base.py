"""The sheet a chart is drawn on: title, legend, axes, tooltip, and what is said below."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitals_dashboard.charts.lines import Spec, chart_text
from vitals_dashboard.charts.marks import LANE, MARK_AXIS
from vitals_dashboard.charts.scale import Scale
from vitals_dashboard.theme import Palette

TOOLTIP_STYLE = "max-width:26rem;white-space:normal;overflow-wrap:anywhere;"
TOP, BELOW, LABELS = 26, 20, 20
"""Pixels: of title and legend, of the words below, of the numbers along x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """What frames the curves of one chart."""

    title: str
    below: str
    along: str
    """What is counted along x."""
    look: Palette
    height: int
    legend: Sequence[str] = ()
    lanes: int = 0
    log: bool = False
    zoom: bool = False
    """Whether dragging over the curves chooses a range."""

    @property
    def plot_height(self) -> int:
        """Pixels of the curves' area, about."""
        return max(40, self.height - self._top - BELOW - LABELS)

    @property
    def _top(self) -> int:
        return TOP + LANE * self.lanes + (4 if self.lanes else 8)

    def spec(self, series: Sequence[Spec], x_axis: Spec) -> Spec:
        """Return the whole chart."""
        quiet = {"color": self.look.quiet, "fontSize": 11}
        return {
            "animation": False,
            "title": self._titles(quiet),
            "legend": self._legend(quiet),
            "grid": {
                "left": 6,
                "right": 14,
                "top": self._top,
                "bottom": BELOW,
                "containLabel": True,
            },
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "valueFormatter": "%.5g",
                "extraCssText": TOOLTIP_STYLE,
            },
            "xAxis": x_axis
            | {
                "axisLabel": quiet | {"showMaxLabel": False, "hideOverlap": True},
                "splitLine": {"show": False},
            },
            "yAxis": self._y_axes(quiet),
            "series": list(series),
        } | (self._brush() if self.zoom else {})

    def _titles(self, quiet: Spec) -> list[Spec]:
        head = {"fontSize": 13, "fontWeight": 600, "width": 420, "overflow": "truncate"}
        foot = {"bottom": 3, "padding": 0, "textStyle": quiet | {"fontWeight": 400}}
        return [
            {"text": chart_text(self.title), "left": 2, "top": 2, "textStyle": head},
            {"text": self.below, "left": 2} | foot,
            {"text": self.along, "right": 14} | foot,
        ]

    def _legend(self, quiet: Spec) -> Spec:
        return {
            "show": bool(self.legend),
            "type": "scroll",
            "data": list(self.legend),
            "left": min(430, 20 + 7.5 * len(self.title)),
            "right": 60 if self.zoom else 10,
            "top": 2,
            "align": "left",
            "itemWidth": 14,
            "itemHeight": 8,
            "itemGap": 10,
            "textStyle": quiet | {"width": 190, "overflow": "truncate"},
            "pageIconSize": 10,
            "pageTextStyle": quiet,
        }

    def _y_axes(self, quiet: Spec) -> list[Spec]:
        rule = {"lineStyle": {"color": self.look.grid}}
        kind = "log" if self.log else "value"
        return [
            {"type": kind, "scale": True, "axisLabel": quiet, "splitLine": rule},
            MARK_AXIS,
        ]

    def _brush(self) -> Spec:
        title = {"lineX": "Zoom: press, then drag over the curves"}
        return {
            "brush": {
                "xAxisIndex": 0,
                "brushMode": "single",
                "throttleType": "debounce",
                "throttleDelay": 200,
                "outOfBrush": {"colorAlpha": 1},
            },
            "toolbox": {
                "right": 8,
                "top": 0,
                "itemSize": 13,
                "feature": {"brush": {"type": ["lineX"], "title": title}},
            },
        }


def x_axis(scale: Scale, extent: tuple[float, float] | None) -> Spec:
    """Return the axis along x, from one place to another where that is given."""
    axis: Spec = (
        {"type": "time"}
        if scale.axis == "time"
        else {"type": "value", "min": "dataMin", "max": "dataMax"}
    )
    if scale.axis == "step":
        # "step 265", not "265.00", above the tooltip
        axis |= {"axisPointer": {"label": {"precision": 0}}, "minInterval": 1}
    if extent is not None:
        axis |= {"min": extent[0], "max": extent[1]}
    return axis


def num_points(spec: Spec) -> int:
    """Return how many points and marks a chart carries to the browser."""
    return sum(len(series["data"]) for series in spec["series"])
