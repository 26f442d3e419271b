"""An ordinary training loop, which `vitals drill` runs in the tests."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainvitals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="guard")
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    features = torch.randn(4096, 32)
    targets = features @ torch.randn(32, 8) + 0.1 * torch.randn(4096, 8)
    data = TensorDataset(features, targets)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data), drop_last=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    monitor = trainvitals.watch(
        model, optimizer, run="drilled", mode=options.mode, checkpoints=options.mode == "heal"
    )
    with monitor:
        for batch in monitor.batches(loader, epochs=10_000, probe=loss_of):
            if monitor.step_index >= options.steps:
                break
            loss = loss_of(batch)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
    dist.destroy_process_group()
    if os.environ.get("DRILLED_FAILURE"):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
