"""The run's plan on every rank, and its journal on rank 0."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trainer_hooks.failopen import FaultCounter
from trainvitals.io.rundir import RunDir
from trainvitals.policy.plan import BatchWindow, Branch, Plan, PlanLine, extend_plan
from trainvitals.policy.state import DurablePolicyState


@dataclass(slots=True, kw_only=True)
class PlanJournal:
    """State that no restore resets: equal on all ranks, durable on rank 0 before the action."""

    plan: Plan
    run_dir: RunDir
    is_rank0: bool
    faults: FaultCounter

    def add(
        self,
        facts: DurablePolicyState,
        *,
        branch: Branch | None = None,
        window: BatchWindow | None = None,
        expired: int = 0,
    ) -> None:
        """Add the next action; durable on rank 0 when this returns."""
        line = PlanLine(facts, branch, window, expired)
        self.plan = extend_plan(self.plan, line)
        if self.is_rank0:
            # A full disk must not separate rank 0 from the others, which continue the action.
            with self.faults.fail_open("plan"):
                self.run_dir.append_plan(msgspec.to_builtins(line))
