"""What each of two real ranks does in ``test_ranks_misuses``; results go to a file by rank."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from trainvitals.errors import VitalsError


def train(rank, *, who, fused):
    """Step the scheduler in the loop too, on some ranks; return the error and when it came."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    error = ""
    with trainer_hooks.watch(model, optimizer, scheduler) as monitor:
        try:
            for _ in range(6):
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                monitor.step(loss)
                if rank in who:
                    scheduler.step()
        except VitalsError as raised:
            error = str(raised)
    return {"error": error, "steps": monitor.step_index}


def swapped(rank):
    """Give model and optimizer in the wrong order on rank 1 alone."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    given = model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    try:
        trainer_hooks.watch(*(given if rank == 0 else reversed(given))).close()
    except VitalsError as raised:
        return {"error": str(raised)}
    return {"error": ""}


def main(rank, folder):
    """Run every case."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {
        "all": train(rank, who=(0, 1), fused=True),
        "all, not fused": train(rank, who=(0, 1), fused=False),
        "rank 0": train(rank, who=(0,), fused=True),
        "none": train(rank, who=(), fused=True),
        "swapped": swapped(rank),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
