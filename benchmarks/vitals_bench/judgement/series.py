"""Makes labelled logs of trainings whose loss rises for good reasons: real ones, on the CPU.

They are reinforcement learning, GANs, curricula, and AdamW with so large a rate that it spikes by
itself.

    python -m vitals_bench.judgement.series FOLDER [SEEDS]

writes ``labels.json`` and ``series/NAME.csv`` for the benchmark `detect --traces FOLDER`; the
benchmark `detect` also makes them itself. Half of the logs are healthy; in the others a fault
happens at a known step. A fault that is hardly visible in loss and norm, compared with the same
training without it, is labeled minor: it need not be reported.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from vitals_bench.judgement.faults import Fault
from vitals_bench.judgement.games import GanTask, PpoTask, ReinforceTask
from vitals_bench.judgement.patterns import PatternsTask
from vitals_bench.judgement.regression import RegressionTask
from vitals_bench.judgement.run import Training, clip_exactly
from vitals_bench.judgement.tasks import Task
from vitals_bench.judgement.text import TextTask
from vitals_bench.judgement.worlds import World

BEGIN, REFERENCE, NEAR, SHORT = 400, 64, 20, 30
"""Record a fault begins with; records before it that it is measured by; records in which it is to
show; records within which a spike is over."""
SEEN_LOSS, SEEN_NORM, USUAL = 8.0, 10.0, 3.0
"""A fault is seen where the loss is so many robust sigmas above the median before, or the norm so
many times it, and either higher than ever without the fault; it lasts while the loss is above the
last of these."""
SETTLED = 100
"""Records of the healthy log that are left out of how high it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A training, and what its user would declare about it."""

    family: str
    make: Callable[..., Task]
    changes: tuple[int, ...] = ()
    """Steps of planned changes: ``monitor.expect`` would announce them."""


KINDS: Mapping[str, Kind] = {
    "ppo": Kind(family="RL", make=partial(PpoTask, steps=800)),
    "reinforce": Kind(family="RL", make=partial(ReinforceTask, steps=600)),
    "reinforce-tail": Kind(
        family="RL, heavy tails", make=partial(ReinforceTask, steps=600, tail=True)
    ),
    "gan": Kind(family="GAN", make=partial(GanTask, steps=900)),
    "gan-tail": Kind(family="GAN", make=partial(GanTask, steps=900, tail=0.6)),
    "curriculum": Kind(
        family="curriculum",
        make=partial(TextTask, steps=800, curriculum=250),
        changes=(250,),
    ),
    "length": Kind(
        family="curriculum", make=partial(TextTask, steps=800, short=250), changes=(250,)
    ),
    "blocks": Kind(
        family="curriculum",
        make=partial(TextTask, steps=1_000, blocks=200),
        changes=(200, 400, 600, 800),
    ),
    "spikes": Kind(
        family="AdamW at 3e-2", make=partial(RegressionTask, steps=1_500, lr=3e-2, fixed=4)
    ),
    "spikes-new": Kind(family="AdamW at 3e-2", make=partial(PatternsTask, steps=800, lr=3e-2)),
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
    kind: Kind
    task: Task
    points: Sequence[Point]
    fault: str = ""


def make_log(name: str, fault: str, seed: int, *, steps: int | None = None) -> Log:
    """Train once, with a fault or without, clipped to a norm of 1; log every step.

    Args:
        name: one of ``KINDS``.
        fault: one of ``FAULTS``; empty for none.
        seed: what the training is drawn from.
        steps: ends it sooner.
    """
    kind = KINDS[name]
    make = kind.make if steps is None else partial(kind.make, steps=steps)
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
    return Log(name=full, kind=kind, task=training.task, points=points, fault=fault)


def make_logs(
    seeds: int, *, names: Sequence[str] = tuple(KINDS), steps: int | None = None
) -> Iterator[tuple[Log, dict[str, Any]]]:
    """Yield each training twice with its label: healthy, and with the seed's fault."""
    for seed in range(seeds):
        fault = list(FAULTS)[seed % len(FAULTS)]
        for name in names:
            healthy = make_log(name, "", seed, steps=steps)
            yield healthy, label_of(healthy, healthy.points)
            damaged = make_log(name, fault, seed, steps=steps)
            yield damaged, label_of(damaged, healthy.points)


def label_of(log: Log, healthy: Sequence[Point]) -> dict[str, Any]:
    """Return what a log's label says; the fault's step is known, its end is read off the loss.

    Args:
        log: the log.
        healthy: the records of the same training without a fault.
    """
    label = {"cls": "clean", "split": "trained", "points": len(log.points), "events": []}
    label["loss_kind"], label["changes"] = log.task.loss_kind, list(log.kind.changes)
    label["family"] = log.kind.family
    if not log.fault:
        return label
    end = BEGIN + _duration(log.points)
    severity = "major" if _is_seen(log.points, healthy) else "minor"
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


def _is_seen(points: Sequence[Point], healthy: Sequence[Point]) -> bool:
    median, sigma, norm = _before(points)
    least_loss = max(median + SEEN_LOSS * sigma, *(p.loss for p in healthy[SETTLED:]))
    least_norm = max(SEEN_NORM * norm, *(p.grad_norm for p in healthy[SETTLED:]))
    return any(
        not math.isfinite(point.loss) or point.loss > least_loss or point.grad_norm > least_norm
        for point in points[BEGIN : BEGIN + NEAR]
    )


def _duration(points: Sequence[Point]) -> int:
    """Return the records after the fault's first until the median of nine losses is as before."""
    median, sigma, _ = _before(points)
    for i in range(BEGIN + 4, len(points) - 4):
        if statistics.median(p.loss for p in points[i - 4 : i + 5]) <= median + USUAL * sigma:
            return i - BEGIN
    return len(points) - 1 - BEGIN


def write_log(log: Log, path: Path) -> None:
    """Write the records of a log as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(log.points)


def write_logs(
    folder: Path, seeds: int, *, names: Sequence[str] = tuple(KINDS), steps: int | None = None
) -> None:
    """Train, and write labels and logs."""
    (folder / "series").mkdir(parents=True, exist_ok=True)
    labels = {}
    for log, label in make_logs(seeds, names=names, steps=steps):
        labels[log.name] = label
        write_log(log, folder / "series" / f"{log.name}.csv")
    (folder / "labels.json").write_bytes(msgspec.json.format(msgspec.json.encode(labels)))


def main(arguments: Sequence[str]) -> None:
    """Write the logs of this many seeds (3) into a directory."""
    torch.set_num_threads(1)
    write_logs(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 3)


if __name__ == "__main__":
    main(sys.argv[1:])
