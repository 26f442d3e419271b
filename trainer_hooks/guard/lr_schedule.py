"""Comparison of the learning rate with the declared schedule: reports a departure.

Pure: the inputs are the declared rates of a step and the rates that the loop requests. Factors of
the escalation policy are in neither. It only reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from trainvitals.detect.reporter import make_finding
from trainvitals.errors import UsageError
from trainvitals.records import Finding
from trainvitals.stateful import Stateful, state_row

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]

ROWS = 3
"""Compared steps in a row off the schedule until a report: one may be a resume or a hook."""
CLEAR_AFTER = 100
"""Compared steps back on the schedule after which it can be reported again."""
_WSD_DECAY = 0.1
"""Share of a run in which WSD decays, if not specified (Hu et al., MiniCPM, 2024)."""
_SHAPE_TOLERANCE = 0.01
"""Share of the peak: differences between conventions of counting, by a step to either side."""
_MOST_NAMED = 3


class RateBand(NamedTuple):
    """Range in which a rate is as declared."""

    low: float
    high: float

    def widened(self, tolerance: float, floor: float) -> RateBand:
        """Widen the declared range of a rate for rounding, before the detector compares."""
        return RateBand(
            self.low - tolerance * abs(self.low) - floor,
            self.high + tolerance * abs(self.high) + floor,
        )

    def times(self, factor: float) -> RateBand:
        """Return the range that the detector expects for a rate multiplied by a factor."""
        return RateBand(self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Shape of a learning-rate schedule, for ``watch(schedule=...)``. It does not set the rate.

    After the warm-up the rate is that of the optimizer's group (``initial_lr``, otherwise ``lr``).
    Then it stays constant, falls linearly or as a cosine to ``min_ratio`` of it at ``total_steps``,
    or stays and falls in the last ``decay_steps`` (``wsd``: linearly, as 1 - sqrt, or as a cosine).
    The form of the warm-up, and whether steps count from 0 or 1, do not matter.

    Args:
        kind: ``constant``, ``linear``, ``cosine`` or ``wsd``.
        warmup_steps: steps of the warm-up.
        min_ratio: final rate, as a share of the full one.
        decay_steps: steps of the decay of ``wsd``; None: a tenth of all steps.
    """

    kind: ScheduleKind
    warmup_steps: int = 0
    min_ratio: float = 0.0
    decay_steps: int | None = None
    """Steps of the decay of ``wsd``; None: a tenth of all steps."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise UsageError(
                f"schedule is {self.kind!r}; it must be one of {', '.join(get_args(ScheduleKind))}",
                hint="for any other schedule give the scheduler: watch(..., schedule=scheduler)",
            )
        if self.warmup_steps < 0 or not 0.0 <= self.min_ratio <= 1.0:
            raise UsageError(
                f"schedule has warmup_steps {self.warmup_steps} and min_ratio {self.min_ratio}; "
                "they must be at least 0, and min_ratio at most 1"
            )
        if self.decay_steps is not None and (self.kind != "wsd" or self.decay_steps < 1):
            raise UsageError(
                f"schedule has decay_steps {self.decay_steps}; it needs kind wsd, and must be at "
                f"least 1",
                hint="linear and cosine decay from the warm-up's end to total_steps",
            )

    def band(self, step: int, total_steps: int) -> RateBand:
        """Return the range that the detector expects for the rate at a step; the peak is 1."""
        if step < self.warmup_steps:
            return RateBand(0.0, 1.0 + _SHAPE_TOLERANCE)
        near = [self._band_at(each, total_steps) for each in (step - 1, step, step + 1)]
        return RateBand(
            min(low for low, _ in near) - _SHAPE_TOLERANCE,
            max(high for _, high in near) + _SHAPE_TOLERANCE,
        )

    def _band_at(self, step: int, total_steps: int) -> RateBand:
        """Return the range that the detector expects for the learning rate at exactly one step."""
        if self.kind == "constant":
            return RateBand(1.0, 1.0)
        begin = self.warmup_steps
        if self.kind == "wsd":
            decay_steps = self.decay_steps
            decays = max(1, round(_WSD_DECAY * total_steps)) if decay_steps is None else decay_steps
            begin = max(begin, total_steps - decays)
        passed = min(1.0, max(0.0, (step - begin) / max(1, total_steps - begin)))
        cosine = 0.5 * (1.0 + math.cos(math.pi * passed))
        shapes = {
            "linear": (1.0 - passed,),
            "cosine": (cosine,),
            "wsd": (1.0 - passed, 1.0 - math.sqrt(passed), cosine),
        }[self.kind]
        rates = [self.min_ratio + (1.0 - self.min_ratio) * shape for shape in shapes]
        return RateBand(min(rates), max(rates))


class ScheduleFollower(Stateful):
    """Compares the rates of all groups with the declared ones; reports a departure once.

    Args:
        name: display name of the declared schedule.
        tolerance: relative difference allowed.
    """

    STATE = (state_row("rows", "_off", "_on", "_since", "_left"), "_scales")

    def __init__(self, name: str, *, tolerance: float) -> None:
        self._name = name
        self._tolerance = tolerance
        self._off = 0
        """Compared steps in a row that were off; below 0: steps since it is on again."""
        self._on = False
        """Whether a reported departure still holds."""
        self._since = 0
        self._left = 0
        """Steps of an announced change that are not compared."""
        self._scales: list[float] = []
        """By group, the factor on the declared rate after an announced change."""
        self._highest = 0.0

    def expect(self, steps: int) -> None:
        """Accept an announced change: the detector takes the rates after it as declared."""
        self._left = max(self._left, steps)

    def is_declared(self, rate: float, band: RateBand) -> bool:
        """Detect whether the first group's rate in a step is as the schedule declares."""
        return not self._is_outside_band(rate, band.times(self._scales[0] if self._scales else 1.0))

    def update(
        self, step: int, rates: Sequence[float | None], declared: Sequence[RateBand | None]
    ) -> Finding | None:
        """Judge a step's learning rates; return the finding on a departure from the schedule."""
        if len(self._scales) != len(rates):
            self._scales = [1.0] * len(rates)
        if self._left > 0:
            self._left -= 1
            if not self._left:
                self._scales = [
                    self._measure_group_scale(scale, rate, band)
                    for scale, rate, band in zip(self._scales, rates, declared, strict=True)
                ]
            return None
        off = [
            (group, rate, band)
            for group, (rate, expected, scale) in enumerate(
                zip(rates, declared, self._scales, strict=True)
            )
            if rate is not None
            and expected is not None
            and self._is_outside_band(rate, band := expected.times(scale))
        ]
        if off:
            return self._record_departure(step, off)
        if any(r is not None and b is not None for r, b in zip(rates, declared, strict=True)):
            self._off = min(0, self._off) - 1
            self._on = self._on and self._off > -CLEAR_AFTER
        return None

    def _record_departure(
        self, step: int, off: Sequence[tuple[int, float, RateBand]]
    ) -> Finding | None:
        """Count a step off the declared schedule; return the finding, once."""
        if self._off <= 0:
            self._since = step
        self._off = max(0, self._off) + 1
        if self._on or self._off < ROWS:
            return None
        self._on = True
        _, rate, band = off[0]
        expected = min(max(rate, band.low), band.high)  # the nearer end of the band
        reason = self._departure_text(step, off)
        return make_finding(
            "schedule", step, reason, value=rate, limit=expected, onset_step=self._since
        )

    def _departure_text(self, step: int, off: Sequence[tuple[int, float, RateBand]]) -> str:
        """Return the text of the finding: groups whose rate left the declared schedule."""
        named = ", ".join(
            f"{_format_group(group)}{rate:.4g} instead of {_format_band(band)}"
            for group, rate, band in off[:_MOST_NAMED]
        )
        more = f" and {len(off) - _MOST_NAMED} more groups" if len(off) > _MOST_NAMED else ""
        since = f" (since step {self._since:,})" if self._since != step else ""
        return f"the learning rate left the declared {self._name}: {named}{more}{since}"

    def _is_outside_band(self, rate: float, band: RateBand) -> bool:
        """Detect whether a step's learning rate is outside its declared range."""
        self._highest = max(self._highest, abs(band.high))
        low, high = band.widened(self._tolerance, 1e-3 * self._tolerance * self._highest)
        return not low <= rate <= high

    def _measure_group_scale(
        self, scale: float, rate: float | None, band: RateBand | None
    ) -> float:
        """Return the factor by which the detector expects a group's rate to differ hereafter."""
        if rate is None or band is None or not self._is_outside_band(rate, band.times(scale)):
            return scale
        middle = (band.low + band.high) / 2
        return rate / middle if middle > 0.0 and rate >= 0.0 else scale

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue as the detector that returned ``state``; start over without one."""
        if state:
            super().load_state_dict(state)


def _format_group(group: int) -> str:
    """Return a parameter group's number for the finding about its learning rate."""
    return f"group {group}: " if group else ""


def _format_band(band: RateBand) -> str:
    """Return a range of learning rates as text for the detector's finding."""
    if band.high - band.low <= 0.02 * abs(band.high):
        return f"{(band.low + band.high) / 2:.4g}"
    return f"{band.low:.4g} to {band.high:.4g}"


__all__ = ["LRSchedule", "RateBand", "ScheduleFollower", "ScheduleKind"]
