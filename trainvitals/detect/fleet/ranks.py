"""One rank against the others: who waits for what, and whose loss lies off from the others'."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, Count, NotNegative, Settings
from trainvitals.detect.fleet.base import (
    LONGEST_SECONDS,
    Episode,
    MergedStep,
    Watcher,
    finite,
    step_seconds,
    tell,
    upper_median,
)
from trainvitals.detect.outliers import SIGMA_PER_MAD
from trainvitals.records import Finding
from trainvitals.stateful import table
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

    def __post_init__(self) -> None:
        """Refuse what cannot work; half of the steps at least must count."""
        super().__post_init__()
        if self.left_out > self.block // 2:
            raise self.refusal("left_out", f"at most half of data_bound.block ({self.block})")


class DataBoundWatcher(Watcher):
    """Finds runs that wait for data, and names the rank if a single one does.

    It sums waits instead of taking medians: with four workers that are too slow, only every fourth
    step waits.
    """

    name = "data_bound"
    STATE = ("_waits", "_durations", "_of_rank", "_start", "_episode")

    def __init__(self, config: DataBoundConfig | None = None) -> None:
        super().__init__()
        self._config = config or DataBoundConfig()
        self._waits: list[float] = []
        self._durations: list[float] = []
        self._of_rank: list[float] = []
        self._start = -1
        self._episode = Episode(self._config.clear_after)

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        return self._episode.on

    def _restarted(self, merged: MergedStep) -> None:
        self._drop()

    def _drop(self) -> None:
        self._waits.clear()
        self._durations.clear()
        self._of_rank.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        waits, ranks = finite(merged.ranks.get("data_wait_seconds"))
        duration = step_seconds(merged)
        if not waits or duration <= 0.0:
            return ()
        if not self._waits:
            self._start = merged.step
        self._add(waits, ranks, duration)
        if len(self._waits) < self._config.block:
            return ()
        finding = self._block_ended(merged.step)
        self._drop()
        return finding

    def _add(self, waits: Sequence[float], ranks: Sequence[int], duration: float) -> None:
        """Add a step; a wait cannot be longer than the step it is part of."""
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

    def _block_ended(self, step: int) -> tuple[Finding, ...]:
        config = self._config
        scale = max(self._durations)  # keeps sums of any floats finite
        pairs = sorted(zip(self._waits, self._durations, strict=True))
        pairs = pairs[: len(pairs) - config.left_out]
        waited = sum(wait / scale for wait, _ in pairs)
        total = sum(duration / scale for _, duration in pairs)
        share = waited / total if total > 0.0 else 0.0
        if not self._episode.begins(share > config.share):
            return ()
        rank = self._one_rank()
        who = f"rank {rank} alone spends" if rank >= 0 else "steps spend"
        return (
            tell(
                self.name,
                step,
                f"{who} {share:.0%} of the time waiting for batches, "
                f"{humanize_seconds(waited / len(pairs) * scale)} of "
                f"{humanize_seconds(total / len(pairs) * scale)} a step, since step {self._start}",
                rank=rank,
                value=share,
                limit=config.share,
                onset_step=self._start,
                cause="data_bound_rank" if rank >= 0 else "data_bound",
            ),
        )

    def _one_rank(self) -> int:
        if len(self._of_rank) < 2:
            return -1
        longest = max(self._of_rank)
        others = sorted(self._of_rank)[: len(self._of_rank) - 1]
        usual = others[len(others) >> 1]
        is_alone = longest / self._config.one_rank_ratio > usual
        return self._of_rank.index(longest) if is_alone else -1


class StragglerConfig(Settings, frozen=True, kw_only=True):
    """When one rank counts as keeping the others waiting."""

    section = "straggler"

    late: Annotated[float, Meta(ge=0.01, le=1.0)] = 0.1
    """Share of the step that the median other rank waits for it. Our own choice; a rank that writes
    logs and checkpoints is a few per cent late."""
    steps: Annotated[int, Meta(ge=2, le=100_000)] = 20
    """A rank is reported when its late steps minus twice its on-time steps reach this: late in at
    least two of three steps, so random delays do not count."""


class StragglerWatcher(Watcher):
    """Finds the rank that the others wait for.

    Synchronous ranks all have the same step time, so the all-reduce shows the straggler: the last
    rank to arrive waits least in ``communication_seconds``. Without that column,
    ``forward_backward_seconds``, the time before the all-reduce, is used; it is the second choice,
    because on a GPU the host runs ahead of the device. A rank that waits longer for data is late in
    any case; with gradients summed during backward, as in DDP, that is the only visible sign.
    """

    name = "straggler"
    STATE = (table("_late"), "_told")

    def __init__(self, config: StragglerConfig | None = None) -> None:
        super().__init__()
        self._config = config or StragglerConfig()
        self._late: dict[int, tuple[int, int]] = {}
        """By rank: steps late, and since when."""
        self._told: set[int] = set()

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        return bool(self._told)

    def _restarted(self, merged: MergedStep) -> None:
        self._late.clear()
        self._told.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        duration = step_seconds(merged)
        if duration <= 0.0:
            return ()
        limit = self._config.late * duration
        if not self._late and _nobody_is_late(merged, limit):
            return ()
        lateness, ranks = _lateness(merged)
        return self._counted(merged, lateness, ranks, duration) if lateness else ()

    def _counted(
        self, merged: MergedStep, lateness: Sequence[float], ranks: Sequence[int], duration: float
    ) -> tuple[Finding, ...]:
        limit, counts, latecomers = self._config.late * duration, self._late, []
        for rank, late in zip(ranks, lateness, strict=True):
            count, since = counts.get(rank, (0, merged.step))
            if late > limit:
                count = min(count + 1, 2 * self._config.steps)
                counts[rank] = (count, since)
                if count >= self._config.steps and rank not in self._told:
                    latecomers.append((late, rank))
            elif count > 2:
                counts[rank] = (count - 2, since)
            elif count:
                del counts[rank]
                self._told.discard(rank)
        self._told.update(rank for _, rank in latecomers)
        return (self._tell(merged, latecomers, ranks, duration),) if latecomers else ()

    def _tell(
        self,
        merged: MergedStep,
        latecomers: list[tuple[float, int]],
        ranks: Sequence[int],
        duration: float,
    ) -> Finding:
        late, rank = max(latecomers)
        late, since = min(late, LONGEST_SECONDS), self._late[rank][1]
        more = sorted(other for _, other in latecomers if other != rank)
        verb = "is" if len(more) == 1 else "are"
        others = f"; {_names(more)} {verb} late as well" if more else ""
        of_data = _is_late_by_data(merged, rank, late)
        why = "; it waits for its data" if of_data else ""
        share = late / duration
        return tell(
            self.name,
            merged.step,
            f"rank {rank} is late by {humanize_seconds(late)} a step ({share:.0%} of it) since "
            f"step {since}; {len(ranks) - 1} other ranks wait for it{others}{why}",
            rank=rank,
            value=share,
            limit=self._config.late,
            onset_step=since,
            cause="straggler_data" if of_data else "straggler",
        )


def _nobody_is_late(merged: MergedStep, limit: float) -> bool:
    """Say so where that takes no list: the exchange and the waits for data differ by little."""
    exchange, _ = finite(merged.ranks.get("communication_seconds"))
    if len(exchange) < 2 or max(exchange) - min(exchange) > limit:
        return False
    waits, _ = finite(merged.ranks.get("data_wait_seconds"))
    return not waits or max(waits) - min(waits) <= limit


def _lateness(merged: MergedStep) -> tuple[Sequence[float], Sequence[int]]:
    """Return how many seconds each rank comes later than the median rank, as far as is known."""
    exchange, ranks = finite(merged.ranks.get("communication_seconds"))
    waits, waiting = finite(merged.ranks.get("data_wait_seconds"))
    if len(exchange) > 1:
        middle = upper_median(exchange)
        late = [middle - waited for waited in exchange]
    else:
        late, ranks = _later(*finite(merged.ranks.get("forward_backward_seconds")))
    by_data, waiting = _later(waits, waiting)
    if not late or not by_data:
        return late or by_data, ranks if late else waiting
    if len(late) == len(by_data) and list(ranks) == list(waiting):
        if len(exchange) > 1:
            return list(map(max, late, by_data)), ranks
        return [max(a + b, b) for a, b in zip(late, by_data, strict=True)], ranks
    return late, ranks


def _later(seconds: Sequence[float], ranks: Sequence[int]) -> tuple[list[float], Sequence[int]]:
    """Return by how much each is above the lower median; nothing for less than two."""
    if len(seconds) < 2:
        return [], ranks
    middle = sorted(seconds)[len(seconds) - 1 >> 1]
    return [taken - middle for taken in seconds], ranks


def _is_late_by_data(merged: MergedStep, rank: int, late: float) -> bool:
    by_data, ranks = _later(*finite(merged.ranks.get("data_wait_seconds")))
    return rank in ranks and bool(by_data) and by_data[list(ranks).index(rank)] > late / 2


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


# -------------------------------------------------------------------------------- one rank's loss


_LEAST_RANKS = 3
"""Of two that differ nobody knows which is off."""


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

    It counts only on which side a rank lies, so one extreme value weighs no more than any other.
    """

    name = "rank_loss"
    STATE = (table("_counts"), "_told")

    def __init__(self, config: RankLossConfig | None = None) -> None:
        super().__init__()
        self._config = config or RankLossConfig()
        self._counts: dict[int, tuple[int, int]] = {}
        """By rank: steps off, below zero for the lower side, and since when."""
        self._told: set[int] = set()

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        return bool(self._told)

    def _restarted(self, merged: MergedStep) -> None:
        self._counts.clear()
        self._told.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
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
        return self._counted(merged, losses, ranks, middle, limit)

    def _counted(
        self,
        merged: MergedStep,
        losses: Sequence[float],
        ranks: Sequence[int],
        middle: float,
        limit: float,
    ) -> tuple[Finding, ...]:
        high, low = middle + limit, middle - limit
        off = {
            rank: loss
            for rank, loss in zip(ranks, losses, strict=True)
            if loss > high or loss < low
        }
        present = set(ranks)
        for rank in [rank for rank in self._counts if rank not in off and rank in present]:
            self._ease(rank)
        findings = []
        for rank, loss in off.items():
            side = 1 if loss > high else -1
            count, since = self._counts.get(rank, (0, merged.step))
            if count * side < 0:
                self._ease(rank)
                continue
            count = min(abs(count) + 1, 2 * self._config.steps) * side
            self._counts[rank] = (count, since)
            if abs(count) >= self._config.steps and rank not in self._told:
                self._told.add(rank)
                findings.append(self._tell(merged.step, rank, loss, middle, since))
        return tuple(findings)

    def _ease(self, rank: int) -> None:
        count, since = self._counts[rank]
        if abs(count) <= 5:
            del self._counts[rank]
            self._told.discard(rank)
        else:
            self._counts[rank] = (count - 5 if count > 0 else count + 5, since)

    def _tell(self, step: int, rank: int, loss: float, middle: float, since: int) -> Finding:
        side = "above" if loss > middle else "below"
        return tell(
            self.name,
            step,
            f"the loss of rank {rank} has been {side} the other ranks' on nearly every step since "
            f"step {since}, now {loss:.4g} against a median of {middle:.4g}: check its data and "
            "its hardware",
            rank=rank,
            value=loss,
            limit=middle,
            onset_step=since,
        )
