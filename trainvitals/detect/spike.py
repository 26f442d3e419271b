"""Steps that stick out: outliers, several high steps together, a norm that rises.

Two rules share one reference. *One step* above the limit is an outlier. *Several steps*, each below
it, are added up as in a CUSUM chart (Page, 1954), in sigma of the run's own noise and with each
step's share bounded: at 15 % noise, five steps at 1.5x are inconspicuous one by one and clear in
their sum.

These rules only report. Whether an update is skipped is decided by the escalation policy, with
limits of its own.
"""

import math
import sys
from collections import deque
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from trainvitals.config import AboveZero, AtLeastOne, NotNegative, Settings
from trainvitals.detect.outliers import Detector, RobustWindow, is_clean
from trainvitals.records import Finding, StepRecord
from trainvitals.stateful import state_row

Metric = Literal["loss", "grad_norm"]
_LARGEST = sys.float_info.max
_LARGEST_EXPONENT = 700.0
_SIGMA_ABOVE = 0.16
"""Normal samples are above one standard deviation this often."""
_RARE = 0.02
_RARE_SIGMAS = 2.05
"""Normal samples are above this many standard deviations that often."""
_FAR_SIGMAS = 4.5
"""The farthest of a thousand normal samples is at 3.2 standard deviations; farther ones are a heavy
tail, and widen the deviation used for adding up several steps."""
_MOST_OF_RARE = 3.0
"""The spread counts for at most this multiple of the distance that 2% of the steps exceed. If one
batch in five belongs to a second, heavier kind, the spread is the distance between the kinds, and a
multiple of it would let everything pass."""
_HEAVY_TAIL = 0.4
"""A value above the limit exceeds the distance that 2% of the steps exceed by as much again, or by
half as much again (this logarithm) if that is less."""
_FEW = 2.5
_ON_THE_WORD_OF_FEW = math.log(4.0)
"""Two samples, which are 2% of a hundred and more of fewer, widen the limit to at most four times
the trend: no limit was in force for the first samples, and one spike among them would hide all
later ones."""
_STEADY_RATIO = 1.3
"""Largest ratio of the medians of the first and the second half of a new level."""
_AROUND_ZERO = 10.0
"""A loss that crosses zero (reinforcement learning) has little meaning: ten times its range."""
_REFRESH = 8
"""Clean steps after which the spread is computed again; the trend is, at every one."""
_FADES = 0.999
"""Share of the largest normal distance that is left after each step."""
_OF_TWO = math.log(1.5)
"""Minimum for reporting two steps together; smaller ones need three."""
_BEYOND_SEEN = 1.15
"""And the limit exceeds the farthest clean step of the last thousand or so by this factor."""
_OFTEN = 400
"""Steps within which ``recurs`` single outliers make two in a row nothing new either."""
_REGULAR, _REGULAR_WITHIN = 3, 0.1
"""Number of similar intervals, and their largest difference: events of every epoch or evaluation
are reported three times."""
_NOISE_BEGINS, _NOISE_WITHIN = 10, 100
"""Number of times outliers start within a number of steps that makes them noise to be learned."""
_ALLOWANCE = 1.0
"""Deviations that a step may be above the trend without being evidence."""
_MOST = 4.0
"""Maximum deviations above the allowance that one step counts for."""
_DEVIATION = 0.02
"""Smallest deviation assumed when steps are added up."""
_TOGETHER = 1.35
"""Average multiple of the trend of steps that are reported together."""
_REMEMBERED = 1.25
"""The sum must exceed the largest one that had no consequence by this factor: a loss that wanders
by itself collects evidence too."""
_MOST_EVIDENCE = 2.0
"""Multiple of ``enough`` at which the sum ends, whatever was remembered: otherwise a run whose
losses wandered that far could not be reported until it is forgotten."""
_RECURS_WITHIN = 2000
"""Steps within which recurring outliers are counted."""
_OF_HIGHER = 0.5
"""Share of the distance of higher steps, reported lately, that steps reported together must have: a
run that occasionally jumps to four times its loss has no report of 1.7 times."""


class CourseConfig(Settings, frozen=True, kw_only=True):
    """How far above its recent course a metric may be for one step."""

    ascending: ClassVar[tuple[tuple[str, ...], ...]] = (("warm_up", "window"),)
    calm: ClassVar[float] = 0.0
    enough: ClassVar[float] = 0.0

    window: int = 200
    """Clean steps kept to estimate the spread and the tail around the metric's trend."""
    warm_up: Annotated[int, Meta(ge=8)] = 10
    """Clean steps needed before there is a limit; 16 and 10 score alike on real curves."""
    trend_window: AtLeastOne = 25
    """Newest clean steps whose median is the metric's trend, which each step is compared with. Its
    own error is a quarter of one step's noise."""
    sigmas: AboveZero
    """Robust standard deviations (sigma) around the trend within which a step counts as clean."""
    margin: Annotated[float, Meta(ge=1.0)] = 1.2
    """The limit is at least this factor times the distance that 2 % of these steps exceeded, so
    values that were normal before are not outliers (bimodal losses, heavy tails)."""
    min_ratio: Annotated[float, Meta(ge=_TOGETHER)]
    """The limit for one step is at least this multiple of the trend."""
    accept_after: Annotated[int, Meta(ge=3)] = 40
    """High steps in a row, with similar values, after which they become the new level."""
    recurs: Annotated[int, Meta(ge=2)] = 5
    """Single-step outliers within 2,000 steps after which they count as hard batches; up to 1.5
    times the highest of them, they are no longer reported."""


class SpikeConfig(CourseConfig, frozen=True, kw_only=True):
    """How far above its recent trend the loss may be, for one step and for several together."""

    section = "loss"

    sigmas: AboveZero = 4.5
    """Robust standard deviations (sigma) around the trend within which a step counts as clean. At
    15 % noise, a step at 3x is 7 sigma."""
    min_ratio: Annotated[float, Meta(ge=_TOGETHER)] = 2.0
    """The limit for one step is at least this multiple of the trend: single batches of clean runs
    reach 1.9 times their neighbors' loss. In low-noise runs ``calm`` sets a lower limit."""
    calm: NotNegative = 30.0  # type: ignore[misc]
    """In a low-noise run the limit for one step is at least this many sigma instead: 1.35x where
    the noise is 1 %. 0: always use ``min_ratio``."""
    enough: NotNegative = 5.5  # type: ignore[misc]
    """Several high steps are reported together when their excess over 1 sigma, counted as at most 4
    per step, adds up to this. It must be above 4, so that one step is never enough. 0: never report
    several steps together."""

    def __post_init__(self) -> None:
        """Refuse what cannot work; one step alone must not be enough."""
        super().__post_init__()
        if self.enough and not self.enough > _MOST:
            raise self.refusal("enough", f"0, or above {_MOST:g}: one step alone is not enough")


class GradNormConfig(CourseConfig, frozen=True, kw_only=True):
    """The same for single steps of the gradient norm; section ``burst`` covers several steps."""

    section = "grad_norm"

    sigmas: AboveZero = 8.0
    """Robust standard deviations (sigma) around the trend within which a step counts as clean."""
    min_ratio: Annotated[float, Meta(ge=_TOGETHER)] = 40.0
    """The limit is at least this multiple of the trend."""


LOSS_DEFAULTS = SpikeConfig()
GRAD_NORM_DEFAULTS = GradNormConfig()
"""Clean runs show single steps at 5 to 15 times the median gradient norm, rarely up to 35 times,
while the loss moves by less than 3 %. BLOOM-176B's spike went 0.242 0.947 2.39 15.9 145 960: it
exceeds 40 times the median (9.7) at the same step as 10 times (2.4), two steps before the loss
shows anything. ``grad_norm_burst`` reports a rise over several steps earlier."""


class SpikeDetector(Detector):
    """Finds steps that are above what the steps before allow for, alone or together.

    Bad steps cannot poison the reference: only steps that were applied, finite and not reported
    enter it, and while evidence accumulates, new steps wait until it has decayed. A lasting change
    becomes the new level after ``accept_after`` similar high steps in a row. Outliers that keep
    recurring are reported ``recurs`` times.
    """

    STATE = (
        "_deviations", "_course", "_suspended", "_clock", "_groups", "_begins", "_rises", "_newest",
        "_recurring_told", "_accepted", "_farthest", "_wandered", "_highest",
        state_row("computed", "_middle", "_sigma", "_far", "_stale"),
        state_row("evidence", "_sum", "_peak", "_height"),
        state_row("counts", "_onset", "_num", "_usual"),
        state_row("told", "_told", "_silent"),
        "_held",
    )  # fmt: skip

    def __init__(
        self, metric: Metric, config: CourseConfig | None = None, *, together: bool = True
    ) -> None:
        self.name = f"{metric}_spike"
        self.metric = metric
        self._config = config or (LOSS_DEFAULTS if metric == "loss" else GRAD_NORM_DEFAULTS)
        self._enough = self._config.enough if together else 0.0
        self._deviations = RobustWindow(self._config.window)
        self._course = RobustWindow(self._config.trend_window)
        self._suspended = 0
        self._clock = 0
        self._groups: deque[list[float]] = deque(maxlen=self._config.recurs + 3)
        """Latest separate outliers: first, last, number, and the largest distance."""
        self._begins: deque[int] = deque(maxlen=_REGULAR + 1)
        """Times on the clock at which the latest episodes were reported."""
        self._rises: deque[int] = deque(maxlen=_NOISE_BEGINS)
        """Times on the clock at which outliers started, after a normal step."""
        self._newest: deque[float] = deque(maxlen=_NOISE_WITHIN)
        """The latest values, with or without findings."""
        self._recurring_told = -1
        self._accepted: list[float] = []
        """Time on the clock and logarithm of the highest value of the latest accepted level."""
        self._reset_state()

    def _reset_state(self) -> None:
        """Discard the spread of clean steps and all evidence of a spike."""
        self._farthest = 0.0
        self._wandered = 0.0
        self._highest = 0.0
        """Distance of the highest reported step, fading."""
        self._middle = self._sigma = 0.0
        self._far: float | None = None
        self._stale = 0
        self._end_episode()

    def _end_episode(self) -> None:
        """End the current episode of high steps: the evidence of a spike is discarded."""
        self._sum, self._peak, self._onset = 0.0, 0.0, -1
        self._num, self._height, self._usual = 0, 0.0, 0
        self._told = self._silent = False
        self._held: list[float] = []

    def update(self, record: StepRecord, clean: bool | None = None) -> tuple[Finding, ...]:
        """Judge the loss or gradient norm of one step; return the findings about spikes."""
        if self._suspended:
            self._suspended -= 1  # steps without a value count too: the announcement was in steps
        value = record.loss if self.metric == "loss" else record.grad_norm
        if value is None or not math.isfinite(value):
            return ()
        self._clock += 1
        if clean is None:
            clean = is_clean(record)
        if self._far is None:
            return self._add_warm_up_step(record, value, clean)
        course = self._course.median()
        if value <= 0.0 or self._course.smallest <= 0.0:
            return self._judge_around_zero(record, value, clean)
        self._newest.append(value)
        logarithm = math.log(value)
        distance = logarithm - math.log(course)
        beyond = (distance - self._middle) / self._sigma - _ALLOWANCE
        if distance > self._far:
            return self._outlier(record, value, logarithm, distance, beyond)
        if not self._enough and self._held:
            self._end_episode()  # held steps become a level only in a row; this one ends it
        if not self._enough or (self._sum == 0.0 and beyond <= 0.0):
            if clean:
                self._push_deviation(value, logarithm, distance)
            return ()
        return self._judge_evidence(record, value, logarithm, distance, beyond, clean)

    def limit(self) -> float | None:
        """Return the value above which the next step is an outlier; None without a limit."""
        if self._suspended or self._far is None or not len(self._course):
            return None
        course = self._course.median()
        if self._course.smallest <= 0.0:
            return self._limit_around_zero()
        return min(course * math.exp(min(self._far, _LARGEST_EXPONENT)), _LARGEST)

    # ------------------------------------------------------------------------ the reference

    def _add_warm_up_step(
        self, record: StepRecord, value: float, clean: bool
    ) -> tuple[Finding, ...]:
        """Add a step of the warm-up, or of an announced change."""
        if clean:
            course = self._course.median() if len(self._course) else value
            if value > 0.0 and course > 0.0:
                logarithm = math.log(value)
                self._push_deviation(value, logarithm, logarithm - math.log(course))
            else:
                self._push_trend(value)
        if not self._suspended and len(self._course) >= min(
            self._config.warm_up, self._config.trend_window
        ):
            self._refresh_spread()
        return ()

    def _push_deviation(self, value: float, logarithm: float, distance: float) -> None:
        """Add a clean step to the trend, and its distance to the spread."""
        self._deviations.push(distance)
        # A window of 200 forgets too soon, and a maximum never: one far step of a clean run widens
        # the limit for about a thousand steps.
        farthest = self._farthest * _FADES
        self._farthest = distance if distance > farthest else farthest
        self._wandered *= _FADES
        self._highest *= _FADES
        self._push_trend(value)

    def _push_trend(self, value: float) -> None:
        """Add a clean step's value to the trend; refresh the spread now and then."""
        self._course.push(value)
        self._stale += 1
        if self._stale >= _REFRESH and self._far is not None:
            self._refresh_spread()

    def _refresh_spread(self) -> None:
        """Compute the spread of the clean steps, and the distance above the trend that is normal.

        If every sample is positive, distances are ratios to the median of the newest steps, which
        follows the trend. Only values above the trend count: a fast-falling metric is below its
        trend in every step, which says nothing about how far above it a clean step may be.
        """
        self._stale = 0
        config, deviations = self._config, self._deviations
        num = len(deviations)
        if num < _FEW:
            self._far, self._middle, self._sigma = _ON_THE_WORD_OF_FEW, 0.0, 1.0
            return
        self._middle = middle = deviations.median()
        sigma = deviations.upper(_SIGMA_ABOVE) - middle
        shared = deviations.upper(max(_RARE, _FEW / num))
        rare = max(shared, min(deviations.upper(_RARE), _ON_THE_WORD_OF_FEW), 0.0)
        spread = min(middle + config.sigmas * sigma, _MOST_OF_RARE * rare)
        tail = min(config.sigmas / _RARE_SIGMAS * rare, rare + _HEAVY_TAIL)
        seen = min(self._farthest, _ON_THE_WORD_OF_FEW) if num < 100 else self._farthest
        least = math.log(config.min_ratio)
        if config.calm:
            least = min(least, config.calm * max(sigma, rare / _RARE_SIGMAS, 0.005))
        self._far = max(spread, tail, config.margin * rare, seen * _BEYOND_SEEN, least)
        scarce = 1.0 + 20.0 / num
        self._sigma = scarce * max(
            _DEVIATION,
            sigma,
            (deviations.upper(_RARE) - middle) / _RARE_SIGMAS,
            (seen - middle) / _FAR_SIGMAS,
        )

    # ---------------------------------------------------------------------- around zero

    def _limit_around_zero(self) -> float | None:
        """Return the limit for a metric with values at or below zero."""
        values = self._course.values()
        course = self._course.median()
        spread = max(max(values) - course, course - min(values))
        return min(course + _AROUND_ZERO * spread, _LARGEST) if spread > 0.0 else None

    def _judge_around_zero(
        self, record: StepRecord, value: float, clean: bool
    ) -> tuple[Finding, ...]:
        """Judge a value of a metric with values at or below zero."""
        limit = self._limit_around_zero()
        if limit is not None and value > limit:
            self._held.append(value)
            course = self._course.median()
            silent = self._record_single_outlier(math.log((value - course) / (limit - course)))
            if len(self._held) >= self._config.accept_after:
                self._adopt_level(self._held)
            return () if silent else self._spike(record, value, limit, record.step)
        self._held.clear()
        if clean:
            self._push_trend(value)
        return ()

    # ------------------------------------------------------------------------- high steps

    def _update_evidence_sum(self, record: StepRecord, distance: float, beyond: float) -> None:
        """Add a step's excess to the CUSUM of the current episode."""
        config = self._config
        share = min(beyond, _MOST)
        if self._onset < 0 or (not self._told and share > max(2.0 * self._sum, 1.0)):
            # A share above twice the sum so far is the start.
            self._onset = record.step
            self._num, self._height = 0, 0.0
        self._sum = min(max(self._sum + share, 0.0), _MOST_EVIDENCE * config.enough or 13.0)
        self._peak = max(self._peak, self._sum)
        if self._told or self._far is None or distance > self._far:
            self._highest = max(self._highest, min(distance, _ON_THE_WORD_OF_FEW))
        if beyond > 0.0:
            self._num += 1
            self._height += distance
            self._usual = 0
        else:
            self._usual += 1

    def _outlier(
        self, record: StepRecord, value: float, logarithm: float, distance: float, beyond: float
    ) -> tuple[Finding, ...]:
        """Judge a single step above the limit: a spike, noise, or a new level."""
        assert self._far is not None
        limit = min(self._course.median() * math.exp(min(self._far, _LARGEST_EXPONENT)), _LARGEST)
        self._update_evidence_sum(record, distance, beyond)
        self._held.append(value)
        onset = self._onset
        if self._is_noise():
            self._restart_reference()
            return ()
        silent = self._record_single_outlier(distance)
        self._silent = silent = self._record_report() or silent or self._is_known(logarithm)
        shift = self._accept_if_steady(record)
        return shift if silent else self._spike(record, value, limit, onset) + shift

    def _spike(
        self, record: StepRecord, value: float, limit: float, onset: int
    ) -> tuple[Finding, ...]:
        """Return the finding that one step's loss or gradient norm is a spike."""
        label = "loss" if self.metric == "loss" else "gradient norm"
        more = ""
        if self._recurring_told == self._clock:
            num, first = len(self._groups), int(self._groups[0][0])
            more = (
                f"; such single spikes recur ({num} in {self._clock - first + 1} steps) and are "
                "no longer reported up to 1.5x the highest"
            )
        reason = f"{label} {value:.4g} is above its report limit {limit:.4g}{more}"
        return self._report(
            record.step, reason, kind="spike",
            cause=f"{self.metric}_outlier", value=value, limit=limit, onset_step=onset,
        )  # fmt: skip

    def _judge_evidence(
        self,
        record: StepRecord,
        value: float,
        logarithm: float,
        distance: float,
        beyond: float,
        clean: bool,
    ) -> tuple[Finding, ...]:
        """Add up a step below the limit; hold it back while there is evidence of a spike."""
        self._update_evidence_sum(record, distance, beyond)
        if self._sum == 0.0:
            self._end_evidence(value, logarithm, distance, clean)
            return ()
        if self._sum <= _MOST - 0.5 and not self._told:
            if clean:
                self._push_deviation(value, logarithm, distance)
            return ()
        if clean or beyond > 0.0:
            self._held.append(value)
        findings: tuple[Finding, ...] = ()
        if self._is_burst(beyond):
            self._silent = self._record_report() or self._is_known(logarithm)
            findings = () if self._silent else self._burst_findings(record, value)
        return findings + self._accept_if_steady(record)

    def _is_burst(self, beyond: float) -> bool:
        """Return whether the excess summed over steps is enough to report a burst."""
        if self._told or not self._enough or beyond <= 0.0 or self._num < 2:
            return False
        remembered = min(_REMEMBERED * self._wandered, _MOST_EVIDENCE * self._enough)
        if self._sum < max(self._enough, remembered):
            return False
        height = self._height / self._num
        if self._num == 2 and height < _OF_TWO:
            return False
        return height >= max(math.log(_TOGETHER), _OF_HIGHER * self._highest)

    def _burst_findings(self, record: StepRecord, value: float) -> tuple[Finding, ...]:
        course = self._course.median()
        ratio = math.exp(self._height / self._num)
        limit = course * math.exp(self._middle + _ALLOWANCE * self._sigma)
        reason = (
            f"the loss has been high since step {self._onset}: {self._num} steps average "
            f"{ratio:.3g}x its usual {course:.4g}; the last is {value:.4g}"
        )
        return self._report(
            record.step, reason, kind="spike", cause=f"{self.metric}_burst", value=value,
            limit=limit, onset_step=self._onset,
        )  # fmt: skip

    def _end_evidence(self, value: float, logarithm: float, distance: float, clean: bool) -> None:
        """End the evidence of a spike, reported or not, and continue from this step."""
        if self._enough:
            most = self._peak if not self._told else min(self._peak, self._enough)
            self._wandered = max(self._wandered, most)
        self._end_episode()
        if clean:
            self._push_deviation(value, logarithm, distance)

    # --------------------------------------------------------------------- what is known

    def _record_report(self) -> bool:
        """Record a reported spike; return whether such episodes come at regular intervals."""
        begins = self._begins
        if not self._told:
            self._told = True
            begins.append(self._clock)
        gaps = [later - before for before, later in pairwise(begins)]
        if len(gaps) < _REGULAR:
            return False
        return max(gaps) - min(gaps) <= max(_REGULAR_WITHIN * max(gaps), 2.0)

    def _is_known(self, logarithm: float) -> bool:
        """Return whether a value belongs to a recently accepted level of the metric."""
        if not self._accepted:
            return False
        since, highest = self._accepted
        if self._clock - since > _RECURS_WITHIN:
            self._accepted = []
            return False
        return logarithm <= highest

    def _record_single_outlier(self, distance: float) -> bool:
        """Record an outlier; return whether such single ones keep recurring."""
        config, clock, groups = self._config, self._clock, self._groups
        if groups and clock - groups[-1][1] <= 1:
            group = groups[-1]
            group[1], group[2], group[3] = clock, group[2] + 1, max(group[3], distance)
        else:
            groups.append([clock, clock, 1, distance])
        singles = [
            group
            for group in list(groups)[:-1]
            if group[2] == 1 and clock - group[0] <= _RECURS_WITHIN
        ]
        often = (
            len(singles) >= config.recurs - 1 and clock - singles[1 - config.recurs][0] <= _OFTEN
        )
        if len(singles) < config.recurs - 1 or groups[-1][2] > (2 if often else 1):
            return False
        if self._recurring_told < 0:
            self._recurring_told = clock
            return False
        if clock - self._recurring_told > _RECURS_WITHIN and len(singles) < config.recurs:
            self._recurring_told = -1
            return False
        return distance <= max(group[3] for group in singles) + math.log(1.5)

    def _is_noise(self) -> bool:
        """Record an outlier; return whether so many spikes start that the reference is wrong."""
        rises, groups = self._rises, self._groups
        if not groups or self._clock - groups[-1][1] > 1:
            rises.append(self._clock)
        return len(rises) == _NOISE_BEGINS and rises[-1] - rises[0] <= _NOISE_WITHIN

    def _restart_reference(self) -> None:
        """Learn from all of the latest steps again what is not a spike."""
        values = list(self._newest)
        course = math.log(sorted(values)[len(values) // 2])
        self._deviations.restore([math.log(value) - course for value in values])
        self._course.restore(values[-self._config.trend_window :])
        self._rises.clear()
        self._end_episode()
        self._refresh_spread()

    def _accept_if_steady(self, record: StepRecord) -> tuple[Finding, ...]:
        """Accept high steps in a row as the metric's new level, if they are many and similar."""
        outliers, num = self._held, self._config.accept_after
        if len(outliers) < num:
            return ()
        half = num // 2
        older, newer = RobustWindow(half), RobustWindow(half)
        older.restore(outliers[-num:-half])
        newer.restore(outliers[-half:])
        low, high = sorted((older.median(), newer.median()))
        widest = min(self._config.min_ratio, 2.0) ** 2
        top = max(newer.upper(0.05), older.upper(0.05))
        bottom = min(newer.upper(0.9), older.upper(0.9))
        steady = bottom > 0.0 and high <= low * _STEADY_RATIO and top <= widest * bottom
        high = self._middle + _ALLOWANCE * self._sigma
        if low > 0.0 and math.log(newer.median() / self._course.median()) < high:
            # It has come back: the trend is at its current values.
            self._adopt_level(outliers[-num:])
            self._accepted = []
            return ()
        # Values that still fall are returning, and not a level.
        falling = newer.median() < older.median() * math.exp(-2.0 * self._sigma / math.sqrt(half))
        if not steady or (falling and len(outliers) < 5 * num):
            if len(outliers) > 5 * num:
                del outliers[0]
            return ()
        was_told, course, onset = self._told, self._course.median(), self._onset
        was_told = was_told and not self._silent and low >= course * _TOGETHER
        level = newer.median()
        self._adopt_level(outliers[-num:])
        if not was_told:
            return ()
        reason = f"{num} high steps in a row around {level:.4g}: accepted as the new level"
        return self._report(
            record.step, reason, kind="level_shift", cause=f"{self.metric}_level_shift",
            value=level, limit=course, onset_step=onset,
        )  # fmt: skip

    def _adopt_level(self, values: list[float]) -> None:
        """Make these values the level above which spikes are found; the spread stays."""
        recent = values[-self._config.trend_window :]
        highest = max(values)
        self._end_episode()
        self._course.clear()
        for value in recent:
            self._course.push(value)
        if highest > 0.0:
            self._accepted = [self._clock, math.log(highest)]
        if self._far is None and len(self._deviations) and not self._suspended:
            self._refresh_spread()

    def rebaseline(self, steps: int = 0) -> None:
        """Discard the reference for spikes; have no limit for ``steps`` steps and a warm-up."""
        self._deviations.clear()
        self._course.clear()
        self._groups.clear()
        self._begins.clear()
        self._rises.clear()
        self._newest.clear()
        self._accepted, self._recurring_told = [], -1
        self._suspended = max(self._suspended, steps)
        self._reset_state()


# ------------------------------------------------------------------------------ a norm that rises


_BURST_RARE_SIGMAS = 4.0
"""If one step in 50 is far off, this is normal for the run: a quarter of it is a deviation."""
_COURSE = 9
_FALLS = 0.02
_HIGHER = math.log(1.5)


_NORM_DEVIATION = 0.3
"""Smallest standard deviation assumed of the logarithm of the norm: 35%."""
_NORM_ALLOWANCE = 3.0
"""Deviations a step may be above the median without being evidence."""
_NORM_MOST = 8.0
"""Maximum deviations that one step counts for."""
_BURSTS_WITHIN = 3000
"""Steps within which recurring bursts are counted."""
_NOTABLE = 8.0
"""Multiple of its median from which a risen norm is worth a message. In real logs bursts before a
divergence reached 9 to 13,000, healthy changes of task or batch size 4 to 6."""
_HUGE, _HUGE_STEPS = 10.0, 12
"""Multiple of the root mean square of the norms, and steps in a row above it, from which a burst
that no clip limits is worth a page. Healthy runs reach 6 in a row. Adam's second moments hold the
squares of such steps for about a thousand steps, and updates are too small meanwhile."""
_JUMP = 3.0
"""Least factor from one norm to the next at which such a row starts: the norm of a run that starts
to learn grows by less per step."""
_SQUARES_KEPT = 0.999
"""Share of the mean square that each step keeps, as in Adam's second moments by default."""
_SQUARES_KNOWN = 50
"""Steps from which that mean square is known."""
_LARGEST_SQUARED = 1e150
"""Larger norms count as this one: their squares would overflow."""


class BurstConfig(Settings, frozen=True, kw_only=True):
    """When consecutive high gradient norms are reported together."""

    section = "burst"
    ascending = (("warm_up", "window"),)

    window: int = 64
    """Steps kept as the reference."""
    warm_up: Annotated[int, Meta(ge=8)] = 20
    """Steps needed before anything is reported."""
    enough: Annotated[float, Meta(gt=_NORM_MOST - _NORM_ALLOWANCE)] = 6.0
    """A burst is reported when the excess over 3 sigma, counted as at most 5 per step, adds up to
    this. It must be above 5, so that one step is never enough."""
    accept_after: AtLeastOne = 40
    """Steps in a row beyond 3 sigma after which they enter the reference."""
    recurs: AtLeastOne = 5
    """Bursts within 3,000 steps after which they count as consecutive hard batches; up to 1.5 times
    the highest of them, they are no longer reported."""


BURST_DEFAULTS = BurstConfig()


class BurstDetector(Detector):
    """Reports, once per burst, a gradient norm that rises over several steps.

    Below 8 times its median the report is only logged; if the burst reaches that later, it is
    reported again, and as a message. Clean runs show single steps at 5 to 15
    times the usual norm while the loss does not move. A real spike builds up over several steps:
    BLOOM-176B's norm went 0.242 0.947 2.39 15.9 145 960. Neither 0.947 nor 2.39 is an outlier; in
    a row they are. So evidence is summed as in a CUSUM chart (Page, 1954), with each step's share
    bounded, so that one step is never enough.

    The loss counts too: while it falls, a growing norm means that the run is starting to learn, and
    the step enters the reference.

    In a loop without a clip, 12 steps in a row above 10 times the root mean square of the run's
    norms are a page, whatever the loss: they fill Adam's second moments, and updates stay too small
    for about a thousand steps.
    """

    name = "grad_norm_burst"
    STATE = (
        "_window", "_deviations", "_course", "_bursts", "_clock", "_held", "_sum", "_onset",
        "_told", state_row("huge", "_squares", "_num_squares", "_last_norm", "_num_huge"),
    )  # fmt: skip
    MAY_LACK = True

    def __init__(self, config: BurstConfig | None = None) -> None:
        self._config = config or BURST_DEFAULTS
        self._window = RobustWindow(self._config.window)
        self._deviations = RobustWindow(self._config.window)
        self._course = RobustWindow(_COURSE)
        self._bursts: deque[list[float]] = deque(maxlen=self._config.recurs + 1)
        """Times of the latest reported bursts, by the clock, and their height above the median."""
        self._clock = 0
        self._held: list[float] = []
        self._sum = 0.0
        self._onset = -1
        self._told = 0
        """1: this burst was logged; 2: a message was sent, or none is worth sending."""
        self._squares = 0.0
        """Running mean of the squared norms of applied steps, before its bias is corrected."""
        self._num_squares = 0
        self._last_norm = 0.0
        self._num_huge = 0
        """Huge norms in a row."""

    def update(self, record: StepRecord, clean: bool | None = None) -> tuple[Finding, ...]:
        """Judge the gradient norm of one step; return the findings about a burst.

        ``clean``: whether it may enter the reference; None: decide by the record itself.
        """
        if clean is None:
            clean = is_clean(record)
        falls = self._loss_falls(record)
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0.0:
            return ()
        self._clock += 1
        huge = () if record.skipped or record.clips else self._add_square(record, norm)
        return huge + self._judge_burst(record, norm, falls, clean)

    def _add_square(self, record: StepRecord, norm: float) -> tuple[Finding, ...]:
        """Add the norm of an applied step to the mean square, or to the row of huge norms."""
        norm = min(norm, _LARGEST_SQUARED)
        weight = 1.0 - _SQUARES_KEPT**self._num_squares
        limit = _HUGE * math.sqrt(self._squares / weight) if weight else math.inf
        last, self._last_norm = self._last_norm, norm
        is_known = self._num_squares >= _SQUARES_KNOWN
        if is_known and norm > limit and (self._num_huge or norm > _JUMP * last):
            self._num_huge += 1
            if self._num_huge < _HUGE_STEPS:
                return ()
            self._num_huge, self._squares = 0, weight * norm * norm
            onset = record.step - _HUGE_STEPS + 1
            reason = (
                f"the gradient norm has been above {_HUGE:g}x its root mean square since step "
                f"{onset}: {norm:.4g} at step {record.step}; the loop does not clip. With Adam the "
                "second moments grew too, and updates stay too small for about 1000 steps"
            )
            return self._report(
                record.step, reason, kind="grad_explosion", cause="huge_gradients", value=norm,
                limit=limit, onset_step=onset, severity="page",
            )  # fmt: skip
        self._num_huge = 0
        self._squares = _SQUARES_KEPT * self._squares + (1.0 - _SQUARES_KEPT) * norm * norm
        self._num_squares += 1
        return ()

    def _judge_burst(
        self, record: StepRecord, norm: float, falls: bool, clean: bool
    ) -> tuple[Finding, ...]:
        """Return the finding about a burst of the gradient norm."""
        if falls or len(self._window) < self._config.warm_up:
            self._end_burst()
            if clean:
                self._push_norm(norm)
            return ()
        beyond = self._distance(norm) - _NORM_ALLOWANCE
        if beyond <= 0.0:
            self._end_burst()  # two spikes with a normal step between them are two spikes
            if clean:
                self._push_norm(norm)
            return ()
        return self._add_evidence(record, norm, beyond, clean)

    def _loss_falls(self, record: StepRecord) -> bool:
        """Return whether the step's loss is below its recent median; record it."""
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return False
        is_full = len(self._course) == _COURSE
        falls = is_full and loss < self._course.median() - _FALLS * abs(self._course.median())
        if not record.skipped:
            self._course.push(loss)
        return falls

    def _distance(self, norm: float) -> float:
        """Return the distance of a step's norm above the median, in deviations of its logarithm."""
        middle = self._deviations.median()
        deviation = max(
            _NORM_DEVIATION,
            self._deviations.upper(_SIGMA_ABOVE) - middle,
            self._deviations.upper(_RARE) / _BURST_RARE_SIGMAS,
        )
        return (math.log(norm) - math.log(self._window.median()) - middle) / deviation

    def _add_evidence(
        self, record: StepRecord, norm: float, beyond: float, clean: bool
    ) -> tuple[Finding, ...]:
        """Sum up high gradient norms; return the finding about a burst."""
        config = self._config
        if self._onset < 0:
            self._onset = record.step
        share = min(beyond, _NORM_MOST - _NORM_ALLOWANCE)
        self._sum = min(self._sum + share, 2.0 * config.enough)
        if clean:
            self._held.append(norm)
        usual = self._window.median()
        if len(self._held) >= config.accept_after:
            for outlier in self._held:
                self._push_norm(outlier)
            self._end_burst()
        is_notable = norm >= _NOTABLE * usual
        before, level = self._told, 2 if is_notable else 1
        if self._sum < config.enough or before >= level:
            return ()
        self._told = level
        if not before and self._record_burst(math.log(norm / usual)):
            self._told = 2
            return ()
        reason = (
            f"the gradient norm has been rising since step {self._onset}: {norm:.4g} is "
            f"{norm / usual:.3g}x its median {usual:.4g}"
        )
        return self._report(
            record.step, reason, kind="grad_explosion", cause="grad_norm_burst", value=norm,
            limit=usual, onset_step=self._onset, severity="notify" if is_notable else "log",
        )  # fmt: skip

    def _record_burst(self, distance: float) -> bool:
        """Record a burst; return whether bursts like it keep recurring."""
        config, clock = self._config, self._clock
        earlier = [height for begin, height in self._bursts if clock - begin <= _BURSTS_WITHIN]
        self._bursts.append([clock, distance])
        return len(earlier) >= config.recurs and distance <= max(earlier) + _HIGHER

    def _end_burst(self) -> None:
        """End the current burst of high gradient norms: its evidence is discarded."""
        self._held.clear()
        self._sum, self._onset, self._told = 0.0, -1, 0

    def _push_norm(self, norm: float) -> None:
        """Add a clean gradient norm to the reference."""
        if len(self._window):
            self._deviations.push(math.log(norm) - math.log(self._window.median()))
        else:
            self._deviations.push(0.0)
        self._window.push(norm)

    def rebaseline(self, steps: int = 0) -> None:
        """Discard the gradient norms with which bursts are compared: a planned change."""
        self._window.clear()
        self._deviations.clear()
        self._course.clear()
        self._bursts.clear()
        self._end_burst()
        self._squares, self._num_squares, self._last_norm, self._num_huge = 0.0, 0, 0.0, 0
