"""Base of the detectors over the scalars of a post-training run.

They see one ``MergedStep`` per logged step, whose columns are the quantities of ``names.py``. A
detector abstains while its quantities are missing, and counts values, not steps.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, pairwise
from typing import ClassVar, Literal

from trainvitals.detect.fleet.base import LastingWatcher, MergedStep, number, upper_median
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding
from trainvitals.stateful import Stateful, StateKey

Outcome = Literal["unknown", "at_best", "fell", "flat"]

_FIRST = 3
"""Values of the first level. More would hide the gain of a task that is learned in a few steps."""
_MAX_VALUES = 200
"""Values from which the noise is measured."""
_OUTLIERS = 0.1
"""Largest part of the changes that is left out of their mean."""
_TO_SIGMA = 1.075
"""Standard deviation of a Gaussian value, divided by the mean absolute change of two values without
the largest tenth: sqrt(pi) / 2, divided by 0.824."""
_TO_TOTAL_SIGMA = 0.605
"""The same, divided by the median absolute second difference over five values: 1.483 / sqrt(6). It
contains slow noise too, such as that of an order of the prompts, and no steady rise or fall."""
_SLOW_NOISE = 2.5
"""Weight of slow noise: the median of a window does not reduce it."""
_LAGS = 12
"""Values per distance over which drift is measured: a longer distance would contain the fault."""
_DRIFT_EXCESS = 1.2
"""Squared changes over a distance, compared with those of neighbors, that noise alone may have."""
_DRIFT_SPAN = 100
"""Values over which drift adds up. A slower one is a trend."""
_LEAST_GAIN = 0.01
"""Smallest gain, as a part of the reward, however little noise it has."""
_CERTAIN = 3.0
"""Student's t above which a trend is not noise."""
_POSSIBLE = 3.0
"""Standard errors above the measured slope that the true one may have."""
_AHEAD = 1_000
"""Values in which a slow success would be seen: the reward is not called flat if it may gain enough
in this many."""
_SOLVED = 0.9
"""Level of a reward between 0 and 1 that may be the best possible one."""
_TAIL = 2.0
"""Standard deviations above the mean that the highest of 100 values exceeds, unless it is cut off:
90% of Gaussian samples do, 99% of 200 values."""
_SKEW = 1.1
"""How much farther the lowest value is from the mean than one that is cut off."""
_SHORT = 5
"""Values in the level of a quantity that falls fast."""
_FALLEN = 0.8
"""Part of the values before to which an entropy falls that is lost at once with the reward."""
_SUDDEN = 3
"""Consecutive values that show a sudden loss or rise."""
_SUDDEN_SIGMAS = 4.0
"""Smallest loss of each of these, in standard deviations of a value."""
ABRUPT = 2
"""Consecutive values that show a larger one."""
_ABRUPT_SIGMAS = 6.0
_TIMES_CHANGES = 2.0
"""Smallest such loss, compared with the largest change before: single batches may be harder."""
_LOW_VALUES = 8
"""Rewards of a policy with little entropy that show whether it gained."""
_LOW_FOR_LONG = 12
"""Such rewards from which a rise that noise explains is likely noise."""
_FEW = 30
"""Rewards before: if the entropy was lost in as many, a success is larger than the noise."""
_GAINED = 2.5
"""Standard errors of a rise of the reward that may be a gain."""
_RISES = 1.0
"""Student's t of the reward's trend from which a slow gain is likely."""
_RISES_FOR_LONG = 1.5
"""The same after a longer time with little entropy: what is deterministic gains nothing more."""
_MAX_MILESTONES = 16
_NUM_OF_TREND = 6
"""Numbers in the state of a trend."""


class Milestones(Stateful):
    """Earlier values of a state, by step: a rollback restores those from before its step.

    They are evenly spaced over the run. What was learned between the last one and the step is
    forgotten too.
    """

    STATE = ("_values", "_every", "_num")

    def __init__(self) -> None:
        self._values: list[list[float | None]] = []
        """A step, and the values after it."""
        self._every = 1
        self._num = 0

    def add(self, step: int, *values: float | None) -> None:
        """Record the values of a post-training detector after a step, for later rollbacks."""
        if self._num % self._every == 0:
            self._values.append([step, *values])
            if len(self._values) > _MAX_MILESTONES:
                del self._values[1::2]
                self._every *= 2
        self._num += 1

    def go_back(self, step: int) -> list[float | None] | None:
        """Return the latest values before a step; None if there are none."""
        while self._values and (self._values[-1][0] or 0.0) >= step:
            del self._values[-1]
        self._num = 0
        return self._values[-1][1:] if self._values else None

    def clear(self) -> None:
        """Discard all recorded values of a post-training detector."""
        self._values.clear()
        self._every, self._num = 1, 0


class ValueCourse(Stateful):
    """Base of the courses: the recent values, and milestones of what was learned before."""

    def __init__(self, num: int) -> None:
        self._recent: deque[float] = deque(maxlen=num)
        self._milestones = Milestones()

    def level_of_latest(self, num: int) -> float:
        """Return the median of the latest values of a scalar, for a sudden change."""
        latest = sorted(islice(reversed(self._recent), num))
        return latest[(len(latest) - 1) >> 1]

    def restart(self) -> None:
        """Discard the recent values: another process continues."""
        self._recent.clear()

    def go_back(self, step: int) -> None:
        """Discard what was learned at a step or after it: the run continues from before it."""
        raise NotImplementedError

    def rebaseline(self) -> None:
        """Start again: a change of the data or the reward was announced."""
        raise NotImplementedError


class RewardCourse(ValueCourse):
    """Level of the reward at the start, at its best and now, compared with its noise.

    It separates success from failure: entropy falls and groups have equal rewards in both, but only
    in success did the reward rise and stay. Without the start of the run, and for a reward that may
    be the best possible one, the course is unknown.
    """

    STATE = ("_recent", "_early", "_values", "_trend", "_milestones", "_start", "_largest", "best",
             "best_step")  # fmt: skip
    MAY_LACK = True  # states of older versions lack ``best_step`` and ``_largest``

    def __init__(self, config: PostTrainingConfig) -> None:
        super().__init__(config.window)
        self._config = config
        self._early: list[float] = []
        self._values: deque[float] = deque(maxlen=_MAX_VALUES)
        self._trend = Trend()
        self._start: float | None = None
        """The first level."""
        self._largest = 0.0
        """Largest change so far from one value to the next, without the latest values."""
        self.best: float | None = None
        """Highest level so far."""
        self.best_step = 0
        """Step of the highest level."""

    def add(self, value: float | None, step: int) -> bool:
        """Add the reward of a step; return whether its level is the highest so far."""
        if value is None:
            return False
        self._values.append(value)
        self._recent.append(value)
        self._trend.add(value)
        if len(self._values) > ABRUPT + 1:
            change = abs(self._values[-ABRUPT - 1] - self._values[-ABRUPT - 2])
            self._largest = max(self._largest, change)
        if len(self._early) < _FIRST:
            self._early.append(value)
        level, best = self.level, self.best
        is_best = level is not None and (best is None or level > best)
        if is_best:
            self.best, self.best_step = level, step
            self._start = level if best is None else self._start
        self._milestones.add(step, self.best, self._start, *self._trend.values(), *self._early)
        return is_best

    def go_back(self, step: int) -> None:
        """Discard the rewards at a step or after it: the run continues from before it."""
        values = self._milestones.go_back(step)
        if values is None:
            self.rebaseline()
            return
        self._recent.clear()
        self.best, self._start, *rest = values
        self.best_step = min(self.best_step, step)
        numbers = [number for number in rest if number is not None]
        num_before = self._trend.num
        self._early = numbers[_NUM_OF_TREND:]
        self._trend.restore(numbers[:_NUM_OF_TREND])
        for _ in range(min(num_before - self._trend.num, len(self._values))):
            self._values.pop()

    def rebaseline(self) -> None:
        """Start again with the reward: a change of the data or the reward was announced."""
        self._recent.clear()
        self._early.clear()
        self._values.clear()
        self._milestones.clear()
        self._trend, self.best, self._start, self.best_step = Trend(), None, None, 0
        self._largest = 0.0

    @property
    def level(self) -> float | None:
        """Return the median of the recent rewards; None while there are too few."""
        recent = self._recent
        return upper_median(recent) if len(recent) == self._config.window else None

    @property
    def num(self) -> int:
        """Return the number of rewards since the start of the run, or an announced change."""
        return self._trend.num

    @property
    def has_no_gain(self) -> bool:
        """Return whether the reward is not above its first values: a gain is then unlikely."""
        level, is_long = self.level, len(self._values) >= 3 * self._config.window
        return level is not None and is_long and level <= self.first

    @property
    def first(self) -> float:
        """Return the level of the run's first rewards; 0 before there is one."""
        return upper_median(self._early) if self._early else 0.0

    @property
    def noise(self) -> float:
        """Return the reward's standard deviation, from its changes."""
        return deviation(self._values)

    @property
    def is_far_below_best(self) -> bool:
        """Return whether the reward is lower than at its best, by more than its fast noise."""
        level, best = self.level, self.best
        least = self._config.gain_sigmas * self.noise
        return level is not None and best is not None and best - level > least

    def _sigma(self, fast: float, drift: float) -> float:
        """Return a larger deviation of the reward if neighboring values are correlated.

        Args:
            fast: the deviation without slow noise.
            drift: variance per value that a drift without direction adds.
        """
        total = _total_sigma(self._values, _SHORT)
        slow = _SLOW_NOISE * math.sqrt(max(total - fast, 0.0) * (total + fast))
        return max(fast, slow, math.sqrt(min(self._trend.num, _DRIFT_SPAN) * drift))

    @property
    def outcome(self) -> Outcome:
        """Return the reward's course: ``flat`` if it moves by no more than its noise.

        A loss is certain at once. That the reward does not rise needs many values: the trend of
        fewer may be that of a slow success.
        """
        return self._course()[0]

    @property
    def num_lost(self) -> int:
        """Return within how many values the reward was lost; 0 if it was not lost suddenly.

        Its level would show such a loss later.
        """
        return self._course()[1]

    def _course(self) -> tuple[Outcome, int]:
        """Return the reward's outcome, and the number of latest values of a sudden loss."""
        level, best, config = self.level, self.best, self._config
        num_values = min(3 * config.window, _MAX_VALUES)
        if level is None or best is None or len(self._values) < num_values:
            return "unknown", 0
        first, fast = self.first, self.noise
        drift = drift_variance(self._values, fast)
        noise = config.gain_sigmas * self._sigma(fast, drift)
        least = _LEAST_GAIN * max(abs(best), abs(first))
        counts = max(noise, least)
        gain, trend = best - first, self._trend
        solved = _SOLVED if trend.lowest >= 0.0 and trend.highest <= 1.0 else math.inf
        is_solved = level >= solved
        if gain > counts or trend.t(drift) >= _CERTAIN:
            loss = config.at_best * gain
            sigma = self._sigma(fast, 0.0)
            num_lost = self._num_lost(best, solved, loss, sigma)
            is_best = is_solved or level >= best - max(loss, noise)
            return "at_best" if is_best and not num_lost else "fell", num_lost
        if is_solved:
            return "unknown", 0
        if level < min(first, best if self._start is None else self._start) - counts:
            return "fell", 0
        gain_ahead = max(config.gain_sigmas * fast, least)
        # A reward that is rarely lower has no noise upward: its first level is also its highest.
        never_rose = self._start is not None and trend.highest <= self._start
        is_slow = never_rose or _AHEAD * trend.upper_slope(drift) <= gain_ahead
        is_flat = trend.num >= config.never_values and is_slow and not trend.is_cut_off
        return "flat" if is_flat else "unknown", 0

    def _num_lost(self, best: float, solved: float, loss: float, sigma: float) -> int:
        """Return the number of latest rewards that show a sudden loss; 0 if there is none.

        Args:
            best: highest level.
            solved: level from which a reward is not lost.
            loss: smallest loss that counts, apart from noise.
            sigma: standard deviation of a value.
        """
        values = list(self._values)
        for num, noise in (
            (ABRUPT, max(_ABRUPT_SIGMAS * sigma, _TIMES_CHANGES * self._largest)),
            (_SUDDEN, _SUDDEN_SIGMAS * sigma),
        ):
            # A drift takes more than a few values: those right before were higher by as much.
            before = upper_median(values[-num - _SHORT : -num])
            if max(values[-num:]) < min(best - max(loss, noise), before - noise, solved):
                return num
        return 0

    @property
    def _is_at_bound(self) -> bool:
        """Return whether the reward may be the best possible one: its highest value recurs."""
        highest = self._trend.highest
        is_solved = self._trend.lowest >= 0.0 and _SOLVED <= (self.level or 0.0) <= highest <= 1.0
        return is_solved or (highest > 0.0 and self._values.count(highest) > 1)

    def is_without_gain(self, num_before: int) -> bool:
        """Return whether a policy with little entropy gained no reward.

        A gain may come before the entropy is low: the rewards before and after each moment until
        then are compared. It may also be slow: the trend must not rise.

        Args:
            num_before: rewards from before the entropy was low. With more than a few, a slow gain
                may be smaller than the noise.
        """
        values, noise = list(self._values), self.noise
        is_early = _SHORT <= num_before <= _FEW and self.num == len(values)
        num_low = len(values) - num_before
        if not is_early or num_low < _LOW_VALUES or self._is_at_bound:
            return False
        if self._trend.t(0.0) >= (_RISES if num_low < _LOW_FOR_LONG else _RISES_FOR_LONG):
            return False
        return not any(
            _has_gained(values[:num], values[num:], noise) for num in range(_FIRST, num_before + 1)
        )

    def describe(self) -> str:
        """Describe the course of the reward for a finding: now, at first or at its best."""
        level, best = self.level or 0.0, self.best or 0.0
        outcome, num_lost = self._course()
        if outcome != "fell":
            return f"the reward is {level:.3g}, and its first values were {self.first:.3g}"
        level = self.level_of_latest(num_lost) if num_lost else level
        return f"the reward is {level:.3g}, and was {best:.3g} at its best"


def _has_gained(before: Sequence[float], after: Sequence[float], noise: float) -> bool:
    """Return whether the mean reward rose by more than its noise may.

    Args:
        before: rewards of the first part.
        after: those of the second part.
        noise: their deviation from the changes of neighbors, which a rise within a part affects
            little. Slow noise is larger: then a gain is not ruled out.
    """
    means = [sum(part) / len(part) for part in (before, after)]
    square = sum(
        (value - mean) * (value - mean)
        for part, mean in zip((before, after), means, strict=True)
        for value in part
    )
    sigma = min(math.sqrt(square / (len(before) + len(after) - 2)), noise)
    error = sigma * math.sqrt(1.0 / len(before) + 1.0 / len(after))
    return means[1] - means[0] >= _GAINED * error


def deviation(values: Iterable[float]) -> float:
    """Return the standard deviation of rewards from their changes; the largest are left out."""
    changes = sorted(abs(b - a) for a, b in pairwise(values))
    del changes[len(changes) - int(_OUTLIERS * len(changes)) :]
    return _TO_SIGMA * sum(changes) / len(changes) if changes else 0.0


def drift_variance(values: Collection[float], fast: float) -> float:
    """Return the variance per value that a drift without direction adds to the reward.

    White noise changes as much over a long distance as over a short one, a random walk in
    proportion to the distance. Second differences contain no steady rise or fall.

    Args:
        values: latest rewards.
        fast: their deviation without slow noise.
    """
    lag = max(_SHORT, len(values) // _LAGS)
    total = _total_sigma(values, lag)
    return 6.0 * max(total * total - _DRIFT_EXCESS * fast * fast, 0.0) / (2 * lag - 3)


def _total_sigma(values: Collection[float], lag: int) -> float:
    """Return the deviation of the rewards from their second differences over a distance."""
    bends = [
        abs(a - 2.0 * b + c)
        for a, b, c in zip(
            values, islice(values, lag, None), islice(values, 2 * lag, None), strict=False
        )
    ]
    return _TO_TOTAL_SIGMA * upper_median(bends) if bends else 0.0


class Trend(Stateful):
    """Linear trend of all values: it finds a slow gain that is smaller than the noise."""

    STATE = ("num", "_mean", "_product", "_square", "lowest", "highest")

    def __init__(self) -> None:
        self.num = 0
        self._mean = 0.0
        self._product = 0.0
        """Sum of the products of index and value, both centered."""
        self._square = 0.0
        """Sum of the squares of the centered values."""
        self.lowest = math.inf
        self.highest = -math.inf

    def add(self, value: float) -> None:
        """Add the next reward to its linear trend."""
        # Welford's update of the covariance with the index.
        change = value - self._mean
        self._mean += change / (self.num + 1)
        self._product += change * (self.num - (self.num - 1) / 2) * self.num / (self.num + 1)
        self._square += change * (value - self._mean)
        self.num += 1
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    def values(self) -> tuple[float, ...]:
        """Return the state of the reward's trend as numbers."""
        return self.num, self._mean, self._product, self._square, self.lowest, self.highest

    def restore(self, values: Sequence[float]) -> None:
        """Continue as the trend of the reward that returned ``values``."""
        num, self._mean, self._product, self._square, self.lowest, self.highest = values
        self.num = int(num)

    def t(self, drift: float) -> float:
        """Return Student's t of the reward's slope; 0 if unknown.

        Args:
            drift: variance per value that a drift without direction adds.
        """
        error = self._slope_error(drift)
        if self.num < _FIRST or not 0.0 < self._square < math.inf:
            return 0.0
        return self._product / self._index_square / max(error, 1e-300)

    def upper_slope(self, drift: float) -> float:
        """Return the largest gain of reward per value that noise and drift allow."""
        if self.num < _FIRST or not self._square < math.inf:
            return math.inf
        return self._product / self._index_square + _POSSIBLE * self._slope_error(drift)

    def _slope_error(self, drift: float) -> float:
        """Return the standard error of the reward's slope."""
        num, index_square = self.num, self._index_square
        if num < _FIRST:
            return math.inf
        rest = max(self._square - self._product * self._product / index_square, 0.0)
        # Variance of the slope of a random walk, and of noise that forgets within the span.
        walk = 1.2 * drift / num * min(1.0, 10.0 * (_DRIFT_SPAN / num) ** 2)
        return math.sqrt(rest / (num - 2) / index_square + walk)

    @property
    def is_cut_off(self) -> bool:
        """Return whether the highest reward seems to be the highest possible one.

        The values are equal and above 0, or their distribution has no upper tail. A failed reward
        is usually 0 or negative, and a reward that is never above a negative value failed.
        """
        if self.lowest == self.highest:
            return self.highest > 0.0
        if self.highest < 0.0:
            return False
        above, below = self.highest - self._mean, self._mean - self.lowest
        sigma = math.sqrt(max(self._square, 0.0) / max(self.num, 1))
        return above < _TAIL * sigma and below > _SKEW * above

    @property
    def _index_square(self) -> float:
        """Return the sum of the squares of the centered indices, for the reward's trend."""
        return (self.num**3 - self.num) / 12


class ShareCourse(ValueCourse):
    """Mean of a share over the recent values, and its lowest level."""

    STATE = ("_recent", "_milestones", "lowest", "num")

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.num = 0
        """Values so far."""
        self.lowest = 1.0
        """Lowest mean over five values: of more, a fast rise would hide the first ones."""

    def add(self, value: float | None, step: int) -> None:
        """Add a logged share, such as that of cut completions, between 0 and 1."""
        if value is None:
            return
        self._recent.append(min(max(value, 0.0), 1.0))
        self.num += 1
        if len(self._recent) >= _SHORT:
            mean = sum(islice(reversed(self._recent), _SHORT)) / _SHORT
            self.lowest = min(self.lowest, mean)
        self._milestones.add(step, self.lowest, self.num)

    def go_back(self, step: int) -> None:
        """Discard the shares of completions or groups that were logged at a step or after it."""
        lowest, num = self._milestones.go_back(step) or (1.0, 0)
        self._recent.clear()
        self.lowest, self.num = lowest or 0.0, int(num or 0)

    def rebaseline(self) -> None:
        """Start again with shares of completions: a change of the data was announced."""
        self._recent.clear()
        self._milestones.clear()
        self.lowest, self.num = 1.0, 0

    @property
    def mean(self) -> float | None:
        """Return the mean of the recent shares of completions or groups; None if too few."""
        recent = self._recent
        return sum(recent) / len(recent) if len(recent) == recent.maxlen else None

    @property
    def recent(self) -> Sequence[float]:
        """Return the recent shares of completions or groups, the latest last."""
        return tuple(self._recent)

    def mean_of_latest(self, num: int) -> float | None:
        """Return the mean of the latest shares; it shows a sudden rise, as of cut completions."""
        recent = list(self._recent)[-num:]
        return sum(recent) / num if len(recent) == num else None


class ShortLevel(ValueCourse):
    """Median of the last five values, and its highest one so far."""

    STATE = ("_recent", "_milestones", "highest")

    def __init__(self) -> None:
        super().__init__(_SHORT)
        self.highest: float | None = None

    def add(self, value: float, step: int) -> float | None:
        """Add the policy's entropy or ratio at a step; return the level, None if too early."""
        self._recent.append(value)
        if len(self._recent) < _SHORT:
            return None
        level = upper_median(self._recent)
        self.highest = level if self.highest is None else max(self.highest, level)
        self._milestones.add(step, self.highest)
        return level

    def go_back(self, step: int) -> None:
        """Discard the policy's entropy or ratio logged at a step or after it."""
        (self.highest,) = self._milestones.go_back(step) or (None,)
        self._recent.clear()

    @property
    def has_fallen(self) -> bool:
        """Return whether the lower one of the two latest values is far below those before."""
        *before, _, _ = self._recent
        return self.lowest_of_latest <= _FALLEN * upper_median(before)

    @property
    def lowest_of_latest(self) -> float:
        """Return the lower one of the two latest values: both are beyond a limit that it passes."""
        return min(islice(reversed(self._recent), ABRUPT))

    def rebaseline(self) -> None:
        """Keep the highest level: new data do not give a policy more entropy."""
        self._recent.clear()


class PostTrainingWatcher(LastingWatcher):
    """Base: reports a lasting condition once, with its numbers, causes and remedy.

    A subclass provides ``is_for``, ``_judge`` and ``STATE``, and lists its parts with recent values
    in ``_courses``.
    """

    STATE: ClassVar[tuple[str | StateKey, ...]] = ("_episode", "_beyond_since")
    MAY_LACK = True  # states of older versions lack ``_beyond_since``

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        self._config = config or PostTrainingConfig()
        super().__init__(self._config.clear_after)
        self._beyond_since: int | None = None
        """First logged step since which the quantity is beyond its limit."""

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether the detector judges this kind of post-training, such as GRPO."""
        return spec.samples

    def set_kind(self, spec: TaskSpec) -> None:
        """Note the kind of post-training run, such as DPO, before its first step."""

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the parts of the post-training detector that keep recent scalars."""
        return ()

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the scalars that another attempt or process of the post-training makes void."""
        is_back = merged.step <= self._step
        if self._beyond_since is not None and self._beyond_since >= merged.step:
            self._beyond_since = None
        for course in self._courses():
            if is_back:
                course.go_back(merged.step)
            else:
                course.restart()

    def rebaseline(self) -> None:
        """Judge only later scalars: a change of the data or the reward was announced."""
        self._beyond_since = None
        for course in self._courses():
            course.rebaseline()

    def _note_beyond(self, is_beyond: bool) -> None:
        """Note whether a quantity is beyond its limit: a finding begins at the first such step.

        It is reported later: a lost reward, or one that does not rise, takes values to be certain.
        """
        if not is_beyond:
            self._beyond_since = None
        elif self._beyond_since is None:
            self._beyond_since = self._step

    def _end_condition(self) -> tuple[Finding, ...]:
        """Note that the condition does not hold."""
        self._episode.begins(False)
        return ()

    def _begin_condition(
        self, merged: MergedStep, reason: str, *, value: float, limit: float, cause: str = ""
    ) -> tuple[Finding, ...]:
        """Return the finding about the condition if it starts."""
        if not self._episode.begins(True):
            return ()
        onset, cause = self._onset(merged.step), cause or self.name
        return self._report(
            merged.step, reason, value=value, limit=limit, cause=cause, onset_step=onset
        )

    def _onset(self, step: int) -> int:
        """Return the step at which the condition began that a finding reports at ``step``."""
        since = step if self._beyond_since is None else self._beyond_since
        for course in self._courses():
            if isinstance(course, RewardCourse) and course.outcome == "fell":
                since = max(since, course.best_step)  # as long as the reward rose, it was success
        return since


class CountWatcher(PostTrainingWatcher):
    """Base: reports facts that were counted over the first batches or steps, each one once.

    Later steps do not change such a fact, so it holds until another process counts again.
    """

    STATE = ("_reported",)
    CAUSES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._reported = 0
        """Causes that were reported, as bits."""

    def holds(self, cause: str) -> bool:
        """Return whether this fact was reported, and not counted otherwise since."""
        return cause in self.CAUSES and bool(self._reported & (1 << self.CAUSES.index(cause)))

    def _clear(self, cause: str) -> None:
        """Note that a new count does not show the fact."""
        self._reported &= ~(1 << self.CAUSES.index(cause))

    def _report_once(
        self, merged: MergedStep, cause: str, value: float, limit: float, reason: str
    ) -> tuple[Finding, ...]:
        """Return the finding about a count of the post-training, unless it was reported before."""
        bit = 1 << self.CAUSES.index(cause)
        if self._reported & bit:
            return ()
        self._reported |= bit
        return self._report(merged.step, reason, cause=cause, value=value, limit=limit)


def quantity(merged: MergedStep, name: str) -> float | None:
    """Return a finite quantity, such as the reward, of a logged step; None if it is missing."""
    return number(merged.run.get(name))
