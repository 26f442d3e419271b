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
from trainvitals.windows import SIGMA_PER_MAD, RobustWindow

Metric = Literal["loss", "grad_norm"]
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeConfig:
    """How far above its recent course a metric may be for one step."""

    window: int = 64
    """Clean steps kept as the reference."""
    warm_up: int = 16
    """Clean steps needed before there is a limit."""
    sigmas: float = 8.0
    """Robust standard deviations above the median (of the logarithms, where all are positive)."""
    min_ratio: float = 1.35
    """The limit is at least this multiple of the median, however calm the metric is."""
    headroom: float = 0.5
    """The limit exceeds the window's 95 % value by this part of that value's distance from the
    median: what clean steps did before is no outlier (bimodal losses, heavy tails)."""
    accept_after: int = 30
    """Outliers in a row, alike among themselves, after which they are the new level. Few would let
    a window of poisoned data pass for one; many cost a step each where the shift is genuine."""

    def __post_init__(self) -> None:
        if not 8 <= self.warm_up <= self.window:
            raise ConfigError(
                f"spike.warm_up is {self.warm_up}; it must be 8 to spike.window ({self.window})"
            )
        if self.min_ratio <= 1.0 or self.sigmas <= 0.0 or self.headroom < 0.0:
            raise ConfigError(
                f"spike.min_ratio is {self.min_ratio}, spike.sigmas {self.sigmas}, spike.headroom "
                f"{self.headroom}; they must be > 1, > 0 and >= 0"
            )
        if self.accept_after < 3:
            raise ConfigError(f"spike.accept_after is {self.accept_after}; it must be at least 3")


LOSS_DEFAULTS = SpikeConfig()
GRAD_NORM_DEFAULTS = SpikeConfig(min_ratio=20.0)
"""Clean GPT-2 runs show gradient norms of 5 to 15 times the median for one step, while the loss
moves less than 3 %. BLOOM-176B's spike went .242 .947 2.39 15.9 145 960: 20 times the median (4.8)
is passed at the same step as 10 times (2.4), two steps before the loss shows anything."""


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
        self._recent = RobustWindow(9)
        self._outliers: list[float] = []
        self._suspended = 0
        self._limit: float | None = None
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
        if is_clean(record):
            self._push(value)
        return ()

    def limit(self) -> float | None:
        """Return the value above which the next steps are outliers; None while there is no say."""
        if self._stale:
            self._stale = False
            enough = len(self._window) >= self._config.warm_up and not self._suspended
            self._limit = _limit(self._window, self._recent, self._config) if enough else None
        return self._limit

    def rebaseline(self, steps: int) -> None:
        """Forget the reference, and have no limit for the next ``steps`` steps and a warm-up."""
        self._window.clear()
        self._recent.clear()
        self._outliers.clear()
        self._suspended = max(self._suspended, steps)
        self._limit, self._stale = None, False

    def _push(self, value: float) -> None:
        self._window.push(value)
        self._recent.push(value)
        self._outliers.clear()
        self._stale = True

    def _outlier(self, record: StepRecord, value: float, limit: float) -> tuple[Finding, ...]:
        label = "loss" if self.metric == "loss" else "gradient norm"
        spike = Finding(
            kind="spike",
            level="act",
            step=record.step,
            detector=self.name,
            reason=f"{label} {value:.4g} is above its limit {limit:.4g}",
            value=value,
            limit=limit,
            onset_step=record.step,
            cause=f"{self.metric}_outlier",
        )
        now = self.limit()
        if now is None or value <= now:
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
        ratio = self._config.min_ratio
        if not (
            _alike(older.median(), newer.median(), ratio)
            and _alike(level.smallest, level.upper(0.0), ratio * ratio)
        ):
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
            "recent": self._recent.values(),
            "outliers": list(self._outliers),
            "suspended": self._suspended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._window.restore(state["window"])
        self._recent.restore(state["recent"])
        self._outliers = [float(value) for value in state["outliers"]]
        self._suspended = int(state["suspended"])
        self._limit, self._stale = None, True


def _limit(window: RobustWindow, recent: RobustWindow, config: SpikeConfig) -> float:
    """Return the limit: the median, or where the metric rises that of the newest, and a margin.

    The margin is the largest of: so many sigmas, the least ratio, and the headroom over what clean
    steps did. Ratios where every sample is positive, differences elsewhere.
    """
    center = max(window.median(), recent.median())
    top = window.upper(0.05)
    if window.smallest > 0.0:
        sigma = SIGMA_PER_MAD * window.log_mad(center)
        reach = math.log(top / center) if top > center else 0.0
        margin = max(config.sigmas * sigma, (1.0 + config.headroom) * reach)
        ratio = max(math.exp(min(margin, 700.0)), config.min_ratio)
        return min(center * ratio, _LARGEST)
    sigma = SIGMA_PER_MAD * window.mad(center)
    margin = max(
        config.sigmas * sigma,
        (1.0 + config.headroom) * (top - center),
        (config.min_ratio - 1.0) * max(abs(center), abs(top), abs(window.smallest)),
    )
    return min(center + margin, _LARGEST)


def _alike(low: float, high: float, ratio: float) -> bool:
    """Say whether two values differ by no more than ``ratio``, in size or in distance."""
    low, high = min(low, high), max(low, high)
    if low > 0.0:
        return high <= low * ratio
    return high - low <= (ratio - 1.0) * max(abs(low), abs(high))
