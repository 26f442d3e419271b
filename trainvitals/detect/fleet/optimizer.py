"""Settings of the update: the learning rate, the weight decay, and float16's gradient scaler.

Rate and decay are compared with their own history: no schedule has to be declared. The scheduled
rate is judged. If the escalation policy cut or held the rate, its factor (``lr_factor``) is removed
first: its own cuts end by themselves.
"""

import math
from bisect import bisect_left
from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, NotNegative, Settings
from trainvitals.detect.fleet.base import ConditionEpisode, MergedStep, Watcher, number
from trainvitals.records import CHANGE_EXPECTED, OVERFLOW, RATE_DECLARED, Finding
from trainvitals.stateful import state_hexadecimal, state_row

_NEWEST = 512
_MOST = 2048
"""Maximum rates kept: the latest in full, older ones with increasing gaps."""


class LearningRateConfig(Settings, frozen=True, kw_only=True):
    """Limits that no schedule exceeds. All values are our own choice, explained at each."""

    section = "learning_rate"

    max_rise: Annotated[float, Meta(ge=1.1, le=1e6)] = 2.0
    """Largest rise in one step after the warm-up. The steps of a linear warm-up rise by 2 at
    most (from the first to the second), those of cosine, linear and cyclic schedules by far
    less."""
    warm_up_rows: Annotated[int, Meta(ge=2)] = 10
    """Steps without a new highest rate after which the warm-up is taken to be over; a fall ends it
    at once."""
    decayed: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.2
    """A rate that was below this part of the highest before it became 0 has decayed: the schedule
    ended, or a log rounds to four digits. That is not reported."""
    max_climb: Annotated[float, Meta(ge=1.1, le=1e6)] = 3.0
    """Largest rise in small steps after the warm-up, relative to the highest rate before. Cycles
    and restarts return to their highest rate; a batch size that grows raises it in few steps."""
    settled_rows: Annotated[int, Meta(ge=2)] = 100
    """Steps without a new highest rate after which the next rise counts as a new one. Before, it
    continues the warm-up, which may pause."""
    climb_rows: Annotated[int, Meta(ge=2)] = 30
    """New highest rates in a rise that is reported; they are at least half of its steps. A rate
    that follows the KL divergence of a policy rises by 1.5 per step, in fewer steps."""
    zero_rows: Annotated[int, Meta(ge=2)] = 30
    """Steps in a row at rate 0 that are reported. Fewer are normal: a scaler that starts at 2**32
    overflows about 20 times before the first update, and schedulers wait for it."""
    tolerance: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Relative difference allowed between the rates of the new and the previous attempt at the same
    step."""
    clear_after: AtLeastOne = 100
    """Steps without the anomaly after which it can be reported again."""


class LearningRateWatcher(Watcher):
    """Finds upward jumps and climbs, a rate stuck at zero, and a schedule that was not restored.

    A falling rate is never reported: a step decay divides by 10 in one step. Neither is a rate that
    the run has trained with before (a warm restart, a cycle), or that is declared: by the schedule,
    by a scheduler given to ``watch``, or by ``monitor.expect``. A climb is reported only if the
    rate was lower before: a warm-up may start late, after a constant rate.
    """

    name = "learning_rate"
    STATE = (
        "_steps", "_rates", "_last", "_peak", "_rows_since_peak",
        state_row("flags", "_is_warm", "_is_resumed"),
        state_row("zeros", "_zeros", "_zero_since"),
        "_is_decayed",
        state_row("episodes", "_jumps", "_zero", "_nonfinite"),
        state_row("climb", "_climb_from", "_climb_rows", "_num_highs", "_climbs"),
    )  # fmt: skip
    MAY_LACK = True  # states of older versions lack ``_is_decayed`` and ``climb``

    def __init__(self, config: LearningRateConfig | None = None) -> None:
        super().__init__()
        self._config = config or LearningRateConfig()
        self._steps: list[int] = []
        self._rates: list[float] = []
        self._last: float | None = None
        self._peak = 0.0
        self._rows_since_peak = 0
        self._is_warm = False
        self._is_resumed = False
        self._zeros, self._zero_since = 0, -1
        self._is_decayed = False
        """Whether the rate was low before it became 0."""
        self._jumps = ConditionEpisode(self._config.clear_after)
        self._zero = ConditionEpisode(self._config.clear_after)
        self._nonfinite = ConditionEpisode(self._config.clear_after)
        self._climb_from = 0.0
        """Highest rate before the latest rise above it; 0: the warm-up is not over."""
        self._climb_rows = self._num_highs = 0
        self._climbs = ConditionEpisode(self._config.clear_after)

    @property
    def goes_on(self) -> bool:
        """Return whether the learning rate that was reported is still zero or non-finite."""
        return self._zero.on or self._nonfinite.on

    def _restarted(self, merged: MergedStep) -> None:
        """Compare the rate of the next merged step with the previous attempt's."""
        self._is_resumed, self._last, self._zeros = True, None, 0

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the learning rate of a merged step."""
        raw = merged.run.get("learning_rate")
        if raw is None:
            return ()
        rate = _requested(number(raw), number(merged.run.get("lr_factor", 1.0)))
        is_bad = rate is None or rate < 0.0
        if self._nonfinite.begins(is_bad):
            reason = f"the learning rate is {rate if rate is not None else 'not finite'}"
            return self._report(merged.step, reason, cause="lr_nonfinite", value=rate)
        if rate is None or is_bad:
            return ()
        return self._check_rate(merged, rate)

    def _check_rate(self, merged: MergedStep, rate: float) -> tuple[Finding, ...]:
        """Return findings about a merged step's learning rate: jump, stuck at 0, not restored."""
        findings = self._forgotten(merged.step, rate) if self._is_resumed else ()
        last = self._last
        is_declared = _has_bit(merged, RATE_DECLARED | CHANGE_EXPECTED)
        is_jump = not is_declared and self._is_jump(rate)
        if self._jumps.begins(is_jump) and last is not None:
            findings += self._report_jump(merged.step, last, rate)
        if self._climbs.begins(self._is_climb(rate, is_declared)):
            findings += self._report_climb(merged.step, rate)
        if not is_jump:  # a lasting jump becomes normal in the next step
            self._track_peak(rate)
            self._remember(merged.step, rate)
        findings += self._stuck(merged, rate)
        self._last = rate
        return findings

    def _report_jump(self, step: int, last: float, rate: float) -> tuple[Finding, ...]:
        times = f"{rate / last:.3g}x" if last > 0.0 else "from 0"
        reason = (
            f"the learning rate jumped from {last:.4g} to {rate:.4g} in one step, {times}; "
            f"the schedule's highest so far was {self._peak:.4g}"
        )
        limit = min(last * self._config.max_rise, 1e308)
        return self._report(step, reason, cause="lr_jump", value=rate, limit=limit)

    def _report_climb(self, step: int, rate: float) -> tuple[Finding, ...]:
        start, limit = self._climb_from, min(self._config.max_climb * self._climb_from, 1e308)
        reason = (
            f"the learning rate rose over {self._climb_rows} steps to {rate:.4g}, "
            f"{rate / start:.3g}x its highest value before, {start:.4g}"
        )
        onset = max(0, step - self._climb_rows + 1)
        return self._report(
            step, reason, cause="lr_climb", value=rate, limit=limit, onset_step=onset
        )

    # -------------------------------------------------------------------------------- the course

    def _is_jump(self, rate: float) -> bool:
        """Return whether a merged step's rate is far above the last one, and all earlier ones."""
        config, last, peak = self._config, self._last, self._peak
        if last is None or not self._is_warm:
            return False
        return rate > max(config.max_rise * last, 1.02 * peak)

    def _is_climb(self, rate: float, is_declared: bool) -> bool:
        """Return whether a merged step's rate rose in small steps far above the highest before.

        Call before ``_track_peak``.
        """
        config, peak = self._config, self._peak
        is_new = self._rows_since_peak >= config.settled_rows
        if rate > peak and (is_declared or is_new):
            self._climb_from = rate if is_declared else peak
            self._climb_rows = self._num_highs = 0
        self._num_highs += rate > peak
        self._climb_rows += 1
        start = self._climb_from
        is_steady = self._num_highs >= max(config.climb_rows, self._climb_rows / 2)
        is_climb = rate > config.max_climb * start > 0.0 and is_steady
        return is_climb and min(self._rates, default=rate) < start

    def _track_peak(self, rate: float) -> None:
        """Track the highest rate of the merged steps, and whether the warm-up is over."""
        if rate > self._peak:
            self._peak, self._rows_since_peak = rate, 0
            return
        self._rows_since_peak += 1
        is_over = rate < 0.999 * self._peak or self._rows_since_peak >= self._config.warm_up_rows
        self._is_warm = self._is_warm or (self._peak > 0.0 and is_over)

    def _stuck(self, merged: MergedStep, rate: float) -> tuple[Finding, ...]:
        """Return the finding about a merged step whose rate stays at 0 in all groups."""
        is_zero = rate == 0.0 and not any(
            name.startswith("learning_rate.") and (number(value) or 0.0) > 0.0
            for name, value in merged.run.items()
        )
        last = self._last or 0.0
        if is_zero and not self._zeros and 0.0 < last < self._config.decayed * self._peak:
            self._is_decayed = True
        if not is_zero:
            self._zeros, self._is_decayed = 0, False
        elif not self._zeros:
            self._zero_since = merged.step
        self._zeros = min(self._zeros + is_zero, self._config.zero_rows)
        is_stuck = self._zeros >= self._config.zero_rows and not self._is_decayed
        if not self._zero.begins(is_zero and is_stuck):
            return ()
        since = self._zero_since
        reason = f"the learning rate has been 0 since step {since}: the model does not learn"
        return self._report(merged.step, reason, cause="lr_zero", value=0.0, onset_step=since)

    # -------------------------------------------------------------------------------- resuming

    def _forgotten(self, step: int, rate: float) -> tuple[Finding, ...]:
        """Return the fleet detector's finding about a schedule that was not restored.

        The previous rates are then discarded. After the last seen step a schedule may fall, but may
        not rise or return to its first rate.
        """
        self._is_resumed = False
        expected, keep = self._expected(step), bisect_left(self._steps, step)
        is_beyond, first = keep == len(self._steps), self._rates[:2]
        del self._steps[keep:], self._rates[keep:]
        if expected is None:
            return ()
        low, high = expected
        config = self._config
        if low * (1.0 - config.tolerance) <= rate <= high * (1.0 + config.tolerance):
            return ()
        begins_again = 0.9 * min(first) <= rate <= 1.1 * max(first)
        if is_beyond and rate <= config.max_rise * high and not begins_again:
            return ()
        reason = (
            f"the learning rate resumed at {rate:.4g}, but the previous attempt had {high:.4g} "
            f"at step {step}: the schedule was not restored"
        )
        return self._report(step, reason, cause="lr_forgotten", value=rate, limit=high)

    def _expected(self, step: int) -> tuple[float, float] | None:
        """Return the range of the rate in the earlier attempt's merged steps; None if unknown."""
        steps, rates = self._steps, self._rates
        if len(steps) < 2 or step < steps[0]:
            return None
        at = bisect_left(steps, step)
        near = rates[max(0, at - 1) : at + 2]
        if at == len(steps):
            pace, ahead = steps[-1] - steps[-2], step - steps[-1]
            if ahead > 10 * pace:
                return None
            slope = (rates[-1] - rates[-2]) / pace
            near = [rates[-1], max(0.0, rates[-1] + slope * ahead)]
        low, high = min(near), max(near)
        return (low, high) if math.isfinite(high) else None

    def _remember(self, step: int, rate: float) -> None:
        """Record a merged step's learning rate; keep fewer of old and of constant rates."""
        steps, rates = self._steps, self._rates
        if len(rates) > 1 and rates[-1] == rate == rates[-2]:
            steps[-1] = step
            return
        steps.append(step)
        rates.append(rate)
        if len(steps) > _MOST:
            del steps[1:-_NEWEST:2], rates[1:-_NEWEST:2]


def _requested(applied: float | None, factor: float | None) -> float | None:
    """Return the scheduled rate of a merged step: the applied one over the policy's factor."""
    if applied is None or factor is None or not 0.0 < factor < 1.0:
        return applied
    requested_rate = applied / factor
    return requested_rate if math.isfinite(requested_rate) else None


def _has_bit(merged: MergedStep, bits: int) -> bool:
    """Return whether a merged step's verdict has any of some bits."""
    return bool(int(number(merged.run.get("verdict")) or 0) & bits)


# ------------------------------------------------------------------------------- the weight decay


class WeightDecayConfig(Settings, frozen=True, kw_only=True):
    """Limits that no schedule of the weight decay exceeds. All values are our own choice."""

    section = "weight_decay"

    max_rise: Annotated[float, Meta(ge=1.1, le=1e6)] = 5.0
    """Largest rise in one step, relative to the highest weight decay so far. A linear warm-up rises
    by at most 2, stages by 2 to 4, a cosine (DINO: from 0.04 to 0.4) by less than 1% per step. A
    misplaced decimal point is a rise by 10."""
    min_decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-6
    """A highest weight decay up to this value counts as none. The first value above it is the start
    of a warm-up or of a stage, and there is nothing to compare it with."""
    warm_up_rows: Annotated[int, Meta(ge=2)] = 10
    """Steps without a new highest weight decay after which a warm-up is taken to be over."""
    clear_after: AtLeastOne = 100
    """Steps without a jump after which one can be reported again."""


class WeightDecayWatcher(Watcher):
    """Finds a jump of the largest weight decay of all parameter groups, also at a resume.

    The loss rises too slowly to show one. A falling weight decay is never reported. Neither is one
    that the run has trained with before, that ``monitor.expect`` announced, or that came with a
    change of the parameter groups. Without ``weight_decay`` it abstains.
    """

    name = "weight_decay"
    STATE = ("_last", "_highest", "_rows_since_highest", "_is_resumed", "_episode")

    def __init__(self, config: WeightDecayConfig | None = None) -> None:
        super().__init__()
        self._config = config or WeightDecayConfig()
        self._last = self._highest = 0.0
        self._rows_since_highest = 0
        self._is_resumed = False
        self._episode = ConditionEpisode(self._config.clear_after)

    def _restarted(self, merged: MergedStep) -> None:
        """Compare the weight decay of the next merged step with those of all earlier attempts."""
        self._is_resumed = True

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the largest weight decay of a merged step."""
        decay = number(merged.run.get("weight_decay"))
        if decay is None or decay < 0.0:
            return ()
        is_resumed, self._is_resumed = self._is_resumed, False
        last, self._last = self._last, decay
        highest = max(self._highest, last)
        limit = min(self._config.max_rise * highest, 1e308)
        is_warm = self._rows_since_highest >= self._config.warm_up_rows
        is_jump = decay > limit and is_warm and highest > self._config.min_decay
        is_jump = is_jump and not _has_bit(merged, CHANGE_EXPECTED)
        if not is_jump:  # a lasting jump becomes normal in the next step
            is_higher = decay > self._highest
            self._rows_since_highest = 0 if is_higher else self._rows_since_highest + 1
            self._highest = max(self._highest, decay)
        if not self._episode.begins(is_jump):
            return ()
        where = "at a resume" if is_resumed else "in one step"
        reason = (
            f"the weight decay jumped from {last:.4g} to {decay:.4g} {where}: "
            f"{decay / highest:.3g}x its highest value so far, {highest:.4g}"
        )
        return self._report(merged.step, reason, value=decay, limit=limit)


# --------------------------------------------------------------------------------- the loss scale


_WINDOW = 100
_ALL = (1 << _WINDOW) - 1


class LossScaleConfig(Settings, frozen=True, kw_only=True):
    """What a gradient scaler does in order: one overflow in about 2000 steps."""

    section = "loss_scale"

    min_scale: NotNegative = 1.0
    """Below this, scaling shrinks the gradients, and they underflow in float16.
    ``torch.amp.GradScaler`` starts at 65536, 16 halvings above it."""
    overflows_in_row: Annotated[int, Meta(ge=2, le=_WINDOW)] = 5
    """Consecutive overflows that are reported. The scaler doubles its scale every 2000 steps (its
    ``growth_interval``), and one overflow then halves it again."""
    overflow_ratio: Annotated[float, Meta(ge=0.01, le=1.0)] = 0.2
    """Share of the last 100 steps that may overflow."""
    warmup_rows: AtLeastOne = 50
    """Steps in a row without overflow after which the scaler has found its scale. Earlier overflows
    belong to its search: 2**32 takes about 20 halvings."""
    clear_after: AtLeastOne = 100
    """Steps without the anomaly after which it can be reported again."""


class LossScaleWatcher(Watcher):
    """Finds a collapsing loss scale and overflows frequent enough to slow training down.

    An overflow is a bit of ``verdict``, or a growing ``overflow_steps``, or, without either, a
    halved scale. Without a loss scale it abstains.
    """

    name = "loss_scale"
    STATE = (
        "_scale",
        "_count",
        state_hexadecimal("_bits"),
        state_row("rows", "_rows", "_in_row", "_calm", "_is_settled"),
        "_before",
        state_row("episodes", "_low", "_collapse", "_rate"),
    )

    def __init__(self, config: LossScaleConfig | None = None) -> None:
        super().__init__()
        self._config = config or LossScaleConfig()
        self._scale: float | None = None
        self._count: float | None = None
        self._bits = 0
        self._rows = 0
        self._in_row = 0
        self._calm = 0
        self._is_settled = False
        self._before = 0.0
        clear = self._config.clear_after
        self._low, self._collapse, self._rate = (ConditionEpisode(clear) for _ in range(3))

    @property
    def goes_on(self) -> bool:
        """Return whether a reported collapse or overflow of the loss scale still lasts."""
        return self._low.on or self._collapse.on or self._rate.on

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the earlier merged steps' scales: a new process starts with the first scale."""
        self._scale = self._count = None
        self._bits = self._rows = self._in_row = self._calm = 0
        self._is_settled = False

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the loss scale of a merged step."""
        scale = number(merged.run.get("loss_scale"))
        if scale is None:
            return ()
        overflowed = self._has_overflowed(merged, scale)
        if overflowed and not self._in_row:
            self._before = scale if self._scale is None else max(scale, self._scale)
        self._scale = scale
        self._in_row = min(self._in_row + 1, _WINDOW) if overflowed else 0
        self._calm = 0 if overflowed else self._calm + 1
        if not self._is_settled and self._calm >= self._config.warmup_rows:
            self._is_settled, self._rows, self._bits = True, 0, 0
        self._bits = (self._bits << 1 | overflowed) & _ALL
        self._rows = min(self._rows + 1, _WINDOW)
        return self._loss_scale_findings(merged.step, scale)

    def _has_overflowed(self, merged: MergedStep, scale: float) -> bool:
        """Return whether the gradients of a merged step overflowed."""
        verdict = merged.run.get("verdict")
        if isinstance(verdict, int):
            return bool(verdict & OVERFLOW)
        count = number(merged.run.get("overflow_steps"))
        if count is not None:
            before, self._count = self._count, count
            return before is not None and count > before
        return self._scale is not None and scale < 0.6 * self._scale

    def _loss_scale_findings(self, step: int, scale: float) -> tuple[Finding, ...]:
        """Report a loss scale that is too low, or that collapses over merged steps."""
        config, in_row, cause = self._config, self._in_row, "loss_scale_collapse"
        findings: tuple[Finding, ...] = ()
        if self._low.begins(scale < config.min_scale):
            reason = (
                f"the loss scale is {scale:.4g}, below {config.min_scale:g}: gradients are too "
                "large for float16 even unscaled"
            )
            findings = self._report(step, reason, cause=cause, value=scale, limit=config.min_scale)
        collapses = self._is_settled and in_row >= config.overflows_in_row
        if self._collapse.begins(collapses) and not findings:
            reason = (
                f"{in_row} overflows in a row: the loss scale fell from {self._before:.4g} to "
                f"{scale:.4g}; a single one about every 2,000 steps is normal"
            )
            limit = float(config.overflows_in_row)
            findings = self._report(
                step, reason, cause=cause, value=float(in_row), limit=limit,
                onset_step=step - in_row + 1,
            )  # fmt: skip
        return findings + self._overflow_rate_findings(step)

    def _overflow_rate_findings(self, step: int) -> tuple[Finding, ...]:
        """Judge the share of overflows in the last 100 merged steps, or in all if fewer."""
        num = self._bits.bit_count()
        ratio, limit = num / _WINDOW, self._config.overflow_ratio
        if self._rows < _WINDOW and not (self._is_settled and ratio > limit):
            return ()
        if not self._rate.begins(ratio > limit):
            return ()
        reason = (
            f"{num} of the last {_WINDOW} steps overflowed and were skipped (limit {limit:.0%}; "
            "1 in 2,000 is normal)"
        )
        onset = max(0, step - self._bits.bit_length() + 1)
        return self._report(
            step, reason, cause="overflow_rate", value=ratio, limit=limit, onset_step=onset
        )
