"""The controls of the run page, every one a part of its address."""

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from trainvitals.views import DecisionView
from vitals_dashboard import layout
from vitals_dashboard.charts import Axis, StepScale
from vitals_dashboard.charts.marks import mark_text

RANGE = "range"
WINDOWS = {"all steps": 0, "last 5000": 5_000, "last 1000": 1_000, "last 200": 200, RANGE: 0}
"""Labels, also used in the URL, to the number of last steps; 0 is all."""
AXES: tuple[Axis, ...] = ("step", "time", "tokens")
MARGIN = 100
"""Steps shown on each side of what happened."""
MAX_EVENTS = 50
ENDS = ("from", "to")
MAX_DIGITS = 15
"""Digits of a step in a URL: limit of a browser's numbers."""
_ZOOMED = "run_zoomed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartControls:
    """Selections of the user."""

    live: bool
    window: int
    """Number of last steps; 0 is all, or the range."""
    first: int | None
    last: int | None
    axis: Axis
    smoothing: float
    log_loss: bool
    discarded: bool

    def extent(self, last_step: int) -> tuple[int | None, int | None]:
        """Return the steps that the user chose on the run page, first and last; None: all."""
        if self.window:
            return max(0, last_step - self.window), None
        first, last = self.first, self.last
        if first is not None and last is not None and last < first:
            first, last = last, first
        return first, last


def draw_chart_controls() -> ChartControls:
    """Draw the controls of the run page and return their values."""
    with st.popover("View", icon=":material/tune:", key="run_view"):  # the curves need the space
        window = str(layout.draw_choice("Steps", tuple(WINDOWS), "window"))
        first, last = _draw_step_range() if window == RANGE else (None, None)
        axis = layout.draw_choice("Along x", AXES, "x")
        smoothing = st.slider("Smoothing", 0.0, 0.99, 0.0, 0.01, key="smooth", bind="query-params")
        log_loss = st.toggle("Log loss", key="log", bind="query-params")
        discarded = st.toggle(
            "Rolled-back branches",
            value=True,
            key="discarded",
            bind="query-params",
            help="Steps discarded by a rollback, drawn faint.",
        )
    live = layout.live_toggle()
    return ChartControls(
        live=live,
        window=WINDOWS.get(window, 0),
        first=first,
        last=last,
        axis=axis,
        smoothing=float(smoothing),
        log_loss=bool(log_loss),
        discarded=bool(discarded),
    )


def _draw_step_range() -> tuple[int | None, int | None]:
    """Draw the range of steps on the run page; the URL leads, as a chart may have changed it."""
    ends = []
    for name in ENDS:
        key = f"range_{name}"
        st.session_state[key] = _step_in_address(name)
        value = st.number_input(
            f"{name} step",
            min_value=0,
            value=None,
            step=1,
            key=key,
            on_change=_copy_range_to_url,
            width=175,
            placeholder=f"{name} step",
            label_visibility="collapsed",
        )
        ends.append(None if value is None else int(value))
    return ends[0], ends[1]


def _step_in_address(name: str) -> int | None:
    """Return the first or last step in the run page's URL; None if it has none."""
    text = st.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def _copy_range_to_url() -> None:
    """Copy the range of steps that a user entered on the run page to its URL."""
    for name in ENDS:
        value = st.session_state.get(f"range_{name}")
        if value is None:
            st.query_params.pop(name, None)
        else:
            st.query_params[name] = str(value)


def zoom_to(first: int, last: int) -> None:
    """Select a range of steps on the run page and in its URL; for callbacks."""
    st.session_state["window"] = RANGE
    for name, step in zip(ENDS, (first, last), strict=True):
        st.query_params[name] = str(max(0, step))
    st.session_state[_ZOOMED] = True


def apply_zoom(scale: StepScale, ends: tuple[float, float] | None) -> None:
    """Apply to the run page a range that a user selected on a chart, or its reset."""
    if ends is not None:
        zoom_to(scale.step_at(ends[0]), scale.step_at(ends[1]))
    elif st.session_state.get("window") == RANGE:
        st.session_state["window"] = next(iter(WINDOWS))
        for name in ENDS:
            st.query_params.pop(name, None)
        st.session_state[_ZOOMED] = True


def has_zoomed() -> bool:
    """Return whether a chart of the run page has just chosen a range, which controls follow."""
    return bool(st.session_state.pop(_ZOOMED, False))


def around(decisions: Sequence[DecisionView]) -> None:
    """Draw on the run page the choice that zooms to the steps around a decision."""
    newest = sorted(decisions, key=lambda view: view.decision.ledger_seq, reverse=True)
    shown = {
        view.decision.ledger_seq: view for view in newest if view.decision.action != "continue"
    }
    if not shown:
        return

    def go() -> None:
        selected = shown.get(st.session_state["around"])
        if selected is not None:
            step, back_to = selected.decision.step, selected.decision.rollback_to_step
            first = min(step, back_to) if back_to >= 0 else step
            zoom_to(first - MARGIN, step + MARGIN)
            st.session_state["around"] = None

    st.selectbox(
        "Go to a decision",
        list(shown)[:MAX_EVENTS],
        index=None,
        key="around",
        format_func=lambda seq: mark_text(shown[seq])[:90],
        on_change=go,
        placeholder="Go to a decision",
        label_visibility="collapsed",
    )
