"""Faults in a training of the benchmark, and their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from vitals_bench.judgement.tasks import Poison

FaultKind = Literal[
    "poison", "rate", "creep", "moments", "layer", "overflow", "nan_loss",
    "dead", "flip", "logits", "decay", "repeat", "gradient",
]  # fmt: skip
Course = Literal["NaN", "poison", "damage", "slow"]
"""NaN in batches or losses; a few wrong batches; a state that is damaged at once or in a few steps,
which a rollback undoes; ruin little by little."""
FOR_GOOD = 10**9
CREEP, CREEP_AT_MOST = 1.03, 60.0
DAMAGING = 3.0
"""A rate as many times too large damages the state."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. Poison is in batches and repeats with them; all other faults happen once."""

    kind: FaultKind
    begin: int = 350
    """Batch, or update attempted, that it begins with."""
    steps: int = 1
    """How long it lasts."""
    poison: Poison = "shuffle"
    factor: float = 1.0
    """What the rate, or the weights of a layer, are multiplied by."""

    @property
    def is_of_the_data(self) -> bool:
        """Whether the batches are the cause: the state is not damaged."""
        return self.kind in ("poison", "nan_loss")

    @property
    def course(self) -> Course:
        """Course of the fault."""
        if self.kind == "nan_loss" or self.poison == "nan":
            return "NaN"
        if self.kind == "poison":
            return "slow" if self.steps == FOR_GOOD else "poison"
        return "slow" if self.kind in ("creep", "logits", "decay", "repeat") else "damage"

    def poisons(self, index: int) -> bool:
        """Return whether this batch is poisoned."""
        return self.kind == "poison" and self.begin <= index < self.begin + self.steps

    def repeats(self, index: int) -> bool:
        """Return whether the loader delivers the batch of ``begin`` again instead of this one."""
        return self.kind == "repeat" and self.begin < index < self.begin + self.steps

    def gradient_factor(self, attempted: int) -> float:
        """Return what the gradients of this update are multiplied by."""
        is_on = self.kind == "gradient" and 0 <= attempted - self.begin < self.steps
        return self.factor if is_on else 1.0

    def rate_factor(self, attempted: int) -> float:
        """Return what the loop multiplies the schedule's rate by, by mistake, in this update."""
        since = attempted - self.begin
        if self.kind == "rate" and 0 <= since < self.steps:
            return self.factor
        if self.kind == "creep" and since >= 0:
            return float(min(CREEP**since, CREEP_AT_MOST))
        return 1.0

    def damages(self, attempted: int) -> bool:
        """Return whether this update, or what comes just before it, damages the state."""
        once = ("moments", "layer", "overflow", "dead", "flip")
        lasting = self.kind in ("logits", "decay") and attempted >= self.begin
        at_once = lasting or (self.kind in once and attempted == self.begin)
        return at_once or self.rate_factor(attempted) >= DAMAGING

    def spoils_loss(self, attempted: int) -> bool:
        """Return whether loss and gradients of this update come out as NaN."""
        return self.kind == "nan_loss" and 0 <= attempted - self.begin < self.steps

    def damage(self, model: nn.Module, optimizer: Optimizer, attempted: int) -> None:
        """Damage the state, where it is time."""
        matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
        if self.kind == "decay" and attempted >= self.begin:
            for group in optimizer.param_groups:
                group["weight_decay"] = self.factor
        if self.kind == "logits" and 0 <= attempted - self.begin < self.steps:
            with torch.no_grad():
                matrices[-1].mul_(self.factor)
        if attempted != self.begin:
            return
        with torch.no_grad():
            if self.kind == "moments":
                for state in optimizer.state.values():
                    state["exp_avg_sq"].zero_()
            elif self.kind == "layer":
                matrices[len(matrices) // 2].mul_(self.factor)
            elif self.kind == "dead":
                matrices[len(matrices) // 2].zero_()
            elif self.kind == "flip":
                matrices[len(matrices) // 2].view(-1)[0].mul_(2.0**40)
            elif self.kind == "overflow":
                matrices[-1].mul_(1e25)
