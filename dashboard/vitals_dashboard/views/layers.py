"""Layers by steps as a heat map, and which layers and ranks moved most before a step."""

import streamlit as st

from trainvitals.views import MoversQuestion, RunDetail, RunQuestion, RunSummary
from vitals_dashboard import heatmap_page, layout, tables
from vitals_dashboard.heatmap_page import MetricChoice
from vitals_dashboard.source import DataSource

CHOICES = (
    MetricChoice("grad norm", "layers.grad_norm", "Gradient norm of each layer"),
    MetricChoice("update ratio", "layers.update_ratio", "Update to weight of each layer"),
    MetricChoice("weight norm", "layers.weight_norm", "Weight norm of each layer"),
    MetricChoice("activation", "layers.activation_rms", "Activation (RMS) of each module"),
    MetricChoice(
        "largest activation", "layers.activation_max", "Largest activation of each module"
    ),
    MetricChoice("dead features", "layers.activation_dead_ratio", "Dead features of each module"),
)


def render() -> None:
    """Draw the dashboard page of a run's layers."""
    layout.heading("Layers")
    layout.run_page(_draw_body, key="layers_body")


def _draw_body(source: DataSource, run: RunSummary) -> None:
    detail = source.client.ask(RunQuestion(run_id=run.run_id))
    choice, shade, steps = heatmap_page.draw_heat_map_controls(
        CHOICES, key="layers", shade="change"
    )
    reply = heatmap_page.query_cells(source, run, choice.metric, steps)
    if reply is None:
        st.caption(_missing_metric_reason(detail, choice))
    else:
        heatmap_page.draw_heat_map(source, run, choice.title, reply, shade=shade, key="layers")
    movers(source, run, steps[1])


def _missing_metric_reason(detail: RunDetail, choice: MetricChoice) -> str:
    """Return the sentence that the layers page shows if a metric was not measured."""
    if not any(metric.startswith("layers.") for metric in detail.metrics):
        return "No layer metrics in this run yet. Layer norms are measured every 10th step."
    if choice.metric == "layers.grad_norm":
        return "No layer metrics in these steps: they are measured every 10th step."
    return (
        "This run does not measure it. Norms of weights, updates and activations are opt-in: see"
        " `SignalSettings`."
    )


def movers(source: DataSource, run: RunSummary, step: int | None) -> None:
    """Draw on the layers page the largest changes up to ``step``, or to the last step."""
    at = run.last_step if step is None else step
    if at < 0:
        return
    moved = source.client.ask(MoversQuestion(run_id=run.run_id, step=at))
    st.markdown(f"## Largest changes up to step {at:,}")
    st.caption(
        "In robust standard deviations (sigma) from its own earlier median; set To step above."
    )
    layout.draw_table(
        tables.mover_rows(moved),
        "Nothing unusual, or no measurements there.",
        key="movers",
        columns={"Sigma": st.column_config.NumberColumn(format="%.1f")},
    )
