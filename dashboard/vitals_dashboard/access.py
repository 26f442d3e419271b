"""Rights of the browser session: none, read-only, or control; and how it gets more."""

import math
import os
import time
from dataclasses import replace
from functools import cache

import streamlit as st

from vitals_dashboard import formatting
from vitals_dashboard.auth import CODE_TRIES, BrowserSession, BrowserSessions, host_name
from vitals_dashboard.settings import DashboardSettings, Role, load_settings
from vitals_dashboard.source import DataSource

NO_TOKEN = (
    "This dashboard is read-only: it was started without a control token. Give it the collector's"
    " token file with --token-file, or use `vitals command`."
)
NOT_STARTED = (
    "This dashboard is read-only. `vitals dashboard --control` starts one that can send commands;"
    " `vitals command` and `vitals alerts` can do so too."
)
SHARED_NAME = (
    "This URL is read-only, because other programs on its host receive its cookies. To get"
    " control, open the other URL that `vitals dashboard` printed, which ends in .localhost."
)
NO_ROLE = "Your account has read access only: the operator lists the accounts with control."
GET_CONTROL = "Read-only. Get control at the end of this page."
_ANSWER = "control_answer"


@cache
def sessions() -> BrowserSessions:
    """Return the browser sessions of this dashboard process, for its middleware and its pages."""
    settings = load_settings(os.environ)
    fd = settings.code_fd

    def announce(code: str) -> None:
        os.write(fd, f"{code}\n".encode())

    return BrowserSessions(announce if settings.control and fd >= 0 else None)


def _request_host() -> str:
    """Return the host name that this browser session uses for the dashboard."""
    return host_name(st.context.headers.get("Host") or "")


def _find_session(settings: DashboardSettings) -> BrowserSession | None:
    """Return this browser's dashboard session by its cookie; None without one."""
    host = _request_host()
    key = st.context.cookies.get(settings.hosts().cookie_name(host), "")
    return sessions().find(key, host)


def _is_signed_on(settings: DashboardSettings) -> bool:
    """Return whether the sign-on provider authenticates this browser session."""
    return settings.hosts().is_signed_on(_request_host())


def role() -> Role:
    """Return the role of this browser session on the dashboard; its control may have expired."""
    settings = load_settings(os.environ)
    if settings.sign_on is not None and _is_signed_on(settings):
        granted = settings.sign_on.role(st.user.to_dict(), unix_seconds=time.time())
        return "look" if granted == "control" and not settings.control else granted
    session = _find_session(settings)
    if session is None:
        return ""
    return "control" if sessions().control_seconds(session) else "look"


def limit_source_to_role(source: DataSource) -> DataSource:
    """Return the data source; without control if this browser session has none."""
    return source if role() == "control" else replace(source, control=None)


def why_no_control() -> str:
    """Return why this browser session cannot send commands to runs, and how to change that."""
    settings = load_settings(os.environ)
    if not settings.control:
        return NOT_STARTED
    if role() == "control":
        return NO_TOKEN
    if _is_signed_on(settings):
        return NO_ROLE
    return GET_CONTROL if settings.hosts().may_control(_request_host()) else SHARED_NAME


def account() -> str:
    """Return the dashboard user's name from the sign-on provider; "" if the token was used."""
    if not _is_signed_on(load_settings(os.environ)):
        return ""
    return str(st.user.get("email") or st.user.get("name") or st.user.get("sub") or "")


# ------------------------------------------------------------------------------------ drawing


def draw_no_access_page() -> None:
    """Draw the sign-in page that a dashboard visitor without access sees."""
    st.markdown("**Vitals**")
    if not _is_signed_on(load_settings(os.environ)):
        st.markdown("Signed out. To come back, open the address that `vitals dashboard` printed.")
        return
    if st.user.is_logged_in:
        st.text(
            f"{formatting.plain(account(), 80)} may not look here, or signed in too long ago."
            " Sign in again, or ask the operator of this dashboard."
        )
        st.button("Sign out", on_click=st.logout, key="sign_out")
    st.button("Sign in", on_click=st.login, type="primary", key="sign_in")


def draw_access_footer() -> None:
    """Draw the footer of a dashboard page: the role, the way to control, and signing out."""
    settings = load_settings(os.environ)
    session = _find_session(settings)
    with st.container(horizontal=True, vertical_alignment="center", key="access", gap="small"):
        if role() == "control":
            st.caption(_control_text(session))
        elif why_no_control() == GET_CONTROL and session is not None:
            _get_control(session)
        else:
            st.caption(why_no_control())
        if name := account():
            st.text(formatting.plain(name, 80))
            st.button("Sign out", on_click=st.logout, key="sign_out", type="tertiary")
        elif session is not None:
            ended = (session,)
            st.button(
                "Sign out", on_click=sessions().end, args=ended, key="sign_out", type="tertiary"
            )


def _control_text(session: BrowserSession | None) -> str:
    """Return for how long this browser session may still send commands."""
    if session is None:  # signed on
        return "You may send commands."
    minutes = math.ceil(sessions().control_seconds(session) / 60)
    return f"You may send commands for {formatting.count(minutes, 'more minute')}."


def _get_control(session: BrowserSession) -> None:
    """Draw the form in which a dashboard user enters the code for control."""
    with st.popover("Get control", icon=":material/lock_open:", key="get_control"):
        if sessions().has_code(session):
            with st.form(key="control_form", border=False):
                code = st.text_input(
                    "Code shown in the terminal of `vitals dashboard`",
                    key="control_code",
                    max_chars=20,
                    autocomplete="off",
                )
                if st.form_submit_button("Enter", type="primary"):
                    _redeem(session, code)
        else:
            st.caption("The terminal in which `vitals dashboard` runs will show a code.")
            st.button("Show a code", on_click=_send_code, args=(session,), key="send_code")
        if text := st.session_state.get(_ANSWER):
            st.text(text)


def _send_code(session: BrowserSession) -> None:
    """Show a control code in the terminal of the dashboard; store why that failed."""
    st.session_state[_ANSWER] = sessions().send_code(session)


def _redeem(session: BrowserSession, code: str) -> None:
    """Give a browser session control if the entered code is right; redraw the page."""
    is_right = sessions().redeem(session, code)
    st.session_state[_ANSWER] = (
        ""
        if is_right
        else f"Wrong code. A code can be tried {CODE_TRIES} times within two minutes."
    )
    st.rerun()
