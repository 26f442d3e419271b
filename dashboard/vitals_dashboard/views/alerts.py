"""The inbox: firing, silenced and resolved alerts, and users' responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.records import SEVERITY_WORDS
from trainvitals.views import (
    AckRequest,
    AlertsQuestion,
    AlertView,
    IncidentLine,
    RunsQuestion,
    RunSummary,
)
from vitals_dashboard import access, formatting, layout, tables
from vitals_dashboard.source import DataSource, verdict_of
from vitals_dashboard.theme import SEVERITY_BADGES

MAX_CARDS = 40
SILENCES = {"15 min": 900.0, "1 h": 3_600.0, "8 h": 28_800.0, "24 h": 86_400.0, "7 d": 604_800.0}
"""A silence has an end: one without would be forgotten."""
OF_FOLDER = (
    "This dashboard reads a folder: what is acknowledged or silenced here is kept on this machine"
    " only, among its temporary files. Another dashboard of the folder that runs at the same time"
    " does not know of it. A collector (`vitals collector`) keeps it for everybody."
)
SEVERITIES = ("page", "notify", "log")
_Runs = Mapping[str, RunSummary]
SHOWN = ("firing", "silenced", "resolved", "all")


def render() -> None:
    """Draw the dashboard page of alerts."""
    layout.heading("Alerts")
    with st.container(horizontal=True, vertical_alignment="center", key="alert_controls"):
        shown = layout.draw_choice("Show", SHOWN, "show", label_visibility="collapsed")
        text = st.text_input(
            "Search",
            key="alert",
            bind="query-params",
            max_chars=200,
            placeholder="Search alert, summary or run",
            label_visibility="collapsed",
            icon=":material/search:",
            width=320,
        )
        st.space("stretch")
        live = layout.live_toggle()
    layout.draw_periodically(
        lambda source: _draw_body(source, shown, str(text or "")), live=live, key="alerts_body"
    )


def _draw_body(source: DataSource, shown: str, text: str) -> None:
    every = source.client.ask(AlertsQuestion())
    runs = {run.run_id: run for run in source.client.ask(RunsQuestion())} if every else {}
    alerts = [alert for alert in every if _matches_search(alert, runs, text)]
    now = source.clock.time_ns()
    firing = [a for a in alerts if a.state == "firing" and a.silenced_until_unix_ns <= now]
    silenced = [a for a in alerts if a.state == "firing" and a.silenced_until_unix_ns > now]
    rest = [a for a in alerts if a.state != "firing"]
    if source.control is None and (firing or silenced):
        st.caption(access.why_no_control())
    elif source.of_folder and (firing or silenced):
        st.caption(OF_FOLDER)
    if shown in ("firing", "all"):
        _draw_cards(source, firing, runs, title="Firing", empty="No firing alerts.")
    if shown in ("silenced", "all"):
        _draw_cards(source, silenced, runs, title="Silenced", empty="No silences.")
    elif silenced:
        st.caption(
            f"{formatting.count(len(silenced), 'firing alert')} silenced; see Silenced above."
        )
    if shown in ("resolved", "all"):
        st.markdown(f"## Resolved and pending ({len(rest):,})")
        names = {run_id: run.name for run_id, run in runs.items()}
        layout.draw_table(tables.alert_rows(rest, names), "None.", key="alert_history", height=600)


def _matches_search(alert: AlertView, runs: _Runs, text: str) -> bool:
    of_run = f"{_run_label(alert.run_id, runs)} {alert.run_id}"
    haystack = f"{alert.title} {alert.name} {alert.summary} {of_run}".casefold()
    return all(needle in haystack for needle in text.casefold().split())


@dataclass(frozen=True, slots=True)
class _AlertGroup:
    """Alerts of one incident, or alerts of a run outside incidents."""

    run_id: str
    incident: IncidentLine | None
    alerts: list[AlertView]

    def order(self) -> tuple[int, int]:
        """Return the sort key of a group on the alerts page: pages first, then latest change."""
        return (
            min(SEVERITIES.index(alert.severity) for alert in self.alerts),
            -max(alert.updated_unix_ns for alert in self.alerts),
        )


def _group_alerts(
    source: DataSource, alerts: Sequence[AlertView], runs: _Runs
) -> list[_AlertGroup]:
    """Return the alerts by incident, pages first; within one the most severe, then the latest."""
    incidents: dict[str, IncidentLine] = {}
    for run_id in {alert.run_id for alert in alerts} & set(runs):
        for incident in verdict_of(source, runs[run_id]).incidents:
            incidents |= dict.fromkeys(incident.alerts, incident)
    groups: dict[tuple[str, str], _AlertGroup] = {}
    for alert in sorted(alerts, key=lambda a: (SEVERITIES.index(a.severity), -a.updated_unix_ns)):
        line = incidents.get(alert.fingerprint)
        key = (alert.run_id, line.incident_id if line else "")
        groups.setdefault(key, _AlertGroup(alert.run_id, line, [])).alerts.append(alert)
    return sorted(groups.values(), key=_AlertGroup.order)


def _draw_cards(
    source: DataSource, alerts: Sequence[AlertView], runs: _Runs, *, title: str, empty: str
) -> None:
    """Draw one section of the alerts page: its title, and a card for each alert."""
    st.markdown(f"## {title} ({len(alerts):,})")
    if not alerts:
        st.caption(empty)
        return
    remaining = MAX_CARDS
    for number, group in enumerate(_group_alerts(source, alerts, runs)):
        if remaining <= 0:
            break
        with st.container(key=f"alert_group_{title.lower()}_{number}", gap="xsmall"):
            _head(group, runs)
            for alert in group.alerts[:remaining]:
                _draw_card(source, alert, runs)
        remaining -= len(group.alerts)
    if remaining < 0:
        what = f"{title.lower()} alerts"
        st.caption(f"{MAX_CARDS} of {len(alerts):,} {what} are shown, pages first.")


def _head(group: _AlertGroup, runs: _Runs) -> None:
    """Draw the heading of a group on the alerts page, and the link to its incident."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        if not group.run_id:
            st.markdown("### Vitals itself")
            return
        st.markdown("### Incident" if group.incident else "### Run")
        label = _run_label(group.run_id, runs)
        title = f"{formatting.plain(group.incident.title, 160)}  |  " if group.incident else ""
        st.text(f"{title}{label}")
        st.space("stretch")
        if group.incident is not None:
            st.page_link(
                layout.INCIDENTS,
                label="Open incident",
                icon=":material/emergency:",
                query_params={"run": group.run_id, "incident": group.incident.incident_id},
            )


def _run_label(run_id: str, runs: _Runs) -> str:
    """Return the name under which the alerts page shows an alert's run."""
    return formatting.run_label(runs[run_id].name if run_id in runs else "", run_id, 60)


def _draw_card(source: DataSource, alert: AlertView, runs: _Runs) -> None:
    """Draw an alert as a card on the alerts page, with its facts and actions."""
    now = source.clock.time_ns()
    key = alert.fingerprint
    with st.container(border=True, key=f"alert_{key}"):
        text, acts = st.columns([3, 2], vertical_alignment="center")
        with text, st.container(key=f"alert_text_{key}", gap="xxsmall"):
            with st.container(horizontal=True, vertical_alignment="center"):
                word, color = SEVERITY_WORDS[alert.severity], SEVERITY_BADGES[alert.severity]
                st.badge(word, color=color)  # type: ignore[arg-type]
                st.text(formatting.plain(alert.title, 60))
                if alert.acknowledged_by:
                    st.badge("acknowledged", color="gray")
                if alert.silenced_until_unix_ns > now:
                    st.badge("silenced", color="gray")
            st.text(formatting.plain(alert.summary, 400))
            with st.container(key=f"facts_{key}"):
                st.text(_facts_line(alert, runs, now))
        with (
            acts,
            st.container(
                horizontal=True, horizontal_alignment="right", vertical_alignment="center"
            ),
        ):
            if alert.run_id:  # one about a receiver is about no run
                st.page_link(
                    layout.RUN,
                    label="Open run",
                    icon=":material/monitor_heart:",
                    query_params=_query_params(alert),
                )
            if source.control is not None:
                _draw_alert_actions(source.control, alert)


def _query_params(alert: AlertView) -> dict[str, str]:
    """Return the URL parameters for the alerts page's link to the curves at an alert's step."""
    if alert.step < 0:
        return {"run": alert.run_id}
    return layout.curves_query_params(alert.run_id, alert.step, alert.step)


def _facts_line(alert: AlertView, runs: _Runs, now: int) -> str:
    """Return the line on an alert's card on its page: run, step, age and silence."""
    facts = [
        _run_label(alert.run_id, runs),
        f"step {alert.step:,}" if alert.step >= 0 else "",
        f"for {formatting.age(alert.started_unix_ns, now)}",
    ]
    if alert.acknowledged_by:
        facts.append(f"acknowledged by {formatting.plain(alert.acknowledged_by, 40)}")
    if alert.silenced_until_unix_ns > now:
        # Relative to its end, so that the text is "for another".
        facts.append(f"silenced for another {formatting.age(now, alert.silenced_until_unix_ns)}")
        facts.append(formatting.plain(alert.silence_reason, 120))
    return "  |  ".join(fact for fact in facts if fact)


def _draw_alert_actions(control: CollectorClient, alert: AlertView) -> None:
    """Draw the forms on the alerts page with which a user acknowledges or silences an alert."""
    key = alert.fingerprint
    with (
        st.popover("Acknowledge", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        person = st.text_input("Who", value=layout.current_user(), max_chars=80, key=f"by_{key}")
        reason = st.text_input("Reason", max_chars=300, key=f"reason_{key}")
        message = None
        if st.form_submit_button("Acknowledge", type="primary"):
            request = AckRequest(by=person.strip() or "dashboard", reason=reason.strip())
            message = _send_ack(control, key, request, "Acknowledged.")
        layout.draw_form_result(f"ack_{key}", message)
    with (
        st.popover("Silence", key=f"open_silence_{key}"),
        st.form(key=f"form_silence_{key}", border=False, enter_to_submit=False),
    ):
        person = st.text_input(
            "Who", value=layout.current_user(), max_chars=80, key=f"silence_by_{key}"
        )
        reason = st.text_input("Reason", max_chars=300, key=f"silence_reason_{key}")
        length = st.selectbox("For", list(SILENCES), key=f"silence_{key}")
        message = None
        if st.form_submit_button("Silence", type="primary"):
            if not reason.strip():
                message = "A silence needs a reason, so that others see why no alert was sent."
            else:
                request = AckRequest(
                    by=person.strip() or "dashboard",
                    reason=reason.strip(),
                    silence_seconds=SILENCES[length],
                )
                message = _send_ack(control, key, request, f"Silenced for {length}.")
        layout.draw_form_result(f"silence_{key}", message)


def _send_ack(control: CollectorClient, fingerprint: str, request: AckRequest, done: str) -> str:
    """Send what a user entered on the alerts page: an acknowledgment or a silence."""
    try:
        control.ack_alert(fingerprint, request)
    except VitalsError as error:
        return f"Not done: {error.text}"
    st.toast(done)
    return done
