"""What is known of optimizer state: how it starts, how large it gets, and whether it is finite."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

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


def starts_from_zeros(optimizer: Optimizer) -> bool:
    """Return whether zeros equal the state that this optimizer makes at its first step.

    Exactly these classes. NAdam and ASGD start at 1, Rprop at the learning rate, SGD with dampening
    takes its first gradient whole, and of an optimizer from elsewhere nothing is known.
    """
    return type(optimizer) in _FROM_ZEROS and not any(
        group.get("dampening") for group in optimizer.param_groups
    )


def expected_bytes(optimizer: Optimizer) -> int:
    """Return how large the state of an optimizer that has none yet will be, roughly."""
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
    """Return zeros for a parameter's state; sharded as the parameter is, where the shape agrees."""
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
    """Return whether the elements lie in one memory of the tensor's own; a sparse one has none."""
    return tensor.layout == torch.strided and not tensor.is_nested


def true_elements(tensor: Tensor) -> Tensor:
    """Return this rank's part without the repeats of an expanded tensor: safe to write to."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.layout == torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def may_be_nonfinite(tensor: Tensor) -> bool:
    """Return whether there are elements in it, of a type that has NaN and Inf."""
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def real(tensor: Tensor) -> Tensor:
    """Return its numbers in a type that torch can reduce; finite where they were."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.float() if tensor.element_size() == 1 else tensor


@torch.no_grad()
def nonfinite_count(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return on ``device`` how many of the tensors hold a NaN or Inf.

    It does not wait for a GPU. There one fused pass gives the extremes, which are finite exactly
    when all of a tensor is; on the CPU that pass is several times slower than sums.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if may_be_nonfinite(tensor):
            plain = real(tensor)
            alike[plain.device, plain.dtype].append(plain)
    count = torch.zeros((), device=device)
    for (where, _), group in alike.items():
        if where.type == "cpu":
            count += count_on_cpu(group)
        else:
            extremes = torch.stack(torch._foreach_norm(group, float("inf")))
            count += (~torch.isfinite(extremes)).sum().to(device, non_blocking=True)
    return count


@torch.no_grad()
def count_on_cpu(tensors: Sequence[Tensor]) -> int:
    """Return how many of the CPU's tensors hold a NaN or Inf.

    A finite sum says that all of it is finite, in half the time that the extremes take; they
    decide where the sum is not, since large values overflow it.
    """
    numbers = [real(tensor) for tensor in tensors if may_be_nonfinite(tensor)]
    suspects = [n for n in numbers if not math.isfinite(n.sum().item())]
    return sum(not all(math.isfinite(end.item()) for end in n.aminmax()) for n in suspects)
