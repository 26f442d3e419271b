"""Messages of a page that cannot draw its data, each with its fix."""

import streamlit as st

from trainvitals.errors import TransportError, UnauthorizedError, VitalsError
from vitals_dashboard import formatting


def _draw_notice(title: str, error: VitalsError | None, hint: str, icon: str) -> None:
    with st.container(border=True, key="notice"):
        st.markdown(f"{icon} **{title}**")
        if error is not None:
            st.text(formatting.plain(error.text, 400))
        st.text(formatting.plain(hint, 400))


def collector_down(error: TransportError, *, again: bool = True) -> None:
    """Draw instead of a page that the collector does not respond, and that no data is lost.

    ``again``: whether the page retries; otherwise there is a button for it.
    """
    _draw_notice(
        "The collector does not answer",
        error,
        "Training continues and its metrics are kept; they appear here when the collector is back."
        + (" This page retries by itself." if again else ""),
        ":material/cloud_off:",
    )
    if not again:
        st.button("Try again", key="again")


def wrong_token(error: UnauthorizedError) -> None:
    """Draw instead of a page that the collector refused the dashboard's token, with the fix."""
    _draw_notice(
        "The collector refused this dashboard's token",
        error,
        "Start it again with the collector's own token file:"
        " vitals dashboard --collector URL --token-file FILE",
        ":material/key_off:",
    )


def problem(error: VitalsError) -> None:
    """Draw any other error instead of a dashboard page."""
    _draw_notice(
        "Cannot show this page", error, error.hint or f"[{error.code}]", ":material/error:"
    )


def no_runs() -> None:
    """Draw on a page that there is no run yet, and how to create the first one."""
    _draw_notice(
        "No runs yet",
        None,
        "Put `with trainvitals.watch(model, optimizer) as monitor` around a training loop, or try"
        " `vitals demo`. A run appears here when it starts.",
        ":material/timeline:",
    )


def no_such_run(run_id: str) -> None:
    """Draw on a page that its URL names an unknown run."""
    _draw_notice(
        "Run not found",
        None,
        f"There is no run {formatting.plain(run_id, 60)}; choose one above.",
        ":material/search_off:",
    )


def not_understood(error: VitalsError) -> None:
    """Draw on a page which part of the user's query was invalid, and what is valid."""
    _draw_notice("Invalid query", error, error.hint, ":material/help:")
