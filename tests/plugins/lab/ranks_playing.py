"""Two ranks that keep bad steps: one rank's own loss, and a weight unlike the other's."""

import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.plugins.lab.bad_steps import ROWS, build, dataset
from tests.support.watched import run_directory
from trainer_hooks.recovery import replicas

EVERY, NAN_STEP, FLIP_STEP, STEPS = 5, 4, 12, 30
FLIPPED = 7


def main(rank, folder):
    """Train with a NaN in rank 1's batch, and a weight of rank 1 that changes later."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    replicas.ROUND = EVERY
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    inner, _ = build()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = dataset()
    batches = [
        {"x": torch.stack([each["x"] for each in samples[i * ROWS : (i + 1) * ROWS]])}
        for i in range(len(samples) // ROWS)
    ]
    batches = [{"x": each["x"] + 0.01 * rank} for each in (batches * 2)[:STEPS]]
    if rank == 1:
        batches[NAN_STEP]["x"][3, 0] = math.nan
    monitor = trainer_hooks.watch(model, optimizer)
    with monitor:
        for batch in monitor.batches(batches, keep_batches=True):
            if rank == 1 and monitor.step_index == FLIP_STEP:
                inner.last.weight.data.view(-1)[FLIPPED] += 0.25
            loss = model(batch["x"]).square().mean()
            loss.backward()
            monitor.step(loss, max_norm=1.0)
    path = str(run_directory(monitor))
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"run_dir": path, "faults": monitor.swallowed_errors})
    )
    dist.destroy_process_group()
