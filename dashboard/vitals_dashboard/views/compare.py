"""Compares two to six runs: their curves, differences, and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import streamlit as st
from msgspec import structs

from trainvitals.errors import UsageError
from trainvitals.views import (
    Along,
    DifferenceReply,
    RunDetail,
    RunQuestion,
    RunsQuestion,
    RunSummary,
    SeriesRequest,
)
from vitals_dashboard import charts, compare, formatting, layout, placeholders, search, tables
from vitals_dashboard.charts import ChartLine
from vitals_dashboard.feed import draw_charts, load_charts
from vitals_dashboard.source import POINTS, DataSource, query_differences, series_of

MAX_RUNS = 6
DEFAULT_METRIC = "steps.loss"
ALONG: tuple[Along, ...] = get_args(Along)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareControls:
    """Selections of the user."""

    axis: Along
    smoothing: float
    log: bool
    group: str
    """What runs of a group have in common; empty: each run has its own curve."""


def render() -> None:
    """Draw the dashboard page that compares runs."""
    layout.heading("Compare")
    load_charts()
    with st.container(horizontal=True, vertical_alignment="center", key="compare_controls"):
        axis = layout.draw_choice("Aligned by", ALONG, "along", label_visibility="collapsed")
        smoothing = st.slider(
            "Smoothing",
            0.0,
            0.99,
            0.0,
            0.01,
            key="smooth",
            bind="query-params",
            width=150,
            format="smoothing %.2f",
            label_visibility="collapsed",
        )
        log = st.toggle("Log", key="log", bind="query-params")
        group = layout.draw_group_choice("Mean of runs by", search.GROUPS, "mean_by", "Mean by")
        st.space("stretch")
        live = layout.live_toggle()
    options = CompareControls(
        axis=axis,
        smoothing=float(smoothing),
        log=bool(log),
        group=group,
    )
    layout.draw_runs_periodically(
        lambda source: _draw_body(source, options), _requested_runs(), live=live, key="compare_body"
    )


def _draw_body(source: DataSource, options: CompareControls) -> None:
    runs = tables.sort_runs(source.client.ask(RunsQuestion()))
    if not runs:
        placeholders.no_runs()
        return
    ids = _draw_run_multiselect(runs)
    if len(ids) < 2:
        st.caption(f"Choose two to {MAX_RUNS} runs; the others are compared with the first.")
        return
    try:
        search.check_group(options.group)
    except UsageError as error:
        placeholders.not_understood(error)
        return
    details = [source.client.ask(RunQuestion(run_id=run_id)) for run_id in ids]
    layout.stop_refreshes_if_ended([detail.summary for detail in details])
    names = compare.distinct_names(details)
    metric = _draw_metric_choice(details)
    if metric is None:
        st.caption("None of these runs has recorded a metric yet.")
        return
    lines = _query_run_lines(source, details, names, metric, options)
    if options.group:
        groups = _group_run_lines(options.group, dict(zip(names, details, strict=True)), lines)
        chart = charts.groups_chart(metric, groups, log=options.log)
        draw_charts("compare", lambda _: [chart], of=(metric, options))
    else:
        _draw_runs(source, details, names, lines, metric, options)
    _draw_table("Last values", compare.value_rows(source, details, names, metric), "compare_values")
    differing = compare.config_rows(details, names)
    if differing:
        _draw_table("Different settings", differing, "compare_config")
    else:
        st.caption("These runs have the same recorded settings.")


def _draw_runs(
    source: DataSource,
    details: Sequence[RunDetail],
    names: Sequence[str],
    lines: Sequence[ChartLine],
    metric: str,
    options: CompareControls,
) -> None:
    """Draw the curves on the compare page, and the differences to the first run."""
    replies: list[DifferenceReply] = []
    if len(lines) > 1 and lines[0].name == names[0]:
        by_name = dict(zip(names, details, strict=True))
        drawn = [by_name[line.name] for line in lines]
        replies = query_differences(source, drawn, metric, options.axis)
    means = _query_smoothed_lines(
        source, dict(zip(names, details, strict=True)), lines, metric, options
    )
    _draw_curves(lines, means, replies, metric, options)


def _requested_runs() -> list[str]:
    """Return the ids of runs in the compare page's URL."""
    return [i for part in st.query_params.get_all("runs") for i in part.split(",") if i]


def _draw_run_multiselect(runs: Sequence[RunSummary]) -> list[str]:
    """Draw the choice of runs, kept in the URL as ``runs=ID&runs=ID``; return their ids."""
    by_id = {run.run_id: run for run in runs}
    requested = _requested_runs()
    compared = [run_id for run_id in dict.fromkeys(requested) if run_id in by_id][:MAX_RUNS]
    if missing := [run_id for run_id in requested if run_id not in by_id]:
        st.text(f"Not here: {formatting.plain(', '.join(missing), 120)}")
    st.session_state["compared"] = compared

    def follow() -> None:
        st.query_params["runs"] = st.session_state["compared"]

    return st.multiselect(
        "Runs",
        list(by_id),
        key="compared",
        format_func=lambda run_id: formatting.run_choice(by_id[run_id].name, run_id),
        on_change=follow,
        max_selections=MAX_RUNS,
        label_visibility="collapsed",
        placeholder="Choose two to six runs",
    )


def _draw_metric_choice(details: Sequence[RunDetail]) -> str | None:
    """Draw the compare page's choice of a metric that some run has; the URL leads."""
    metrics = sorted({m for detail in details for m in detail.metrics if compare.has_steps(m)})
    if not metrics:
        return None
    first = DEFAULT_METRIC if DEFAULT_METRIC in metrics else metrics[0]
    requested = st.query_params.get("metric", first)
    st.session_state["compared_metric"] = requested if requested in metrics else first

    def follow() -> None:
        st.query_params["metric"] = st.session_state["compared_metric"]

    selected = st.selectbox(
        "Metric", metrics, key="compared_metric", on_change=follow, label_visibility="collapsed"
    )
    return str(selected)


def _query_run_lines(
    source: DataSource,
    details: Sequence[RunDetail],
    names: Sequence[str],
    metric: str,
    options: CompareControls,
) -> list[ChartLine]:
    """Query the compare page's curves, each on the steps, tokens or time of its run."""
    request = SeriesRequest(metric=metric, points=POINTS)
    if options.group:
        request = structs.replace(request, mean=True, smoothing=options.smoothing)
    replies = {
        name: series_of(source, detail, [request])[0]
        for detail, name in zip(details, names, strict=True)
    }
    lines = [
        ChartLine(name=name, reply=reply) for name, reply in replies.items() if reply is not None
    ]
    _say_missing([n for n in names if replies[n] is None], f"no {formatting.plain(metric, 60)}")
    if options.axis == "tokens":
        return _scale_to_tokens(source, details, names, lines)
    if options.axis == "time":
        return [replace(line, scale=charts.elapsed_scale(line.reply)) for line in lines]
    return lines


def _group_run_lines(
    by: str, details: Mapping[str, RunDetail], lines: Sequence[ChartLine]
) -> list[tuple[str, list[ChartLine]]]:
    """Group the compare page's curves by an equal value, with its name and number of runs.

    ``details`` and ``lines`` have the same names of runs.
    """
    line_of = {details[line.name].summary.run_id: line for line in lines}
    runs = [details[line.name].summary for line in lines]
    configs = {detail.summary.run_id: detail.info.config for detail in details.values()}
    return [
        (
            f"{by}: {value or 'none'} ({formatting.count(len(members), 'run')})",
            [line_of[run.run_id] for run in members],
        )
        for value, members in search.grouped(runs, by, configs)
    ]


def _scale_to_tokens(
    source: DataSource,
    details: Sequence[RunDetail],
    names: Sequence[str],
    lines: Sequence[ChartLine],
) -> list[ChartLine]:
    """Place the compare page's curves along tokens; list runs that did not count them."""
    by_name = dict(zip(names, details, strict=True))
    request = SeriesRequest(metric="steps.tokens_seen", points=POINTS // 2)
    counted = {
        line.name: reply
        for line in lines
        if (reply := series_of(source, by_name[line.name], [request])[0])
    }
    most = max((v for r in counted.values() for v in r.value if v is not None), default=0.0)
    scaled: list[ChartLine] = []
    for line in lines:
        if line.name in counted:
            scale = charts.token_scale(counted[line.name], unit=charts.token_unit(most))
            scaled.append(replace(line, scale=scale))
    _say_missing([line.name for line in lines if line.name not in counted], "no tokens to draw by")
    return scaled


def _query_smoothed_lines(
    source: DataSource,
    by_name: Mapping[str, RunDetail],
    lines: Sequence[ChartLine],
    metric: str,
    options: CompareControls,
) -> list[ChartLine]:
    """Query the compare page's smoothed curves, if the user has turned smoothing on."""
    if not options.smoothing:
        return []
    request = SeriesRequest(metric=metric, points=POINTS, smoothing=options.smoothing)
    return [
        replace(line, name=f"{line.name}, smoothed", reply=reply, role="mean")
        for line in lines
        if (reply := series_of(source, by_name[line.name], [request])[0]) is not None
    ]


def _say_missing(names: Sequence[str], what: str) -> None:
    """Show on the compare page which runs have no curve, and why."""
    if names:
        st.text(f"Left out ({what}): {', '.join(names)}")


def _draw_curves(
    lines: Sequence[ChartLine],
    means: Sequence[ChartLine],
    replies: Sequence[DifferenceReply],
    metric: str,
    options: CompareControls,
) -> None:
    """Draw the charts of the compare page: curves with means, then differences."""
    if not lines:
        return
    drawn = [charts.runs_chart(metric, [*lines, *means], log=options.log)]
    if replies:
        title = f"{metric}: difference to the first run"
        drawn.append(charts.difference_chart(title, lines, replies))
    draw_charts("compare", lambda _: drawn, of=(metric, options))


def _draw_table(title: str, rows: list[tables.Row], key: str) -> None:
    """Draw a table with its title on the compare page."""
    st.markdown(f"## {title}")
    st.dataframe(
        rows, key=key, hide_index=True, placeholder="", height=min(38 + 35 * len(rows), 520)
    )
