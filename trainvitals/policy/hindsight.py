"""Shadow mode: how often what ``observe`` would have done would have been right.

Nobody acted, so the run itself shows what the update did. The deed was *needed* where the loss
stayed above where it had been, and *unneeded* where the loss came back by itself (a skip costs one
step). To hold a non-finite update back is always needed: it ruins the parameters. A judgement takes
the steps that came after; until they are there it is *open*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from trainvitals.records import Decision
from trainvitals.windows import RobustWindow

Outcome = Literal["needed", "unneeded", "open"]

BEFORE = 32
"""Steps before the onset whose median is where the loss had been."""
AFTER = {"skip_step": 8, "rollback": 200, "halt": 200}
"""Steps after it by which the loss must be back: for one update, and for a course of them."""
WITHIN = 8
"""Steps whose median tells that it is."""
SIGMAS = 3.0
_SIGMA_ABOVE = 0.16
_LEAST = 0.01
"""Of the loss: smaller rises are no harm that anybody could see."""


def outcome(decision: Decision, losses: Mapping[int, float]) -> Outcome | None:
    """Return what became of a decision that was not carried out; None for one that was.

    Args:
        decision: an entry of the ledger.
        losses: the run's loss by step, around the decision; what is not finite counts as harm.
    """
    patience = AFTER.get(decision.action)
    if decision.acted or patience is None:
        return None
    if decision.cause.startswith("nonfinite"):
        return "needed"
    before = RobustWindow(BEFORE)
    for step in range(decision.step - 2 * BEFORE, decision.step):
        if math.isfinite(loss := losses.get(step, math.nan)):
            before.push(loss)
    last = decision.step + patience
    after = [losses[step] for step in range(last - WITHIN + 1, last + 1) if step in losses]
    if len(before) < WITHIN or not after or max(losses) < last:
        return "open"
    if any(not math.isfinite(loss) for loss in after):
        return "needed"
    level = before.median()
    noise = before.upper(_SIGMA_ABOVE) - level
    now = RobustWindow(WITHIN)
    now.restore(after)
    back = now.median() <= level + max(SIGMAS * noise, _LEAST * abs(level))
    return "unneeded" if back else "needed"


def tally(outcomes: Iterable[str | None]) -> str:
    """Return the outcomes in words; empty where there is none.

    >>> tally(["needed", "needed", "unneeded", None])
    '2 of 3 would have been needed, 1 was not'
    """
    counts = Counter(outcome for outcome in outcomes if outcome is not None)
    judged = counts["needed"] + counts["unneeded"]
    if not counts:
        return ""
    words = f"{counts['needed']} of {judged} would have been needed, {counts['unneeded']} was not"
    if counts["unneeded"] != 1:
        words = words.replace("was not", "were not")
    return words + (f"; {counts['open']} cannot be told yet" if counts["open"] else "")
