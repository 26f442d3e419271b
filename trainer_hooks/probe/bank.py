"""Host copies of batches from healthy steps, within a byte limit.

A batch is copied before the loop receives it, since the loop may modify it in place. GPU tensors
are copied to pinned memory asynchronously, so the host does not wait.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_hooks.recovery.memory import host_memory_left

EVERY = 3
"""Steps between two kept steps."""
MOST_BATCHES = 4
"""Batches kept per step, if the step accumulates more."""
_NEAR_STEPS = 84
"""Age in steps up to which every third step is kept: 40 steps before an onset, 32 withheld steps
after it, and the delay until the probe runs."""
_FAR = ((144, 24), (440, 96))
"""For older steps: (maximum age, keep only multiples of this)."""
_MAX_BYTES = 256 << 20
_MAX_SHARE = 0.02
"""Fraction of the memory that is free when the first batch is kept."""

_AS_THEY_ARE = (
    *(str, bytes, int, float, complex, bool, type(None), type, range, slice),
    *(FunctionType, BuiltinFunctionType, ModuleType),
    *(torch.dtype, torch.device, torch.Generator, nn.Module),
)


class TooLargeError(Exception):
    """A copy would exceed its byte limit."""


class OnHost(NamedTuple):
    """Copy of a device tensor in pinned memory, and its original device."""

    tensor: Tensor
    device: torch.device


def copy_to_host(value: Any, room: int) -> tuple[Any, int]:
    """Copy a batch for the probe to the host without waiting; return the copy and its bytes.

    Containers and objects are copied recursively; an object that occurs twice is copied once. Plain
    values are shared.

    Raises:
        TooLargeError: tensors and arrays exceed ``room`` bytes.
    """
    size = 0

    def leaf(data: Any) -> Any:
        nonlocal size
        size += _num_bytes(data)
        if size > room:
            raise TooLargeError(f"a batch of more than {room} bytes")
        return _copy_leaf_to_host(data)

    return _map_leaves(value, leaf, {}), size


def copy_to_device(value: Any) -> Any:
    """Return a copy of the probe's batch on its original device; the caller may modify it."""
    return _map_leaves(value, _to_original_device, {})


def same_content(left: Any, right: Any) -> bool:
    """Return whether two batches of the probe hold the same tensors and arrays, bit for bit."""
    ours, theirs = _leaves(left), _leaves(right)
    if not ours and not theirs:
        return bool(left == right)
    return len(ours) == len(theirs) and all(map(_is_equal_data, ours, theirs))


def _leaves(value: Any) -> list[Any]:
    """Return all tensors and arrays of a batch that was kept for the probe."""
    leaves: list[Any] = []

    def take(data: Any) -> Any:
        leaves.append(data)
        return data

    _map_leaves(value, take, {})
    return leaves


def _is_equal_data(left: Any, right: Any) -> bool:
    """Return whether two tensors or arrays of the probe's kept batches are equal."""
    left, right = (d.tensor if isinstance(d, OnHost) else d for d in (left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.layout == right.layout == torch.strided and torch.equal(left, right)
    return type(left) is type(right) and left.tobytes() == right.tobytes()


def _num_bytes(data: Any) -> int:
    """Return the bytes of a tensor or array of a batch to keep for the probe."""
    if isinstance(data, Tensor):
        return data.numel() * data.element_size()
    return int(data.nbytes)


def _copy_leaf_to_host(data: Any) -> Any:
    """Copy one tensor or array of the probe's batch to the host, without waiting for CUDA."""
    if not isinstance(data, Tensor):
        return data.copy()
    if data.device.type == "cpu":
        return data.detach().clone()
    if data.layout != torch.strided or data.is_nested or data.device.type != "cuda":
        return OnHost(data.detach().to("cpu"), data.device)
    pinned = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
    return OnHost(pinned.copy_(data.detach(), non_blocking=True), data.device)


def _to_original_device(data: Any) -> Any:
    """Copy a tensor or array of the probe's kept batch back to its original device."""
    if isinstance(data, OnHost):
        # Both copies are ordered on the device's stream, so this one starts after the first has
        # ended.
        return data.tensor.to(data.device, copy=True)
    return data.clone() if isinstance(data, Tensor) else data.copy()


def _map_leaves(value: Any, leaf: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    """Return a probe's batch with each tensor and array replaced by the result of ``leaf``."""
    if isinstance(value, _AS_THEY_ARE):
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    copied_value = _copy_container(value, leaf, memo)
    memo[id(value)] = value, copied_value  # keep a reference: otherwise the id could be reused
    return copied_value


def _copy_container(
    value: Any, leaf: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]
) -> Any:
    """Return a container of a probe's batch with its tensors and arrays replaced."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor | OnHost):
        return leaf(value)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return leaf(value)
    again = [_map_leaves(v, leaf, memo) for v in value] if _is_sequence(value) else []
    if isinstance(value, tuple):
        return type(value)(*again) if hasattr(value, "_fields") else type(value)(again)
    if _is_sequence(value):
        return type(value)(again)
    try:
        shallow_copy = copy.copy(value)
    except TypeError:  # an opaque library handle, not modified in place
        return value
    if isinstance(value, dict):
        for key, inner in value.items():
            shallow_copy[key] = _map_leaves(inner, leaf, memo)
    for name, inner in vars(value).items() if hasattr(value, "__dict__") else ():
        if not isinstance(value, dict) or name not in value:
            object.__setattr__(shallow_copy, name, _map_leaves(inner, leaf, memo))
    return shallow_copy


def _is_sequence(value: Any) -> bool:
    """Return whether a part of the probe's batch is a list, tuple or set."""
    return isinstance(value, list | tuple | set | frozenset)


@dataclass(slots=True)
class BankedBatches:
    """Kept batches of one step, and the loss of that step."""

    step: int
    batches: list[Any]
    num_batches: int
    """Batches of the step; only the first few are kept."""
    loss_of: Callable[[Any], Any]
    """The loop's loss function for these batches."""
    num_bytes: int
    loss: float = float("nan")
    """Local loss of this rank."""


class BatchBank:
    """Keeps batches of healthy steps: every third recent step, and few older ones.

    If they exceed the limit, it keeps less: one batch per step, then every sixth step, then no
    older ones, and finally nothing. By default the limit of all copies is 256 MiB, or 2% of the
    free memory if that is less.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._accepted: dict[int, BankedBatches] = {}
        self._waiting: dict[int, BankedBatches] = {}
        """By step; the verdict has not arrived yet."""
        self._level = 0
        self._copies: list[Any] = []
        self._copied_bytes = 0

    @property
    def max_bytes(self) -> int:
        """Return the limit, in bytes, for all copies of the probe's batches."""
        if self._max_bytes is None:
            free_bytes = host_memory_left()
            share = _MAX_BYTES if free_bytes is None else int(free_bytes * _MAX_SHARE)
            self._max_bytes = min(_MAX_BYTES, share)
        return self._max_bytes

    @property
    def is_full(self) -> bool:
        """Return whether even the smallest level exceeded the limit; then a probe keeps nothing."""
        return self._level >= len(_LEVELS)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all current copies of the probe's batches."""
        banked = (*self._accepted.values(), *self._waiting.values())
        return self._copied_bytes + sum(batches.num_bytes for batches in banked)

    def num_batches(self) -> dict[int, int]:
        """Return the number of batches kept for the probe by accepted step."""
        return {step: len(batches.batches) for step, batches in self._accepted.items()}

    def __getitem__(self, step: int) -> BankedBatches:
        return self._accepted[step]

    def waiting(self, step: int) -> BankedBatches | None:
        """Return the probe's batches of a step whose verdict has not arrived yet."""
        return self._waiting.get(step)

    def expected_bytes(self) -> int:
        """Return the bytes of a full probe bank, extrapolated from the current copies."""
        banked = [*self._accepted.values(), *self._waiting.values()]
        if not banked or self.is_full:
            return 0
        far = sum((end - begin) // every for begin, end, every in _old_step_spacings())
        stride = EVERY * _LEVELS[self._level].stride
        steps = _NEAR_STEPS // stride + (far if _LEVELS[self._level].far else 0)
        return min(self.max_bytes, steps * max(batches.num_bytes for batches in banked))

    # --------------------------------------------------------------------- batches of a step

    def wants(self, step: int) -> bool:
        """Return whether another batch of the step would be kept for the probe."""
        if self.is_full:
            return False
        level = _LEVELS[self._level]
        return step % (EVERY * level.stride) == 0 and len(self._copies) < level.batches

    def copy(self, batch: Any) -> None:
        """Copy a batch of the next step for the probe, if the limit allows it."""
        while not self.is_full:
            try:
                batch_copy, size = copy_to_host(batch, self.max_bytes - self.num_bytes)
            except TooLargeError:
                self._lower_level()
                continue
            self._copies.append(batch_copy)
            self._copied_bytes += size
            return

    def _lower_level(self) -> None:
        """Switch to a level that keeps less for the probe, and drop what exceeds it."""
        self._level += 1
        if self.is_full:
            self.clear()
            return
        most = _LEVELS[self._level].batches
        for batches in (*self._accepted.values(), *self._waiting.values()):
            if len(batches.batches) > most:
                batches.num_bytes = batches.num_bytes * most // len(batches.batches)
                del batches.batches[most:]
        if len(self._copies) > most:
            self._copied_bytes = self._copied_bytes * most // len(self._copies)
            del self._copies[most:]
        self._evict_old()

    def fed(self, step: int, num_batches: int, loss_of: Callable[[Any], Any]) -> None:
        """Assign the batches copied for the probe since the last call to a step."""
        copies, self._copies = self._copies, []
        size, self._copied_bytes = self._copied_bytes, 0
        self._waiting.pop(step, None)  # belongs to an attempt that was rolled back
        if copies:
            self._waiting[step] = BankedBatches(step, copies, num_batches, loss_of, size)
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[min(self._waiting)]

    def accepted(self, step: int, loss: float) -> None:
        """Keep for the probe the batches of a step that was judged clean, with its local loss."""
        batches = self._waiting.pop(step, None)
        if batches is not None:
            batches.loss = loss
            self._accepted[step] = batches
            self._evict_old()

    def dropped(self, step: int) -> None:
        """Drop the batches of a step that was not judged clean, so that no probe uses them."""
        self._waiting.pop(step, None)

    def rolled_back(self, step: int) -> None:
        """Drop the probe's batches of this step and all later ones."""
        for banked in (self._accepted, self._waiting):
            for later in [s for s in banked if s >= step]:
                del banked[later]
        self._copies.clear()
        self._copied_bytes = 0

    def clear(self) -> None:
        """Drop all batches kept for the probe."""
        self._accepted.clear()
        self._waiting.clear()
        self._copies.clear()
        self._copied_bytes = 0

    def _evict_old(self) -> None:
        """Drop the probe's steps that are too old for their spacing."""
        newest = max(self._accepted, default=0)
        for step in [s for s in self._accepted if not self._is_retained(s, newest - s)]:
            del self._accepted[step]

    def _is_retained(self, step: int, age: int) -> bool:
        """Return whether the probe keeps a step of this age, by the level's spacing."""
        level = _LEVELS[self._level]
        if age <= _NEAR_STEPS:
            return step % (EVERY * level.stride) == 0 or level.stride == 1
        return level.far and any(age <= oldest and step % every == 0 for oldest, every in _FAR)


class _Level(NamedTuple):
    batches: int
    """Batches per step."""
    stride: int
    """In units of kept steps."""
    far: bool


_LEVELS = (
    _Level(MOST_BATCHES, 1, True),
    _Level(1, 1, True),
    _Level(1, 2, True),
    _Level(1, 2, False),
)
_MOST_WAITING = 4
"""Steps without a verdict; it arrives one step later."""


def _old_step_spacings() -> Iterable[tuple[int, int, int]]:
    """Yield (youngest age, oldest age, spacing) of the older steps kept for the probe."""
    begin = _NEAR_STEPS
    for end, every in _FAR:
        yield begin, end, every
        begin = end
