"""Three ranks, of which the middle one waits for its data: which of them are profiled."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.watched import run_directory, send_command, until
from trainvitals.records import ProfileArgument

RANKS, SLOW = 3, 1


def main(rank, folder):
    """Train; order one profile of whom Vitals chooses, then one of rank 2."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loader():
        while True:
            time.sleep(0.1 if rank == SLOW else 0.001)
            yield torch.randn(8, 4)

    class Data:
        def __iter__(self):
            return loader()

    left = {}
    with trainer_hooks.watch(model, optimizer) as monitor:
        traces = run_directory(monitor) / "profiles"
        for step, batch in enumerate(monitor.batches(Data())):
            model(batch).square().mean().backward()
            monitor.step()
            if step == 12 and rank == 0:
                send_command(monitor, action="profile", argument=ProfileArgument(2).argument)
            if step == 24:
                until(lambda: len(list(traces.glob("step-*"))) == 2)
                dist.barrier()
                left["chosen"] = sorted(path.name for path in traces.glob("step-*"))
                dist.barrier()
                if rank == 0:
                    send_command(
                        monitor, action="profile", argument=ProfileArgument(2, rank=2).argument
                    )
            if step == 36:
                until(lambda: len(list(traces.glob("step-*"))) == 3)
                left["all"] = sorted(path.name for path in traces.glob("step-*"))
                dist.barrier()
                break
        left["faults"] = monitor.swallowed_errors
    (Path(folder) / f"{rank}.json").write_text(json.dumps(left))
    dist.destroy_process_group()
