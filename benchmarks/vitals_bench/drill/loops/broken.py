"""A DDP loop that trains well, and breaks one promise of a restart; ``--how none`` breaks none."""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainvitals

num_batches = 200
"""Batches of one epoch."""


class Shards:
    """This rank's batches; its state is the position in the epoch."""

    def __init__(self, rank: int, *, forgets_position: bool) -> None:
        self._forgets_position = forgets_position
        self._generator_seed = rank
        self._position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            seed = 2 * (self._position % num_batches) + self._generator_seed
            self._position += 1
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
            yield x, x.flip(1)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position, or repeat the batches from the start."""
        self._position = 0 if self._forgets_position else state["position"]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="heal")
    parser.add_argument("--how", choices=("none", "scheduler", "checkpoint", "loader"))
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = Shards(dist.get_rank(), forgets_position=options.how == "loader")
    checkpoints: bool | str = True
    if options.how == "checkpoint":  # each start has its own directory: the next one is empty
        checkpoints = f"checkpoints-{os.environ['TORCHELASTIC_RUN_ID']}"

    with trainvitals.watch(
        model, optimizer, scheduler, run="broken", mode=options.mode, checkpoints=checkpoints
    ) as monitor:
        is_resumed = monitor.step_index > 0
        for x, y in monitor.batches(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
            if is_resumed and options.how == "scheduler":  # `watch` steps it, too
                scheduler.step()
            if monitor.step_index >= options.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
