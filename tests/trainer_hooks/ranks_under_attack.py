"""What each of two real ranks does in ``test_ranks_attacks``; results go to a file by rank."""

import copy
import json
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import device_of, events_of, facts_of, run_of, tokens_of
from trainvitals.errors import VitalsError
from trainvitals.io.journal import StreamWriter

NAN, INF = float("nan"), float("inf")


def ddp(*, fused, seed=0):
    """Return a wrapped model with batch norm, and its optimizer."""
    torch.manual_seed(seed)
    # A bias before batch norm has no gradient but rounding, which Adam makes steps of.
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return DistributedDataParallel(model), optimizer


def forward(model, rank, step, factor=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(6, 4, generator=generator) * factor).square().mean()
    loss.backward()
    return loss


def bits(model, optimizer):
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"]))


def alike(left, right):
    if isinstance(left, dict | list | tuple):
        pairs = left.items() if isinstance(left, dict) else enumerate(left)
        return len(left) == len(right) and all(alike(value, right[key]) for key, value in pairs)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def same_on_all(model):
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(every[0], other) for other in every)


def boom(*_, **__):
    raise OSError(28, "No space left on device")


def failing_preparation(rank, fused, what):
    plain, bare = ddp(fused=fused)
    for step in range(3):
        forward(plain, rank, step, 100.0)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        bare.step()
        bare.zero_grad()
    model, optimizer = ddp(fused=fused)
    with trainer_hooks.watch(model, optimizer) as monitor:
        said = notes(monitor)
        if rank == 1:
            setattr(device_of(monitor).norms, what, boom)
        for step in range(3):
            monitor.step(forward(model, rank, step, 100.0), max_norm=0.5)
    close = all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    return {"same": same_on_all(model), "as_plain": close, "notes": said}


def failing_fill(rank):
    """The pack itself cannot be filled on rank 1, once: it still enters the exchange."""
    model, optimizer = ddp(fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:
        packer, done = device_of(monitor).packer, []
        fill = packer.fill

        def fail_once(local, *args, **kwargs):
            if not done:
                done.append(True)
                local = replace(local, loss=torch.zeros(3))  # it must be one number
            fill(local, *args, **kwargs)

        if rank == 1:
            packer.fill = fail_once
        for step in range(3):
            monitor.step(forward(model, rank, step), max_norm=0.5)
    return {"same": same_on_all(model)}


def notes(monitor):
    """Collect the codes of notes as they are said."""
    return events_of(monitor, keep=lambda event, **_: getattr(event, "code", ""))


def nan_forward(rank, fused):
    model, optimizer = ddp(fused=fused)
    kept = []
    with trainer_hooks.watch(model, optimizer) as monitor:
        for step in range(5):
            before = bits(model, optimizer)
            bad = step == 0 or step == 3
            loss = forward(model, rank, step, NAN if bad and rank == 1 else 1.0)
            monitor.step(loss)
            after = bits(model, optimizer)
            kept.append(alike(before[0], after[0]) and (step == 0 or alike(before[1], after[1])))
    return {"kept": kept, "same": same_on_all(model), "faults": monitor.swallowed_errors}


def overflow_on_one_shard(rank):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with trainer_hooks.watch(model, optimizer, scaler=scaler) as monitor:
        for step in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss).backward()
            if step == 1 and rank == 1:
                model.bias.grad.fill_(INF)
            monitor.step(loss)
    return {"scale": scaler.get_scale(), "same": same_on_all(model)}


def announced_on_rank_0_alone(rank):
    model, optimizer = ddp(fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:
        said = notes(monitor)
        for step in range(60):
            if step == 40 and rank == 0:
                monitor.expect("longer context", steps=10)
            monitor.step(forward(model, rank, step, 30.0 if step >= 40 else 1.0))
    return {
        "same": same_on_all(model),
        "notes": said,
        "skips": facts_of(monitor).num_skips,
    }


def full_disk(rank):
    model, optimizer = ddp(fused=True)
    with (
        trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=True) as monitor,
        mock.patch.multiple(StreamWriter, append=boom, append_event=boom),
    ):
        if rank == 0:
            type(run_of(monitor).run_dir).append_plan = boom
        back = []
        for step in range(40):
            if step == 35 and rank == 1:
                with torch.no_grad():
                    next(model.parameters()).fill_(NAN)
            back.append(monitor.step(forward(model, rank, step)).rolled_back_to)
    return {"same": same_on_all(model), "back": [b for b in back if b is not None]}


def no_gradients(rank):
    model, optimizer = ddp(fused=True)
    try:
        with trainer_hooks.watch(model, optimizer) as monitor:
            for _ in range(3):
                monitor.step(torch.tensor(1.0))
    except VitalsError as error:
        return {"error": type(error).__name__, "at": monitor.step_index}
    return {"error": ""}


def accumulated(rank, sync):
    model, optimizer = ddp(fused=True)
    losses = []
    with trainer_hooks.watch(model, optimizer) as monitor:
        push = device_of(monitor).readback.push
        device_of(monitor).readback.push = lambda n, h: (losses.append(float(n[-3])), push(n, h))[1]
        for step in range(3):
            with model.no_sync() if not sync else torch.enable_grad():
                monitor.micro(forward(model, rank, step), torch.tensor(rank + 1))
            monitor.micro(forward(model, rank, step + 10), torch.tensor(2.0 * (rank + 1)))
            monitor.step(max_norm=1.0)
        tokens = tokens_of(monitor)
    return {"same": same_on_all(model), "tokens": tokens, "losses": losses}


class On:
    """Sets variables of the environment on one rank alone."""

    def __init__(self, here, **values):
        self.values = values if here else {}

    def __enter__(self):
        self.before = {name: os.environ.get(name) for name in self.values}
        os.environ.update(self.values)

    def __exit__(self, *_):
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def refused(rank, call):
    try:
        monitor = call()
    except VitalsError as error:
        return {"error": type(error).__name__, "text": error.text}
    monitor.close()
    return {"error": ""}


def refusals(rank, folder):
    def plain(**keywords):
        model, optimizer = ddp(fused=keywords.pop("fused", True))
        return trainer_hooks.watch(model, optimizer, **keywords)

    def other_parameters():
        model = nn.Linear(2 + rank, 1, bias=rank == 0)
        return trainer_hooks.watch(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))

    file = folder / "file"
    file.touch()
    found = {}
    for name, here, values, call in [
        ("observe on one", rank == 1, {"VITALS_MODE": "observe"}, plain),
        ("off on one", rank == 1, {"VITALS_MODE": "off"}, plain),
        ("wrong on one", rank == 1, {"VITALS_MODE": "heal"}, plain),
        ("agent on one", rank == 1, {"VITALS_AGENT": "perhaps"}, plain),
        ("shm on one", rank == 1, {"VITALS_SHM": str(folder / "missing")}, plain),
        ("dir on root", rank == 0, {"VITALS_DIR": str(file)}, plain),
        ("other lag", False, {}, lambda: plain(fused=rank == 0)),
        ("other parameters", False, {}, other_parameters),
        ("other checkpoints", False, {}, lambda: plain(checkpoints=rank == 0)),
        ("none", False, {}, plain),
    ]:
        with On(here, **values):
            found[name] = refused(rank, call)
    return found


def main(rank, folder):
    """Run every case on this rank, one after another; a hang in one is a hang of all."""
    folder = Path(folder)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {"refusals": refusals(rank, folder)}
    for fused in (True, False):
        for what in ("gradients", "squares_into"):
            found[f"prepare {what} {fused}"] = failing_preparation(rank, fused, what)
        found[f"nan {fused}"] = nan_forward(rank, fused)
    found["fill"] = failing_fill(rank)
    found["overflow"] = overflow_on_one_shard(rank)
    found["announced"] = announced_on_rank_0_alone(rank)
    found["no gradients"] = no_gradients(rank)
    found["sync"], found["no_sync"] = accumulated(rank, True), accumulated(rank, False)
    found["full disk"] = full_disk(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
