"""The fleet: every run with its state, health, verdict, curve, alerts; searched and grouped."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import streamlit as st

from trainvitals.errors import UsageError
from trainvitals.views import FailingNodesQuestion, RunsQuestion, RunSummary
from vitals_dashboard import formatting, layout, placeholders, search, tables, verdicts
from vitals_dashboard.charts.sparkline import sparkline
from vitals_dashboard.source import DataSource, configs_of, goodput_of, loss_curve, verdict_of
from vitals_dashboard.theme import HEALTH_BADGES, HEALTH_WORDS, LABELS, STATE_BADGES, STATE_WORDS

PAGE_SIZE = 25
"""Runs per page: each has a sparkline, which needs a query."""
PHONE_ROW = 92
"""Pixels: five lines."""
CURVE_STEPS = 50
"""A sparkline is queried again when its run has grown by 1/50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Filter, groups and order of the run list."""

    text: str
    group: str
    order: str


def render() -> None:
    """Draw the dashboard page with the list of runs."""
    layout.heading("Fleet")
    with st.container(horizontal=True, vertical_alignment="center", key="fleet_controls"):
        choice = _draw_controls()
        live = layout.live_toggle()
    layout.draw_periodically(
        lambda source: _draw_body(source, choice), live=live, key="overview_body"
    )


def _draw_controls() -> RunFilter:
    """Draw the search, groups and order of the fleet page, and return their values."""
    text = st.text_input(
        "Search",
        key="q",
        bind="query-params",
        placeholder="Search: words, or project:x user:y health:critical step>1000",
        label_visibility="collapsed",
        help=search.HELP,
        max_chars=400,
        icon=":material/search:",
    )
    group = layout.draw_group_choice("Group by", search.GROUPS, "group", "Group by")
    order = st.selectbox(
        "Order",
        list(tables.ORDERS),
        key="order",
        bind="query-params",
        label_visibility="collapsed",
        width=170,
    )
    return RunFilter(text=str(text or ""), group=group, order=str(order))


def _draw_body(source: DataSource, choice: RunFilter) -> None:
    everything = source.client.ask(RunsQuestion())
    if not everything:
        placeholders.no_runs()
        return
    _draw_totals(everything)
    try:
        query, by = search.parse_run_search(choice.text), search.check_group(choice.group)
    except UsageError as error:
        placeholders.not_understood(error)
        return
    configs: search.Configs = {}
    if query.needs_configs or by.startswith(search.CONFIG):
        configs = configs_of(source.client, source.client.url, len(everything))
    runs = tables.sort_runs(
        (run for run in everything if query.matches(run, configs.get(run.run_id, {}))), choice.order
    )
    groups = search.grouped(runs, by, configs) if by else [("", runs)]
    _draw_run_list(source, choice, groups, num_runs=len(runs), num_all=len(everything))
    _draw_failing_nodes(source)


def _draw_run_list(
    source: DataSource,
    choice: RunFilter,
    groups: Sequence[tuple[str, Sequence[RunSummary]]],
    *,
    num_runs: int,
    num_all: int,
) -> None:
    """Draw the fleet page's list of runs, by groups, with its pagination."""
    sizes = {value: len(members) for value, members in groups}
    rows = [(value, run) for value, members in groups for run in members]
    caption_column, pages = st.columns([3, 2], vertical_alignment="center")
    num_pages = max(1, -(-len(rows) // PAGE_SIZE))
    page = 1
    if num_pages > 1:
        with pages, st.container(horizontal=True, horizontal_alignment="right"):
            page = min(st.pagination(num_pages, key="p", bind="query-params"), num_pages)
    first = (page - 1) * PAGE_SIZE
    shown = rows[first : first + PAGE_SIZE]
    where = f"; {first + 1:,} to {first + len(shown):,} here" if num_pages > 1 else ""
    caption_column.caption(
        f"{num_runs:,} of {formatting.count(num_all, 'run')}{where}. Click a row to open the run; "
        "the address keeps search, groups and order."
    )
    if not shown:
        st.caption("No run matches. Clear part of the search above.")
    for number, (value, members) in enumerate(groupby(shown, key=lambda row: row[0])):
        if choice.group:
            with st.container(horizontal=True, key=f"group_{number}"):
                label = formatting.plain(f"{choice.group}: {value or 'none'}", 120)
                st.markdown("## Group")
                st.text(f"{label} ({formatting.count(sizes[value], 'run')})")
        _draw_run_table(source, [run for _, run in members], key=f"runs_{number}_{choice.group}")
    if shown:
        _draw_waiting(source, {run.run_id: run for _, run in shown}.values())


def _draw_waiting(source: DataSource, runs: Iterable[RunSummary]) -> None:
    """Draw on the fleet page what stragglers and hangs cost these runs.

    Queried when it is opened: the collector reads every step of each run for it.
    """
    with st.expander(
        "Cost of stragglers and hangs", key="open_waiting", on_change="rerun", bind="query-params"
    ) as part:
        if part.open:
            views = [(run, goodput_of(source, run)) for run in runs if run.last_step >= 0]
            empty = "No run above has waited for a straggler, or has hung."
            layout.draw_table(tables.waiting_rows(views), empty, key="waiting")
            st.caption("Time in which the other ranks waited, and the same on every rank's GPU.")


def _draw_failing_nodes(source: DataSource) -> None:
    """Draw on the fleet page the nodes that failed preflights; queried when it is opened."""
    with st.expander(
        "Nodes that failed preflights", key="open_nodes", on_change="rerun", bind="query-params"
    ) as part:
        if part.open:
            rows = tables.failing_node_rows(source.client.ask(FailingNodesQuestion()))
            empty = "No node failed repeatedly, in the folders that the collector reads."
            layout.draw_table(rows, empty, key="failing_nodes")
            st.caption("Do not train on them: `vitals preflight --failed-nodes --format exclude`")


def _draw_run_table(source: DataSource, runs: Sequence[RunSummary], *, key: str) -> None:
    """Draw a table of runs on the fleet page; a click opens a run."""
    judged = {run.run_id: verdict_of(source, run) for run in runs if _had_trouble(run)}
    rows = tables.run_rows(
        runs,
        now_unix_ns=source.clock.time_ns(),
        curves=_loss_sparklines(source, runs),
        verdicts={run.run_id: verdicts.headline(run, judged.get(run.run_id)) for run in runs},
        hung={run_id for run_id, of_run in judged.items() if of_run.verdict.is_hung},
    )
    column = st.column_config
    numbers = column.NumberColumn(format="localized", width=70)
    is_text = any(isinstance(row["Loss"], str) for row in rows)
    loss = column.TextColumn(width=70) if is_text else column.NumberColumn(format="%.4g", width=70)
    columns = {
        "Run": column.TextColumn(width="medium"),
        "State": _labels(STATE_WORDS, STATE_BADGES, width=115),
        "Health": _labels(HEALTH_WORDS, HEALTH_BADGES, width=105),
        "Verdict": column.TextColumn(width=420),
        "Alerts": column.NumberColumn(width=60),
        "Loss": loss,
        "Loss curve": column.ImageColumn(width=130, help="Red: the loss was NaN or infinite."),
        "Seen": column.TextColumn(width=90),
        "Step": numbers,
        "Skips": numbers,
        "Rollbacks": numbers,
        "Ranks": numbers,
    }
    # The style sheet shows one of the two: only the browser knows how wide it is.
    with st.container(key=f"wide_{key}"):
        selected = layout.draw_table(
            rows, "", key=key, height=38 + 35 * PAGE_SIZE, select=True, columns=columns
        )
    with st.container(key=f"narrow_{key}"):
        of_phone = layout.draw_table(
            tables.phone_rows(rows),
            "",
            key=f"{key}_narrow",
            height=38 + PHONE_ROW * PAGE_SIZE,
            select=True,
            columns={"Run": column.TextColumn(width=90), "Now": column.TextColumn(width=228)},
            row_height=PHONE_ROW,
        )
    selected = of_phone if selected is None else selected
    if selected is not None:
        st.switch_page(layout.RUN, query_params={"run": runs[selected].run_id})


def _labels(label_texts: Mapping[str, str], colours: Mapping[str, str], *, width: int) -> object:
    """Return the fleet page's column of labels: a name with its shape, on its color."""
    return st.column_config.MultiselectColumn(
        width=width,
        options=list(label_texts.values()),
        color=[LABELS[colours[name]] for name in label_texts],
    )


def _had_trouble(run: RunSummary) -> bool:
    """Return whether the fleet page has to query a run's verdict: it may have an incident."""
    acted = run.num_skips or run.num_rollbacks or run.num_firing_alerts or run.last_decision
    return bool(acted) or run.health != "healthy" or run.state in ("lost", "failed", "halted")


def _loss_sparklines(source: DataSource, runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return a small image of each run's loss curve for the fleet page."""
    curves, look = {}, layout.current_palette()
    for run in runs:
        grown = max(1, run.last_step // CURVE_STEPS)
        step = run.last_step if run.state != "running" else run.last_step - run.last_step % grown
        # A loss that just ceased to be finite, or a rollback, is seen at once.
        seen = (step, run.num_attempts, math.isfinite(run.loss or 0.0))
        reply = loss_curve(source.client, source.client.url, run.run_id, seen)
        curves[run.run_id] = sparkline(reply, look)
    return curves


_IN_TROUBLE = ("acting", "critical", "unguarded")


def _draw_totals(runs: Sequence[RunSummary]) -> None:
    """Draw the totals over all runs at the top of the fleet page."""
    values = (
        ("Runs", len(runs)),
        ("Running", sum(run.state == "running" for run in runs)),
        ("Acting or critical", sum(run.health in _IN_TROUBLE for run in runs)),
        ("Lost or failed", sum(run.state in ("lost", "failed") for run in runs)),
        ("Firing alerts", sum(run.num_firing_alerts for run in runs)),
        ("Steps skipped", sum(run.num_skips for run in runs)),
        ("Rollbacks", sum(run.num_rollbacks for run in runs)),
    )
    with st.container(horizontal=True, key="fleet_totals", gap="small"):  # wraps on a phone
        for label, value in values:
            st.metric(label, f"{value:,}", border=True)
