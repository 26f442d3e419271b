"""Lightning Fabric: loops of the user's own, through a Fabric."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.integrations.script import MAX_NORM, Script
from tests.integrations.trainings.torchrun import gradients_of
from trainer_hooks.integrations.fabric import attach


def train(
    script: Script,
    *,
    accumulate: int = 1,
    divided: bool = True,
    fused: bool = True,
    clip: Callable[..., Any] = lambda fabric, *of: fabric.clip_gradients(*of, max_norm=MAX_NORM),
    given: Callable[[], dict[str, Any]] = lambda: {"strategy": "ddp"},
    **options: Any,
) -> None:
    """Train the script's steps."""
    fabric = Fabric(accelerator="cpu", devices=script.world, **given())
    fabric.launch()
    net = script.net()
    model = fabric.setup_module(net)
    bare = script.optimizer(model.parameters(), fused=fused)
    optimizer, schedule = fabric.setup_optimizers(bare), script.schedule(bare)
    divisor = accumulate if divided else 1
    options = {"loss_divisor": divisor} | options if divisor > 1 else options
    with attach(fabric, model, optimizer, **options):
        for _ in range(script.num_steps):
            script.begin(net, bare)
            for last in range(accumulate - 1, -1, -1):
                with fabric.no_backward_sync(model, enabled=last > 0):
                    loss = model(**script.batch())["loss"]
                    fabric.backward(loss / divisor)
            script.poison(gradients_of(net))
            clip(fabric, model, optimizer)
            optimizer.step()
            schedule.step()
            script.end(net, bare)
            optimizer.zero_grad()


def by_value(fabric: Fabric, model: nn.Module, optimizer: Any) -> None:
    fabric.clip_gradients(model, optimizer, clip_val=MAX_NORM)


def nothing(*_: Any) -> None:
    pass


def float16() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return {"strategy": "ddp", "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def sharded() -> dict[str, Any]:
    strategy = ModelParallelStrategy(_sharded, data_parallel_size=2, tensor_parallel_size=1)
    return {"strategy": strategy}


VARIANTS = {
    "DDP": train,
    "DDP, not fused": partial(train, fused=False),
    "DDP, accumulating": partial(train, accumulate=2),
    "DDP, clipped by value": partial(train, clip=by_value),
    "DDP, never clipped": partial(train, clip=nothing, max_norm=math.inf),
    "DDP, clipped by the guard": partial(train, clip=nothing, max_norm=MAX_NORM),
    "DDP, clipped in a way of the loop's own": partial(
        train, clip=lambda _, model, __: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    ),
    "DDP, float16 with a scaler": partial(train, given=float16, fused=False),
    "FSDP2": partial(train, given=sharded),
}
