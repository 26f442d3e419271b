"""Finite outliers of the loss and of the gradient norm.

The rule is one number, the limit: ``value > limit`` is an outlier. It must be one number, because
the device compares with it, without waiting for the host, one or two steps after it was computed.
So the finding is made against ``record.<metric>_limit``, the limit that was in force, and a record
without one is not judged.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from trainvitals.detect.protocol import is_clean
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord
from trainvitals.windows import RobustWindow

Metric = Literal["loss", "grad_norm"]
_LARGEST = sys.float_info.max
_LARGEST_EXPONENT = 700.0
_SIGMA_ABOVE = 0.16
"""Normal samples are above one standard deviation this often."""
_RARE = 0.02
_MOST_OF_RARE = 3.0
"""The spread counts for no more than this multiple of what 2 % of the steps go beyond: six standard
deviations of normal noise. Where one batch in five is of a second, heavier kind, the spread is the
distance between the kinds, and eight of those would let everything pass."""
_FEW = 2.5
_ON_THE_WORD_OF_FEW = math.log(4.0)
"""Two samples, which are 2 % of a hundred and more of fewer, widen the limit to no more than four
times the course: no limit was in force while the first were taken in, and one spike among them
would hide all that come after."""
_STEADY_RATIO = 1.3
"""What the medians of the first and the second half of a new level may differ by."""
_AROUND_ZERO = 10.0
"""A loss that passes zero (reinforcement learning) says little: ten times its whole range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeConfig:
    """How far above its recent course a metric may be for one step."""

    window: int = 48
    """Clean steps kept as the reference."""
    warm_up: int = 10
    """Clean steps needed before there is a limit; 16 and 10 score alike on real curves."""
    course: int = 9
    """Newest clean steps whose median is the metric's course: what a step is compared with."""
    sigmas: float = 8.0
    """Robust standard deviations around the course that clean steps keep within."""
    tail: int = 200
    """Clean steps over which the rare distances from the course are remembered."""
    headroom: float = 1.2
    """The limit exceeds by this factor the distance that 2 % of these steps went beyond: what was
    normal before is no outlier (bimodal losses, heavy tails)."""
    min_ratio: float = 2.0
    """The limit is at least this multiple of the course, however calm the metric is: single batches
    of clean runs reach 1.9 times their neighbours' loss."""
    doubt_ratio: float = 1.2
    """The same while in doubt, that is in the ``doubt_steps`` after a step above this multiple: one
    heavy batch is let through, more right after it are not. Equal to ``min_ratio``: no doubt."""
    doubt_steps: int = 3
    """Steps that a doubt lasts; it must cover the two until a new limit is in force."""
    accept_after: int = 30
    """Outliers in a row, alike among themselves, after which they are the new level. Few would let
    a window of poisoned data pass for one; many cost a step each where the shift is genuine."""

    def __post_init__(self) -> None:
        if not 8 <= self.warm_up <= self.window:
            raise ConfigError(
                f"spike.warm_up is {self.warm_up}; it must be 8 to spike.window ({self.window})"
            )
        if self.tail < self.window:
            raise ConfigError(
                f"spike.tail is {self.tail}; it must be at least spike.window ({self.window})"
            )
        if not 1 <= self.course <= self.warm_up:
            raise ConfigError(
                f"spike.course is {self.course}; it must be 1 to spike.warm_up ({self.warm_up})"
            )
        if self.sigmas <= 0.0 or self.headroom < 1.0:
            raise ConfigError(
                f"spike.sigmas is {self.sigmas}, spike.headroom {self.headroom}; they must be "
                "above 0 and at least 1"
            )
        if not 1.0 < self.doubt_ratio <= self.min_ratio:
            raise ConfigError(
                f"spike.doubt_ratio is {self.doubt_ratio}; it must be above 1 and at most "
                f"spike.min_ratio ({self.min_ratio})"
            )
        if self.accept_after < 3 or self.doubt_steps < 1:
            raise ConfigError(
                f"spike.accept_after is {self.accept_after}, spike.doubt_steps {self.doubt_steps}; "
                "they must be at least 3 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNormConfig(SpikeConfig):
    """The same for the gradient norm."""

    min_ratio: float = 40.0
    """The limit is at least this multiple of the course."""
    doubt_ratio: float = 40.0
    """The same while in doubt; equal to ``min_ratio``: no doubt."""


LOSS_DEFAULTS = SpikeConfig()
GRAD_NORM_DEFAULTS = GradNormConfig()
"""Clean runs show gradient norms of 5 to 15 times the median for one step, and up to 35 times,
while the loss moves less than 3 %. BLOOM-176B's spike went .242 .947 2.39 15.9 145 960: 40 times
the median (9.7) is passed at the same step as 10 times (2.4), two steps before the loss shows
anything. What rises over several steps is told earlier (``trainvitals.detect.burst``)."""


class SpikeDetector:
    """Finds steps whose loss or gradient norm is above the limit that was in force.

    The reference is poison-proof: only steps that were applied, finite and below every limit enter
    it. So a lasting change would be an outlier for ever; it is accepted as the new level after
    ``accept_after`` outliers in a row that are alike.
    """

    def __init__(self, metric: Metric, config: SpikeConfig | None = None) -> None:
        self.name = f"{metric}_spike"
        self.metric = metric
        self._config = config or (LOSS_DEFAULTS if metric == "loss" else GRAD_NORM_DEFAULTS)
        self._window = RobustWindow(self._config.window)
        self._deviations = RobustWindow(self._config.window)
        self._tail = RobustWindow(self._config.tail)
        self._course = RobustWindow(self._config.course)
        self._outliers: list[float] = []
        self._held: list[float] = []
        self._suspended = 0
        self._doubt, self._doubt_since = 0, -1
        self._last: float | None = None
        self._limits: tuple[float, float] | None = None
        self._stale = False

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it."""
        if self._suspended:
            self._suspended -= 1
            self._stale = self._stale or self._suspended == 0
        value = record.loss if self.metric == "loss" else record.grad_norm
        limit = record.loss_limit if self.metric == "loss" else record.grad_norm_limit
        if value is None or not math.isfinite(value):
            return ()
        if limit is not None and value > limit:
            return self._outlier(record, value, limit)
        self._doubt = max(0, self._doubt - 1)
        if is_clean(record):
            self._take_in(record.step, value)
        return ()

    def limit(self) -> float | None:
        """Return the value above which the next steps are outliers; None while there is no say."""
        limits = self._both()
        return None if limits is None else limits[0 if self._doubt else 1]

    def _both(self) -> tuple[float, float] | None:
        """Return the limits in doubt and without doubt, computed once per change."""
        if self._stale:
            self._stale = False
            enough = len(self._window) >= self._config.warm_up and not self._suspended
            self._limits = self._compute() if enough else None
        return self._limits

    def _compute(self) -> tuple[float, float] | None:
        """Return the limits in doubt and without; None where nothing can be said.

        Where every sample is positive, distances are ratios: to the median of the newest steps,
        which follows a trend. Only what lies above counts: a metric that falls fast is below its
        course in every step, and that says nothing of how far a clean step may be above.
        """
        config, window = self._config, self._window
        course = self._course.median()
        if window.smallest > 0.0:
            middle = self._deviations.median()
            noise = middle + config.sigmas * (self._deviations.upper(_SIGMA_ABOVE) - middle)
            shared = self._tail.upper(max(_RARE, _FEW / len(self._tail)))
            rare = max(shared, min(self._tail.upper(_RARE), _ON_THE_WORD_OF_FEW))
            far = max(min(noise, _MOST_OF_RARE * rare), config.headroom * rare, 0.0)
            ratio = math.exp(min(far, _LARGEST_EXPONENT))
            return (
                min(course * max(ratio, config.doubt_ratio), _LARGEST),
                min(course * max(ratio, config.min_ratio), _LARGEST),
            )
        spread = max(window.upper(0.0) - course, course - window.smallest)
        limit = min(course + _AROUND_ZERO * spread, _LARGEST)
        return (limit, limit) if spread > 0.0 else None

    def rebaseline(self, steps: int) -> None:
        """Forget the reference, and have no limit for the next ``steps`` steps and a warm-up."""
        self._window.clear()
        self._deviations.clear()
        self._tail.clear()
        self._course.clear()
        self._outliers.clear()
        self._held.clear()
        self._suspended = max(self._suspended, steps)
        self._doubt, self._limits, self._stale = 0, None, False
        self._last = None

    def _take_in(self, step: int, value: float) -> None:
        """Add a clean sample; a doubtful one is held back until the doubt has passed."""
        limits = self._both()
        if limits is not None and value > limits[0]:
            self._raise_doubt(step)
            self._held = [*self._held, value][-self._config.doubt_steps :]
            return
        if not self._doubt:
            for held in self._held:
                self._push(held)
            self._held.clear()
        self._push(value)

    def _push(self, value: float) -> None:
        course = self._course.median() if len(self._course) else value
        if value > 0.0 and course > 0.0:
            logarithm = math.log(value)
            deviation = logarithm - math.log(course)
            self._deviations.push(deviation)
            # Of two kinds of batches the course may lie on either; the jump between them does not.
            last = self._last if self._last is not None else logarithm
            self._tail.push(max(deviation, logarithm - last))
            self._last = logarithm
        self._window.push(value)
        self._course.push(value)
        self._outliers.clear()
        self._stale = True

    def _raise_doubt(self, step: int) -> None:
        if not self._doubt:
            self._doubt_since = step
        self._doubt = self._config.doubt_steps

    def _outlier(self, record: StepRecord, value: float, limit: float) -> tuple[Finding, ...]:
        self._raise_doubt(record.step)
        self._held.clear()
        label = "loss" if self.metric == "loss" else "gradient norm"
        spike = Finding(
            kind="spike",
            level="act",
            step=record.step,
            detector=self.name,
            reason=f"{label} {value:.4g} is above its limit {limit:.4g}",
            value=value,
            limit=limit,
            onset_step=self._doubt_since,
            cause=f"{self.metric}_outlier",
        )
        now = self._both()
        if now is None or value <= now[0]:
            return (spike,)  # judged by an older limit: says nothing about the present reference
        self._outliers.append(value)
        if len(self._outliers) < self._config.accept_after:
            return (spike,)
        return self._accept_if_stable(record, spike)

    def _accept_if_stable(self, record: StepRecord, spike: Finding) -> tuple[Finding, ...]:
        level = RobustWindow(self._config.accept_after)
        level.restore(self._outliers)
        half = len(self._outliers) // 2
        older, newer = RobustWindow(half), RobustWindow(half)
        older.restore(self._outliers[:half])
        newer.restore(self._outliers[-half:])
        steady = _alike(older.median(), newer.median(), _STEADY_RATIO)
        if not (steady and _alike(level.smallest, level.upper(0.0), self._config.min_ratio**2)):
            del self._outliers[0]
            return (spike,)
        accepted = list(self._outliers)
        self.rebaseline(0)
        for value in accepted:
            self._push(value)
        shift = Finding(
            kind="level_shift",
            level="tell",
            step=record.step,
            detector=self.name,
            reason=f"{len(accepted)} outliers in a row lie around {level.median():.4g}: "
            "this is the new level",
            value=level.median(),
            limit=spike.limit,
            onset_step=record.step - len(accepted) + 1,
            cause=f"{self.metric}_level_shift",
        )
        return (spike, shift)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "window": self._window.values(),
            "deviations": self._deviations.values(),
            "tail": self._tail.values(),
            "course": self._course.values(),
            "outliers": list(self._outliers),
            "held": list(self._held),
            "suspended": self._suspended,
            "doubt": self._doubt,
            "doubt_since": self._doubt_since,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._window.restore(state["window"])
        self._deviations.restore(state["deviations"])
        self._tail.restore(state["tail"])
        self._course.restore(state["course"])
        self._outliers = [float(value) for value in state["outliers"]]
        self._held = [float(value) for value in state["held"]]
        self._suspended = int(state["suspended"])
        self._doubt, self._doubt_since = int(state["doubt"]), int(state["doubt_since"])
        self._last = state["last"]
        self._limits, self._stale = None, True


def _alike(low: float, high: float, ratio: float) -> bool:
    """Say whether two values differ by no more than ``ratio``, in size or in distance."""
    low, high = min(low, high), max(low, high)
    if low > 0.0:
        return high <= low * ratio
    return high - low <= (ratio - 1.0) * max(abs(low), abs(high))
