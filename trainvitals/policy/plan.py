"""Content of a run's plan journal: spent budgets, attempts, and skipped data.

Each line of the journal adds to the lines before it; nothing is ever taken back. A line is written
before its action, so a relaunch after a crash in the middle of a rollback continues the rollback.
"""

from collections.abc import Iterable, Mapping

import msgspec

from trainvitals.policy.state import FOREVER, DurablePolicyState


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """An attempt, and the step at which it left the previous attempt."""

    id: int
    parent: int | None
    fork_step: int
    """First step that it trains; states of the parent up to before that step belong to it too."""


class BatchWindow(msgspec.Struct, frozen=True, array_like=True):
    """Batches that are never trained on again; the window may extend past the end of the epoch."""

    epoch: int
    first_batch: int
    num_batches: int
    loop: int = 0
    """Index of the run's loop over data, from 0."""
    num_ranks: int = 0
    """Ranks that shared the data: the batch index applies to one rank. 0: unknown."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan journal of a run."""

    facts: DurablePolicyState = DurablePolicyState()
    branches: tuple[Branch, ...] = ()
    windows: tuple[BatchWindow, ...] = ()
    expired: int = 0
    """Number of the latest expired command: a clock that is set back cannot revive it."""

    @property
    def newest_attempt(self) -> int:
        """Return the id of the latest attempt that the policy recorded; 0 before the first."""
        return max((self.facts.attempt, *(branch.id for branch in self.branches)))

    def is_in_lineage(self, step: int, attempt: int) -> bool:
        """Return whether the policy's rollbacks kept the state before ``step`` of ``attempt``.

        States of a discarded attempt do not. Before the first attempt all of them do. A start that
        found nothing to load rolls nothing back: earlier states stay valid.
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


class PlanLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal: ``msgspec.to_builtins`` it before the action."""

    facts: DurablePolicyState | None = None
    branch: Branch | None = None
    window: BatchWindow | None = None
    expired: int = 0


def extend_plan(plan: Plan, line: PlanLine) -> Plan:
    """Add a line, such as a spent budget of the policy or skipped batches, to the plan."""
    branches, windows = plan.branches, plan.windows
    if line.branch is not None:
        branches = (*(b for b in branches if b.id != line.branch.id), line.branch)
    if line.window is not None:
        windows = (*windows, line.window)
    return Plan(
        facts=line.facts or plan.facts,
        branches=branches,
        windows=windows,
        expired=max(plan.expired, line.expired),
    )


def read_plan(lines: Iterable[Mapping[str, object]]) -> Plan:
    """Return the plan of the policy from its lines: spent budgets, attempts, skipped batches.

    Raises:
        msgspec.ValidationError: a line is damaged; a guess could give budgets back.
    """
    plan = Plan()
    for line in lines:
        plan = extend_plan(plan, msgspec.convert(line, PlanLine))
    return plan
