"""What each of two real ranks does in ``test_ranks_attached``; results go to a file by rank."""

import json
import os
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_hooks
from tests.support.inside import device_of, facts_of, records_of, run_of
from tests.trainer_hooks.each_outlier import withhold_each_outlier
from tests.trainer_hooks.ranks_under_attack import alike, bits, boom, ddp, forward, same_on_all
from trainer_hooks.tensors.gradients import local_tensor

NAN, INF = float("nan"), float("inf")


def train(model, optimizer, attached, rank, steps, *, begin=0, wrong=None, clips=True):
    """Train as people do; ``wrong`` is (step, rank, call on the gradients). Return who changed."""
    changed = []
    for step in range(begin, begin + steps):
        before = bits(model, optimizer)
        attached.loss(forward(model, rank, step))
        if wrong is not None and wrong[:2] == (step, rank):
            wrong[2](next(model.parameters()).grad)
        if clips:
            attached.grad_norm(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        changed.append(not alike(before, bits(model, optimizer)))
    return changed


def summary(attached, model, changed):
    return {
        "kept": [step for step, one in enumerate(changed) if not one],
        "same": same_on_all(model),
        "skips": facts_of(attached).num_skips,
        "digest": run_of(attached).judge.digest(),
        "faults": attached.swallowed_errors,
    }


def nan_on_one(rank, fused):
    """After the reduction, so on rank 1 alone."""
    model, optimizer = ddp(fused=fused)
    with trainer_hooks.attach(model, optimizer) as attached:
        wrong = (3, 1, lambda grad: grad.view(-1)[:1].fill_(NAN))
        changed = train(model, optimizer, attached, rank, 6, wrong=wrong, clips=False)
    return summary(attached, model, changed)


def outlier(rank, fused, owned):
    model, optimizer = ddp(fused=fused)
    options = {"max_norm": 0.5} if owned else {}
    with trainer_hooks.attach(model, optimizer, **options) as attached:
        wrong = (30, 1, lambda grad: grad.mul_(1e6))
        changed = train(model, optimizer, attached, rank, 33, wrong=wrong, clips=not owned)
    return summary(attached, model, changed)


def failing_preparation(rank):
    model, optimizer = ddp(fused=True)
    with trainer_hooks.attach(model, optimizer) as attached:
        if rank == 1:
            device_of(attached).norms.squares_into = boom
        changed = train(model, optimizer, attached, rank, 4)
    return summary(attached, model, changed)


def overflow_on_one(rank, fused):
    """Each rank a model of its own, so that one alone overflows: torch itself would part them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with trainer_hooks.attach(model, optimizer, scaler=scaler) as attached:
        for step in range(3):
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            if step == 1 and rank == 1:
                model.bias.grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"scale": scaler.get_scale(), "same": same_on_all(model), "step": attached.step_index}


def sharded(rank):
    """FSDP2: clip_grad_norm_ returns a DTensor that is not reduced yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    kept = []
    with trainer_hooks.attach(model, optimizer) as attached:
        full = records_of(attached, keep=lambda record: record.grad_norm)
        given = []
        for step in range(33):
            before = [p.to_local().detach().clone() for p in model.parameters()]
            forward(model, rank, step)
            if step == 30 and rank == 1:
                model[0].weight.grad.to_local().mul_(1e6)
            if step == 31 and rank == 0:
                model[0].weight.grad.to_local()[0] = NAN
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            given.append(float(norm.full_tensor()))
            attached.grad_norm(norm)
            optimizer.step()
            optimizer.zero_grad()
            after = [p.to_local() for p in model.parameters()]
            if all(map(torch.equal, before, after)):
                kept.append(step)
    close = [abs(a - b) < 1e-3 * b for a, b in zip(full[:30], given, strict=False)]
    return {"kept": kept, "norms": all(close) and len(close) == 30}


def adapted(rank):
    """FSDP2 with a LoRA adapter: rank 0 alone reads whether it has a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(lora_A=nn.Linear(4, 8), out=nn.Linear(8, 1)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with trainer_hooks.attach(model, optimizer, task="sft") as attached:
        for step in range(5):
            attached.loss(forward(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    return {"step": attached.step_index, "faults": attached.swallowed_errors}


def resumed(rank):
    """The state of rank 0 alone, as a checkpoint holds it, protects both from the first step."""
    model, optimizer = ddp(fused=True)
    with trainer_hooks.attach(model, optimizer) as attached:
        train(model, optimizer, attached, rank, 30)
        state = [json.loads(json.dumps(attached.state_dict()))]
    dist.broadcast_object_list(state, src=0)
    with trainer_hooks.attach(model, optimizer) as attached:
        attached.load_state_dict(state[0])
        wrong = (30, 1, lambda grad: grad.mul_(1e6))
        changed = train(model, optimizer, attached, rank, 3, begin=30, wrong=wrong)
    return {**summary(attached, model, changed), "step": attached.step_index}


def healed(rank, is_sharded):
    """A weight of rank 1 alone turns NaN: with DDP in its copy, with FSDP2 in its shard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    count, states, back = 0, {}, []

    def rewind(num):
        nonlocal count
        count -= num

    with trainer_hooks.attach(model, optimizer, schedule, mode="heal") as attached:
        attached.when_rolled_back(rewind)
        for step in range(70):
            if step == 60 and rank == 1:
                with torch.no_grad():
                    local_tensor(next(model.parameters())).view(-1)[0] = NAN
            attached.loss(forward(model, rank, step))
            before = count
            optimizer.step()
            count += 1
            now = [local_tensor(p).detach().clone() for p in model.parameters()]
            if count <= before:
                same = all(map(torch.equal, states[count], now))
                back.append([step, count, same, schedule.last_epoch])
            states[count] = now
            schedule.step()
            optimizer.zero_grad()
        is_agreed = count == attached.step_index
    finite = all(bool(part.isfinite().all()) for part in now)
    return {
        "back": back,
        "finite": finite,
        "agreed": is_agreed,
        "faults": attached.swallowed_errors,
    }


def main(rank, folder):
    """Run every case on this rank, one after another; a hang in one is a hang of all."""
    folder = Path(folder)
    withhold_each_outlier()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {"failing": failing_preparation(rank), "sharded": sharded(rank)}
    found["adapted"] = adapted(rank)
    for fused in (True, False):
        found[f"nan {fused}"] = nan_on_one(rank, fused)
        found[f"overflow {fused}"] = overflow_on_one(rank, fused)
        found[f"given {fused}"] = outlier(rank, fused, False)
        found[f"owned {fused}"] = outlier(rank, fused, True)
    found["resumed"] = resumed(rank)
    found["healed"] = [healed(rank, is_sharded) for is_sharded in (False, True)]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
