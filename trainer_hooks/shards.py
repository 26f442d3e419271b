"""Who holds which part of which parameter: what the ranks compare once, at ``watch()``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from trainvitals.errors import UsageError

Shard = tuple[str, tuple[int, ...], tuple[int, ...]]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (a Partial one reduced first), or the tensor."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(p.is_partial() for p in placements):
        from torch.distributed.tensor import Replicate

        full = [Replicate() if p.is_partial() else p for p in placements]
        tensor = tensor.redistribute(placements=full)  # type: ignore[attr-defined]
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def shard_of(name: str, param: Tensor) -> Shard:
    """Return the name, global offset and shape of what this rank holds of a parameter."""
    if not hasattr(param, "to_local"):
        return name, (0,) * param.dim(), tuple(param.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
    )
    return name, tuple(offset), tuple(shape)


def named_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' parameters by name, in optimizer order.

    The optimizers' and never the model's: FSDP2 may hold other objects there. A parameter the model
    does not know is named after its place in the optimizer.

    Raises:
        UsageError: there are none, or two optimizers hold the same parameter.
    """
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
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
                found[names.get(id(param), f"optimizer{o}.group{g}.{i}")] = param
    if not found:
        raise UsageError(
            "the optimizers hold no parameters", hint="pass the optimizers that train the model"
        )
    return found


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
