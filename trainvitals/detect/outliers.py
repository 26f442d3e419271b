"""Finite outliers of loss and gradient norm: the one finite rule that may keep an update back.

The rule is one number a metric, the limit: ``value > limit`` is an outlier. It must be one number,
because the device compares with it without waiting for the host, one or two steps after it was
computed. So the finding is made against ``record.<metric>_limit``, the limit that was in force.

Limits are wide on purpose: eight robust deviations of the run's own noise, a multiple of the median
and a floor, all three. What is told, and not acted on, is found by the other detectors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from trainvitals.detect.protocol import is_clean
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord
from trainvitals.windows import SIGMA_PER_MAD, RobustWindow

LossKind = Literal["minimize", "rl", "adversarial"]
"""What a loss is good for: where it is not what the training makes small, it keeps nothing back."""

_LARGEST = sys.float_info.max
_EVERY = 4
"""Samples between two looks at the reference: one of 64 moves a median by nothing."""


class Limits(msgspec.Struct, frozen=True):
    """What the device compares the next steps with; None: that rule has no say yet."""

    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierConfig:
    """How far off a finite step must be to count as an outlier. All three conditions must hold."""

    window: int = 64
    """Clean steps kept as the reference."""
    warm_up: int = 50
    """Clean steps needed; before, only what is absurd is stopped."""
    sigmas: float = 8.0
    """Robust standard deviations (1.4826 MAD) above the median."""
    loss_ratio: float = 3.0
    """Multiple of the median loss; around zero, that many times its size above it."""
    grad_norm_ratio: float = 10.0
    """Multiple of the median gradient norm: clean runs show single steps of 5 to 15 times it."""
    floor: float = 0.05
    """Part of the run's first values that the value itself must exceed: a loss near 0 has noise of
    its own size."""
    first: int = 20
    """Steps whose median is the run's first value."""
    absurd: float = 1e5
    """Multiple of the largest first value that is stopped before the warm-up is over."""

    def __post_init__(self) -> None:
        if not 8 <= self.warm_up <= self.window:
            raise ConfigError(
                f"outlier.warm_up is {self.warm_up}; it must be 8 to outlier.window ({self.window})"
            )
        for name, least in (("sigmas", 0.0), ("loss_ratio", 1.0), ("grad_norm_ratio", 1.0)):
            if not getattr(self, name) > least:
                raise ConfigError(
                    f"outlier.{name} is {getattr(self, name)}; it must be above {least:g}"
                )
        if not 0.0 <= self.floor < 1.0 or self.first < 1 or self.absurd < 100.0:
            raise ConfigError(
                f"outlier.floor is {self.floor}, outlier.first {self.first}, outlier.absurd "
                f"{self.absurd}; they must be from 0 to below 1, at least 1, and at least 100"
            )


OUTLIER_DEFAULTS = OutlierConfig()


class Level(NamedTuple):
    """Values up to which nothing is an outlier; 0 where a metric has no such value."""

    loss: float = 0.0
    grad_norm: float = 0.0


NOTHING = Level()


class _Metric:
    """The reference of one metric."""

    def __init__(self, ratio: float, config: OutlierConfig) -> None:
        self._ratio = ratio
        self._config = config
        self.window = RobustWindow(config.window)
        self.first: list[float] = []
        self._limit: float | None = None
        self._age = 0

    def push(self, value: float) -> None:
        """Take a clean sample in."""
        if len(self.first) < self._config.first:
            self.first.append(value)
            self._age = 0
        self.window.push(value)
        if len(self.window) <= self._config.warm_up:
            self._age = 0
        if not self._age:
            self._limit = self._compute()
        self._age = (self._age + 1) % _EVERY

    def limit(self) -> float | None:
        return self._limit

    def begin_anew(self, values: Iterable[float]) -> None:
        """Take these samples as the whole reference; the run's first values stay."""
        self.window.restore(values)
        self._limit, self._age = self._compute(), 0

    def first_value(self) -> float:
        """Return the size of the run's first values; 0 before there is one."""
        ordered = sorted(self.first)
        return abs(ordered[len(ordered) >> 1]) if ordered else 0.0

    def _compute(self) -> float | None:
        config = self._config
        if len(self.window) < config.warm_up:
            largest = max(map(abs, self.first), default=0.0)
            return min(config.absurd * largest, _LARGEST) if largest else None
        median = self.window.median()
        limit = max(
            median + config.sigmas * SIGMA_PER_MAD * self.window.mad(),
            median + (self._ratio - 1.0) * abs(median),
            config.floor * self.first_value(),
        )
        # Most values are zero, as rounded losses of GRPO are: there is nothing to be far from.
        return min(limit, _LARGEST) if limit > median else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self.window.values(),
            "first": list(self.first),
            "limit": self._limit,
            "age": self._age,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.restore(state["window"])
        self.first = [float(value) for value in state["first"]]
        self._limit, self._age = state["limit"], int(state["age"])


class OutlierRule:
    """Gives the limits, and finds the steps above the limits that were in force.

    The reference is poison-proof: only steps that were applied, finite, and no outlier by the
    limits in force or by the present ones enter it.
    """

    name = "outlier"

    def __init__(
        self, config: OutlierConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        self._config = config or OUTLIER_DEFAULTS
        self._judges_loss = loss_kind == "minimize"
        self._loss = _Metric(self._config.loss_ratio, self._config)
        self._grad_norm = _Metric(self._config.grad_norm_ratio, self._config)
        self._suspended = 0

    def update(self, record: StepRecord, *, accepted: Level = NOTHING) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it.

        Args:
            record: the step.
            accepted: what was accepted as normal; such values enter the reference.
        """
        if self._suspended:
            self._suspended -= 1
        spikes = self._spikes(record)
        if spikes or record.failed_ranks or not is_clean(record):
            return spikes
        loss, norm = record.loss, record.grad_norm
        if self._is_above(loss, self._loss, accepted.loss) or self._is_above(
            norm, self._grad_norm, accepted.grad_norm
        ):
            return ()
        if loss is not None:
            self._loss.push(loss)
        if norm is not None:
            self._grad_norm.push(norm)
        return ()

    @staticmethod
    def _is_above(value: float | None, metric: _Metric, accepted: float) -> bool:
        limit = metric.limit()
        return value is not None and limit is not None and value > max(limit, accepted)

    def _spikes(self, record: StepRecord) -> tuple[Finding, ...]:
        spikes = []
        for metric, label, value, limit in (
            ("loss", "loss", record.loss, record.loss_limit),
            ("grad_norm", "gradient norm", record.grad_norm, record.grad_norm_limit),
        ):
            if value is None or limit is None or not limit < value < math.inf:
                continue
            spikes.append(
                Finding(
                    kind="spike",
                    level="actionable",
                    step=record.step,
                    detector=self.name,
                    reason=f"{label} {value:.4g} is above its limit {limit:.4g}",
                    rank=self._culprit(record) if metric == "loss" else -1,
                    value=value,
                    limit=limit,
                    onset_step=record.step,
                    cause=f"{metric}_outlier",
                )
            )
        return tuple(spikes)

    def _culprit(self, record: StepRecord) -> int:
        """Return the rank whose own loss makes the mean an outlier; -1 where none stands out.

        With one bad rank of N, it lies N - 1 times as far above the mean as the mean is too high.
        """
        if record.loss is None or record.loss_max is None or not len(self._loss.window):
            return -1
        excess = record.loss - self._loss.window.median()
        return record.loss_max_rank if record.loss_max - record.loss >= 0.8 * excess else -1

    def limits(self) -> Limits:
        """Return what the next steps are compared with."""
        if self._suspended:
            return Limits()
        loss = self._loss.limit() if self._judges_loss else None
        return Limits(loss, self._grad_norm.limit())

    @property
    def is_warming_up(self) -> bool:
        """Whether only what is absurd is stopped so far; that is stopped however the loop clips."""
        least = self._config.warm_up
        return len(self._grad_norm.window) < least and len(self._loss.window) < least

    def course(self) -> tuple[float, float, float]:
        """Return the loss's median, its robust deviation, and the size of the run's first losses.

        All 0 before there is one.
        """
        window = self._loss.window
        if not len(window):
            return 0.0, 0.0, self._loss.first_value()
        return window.median(), SIGMA_PER_MAD * window.mad(), self._loss.first_value()

    def rebaseline(self, steps: int) -> None:
        """Forget the reference, and have no limit for the next ``steps`` steps."""
        self._loss.begin_anew(())
        self._grad_norm.begin_anew(())
        self._suspended = max(self._suspended, steps)

    def accept(self, losses: Iterable[float], grad_norms: Iterable[float]) -> None:
        """Begin a new reference with the values of a level that was accepted."""
        self._loss.begin_anew(losses)
        self._grad_norm.begin_anew(grad_norms)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "loss": self._loss.state_dict(),
            "grad_norm": self._grad_norm.state_dict(),
            "suspended": self._suspended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the rule that gave ``state``."""
        self._loss.load_state_dict(state["loss"])
        self._grad_norm.load_state_dict(state["grad_norm"])
        self._suspended = int(state["suspended"])
