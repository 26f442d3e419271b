"""Curves as plain data for the chart component: pure functions from the query API's replies.

What must be seen is always there: every bucket's minimum and maximum as the collector sent them,
a red mark for every non-finite step, a mark for every decision, a gap where there is no value.
Marks that are too close are one, which shows their number.
Names and reasons are only ever set as text in the browser.
"""

from vitals_dashboard.charts.chart import (
    Chart,
    difference_chart,
    groups_chart,
    runs_chart,
    step_chart,
    time_chart,
)
from vitals_dashboard.charts.lines import ChartLine, Role
from vitals_dashboard.charts.marks import (
    ChartMark,
    alert_marks,
    checkpoint_marks,
    decision_marks,
    note_marks,
)
from vitals_dashboard.charts.scale import (
    STEPS,
    Axis,
    StepScale,
    elapsed_scale,
    time_scale,
    token_scale,
    token_unit,
)

__all__ = [
    "STEPS",
    "Axis",
    "Chart",
    "ChartLine",
    "ChartMark",
    "Role",
    "StepScale",
    "alert_marks",
    "checkpoint_marks",
    "decision_marks",
    "difference_chart",
    "elapsed_scale",
    "groups_chart",
    "note_marks",
    "runs_chart",
    "step_chart",
    "time_chart",
    "time_scale",
    "token_scale",
    "token_unit",
]
