"""Evidence: what the probe is asked about the state, and what later steps say of a decision.

In shadow mode nobody acted, so the run itself shows what the update did. The deed was *needed*
where the loss stayed above where it had been, and *unneeded* where the loss came back by itself (a
skip costs one step). To hold a non-finite update back is always needed: it ruins the parameters. A
judgement takes the steps that came after; until they are there it is *open*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from trainvitals.detect.outliers import RobustWindow
from trainvitals.records import Decision, StateRead

Trigger = Literal["spike", "nonfinite", "level"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the state: how does it do now on batches that it did well on before?"""

    trigger: Trigger
    step: int
    """The step whose verdict asks."""
    onset_step: int
    """First step of the trouble; batches are taken from before it."""
    floor: float
    """Loss that is added to both sides of the ratio: a part of the run's first losses."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, equal on all ranks. Losses are means over ranks of each rank's own loss."""

    num_batches: int
    """Batches of 16 to 40 steps before the onset that every rank had kept and read; where these are
    fewer than three, the nearest of up to 100 steps before it."""
    then: float
    """Median of their losses when they were trained on."""
    now: float
    """Median of their losses with the present state; NaN or Inf where one was not finite."""
    older: float | None = None
    """The same ratio with batches of 64 and 256 steps before the onset in it, for the record."""
    detail: str = ""
    """The steps that were read, or why they could not be."""
    has_gradient: bool = True
    """Whether the gradient of one kept batch is finite on every rank, or is not known."""

    def ratio(self, floor: float) -> float | None:
        """Return now over then; inf where a loss or a gradient is not finite; None: unknown.

        Fewer than three batches, and losses at or below zero, say nothing.
        """
        if self.num_batches < MIN_BATCHES or not math.isfinite(self.then):
            return None
        if not self.has_gradient:
            return math.inf
        if self.then + floor <= 0.0:
            return None
        return (self.now + floor) / (self.then + floor) if math.isfinite(self.now) else math.inf


MIN_BATCHES = 3
NO_READING = Reading(num_batches=0, then=math.nan, now=math.nan, detail="no probe")

_WITHHELD = "the state is healthy, so the updates were withheld and nothing was rolled back"
NONFINITE_GRADIENT = "the gradient on a kept batch is not finite"
_WORSE = "the state got worse on these batches, but not enough to prove damage"
_MEANINGS_OF_STATE: dict[tuple[str, str], str] = {
    ("spike", "sound"): "the state is healthy, so no update is withheld",
    ("row", "sound"): _WITHHELD,
    ("nonfinite", "sound"): _WITHHELD.replace("withheld", "skipped"),
    ("lr_jump", "sound"): "the state is healthy, so the learning rate was not changed",
    ("level", "state"): "the state got worse on these batches",
    ("spike", "worse"): f"{_WORSE}; no update is withheld",
    ("row", "worse"): f"{_WORSE}; the next outliers in a row are applied, not withheld",
}
"""By trigger and verdict. Older versions asked with the triggers ``row`` and ``lr_jump``."""
_MEANINGS = {"sound": "the state is healthy", "state": "the state is damaged", "worse": _WORSE}


def of_reading(event: StateRead) -> str:
    """Return what the probe or an evaluation said of the state, with its numbers."""
    is_probe = event.trigger != "evaluation"
    who = "Probe" if is_probe else "Evaluation"
    if event.verdict == "abstained" or event.ratio is None:
        few = f"only {event.num_batches} kept batches could be evaluated; it needs 3"
        return f"{who}: no verdict: {event.detail or (few if is_probe else 'nothing to compare')}"
    numbers = [f"{event.num_batches} batches"] if is_probe else []
    numbers += [] if event.then is None else [f"{event.then:.4g} before"]
    numbers += [] if event.now is None else [f"{event.now:.4g} now"]
    if is_probe and len(numbers) > 1:
        numbers.append("a share of the initial loss added to both")
    shown = f" ({', '.join(numbers)})" if numbers else ""
    if event.detail.startswith(NONFINITE_GRADIENT):
        return f"{who}: {event.detail}{shown}: {meaning_of(event)}"
    times = f"{event.ratio:.3g}x" if math.isfinite(event.ratio) else "NaN or infinite, against"
    what = "loss on kept batches is" if is_probe else "the loss is"
    earlier = "its earlier value" if is_probe else "that of the previous evaluation"
    return f"{who}: {what} {times} {earlier}{shown}: {meaning_of(event)}"


def meaning_of(event: StateRead) -> str:
    """Return what a verdict about the state means for the run."""
    return _MEANINGS_OF_STATE.get((event.trigger, event.verdict), _MEANINGS[event.verdict])


# -------------------------------------------------------------------------------------- hindsight


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
    return words + (f"; {counts['open']} are undecided" if counts["open"] else "")
