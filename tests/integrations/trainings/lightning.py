"""Lightning's Trainer: automatic optimization in every way that a CPU can run, and a manual one."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.integrations.script import BATCH, MAX_NORM, Net, Script
from tests.integrations.trainings.torchrun import gradients_of
from trainer_hooks.integrations.lightning import VitalsCallback


class Lit(LightningModule):
    """The script's network as a module of Lightning's, under the same names."""

    def __init__(self, script: Script, *, fused: bool = True) -> None:
        super().__init__()
        for name, child in script.net().named_children():
            self.add_module(name, child)
        self.script, self.fused = script, fused

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return Net.forward(self, inputs, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = self.script.optimizer(self.parameters(), fused=self.fused)
        schedule = {"scheduler": self.script.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.script.begin(self, self.trainer.optimizers[0])

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.script.poison(gradients_of(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.script.end(self, self.trainer.optimizers[0])


class Sharded(Lit):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class OwnClip(Lit):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)


class Manual(Lit):
    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(**batch)["loss"])
        self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


def train(
    script: Script,
    module: type[Lit] = Lit,
    *,
    accumulate: int = 1,
    clip: float | None = MAX_NORM,
    callback: type[Callback] = VitalsCallback,
    options: Any = dict,
    **of_the_module: Any,
) -> None:
    """Train the script's steps."""
    given = {"strategy": "ddp", "gradient_clip_val": clip} | options()
    trainer = Trainer(
        accelerator="cpu",
        devices=script.world,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[callback()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=script.folder,
        **given,
    )
    loader = DataLoader(script.dataset(accumulate), batch_size=BATCH)
    trainer.fit(module(script, **of_the_module), loader)


def float16() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def sharded() -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)}


VARIANTS = {
    "DDP": train,
    "DDP, not fused": partial(train, fused=False),
    "DDP, accumulating": partial(train, accumulate=2),
    "DDP, clipped by value": partial(train, options=lambda: {"gradient_clip_algorithm": "value"}),
    "DDP, a clip of the module's own": partial(train, module=OwnClip, clip=None),
    "DDP, float16 with a scaler": partial(train, options=float16, fused=False),
    "DDP, float16, fused and never clipped": partial(train, options=float16, clip=None),
    "FSDP2": partial(train, module=Sharded, options=sharded),
    "manual optimization": partial(train, module=Manual, clip=None),
}
