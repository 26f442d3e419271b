"""PyTorch's ImageNet example: DDP, DistributedSampler, StepLR by epochs, validation."""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainvitals

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # trained without a tracker
    SummaryWriter = None  # type: ignore[assignment, misc]


def build_model() -> nn.Module:
    """Return a small network with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def build_dataset(num_images: int, seed: int) -> TensorDataset:
    """Return noisy images of four classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num_images,), generator=generator)
    patterns = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(num_images, 3, 8, 8, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


def validate(loader: DataLoader[tuple[Tensor, ...]], model: nn.Module) -> float:
    """Return the accuracy on the validation set."""
    model.eval()
    num_right = num_images = 0
    with torch.no_grad():
        for images, labels in loader:
            num_right += int((model(images).argmax(1) == labels).sum())
            num_images += len(labels)
    model.train()
    return num_right / num_images


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="guard")
    parser.add_argument("--epochs", type=int, default=90)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    dataset = build_dataset(256, seed=1)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    val_loader = DataLoader(build_dataset(64, seed=2), batch_size=32)
    has_writer = SummaryWriter is not None and dist.get_rank() == 0
    writer = SummaryWriter() if has_writer else None

    def loss_of(batch: list[Tensor]) -> Tensor:
        loss: Tensor = criterion(model(batch[0]), batch[1])
        return loss

    with trainvitals.watch(
        model,
        optimizer,
        scheduler,
        scheduler_every="epoch",
        run="imagenet",
        mode=options.mode,
        checkpoints=options.mode == "heal",
    ) as monitor:
        for batch in monitor.batches(loader, epochs=options.epochs, probe=loss_of):
            loss = loss_of(batch)
            loss.backward()
            monitor.step(loss)
            if writer is not None:
                writer.add_scalar("loss", loss.item(), monitor.step_index)
            if monitor.step_index % len(loader) == 0:
                monitor.evaluate(accuracy=validate(val_loader, model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
