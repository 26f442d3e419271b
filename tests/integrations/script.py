"""What happens to one rank's training, step by step; every framework plays the same script.

Some clean steps, then for each fault one step that has it on rank 1 alone, and one clean step.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

KINDS = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30, "x100": 100.0}
PLACES = ("loss", "element", "all")
FINITE = ("1e30", "x100")
CASES = [(place, kind) for place in PLACES for kind in KINDS]
NAMES = [f"{kind} in {place}" for place, kind in CASES]
WARM_UP = 17
SETTINGS = {
    "VITALS_OUTLIER_WARM_UP": "12",
    "VITALS_OUTLIER_FIRST": "4",
    "VITALS_OUTLIER_PROGRESS": "1e-9",
    "VITALS_OUTLIER_GRAD_NORM_RATIO": "10",
    "VITALS_OUTLIER_GRAD_NORM_FIRST": "2",
    "VITALS_LADDER_MAX_ROW": "100",
    "VITALS_LADDER_MAX_WITHHELD": "1000",
}
"""So that outliers are judged from ``WARM_UP`` on (by default it takes 50 trained steps), at the
factors of the schedule, and every fault of it alike."""
BATCH = 4
MAX_NORM = 0.05
"""Below every norm here, so that it always clips."""
LR, DECAY = 1e-4, 0.99
WIDTH, HIDDEN, OUT = 12, 20, 3


def _schedule() -> dict[int, tuple[str, str]]:
    """Return the case of each step that has one: a finite fault comes twice, then one is clean."""
    steps: dict[int, tuple[str, str]] = {}
    step = WARM_UP
    for case in CASES:
        times = 2 if case[1] in FINITE else 1
        steps |= dict.fromkeys(range(step, step + times), case)
        step += times + 1
    return steps


SCHEDULE = _schedule()
NUM_STEPS = max(SCHEDULE) + 2


def fault_steps(name: str) -> list[int]:
    """Return the steps that have this fault: one, or two in a row."""
    return [step for step, (place, kind) in SCHEDULE.items() if name == f"{kind} in {place}"]


class Factor:
    """What the network multiplies its loss by: the faults in the loss."""

    value = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    """Has one element: ranks that share it out hold nothing of it, but for one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Takes (batch, sequence, 6); returns its loss as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)
        self.scale = Scale()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.inp(inputs)
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        loss = (self.scale(self.head(x)).float() - labels.float()).square().mean()
        return {"loss": loss * Factor.value}


def make_net() -> Net:
    """Return the network: the same on every rank and in every framework."""
    torch.manual_seed(7)
    return Net()


def make_batch(rank: int) -> dict[str, Tensor]:
    """Return the one batch of a rank, which it sees in every step."""
    generator = torch.Generator().manual_seed(1000 + rank)
    inputs = torch.randn(BATCH, 4, 6, generator=generator)
    return {"inputs": inputs, "labels": torch.randn(BATCH, 4, 3, generator=generator)}


class Repeated(Dataset):
    """One batch's items over and over, for a loader with ``batch_size=BATCH`` and no shuffling."""

    def __init__(self, batch: Mapping[str, Tensor], num_batches: int) -> None:
        self._batch, self._num = batch, num_batches * BATCH

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index % BATCH] for name, tensor in self._batch.items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all that a skipped step may not change, on this rank: live, not copied."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = [
        moment
        for param in params
        for moment in optimizer.state.get(param, {}).values()
        if isinstance(moment, Tensor)
    ]
    return [*params, *moments, *model.buffers()]


class Script:
    """One rank's part. Call ``begin``, ``poison`` and ``end`` once in every attempted step."""

    num_steps = NUM_STEPS

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.step = 0
        self.changed: list[bool] = []
        self.finite: list[bool] = []
        self._before: list[Tensor] = []
        Factor.value = 1.0

    def net(self) -> Net:
        return make_net()

    def batch(self) -> dict[str, Tensor]:
        return make_batch(self.rank)

    def dataset(self, micro_batches: int = 1) -> Repeated:
        return Repeated(self.batch(), self.num_steps * micro_batches)

    def optimizer(self, params: Iterable[Any], *, fused: bool = True) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, lr=LR, fused=fused)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: DECAY**step)

    # -------------------------------------------------------------------------- in every step

    def begin(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tensors: Iterable[Tensor] | None = None,
    ) -> None:
        """Copy the state before forward, and let the loss be at fault where the script says so."""
        case = self._case()
        here = case is not None and case[0] == "loss" and self.rank == 1
        Factor.value = KINDS[case[1]] if here else 1.0
        self._before = self._copies(model, optimizer, tensors)

    @torch.no_grad()
    def poison(self, gradients: Mapping[str, Tensor]) -> None:
        """Write the step's fault into this rank's gradients; call after the last backward."""
        local = [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in gradients.values()]
        local = [grad for grad in local if grad.numel()]
        square = torch.zeros(())
        for grad in local:
            square = square + grad.float().square().sum()
        dist.all_reduce(square)  # a rank's part alone may be small
        case = self._case()
        if case is None or self.rank != 1 or case[0] == "loss":
            return
        value, relative = KINDS[case[1]], case[1] == "x100"
        if case[0] == "all":
            for grad in local:
                grad.mul_(value) if relative else grad.fill_(value)
        else:
            local[0].view(-1)[0] = value * math.sqrt(square.item()) if relative else value

    def end(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tensors: Iterable[Tensor] | None = None,
    ) -> None:
        """Compare the state after the update with that before forward."""
        after, before = self._copies(model, optimizer, tensors), self._before
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        self.changed.append(not same)
        self.finite.append(
            all(bool(torch.isfinite(t).all()) for t in after if t.is_floating_point())
        )
        self.step += 1
        Factor.value = 1.0

    def _case(self) -> tuple[str, str] | None:
        return SCHEDULE.get(self.step)

    def _copies(self, model: Any, optimizer: Any, tensors: Any) -> list[Tensor]:
        live = state_of(model, optimizer) if tensors is None else tensors
        with torch.no_grad():
            return [getattr(t, "to_local", lambda t=t: t)().detach().clone() for t in live]

    def result(self) -> dict[str, Any]:
        """Return what this rank saw: whether each step changed anything, and left it finite."""
        assert self.step == self.num_steps, f"played {self.step} of {self.num_steps} steps"
        return {"changed": self.changed, "finite": self.finite}
