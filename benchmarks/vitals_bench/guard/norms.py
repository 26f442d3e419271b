"""Norms, clip and verdict of a step against the clip alone; with the fused step, and sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import Gradients, Nothing, gpt, size_of, watched

Limits = Callable[[], Iterator[float]]
"""Gives each arm what it clips to, step by step."""

CLIPS: dict[str, tuple[Limits, float]] = {
    "a norm below the limit": (lambda: itertools.repeat(1e9), 0.8),
    # The gradients of a step are those that the step before has clipped.
    "a norm above the limit": (lambda: (1e3 * 0.98**i for i in itertools.count()), 1.0),
}
"""What the norm is, and how much of the peer's time may be taken."""


def measure_norms(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of one process."""
    millions, rounds = (5, 6) if quick else (50, 30)
    for kind, (limits, goal) in CLIPS.items():
        yield _clip(millions, rounds, kind, limits, goal)
    for kind, (limits, _) in CLIPS.items():
        yield _clip_and_step(millions, rounds, kind, limits)


def _clip(millions: int, rounds: int, kind: str, limits: Limits, goal: float) -> Row:
    model, peer = gpt(millions), gpt(millions)
    params = list(peer.parameters())
    mine, theirs = Gradients(list(model.parameters())), Gradients(params)
    loss, my_limit, their_limit = torch.tensor(1.0), limits(), limits()
    with watched(model, Nothing(model.parameters())) as monitor:

        def ours() -> None:
            mine.give_back()
            monitor.step(loss, max_norm=next(my_limit))

        def clip() -> None:
            theirs.give_back()
            torch.nn.utils.clip_grad_norm_(params, next(their_limit), foreach=True)

        times = interleave({"ours": ours, "clip": clip, "again": clip}, rounds=rounds)
    median_ms = medians(times, scale=1e3)
    return Row(
        name=f"norms, layers, clip, verdict and journal, {size_of(model)}, {kind}",
        ours=median_ms["ours"],
        unit="ms",
        peer="clip_grad_norm_(foreach=True)",
        theirs=median_ms["clip"],
        goal=ratio_at_most(goal),
        spread=spread(median_ms["again"], median_ms["clip"]),
        note="all of monitor.step with an optimizer of no effect",
    )


def _clip_and_step(millions: int, rounds: int, kind: str, limits: Limits) -> Row:
    model, peer = gpt(millions), gpt(millions)
    mine, theirs = Gradients(list(model.parameters())), Gradients(list(peer.parameters()))
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
    params = list(peer.parameters())
    fused = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss, my_limit, their_limit = torch.tensor(1.0), limits(), limits()
    with watched(model, fused) as monitor:

        def ours() -> None:
            mine.give_back()
            monitor.step(loss, max_norm=next(my_limit))

        def clip_and_step() -> None:
            theirs.give_back()
            torch.nn.utils.clip_grad_norm_(params, next(their_limit), foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        arms = {"ours": ours, "peer": clip_and_step, "again": clip_and_step}
        times = interleave(arms, rounds=rounds)
    median_ms = medians(times, scale=1e3)
    return Row(
        name=f"the same with a fused AdamW, {size_of(model)}, {kind}",
        ours=median_ms["ours"],
        unit="ms",
        peer="clip_grad_norm_ and fused step",
        theirs=median_ms["peer"],
        goal=ratio_at_most(1.0),
        spread=spread(median_ms["again"], median_ms["peer"]),
    )
