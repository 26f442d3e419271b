"""Evidence about the state: what the probe is asked, and what it answers."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Trigger = Literal["row", "nonfinite", "level", "lr_jump"]


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
    """Batches of 16 to 40 steps before the onset that every rank had kept and read."""
    then: float
    """Median of their losses when they were trained on."""
    now: float
    """Median of their losses with the present state; NaN or Inf where one was not finite."""
    older: float | None = None
    """The same ratio with batches of 64 and 256 steps before the onset in it, for the record."""
    detail: str = ""
    """The steps that were read, or why they could not be."""

    def ratio(self, floor: float) -> float | None:
        """Return now over then; inf where a loss is not finite; None: it says nothing.

        Fewer than three batches, and losses at or below zero, say nothing.
        """
        if self.num_batches < MIN_BATCHES or not math.isfinite(self.then):
            return None
        if self.then + floor <= 0.0:
            return None
        return (self.now + floor) / (self.then + floor) if math.isfinite(self.now) else math.inf


MIN_BATCHES = 3
NO_READING = Reading(num_batches=0, then=math.nan, now=math.nan, detail="no probe")
