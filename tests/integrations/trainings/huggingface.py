"""Hugging Face's ``Trainer``."""

from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations.script import BATCH, MAX_NORM, Script
from tests.integrations.trainings.accelerate import (
    engine_gradients,
    engine_state,
    without_builds,
)
from tests.integrations.trainings.torchrun import gradients_of
from trainer_hooks.integrations.huggingface import VitalsCallback

ZERO = {
    "zero_optimization": {"stage": 2},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}


class Scripted(Trainer):
    """Trains on this rank's batch, and has the script's faults after the last backward."""

    def __init__(self, script: Script, micro_batches: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.script, self.micro_batches = script, micro_batches

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        if self.is_deepspeed_enabled:  # which forgets what it was given
            self.optimizer = self.script.optimizer(self.model.parameters())
        return super().create_optimizer(*args)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = self.script.schedule(optimizer or self.optimizer)
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.script.dataset(self.micro_batches), batch_size=BATCH)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Do as the trainer does; overridden, so that no probe evaluates a batch with a fault."""
        return super().compute_loss(*args, **kwargs)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients and not self.is_deepspeed_enabled:
            self.script.poison(gradients_of(model))
        return loss


class Played(TrainerCallback):
    """Begins and ends the script's steps."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        self.script.begin(model, optimizer)

    def on_step_end(self, args, state, control, model, optimizer, **kwargs) -> None:
        self.script.end(model, optimizer)


class PlayedByEngine(TrainerCallback):
    """The same where DeepSpeed's engine has the state, and steps within backward."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.engine = engine = self.trainer.model_wrapped
        step = engine.step

        def poisoned() -> None:
            if engine.is_gradient_accumulation_boundary():
                self.script.poison(engine_gradients(engine))
            step()

        engine.step = poisoned

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.script.begin(tensors=engine_state(self.engine))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.script.end(tensors=engine_state(self.engine))


def trained(
    script: Script,
    *,
    micro_batches: int = 1,
    fused: bool = True,
    knows_trainer: bool = True,
    scaled: bool = False,
    engine: bool = False,
) -> None:
    """Train with the callback, which knows its trainer or not.

    With ``scaled``, with the scaler that the trainer's accelerator makes where there is a GPU.
    """
    net = script.net()
    optimizer = script.optimizer(net.parameters(), fused=fused)
    backend: dict[str, Any] = {"use_cpu": True}
    if engine:
        without_builds()
        AcceleratorState._reset_state(reset_partial_state=True)
        backend = {"deepspeed": ZERO, "ddp_backend": "gloo"}
    played = PlayedByEngine(script) if engine else Played(script)
    trainer = Scripted(
        script,
        micro_batches,
        model=net,
        args=TrainingArguments(
            output_dir=str(script.folder),
            report_to=[],
            save_strategy="no",
            logging_steps=5,
            disable_tqdm=True,
            max_steps=script.num_steps,
            max_grad_norm=MAX_NORM,
            gradient_accumulation_steps=micro_batches,
            per_device_train_batch_size=BATCH,
            **backend,
        ),
        train_dataset=script.dataset(micro_batches),
        optimizers=(optimizer, script.schedule(optimizer)),
        callbacks=[played],
    )
    played.trainer, accelerator = trainer, trainer.accelerator
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
    trainer.add_callback(VitalsCallback(trainer if knows_trainer else None))
    trainer.train()
    accelerator.state._reset_state(reset_partial_state=engine)


VARIANTS = {
    "DDP": trained,
    "DDP, accumulating": partial(trained, micro_batches=2),
    "DDP, not fused": partial(trained, fused=False),
    "DDP, float16 with a scaler": partial(trained, scaled=True),
    "DDP, float16 with a scaler, not fused": partial(trained, scaled=True, fused=False),
    "callback without the trainer": partial(trained, knows_trainer=False),
    "DeepSpeed, ZeRO 2, accumulating": partial(trained, micro_batches=2, engine=True),
}
