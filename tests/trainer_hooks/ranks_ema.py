"""What each of two real ranks does in ``test_ema``; results go to a file by rank."""

import copy
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import device_of
from tests.trainer_hooks.ranks_under_attack import NAN, alike, refused
from trainer_hooks.tensors.gradients import local_tensor

STEPS = 7
BAD = (0, 3, 4)
BROKEN = 42


class Block(nn.Linear):
    """A layer that is wrapped by itself; the head belongs to the root."""


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(5, 7), nn.GELU(), Block(7, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def ddp():
    return DistributedDataParallel(net())


def fsdp2():
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(original=True):
    return FullyShardedDataParallel(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )


def fsdp1_flat():
    return fsdp1(original=False)


WRAPPINGS = {"ddp": ddp, "fsdp2": fsdp2, "fsdp1": fsdp1, "fsdp1 flat": fsdp1_flat}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def data(rank, step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def forward(model, rank, step, factor=1.0):
    loss = model(data(rank, step)).square().mean() * factor
    loss.backward()
    return loss


def bits(ema):
    return {name: local_tensor(tensor).clone() for name, tensor in ema.state_dict().items()}


def weights(model):
    return [local_tensor(p.detach()).clone() for p in model.parameters()]


@torch.no_grad()
def predict(model, rank):
    return model(data(rank, 1000)).clone()


def twin(make, rank):
    """Train and average the good steps alone, without us; nothing is ever swapped."""
    model = make()
    ema, optimizer = trainer_hooks.EMA(model, 0.9), adamw(model)
    for step in range(STEPS):
        if step not in BAD:
            forward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
    return model, ema


def averaged(make, rank):
    model, stood = make(), []
    ema = trainer_hooks.EMA(model, 0.9)
    with trainer_hooks.watch(model, adamw(model), state={"ema": ema}) as monitor:
        for step in range(STEPS):
            before = bits(ema)
            bad = step in BAD and rank == 1
            monitor.step(forward(model, rank, step, NAN if bad else 1.0))
            stood.append(alike(before, bits(ema)))
            plain = predict(model, rank)  # FSDP holds what it gathered for this
            with ema.swap():
                swapped = predict(model, rank)
            again = predict(model, rank)
            with ema.swap():
                swapped_again = predict(model, rank)
        with ema.swap():
            told = refused(rank, lambda: monitor.step(torch.tensor(1.0)))
        seen = device_of(monitor).extra["ema"] is ema
    plain_model, plain_ema = twin(make, rank)
    with plain_ema.swap():
        wanted = predict(plain_model, rank)
    return {
        "stood": [step for step, same in enumerate(stood) if same],
        "as_twin": alike(bits(plain_ema), bits(ema)),
        "weights": alike(weights(plain_model), weights(model)),
        "swapped": alike([wanted, wanted], [swapped, swapped_again]),
        "back": torch.equal(plain, again),
        "differ": not torch.equal(plain, swapped),
        "told": told["error"],
        "faults": monitor.swallowed_errors,
        "seen": seen,
    }


def layout(make):
    """Whether each average is laid out as its parameter, and its names are the user's."""
    model = make()
    ema = trainer_hooks.EMA(model, device="cpu", dtype=torch.float64)
    pairs = zip(model.parameters(), ema.state_dict().values(), strict=False)
    return {
        "names": [*ema.state_dict()],
        "alike": all(
            type(p.data) is type(average)
            and p.shape == average.shape
            and getattr(p, "placements", None) == getattr(average, "placements", None)
            and local_tensor(p).shape == local_tensor(average).shape
            for p, average in pairs
        ),
        "dtypes": sorted({str(average.dtype) for average in ema.state_dict().values()}),
    }


def heals(make, rank):
    model, kept, back, exact = make(), {}, [], []
    ema = trainer_hooks.EMA(model, 0.9)
    with trainer_hooks.watch(
        model, adamw(model), mode="heal", checkpoints=True, state={"ema": ema}
    ) as monitor:
        for _ in range(BROKEN + 5):
            step = monitor.step_index
            kept[step] = bits(ema)
            if step == BROKEN and not back:
                with torch.no_grad():
                    local_tensor(next(model.parameters()).detach()).fill_(NAN)
            outcome = monitor.step(forward(model, rank, step))
            if outcome.rolled_back_to is not None:
                back.append(outcome.rolled_back_to)
                exact.append(alike(kept[back[-1]], bits(ema)))
    finite = all(bool(t.isfinite().all()) for t in bits(ema).values())
    return {"back": len(back), "exact": exact, "finite": finite}


def shapes(rank):
    """What one rank holds of a sharded model fits neither the whole one nor another cut."""
    ema = trainer_hooks.EMA(fsdp2())
    whole = copy.deepcopy(trainer_hooks.EMA(net()).state_dict())
    return {
        "copy": refused(rank, lambda: ema.copy_to(net()))["error"],
        "load": refused(rank, lambda: ema.load_state_dict(whole))["error"],
    }


def main(rank, folder):
    folder = Path(folder)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name, make in WRAPPINGS.items():
        found[name] = averaged(make, rank)
        found[f"{name} layout"] = layout(make)
    for name in ("ddp", "fsdp2", "fsdp1"):
        found[f"{name} heals"] = heals(WRAPPINGS[name], rank)
    found["shapes"] = shapes(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
