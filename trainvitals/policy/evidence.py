"""Evidence about the state: queries to the probe, and its readings."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trainvitals.records import StateRead

Trigger = Literal["spike", "nonfinite", "level"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A query to the probe: loss of the current state on batches on which it was good before."""

    trigger: Trigger
    step: int
    """The step whose verdict needs the probe."""
    onset_step: int
    """First step of the problem; batches are taken from before it."""
    floor: float
    """Loss added to both sides of the ratio: a share of the run's first losses."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the probe, equal on all ranks. Losses are means over the losses of the ranks."""

    num_batches: int
    """Batches of 16 to 40 steps before the onset that every rank had kept and read. If there are
    fewer than three, the nearest ones of up to 100 steps before it."""
    then: float
    """Median of their losses at the time of training."""
    now: float
    """Median of their losses with the current state; NaN or Inf if one of them is non-finite."""
    older: float | None = None
    """The same ratio including batches of 64 and 256 steps before the onset, for the record."""
    detail: str = ""
    """The steps that were read, or the reason why none could be."""
    has_gradient: bool = True
    """Whether the gradient of one kept batch is finite on every rank, or unknown."""

    def ratio(self, floor: float) -> float | None:
        """Return now / then; inf if a loss or a gradient is non-finite; None if unknown.

        Fewer than three batches, or losses at or below zero, give no ratio.
        """
        if self.num_batches < MIN_BATCHES or not math.isfinite(self.then):
            return None
        if not self.has_gradient:
            return math.inf
        if self.then + floor <= 0.0:
            return None
        return (self.now + floor) / (self.then + floor) if math.isfinite(self.now) else math.inf


MIN_BATCHES = 3
NO_READING = ProbeResult(num_batches=0, then=math.nan, now=math.nan, detail="no probe")

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
"""By trigger and verdict. Older versions used the triggers ``row`` and ``lr_jump`` too."""
_MEANINGS = {"sound": "the state is healthy", "state": "the state is damaged", "worse": _WORSE}


def of_reading(event: StateRead) -> str:
    """Return a sentence about the result of the probe or an evaluation, with its numbers."""
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
    """Return the meaning of a verdict about the state for the run."""
    return _MEANINGS_OF_STATE.get((event.trigger, event.verdict), _MEANINGS[event.verdict])
