"""Incidents: the verdict on one screen, then its evidence: curves, layers, ranks and data."""

from collections.abc import Sequence

import streamlit as st
from msgspec.structs import replace

from trainvitals.records import SEVERITY_WORDS
from trainvitals.views import (
    IncidentsQuestion,
    IncidentView,
    RunDetail,
    RunQuestion,
    RunSummary,
    SeriesRequest,
)
from vitals_dashboard import (
    charts,
    commands,
    formatting,
    hangs,
    heatmap_page,
    layout,
    tables,
    verdicts,
)
from vitals_dashboard.feed import draw_charts, load_charts
from vitals_dashboard.source import DataSource, series_of
from vitals_dashboard.theme import SEVERITY_BADGES
from vitals_dashboard.views.layers import movers
from vitals_dashboard.views.ranks import row_names

BEFORE, AFTER = 100, 100
"""Steps drawn on each side."""
CURVES = (
    ("steps.loss", "Loss", False),
    ("steps.grad_norm", "Gradient norm (log)", True),
    ("steps.learning_rate", "Learning rate", False),
    ("steps.tokens_per_second", "Tokens per second", False),
)
HEIGHT = 165


def render() -> None:
    """Draw the dashboard page of one incident of a run."""
    layout.heading("Incidents")
    load_charts()
    layout.run_page(_draw_body, key="incident_body")


def _draw_body(source: DataSource, run: RunSummary) -> None:
    every = source.client.ask(IncidentsQuestion(run_id=run.run_id))
    if not every:
        st.caption(
            "No incidents. One begins with the first finding that leads to an action or an alert."
        )
        return
    selected = _select_incident(every)
    _draw_incident_summary(run, selected, source.clock.time_ns())
    healthy = commands.acceptable_step(selected)
    if healthy is not None:
        commands.draw_accept_form(source, run, healthy, key=f"accept_{selected.incident_id}")
    _choice(run, every)
    st.markdown("## Evidence")
    detail = source.client.ask(RunQuestion(run_id=run.run_id))
    steps = (max(0, selected.onset_step - BEFORE), selected.last_step + AFTER)
    left, right = st.columns([6, 5])
    with left:
        _draw_story(selected)
    with right:
        _draw_curves(source, detail, selected, steps)
    hangs.draw_hang(source, selected)
    _draw_tables(selected, run)
    _draw_heat_maps(source, run, detail, steps)
    movers(source, run, selected.onset_step)


def _select_incident(every: Sequence[IncidentView]) -> IncidentView:
    """Return the incident in the page's URL; otherwise the latest open one, or the latest."""
    requested = st.query_params.get("incident")
    selected = next((incident for incident in every if incident.incident_id == requested), None)
    if selected is None and requested:
        st.caption("This run has no such incident; showing the newest.")
    open_now = (incident for incident in every if incident.is_open)
    return selected or next(open_now, every[0])


def _choice(run: RunSummary, every: Sequence[IncidentView]) -> None:
    """Draw the incident page's list of all incidents, if several: a click selects one."""
    if len(every) == 1:
        return
    st.markdown(f"## All incidents ({len(every):,})")
    picked = layout.draw_table(
        tables.incident_rows(every), "", key=f"incidents_{run.run_id}_{len(every)}", height=220,
        select=True,
    )  # fmt: skip
    if picked is not None and every[picked].incident_id != st.query_params.get("incident"):
        st.query_params["incident"] = every[picked].incident_id
        st.rerun()


def _draw_incident_summary(run: RunSummary, incident: IncidentView, now_unix_ns: int) -> None:
    """Draw the main facts at the top of an incident's page, on one screen."""
    with st.container(border=True, key="incident_summary", gap="small"):
        with st.container(horizontal=True, vertical_alignment="center", key="incident_head"):
            with st.container(key="incident_title", width="content"):
                st.text(formatting.plain(incident.title, 200))
            word, color = SEVERITY_WORDS[incident.severity], SEVERITY_BADGES[incident.severity]
            st.badge(word, color=color)  # type: ignore[arg-type]
            verdicts.draw_state_badge(incident)
            st.space("stretch")
            verdicts.ticket_of(run, incident)
            st.page_link(
                layout.RUN,
                label="Curves around it",
                icon=":material/zoom_in:",
                query_params=layout.curves_query_params(
                    run.run_id, incident.onset_step, incident.last_step
                ),
            )
        with st.container(key="facts_incident"):
            st.text(_facts_line(incident, now_unix_ns))
        left, right = st.columns([6, 5])
        with left:
            verdicts.draw_verdict_panel(incident.verdict)
        with right:
            st.markdown("## Timeline")
            verdicts.draw_verdict_timeline(incident.verdict)


def _draw_story(incident: IncidentView) -> None:
    """Draw the paragraphs of the story on an incident's page."""
    with st.container(border=True, key="prose_story", gap="small"):
        for paragraph in incident.story:
            st.text(formatting.sentence(paragraph, 2_000))


def _facts_line(incident: IncidentView, now_unix_ns: int) -> str:
    """Return the line at the top of an incident's page: steps, start and numbers of parts."""
    began = tables.to_datetime(incident.started_unix_ns)
    date = "" if began is None else f"{began:%Y-%m-%d}, "
    first, last = incident.onset_step, incident.last_step
    facts = (
        f"step {first:,}" if first == last else f"steps {first:,} to {last:,}",
        f"began {date}{formatting.age(incident.started_unix_ns, now_unix_ns)} ago",
        formatting.count(len(incident.findings), "finding"),
        formatting.count(len(incident.decisions), "action"),
        formatting.count(len(incident.alerts), "alert"),
    )
    return "  |  ".join(fact for fact in facts if fact)


def _draw_heat_maps(
    source: DataSource, run: RunSummary, detail: RunDetail, steps: tuple[int, int]
) -> None:
    """Draw the heat maps of layers and ranks next to each other on an incident's page."""
    left, right = st.columns(2)
    with left:
        _draw_heat_map(
            source, run, "layers.grad_norm", "Gradient norm of each layer", steps, key="layers"
        )
    with right:
        _draw_heat_map(
            source, run, "steps.step_duration_seconds", "Step time of each rank", steps,
            key="ranks", detail=detail,
        )  # fmt: skip


def _draw_curves(
    source: DataSource, detail: RunDetail, incident: IncidentView, steps: tuple[int, int]
) -> None:
    """Draw the curves around the steps of an incident on its page."""
    drawn = [
        charts.step_chart(
            title,
            lines,
            decisions=incident.decisions,
            others=charts.alert_marks(incident.alerts),
            extent=steps,
            log=log,
            show_unit=False,
            height=HEIGHT,
        )
        for metric, title, log in CURVES
        if (lines := _query_metric_lines(source, detail, metric, steps))
    ]
    draw_charts("incident", lambda _: drawn, of=(detail.summary.run_id, incident.incident_id))


def _query_metric_lines(
    source: DataSource, detail: RunDetail, metric: str, steps: tuple[int, int]
) -> list[charts.ChartLine]:
    """Query a curve of an incident's page, with its limit and its discarded parts."""
    series_request = SeriesRequest(metric=metric, from_step=steps[0], to_step=steps[1])
    requested: list[tuple[str, charts.Role, SeriesRequest]] = [
        (metric.removeprefix("steps."), "main", series_request),
        ("limit", "limit", replace(series_request, metric=f"{metric}_limit")),
    ]
    if len(detail.attempts) > 1:
        requested.append(("rolled back", "discarded", replace(series_request, branch="discarded")))
    replies = series_of(source, detail, [request for _, _, request in requested])
    return [
        charts.ChartLine(name=name, reply=reply, role=role)
        for (name, role, _), reply in zip(requested, replies, strict=True)
        if reply is not None
    ]


def _draw_heat_map(
    source: DataSource,
    run: RunSummary,
    metric: str,
    title: str,
    steps: tuple[int, int],
    *,
    key: str,
    detail: RunDetail | None = None,
) -> None:
    """Draw one heat map on an incident's page, or that the metric was not measured."""
    reply = heatmap_page.query_cells(source, run, metric, steps)
    if reply is None:
        st.caption(f"{title}: not measured in these steps.")
        return
    names: Sequence[str] = row_names(reply.rows, detail) if detail else ()
    shade = heatmap_page.SHADES["change"]
    heatmap_page.draw_heat_map(
        source, run, title, reply, shade=shade, key=f"incident_{key}", names=names
    )


def _draw_tables(incident: IncidentView, run: RunSummary) -> None:
    """Draw the tables on an incident's page: actions, findings, alerts, events and data."""
    parts = (
        ("Actions", tables.decision_rows(incident.decisions), "Vitals took no action."),
        ("Findings", tables.finding_rows(incident.findings), "No findings."),
        ("Alerts", tables.alert_rows(incident.alerts, {run.run_id: run.name}), "No alerts."),
        (
            "GPU, node and other events",
            tables.event_rows(incident.events),
            "No other events in these steps.",
        ),
        (
            "Batches and samples of the bad steps",
            tables.step_data_rows(incident.data),
            "No batches recorded: wrap the loader in `monitor.batches`.",
        ),
    )
    for number, (title, rows, empty) in enumerate(parts):
        st.markdown(f"### {title} ({len(rows):,})")
        layout.draw_table(rows, empty, key=f"incident_table_{number}", height=260)
