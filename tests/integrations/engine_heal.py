"""A Hugging Face trainer on DeepSpeed's engine that goes back; run on each of two ranks."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments

from tests.integrations.script import BATCH, MAX_NORM, SETTINGS, Script
from tests.integrations.trainings.accelerate import without_builds
from tests.integrations.trainings.huggingface import ZERO, Scripted
from trainer_hooks.integrations.huggingface import VitalsCallback

STEPS, DAMAGED_AT = 96, 61


class Damaged(TrainerCallback):
    """Writes a NaN into the weights that rank 1 updates, once, and keeps the trainer's steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []

    def on_step_end(self, args, state, control, lr_scheduler, **kwargs) -> None:
        engine = self.trainer.model_wrapped
        self.steps.append((state.global_step, engine.global_steps, lr_scheduler.get_last_lr()[0]))
        if len(self.steps) == DAMAGED_AT and dist.get_rank() == 1:
            with torch.no_grad():
                engine.optimizer.single_partition_of_fp32_groups[0][0] = float("nan")


def main(folder: Path) -> None:
    """Train, and write down what was seen."""
    torch.set_num_threads(1)
    os.environ |= {
        "VITALS_DIR": str(folder / "runs"),
        "VITALS_SHM": str(folder),
        "VITALS_AGENT": "off",
        **SETTINGS,
    }
    script = Script(folder)
    without_builds()
    net, damaged = script.net(), Damaged()
    optimizer = script.optimizer(net.parameters())
    trainer = Scripted(
        script,
        1,
        model=net,
        args=TrainingArguments(
            output_dir=str(folder),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_steps=STEPS,
            max_grad_norm=MAX_NORM,
            per_device_train_batch_size=BATCH,
            deepspeed=ZERO,
            ddp_backend="gloo",
        ),
        train_dataset=script.dataset(STEPS),
        optimizers=(optimizer, script.schedule(optimizer)),
        callbacks=[damaged],
    )
    damaged.trainer = trainer
    trainer.add_callback(VitalsCallback(trainer, mode="heal"))
    trainer.train()
    weights = [p.detach().double() for p in trainer.model.parameters()]
    seen = {
        "steps": damaged.steps,
        "finite": all(bool(w.isfinite().all()) for w in weights),
        "sum": float(sum(w.sum() for w in weights)),
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    os._exit(0)  # gloo aborts a process at its exit now and then; what was found is written


if __name__ == "__main__":
    main(Path(sys.argv[1]))
