"""Forecast of a run's end and final loss from its own steps, and its lag behind another run.

Pure: input are columns of the steps in the lineage; output are numbers or a reason. If the past
does not predict the future, the result is the reason as a sentence.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FINAL_SHARE = 0.05
"""The final loss is the median over this last share of a run's steps."""
COVERS = 0.8
"""Coverage of an interval."""

_SHORTEST_WAIT = 15.0
"""Seconds: so long rows may be on their way."""
_MIN_PACE_ROWS = 20
_LONG = 3.0
"""From this multiple of the usual step on, a gap between two steps contained something else as
well."""
_RARE, _MANY, _LARGER = 0.01, 4, 5.0
"""A gap is an interruption from this share of the time so far on; with at least the second number
of gaps, only if it is this many times their median: evaluations are long, but similar."""
_UNSEEN = 0.04
"""Share of the time so far: assumed cost of a first interruption. It only widens the interval."""
_LONGEST_SECONDS = 1000 * 365.25 * 86_400
"""A thousand years: a later date is not reported."""
_BLOCKS = 16
_NORMAL_80 = 1.2816
"""Standard errors to each side that contain 80% of a normal distribution."""

_MIN_LOSS_ROWS, _MIN_SHARE = 30, 0.25
_SPAN = 3.0
"""The line is fitted to the latest steps, from a third of the way on."""
_BINS = 16
_ORIGINS = (0.6, 2 / 3, 0.75)
"""Shares of the steps so far from which the line is tested on the known rest."""
_MOST_OFF = 0.1
_MOST_RISE = 0.02
_OF_FALL, _OF_MISS, _FLOOR = 0.85, 0.2, 0.02
_BELOW, _ABOVE = 1.65, 0.7
"""Scale of an interval: share of the predicted fall, share of the error in tests, and a minimum;
then the multiples of it on each side. A learning rate that still has to decay makes a curve fall
below its line more often than above. Fitted to past runs."""

_LEVEL_SHARE = 0.05
_LEVEL_ERRORS = 2.0


class Finish(NamedTuple):
    """Forecast of the end of the last planned step."""

    unix_ns: int
    low_unix_ns: int
    high_unix_ns: int
    seconds_per_step: float
    """Wall time per step, everything included."""
    step_share: float
    """Share of the wall time so far that went to steps: the rest were restarts, evaluations,
    saves."""
    is_waiting: bool
    """Whether training is stalled now; the forecast then counts from now."""


class FinalLoss(NamedTuple):
    """The median loss of a run's last steps, and an 80% interval."""

    loss: float
    low: float
    high: float


def forecast_finish(
    step: Ints,
    time_unix_ns: Ints,
    attempt: Ints | None = None,
    *,
    total_steps: int,
    now_unix_ns: int,
) -> Finish | str:
    """Forecast from the columns of steps when the last one ends, or return why it cannot be.

    A gap that is longer than a usual step contained an evaluation or a save, which continue at
    their rate so far. If it is much longer, or a new attempt started, it was an interruption: a
    restart with repeated steps, or a night without training. For n interruptions so far, n minus
    its standard error are expected for the same time again, because many happen while a run is new;
    each with their median length, so that a single long one has no effect. The duration of steps is
    from the latest quarter.

    Args:
        step: numbers of the steps, rising, ``(rows,)``.
        time_unix_ns: end of each step, ``(rows,)``.
        attempt: the attempt of each, ``(rows,)``; None: one for all.
        total_steps: that are planned.
        now_unix_ns: the present, by the same clock.
    """
    remaining_steps = total_steps - 1 - int(step[-1]) if len(step) else total_steps
    if remaining_steps <= 0:
        return f"all {total_steps:,} planned steps are done"
    if len(step) < _MIN_PACE_ROWS:
        return f"{_MIN_PACE_ROWS} steps are needed to know the pace"
    seconds = np.maximum(np.diff(time_unix_ns) / 1e9, 0.0)
    num = np.diff(step).astype(np.float64)
    is_long = _is_long(seconds, num)
    newest = ~is_long
    newest[: len(newest) - max(_MIN_PACE_ROWS - 1, len(newest) // 4)] = False
    if not newest.any():
        newest = ~is_long
    mean_seconds = float(seconds[newest].sum() / num[newest].sum())
    elapsed = float(seconds.sum())
    if not elapsed > 0:
        return "the steps' times do not rise"
    beside = np.where(is_long, np.maximum(seconds - mean_seconds * num, 0.0), 0.0)
    most = _RARE * elapsed
    if is_long.sum() >= _MANY:
        most = max(most, _LARGER * float(np.median(beside[is_long])))
    is_mishap = beside > most
    if attempt is not None:
        is_mishap |= (np.diff(attempt) != 0) & is_long
    mishaps = np.sort(beside[is_mishap])
    num_mishaps = len(mishaps)
    each = float(mishaps[(num_mishaps - 1) // 2]) if num_mishaps else _UNSEEN * elapsed
    beside = np.where(is_mishap, 0.0, beside)
    expected = num_mishaps - np.sqrt(num_mishaps)
    rate = mean_seconds + float((beside.sum() + expected * each) / num.sum())
    usual = np.where(is_long, mean_seconds * num, seconds) + beside
    of_mishaps = float(np.sqrt(num_mishaps + 1) * each / num.sum())
    spread = float(np.hypot(_pace_error(usual, num, remaining_steps), of_mishaps))
    in_steps = np.where(is_long, np.minimum(mean_seconds * num, seconds), seconds)
    # Excess time between two steps is known only once it is over.
    silent = (now_unix_ns - int(time_unix_ns[-1])) / 1e9
    is_waiting = silent > max(_SHORTEST_WAIT, 10 * _LONG * mean_seconds)
    begin = max(int(time_unix_ns[-1]), now_unix_ns if is_waiting else 0)
    if remaining_steps * (rate + _NORMAL_80 * spread) > _LONGEST_SECONDS:
        return f"at {rate:.3g} s a step, {remaining_steps:,} more steps take over 1,000 years"

    def at(per_step: float) -> int:
        return max(now_unix_ns, begin + round(remaining_steps * max(per_step, 0.0) * 1e9))

    return Finish(
        unix_ns=at(rate),
        low_unix_ns=at(rate - _NORMAL_80 * spread),
        high_unix_ns=at(rate + _NORMAL_80 * spread),
        seconds_per_step=rate,
        step_share=float(in_steps.sum()) / elapsed,
        is_waiting=is_waiting,
    )


def _is_long(seconds: Floats, num: Floats) -> npt.NDArray[np.bool_]:
    """Return which gaps between steps the forecast counts as interruptions or saves."""
    each = seconds / num
    usual = np.empty_like(each)
    for block in np.array_split(np.arange(len(each)), min(_BLOCKS, len(each) // 8 or 1)):
        usual[block] = np.median(each[block])
    return seconds - usual * num > (_LONG - 1.0) * usual


def _pace_error(seconds: Floats, num: Floats, remaining_steps: int) -> float:
    """Return the standard error of the seconds per step in the forecast."""
    edges = np.linspace(0.0, num.sum(), _BLOCKS + 1)
    block = np.clip(np.searchsorted(edges, np.cumsum(num)) - 1, 0, _BLOCKS - 1)
    steps = np.bincount(block, num, _BLOCKS)
    rates = np.bincount(block, seconds, _BLOCKS)[steps > 0] / steps[steps > 0]
    if len(rates) < 2:
        return 0.0
    blocks_left = max(remaining_steps / (num.sum() / len(rates)), 1.0)
    return float(np.std(rates, ddof=1) * np.sqrt(1 / len(rates) + 1 / blocks_left))


def forecast_final_loss(step: Ints, loss: Floats, *, total_steps: int) -> FinalLoss | str:
    """Forecast the final loss from the columns of steps, or return why there is no forecast.

    The latest two thirds of the curve, as medians, are fitted by a line of log loss over log steps
    (a power law; Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 4.2); its
    slope is the median over all pairs (Theil and Sen), so that spikes do not tilt it. The line is
    used only if fits to less of the curve predict the rest: this test fails for corners of a
    schedule, divergence and noise, whatever their cause. The remaining decay of the learning rate
    is not modeled, except as far as past runs decayed it.

    Args:
        step: numbers of the steps from 0, rising, ``(rows,)``.
        loss: one per step, ``(rows,)``; non-finite values are ignored.
        total_steps: that are planned.
    """
    is_finite = np.isfinite(loss)
    at, values = step[is_finite].astype(np.float64) + 1.0, loss[is_finite]
    if len(at) < _MIN_LOSS_ROWS:
        return f"{_MIN_LOSS_ROWS} steps with a loss are needed"
    if at[-1] < _MIN_SHARE * total_steps:
        return f"known from a quarter of the run on, step {int(_MIN_SHARE * total_steps):,}"
    now = float(at[-1])
    level = float(np.median(_select_latest_losses(at, values, now)))
    end = (1.0 - FINAL_SHARE / 2) * total_steps
    if now >= end:
        low, high = np.quantile(values[at > (1 - FINAL_SHARE) * now], (0.1, 0.9))
        return FinalLoss(level, float(low), float(high))
    if level <= 0 or np.quantile(values, 0.05) <= 0:
        return "the loss is not above 0, and only such curves are known to follow a line"
    line = _fit_loss_line(at, values, now)
    if line is None:
        return "too few steps of the newest two thirds have a loss"
    slope, offset = line
    if slope > _MOST_RISE:
        return "the loss has been rising"
    misses = [_backtest_line(at, values, now, level, share) for share in _ORIGINS]
    miss = max(misses, key=abs)
    if not abs(miss) <= _MOST_OFF:
        return (
            f"the curve does not foretell its own last part: the same forecast made at step "
            f"{int(_ORIGINS[misses.index(miss)] * now):,} would be {100 * abs(np.expm1(miss)):.0f} "
            "% off by now"
        )
    foreseen = offset + slope * np.log(end)
    fall = foreseen - np.log(level)
    scale = np.sqrt(_FLOOR**2 + (_OF_FALL * fall) ** 2 + (_OF_MISS * miss) ** 2)
    return FinalLoss(*(float(np.exp(foreseen + by * scale)) for by in (0.0, -_BELOW, _ABOVE)))


def _select_latest_losses(at: Floats, values: Floats, now: float) -> Floats:
    """Return the losses of the last twentieth before a step of the forecast: at least one."""
    end = int(np.searchsorted(at, now, "right"))
    begin = int(np.searchsorted(at, (1 - FINAL_SHARE) * now, "right"))
    return values[min(begin, end - 1) : end]


def _fit_loss_line(at: Floats, values: Floats, now: float) -> tuple[float, float] | None:
    """Fit the forecast's line of log loss over log steps up to a step; None with too few."""
    edges = np.searchsorted(at, now * np.geomspace(1 / _SPAN, 1.0, _BINS + 1), "right")
    parts = [slice(a, b) for a, b in pairwise(edges) if b > a]
    if len(parts) < 4:
        return None
    x = np.log([at[part].mean() for part in parts])
    y = np.log([max(float(np.median(values[part])), np.finfo(np.float64).tiny) for part in parts])
    i, j = np.triu_indices(len(x), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    return slope, float(np.median(y - slope * x))


def _backtest_line(at: Floats, values: Floats, now: float, level: float, share: float) -> float:
    """Return the error, in log loss, that a forecast from an earlier step has at this one."""
    line = _fit_loss_line(at, values, share * now)
    if line is None:
        return float("inf")
    return line[1] + line[0] * float(np.log((1 - FINAL_SHARE / 2) * now)) - float(np.log(level))


class Lag(NamedTuple):
    """Lag of one run behind another at equal tokens; negative: ahead."""

    tokens: float
    is_least: bool
    """Whether the other run never reached this loss: the lead is then at least this large."""


def measure_token_lag(
    tokens: Floats, loss: Floats, other_tokens: Floats, other_loss: Floats
) -> Lag | str:
    """Compute from the columns of two runs how many tokens sooner the other had this loss.

    Losses are medians over a twentieth of the tokens. 0: the difference is within the noise.

    Args:
        tokens: rising, ``(rows,)``; or steps, if no tokens are counted.
        loss: one for each, ``(rows,)``.
        other_tokens: of the other run.
        other_loss: of the other run.
    """
    at, values = _finite_pairs(tokens, loss)
    other_at, other_values = _finite_pairs(other_tokens, other_loss)
    if min(len(at), len(other_at)) < _MIN_PACE_ROWS:
        return f"{_MIN_PACE_ROWS} steps of each run are needed"
    now = float(at[-1])
    window = _select_latest_losses(at, values, now)
    level = float(np.median(window))
    spread = 1.4826 * float(np.median(np.abs(window - level)))
    error = 1.2533 * spread / np.sqrt(len(window))  # a median's, of normal noise
    places = now * (1 - _LEVEL_SHARE) ** np.arange(200.0)[::-1]
    reach = float(other_at[-1])
    places = np.union1d(places, reach * (1 - _LEVEL_SHARE) ** np.arange(200.0))
    places = places[(places > other_at[min(len(other_at) - 1, 4)]) & (places <= reach)]
    curve = np.array(
        [np.median(_select_latest_losses(other_at, other_values, place)) for place in places]
    )
    lowest = np.minimum.accumulate(curve)
    if reach >= now:
        same = _select_latest_losses(other_at, other_values, now)
        if abs(float(np.median(same)) - level) <= _LEVEL_ERRORS * np.hypot(
            error, _estimate_median_error(same)
        ):
            return Lag(0.0, is_least=False)
    reached = np.flatnonzero(lowest <= level)
    if not len(reached):
        return (
            Lag(now - reach, is_least=True)
            if reach > now
            else "the other run has not come to this loss yet"
        )
    first = int(reached[0])
    if first == 0:
        return Lag(now - float(places[0]), is_least=False)
    part = (lowest[first - 1] - level) / (lowest[first - 1] - lowest[first])
    place = places[first - 1] + part * (places[first] - places[first - 1])
    return Lag(now - float(place), is_least=False)


def _estimate_median_error(window: Floats) -> float:
    """Return the standard error of the median loss in a window of the forecast."""
    spread = 1.4826 * float(np.median(np.abs(window - np.median(window))))
    return 1.2533 * spread / float(np.sqrt(len(window)))


def _finite_pairs(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the points of the loss curve, for a forecast, whose numbers are both finite."""
    is_finite = np.isfinite(at) & np.isfinite(values)
    return at[is_finite].astype(np.float64), values[is_finite]
