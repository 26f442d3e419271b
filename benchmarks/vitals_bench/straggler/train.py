"""A rank of a training whose compute is timed sleeps; faults come and go within it, by a plan.

``train.py FOLDER STRATEGY``: the plan is ``FOLDER/plan.json``, a list of ``Fault``.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks import watch

CALIBRATED_AT = 40
"""The step before which the ranks agree how long a healthy step takes on this machine."""
_LAYERS = 3
_SLEEPS = {"data": 0.008, "before": 0.008, "forward": 0.018, "backward": 0.03, "optimizer": 0.008}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in which a rank is late."""

    place: str
    """data, before, forward, backward, link, optimizer; or rotating, evaluation."""
    share: float
    """Of a step."""
    rank: int
    first: int
    last: int
    seed: int = 0

    def part(self, place: str, rank: int, step: int) -> float:
        """Return how late a rank is in a place of a step, as a share of a healthy one."""
        if not self.first <= step <= self.last:
            return 0.0
        if self.place == "rotating":
            drawn = random.Random(self.seed * 100_003 + step)
            who, where = drawn.randrange(dist.get_world_size()), drawn.choice(tuple(_SLEEPS))
            return self.share if (rank, place) == (who, where) else 0.0
        if self.place == "evaluation":
            is_due = rank == self.rank and place == "before" and step % 20 == 0
            return self.share if is_due else 0.0
        is_mine = rank == self.rank and place == self.place
        return self.share if is_mine else 0.0


class Pace:
    """Sleeps in each place for as long as it takes there in this step."""

    def __init__(self, plan: list[Fault]) -> None:
        self._plan = plan
        self._rank = dist.get_rank()
        self.step = 0
        self._step_seconds = 0.0
        self._ends: list[float] = []

    def late(self, place: str) -> float:
        """Return by how many seconds this rank is late here."""
        parts = (fault.part(place, self._rank, self.step) for fault in self._plan)
        return sum(parts) * self._step_seconds

    def stepped(self) -> None:
        """Count a step; after some, agree how long one takes."""
        self.step += 1
        if self.step <= CALIBRATED_AT:
            self._ends.append(time.monotonic())
        if self.step == CALIBRATED_AT:
            steps = [b - a for a, b in pairwise(self._ends)]
            seconds = torch.tensor(statistics.median(steps), dtype=torch.float64)
            dist.broadcast(seconds, src=0)
            self._step_seconds = float(seconds)

    def rest(self, place: str, parts: int = 1) -> None:
        """Sleep for one of the parts of a place."""
        time.sleep((_SLEEPS[place] + self.late(place)) / parts)


class _Sleep(torch.autograd.Function):
    """Takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.pace = pace
        pace.rest("forward", _LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pace.rest("backward", _LAYERS)
        return gradient, None


class _Layer(nn.Module):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sleep.apply(self.inner(x), self._pace)  # type: ignore[no-untyped-call]
        return out


class _Slow(torch.optim.SGD):
    """An optimizer whose step takes its time."""

    def __init__(self, parameters: Any, pace: Pace) -> None:
        super().__init__(parameters, lr=1e-3)
        self._pace = pace

    def step(self, closure: Any = None) -> Any:
        self._pace.rest("optimizer")
        return super().step(closure)


def _with_slow_link(pace: Pace) -> Callable[..., Any]:
    """Return a hook of DDP by which a rank has the sum later than the others."""

    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        is_last = bucket.is_last()

        def received(future: Any) -> torch.Tensor:
            if is_last:
                time.sleep(pace.late("link"))
            summed: torch.Tensor = future.value()[0]
            return summed

        late: torch.futures.Future[torch.Tensor] = reduced.get_future().then(received)
        return late

    return hook


class _SlowScatter:
    """A reduce-scatter of FSDP2 after which a rank has its part later than the others."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        work = dist.reduce_scatter_tensor(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )
        time.sleep(self._pace.late("link"))
        return work


def wrapped(strategy: str, pace: Pace) -> nn.Module:
    """Return the model under a strategy."""
    model = nn.Sequential(*(_Layer(pace) for _ in range(_LAYERS)), nn.Linear(16, 1))
    if strategy == "ddp":
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(None, _with_slow_link(pace))
        return parallel
    for layer in list(model)[1:]:
        fully_shard(layer)
    fully_shard(model)
    # The root's group, with the first layer in it, is the last of backward.
    model.set_custom_reduce_scatter(_SlowScatter(pace))  # type: ignore[operator]
    return model


class _Data:
    """Batches without end."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._pace.rest("data")
            yield torch.randn(8, 16)


def main() -> None:
    """Train as long as the plan says."""
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    plan = msgspec.convert(json.loads((folder / "plan.json").read_text()), list[Fault])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    pace = Pace(plan)
    model = wrapped(strategy, pace)
    optimizer = _Slow(model.parameters(), pace)
    num_steps = max(fault.last for fault in plan) + 1
    with watch(model, optimizer, run=f"straggler-{strategy}", mode="observe") as monitor:
        for batch in monitor.batches(_Data(pace)):
            pace.rest("before")
            loss = model(batch).square().mean()
            loss.backward()
            monitor.step(loss)
            pace.stepped()
            if pace.step == num_steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
