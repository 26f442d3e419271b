"""Loops that train with Accelerate."""

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from tests.integrations.script import BATCH, MAX_NORM, Script
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


VARIANTS = {
    "DDP": accelerated,
    "DDP, accumulating": partial(accelerated, micro_batches=2),
    "DDP, not fused": partial(accelerated, fused=False),
    "DDP, float16 with a scaler": partial(accelerated, scaled=True),
    "DDP, float16 with a scaler, not fused": partial(accelerated, scaled=True, fused=False),
    "DDP, says that it does not clip": partial(accelerated, clips=False, max_norm=float("inf")),
}
