"""One rank of a training whose rows are attributed: started by ``runs``, four of them over gloo.

The library is used as in any training loop. A fault starts in a copy of the run: parameters,
optimizer and schedule are restored to a few steps before it, and a new monitor continues from
there, as after a resume, and appends to the rows of the run before.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from trainer_hooks import SignalSettings, watch
from trainvitals.io.journal_reader import JournalReader
from trainvitals.wire import Batch as Rows
from vitals_bench.attribution.trainings import (
    STEPS,
    WEIGHT_DECAY,
    Batch,
    Injector,
    Training,
    make,
    plan,
)

SIGNALS = SignalSettings(
    every=1, update_norm=True, outside_writes=True, noise_scale=True, activations=("*",)
)
LEAD = 3
"""Steps before a fault with which its copy begins: the first ones have no update behind them."""
HARD, RESTART, TASK = 330, 450, 580
"""Steps of the healthy jumps: a hard batch, a warm restart, another task."""
JUMP_STEPS = 100
"""Steps for which the loop announces the other task."""
_LOOK = 25
"""Steps after which a rank's journal is read: it is bounded."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What four ranks train."""

    model: str
    seed: int
    faults: tuple[str, ...] = ()
    """Without any it is one healthy run."""
    jumps: bool = False
    steps: int = STEPS
    """Of a run without faults."""
    between: tuple[int, int] = (270, 430)
    """Steps in which faults strike."""


class Part(NamedTuple):
    """Rows of one stretch of steps on one rank."""

    fault: Any
    first_step: int
    batches: list[Rows]


class _Loop:
    def __init__(self, work: Work, rank: int) -> None:
        self.work, self.rank = work, rank
        self.training: Training = make(work.model, work.seed)
        self.model = DistributedDataParallel(self.training.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.training.rate, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.schedule = LambdaLR(self.optimizer, self._rate)
        self.injector = Injector(self.training, self.optimizer, rank, work.seed)

    def _rate(self, step: int) -> float:
        since = step - RESTART if self.work.jumps and step >= RESTART else step
        warm = min(1.0, (step + 1) / 30)
        return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * since / (2 * STEPS))))

    def state(self) -> Any:
        parts = (self.training.model, self.optimizer, self.schedule)
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def load(self, state: Any) -> None:
        parts: tuple[Any, ...] = (self.training.model, self.optimizer, self.schedule)
        for part, saved in zip(parts, state, strict=True):
            part.load_state_dict(copy.deepcopy(saved))

    def _batches(self, first: int) -> Iterator[Batch]:
        step = first
        while True:
            draws = np.random.default_rng([self.work.seed, step, self.rank, 3])
            wait = 0.002 * math.exp(0.3 * draws.standard_normal())
            wait *= 5 if draws.random() < 0.01 else 1
            self.injector.begin(step)
            time.sleep(0.5 if self.injector.stalls else wait)
            is_other = self.work.jumps and step >= TASK
            batch = self.training.batch_of(step, self.rank, is_other)
            if self.work.jumps and step == HARD:
                batch = self._hardest(step)
            yield self.injector.batch(batch, step)
            step += 1

    @torch.no_grad()
    def _hardest(self, step: int) -> Batch:
        """Return the samples of four batches on which the model is worst."""
        drawn = [self.training.batch_of(step, self.rank + 10 * i, False) for i in range(4)]
        x, y = (torch.cat(part) for part in zip(*drawn, strict=True))
        model = self.training.model.eval()
        worst = self.training.losses(model(x), y).topk(self.training.size).indices
        model.train()
        return x[worst], y[worst]

    def train(self, first: int, last: int, keep: set[int], states: dict[int, Any]) -> list[Rows]:
        """Train from one step to before another; return the rows that this rank wrote."""
        folder = Path(os.environ["VITALS_SHM"]) / f"{self.work.seed}-{first}-{time.time_ns()}"
        os.environ["VITALS_SHM"] = str(folder)
        folder.mkdir(parents=True, mode=0o700)
        rows: list[Rows] = []
        readers: dict[Path, JournalReader] = {}
        try:
            with watch(self.model, self.optimizer, self.schedule, signals=SIGNALS) as monitor:
                feed = iter(monitor.batches(self._batches(first)))
                for step in range(first, last):
                    if step in keep:
                        states[step] = self.state()
                    x, y = next(feed)
                    self.injector.before_forward()
                    loss = self.training.losses(self.model(x), y).mean()
                    loss, backward = self.injector.scaled(loss)
                    backward.backward()
                    self.injector.after_backward()
                    monitor.step(loss, max_norm=self.injector.clip)
                    if (step - first) % _LOOK == _LOOK - 1:
                        rows += _read(folder, readers)
            rows += _read(folder, readers)
        finally:
            os.environ["VITALS_SHM"] = str(folder.parent)
        return rows


def _read(folder: Path, readers: dict[Path, JournalReader]) -> list[Rows]:
    rows: list[Rows] = []
    for journal in {path.parent for path in folder.rglob("*.seg")}:
        reader = readers.setdefault(journal, JournalReader(journal))
        for batch in reader.read(max_rows=100_000):
            rows.append(batch)
            reader.release(batch.header.stream, batch.header.last_seq)
    return rows


def main(work: Work, rank: int, folder: Path) -> None:
    """Train the run, then each fault in a copy of it; write the rows down."""
    torch.set_num_threads(1)
    place = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=place, rank=rank, world_size=4, timeout=timedelta(minutes=10)
    )
    own = folder / f"rank{rank}"
    own.mkdir()
    os.environ |= {"VITALS_SHM": str(own), "VITALS_DIR": str(own / "runs")}
    loop = _Loop(work, rank)
    training = loop.training
    faults = plan(work.seed, work.faults, training, work.between)
    states: dict[int, Any] = {}
    last = max((fault.step for fault in faults), default=work.steps)
    starts = {fault.step - LEAD for fault in faults}
    parts = [Part(None, 0, loop.train(0, last, starts, states))]
    for fault in faults:
        loop.injector.fault = fault
        loop.load(states[fault.step - LEAD])
        first = fault.step - LEAD
        parts.append(Part(fault, first, loop.train(first, fault.asked_at + 2, set(), {})))
    (folder / f"rows{rank}.pkl").write_bytes(pickle.dumps(parts))
    dist.barrier()
    dist.destroy_process_group()


def run() -> None:
    """Be the rank that the command line says."""
    main(msgspec.json.decode(sys.argv[1], type=Work), int(sys.argv[2]), Path(sys.argv[3]))
