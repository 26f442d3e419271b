"""What each of two real ranks does in ``test_on_ranks``; results go to a file by rank."""

import gc
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.real_programs.data import Images
from tests.real_programs.playing import play
from tests.trainer_hooks.measures.journal import Journal

CASES = {
    "healthy": {},
    "nan": {"bad": {12: math.nan, 25: math.nan}},
    "spike": {"bad": {70: 1e4, 71: 1e4}},
}
MICRO_STEPS = {"imagenet": 1, "litgpt": 2}
LEFT_OUT = {
    ("imagenet", "nan"): {12, 25},
    ("litgpt", "nan"): {12, 25},
    ("imagenet", "spike"): {70, 71},
    ("litgpt", "spike"): {70, 71},
}
NIGHTLY = {("imagenet", "nan"), ("litgpt", "healthy")}
"""Cases that others contain: NaN images, and a program that is healthy except for two updates."""
POISONED = frozenset({3, 40})
"""Images that are NaN: in each epoch the batches with them are bad, wherever they come."""


def both(name, shm, left_out, **faults):
    """Play a program with the guide's lines and without; return both, and what was skipped."""
    shm.mkdir()
    os.environ["VITALS_SHM"] = str(shm)
    watched = play(name, watched=True, **faults)
    gc.collect()
    skipped = [step for step, value in Journal(shm).steps("skipped").items() if value]
    plain = play(name, watched=False, left_out=frozenset(left_out), **faults)
    return {"watched": {key: watched[key] for key in plain}, "plain": plain, "skipped": skipped}


def main(rank, folder, *, has_nightly):
    """Run the cases; what is wrong is wrong on rank 1 alone."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, micro_steps in MICRO_STEPS.items():
        for case, faults in CASES.items():
            if (name, case) in NIGHTLY and not has_nightly:
                continue
            bad = {
                index * micro_steps: factor
                for index, factor in faults.get("bad", {}).items()
                if rank == 1
            }
            shm = Path(folder) / f"shm-{name}-{case}-{rank}"
            left_out = LEFT_OUT.get((name, case), set())
            results[f"{name} {case}"] = both(name, shm, left_out, bad=bad)
    shm = Path(folder) / f"shm-poisoned-{rank}"
    results["imagenet poisoned"] = both("imagenet", shm, bad_updates(), poisoned=POISONED)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def bad_updates():
    """Return the updates that a NaN image of either rank is in."""
    updates = set()
    for rank in range(2):
        sampler = DistributedSampler(Images(), num_replicas=2, rank=rank)
        for epoch in range(9):
            sampler.set_epoch(epoch)
            for place, index in enumerate(sampler):
                if index in POISONED:
                    updates.add(epoch * 10 + place // 8)
    return updates
