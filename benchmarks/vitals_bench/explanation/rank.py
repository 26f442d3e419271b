"""One rank of a training with faults; ``jobs`` starts several as processes, one in process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainer_hooks import SignalSettings, watch
from trainvitals.errors import TrainingHalted
from vitals_bench.attribution.trainings import (
    CLIP,
    WEIGHT_DECAY,
    Batch,
    Fault,
    Injector,
    Training,
    make,
)
from vitals_bench.explanation.kinds import STEPS, Job, plan

MODEL = "cnn"
SIGNALS = SignalSettings(every=1, update_norm=True, outside_writes=True, activations=("*",))
_SLOW_SECONDS = 0.05
"""Added to each step of a slow rank."""
_PACE_SECONDS = 0.004
"""Least time of a step, so that the noise of a busy machine is not all of it."""
_LOOK = 20
"""Steps between two calls of ``on_look``."""


class CrashError(Exception):
    """The fault `crash`."""


class _Faults:
    """Faults of one rank, each with its injector; two may be active at once."""

    def __init__(
        self, faults: list[Fault], training: Training, optimizer: torch.optim.AdamW, job: Job
    ) -> None:
        self._rank, self._training = dist.get_rank() if job.ranks > 1 else 0, training
        self._faults = faults
        self._injectors: list[Injector] = []
        for fault in faults:
            injector = Injector(training, optimizer, self._rank, job.seed)
            injector.fault = fault
            self._injectors.append(injector)
        self._step = -1

    def begin(self, step: int) -> None:
        self._step = step
        for injector in self._injectors:
            injector.begin(step)
        if any(injector.stalls for injector in self._injectors):
            time.sleep(0.5)

    def batch(self, batch: Batch) -> Batch:
        for injector in self._injectors:
            batch = injector.batch(batch, self._step)
        return batch

    def before_forward(self) -> None:
        time.sleep(_PACE_SECONDS)  # not in the loader, which would make the run data-bound
        for fault, injector in zip(self._faults, self._injectors, strict=True):
            injector.before_forward()
            if fault.name == "nan_weight" and self._step == fault.step:
                self._spoil(fault)
            if self._step < fault.step or fault.rank != self._rank:
                continue
            if fault.name == "slow_rank":
                time.sleep(_SLOW_SECONDS)
            if fault.name == "crash":
                raise CrashError(f"the tokenizer found no file for shard {fault.draw % 97}")

    @torch.no_grad()
    def _spoil(self, fault: Fault) -> None:
        module = dict(self._training.model.named_modules())[fault.layer]
        flat = next(module.parameters()).view(-1)
        flat[fault.draw % flat.numel()] = torch.nan

    def scaled(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        backward = loss
        for injector in self._injectors:
            loss, backward = injector.scaled(loss)
        return loss, backward

    def after_backward(self) -> None:
        for injector in self._injectors:
            injector.after_backward()


def train(job: Job, *, steps: int = STEPS, on_look: Callable[[], object] = lambda: None) -> str:
    """Train with the library in the loop; return the run's id.

    Args:
        job: the training.
        steps: its length.
        on_look: called every few steps.
    """
    training = make(MODEL, job.seed)
    rank = dist.get_rank() if job.ranks > 1 else 0
    model: nn.Module = training.model
    model = DistributedDataParallel(model) if job.ranks > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.rate, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = CosineAnnealingLR(optimizer, T_max=2 * STEPS)
    faults = _Faults(plan(job, training.layers), training, optimizer, job)

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            faults.begin(step)
            yield faults.batch(training.batch_of(step, rank, False))

    run_id = ""
    signals = SIGNALS if job.has_signals else None
    watched = watch(model, optimizer, schedule, signals=signals)
    with suppress(CrashError, TrainingHalted), watched as monitor:
        run_id = monitor.run_id
        for step, (x, y) in enumerate(monitor.batches(batches())):
            faults.before_forward()
            loss = training.losses(model(x), y).mean()
            loss, backward = faults.scaled(loss)
            backward.backward()
            faults.after_backward()
            monitor.step(loss, max_norm=CLIP)
            if step % _LOOK == 0:
                on_look()
    return run_id


def main(body: str) -> None:
    """Be the rank that the environment names."""
    torch.set_num_threads(1)
    job, steps = msgspec.json.decode(body, type=tuple[Job, int])
    dist.init_process_group("gloo")
    run_id = train(job, steps=steps)
    Path(os.environ["EXPLANATION_OUT"]).write_text(run_id)
    if job.kind != "crash":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
