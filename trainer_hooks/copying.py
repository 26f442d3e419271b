"""Copies tensors into memory kept for them, and finds on the way what is not finite.

Each block is summed while it is still in the core's cache, so the check costs little beside the
copy. As many threads copy as torch would use, and torch is single-threaded in each of them: its own
parallel regions end with their slowest thread, and where cores are busy that costs more than all
of the copy.
"""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.moments import count_on_cpu, may_be_nonfinite, real

_BLOCK = 1 << 18
"""Elements: copied, then summed. Smaller ones cost calls, larger ones leave the cache."""
_PIECE = 1 << 22
"""Elements that one thread takes at a time."""
_MAX_THREADS = 8
"""More do not make the memory faster."""


class Pair(NamedTuple):
    """A tensor of the CPU, and what is to be copied into it: of the same shape and type."""

    into: Tensor
    source: Tensor
    checked: bool
    """Whether the copy must be finite."""


class _Piece(NamedTuple):
    owner: int
    pair: Pair


def copy_and_count(pairs: Sequence[Pair]) -> int:
    """Copy every pair, and return how many of the checked copies hold a NaN or Inf.

    The sum of a block is finite only if all of it is; where one is not, large values may have made
    it so, and the copy is looked at again.
    """
    pieces = deque(chain.from_iterable(_pieces(i, pair) for i, pair in enumerate(pairs)))
    num_threads = torch.get_num_threads()
    workers = min(num_threads, _MAX_THREADS, len(pieces))
    if workers < 2:
        suspects = _copy(pieces)
    else:
        try:
            alone = partial(torch.set_num_threads, 1)
            with ThreadPoolExecutor(workers, "vitals-copy", initializer=alone) as pool:
                suspects = set().union(*pool.map(_copy, [pieces] * workers))
        finally:
            torch.set_num_threads(num_threads)  # it is also the default of threads to come
    return count_on_cpu([pairs[i].into for i in suspects])


def _pieces(index: int, pair: Pair) -> list[_Piece]:
    if pair.into.numel() <= _PIECE or not _is_plain(pair):
        return [_Piece(index, pair)]
    parts = zip(pair.into.view(-1).split(_PIECE), pair.source.view(-1).split(_PIECE), strict=True)
    return [_Piece(index, Pair(into, source, pair.checked)) for into, source in parts]


def _is_plain(pair: Pair) -> bool:
    """Return whether the bytes of one are the bytes of the other, from first to last."""
    into, source = pair.into, pair.source
    return (
        source.device.type == "cpu"
        and into.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg())
    )


@torch.no_grad()
def _copy(pieces: deque[_Piece]) -> set[int]:
    """Copy pieces until there are none; return the indices of those whose sums are not finite."""
    sums: list[Tensor] = []
    owners: list[int] = []
    while True:
        try:
            owner, pair = pieces.popleft()  # threads share them
        except IndexError:
            break
        for block in _blocks(pair):
            if pair.checked and may_be_nonfinite(block):
                sums.append(real(block).sum())
                owners.append(owner)
    if not sums:
        return set()
    finite = torch.stack([one.float() for one in sums]).isfinite().tolist()
    return {owner for owner, sound in zip(owners, finite, strict=True) if not sound}


def _blocks(pair: Pair) -> Iterator[Tensor]:
    """Copy block by block; yield each block of the copy while it is in the cache."""
    into, source, _ = pair
    if not _is_plain(pair):
        into.copy_(source)
        yield into
    elif into.numel() <= _BLOCK:
        ctypes.memmove(into.data_ptr(), source.data_ptr(), into.nbytes)
        yield into
    else:
        halves = (one.view(-1).split(_BLOCK) for one in (into, source))
        for part, origin in zip(*halves, strict=True):
            ctypes.memmove(part.data_ptr(), origin.data_ptr(), part.nbytes)
            yield part
