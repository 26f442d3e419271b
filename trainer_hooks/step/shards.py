"""Who holds which part of which parameter: what the ranks compare once, at ``watch()``.

A part is known by its name, by its place among the parts, and by its shape. Ranks that agree in all
three hold the same numbers: DDP's replicas, the replicated side of a mesh. All others hold parts of
their own: FSDP, tensor parallelism, and the two together.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainvitals.errors import UsageError

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""The place of a part among the parts of its parameter, and its shape."""

Shard = tuple[str, Piece]

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def clean_name(name: str) -> str:
    """Return the name without what FSDP1, torch.compile and checkpointing wrap around modules."""
    return _WRAPPERS.sub("", name).lstrip(".")


def unwrap(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module that DDP and torch.compile lie around, and whether DDP does."""
    is_ddp = False
    while True:
        if isinstance(model, DistributedDataParallel):
            model, is_ddp = model.module, True
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model, is_ddp


def reshard(model: nn.Module) -> None:
    """Let FSDP drop the parameters it gathered: after a forward without backward it holds them.

    What is written to the shards would not be seen by the next forward.
    """
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
        handle: Any = getattr(module, "_handle", None)
        # FSDP1 makes the place to gather into at its first forward.
        if hasattr(getattr(handle, "flat_param", None), "_full_param_padded"):
            _drop_gathered(handle)


def _drop_gathered(handle: Any) -> None:
    if handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(True)
        handle._prefetched = False


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def named_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' parameters by the names the user knows, in optimizer order.

    The optimizers' and never the model's: FSDP2 may hold other objects there. A parameter the model
    does not know is named after its place in the optimizer.

    Raises:
        UsageError: there are none, or two optimizers hold the same parameter.
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
                        hint="give each parameter to one optimizer: it would be stepped twice",
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


def flat_pieces(model: nn.Module) -> dict[int, Piece]:
    """Return which piece of its parameter each of FSDP1's tensors is, by the tensor's id.

    They are plain views into a flat parameter, so two ranks' disjoint pieces can have one shape.

    Raises:
        UsageError: FSDP1 lies over tensor parallelism, where that is not known.
    """
    pieces: dict[int, Piece] = {}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
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


def shards_of(params: Mapping[str, Tensor], pieces: Mapping[int, Piece]) -> list[Shard]:
    """Return what this rank holds of each parameter."""
    return [(name, pieces.get(id(param)) or _piece(param)) for name, param in params.items()]


def _piece(param: Tensor) -> Piece:
    """Return the place on those sides of a mesh that cut the parameter, and the local shape."""
    if not hasattr(param, "to_local"):
        return (), tuple(param.shape)
    here = param.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    placements = param.placements  # type: ignore[attr-defined]
    place = tuple(c for c, p in zip(here, placements, strict=False) if not p.is_replicate())
    return place, tuple(local_tensor(param).shape)


def shares(mine: Sequence[Shard], everyone: Sequence[Sequence[Shard]]) -> list[float]:
    """Return what part of each square is this rank's: one through the number of holders."""
    held = Counter(shard for rank in everyone for shard in rank)
    return [1.0 / held[shard] for shard in mine]


def num_elements(everyone: Sequence[Sequence[Shard]]) -> int:
    """Return the number of elements of all parameters, each counted once."""
    distinct = {shard for rank in everyone for shard in rank}
    return sum(math.prod(shape) for _, (_, shape) in distinct)


def check_alike(names: list[list[str]]) -> None:
    """Refuse, on all ranks, parameters that differ by rank: the packs would be of other lengths."""
    for rank, other in enumerate(names):
        if other != names[0]:
            odd = sorted(set(other).symmetric_difference(names[0]))[:4] or ["their order"]
            raise UsageError(
                f"rank {rank} trains {len(other)} parameters and rank 0 {len(names[0])}; they "
                f"differ in {', '.join(odd)}",
                hint="all ranks must watch the same parameters in the same order; pipeline stages "
                "are not supported",
            )


@torch.no_grad()
def align_gradients(sharded: Iterable[Tensor]) -> None:
    """Lay each DTensor's gradient out as its parameter is: a Partial one is summed over its mesh.

    Sequence parallelism leaves such gradients. The optimizer would do the same to each of them;
    it is a collective, in which the ranks meet because they hold the same layouts.
    """
    for param in sharded:
        grad: Any = param.grad
        placements: Any = param.placements  # type: ignore[attr-defined]
        if getattr(grad, "placements", placements) != placements:
            param.grad = grad.redistribute(placements=placements)
