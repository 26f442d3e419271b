"""All runs at a glance: state, health, step, loss, what was done about them."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.views import RunSummary
from vitals_dashboard import frame, states, tables, words
from vitals_dashboard.look import BLUE, STATE_WORDS
from vitals_dashboard.source import Source, loss_curve

RUN_PAGE = "vitals_page_run.py"
MAX_CURVES = 30
"""Sparklines drawn: each is a question to the collector. The newest runs have one."""


def render() -> None:
    """Draw the page."""
    left, middle, right = st.columns([5, 3, 1], vertical_alignment="center")
    text = left.text_input(
        "Search",
        key="q",
        bind="query-params",
        placeholder="Search name, project, user, tag or id",
        label_visibility="collapsed",
        max_chars=200,
    )
    state = middle.selectbox(
        "State",
        list(STATE_WORDS),
        index=None,
        key="state",
        bind="query-params",
        placeholder="Any state",
        label_visibility="collapsed",
    )
    with right:
        live = frame.live_toggle()
    frame.refreshing(
        lambda source: _body(source, str(text or ""), state), live=live, key="overview_body"
    )


def _body(source: Source, text: str, state: str | None) -> None:
    everything = source.client.runs()
    if not everything:
        states.no_runs()
        return
    _totals(everything)
    runs = tables.matching(everything, text, state)
    st.caption(
        f"{len(runs):,} of {words.count(len(everything), 'run')}, newest first;"
        " select one to open it"
    )
    curves = {
        run.run_id: loss_curve(source.client, source.client.url, run.run_id, run.last_step)
        for run in runs[:MAX_CURVES]
    }
    rows = tables.run_rows(runs, now_unix_ns=source.clock.time_ns(), curves=curves)
    picked = st.dataframe(
        rows,
        key="runs",
        hide_index=True,
        placeholder="",
        height=min(38 + 35 * max(len(rows), 1), 700),
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "Run": st.column_config.TextColumn(width="medium", pinned=True),
            "Loss": st.column_config.NumberColumn(format="%.4g"),
            "Step": st.column_config.NumberColumn(format="localized"),
            "Loss curve": st.column_config.LineChartColumn(width="small", color=BLUE),
            "Last decision": st.column_config.TextColumn(width=320),
            "Started": st.column_config.DatetimeColumn(format="distance"),
        },
    )
    chosen = picked.selection.rows
    if chosen and chosen[0] < len(runs):
        st.switch_page(RUN_PAGE, query_params={"run": runs[chosen[0]].run_id})


def _totals(runs: Sequence[RunSummary]) -> None:
    values = (
        ("Running", sum(run.state == "running" for run in runs)),
        ("Acting or critical", sum(run.health in ("acting", "critical") for run in runs)),
        ("Firing alerts", sum(run.num_firing_alerts for run in runs)),
        ("Steps skipped", sum(run.num_skips for run in runs)),
        ("Rollbacks", sum(run.num_rollbacks for run in runs)),
    )
    for column, (label, value) in zip(st.columns(len(values)), values, strict=True):
        column.metric(label, f"{value:,}", border=True)
