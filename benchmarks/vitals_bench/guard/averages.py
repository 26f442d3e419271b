"""An update of the average of the weights against torch's own, and one that a skip holds back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer_hooks import EMA
from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import gpt, size_of


def measure_averages(*, quick: bool) -> Iterator[Row]:
    """Yield the CPU time of an update, applied and skipped, on one thread: others spin."""
    millions, rounds = (1, 6) if quick else (50, 20)
    model = gpt(millions)
    ema = EMA(model)
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    bad, names = torch.ones((), dtype=torch.float64), [name for name, _ in model.named_parameters()]

    def skipped() -> None:
        ema.begin(bad)
        ema.follow(names)

    def torch_s_own() -> None:
        peer.update_parameters(model)

    arms = {"applied": ema.update, "skipped": skipped, "peer": torch_s_own, "again": torch_s_own}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = interleave(arms, rounds=rounds, clock_ns=time.process_time_ns)
    finally:
        torch.set_num_threads(num_threads)
    median_ms = medians(times, scale=1e3)
    for kind in ("applied", "skipped"):
        yield Row(
            name=f"ema_update, {kind}, {size_of(model)}",
            ours=median_ms[kind],
            unit="ms",
            peer="AveragedModel(get_ema_multi_avg_fn)",
            theirs=median_ms["peer"],
            goal=ratio_at_most(1.0),
            spread=spread(median_ms["again"], median_ms["peer"]),
        )
