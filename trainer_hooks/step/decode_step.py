"""From the summed numbers of a step to the record that detectors and the ladder see."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer_hooks.step.reduce_vector import Reduced
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CLIPS,
    OVERFLOW,
    WITHHELD,
    StepRecord,
)

NUM_FIGURES = 4
"""Numbers behind the pack that ``Derived`` is made of."""


@dataclass(frozen=True, slots=True)
class Derived:
    """The device's own figures, read back with the pack."""

    bits: int
    loss: float
    grad_norm: float
    loss_scale: float

    @classmethod
    def of(cls, numbers: list[float]) -> Derived:
        """Return the figures in the order they were stacked."""
        bits, loss, norm, scale = numbers
        return cls(int(bits), loss, norm, scale)

    def blocked(self, mode: str) -> bool:
        """Whether the update was kept back: where we only observe, by the scaler alone."""
        stops = OVERFLOW if mode == "observe" else BAD_LOSS | BAD_GRADIENTS | OVERFLOW | WITHHELD
        return bool(self.bits & stops)

    def column(self, *, clips: bool) -> int:
        """Return what is written as the step's verdict."""
        return self.bits | (CLIPS if clips else 0)


def rank_losses(reduced: Reduced) -> list[float | None]:
    """Return each rank's own loss, None where it gave none."""
    pairs = zip(reduced.by_rank("weighted_loss"), reduced.by_rank("weight"), strict=True)
    return [loss / weight if weight else None for loss, weight in pairs]


def culprits(reduced: Reduced, losses: list[float | None]) -> tuple[int, ...]:
    """Return the ranks that made the step non-finite, as far as the numbers can tell.

    A NaN loss on one rank makes every rank's gradients NaN through DDP's all-reduce, so losses are
    asked first. Where all ranks hold the same bad gradients and every loss is finite, nobody can be
    named, and nobody is.
    """
    by_loss = tuple(r for r, x in enumerate(losses) if x is not None and not math.isfinite(x))
    if by_loss:
        return by_loss
    by_squares = reduced.ranks_where("bad_squares")
    everyone = len(by_squares) == reduced.layout.num_slots
    return () if everyone and reduced.layout.num_slots > 1 else by_squares


def _largest(losses: list[float | None]) -> tuple[float | None, int]:
    """Return the largest loss and its rank; a NaN counts as larger than everything."""
    pairs = [(x, r) for r, x in enumerate(losses) if x is not None]
    if not pairs:
        return None, -1
    return max(pairs, key=lambda pair: (math.isnan(pair[0]), pair[0], -pair[1]))


def step_record(
    reduced: Reduced,
    derived: Derived,
    *,
    step: int,
    attempt: int,
    skipped: bool,
    learning_rate: float | None,
    lr_factor: float = 1.0,
    before_clip: bool = True,
) -> StepRecord:
    """Return the step as detectors see it. A function of reduced numbers: equal on all ranks.

    Unknown is not zero: with no gradient on any rank the norm is None, and so is the loss where no
    rank gave one. One that was not measured ``before_clip`` says nothing unless it is not finite.
    """
    losses = rank_losses(reduced)
    loss_max, loss_max_rank = _largest(losses)
    has_norm = reduced.has_gradients and (before_clip or not math.isfinite(derived.grad_norm))
    nonfinite = bool(derived.bits & (BAD_LOSS | BAD_GRADIENTS))
    return StepRecord(
        step=step,
        attempt=attempt,
        loss=derived.loss if loss_max is not None else None,
        loss_max=loss_max,
        loss_max_rank=loss_max_rank,
        grad_norm=derived.grad_norm if has_norm else None,
        loss_limit=reduced.limit("loss_limit"),
        grad_norm_limit=reduced.limit("grad_norm_limit"),
        nonfinite_ranks=culprits(reduced, losses) if nonfinite else (),
        failed_ranks=reduced.ranks_where("failed"),
        nonfinite_params=len(reduced.ranks_where("nonfinite_params")),
        skipped=skipped,
        withheld=bool(derived.bits & WITHHELD),
        overflow=bool(derived.bits & OVERFLOW),
        learning_rate=None if learning_rate is None else learning_rate * lr_factor,
        lr_factor=lr_factor,
        clips=bool(reduced.root["clips"]),
    )


def agreed(reduced: Reduced) -> bool:
    """Return whether all ranks reported the same digest of their last verdict."""
    digests = reduced.by_rank("digest")
    return all(d == digests[0] for d in digests)
