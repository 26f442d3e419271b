"""What each of two ranks does in ``test_ranks``: measured trainings, each in a place of its own."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from trainer_hooks import SignalSettings
from trainer_hooks.measures import noise
from trainer_hooks.measures.sampled import WeightUpdateNorms
from trainvitals.errors import UsageError

CPU = torch.device("cpu")
STEPS = 14
UPDATES = SignalSettings(every=3, update_norm=True)
NOISE = SignalSettings(every=1, noise_scale=True)
REDUCTION = SignalSettings(every=1, reduction=True)
FLIPPED_AT = 7
"""The step in which rank 1 gets another gradient than was summed."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def data(step: int, rank: int) -> Tensor:
    """Return one rank's part of a step's batch."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x[:, :3]).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(
    model: nn.Module,
    signals: SignalSettings | None,
    place: Path,
    *,
    micro: int = 1,
    synced: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    fail_at: int = -1,
    flip_at: int = -1,
) -> dict[str, Any]:
    """Train; return the pairs of squares that rank 0 took in, and the last parameters."""
    place.mkdir(exist_ok=True)
    os.environ["VITALS_SHM"] = str(place)
    rank = dist.get_rank()
    optimizer = optimizer_of(model)
    pairs: list[tuple[float, float]] = []
    add = noise.NoiseScale.add
    weight_squares, measure = WeightUpdateNorms.weight_squares, WeightUpdateNorms.measure

    def keep_and_add(scale: noise.NoiseScale, **squares: float) -> None:
        pairs.append(tuple(squares.values()))
        add(scale, **squares)

    def fail_weights(updates: WeightUpdateNorms) -> Tensor:
        return weight_squares(updates) if step < failing_from else 1 / 0

    def fail_update(updates: WeightUpdateNorms) -> None:
        if step >= failing_from and signals.due(step + 1):
            raise ZeroDivisionError
        measure(updates)

    failing_from = fail_at if rank == 1 and fail_at >= 0 else STEPS
    with (
        mock.patch.object(noise.NoiseScale, "add", keep_and_add),
        mock.patch.object(WeightUpdateNorms, "weight_squares", fail_weights),
        mock.patch.object(WeightUpdateNorms, "measure", fail_update),
        trainer_hooks.watch(
            model, optimizer, signals=signals, scaler=scaler, tokens_per_step=12
        ) as monitor,
    ):
        for step in range(STEPS):
            if step == flip_at and rank == 1:
                noise.allreduce_hook = with_a_flipped_bit
            parts = data(step, rank).chunk(micro)
            for i, part in enumerate(parts):
                with nullcontext() if synced or i == micro - 1 else model.no_sync():
                    loss = loss_of(model, part) / micro
                    (loss if scaler is None else scaler.scale(loss)).backward()
            monitor.step(loss)
            noise.allreduce_hook = allreduce_hook
        errors = dict(monitor.swallowed_errors)
    replicated = isinstance(model, DistributedDataParallel)
    last = [p.detach().tolist() for p in model.parameters()] if replicated else []
    return {"pairs": pairs, "errors": errors, "last": last}


def with_a_flipped_bit(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket, and flip a bit of the mantissa of what comes out: as a link would."""

    def flip(future: torch.futures.Future[Tensor]) -> Tensor:
        reduced = future.value()
        largest = int(reduced.abs().argmax())
        reduced.view(torch.int32)[largest] ^= 1 << 20
        return reduced

    return allreduce_hook(group, bucket).then(flip)


def hooked(builtin: bool) -> nn.Module:
    model = DistributedDataParallel(network())
    if builtin:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, allreduce_hook)
    return model


def refused(model: nn.Module, signals: SignalSettings, trained: nn.Module | None = None) -> str:
    try:
        trainer_hooks.watch(model, optimizer_of(trained or model), signals=signals).close()
    except UsageError as error:
        return error.text
    return ""


def trainings(folder: Path) -> dict[str, Any]:
    ddp = lambda: DistributedDataParallel(network())  # noqa: E731
    sharded = network()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    twice = ddp()
    return {
        "ddp": train(ddp(), UPDATES, folder / "ddp"),
        "fsdp2": train(sharded, UPDATES, folder / "fsdp2"),
        "fsdp1": train(
            FullyShardedDataParallel(network(), use_orig_params=True, device_id=CPU),
            UPDATES,
            folder / "fsdp1",
        ),
        "noise": train(ddp(), NOISE, folder / "noise"),
        "bare": train(ddp(), None, folder / "bare"),
        "no_sync": train(ddp(), NOISE, folder / "no_sync", micro=2, synced=False),
        "synced twice": train(ddp(), NOISE, folder / "twice", micro=2),
        "scaled": train(
            ddp(), NOISE, folder / "scaled", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)
        ),
        "first": train(twice, NOISE, folder / "first"),
        "again": train(twice, NOISE, folder / "again"),
        "reduction": train(ddp(), REDUCTION, folder / "reduction"),
        "reduction, no_sync": train(
            ddp(), REDUCTION, folder / "reduction_no_sync", micro=2, synced=False
        ),
        "flipped": train(ddp(), REDUCTION, folder / "flipped", flip_at=FLIPPED_AT),
        "failing": train(ddp(), UPDATES, folder / "failing", fail_at=5),
    }


def main(rank: int, folder: str) -> None:
    """Run all cases on this rank."""
    torch.set_num_threads(1)
    place = Path(folder)
    store = f"file://{place / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    ddp = DistributedDataParallel(network())
    differing = SignalSettings(every=2 + rank)
    found = {
        "refusals": {
            "hook": refused(hooked(builtin=False), NOISE),
            "builtin": refused(hooked(builtin=True), NOISE),
            "plain": refused(network(), NOISE),
            "reduction": refused(network(), REDUCTION),
            "differing": refused(DistributedDataParallel(network()), differing),
            "other parameters": refused(ddp, NOISE, trained=ddp.module[0]),
        },
        "trainings": trainings(place),
    }
    (place / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # past gloo's own abort at exit
