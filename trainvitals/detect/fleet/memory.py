"""Device memory that grows slowly, and the steps left until it is full."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, Count, Settings
from trainvitals.detect.fleet.base import (
    INFINITY,
    LastingWatcher,
    MergedStep,
    finite,
    number,
    upper_median,
)
from trainvitals.records import Finding
from trainvitals.stateful import StatefulRow
from trainvitals.units import humanize_bytes, humanize_count

_MOST_BYTES = 1e18
"""An exabyte: a larger number is invalid."""
_LEVELS = 3
_PER_LEVEL = 20
"""Blocks per block of the next level: blocks of 50, 1,000 and 20,000 steps."""


class MemoryConfig(Settings, frozen=True, kw_only=True):
    """Definition of a leak."""

    section = "memory"
    ascending = (("least_blocks", "blocks"),)

    block: Annotated[int, Meta(ge=2, le=100_000)] = 50
    """Steps whose lowest value is one measurement: batches of varying length stay above that floor,
    a leak raises it."""
    blocks: Annotated[int, Meta(le=1000)] = 24
    """Measurements kept, at each of three scales."""
    least_blocks: Annotated[int, Meta(ge=4, le=1000)] = 8
    """Measurements needed."""
    rising: Annotated[float, Meta(ge=0.5, le=1.0)] = 0.75
    """Share of the measurements that must exceed the previous one: one large buffer, allocated
    once, is a step and not a slope."""
    min_growth: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.01
    """Share of the device's memory by which use must have grown over the measured steps."""
    horizon: Annotated[float, Meta(ge=0.1, le=1e6)] = 10.0
    """How far the trend is extrapolated, in multiples of the measured steps. Our own choice."""
    warmup_rows: Count = 100
    """First steps of an attempt, left out: optimizer states and caches are made."""
    clear_after: AtLeastOne = 4
    """Measurements without creep after which it can be reported again."""


class _MemoryFloors(StatefulRow):
    """Smallest values of blocks of steps, of every rank: one scale."""

    STATE = ("present", "num", "kept")

    def __init__(self, size: int, most: int) -> None:
        self.size, self.most = size, most
        self.present: list[float] = []
        self.num = 0
        self.kept: list[list[float]] = []

    def add(self, values: Sequence[float]) -> list[float] | None:
        """Add a row of the ranks' memory; return the block's minima if this ends the block."""
        if len(values) != len(self.present):
            self.present, self.num, self.kept = list(values), 0, []
        elif self.num:
            self.present = list(map(min, self.present, values))
        else:
            self.present = list(values)
        self.num += 1
        if self.num < self.size:
            return None
        self.num = 0
        self.kept = [*self.kept, self.present][-self.most :]
        return self.present


class MemoryCreepWatcher(LastingWatcher):
    """Finds a steady rise of ``memory_allocated_bytes`` and estimates when memory runs out.

    It uses the Theil-Sen slope: the median of the slopes between all pairs of measurements (Sen,
    1968). The device's size comes from the GPU samples, through ``learn_total``; without it the
    detector abstains. Rows that lack a rank's value are skipped.
    """

    name = "memory_creep"
    STATE = ("_total", "_settling", "_scales", "_creeps", "_episode")

    def __init__(self, config: MemoryConfig | None = None) -> None:
        self._config = config or MemoryConfig()
        super().__init__(self._config.clear_after)
        self._total = 0.0
        self._settling = self._config.warmup_rows
        self._scales = self._new_scales()
        self._creeps = [False] * _LEVELS
        """Whether each scale showed growth when it was last judged."""

    def _new_scales(self) -> list[_MemoryFloors]:
        """Return empty minima of the ranks' memory, one object per time scale."""
        sizes = [self._config.block, *([_PER_LEVEL] * (_LEVELS - 1))]
        return [_MemoryFloors(size, self._config.blocks) for size in sizes]

    def learn_total(self, total_bytes: float | int | None) -> None:
        """Set the memory size of one of the run's GPUs; the smallest counts."""
        total = number(total_bytes)
        if total is not None and 0.0 < total <= _MOST_BYTES:
            self._total = min(self._total, total) if self._total else total

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the memory minima: another attempt starts."""
        self._settling = self._config.warmup_rows
        self._scales = self._new_scales()
        self._creeps = [False] * _LEVELS

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the ranks' allocated memory in a merged step: find a steady rise."""
        allocated, ranks = finite(merged.ranks.get("memory_allocated_bytes"))
        if not allocated or len(ranks) != ranks[-1] + 1 or max(map(abs, allocated)) > _MOST_BYTES:
            return ()
        if self._settling:
            self._settling -= 1
            return ()
        floors = allocated
        length, has_judged = 1, False
        leaks: list[tuple[float, int, float, int]] = []
        for i, scale in enumerate(self._scales):
            length *= scale.size
            ended = scale.add(floors)
            if ended is None:
                break
            floors = ended
            if self._total and len(scale.kept) >= self._config.least_blocks:
                has_judged = True
                creeping = self._find_leaking_ranks(merged, scale.kept, length)
                self._creeps[i] = bool(creeping)
                leaks += creeping
        if not has_judged or not self._episode.begins(any(self._creeps)) or not leaks:
            return ()
        return self._report_creep(merged.step, *min(leaks))

    def _find_leaking_ranks(
        self, merged: MergedStep, floors: list[list[float]], length: int
    ) -> list[tuple[float, int, float, int]]:
        """Return steps left, rank, bytes per step and onset, for each rank with growth."""
        config, leaks = self._config, []
        peaks, ranks = finite(merged.ranks.get("memory_peak_bytes"))
        peak_of = dict(zip(ranks, peaks, strict=True))
        num = len(floors)
        for rank, (old, new) in enumerate(zip(floors[0], floors[-1], strict=True)):
            if new - old < config.min_growth * self._total:
                continue
            values = [row[rank] for row in floors]
            rises = sum(a < b for a, b in pairwise(values))
            if rises < config.rising * (num - 1):
                continue
            slope = _theil_sen(values) / length
            used = max(new, peak_of.get(rank, new))
            steps_to_full = (self._total - used) / slope if slope > 0.0 else INFINITY
            if steps_to_full <= config.horizon * num * length:
                leaks.append((max(0.0, steps_to_full), rank, slope, merged.step - num * length + 1))
        return leaks

    def _report_creep(
        self, step: int, steps_to_full: float, rank: int, slope: float, onset: int
    ) -> tuple[Finding, ...]:
        onset = max(0, onset)
        reason = (
            f"memory of rank {rank} grows by {humanize_bytes(slope)} per step since step {onset}; "
            f"at that rate its {humanize_bytes(self._total)} run out in "
            f"{humanize_count(round(steps_to_full), 'step')}"
        )
        return self._report(step, reason, rank=rank, value=steps_to_full, onset_step=onset)


def _theil_sen(values: Sequence[float]) -> float:
    """Return the slope of a rank's memory: the median over all pairs of values (Theil-Sen)."""
    num = len(values)
    return upper_median(
        [(values[j] - values[i]) / (j - i) for i in range(num) for j in range(i + 1, num)]
    )
