"""The fleet: every run with its state, health, curve, alerts, and what was done about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from trainvitals.views import RunsQuestion, RunSummary
from vitals_dashboard import formatting, layout, states, tables
from vitals_dashboard.charts.sparkline import sparkline
from vitals_dashboard.source import Source, loss_curve
from vitals_dashboard.theme import HEALTH_WORDS, STATE_WORDS

PAGE_SIZE = 25
"""Runs on a page: each has a sparkline, and that is a question to the collector."""
CURVE_STEPS = 50
"""A sparkline is asked for again when its run has grown by one part in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs are to be seen, and in which order."""

    text: str
    state: str | None
    health: str | None
    order: str


def render() -> None:
    """Draw the page."""
    with st.container(horizontal=True, vertical_alignment="center", key="fleet_controls"):
        filters = _controls()
        live = layout.live_toggle()
    layout.refreshing(lambda source: _body(source, filters), live=live, key="overview_body")


def _controls() -> RunFilter:
    text = st.text_input(
        "Search",
        key="q",
        bind="query-params",
        placeholder="Search name, project, user, tag or id",
        label_visibility="collapsed",
        max_chars=200,
        icon=":material/search:",
    )
    state = st.selectbox(
        "State",
        list(STATE_WORDS),
        index=None,
        key="state",
        bind="query-params",
        placeholder="Any state",
        label_visibility="collapsed",
        width=150,
    )
    health = st.selectbox(
        "Health",
        list(HEALTH_WORDS),
        index=None,
        key="health",
        bind="query-params",
        placeholder="Any health",
        label_visibility="collapsed",
        width=150,
    )
    order = st.selectbox(
        "Order",
        list(tables.ORDERS),
        key="order",
        bind="query-params",
        label_visibility="collapsed",
        width=170,
    )
    return RunFilter(text=str(text or ""), state=state, health=health, order=str(order))


def _body(source: Source, filters: RunFilter) -> None:
    everything = source.client.ask(RunsQuestion())
    if not everything:
        states.no_runs()
        return
    _totals(everything)
    runs = tables.matching(everything, filters.text, filters.state, filters.health, filters.order)
    caption_column, pages = st.columns([3, 2], vertical_alignment="center")
    num_pages = max(1, -(-len(runs) // PAGE_SIZE))
    page = 1
    if num_pages > 1:
        with pages, st.container(horizontal=True, horizontal_alignment="right"):
            page = min(st.pagination(num_pages, key="p", bind="query-params"), num_pages)
    first = (page - 1) * PAGE_SIZE
    shown = runs[first : first + PAGE_SIZE]
    where = f"; {first + 1:,} to {first + len(shown):,} here" if num_pages > 1 else ""
    caption_column.caption(
        f"{len(runs):,} of {formatting.count(len(everything), 'run')}{where}; select one to open it"
    )
    _list(source, shown)


def _list(source: Source, runs: Sequence[RunSummary]) -> None:
    rows = tables.run_rows(runs, now_unix_ns=source.clock.time_ns(), curves=_curves(source, runs))
    numbers = st.column_config.NumberColumn(format="localized", width=70)
    is_text = any(isinstance(row["Loss"], str) for row in rows)
    column = st.column_config
    loss = column.TextColumn(width=70) if is_text else column.NumberColumn(format="%.4g", width=70)
    chosen = layout.table(
        rows,
        "No run matches. Clear part of the search above.",
        key="runs",
        height=38 + 35 * PAGE_SIZE,
        select=True,
        columns={
            "Run": st.column_config.TextColumn(width="medium"),
            "State": st.column_config.TextColumn(width=105),
            "Health": st.column_config.TextColumn(width=95),
            "Alerts": st.column_config.NumberColumn(width=60),
            "Loss": loss,
            "Loss curve": st.column_config.ImageColumn(
                width=130, help="Red: the loss was NaN or infinite."
            ),
            "Seen": st.column_config.TextColumn(width=90),
            "Last decision": st.column_config.TextColumn(width=330),
            "Step": numbers,
            "Skips": numbers,
            "Rollbacks": numbers,
            "Ranks": numbers,
        },
    )
    if chosen is not None:
        st.switch_page(layout.RUN, query_params={"run": runs[chosen].run_id})


def _curves(source: Source, runs: Sequence[RunSummary]) -> dict[str, str]:
    curves, look = {}, layout.present_palette()
    for run in runs:
        grown = max(1, run.last_step // CURVE_STEPS)
        step = run.last_step if run.state != "running" else run.last_step - run.last_step % grown
        # A loss that just ceased to be finite, or a rollback, is seen at once.
        seen = (step, run.num_attempts, math.isfinite(run.loss or 0.0))
        reply = loss_curve(source.client, source.client.url, run.run_id, seen)
        curves[run.run_id] = sparkline(reply, look)
    return curves


def _totals(runs: Sequence[RunSummary]) -> None:
    values = (
        ("Runs", len(runs)),
        ("Running", sum(run.state == "running" for run in runs)),
        ("Acting or critical", sum(run.health in ("acting", "critical") for run in runs)),
        ("Lost or failed", sum(run.state in ("lost", "failed") for run in runs)),
        ("Firing alerts", sum(run.num_firing_alerts for run in runs)),
        ("Steps skipped", sum(run.num_skips for run in runs)),
        ("Rollbacks", sum(run.num_rollbacks for run in runs)),
    )
    for column, (label, value) in zip(st.columns(len(values)), values, strict=True):
        column.metric(label, f"{value:,}", border=True)
