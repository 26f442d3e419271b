"""FSDP2 on two ranks: our exchange against ``clip_grad_norm_().full_tensor()``.

Each is measured as what it adds to a fused step: ours leaves the clip to that step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from vitals_bench.guard.norms import Limits
from vitals_bench.guard.two_ranks import run_on_this_rank, run_on_two_ranks
from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import Gradients, gpt, size_of, tokens, watched

LIMITS: dict[str, Limits] = {
    "a norm below the limit": lambda: itertools.repeat(1e9),
    # All arms clip the same gradients, and each call must find something left to clip.
    "a norm above the limit": lambda: (0.98**i for i in itertools.count()),
}


def measure_sharded(*, quick: bool) -> Iterator[Row]:
    """Start two real ranks and yield their rows."""
    millions, rounds = (1, 6) if quick else (50, 30)
    by_kind = run_on_two_ranks(__name__, millions=millions, rounds=rounds)
    for kind, measured in by_kind.items():
        base = measured["bare"]
        yield Row(
            name=f"FSDP2 on 2 ranks, added to a fused step: norms, exchange, clip, {kind}",
            ours=measured["ours"] - base,
            unit="ms",
            peer="clip_grad_norm_().full_tensor()",
            theirs=measured["peer"] - base,
            goal=ratio_at_most(0.8),
            spread=spread(measured["again"] - base, measured["peer"] - base),
            note=f"gloo, one thread a rank; the fused step alone takes {base:.0f} ms",
        )


def measure_on_this_rank(millions: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return this rank's medians in milliseconds, below and above the limit."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = gpt(millions)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model(tokens(1)).backward()
    params = list(model.parameters())
    grads = Gradients(params, filled=False)
    guarded, plain = (torch.optim.AdamW(params, lr=1e-4, fused=True) for _ in range(2))
    limit: Iterator[float] = iter(())
    measured = {}
    with watched(model, guarded) as monitor:

        def ours() -> None:
            grads.give_back()
            monitor.step(torch.tensor(1.0), max_norm=next(limit))

        def bare() -> None:
            grads.give_back()
            plain.step()
            plain.zero_grad()

        def clip() -> None:
            grads.give_back()
            norm = torch.nn.utils.clip_grad_norm_(params, next(limit), foreach=True)
            assert isinstance(norm, DTensor)
            norm.full_tensor()
            plain.step()
            plain.zero_grad()

        arms = {"ours": ours, "peer": clip, "again": clip, "bare": bare}
        for kind, limits in LIMITS.items():
            limit = limits()
            times = interleave(arms, rounds=rounds, between=dist.barrier)
            measured[f"{size_of(model)}, {kind}"] = medians(times, scale=1e3)
    return measured


if __name__ == "__main__":
    run_on_this_rank(measure_on_this_rank)
