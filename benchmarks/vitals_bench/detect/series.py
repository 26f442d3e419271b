"""What is scored: a log of a training with what is known to have gone wrong in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from trainvitals.detect.outliers import LossKind

Number = float | None
"""A logged value as it was logged, NaN and infinities included; None where none was."""

KINDS = ("nonfinite", "spike", "divergence", "grad_explosion", "level_shift", "plateau")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that went wrong, by the indices of the records it is seen in, both included."""

    kind: str
    onset: int
    end: int
    severity: Literal["major", "minor"] = "major"
    """A minor one need not be found, and finding it is no false alarm."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One log, record by record."""

    name: str
    steps: Sequence[int]
    losses: Sequence[Number]
    norms: Sequence[Number]
    rates: Sequence[Number]
    events: tuple[Event, ...] = ()
    is_clean: bool = True
    """Nothing major is in it."""
    loss_kind: LossKind = "minimize"
    """What the run declared of its loss."""
    changes: tuple[int, ...] = ()
    """Steps of changes that the run announced."""
    family: str = ""
    """What it is shown with."""

    def undeclared(self) -> Series:
        """Return the same log of a run that declared and announced nothing."""
        return replace(self, loss_kind="minimize", changes=())

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def cadence(self) -> int:
        """Steps from one record to the next, as a rule; 1: every step was logged."""
        later = [b - a for a, b in zip(self.steps, self.steps[1:], strict=False) if b > a]
        return max(1, round(statistics.median(later))) if later else 1

    def thinned(self, every: int, phase: int = 0) -> Series:
        """Return what a log of every so many records would have kept, the first being ``phase``.

        An event of which no record is left is not in it: nobody could see it there.
        """
        kept = (
            replace(
                event,
                onset=max(0, math.ceil((event.onset - phase) / every)),
                end=(event.end - phase) // every,
            )
            for event in self.left(every, phase)
        )
        return replace(
            self,
            steps=self.steps[phase::every],
            losses=self.losses[phase::every],
            norms=self.norms[phase::every],
            rates=self.rates[phase::every],
            events=tuple(kept),
        )

    def left(self, every: int, phase: int = 0) -> list[Event]:
        """Return the events of which a record is left in a log of every so many."""
        kept = range(phase, len(self), every)
        return [e for e in self.events if any(row in kept for row in range(e.onset, e.end + 1))]


class Alarm(NamedTuple):
    """What a rule said about a record."""

    row: int
    kind: str


class Rule(Protocol):
    """Judges one record after another, and cannot look ahead."""

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Take a record in; return the kind of what is wrong with it, or None."""
        ...


def alarms_of(make: Callable[[], Rule], series: Series) -> list[Alarm]:
    """Return what a new rule says about a log."""
    update = make().update
    columns = (series.steps, series.losses, series.norms, series.rates)
    alarms = []
    for row, record in enumerate(zip(*columns, strict=True)):
        kind = update(*record)
        if kind is not None:
            alarms.append(Alarm(row, kind))
    return alarms
