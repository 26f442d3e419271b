"""Loops that train with Accelerate."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integrations.script import BATCH, MAX_NORM, Script, state_of
from tests.integrations.trainings.torchrun import gradients_of
from trainer_hooks.integrations.accelerate import attach


def accelerated(
    script: Script,
    *,
    micro_batches: int = 1,
    fused: bool = True,
    clips: bool = True,
    scaled: bool = False,
    max_norm: float | None = None,
) -> None:
    """Train; with ``scaled``, with the scaler that Accelerate makes where there is a GPU."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=micro_batches,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # one step of the schedule
        mixed_precision="fp16" if scaled else "no",
    )
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        accelerator.native_amp = True
    net = script.net()
    optimizer = script.optimizer(net.parameters(), fused=fused)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, script.schedule(optimizer))
    attached = attach(accelerator, model, optimizer, max_norm=max_norm)
    begun = False
    for batch in DataLoader(script.dataset(micro_batches), batch_size=BATCH):
        with accelerator.accumulate(model):
            if not begun:
                script.begin(model, optimizer)
            begun = not accelerator.sync_gradients
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                script.poison(gradients_of(model))
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            if accelerator.sync_gradients:
                script.end(model, optimizer)
            optimizer.zero_grad()
    attached.close()
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=False)


def without_builds() -> None:
    """Keep DeepSpeed from compiling operators of its own, which takes minutes; gloo will do."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)


def engine_state(engine: Any) -> list[Tensor]:
    """Return all that a skipped step of ZeRO 2 may not change on this rank."""
    return [*engine.module.parameters(), *state_of(engine.module, engine.optimizer.optimizer)]


def engine_gradients(engine: Any) -> Mapping[str, Tensor]:
    """Return what this rank's update under ZeRO 2 will be made from."""
    averaged = engine.optimizer.averaged_gradients
    found = {f"{i}.{j}": grad for i in averaged for j, grad in enumerate(averaged[i])}
    return {n: grad for n, grad in found.items() if not getattr(grad, "_zero_padding", False)}


def engined(script: Script) -> None:
    """Train with DeepSpeed's engine, which Accelerate makes and steps within ``backward``."""
    without_builds()
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=MAX_NORM),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    settings = accelerator.deepspeed_plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = BATCH
    net = script.net()
    optimizer = script.optimizer(net.parameters())
    engine, optimizer, scheduler = accelerator.prepare(net, optimizer, script.schedule(optimizer))
    step = engine.step

    def poisoned() -> None:
        script.poison(engine_gradients(engine))
        step()

    engine.step = poisoned
    attached = attach(accelerator, engine, optimizer)
    for batch in DataLoader(script.dataset(), batch_size=BATCH):
        script.begin(tensors=engine_state(engine))
        accelerator.backward(engine(**batch)["loss"])
        accelerator.clip_grad_norm_(engine.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        script.end(tensors=engine_state(engine))
    attached.close()
    AcceleratorState._reset_state(reset_partial_state=True)


VARIANTS = {
    "DDP": accelerated,
    "DDP, accumulating": partial(accelerated, micro_batches=2),
    "DDP, not fused": partial(accelerated, fused=False),
    "DDP, float16 with a scaler": partial(accelerated, scaled=True),
    "DDP, float16 with a scaler, not fused": partial(accelerated, scaled=True, fused=False),
    "DDP, says that it does not clip": partial(accelerated, clips=False, max_norm=float("inf")),
    "DeepSpeed, ZeRO 2": engined,
}
