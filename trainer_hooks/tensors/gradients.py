"""Ownership of parameter parts, and the squares of all gradients in one fused pass.

The ranks compare their parts once, at ``watch()``. A part is identified by its name, its position
among the parts, and its shape. Ranks that agree in all three hold the same numbers: DDP replicas,
or the replicated side of a mesh. All other ranks hold separate parts: FSDP, tensor parallelism, and
both together. A local square is divided by its number of holders, so the sum over the ranks is the
exact global square, without weights from placements. The position of an expert's parameter starts
with the ranks that train it together, because other ranks train another one under the same name.

The reduce vector has a place for every parameter of every rank. Ranks may hold experts of other
names, and stages of a pipeline: each rank fills the places of its own parameters.

A gradient of 1e30 must stay a finite outlier although its square is Inf in float32, and float32
sums of millions of squares drift (torch's own norm of 25M elements is off by 0.3% on the CPU). On a
GPU the pass is bound by memory, so it sums in float64. On the CPU that would cost ten times as
much, so float32 sums blocks of ``BLOCK`` elements, and float64 sums the blocks. Only if a square is
non-finite, a second pass in float64 distinguishes an overflow from a non-finite element.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.events import copy_to
from trainer_hooks.tensors.experts import RankGroup
from trainer_hooks.tensors.optimizer_state import nonfinite_count
from trainvitals.errors import UsageError

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Position of a part among the parts of its parameter, and its shape."""

Shard = tuple[str, Piece]

_EXPERT = -2
"""First number of the position of an expert's parameter, before the ranks that train it.

No other position starts so: that of a piece that a rank does not hold starts with -1.
"""

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def clean_name(name: str) -> str:
    """Return a parameter's name without the wrappers of FSDP1, torch.compile and checkpointing."""
    return _WRAPPERS.sub("", name).lstrip(".")


class NamedModels(nn.ModuleDict):
    """Several models of one run by name, wrapped or not: both of a GAN, an actor and its critic."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__(models)
        inner = [unwrap(model) for model in models.values()]
        bare = nn.ModuleDict(dict(zip(models, (module for module, _ in inner), strict=True)))
        self._bare = (bare, any(is_ddp for _, is_ddp in inner))  # in a tuple: not a submodule

    def unwrapped(self) -> tuple[nn.ModuleDict, bool]:
        """Return the models without their wrappers, and whether any wrapper is DDP."""
        return self._bare


def unwrap(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module inside the wrappers of DDP and torch.compile, and whether DDP is one."""
    if isinstance(model, NamedModels):
        return model.unwrapped()
    is_ddp = False
    while True:
        if isinstance(model, DistributedDataParallel):
            model, is_ddp = model.module, True
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model, is_ddp


def reshard(model: nn.Module) -> None:
    """Make FSDP drop gathered parameters that it keeps as tensors after a forward only.

    Otherwise the next forward would not see values that are written to the shards.
    """
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
    for _, handle, flat in flat_parameters(model):
        # FSDP1 creates the buffer for gathered parameters at its first forward.
        is_used = hasattr(flat, "_full_param_padded") and handle.uses_sharded_strategy
        if is_used and not handle.needs_unshard():
            handle.reshard(True)
            handle._prefetched = False


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def named_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' parameters by the names that the user knows, in optimizer order.

    They come from the optimizers, never from the model: FSDP2 may hold other objects there. A
    parameter that is not in the model is named after its position in the optimizer.

    Raises:
        UsageError: there are no parameters, or two optimizers hold the same parameter.
    """
    names = {id(p): clean_name(n) for n, p in unwrap(model)[0].named_parameters()}
    by_name: dict[str, Tensor] = {}
    seen: set[int] = set()
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if id(param) in seen:
                    raise UsageError(
                        f"parameter {names.get(id(param), i)!r} is in two optimizers or groups",
                        hint="pass each parameter to one optimizer only: it would be updated twice",
                    )
                seen.add(id(param))
                place = f"optimizer{o}.group{g}.{i}"
                name = names.get(id(param), place)
                by_name[place if name in by_name else name] = param
    if not by_name:
        raise UsageError(
            "the optimizers hold no parameters", hint="pass the optimizers that train the model"
        )
    return by_name


def flat_parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each FSDP1 module, its handle, and the handle's flat parameter."""
    for name, module in model.named_modules():
        handle: Any = getattr(module, "_handle", None)
        if (flat := getattr(handle, "flat_param", None)) is not None:
            yield name, handle, flat


def fsdp2_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 state: none or one before torch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    only = getattr(state, "_fsdp_param_group", None)
    return [] if only is None else [only]


def flat_pieces(model: nn.Module) -> dict[int, Piece]:
    """Return the piece of its parameter that each of FSDP1's tensors is, by the tensor's id.

    The tensors are plain views into a flat parameter, so disjoint pieces on two ranks can have the
    same shape.

    Raises:
        UsageError: FSDP1 wraps tensor parallelism, which hides the pieces.
    """
    pieces: dict[int, Piece] = {}
    for _, handle, flat in flat_parameters(model):
        if handle._fsdp_extension is not None:
            raise UsageError(
                "FullyShardedDataParallel over tensor parallelism is not supported",
                hint="use torch.distributed.fsdp.fully_shard, which has replaced it",
            )
        place = (handle.rank,) if handle.uses_sharded_strategy else ()
        pieces[id(flat)] = place, (flat.numel() - flat._shard_numel_padded,)
        for param, info in zip(flat._params or (), flat._shard_param_infos, strict=False):
            pieces[id(param)] = (info.intra_param_start_idx or 0,), (info.numel_in_shard or 0,)
    return pieces


def shards_of(
    params: Mapping[str, Tensor],
    pieces: Mapping[int, Piece],
    experts: Mapping[int, RankGroup] | None = None,
) -> list[Shard]:
    """Return this rank's part of each parameter."""
    shards = []
    for name, param in params.items():
        position, shape = pieces.get(id(param)) or _piece(param)
        if experts and id(param) in experts:
            position = (_EXPERT, *experts[id(param)], *position)
        shards.append((name, (position, shape)))
    return shards


def _piece(param: Tensor) -> Piece:
    """Return a parameter's position on the mesh sides that split it, and its local shape."""
    if not hasattr(param, "to_local"):
        return (), tuple(param.shape)
    here = param.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    placements = param.placements  # type: ignore[attr-defined]
    place = tuple(c for c, p in zip(here, placements, strict=False) if not p.is_replicate())
    return place, tuple(local_tensor(param).shape)


def shares(mine: Sequence[Shard], everyone: Sequence[Sequence[Shard]]) -> list[float]:
    """Return this rank's share of each gradient's square: 1 / number of holders."""
    held = Counter(shard for rank in everyone for shard in rank)
    return [1.0 / held[shard] for shard in mine]


def num_elements(everyone: Sequence[Sequence[Shard]]) -> int:
    """Return the number of elements of all parameters, given each rank's shards.

    A shard that several ranks hold counts once.
    """
    distinct = {shard for rank in everyone for shard in rank}
    return sum(math.prod(shape) for _, (_, shape) in distinct)


def check_alike(names: Sequence[Sequence[str]]) -> None:
    """Refuse parameters that differ by rank on all ranks: their gradients are not comparable."""
    for rank, other in enumerate(names):
        if other != names[0]:
            odd = sorted(set(other).symmetric_difference(names[0]))[:4] or ["their order"]
            raise UsageError(
                f"rank {rank} trains {len(other)} parameters and rank 0 {len(names[0])}; they "
                f"differ in {', '.join(odd)}",
                hint="all ranks must watch the same parameters in the same order; for the stages "
                "of a pipeline use watch(..., pipeline=schedule); for experts that differ by rank, "
                "let DDP ignore them, or set allreduce = False on their parameters",
            )


@torch.no_grad()
def align_gradients(sharded: Iterable[Tensor]) -> None:
    """Redistribute each DTensor gradient to its parameter's layout; a Partial one is summed.

    The sum is over its mesh. Sequence parallelism leaves such gradients. The optimizer would do the
    same to each of them. This is a collective; it matches on all ranks because they hold the same
    layouts.
    """
    for param in sharded:
        grad: Any = param.grad
        placements: Any = param.placements  # type: ignore[attr-defined]
        if getattr(grad, "placements", placements) != placements:
            param.grad = grad.redistribute(placements=placements)


# ---------------------------------------------------------------------- sums of squares


def reads_are_free(device: torch.device) -> bool:
    """Return whether the host can read a tensor there without waiting for a device."""
    return device.type == "cpu"


BLOCK = 4096
"""Elements per float32 sum: larger sums lose digits, smaller ones take longer."""

SMALL = 4096
"""Gradients up to this size are summed together, in float64: a kernel for each would cost more."""


_MAX_PLANS = 4
"""Lists of gradients whose plans are kept, each with memory for its small gradients."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Gradients to sum in three ways, and memory for the small ones."""

    key: tuple[list[torch.Size], list[torch.dtype]]
    """Shapes and types of the gradients that the plan was made for."""
    small: list[int]
    """Gradients that are summed together."""
    whole: list[int]
    """Gradients whose norm is computed in one call, in float64."""
    blocked: list[int]
    views: list[Tensor]
    """Memory for each small gradient, float64, in its shape."""
    values: NDArray[np.float64]
    """The same memory, flat."""
    starts: NDArray[np.int64]
    """Start of each small gradient in ``values``."""
    first_blocks: NDArray[np.int64]
    """First block of each blocked gradient among all of them."""


class GradientSquares:
    """Sums squares; keeps the last plans: shapes rarely change, but optimizers may take turns."""

    def __init__(self, params: Sequence[Tensor] = ()) -> None:
        self._plans: list[_Plan] = []
        self._is_on_host = all(reads_are_free(local_tensor(p).device) for p in params)

    def of(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sum of squares of each gradient, float64 of shape (len(grads),).

        A sum is non-finite exactly if an element is non-finite, or if it overflows float64.
        """
        if not (self._is_on_host and reads_are_free(device)):
            return _squares_by_kind(grads, device)
        plan = self._cached_plan(grads)
        # In numpy: an operation on some hundred numbers takes torch several times as long.
        out = np.zeros(len(grads))
        with np.errstate(all="ignore"):
            if plan.small:
                out[plan.small] = _small_squares([grads[i] for i in plan.small], plan)
            if plan.whole:
                each = torch._foreach_norm([grads[i] for i in plan.whole], 2.0, dtype=torch.float64)
                out[plan.whole] = _squares(torch.stack(each))
            if plan.blocked:
                blocked = [grads[i] for i in plan.blocked]
                out[plan.blocked] = _block_squares(blocked, plan.first_blocks)
        return torch.from_numpy(out)

    def _cached_plan(self, grads: Sequence[Tensor]) -> _Plan:
        """Return how to sum these gradients; an earlier plan if shapes and types are equal."""
        key = [grad.shape for grad in grads], [grad.dtype for grad in grads]
        for plan in self._plans:
            if plan.key == key:
                return plan
        self._plans = [_make_plan(*key), *self._plans][:_MAX_PLANS]
        return self._plans[0]


def _make_plan(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> _Plan:
    """Return how to sum gradients of these shapes and types; those without elements stay 0."""
    sizes = [shape.numel() for shape in shapes]
    small = [i for i, numel in enumerate(sizes) if 0 < numel <= SMALL]
    large = [i for i, numel in enumerate(sizes) if numel > SMALL]
    # Half precision has no reliable sum: those gradients take the slower path.
    blocked = [i for i in large if dtypes[i] in (torch.float32, torch.float64)]
    whole = [i for i in large if dtypes[i] not in (torch.float32, torch.float64)]
    starts = np.cumsum([0, *(sizes[i] for i in small)])
    values = torch.empty(int(starts[-1]), dtype=torch.float64, device="cpu")
    parts = values.split([sizes[i] for i in small])
    return _Plan(
        key=(shapes, dtypes),
        small=small,
        whole=whole,
        blocked=blocked,
        views=[part.view(shapes[i]) for i, part in zip(small, parts, strict=True)],
        values=values.numpy(),
        starts=starts[:-1],
        first_blocks=np.cumsum([0, *(-(-sizes[i] // BLOCK) for i in blocked[:-1])]),
    )


def by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors that share a device and a type, a list for each.

    Kernels for lists of tensors (``torch._foreach_*``) are only fused over such tensors. One tensor
    of another type would send all of them down the slow path, which for a norm in float64 copies
    each tensor to float64.
    """
    positions: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        positions[tensor.device, tensor.dtype].append(i)
    return list(positions.values())


def _squares_by_kind(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the square of each gradient, in one fused pass per device and type."""
    squares: list[Tensor | None] = [None] * len(grads)
    for positions in by_kind(grads):
        norms = torch._foreach_norm([grads[i] for i in positions], 2.0, dtype=torch.float64)
        own = copy_to(torch.stack(norms).square_(), device)
        for i, square in zip(positions, own.unbind(), strict=True):
            squares[i] = square
        if len(positions) == len(grads):
            return own
    return torch.stack([square for square in squares if square is not None])


def _small_squares(grads: list[Tensor], plan: _Plan) -> NDArray[np.float64]:
    """Return the square of each gradient."""
    # The memory is kept from step to step: new pages cost more than the sums.
    torch._foreach_copy_(plan.views, grads)
    squares = np.multiply(plan.values, plan.values, out=plan.values)
    return np.add.reduceat(squares, plan.starts)


def _block_squares(grads: list[Tensor], first_blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the square of each gradient, the sum of those of its blocks."""
    norms = [norm for grad in grads for norm in _gradient_block_norms(grad)]
    squares = _squares(torch.cat(norms))
    # On the CPU a read is free, and a pass that is exact for every size costs ten times this.
    if not math.isfinite(np.add.reduce(squares)):
        norms = [norm for grad in grads for norm in _gradient_block_norms(grad, torch.float64)]
        squares = _squares(torch.cat(norms))
    return np.add.reduceat(squares, first_blocks)


def _squares(norms: Tensor) -> NDArray[np.float64]:
    """Return the squares of norms on the host in float64."""
    squares: NDArray[np.float64] = norms.numpy().astype(np.float64)
    return np.multiply(squares, squares, out=squares)


def _gradient_block_norms(grad: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Yield the norms of a gradient's blocks of ``BLOCK`` elements."""
    flat = grad.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    blocks = flat if whole == flat.numel() else flat[:whole]
    yield torch.linalg.vector_norm(blocks.view(-1, BLOCK), dim=1, dtype=dtype)
    if whole < flat.numel():
        yield torch.linalg.vector_norm(flat[whole:], dtype=dtype)[None]


# -------------------------------------------------------------- the gradients of a step


def no_gradient_error(name: str = "") -> UsageError:
    """Return the error for a first step without any gradient; ``name``: of one optimizer."""
    if name:
        return UsageError(
            f"no parameter of the optimizer {name!r} has a gradient at its first step",
            hint="call monitor.step(loss, optimizer=...) right after that loss's backward(): each "
            "call clears the gradients of all optimizers",
        )
    return UsageError(
        "no parameter of the optimizers has a gradient at the first step",
        hint="step after loss.backward() and before zero_grad(), with the optimizers that hold the "
        "model's parameters; frozen parameters (requires_grad=False) have none",
    )


def scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply the gradients in place, one group per device and type to keep the fused kernel."""
    for positions in by_kind(grads):
        # The last first: those were measured most recently and are still in the CPU's cache.
        group = [grads[i] for i in reversed(positions)]
        torch._foreach_mul_(group, coefficient.to(group[0].device, group[0].dtype))


ALL = slice(None)


def layer_of(parameter: str) -> str:
    """Return the layer whose row covers a parameter: its name without the last part."""
    return parameter.rpartition(".")[0] or parameter


class GradNorms:
    """The gradients of all watched parameters and their squares; creation is collective."""

    has_loss = True
    """Whether this rank computes the loss."""
    place = ""
    """Stages of this rank in a pipeline; empty without one."""

    def __init__(
        self,
        params: dict[str, Tensor],
        ranks: Ranks,
        pieces: Mapping[int, Piece] | None = None,
        experts: Mapping[int, RankGroup] | None = None,
    ) -> None:
        self.local_names = tuple(params)
        self.params: Sequence[Tensor] = tuple(params.values())
        self.device = local_tensor(self.params[0]).device
        self._sharded = [param for param in self.params if hasattr(param, "placements")]
        shards = shards_of(params, pieces or {}, experts)
        everyone = ranks.gather(shards)
        self.names = self._union(everyone)
        """Names of all ranks' parameters, in the order of the reduce vector."""
        self.has_all = all(tuple(name for name, _ in rank) == self.names for rank in everyone)
        """Whether every rank has gradients of all parameters: no stages, no other experts."""
        self._places: Tensor | None = None
        """Positions of this rank's parameters among them; None if it has all of them."""
        if self.names != self.local_names:
            at = {name: i for i, name in enumerate(self.names)}
            self._places = torch.tensor([at[n] for n in self.local_names], device=self.device)
        self.share = torch.tensor(shares(shards, everyone), dtype=torch.float64, device=self.device)
        self.replicated = all(others == shards for others in everyone)
        self.num_parameters = num_elements(everyone)
        self.part = ALL
        """The parameters that have gradients in the current step."""
        self._where: tuple[list[int], Tensor] | None = None
        self._squares = GradientSquares(self.params)
        self._everywhere = list(range(len(self.params)))
        self._is_plain = not any(
            hasattr(param, "to_local") or param.is_complex() or not param.numel()
            for param in self.params
        )
        """Whether each gradient is usually measured as it is."""

    def _union(self, everyone: Sequence[Sequence[Shard]]) -> tuple[str, ...]:
        """Return the names of all gradients, given each rank's shards.

        Refuse parameters of no expert that differ by rank.
        """
        check_alike([[name for name, (at, _) in rank if at[:1] != (_EXPERT,)] for rank in everyone])
        return tuple(dict.fromkeys(name for rank in everyone for name, _ in rank))

    def named_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of a model by the names of their gradients' layers."""
        yield from unwrap(model)[0].named_modules()

    def align(self) -> None:
        """Redistribute the gradients of sharded parameters to their layout; may be a collective."""
        if self._sharded:
            align_gradients(self._sharded)

    def gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return the positions that have a gradient and those gradients, sparse ones coalesced.

        The result is the gradient itself: scaling it in place clips it.
        """
        if self._is_plain and self.part is ALL:
            grads: list[Any] = [param.grad for param in self.params]
            for grad in grads:
                if type(grad) is not Tensor or grad.is_sparse or grad.requires_grad:
                    break
            else:
                return self._everywhere, grads
        return self._each_gradient()

    @torch.no_grad()  # otherwise to_local() builds a graph
    def _each_gradient(self) -> tuple[list[int], list[Tensor]]:
        """Do the same for gradients of any kind, one after another."""
        where, grads = [], []
        for i, param in enumerate(self.params[self.part], self.part.start or 0):
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse and not grad.is_coalesced():
                grad = param.grad = grad.coalesce()
            local = local_tensor(grad)
            # backward(create_graph=True) leaves gradients that are part of a graph. torch refuses
            # to use them with out= (the sum into the vector) or in place (the clip).
            if local.requires_grad:
                local = local.detach()
            if local.is_sparse:
                local = local._values()
            if local.numel() == 0:
                continue
            where.append(i)
            grads.append(torch.view_as_real(local) if local.is_complex() else local)
        return where, grads

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """Return this rank's part of each parameter, complex ones as pairs of numbers."""
        local = [local_tensor(param.detach()) for param in self.params]
        return [torch.view_as_real(p) if p.is_complex() else p for p in local]

    @torch.no_grad()
    def clip_fallback_gradients(self) -> list[Tensor]:
        """Return the gradients unchanged: these are clipped if ``gradients`` failed."""
        grads = [p.grad for p in self.params[self.part] if p.grad is not None]
        return [local_tensor(grad).detach() for grad in grads]

    def squares_into(self, out: Tensor, where: list[int], grads: list[Tensor]) -> None:
        """Write each parameter's share of its square into ``out`` (float64); missing ones are 0.

        No value is read on the host.
        """
        if not grads:
            out.zero_()
            return
        squares = self._squares.of(grads, self.device)
        if self._places is None and len(grads) == len(self.params):
            torch.mul(squares, self.share, out=out)
            return
        index = self._index(where)
        places = index if self._places is None else self._places[index]
        out.zero_().index_copy_(0, places, squares * self.share[index])

    def shares_of(self, values: Tensor) -> Tensor:
        """Return this rank's share of a number per local parameter, at its place in the vector."""
        shares = values * self.share
        if self._places is None:
            return shares
        return shares.new_zeros(len(self.names)).index_copy_(0, self._places, shares)

    def _index(self, where: list[int]) -> Tensor:
        """Return the positions on the device: cached, and sent from pinned memory: nothing waits.

        Frozen parameters have no gradient in any step.
        """
        if self._where is None or self._where[0] != where:
            pinned = self.device.type == "cuda"
            index = torch.tensor(where, device="cpu", pin_memory=pinned)
            self._where = where, index.to(self.device, non_blocking=True)
        return self._where[1]

    def nonfinite_parameters(self) -> Tensor:
        """Return, on the device, the number of local parameters with NaN or Inf; does not wait."""
        with torch.no_grad():
            return nonfinite_count([local_tensor(p) for p in self.params], self.device)

    def nonfinite_names(self) -> list[str]:
        """Return the names of local parameters with NaN or Inf; waits for the device."""
        counts = [nonfinite_count([p], self.device) for p in self.local_parameters()]
        are_bad = torch.stack(counts).tolist()
        return [name for name, is_bad in zip(self.local_names, are_bad, strict=True) if is_bad]

    @torch.no_grad()
    def largest_weights(self) -> dict[str, float]:
        """Return the largest absolute value of each local parameter; waits for the device.

        Call after a bad step only: it reads all parameters.
        """
        parts = [p.float() if p.element_size() == 1 else p for p in self.local_parameters()]
        peaks = [torch.linalg.vector_norm(p, math.inf) if p.numel() else p.sum() for p in parts]
        found = torch.stack([peak.to(self.device, torch.float64) for peak in peaks]).tolist()
        return dict(zip(self.local_names, found, strict=True))
