"""One run, live: curves with every decision, the decision log, the checkpoints."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import streamlit as st

from trainvitals.hindsight import summarize_outcomes
from trainvitals.io.client import CollectorClient
from trainvitals.units import humanize_count
from trainvitals.views import (
    AlertsQuestion,
    AlertView,
    AnnotationsQuestion,
    AnnotationView,
    CheckpointsQuestion,
    CheckpointView,
    DecisionsQuestion,
    DecisionView,
    EventsQuestion,
    EventView,
    GoodputQuestion,
    RunDetail,
    RunQuestion,
)
from vitals_dashboard import charts, commands, formatting, layout, tables, verdicts
from vitals_dashboard.feed import MAX_POINTS, ChartFeed, draw_charts, load_charts
from vitals_dashboard.source import (
    DataSource,
    event_cache_key,
    forecast_of,
    query_in_threads,
    verdict_of,
)
from vitals_dashboard.views import controls, curves, machines
from vitals_dashboard.views.controls import ChartControls

WIDE_NUMBER, NUMBER = 165, 118
"""Pixels."""
REST_SECONDS = 30.0
"""Interval of redrawing the whole page without an event or note in the run: it has new checkpoints,
and other users may have written notes."""


def render() -> None:
    """Draw the dashboard page of one run: verdict, curves and tables."""
    layout.heading("Run")
    load_charts()
    with st.container(horizontal=True, vertical_alignment="center", key="run_bar"):
        layout.run_links()
        st.space("stretch")
        options = controls.draw_chart_controls()
    live = layout.is_page_live(layout.run_ids_from_url(), live=options.live)
    layout.page_with_live_part(lambda source: _draw_page(source, options, live))


def _draw_page(source: DataSource, options: ChartControls, live: bool) -> None:
    """Draw the run page: the part that refreshes itself, then its tools and tables."""
    controls.has_zoomed()  # and they did follow, because the whole page is redrawn
    run = layout.draw_run_choice(source)
    if run is None:
        return
    with query_in_threads() as ask:
        happened = ask(lambda: _query_run_events(source, run.run_id))
        detail = source.client.ask(RunQuestion(run_id=run.run_id, volume=False))
        seen = happened.result()
    shown = _LivePart(options, detail, seen, _own_metrics(detail))
    layout.draw_live_part(
        lambda: shown.draw(source, detail), shown.redraw, live=live, key="run_live"
    )
    _draw_curve_tools(source, detail, seen.decisions)
    # Results of the probe and of evaluations, for a run with any problem.
    readings: Sequence[EventView] = ()
    if seen.decisions:
        readings = source.client.ask(EventsQuestion(run_id=run.run_id, kind="StateRead"))
    _draw_run_tables(detail, seen.decisions, seen.checkpoints, readings)
    _draw_goodput(source, detail)


class _LivePart:
    """Parts that change with each step: the verdict, the curves, the numbers.

    The rest of the page is redrawn after an event, otherwise occasionally: a browser takes longer
    for it than for new points of curves.
    """

    def __init__(
        self,
        options: ChartControls,
        detail: RunDetail,
        happened: "_RunEvents",
        extra_metrics: Sequence[str],
    ) -> None:
        self._chosen, self._happened, self._own = options, happened, extra_metrics
        self._run = detail.summary
        self._until = time.monotonic() + REST_SECONDS

    def draw(self, source: DataSource, detail: RunDetail) -> None:
        """Draw the verdict, the curves and the numbers of a run's page."""
        verdict = st.container(key="run_verdict")
        # The curves matter most: nothing else is queried until the browser has them.
        with st.container(key="run_charts"):
            _draw_run_charts(
                _build_chart_context(source, detail, self._chosen, self._happened), self._own
            )
        with verdict:
            verdicts.draw_verdict_strip(
                detail.summary, verdict_of(source, detail.summary, is_exact=True)
            )
        _draw_metrics(detail, curves.last_values(source, detail))
        _draw_facts(detail, source.clock.time_ns())

    def redraw(self, source: DataSource) -> bool:
        """Draw the live part of the run page again unless outdated; return whether it did."""
        if controls.has_zoomed() or time.monotonic() > self._until:
            return False
        detail = source.client.ask(RunQuestion(run_id=self._run.run_id, volume=False))
        if event_cache_key(detail.summary) != event_cache_key(self._run):
            return False
        self.draw(source, detail)
        return True


class _RunEvents(NamedTuple):
    """Decisions, checkpoints, alerts and notes of a run, drawn as marks."""

    decisions: Sequence[DecisionView]
    checkpoints: Sequence[CheckpointView]
    alerts: Sequence[AlertView]
    notes: Sequence[AnnotationView]


def _query_run_events(source: DataSource, run_id: str) -> _RunEvents:
    """Query what the run page marks on its curves: decisions, checkpoints, alerts, notes."""
    return _RunEvents(
        source.client.ask(DecisionsQuestion(run_id=run_id)),
        source.client.ask(CheckpointsQuestion(run_id=run_id)),
        source.client.ask(AlertsQuestion(run_id=run_id)),
        source.client.ask(AnnotationsQuestion(run_id=run_id)),
    )


def _build_chart_context(
    source: DataSource, detail: RunDetail, options: ChartControls, happened: _RunEvents
) -> curves.ChartContext:
    """Build the subject of the run page's charts, with all events at their x positions."""
    view = curves.ChartContext(source=source, detail=detail, controls=options)
    scale = curves.query_step_scale(view)
    if scale is None:
        st.caption(f"This run has no {options.axis} to draw along; steps are shown.")
        scale = charts.STEPS
    others = [
        *charts.alert_marks(happened.alerts, scale),
        *charts.checkpoint_marks(happened.checkpoints, scale),
        *charts.note_marks(happened.notes, scale),
    ]
    marks = charts.decision_marks(happened.decisions, scale)
    return replace(view, scale=scale, decisions=marks, others=others)


def _draw_run_charts(view: curves.ChartContext, extra_metrics: Sequence[str]) -> None:
    """Draw the curves of the run page, with the charts of its machines below."""
    notes: list[str] = []

    def make(feed: ChartFeed) -> list[charts.Chart]:
        fed = replace(view, feed=feed)
        of_run, loss = curves.build_charts(fed, extra_metrics)
        strip, missing = machines.build_machine_charts(fed, loss)
        notes[:] = [missing] if of_run else [curves.no_curve_reason(fed), missing]
        return [*of_run, *strip]

    def zoomed(axis: str, ends: tuple[float, float] | None) -> None:
        if axis == view.scale.axis:
            controls.apply_zoom(view.scale, ends)

    attempts = tuple(attempt.id for attempt in view.detail.attempts)
    num_left_out = draw_charts(
        "run", make, of=(view.run_id, attempts, view.controls, tuple(extra_metrics)), zoomed=zoomed
    )
    if num_left_out:
        notes.append(
            f"{formatting.count(num_left_out, 'chart')} did not fit (at most {MAX_POINTS:,}"
            " points): choose fewer metrics."
        )
    if text := " ".join(note for note in notes if note):
        st.caption(text)


def _draw_curve_tools(
    source: DataSource, detail: RunDetail, decisions: Sequence[DecisionView]
) -> None:
    """Draw the run page's choices of steps and metrics below the curves, and its note form."""
    where, what, note = st.columns([3, 5, 1], vertical_alignment="bottom")
    with where:
        controls.around(decisions)
    with what:
        _draw_metric_choice(detail)
    with note:
        if source.control is not None:
            _draw_note_form(source.control, detail)


def _optional_metrics(detail: RunDetail) -> list[str]:
    """Return the metrics that the run page draws only if a user selects them."""
    drawn = {metric for chart in curves.charts_of_task(detail) for _, metric in chart.lines}
    metrics = [m for m in detail.metrics if m.startswith("scalars.") and m not in drawn]
    return metrics + [m for m in detail.metrics if m.startswith("steps.") and m not in curves.DRAWN]


def _own_metrics(detail: RunDetail) -> list[str]:
    """Return the metrics that the user selected below the curves of the run page."""
    # Metrics in the URL that this run lacks are omitted, not an error.
    metrics = _optional_metrics(detail)
    requested = [m for m in st.query_params.get_all("also") if m in metrics][: curves.MAX_OWN]
    if "also" not in st.session_state or detail.summary.run_id != st.session_state.get("also_of"):
        st.session_state["also"] = requested
        st.session_state["also_of"] = detail.summary.run_id
    return [m for m in st.session_state["also"] if m in metrics]


def _draw_metric_choice(detail: RunDetail) -> None:
    def follow() -> None:
        st.query_params["also"] = st.session_state["also"]

    if metrics := _optional_metrics(detail):
        st.multiselect(
            "More metrics",
            metrics,
            key="also",
            on_change=follow,
            max_selections=curves.MAX_OWN,
            placeholder=f"Draw more metrics: {len(metrics):,} more are recorded",
            label_visibility="collapsed",
        )


def _draw_note_form(control: CollectorClient, detail: RunDetail) -> None:
    """Draw the form on the run page in which a user writes a note at a step."""
    with (
        st.popover("Note", icon=":material/edit_note:", key="note_open"),
        st.form(key="note_form", border=False, enter_to_submit=False),
    ):
        last = max(0, detail.summary.last_step)
        step = st.number_input("At step", min_value=0, value=last, step=1, key="note_step")
        text = st.text_input("Note", max_chars=300, key="note_text")
        by = st.text_input("Who", value=layout.current_user(), max_chars=80, key="note_by")
        message: str | None = None
        if st.form_submit_button("Add the note", type="primary"):
            if not text.strip():
                message = "A note needs a text."
            else:
                message = commands.write_user_note(
                    control, detail.summary, int(step), text.strip(), by.strip()
                )
                message = message or f"The note is on the curves, at step {step:,}."
        layout.draw_form_result(f"note_{detail.summary.run_id}", message)
    if message is not None:
        st.rerun()  # the curves above are drawn already


def _draw_facts(detail: RunDetail, now_unix_ns: int) -> None:
    summary, info = detail.summary, detail.info
    facts = (
        summary.run_id,
        formatting.plain(summary.project, 60),
        formatting.plain(summary.user, 40),
        f"mode {formatting.plain(summary.mode, 20)}",
        formatting.count(summary.world_size, "rank"),
        _format_num_params(info.num_params),
        f"started {formatting.age(summary.started_unix_ns, now_unix_ns)} ago",
        f"last seen {formatting.age(summary.last_seen_unix_ns, now_unix_ns)} ago",
        formatting.plain(", ".join(summary.tags), 120),
    )
    with st.container(key="run_facts"):
        st.text("  |  ".join(fact for fact in facts if fact))


def _format_num_params(num_params: int) -> str:
    """Return a model's number of parameters as the run page shows it."""
    if not num_params or num_params < 1e5:
        return formatting.count(num_params, "parameter") if num_params else ""
    return f"{formatting.number(num_params / 1e6, 3)} M parameters"


def _draw_metrics(detail: RunDetail, last: curves.LastValues) -> None:
    """Draw the numbers of the run page: step, gradient norm, loss and so on."""
    summary = detail.summary
    delta = last.loss_delta
    cells: tuple[tuple[str, str], ...] = (
        ("Step", f"{summary.last_step:,}" if summary.last_step >= 0 else "\N{EN DASH}"),
        ("Grad norm", formatting.number(summary.grad_norm)),
        ("Learning rate", formatting.number(last.learning_rate, 3)),
        ("Tokens/s", formatting.rate(last.tokens_per_second)),
        ("MFU", "n/a" if last.mfu is None else f"{last.mfu * 100:.1f} %"),
        ("Skips", f"{summary.num_skips:,}"),
        ("Rollbacks", f"{summary.num_rollbacks:,}"),
    )
    with st.container(horizontal=True, key="run_numbers", gap="small"):  # wraps on a narrow screen
        if last.quantities:  # the loss of a post-training run says little
            quantities = [(name, formatting.number(value)) for name, value in last.quantities]
            for label, value in (*quantities, *cells, ("Loss", formatting.number(summary.loss))):
                st.metric(label, value, border=True, height="stretch", width=NUMBER)
            return
        st.metric(
            "Loss",
            formatting.number(summary.loss),
            delta=None if delta is None else f"{delta:+.3g}",
            delta_color="inverse",
            delta_description=None
            if delta is None
            else f"in {humanize_count(last.delta_steps, 'step')}",
            border=True,
            width=WIDE_NUMBER,
        )
        for label, value in cells:
            st.metric(label, value, border=True, height="stretch", width=NUMBER)


def _forecast_text(source: DataSource, detail: RunDetail) -> str:
    """Return the run page's forecast of end and loss, if the run declared its length."""
    if not detail.info.total_steps:
        return ""
    view = forecast_of(source, detail.summary)
    end = f"Ends {view.end_text()}" if view.finish_unix_ns else f"End {view.end_text()}"
    return f"{end}  |  Final loss {view.loss_text()}"


def _draw_run_tables(
    detail: RunDetail,
    decisions: Sequence[DecisionView],
    checkpoints: Sequence[CheckpointView],
    readings: Sequence[EventView],
) -> None:
    """Draw the tables of the run page; each opens by a click, as a browser needs long for one."""
    parts: tuple[tuple[str, Sequence[Any], Callable[[Any], list[tables.Row]], str], ...] = (
        ("Decisions", decisions, tables.decision_rows, "Vitals took no action."),
        ("Probe and evaluation results", readings, tables.event_rows, ""),
        ("Checkpoints and snapshots", checkpoints, tables.checkpoint_rows, "None yet."),
        ("Attempts", detail.attempts, tables.attempt_rows, "None yet."),
    )
    for title, found, rows_of, empty in parts:
        if not (found or empty):
            continue
        key, label = title.split()[0].lower(), f"{title} ({len(found):,})"
        with st.expander(label, key=f"open_{key}", on_change="rerun", bind="query-params") as part:
            if part.open:
                layout.draw_table(rows_of(found), empty, key=key)
                if title == "Decisions" and (
                    shadow := summarize_outcomes(v.hindsight or None for v in found)
                ):
                    st.caption(f"Observed decisions: {shadow}.")


def _draw_goodput(source: DataSource, detail: RunDetail) -> None:
    """Draw the use of a run's wall time on its page, with cost and forecast.

    Queried when it is opened: the collector reads every step of the run for it.
    """
    with st.expander(
        "Where the time went", key="open_goodput", on_change="rerun", bind="query-params"
    ) as part:
        if part.open:
            view = source.client.ask(GoodputQuestion(run_id=detail.summary.run_id))
            if foreseen := _forecast_text(source, detail):
                st.text(foreseen)
            st.text(f"Goodput {formatting.share(view.ratio)}")
            layout.draw_table(
                tables.goodput_rows(view), "No process has reported yet.", key="goodput"
            )
            st.caption("  |  ".join(f"{name}: {text}" for name, text in view.cost()))
            for note in view.notes:
                st.caption(note)
