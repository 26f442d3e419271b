"""A guarded and a skipped optimizer step against the bare one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_hooks.guard.optimizers import OptimizerGuard
from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import Gradients, gpt, size_of

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True),
}
ON_HOST: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW (foreach)": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-4),
}


def measure_steps(*, quick: bool) -> Iterator[Row]:
    """Yield a row for each optimizer and verdict."""
    millions, rounds = (1, 6) if quick else (10, 20)
    for name, make in FUSED.items():
        yield from _rows(f"fused {name}", gpt(millions), make, rounds, on_device=True)
    for name, make in ON_HOST.items():
        yield from _rows(name, gpt(millions), make, rounds, on_device=False)
    muon = getattr(torch.optim, "Muon", None)
    if muon is not None:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2 * millions)))
        make = lambda params: muon(params, lr=1e-4)  # noqa: E731
        yield from _rows("Muon", model, make, rounds, on_device=False)


def _rows(
    name: str,
    model: nn.Module,
    make: Callable[[Any], Optimizer],
    rounds: int,
    *,
    on_device: bool,
) -> Iterator[Row]:
    params = list(model.parameters())
    grads = Gradients(params)
    optimizer = make(params)
    grads.give_back()
    optimizer.step()
    guard = OptimizerGuard(optimizer, None)
    good, bad = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def under(flag: torch.Tensor) -> Callable[[], None]:
        return lambda: guard.apply(
            flag, skip_on_host=None if on_device else bool(flag.item()), lr_factor=1.0
        )

    arms: dict[str, Callable[[], object]] = {
        "guarded": under(good),
        "bare": optimizer.step,
        "skipped": under(bad),
        "again": optimizer.step,
    }
    median_ms = medians(interleave(arms, rounds=rounds), scale=1e3)
    guard.release()
    for kind in ("guarded", "skipped"):
        yield Row(
            name=f"{name}: a {kind} step, {size_of(model)}",
            ours=median_ms[kind],
            unit="ms",
            peer="bare step",
            theirs=median_ms["bare"],
            goal=ratio_at_most(1.10 if on_device else 3.0),
            spread=spread(median_ms["again"], median_ms["bare"]),
        )
