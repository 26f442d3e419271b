"""A pipeline of two stages on two ranks, 1F1B: a watched step against the bare one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from vitals_bench.guard.two_ranks import run_on_this_rank, run_on_two_ranks
from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import watched

NUM_LAYERS, NUM_EXAMPLES, NUM_MICROBATCHES = 4, 512, 4


def measure_pipelined(*, quick: bool) -> Iterator[Row]:
    """Start two real ranks and yield their row: of several starts, the one in the middle.

    A start keeps its place in memory, which is worth a percent for either side.
    """
    millions, rounds, starts = (1, 6, 1) if quick else (10, 20, 5)
    measured = [run_on_two_ranks(__name__, millions=millions, rounds=rounds) for _ in range(starts)]
    measured.sort(key=lambda ms: ms["ours"] / ms["bare"])
    median_ms = measured[starts // 2]
    ratios = [ms["ours"] / ms["bare"] for ms in measured]
    yield Row(
        name=f"a step of a pipeline, 2 stages on 2 ranks, 1F1B, {millions}M parameters each",
        ours=median_ms["ours"],
        unit="ms",
        peer="the bare step, clipped by the norm over all stages",
        theirs=median_ms["bare"],
        goal=ratio_at_most(1.01),
        spread=max(spread(ms["again"], ms["bare"]) for ms in measured),
        note="gloo, one thread a rank; wall time of a step of the first stage; "
        f"ratios of {starts} starts: {', '.join(f'{ratio:.3f}' for ratio in ratios)}",
    )


def measure_on_this_rank(millions: int, rounds: int) -> dict[str, float]:
    """Return this rank's medians in milliseconds."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    rank, width = dist.get_rank(), int((millions * 1e6 / NUM_LAYERS) ** 0.5)
    layers = [part for _ in range(NUM_LAYERS) for part in (nn.Linear(width, width), nn.GELU())]
    module = nn.Sequential(*layers)
    example = torch.zeros(NUM_EXAMPLES // NUM_MICROBATCHES, width, requires_grad=True)
    stage = PipelineStage(
        module, rank, 2, torch.device("cpu"), input_args=(example,), output_args=(example,)
    )
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    guarded, plain = (torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True) for _ in range(2))
    batch = torch.randn(NUM_EXAMPLES, width, generator=torch.Generator().manual_seed(0))

    def backward() -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch)
            return None
        schedule.step(target=batch, losses=losses)
        return torch.stack(losses).mean().detach()

    with watched(module, guarded, pipeline=schedule) as monitor:

        def ours() -> None:
            monitor.step(backward(), max_norm=1.0)

        def bare() -> None:
            backward()
            grads = [param.grad for param in module.parameters() if param.grad is not None]
            total = nn.utils.get_total_norm(grads).square()
            dist.all_reduce(total)
            nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, total.sqrt())
            del grads
            plain.step()
            plain.zero_grad()

        arms = {"ours": ours, "bare": bare, "again": bare}
        times = interleave(arms, rounds=rounds, between=dist.barrier)
    return medians(times, scale=1e3)


if __name__ == "__main__":
    run_on_this_rank(measure_on_this_rank)
