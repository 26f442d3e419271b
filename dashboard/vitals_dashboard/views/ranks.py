"""Ranks, GPUs and nodes by steps as heat heatmap_page, and the stragglers by name."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.detect.registry import kinds_about
from trainvitals.views import FindingsQuestion, RunDetail, RunQuestion, RunSummary
from vitals_dashboard import formatting, heatmap_page, layout, stragglers, tables
from vitals_dashboard.charts import heatmap
from vitals_dashboard.heatmap_page import MetricChoice
from vitals_dashboard.source import DataSource

CHOICES = (
    MetricChoice("step time", "steps.step_duration_seconds", "Step time of each rank"),
    MetricChoice("loss", "steps.rank_loss", "Loss of each rank"),
    MetricChoice("memory", "steps.memory_peak_bytes", "Peak memory of each rank"),
    MetricChoice("data wait", "steps.data_wait_seconds", "Wait for data of each rank"),
    MetricChoice("communication", "steps.communication_seconds", "Communication of each rank"),
    MetricChoice(
        "gradient wait",
        "steps.gradient_wait_seconds",
        "Wait for the others' gradients of each rank",
    ),
    MetricChoice("temperature", "gpu.temperature_celsius", "Temperature of each GPU"),
    MetricChoice("power", "gpu.power_watts", "Power of each GPU"),
    MetricChoice("host memory", "node.memory_used_bytes", "Memory of each node"),
)
WAITS = ("steps.gradient_wait_seconds", "steps.communication_seconds")
"""Metrics of how long a rank waits for the others, the best first."""
LAST_STEPS = 200
"""Steps in which stragglers are named: one column per step, so that no peak hides a rank's pace."""
ABOUT_MACHINES = kinds_about("machine")


def render() -> None:
    """Draw the dashboard page of a run's ranks, GPUs and nodes."""
    layout.heading("Ranks and nodes")
    layout.run_page(_draw_body, key="ranks_body")


def _draw_body(source: DataSource, run: RunSummary) -> None:
    detail = source.client.ask(RunQuestion(run_id=run.run_id))
    waits = next((metric for metric in WAITS if metric in detail.metrics), "")
    choices = [choice for choice in CHOICES if choice.metric != waits]
    if waits:
        title = "Wait of each rank for the others; the rank that waits least is the slow one"
        choices.insert(1, MetricChoice("wait for others", waits, title))
    shown, shade, steps = heatmap_page.draw_heat_map_controls(choices, key="ranks", shade="value")
    _draw_stragglers(source, run, detail, steps, waits)
    if shown.metric == waits:
        _waited_for(source, run, steps, waits)
    reply = heatmap_page.query_cells(source, run, shown.metric, steps)
    if reply is None:
        st.caption(_missing_metric_reason(shown))
    else:
        names = row_names(reply.rows, detail)
        heatmap_page.draw_heat_map(
            source, run, shown.title, reply, shade=shade, key="ranks", names=names
        )
    _draw_findings(source, run)
    _draw_sources(source, detail)


def _missing_metric_reason(choice: MetricChoice) -> str:
    """Return the sentence that the ranks page shows if a metric was not measured."""
    if choice.metric.startswith(("gpu.", "node.")):
        return "No agent has reported this for the run; without an agent only ranks report."
    return "No rank measured this in these steps."


def row_names(rows: Sequence[str], detail: RunDetail) -> list[str]:
    """Return the names of a heat map's rows on the ranks page, such as ``rank 3, node-b``."""
    nodes = stragglers.nodes_of(detail)
    return [
        ", ".join(part for part in (row.replace(":", " ", 1), nodes.get(row, "")) if part)
        if not row.startswith("node:")
        else row.replace(":", " ", 1)
        for row in rows
    ]


def _draw_stragglers(
    source: DataSource,
    run: RunSummary,
    detail: RunDetail,
    steps: tuple[int | None, int | None],
    waits: str,
) -> None:
    """Draw the ranks page's box about stragglers in the latest of the selected steps."""
    last = run.last_step if steps[1] is None else steps[1]
    span = (max(steps[0] or 0, last - LAST_STEPS + 1), last)
    metrics = ["steps.step_duration_seconds", *([waits] if waits else [])]
    reply, *waited = (
        # With two attempts, a cell would have the slower one.
        heatmap_page.query_cells(source, run, metric, span, points=LAST_STEPS, branch="lineage")
        for metric in metrics
    )
    with st.container(border=True, key="prose_stragglers", gap="xsmall"):
        if reply is None:
            st.text("No step time was measured here, so no straggler can be named.")
            return
        cells, part = heatmap.cells_of(reply), "steps"
        for wait in waited:
            if wait is not None and (wait.rows, wait.step) == (reply.rows, reply.step):
                # The all-reduce makes step times equal: only the rank's own part tells.
                cells, part = cells - heatmap.cells_of(wait), "steps, without waits for others"
        for line in stragglers.straggler_sentences(
            stragglers.summarize_stragglers(cells, reply.rows, detail)
        ):
            st.text(formatting.sentence(line, 300))
        st.caption(f"Medians of the {part}, {span[0]:,} to {span[1]:,}.")


def _waited_for(
    source: DataSource, run: RunSummary, steps: tuple[int | None, int | None], metric: str
) -> None:
    """Draw the ranks page's sentence about the blocking rank in the drawn steps."""
    reply = heatmap_page.query_cells(
        source, run, metric, steps, points=LAST_STEPS, branch="lineage"
    )
    if reply is not None:
        sentence = stragglers.blocking_rank_sentence(
            heatmap.cells_of(reply), reply.rows, reply.step
        )
        st.text(formatting.sentence(sentence, 300))


def _draw_findings(source: DataSource, run: RunSummary) -> None:
    """Draw the table of findings about ranks and nodes on the ranks page."""
    findings = [
        view
        for view in source.client.ask(FindingsQuestion(run_id=run.run_id))
        if view.finding.kind in ABOUT_MACHINES
    ]
    st.markdown(f"## Rank and node findings ({len(findings):,})")
    layout.draw_table(
        tables.finding_rows(findings), "Rank and node findings: none.", key="rank_findings"
    )


def _draw_sources(source: DataSource, detail: RunDetail) -> None:
    """Draw the table of reporting processes on the ranks page."""
    st.markdown(f"## Reporting processes ({len(detail.sources):,})")
    layout.draw_table(
        tables.source_rows(detail.sources, now_unix_ns=source.clock.time_ns()),
        "No process has reported yet.",
        key="sources",
    )
