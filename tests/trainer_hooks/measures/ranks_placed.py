"""What each of two ranks does in ``test_sections``: trainings in which rank 1 sleeps somewhere."""

import copy
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_hooks

PLACES = ("data_wait", "before_forward", "forward", "backward", "after_backward", "optimizer")
NUM = 2 * len(PLACES)
"""Steps in which a rank is late."""
LATE = 0.06


class Late(torch.autograd.Function):
    """Sleeps in forward and in backward, where it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Callable[[str], None]) -> Tensor:
        ctx.at = at
        at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.at("backward")
        return gradient, None


class Network(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self._at = nn.Linear(8, 8), nn.Linear(8, 1), at

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.last(Late.apply(self.first(x), self._at))}


class Optimizer(torch.optim.SGD):
    at: Callable[[str], None]

    def step(self, closure: Any = None) -> Any:
        self.at("optimizer")
        return super().step(closure)


def train(kind: str, folder: Path, rank: int, *, micro: int = 1) -> dict[str, Any]:
    """Train two steps for each place, two before and one after; return the errors swallowed."""
    place = folder / kind
    place.mkdir(exist_ok=True)
    os.environ["VITALS_SHM"] = str(place)
    now = -2

    def at(where: str) -> None:
        if rank == 1 and 0 <= now < NUM and PLACES[now // 2] == where:
            time.sleep(LATE)

    model: nn.Module = Network(at)
    if kind == "fsdp2":
        fully_shard(model.last)
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    elif kind == "compiled":
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    optimizer = Optimizer(model.parameters(), lr=0.01)
    optimizer.at = at

    def data() -> Any:
        while True:
            at("data_wait")
            yield torch.ones(4, 8)

    with trainer_hooks.watch(model, optimizer) as monitor:
        for batch in monitor.batches(data()):
            at("before_forward")
            for index in range(micro):
                model.require_backward_grad_sync = index == micro - 1
                loss = model(batch)["out"].square().mean()
                loss.backward()
            with torch.no_grad():
                model(batch)  # a look at the model in between is no forward of the step
            at("after_backward")
            monitor.step(loss)
            now += 1
            if now > NUM:  # one more step, in which the other waits for the last late one
                break
    left = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    return {
        "errors": monitor.swallowed_errors,
        "left": sum("sections" in type(hook).__module__ for hook in left),
        "timed": sum("unshard" in vars(g) for g in _groups(model)),
    }


def _groups(model: nn.Module) -> list[Any]:
    if not hasattr(model, "_get_fsdp_state"):
        return []
    state = model._get_fsdp_state()
    return list(getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]))


def copied(folder: Path, rank: int) -> dict[str, Any]:
    """Copy a watched DDP while it trains, and pickle it; train the copy."""
    os.environ["VITALS_SHM"] = str(folder)
    model = DistributedDataParallel(nn.Linear(8, 1))
    with trainer_hooks.watch(model, torch.optim.SGD(model.parameters())) as monitor:
        for _ in range(2):
            loss = model(torch.ones(4, 8)).mean()
            loss.backward()
            monitor.step(loss)
        other = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        loaded = [float(m.module(torch.ones(1, 8))) for m in (model, other, again)]
        own = list(other._forward_hooks.values())
        return {"errors": monitor.swallowed_errors, "out": loaded, "hooks": [str(h) for h in own]}


def main(rank: int, folder: str) -> None:
    place = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=2
    )
    kinds = ("ddp", "ddp_micro", "fsdp2", "fsdp1", "plain", "compiled")
    said: dict[str, Any] = {
        kind: train(kind, place, rank, micro=3 if kind == "ddp_micro" else 1) for kind in kinds
    }
    said["copied"] = copied(place, rank)
    (place / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
