"""One small network, wrapped in every way; and what each wrapping needs of the loop around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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


class _Divided(torch.autograd.Function):
    """A tensor whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: int) -> Tensor:
        ctx.by = by
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad / ctx.by, None


class Experts(nn.Module):
    """Four experts; the token at position i of a sequence goes to expert i % 4.

    With a ``group``, each of its ranks has the next part of the experts.
    """

    NUM = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.NUM, WIDTH, WIDTH) * WIDTH**-0.5)
        self.bias = nn.Parameter(torch.zeros(self.NUM, WIDTH))
        self.group: Any = None

    def spread(self, group: Any) -> None:
        """Drop the experts of other ranks of a group."""
        self.group = group
        num = self.NUM // group.size()
        mine = slice(dist.get_rank(group) * num, (dist.get_rank(group) + 1) * num)
        self.weight = nn.Parameter(self.weight.detach()[mine].clone())
        self.bias = nn.Parameter(self.bias.detach()[mine].clone())

    def _send(self, x: Tensor) -> Tensor:
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)

    def forward(self, x: Tensor) -> Tensor:
        by_expert = x.unflatten(1, (-1, self.NUM)).permute(
            2, 0, 1, 3
        )  # expert, batch, place, WIDTH
        tokens = by_expert.flatten(1, 2)
        size = 1 if self.group is None else self.group.size()
        weight, bias = (
            _Divided.apply(p.to_local() if hasattr(p, "to_local") else p, size)
            for p in (self.weight, self.bias)
        )
        if self.group is not None:
            sent = self._send(tokens).unflatten(0, (size, -1))  # source, expert, token, WIDTH
            tokens = sent.transpose(0, 1).flatten(1, 2)
        out = torch.baddbmm(bias[:, None], tokens, weight)
        if self.group is not None:
            back = out.unflatten(1, (size, -1)).transpose(0, 1)
            out = self._send(back.flatten(0, 1))
        out = out.view_as(by_expert).permute(1, 2, 0, 3).flatten(1, 2)
        return x + torch.nn.functional.gelu(out)


class Attention(nn.Module):
    """Causal attention; with a ``group``, each of its ranks has the next part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        start = 0
        if self.group is not None:
            start = dist.get_rank(self.group) * x.shape[1]
            k, v = (all_gather_tensor_autograd(t.contiguous(), 1, self.group) for t in (k, v))
        rows, columns = torch.arange(start, start + x.shape[1]), torch.arange(k.shape[1])
        scores = (q @ k.mT * WIDTH**-0.5).masked_fill(columns > rows[:, None], -torch.inf)
        return x + scores.softmax(-1) @ v


class Net(nn.Module):
    """Takes (batch, sequence, 6). ``batch_norm`` stands for all state that forward writes."""

    def __init__(
        self, *, batch_norm: bool = True, experts: bool = False, attention: bool = False
    ) -> None:
        super().__init__()
        self.mix = Mix()
        self.inp = nn.Linear(6, WIDTH)
        self.experts = Experts() if experts else nn.Identity()
        self.attention = Attention() if attention else nn.Identity()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.head = nn.Linear(WIDTH, OUT)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.experts(self.inp(self.mix(x))))
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
    context_parallel: int = 1
    """Neighbouring ranks that see the same data, each another part of the sequence."""
    batch_norm: bool = True
    experts: bool = False
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
        if self.sparse:
            return Table()
        attention = self.context_parallel > 1
        net = Net(batch_norm=self.batch_norm, experts=self.experts, attention=attention)
        if self.mixed:
            net.head.bfloat16()
        return net

    def num_replicas(self, world: int) -> int:
        """Return the number of groups of ranks that see different data."""
        return world // self.tensor_parallel // self.context_parallel

    def part_of(self, sequences: Tensor, rank: int) -> Tensor:
        """Return the rank's part of (batch, sequence, features)."""
        return sequences.chunk(self.context_parallel, dim=1)[rank % self.context_parallel]

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


def _expert_parallel(net: nn.Module, *, ddp: bool = False) -> nn.Module:
    """Spread the experts over pairs of ranks; wrap the two pairs' replicas, and the rest."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["experts.weight", "experts.bias", "experts.module.weight", "experts.module.bias"]
    )
    if dist.get_world_size() == 2:
        net.experts.spread(dist.group.WORLD)
        return _ddp(net)
    mesh = _mesh(2, 2, names=("replicas", "experts"))
    net.experts.spread(mesh["experts"].get_group())
    if ddp:
        net.experts = DistributedDataParallel(
            net.experts, process_group=mesh["replicas"].get_group()
        )
        return _ddp(net)
    fully_shard(net.experts, mesh=mesh["replicas"])
    for param in net.experts.parameters():
        param.allreduce = False
    return _fsdp2(net, mesh=_mesh(dist.get_world_size(), names=("all",)))


def _sharded_experts(net: nn.Module) -> nn.Module:
    """Shard the experts by FSDP2 over pairs of ranks that hold parts of one DTensor."""
    mesh = _mesh(2, 2, names=("replicas", "experts"))
    net.experts.group = mesh["experts"].get_group()
    for name, param in net.experts.named_parameters():
        cut = distribute_tensor(param.detach(), mesh["experts"], [Shard(0)])
        net.experts.register_parameter(name, nn.Parameter(cut))
    fully_shard(net.experts, mesh=mesh["replicas"], shard_placement_fn=lambda _: Shard(1))
    return _fsdp2(net, mesh=_mesh(dist.get_world_size(), names=("all",)))


def _context_parallel(net: nn.Module) -> nn.Module:
    """Spread each sequence over pairs of ranks, and average gradients over all ranks."""
    size = dist.get_world_size()
    mesh = _mesh(size // 2, 2, names=("data", "sequence"))
    net.attention.group = mesh["sequence"].get_group()
    return (
        _ddp(net) if size == 2 else _fsdp2(net, mesh=_mesh(dist.get_world_size(), names=("all",)))
    )


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
    "experts in ddp": Wrapping(wrap=_expert_parallel, experts=True),
    "context parallel in ddp": Wrapping(
        wrap=_context_parallel, context_parallel=2, batch_norm=False, since=(2, 13)
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
    "replicated experts in ddp": Wrapping(wrap=partial(_expert_parallel, ddp=True), experts=True),
    "marked experts in fsdp2": Wrapping(wrap=_expert_parallel, experts=True, since=(2, 13)),
    "sharded experts in fsdp2": Wrapping(wrap=_sharded_experts, experts=True, since=(2, 13)),
    "context parallel in fsdp2": Wrapping(
        wrap=_context_parallel, context_parallel=2, batch_norm=False, since=(2, 13)
    ),
}

WRAPPINGS = {
    world: {name: wrapping for name, wrapping in every.items() if wrapping.since <= TORCH}
    for world, every in ((2, TWO_RANKS), (4, FOUR_RANKS))
}

QUICK = {
    *("ddp", "ddp autocast fp16 scaled", "fsdp1 flat", "fsdp2 nested", "sequence parallel"),
    *("fsdp2 x tp", "experts in ddp", "marked experts in fsdp2", "context parallel in ddp"),
}
"""One of each kind; the others are as much work again, and run with the slow tests."""
DAILY = {
    (2, "ddp"),
    (2, "ddp autocast fp16 scaled"),
    (2, "fsdp1 flat"),
    (2, "fsdp2 nested"),
    (2, "experts in ddp"),
    (4, "fsdp2 x tp"),
    (4, "marked experts in fsdp2"),
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
