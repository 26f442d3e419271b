"""A pipeline of small stages, one per rank, as a training that hangs on order."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainer_hooks import watch

STEP_SECONDS = 0.05


class StageModule(nn.Module):
    """A stage, in whose forward a fault can happen."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self._at = at

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the next stage."""
        self._at("forward")
        out: Tensor = self.inner(x)
        return out


def train_stages(at: Callable[[str], None]) -> None:
    """Train until the process ends; ``at`` is called in each place of a fault."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = StageModule(at)
    example = torch.zeros(4, 16, requires_grad=True)
    stage = PipelineStage(
        module, rank, num_ranks, torch.device("cpu"), input_args=(example,), output_args=(example,)
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    with watch(module, optimizer, run="hang", pipeline=schedule) as monitor:
        while True:
            at("loader")
            time.sleep(STEP_SECONDS / 2)
            losses: list[Tensor] = []
            batch = torch.randn(16, 16)
            if rank == num_ranks - 1:
                schedule.step(target=batch, losses=losses)
            elif rank == 0:
                schedule.step(batch)
            else:
                schedule.step()
            at("collective")
            monitor.step(torch.stack(losses).mean().detach() if losses else None)
            at("between")
