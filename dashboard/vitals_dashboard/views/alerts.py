"""The inbox: what fires, what has passed, and a word from a person about it."""

import getpass
from collections.abc import Sequence

import streamlit as st

from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.views import AckRequest, AlertView
from vitals_dashboard import frame, tables, words
from vitals_dashboard.look import SEVERITY_BADGES
from vitals_dashboard.source import Source

MAX_CARDS = 40
SILENCES = {"no": 0.0, "15 min": 900.0, "1 h": 3_600.0, "8 h": 28_800.0, "24 h": 86_400.0}


def render() -> None:
    """Draw the page."""
    with st.container(horizontal=True, vertical_alignment="center", key="alert_controls"):
        shown = st.segmented_control(
            "Show",
            ["firing", "resolved", "all"],
            default="firing",
            required=True,
            key="show",
            bind="query-params",
            label_visibility="collapsed",
        )
        st.space("stretch")
        live = frame.live_toggle()
    frame.refreshing(lambda source: _body(source, str(shown)), live=live, key="alerts_body")


def _body(source: Source, shown: str) -> None:
    alerts = source.client.alerts()
    names = {run.run_id: run.name for run in source.client.runs()} if alerts else {}
    firing = [alert for alert in alerts if alert.state == "firing"]
    rest = [alert for alert in alerts if alert.state != "firing"]
    if shown in ("firing", "all"):
        _firing(source, firing, names)
    if shown in ("resolved", "all"):
        st.markdown(f"**Resolved and pending** ({len(rest):,})")
        if rest:
            _history(tables.alert_rows(rest, names))
        else:
            st.caption("None.")


def _firing(source: Source, firing: Sequence[AlertView], names: dict[str, str]) -> None:
    st.markdown(f"**Firing** ({len(firing):,})")
    if not firing:
        st.caption("Nothing fires.")
        return
    if source.control is None:
        st.caption(
            "This dashboard can only look: it was started without a control token, so alerts cannot"
            " be acknowledged or silenced here. Give it the collector's token file with"
            " --token-file, or use `vitals alerts ack`."
        )
    newest = sorted(firing, key=lambda alert: alert.updated_unix_ns, reverse=True)
    for alert in newest[:MAX_CARDS]:
        _card(source, alert, names)
    if len(newest) > MAX_CARDS:
        st.caption(f"{MAX_CARDS} of {len(newest):,} firing alerts are shown, the newest ones.")


def _card(source: Source, alert: AlertView, names: dict[str, str]) -> None:
    now = source.clock.time_ns()
    key = alert.fingerprint
    with st.container(border=True, key=f"alert_{key}"):
        text, acts = st.columns([5, 2], vertical_alignment="center")
        with text, st.container(key=f"alert_text_{key}", gap="xxsmall"):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.badge(alert.severity, color=SEVERITY_BADGES[alert.severity])  # type: ignore[arg-type]
                st.text(words.plain(alert.name, 60))
                if alert.acknowledged_by:
                    st.badge("acknowledged", color="gray")
                if alert.silenced_until_unix_ns > now:
                    st.badge("silenced", color="gray")
            st.text(words.plain(alert.summary, 400))
            st.text(_facts(alert, names, now))
        with acts, st.container(horizontal=True, horizontal_alignment="right"):
            st.page_link("vitals_page_run.py", label="Open run", query_params={"run": alert.run_id})
            if source.control is not None:
                _act(source.control, alert)


def _facts(alert: AlertView, names: dict[str, str], now: int) -> str:
    facts = [
        words.run_label(names.get(alert.run_id, ""), alert.run_id, 60),
        f"step {alert.step:,}" if alert.step >= 0 else "",
        f"for {words.age(alert.started_unix_ns, now)}",
    ]
    if alert.acknowledged_by:
        facts.append(f"acknowledged by {words.plain(alert.acknowledged_by, 40)}")
    if alert.silenced_until_unix_ns > now:
        # Seen from its end, so that the words read "for another".
        facts.append(f"silenced for another {words.age(now, alert.silenced_until_unix_ns)}")
        facts.append(words.plain(alert.silence_reason, 120))
    return "  |  ".join(fact for fact in facts if fact)


def _act(control: CollectorClient, alert: AlertView) -> None:
    key = alert.fingerprint
    with (
        st.popover("Acknowledge", key=f"open_{key}"),
        st.form(key=f"form_{key}", border=False, enter_to_submit=False),
    ):
        person = st.text_input("Who", value=getpass.getuser(), max_chars=80, key=f"by_{key}")
        reason = st.text_input("Reason", max_chars=300, key=f"reason_{key}")
        silence = st.selectbox("Silence as well", list(SILENCES), key=f"silence_{key}")
        if st.form_submit_button("Acknowledge", type="primary"):
            request = AckRequest(
                by=person.strip() or "dashboard",
                reason=reason.strip(),
                silence_seconds=SILENCES[silence],
            )
            _send(control, alert.fingerprint, request)


def _send(control: CollectorClient, fingerprint: str, request: AckRequest) -> None:
    try:
        control.ack_alert(fingerprint, request)
    except VitalsError as error:
        st.text(words.plain(f"Not done: {error.text}", 300))
    else:
        st.toast("Acknowledged.")


def _history(rows: list[tables.Row]) -> None:
    time = st.column_config.DatetimeColumn(format="distance")
    st.dataframe(
        rows,
        key="alert_history",
        hide_index=True,
        placeholder="",
        height=min(38 + 35 * len(rows), 600),
        column_config={
            "Summary": st.column_config.TextColumn(width="large"),
            "Began": time,
            "Ended": time,
        },
    )
