"""A pipeline of two stages with the schedule 1F1B; the last stage has the loss."""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import trainvitals


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="guard")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    # All stages must draw the same order.
    order = torch.Generator().manual_seed(2)
    dataset = TensorDataset(inputs, inputs.flip(1))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, generator=order)

    with trainvitals.watch(
        stage_module,
        optimizer,
        run="pipeline",
        mode=options.mode,
        checkpoints=options.mode == "heal",
        pipeline=schedule,
    ) as monitor:
        for x, y in monitor.batches(loader, epochs=options.epochs):
            loss, losses = None, list[Tensor]()
            if rank == size - 1:
                schedule.step(target=y, losses=losses)
                loss = torch.stack(losses).mean()
            elif rank == 0:
                schedule.step(x)
            else:
                schedule.step()
            monitor.step(loss, max_norm=1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
