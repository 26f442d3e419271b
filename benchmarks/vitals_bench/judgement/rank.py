"""One rank of a training on several: started by torchrun, see ``jobs``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from trainvitals.jsonable import to_json
from vitals_bench.judgement.run import Clip, Outcome, Policy, run_one


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are told to train."""

    world: str
    clip: Clip
    policy: Policy
    seed: int
    steps: int | None


def main(work: Work, result: Path) -> None:
    """Train on all ranks; rank 0 writes what became of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        outcome: Outcome = run_one(
            work.world, clip=work.clip, policy=work.policy, seed=work.seed, steps=work.steps
        )
        if dist.get_rank() == 0:
            result.write_bytes(to_json(outcome))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(msgspec.json.decode(sys.argv[1], type=Work), Path(sys.argv[2]))
