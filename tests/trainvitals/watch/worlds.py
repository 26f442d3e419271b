"""Runs as a collector would see them: a healthy one, and one for each thing that goes wrong."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.fleet.layers import (
    ActivationWatcher,
    LayerGradientWatcher,
    UpdateRatioWatcher,
)
from trainvitals.detect.fleet.memory import MemoryCreepWatcher
from trainvitals.detect.fleet.node import GpuErrorWatcher, GpuLostWatcher, GpuThrottleWatcher
from trainvitals.detect.fleet.optimizer import (
    LearningRateWatcher,
    LossScaleWatcher,
    WeightDecayWatcher,
)
from trainvitals.detect.fleet.ranks import DataBoundWatcher, RankLossWatcher, ReductionWatcher
from trainvitals.detect.fleet.speed import ThroughputWatcher
from trainvitals.detect.fleet.straggler import StragglerWatcher
from trainvitals.detect.fleet.weights import WeightNormWatcher

SECOND = 1_000_000_000
GIB = 1 << 30
RANKS = 8
LAYERS = tuple(f"h.{i}" for i in range(12))

Row = MergedStep | NodeSample


def cosine(step: int, *, steps: int = 3000, warm_up: int = 100, peak: float = 1e-3) -> float:
    if step < warm_up:
        return peak * (step + 1) / warm_up
    part = min(1.0, (step - warm_up) / (steps - warm_up))
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * part)))


def healthy_step(rng: random.Random, step: int, *, attempt: int = 1, ranks: int = RANKS) -> Any:
    """One step of a healthy run with every column: noise, evaluations, the odd heavy batch."""
    rate = cosine(step)
    usual = 0.5 * rng.lognormvariate(0.0, 0.03) * (1.0 + 3.0 * (rng.random() < 0.005))
    seconds = usual + (4.0 if step % 100 == 0 else 0.0) + (2.0 if step % 250 == 1 else 0.0)
    losses = [3.0 * rng.lognormvariate(0.0, 0.06) for _ in range(ranks)]
    if rng.random() < 0.02:
        losses[rng.randrange(ranks)] *= 1.98
    heavy = rng.choice([1.0] * 40 + [10.0])
    layers = {
        name: {
            "grad_norm": heavy * (1 + i) * rng.lognormvariate(0.0, 0.4) / (1 + step / 500),
            "weight_norm": 30.0 + step / 300,
            "update_norm": 30.0 * rate * rng.lognormvariate(0.0, 0.15),
            "activation_rms": rng.lognormvariate(0.0, 0.05) * (1 + step / 2000),
            "activation_max": 20 * rng.lognormvariate(0.0, 0.4) * (1 + step / 200),
        }
        for i, name in enumerate(LAYERS)
    }
    return MergedStep(
        step=step,
        attempt=attempt,
        time_unix_ns=step * SECOND,
        run={
            "loss": sum(losses) / ranks,
            "learning_rate": rate,
            "loss_scale": 65536.0,
            "weight_decay": 0.1,
            "weight_norm": 100.0 + step / 100 if step % 10 == 0 else None,
            "verdict": 16 if step % 1900 == 77 else 0,
            "tokens_per_second": 1e6 / seconds,
        },
        ranks={
            "rank_loss": losses,
            "reduction_error": [abs(rng.gauss(0.0, 0.3)) for _ in range(ranks)],
            "step_duration_seconds": [seconds] * ranks,
            "data_wait_seconds": [
                min(seconds, abs(rng.gauss(0.004, 0.003)) + 2.0 * (step % 400 == 0))
                for _ in range(ranks)
            ],
            "before_forward_seconds": [0.01] * ranks,
            "forward_seconds": [0.1 * usual * rng.uniform(0.98, 1.02)] * ranks,
            "backward_seconds": [0.3 * usual] * ranks,
            "gradient_wait_seconds": [0.02] * ranks,
            "after_backward_seconds": [0.001] * ranks,
            "optimizer_seconds": [0.01] * ranks,
            "checkpoint_seconds": [None] * ranks,
            "monitor_seconds": [0.001] * ranks,
            "communication_seconds": [0.01 + rng.random() * 0.01 for _ in range(ranks)],
            "memory_allocated_bytes": [(40 + rng.random()) * GIB for _ in range(ranks)],
            "memory_peak_bytes": [60.0 * GIB] * ranks,
        },
        layers=layers if step % 10 == 0 else {},
    )


def healthy_run(
    steps: int, *, seed: int = 1, first: int = 0, attempt: int = 1, ranks: int = RANKS
) -> Iterator[MergedStep]:
    rng = random.Random(seed)
    for step in range(first, first + steps):
        yield healthy_step(rng, step, attempt=attempt, ranks=ranks)


def with_run(row: MergedStep, **columns: Any) -> MergedStep:
    return replace(row, run={**row.run, **columns})


def with_rank(row: MergedStep, column: str, rank: int, change: Callable[[float], float]) -> Any:
    values: list[Any] = list(row.ranks[column])
    values[rank] = change(values[rank])
    return replace(row, ranks={**row.ranks, column: values})


def with_layer(row: MergedStep, layer: str, column: str, factor: float) -> MergedStep:
    if layer not in row.layers:
        return row
    columns = dict(row.layers[layer])
    columns[column] *= factor
    return replace(row, layers={**row.layers, layer: columns})


def poisoned(row: Any, value: float | None) -> Any:
    """The same row with every number replaced; a layer's columns cannot be None."""

    def all_of(columns: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(columns, value)

    if isinstance(row, NodeSample):
        return replace(row, gpus={uuid: {**c, **all_of(c), "utilization_ratio": 1.0}
                                  for uuid, c in row.gpus.items()})  # fmt: skip
    layers = {} if value is None else {n: all_of(c) for n, c in row.layers.items()}
    ranks = {name: [value] * len(values) for name, values in row.ranks.items()}
    return replace(row, run=all_of(row.run), ranks=ranks, layers=layers)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault that sets in at a step, and how long it may take to be told."""

    make: Callable[[], Any]
    cause: str
    within: int
    change: Callable[[Any], Any]
    onset: int = 1200
    length: int = 400
    nodes: bool = False

    def rows(self) -> Iterator[Any]:
        source = healthy_samples() if self.nodes else healthy_run(self.onset + self.length)
        for row in source:
            if row.step < self.onset + self.length:
                yield self.change(row) if row.step >= self.onset else row


def healthy_samples(samples: int = 1600, gpus: int = 4) -> Iterator[NodeSample]:
    rng = random.Random(2)
    for i in range(samples):
        columns = {
            "temperature_celsius": rng.gauss(62, 2),
            "power_watts": rng.gauss(650, 30),
            "sm_clock_hertz": rng.gauss(1.75e9, 3e7),
            "throttle_reasons": rng.choice([0, 0, 4, 1]),
            "memory_total_bytes": 80.0 * GIB,
            "ecc_uncorrected_errors": 2,
            "ecc_corrected_errors": 5 + i // 100,
            "last_xid": 0,
        }
        yield NodeSample(
            node="node-7",
            time_unix_ns=i * 2 * SECOND,
            step=i,
            gpus={f"GPU-{n}": columns for n in range(gpus)},
        )


def with_gpu(sample: NodeSample, **columns: Any) -> NodeSample:
    return replace(sample, gpus={**sample.gpus, "GPU-2": {**sample.gpus["GPU-2"], **columns}})


def memory_watcher() -> MemoryCreepWatcher:
    watcher = MemoryCreepWatcher()
    watcher.learn_total(80 * GIB)
    return watcher


def slower(row: MergedStep, factor: float) -> MergedStep:
    rate = row.run["tokens_per_second"]
    assert rate is not None
    seconds = [float(s or 0.0) * factor for s in row.ranks["step_duration_seconds"]]
    ranks = {**row.ranks, "step_duration_seconds": seconds}
    return replace(row, run={**row.run, "tokens_per_second": rate / factor}, ranks=ranks)


def waits_at_exchange(row: MergedStep, slow: int) -> MergedStep:
    seconds = [0.02 if rank == slow else 0.12 for rank in range(RANKS)]
    return replace(row, ranks={**row.ranks, "communication_seconds": seconds})


def slow_by_data(row: MergedStep, slow: int) -> MergedStep:
    """One rank has its batch late, and the others wait for its gradients."""
    waits = [0.02 if rank == slow else 0.22 for rank in range(RANKS)]
    slowed = with_rank(row, "data_wait_seconds", slow, lambda s: s + 0.2)
    return replace(row, ranks={**slowed.ranks, "gradient_wait_seconds": waits})


def waiting_for_data(row: MergedStep) -> MergedStep:
    """A loader with four workers that is too slow: every fourth step waits for all of them."""
    seconds = 1.2 if row.step % 4 == 0 else 0.5
    ranks = {
        **row.ranks,
        "step_duration_seconds": [seconds] * RANKS,
        "data_wait_seconds": [seconds - 0.5] * RANKS,
    }
    return replace(row, ranks=ranks)


def overflowing(row: MergedStep, every: int) -> MergedStep:
    return with_run(row, verdict=16 if row.step % every == 0 else 0)


GONE_WRONG: dict[str, Case] = {
    "the rate jumps to ten times": Case(
        make=LearningRateWatcher,
        cause="lr_jump",
        within=0,
        change=lambda row: with_run(row, learning_rate=10 * row.run["learning_rate"]),
    ),
    "the rate jumps to three times": Case(
        make=FleetDetectors,
        cause="lr_jump",
        within=0,
        change=lambda row: with_run(row, learning_rate=3 * row.run["learning_rate"]),
    ),
    "the rate climbs": Case(
        make=FleetDetectors,
        cause="lr_climb",
        within=250,
        change=lambda row: with_run(
            row, learning_rate=1.01 ** (row.step - 1199) * row.run["learning_rate"]
        ),
    ),
    "the rate is stuck at zero": Case(
        make=LearningRateWatcher,
        cause="lr_zero",
        within=30,
        change=lambda row: with_run(row, learning_rate=0.0),
    ),
    "the weight decay jumps": Case(
        make=WeightDecayWatcher,
        cause="weight_decay",
        within=0,
        change=lambda row: with_run(row, weight_decay=10 * row.run["weight_decay"]),
    ),
    "the scale collapses": Case(
        make=LossScaleWatcher,
        cause="loss_scale_collapse",
        within=5,
        change=lambda row: with_run(
            row,
            verdict=16 if row.step < 1212 else 0,
            loss_scale=65536.0 * 0.5 ** min(12, row.step - 1199),
        ),
    ),
    "the scale falls below one": Case(
        make=LossScaleWatcher,
        cause="loss_scale_collapse",
        within=0,
        change=lambda row: with_run(row, loss_scale=0.5),
    ),
    "every third step overflows": Case(
        make=LossScaleWatcher,
        cause="overflow_rate",
        within=70,
        change=lambda row: overflowing(row, 3),
    ),
    "weight decay eats the weights": Case(
        make=WeightNormWatcher,
        cause="weight_norm",
        within=60,
        change=lambda row: with_run(
            row,
            weight_norm=None
            if row.run["weight_norm"] is None
            else row.run["weight_norm"] * 0.995 ** (row.step - 1199),
        ),
    ),
    "one layer's gradients explode": Case(
        make=LayerGradientWatcher,
        cause="layer_gradient",
        within=20,
        length=200,
        change=lambda row: with_layer(row, "h.4", "grad_norm", 100.0),
    ),
    "one layer learns no more": Case(
        make=LayerGradientWatcher,
        cause="layer_gradient",
        within=30,
        length=200,
        change=lambda row: with_layer(row, "h.4", "grad_norm", 0.0),
    ),
    "one layer's updates grow": Case(
        make=UpdateRatioWatcher,
        cause="update_ratio",
        within=30,
        length=200,
        change=lambda row: with_layer(row, "h.4", "update_norm", 12.0),
    ),
    "a module's output grows": Case(
        make=ActivationWatcher,
        cause="activation",
        within=30,
        change=lambda row: with_layer(row, "h.4", "activation_rms", 25.0),
    ),
    "a module's output collapses": Case(
        make=ActivationWatcher,
        cause="activation_collapse",
        within=30,
        change=lambda row: with_layer(row, "h.4", "activation_rms", 0.04),
    ),
    "throughput falls": Case(
        make=ThroughputWatcher,
        cause="throughput",
        within=70,
        change=lambda row: slower(row, 1.25),
    ),
    "throughput falls, all watch": Case(
        make=FleetDetectors,
        cause="throughput",
        within=70,
        change=lambda row: slower(row, 1.25),
    ),
    "data come too slowly": Case(
        make=DataBoundWatcher,
        cause="data_bound",
        within=100,
        change=waiting_for_data,
    ),
    "the loader stalls": Case(
        make=DataBoundWatcher,
        cause="loader_stall",
        within=2,
        length=3,
        change=lambda row: with_rank(slower(row, 8.0), "data_wait_seconds", 3, lambda s: s + 3.0),
    ),
    "a rank's data come too slowly": Case(
        make=DataBoundWatcher,
        cause="data_bound_rank",
        within=100,
        change=lambda row: with_rank(row, "data_wait_seconds", 3, lambda s: s + 0.2),
    ),
    "a rank is slow": Case(
        make=StragglerWatcher,
        cause="straggler_link",
        within=25,
        change=lambda row: waits_at_exchange(row, 5),
    ),
    "a rank is slow by its data": Case(
        make=StragglerWatcher,
        cause="straggler_data",
        within=25,
        change=lambda row: slow_by_data(row, 3),
    ),
    "memory leaks": Case(
        make=memory_watcher,
        cause="memory_creep",
        within=1300,
        length=2000,
        change=lambda row: with_rank(
            row, "memory_allocated_bytes", 1, lambda b: b + 0.005 * GIB * (row.step - 1200)
        ),
    ),
    "a rank's loss is off": Case(
        make=RankLossWatcher,
        cause="rank_loss",
        within=120,
        change=lambda row: with_rank(row, "rank_loss", 6, lambda loss: 1.3 * loss),
    ),
    "a link changes gradients": Case(
        make=ReductionWatcher,
        cause="reduction",
        within=1,
        change=lambda row: with_rank(row, "reduction_error", 6, lambda error: error + 1e3),
    ),
    "a GPU is too hot": Case(
        make=GpuThrottleWatcher,
        cause="gpu_thermal",
        within=3,
        nodes=True,
        change=lambda row: with_gpu(row, throttle_reasons=64 | 4, temperature_celsius=91.0),
    ),
    "a GPU lacks power": Case(
        make=GpuThrottleWatcher,
        cause="gpu_power_brake",
        within=3,
        nodes=True,
        change=lambda row: with_gpu(row, throttle_reasons=128 | 8),
    ),
    "a GPU's power cap hurts": Case(
        make=GpuThrottleWatcher,
        cause="gpu_power_cap",
        within=10,
        nodes=True,
        change=lambda row: with_gpu(row, throttle_reasons=4, sm_clock_hertz=0.9e9),
    ),
    "a GPU's memory fails": Case(
        make=GpuErrorWatcher,
        cause="ecc_uncorrected",
        within=0,
        nodes=True,
        change=lambda row: with_gpu(row, ecc_uncorrected_errors=3),
    ),
    "a GPU's memory is corrected too often": Case(
        make=GpuErrorWatcher,
        cause="ecc_corrected",
        within=200,
        nodes=True,
        change=lambda row: with_gpu(row, ecc_corrected_errors=17 + (row.step - 1200)),
    ),
    "a GPU reports a fatal Xid": Case(
        make=GpuErrorWatcher,
        cause="xid_fatal",
        within=0,
        nodes=True,
        change=lambda row: with_gpu(row, last_xid=79),
    ),
    "a GPU falls off the bus": Case(
        make=GpuLostWatcher,
        cause="gpu_lost",
        within=3,
        nodes=True,
        change=lambda row: replace(
            row, gpus={uuid: c for uuid, c in row.gpus.items() if uuid != "GPU-2"}
        ),
    ),
}
