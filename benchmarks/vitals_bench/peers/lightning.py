"""The same step in a Lightning Trainer that logs twelve scalars at each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitals_bench.peers.loggers import NAMES

if TYPE_CHECKING:
    from vitals_bench.training import Loop


def steps_of_a_trainer(
    loop: Loop, bare: Callable[[], object], steps: int, folder: Path
) -> tuple[list[float], list[float]]:
    """Return the seconds of the trainer's steps, and of bare ones in turn with them."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    trained: list[float] = []
    plain: list[float] = []
    began = time.perf_counter()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch)
            self.log_dict(dict.fromkeys(NAMES, loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return loop.optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            nonlocal began
            ended = time.perf_counter()
            trained.append(ended - began)
            bare()
            began = time.perf_counter()
            plain.append(began - ended)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps + 3,
            logger=CSVLogger(str(folder)),
            log_every_n_steps=1,
            gradient_clip_val=1.0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches: Any = torch.utils.data.DataLoader([loop.batch] * (steps + 3), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(Module(), batches)
    return trained[3:], plain[3:]
