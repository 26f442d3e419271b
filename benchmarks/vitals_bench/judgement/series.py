"""Makes labelled logs of RL, GAN and curriculum trainings: real ones, small, on the CPU.

    python -m vitals_bench.judgement.series FOLDER [SEEDS]

writes ``labels.json`` and ``series/NAME.csv`` as `vitals bench detect --traces FOLDER` reads them.
Half of the logs are healthy; in the others a fault happens at a step that is known. A fault that
can hardly be seen in loss and norm is labelled minor: it need not be told.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from vitals_bench.judgement.faults import Fault
from vitals_bench.judgement.games import GanTask, PpoTask, ReinforceTask
from vitals_bench.judgement.run import Training, clip_exactly
from vitals_bench.judgement.tasks import Task
from vitals_bench.judgement.text import TextTask
from vitals_bench.judgement.worlds import World

BEGIN, REFERENCE, NEAR, SHORT = 400, 64, 20, 30
"""Record a fault begins with; records before it that it is measured by; records in which it is to
show; records within which a spike is over."""
SEEN_LOSS, SEEN_NORM, USUAL = 8.0, 10.0, 3.0
"""A fault is seen where the loss is so many robust sigmas above the median before, or the norm so
many times it; it lasts while the loss is above the last of these."""
TASKS: Mapping[str, Callable[..., Task]] = {
    "ppo": partial(PpoTask, steps=800),
    "reinforce": partial(ReinforceTask, steps=600),
    "reinforce-tail": partial(ReinforceTask, steps=600, tail=True),
    "gan": partial(GanTask, steps=900),
    "gan-tail": partial(GanTask, steps=900, tail=0.6),
    "curriculum": partial(TextTask, steps=800, curriculum=250),
    "length": partial(TextTask, steps=800, short=250),
    "blocks": partial(TextTask, steps=1_000, blocks=200),
}
FAULTS: Mapping[str, Fault] = {
    "rate": Fault(kind="rate", begin=BEGIN, factor=30.0, steps=20),
    "moments": Fault(kind="moments", begin=BEGIN),
    "layer": Fault(kind="layer", begin=BEGIN, factor=10.0),
}


class Point(NamedTuple):
    """One record of a log."""

    step: int
    loss: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A training as it was logged."""

    name: str
    task: Task
    points: Sequence[Point]
    fault: str = ""


def make_log(name: str, fault: str, seed: int) -> Log:
    """Train once, with a fault or without, clipped to a norm of 1; log every step."""
    make = TASKS[name]
    world = World(
        name=name, label="damaged", family=name, make=make, base=name, fault=FAULTS.get(fault)
    )
    training = Training(world, seed, 1.0)
    parameters = list(training.model.parameters())
    points = []
    for batch in training.loader():
        loss = training.backward(batch).item()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients, 2.0)).norm().item()
        rate = training.optimizer.param_groups[0]["lr"]
        points.append(Point(int(batch[0]), loss, norm, rate))
        clip_exactly(parameters, 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
    full = "_".join(part for part in (name, fault, f"s{seed}") if part)
    return Log(name=full, task=training.task, points=points, fault=fault)


def label_of(log: Log) -> dict[str, Any]:
    """Return what a log's label says; the fault's step is known, its end is read off the loss."""
    label = {"cls": "clean", "split": "trained", "points": len(log.points), "events": []}
    label["loss_kind"] = log.task.loss_kind
    if not log.fault:
        return label
    end, severity = BEGIN + _duration(log.points), "major" if _is_seen(log.points) else "minor"
    event = {
        "onset_idx": BEGIN,
        "end_idx": end,
        "kind": "spike" if end - BEGIN < SHORT else "divergence",
        "severity": severity,
        "reason": f"{log.fault} at step {BEGIN}, on purpose",
    }
    cls = "anomalous" if severity == "major" else "clean_with_minor"
    return label | {"cls": cls, "events": [event]}


def _before(points: Sequence[Point]) -> tuple[float, float, float]:
    """Return median and robust sigma of the loss before the fault, and the norm's median."""
    losses = [point.loss for point in points[BEGIN - REFERENCE : BEGIN]]
    median = statistics.median(losses)
    sigma = 1.4826 * statistics.median(abs(loss - median) for loss in losses)
    norms = (point.grad_norm for point in points[BEGIN - REFERENCE : BEGIN])
    return median, sigma, statistics.median(norms)


def _is_seen(points: Sequence[Point]) -> bool:
    median, sigma, norm = _before(points)
    return any(
        not math.isfinite(point.loss)
        or point.loss > median + SEEN_LOSS * sigma
        or point.grad_norm > SEEN_NORM * norm
        for point in points[BEGIN : BEGIN + NEAR]
    )


def _duration(points: Sequence[Point]) -> int:
    """Return the records after the fault's first until the median of nine losses is as before."""
    median, sigma, _ = _before(points)
    for i in range(BEGIN + 4, len(points) - 4):
        if statistics.median(p.loss for p in points[i - 4 : i + 5]) <= median + USUAL * sigma:
            return i - BEGIN
    return len(points) - 1 - BEGIN


def write_logs(folder: Path, seeds: int) -> None:
    """Train, and write labels and logs."""
    (folder / "series").mkdir(parents=True, exist_ok=True)
    labels = {}
    for seed in range(seeds):
        for name in TASKS:
            for fault in ("", list(FAULTS)[seed % len(FAULTS)]):
                log = make_log(name, fault, seed)
                labels[log.name] = label_of(log)
                with (folder / "series" / f"{log.name}.csv").open("w", newline="") as file:
                    writer = csv.writer(file)
                    writer.writerow(Point._fields)
                    writer.writerows(log.points)
    (folder / "labels.json").write_bytes(msgspec.json.format(msgspec.json.encode(labels)))


def main(arguments: Sequence[str]) -> None:
    """Write the logs of so many seeds (3) into a folder."""
    torch.set_num_threads(1)
    write_logs(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 3)


if __name__ == "__main__":
    main(sys.argv[1:])
