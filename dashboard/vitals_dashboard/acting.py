"""What a person may do to a run: which command fits, and how it is sent. The ladder answers."""

from typing import Literal

import streamlit as st

from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.records import CommandAction
from trainvitals.views import (
    AnnotationRequest,
    AnnotationView,
    CommandRequest,
    DecisionView,
    RunSummary,
)
from vitals_dashboard import frame, words
from vitals_dashboard.look import ACTIONS
from vitals_dashboard.source import Source

MAX_REASON = 300
TTL_SECONDS = 300.0
LAST_WORD = (
    "This proposes it: the run's own ladder has the last word, within the run's budget, at its next"
    " step, and its answer is listed below."
)
LOOK_ONLY = (
    "This dashboard can only look: it was started without a control token. Give it the collector's"
    " token file with --token-file, or use `vitals command`."
)
Action = Literal["halt", "rollback"]


def refused(run: RunSummary, action: Action) -> str:
    """Return why the run would refuse a command as it is now; "" where it would hear it."""
    if run.state != "running":
        return f"The run is {run.state}: it takes no command."
    if run.mode == "observe":
        return "The run's mode is 'observe': it acts on nothing, so it would refuse the command."
    if action == "rollback" and run.mode != "heal":
        return (
            f"The run's mode is '{words.plain(run.mode, 20)}': it would refuse a rollback, which"
            " needs mode 'heal' and checkpoints. It can be halted."
        )
    return ""


def proposed(view: DecisionView) -> Action | None:
    """Return the command that would carry a decision out; None where there is none any more."""
    decision = view.decision
    if decision.acted:
        return None
    if decision.action == "rollback":
        return "rollback"
    return "halt" if decision.action == "halt" else None


def veto_text(view: DecisionView, by: str, reason: str) -> str:
    """Return the note that says that a proposed decision is not to be carried out."""
    return f"{_head(view)}: vetoed by {by}: {reason}"


def word_of(view: DecisionView, notes: tuple[AnnotationView, ...]) -> str:
    """Return what a person said of a decision; "" where nobody did."""
    head = f"{_head(view)}: "
    said = [note.text for note in notes if note.text.startswith(head)]
    return words.plain(said[-1].removeprefix(head), 200) if said else ""


def _head(view: DecisionView) -> str:
    look = ACTIONS.get(view.decision.action)
    return f"Decision {view.decision.ledger_seq} ({look.word if look else view.decision.action})"


def command(
    source: Source,
    run: RunSummary,
    action: Action,
    *,
    label: str,
    key: str,
    checkpoint_id: str = "",
    why: str = "",
) -> None:
    """Draw the way to send a command; words, where the run would refuse it or we may not."""
    if source.control is None:
        st.caption(LOOK_ONLY)
        return
    if no := refused(run, action):
        st.caption(no)
        return
    with (
        st.popover(label, icon=":material/gavel:", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        st.caption(LAST_WORD)
        reason = st.text_input("Reason", value=why, max_chars=MAX_REASON, key=f"reason_{key}")
        said = None
        if st.form_submit_button(f"Send: {action}", type="primary"):
            if not reason.strip():
                said = "A command needs a reason: it is kept in the run's ledger."
            else:
                said = _send(source.control, run, action, checkpoint_id, reason.strip())
        frame.answer(key, said)


def _send(
    control: CollectorClient,
    run: RunSummary,
    action: CommandAction,
    checkpoint_id: str,
    reason: str,
) -> str:
    request = CommandRequest(
        action=action, reason=reason, checkpoint_id=checkpoint_id, ttl_seconds=TTL_SECONDS
    )
    try:
        sent = control.send_command(run.run_id, request)
    except VitalsError as error:
        return f"Not sent: {error.text}. {error.hint}"
    said = f"Sent. Command {sent.command.number} is {sent.status}."
    st.toast(said)
    return said


def dismiss(source: Source, run: RunSummary, view: DecisionView, *, key: str) -> None:
    """Draw the way to say that a proposed decision is not to be carried out, and why."""
    if source.control is None:
        return
    with (
        st.popover("Dismiss", icon=":material/block:", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        st.caption("Kept as a note at its step, drawn on the curves. Nothing is sent to the run.")
        by = st.text_input("Who", value=frame.person(), max_chars=80, key=f"by_{key}")
        reason = st.text_input("Reason", max_chars=MAX_REASON, key=f"reason_{key}")
        said = None
        if st.form_submit_button("Dismiss", type="primary"):
            if not (by.strip() and reason.strip()):
                said = "Give a name and a reason: others will ask."
            else:
                text = veto_text(view, by.strip(), reason.strip())
                said = note(source.control, run, view.decision.step, text, by.strip())
                said = said or "Dismissed, and noted."
        frame.answer(key, said)


def note(control: CollectorClient, run: RunSummary, step: int, text: str, by: str) -> str:
    """Write a note at a step; return why it could not be written, "" where it was."""
    try:
        control.annotate(run.run_id, AnnotationRequest(step=step, text=text, by=by))
    except VitalsError as error:
        return f"Not written: {error.text}"
    return ""
