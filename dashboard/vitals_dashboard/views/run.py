"""One run, live: its curves with every decision drawn on them, the ledger, the checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from trainvitals.policy.hindsight import tally
from trainvitals.views import DecisionView, RunDetail, RunSummary
from vitals_dashboard import frame, states, tables, words
from vitals_dashboard.look import (
    HEALTH_BADGES,
    HEALTH_WORDS,
    STATE_BADGES,
    STATE_WORDS,
)
from vitals_dashboard.source import Source
from vitals_dashboard.views import curves

WINDOWS = {"all steps": 0, "last 5000": 5_000, "last 1000": 1_000, "last 200": 200}
"""Words, in the address too, to the number of last steps; 0 is all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """What the person at the page has chosen."""

    live: bool
    window: int
    log_loss: bool
    discarded: bool


def render() -> None:
    """Draw the page."""
    controls = _controls()
    frame.refreshing(lambda source: _body(source, controls), live=controls.live, key="run_body")


def _controls() -> Controls:
    with st.container(horizontal=True, vertical_alignment="center", key="run_controls"):
        window = st.segmented_control(
            "Steps",
            list(WINDOWS),
            default="all steps",
            required=True,
            key="window",
            bind="query-params",
            label_visibility="collapsed",
        )
        log_loss = st.toggle("Log loss", key="log", bind="query-params")
        discarded = st.toggle(
            "Rolled-back branches",
            value=True,
            key="discarded",
            bind="query-params",
            help="Steps that a rollback left behind, drawn faint.",
        )
        st.space("stretch")
        live = frame.live_toggle()
    return Controls(
        live=live,
        window=WINDOWS.get(str(window), 0),
        log_loss=bool(log_loss),
        discarded=bool(discarded),
    )


def _body(source: Source, controls: Controls) -> None:
    runs = tables.matching(source.client.runs(), "", None)
    if not runs:
        states.no_runs()
        return
    head, choice = st.columns([3, 1], vertical_alignment="top")
    with choice:
        run_id = _choose(runs)
    if run_id is None:
        return
    detail = source.client.run(run_id)
    decisions = source.client.decisions(run_id)
    with head:
        _head(detail, source.clock.time_ns())
    _numbers(source, detail)
    view = curves.View(
        source=source,
        detail=detail,
        decisions=decisions,
        look=frame.present_palette(),
        from_step=max(0, detail.summary.last_step - controls.window) if controls.window else None,
        log_loss=controls.log_loss,
        discarded=controls.discarded,
    )
    curves.draw(view)
    _below(source, detail, decisions)


def _choose(runs: Sequence[RunSummary]) -> str | None:
    """Draw the choice of a run; return its id, or None where the address names an unknown one."""
    ids = [run.run_id for run in runs]
    by_id = {run.run_id: run for run in runs}
    asked = st.query_params.get("run", ids[0])
    if asked in by_id:
        # The address leads: it changes when someone comes from the overview or by a link.
        st.session_state["picked_run"] = asked

    def label(run_id: str) -> str:
        name = words.run_label(by_id[run_id].name, run_id, 60)
        return f"{name}  ({run_id[-6:]}, {by_id[run_id].state})"

    def follow() -> None:
        st.query_params["run"] = st.session_state["picked_run"]

    chosen = st.selectbox(
        "Run",
        ids,
        index=None if asked not in by_id else ids.index(asked),
        key="picked_run",
        format_func=label,
        on_change=follow,
        label_visibility="collapsed",
        placeholder="Choose a run",
    )
    if chosen is None:
        states.no_such_run(asked)
        return None
    return str(chosen)


def _head(detail: RunDetail, now_unix_ns: int) -> None:
    summary, info = detail.summary, detail.info
    with st.container(horizontal=True, vertical_alignment="center", key="run_head", gap="small"):
        with st.container(key="run_title", width="content"):
            st.text(words.run_label(summary.name, summary.run_id, 160))
        st.badge(STATE_WORDS[summary.state], color=STATE_BADGES[summary.state])  # type: ignore[arg-type]
        st.badge(HEALTH_WORDS[summary.health], color=HEALTH_BADGES[summary.health])  # type: ignore[arg-type]
        if summary.num_firing_alerts:
            st.badge(words.count(summary.num_firing_alerts, "firing alert"), color="red")
    facts = (
        summary.run_id,
        words.plain(summary.project, 60),
        words.plain(summary.user, 40),
        f"mode {words.plain(summary.mode, 20)}",
        words.count(summary.world_size, "rank"),
        f"{words.number(info.num_params / 1e6, 3)} M parameters" if info.num_params else "",
        f"started {words.age(summary.started_unix_ns, now_unix_ns)} ago",
        f"last seen {words.age(summary.last_seen_unix_ns, now_unix_ns)} ago",
        words.plain(", ".join(summary.tags), 120),
    )
    with st.container(key="run_facts"):
        st.text("  |  ".join(fact for fact in facts if fact))


def _numbers(source: Source, detail: RunDetail) -> None:
    summary = detail.summary
    last = curves.last_values(source, detail)
    delta = last.loss_delta
    cells: tuple[tuple[str, str], ...] = (
        ("Step", f"{summary.last_step:,}"),
        ("Grad norm", words.number(summary.grad_norm)),
        ("Learning rate", words.number(last.learning_rate, 3)),
        ("Tokens/s", words.number(last.tokens_per_second, 3)),
        ("MFU", "n/a" if last.mfu is None else f"{last.mfu * 100:.1f} %"),
        ("Skips", f"{summary.num_skips:,}"),
        ("Rollbacks", f"{summary.num_rollbacks:,}"),
    )
    columns = st.columns([1.5] + [1] * len(cells))
    columns[0].metric(
        "Loss",
        words.number(summary.loss),
        delta=None if delta is None else f"{delta:+.3g}",
        delta_color="inverse",
        delta_description=f"in {last.delta_steps} steps" if delta is not None else None,
        border=True,
        height="stretch",
    )
    for column, (label, value) in zip(columns[1:], cells, strict=True):
        column.metric(label, value, border=True, height="stretch")


def _below(source: Source, detail: RunDetail, decisions: Sequence[DecisionView]) -> None:
    st.markdown(f"**Decisions** ({len(decisions):,})")
    if shadow := tally(view.hindsight or None for view in decisions):
        st.caption(f"Of what was only observed, {shadow}.")
    _table(tables.decision_rows(decisions), "No decision was needed so far.", key="decisions")
    left, right = st.columns(2)
    with left:
        checkpoints = source.client.checkpoints(detail.summary.run_id)
        st.markdown(f"**Checkpoints and snapshots** ({len(checkpoints):,})")
        _table(tables.checkpoint_rows(checkpoints), "None yet.", key="checkpoints")
    with right:
        st.markdown(f"**Attempts** ({len(detail.attempts):,})")
        _table(tables.attempt_rows(detail.attempts), "None yet.", key="attempts")


def _table(rows: list[tables.Row], empty: str, *, key: str) -> None:
    if not rows:
        st.caption(empty)
        return
    numbers = st.column_config.NumberColumn(format="localized")
    time = st.column_config.DatetimeColumn(format="distance")
    st.dataframe(
        rows,
        key=key,
        hide_index=True,
        placeholder="",
        height=min(38 + 35 * len(rows), 330),
        column_config={
            "Step": numbers,
            "Back to": numbers,
            "Reason": st.column_config.TextColumn(width="large"),
            "When": time,
            "Started": time,
        },
    )
