"""A training step with and without Vitals, on one process of this machine."""

import os
import time
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks.measure import Cost, summarize
from trainer_hooks import watch


def measure_training(*, quick: bool) -> list[Cost]:
    """Return the cost of a step, plain and watched, of the same small model.

    Steps of both kinds take turns, so that whatever else the machine does meets both alike.
    """
    rounds, warm_up = (20, 5) if quick else (300, 50)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs, targets = torch.randn(64, 256), torch.randn(64, 256)
    plain, guarded = _model(), _model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    guarded_optimizer = torch.optim.AdamW(guarded.parameters(), fused=True)
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    os.environ["VITALS_AGENT"] = "off"
    with TemporaryDirectory() as runs, watch(guarded, guarded_optimizer, dir=runs) as monitor:
        for i in range(warm_up + rounds):
            start = time.perf_counter_ns()
            _loss(plain, inputs, targets).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            middle = time.perf_counter_ns()
            loss = _loss(guarded, inputs, targets)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
            end = time.perf_counter_ns()
            if i >= warm_up:
                times["plain"].append((middle - start) / 1e3)
                times["watched"].append((end - middle) / 1e3)
    added = [w - p for p, w in zip(times["plain"], times["watched"], strict=True)]
    size = sum(p.numel() for p in plain.parameters())
    return [
        summarize(f"training: a plain step, {size:,} parameters", times["plain"]),
        summarize("training: the same step, watched", times["watched"]),
        summarize("training: what watching adds", added),
    ]


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())))


def _loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)
