"""A finite loss that is out: its first steps, and whether bad data explain it once it is back."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainvitals.detect.fleet.origin.onsets import Onset, SeriesOutlier
from trainvitals.detect.fleet.origin.reference import SIGMAS

HIGH_STEPS = 3
"""Steps in a row from which a loss is out that is above every quiet one: each raises the limit."""
_LONGEST_BATCHES = 10
"""Steps of bad data at most; a longer problem is not shown to be the data."""
_HEALED = 5
"""Steps after a loss that was out, by which it is known whether it is back."""
_LEAST_APART = 2
"""Steps in which only one of two data problems is seen, of each."""
_OTHER_DATA = 2.0
"""Ratio between the gradient norms of two kinds of bad data; each kind must vary by less."""
_HIGH_LOSSES = (("losses", "loss"), ("data", "loss"), ("data", "rank_loss"))
"""Subject and series of the onsets of a finite loss whose end shows more about them."""


class HighLossStep(NamedTuple):
    """A step whose finite loss is out. Numbers are a value, its usual value and its sigmas."""

    step: int
    norm: float
    """Gradient norm."""
    loss: tuple[float, float, float]
    rank: int = -1
    """The one rank whose loss left its distance from the others; -1: none."""
    of_rank: tuple[float, float, float] = (0.0, 0.0, 0.0)
    of_others: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def is_of_others(self) -> bool:
        """Return whether the loss of the other ranks left its own range."""
        return self.of_others[2] > 0.0

    @property
    def rank_alone(self) -> int:
        """Return the rank whose loss alone is out; -1: none."""
        return -1 if self.is_of_others else self.rank


class HighLoss:
    """The finite loss of one run while it is out, and what it is explained by once it is back."""

    def __init__(self) -> None:
        self.was_out = False
        """Whether the loss of the step before is out."""
        self.onset: Onset | None = None
        """Onset of the loss, also while a later NaN has its own onset."""
        self.steps: list[HighLossStep] = []
        """The first steps of the loss, also those before its onset."""
        self.num_above = 0
        """Steps in a row, up to this one, whose loss is above all in its reference."""
        self._num_above_before = 0
        self._above_from = math.inf
        """Height of that loss above the middle, when the row began."""
        self._height: tuple[float, bool] | None = None
        """Distance of the step's loss from its middle, and whether it is out."""
        self._bad_step: HighLossStep | None = None
        """The step, if its loss is out."""
        self._bad: list[float] = []
        self._after: list[float] = []
        """Heights of the loss while it was out, and since then."""

    def start_step(self) -> None:
        """Start a step, whose loss may be missing or NaN."""
        self.was_out = self._height is not None and self._height[1]
        self._num_above_before, self.num_above = self.num_above, 0
        self._height = self._bad_step = None

    def measure(self, height: float, peak: float, *, is_out: bool) -> None:
        """Take the height of the step's loss above its middle, and whether it left its range.

        ``peak``: height of the quiet losses. A loss that stays above it raises its own limit.
        """
        if not self._num_above_before:
            self._above_from = peak
        is_above = height > self._above_from
        self.num_above = self._num_above_before + 1 if is_above else 0
        self._height = (height, is_out or is_above)

    def take_step(self, bad: HighLossStep) -> None:
        """Take the numbers of the step, which count if its loss is out."""
        self._bad_step = bad if self._height is not None and self._height[1] else None

    def follow(self, onset: Onset | None, attempt: int) -> Onset | None:
        """Return the loss's onset once it is back, in a way that only bad data explain.

        ``onset``: onset of the current episode; None without one.
        """
        if onset is None or not (onset.is_nonfinite or onset.is_lasting or onset.is_apart):
            is_here = onset is not None and onset.attempt == attempt
            is_loss = onset is not None and (onset.subject, onset.series) in _HIGH_LOSSES
            self.onset = onset if is_here and is_loss else None
        if self._bad_step is not None and len(self.steps) < _LONGEST_BATCHES:
            self.steps.append(self._bad_step)
        if self.onset is None:
            self._bad, self._after = [], []
            self.steps = self.steps if self._bad_step else []
            return None
        if self._height is None:  # a NaN has its own onset
            return None
        height, is_out = self._height
        self._after.append(height)
        if is_out:
            self._bad += self._after
            self._after = []
        return self.onset if self._is_back() else None

    def _is_back(self) -> bool:
        """Return whether the loss fell back in one step, and has stayed there just long enough."""
        bad, after = self._bad[-_LONGEST_BATCHES:], self._after
        if len(after) != _HEALED or not bad or len(bad) < len(self._bad):
            return False
        height, peak = math.fsum(bad) / len(bad), max(bad)
        is_low = after[0] < bad[-1] / 3 and math.fsum(after) < len(after) * height / 8
        return height >= peak / 3 and is_low


def find_second_data(steps: Sequence[HighLossStep], where: str) -> SeriesOutlier | None:
    """Return the second of two data problems of a high loss that ended at once; None for one.

    Either only one concerns all ranks, or the gradients of the later one are larger.

    Args:
        steps: the first steps of the loss.
        where: location of both, unless their ranks differ.
    """
    if len(steps) < 2 * _LEAST_APART:
        return None
    if any(each.rank_alone >= 0 and each.of_rank[2] > SIGMAS for each in steps):
        return _find_other_ranks(steps)
    at = _find_larger_gradients([each.norm for each in steps])
    if at is None:
        return None
    return SeriesOutlier(steps[at].step, 10, "data", where, "loss", *steps[at].loss, True)


def _find_other_ranks(steps: Sequence[HighLossStep]) -> SeriesOutlier | None:
    """Return the second data problem if one concerns one rank and the other all ranks.

    Each is seen without the other: the first at the beginning, the second also at the end.
    """
    alone = [each.rank_alone for each in steps]
    first, last = set(alone[:_LEAST_APART]), set(alone[-_LEAST_APART:])
    if len(first) == 1 and min(first) >= 0:
        num = next((i for i, each in enumerate(steps) if each.is_of_others), len(steps))
        num_others = sum(each.is_of_others for each in steps[num:])
        if num_others >= _LEAST_APART and max(alone[num:]) < 0 and _is_as_high(steps[num]):
            at = steps[num]
            return SeriesOutlier(at.step, 10, "data", "", "loss", *at.of_others, True)
    elif len(last) == 1 and min(last) >= 0:
        rank = min(last)
        num = max((i + 1 for i, each in enumerate(steps) if each.rank != rank), default=0)
        if num >= _LEAST_APART and all(each.is_of_others for each in steps[:num]):
            at, where = steps[num], f"rank:{rank}"
            return SeriesOutlier(at.step, 9, "data", where, "rank_loss", *at.of_rank, True)
    return None


def _is_as_high(bad: HighLossStep) -> bool:
    """Return whether the others' loss rose about as much; less may follow from the rank's data."""
    other_loss, usual, _ = bad.of_others
    return other_loss - usual > (bad.of_rank[0] - usual) / 4


def _find_larger_gradients(norms: Sequence[float]) -> int | None:
    """Return the index from which all gradient norms are larger, by more than each part varies."""
    if min(norms) <= 0.0:
        return None
    for at in range(_LEAST_APART, len(norms) - _LEAST_APART + 1):
        before, after = norms[:at], norms[at:]
        spread = max(max(part) / min(part) for part in (before, after))
        if min(after) / max(before) > max(_OTHER_DATA, spread):
            return at
    return None
