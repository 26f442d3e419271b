"""What all pages share: the switch for refreshing, the fragment that refreshes, the style."""

from collections.abc import Callable

import streamlit as st

from vitals_dashboard.look import STYLE, Palette, palette
from vitals_dashboard.source import Source, guarded

REFRESH_SECONDS = 2.0


def style() -> None:
    """Send our constant style sheet."""
    st.html(STYLE)


def live_toggle() -> bool:
    """Draw the switch and return whether the page refreshes itself."""
    help_text = f"Refresh every {REFRESH_SECONDS:.0f} seconds. Off: the page stands still."
    return bool(st.toggle("Live", value=True, key="live", bind="query-params", help=help_text))


def refreshing(draw: Callable[[Source], None], *, live: bool, key: str) -> None:
    """Draw now and, while ``live``, again every two seconds; only this part of the page."""
    every = REFRESH_SECONDS if live else None
    st.fragment(guarded, run_every=every, key=key)(draw)


def present_palette() -> Palette:
    """Return the palette of the theme this browser shows."""
    return palette(st.context.theme.type)
