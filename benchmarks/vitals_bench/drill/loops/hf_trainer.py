"""Hugging Face's Trainer with VitalsCallback."""

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from trainer_hooks.integrations.huggingface import VitalsCallback


class Regression(nn.Module):
    """A small network that returns its loss, as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    data = [{"inputs": x, "labels": x.sum().reshape(1)} for x in inputs]
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=600,
        per_device_train_batch_size=16,
        learning_rate=0.003,
        warmup_steps=20,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        save_steps=50,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=data)
    trainer.add_callback(VitalsCallback(trainer))
    trainer.train()


if __name__ == "__main__":
    main()
