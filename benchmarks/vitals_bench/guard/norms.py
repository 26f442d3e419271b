"""Norms, clip and verdict of a step against the clip alone; with the fused step, and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch

from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import Gradients, Nothing, gpt, size_of, watched


def measure_norms(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of one process."""
    millions, rounds = (5, 6) if quick else (50, 30)
    yield _clip(millions, rounds)
    yield _clip_and_step(millions, rounds)


def _clip(millions: int, rounds: int) -> Row:
    model, peer = gpt(millions), gpt(millions)
    params = list(peer.parameters())
    mine, theirs = Gradients(list(model.parameters())), Gradients(params)
    loss = torch.tensor(1.0)
    with watched(model, Nothing(model.parameters())) as monitor:

        def ours() -> None:
            mine.give_back()
            monitor.step(loss, max_norm=1.0)

        def clip() -> None:
            theirs.give_back()
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)

        times = interleave({"ours": ours, "clip": clip, "again": clip}, rounds=rounds)
    median_ms = medians(times, scale=1e3)
    return Row(
        name=f"norms, layers, clip, verdict and journal, {size_of(model)}",
        ours=median_ms["ours"],
        unit="ms",
        peer="clip_grad_norm_(foreach=True)",
        theirs=median_ms["clip"],
        goal=ratio_at_most(1.05),
        spread=spread(median_ms["again"], median_ms["clip"]),
        note="all of monitor.step with an optimizer of no effect",
    )


def _clip_and_step(millions: int, rounds: int) -> Row:
    model, peer = gpt(millions), gpt(millions)
    mine, theirs = Gradients(list(model.parameters())), Gradients(list(peer.parameters()))
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
    params = list(peer.parameters())
    loss = torch.tensor(1.0)
    with ExitStack() as stack:
        fused = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        monitor = stack.enter_context(watched(model, fused))

        def ours() -> None:
            mine.give_back()
            monitor.step(loss, max_norm=1.0)

        def clip_and_step() -> None:
            theirs.give_back()
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        arms = {"ours": ours, "peer": clip_and_step, "again": clip_and_step}
        times = interleave(arms, rounds=rounds)
    median_ms = medians(times, scale=1e3)
    return Row(
        name=f"the same with a fused AdamW, {size_of(model)}",
        ours=median_ms["ours"],
        unit="ms",
        peer="clip_grad_norm_ and fused step",
        theirs=median_ms["peer"],
        goal=ratio_at_most(1.0),
        spread=spread(median_ms["again"], median_ms["peer"]),
    )
