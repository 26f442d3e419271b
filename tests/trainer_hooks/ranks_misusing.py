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


def wrong_on_rank_1(rank, **wrong):
    """Give a wrong argument on rank 1 alone; ``attach`` where it is an argument of its own."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    begin = trainer_hooks.attach if wrong.pop("attach", False) else trainer_hooks.watch
    given = {"optimizers": optimizer, **(wrong if rank == 1 else {})}
    try:
        begin(model, given.pop("optimizers"), **given).close()
    except VitalsError as raised:
        return {"error": str(raised)}
    return {"error": ""}


class NoOptimizer:
    """Has what is looked at first, and nothing in it."""

    param_groups = ({},)

    def step(self):
        """Do nothing."""


def checkpoints_refused_on_rank_1(rank, folder):
    """Give a folder that cannot be written on rank 1 alone."""
    file = Path(folder) / f"taken-{rank}"
    file.touch()
    where = file if rank == 1 else Path(folder) / "checkpoints"
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    try:
        trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=where).close()
    except VitalsError as raised:
        return {"error": str(raised)}
    return {"error": ""}


WRONG = {
    "tokens_per_step is 'many'": {"tokens_per_step": "many"},
    "config is a list": {"config": [1]},
    "tags is None": {"tags": None},
    "max_norm is 0": {"attach": True, "max_norm": 0},
    "mode is 'gaurd'": {"mode": "gaurd"},
    "run is an int": {"run": 1},
    "state is a list": {"state": [1]},
    "signals is a dict": {"signals": {}},
    "optimizers holds a NoOptimizer": {"optimizers": NoOptimizer()},
}
"""What an error says, and the argument that is wrong on rank 1 alone."""


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
        **{text: wrong_on_rank_1(rank, **wrong) for text, wrong in WRONG.items()},
        "checkpoints cannot be kept": checkpoints_refused_on_rank_1(rank, folder),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
