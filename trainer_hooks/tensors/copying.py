"""Copies tensors into memory kept for them, and finds non-finite values during the copy.

Each block is checked while it is still in the core's cache, so the check costs little compared with
the copy. As many threads copy as torch would use; none of them calls torch, because the number of
torch threads belongs to the training.

From a GPU the copy runs on a side stream. Before other code writes the source, it must let the copy
end on the device: ``wait_for_copies``.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_hooks.tensors.events import copy_to, record_event
from trainer_hooks.tensors.finite import (
    Numbers,
    are_finite,
    bytes_of,
    is_finite,
    is_readable,
    numbers_of,
)

_BLOCK_BYTES = 1 << 19
"""Unit of copy and check. Smaller blocks cost calls, larger ones leave the cache."""
_PIECE_BYTES = 1 << 24
"""Bytes that one thread takes at a time."""
_SMALL_BYTES = 1 << 14
"""Smaller tensors are checked together: calls would cost more than their bytes."""
_MAX_THREADS = 8
"""More threads do not make the memory faster."""
_BYTES_PER_THREAD = 1 << 25
"""Below this, another thread costs as much as it saves."""


class Pair(NamedTuple):
    """A CPU tensor, and the source of its copy: of the same shape and type."""

    into: Tensor | None
    """None: another rank copies it, and it is only checked."""
    source: Tensor
    checked: bool
    """Whether the copy must be finite."""
    name: str = ""
    """Ranges of one tensor share a name, and count as one."""
    unit: int = -1
    """Its position in the fingerprint of replicas; -1: not included."""


class _Piece(NamedTuple):
    owner: int | str
    into: NDArray[Any] | None
    source: NDArray[Any]
    first_nonfinite: int | None
    """First bit pattern that is non-finite; None if it is not checked."""
    block: int
    """Elements per copy and check."""
    unit: int


class _Bundle(NamedTuple):
    """Small tensors of one type, which are checked together."""

    owners: list[int | str]
    intos: list[NDArray[Any]]
    sources: list[NDArray[Any]]
    first_nonfinite: int | None


class CopyCheck(NamedTuple):
    """Result of the checks during a copy."""

    num_wrong: int
    """Number of non-finite tensors among those that must be finite."""
    fingerprint: int
    """Fingerprint of all bits of the pairs with a ``unit``, below 2**64."""


class CopyPlan:
    """Copies the same tensors repeatedly; their plan is computed once.

    It holds the memory of both sides, so addresses are not reused while the plan lives.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._others = [(i, pair) for i, pair in enumerate(pairs) if not _is_plain(pair)]
        plain = [(pair.name or i, pair) for i, pair in enumerate(pairs) if _is_plain(pair)]
        self._bundles = _bundles([each for each in plain if _is_small(each[1])])
        self._pieces = [
            piece
            for owner, pair in plain
            if not _is_small(pair)
            for piece in _split_into_pieces(owner, pair)
        ]
        size = sum(piece.source.nbytes for piece in self._pieces)
        self._most_threads = min(_MAX_THREADS, size // _BYTES_PER_THREAD, len(self._pieces))

    @torch.no_grad()
    def run(self) -> CopyCheck:
        """Copy every pair to the host; check those that must be finite, and those to compare."""
        wrong: set[int | str] = set()
        for i, pair in self._others:
            assert pair.into is not None, "what is only looked at is plain"
            pair.into.copy_(pair.source)
            if pair.checked and not is_finite(pair.into):
                wrong.add(pair.name or i)
        pieces = deque(self._pieces)
        helpers = min(torch.get_num_threads(), self._most_threads) - 1
        if helpers < 1:
            wrong |= _copy_small(self._bundles)
            seen = [_copy_pieces(pieces)]
        else:
            with ThreadPoolExecutor(helpers, "vitals-copy") as pool:
                beside = [pool.submit(_copy_pieces, pieces) for _ in range(helpers)]
                wrong |= _copy_small(self._bundles)
                seen = [_copy_pieces(pieces), *(part.result() for part in beside)]
        num_wrong = len(wrong.union(*(owners for owners, _ in seen)))
        return CopyCheck(num_wrong, sum(part for _, part in seen) % _MODULUS)


def signature_of(live: Mapping[str, Tensor]) -> list[object]:
    """Return the inputs of a copy's plan: equal ones mean the same memory, read in the same way."""
    return [
        (key, t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg())
        for key, t in live.items()
    ]


def _is_plain(pair: Pair) -> bool:
    """Return whether one tensor has the bytes of the other, from first to last."""
    into, source = pair.into, pair.source
    return (
        source.device.type == "cpu"
        and (into is None or (into.shape == source.shape and into.is_contiguous()))
        and source.numel() > 0
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg())
        and (not pair.checked or is_readable(source.dtype))
    )


def _is_small(pair: Pair) -> bool:
    """Return whether a tensor's copy is small, so that it is bundled with others."""
    return pair.into is not None and pair.unit < 0 and pair.source.nbytes <= _SMALL_BYTES


def _arrays(pair: Pair) -> tuple[NDArray[Any] | None, NDArray[Any], int | None]:
    """Return both sides of a snapshot copy as arrays, and the first non-finite bits."""
    numbers = numbers_of(pair.source) if pair.checked else None
    if numbers is None:
        into = None if pair.into is None else bytes_of(pair.into)
        return into, bytes_of(pair.source), None
    target = None if pair.into is None else numbers_of(pair.into)
    into = None if target is None else target[0].reshape(-1)
    return into, numbers[0].reshape(-1), numbers[1]


def _bundles(small: Sequence[tuple[int | str, Pair]]) -> list[_Bundle]:
    """Return small tensors to copy in bundles of a block, each of one type."""
    full: list[_Bundle] = []
    open_: dict[tuple[np.dtype[Any], int | None], _Bundle] = {}
    for owner, pair in small:
        into, source, first = _arrays(pair)
        assert into is not None, "what is only looked at has a piece of its own"
        key = source.dtype, first
        bundle = open_.setdefault(key, _Bundle([], [], [], first))
        bundle.owners.append(owner)
        bundle.intos.append(into)
        bundle.sources.append(source)
        if sum(part.nbytes for part in bundle.sources) >= _BLOCK_BYTES:
            full.append(open_.pop(key))
    return [*full, *open_.values()]


def _copy_small(bundles: Sequence[_Bundle]) -> set[int | str]:
    """Copy bundles of small tensors; return the owners of non-finite values."""
    wrong: set[int | str] = set()
    with np.errstate(invalid="ignore"):
        for owners, intos, sources, first in bundles:
            for into, source in zip(intos, sources, strict=True):
                np.copyto(into, source)
            if first is None or are_finite(np.concatenate(intos), first):
                continue
            each = zip(owners, intos, strict=True)
            wrong.update(owner for owner, into in each if not are_finite(into, first))
    return wrong


def _split_into_pieces(owner: int | str, pair: Pair) -> Iterator[_Piece]:
    """Yield pieces of a tensor's copy to the host, which threads share."""
    into, source, first = _arrays(pair)
    step, block = (max(1, size // source.itemsize) for size in (_PIECE_BYTES, _BLOCK_BYTES))
    for i in range(0, source.size, step):
        part = None if into is None else into[i : i + step]
        yield _Piece(owner, part, source[i : i + step], first, block, pair.unit)


def _copy_pieces(pieces: deque[_Piece]) -> tuple[set[int | str], int]:
    """Copy pieces until none are left; return owners of non-finite values, and a fingerprint."""
    wrong: set[int | str] = set()
    fingerprint = 0
    with np.errstate(invalid="ignore"):  # a signaling NaN is expected here
        while True:
            try:
                piece = pieces.popleft()  # threads share them
            except IndexError:
                return wrong, fingerprint
            is_well, part = _copy_piece(piece)
            fingerprint += part
            if not is_well:
                wrong.add(piece.owner)


def _copy_piece(piece: _Piece) -> tuple[bool, int]:
    """Copy a piece block by block; return whether it is finite if checked, and a fingerprint."""
    _, into, source, first_nonfinite, step, unit = piece
    finite, fingerprint = True, 0
    for i in range(0, source.size, step):
        block: Numbers = source[i : i + step]
        if into is not None:
            origin, block = block, into[i : i + step]
            np.copyto(block, origin)
        if first_nonfinite is not None and not are_finite(block, first_nonfinite):
            finite = False
        if unit >= 0:  # from this rank's own data, which another rank's copy may not equal
            chunk = source[i : i + step].view(np.uint8)
            fingerprint += _sum_of_bits(chunk) * _odd_weight(unit, i // step)
    return finite, fingerprint


# ----------------------------------------------------------------- whether replicas are equal

_MODULUS = 1 << 64
_LANES = 1024
_LANE_WEIGHTS = np.random.default_rng(0x5EED).integers(-(1 << 63), 1 << 63, _LANES) | 1
"""Odd, so that no flipped bit is lost in the product."""
WORD_BITS = 52
"""Bits of a fingerprint that are sent: a float64 holds them exactly."""


def _odd_weight(unit: int, block: int) -> int:
    """Return the weight of a tensor's block in a fingerprint: odd, and different for each block."""
    return (unit * 0x9E3779B97F4A7C15 + block * 0xD1B54A32D192ED03 << 1 | 1) % _MODULUS


def _sum_of_bits(raw: NDArray[np.uint8]) -> int:
    """Return a sum over a tensor, modulo 2**64: every bit counts with the weight of its column."""
    int64_view = raw[: raw.size & ~7].view(np.int64)
    whole = int64_view.size // _LANES * _LANES
    total = 0
    if whole:
        columns = np.add.reduce(int64_view[:whole].reshape(-1, _LANES), axis=0)
        total = int(np.dot(columns, _LANE_WEIGHTS))
    rest = int64_view[whole:]
    total += 3 * int(np.dot(rest, _LANE_WEIGHTS[: rest.size]))
    return total + 5 * int.from_bytes(raw[int64_view.nbytes :].tobytes(), "little")


def fingerprint_on_device(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Return, as one int64 on the device, the fingerprint of the pairs that have a ``unit``.

    It detects every single flipped bit, as ``CopyPlan`` does, but has other values. CPU tensors are
    read at once, the others without waiting.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for pair in pairs:
        if pair.unit >= 0 and pair.source.numel():
            total += fingerprint_of([pair.source], device) * _signed(_odd_weight(pair.unit, 0))
    return total


_PRIME_LANES = 4093
"""Words of 8 bytes are summed by their position modulo this. A prime: rows are as wide as powers of
two, so words that change places between rows do not land in the lane they came from."""


@torch.no_grad()
def fingerprint_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an int64 on the device that depends on every bit of the tensors and on its place.

    A wrap-around sum of each lane's words, mixed before the lanes are added: a linear sum would not
    see two flips of the highest bit of two words, whatever its weights. No value reaches the host.
    """
    columns = [copy_to(_lanes(tensor), device) for tensor in tensors]
    flat = columns[0] if len(columns) == 1 else torch.cat(columns)
    # Created each time: a cached one would belong to another stream, which nothing waits for.
    places = torch.arange(1, flat.numel() + 1, device=device) * _signed(0xD1B54A32D192ED03)
    mixed = (flat + places) * _signed(0x9E3779B97F4A7C15)
    mixed ^= mixed >> 32
    mixed *= _signed(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> 29
    return mixed.sum()


def _lanes(tensor: Tensor) -> Tensor:
    """Return the sums of a tensor's words by lane, at most ``_PRIME_LANES`` int64 of them."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # the same words at every alignment
    end = raw.numel() // 8 * 8
    int64_view, odd = raw[:end].view(torch.int64), raw[end:]
    whole = int64_view.numel() // _PRIME_LANES * _PRIME_LANES
    parts = [int64_view[whole:]]
    if whole:
        lanes = int64_view[:whole].view(-1, _PRIME_LANES).sum(0)
        lanes[: int64_view.numel() - whole] += parts[0]
        parts = [lanes]
    if odd.numel():
        parts.append(odd.to(torch.int64))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def word_of(fingerprint: Tensor) -> Tensor:
    """Return 52 bits of a mixed int64 as a float64 that is never 0, to send with the step."""
    mixed = fingerprint
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        logical = (mixed >> shift) & ((1 << (64 - shift)) - 1)
        mixed = (mixed ^ logical) * _signed(factor)
    word = (mixed >> (64 - WORD_BITS)) & ((1 << WORD_BITS) - 1)
    return word.clamp(min=1).to(torch.float64)


def as_int64(number: int) -> Tensor:
    """Return the number, modulo 2**64, as a CPU tensor."""
    return torch.tensor(_signed(number), dtype=torch.int64, device="cpu")


def _signed(number: int) -> int:
    """Return the fingerprint's int64 with the same lowest 64 bits."""
    number %= _MODULUS
    return number - _MODULUS if number >= _MODULUS >> 1 else number


# ------------------------------------------------------------- the order on the device


class SideStream:
    """A GPU's second queue of work, in addition to the stream of the training.

    It contains everything about the order, so that a test can replace a device and run the side
    work at any time that a device may choose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Queue work after the training stream's current work; return a marker of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            return record_event(self._device)

    def wait(self, end: torch.cuda.Event) -> None:
        """Queue later work of the training's stream after that end; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(end)

    def join(self, end: torch.cuda.Event) -> None:
        """Make the host wait for that end."""
        end.synchronize()

    def drain(self) -> None:
        """Make the host wait for the current work of the training's stream."""
        record_event(self._device).synchronize()


class PendingCopy:
    """A copy that may be in flight: its source must not be written before it ends."""

    def __init__(
        self, side: SideStream, end: torch.cuda.Event, written: Sequence[Tensor] = ()
    ) -> None:
        """``written``: what the side stream writes; it must not be freed before the end."""
        self._side, self._end, self._written = side, end, written
        _PENDING.add(self)

    def wait(self) -> None:
        """Queue all later work after the copy of the tensors."""
        self._side.wait(self._end)


_PENDING: WeakSet[PendingCopy] = WeakSet()
"""Copies of all rings: an average knows its weights, but not the rings that copy them."""


def wait_for_copies() -> None:
    """Queue all later work after every copy of tensors in flight; the host does not wait.

    For our own writers of weights, optimizer state and averages outside of a step.
    """
    for pending in tuple(_PENDING):
        pending.wait()
