"""The two rules that may skip an update, and the window of trained steps that they use.

Non-finite values need no history. For finite steps one rule may skip an update: the limit of each
metric is one number, and ``value > limit`` is an outlier. It must be one number, because the device
compares with it without waiting for the host, one or two steps after it was computed. So the
finding uses ``record.<metric>_limit``, the limit that was in force.

No healthy run reaches these limits: a loss far above the run's first losses, a norm of 100 times
the usual. The other detectors find everything below, and only report it.

The window holds the trained steps, including outliers that were applied: the limits move with the
data. All arithmetic here is float64 in a fixed order, so that every rank, the collector and a
replay get the same bits.
"""

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainvitals.config import AboveOne, AboveZero, AtLeastOne, Settings
from trainvitals.detect.reporter import Reporter
from trainvitals.records import Finding, StepRecord
from trainvitals.stateful import Stateful, StatefulRow
from trainvitals.units import humanize_count, name_ranks

SIGMA_PER_MAD = 1.4826
"""Standard deviations per median absolute deviation for normal samples."""
_RECENT = 8
"""Steps that the recent value of a metric is the median of."""


class RobustWindow(StatefulRow):
    """The latest ``size`` samples, kept in order of arrival and in order of value."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, value: float) -> None:
        """Add a finite sample to the detector's window; the oldest leaves when it is full."""
        value += 0.0  # -0.0 becomes 0.0: equal values must also be equal bits
        arrived, ordered = self._arrived, self._sorted
        if len(ordered) == self._size:
            # Both lists hold the same bits, so bisection finds the oldest or an equal sample
            # without a search through 200 samples at every step.
            del ordered[bisect_left(ordered, arrived[0])]
        arrived.append(value)
        insort(ordered, value)

    def clear(self) -> None:
        """Discard every sample that the detector compares with."""
        self._arrived.clear()
        self._sorted.clear()

    def values(self) -> list[float]:
        """Return the samples of trained steps that a detector compares with, oldest first."""
        return list(self._arrived)

    def state(self) -> list[float]:
        """Return the detector's window as state for a snapshot: the samples, oldest first."""
        return self.values()

    def restore(self, values: Iterable[float]) -> None:
        """Hold exactly these samples for the detector, oldest first; the latest if too many."""
        self.clear()
        self._arrived.extend(values)
        self._sorted.extend(sorted(self._arrived))

    @property
    def smallest(self) -> float:
        """Return the smallest sample in the detector's window, which must not be empty."""
        return self._sorted[0]

    def median(self) -> float:
        """Return the median of the detector's window, the upper one of two; not of an empty one."""
        return self._sorted[len(self._sorted) >> 1]

    def mad(self) -> float:
        """Return the median absolute deviation in the detector's window; not of an empty one.

        The half nearest to the median is a contiguous part of the ordered samples: the part with
        the smallest reach, found by bisection.
        """
        ordered = self._sorted
        half = len(ordered) >> 1
        median = ordered[half]
        low, high = 0, len(ordered) - 1 - half
        while low < high:
            middle = (low + high) >> 1
            if median - ordered[middle] > ordered[middle + half] - median:
                low = middle + 1
            else:
                high = middle
        reach = max(median - ordered[low], ordered[low + half] - median)
        if low:
            reach = min(reach, max(median - ordered[low - 1], ordered[low - 1 + half] - median))
        return reach

    def upper(self, fraction: float) -> float:
        """Return the sample that only ``fraction`` of those in the detector's window exceed."""
        return self._sorted[-1 - int(len(self._sorted) * fraction)]


class Detector(Reporter):
    """Judges one step after another.

    Every rank, the collector and a replay run it on the same records and get the same findings.
    """

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Judge the numbers of one step; return the detector's findings. Steps come in order."""
        raise NotImplementedError

    def rebaseline(self, steps: int = 0) -> None:
        """Discard the detector's reference: a planned change comes within ``steps`` steps."""
        raise NotImplementedError


def is_clean(record: StepRecord) -> bool:
    """Return whether a step may enter a detector's reference: applied, finite, below its limits."""
    if record.skipped or record.overflow or record.nonfinite_ranks or record.nonfinite_params:
        return False
    return not (
        _is_nonfinite_or_outlier(record.loss, record.loss_limit)
        or _is_nonfinite_or_outlier(record.grad_norm, record.grad_norm_limit)
    )


def _is_nonfinite_or_outlier(value: float | None, limit: float | None) -> bool:
    """Return whether a step's loss or norm is non-finite, or an outlier above its limit."""
    if value is None:
        return False
    return not math.isfinite(value) or (limit is not None and value > limit)


# ----------------------------------------------------------------------------- non-finite values


MAX_OVERFLOWS = 40
"""Scaler overflows in a row that still count as normal. The default scale, 65536, reaches 1 after
16 halvings, and even 2**40 after this many: further overflows are not caused by the scale."""


class NonFiniteDetector(Detector):
    """Finds what is NaN or infinite. Needs no warm-up and no history.

    Gradient-scaler overflows are normal and not reported, as long as the loss is finite and the
    overflows end.
    """

    name = "nonfinite"
    STATE = ("_overflows",)

    def __init__(self) -> None:
        self._overflows = 0

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Judge one step: return a finding about each NaN or infinite number in it."""
        self._overflows = min(self._overflows + 1, MAX_OVERFLOWS + 1) if record.overflow else 0
        loss, norm = record.loss, record.grad_norm
        bad_loss = loss is not None and not math.isfinite(loss)
        bad_norm = bool(record.nonfinite_ranks) or (norm is not None and not math.isfinite(norm))
        excused = record.overflow and not bad_loss and self._overflows <= MAX_OVERFLOWS
        if not (bad_loss or bad_norm or record.nonfinite_params or record.failed_ranks):
            return ()
        findings: tuple[Finding, ...] = ()
        if record.nonfinite_params:
            findings += self._nonfinite_params_findings(record)
        if (bad_loss or bad_norm) and not excused:
            findings += self._nonfinite_findings(record, bad_loss=bad_loss)
        if record.failed_ranks:
            ranks = record.failed_ranks
            reason = f"{name_ranks(ranks)} could not measure the step"
            rank = ranks[0] if len(ranks) == 1 else -1
            findings += self._report(record.step, reason, kind="rank_failed", rank=rank)
        return findings

    def rebaseline(self, steps: int = 0) -> None:
        """Do nothing: a planned change does not make non-finite numbers normal."""

    def _nonfinite_findings(self, record: StepRecord, *, bad_loss: bool) -> tuple[Finding, ...]:
        ranks = record.nonfinite_ranks
        what = f"loss is {record.loss}" if bad_loss else f"gradient norm is {record.grad_norm}"
        if not bad_loss and record.grad_norm is not None and math.isfinite(record.grad_norm):
            what = "gradients are non-finite"
        where = f" on {name_ranks(ranks)}" if ranks else ""
        if record.overflow and not bad_loss:
            what = f"{what} for more than {MAX_OVERFLOWS} steps in a row at every loss scale"
        return self._report(
            record.step,
            what + where,
            level="actionable",
            rank=ranks[0] if len(ranks) == 1 else -1,
            value=record.loss if bad_loss else record.grad_norm,
            cause="nonfinite_loss" if bad_loss else "nonfinite_gradient",
        )

    def _nonfinite_params_findings(self, record: StepRecord) -> tuple[Finding, ...]:
        ranks, num = record.nonfinite_ranks, record.nonfinite_params
        reason = f"parameters are non-finite on {humanize_count(num, 'rank')}"
        rank = ranks[0] if len(ranks) == 1 == num else -1
        return self._report(
            record.step,
            reason,
            level="actionable",
            kind="nonfinite_params",
            rank=rank,
            value=float(num),
        )


# -------------------------------------------------------------------------------- finite outliers


LossKind = Literal["minimize", "rl", "adversarial"]
"""Meaning of a loss: if training does not minimize it, it withholds no updates."""

_LARGEST = sys.float_info.max
_EVERY = 4
"""Samples between two checks of the reference: one of 64 does not move a median."""


class Limits(msgspec.Struct, frozen=True):
    """Limits for the next steps on the device; None: the rule has no limit yet."""

    loss: float | None = None
    grad_norm: float | None = None


class OutlierConfig(Settings, frozen=True, kw_only=True):
    """When a finite step is an outlier that may be withheld."""

    section = "outlier"
    ascending = (("warm_up", "window"),)
    removed = dict.fromkeys(("loss_ratio", "floor"), "progress and sigmas limit the loss")

    window: int = 64
    """Trained steps kept as the reference."""
    warm_up: Annotated[int, Meta(ge=8)] = 50
    """Trained steps needed; until then only values above `absurd` are stopped."""
    progress: AboveZero = 25.0
    """Multiple of the run's progress (from the first losses to the median) by which one loss must
    be above the median: 1 is as bad as at the start, and hard batches of healthy runs reach 20. A
    run without progress has no limit for its loss."""
    sigmas: AboveZero = 8.0
    """Robust standard deviations (1.4826 MAD) by which the loss must also be above the median."""
    grad_norm_ratio: AboveOne = 100.0
    """Multiple of the median gradient norm; single steps of healthy runs reach 30 times. In
    reinforcement learning the limit is ten times as high."""
    grad_norm_first: AboveZero = 100.0
    """Multiple of the run's first norms that the norm must also exceed: if a set is learned
    by heart the median is next to nothing, and healthy spikes reach 30 times the first norms."""
    first: AtLeastOne = 20
    """Steps whose median is the run's first value."""
    absurd: Annotated[float, Meta(ge=100.0)] = 1e5
    """Multiple of the largest first value above which a step is stopped during warm-up."""


OUTLIER_DEFAULTS = OutlierConfig()


_SPARSE_SHARE, _SPARSE_RATIO = 0.1, 10.0
"""In reinforcement learning most steps may have next to no gradient, because the rewards of their
groups are equal. The limit is at least this multiple of the norm that this share of steps exceeds:
otherwise the few steps with a signal would be the outliers."""
_RL_TIMES = 10.0
"""Factor of the limit in reinforcement learning. There the norms are heavy-tailed: a single
improbable token has a large divergence, and healthy norms reach 300 times the first ones."""


class _MetricReference(Stateful):
    """The reference of one metric."""

    STATE = ("window", "first", "_limit", "_age")

    def __init__(
        self,
        name: Literal["loss", "grad_norm"],
        config: OutlierConfig,
        *,
        is_rl: bool = False,
    ) -> None:
        self._is_loss = name == "loss"
        self._is_rl = is_rl
        self._config = config
        self.window = RobustWindow(config.window)
        self.first: list[float] = []
        self._limit: float | None = None
        self._age = 0

    def push(self, value: float) -> None:
        """Add the loss or norm of a trained step, with which outliers are compared."""
        if len(self.first) < self._config.first:
            self.first.append(value)
            self._age = 0
        self.window.push(value)
        if len(self.window) <= self._config.warm_up:
            self._age = 0  # with few samples each one moves the median
        if not self._age:
            self._limit = self._compute_limit()
        self._age = (self._age + 1) % _EVERY

    def limit(self) -> float | None:
        """Return the loss or norm above which the next step is an outlier."""
        return self._limit

    def clear(self) -> None:
        """Discard the reference for outliers; the run's first values stay."""
        self.window.clear()
        self._limit, self._age = self._compute_limit(), 0

    def first_value(self) -> float:
        """Return the median of the run's first losses or norms; 0 before there is one."""
        ordered = sorted(self.first)
        return ordered[len(ordered) >> 1] if ordered else 0.0

    def _compute_limit(self) -> float | None:
        """Compute the limit for outliers from the median of trained steps; None if too few."""
        config = self._config
        if len(self.window) < config.warm_up:
            largest = max(map(abs, self.first), default=0.0)
            return min(config.absurd * largest, _LARGEST) if largest else None
        median = self.window.median()
        if not self._is_loss:
            limit = max(
                config.grad_norm_ratio * median, config.grad_norm_first * self.first_value()
            )
            if self._is_rl:
                limit = max(limit, _SPARSE_RATIO * self.window.upper(_SPARSE_SHARE)) * _RL_TIMES
            return min(limit, _LARGEST) if limit > 0.0 else None
        progress = self.first_value() - median
        if progress <= 0.0:
            return None
        noise = config.sigmas * SIGMA_PER_MAD * self.window.mad()
        return min(median + max(config.progress * progress, noise), _LARGEST)


class OutlierRule(Detector):
    """Provides the limits, and reports the steps that were withheld because of them."""

    name = "outlier"
    STATE = ("_loss", "_grad_norm", "_suspended")

    def __init__(
        self, config: OutlierConfig | None = None, *, loss_kind: LossKind = "minimize"
    ) -> None:
        self._config = config or OUTLIER_DEFAULTS
        self._judges_loss = loss_kind == "minimize"
        self._loss = _MetricReference("loss", self._config)
        self._grad_norm = _MetricReference("grad_norm", self._config, is_rl=loss_kind == "rl")
        self._suspended = 0

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Judge one step: return a finding if it was withheld as an outlier."""
        if self._suspended:
            self._suspended -= 1
        # By the device's verdict and the limits in the record: the current limits are newer. The
        # other detectors report outliers that were applied.
        spikes = self._spike_findings(record) if record.withheld else ()
        if record.skipped or record.overflow or record.failed_ranks or record.nonfinite_ranks:
            return spikes
        loss, norm = record.loss, record.grad_norm
        if loss is not None and math.isfinite(loss):
            self._loss.push(loss)
        if norm is not None and math.isfinite(norm):
            self._grad_norm.push(norm)
        return spikes

    def _spike_findings(self, record: StepRecord) -> tuple[Finding, ...]:
        """Return the findings about a withheld step: loss, gradient norm, or both were outliers."""
        spikes: tuple[Finding, ...] = ()
        for metric, label, value, limit in (
            ("loss", "loss", record.loss, record.loss_limit),
            ("grad_norm", "gradient norm", record.grad_norm, record.grad_norm_limit),
        ):
            if value is None or limit is None or not limit < value < math.inf:
                continue
            reason = f"{label} {value:.4g} is above its limit {limit:.4g}"
            rank = self._find_outlier_rank(record) if metric == "loss" else -1
            spikes += self._report(
                record.step, reason, level="actionable", kind="spike", cause=f"{metric}_outlier",
                rank=rank, value=value, limit=limit,
            )  # fmt: skip
        return spikes

    def _find_outlier_rank(self, record: StepRecord) -> int:
        """Return the rank whose own loss makes the mean an outlier; -1 if no rank stands out.

        With one bad rank of N, it is N - 1 times as far above the mean as the mean is too high.
        """
        if record.loss is None or record.loss_max is None or not len(self._loss.window):
            return -1
        excess = record.loss - self._loss.window.median()
        return record.loss_max_rank if record.loss_max - record.loss >= 0.8 * excess else -1

    def limits(self) -> Limits:
        """Return the limits above which the loss or norm of the next steps is an outlier."""
        if self._suspended:
            return Limits()
        loss = self._loss.limit() if self._judges_loss else None
        return Limits(loss, self._grad_norm.limit())

    def loss_statistics(self) -> tuple[float, float, float, float, float]:
        """Return the loss's median, robust deviation, first size, smallest and recent value.

        The recent value is the median of the last eight steps. All are 0 before the first loss.
        """
        window, first = self._loss.window, abs(self._loss.first_value())
        if not len(window):
            return 0.0, 0.0, first, 0.0, 0.0
        recent = sorted(window.values()[-_RECENT:])
        middle = recent[len(recent) >> 1]
        return window.median(), SIGMA_PER_MAD * window.mad(), first, window.smallest, middle

    def rebaseline(self, steps: int = 0) -> None:
        """Discard the reference for outliers, and have no limit for the next ``steps`` steps."""
        self._loss.clear()
        self._grad_norm.clear()
        self._suspended = max(self._suspended, steps)

    def suspend(self, steps: int) -> None:
        """Let no step be an outlier for the next ``steps`` steps, and keep the reference."""
        self._suspended = max(self._suspended, steps)
