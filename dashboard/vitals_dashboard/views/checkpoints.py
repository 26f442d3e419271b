"""Checkpoints and snapshots: their state, and the target of a rollback."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.policy.actions import newest_healthy
from trainvitals.policy.state import CheckpointRef
from trainvitals.views import (
    CheckpointsQuestion,
    CheckpointView,
    RunDetail,
    RunQuestion,
    RunSummary,
)
from vitals_dashboard import commands, formatting, layout, tables
from vitals_dashboard.source import DataSource
from vitals_dashboard.theme import CHECKPOINT_WORDS


def render() -> None:
    """Draw the dashboard page of a run's checkpoints."""
    layout.heading("Checkpoints")
    layout.run_page(_draw_body, key="checkpoints_body")


def _draw_body(source: DataSource, run: RunSummary) -> None:
    every = source.client.ask(CheckpointsQuestion(run_id=run.run_id))
    if not every:
        st.caption(
            "No checkpoint or snapshot yet. Snapshots in memory come with mode 'heal', those on"
            " disk with `checkpoints=` in watch()."
        )
        return
    is_running = run.state == "running"
    # Snapshots in memory were lost with the processes.
    there = [checkpoint for checkpoint in every if is_running or checkpoint.where == "disk"]
    _draw_totals(there)
    target = rollback_target(there)
    if is_running:
        _draw_rollback_option(
            source, run, source.client.ask(RunQuestion(run_id=run.run_id)), target
        )
    else:
        _draw_rollback_target(target)
    with st.container(horizontal=True, key="checkpoint_controls"):
        state = st.selectbox(
            "State", list(CHECKPOINT_WORDS), index=None, key="worth", bind="query-params",
            placeholder="Any state", label_visibility="collapsed", width=170,
        )  # fmt: skip
        where = st.selectbox(
            "Where", ["memory", "disk"], index=None, key="where", bind="query-params",
            placeholder="Anywhere", label_visibility="collapsed", width=170,
        )  # fmt: skip
    shown = [c for c in every if state in (None, c.state) and where in (None, c.where)]
    back = "; select one to roll back to it" if is_running and source.control is not None else ""
    st.caption(f"{len(shown):,} of {len(every):,} checkpoints and snapshots{back}.")
    rows = tables.checkpoint_rows(shown)
    newest = sorted(shown, key=lambda c: c.time_unix_ns, reverse=True)
    for row, checkpoint in zip(rows, newest, strict=True):
        row["Next"] = "\N{LEFTWARDS ARROW} rollback" if is_running and checkpoint == target else ""
    picked = layout.draw_table(
        rows,
        "No checkpoint matches.",
        key=f"checkpoints_{len(every)}_{len(shown)}",
        height=520,
        select=True,
    )
    if picked is not None:
        _draw_checkpoint(source, run, newest[picked])


def rollback_target(every: Sequence[CheckpointView]) -> CheckpointView | None:
    """Return the checkpoint that the page shows as the policy's target of a rollback."""
    newest = newest_healthy(
        [
            CheckpointRef(
                id=c.checkpoint_id,
                step=c.step,
                attempt=c.attempt,
                state=c.state,  # type: ignore[arg-type]
                where=c.where,  # type: ignore[arg-type]
            )
            for c in every
        ]
    )
    if newest is None:
        return None
    return next(c for c in every if (c.checkpoint_id, c.where) == (newest.id, newest.where))


def _draw_totals(every: Sequence[CheckpointView]) -> None:
    """Draw the numbers at the top of the checkpoints page: by state, and sizes."""
    stored = [c for c in every if c.state not in ("retired", "bad")]
    memory, disk = (sum(c.num_bytes for c in stored if c.where == w) for w in ("memory", "disk"))
    values = (
        ("Healthy", f"{sum(c.state == 'healthy' for c in every):,}"),
        # A healthy one was verified before: it must not leave the count by ageing well.
        ("Verified", f"{sum(c.state in ('verified', 'healthy') for c in every):,}"),
        ("Candidates", f"{sum(c.state == 'candidate' for c in every):,}"),
        ("Bad", f"{sum(c.state == 'bad' for c in every):,}"),
        ("In memory", formatting.size(memory)),
        ("On disk", formatting.size(disk)),
    )
    for column, (label, value) in zip(st.columns(len(values)), values, strict=True):
        column.metric(label, value, border=True)


def _draw_rollback_option(
    source: DataSource, run: RunSummary, detail: RunDetail, target: CheckpointView | None
) -> None:
    """Draw on the checkpoints page where a commanded rollback goes, and its form."""
    with st.container(border=True, key="prose_target", gap="small"):
        if target is None:
            st.text("No checkpoint is healthy: a rollback would be refused.")
            return
        back = max(0, run.last_step + 1 - target.step)
        st.text(
            f"A rollback commanded now goes to {formatting.plain(target.checkpoint_id, 60)}, before"
            f" step {target.step:,}, {'on disk' if target.where == 'disk' else 'in memory'}:"
            f" {formatting.count(back, 'step')} would be trained again."
        )
        st.text(_own_choice(detail))
        commands.draw_command_form(
            source, run, "rollback", label="Roll back", key="rollback_newest"
        )


def _draw_rollback_target(target: CheckpointView | None) -> None:
    """Draw on the checkpoints page the latest healthy checkpoint of a run that has stopped."""
    with st.container(border=True, key="prose_target", gap="small"):
        notice = "No healthy checkpoint on disk."
        if target is not None:
            notice = (
                f"The newest healthy one on disk is {formatting.plain(target.checkpoint_id, 60)},"
                f" before step {target.step:,}."
            )
        st.text(f"The run has stopped, so its in-memory snapshots are gone. {notice}")


def _own_choice(detail: RunDetail) -> str:
    """Return the checkpoints page's sentence on what an automatic rollback takes."""
    margin = detail.info.judge.get("ladder", {}).get("margin")
    steps = f"{margin} steps" if isinstance(margin, int) else "a margin"
    return f"An automatic rollback takes the newest healthy one at least {steps} before the onset."


def _draw_checkpoint(source: DataSource, run: RunSummary, checkpoint: CheckpointView) -> None:
    """Draw the selected checkpoint on its page, with the form to roll back to it."""
    with st.container(border=True, key="prose_checkpoint", gap="small"):
        st.text(
            f"{formatting.plain(checkpoint.checkpoint_id, 60)}:"
            f" {formatting.plain(checkpoint.state, 20)},"
            f" before step {checkpoint.step:,}. {formatting.plain(checkpoint.detail, 400)}"
        )
        if checkpoint.state != "healthy":
            st.caption(
                "Only a healthy checkpoint can be rolled back to; the collector refuses others."
            )
            return
        commands.draw_command_form(
            source, run, "rollback", label="Roll back to this", key="rollback_chosen",
            checkpoint_id=checkpoint.checkpoint_id,
        )  # fmt: skip
