"""The inbox: what fires, what is silenced, what has passed, and a person's word about it."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.views import AckRequest, AlertsQuestion, AlertView, RunsQuestion
from vitals_dashboard import access, formatting, layout, tables
from vitals_dashboard.source import Source
from vitals_dashboard.theme import SEVERITY_BADGES, SEVERITY_WORDS

MAX_CARDS = 40
SILENCES = {"15 min": 900.0, "1 h": 3_600.0, "8 h": 28_800.0, "24 h": 86_400.0, "7 d": 604_800.0}
"""A silence has an end: nobody remembers one that has not."""
OF_FOLDER = (
    "This dashboard reads a folder: what is acknowledged or silenced here is kept on this machine"
    " only, among its temporary files. Another dashboard of the folder that runs at the same time"
    " does not know of it. A collector (`vitals collector`) keeps it for everybody."
)
SHOWN = ("firing", "silenced", "resolved", "all")


def render() -> None:
    """Draw the page."""
    with st.container(horizontal=True, vertical_alignment="center", key="alert_controls"):
        shown = st.segmented_control(
            "Show",
            SHOWN,
            default="firing",
            required=True,
            key="show",
            bind="query-params",
            label_visibility="collapsed",
        )
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
    layout.refreshing(
        lambda source: _body(source, str(shown), str(text or "")), live=live, key="alerts_body"
    )


def _body(source: Source, shown: str, text: str) -> None:
    every = source.client.ask(AlertsQuestion())
    names = {run.run_id: run.name for run in source.client.ask(RunsQuestion())} if every else {}
    alerts = [alert for alert in every if _holds(alert, names, text)]
    now = source.clock.time_ns()
    firing = [a for a in alerts if a.state == "firing" and a.silenced_until_unix_ns <= now]
    silenced = [a for a in alerts if a.state == "firing" and a.silenced_until_unix_ns > now]
    rest = [a for a in alerts if a.state != "firing"]
    if source.control is None and (firing or silenced):
        st.caption(access.how_to_control())
    elif source.of_folder and (firing or silenced):
        st.caption(OF_FOLDER)
    if shown in ("firing", "all"):
        _cards(source, firing, names, title="Firing", empty="No firing alerts.")
    if shown in ("silenced", "all"):
        _cards(source, silenced, names, title="Silenced", empty="No silences.")
    elif silenced:
        st.caption(
            f"{formatting.count(len(silenced), 'firing alert')} silenced; see Silenced above."
        )
    if shown in ("resolved", "all"):
        st.markdown(f"**Resolved and pending** ({len(rest):,})")
        layout.table(tables.alert_rows(rest, names), "None.", key="alert_history", height=600)


def _holds(alert: AlertView, names: dict[str, str], text: str) -> bool:
    of_run = f"{names.get(alert.run_id, '')} {alert.run_id}"
    haystack = f"{alert.title} {alert.name} {alert.summary} {of_run}".casefold()
    return all(needle in haystack for needle in text.casefold().split())


def _cards(
    source: Source, alerts: Sequence[AlertView], names: dict[str, str], *, title: str, empty: str
) -> None:
    st.markdown(f"**{title}** ({len(alerts):,})")
    if not alerts:
        st.caption(empty)
        return
    newest = sorted(alerts, key=lambda alert: alert.updated_unix_ns, reverse=True)
    for alert in newest[:MAX_CARDS]:
        _card(source, alert, names)
    if len(newest) > MAX_CARDS:
        what = f"{title.lower()} alerts"
        st.caption(f"{MAX_CARDS} of {len(newest):,} {what} are shown, the newest ones.")


def _card(source: Source, alert: AlertView, names: dict[str, str]) -> None:
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
                st.text(_facts(alert, names, now))
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
                    query_params=_address(alert),
                )
            if source.control is not None:
                _act(source.control, alert)


def _address(alert: AlertView) -> dict[str, str]:
    if alert.step < 0:
        return {"run": alert.run_id}
    return layout.around(alert.run_id, alert.step, alert.step)


def _facts(alert: AlertView, names: dict[str, str], now: int) -> str:
    facts = [
        formatting.run_label(names.get(alert.run_id, ""), alert.run_id, 60),
        f"step {alert.step:,}" if alert.step >= 0 else "",
        f"for {formatting.age(alert.started_unix_ns, now)}",
    ]
    if alert.acknowledged_by:
        facts.append(f"acknowledged by {formatting.plain(alert.acknowledged_by, 40)}")
    if alert.silenced_until_unix_ns > now:
        # Seen from its end, so that the words read "for another".
        facts.append(f"silenced for another {formatting.age(now, alert.silenced_until_unix_ns)}")
        facts.append(formatting.plain(alert.silence_reason, 120))
    return "  |  ".join(fact for fact in facts if fact)


def _act(control: CollectorClient, alert: AlertView) -> None:
    key = alert.fingerprint
    with (
        st.popover("Acknowledge", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        person = st.text_input("Who", value=layout.person(), max_chars=80, key=f"by_{key}")
        reason = st.text_input("Reason", max_chars=300, key=f"reason_{key}")
        message = None
        if st.form_submit_button("Acknowledge", type="primary"):
            request = AckRequest(by=person.strip() or "dashboard", reason=reason.strip())
            message = _send(control, key, request, "Acknowledged.")
        layout.answer(f"ack_{key}", message)
    with (
        st.popover("Silence", key=f"open_silence_{key}"),
        st.form(key=f"form_silence_{key}", border=False, enter_to_submit=False),
    ):
        person = st.text_input("Who", value=layout.person(), max_chars=80, key=f"silence_by_{key}")
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
                message = _send(control, key, request, f"Silenced for {length}.")
        layout.answer(f"silence_{key}", message)


def _send(control: CollectorClient, fingerprint: str, request: AckRequest, done: str) -> str:
    try:
        control.ack_alert(fingerprint, request)
    except VitalsError as error:
        return f"Not done: {error.text}"
    st.toast(done)
    return done
