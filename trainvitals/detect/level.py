"""The loss level: divergence, drift, a recovery that fails, progress that is lost.

A spike is one step compared with its neighbors. A slow divergence, or a rise of 3 % that never
recovers, contains no such step; it shows in the level: the median of the newest steps, compared
with the run's lowest level so far. Bad steps cannot poison that reference: they can raise a median
but never a minimum.

``loss_level`` compares the median of 64 steps with the noise of single steps and finds fast or
large rises. ``loss_drift`` compares medians over 128 to 512 steps with how much medians of 32 steps
vary and with the largest rise that recovered by itself: it finds a 10 % rise at 15 % noise, but
needs 500 steps to learn how much the run varies.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from trainvitals.config import AboveZero, Settings
from trainvitals.detect.outliers import Detector
from trainvitals.records import Finding, StepRecord

_SIGMA_OF_DIFFERENCES = 1.28 * math.sqrt(2.0)
"""The distance that one in five differences of two normal samples exceeds, in their deviations. Not
the median: if most losses repeat and some jump (two kinds of batches, sparse rewards), the median
has no meaning."""
_EXCEEDED_BY = 0.2
_LOOKS = 7
"""Checks of the level, evenly spaced, over ``flat_steps``."""
_RECURS, _HIGHER = 3, 1.3
_EVERY = 8
"""Steps between two checks of the level: a median of 64 hardly moves in so few."""
_NOISE_EVERY = 4
"""Checks between two estimates of the noise."""


_NOISE_STEPS = 256
"""Steps whose differences define the noise of the loss."""
_FAR = 0.25
"""Rise from which a lasting loss is reported only as a divergence, and not as a plateau too; unless
it rose at once."""
_RISES_WITHIN = 3000
"""Steps within which three reported rises that ended are normal for this run: no longer reported up
to 1.3 times the highest."""
_RECOVERING = 0.6
"""Share of its excess to which the loss has fallen within a quarter of the window when it recovers.
Real divergences were at 0.66 and above when they were reported, slow recoveries below 0.52."""
_NO_PROGRESS = 0.1
"""Share of the first level by which a loss must have fallen, so that a rise below that level is a
divergence."""
_MEMORIZED = 0.1
"""Share of the first losses below which most changes are only logged: a small loss that is learned
by heart falls in jumps and rises by multiples."""
_TENFOLD = 10.0
"""Multiple of the lowest level from which even a memorized loss has diverged."""
_FLAT = 0.01
"""Largest change of a flat level in ``flat_steps``; half of it downwards."""


class LevelConfig(Settings, frozen=True, kw_only=True):
    """When a rising loss level is reported as a divergence, and when as a plateau."""

    section = "level"
    ascending = (("rise", "divergence"),)

    window: Annotated[int, Meta(ge=8, le=_NOISE_STEPS)] = 64
    """Steps whose median is the level."""
    sigmas: AboveZero = 6.0
    """Sigma of the loss's noise by which the level must exceed its lowest; the median of 64 steps
    itself varies by a sixth of that. Clean real runs reach 3."""
    rise: AboveZero = 0.02
    """Share of the lowest level by which it must also exceed it; above that, the loss has not
    recovered."""
    divergence: Annotated[float, Meta(le=_FAR)] = 0.05
    """Rise, as a share of the lowest level, that is reported at once; reported again after twice
    that further rise."""
    flat_steps: Annotated[int, Meta(ge=_LOOKS)] = 150
    """Steps without progress after the level rose, after which a plateau is reported."""


LEVEL_DEFAULTS = LevelConfig()


class LevelDetector(Detector):
    """Reports a divergence once per rise, and a plateau above the lowest level once.

    During a change that was announced with ``expect``, that rise is not reported. A loss that has
    fallen by less than 10 % is reported only above its first level: the losses of a GAN or of PPO
    move up and down by less. A loss below a tenth of its first level is memorized: its rises are
    only logged until it is ten times its lowest level.
    """

    name = "loss_level"
    STATE = (
        "_losses", "_steps", "_noise", "_seen", "_first", "_best", "_onset", "_low", "_num_told",
        "_is_far", "_at_once", "_silent", "_top", "_recovered", "_since", "_looks",
    )  # fmt: skip
    MAY_LACK = True  # checkpoints of earlier versions lack "first"

    def __init__(self, config: LevelConfig | None = None) -> None:
        self._config = config or LEVEL_DEFAULTS
        self._losses: deque[float] = deque(maxlen=_NOISE_STEPS + 1)
        self._steps: deque[int] = deque(maxlen=self._config.window)
        self._noise = 0.0
        self._seen = 0
        self._forget_level()

    def _forget_level(self) -> None:
        """Reset the loss level, its lowest value and the current rise."""
        self._first: float | None = None
        self._best: float | None = None
        self._onset = -1
        """First step of the rise, or -1 while the level is normal."""
        self._low = 0.0
        self._num_told = 0
        self._is_far = self._at_once = self._silent = False
        self._top = 0.0
        self._recovered: deque[list[float]] = deque(maxlen=_RECURS + 1)
        """Reported rises that ended: time and height."""
        self._since = 0
        self._looks: list[float] = []

    def update(self, record: StepRecord, shifted: bool = False) -> tuple[Finding, ...]:
        """Judge the loss level after one step; return the findings about it.

        A step that was not applied is left out. ``shifted``: a new level was reported in this step.
        """
        self._at_once = self._at_once or shifted
        loss = record.loss
        if loss is None or record.skipped or not math.isfinite(loss):
            return ()
        losses, window = self._losses, self._config.window
        losses.append(loss)
        self._steps.append(record.step)
        self._seen += 1
        if self._seen % _EVERY or len(losses) < window:
            return ()
        if self._seen % (_EVERY * _NOISE_EVERY) == 0 or self._noise == 0.0:
            self._noise = _estimate_loss_noise(losses)
        # Sorted again instead of keeping an ordered window: one sort in eight steps costs less than
        # keeping order at every step.
        newest = sorted(list(losses)[-window:])
        return self._check_level(record, newest[window >> 1], self._noise)

    def _check_level(self, record: StepRecord, level: float, noise: float) -> tuple[Finding, ...]:
        """Judge the loss level: rise, divergence, plateau or recovery."""
        config = self._config
        best = level if self._best is None else self._best
        self._first = level if self._first is None else self._first
        if self._onset < 0:
            best = self._best = min(best, level)
        rise = max(config.rise * abs(best), config.sigmas * noise)
        if self._onset < 0:
            if level <= best + rise or noise == 0.0:
                return ()
            self._start_rise(level, best)
        self._top = max(self._top, level - best)
        if level < best + 0.5 * rise:
            self._record_recovery()
            return ()
        if diverged := self._divergence_findings(record, level, best, noise):
            return diverged
        self._low = min(self._low, level)
        return self._plateau_findings(record, level, best)

    def _record_recovery(self) -> None:
        """End a rise of the loss level that has recovered."""
        if self._num_told or self._silent:
            self._recovered.append([self._seen, self._top])
        self._onset, self._at_once, self._silent = -1, False, False

    def _is_recurring_rise(self, rise: float) -> bool:
        """Return whether such rises of the loss end without action: the run has had several."""
        tops = [top for seen, top in self._recovered if self._seen - seen <= _RISES_WITHIN]
        return len(tops) >= _RECURS and rise <= _HIGHER * max(tops)

    def _is_recovering(self, level: float, best: float) -> bool:
        """Return whether the latest quarter of the window has undone most of the loss's rise.

        It is compared with the previous quarter and with the level. After a spike the median stays
        high for longer than the loss: half of its window is in the spike. A loss that stops falling
        above the lowest level is reported once the median has followed it.
        """
        quarter = self._config.window // 4
        losses = list(self._losses)[-2 * quarter :]
        before, latest = (
            sorted(part)[quarter >> 1] - best for part in (losses[:quarter], losses[quarter:])
        )
        return latest < _RECOVERING * max(before, level - best)

    def _start_rise(self, level: float, best: float) -> None:
        """Record that the loss started to rise above its lowest level."""
        self._top = 0.0
        self._onset = self._change_point(level, best)
        self._low, self._num_told, self._is_far = best, 0, False
        self._since, self._looks = 0, [level]

    def _change_point(self, level: float, best: float) -> int:
        """Return the first step of the loss's rise: the lowest point of a CUSUM.

        Each loss is compared with the middle between the two levels, and counts at most as much as
        the rise: one spike before it does not move the result.
        """
        middle, most = (level + best) / 2.0, level - best
        total = lowest = 0.0
        first = 0
        for i, loss in enumerate(list(self._losses)[-len(self._steps) :], start=1):
            total += max(-most, min(most, loss - middle))
            if total <= lowest:
                lowest, first = total, i
        return self._steps[min(first, len(self._steps) - 1)]

    def _divergence_findings(
        self, record: StepRecord, level: float, best: float, noise: float
    ) -> tuple[Finding, ...]:
        config = self._config
        further = 2.0 if self._num_told else 1.0
        enough = max(config.divergence * abs(best), config.sigmas * noise) * further
        if level <= self._low + enough or self._is_recovering(level, best):
            return ()
        first = level if self._first is None else self._first
        if level <= first and first - best < _NO_PROGRESS * abs(first):
            return ()
        if self._is_recurring_rise(level - best):
            self._silent = True
            return ()
        self._num_told += 1
        self._is_far = self._is_far or level > best + _FAR * abs(best)
        self._low = level
        self._since, self._looks = 0, [level]
        reason = (
            f"the loss is diverging: its level {level:.4g} (over {config.window} steps) is "
            f"{_format_rise(level, best)} above its lowest, {best:.4g} "
            f"({(level - best) / noise:.0f} sigma)"
        )
        return self._report(
            record.step, reason, kind="divergence", cause="loss_divergence", value=level,
            limit=best, severity=_severity_of_rise(level, best, first), onset_step=self._onset,
        )  # fmt: skip

    def _plateau_findings(
        self, record: StepRecord, level: float, best: float
    ) -> tuple[Finding, ...]:
        """Report a loss level that stays above its lowest, unless it is a known divergence."""
        config = self._config
        if self._is_far and not self._at_once:
            return ()  # already reported as a divergence
        self._since += _EVERY
        if self._since < config.flat_steps // (_LOOKS - 1) - _EVERY // 2:
            return ()
        self._since = 0
        looks = self._looks = [*self._looks, level][-_LOOKS:]
        flat = _FLAT * abs(level)
        if len(looks) < _LOOKS or max(looks) - min(looks) > flat or looks[0] - level > flat / 2:
            return ()
        onset = self._onset
        self._best, self._onset = level, -1  # a new regime: later losses are compared with it
        self._at_once = False
        reason = (
            f"the loss rose and did not recover: for {config.flat_steps} steps its level has been "
            f"{level:.4g}, {_format_rise(level, best)} above its lowest, {best:.4g}"
        )
        return self._report(
            record.step, reason, kind="plateau", cause="not_recovered", value=level, limit=best,
            onset_step=onset,
        )  # fmt: skip

    def rebaseline(self, steps: int = 0) -> None:
        """Discard the loss level and its lowest: a planned or accepted change."""
        self._losses.clear()
        self._steps.clear()
        self._noise = 0.0
        self._forget_level()


def _estimate_loss_noise(losses: Iterable[float]) -> float:
    """Return the deviation of single losses, from differences between adjacent losses."""
    values = list(losses)
    differences = sorted(abs(newer - older) for older, newer in pairwise(values))
    finite = [difference for difference in differences if math.isfinite(difference)]
    if not finite:
        return 0.0
    return finite[-1 - int(len(finite) * _EXCEEDED_BY)] / _SIGMA_OF_DIFFERENCES


def _spread(ordered: Sequence[float]) -> float:
    """Return half the width of the middle 68% of sorted losses: their deviation, if normal."""
    num = len(ordered)
    return 0.5 * (ordered[int(0.84 * num)] - ordered[int(0.16 * num)])


def _trimmed_mean(ordered: Sequence[float]) -> float:
    """Return the mean of sorted losses without an eighth at each end: stable for two modes."""
    num = len(ordered) // 8
    return sum(ordered[num : len(ordered) - num]) / (len(ordered) - 2 * num)


def _length_of_fall(losses: Sequence[float]) -> int:
    """Return at how many steps in a row, up to the last one, the loss fell."""
    num = 0
    while num + 1 < len(losses) and losses[-num - 1] < losses[-num - 2]:
        num += 1
    return num


def _severity_of_rise(level: float, best: float, first: float) -> Literal["", "log"]:
    """Return "log" for a loss that stays memorized, and "" for the detector's own severity."""
    return "log" if level < min(_MEMORIZED * first, _TENFOLD * best) else ""


def _format_rise(level: float, best: float) -> str:
    """Return the rise of a loss level above the lowest as text."""
    if best <= 0.0:
        return f"{level - best:.4g}"
    return f"{100.0 * (level - best) / best:.3g} %"


# ----------------------------------------------------------------------------------- drift


_BLOCK = 32
_SPANS = (4, 8, 16)
"""Blocks of 32 steps whose mean is a level: 128 to 512 steps."""
_DIFFERENCES = 64
_MOST_WANDERED = 0.2
"""Largest rise that ended and counts as normal for the run."""
_FEW_MOVES = 4
_NOT_AGAIN = 8
"""Blocks after any other finding about the loss in which a rise is not reported again."""


_FALL = 0.15
"""A fall (in logarithm) from one block to the next after which the level is learned again: a new
epoch of memorized data rises slowly later, by 12% in a clean real run."""
_REMEMBERED = 2.0
"""A rise must be this multiple of the largest one that ended by itself."""


class DriftConfig(Settings, frozen=True, kw_only=True):
    """When a slow rise of the loss, beyond the run's own variation, is reported."""

    section = "drift"

    rise: AboveZero = 0.04
    """Smallest reported rise of the level above its lowest (natural logarithm: 0.04 is 4 %)."""
    sigmas: AboveZero = 6.0
    """Smallest reported rise in sigma, estimated from how much blocks of 32 steps differ."""
    warm_up: Annotated[int, Meta(ge=2 * _SPANS[0])] = 16
    """Blocks of 32 steps needed before anything is reported: 512 steps."""


DRIFT_DEFAULTS = DriftConfig()


class DriftDetector(Detector):
    """Tells, once per rise, of a level that is above its lowest by more than the run wanders.

    It works on log(loss) and abstains if any loss is zero or negative.
    """

    name = "loss_drift"
    STATE = (
        "_block", "_begin", "_blocks", "_begins", "_differences", "_moves", "_num", "_lowest",
        "_peaks", "_wandered", "_told", "_known", "_first",
    )  # fmt: skip
    MAY_LACK = True  # checkpoints of earlier versions lack "first"

    def __init__(self, config: DriftConfig | None = None) -> None:
        self._config = config or DRIFT_DEFAULTS
        self._block: list[float] = []
        self._begin = -1
        self._blocks: deque[float] = deque(maxlen=2 * _SPANS[-1])
        self._begins: deque[int] = deque(maxlen=2 * _SPANS[-1])
        self._first: float | None = None
        """Loss of the first block."""
        self._differences: deque[float] = deque(maxlen=_DIFFERENCES)
        self._moves: list[deque[float]] = [deque(maxlen=_DIFFERENCES + 2 * span) for span in _SPANS]
        self._reset_state()

    def _reset_state(self) -> None:
        """Reset the loss's lowest levels and the drift that was reported."""
        self._num = 0
        self._lowest: list[float | None] = [None] * len(_SPANS)
        self._peaks = [0.0] * len(_SPANS)
        self._wandered = [0.0] * len(_SPANS)
        self._told = 0.0
        self._known = 0
        """Blocks in which another finding about the loss already covers a rise."""

    def update(self, record: StepRecord, already: bool = False) -> tuple[Finding, ...]:
        """Judge after one step whether the loss level drifts up; return the findings.

        ``already``: another finding about the loss was reported in this step.
        """
        if already:
            self._known = _NOT_AGAIN
        loss = record.loss
        if loss is None or record.skipped or not math.isfinite(loss):
            return ()
        block = self._block
        if not block:
            self._begin = record.step
        block.append(loss)
        if len(block) < _BLOCK:
            return ()
        middle = sorted(block)[_BLOCK >> 1]
        block.clear()
        self._known = max(0, self._known - 1)
        if middle <= 0.0:
            self.rebaseline()
            return ()
        self._first = middle if self._first is None else self._first
        return self._add_block(record, math.log(middle))

    def _add_block(self, record: StepRecord, block: float) -> tuple[Finding, ...]:
        """Add a block's log loss; return the finding about an upward drift."""
        if self._blocks:
            change = block - self._blocks[-1]
            if change < -max(_FALL, 8.0 * self._block_noise()):
                self._reset_blocks()
            else:
                self._differences.append(abs(change))
        self._blocks.append(block)
        self._begins.append(self._begin)
        self._num += 1
        if self._num < self._config.warm_up // 2:
            return ()
        noise = self._block_noise()
        findings: tuple[Finding, ...] = ()
        blocks = list(self._blocks)
        back = True
        for i, span in enumerate(_SPANS):
            if len(blocks) < 2 * span:
                continue
            lowest = self._lowest[i]
            earlier = math.fsum(blocks[-2 * span : -span]) / span
            lowest = self._lowest[i] = earlier if lowest is None else min(lowest, earlier)
            level = math.fsum(blocks[-span:]) / span
            rise = level - lowest
            deviation = max(noise / math.sqrt(span), self._upward_movement(i, span))
            self._moves[i].append(max(level - earlier, 0.0))
            least = max(self._config.rise, self._config.sigmas * deviation)
            back = back and rise < 0.5 * least
            self._peaks[i] = max(self._peaks[i], rise)
            enough = max(least, _REMEMBERED * self._wandered[i])
            if findings or self._num < self._config.warm_up or rise <= enough:
                continue
            if rise > 2.0 * self._told:
                self._told = rise
                if not self._known:
                    findings = self._drift_findings(record, level, lowest, span, noise)
        if back:
            # A rise that ended by itself is normal for this run.
            self._wandered = [
                max(0.99 * before, min(peak, _MOST_WANDERED))
                for before, peak in zip(self._wandered, self._peaks, strict=True)
            ]
            self._peaks = [0.0] * len(_SPANS)
            self._told = 0.0
        return findings

    def _block_noise(self) -> float:
        """Return the noise of a block's loss, from adjacent blocks; a few jumps do not count."""
        ordered = sorted(self._differences)
        if not ordered:
            return 0.0
        most = 4.0 * ordered[len(ordered) >> 1]
        squares = math.fsum(min(difference, most) ** 2 for difference in ordered)
        return math.sqrt(squares / len(ordered) / 2.0)

    def _upward_movement(self, i: int, span: int) -> float:
        """Return how much the loss level usually rises from one span to the next.

        Blocks that may belong to the judged rise are left out.
        """
        moves = list(self._moves[i])[: -2 * span]
        ups = [move * move for move in moves if move > 0.0]
        if len(ups) < _FEW_MOVES:
            return 0.0
        return math.sqrt(math.fsum(ups) / len(ups) / 2.0)

    def _drift_findings(
        self, record: StepRecord, level: float, lowest: float, span: int, noise: float
    ) -> tuple[Finding, ...]:
        rise = math.exp(level - lowest) - 1.0
        deviations = (level - lowest) * math.sqrt(span) / max(noise, 1e-9)
        value, limit = math.exp(level), math.exp(lowest)
        reason = (
            f"the loss is drifting up: its level {value:.4g} (over {span * _BLOCK} steps) is "
            f"{100.0 * rise:.3g} % above its lowest, {limit:.4g} ({deviations:.0f} sigma)"
        )
        return self._report(
            record.step, reason, kind="divergence", cause="loss_drift", value=value, limit=limit,
            severity=_severity_of_rise(value, limit, self._first or value),
            onset_step=self._begins[-span],
        )  # fmt: skip

    def _reset_blocks(self) -> None:
        """Discard the loss levels of all blocks, and what the detector derived from them."""
        self._blocks.clear()
        self._begins.clear()
        self._reset_state()

    def rebaseline(self, steps: int = 0) -> None:
        """Discard all loss levels and their noise: a planned change."""
        self._block.clear()
        self._first = None
        self._reset_blocks()
        self._differences.clear()
        for moves in self._moves:
            moves.clear()


# --------------------------------------------------------------------------------------- progress


_PROGRESS_EVERY = 16
"""Steps between two checks."""
_FIRST = 20
"""First losses whose median is the start of the run."""
_START = 64
"""First losses that a loss which never learns is compared with."""
_BEGINNINGS = (9, 20, 64)
"""Numbers of first losses whose medians define the start."""
_LEVEL = 64
_GIVEN_BACK = 100
"""Steps for which the progress must be lost."""
_KEPT = _LEVEL + _GIVEN_BACK
_LEAST_GAIN = 0.25
"""Share of the first losses that must have been gained before it can be lost."""
_REGAINED = 0.1
"""Share of the gain that may be missing when lost progress counts as regained."""
_MOST_LOST = 2
"""Maximum number of reports until progress is measured again."""
_SETBACK_STEPS = 48
"""Steps whose mean is compared with the two means before it. A slower rise can be healthy: the
loss of a VAE rises by as much within 190 steps while the weight of its KL term grows."""
_SET_BACK = 0.25
"""Share of the gain whose loss is a setback. Healthy trainings reach 0.21."""
_SETBACK_SIGMAS = 4.0
"""Errors of the two means by which the loss must have risen, too."""
_MOSTLY_LEARNED = 0.7
"""Share of the first losses that must have been gained. The loss of PPO, which moves up and down,
gains up to 0.65."""
_EVENLY = 0.5
"""Part of the rise that each third of the 48 steps must show."""
_STILL_HIGH = 0.7
"""Part of the highest third that the latest one must reach: new data are learned, and fall."""
_BOTTOM = 16
"""Steps in a row that are far below, for a collapse."""
_STEADY = 1.3
_REPEATED = 32
"""Steps in a row with a falling loss from which the loader is taken to repeat one batch."""
_BY_CHANCE = 10
"""Falls in a row that independent losses never reach: n of them have the chance 1 in (n + 1)!"""
_BEFORE = 96
"""Losses before such a row that must be known."""
_TOO_WIDE = 1.0
"""Spread of the losses, as a share of the first ones, above which a median cannot show that nothing
was learned: tasks of different scales that take turns."""
_WIDE = 1.25
"""The error of a median of n normal samples is this deviation divided by the root of n."""


class ProgressConfig(Settings, frozen=True, kw_only=True):
    """When lost progress, a loss that never falls, or a sudden collapse is reported."""

    section = "progress"

    given_back: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """Share of the improvement since the first losses that must be lost for 100 steps."""
    learn_steps: Annotated[int, Meta(ge=2 * _KEPT)] = 500
    """Steps after the learning-rate warm-up by which the loss must have fallen; otherwise it is
    reported as not learning."""
    learned: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.02
    """Share of the first losses by which it must have fallen by then, beyond its noise."""
    collapse: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.3
    """A collapse: the loss falls below this share of its trend within 16 steps and stays there for
    16."""
    stuck: Annotated[float, Meta(ge=1.0)] = 1.15
    """Multiple of the lowest level before a restart above which a loss that does not fall counts as
    stuck."""


PROGRESS_DEFAULTS = ProgressConfig()


class ProgressDetector(Detector):
    """Reports lost progress, a setback, a loss that never learns or is stuck, and a collapse.

    A loss that never falls, that returns to its initial value, that suddenly drops to almost zero,
    or that falls at every step because one batch is repeated is a fault too, and no upper limit
    catches it. Neither does a setback: within 100 steps the loss gives back a quarter of its
    improvement, which ``loss_level`` does not see in the noise, and ``loss_drift`` not so early.

    It checks every 16th step. It abstains on losses at or below zero, except for a collapse to
    exactly zero.
    """

    name = "loss_progress"
    STATE = (
        "_losses", "_before", "_suspended", "_seen", "_start", "_first", "_best", "_lowest",
        "_learning", "_rate", "_lost", "_num_lost", "_collapsed", "_repeats", "_known",
        "_is_set_back",
        "_set_back",
    )  # fmt: skip
    MAY_LACK = True  # checkpoints of earlier versions lack "repeats", and those of setbacks

    def __init__(self, config: ProgressConfig | None = None) -> None:
        self._config = config or PROGRESS_DEFAULTS
        self._losses: deque[float] = deque(maxlen=_KEPT)
        self._before: float | None = None
        """Lowest level before the last restart or announced change."""
        self._suspended = 0  # always; states have it
        self._reset_state()

    def _reset_state(self) -> None:
        """Discard the loss levels from which the detector measures progress."""
        self._seen = 0
        self._start: list[float] = []
        self._first: float | None = None
        self._best: float | None = None
        """Lowest level that is older than 100 steps."""
        self._lowest: float | None = None
        self._learning = 0
        """Steps since the learning rate's warm-up ended; -1: it has learned, or was reported."""
        self._rate = 0.0
        self._lost, self._num_lost = False, 0
        self._collapsed: float | None = None
        """Loss before the collapse; the collapse ends at half of it."""
        self._repeats = False
        """Whether a repeated batch was reported, and the loss still falls at every step."""
        self._known = 0
        """Steps for which another finding about the loss covers a setback."""
        self._is_set_back = False
        self._set_back = 0.0
        """Highest level of a setback so far: a loss that goes up and down is reported once."""

    def update(self, record: StepRecord, already: bool = False) -> tuple[Finding, ...]:
        """Judge the progress of the loss after one step; return the findings about it.

        ``already``: another finding about the level of the loss was reported in this step.
        """
        self._known = _NOT_AGAIN * _BLOCK if already else max(0, self._known - 1)
        loss = record.loss
        if loss is None or record.skipped or not math.isfinite(loss):
            return ()
        self._losses.append(loss)
        self._seen += 1
        if self._learning >= 0:
            # At every step: a warm-up's rate may rise between two checks.
            self._track_warm_up(record, loss)
        if self._seen % _PROGRESS_EVERY:
            return ()
        if self._first is None:
            if self._seen < _FIRST:
                return ()
            self._first = sorted(list(self._losses)[:_FIRST])[_FIRST >> 1]
        losses = list(self._losses)
        findings = self._collapse_findings(record, losses) + self._repeat_findings(record, losses)
        if self._first > 0.0 and len(losses) >= 3 * _SETBACK_STEPS:
            findings += self._setback_findings(record, losses, self._first)
        if self._first > 0.0 and len(losses) == _KEPT:
            findings += self._lost_progress_findings(record, losses, self._first)
        if self._learning >= self._config.learn_steps and self._seen % 64 == 0:
            findings += self._not_learning_findings(record, losses)
        return findings

    def _track_warm_up(self, record: StepRecord, loss: float) -> None:
        """Count the steps since the learning rate's warm-up ended."""
        rate = record.learning_rate
        if len(self._start) < _START:
            self._start.append(loss)
        if rate is not None and (rate > self._rate or rate <= 0.0):
            self._rate = max(rate, self._rate)
            self._learning = 0  # a warm-up: its effect on the loss comes later
        else:
            self._learning += 1

    # ---------------------------------------------------------------------- lost progress

    def _lost_progress_findings(
        self, record: StepRecord, losses: list[float], first: float
    ) -> tuple[Finding, ...]:
        """Report a loss that has given back most of what the run had learned."""
        older = sorted(losses[:_LEVEL])[_LEVEL >> 1]
        self._best = older if self._best is None else min(self._best, older)
        best, gain = self._best, first - self._best
        quarter = _GIVEN_BACK // 4
        parts = [
            sorted(losses[_LEVEL + i * quarter : _LEVEL + (i + 1) * quarter])[quarter >> 1]
            for i in range(4)
        ]
        floor = first - (1.0 - self._config.given_back) * gain
        if self._lost and sorted(losses[-_LEVEL:])[_LEVEL >> 1] <= best + _REGAINED * gain:
            self._lost = False
        lost = best > 0.0 and gain > _LEAST_GAIN * first and min(parts) > floor
        if not lost or self._lost or self._num_lost >= _MOST_LOST:
            return ()
        self._lost = True
        self._num_lost += 1
        back = 100.0 * (min(parts) - best) / gain
        reason = (
            f"training progress was lost: the loss had fallen from {first:.4g} to {best:.4g}, and "
            f"has been at {min(parts):.4g} or above for {_GIVEN_BACK} steps: {back:.0f} % of the "
            "improvement is gone"
        )
        return self._report(
            record.step, reason, kind="lost_progress", cause="loss_lost_progress",
            value=parts[-1], limit=floor, onset_step=max(record.step - _GIVEN_BACK, 0),
        )  # fmt: skip

    # --------------------------------------------------------------------------- setback

    def _setback_findings(
        self, record: StepRecord, losses: list[float], first: float
    ) -> tuple[Finding, ...]:
        """Report a loss that gave back a quarter of its progress, too little to show in 8 steps."""
        num, losses = _SETBACK_STEPS, losses[-3 * _SETBACK_STEPS :]
        *earlier, newest = (sorted(losses[i : i + num]) for i in (0, num, 2 * num))
        lowest = min(earlier, key=_trimmed_mean)
        low, level = _trimmed_mean(lowest), _trimmed_mean(newest)
        gain, rise = first - low, level - low
        least = _SET_BACK * gain
        if rise < least or gain < _MOSTLY_LEARNED * first:
            self._is_set_back = self._is_set_back and rise >= _REGAINED * gain
            return ()
        if self._is_set_back:
            self._set_back = max(self._set_back, level)
            return ()
        error = _WIDE * math.hypot(_spread(newest), _spread(lowest)) / math.sqrt(num)
        thirds = (sorted(losses[i : i + num // 3]) for i in range(0, 3 * num, num // 3))
        parts = [_trimmed_mean(third) - low for third in thirds]
        is_lasting = min(parts[-3:]) > _EVENLY * rise and parts[-1] > _STILL_HIGH * max(parts)
        is_clear = rise > _SETBACK_SIGMAS * error and min(losses) > 0.0
        if level <= self._set_back + least or not is_lasting or not is_clear:
            return ()
        self._is_set_back, self._set_back = True, level
        if self._known:
            return ()
        reason = (
            f"the loss gives back its progress: after a fall from {first:.4g} to {low:.4g} its "
            f"level over {num} steps is {level:.4g}: {100.0 * rise / gain:.0f} % of the "
            "improvement is gone"
        )
        return self._report(
            record.step, reason, kind="divergence", cause="loss_setback", value=level,
            limit=low + least, severity=_severity_of_rise(level, low, first),
            onset_step=max(record.step - _SETBACK_STEPS, 0),
        )  # fmt: skip

    # --------------------------------------------------------------------------- collapse

    def _collapse_findings(self, record: StepRecord, losses: list[float]) -> tuple[Finding, ...]:
        """Report a loss that suddenly dropped to almost zero."""
        newest = losses[-_BOTTOM:]
        if self._collapsed is not None:
            if sorted(newest)[_BOTTOM >> 1] > 0.5 * self._collapsed:
                self._collapsed = None
            return ()
        course = losses[-5 * _BOTTOM : -2 * _BOTTOM]
        if len(course) < 3 * _BOTTOM or min(course) < 0.0:
            return ()
        half = len(course) >> 1
        older, newer = sorted(course[:half])[half >> 1], sorted(course[half:])[half >> 1]
        lowest = self._lowest
        self._lowest = newer if lowest is None else min(lowest, newer)
        top = sorted(newest)[-2]
        if newer <= 0.0 or top > self._config.collapse * newer or older > _STEADY * newer:
            return ()
        if top > 0.5 * self._lowest or min(newest) < 0.0:
            return ()
        self._collapsed = newer
        value = sorted(newest)[_BOTTOM >> 1]
        reason = (
            f"the loss collapsed: from {newer:.4g} to {value:.4g} within {2 * _BOTTOM} steps; "
            "check for label leakage or a masked loss"
        )
        return self._report(
            record.step, reason, kind="collapse", cause="loss_collapse", value=value,
            limit=self._config.collapse * newer, severity=self._severity_below(newer),
            onset_step=max(record.step - 2 * _BOTTOM + 1, 0),
        )  # fmt: skip

    def _severity_below(self, loss: float) -> Literal["", "log"]:
        """Return "log" if a fall began at this loss on memorized data, and "" otherwise."""
        is_memorized = self._first is not None and loss < _MEMORIZED * self._first
        return "log" if is_memorized else ""

    # ----------------------------------------------------------------------------- repetition

    def _repeat_findings(self, record: StepRecord, losses: list[float]) -> tuple[Finding, ...]:
        """Report a loss that falls at every step: the loader delivers one batch again and again.

        It began within the range of the losses before: a loss that falls back from a jump, or from
        its start, may fall as evenly.
        """
        # Dropout or a router may raise a loss: the row may have ended since the last check.
        end = max(len(losses) - _PROGRESS_EVERY + 1, 1)
        while end < len(losses) and losses[end] < losses[end - 1]:
            end += 1
        row = _length_of_fall(losses[:end])
        if row < _REPEATED:
            self._repeats = False
            return ()
        before = losses[: end - row - 1]
        if self._repeats or len(before) < _BEFORE:
            return ()
        longest = max(_length_of_fall(before[:num]) for num in range(1, len(before) + 1))
        if longest >= _BY_CHANCE or losses[end - row] > max(before[-_LEVEL:]):
            return ()
        self._repeats = True
        first = losses[end - row - 1]
        reason = (
            f"the loss fell at each of {row} steps in a row, and before that at no more than "
            f"{longest}: check whether the loader repeats one batch"
        )
        return self._report(
            record.step, reason, kind="collapse", cause="repeated_batch", value=losses[-1],
            limit=first, severity=self._severity_below(first),
            onset_step=max(record.step - row - (len(losses) - end), 0),
        )  # fmt: skip

    # ---------------------------------------------------------------------- never learned

    def _not_learning_findings(
        self, record: StepRecord, losses: list[float]
    ) -> tuple[Finding, ...]:
        """Report a loss that does not fall from its start, or is stuck since a restart."""
        start, ordered = self._start, sorted(losses)
        if len(start) < _START or len(losses) < _KEPT or min(start) <= 0.0 or ordered[0] <= 0.0:
            return ()
        # A run may learn everything in the first few steps: its start is the highest median.
        began = max(sorted(start[:num])[num >> 1] for num in _BEGINNINGS)
        level = ordered[_KEPT >> 1]
        spread = _spread(ordered) / began
        error = _WIDE * spread / math.sqrt(_BEGINNINGS[0])
        if spread > _TOO_WIDE:
            return ()
        least = self._config.learned
        if level < began * (1.0 - least - 3.0 * error):
            self._learning = -1
            return ()
        if level < began * (1.0 - least - error):
            return ()
        before = self._before
        if before is not None and level < self._config.stuck * before:
            return ()  # as good as before the restart
        self._learning = -1
        num = self._seen
        if before is None:
            cause = "never_learned"
            reason = (
                f"the loss does not fall: its level is {level:.4g} after {num} steps and began at "
                f"{began:.4g}"
            )
        else:
            cause = "stuck_after_restart"
            reason = (
                f"the loss has been stuck since a restart or an announced change {num} steps ago: "
                f"its level is {level:.4g}; it began at {began:.4g} and was {before:.4g} before"
            )
        return self._report(
            record.step, reason, kind="plateau", cause=cause, value=level,
            limit=began if before is None else before, onset_step=max(record.step - num + 1, 0),
        )  # fmt: skip

    def rebaseline(self, steps: int = 0) -> None:
        """Measure the loss's progress again: a planned change or a restart."""
        lowest = min(
            (level for level in (self._best, self._lowest, self._before) if level is not None),
            default=None,
        )
        self._before = lowest
        self._losses.clear()
        self._reset_state()

    def accept_level(self) -> None:
        """Measure progress from the loss level that was accepted: the run is not stuck there."""
        self.rebaseline()
        self._learning = -1
