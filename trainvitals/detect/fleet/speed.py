"""Throughput that falls for good: against the best the run itself has shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from trainvitals.detect.fleet.base import (
    INFINITY,
    Episode,
    Watcher,
    number,
    require,
    step_seconds,
    tell,
    upper_median,
)
from trainvitals.detect.fleet.pace import Pace, PaceConfig
from trainvitals.detect.merged import MergedStep
from trainvitals.records import Finding
from trainvitals.units import humanize, humanize_seconds
from trainvitals.windows import SIGMA_PER_MAD

_LEAST_BLOCKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """When a run counts as slower than it was."""

    fall: float = 0.1
    """Part of the best throughput that may be missing."""
    block: int = 20
    """Ordinary steps whose median is one measurement."""
    blocks: int = 15
    """Measurements whose median is the run's course; the best course is the reference."""
    persistence: int = 2
    """Measurements in a row below the limit that are told: at least 30 of 40 steps are slow."""
    sigmas: float = 5.0
    """Robust standard deviations of these measurements that the fall must exceed as well, so that
    a noisy run is not told for its noise."""
    warmup_rows: int = 20
    """First steps of an attempt, left out: compilation, autotuning, cold caches."""
    accept_after: int = 50
    """Measurements in a row below the limit (1000 steps) after which that is the reference."""
    clear_after: int = 5
    """Measurements above the limit after which a fall would be told again."""
    pace: PaceConfig = field(default_factory=PaceConfig)
    """What makes a single step slow; slow steps at intervals are left out."""

    def __post_init__(self) -> None:
        require("throughput", "fall", self.fall, least=0.01, most=0.99)
        require("throughput", "block", self.block, least=3, most=10_000)
        require("throughput", "blocks", self.blocks, least=_LEAST_BLOCKS, most=1000)
        require("throughput", "persistence", self.persistence, least=1, most=INFINITY)
        require("throughput", "sigmas", self.sigmas, least=0.0, most=100.0)
        require("throughput", "warmup_rows", self.warmup_rows, least=0, most=INFINITY)
        require(
            "throughput", "accept_after", self.accept_after, least=self.persistence, most=INFINITY
        )
        require("throughput", "clear_after", self.clear_after, least=1, most=INFINITY)


class ThroughputWatcher(Watcher):
    """Finds a sustained fall of ``tokens_per_second``, or of steps per second without tokens.

    Works on the logarithm of the seconds that a token (or a step) costs. A measurement below the
    limit never enters the reference.
    """

    name = "throughput"

    def __init__(self, config: ThroughputConfig | None = None) -> None:
        super().__init__()
        self._config = config or ThroughputConfig()
        self.pace = Pace(self._config.pace)
        self._world_size = 0
        self._per_token = False
        self._settling = self._config.warmup_rows
        self._block: list[float] = []
        self._blocks: list[float] = []
        self._best: float | None = None
        self._noise = 0.0
        self._low_blocks = 0
        self._onset = -1
        self._block_start = -1
        self._episode = Episode(self._config.clear_after)

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        return self._episode.on

    def _restarted(self, merged: MergedStep) -> None:
        self.pace.went_back(merged.step)
        self._settling = self._config.warmup_rows
        self._block.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        seconds = step_seconds(merged)
        kind = self.pace.push(merged.step, seconds) if seconds > 0.0 else "ordinary"
        num_ranks = len(merged.ranks.get("step_duration_seconds", ()))
        rate = number(merged.run.get("tokens_per_second")) or 0.0
        if rate <= 0.0 and (seconds <= 0.0 or self._per_token):
            return ()
        if (rate > 0.0) != self._per_token or num_ranks not in (0, self._world_size):
            self._start_anew(per_token=rate > 0.0, world_size=num_ranks or self._world_size)
        if self._settling:
            self._settling -= 1
            return ()
        if kind == "periodic":
            return ()
        if not self._block:
            self._block_start = merged.step
        self._block.append(-math.log(rate) if rate > 0.0 else math.log(seconds))
        if len(self._block) < self._config.block:
            return ()
        cost = upper_median(self._block)
        self._block.clear()
        return self._measured(merged.step, cost)

    def _start_anew(self, *, per_token: bool, world_size: int) -> None:
        """Forget the reference: what is measured, or how many measure it, has changed."""
        self._per_token, self._world_size = per_token, world_size
        self._block.clear()
        self._blocks.clear()
        self._best, self._low_blocks = None, 0

    def _measured(self, step: int, cost: float) -> tuple[Finding, ...]:
        config, best = self._config, self._best
        allowed = max(-math.log1p(-config.fall), config.sigmas * self._noise)
        is_low = best is not None and cost > best + allowed
        if is_low and not self._low_blocks:
            self._onset = self._block_start
        self._low_blocks = self._low_blocks + 1 if is_low else 0
        if not is_low:
            self._learn(cost)
        if best is None:
            return ()
        is_present = self._low_blocks >= config.persistence
        begins = self._episode.begins(is_present) if is_present or not is_low else False
        if self._low_blocks >= config.accept_after:
            self._blocks, self._best, self._low_blocks = [cost], None, 0
        return (self._told(step, cost, best, allowed),) if begins else ()

    def _learn(self, cost: float) -> None:
        self._blocks = [*self._blocks, cost][-self._config.blocks :]
        if len(self._blocks) < _LEAST_BLOCKS:
            return
        course = upper_median(self._blocks)
        if self._best is None or course < self._best:
            self._best = course
            self._noise = SIGMA_PER_MAD * upper_median([abs(b - course) for b in self._blocks])

    def _told(self, step: int, cost: float, best: float, allowed: float) -> Finding:
        part, num = _exp(best - cost), self._low_blocks * self._config.block
        for_steps = f"for {num} steps, evaluations and checkpoints left out"
        now, was, limit = _exp(-cost), _exp(-best), _exp(-best - allowed)
        if self._per_token:
            reason = (
                f"throughput fell to {humanize(now, 'tokens')} tokens a second, {part:.0%} of the "
                f"run's best course of {humanize(was, 'tokens')}, {for_steps}"
            )
        else:
            reason = (
                f"steps take {humanize_seconds(_exp(cost))}, {_exp(cost - best):.3g} times as long "
                f"as the {humanize_seconds(_exp(best))} of the run's best course, {for_steps}"
            )
        return tell(self.name, step, reason, value=now, limit=limit, onset_step=self._onset)

    def _state(self) -> dict[str, Any]:
        return {
            "pace": self.pace.state(),
            "measures": [self._world_size, int(self._per_token), self._settling],
            "block": list(self._block),
            "blocks": list(self._blocks),
            "best": self._best,
            "noise": self._noise,
            "low": [self._low_blocks, self._onset, self._block_start],
            "episode": self._episode.state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.pace.restore(state["pace"])
        self._world_size, per_token, self._settling = (int(n) for n in state["measures"])
        self._per_token = bool(per_token)
        self._block, self._blocks = list(state["block"]), list(state["blocks"])
        self._best, self._noise = state["best"], float(state["noise"])
        self._low_blocks, self._onset, self._block_start = (int(n) for n in state["low"])
        self._episode.restore(state["episode"])


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))
