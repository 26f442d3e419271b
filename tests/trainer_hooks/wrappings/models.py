"""One small network, wrapped in every way; and what each wrapping needs of the loop around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
SCALE = 64.0
WIDTH, HIDDEN, OUT = 12, 20, 3
"""Three outputs: the head cannot be cut evenly, and on four ranks one of them holds none of it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Mix(nn.Linear):
    """A layer of one parameter: FSDP1 cuts it into parts of the same shape."""

    def __init__(self) -> None:
        super().__init__(6, 6, bias=False)


class Net(nn.Module):
    """Takes (batch, sequence, 6). ``batch_norm`` stands for all state that forward writes."""

    def __init__(self, *, batch_norm: bool = True) -> None:
        super().__init__()
        self.mix = Mix()
        self.inp = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.head = nn.Linear(WIDTH, OUT)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(self.mix(x))
        for block in self.blocks:
            x = block(x)
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return self.head(x.to(self.head.weight.dtype))


class Table(nn.Module):
    """A table whose gradient is sparse, before the network."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.table((x[..., 0].abs() * 10).long()))


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """One way to wrap ``Net``."""

    wrap: Callable[[nn.Module], nn.Module]
    tensor_parallel: int = 1
    """Neighbouring ranks that see the same data."""
    batch_norm: bool = True
    sparse: bool = False
    mixed: bool = False
    """The head in bfloat16, the rest in float32."""
    micro_batches: int = 1
    autocast: torch.dtype | None = None
    scaled: bool = False
    rounded: bool = False
    """Computed in less than float32, which a reference elsewhere does not round alike."""
    fused: bool = True
    since: tuple[int, int] = (2, 7)
    """The oldest torch that was seen to train so on CPUs at all."""

    def net(self) -> nn.Module:
        """Return the bare network: the same on every rank."""
        torch.manual_seed(7)
        net = Table() if self.sparse else Net(batch_norm=self.batch_norm)
        if self.mixed:
            net.head.bfloat16()
        return net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer over the wrapped model's parameters."""
        if self.sparse:  # the only one that takes sparse and dense gradients alike
            return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.0)
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.fused)

    def scaler(self, model: nn.Module) -> torch.amp.GradScaler | None:
        """Return the gradient scaler that goes with the wrapper, if the loop has one."""
        if not self.scaled:
            return None
        kind = ShardedGradScaler if isinstance(model, Fsdp1) else torch.amp.GradScaler
        return kind("cpu", init_scale=SCALE)

    def computing(self) -> Any:
        """Return the context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.autocast)


# -------------------------------------------------------------------------------- how to wrap


def _plain(net: nn.Module) -> nn.Module:
    """Average by hand, as loops do that know no wrapper."""
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(_average)
    return net


def _average(param: Tensor) -> None:
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def _ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def _checkpointed(net: nn.Module) -> nn.Module:
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)
    return net


def _each_compiled(net: nn.Module, backend: str = "aot_eager") -> nn.Module:
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=backend)
    return net


def _fsdp1(net: nn.Module, **how: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block, Mix})
    return Fsdp1(net, auto_wrap_policy=policy, device_id=torch.device("cpu"), **how)


def _fsdp2(net: nn.Module, *, nested: bool = True, **how: Any) -> nn.Module:
    if nested:
        for module in (*net.blocks, net.head):
            fully_shard(module, **how)
    return fully_shard(net, **how)


def _mesh(*sizes: int, names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _hsdp(net: nn.Module) -> nn.Module:
    return _fsdp2(net, mesh=_mesh(2, 2, names=("replicate", "shard")))


def _hybrid_fsdp1(net: nn.Module, **how: Any) -> nn.Module:
    mesh = _mesh(2, 2, names=("replicate", "shard"))
    return _fsdp1(net, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **how)


def _plan(*, sequence: bool) -> dict[str, Any]:
    """Return who is cut how; with ``sequence`` activations between the layers are cut as well."""
    if not sequence:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return {f"blocks.{i}.{name}": style for i in range(2) for name, style in plan.items()}
    lengthwise = Shard(1)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=lengthwise),
        "down": RowwiseParallel(output_layouts=lengthwise),
    }
    every = {f"blocks.{i}.{name}": style for i in range(2) for name, style in plan.items()}
    every["mix"] = ColwiseParallel(output_layouts=Replicate())
    every["inp"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=lengthwise)
    every["head"] = ColwiseParallel(input_layouts=lengthwise, output_layouts=Replicate())
    return every


def _tensor_parallel(net: nn.Module, *, sequence: bool, fsdp: bool) -> nn.Module:
    if not fsdp:
        mesh = _mesh(dist.get_world_size(), names=("tp",))
        return parallelize_module(net, mesh, _plan(sequence=sequence))
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], _plan(sequence=sequence))
    return _fsdp2(net, mesh=mesh["dp"])


def _compiled(net: nn.Module, *, backend: str, inside: bool) -> nn.Module:
    compiled = partial(torch.compile, backend=backend)
    return _ddp(compiled(net)) if inside else compiled(_ddp(net))


@contextmanager
def not_syncing(model: nn.Module) -> Iterator[None]:
    """Leave the gradients of this micro-batch unreduced, in the way of the model's wrapper."""
    if isinstance(model, DistributedDataParallel | Fsdp1):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

TWO_RANKS: dict[str, Wrapping] = {
    "plain": Wrapping(wrap=_plain),
    "ddp": Wrapping(wrap=_ddp),
    "ddp accumulating": Wrapping(wrap=_ddp, micro_batches=3),
    "ddp sparse": Wrapping(wrap=_ddp, sparse=True),
    "ddp of mixed types": Wrapping(wrap=_ddp, mixed=True, rounded=True),
    "ddp checkpointed": Wrapping(wrap=lambda net: _ddp(_checkpointed(net))),
    "ddp autocast bf16": Wrapping(wrap=_ddp, autocast=torch.bfloat16),
    "ddp autocast fp16 scaled": Wrapping(wrap=_ddp, autocast=torch.float16, scaled=True),
    "compiled in ddp": Wrapping(wrap=partial(_compiled, backend="aot_eager", inside=True)),
    "ddp in compiled": Wrapping(wrap=partial(_compiled, backend="aot_eager", inside=False)),
    "fsdp1": Wrapping(wrap=partial(_fsdp1, use_orig_params=True)),
    "fsdp1 flat": Wrapping(wrap=partial(_fsdp1, use_orig_params=False)),
    "fsdp1 not cut": Wrapping(
        wrap=partial(_fsdp1, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    ),
    "fsdp1 accumulating": Wrapping(wrap=partial(_fsdp1, use_orig_params=True), micro_batches=3),
    "fsdp1 checkpointed": Wrapping(
        wrap=lambda net: _fsdp1(_checkpointed(net), use_orig_params=True)
    ),
    "fsdp1 autocast fp16 scaled": Wrapping(
        wrap=partial(_fsdp1, use_orig_params=True), autocast=torch.float16, scaled=True
    ),
    "fsdp2": Wrapping(wrap=partial(_fsdp2, nested=False)),
    "fsdp2 nested": Wrapping(wrap=_fsdp2),
    "fsdp2 bf16": Wrapping(wrap=partial(_fsdp2, mp_policy=_BF16), rounded=True, batch_norm=False),
    "fsdp2 of mixed types": Wrapping(wrap=_fsdp2, mixed=True, rounded=True),
    "fsdp2 of compiled blocks": Wrapping(wrap=lambda net: _fsdp2(_each_compiled(net))),
    "fsdp2 accumulating": Wrapping(wrap=_fsdp2, micro_batches=3),
    "fsdp2 checkpointed": Wrapping(wrap=lambda net: _fsdp2(_checkpointed(net))),
    "fsdp2 on the host path": Wrapping(wrap=_fsdp2, fused=False),
    "fsdp2 autocast fp16 scaled": Wrapping(wrap=_fsdp2, autocast=torch.float16, scaled=True),
    "sequence parallel": Wrapping(
        wrap=partial(_tensor_parallel, sequence=True, fsdp=False),
        tensor_parallel=2,
        batch_norm=False,
    ),
}

FOUR_RANKS: dict[str, Wrapping] = {
    "ddp": Wrapping(wrap=_ddp),
    "fsdp1 flat": Wrapping(wrap=partial(_fsdp1, use_orig_params=False)),
    "fsdp1 hybrid": Wrapping(wrap=partial(_hybrid_fsdp1, use_orig_params=True)),
    "fsdp1 hybrid flat": Wrapping(wrap=partial(_hybrid_fsdp1, use_orig_params=False)),
    "fsdp2 nested": Wrapping(wrap=_fsdp2),
    "hsdp": Wrapping(wrap=_hsdp, since=(2, 8)),
    "fsdp2 x tp": Wrapping(
        wrap=partial(_tensor_parallel, sequence=False, fsdp=True),
        tensor_parallel=2,
        batch_norm=False,
        since=(2, 13),
    ),
    "fsdp2 x tp, sequence parallel": Wrapping(
        wrap=partial(_tensor_parallel, sequence=True, fsdp=True),
        tensor_parallel=2,
        batch_norm=False,
        since=(2, 8),
    ),
}

WRAPPINGS = {
    world: {name: wrapping for name, wrapping in every.items() if wrapping.since <= TORCH}
    for world, every in ((2, TWO_RANKS), (4, FOUR_RANKS))
}

QUICK = {
    *("ddp", "ddp autocast fp16 scaled", "fsdp1 flat", "fsdp2 nested", "sequence parallel"),
    "fsdp2 x tp",
}
"""One of each kind; the others are as much work again, and run with the slow tests."""
DAILY = {
    (2, "ddp"),
    (2, "ddp autocast fp16 scaled"),
    (2, "fsdp1 flat"),
    (2, "fsdp2 nested"),
    (4, "fsdp2 x tp"),
}
"""World sizes and wrappings; on four ranks only what two cannot have."""

SLOW: dict[str, Wrapping] = {
    "ddp, inductor": Wrapping(
        wrap=partial(_compiled, backend="inductor", inside=False), rounded=True
    ),
    "fsdp2, inductor": Wrapping(
        wrap=lambda net: _fsdp2(_each_compiled(net, "inductor")), rounded=True
    ),
}
"""For two ranks: the compiler takes its time."""
