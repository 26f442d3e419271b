"""Plain loops under torchrun: the reference that every framework is held against."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks
from tests.integrations.script import MAX_NORM, Script


def gradients_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return this rank's gradients by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _sharded(net: nn.Module) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def watched(script: Script, wrap: Callable[[nn.Module], nn.Module], *, fused: bool = True) -> None:
    """Train with ``watch`` and ``monitor.step``."""
    _join()
    model = wrap(script.net())
    optimizer = script.optimizer(model.parameters(), fused=fused)
    with trainer_hooks.watch(model, optimizer, script.schedule(optimizer)) as monitor:
        for _ in range(script.num_steps):
            script.begin(model, optimizer)
            loss = model(**script.batch())["loss"]
            loss.backward()
            script.poison(gradients_of(model))
            monitor.step(loss, max_norm=MAX_NORM)
            script.end(model, optimizer)


def attached(script: Script, how: str) -> None:
    """Train with ``attach`` and a clip of the loop's own, in each way it may be told the norm."""
    _join()
    model = DistributedDataParallel(script.net())
    optimizer = script.optimizer(model.parameters())
    scheduler = script.schedule(optimizer)
    with trainer_hooks.attach(model, optimizer) as guard:
        for _ in range(script.num_steps):
            script.begin(model, optimizer)
            loss = model(**script.batch())["loss"]
            loss.backward()
            script.poison(gradients_of(model))
            if how == "judged before":
                guard.loss(loss)
                guard.before_clip(MAX_NORM)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if how == "told":
                guard.loss(loss)
                guard.grad_norm(norm)
            optimizer.step()
            scheduler.step()
            script.end(model, optimizer)
            optimizer.zero_grad()


def scaled(script: Script) -> None:
    """Train in float16 with a gradient scaler."""
    _join()
    model = DistributedDataParallel(script.net())
    optimizer = script.optimizer(model.parameters())
    scheduler = script.schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with trainer_hooks.attach(model, optimizer, scaler=scaler) as guard:
        for _ in range(script.num_steps):
            script.begin(model, optimizer)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(**script.batch())["loss"]
            scaler.scale(loss).backward()
            script.poison(gradients_of(model))
            guard.loss(loss)
            guard.before_clip(MAX_NORM)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            script.end(model, optimizer)
            optimizer.zero_grad()


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


VARIANTS = {
    "watch, DDP": partial(watched, wrap=DistributedDataParallel),
    "watch, FSDP2": partial(watched, wrap=_sharded),
    "watch, DDP, not fused": partial(watched, wrap=DistributedDataParallel, fused=False),
    "attach, judged before the clip": partial(attached, how="judged before"),
    "attach, told the norm": partial(attached, how="told"),
    "attach, nothing told": partial(attached, how="nothing told"),
    "attach, float16 with a scaler": scaled,
}
