"""Training script of the demo; run by torchrun, one process per rank, DDP over gloo or NCCL.

    torchrun --nproc-per-node 2 -m trainer_hooks.demo.train --steps 600 --result result.json

An ordinary loop with three lines of Vitals (marked), plus the planned faults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainer_hooks
from trainer_hooks.demo.data import Windows, standard_library_bytes
from trainer_hooks.demo.inject import FaultInjector
from trainer_hooks.demo.model import ByteGPT
from trainvitals.testing.faults import FaultPlan

CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 64, 16, 80, 3, 4
PEAK_RATE, WARM_UP = 3e-3, 40
TRAIN_BYTES, VALIDATION_BYTES = 4_000_000, 200_000


def main() -> None:
    """Train the small GPT of the demo, inject its faults, and write the result."""
    options = _parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    backend, device = place(
        int(os.environ["LOCAL_RANK"]),
        num_ranks=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    text = standard_library_bytes(TRAIN_BYTES + VALIDATION_BYTES)
    data = Windows(text[:TRAIN_BYTES], CONTEXT)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = ByteGPT(width=WIDTH, num_layers=LAYERS, num_heads=HEADS, context=CONTEXT).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=PEAK_RATE, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps=options.steps))
    faults = FaultInjector(FaultPlan.from_json(os.environ.get("VITALS_DEMO_FAULTS", "")), rank)

    monitor = trainer_hooks.watch(  # Vitals: line 1
        ddp, optimizer, scheduler, run=options.name, mode=options.mode, checkpoints=True,
        tokens_per_step=world * BATCH * CONTEXT, tags=("demo",),
        config={"context": CONTEXT, "batch": BATCH, "width": WIDTH, "peak_rate": PEAK_RATE},
    )  # fmt: skip

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, for the probe."""
        loss: torch.Tensor = ddp(tokens.to(device))
        return loss

    with monitor:
        seen = 0
        for tokens in monitor.batches(loader, epochs=100, probe=loss_of):  # Vitals: line 2
            step = monitor.step_index
            if step >= options.steps:
                break
            tokens = faults.batch(tokens, _batch_index(monitor, seen)).to(device)
            faults.before_forward(model, step)
            loss = faults.loss(ddp(tokens), step)
            loss.backward()
            faults.after_backward(model, step)
            monitor.step(loss, max_norm=1.0)  # Vitals: line 3
            seen += 1
        final = evaluate(model, Windows(text[TRAIN_BYTES:], CONTEXT), device)
        monitor.evaluate(loss=final)
    if rank == 0 and options.result:
        finite = final if math.isfinite(final) else None  # JSON has no NaN
        result = {"run_id": monitor.run_id, "validation_loss": finite, "updates_tried": seen}
        options.result.write_text(json.dumps(result))
    dist.barrier()  # keep all ranks alive until the result is written
    dist.destroy_process_group()


def rate(step: int, *, steps: int) -> float:
    """Return the demo's factor of the peak rate: warm-up, plateau, decay to 0.1."""
    down = 1.0 - 0.9 * (6 * step / steps - 5)
    return min((step + 1) / WARM_UP, 1.0, max(down, 0.1))


def _batch_index(monitor: trainer_hooks.Monitor, seen: int) -> int:
    """Return the demo's current batch index; without a data position, the number of batches."""
    position = getattr(monitor, "batch_position", None)
    return seen if position is None else position.batch


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, device: torch.device) -> float:
    """Return the demo model's mean loss over the validation windows."""
    model.eval()
    batches = DataLoader(data, batch_size=256)
    losses = [(float(model(tokens.to(device))), len(tokens)) for tokens in batches]
    model.train()
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def place(local_rank: int, *, num_ranks: int, num_gpus: int) -> tuple[str, torch.device]:
    """Return the backend and the device of a rank of the demo; all numbers are of this node.

    With fewer GPUs than ranks, ranks share GPUs: then over gloo, because NCCL refuses two ranks on
    one GPU.
    """
    if num_gpus == 0:
        return "gloo", torch.device("cpu")
    backend = "nccl" if num_ranks <= num_gpus else "gloo"
    return backend, torch.device("cuda", local_rank % num_gpus)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="demo")
    parser.add_argument("--mode", default="heal", choices=["off", "observe", "guard", "heal"])
    parser.add_argument("--result", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
