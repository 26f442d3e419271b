"""Checks that need two GPUs. One GPU cannot run them: NCCL refuses two ranks on the same device."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainvitals
from vitals_bench.gpu.checks import check_ranks, check_rollback
from vitals_bench.gpu.loops import (
    DEVICE,
    NAN,
    GuardedLoop,
    find_differences,
    make_batches,
    make_model,
)
from vitals_bench.gpu.parts import Facts, part


@part("check", 60, num_gpus=2)
def nccl_ranks_agree(facts: Facts) -> None:
    """All NCCL ranks skip the NaN of one rank and stay equal; a rollback restores each bit."""
    if "RANK" not in os.environ:
        check_ranks(
            facts,
            "nccl_ranks_agree",
            num_ranks=torch.cuda.device_count(),
            has_own_gpus=True,
        )
        return
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with GuardedLoop(DistributedDataParallel(make_model())) as loop:
        for step, batch in enumerate(make_batches(20)):
            before = loop.state() if step == 12 else {}
            loop.step(batch, NAN if step == 12 and dist.get_rank() == 1 else 1.0)
            if step == 12:
                changed = find_differences(before, loop.state())
                assert not changed, f"the NaN of rank 1 changed {changed[:4]}"
        states: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(states, {n: t.cpu() for n, t in loop.state().items()})
        differences = [find_differences(states[0] or {}, state or {}) for state in states]
        # Each rank computes its own batch norm buffers.
        differs = [[n for n in names if "running" not in n] for names in differences]
        assert not any(differs), f"ranks differ: {differs}"
    model = DistributedDataParallel(make_model(1024))
    check_rollback(facts, model, overlap=True, width=1024)
    dist.destroy_process_group()


@part("check", 20, num_gpus=2)
def current_device_is_not_used(facts: Facts) -> None:
    """A model on the second GPU is guarded although the first is the current device."""
    second = torch.device("cuda", 1)
    for guard in (trainvitals.attach, trainvitals.watch):
        with GuardedLoop(make_model().to(second), guard=guard) as loop:
            for step, batch in enumerate(make_batches(30)):
                before = loop.state()
                torch.cuda._sleep(20_000_000)  # on the current device: its events complete late
                loop.step(batch.to(second), NAN if step == 20 else 1.0)
                is_changed = bool(find_differences(before, loop.state()))
                assert is_changed == (step != 20), f"{guard.__name__}: step {step}"
            facts[guard.__name__] = "30 steps"
