"""Commands to a run: which ones apply, and how they are sent. The policy responds."""

from typing import Literal

import streamlit as st

from trainvitals.detect.registry import KINDS
from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.views import (
    AnnotationRequest,
    AnnotationView,
    CommandRequest,
    DecisionView,
    IncidentView,
    RunSummary,
)
from vitals_dashboard import access, formatting, layout
from vitals_dashboard.source import DataSource
from vitals_dashboard.theme import ACTIONS

MAX_REASON = 300
LAST_WORD = (
    "The run answers at its next step; a manual command spends no rollback budget. The answer is"
    " listed on the Decisions page."
)
HEALTHY = "This was healthy"
HEALTHY_HELP = (
    "Marks step {step:,} as healthy: its level becomes normal, and Vitals no longer withholds"
    " updates or rolls back because of it. " + LAST_WORD
)
Action = Literal["halt", "rollback", "accept", "approve", "veto"]
ICONS: dict[Action, str] = {
    "halt": ":material/gavel:",
    "rollback": ":material/gavel:",
    "accept": ":material/check_circle:",
    "approve": ":material/check:",
    "veto": ":material/block:",
}
FINITE_RULES = frozenset({"outlier", "state_damaged", "evaluation", "lr_jump"})
"""Rules of decisions on finite values, which a user may accept as healthy."""
ACCEPTABLE_KINDS = frozenset(kind.name for kind in KINDS.values() if kind.may_be_accepted)
"""Findings about finite values."""


def refusal_reason(run: RunSummary, action: Action) -> str:
    """Return why a run would refuse a command from the dashboard now; "" if it would accept it."""
    if run.state != "running":
        return f"The run is {run.state}: it cannot take commands."
    if run.mode == "observe":
        return "The run's mode is 'observe': it takes no action and would refuse the command."
    if action == "rollback" and run.mode != "heal":
        return (
            f"The run's mode is '{formatting.plain(run.mode, 20)}': it would refuse a rollback,"
            " which needs mode 'heal' and checkpoints. It can be halted."
        )
    return ""


def is_acceptable(view: DecisionView) -> bool:
    """Return whether a user may accept the subject of a decision as healthy: NaN never is."""
    return view.decision.rule in FINITE_RULES


def acceptable_step(incident: IncidentView) -> int | None:
    """Return the step of an incident that the dashboard offers to accept as healthy, or None."""
    judged = [view.decision.step for view in incident.decisions if is_acceptable(view)]
    raised = [
        view.finding.step for view in incident.findings if view.finding.kind in ACCEPTABLE_KINDS
    ]
    return max(judged + raised, default=None)


def proposed_command(view: DecisionView) -> Action | None:
    """Return the command whose button on a page applies a proposed decision, or None."""
    decision = view.decision
    if decision.acted:
        return None
    if decision.action == "rollback":
        return "rollback"
    return "halt" if decision.action == "halt" else None


def decision_response(view: DecisionView, notes: tuple[AnnotationView, ...]) -> str:
    """Return the response to a decision that a user wrote on the dashboard; "" without one."""
    head = f"{_decision_label(view)}: "
    texts = [note.text for note in notes if note.text.startswith(head)]
    return formatting.plain(texts[-1].removeprefix(head), 200) if texts else ""


def _decision_label(view: DecisionView) -> str:
    """Return a decision's number and action: the start of the dashboard's notes about it."""
    look = ACTIONS.get(view.decision.action)
    return f"Decision {view.decision.ledger_seq} ({look.word if look else view.decision.action})"


def draw_command_form(
    source: DataSource,
    run: RunSummary,
    action: Action,
    *,
    label: str,
    key: str,
    checkpoint_id: str = "",
    step: int = -1,
    why: str = "",
) -> None:
    """Draw the form with which a page sends a command to a run, or why it cannot be sent.

    ``step`` is the action's argument: the accepted step, or the step of the decision.
    """
    if source.control is None:
        st.caption(access.why_no_control())
        return
    if no := refusal_reason(run, action):
        st.caption(no)
        return
    with (
        st.popover(label, icon=ICONS[action], key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        st.caption(HEALTHY_HELP.format(step=step) if action == "accept" else LAST_WORD)
        reason = st.text_input("Reason", value=why, max_chars=MAX_REASON, key=f"reason_{key}")
        answer = None
        if st.form_submit_button(f"Send: {action}", type="primary"):
            if not reason.strip():
                answer = "A command needs a reason: it is stored with the decision."
            else:
                request = CommandRequest(
                    action=action,
                    reason=reason.strip(),
                    checkpoint_id=checkpoint_id,
                    argument=float(step) if step >= 0 else None,
                )
                answer = _send_command(source, source.control, run, request)
        layout.draw_form_result(key, answer)


def draw_accept_form(source: DataSource, run: RunSummary, step: int, *, key: str) -> None:
    """Draw the form, shared by several pages, to accept a step as healthy; or nothing."""
    if source.control is not None and not refusal_reason(run, "accept"):
        draw_command_form(source, run, "accept", label=HEALTHY, key=key, step=step)


def _send_command(
    source: DataSource, control: CollectorClient, run: RunSummary, request: CommandRequest
) -> str:
    """Send the command of a form on the dashboard to a run; return the outcome as text."""
    who = layout.current_user() or "dashboard"
    try:
        sent = control.send_command(run.run_id, request, issued_by=who, keys=source.keys)
    except VitalsError as error:
        return f"Not sent: {error.text}. {error.hint}"
    message = f"Sent. Command {sent.command.number} is {sent.status}."
    st.toast(message)
    return message


def draw_dismiss_form(source: DataSource, run: RunSummary, view: DecisionView, *, key: str) -> None:
    """Draw the form with which a dashboard user rejects a proposed decision, with a reason."""
    if source.control is None:
        return
    with (
        st.popover("Dismiss", icon=":material/block:", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        st.caption(
            "Saved as a note at its step and drawn on the curves. Nothing is sent to the run."
        )
        by = st.text_input("Who", value=layout.current_user(), max_chars=80, key=f"by_{key}")
        reason = st.text_input("Reason", max_chars=MAX_REASON, key=f"reason_{key}")
        message = None
        if st.form_submit_button("Dismiss", type="primary"):
            if not (by.strip() and reason.strip()):
                message = "Enter your name and a reason."
            else:
                text = f"{_decision_label(view)}: vetoed by {by.strip()}: {reason.strip()}"
                message = write_user_note(source.control, run, view.decision.step, text, by.strip())
                message = message or "Dismissed; a note was saved."
        layout.draw_form_result(key, message)


def write_user_note(
    control: CollectorClient, run: RunSummary, step: int, text: str, by: str
) -> str:
    """Save the note that a dashboard user wrote at a step of a run; return an error or ""."""
    try:
        control.annotate(run.run_id, AnnotationRequest(step=step, text=text, by=by))
    except VitalsError as error:
        return f"Not saved: {error.text}"
    return ""
