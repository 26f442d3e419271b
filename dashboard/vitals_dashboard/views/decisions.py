"""The decision log: every decision with its evidence, its outcome, and users' responses."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.hindsight import HINDSIGHT_WORDS, summarize_outcomes
from trainvitals.policy.actions import rule_words
from trainvitals.policy.approval import WAITS_UNTIL
from trainvitals.views import (
    AnnotationsQuestion,
    AnnotationView,
    CommandsQuestion,
    CommandView,
    DecisionsQuestion,
    DecisionView,
    RunSummary,
)
from vitals_dashboard import commands, formatting, layout, tables
from vitals_dashboard.source import DataSource
from vitals_dashboard.theme import ACTIONS

KINDS = {look.word: action for action, look in ACTIONS.items()}
DONE = ("carried out", "proposed only")


def render() -> None:
    """Draw the dashboard page of a run's decision log."""
    layout.heading("Decisions")
    layout.run_page(_draw_body, key="decisions_body")


def _draw_body(source: DataSource, run: RunSummary) -> None:
    ledger = source.client.ask(DecisionsQuestion(run_id=run.run_id))
    notes = source.client.ask(AnnotationsQuestion(run_id=run.run_id))
    shown = _filter_decisions(ledger)
    num_all = formatting.count(len(ledger), "decision")
    count = f"{len(shown):,} of {num_all}; select one for its evidence."
    if shadow := summarize_outcomes(view.hindsight or None for view in ledger):
        count += f"  Observed decisions: {shadow}."
    st.caption(count)
    rows = tables.decision_rows(shown)
    newest = sorted(shown, key=lambda view: view.decision.ledger_seq, reverse=True)
    remarks = [commands.decision_response(view, notes) for view in newest]
    if any(remarks):
        rows = [
            {"Step": row["Step"], "Action": row["Action"], "Manual override": word} | row
            for row, word in zip(rows, remarks, strict=True)
        ]
    empty = "No decision matches." if ledger else "Vitals took no action."
    picked = layout.draw_table(
        rows, empty, key=f"ledger_{len(ledger)}_{len(shown)}", height=430, select=True
    )
    waiting = [view for view in newest if commands.proposed_command(view)]
    if picked is not None:
        _draw_evidence(source, run, newest[picked], notes)
    elif waiting:
        _draw_evidence(source, run, waiting[0], notes, head="Newest proposal")
    _draw_commands(source, run)


def _filter_decisions(ledger: Sequence[DecisionView]) -> list[DecisionView]:
    """Draw the filters of the decisions page, and return the matching decisions."""
    causes = sorted({formatting.plain(view.decision.cause, 60) for view in ledger} - {""})
    with st.container(horizontal=True, vertical_alignment="bottom", key="ledger_controls"):
        action = st.selectbox(
            "Action", list(KINDS), index=None, key="action", bind="query-params",
            placeholder="Any action", width=150,
        )  # fmt: skip
        done = st.selectbox(
            "Outcome", DONE, index=None, key="done", bind="query-params",
            placeholder="Any outcome", width=170,
        )  # fmt: skip
        cause = st.selectbox(
            "Cause", causes, index=None, key="cause", placeholder="Any cause", width=200
        )
        first, last = layout.step_range()
        text = st.text_input(
            "Reason contains", key="why", bind="query-params", max_chars=200, width=220
        )
    needle = str(text or "").strip().casefold()
    return [
        view
        for view in ledger
        if (not action or view.decision.action == KINDS[action])
        and (not done or view.decision.acted == (done == DONE[0]))
        and (not cause or formatting.plain(view.decision.cause, 60) == cause)
        and (first is None or view.decision.step >= first)
        and (last is None or view.decision.step <= last)
        and needle in view.decision.reason.casefold()
    ]


def _draw_evidence(
    source: DataSource,
    run: RunSummary,
    view: DecisionView,
    notes: tuple[AnnotationView, ...],
    *,
    head: str = "Evidence",
) -> None:
    """Draw the selected decision on its page: evidence, fields, responses and commands."""
    decision = view.decision
    look = ACTIONS.get(decision.action)
    with st.container(border=True, key="prose_evidence", gap="small"):
        st.markdown(f"**{head}**")
        word = look.word if look else str(decision.action)
        done = "carried out" if decision.acted else "proposed, not carried out"
        reason = formatting.sentence(decision.reason, 600)
        st.text(f"Step {decision.step:,}: {word}, {done}. {reason}")
        st.text("   ".join(_decision_fields(view)))
        if decision.evidence:
            pairs = sorted(decision.evidence.items())[:40]
            st.text(
                "   ".join(
                    f"{formatting.plain(name, 60)} = {formatting.number(v)}" for name, v in pairs
                )
            )
        if remark := commands.decision_response(view, notes):
            st.text(f"Manual override: {remark}")
        with st.container(horizontal=True, vertical_alignment="center"):
            st.page_link(
                layout.RUN,
                label="See it on the curves",
                icon=":material/monitor_heart:",
                query_params=layout.curves_query_params(run.run_id, decision.step, decision.step),
            )
        _draw_decision_commands(source, run, view)


def _draw_decision_commands(source: DataSource, run: RunSummary, view: DecisionView) -> None:
    """Draw on the decisions page the forms to apply, dismiss or contradict a decision."""
    key = f"{view.decision.ledger_seq}"
    action = commands.proposed_command(view)
    with st.container(horizontal=True, vertical_alignment="center", key="decision_acts"):
        if commands.is_acceptable(view):
            commands.draw_accept_form(source, run, view.decision.step, key=f"accept_{key}")
        if action is None:
            return
        if WAITS_UNTIL in view.decision.evidence:  # it asks for approval
            number = view.decision.ledger_seq
            answers: tuple[tuple[commands.Action, str], ...] = (
                ("approve", "Approve"),
                ("veto", "Veto"),
            )
            for answer, label in answers:
                commands.draw_command_form(
                    source, run, answer, label=label, key=f"{answer}_{key}", step=number,
                    why=f"asked at step {view.decision.step}",
                )  # fmt: skip
            return
        commands.draw_command_form(
            source, run, action, label="Carry out", key=f"do_{key}",
            checkpoint_id=view.decision.checkpoint_id if action == "rollback" else "",
            why=formatting.plain(f"as decided at step {view.decision.step}", commands.MAX_REASON),
        )  # fmt: skip
        if action == "rollback" and source.control is not None and run.mode == "guard":
            commands.draw_command_form(source, run, "halt", label="Halt instead", key=f"halt_{key}")
        commands.draw_dismiss_form(source, run, view, key=f"veto_{key}")


def _decision_fields(view: DecisionView) -> list[str]:
    """Return the fields of the selected decision as its page lists them."""
    decision = view.decision
    pairs = (
        ("rule", formatting.plain(rule_words(decision.rule), 80)),
        ("cause", formatting.plain(decision.cause, 60)),
        ("value", "" if decision.value is None else formatting.number(decision.value)),
        ("limit", "" if decision.limit is None else formatting.number(decision.limit)),
        ("rank", str(decision.rank) if decision.rank >= 0 else ""),
        ("mode", formatting.plain(decision.mode, 20)),
        ("budget left", str(decision.budget_left) if decision.budget_left >= 0 else ""),
        ("cost", formatting.count(decision.cost_steps, "step")),
        (
            "back to step",
            f"{decision.rollback_to_step:,}" if decision.rollback_to_step >= 0 else "",
        ),
        ("checkpoint", formatting.plain(decision.checkpoint_id, 60)),
        ("hindsight", HINDSIGHT_WORDS.get(view.hindsight, "")),
    )
    return [f"{name}: {value}" for name, value in pairs if value]


def _draw_commands(source: DataSource, run: RunSummary) -> None:
    """Draw the table of manual commands at the end of the decisions page."""
    sent: tuple[CommandView, ...] = source.client.ask(CommandsQuestion(run_id=run.run_id))
    st.markdown(f"## Manual commands ({len(sent):,})")
    layout.draw_table(tables.command_rows(sent), "Manual commands: none.", key="commands")
