"""What each of two real ranks does while the policy collapses; results go to a file by rank."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from trainvitals.errors import TrainingHalted, UsageError


def train(rank, folder):
    """Train until the halt; only rank 0 has scalars."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    found = {"halted": ""}
    kept = Path(folder) / "kept"
    with trainer_hooks.watch(
        model, optimizer, task="grpo", on_collapse="stop", checkpoints=kept
    ) as monitor:
        try:
            for step in range(100):
                if rank == 0:
                    is_low, is_lost = step >= 40, step >= 60
                    reward = 0.1 if is_lost else 0.1 + 0.01 * min(step, 40)
                    monitor.observe(entropy=0.01 if is_low else 1.0, reward=reward)
                model(torch.ones(4, 4) * rank).square().mean().backward()
                monitor.step()
        except TrainingHalted as halted:
            found["halted"] = halted.text
        found["step"], found["faults"] = monitor.step_index, monitor.swallowed_errors
    found["kept"] = sorted(path.name for path in kept.glob("step-*"))
    return found


def refused(rank):
    """Give the two ranks different reactions."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reaction = "stop" if rank else "report"
    try:
        trainer_hooks.watch(model, optimizer, task="grpo", on_collapse=reaction, checkpoints=True)
    except UsageError as error:
        return error.text
    return ""


def main(rank, folder):
    """Run both cases; each rank writes what it found."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {"refused": refused(rank), "trained": train(rank, folder)}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
