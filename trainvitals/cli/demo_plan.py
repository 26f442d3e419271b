"""What the demo injects, what it expects to read in the ledger, and whether it did."""

from collections.abc import Sequence
from typing import NamedTuple

from trainvitals.records import Decision
from trainvitals.testing.faults import FaultPlan

STEPS = 600
NAN_GRADIENT_STEP = 150
POISON_FIRST, POISON_LAST = 400, 410
NAN_PARAMETERS_STEP = 540
LOSS_TOLERANCE = 0.02
"""How far above the clean run's validation loss the guarded run may end."""


class Expected(NamedTuple):
    """One ledger entry that must be there; rank -1: no single rank is to blame."""

    fault: str
    action: str
    rule: str
    rank: int
    step: int


class Match(NamedTuple):
    """An expected entry and the decision that answers it, if there is one."""

    expected: Expected
    decision: Decision | None


def plan() -> FaultPlan:
    """Return the demo's faults."""
    return (
        FaultPlan()
        .nan_gradient_at(rank=1, step=NAN_GRADIENT_STEP)
        .poison_batches(first=POISON_FIRST, last=POISON_LAST)
        .nan_parameters_at(rank=1, step=NAN_PARAMETERS_STEP)
    )


def expected() -> list[Expected]:
    """Return the ledger the faults must lead to.

    Until the first rollback a batch's index is its step. The first outlier of a row is left to the
    clip; the ones behind it are withheld. After a non-finite step the ranks look at their
    parameters; that is known two steps later.
    """
    poison, params = "poisoned data", "NaN parameters"
    first, broken = POISON_FIRST, NAN_PARAMETERS_STEP
    return [
        Expected("NaN gradient", "skip_step", "nonfinite", 1, NAN_GRADIENT_STEP),
        *(
            Expected(poison, "skip_step", "outlier", -1, step)
            for step in range(first + 1, POISON_LAST)
        ),
        Expected(params, "skip_step", "nonfinite", 1, broken),
        Expected(params, "skip_step", "nonfinite", 1, broken + 1),
        Expected(params, "rollback", "nonfinite_params", 1, broken + 2),
    ]


def match(expected: Sequence[Expected], decisions: Sequence[Decision]) -> list[Match]:
    """Pair each expected entry with the first unused decision of that action, rule, rank, step."""
    left = list(decisions)
    pairs = []
    for entry in expected:
        decision = next((d for d in left if _answers(entry, d)), None)
        if decision is not None:
            left.remove(decision)
        pairs.append(Match(entry, decision))
    return pairs


def unexpected(matches: Sequence[Match], decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions that answer nothing: false alarms."""
    used = {id(m.decision) for m in matches}
    return [d for d in decisions if id(d) not in used]


def _answers(want: Expected, decision: Decision) -> bool:
    expected = (want.action, want.rule, want.rank, want.step)
    return expected == (decision.action, decision.rule, decision.rank, decision.step)
