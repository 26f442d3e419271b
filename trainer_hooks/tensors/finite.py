"""Exact check that numbers in CPU memory are finite, without threads of torch.

The extremes of a block are finite exactly if all of it is, because a NaN makes both NaN. Types that
numpy lacks, or handles slowly, are checked by their bits: a NaN or an infinity has all bits of its
exponent set, so it is among the largest of all numbers, with or without its sign bit.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]

_BLOCK_BYTES = 1 << 19
"""Read twice while it is in the core's cache."""

array_of = Tensor.numpy
"""A view of CPU memory: it reads nothing and never waits."""

_BITS = {1: torch.int8, 2: torch.int16}
_FIRST_NONFINITE = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}
"""The smallest positive bit patterns that are non-finite."""


def is_readable(dtype: torch.dtype) -> bool:
    """Return whether ``numbers_of`` reads the type, or it has no NaN and no Inf."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    return dtype in _FIRST_NONFINITE or (dtype.itemsize > 2 and dtype != torch.complex32)


def numbers_of(tensor: Tensor) -> tuple[Numbers, int] | None:
    """Return a dense tensor as a numpy array, and the first bit pattern that is non-finite.

    That is 0 if the array contains numbers. None for types other than the common floating ones.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.detach()
    if tensor.dtype in (torch.float32, torch.float64):
        return array_of(tensor), 0
    first = _FIRST_NONFINITE.get(tensor.dtype)
    return None if first is None else (array_of(tensor.view(_BITS[tensor.element_size()])), first)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor's bytes in memory order."""
    # One element counts as contiguous with any stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return array_of(flat.view(torch.uint8))


def are_finite(numbers: Numbers, first_nonfinite: int) -> bool:
    """Return whether all numbers from ``numbers_of``, or a part of them, are finite."""
    if not numbers.size:
        return True
    if not first_nonfinite:
        extremes = np.maximum.reduce(numbers, axis=None), np.minimum.reduce(numbers, axis=None)
        return math.isfinite(extremes[0]) and math.isfinite(extremes[1])
    if int(numbers.max()) >= first_nonfinite:
        return False
    negative = 1 << (8 * numbers.itemsize - 1)
    return int(numbers.view(f"u{numbers.itemsize}").max()) < first_nonfinite + negative


def is_finite(tensor: Tensor) -> bool:
    """Return whether a CPU tensor holds neither NaN nor Inf."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    tensor = tensor.detach().resolve_conj().resolve_neg()
    view = numbers_of(tensor)
    if view is None:
        return bool(torch.isfinite(tensor.float()).all())
    numbers, first = view
    if not numbers.flags.c_contiguous:
        numbers = np.ascontiguousarray(numbers)
    flat, step = numbers.reshape(-1), max(1, _BLOCK_BYTES // numbers.itemsize)
    with np.errstate(invalid="ignore"):  # a signaling NaN is expected here
        return all(are_finite(flat[i : i + step], first) for i in range(0, flat.size, step))
