"""Questions with filters over runs, steps, ranks, decisions, findings, alerts and events."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, get_args

import pandas as pd
import streamlit as st

from trainvitals.errors import TransportError, UnauthorizedError, UsageError
from trainvitals.views import Branch, RunsQuestion, RunSummary, TableName, TableQuestion, TableReply
from vitals_dashboard import exports, formatting, layout, placeholders, tables
from vitals_dashboard.source import DataSource, guarded

TABLES: tuple[TableName, ...] = get_args(TableName)
ALL_RUNS = "all runs"
MAX_ROWS = 100_000
EXAMPLES: dict[TableName, str] = {
    "runs": "state = running\nnum_rollbacks > 0\nname ~ gpt",
    "steps": "loss > 3\nskipped = 1\ngrad_norm = nan",
    "ranks": "rank = 2\nstep_duration_seconds > 0.5",
    "decisions": "action = rollback\nacted = true\nreason ~ NaN",
    "findings": "kind = spike\nvalue > 5",
    "alerts": "state = firing\nseverity = page",
    "events": "kind = Note\ntext ~ disk",
}
"""Filters that make sense for each table; one a line, all must hold."""
OF_ONE_RUN = ("steps", "ranks")
BRANCHES: tuple[Branch, ...] = ("all", "lineage", "discarded")


def render() -> None:
    """Draw the query page; it queries when its form changes and, if selected, periodically."""
    layout.heading("Query")
    guarded(lambda source: _draw_once(lambda: _draw_page(source)))


def _draw_once(draw: Callable[[], None]) -> None:
    """Draw a part of the query page without periodic refreshes; a button retries."""
    try:
        draw()
    except UnauthorizedError:
        raise
    except TransportError as error:
        placeholders.collector_down(error, again=False)


def _draw_page(source: DataSource) -> None:
    """Draw the form of the query page, and below it the result."""
    runs = tables.sort_runs(source.client.ask(RunsQuestion()))
    if not runs:
        placeholders.no_runs()
        return
    request, live = _draw_question(runs)
    if request is None:
        return

    def ask(source: DataSource) -> None:
        if live:
            _query_and_draw(source, request)
        else:
            _draw_once(lambda: _query_and_draw(source, request))

    layout.draw_periodically(ask, live=live, key="query_body", every=layout.SLOW_SECONDS)


def _query_and_draw(source: DataSource, request: TableQuestion) -> None:
    """Send the query of the query page, and draw its result or the error in it."""
    try:
        reply = source.client.ask(request)
    except UsageError as error:
        placeholders.not_understood(error)
        return
    _draw_reply(request, reply)


def _draw_question(runs: list[RunSummary]) -> tuple[TableQuestion | None, bool]:
    """Draw the form of the query page; return the query, and whether it is periodic.

    The query is None, with a message, if a run has to be selected first.
    """
    names = {ALL_RUNS: ALL_RUNS} | {
        run.run_id: formatting.run_choice(run.name, run.run_id) for run in runs
    }
    with st.container(horizontal=True, vertical_alignment="bottom", key="query_controls"):
        name = layout.draw_choice("Table", TABLES, "table", default="steps")
        run_id = _run_choice(names)
        branch = _branch_choice() if name in OF_ONE_RUN else "all"
        steps = layout.step_range() if name != "runs" else (None, None)
        limit = st.number_input(
            "Maximum rows", min_value=1, max_value=MAX_ROWS, value=1_000, step=1_000,
            key="limit", bind="query-params", width=110,
        )  # fmt: skip
        with st.container(horizontal=True, width="content", key="query_order"):
            newest = st.toggle("Newest first", key="newest", bind="query-params")
            # Off: moving rows are hard to read, and most queries are about the past.
            live = layout.live_toggle(layout.SLOW_SECONDS, value=False)
    where, columns = _draw_condition_boxes(name)
    if run_id is None:
        placeholders.no_such_run(st.query_params.get("run") or "")
        return None, live
    if run_id == ALL_RUNS and name in OF_ONE_RUN:
        st.caption("Pick a run to query its steps or ranks.")
        return None, live
    request = TableQuestion(
        table=name,
        run_id="" if run_id == ALL_RUNS else run_id,
        where=where,
        columns=columns,
        branch=branch,
        from_step=steps[0],
        to_step=steps[1],
        newest_first=bool(newest),
        limit=int(limit),
    )
    return request, live


def _branch_choice() -> Branch:
    """Draw the query page's choice of branch: lineage, discarded or all."""
    selected = st.selectbox(
        "Branch", BRANCHES, key="branch", bind="query-params", width=120,
        help="all: a step that was trained again has one row per attempt. lineage: without"
        " discarded steps. discarded: only those.",
    )  # fmt: skip
    return selected if selected in BRANCHES else "all"


def _draw_condition_boxes(table: TableName) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Draw the query page's boxes of conditions and columns; return their values."""
    left, right = st.columns([3, 2])
    where = left.text_area(
        "Conditions, one a line; all must hold", key="where", bind="query-params", height=112,
        max_chars=4_000, placeholder=EXAMPLES[table],
        help="COLUMN OP VALUE. OP is one of = != < <= > >= and ~ (holds the text). `= none` finds"
        " what is missing, `= nan` what is NaN.",
    )  # fmt: skip
    columns = right.text_area(
        "Columns, by comma; empty: all", key="columns", bind="query-params", height=112,
        max_chars=4_000, placeholder="step, attempt, loss, grad_norm",
    )  # fmt: skip
    return (
        tuple(line.strip() for line in str(where or "").splitlines() if line.strip()),
        tuple(c for c in re.split(r"[\s,]+", str(columns or "")) if c),
    )


def _run_choice(names: dict[str, str]) -> str | None:
    """Draw the query page's choice of a run; return it, or None if the URL's is unknown."""
    before = st.session_state.get(layout.LAST_RUN)
    requested = st.query_params.get("run") or (before if before in names else ALL_RUNS)
    st.session_state["query_run"] = requested if requested in names else None

    def follow() -> None:
        st.query_params["run"] = st.session_state["query_run"]

    selected = st.selectbox(
        "Run", list(names), index=0 if requested in names else None, key="query_run",
        format_func=lambda k: names[k], on_change=follow, width=215, placeholder="Choose a run",
    )  # fmt: skip
    return None if selected is None else str(selected)


def _draw_reply(request: TableQuestion, reply: TableReply) -> None:
    """Draw the result of the query page: number of rows, downloads and table."""
    num = len(reply.data[0]) if reply.data else 0
    with st.container(horizontal=True, vertical_alignment="center", key="query_answer"):
        cut = "; raise the number of rows to see more" if num < reply.num_total else ""
        unseen = f"; {formatting.count(reply.num_discarded, 'rolled-back row')} left out"
        remark = cut + (unseen if reply.num_discarded else "")
        st.caption(f"{num:,} of {formatting.count(reply.num_total, 'row')} match{remark}")
        st.space("stretch")
        name = f"vitals_{request.table}{'_' + request.run_id if request.run_id else ''}"
        st.download_button(
            "CSV", lambda: exports.csv_bytes(reply), file_name=f"{name}.csv", mime="text/csv",
            icon=":material/download:", key="as_csv", on_click="ignore", disabled=not num,
        )  # fmt: skip
        st.download_button(
            "Parquet", lambda: exports.parquet_bytes(reply), file_name=f"{name}.parquet",
            mime="application/vnd.apache.parquet", icon=":material/download:", key="as_parquet",
            on_click="ignore", disabled=not num,
        )  # fmt: skip
    if not num:
        st.caption("No row matches all conditions.")
        return
    st.dataframe(
        as_frame(reply),
        key="answer",
        hide_index=True,
        placeholder="",
        height=min(38 + 35 * num, 620),
        column_config=column_formats(reply),
    )


def as_frame(reply: TableReply) -> pd.DataFrame:
    """Return a result as the query page shows it: strings as one line, times as dates."""
    return pd.DataFrame(
        {
            name: [_cell_value(name, value) for value in exports.unify_column_type(values)]
            for name, values in zip(reply.columns, reply.data, strict=True)
        }
    )


def _cell_value(name: str, value: Any) -> Any:
    """Return a cell of the query page: text as one line, a time as a date."""
    if isinstance(value, str):
        return formatting.plain(value, 500)
    if name.endswith("_unix_ns") and isinstance(value, int) and value > 0:
        return datetime.fromtimestamp(value / 1e9, tz=UTC)
    return value


def column_formats(reply: TableReply) -> dict[str, Any]:
    """Return the query page's column formats: Streamlit alone rounds 0.000212 to 0.0002."""
    return {
        name: _column_format(name, exports.unify_column_type(values))
        for name, values in zip(reply.columns, reply.data, strict=True)
    }


def _column_format(name: str, values: Sequence[Any]) -> Any:
    """Return how the query page formats one column: a time, a float, or other values."""
    if name.endswith("_unix_ns"):
        return st.column_config.DatetimeColumn(format="iso8601")
    if any(isinstance(value, float) for value in values):
        return st.column_config.NumberColumn(format="%.9g")
    return st.column_config.Column()
