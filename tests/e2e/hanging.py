"""A rank of a small training that hangs once, as it is told; a start that follows does not."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks import watch
from trainer_hooks.recovery.manager import CheckpointSettings

STEPS, HANGS_AT = 120, 60


def main() -> None:
    """Train for so many steps; leave in FOLDER/starts which step each start began with."""
    told = json.loads(sys.argv[1])
    folder = Path(told["folder"])
    dist.init_process_group("gloo")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept = CheckpointSettings(directory=folder / "kept", save_every=20, grace_seconds=6.0)
    with watch(model, optimizer, checkpoints=kept, on_hang=told["on_hang"]) as monitor:
        if dist.get_rank() == 0:
            with (folder / "starts").open("a") as file:
                file.write(f"{monitor.step_index}\n")
        while monitor.step_index < STEPS:
            if is_first and monitor.step_index == HANGS_AT and dist.get_rank() == 1:
                hang(told["how"])
            model(torch.randn(8, 16)).square().mean().backward()
            monitor.step()
            time.sleep(0.05)
    dist.destroy_process_group()


def hang(how: str) -> None:
    """Stop, or wait for a lock that nobody gives back."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


if __name__ == "__main__":
    main()
