"""One rank's loss that lies off from the others': other data, or a broken rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainvitals.detect.fleet.base import Watcher, finite, require, tell, upper_median
from trainvitals.detect.merged import MergedStep
from trainvitals.records import Finding
from trainvitals.windows import SIGMA_PER_MAD

_LEAST_RANKS = 3
"""Of two that differ nobody knows which is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLossConfig:
    """When a rank's loss counts as off. All values are our own choice."""

    sigmas: float = 3.0
    """Robust standard deviations among the ranks of one step that are off."""
    least: float = 0.02
    """Part of the median loss below which nothing is off, however alike the ranks are."""
    most: float = 0.1
    """Part of the median loss above which a rank is off, however unlike they are: it is the side
    it always lies on that counts, not how far."""
    steps: int = 85
    """Steps off on one side, less five times the other steps, after which a rank is told: five in
    six at least. Rank-local losses are heavy-tailed (clean runs show 1.98 times for one step), but
    the tails are not always the same rank's."""

    def __post_init__(self) -> None:
        require("rank_loss", "sigmas", self.sigmas, least=1.0, most=100.0)
        require("rank_loss", "least", self.least, least=0.0, most=self.most)
        require("rank_loss", "most", self.most, least=self.least, most=10.0)
        require("rank_loss", "steps", self.steps, least=10, most=100_000)


class RankLossWatcher(Watcher):
    """Finds the rank whose loss persistently lies on one side of the others'.

    Only signs are counted, so no single value weighs more than any other. Needs three ranks.
    """

    name = "rank_loss"

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
            f"the loss of rank {rank} lies {side} the other ranks' nearly always since step "
            f"{since}, now {loss:.4g} with a median of {middle:.4g}: its data differ, or the rank "
            "is broken",
            rank=rank,
            value=loss,
            limit=middle,
            onset_step=since,
        )

    def _state(self) -> dict[str, Any]:
        counts = [[rank, count, since] for rank, (count, since) in self._counts.items()]
        return {"counts": counts, "told": sorted(self._told)}

    def _restore(self, state: dict[str, Any]) -> None:
        self._counts = {int(r): (int(count), int(since)) for r, count, since in state["counts"]}
        self._told = {int(rank) for rank in state["told"]}
