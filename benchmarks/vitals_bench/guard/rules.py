"""What a rule makes of one NaN, of two spikes and of the first steps: ours in a real loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from vitals_bench.peers.olmo_rule import UNGUARDED, SpikeRule
from vitals_bench.rows import Row, at_most, exactly
from vitals_bench.training import watched

PEER = "OLMo-core's rule"


class Trained(NamedTuple):
    """Result of a loop with injected faults."""

    skipped: list[int]
    first_guarded: int
    losses: list[float]
    norms: list[float]
    is_finite: bool
    """Whether the parameters are, at the end."""


def train(*, steps: int, spikes: dict[int, float]) -> Trained:
    """Train a small model under guard, with the loss of some steps multiplied.

    A NaN goes into one element of one gradient instead. The targets are noise, so that loss and
    norm are as steady as a language model's.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    skipped: list[int] = []
    losses, norms, first_guarded = [], [], -1
    with watched(model, optimizer) as monitor:
        for step in range(steps):
            inputs, targets = torch.randn(256, 64), torch.randn(256, 16)
            factor = spikes.get(step, 1.0)
            is_nan = math.isnan(factor)
            loss = nn.functional.mse_loss(model(inputs), targets) * (1.0 if is_nan else factor)
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if is_nan:
                grads[0][0, 0] = factor
            losses.append(loss.item())
            norms.append(torch.nn.utils.get_total_norm(grads).item())
            if first_guarded < 0 and monitor._run.judge.limits().grad_norm is not None:
                first_guarded = step
            decision = monitor.step(loss).decision
            if decision is not None and decision.action == "skip_step":
                skipped.append(decision.step)
        finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return Trained(skipped, first_guarded, losses, norms, finite)


def skipped_by_peer(losses: list[float], norms: list[float]) -> list[int]:
    """Return the steps that OLMo-core's rule would not have counted."""
    rule = SpikeRule()
    pairs = enumerate(zip(losses, norms, strict=True))
    return [i for i, (loss, norm) in pairs if not rule.factor(loss, norm)]


def measure_rules(*, quick: bool) -> Iterator[Row]:
    """Yield the rows; they count, and take as long quick or not."""
    del quick
    nan = train(steps=400, spikes={200: math.nan})
    yield Row(
        name="steps skipped after one NaN in one gradient element",
        ours=len([step for step in nan.skipped if step >= 200]),
        unit="steps",
        peer=PEER,
        theirs=len([i for i in skipped_by_peer(nan.losses, nan.norms) if i >= 200]),
        goal=exactly(1),
        note="" if nan.is_finite else "OUR PARAMETERS ARE NOT FINITE",
    )
    two = train(steps=300, spikes={200: 20.0, 230: 10.0})
    yield Row(
        name="of two spikes, 20x and 30 steps later 10x, skipped",
        ours=len({200, 230} & set(two.skipped)),
        unit="spikes",
        peer=PEER,
        theirs=len({200, 230} & set(skipped_by_peer(two.losses, two.norms))),
        goal=exactly(2),
        note=f"healthy steps skipped: {len(set(two.skipped) - {200, 230})}",
    )
    yield Row(
        name="first step whose norm is guarded against a finite spike",
        ours=nan.first_guarded,
        unit="step",
        peer=PEER,
        theirs=UNGUARDED,
        goal=at_most(12),
    )
