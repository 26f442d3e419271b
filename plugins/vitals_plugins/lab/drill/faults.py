"""The faults of a drill, the records that its ranks write, and the plan that they get."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from trainvitals.errors import UNREADABLE

VARIABLE = "VITALS_DRILL"
"""Environment variable with the plan of a drill's training, as JSON."""
FAULT_STEP = 80
"""Step of a fault: an outlier needs 50 trained steps as a reference, a rollback a healthy snapshot
at least 20 steps older than the fault."""
CONTINUED_STEPS = 20
"""Steps after a fault, or after a restart, from which training counts as continued."""
POISONED_STEPS = 8
"""Steps with damaged inputs in the fault ``poisoned_window``."""


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a drill."""

    name: str
    num_steps: int = 60
    """Steps that are trained after the fault."""
    min_ranks: int = 1
    alerts: tuple[str, ...] = ()
    """Alerts, one of which must arrive at a receiver if Vitals does not repair the fault."""
    is_repaired: bool = False
    """Whether mode ``heal`` repairs it, without an alert from ``alerts``."""
    is_restarted: bool = False
    """Whether it kills a rank, so that a second start with the same run id follows."""

    def pages(self, mode: str) -> tuple[str, ...]:
        """Return the alerts to wait for after a drilled training in this mode."""
        return () if self.is_repaired and mode == "heal" else self.alerts


FAULTS: dict[str, FaultSpec] = {
    spec.name: spec
    for spec in (
        FaultSpec(name="nan_gradient", num_steps=30),
        FaultSpec(name="spike", num_steps=30),
        FaultSpec(name="poisoned_window"),
        FaultSpec(
            name="nan_parameters",
            alerts=("TrainingHalted", "NonFiniteState", "StateDamaged"),
            is_repaired=True,
        ),
        # Each parameter is compared every 50 steps; the next comparison names the rank.
        FaultSpec(
            name="bit_flip",
            num_steps=110,
            min_ranks=2,
            alerts=("ReplicaCorrupted",),
            is_repaired=True,
        ),
        # 20 of 32 steps must be late.
        FaultSpec(
            name="slow_rank",
            num_steps=100,
            min_ranks=2,
            alerts=("StragglerRank",),
        ),
        FaultSpec(
            name="stopped_rank",
            num_steps=30,
            min_ranks=2,
            alerts=("RankHung",),
        ),
        FaultSpec(
            name="killed_rank",
            alerts=("RankLost", "RunLost", "RunFailed"),
            is_restarted=True,
        ),
        FaultSpec(
            name="forgotten_lr",
            alerts=("LearningRateAnomaly",),
            is_restarted=True,
        ),
        FaultSpec(name="killed_agent", num_steps=30),
        FaultSpec(name="collector_down"),
        FaultSpec(name="full_disk", num_steps=30),
    )
}
"""All faults, in the order in which a drill injects them."""


class DrillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one training of a drill."""

    record: str
    """File to which all ranks append records."""
    fault: str = ""
    """Empty: nothing is injected."""
    inject_step: int = FAULT_STEP
    end_step: int
    """Step before which the training ends."""
    acknowledgment: str
    """File for which ranks wait: it exists once the drill has killed the collector, or got the
    alerts that the end of the run would resolve."""
    waits_at_end: bool = False
    small_disk: str = ""
    """Mount point of a small disk, which ``full_disk`` fills."""


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one rank about its training."""

    kind: Literal["started", "killed", "injected", "impossible", "continued", "ended"]
    rank: int
    step: int = -1
    time_unix_ns: int = 0
    pid: int = 0
    text: str = ""
    """Reason why a fault cannot be injected."""
    run_id: str = ""
    mode: str = ""
    world_size: int = 1
    first_save_step: int = -1
    """Step at which the first checkpoint is on disk; -1 without checkpoints."""
    has_probe: bool = False
    owns_step: bool = True
    """Whether Vitals controls the step; ``attach`` and adapters roll nothing back."""
    state_bytes: int = 0
    """Size of the parameters, of all ranks."""
    step_seconds: float | None = None
    """Median time of a step before the fault."""


def read_records(path: Path) -> list[DrillRecord]:
    """Return the records that the ranks of a drill have written so far."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(msgspec.json.decode(line, type=DrillRecord))
        except UNREADABLE:  # a line that is being written
            continue
    return records
