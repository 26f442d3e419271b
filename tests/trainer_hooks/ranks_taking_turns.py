"""A GAN on two ranks, each player in its own DDP: as it is alone, and as it is watched."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

import trainvitals
from tests.trainer_hooks.gan import NAN, Gan

BATCHES, DAMAGED_AT = 30, 40
BAD = {20, 31}  # one update of each player: on rank 1 alone


def digest(gan):
    """All weights, moments and buffers as numbers."""
    moments = [
        value
        for optimizer in (gan.of_g, gan.of_d)
        for state in optimizer.state.values()
        for value in state.values()
    ]
    tensors = [*gan.g.state_dict().values(), *gan.d.state_dict().values(), *moments]
    return [float(tensor.double().abs().sum()) for tensor in tensors]


def made(rank, bad=()):
    """Each rank plays on data of its own."""
    return Gan(ddp=True, data_seed=1 + rank, bad=bad, batches=BATCHES)


def main(rank, folder):
    """Train plainly, watched in both modes, with bad updates, and over a rollback."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    out = {"plain": plain(made(rank)), "dropped": plain(made(rank), dropped=BAD)}
    for mode in ("guard", "heal"):
        out[mode] = watched(made(rank), folder, mode)
        out[f"{mode} bad"] = watched(made(rank, BAD if rank else ()), folder, mode)
    out["back"] = watched(made(rank), folder, "heal", damages=rank == 1)
    Path(folder, f"{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


def plain(gan, dropped=()):
    gan.bare(dropped=dropped)
    return digest(gan)


def watched(gan, folder, mode, *, damages=False):
    rank = dist.get_rank()
    settings = trainvitals.CheckpointSettings(
        directory=Path(folder, f"{mode}{gan.bad and 'bad'}{damages}"), snapshot_every=11
    )
    damaged = back = False
    models, optimizers = {"g": gan.g, "d": gan.d}, [gan.of_g, gan.of_d]
    with trainvitals.watch(
        models, optimizers, gan.schedules, mode=mode, checkpoints=settings
    ) as monitor:

        def step(optimizer, loss):
            nonlocal damaged, back
            outcome = monitor.step(loss, optimizer=optimizer)
            back |= outcome.rolled_back_to is not None
            if damages and outcome.step == DAMAGED_AT and not damaged:
                damaged = True
                with torch.no_grad():
                    next(gan.d.parameters()).fill_(NAN)

        for real in monitor.batches(gan.data):
            gan.play(real, step)
        assert monitor.swallowed_errors == {}, (rank, monitor.swallowed_errors)
    return {"state": digest(gan), "back": back}
