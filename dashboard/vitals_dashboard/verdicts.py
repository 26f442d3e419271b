"""The verdict as pages show it: a strip of two lines, and the panel that it folds out."""

from collections.abc import Iterable
from datetime import datetime

import streamlit as st

from trainvitals.document import markdown, page
from trainvitals.document.blocks import CommandLines, KeyFacts, TableBlock, TextBlock
from trainvitals.document.incident import (
    incident_blocks,
    incident_state,
    timeline_blocks,
    verdict_blocks,
)
from trainvitals.views import IncidentLine, IncidentView, RunSummary, RunVerdict, VerdictView
from vitals_dashboard import components, formatting, layout

MAX_TEXT = 600
_BADGES = {
    "open": ("\N{BLACK UP-POINTING TRIANGLE} Open incident", "orange"),
    "resolved": ("\N{CHECK MARK} Resolved", "green"),
    "unresolved": ("Unresolved", "gray"),
}


def draw_verdict_strip(run: RunSummary, judged: RunVerdict) -> None:
    """Draw the verdict on a run as a strip of two lines for a page; the rest folds out."""
    verdict = judged.verdict
    with st.container(
        horizontal=True, vertical_alignment="center", key="verdict_strip", gap="small"
    ):
        if not verdict.incident_id:
            st.text(formatting.sentence(verdict.state, MAX_TEXT))
            return
        lines = (each for each in judged.incidents if each.incident_id == verdict.incident_id)
        draw_state_badge(next(lines))
        # A badge above shows that a hung run is running.
        state = f"{verdict.state} " if verdict.is_hung else ""
        sentences = f"{state}{verdict.cause} {verdict.action}"
        st.text(formatting.sentence(sentences, MAX_TEXT), width="stretch")
        num = len(judged.incidents)
        # Drawn once it is opened: a refresh would send as much for it as for all of the rest.
        with st.popover(
            "Verdict", icon=":material/unfold_more:", key="verdict_open", on_change="rerun"
        ) as part:
            if part.open:
                draw_verdict_panel(verdict)
        st.page_link(
            layout.INCIDENTS,
            label="Evidence" if num == 1 else f"Evidence ({num} incidents)",
            icon=":material/emergency:",
            query_params={"run": run.run_id, "incident": verdict.incident_id},
        )
    is_urgent = run.state in ("halted", "failed", "lost") or any(
        i.is_open for i in judged.incidents
    )
    if not (is_urgent and verdict.commands):  # nobody has to act
        return
    with st.container(horizontal=True, vertical_alignment="center", key="strip_next"):
        st.text(formatting.sentence(f"Next: {verdict.next}", MAX_TEXT))
        command = formatting.plain(verdict.commands[0], MAX_TEXT)
        components.draw_copyable_command(command, key="copy_next", width="content")


def draw_state_badge(incident: IncidentLine | IncidentView) -> None:
    """Draw the state of an incident as a badge on a page: open, resolved or unresolved."""
    word, color = _BADGES[incident_state(incident)]
    st.badge(word, color=color)  # type: ignore[arg-type]


def draw_verdict_panel(verdict: VerdictView) -> None:
    """Draw the whole verdict as a part of a page: facts by name, then commands to copy."""
    _draw(verdict_blocks(verdict), key="verdict")


def draw_verdict_timeline(verdict: VerdictView) -> None:
    """Draw the timeline of the verdict as a part of a page, one line per event."""
    _draw(timeline_blocks(verdict), key="timeline")


def _draw(blocks: Iterable[TextBlock], *, key: str) -> None:
    """Draw a verdict's facts, commands and tables on the page."""
    with st.container(key=f"prose_{key}", gap="xxsmall"):
        for block in blocks:
            match block:
                case KeyFacts():
                    for name, text in block.pairs:
                        with st.container(horizontal=True, key=f"fact_{name.split()[0].lower()}"):
                            st.markdown(f"**{name}**", width=110)
                            st.text(formatting.sentence(text, MAX_TEXT), width="stretch")
                case CommandLines():
                    for number, line in enumerate(block.lines):
                        components.draw_copyable_command(
                            formatting.plain(line, MAX_TEXT), key=f"copy_{number}"
                        )
                case TableBlock():
                    for number, (*cells, last) in enumerate(block.rows):
                        labels = map(_label, block.header, cells)
                        with st.container(horizontal=True, key=f"fact_line_{number}"):
                            st.text(", ".join(filter(None, labels)), width=170)
                            st.text(formatting.sentence(str(last), 300), width="stretch")


def _label(name: str, cell: object) -> str:
    """Return a cell of the verdict's timeline on the dashboard as text: a time or a number."""
    if isinstance(cell, datetime):
        return f"{cell:%H:%M:%S} UTC"
    return f"{name} {cell:,}" if isinstance(cell, int) else ""


def ticket_of(run: RunSummary, incident: IncidentView) -> None:
    """Draw the part of a page from which a user copies an incident's summary to a ticket."""
    blocks = incident_blocks(incident, run)
    with st.popover("For a ticket", icon=":material/content_copy:", key="ticket_open"):
        as_markdown, as_page = st.tabs(["Markdown", "HTML"])
        with as_markdown:
            st.code(markdown.write_markdown(blocks), language=None, wrap_lines=True, height=320)
        with as_page:
            st.code(page.write_part(blocks), language=None, wrap_lines=True, height=320)
        st.caption("The whole report, with its curves:")
        st.code(
            f"vitals postmortem {run.run_id} --incident {incident.incident_id}"
            " --html incident.html",
            language=None,
        )


def headline(run: RunSummary, judged: RunVerdict | None) -> str:
    """Return the verdict as one line of the dashboard's run list; "" without any incident."""
    if judged is None or not judged.verdict.incident_id:
        return ""
    is_open = any(line.is_open for line in judged.incidents)
    description = f"{judged.verdict.cause} {judged.verdict.action}"
    return formatting.plain(
        description if is_open or run.state != "running" else f"Resolved: {description}", 300
    )
