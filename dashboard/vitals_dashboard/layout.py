"""Shared parts of pages: the bar of a run's pages, the choice of the run, refreshes."""

import getpass
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import streamlit as st

from trainvitals.errors import VitalsError
from trainvitals.views import RunsQuestion, RunSummary
from vitals_dashboard import access, formatting, placeholders, tables
from vitals_dashboard.source import DataSource, guarded, open_data_source
from vitals_dashboard.theme import (
    HEALTH_BADGES,
    HEALTH_WORDS,
    STATE_BADGES,
    STATE_WORDS,
    STYLE,
    Palette,
    palette,
)

T = TypeVar("T", bound=str)

REFRESH_SECONDS = 5.0
SLOW_SECONDS = 10.0
"""Interval of pages that draw thousands of cells."""

RUN = "vitals_page_run.py"
LAYERS, RANKS = "vitals_page_layers.py", "vitals_page_ranks.py"
DECISIONS, CHECKPOINTS = "vitals_page_decisions.py", "vitals_page_checkpoints.py"
INCIDENTS = "vitals_page_incident.py"
RUN_PAGES = {
    RUN: ("Curves", ":material/monitor_heart:"),
    INCIDENTS: ("Incidents", ":material/emergency:"),
    LAYERS: ("Layers", ":material/layers:"),
    RANKS: ("Ranks and nodes", ":material/hub:"),
    DECISIONS: ("Decisions", ":material/gavel:"),
    CHECKPOINTS: ("Checkpoints", ":material/save:"),
}
"""The pages of one run, with their names in the bar."""
LAST_RUN = "last_run"
"""This browser's last run: the default of a page whose URL names none."""
AROUND_STEPS = 100
STEP_COLUMNS = ("Step", "To step", "Since step", "Back to", "At step", "Last step")
_PICKED = "run_picked"
ENDED = frozenset({"finished", "halted", "failed"})
"""States of a run that are final; an interrupted or lost run may continue."""
_REFRESHES = "page_refreshes"
_RUNS = "runs_just_asked"
"""Response from the start of the page, for the parts drawn first."""


def style() -> None:
    """Send the dashboard's constant style sheet."""
    st.html(STYLE)


def heading(text: str) -> None:
    """Set the browser title of a dashboard page, and its heading for screen readers."""
    st.set_page_config(page_title=f"{text} - Vitals")
    with st.container(key="page_heading"):
        st.markdown(f"# {text}")


def live_toggle(every: float = REFRESH_SECONDS, *, value: bool = True) -> bool:
    """Draw the switch for a page's refreshes and return its value; ``value`` is its default."""
    help_text = f"Refresh every {every:.0f} seconds while a run is active; off: never."
    return bool(st.toggle("Live", value=value, key="live", bind="query-params", help=help_text))


def draw_periodically(
    draw: Callable[[DataSource], None], *, live: bool, key: str, every: float = REFRESH_SECONDS
) -> None:
    """Draw now and, while ``live``, again every few seconds; only this part of the page.

    If drawing fails, it is retried, live or not.
    """
    part = st.fragment(guarded, run_every=every if live else None, key=key)
    if part(_require_access(draw)) is False and not live:
        _retry_page_later(f"{key}_again")


def _require_access(draw: Callable[[DataSource], None]) -> Callable[[DataSource], None]:
    def allowed(source: DataSource) -> None:
        # Checked again: a refresh runs no other part of the page, and a session may have ended.
        if access.role():
            draw(access.limit_source_to_role(source))
        else:
            access.draw_no_access_page()

    return allowed


def page_with_live_part(draw: Callable[[DataSource], None]) -> None:
    """Draw any page whose ``draw`` calls ``draw_live_part``; if drawing fails, retry."""
    if not guarded(_require_access(draw)):
        _retry_page_later("page_again")


def _retry_page_later(key: str) -> None:
    """Draw a part of the page that retries a failed page after some seconds."""
    draw_live_part(lambda: None, lambda _: False, live=True, key=key)


def draw_live_part(
    draw: Callable[[], None], again: Callable[[DataSource], bool], *, live: bool, key: str
) -> None:
    """Draw a part of a page and, while ``live``, draw it again every few seconds.

    Args:
        draw: draws it with the page.
        again: draws only this part, and returns whether the rest of the page is still up to date.
            If not, or if drawing fails, the whole page is drawn again, which shows the reason.
        live: whether to draw it again.
        key: key of this part.
    """
    with_page = [True]

    def part() -> None:
        if with_page:
            with_page.clear()
            draw()
            return
        try:
            is_true = access.role() and again(access.limit_source_to_role(open_data_source()))
        except VitalsError:
            is_true = False
        if not is_true:
            st.rerun()

    st.fragment(part, run_every=REFRESH_SECONDS if live else None, key=key)()


def draw_runs_periodically(
    draw: Callable[[DataSource], None],
    run_ids: Sequence[str],
    *,
    live: bool,
    key: str,
    every: float = REFRESH_SECONDS,
) -> None:
    """Draw any page of runs, and refresh it every few seconds until all have ended.

    Its ``draw`` has to call ``stop_refreshes_if_ended``.
    """
    draw_periodically(draw, live=is_page_live(run_ids, live=live), key=key, every=every)


def is_page_live(run_ids: Sequence[str], *, live: bool) -> bool:
    """Return whether a page of these runs refreshes itself: not once all of them have ended."""
    st.session_state.pop(_RUNS, None)
    live = live and not _have_runs_ended(run_ids)
    st.session_state[_REFRESHES] = live
    return live


def stop_refreshes_if_ended(runs: Sequence[RunSummary]) -> None:
    """Stop the refreshes of a dashboard page once all of its runs have ended."""
    if all(run.state in ENDED for run in runs) and st.session_state.pop(_REFRESHES, False):
        st.rerun()


def _have_runs_ended(run_ids: Sequence[str]) -> bool:
    """Query whether all runs that a page shows have ended, so that it need not refresh."""
    try:
        runs = access.limit_source_to_role(open_data_source()).client.ask(RunsQuestion())
    except VitalsError:  # the page shows it
        return False
    st.session_state[_RUNS] = runs
    state_by_run = {run.run_id: run.state for run in runs}
    return bool(run_ids) and all(state_by_run.get(run_id) in ENDED for run_id in run_ids)


def current_palette() -> Palette:
    """Return the dashboard's colors for the theme that this browser shows."""
    return palette(st.context.theme.type)


def current_user() -> str:
    """Return the name of the dashboard's user, if known: the default in its forms."""
    if name := access.account():
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return ""


# ------------------------------------------------------------------------------- pages of a run


def run_links() -> None:
    """Draw the bar with the pages of the run in the URL; each link keeps the run."""
    query = [("run", run_id) for run_id in run_ids_from_url()]
    with st.container(horizontal=True, key="run_links", gap="xxsmall", width="content"):
        for page, (label, icon) in RUN_PAGES.items():
            st.page_link(page, label=label, icon=icon, query_params=query or None)


def run_page(draw: Callable[[DataSource, RunSummary], None], *, key: str) -> None:
    """Draw any page of one run: the bar, the choice of the run, and the output of ``draw``."""
    with st.container(horizontal=True, vertical_alignment="center", key="run_bar"):
        run_links()
        st.space("stretch")
        live = live_toggle(SLOW_SECONDS)

    def body(source: DataSource) -> None:
        run = draw_run_choice(source)
        if run is not None:
            draw(source, run)

    draw_runs_periodically(body, run_ids_from_url(), live=live, key=key, every=SLOW_SECONDS)


def run_ids_from_url() -> list[str]:
    """Return the run in the page's URL, otherwise the last one shown; empty without one."""
    run_id = st.query_params.get("run") or st.session_state.get(LAST_RUN)
    return [str(run_id)] if run_id else []


def draw_run_choice(source: DataSource) -> RunSummary | None:
    """Draw the choice of a page's run and return it; None, with a message, if there is none."""
    asked_before = st.session_state.pop(_RUNS, None)
    runs = tables.sort_runs(asked_before or source.client.ask(RunsQuestion()))
    if not runs:
        placeholders.no_runs()
        return None
    by_id = {run.run_id: run for run in runs}
    before = st.session_state.get(LAST_RUN)
    requested = st.query_params.get("run") or (before if before in by_id else runs[0].run_id)
    with st.container(horizontal=True, vertical_alignment="center", key="run_and_choice"):
        head = st.container(width="stretch")
        # In a popover: a browser loads a large program for a box to choose in, once it is opened.
        label = "Change run" if requested in by_id else "Choose a run"
        with st.popover(label, icon=":material/swap_horiz:", key=f"run_change_{requested}"):
            selected = _select_run(by_id, requested)
    if selected is None:
        placeholders.no_such_run(requested)
        return None
    st.session_state[LAST_RUN] = selected
    if st.session_state.pop(_PICKED, False) or st.query_params.get("run") != selected:
        st.query_params["run"] = selected
        st.rerun()  # the bar above links to this run from now on
    stop_refreshes_if_ended([by_id[selected]])
    with head:
        run_head(by_id[selected])
    return by_id[selected]


def _select_run(by_id: Mapping[str, RunSummary], requested: str) -> str | None:
    """Draw the choice of a page's run, synchronized with the URL; return its id."""
    # The URL has priority: each run has its own widget, without a previous state.
    key = f"run_of_page_{requested}"

    def follow() -> None:
        st.query_params["run"] = st.session_state[key]
        st.query_params.pop("incident", None)  # one of the run before
        st.session_state[_PICKED] = True

    selected = st.selectbox(
        "Run",
        list(by_id),
        index=list(by_id).index(requested) if requested in by_id else None,
        key=key,
        format_func=lambda run_id: formatting.run_choice(by_id[run_id].name, run_id),
        on_change=follow,
        label_visibility="collapsed",
        placeholder="Choose a run",
    )
    return None if selected is None else str(selected)


def run_head(run: RunSummary) -> None:
    """Draw a run's name, state and health in one line at the top of its pages."""
    with st.container(horizontal=True, vertical_alignment="center", key="run_head", gap="small"):
        with st.container(key="run_title", width="content"):
            st.text(formatting.run_label(run.name, run.run_id, 160))
        st.badge(STATE_WORDS[run.state], color=STATE_BADGES[run.state])  # type: ignore[arg-type]
        st.badge(HEALTH_WORDS[run.health], color=HEALTH_BADGES[run.health])  # type: ignore[arg-type]
        if run.missing:
            st.badge(f"Missing: {', '.join(run.missing)}", color="red")
        if run.num_firing_alerts:
            st.badge(formatting.count(run.num_firing_alerts, "firing alert"), color="red")


def draw_choice(
    label: str, options: Sequence[T], key: str, *, default: T | None = None, **how: Any
) -> T:
    """Draw a choice of one of few, kept in the URL; ``default`` is the first if it is not given."""
    default = options[0] if default is None else default
    selected = st.segmented_control(
        label, options, default=default, required=True, key=key, bind="query-params", **how
    )
    return selected if selected in options else default


def draw_group_choice(label: str, groups: Sequence[str], key: str, hint: str) -> str:
    """Draw a choice of the key by which runs are grouped; return "" if none is chosen."""
    group = st.selectbox(
        label,
        groups,
        index=None,
        key=key,
        bind="query-params",
        placeholder=f"{hint} (or type config.KEY)",
        label_visibility="collapsed",
        accept_new_options=True,
        width=230,
    )
    return str(group or "").strip()


def step_range() -> tuple[int | None, int | None]:
    """Draw the fields for a page's first and last step, both in the URL; None: the run's."""
    with st.container(horizontal=True, width="content"):  # on a narrow screen, both wrap
        entered = [
            st.number_input(
                label,
                min_value=0,
                value=None,
                step=1,
                key=key,
                bind="query-params",
                width=115,
                placeholder=empty,
            )
            for label, key, empty in (("From step", "from", "first"), ("To step", "to", "last"))
        ]
    first, last = (None if value is None else int(value) for value in entered)
    if first is not None and last is not None and last < first:
        first, last = last, first
    return first, last


def curves_query_params(run_id: str, first: int, last: int) -> dict[str, str]:
    """Return the parameters of a link between pages: to a run's curves around some steps."""
    margin = {"from": str(max(0, first - AROUND_STEPS)), "to": str(last + AROUND_STEPS)}
    return {"run": run_id, "window": "range"} | margin


# ---------------------------------------------------------------------------------------- parts


def draw_table(
    rows: Sequence[tables.Row],
    empty: str,
    *,
    key: str,
    height: int = 360,
    columns: Mapping[str, Any] | None = None,
    select: bool = False,
    row_height: int | None = None,
) -> int | None:
    """Draw rows as a table on a page, or ``empty`` without any; return the selected index.

    Text wraps in rows of a ``row_height`` in pixels; without one a row is one line. A click
    anywhere in a row selects it, as its checkbox does. A selection is stored by position:
    if rows may be inserted above it, ``key`` must change with them.
    """
    if not rows:
        st.caption(empty)
        return None
    modes = ["single-row", "single-cell"]
    how: dict[str, Any] = {"on_select": "rerun", "selection_mode": modes} if select else {}
    picked = st.dataframe(
        list(rows),
        key=key,
        hide_index=True,
        placeholder="",
        height=min(38 + (row_height or 35) * len(rows), height),
        row_height=row_height,
        column_config=_default_column_formats(rows[0]) | dict(columns or {}),
        **how,
    )
    selected_rows = (
        [row for row, _ in picked.selection.cells] or picked.selection.rows if select else []
    )
    return selected_rows[0] if selected_rows and selected_rows[0] < len(rows) else None


def _default_column_formats(row: tables.Row) -> dict[str, Any]:
    """Return how all tables of the dashboard show columns of these names."""
    number = st.column_config.NumberColumn(format="localized")
    time = st.column_config.DatetimeColumn(format="distance")
    text = st.column_config.TextColumn(width="large")
    kinds = dict.fromkeys(STEP_COLUMNS, number)
    kinds |= dict.fromkeys(("When", "Started", "Began", "Ended"), time)
    kinds |= dict.fromkeys(("Reason", "Summary", "What"), text)
    return {name: kind for name, kind in kinds.items() if name in row}


def draw_form_result(key: str, message: str | None) -> None:
    """Draw the result of a form on a page: ``message`` now, otherwise the last one.

    It is stored because the page is redrawn every few seconds, maybe before a user has read it.
    """
    answer_key = f"answer_{key}"
    if message is not None:
        st.session_state[answer_key] = message
    if text := st.session_state.get(answer_key):
        st.text(formatting.plain(text, 400))
