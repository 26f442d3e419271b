"""Batches that a training did well on, kept on the host within a bound of bytes.

A batch is copied as it is handed out: what the loop then does to it in place is its own affair. Of
a GPU's tensors pinned memory takes the copy, and nothing waits.
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
"""Steps from one kept step to the next."""
MOST_BATCHES = 4
"""Batches of one step that are kept, where it accumulates more."""
_NEAR_STEPS = 84
"""As far back batches lie close: 40 steps before an onset that 32 withheld steps have followed, and
the few until it is asked about."""
_FAR = ((144, 24), (440, 96))
"""Beyond that: up to this age, the steps that are kept are multiples of this."""
_MAX_BYTES = 256 << 20
_MAX_SHARE = 0.02
"""Of the memory that is left when the first batch is kept."""

_AS_THEY_ARE = (
    *(str, bytes, int, float, complex, bool, type(None), type, range, slice),
    *(FunctionType, BuiltinFunctionType, ModuleType),
    *(torch.dtype, torch.device, torch.Generator, nn.Module),
)


class TooLargeError(Exception):
    """A copy would go beyond its bound."""


class OnHost(NamedTuple):
    """A device's tensor, copied into pinned memory."""

    tensor: Tensor
    device: torch.device


def copied(value: Any, room: int) -> tuple[Any, int]:
    """Return a copy of a batch on the host and its bytes; nothing waits.

    Containers and objects are copied as deep as they go, and what is in them twice stays one; plain
    values are taken as they are.

    Raises:
        TooLargeError: the tensors and arrays take more than ``room`` bytes.
    """
    size = 0

    def leaf(data: Any) -> Any:
        nonlocal size
        size += _bytes(data)
        if size > room:
            raise TooLargeError(f"a batch of more than {room} bytes")
        return _on_host(data)

    return _mapped(value, leaf, {}), size


def given_out(value: Any) -> Any:
    """Return a batch as it was handed out, on its device; the caller may write to it."""
    return _mapped(value, _as_it_was, {})


def same_content(left: Any, right: Any) -> bool:
    """Return whether two copies hold the same tensors and arrays, bit for bit."""
    ours, theirs = _leaves(left), _leaves(right)
    if not ours and not theirs:
        return bool(left == right)
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []

    def take(data: Any) -> Any:
        leaves.append(data)
        return data

    _mapped(value, take, {})
    return leaves


def _same(left: Any, right: Any) -> bool:
    left, right = (d.tensor if isinstance(d, OnHost) else d for d in (left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.layout == right.layout == torch.strided and torch.equal(left, right)
    return type(left) is type(right) and left.tobytes() == right.tobytes()


def _bytes(data: Any) -> int:
    if isinstance(data, Tensor):
        return data.numel() * data.element_size()
    return int(data.nbytes)


def _on_host(data: Any) -> Any:
    if not isinstance(data, Tensor):
        return data.copy()
    if data.device.type == "cpu":
        return data.detach().clone()
    if data.layout != torch.strided or data.is_nested or data.device.type != "cuda":
        return OnHost(data.detach().to("cpu"), data.device)
    pinned = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
    return OnHost(pinned.copy_(data.detach(), non_blocking=True), data.device)


def _as_it_was(data: Any) -> Any:
    if isinstance(data, OnHost):
        # The copy into pinned memory was ordered on the device's stream; so is this one out of it.
        return data.tensor.to(data.device, copy=True)
    return data.clone() if isinstance(data, Tensor) else data.copy()


def _mapped(value: Any, leaf: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    """Return the value with every tensor and array in it replaced by what ``leaf`` makes of it."""
    if isinstance(value, _AS_THEY_ARE):
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    copied_value = _copy_container(value, leaf, memo)
    memo[id(value)] = value, copied_value  # the value too: its id must stay its own
    return copied_value


def _copy_container(
    value: Any, leaf: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]
) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor | OnHost):
        return leaf(value)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return leaf(value)
    again = [_mapped(v, leaf, memo) for v in value] if _is_sequence(value) else []
    if isinstance(value, tuple):
        return type(value)(*again) if hasattr(value, "_fields") else type(value)(again)
    if _is_sequence(value):
        return type(value)(again)
    try:
        shallow_copy = copy.copy(value)
    except TypeError:  # a handle of some library: nobody writes to it in place
        return value
    if isinstance(value, dict):
        for key, inner in value.items():
            shallow_copy[key] = _mapped(inner, leaf, memo)
    for name, inner in vars(value).items() if hasattr(value, "__dict__") else ():
        if not isinstance(value, dict) or name not in value:
            object.__setattr__(shallow_copy, name, _mapped(inner, leaf, memo))
    return shallow_copy


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


@dataclass(slots=True)
class BankedBatches:
    """The batches of one step, and the loss that the step saw."""

    step: int
    batches: list[Any]
    num_batches: int
    """Of the step; the first few of them are kept."""
    loss_of: Callable[[Any], Any]
    """Of the loop that handed them out."""
    num_bytes: int
    loss: float = float("nan")
    """This rank's own."""


class Bank:
    """Keeps accepted batches by their steps: every third for a while, few that are older.

    Where they take too much it keeps fewer: one batch of a step, every sixth step, none that are
    older; and at last none at all.

    Args:
        max_bytes: bound of all copies; by default 256 MiB and 2 % of the memory that is left.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[int, BankedBatches] = {}
        self._waiting: dict[int, BankedBatches] = {}
        """By step, until their verdict is there."""
        self._level = 0
        self._copies: list[Any] = []
        self._copied_bytes = 0

    @property
    def max_bytes(self) -> int:
        """The bound."""
        if self._max_bytes is None:
            free_bytes = host_memory_left()
            share = _MAX_BYTES if free_bytes is None else int(free_bytes * _MAX_SHARE)
            self._max_bytes = min(_MAX_BYTES, share)
        return self._max_bytes

    @property
    def is_full(self) -> bool:
        """Whether even the fewest batches did not fit: nothing is kept any more."""
        return self._level >= len(_LEVELS)

    @property
    def num_bytes(self) -> int:
        """Of all copies that are held."""
        banked = (*self._kept.values(), *self._waiting.values())
        return self._copied_bytes + sum(batches.num_bytes for batches in banked)

    def num_batches(self) -> dict[int, int]:
        """Return how many batches are kept of each step that was accepted."""
        return {step: len(batches.batches) for step, batches in self._kept.items()}

    def __getitem__(self, step: int) -> BankedBatches:
        return self._kept[step]

    def waiting(self, step: int) -> BankedBatches | None:
        """Return what was kept of a step whose verdict is not there yet."""
        return self._waiting.get(step)

    def expected_bytes(self) -> int:
        """Return what the bank will come to hold, by what it holds now."""
        banked = [*self._kept.values(), *self._waiting.values()]
        if not banked or self.is_full:
            return 0
        far = sum((end - begin) // every for begin, end, every in _far_parts())
        stride = EVERY * _LEVELS[self._level].stride
        steps = _NEAR_STEPS // stride + (far if _LEVELS[self._level].far else 0)
        return min(self.max_bytes, steps * max(batches.num_bytes for batches in banked))

    # ------------------------------------------------------------------------- what comes in

    def wants(self, step: int) -> bool:
        """Return whether one more batch of the step would be kept."""
        if self.is_full:
            return False
        level = _LEVELS[self._level]
        return step % (EVERY * level.stride) == 0 and len(self._copies) < level.batches

    def copy(self, batch: Any) -> None:
        """Copy a batch of the step to come, where there is room for it."""
        while not self.is_full:
            try:
                batch_copy, size = copied(batch, self.max_bytes - self.num_bytes)
            except TooLargeError:
                self._thin_out()
                continue
            self._copies.append(batch_copy)
            self._copied_bytes += size
            return

    def _thin_out(self) -> None:
        """Keep fewer from now on."""
        self._level += 1
        if self.is_full:
            self.clear()
            return
        most = _LEVELS[self._level].batches
        for batches in (*self._kept.values(), *self._waiting.values()):
            if len(batches.batches) > most:
                batches.num_bytes = batches.num_bytes * most // len(batches.batches)
                del batches.batches[most:]
        if len(self._copies) > most:
            self._copied_bytes = self._copied_bytes * most // len(self._copies)
            del self._copies[most:]
        self._let_go()

    def fed(self, step: int, num_batches: int, loss_of: Callable[[Any], Any]) -> None:
        """Take the copies since the last call for those of this step."""
        copies, self._copies = self._copies, []
        size, self._copied_bytes = self._copied_bytes, 0
        self._waiting.pop(step, None)  # of a branch that was left
        if copies:
            self._waiting[step] = BankedBatches(step, copies, num_batches, loss_of, size)
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[min(self._waiting)]

    def accepted(self, step: int, loss: float) -> None:
        """Keep the step's batches with its loss."""
        batches = self._waiting.pop(step, None)
        if batches is not None:
            batches.loss = loss
            self._kept[step] = batches
            self._let_go()

    def dropped(self, step: int) -> None:
        """Forget the step's batches."""
        self._waiting.pop(step, None)

    def rolled_back(self, step: int) -> None:
        """Forget all from this step on."""
        for banked in (self._kept, self._waiting):
            for later in [s for s in banked if s >= step]:
                del banked[later]
        self._copies.clear()
        self._copied_bytes = 0

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._waiting.clear()
        self._copies.clear()
        self._copied_bytes = 0

    def _let_go(self) -> None:
        """Drop what has become too old for its place."""
        newest = max(self._kept, default=0)
        for step in [s for s in self._kept if not self._stays(s, newest - s)]:
            del self._kept[step]

    def _stays(self, step: int, age: int) -> bool:
        level = _LEVELS[self._level]
        if age <= _NEAR_STEPS:
            return step % (EVERY * level.stride) == 0 or level.stride == 1
        return level.far and any(age <= oldest and step % every == 0 for oldest, every in _FAR)


class _Level(NamedTuple):
    batches: int
    """Of one step."""
    stride: int
    """In kept steps."""
    far: bool


_LEVELS = (
    _Level(MOST_BATCHES, 1, True),
    _Level(1, 1, True),
    _Level(1, 2, True),
    _Level(1, 2, False),
)
_MOST_WAITING = 4
"""Steps under way: their verdict comes one step later."""


def _far_parts() -> Iterable[tuple[int, int, int]]:
    begin = _NEAR_STEPS
    for end, every in _FAR:
        yield begin, end, every
        begin = end
