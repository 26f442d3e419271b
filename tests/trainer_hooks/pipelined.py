"""A training by ``torch.distributed.pipelining``, watched or bare."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, MICRO = 14, 16, 4
BAD = (3, 4, 9)
"""Steps that are left out of the bare program, and are bad in the watched one."""
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
OPTIMIZERS = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd-momentum-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}


def local(tensor):
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    """Return a tensor with the parts of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Block(nn.Module):
    """Each stage has a parameter, a buffer and names that the others have too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


class Wide(nn.Module):
    """A stage that tensor parallelism splits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x)


def stages_of_rank(schedule, rank, size):
    """Return the stages of a rank: the first and last one are on rank 0 if they form a V."""
    second = {"interleaved": rank + size, "zero bubble": rank + size, "zbv": 2 * size - 1 - rank}
    return [rank, *([second[schedule]] if schedule in second else [])]


def split(rank, size):
    """Return a stage's slice of one sequence, whose names differ from those of the others."""
    torch.manual_seed(5)
    whole = nn.Sequential(*(layer for _ in range(size) for layer in (nn.Linear(8, 8), nn.Tanh())))
    return whole[2 * rank : 2 * rank + 2]


class Pipelined:
    """One rank of the training; equal names on all stages unless ``distinct``.

    ``mesh`` has the dimensions pp, dp for the wrapper "ddp", "ddp, wide" or "fsdp2", and tp for
    "tp". Wide stages learn their shapes in the first step.
    """

    def __init__(
        self, optimizer="adamw-fused", schedule="gpipe", *, distinct=False, mesh=None, wrapper=""
    ):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seed, self.group = 0, None
        if mesh is not None:
            self.rank, self.size = mesh["pp"].get_local_rank(), mesh["pp"].size()
            self.group = mesh["pp"].get_group()
            if "dp" in mesh.mesh_dim_names:
                self.seed = 10**6 * mesh["dp"].get_local_rank()
        numbers = stages_of_rank(schedule, self.rank, self.size)
        num_stages, self.schedule_stages = len(numbers) * self.size, numbers
        self.stages = []
        for number in numbers:
            torch.manual_seed(number)
            block = Wide if "tp" in wrapper or "wide" in wrapper else Block
            self.stages.append(split(number, num_stages) if distinct else block())
            if "tp" in wrapper:
                plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
                parallelize_module(self.stages[-1], mesh["tp"], plan)
            if "fsdp2" in wrapper:
                fully_shard(self.stages[-1], mesh=mesh["dp"])
        self.module = nn.ModuleList(self.stages) if len(numbers) > 1 else self.stages[0]
        if wrapper.startswith("ddp"):
            self.module = DistributedDataParallel(
                self.module, process_group=mesh["dp"].get_group(), broadcast_buffers=False
            )
        self.is_first, self.is_last = 0 in numbers, num_stages - 1 in numbers
        # Without these, torch runs the later stages on uninitialized memory to learn the shapes,
        # which the statistics of batch norm keep.
        chunk = torch.zeros(BATCH // MICRO, 8)
        moved = torch.zeros(BATCH // MICRO, 8, requires_grad=True)
        modules = self.stages if len(numbers) > 1 else [self.module]
        stages = [
            PipelineStage(
                module, number, num_stages, torch.device("cpu"), group=self.group,
                **{} if "wide" in wrapper
                else {"input_args": moved if number else chunk, "output_args": moved},
            )
            for number, module in zip(numbers, modules, strict=True)
        ]  # fmt: skip
        self.schedule = SCHEDULES[schedule](
            stages if len(numbers) > 1 else stages[0], MICRO, loss_fn=nn.functional.mse_loss
        )
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())

    def backward(self, step, factor=1.0):
        """Run the schedule on a step's data; return the loss on the last stage, otherwise None."""
        torch.manual_seed(1000 * step + self.rank + self.seed)
        generator = torch.Generator().manual_seed(step + self.seed)
        x = torch.randn(BATCH, 8, generator=generator)
        arguments = (x * factor,) if self.is_first else ()
        if not self.is_last:
            self.schedule.step(*arguments)
            return None
        losses = []
        self.schedule.step(*arguments, target=x.flip(1), losses=losses)
        return torch.stack(losses).mean()

    def evaluate(self, step):
        """Run the schedule forward only on a step's data; return the loss on the last stage."""
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step + self.seed))
        arguments = (x,) if self.is_first else ()
        if not self.is_last:
            self.schedule.eval(*arguments)
            return None
        losses = []
        self.schedule.eval(*arguments, target=x.flip(1), losses=losses)
        return torch.stack(losses).mean()

    def bits(self):
        """Return this rank's model and optimizer state."""
        state = dict(self.module.state_dict())
        for i, param in enumerate(self.module.parameters()):
            held = self.optimizer.state.get(param, {})
            state |= {f"{i}.{name}": value for name, value in held.items()}
        return {k: local(v).clone() for k, v in state.items() if isinstance(v, torch.Tensor)}

    def run_bare(self, *, without=BAD, steps=STEPS, max_norm=None):
        """Train without Vitals, without the updates of some steps."""
        for step in range(steps):
            if step in without:
                continue
            self.backward(step)
            if max_norm is not None:
                self.clip(max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.bits()

    def norm(self):
        """Return the norm of all stages' gradients, without their replicas."""
        grads = [whole(p.grad).double() for p in self.module.parameters() if p.grad is not None]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def clip(self, max_norm):
        """Clip to the norm of all stages."""
        norm = self.norm()
        for param in self.module.parameters():
            param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).float())
