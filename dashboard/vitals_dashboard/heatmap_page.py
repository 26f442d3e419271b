"""Shared code of the two pages with heat maps: metrics, and drawing."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import streamlit as st

from trainvitals.errors import UsageError
from trainvitals.views import Branch, CellsQuestion, CellsReply, DecisionsQuestion, RunSummary
from vitals_dashboard import formatting, layout
from vitals_dashboard.charts import heatmap
from vitals_dashboard.source import DataSource

POINTS, ROWS = 160, 64
SHADES: dict[str, heatmap.Shade] = {"value": "size", "change": "change", "vs. others": "others"}
"""Labels, also used in the URL, of the color's meanings."""


class MetricChoice(NamedTuple):
    """One metric that can be drawn."""

    word: str
    metric: str
    title: str


def query_cells(
    source: DataSource,
    run: RunSummary,
    metric: str,
    steps: tuple[int | None, int | None],
    *,
    points: int = POINTS,
    branch: Branch = "all",
) -> CellsReply | None:
    """Query a heat map's cells for a page; None if the run has no such value in these steps."""
    try:
        reply = source.client.ask(
            CellsQuestion(
                run_id=run.run_id,
                metric=metric,
                points=points,
                rows=ROWS,
                branch=branch,
                from_step=steps[0],
                to_step=steps[1],
            )
        )
    except UsageError:
        return None  # this run never measured it
    return reply if reply.rows and reply.step else None


def draw_heat_map_controls(
    choices: Sequence[MetricChoice], *, key: str, shade: str
) -> tuple[MetricChoice, heatmap.Shade, tuple[int | None, int | None]]:
    """Draw, on each page with a heat map, the choice of metric, color and steps; return it."""
    by_word = {choice.word: choice for choice in choices}
    with st.container(horizontal=True, vertical_alignment="bottom", key=f"{key}_controls"):
        word = layout.draw_choice("Shown", list(by_word), f"{key}_metric")
        colour = layout.draw_choice(
            "Colour",
            list(SHADES),
            f"{key}_colour",
            default=shade,
            help="value: as it is. change: against the median of the row's own steps. vs. others:"
            " against the median of all rows at that step. Blue is below, orange above.",
        )
        steps = layout.step_range()
    return by_word[word], SHADES[colour], steps


def draw_heat_map(
    source: DataSource,
    run: RunSummary,
    title: str,
    reply: CellsReply,
    *,
    shade: heatmap.Shade,
    key: str,
    names: Sequence[str] = (),
) -> None:
    """Draw a heat map for any page that has one, and show below it what it omits."""
    spec = heatmap.heat_map(
        title,
        reply,
        shade=shade,
        look=layout.current_palette(),
        decisions=source.client.ask(DecisionsQuestion(run_id=run.run_id)),
        names=names,
    )
    rows_height = heatmap.AROUND + heatmap.ROW_PIXELS * len(reply.rows)
    height = max(heatmap.MIN_HEIGHT, min(heatmap.MAX_HEIGHT, rows_height))
    st.echarts_chart(spec, key=f"heat_{key}", height=height, alt=f"{title} over steps")
    st.caption(" ".join(_notes(reply)))


def _notes(reply: CellsReply) -> list[str]:
    """Return the sentences that the dashboard shows below a heat map: what it omits or combines."""
    apart = sorted(b - a for a, b in pairwise(reply.step))
    width = apart[len(apart) // 2] if apart else 1  # bad steps are measured more densely
    num_rows = formatting.count(len(reply.rows), "row")
    notes = [f"{num_rows}, {formatting.count(len(reply.step), 'column')}."]
    if reply.num_rows > len(reply.rows):
        notes[0] = f"The {len(reply.rows)} most unusual of {reply.num_rows:,} rows."
    if width > 1:
        notes.append(
            f"A column is about {width:,} steps; each cell shows the most unusual value of its "
            "steps."
        )
    if reply.rolled_back is not None:
        notes.append(
            "Some steps from {:,} to {:,} were rolled back: cells there show the most unusual value"
            " of all attempts.".format(*reply.rolled_back)
        )
    if reply.nonfinite:
        notes.append(
            f"{formatting.count(len(reply.nonfinite), 'cell')} with NaN or infinity (red crosses)."
        )
    if num_rolled_back := len(reply.nonfinite_rolled_back):
        notes.append(f"{num_rolled_back:,} of them only in rolled-back steps (small crosses).")
    return notes
