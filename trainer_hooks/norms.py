"""Squares of all gradients in one fused pass, so that one sum over the ranks gives exact norms.

At ``watch()`` the ranks compare (name, global offset, shape) of what each holds; a local square is
divided by its number of holders. The sum over ranks then is the global square in DDP (every rank
holds all), FSDP (each holds a part) and their products, without weights from placements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.moments import nonfinite_count
from trainer_hooks.ranks import Ranks
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


def _shard(name: str, param: Tensor) -> Shard:
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


def no_gradients() -> UsageError:
    """Return what is said where the first step brings no gradient on any rank."""
    return UsageError(
        "no parameter of the optimizers has a gradient at the first step",
        hint="call monitor.step(loss) after loss.backward(), with the optimizers that hold the "
        "model's parameters",
    )


def _check_alike(names: list[list[str]]) -> None:
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


def scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply the gradients in place: in groups of a device and type, or the fused way is lost."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        alike[grad.device, grad.dtype].append(grad)
    for (device, dtype), group in alike.items():
        torch._foreach_mul_(group, coefficient.to(device, dtype))


class GradNorms:
    """The gradients of all watched parameters and their squares; collective when made."""

    def __init__(self, params: dict[str, Tensor], ranks: Ranks) -> None:
        self.names = tuple(params)
        self._params: Sequence[Tensor] = tuple(params.values())
        self.device = local_tensor(self._params[0]).device
        shards = [_shard(name, param) for name, param in params.items()]
        all_shards = ranks.gather(shards)
        _check_alike([[name for name, *_ in rank] for rank in all_shards])
        held = Counter(shard for rank in all_shards for shard in rank)
        self._share = torch.tensor(
            [1.0 / held[shard] for shard in shards], dtype=torch.float64, device=self.device
        )
        self.num_parameters = sum(p.numel() for p in self._params)
        self._where: tuple[list[int], Tensor] | None = None

    def gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return the positions that have a gradient and those gradients, sparse ones coalesced.

        What is returned is the gradient itself: scaled in place, it is clipped.
        """
        where, grads = [], []
        for i, param in enumerate(self._params):
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse and not grad.is_coalesced():
                grad = param.grad = grad.coalesce()
            local = local_tensor(grad)
            if local.is_sparse:
                local = local._values()
            if local.numel() == 0:
                continue
            where.append(i)
            grads.append(torch.view_as_real(local) if local.is_complex() else local)
        return where, grads

    def untouched(self) -> list[Tensor]:
        """Return the gradients just as they are: what is clipped where ``gradients`` failed."""
        return [param.grad for param in self._params if param.grad is not None]

    def squares_into(self, out: Tensor, where: list[int], grads: list[Tensor]) -> None:
        """Write each parameter's share of its square into ``out`` (float64); missing ones are 0.

        Norms are taken in float64: a finite gradient of 1e30 must stay a finite outlier, where a
        float32 square would be Inf. No value reaches the host.
        """
        if not grads:
            return
        each = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
        norms = torch.stack([norm.to(self.device) for norm in each])
        if len(grads) == len(self._params):
            torch.mul(norms * norms, self._share, out=out)
        else:
            index = self._index(where)
            out.index_copy_(0, index, norms * norms * self._share[index])

    def _index(self, where: list[int]) -> Tensor:
        """Return the positions on the device: kept, and sent from pinned memory, which waits not.

        Frozen parameters are without a gradient in every step.
        """
        if self._where is None or self._where[0] != where:
            pinned = self.device.type == "cuda"
            index = torch.tensor(where, device="cpu", pin_memory=pinned)
            self._where = where, index.to(self.device, non_blocking=True)
        return self._where[1]

    def nonfinite_parameters(self) -> Tensor:
        """Return, on the device, how many local parameters hold a NaN or Inf; does not wait."""
        with torch.no_grad():
            return nonfinite_count([local_tensor(p) for p in self._params], self.device)
