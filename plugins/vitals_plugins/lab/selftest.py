"""Small computations with exactly known results, to test a suspected device.

Each takes a device and a seed and returns its first wrong answer, or None. Answers are compared bit
for bit: inputs are integers, small enough that each product and each partial sum is one too, so
that no order of summation, no fused multiply-add and no TF32 rounds. Nothing here needs a run, a
journal or a process group of the training's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

LARGEST = {torch.float64: 1 << 22, torch.float32: 1 << 8, torch.bfloat16: 1}
"""Largest magnitude of an input of ``gemm``: ``INNER * LARGEST ** 2`` is at most 2 ** 53, 2 ** 24
and 2 ** 8, up to which these types hold every integer. 2 ** 8 is also exact as TF32 and bfloat16,
in which a float32 product may be computed."""
INNER = 256
"""Products summed for each element of ``gemm``."""
_OUTER = 128
PATTERNS = ("0x55", "0xaa", "address", "random")
"""Patterns of ``memory``: alternating bits and their inverse, each word's own address, and
pseudo-random words."""
NUM_SUMMED = 1 << 18
"""Elements of a tensor of ``all_reduce``."""
_CHUNK_WORDS = 1 << 21
_ODD = -7046029254386353131  # 2 ** 64 over the golden ratio: neighbors differ in half of their bits
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class WrongAnswer(NamedTuple):
    """The first element that is wrong, and how many are."""

    kernel: str
    device: str
    seed: int
    element: int
    """Its index in the flat result, or block of memory."""
    num_wrong: int
    expected: int
    actual: int
    """Both as the element's bits."""
    address: int = 0
    """Address of the word, in the process or on the device; 0 if memory was not tested."""

    def __str__(self) -> str:
        flipped = self.expected ^ self.actual
        bits = [str(bit) for bit in range(flipped.bit_length()) if flipped >> bit & 1]
        which = f"bit {', '.join(bits)}" if len(bits) <= 4 else f"{len(bits)} bits"
        where = f" at {self.address:#x}" if self.address else ""
        return (
            f"{self.kernel}, seed {self.seed}: element {self.element}{where} is {self.actual:#x}, "
            f"expected {self.expected:#x} "
            f"({which if flipped else 'right when read again'}; {self.num_wrong:,} wrong)"
        )


@torch.no_grad()
def gemm(
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    seconds: float = 0.0,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> WrongAnswer | None:
    """Multiply two integer matrices; compare with the known result: the host's int64 product.

    Args:
        device: device of the multiplication.
        dtype: a key of ``LARGEST``.
        seed: of the matrices.
        seconds: for how long the product is computed again; once at least.
        multiply: computes the product; tests replace it.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(rows: int, columns: int) -> torch.Tensor:
        size = torch.randint(
            1, LARGEST[dtype] + 1, (rows, columns), generator=generator, device="cpu"
        )
        # No zero: a sum of nothing but negative zeros would be one, which is other bits.
        return size * (torch.randint(0, 2, size.shape, generator=generator, device="cpu") * 2 - 1)

    left, right = integers(_OUTER, INNER), integers(INNER, _OUTER)
    # Repeated rows and columns fill the device while the known answer costs the host milliseconds.
    times = 32 if device.type == "cuda" else 4
    expected = (left @ right).to(device, dtype).repeat(times, times)
    left, right = left.to(device, dtype).repeat(times, 1), right.to(device, dtype).repeat(1, times)
    until = time.monotonic() + seconds
    name = f"gemm {str(dtype).removeprefix('torch.')}"
    while True:
        with torch.autocast(device.type, enabled=False):
            product = multiply(left, right)
        wrong = _find_wrong_element(name, seed, product, expected)
        if wrong is not None or time.monotonic() >= until:
            return wrong


@torch.no_grad()
def memory(
    block: torch.Tensor,
    seed: int,
    *,
    read: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
) -> WrongAnswer | None:
    """Write a known pattern into a block of a device's memory, then read it back.

    Args:
        block: words of int64 on the device; larger than its caches, or those are tested.
        seed: selects one of ``PATTERNS`` in turn, and the random words.
        read: reads a part of the block; tests replace it.
    """
    pattern = PATTERNS[seed % len(PATTERNS)]
    parts = block.split(_CHUNK_WORDS)
    for number, part in enumerate(parts):
        part.copy_(_pattern_words(pattern, block, number * _CHUNK_WORDS, len(part), seed))
    for number, part in enumerate(parts):
        first = number * _CHUNK_WORDS
        expected = _pattern_words(pattern, block, first, len(part), seed)
        wrong = _find_wrong_element(f"memory {pattern}", seed, read(part), expected)
        if wrong is not None:
            element = first + wrong.element
            return wrong._replace(element=element, address=block.data_ptr() + 8 * element)
    return None


def _pattern_words(
    pattern: str, block: torch.Tensor, first: int, num_words: int, seed: int
) -> torch.Tensor:
    """Return the known words that a memory test writes and expects to read back."""
    if pattern == "0x55":
        return block.new_full((num_words,), 0x5555555555555555)
    if pattern == "0xaa":
        return block.new_full((num_words,), ~0x5555555555555555)
    index = torch.arange(first, first + num_words, device=block.device)
    if pattern == "address":
        return index * 8 + block.data_ptr()
    mixed = (index + seed) * _ODD
    return mixed ^ (mixed >> 32)


@torch.no_grad()
def all_reduce(
    rank: int,
    world_size: int,
    device: torch.device,
    seed: int,
    *,
    reduce: Callable[[torch.Tensor], object],
) -> WrongAnswer | None:
    """Sum integers over ranks; the sum of all is known to each. Collective.

    Rank r brings ``(r + 1) * w`` as float32, and ``w`` is at most ``2 ** 24 / (1 + ... +
    world_size)``: every partial sum of any ranks is exact.

    Args:
        rank: this one's.
        world_size: number of ranks; the same seed on all.
        device: device of the tensor.
        seed: of the integers.
        reduce: sums a tensor over all ranks, in place; tests replace it.
    """
    shares = world_size * (world_size + 1) // 2
    largest = (1 << 24) // shares
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(-largest, largest + 1, (NUM_SUMMED,), generator=generator, device="cpu")
    total = (weights * (rank + 1)).to(device, torch.float32)
    reduce(total)
    expected = (weights * shares).to(device, torch.float32)
    return _find_wrong_element("all-reduce", seed, total, expected)


def _find_wrong_element(
    kernel: str, seed: int, actual: torch.Tensor, expected: torch.Tensor
) -> WrongAnswer | None:
    """Return the first element that differs, bit by bit, from the known result of a kernel."""
    integer = _INTEGERS[expected.element_size()]
    actual, expected = actual.reshape(-1).view(integer), expected.reshape(-1).view(integer)
    wrong = (actual != expected).nonzero()
    if not len(wrong):
        return None
    element = int(wrong[0])
    mask = (1 << 8 * expected.element_size()) - 1
    return WrongAnswer(
        kernel=kernel,
        device=str(expected.device),
        seed=seed,
        element=element,
        num_wrong=len(wrong),
        expected=int(expected[element]) & mask,
        actual=int(actual[element]) & mask,
    )
