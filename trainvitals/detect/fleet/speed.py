"""Durations of steps: the usual one, a throughput that falls, overdue steps and checkpoints."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from msgspec import Meta

from trainvitals.config import AtLeastOne, Count, Settings
from trainvitals.detect.fleet.base import (
    LastingWatcher,
    MergedStep,
    clamped_exp,
    number,
    step_seconds,
    upper_median,
)
from trainvitals.detect.outliers import SIGMA_PER_MAD, RobustWindow
from trainvitals.detect.reporter import make_finding
from trainvitals.records import Finding
from trainvitals.stateful import Stateful, state_row
from trainvitals.units import humanize, humanize_seconds

Kind = Literal["ordinary", "periodic", "slow"]

_KEPT_SLOW = 64
_IN_ROW = 4
"""Slow steps at equal distances that form a period: three distances are not a coincidence."""


class PaceConfig(Settings, frozen=True, kw_only=True):
    """What makes a step slow."""

    section = "pace"

    window: Annotated[int, Meta(ge=4, le=4096)] = 32
    """Ordinary steps whose median is the usual duration."""
    slow_ratio: Annotated[float, Meta(ge=1.05, le=100.0)] = 1.5
    """Multiple of the usual duration from which a step is slow."""
    accept_after: Annotated[int, Meta(ge=2)] = 16
    """Slow steps in a row after which theirs becomes the usual duration."""


class SlowStepFilter(Stateful):
    """Sorts steps by their duration. Slow ones never enter what is usual.

    In a healthy run nearly all slow steps are evaluations and checkpoints, at equal distances: a
    slow step counts as periodic if the three before it have that distance, within one step.
    """

    STATE = ("_usual", "_slow", "_streak", "_longest", "period")

    def __init__(self, config: PaceConfig | None = None) -> None:
        self._config = config or PaceConfig()
        self._usual = RobustWindow(self._config.window)
        self._slow: list[int] = []
        self._streak: list[float] = []
        self._longest = (0.0, 0.0)
        self.period = 0
        """Distance of the latest periodic slow steps; 0 until one is known."""

    @property
    def typical_seconds(self) -> float | None:
        """Return the usual duration of a run's steps; None until some are known."""
        return self._usual.median() if len(self._usual) >= 4 else None

    @property
    def longest_seconds(self) -> float:
        """Return the second longest step: a single long one, such as a stall, is not typical."""
        return self._longest[1]

    @property
    def longest_once_seconds(self) -> float:
        """Return the longest step: the run survived it, so it is not necessarily a stall."""
        return self._longest[0]

    def push(self, step: int, seconds: float) -> Kind:
        """Add the duration of a merged step, finite and above zero, and return its kind."""
        if seconds > self._longest[1]:
            self._longest = (max(seconds, self._longest[0]), min(seconds, self._longest[0]))
        usual = self.typical_seconds
        if usual is None or seconds <= self._config.slow_ratio * usual:
            self._usual.push(seconds)
            self._streak.clear()
            return "ordinary"
        self._streak.append(seconds)
        if len(self._streak) >= self._config.accept_after:
            self._usual.restore(self._streak)
            self._streak.clear()
        return "periodic" if self._is_periodic(step) else "slow"

    def _is_periodic(self, step: int) -> bool:
        """Return whether slow steps of the run come at a regular distance; record this one."""
        slow = set(self._slow)
        cycle = 0
        for earlier in reversed(self._slow):
            period = step - earlier
            if period >= 2 and all(
                any(step - n * period + off in slow for off in ((0, -1, 1) if period > 8 else (0,)))
                for n in range(2, _IN_ROW)
            ):
                cycle = period
                break
        self._slow = [*self._slow, step][-_KEPT_SLOW:]
        self.period = cycle or self.period
        return cycle > 0

    def roll_back(self, step: int) -> None:
        """Discard the slow steps that the next attempt trains again."""
        self._slow = [slow for slow in self._slow if slow < step]
        self._streak.clear()


# ------------------------------------------------------------------------------------- throughput


_LEAST_BLOCKS = 5


class ThroughputConfig(Settings, frozen=True, kw_only=True):
    """When a run counts as slower than it was."""

    section = "throughput"
    ascending = (("persistence", "accept_after"),)

    fall: Annotated[float, Meta(ge=0.01, le=0.99)] = 0.1
    """Reported loss of throughput, as a share of the run's best."""
    block: Annotated[int, Meta(ge=3, le=10_000)] = 20
    """Ordinary steps whose median is one measurement."""
    blocks: Annotated[int, Meta(ge=_LEAST_BLOCKS, le=1000)] = 15
    """Measurements whose median is the current throughput; its best value is the reference."""
    persistence: AtLeastOne = 2
    """Measurements in a row below the limit before a report: at least 30 of 40 steps are slow."""
    sigmas: Annotated[float, Meta(ge=0.0, le=100.0)] = 5.0
    """The fall must also exceed this many robust standard deviations of the measurements, so that
    noise is not reported."""
    warmup_rows: Count = 20
    """First steps of an attempt, left out: compilation, autotuning, cold caches."""
    accept_after: int = 50
    """Measurements in a row below the limit (1000 steps) after which they become the reference."""
    clear_after: AtLeastOne = 5
    """Measurements above the limit after which a fall can be reported again."""
    worse: Annotated[float, Meta(ge=1.05, le=100.0)] = 1.5
    """Multiple of the reported duration from which the same fall is reported again."""
    pace: PaceConfig = PaceConfig()
    """What makes a single step slow; slow steps at intervals are left out."""


class ThroughputWatcher(LastingWatcher):
    """Finds a sustained fall of ``tokens_per_second``, or of steps per second without tokens.

    Works on the logarithm of the seconds per token (or per step). A measurement below the limit
    never enters the reference.
    """

    name = "throughput"
    STATE = (
        "pace",
        state_row("measures", "_world_size", "_per_token", "_settling"),
        "_block",
        "_blocks",
        "_best",
        "_noise",
        "_low_blocks",
        "_episode",
        "_costs",
        "_steps",
        state_row("reported", "_reported", "_worse_blocks"),
    )
    MAY_LACK = True
    """States of an earlier version contain no single steps."""

    def __init__(self, config: ThroughputConfig | None = None) -> None:
        self._config = config or ThroughputConfig()
        super().__init__(self._config.clear_after)
        self.pace = SlowStepFilter(self._config.pace)
        self._world_size = 0
        self._per_token = False
        self._settling = self._config.warmup_rows
        self._block: list[float] = []
        self._blocks: list[float] = []
        self._best: float | None = None
        self._noise = 0.0
        self._low_blocks = 0
        self._costs: list[float] = []
        """Costs of the steps of the blocks that a report needs, and of the one before them."""
        self._steps: list[int] = []
        """Their steps."""
        self._reported = 0.0
        """Cost of the latest report."""
        self._worse_blocks = 0

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the unfinished block of merged steps: another attempt starts."""
        self.pace.roll_back(merged.step)
        self._settling = self._config.warmup_rows
        self._block.clear()
        self._costs.clear()
        self._steps.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the speed of a merged step: report a sustained fall of throughput."""
        seconds = step_seconds(merged)
        kind = self.pace.push(merged.step, seconds) if seconds > 0.0 else "ordinary"
        num_ranks = len(merged.ranks.get("step_duration_seconds", ()))
        rate = number(merged.run.get("tokens_per_second")) or 0.0
        if rate <= 0.0 and (seconds <= 0.0 or self._per_token):
            return ()
        if (rate > 0.0) != self._per_token or num_ranks not in (0, self._world_size):
            self._reset_reference(per_token=rate > 0.0, world_size=num_ranks or self._world_size)
        if self._settling:
            self._settling -= 1
            return ()
        if kind == "periodic":
            return ()
        cost = -math.log(rate) if rate > 0.0 else math.log(seconds)
        self._block.append(cost)
        num_steps = (self._config.persistence + 1) * self._config.block
        self._costs = [*self._costs, cost][-num_steps:]
        self._steps = [*self._steps, merged.step][-num_steps:]
        if len(self._block) < self._config.block:
            return ()
        cost = upper_median(self._block)
        self._block.clear()
        return self._check_block_cost(merged.step, cost)

    def _reset_reference(self, *, per_token: bool, world_size: int) -> None:
        """Discard the reference speed: its unit, or the number of ranks, has changed."""
        self._per_token, self._world_size = per_token, world_size
        self._block.clear()
        self._blocks.clear()
        self._costs.clear()
        self._steps.clear()
        self._best, self._low_blocks = None, 0

    def _check_block_cost(self, step: int, cost: float) -> tuple[Finding, ...]:
        """Compare a block's throughput with the run's best; return findings."""
        config, best = self._config, self._best
        allowed = max(-math.log1p(-config.fall), config.sigmas * self._noise)
        is_low = best is not None and cost > best + allowed
        self._low_blocks = self._low_blocks + 1 if is_low else 0
        if not is_low:
            self._update_best(cost)
        if best is None:
            return ()
        is_present = self._low_blocks >= config.persistence
        begins = self._episode.begins(is_present) if is_present or not is_low else False
        is_worse = self._episode.on and cost > self._reported + math.log(config.worse)
        self._worse_blocks = self._worse_blocks + 1 if is_worse else 0
        num, level = self._low_blocks, best
        if not begins and self._worse_blocks >= config.persistence:
            begins, num, level = True, self._worse_blocks, self._reported
        if self._low_blocks >= config.accept_after:
            self._blocks, self._best, self._low_blocks = [cost], None, 0
        if not begins:
            return ()
        self._reported, self._worse_blocks = cost, 0
        onset = self._find_onset(level, cost)
        return self._report_slowdown(step, cost, best, allowed, num=num, onset=onset)

    def _find_onset(self, level: float, cost: float) -> int:
        """Return the step from which steps cost as much as now (CUSUM over the latest blocks).

        Until then the sum of costs above the middle falls, so it is lowest right before that step.
        A stall right before it, whose steps cost far more, is a problem apart: it counts as 0.
        """
        middle, highest = (level + cost) / 2, cost + max(cost - level, math.log(2.0))
        excess = [min(c, cost) - middle if c < highest else 0.0 for c in self._costs]
        sums = [*accumulate(excess, initial=0.0)]
        last_lowest = len(sums) - 1 - sums[::-1].index(min(sums))
        return self._steps[min(last_lowest, len(self._steps) - 1)]

    def _update_best(self, cost: float) -> None:
        """Update the run's best throughput, and its noise, by a block's cost."""
        self._blocks = [*self._blocks, cost][-self._config.blocks :]
        if len(self._blocks) < _LEAST_BLOCKS:
            return
        course = upper_median(self._blocks)
        if self._best is None or course < self._best:
            self._best = course
            self._noise = SIGMA_PER_MAD * upper_median([abs(b - course) for b in self._blocks])

    def _report_slowdown(
        self, step: int, cost: float, best: float, allowed: float, *, num: int, onset: int
    ) -> tuple[Finding, ...]:
        part = clamped_exp(best - cost)
        for_steps = (
            f"over {num * self._config.block} steps (not counting evaluations and checkpoints)"
        )
        now, was, limit = clamped_exp(-cost), clamped_exp(-best), clamped_exp(-best - allowed)
        if self._per_token:
            reason = (
                f"throughput fell to {humanize(now, 'tokens')} tokens/s, {part:.0%} of the "
                f"run's best ({humanize(was, 'tokens')} tokens/s), {for_steps}"
            )
        else:
            reason = (
                f"steps take {humanize_seconds(clamped_exp(cost))}, "
                f"{clamped_exp(cost - best):.3g}x the run's "
                f"best ({humanize_seconds(clamped_exp(best))}), {for_steps}"
            )
        return self._report(step, reason, value=now, limit=limit, onset_step=onset)


# ------------------------------------------------------------------------------ what is overdue


class StallConfig(Settings, frozen=True, kw_only=True):
    """How long a step may take."""

    section = "stall"

    least_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = 300.0
    """Silence up to this is never a stall."""
    first_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = 1_800.0
    """Nor is silence up to this in a run that came past none above ``least_seconds`` yet: it may be
    the first evaluation, and looks the same from outside. As long as PyTorch itself waits for a
    collective that hangs: 10 (NCCL) or 30 minutes (gloo)."""
    typical_ratio: Annotated[float, Meta(ge=1.0, le=1e6)] = 20.0
    """Multiple of the usual step. Our own choice."""
    longest_ratio: Annotated[float, Meta(ge=1.0, le=1e6)] = 3.0
    """Multiple of the second longest step, including evaluations and checkpoints.
    nvidia-resiliency-ext takes 5 times the longest and restarts the job; this one only reports."""
    longest_once_ratio: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.2
    """Multiple of the longest step, for the second evaluation: up to an hour, for it may have been
    a hang that ended."""


class CheckpointConfig(Settings, frozen=True, kw_only=True):
    """How old the newest checkpoint may be."""

    section = "checkpoint"

    ratio: Annotated[float, Meta(ge=1.0)] = 2.0
    """Multiple of the usual interval; one failed or late save is not reported."""


_STALL = StallConfig()
_MOST_FOR_ONCE_SECONDS = 3_600.0
_CHECKPOINT = CheckpointConfig()


def stalled(
    now_ns: int,
    *,
    last_step: int,
    last_time_ns: int,
    typical_seconds: float | None,
    longest_seconds: float = 0.0,
    longest_once_seconds: float = 0.0,
    config: StallConfig = _STALL,
) -> Finding | None:
    """Return a finding if the run stalls: the step after ``last_step`` takes too long.

    Both times must come from the same clock. A clock that jumped back is not a stall.
    """
    silent = (now_ns - last_time_ns) / 1e9
    is_first = longest_once_seconds <= config.least_seconds
    limit = max(
        config.least_seconds,
        config.first_seconds if is_first else 0.0,
        config.typical_ratio * (typical_seconds or 0.0),
        config.longest_ratio * longest_seconds,
        min(config.longest_once_ratio * longest_once_seconds, _MOST_FOR_ONCE_SECONDS),
    )
    if silent <= limit:
        return None
    usual = "" if typical_seconds is None else humanize_seconds(typical_seconds)
    return make_finding(
        "stalled",
        last_step,
        f"no step has finished for {humanize_seconds(silent)} since step {last_step}"
        + (f"; a step usually takes {usual}" if usual else "")
        + f" (limit {humanize_seconds(limit)})",
        value=silent,
        limit=limit,
    )


def usual_interval(checkpoint_steps: Sequence[int]) -> int | None:
    """Return the usual distance of checkpoints in steps, to find overdue ones; None if unknown."""
    steps = sorted(set(checkpoint_steps))
    gaps = [after - before for before, after in pairwise(steps)]
    return int(upper_median(gaps)) if gaps else None


def checkpoint_overdue(
    step: int,
    *,
    newest_checkpoint_step: int,
    interval: int | None,
    config: CheckpointConfig = _CHECKPOINT,
) -> Finding | None:
    """Return a fleet detector's finding if a checkpoint is overdue; None if it has no interval."""
    if interval is None or interval < 1:
        return None
    age, limit = step - newest_checkpoint_step, config.ratio * interval
    if age <= limit:
        return None
    return make_finding(
        "checkpoint_overdue",
        step,
        f"the newest checkpoint is {age} steps old (step {newest_checkpoint_step}); the usual "
        f"interval is {interval} steps",
        value=float(age),
        limit=limit,
        onset_step=newest_checkpoint_step + interval,
    )
