"""What each of two real ranks does in ``test_ranks_state``; results go to a file by rank."""

import copy
import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.support.inside import device_of, facts_of
from tests.trainer_hooks.ranks_under_attack import NAN, alike, notes, refused, same_on_all

STEPS = 12
BAD = (4, 7)


def ddp(seed=0):
    torch.manual_seed(seed)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    )


def forward(model, rank, step, factor=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(8, 16, generator=generator) * factor).square().mean()
    loss.backward()
    return loss


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- ZeroRedundancyOptimizer


def zero(model, *, fused, views=False):
    return ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=views,
        lr=0.01,
        fused=fused,
    )


def zero_state(model, optimizer):
    return copy.deepcopy((dict(model.state_dict()), [*optimizer.optim.state.values()]))


def zero_skips(rank, fused, views):
    plain = ddp()
    bare = zero(plain, fused=fused, views=views)
    for step in range(STEPS):
        if step not in BAD:
            forward(plain, rank, step)
            bare.step()
            bare.zero_grad()
    model, kept, moved = ddp(), [], []
    optimizer = zero(model, fused=fused, views=views)
    with trainer_hooks.watch(model, optimizer) as monitor:
        lag = device_of(monitor).readback.lag
        for step in range(STEPS):
            before = zero_state(model, optimizer)
            bad = step in BAD and rank == 1
            monitor.step(forward(model, rank, step, NAN if bad else 1.0))
            same = alike(before, zero_state(model, optimizer))
            (kept if step in BAD else moved).append(same)
    return {
        "kept": kept,
        "stood_still": any(moved),
        "as_plain": alike(parameters(plain), parameters(model)),
        "same": same_on_all(model),
        "lag": lag,
        "faults": monitor.swallowed_errors,
    }


def zero_heals(rank):
    model = ddp()
    optimizer, back, exact, kept = zero(model, fused=True), [], [], {}
    with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=True) as monitor:
        for _ in range(80):
            step = monitor.step_index
            kept[step] = zero_state(model, optimizer)
            if step == 55 and not back:
                with torch.no_grad():
                    next(model.parameters()).fill_(NAN)
            outcome = monitor.step(forward(model, rank, step))
            if outcome.rolled_back_to is not None:
                back.append(outcome.rolled_back_to)
                exact.append(alike(kept[back[-1]], zero_state(model, optimizer)))
    return {"back": len(back), "exact": exact, "same": same_on_all(model)}


def zero_relaunched(rank, folder):
    """Train, save, and go on in a monitor of its own, as a relaunch of the run does."""
    where = trainer_hooks.CheckpointSettings(
        directory=folder / "zero", healthy_after=2, save_every=4
    )
    model = ddp()
    optimizer, kept = zero(model, fused=True), {}
    with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=where) as monitor:
        for step in range(14):
            kept[step] = zero_state(model, optimizer)
            monitor.step(forward(model, rank, step))
        run_id = monitor.run_id
    os.environ["VITALS_RUN_ID"] = run_id
    try:
        again = ddp(seed=1)
        optimizer = zero(again, fused=True)
        with trainer_hooks.watch(again, optimizer, mode="heal", checkpoints=where) as monitor:
            step = monitor.step_index
            exact = alike(kept[step], zero_state(again, optimizer))
            monitor.step(forward(again, rank, step))
    finally:
        del os.environ["VITALS_RUN_ID"]
    return {"step": step, "exact": exact, "same": same_on_all(again)}


def zero_overlapped():
    model = ddp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01, overlap_with_ddp=True
    )
    return trainer_hooks.watch(model, optimizer)


# ------------------------------------------------------------------------------- hooks' memory


def powersgd(model, **keywords):
    state = PowerSGDState(None, start_powerSGD_iter=2, **keywords)
    model.register_comm_hook(state, powerSGD_hook)
    return state


def memory(state):
    return copy.deepcopy((state.error_dict, state.p_memory_dict, state.q_memory_dict))


def powersgd_skips(rank, batched=False):
    plain = ddp()
    twin = powersgd(plain, batch_tensors_with_same_shape=batched)
    bare = torch.optim.SGD(plain.parameters(), lr=0.05, fused=True)
    for step in range(STEPS):
        if step not in BAD:
            forward(plain, rank, step)
            bare.step()
            bare.zero_grad()
    model, kept = ddp(), []
    state = powersgd(model, batch_tensors_with_same_shape=batched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    with trainer_hooks.watch(model, optimizer, state={"hook": state}) as monitor:
        said = notes(monitor)
        for step in range(STEPS):
            before = memory(state)
            bad = step in BAD and rank == 1
            monitor.step(forward(model, rank, step, NAN if bad else 1.0))
            kept.append(alike(before, memory(state)))
    return {
        "kept": [step for step, same in enumerate(kept) if same],
        "as_plain": alike(parameters(plain), parameters(model)),
        "memory": alike(memory(twin), memory(state)),
        "tensors": len(state.error_dict) + len(state.q_memory_dict),
        "same": same_on_all(model),
        "notes": said,
        "faults": monitor.swallowed_errors,
    }


def powersgd_first(rank):
    """The very step in which the memory is made is the bad one."""
    model = ddp()
    state = powersgd(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    with trainer_hooks.watch(model, optimizer, state={"hook": state}) as monitor:
        for step in range(8):
            before = parameters(model)
            loss = forward(model, rank, step, NAN if step == 2 and rank == 1 else 1.0)
            monitor.step(loss)
            moved = not alike(before, parameters(model))
    finite = all(bool(torch.isfinite(t).all()) for d in memory(state) for t in d.values())
    largest = max(float(t.abs().max()) for t in state.p_memory_dict.values())
    return {"finite": finite, "moved": moved, "same": same_on_all(model), "alive": largest > 0}


def powersgd_heals(rank):
    model, back, exact, kept = ddp(), [], [], {}
    state = powersgd(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    with trainer_hooks.watch(
        model, optimizer, mode="heal", checkpoints=True, state={"hook": state}
    ) as monitor:
        for _ in range(80):
            step = monitor.step_index
            kept[step] = (memory(state), state.iter, state.rng.get_state()[1].tolist())
            if step == 55 and not back:
                with torch.no_grad():
                    next(model.parameters()).fill_(NAN)
            outcome = monitor.step(forward(model, rank, step))
            if outcome.rolled_back_to is not None:
                back.append(outcome.rolled_back_to)
                now = (memory(state), state.iter, state.rng.get_state()[1].tolist())
                exact.append(alike(kept[back[-1]], now))
    return {"back": len(back), "exact": exact, "same": same_on_all(model)}


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def unregistered(rank, make):
    """Return what was said, and whether one bad step on rank 1 poisoned what came after."""
    model, heard = ddp(), Heard()
    make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    log = logging.getLogger("trainvitals")
    log.addHandler(heard)
    try:
        with trainer_hooks.watch(model, optimizer) as monitor:
            for step in range(6):
                bad = step == 3 and rank == 1
                monitor.step(forward(model, rank, step, NAN if bad else 1.0))
            skips = facts_of(monitor).num_skips
    finally:
        log.removeHandler(heard)
    return {"said": [t for t in heard.texts if "communication hook" in t], "skips": skips}


def hooks(rank):
    local = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    return {
        "powersgd": unregistered(rank, powersgd),
        "fp16": unregistered(
            rank, lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)
        ),
        "local": unregistered(
            rank, lambda m: m.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        ),
        "none": unregistered(rank, lambda m: None),
    }


# -------------------------------------------------------------------------------------- refused


def joined(rank, how):
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    with trainer_hooks.watch(model, optimizer) as monitor:

        def train():
            with model.join() if how == "join" else Join([model]):
                for step in range(3 + rank):
                    monitor.step(forward(model, rank, step))
            return monitor

        found = refused(rank, train)
        with model.join(enable=False):
            monitor.step(forward(model, rank, 5))
    return found | {"steps": monitor.step_index}


def fused_in_backward():
    model = ddp()
    model._register_fused_optim(torch.optim.SGD, 0.01)
    return trainer_hooks.watch(model, torch.optim.SGD(model.parameters(), lr=0.05, fused=True))


def main(rank, folder):
    folder = Path(folder)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {
        f"zero {fused} {views}": zero_skips(rank, fused, views)
        for fused, views in ((True, False), (False, True))
    }
    found["zero heals"] = zero_heals(rank)
    found["zero relaunched"] = zero_relaunched(rank, folder)
    found["powersgd"] = powersgd_skips(rank)
    found["powersgd batched"] = powersgd_skips(rank, batched=True)
    found["powersgd first"] = powersgd_first(rank)
    found["powersgd heals"] = powersgd_heals(rank)
    found["hooks"] = hooks(rank)
    found["join"], found["Join"] = joined(rank, "join"), joined(rank, "Join")
    found["overlapped"] = refused(rank, zero_overlapped)
    found["fused in backward"] = refused(rank, fused_in_backward)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
