"""Restarts of a run: the steps that each of them repeats, and its first step.

A restart is an attempt that was not started by a rollback. Its lost steps are those of the lineage
before it that are not in the lineage after it, as ``goodput`` counts them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, select

from trainvitals.records import Decision
from vitals_collector.numbers.interface import AttemptRow, lineage
from vitals_collector.storage.schema import attempts, decisions, sources

Lost = tuple[int, int, int]
"""Attempt, first and last step."""

_decision = msgspec.msgpack.Decoder(Decision).decode


class Restart(NamedTuple):
    """One restart of a run."""

    attempt: int
    """The attempt that it started."""
    step: int
    """The first step of it."""
    before: int
    """The attempt that had ended."""
    last_step: int
    """The last step of that one."""
    lost: tuple[Lost, ...]
    stopped_unix_ns: int
    """When the last step before it ended."""
    started_unix_ns: int
    is_planned: bool
    """Whether the start before it finished or was interrupted, which is not a failure."""

    @property
    def lost_steps(self) -> int:
        """Return how many steps a run lost by the restart."""
        return sum(high - low + 1 for _, low, high in self.lost)


def restarts_of(connection: Connection, ids: Sequence[str]) -> dict[str, list[Restart]]:
    """Find the restarts of each run, for the list of runs and for incidents; oldest first."""
    branches: dict[str, list[tuple[AttemptRow, int]]] = {run_id: [] for run_id in ids}
    columns = attempts.c
    query = select(
        columns.run_id, columns.id, columns.parent, columns.fork_step, columns.started_unix_ns
    )
    for row in connection.execute(query.where(columns.run_id.in_(ids)).order_by(columns.id)):
        branch = AttemptRow(row.id, row.parent, row.fork_step)
        branches[row.run_id].append((branch, row.started_unix_ns))
    several = [run_id for run_id, of_run in branches.items() if len(of_run) > 1]
    if not several:
        return {run_id: [] for run_id in ids}
    last: dict[str, dict[int, tuple[int, int, str]]] = {run_id: {} for run_id in ids}
    heads = sources.c
    ended = select(
        heads.run_id,
        heads.last_attempt,
        heads.last_step,
        heads.last_step_unix_ns,
        heads.ended_state,
    )
    for of, attempt, step, at, state in connection.execute(
        ended.where(heads.run_id.in_(several), heads.source == "rank:0", heads.last_step >= 0)
    ):
        last[of][attempt] = max((step, at, state), last[of].get(attempt, (-1, 0, "")))
    return {
        run_id: _find_restarts(of_run, _rolled_back_to(connection, run_id), last[run_id])
        if run_id in several
        else []
        for run_id, of_run in branches.items()
    }


def _rolled_back_to(connection: Connection, run_id: str) -> set[int]:
    """Return the attempts that rollbacks started, which are not restarts of the run."""
    columns = decisions.c
    bodies = connection.execute(
        select(columns.body).where(
            columns.run_id == run_id, columns.acted, columns.action == "rollback"
        )
    ).scalars()
    return {_decision(body).new_attempt for body in bodies if body}


def _find_restarts(
    branches: Iterable[tuple[AttemptRow, int]],
    rolled_back: set[int],
    last: Mapping[int, tuple[int, int, str]],
) -> list[Restart]:
    """Return the restarts among a run's attempts, with the steps that each lost."""
    found: list[Restart] = []
    rows: list[AttemptRow] = []
    for branch, started in branches:
        before = lineage(rows)
        rows.append(branch)
        leaf = max(before, default=0)
        if not before or branch.id in rolled_back or leaf not in last:
            continue
        after, forks = lineage(rows), {row.id: row.fork_step for row in rows}
        lost = []
        for attempt, bound in before.items():
            low = max(after.get(attempt, -math.inf), forks[attempt])
            high = last[leaf][0] if attempt == leaf else bound - 1
            if low <= high:
                lost.append((attempt, int(low), int(high)))
        step, at, state = last[leaf]
        found.append(
            Restart(
                attempt=branch.id,
                step=branch.fork_step,
                before=leaf,
                last_step=step,
                lost=tuple(sorted(lost)),
                stopped_unix_ns=at,
                started_unix_ns=started,
                is_planned=state in ("finished", "interrupted"),
            )
        )
    return found
