"""What the demo injects, what it expects to read in the ledger, and whether it did."""

from collections.abc import Sequence
from typing import NamedTuple

from trainvitals.records import Decision
from trainvitals.testing.faults import FaultPlan

NAN_GRADIENT_STEP = 150
POISON_FIRST, POISON_LAST = 260, 300
NAN_PARAMETERS_STEP = 470
STEPS = 600


class Expected(NamedTuple):
    """One ledger entry that must be there; rank -1: no single rank is to blame."""

    fault: str
    action: str
    rule: str
    rank: int
    step: int


def plan() -> FaultPlan:
    """Return the demo's faults."""
    return (
        FaultPlan()
        .nan_gradient_at(rank=1, step=NAN_GRADIENT_STEP)
        .poison_batches(first=POISON_FIRST, last=POISON_LAST)
        .nan_parameters_at(rank=1, step=NAN_PARAMETERS_STEP)
    )


class Match(NamedTuple):
    """An expected entry and the decision that answers it, if there is one."""

    expected: Expected
    decision: Decision | None


def match(expected: Sequence[Expected], decisions: Sequence[Decision]) -> list[Match]:
    """Pair each expected entry with the first unused decision of that action, rule, rank and step."""
    left = list(decisions)
    pairs = []
    for want in expected:
        found = next((d for d in left if _answers(want, d)), None)
        if found is not None:
            left.remove(found)
        pairs.append(Match(want, found))
    return pairs


def unexpected(matches: Sequence[Match], decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions that answer nothing: false alarms."""
    used = {id(m.decision) for m in matches}
    return [d for d in decisions if id(d) not in used]


def _answers(want: Expected, decision: Decision) -> bool:
    return (want.action, want.rule, want.rank, want.step) == (
        decision.action,
        decision.rule,
        decision.rank,
        decision.step,
    )
