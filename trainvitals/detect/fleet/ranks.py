"""Waits for data, one rank's loss compared with the others', and wrong gradient sums."""

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, Count, NotNegative, Settings
from trainvitals.detect.fleet.base import (
    INFINITY,
    ConditionEpisode,
    LastingWatcher,
    MergedStep,
    Watcher,
    finite,
    step_seconds,
    upper_median,
)
from trainvitals.detect.outliers import SIGMA_PER_MAD
from trainvitals.records import Finding
from trainvitals.stateful import state_table
from trainvitals.units import humanize_seconds


class DataBoundConfig(Settings, frozen=True, kw_only=True):
    """When a run counts as waiting for its data."""

    section = "data_bound"

    share: Annotated[float, Meta(ge=0.01, le=1.0)] = 0.2
    """Share of the steps' time spent waiting for batches, on the rank that waits longest: all
    others wait for it in the all-reduce. A healthy loader stays below a few per cent; from 20 % on,
    one or two more workers pay off at once. Our own choice."""
    block: Annotated[int, Meta(ge=5, le=10_000)] = 50
    """Steps that are judged together."""
    left_out: Count = 2
    """Longest waits per block that are ignored: the start of an epoch, one slow read."""
    one_rank_ratio: Annotated[float, Meta(ge=1.1)] = 3.0
    """A rank is named if it waits this many times as long as the median rank."""
    clear_after: AtLeastOne = 4
    """Blocks below the share after which it can be reported again."""
    stall_steps: AtLeastOne = 3
    """Steps in a row that each wait ``stall_ratio`` times as long as a step usually takes: a stall,
    reported at once. A single one is the start of an epoch, or one slow read."""
    stall_ratio: Annotated[float, Meta(ge=1.1, le=1e6)] = 2.0
    """Multiple of the usual step, which such a wait must exceed."""
    stall_seconds: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.1
    """Least such wait."""

    def __post_init__(self) -> None:
        """Refuse what cannot work; half of the steps at least must count."""
        super().__post_init__()
        if self.left_out > self.block // 2:
            raise self.refusal("left_out", f"at most half of data_bound.block ({self.block})")


STALL = "loader_stall"
"""Cause of findings about a stall, which does not last."""
_LEAST_USUAL, _MOST_USUAL = 8, 32
"""Steps from which the usual duration is known, and the number that it is taken from."""


class DataBoundWatcher(LastingWatcher):
    """Finds runs that wait for data, and names the rank if a single one does.

    It sums waits instead of taking medians: with four workers that are too slow, only every fourth
    step waits.
    """

    name = "data_bound"
    STATE = (
        "_waits", "_durations", "_of_rank", "_start", "_episode", "_usual", "_stalled",
        "_stall_episode", "_num_stalled",
    )  # fmt: skip
    MAY_LACK = True
    """States of an earlier version contain no stall."""

    def __init__(self, config: DataBoundConfig | None = None) -> None:
        self._config = config or DataBoundConfig()
        super().__init__(self._config.clear_after)
        self._waits: list[float] = []
        self._durations: list[float] = []
        self._of_rank: list[float] = []
        self._start = -1
        self._usual: list[float] = []
        """Durations of the latest steps without a long wait."""
        self._stalled: list[float] = []
        """Waits of the latest steps in a row that are long."""
        self._stall_episode = ConditionEpisode(self._config.block)
        self._num_stalled = 0
        """Steps of the block that are part of a stall."""

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the unfinished block of waits: another attempt starts."""
        self._clear_wait_block()
        self._stalled.clear()

    def _stall(self, step: int, wait: float, duration: float) -> tuple[Finding, ...]:
        """Add the ranks' wait for data in a step; return the finding if the loader stalled."""
        config, usual = self._config, self._usual
        typical = upper_median(usual) if len(usual) >= _LEAST_USUAL else INFINITY
        if wait <= max(config.stall_seconds, config.stall_ratio * typical):
            self._usual = [*usual, duration][-_MOST_USUAL:]
            self._stalled.clear()
            self._stall_episode.begins(False)
            return ()
        was_stall = len(self._stalled) >= config.stall_steps
        self._stalled = [*self._stalled, wait][-config.stall_steps :]
        is_stall = len(self._stalled) >= config.stall_steps
        self._num_stalled += 1 if was_stall else config.stall_steps * is_stall
        if not self._stall_episode.begins(is_stall):
            return ()
        first = step - config.stall_steps + 1
        reason = (
            f"the loader stalled: steps {first} to {step} waited "
            f"{humanize_seconds(sum(self._stalled))} for their batches; a step usually takes "
            f"{humanize_seconds(typical)}"
        )
        longest = max(self._stalled)
        return self._report(
            step, reason, cause=STALL, value=longest, limit=typical, onset_step=first
        )

    def _clear_wait_block(self) -> None:
        """Empty the block in which the ranks' waits for data are summed."""
        self._waits.clear()
        self._durations.clear()
        self._of_rank.clear()
        self._num_stalled = 0

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the ranks' waits for data in a merged step."""
        waits, ranks = finite(merged.ranks.get("data_wait_seconds"))
        duration = step_seconds(merged)
        if not waits or duration <= 0.0:
            return ()
        stall = self._stall(merged.step, min(max(waits), duration), duration)
        if not self._waits:
            self._start = merged.step
        self._add_data_waits(waits, ranks, duration)
        if len(self._waits) < self._config.block:
            return stall
        finding = self._data_bound_findings(merged.step)
        self._clear_wait_block()
        return finding or stall

    def _add_data_waits(
        self, waits: Sequence[float], ranks: Sequence[int], duration: float
    ) -> None:
        """Add the ranks' waits for data; none can be longer than its merged step."""
        self._waits.append(min(max(0.0, max(waits)), duration))
        self._durations.append(duration)
        missing = ranks[-1] + 1 - len(self._of_rank)
        if missing > 0:
            self._of_rank += [0.0] * missing
        if len(waits) == len(self._of_rank) and min(waits) >= 0.0 and max(waits) <= duration:
            self._of_rank = list(map(add, self._of_rank, waits))
            return
        for rank, wait in zip(ranks, waits, strict=True):
            self._of_rank[rank] += min(max(0.0, wait), duration)

    def _data_bound_findings(self, step: int) -> tuple[Finding, ...]:
        """Report ranks that wait for data for too large a share of a block of steps."""
        config = self._config
        scale = max(self._durations)  # keeps sums of arbitrary floats finite
        pairs = sorted(zip(self._waits, self._durations, strict=True))
        # A stall is reported on its own; one that lasts for half of the block counts here too.
        num_left_out = min(config.left_out + self._num_stalled, len(pairs) // 2)
        pairs = pairs[: len(pairs) - num_left_out]
        waited = sum(wait / scale for wait, _ in pairs)
        total = sum(duration / scale for _, duration in pairs)
        share = waited / total if total > 0.0 else 0.0
        if not self._episode.begins(share > config.share):
            return ()
        rank = self._find_waiting_rank()
        who = f"rank {rank} alone spends" if rank >= 0 else "steps spend"
        onset = self._find_onset()
        of_block = "" if onset == self._start else f" in the last {len(self._waits)} steps"
        reason = (
            f"{who} {share:.0%} of the time waiting for batches, "
            f"{humanize_seconds(waited / len(pairs) * scale)} of "
            f"{humanize_seconds(total / len(pairs) * scale)} a step{of_block}, since step {onset}"
        )
        return self._report(
            step, reason, rank=rank, value=share, limit=config.share, onset_step=onset,
            cause="data_bound_rank" if rank >= 0 else "data_bound",
        )  # fmt: skip

    def _find_onset(self) -> int:
        """Return the step of the block from which its waits for data exceed the share (CUSUM).

        Until then the sum of waits beyond the share falls, so it is lowest right before that step.
        """
        scale, share = max(self._durations), self._config.share
        steps = zip(self._waits, self._durations, strict=True)
        sums = [*accumulate(((w - share * d) / scale for w, d in steps), initial=0.0)]
        return self._start + min(sums.index(min(sums)), len(self._waits) - 1)

    def _find_waiting_rank(self) -> int:
        """Return the only rank that waits long for its data; -1 if there is none."""
        if len(self._of_rank) < 2:
            return -1
        longest = max(self._of_rank)
        others = sorted(self._of_rank)[: len(self._of_rank) - 1]
        usual = others[len(others) >> 1]
        is_alone = longest / self._config.one_rank_ratio > usual
        return self._of_rank.index(longest) if is_alone else -1


# -------------------------------------------------------------------------------- one rank's loss


_LEAST_RANKS = 3
"""With two ranks that differ, the wrong one is unknown."""


class RankLossConfig(Settings, frozen=True, kw_only=True):
    """When a rank's loss counts as off. All values are our own choice."""

    section = "rank_loss"
    ascending = (("least", "most"),)

    sigmas: Annotated[float, Meta(ge=1.0, le=100.0)] = 3.0
    """Robust standard deviations between the ranks of one step from which a rank is off."""
    least: NotNegative = 0.02
    """Deviations below this share of the median loss never count, however similar the ranks are."""
    most: Annotated[float, Meta(le=10.0)] = 0.1
    """Deviations above this share of the median loss always count, however different the ranks are:
    what matters is that it is always the same side."""
    steps: Annotated[int, Meta(ge=10, le=100_000)] = 85
    """A rank is reported when its steps off on one side minus five times its other steps reach
    this: at least five of six. Per-rank losses are heavy-tailed (clean runs show single steps at
    1.98 times), but not always on the same rank."""


class RankLossWatcher(Watcher):
    """Finds a rank whose loss stays above, or below, the other ranks'.

    It counts only the side on which a rank is, so one extreme value weighs no more than any other.
    """

    name = "rank_loss"
    STATE = (state_table("_counts"), "_told")

    def __init__(self, config: RankLossConfig | None = None) -> None:
        super().__init__()
        self._config = config or RankLossConfig()
        self._counts: dict[int, tuple[int, int]] = {}
        """By rank: steps off, below zero for the lower side, and the first of them."""
        self._told: set[int] = set()

    @property
    def goes_on(self) -> bool:
        """Return whether a rank that was reported still has a loss unlike the others'."""
        return bool(self._told)

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the counts of steps in which a rank's loss was off."""
        self._counts.clear()
        self._told.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the ranks' losses in a merged step."""
        losses, ranks = finite(merged.ranks.get("rank_loss"))
        if len(losses) < _LEAST_RANKS:
            return ()
        ordered = sorted(losses)
        middle = ordered[len(ordered) >> 1]
        size = abs(middle)
        least = self._config.least * size
        if not self._counts and ordered[-1] - middle <= least and middle - ordered[0] <= least:
            return ()
        mad = upper_median([abs(loss - middle) for loss in ordered])
        sigma = self._config.sigmas * SIGMA_PER_MAD * mad
        limit = max(least, min(sigma, self._config.most * size))
        if not self._counts and ordered[-1] <= middle + limit and ordered[0] >= middle - limit:
            return ()
        return self._update_counts(merged, losses, ranks, middle, limit)

    def _update_counts(
        self,
        merged: MergedStep,
        losses: Sequence[float],
        ranks: Sequence[int],
        middle: float,
        limit: float,
    ) -> tuple[Finding, ...]:
        """Count the steps in which a rank's loss is off; return new findings."""
        high, low = middle + limit, middle - limit
        off = {
            rank: loss
            for rank, loss in zip(ranks, losses, strict=True)
            if loss > high or loss < low
        }
        present = set(ranks)
        for rank in [rank for rank in self._counts if rank not in off and rank in present]:
            self._decrease_count(rank)
        findings: list[Finding] = []
        for rank, loss in off.items():
            side = 1 if loss > high else -1
            count, since = self._counts.get(rank, (0, merged.step))
            if count * side < 0:
                self._decrease_count(rank)
                continue
            count = min(abs(count) + 1, 2 * self._config.steps) * side
            self._counts[rank] = (count, since)
            if abs(count) >= self._config.steps and rank not in self._told:
                self._told.add(rank)
                findings += self._report_rank_loss(merged.step, rank, loss, middle, since)
        return tuple(findings)

    def _decrease_count(self, rank: int) -> None:
        """Lower a rank's count of steps in which its loss was off."""
        count, since = self._counts[rank]
        if abs(count) <= 5:
            del self._counts[rank]
            self._told.discard(rank)
        else:
            self._counts[rank] = (count - 5 if count > 0 else count + 5, since)

    def _report_rank_loss(
        self, step: int, rank: int, loss: float, middle: float, since: int
    ) -> tuple[Finding, ...]:
        side = "above" if loss > middle else "below"
        reason = (
            f"the loss of rank {rank} has been {side} the other ranks' on nearly every step since "
            f"step {since}, now {loss:.4g} against a median of {middle:.4g}: check its data and "
            "its hardware"
        )
        return self._report(step, reason, rank=rank, value=loss, limit=middle, onset_step=since)


class ReductionConfig(Settings, frozen=True, kw_only=True):
    """When averaged gradients are not what the ranks put in."""

    section = "reduction"

    limit: Annotated[float, Meta(ge=1.0, le=1e9)] = 16.0
    """Standard errors of rounding. These are taken rather too large, so a right sum stays below 1
    or 2; a flipped bit is seen where it changes an element by more than about 1e-5 of the norm of
    its bucket, in float32."""
    clear_after: AtLeastOne = 20
    """Checks without it, after which it can be reported again."""


class ReductionWatcher(Watcher):
    """Finds gradients that a reduction, or the link to a rank, changed on their way.

    Where all ranks got the same wrong sum, it was wrong before it was handed out.
    """

    name = "reduction"
    STATE = ("_episode",)

    def __init__(self, config: ReductionConfig | None = None) -> None:
        super().__init__()
        self._config = config or ReductionConfig()
        self._episode = ConditionEpisode(self._config.clear_after)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the ranks' reduction errors in a merged step: wrong gradient sums."""
        errors, ranks = finite(merged.ranks.get("reduction_error"))
        if not errors:
            return ()
        limit = self._config.limit
        wrong = [rank for rank, error in zip(ranks, errors, strict=True) if error > limit]
        if not self._episode.begins(bool(wrong)):
            return ()
        worst = max(errors)
        if len(wrong) == len(errors):
            who = "the ranks all got gradients that are"
            why = "what reduces them, or the link of a rank that puts in, is faulty"
        else:
            names = ", ".join(map(str, wrong[:_MOST_NAMED]))
            more = "" if len(wrong) <= _MOST_NAMED else f" and {len(wrong) - _MOST_NAMED} more"
            who = f"rank{'s' * (len(wrong) > 1)} {names}{more} got gradients that are"
            why = "the others got the right ones, so its link or its reduction is faulty"
            if len(wrong) > 1:
                why = "the others got the right ones, so their links or reductions are faulty"
        reason = (
            f"{who} not the sum of what the ranks put in (off by {worst:.3g} times what rounding "
            f"explains): {why}"
        )
        rank = wrong[0] if len(wrong) == 1 else -1
        return self._report(merged.step, reason, rank=rank, value=worst, limit=limit)


_MOST_NAMED = 8
