"""What each of two real ranks does in ``test_early_stopping``; results go to a file by rank."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import store_of
from tests.trainer_hooks.ranks_under_attack import notes
from trainer_hooks import CheckpointSettings, EarlyStopping
from trainvitals.errors import VitalsError

NAN = float("nan")


def train(rank, folder, case, *, value, who=(0, 1), restore=False, **settings):
    """Evaluate after every third step with ``value(rank, step)``; return how it ended."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    checkpoints = CheckpointSettings(directory=Path(folder) / case, healthy_after=2)
    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(60)]
    found, at = {}, {}
    with trainer_hooks.watch(
        model,
        optimizer,
        checkpoints=checkpoints,
        early_stopping=EarlyStopping(**{"patience": 2, **settings}),
    ) as monitor:
        said = notes(monitor)
        for batch in monitor.batches(data):
            loss = model(batch).square().mean()
            loss.backward()
            monitor.step(loss)
            step = monitor.step_index
            if step % 3 == 0 and rank in who:
                store_of(monitor).wait()  # as if the disk was faster than 3 steps
                at[step] = [p.detach().clone() for p in model.parameters()]
                monitor.evaluate(loss=value(rank, step))
        found["stopped"] = monitor.step_index if monitor.should_stop else None
        if restore:
            try:
                best = monitor.restore_best()
                found["best"] = [best.step, best.value]
                parameters = list(model.parameters())
                found["exact"] = all(map(torch.equal, at[best.step], parameters))
            except VitalsError as error:
                found["refused"] = error.text
        found["said"] = [
            code for code in said if "best" in code or "eva" in code or "early" in code
        ]
        found["faults"] = monitor.swallowed_errors
    return found


def falling(rank, step):
    """Best at step 6 on rank 0; on rank 1 never better than at first."""
    return {3: 2.0, 6: 1.0}.get(step, 5.0) if rank == 0 else float(step)


def main(rank, folder):
    """Run every case; each rank writes what it found."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {
        "own values": train(rank, folder, "own", value=falling, restore=True),
        "nan on rank 0": train(
            rank, folder, "nan", value=lambda r, s: NAN if r == 0 else 60.0 - s, restore=True
        ),
        "rank 0 alone": train(rank, folder, "alone", value=falling, who=(0,), restore=True),
        "rank 1 alone": train(rank, folder, "other", value=falling, who=(1,)),
        "after the last step": train(
            rank, folder, "late", value=lambda r, s: 60.0 - s, restore=True
        ),
        "other settings": refused(rank),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def refused(rank):
    """Return what is said where the ranks were given different settings."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        trainer_hooks.watch(model, optimizer, early_stopping=EarlyStopping(patience=2 + rank))
    except VitalsError as error:
        return error.text
    return ""
