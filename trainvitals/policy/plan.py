"""What the plan journal says of a run: what was spent, its branches, and the data it passed over.

Each line of the journal adds to what the lines before it said; nothing is ever taken back. It is
written before the deed, so a relaunch after a crash in the middle of a rollback goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from trainvitals.policy.state import FOREVER, LadderMemory


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """An attempt, and where it left the one before it."""

    id: int
    parent: int | None
    fork_step: int
    """The step it trains first; states of the parent up to before that step are its own too."""


class Window(msgspec.Struct, frozen=True, array_like=True):
    """Batches that are never trained on again; it may run over the end of the epoch."""

    epoch: int
    first_batch: int
    num_batches: int
    loop: int = 0
    """Which loop over data of the run it was in, from 0."""
    num_ranks: int = 0
    """Ranks that shared the data then: the index is one rank's. 0 where that is not known."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    facts: LadderMemory = LadderMemory()
    branches: tuple[Branch, ...] = ()
    windows: tuple[Window, ...] = ()
    expired: int = 0
    """Number of the newest command that came too late: no clock that is set back revives it."""

    @property
    def newest_attempt(self) -> int:
        """The newest branch there ever was; 0 before the first."""
        return max((self.facts.attempt, *(branch.id for branch in self.branches)))

    def holds(self, step: int, attempt: int) -> bool:
        """Return whether the state before ``step`` of ``attempt`` lies on the run's present branch.

        States of a branch that was rolled back away do not. Before the first branch all do. A start
        that found nothing to load rolls nothing back: what came before it is held as before.
        """
        if not self.branches:
            return True
        by_id = {branch.id: branch for branch in self.branches}
        here: Branch | None = by_id[max(by_id)]
        latest = FOREVER
        while here is not None:
            if here.id == attempt:
                return step <= latest
            latest = min(latest, here.fork_step)
            if here.parent is None:
                latest = FOREVER
                here = by_id.get(max((b for b in by_id if b < here.id), default=-1))
            elif here.parent in by_id:
                here = by_id[here.parent]
            else:
                return here.parent == attempt and step <= latest
        return False


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal."""

    facts: LadderMemory | None = None
    branch: Branch | None = None
    window: Window | None = None
    expired: int = 0


def plan_line(
    facts: LadderMemory,
    *,
    branch: Branch | None = None,
    window: Window | None = None,
    expired: int = 0,
) -> dict[str, object]:
    """Return what is to be written down before a deed."""
    line: dict[str, object] = msgspec.to_builtins(_Line(facts, branch, window, expired))
    return line


def extend(
    plan: Plan,
    *,
    facts: LadderMemory,
    branch: Branch | None = None,
    window: Window | None = None,
    expired: int = 0,
) -> Plan:
    """Return the plan with one more line; a branch that is told again is the newer word."""
    branches, windows = plan.branches, plan.windows
    if branch is not None:
        branches = (*(b for b in branches if b.id != branch.id), branch)
    if window is not None:
        windows = (*windows, window)
    expired = max(plan.expired, expired)
    return Plan(facts=facts, branches=branches, windows=windows, expired=expired)


def read_plan(lines: Iterable[Mapping[str, object]]) -> Plan:
    """Return what the lines say together.

    Raises:
        msgspec.ValidationError: a line is damaged; a guess could give budgets back.
    """
    plan = Plan()
    for line in lines:
        entry = msgspec.convert(line, _Line)
        plan = extend(
            plan,
            facts=entry.facts or plan.facts,
            branch=entry.branch,
            window=entry.window,
            expired=entry.expired,
        )
    return plan
