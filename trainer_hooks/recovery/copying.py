"""Copies tensors into memory kept for them, and finds on the way what is not finite.

Each block is looked at while it is still in the core's cache, so the check costs little beside the
copy. As many threads copy as torch would use; none of them calls torch, whose own number of threads
is the training's.

From a GPU the copy runs on a side stream. Whoever writes what it reads lets it end first, on the
device: ``wait_for_copies``.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_hooks.recovery.finite import (
    Numbers,
    are_finite,
    bytes_of,
    is_finite,
    is_readable,
    numbers_of,
)

_BLOCK_BYTES = 1 << 19
"""Copied, then looked at. Smaller ones cost calls, larger ones leave the cache."""
_PIECE_BYTES = 1 << 24
"""What one thread takes at a time."""
_MAX_THREADS = 8
"""More do not make the memory faster."""
_BYTES_PER_THREAD = 1 << 25
"""Below that a thread more costs as much as it saves."""


class Pair(NamedTuple):
    """A tensor of the CPU, and what is to be copied into it: of the same shape and type."""

    into: Tensor
    source: Tensor
    checked: bool
    """Whether the copy must be finite."""


class _Piece(NamedTuple):
    owner: int
    into: NDArray[Any]
    source: NDArray[Any]
    first_nonfinite: int | None
    """From where on the bits are no finite number; None where that is nobody's question."""
    block: int
    """Elements that are copied, then looked at."""


class CopyPlan:
    """Copies the same tensors again and again; what each of them needs is worked out once.

    It holds the memory of both sides: addresses stay their own for as long as the plan lives.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._others = [(i, pair) for i, pair in enumerate(pairs) if not _is_plain(pair)]
        self._pieces = [
            piece for i, pair in enumerate(pairs) if _is_plain(pair) for piece in _pieces(i, pair)
        ]
        size = sum(piece.into.nbytes for piece in self._pieces)
        self._most_threads = min(_MAX_THREADS, size // _BYTES_PER_THREAD, len(self._pieces))

    @torch.no_grad()
    def run(self) -> int:
        """Copy every pair, and return how many of the checked copies hold a NaN or Inf."""
        wrong: set[int] = set()
        for i, pair in self._others:
            pair.into.copy_(pair.source)
            if pair.checked and not is_finite(pair.into):
                wrong.add(i)
        pieces = deque(self._pieces)
        helpers = min(torch.get_num_threads(), self._most_threads) - 1
        if helpers < 1:
            return len(wrong | _copy(pieces))
        with ThreadPoolExecutor(helpers, "vitals-copy") as pool:
            beside = [pool.submit(_copy, pieces) for _ in range(helpers)]
            wrong |= _copy(pieces)
            return len(wrong.union(*(part.result() for part in beside)))


def signature_of(live: Mapping[str, Tensor]) -> list[object]:
    """Return what a plan depends on: two that are equal name the same memory, read the same way."""
    return [
        (key, t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg())
        for key, t in live.items()
    ]


def _is_plain(pair: Pair) -> bool:
    """Return whether the bytes of one are the bytes of the other, from first to last."""
    into, source = pair.into, pair.source
    return (
        source.device.type == "cpu"
        and into.shape == source.shape
        and source.numel() > 0
        and into.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg())
        and (not pair.checked or is_readable(source.dtype))
    )


def _pieces(index: int, pair: Pair) -> Iterator[_Piece]:
    target = numbers_of(pair.into) if pair.checked else None
    if target is None:
        arrays, first = [bytes_of(pair.into), bytes_of(pair.source)], None
    else:
        source = numbers_of(pair.source)
        assert source is not None, "the two are of one type"
        arrays, first = [target[0].reshape(-1), source[0].reshape(-1)], target[1]
    into, origin = arrays
    step, block = (max(1, size // into.itemsize) for size in (_PIECE_BYTES, _BLOCK_BYTES))
    for i in range(0, into.size, step):
        yield _Piece(index, into[i : i + step], origin[i : i + step], first, block)


def _copy(pieces: deque[_Piece]) -> set[int]:
    """Copy pieces until there are none; return the owners of those that are not finite."""
    wrong: set[int] = set()
    with np.errstate(invalid="ignore"):  # a signalling NaN is what is looked for
        while True:
            try:
                piece = pieces.popleft()  # threads share them
            except IndexError:
                return wrong
            if not _copied(piece):
                wrong.add(piece.owner)


def _copied(piece: _Piece) -> bool:
    """Copy a piece block by block; return whether it is finite, where that is the question."""
    _, into, source, first_nonfinite, step = piece
    finite = True
    for i in range(0, into.size, step):
        block: Numbers = into[i : i + step]
        np.copyto(block, source[i : i + step])
        if first_nonfinite is not None and not are_finite(block, first_nonfinite):
            finite = False
    return finite


# ------------------------------------------------------------- the order on the device


class SideStream(Protocol):
    """A device's second queue of work, beside the stream that the training is on.

    All that order is made of is here, so that a test may stand in for a device and run what is on
    the side at any moment that a device may choose.
    """

    def run(self, work: Callable[[], None]) -> object:
        """Queue work behind what the training's stream has by now; return what marks its end."""

    def wait(self, end: object) -> None:
        """Put what the training's stream is given from now on behind that end; no host waits."""

    def join(self, end: object) -> None:
        """Make the host wait for that end."""

    def drain(self) -> None:
        """Make the host wait for what the training's stream has by now."""


class CudaSideStream:
    """The one of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Queue work; each kernel and copy in it lands on the side."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            end: torch.cuda.Event = self._stream.record_event()
        return end

    def wait(self, end: object) -> None:
        """Let the present stream wait."""
        assert isinstance(end, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(end)

    def join(self, end: object) -> None:
        """Let the host wait."""
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()

    def drain(self) -> None:
        """Let the host wait for the present stream."""
        torch.cuda.current_stream(self._device).synchronize()


class PendingCopy:
    """A copy that may still be under way: what it reads is not to be written before."""

    def __init__(self, side: SideStream, end: object) -> None:
        self._side, self._end = side, end
        _PENDING.add(self)

    def wait(self) -> None:
        """Let what is queued from now on come after it."""
        self._side.wait(self._end)


_PENDING: WeakSet[PendingCopy] = WeakSet()
"""Of all rings: an average knows its weights, and not who copies them."""


def wait_for_copies() -> None:
    """Let what is queued from now on come after every copy that is under way; no host waits.

    For our own writers of weights, optimizer state and averages outside of a step.
    """
    for pending in tuple(_PENDING):
        pending.wait()
