"""Base of the detectors over the scalars of a post-training run.

They see one ``MergedStep`` per logged step, whose columns are the quantities of ``names.py``. A
detector abstains while its quantities are missing, and counts values, not steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Literal

from trainvitals.detect.fleet.base import Episode, MergedStep, Watcher, number, upper_median
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding
from trainvitals.stateful import Stateful, StateKey

Outcome = Literal["unknown", "at_best", "fell", "flat"]

_FIRST = 3
"""Values of the first level. More would hide the gain of a task that is learned in a few steps."""
_MAX_CHANGES = 50
_OUTLIERS = 0.1
"""Largest part of the changes that is left out of their mean."""
_TO_SIGMA = 1.075
"""Standard deviation of a Gaussian value, divided by the mean absolute change of two values without
the largest tenth: sqrt(pi) / 2, divided by 0.824."""
_LEAST_GAIN = 0.01
"""Smallest gain, as a part of the reward, however little noise it has."""
_CERTAIN = 3.0
"""Student's t above which a trend is not noise."""
_POSSIBLE = 1.0
"""Student's t above which a trend may be one: the reward is not called flat then."""
_SHORT = 5
"""Values in the level of a quantity that falls fast."""


class RewardCourse(Stateful):
    """Level of the reward at the start, at its best and now, compared with its noise.

    It separates success from failure: entropy falls and groups have equal rewards in both, but only
    in success did the reward rise and stay.
    """

    STATE = ("_recent", "_early", "_changes", "_trend", "_has_changed", "best")

    def __init__(self, config: PostTrainingConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.window)
        self._early: list[float] = []
        self._changes: deque[float] = deque(maxlen=_MAX_CHANGES)
        self._trend = Trend()
        self._has_changed = False
        """Whether a change was announced: other data need not give a gain."""
        self.best: float | None = None
        """Highest level so far."""

    def add(self, value: float) -> bool:
        """Add a value; return whether the level is the highest so far."""
        if self._recent:
            self._changes.append(abs(value - self._recent[-1]))
        self._recent.append(value)
        self._trend.add(value)
        if len(self._early) < _FIRST:
            self._early.append(value)
        level = self.level
        if level is None or (self.best is not None and level <= self.best):
            return False
        self.best = level
        return True

    def restart(self) -> None:
        """Discard the recent values: the run continues from other weights."""
        self._recent.clear()

    def rebaseline(self) -> None:
        """Start again: a change of the data or the reward was announced."""
        self._recent.clear()
        self._early.clear()
        self._changes.clear()
        self._trend = Trend()
        self._has_changed, self.best = True, None

    @property
    def level(self) -> float | None:
        """Median of the recent values; None while there are too few."""
        recent = self._recent
        return upper_median(recent) if len(recent) == self._config.window else None

    @property
    def first(self) -> float:
        """Level of the first values."""
        return upper_median(self._early) if self._early else 0.0

    @property
    def sigma(self) -> float:
        """Standard deviation of a value, from the changes; the largest ones are left out."""
        changes = sorted(self._changes)
        del changes[len(changes) - int(_OUTLIERS * len(changes)) :]
        return _TO_SIGMA * sum(changes) / len(changes) if changes else 0.0

    @property
    def outcome(self) -> Outcome:
        """Course so far: ``flat`` if the reward neither rose nor fell by more than its noise."""
        level, best, config = self.level, self.best, self._config
        if level is None or best is None or self._trend.num < 2 * config.window:
            return "unknown"
        first, noise = self.first, config.gain_sigmas * self.sigma
        counts = max(noise, _LEAST_GAIN * max(abs(best), abs(first)))
        gain = best - first
        t = self._trend.t
        if gain <= counts and t < _CERTAIN:
            if level < first - counts:
                return "fell"
            return "unknown" if self._has_changed or t > _POSSIBLE else "flat"
        return "at_best" if level >= best - max(config.at_best * gain, noise) else "fell"

    def describe(self) -> str:
        """Return the course as text."""
        level, best = self.level or 0.0, self.best or 0.0
        if self.outcome == "flat":
            return f"the reward is {level:.3g}, and was {self.first:.3g} at the start"
        return f"the reward is {level:.3g}, and was {best:.3g} at its best"


class Trend(Stateful):
    """Linear trend of all values: it finds a slow gain that is smaller than the noise."""

    STATE = ("num", "_mean", "_product", "_square")

    def __init__(self) -> None:
        self.num = 0
        self._mean = 0.0
        self._product = 0.0
        """Sum of the products of index and value, both centered."""
        self._square = 0.0
        """Sum of the squares of the centered values."""

    def add(self, value: float) -> None:
        """Add the next value."""
        # Welford's update of the covariance with the index.
        change = value - self._mean
        self._mean += change / (self.num + 1)
        self._product += change * (self.num - (self.num - 1) / 2) * self.num / (self.num + 1)
        self._square += change * (value - self._mean)
        self.num += 1

    @property
    def t(self) -> float:
        """Student's t of the slope; 0 if unknown."""
        num = self.num
        squares = (num**3 - num) / 12 * self._square
        if num < _FIRST or not 0.0 < squares < math.inf:
            return 0.0
        r = min(max(self._product / math.sqrt(squares), -1.0), 1.0)
        return r * math.sqrt((num - 2) / max(1.0 - r * r, 1e-12))


class ShareCourse(Stateful):
    """Mean of a share over the recent values, and its lowest level."""

    STATE = ("_recent", "lowest")

    def __init__(self, num: int) -> None:
        self._recent: deque[float] = deque(maxlen=num)
        self.lowest = 1.0
        """Lowest mean over five values: of more, a fast rise would hide the first ones."""

    def add(self, value: float) -> None:
        """Add a value between 0 and 1."""
        self._recent.append(min(max(value, 0.0), 1.0))
        if len(self._recent) >= _SHORT:
            mean = sum(islice(reversed(self._recent), _SHORT)) / _SHORT
            self.lowest = min(self.lowest, mean)

    def restart(self) -> None:
        """Discard the recent values."""
        self._recent.clear()

    def rebaseline(self) -> None:
        """Start again: a change of the data was announced."""
        self._recent.clear()
        self.lowest = 1.0

    @property
    def mean(self) -> float | None:
        """Mean over the recent values; None while there are too few."""
        recent = self._recent
        return sum(recent) / len(recent) if len(recent) == recent.maxlen else None


class ShortLevel(Stateful):
    """Median of the last five values, and its highest one so far."""

    STATE = ("_recent", "highest")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_SHORT)
        self.highest: float | None = None

    def add(self, value: float) -> float | None:
        """Add a value; return the level, or None while there are too few values."""
        self._recent.append(value)
        if len(self._recent) < _SHORT:
            return None
        level = upper_median(self._recent)
        self.highest = level if self.highest is None else max(self.highest, level)
        return level

    def restart(self) -> None:
        """Discard the recent values."""
        self._recent.clear()

    def rebaseline(self) -> None:
        """Keep the highest level: a change of the data gives a policy no new entropy."""
        self._recent.clear()


class PostTrainingWatcher(Watcher):
    """Base: reports a lasting condition once, with its numbers, causes and remedy.

    A subclass provides ``is_for``, ``_judge`` and ``STATE``, and lists its parts with recent values
    in ``_courses``.
    """

    STATE: ClassVar[tuple[str | StateKey, ...]] = ("_episode",)

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__()
        self._config = config or PostTrainingConfig()
        self._episode = Episode(self._config.clear_after)

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether it judges this kind of run; by default one that samples completions."""
        return spec.samples

    @property
    def goes_on(self) -> bool:
        """Whether the reported condition still holds."""
        return self._episode.on

    def _courses(self) -> Sequence[RewardCourse | ShareCourse | ShortLevel]:
        return ()

    def _restarted(self, merged: MergedStep) -> None:
        for course in self._courses():
            course.restart()

    def rebaseline(self) -> None:
        """Judge only what follows: a change of the data or the reward was announced."""
        for course in self._courses():
            course.rebaseline()

    def _report(self, finding: Finding | None) -> tuple[Finding, ...]:
        """Return the finding if its condition starts; None: the condition does not hold."""
        begins = self._episode.begins(finding is not None)
        return (finding,) if begins and finding is not None else ()


def quantity(merged: MergedStep, name: str) -> float | None:
    """Return a finite quantity of the logged step; None if it is missing."""
    return number(merged.run.get(name))
