"""A hang on an incident's page: location of each rank, since when, and missing ranks."""

from collections.abc import Sequence

import streamlit as st

from trainvitals.units import name_ranks
from trainvitals.views import IncidentView, StacksQuestion, StacksView
from vitals_dashboard import formatting, layout, tables
from vitals_dashboard.source import DataSource

MAX_GROUPS = 8
"""Places whose calls can be expanded; the table has every rank."""


def draw_hang(source: DataSource, incident: IncidentView) -> None:
    """Draw the part of a page about a hang: waiting and blocking ranks, and their stacks."""
    waits = [view for view in incident.findings if view.finding.kind in ("waiting", "hang")]
    if not waits:
        return
    stacks = stacks_of_incident(
        source.client.ask(StacksQuestion(run_id=incident.run_id)),
        {view.finding.step for view in waits},
    )
    st.markdown("### Waits between ranks")
    layout.draw_table(
        rank_rows(stacks, {view.finding.rank for view in waits}),
        "No stacks were taken: only ranks on nodes with an agent provide them.",
        key="hang_ranks",
        height=260,
    )
    for same in group_by_calls(stacks)[:MAX_GROUPS]:
        with st.expander(
            formatting.plain(f"Where {name_ranks([view.rank for view in same])} stood", 120)
        ):
            st.code("\n".join(formatting.plain(call, 300) for call in same[0].calls), language=None)


def stacks_of_incident(stacks: Sequence[StacksView], steps: set[int]) -> list[StacksView]:
    """Return the latest stacks of each rank in a hang, which the dashboard then draws."""
    incident_stacks = (view for view in stacks if view.step in steps and not view.command_number)
    return [view for _, view in sorted({view.rank: view for view in incident_stacks}.items())]


def rank_rows(stacks: Sequence[StacksView], culprits: set[int]) -> list[tables.Row]:
    """Return the dashboard's table of a hang: each rank's last collective and location."""
    return [
        {
            "Rank": view.rank,
            "": "waited for" if view.rank in culprits else "waits",
            "Last collective it began": formatting.plain("".join(view.collectives[-1:]), 120),
            "Stood in": formatting.plain(
                view.calls[0].strip() if view.calls else f"no stacks: {view.detail}", 160
            ),
            "Seen": tables.to_datetime(view.time_unix_ns),
        }
        for view in stacks
    ]


def group_by_calls(stacks: Sequence[StacksView]) -> list[list[StacksView]]:
    """Group the ranks of a hang by equal calls, the fewest first, to draw each stack once."""
    groups: dict[tuple[str, ...], list[StacksView]] = {}
    for view in stacks:
        if view.calls:
            groups.setdefault(view.calls, []).append(view)
    return sorted(groups.values(), key=lambda same: (len(same), same[0].rank))
