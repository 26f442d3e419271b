"""Curves as ECharts options: pure functions from the query API's replies to a dictionary.

What must be seen is always there: every bucket's minimum and maximum as the collector sent them,
a red mark for every non-finite step, a mark for every decision, a gap where there is no value.
Names and reasons become tooltip values, titles and legend texts only, which ECharts shows as plain
text.
"""

from vitals_dashboard.charts.chart_base import num_points
from vitals_dashboard.charts.lines import Line, Role, Spec
from vitals_dashboard.charts.marks import (
    ChartMark,
    alert_marks,
    checkpoint_marks,
    decision_marks,
    note_marks,
)
from vitals_dashboard.charts.runs import (
    DIFFERENCE_HEIGHT,
    RUNS_HEIGHT,
    difference_chart,
    runs_chart,
)
from vitals_dashboard.charts.scale import STEPS, Axis, Scale, time_scale, token_scale, token_unit
from vitals_dashboard.charts.steps import Legend, step_chart, time_chart

__all__ = [
    "DIFFERENCE_HEIGHT",
    "RUNS_HEIGHT",
    "STEPS",
    "Axis",
    "ChartMark",
    "Legend",
    "Line",
    "Role",
    "Scale",
    "Spec",
    "alert_marks",
    "checkpoint_marks",
    "decision_marks",
    "difference_chart",
    "note_marks",
    "num_points",
    "runs_chart",
    "step_chart",
    "time_chart",
    "time_scale",
    "token_scale",
    "token_unit",
]
