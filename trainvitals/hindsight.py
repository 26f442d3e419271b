"""Decisions in hindsight: what observe mode shows about an action that was not taken.

In observe mode Vitals took no action, so the run itself shows the effect of the update. A decision
was *needed* if the loss stayed above its earlier level, and *unneeded* if the loss recovered by
itself (a skip costs one step). Skipping a non-finite update is always needed: the update ruins the
parameters. A judgement needs the steps after the decision; until they exist it is *open*.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from trainvitals.detect.outliers import RobustWindow
from trainvitals.records import Decision

Outcome = Literal["needed", "unneeded", "open"]
HINDSIGHT_WORDS = {
    "needed": "would have helped",
    "unneeded": "not needed",
    "open": "too early to say",
}
"""Displayed outcomes."""

BEFORE = 32
"""Steps before the onset whose median is the earlier level of the loss."""
AFTER = {"skip_step": 8, "rollback": 200, "halt": 200}
"""Steps after the decision by which the loss must be back: for one update, and for many."""
_OF_REWARD = "post_training"
"""Rule of a halt because of the reward, the entropy and the divergence."""
WITHIN = 8
"""Steps whose median shows whether the loss is back."""
SIGMAS = 3.0
_SIGMA_ABOVE = 0.16
_LEAST = 0.01
"""Share of the loss: smaller rises are not noticeable harm."""


def judge_decision_in_hindsight(decision: Decision, losses: Mapping[int, float]) -> Outcome | None:
    """Return the outcome of a decision that was not carried out; None if it was carried out.

    Also None if the loss says nothing about it: the policy of a post-training run is lost.

    Args:
        decision: an entry of the decision log.
        losses: the run's loss by step, around the decision; a non-finite loss counts as harm.
    """
    patience = AFTER.get(decision.action)
    if decision.acted or patience is None or decision.rule == _OF_REWARD:
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


def summarize_outcomes(outcomes: Iterable[str | None]) -> str:
    """Return a sentence on how many recorded decisions were needed in hindsight; "" for none.

    >>> summarize_outcomes(["needed", "needed", "unneeded", None])
    '2 of 3 would have been needed, 1 was not'
    """
    counts = Counter(outcome for outcome in outcomes if outcome is not None)
    judged = counts["needed"] + counts["unneeded"]
    if not counts:
        return ""
    summary = f"{counts['needed']} of {judged} would have been needed, {counts['unneeded']} was not"
    if counts["unneeded"] != 1:
        summary = summary.replace("was not", "were not")
    return summary + (f"; {counts['open']} are undecided" if counts["open"] else "")
