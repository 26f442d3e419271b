"""Two to six runs over each other: their curves, their difference, what was set differently."""

from vitals_dashboard import frame, states
from vitals_dashboard.source import Source


def render() -> None:
    """Draw the page."""
    live = frame.live_toggle()
    frame.refreshing(_body, live=live, key="compare_body")


def _body(source: Source) -> None:
    if not source.client.runs():
        states.no_runs()
