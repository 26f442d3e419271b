"""Properties of optimizer state: initial values, size, and whether it is finite."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.tensors.events import copy_to
from trainer_hooks.tensors.finite import is_finite

_FROM_ZEROS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.SparseAdam,
    torch.optim.Adafactor,
)


def params_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of all groups of the optimizers, in their order."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def starts_from_zeros(optimizer: Optimizer) -> bool:
    """Return whether zeros equal the state that this optimizer creates at its first step.

    Only for these classes. NAdam and ASGD start at 1, Rprop at the learning rate, SGD with
    dampening takes its complete first gradient, and third-party optimizers are unknown.
    """
    return type(optimizer) in _FROM_ZEROS and not any(
        group.get("dampening") for group in optimizer.param_groups
    )


def expected_bytes(optimizer: Optimizer) -> int:
    """Return the approximate size of the state of an optimizer that has none yet, in bytes."""
    total = 0
    for group in optimizer.param_groups:
        size = sum(p.numel() * p.element_size() for p in group["params"])
        if type(optimizer) is torch.optim.SGD:
            total += size if group["momentum"] else 0
        else:
            total += size * (3 if group.get("amsgrad") else 2)
    return total


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, like: Tensor
) -> Tensor:
    """Return zeros for a parameter's state; sharded like the parameter if the shapes agree."""
    local = torch.zeros(shape, dtype=dtype, device=device)
    to_local = getattr(like, "to_local", None)
    if to_local is None:
        if shape == tuple(like.shape):
            return torch.zeros_like(like, dtype=dtype, device=device, requires_grad=False)
        return local
    if shape != tuple(to_local().shape):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in one memory; a sparse tensor has none."""
    return tensor.layout == torch.strided and not tensor.is_nested


def true_elements(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor without an expanded one's repeats: safe to write to."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.layout == torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def nonfinite_count(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return on ``device`` the number of tensors with a NaN or Inf.

    It does not wait for a GPU: there one fused pass computes the extremes, which are finite exactly
    if all elements are.
    """
    on_host = 0
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.device.type == "cpu":
            on_host += not is_finite(tensor)
        elif tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            plain = plain.float() if plain.element_size() == 1 else plain
            alike[plain.device, plain.dtype].append(plain)
    count = torch.full((), float(on_host), device=device)
    for group in alike.values():
        extremes = torch.stack(torch._foreach_norm(group, float("inf")))
        count += copy_to((~torch.isfinite(extremes)).sum(), device)
    return count
