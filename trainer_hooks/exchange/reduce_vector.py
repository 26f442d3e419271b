"""The vector that the ranks sum in a step: filled, judged on the device, and read on the host.

    squares of every parameter | rank 0's numbers | fields of rank 0 | of rank 1 | ... | sampled

The last part exists if signals are enabled (``trainer_hooks.measures.sampled``).

A rank writes its own slots and leaves the others zero, so a sum is also a gather: the same
collective provides the maximum, the spread and the rank at fault. Above MAX_SLOTS ranks, adjacent
ranks share a slot, which holds the sum of their values, and a second part identifies the ranks:

    fields of slot 0 | of slot 1 ... | the same as bits | exact fields of rank 0 | of rank 1 ...

In the bits, the i-th rank of a slot adds 2**i if its number is not zero: such a sum is exact, and
identifies each of them. Values that need more than a bit have a place per rank: 32 bytes instead of
128.

The verdict is computed on the device from the reduced numbers, so it is the same on every rank. The
host reads the numbers a fixed number of steps late, so that nothing waits for the GPU, and turns
them into the record for the detectors and the escalation policy.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer_hooks.ranks import Ranks
from trainvitals.auto_clip import MaxNorm
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CHANGE_EXPECTED,
    CLIPS,
    COMMANDED,
    LOSS_OUTLIER,
    NO_GRADIENT,
    NONFINITE_STATE,
    NORM_OUTLIER,
    OVERFLOW,
    RANK_FAILED,
    RATE_DECLARED,
    REPLAYED_ALIKE,
    REPLICAS_DIFFER,
    SETTINGS_DIFFER,
    SNAPSHOT_MISSED,
    WITHHELD,
    StepRecord,
)

MAX_SLOTS = 1024
"""Up to this number of ranks, each rank has its own slot."""
MAX_SHARED = 48
"""Most ranks of a slot: a float64 holds this many bits exactly, and the sum of as many digests."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers that one part of a step adds to the vector, by name."""

    rank0: tuple[str, ...] = ()
    """Numbers of rank 0, which reach all ranks."""
    rank: tuple[str, ...] = ()
    """Numbers of each rank; adjacent ranks share a slot above MAX_SLOTS ranks."""
    exact: tuple[str, ...] = ()
    """Those of ``rank`` that also have their own value per rank if slots are shared."""


CORE_SLOTS = Slots(
    rank0=(
        "loss_limit",
        "grad_norm_limit",
        "max_row",  # updates in a row that may be withheld for finite outliers; 0 for none
        "clips",  # the loop clips outliers
    ),
    rank=(
        "weighted_loss",  # loss times weight
        "weight",  # 0 if the rank has no loss
        "overflow",  # the gradient scaler's own flag
        "failed",  # the rank's prepare failed: its numbers do not count
        "bad_squares",  # 1 if this rank's own gradients are non-finite
        "num_gradients",
        "nonfinite_params",
        "norm_before_clip",  # if the loop clips itself and provides it; shared by all ranks
    ),
    exact=("loss",),  # the quotient of the first two
)
"""Numbers of the norms, the verdict and the update; they come first."""


@dataclass(frozen=True, slots=True)
class VectorFields:
    """Names of the numbers in the vector, in its order; equal on all ranks."""

    rank0: tuple[str, ...] = CORE_SLOTS.rank0
    rank: tuple[str, ...] = CORE_SLOTS.rank
    exact: tuple[str, ...] = CORE_SLOTS.exact

    @classmethod
    def of(cls, slots: Iterable[Slots]) -> VectorFields:
        """Return the fields of the reduce vector: the core's, then the features'."""
        parts = (CORE_SLOTS, *slots)
        fields = cls(
            tuple(name for part in parts for name in part.rank0),
            tuple(name for part in parts for name in part.rank),
            tuple(name for part in parts for name in part.exact),
        )
        for names in (fields.rank0, fields.rank):
            twice = [name for name, count in Counter(names).items() if count > 1]
            assert not twice, f"two features have the slot {twice[0]!r}; rename one"
        return fields


CORE_FIELDS = VectorFields()


@dataclass(frozen=True, slots=True)
class ReduceVectorLayout:
    """Position of each number; equal on all ranks by construction."""

    num_params: int
    num_slots: int
    slot: int
    world_size: int = 1
    num_sampled: int = 0
    rank: int = 0
    fields: VectorFields = CORE_FIELDS
    root: int = field(init=False)
    """Position of the first of rank 0's numbers."""
    ranks: int = field(init=False)
    """Position of the first rank slot."""
    is_shared: bool = field(init=False)
    """Whether there are more ranks than slots."""
    bits: int = field(init=False)
    """Position of the first bit that identifies the rank of a number in a shared slot."""
    own: int = field(init=False)
    """Position of the first per-rank field if slots are shared."""
    sampled: int = field(init=False)
    """Position of the first sampled signal."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the positions once: each step uses them dozens of times."""
        width, is_shared = len(self.fields.rank), self.num_slots < self.world_size
        ranks = self.num_params + len(self.fields.rank0)
        bits = ranks + self.num_slots * width
        own = bits + is_shared * self.num_slots * width
        sampled = own + is_shared * self.world_size * len(self.fields.exact)
        positions = {"root": self.num_params, "ranks": ranks, "is_shared": is_shared}
        positions |= {"bits": bits, "own": own, "sampled": sampled}
        positions["size"] = sampled + self.num_sampled
        for name, position in positions.items():
            object.__setattr__(self, name, position)

    @classmethod
    def of(
        cls,
        num_params: int,
        ranks: Ranks,
        num_sampled: int = 0,
        fields: VectorFields = CORE_FIELDS,
    ) -> ReduceVectorLayout:
        """Return the vector's layout for this job and this rank's slot in it."""
        rank, world_size = ranks.rank, ranks.world_size
        slots = min(world_size, max(MAX_SLOTS, -(-world_size // MAX_SHARED)))
        slot = rank * slots // world_size
        return cls(num_params, slots, slot, world_size, num_sampled, rank, fields)

    def own_index(self, field: str) -> int:
        """Return this rank's position of a field in the reduce vector."""
        return self.ranks + self.slot * len(self.fields.rank) + self.fields.rank.index(field)

    def own_exact_index(self, field: str) -> int:
        """Return the position of this rank's ``field`` in the vector if slots are shared."""
        return self.own + self.rank * len(self.fields.exact) + self.fields.exact.index(field)

    def first_of(self, slot: int) -> int:
        """Return the first rank of a slot of the vector, which is the end of the previous slot."""
        return -(-slot * self.world_size // self.num_slots)

    def slots(self, pack: Tensor) -> Tensor:
        """Return the vector's rank slots as a view of shape (num_slots, fields)."""
        return pack[self.ranks : self.bits].view(self.num_slots, len(self.fields.rank))


class RankContribution(msgspec.Struct, frozen=True):
    """One rank's part of the exchange, in addition to the squares of its gradients."""

    loss: Tensor | float | None
    """A plain number only for ``ReduceVector.fill_on_host``."""
    weight: Tensor | float
    overflow: Tensor | None = None
    nonfinite_params: Tensor | None = None
    num_gradients: int = 0
    failed: bool = False
    norm_before_clip: Tensor | None = None
    values: Mapping[str, Tensor | float] = MappingProxyType({})
    """Values of the features' slots."""


class Rank0Values(msgspec.Struct, frozen=True):
    """Rank 0's numbers: the limits in force, and those of the features. None: no limit."""

    loss_limit: float | None = None
    grad_norm_limit: float | None = None
    clips: bool = False
    max_row: int = 0
    """Number of updates in a row that may be withheld for finite outliers."""
    skips: bool = False
    """Whether an operator skips this update: then every value is above the limits."""
    values: Mapping[str, float] = MappingProxyType({})
    """Values of the features' slots; a missing one is 0."""

    def to_numbers(self, fields: VectorFields) -> list[float]:
        """Return rank 0's numbers in the order of the fields of the vector."""
        limits = (
            math.inf if self.loss_limit is None else self.loss_limit,
            math.inf if self.grad_norm_limit is None else self.grad_norm_limit,
            float(self.max_row),
        )
        if self.skips:
            limits = (-math.inf, -math.inf, math.inf)
        core, values = (*limits, float(self.clips)), self.values
        if not values:
            return [*core, *[0.0] * (len(fields.rank0) - len(core))]
        return [*core, *map(values.get, fields.rank0[len(core) :], itertools.repeat(0.0))]


class ReduceVector:
    """Fills this rank's persistent vector."""

    def __init__(self, layout: ReduceVectorLayout, device: torch.device) -> None:
        self.layout = layout
        self.pack = torch.zeros(layout.size, dtype=torch.float64, device=device)
        self.squares = self.pack[: layout.num_params]
        """The part of the vector for the squared norms; ``clear`` zeroes it."""
        self.sampled = self.pack[layout.sampled :]
        """The part of the vector for sampled signals; empty if none are enabled."""
        self._position = {name: layout.own_index(name) for name in layout.fields.rank}
        self._mine = {name: self.pack[position] for name, position in self._position.items()}
        is_shared = layout.is_shared
        self._exact = [n for n in layout.fields.exact if is_shared and n in self._position]
        """Fields that are written twice: to the shared slot, and to this rank's own field."""
        self._rest = self.pack[layout.num_params :]
        self.norm = 0.0
        """Norm of the gradients, after ``measure_norm``."""
        self._here = self.pack.numpy().data if device.type == "cpu" else None
        """The vector itself, if the host can write to it."""
        self._words_here = struct.Struct(f"{layout.size - layout.num_params}d")
        pinned = device.type == "cuda"
        # Three host buffers in rotation: copies of the last steps may still be in flight.
        self._host = [
            torch.zeros(
                layout.size - layout.num_params,
                dtype=torch.float64,
                device="cpu",
                pin_memory=pinned,
            )
            for _ in range(3)
        ]
        # Through numpy: writing one number through torch takes three torch operations.
        self._words = [buffer.numpy() for buffer in self._host]
        self._turn = 0

    def fill(self, local: RankContribution, root: Rank0Values | None) -> None:
        """Fill the vector except for the squares; ``root`` only on rank 0. Never waits."""
        layout, base = self.layout, self.layout.num_params
        self._turn = (self._turn + 1) % len(self._host)
        buffer, words = self._host[self._turn], self._words[self._turn]
        words.fill(0.0)
        position, tensors = self._position, {}
        words[position["failed"] - base] = float(local.failed)
        words[position["num_gradients"] - base] = float(local.num_gradients)
        has_loss = local.loss is not None and not local.failed
        if has_loss and not isinstance(local.weight, Tensor):
            words[position["weight"] - base] = local.weight
        for name, value in local.values.items():
            if isinstance(value, Tensor):
                tensors[name] = value
                continue
            words[position[name] - base] = value
            if name in self._exact:
                words[layout.own_exact_index(name) - base] = value
        if root is not None:
            words[: len(layout.fields.rank0)] = root.to_numbers(layout.fields)
        self._rest.copy_(buffer, non_blocking=True)
        if local.overflow is not None:
            self._mine["overflow"].copy_(local.overflow.reshape(()))
        if not local.failed:
            self._fill_tensors(local, tensors)
        if layout.is_shared:
            self._mark_contributors([name for name in self._exact if name in tensors])

    def fill_on_host(self, local: RankContribution, root: Rank0Values | None) -> None:
        """Fill the vector like ``fill`` on the only rank, if it is on the host: no tensors."""
        position, base = self._position, self.layout.num_params
        words = [0.0] * (self.layout.size - base)
        if root is not None:
            words[: len(self.layout.fields.rank0)] = root.to_numbers(self.layout.fields)
        for name, value in local.values.items():
            words[position[name] - base] = _real_part(value)
        words[position["failed"] - base] = local.failed
        words[position["num_gradients"] - base] = local.num_gradients
        if local.overflow is not None:
            words[position["overflow"] - base] = local.overflow.item()
        if not local.failed:
            if local.loss is not None:
                words[position["weight"] - base] = weight = _real_part(local.weight)
                words[position["weighted_loss"] - base] = _real_part(local.loss) * weight
            if local.norm_before_clip is not None:
                words[position["norm_before_clip"] - base] = local.norm_before_clip.item()
            if local.nonfinite_params is not None:
                words[position["nonfinite_params"] - base] = local.nonfinite_params.item()
            words[position["bad_squares"] - base] = not math.isfinite(self.measure_norm())
        # Through struct: writing one number through numpy or torch takes a call for each.
        assert self._here is not None, "the vector is in host memory"
        self._words_here.pack_into(self._here, 8 * base, *words)

    @torch.no_grad()
    def _fill_tensors(self, local: RankContribution, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's device tensors to its slot of the reduce vector."""
        mine = self._mine
        if local.loss is not None:
            assert isinstance(local.loss, Tensor), "plain only if the host writes the vector"
            # Copied first: a loss multiplied in half precision would be rounded again.
            mine["weighted_loss"].copy_(local.loss)
            if isinstance(local.weight, Tensor):
                mine["weight"].copy_(local.weight)
            if isinstance(local.weight, Tensor) or local.weight != 1.0:
                mine["weighted_loss"].mul_(local.weight)
        if local.norm_before_clip is not None:
            mine["norm_before_clip"].copy_(local.norm_before_clip / self.layout.world_size)
        if local.nonfinite_params is not None:
            mine["nonfinite_params"].copy_(local.nonfinite_params)
        for name, value in tensors.items():
            mine[name].copy_(value)
        # A sum of squares is non-finite if one of them is: NaN and Inf times 0 are NaN.
        nothing = self.squares.sum() * 0.0
        torch.ne(nothing, nothing, out=mine["bad_squares"])

    def _mark_contributors(self, exact: Iterable[str]) -> None:
        """Mark a shared slot's contributing ranks in the vector; write this rank's exact fields."""
        pack, layout = self.pack, self.layout
        width = len(layout.fields.rank)
        begin = layout.slot * width
        slot = pack[layout.ranks + begin : layout.ranks + begin + width]
        bit = 2.0 ** (layout.rank - layout.first_of(layout.slot))
        pack[layout.bits + begin : layout.bits + begin + width] = (slot != 0) * bit
        loss = pack[layout.own_index("weighted_loss")] / pack[layout.own_index("weight")]
        pack[layout.own_exact_index("loss")] = loss
        for name in exact:
            pack[layout.own_exact_index(name)] = pack[layout.own_index(name)]

    @property
    def auto_max_norm(self) -> Tensor:
        """Return the limit of ``max_norm="auto"`` in the vector, 0-dim float64; inf: none."""
        return self.pack[self.layout.root + self.layout.fields.rank0.index("auto_max_norm")]

    def clip_divisor(self, norm: Tensor, max_norm: MaxNorm) -> Tensor:
        """Return what divides gradients of this norm so that they are clipped; on the device."""
        if max_norm == "auto":
            return auto_clip_divisor(norm, self.auto_max_norm)
        return clip_divisor(norm, max_norm)

    def undo_clip(self) -> None:
        """Scale the summed squares to those before the loop's own clip, if it provided the norm.

        This rank's slot then contains the norm after the clip.
        """
        squares, layout = self.squares, self.layout
        given = layout.slots(self.pack)[:, layout.fields.rank.index("norm_before_clip")].sum()
        total = squares.sum()
        nothing_left = (total == 0) & torch.isfinite(given)
        squares *= torch.where((given == 0) | nothing_left, 1.0, given * given / total)
        after = torch.where(given == 0, 0.0, total.sqrt())
        self.pack[layout.own_index("norm_before_clip")] = after

    def measure_norm(self) -> float:
        """Return the norm of the vector's squares, kept for the verdict; only on the host."""
        # With torch's own root: its last bit may differ from that of math.sqrt.
        self.norm = self.squares.sum().sqrt_().item()
        return self.norm

    def clear(self) -> None:
        """Set every number of the vector to zero before a step's numbers are written."""
        self.pack.zero_()
        self.norm = 0.0


def _real_part(value: Tensor | float) -> float:
    """Return a number for the vector: its real part, as a copy to a float64 tensor keeps it."""
    return (value.item() if isinstance(value, Tensor) else value).real


class ReducedNumbers:
    """The summed vector on the host: plain numbers that are equal on every rank."""

    def __init__(self, layout: ReduceVectorLayout, numbers: list[float]) -> None:
        fields, self.layout = layout.fields, layout
        self.squares = numbers[: layout.num_params]
        self.root = dict(zip(fields.rank0, numbers[layout.root : layout.ranks], strict=True))
        self.sampled = numbers[layout.sampled : layout.size]
        self._sums = _by_field(numbers[layout.ranks : layout.bits], fields.rank)
        if layout.is_shared:
            self._bits = _by_field(numbers[layout.bits : layout.own], fields.rank)
            self._own = _by_field(numbers[layout.own : layout.sampled], fields.exact)

    @property
    def has_gradients(self) -> bool:
        """Return whether any rank had a gradient, according to the summed vector."""
        return any(self._sums["num_gradients"])

    def total(self, field: str) -> float:
        """Return the sum of a field of the reduce vector over all ranks."""
        return sum(self._sums[field])

    def slot_sum(self, field: str) -> float:
        """Return the vector's sum of a field in this rank's slot: its own up to MAX_SLOTS ranks."""
        return self._sums[field][self.layout.slot]

    def ranks_where(self, field: str) -> tuple[int, ...]:
        """Return the ranks whose value of a field in the reduce vector is not zero."""
        if not self.layout.is_shared:
            values = self._sums[field]
            if not any(values):
                return ()  # the usual answer, without a generator
            return tuple(r for r, value in enumerate(values) if value != 0.0)
        return tuple(
            self.layout.first_of(slot) + i
            for slot, bits in enumerate(self._bits[field])
            if bits
            for i in range(MAX_SHARED)
            if int(bits) >> i & 1
        )

    def losses(self) -> list[float | None]:
        """Return each rank's local loss from the vector; None for a rank without a loss."""
        if self.layout.is_shared:
            losses: list[float | None] = [None] * self.layout.world_size
            for rank in self.ranks_where("weight"):
                losses[rank] = self._own["loss"][rank]
            return losses
        pairs = zip(self._sums["weighted_loss"], self._sums["weight"], strict=True)
        return [loss / weight if weight else None for loss, weight in pairs]

    def by_rank(self, field: str) -> list[float]:
        """Return the value of each rank for an ``exact`` field of the reduce vector."""
        return (self._own if self.layout.is_shared else self._sums)[field]

    @property
    def is_told_to_skip(self) -> bool:
        """Return whether the vector contains an operator's command to skip this step's update."""
        return self.root["loss_limit"] == -math.inf

    def limit(
        self, field: Literal["loss_limit", "grad_norm_limit", "auto_max_norm"]
    ) -> float | None:
        """Return rank 0's limit for the step from the reduce vector; None: no limit."""
        value = self.root[field]
        return None if math.isinf(value) else value


def _by_field(flat: list[float], fields: Sequence[str]) -> dict[str, list[float]]:
    """Return the reduce vector's numbers by field, one number per slot."""
    if len(flat) == len(fields):  # one slot
        return {field: [value] for field, value in zip(fields, flat, strict=True)}
    return {field: flat[i :: len(fields)] for i, field in enumerate(fields)}


# ----------------------------------------------------------- the verdict, on the device


SHORT_FROM = 1.8e19
"""Square root of the largest float32."""

_SUMMED = ("weighted_loss", "weight", "overflow", "failed")
assert CORE_SLOTS.rank[:4] == _SUMMED, "the verdict sums these at once"
assert CORE_SLOTS.rank0[:3] == ("loss_limit", "grad_norm_limit", "max_row"), "it reads these"

_FACTS = (BAD_LOSS, BAD_GRADIENTS, OVERFLOW, RANK_FAILED, WITHHELD, LOSS_OUTLIER, NORM_OUTLIER)
_STOPS = BAD_LOSS | BAD_GRADIENTS | OVERFLOW | WITHHELD
_UNCLEAR = BAD_LOSS | BAD_GRADIENTS | OVERFLOW | RANK_FAILED


class Verdict(NamedTuple):
    """Tensors on the device, all 0-dimensional float64; plain numbers from ``judge_on_host``."""

    bad: Tensor
    """Exactly 0.0 or 1.0: whether the update must not be applied. Always a tensor."""
    bits: Tensor | float
    loss: Tensor | float
    grad_norm: Tensor | float
    overflow: Tensor
    """0.0 or 1.0: whether any rank's gradient scaler reported an overflow. Always a tensor."""
    row: Tensor | float
    """Updates withheld in a row, including this step. A non-finite or incompletely measured step
    neither counts nor ends the row. Input of the next verdict, because the host does not know it
    yet."""
    num_failed: Tensor | float
    """Ranks that could not measure; if all of them failed, the norm has no meaning."""

    values: Tensor | None = None
    """Loss and norm, shape (2,); only on the device."""

    def derived(self) -> tuple[Tensor, Tensor]:
        """Return the verdict's values to read back with the vector, each 1-dim: bits, values."""
        assert isinstance(self.bits, Tensor) and self.values is not None, "judged on the device"
        return self.bits[None], self.values


_FLAGS = tuple(torch.tensor(flag, dtype=torch.float64, device="cpu") for flag in (0.0, 1.0))


def judge_on_host(
    layout: ReduceVectorLayout, numbers: Sequence[float], norm: float, row: float
) -> Verdict:
    """Return the same verdict as ``judge_on_device``, bit for bit, from numbers on the host.

    Operations on tensors of a few numbers would take longer than the update of a small model. Only
    for one rank: a sum over ranks depends on its order. ``norm`` is the root of the sum of the
    squares, ``row`` that of the previous verdict.
    """
    weighted_loss, weight, overflow, failed = numbers[layout.ranks : layout.ranks + len(_SUMMED)]
    weighted_loss += 0.0  # -0.0 becomes 0.0, as in a sum
    loss_limit, norm_limit, max_row = numbers[layout.root : layout.root + 3]
    loss = weighted_loss / weight if weight else weighted_loss * math.inf
    bits = 0
    if weight:
        if not math.isfinite(loss):
            bits = BAD_LOSS
        elif loss > loss_limit and not failed:
            bits = LOSS_OUTLIER
    if overflow:
        bits |= OVERFLOW
    elif not math.isfinite(norm):
        bits |= BAD_GRADIENTS
    elif norm > norm_limit and not failed:
        bits |= NORM_OUTLIER
    if failed:
        bits |= RANK_FAILED
    if bits & (LOSS_OUTLIER | NORM_OUTLIER) and row < max_row:
        bits |= WITHHELD
    if not bits & _UNCLEAR:
        row = row + 1.0 if bits & WITHHELD else 0.0
    bad, overflowed = _FLAGS[bool(bits & _STOPS)], _FLAGS[bool(overflow)]
    return Verdict(bad, float(bits), loss, norm, overflowed, row, failed)


def judge_on_device(layout: ReduceVectorLayout, pack: Tensor, row: Tensor) -> Verdict:
    """Return the verdict on the reduced vector. Pure; no value reaches the host.

    A non-finite loss or norm is bad at once. A finite one above rank 0's limit is withheld, unless
    as many updates as rank 0 allows were withheld immediately before it. If a rank's prepare
    failed, the numbers lack its part, so the finite rules abstain. A scaler's overflow skips the
    update but does not count as a fault, whatever the norm. ``pack`` is float64, ``row`` that of
    the previous verdict.
    """
    # Each operation is a separate kernel: both numbers are judged at once, and a > b of flags means
    # "a and not b".
    sums = layout.slots(pack)[:, : len(_SUMMED)].sum(dim=0)
    weighted_loss, weight, _, num_failed = sums.unbind()
    limits, max_row = pack[layout.root : layout.root + 2], pack[layout.root + 2]
    square = pack[: layout.num_params].sum()
    if layout.world_size > 1:
        # Each replica adds an equal part: the parts of the others replace a missing one.
        part = torch.rsub(num_failed, 1.0, alpha=1.0 / layout.world_size)
        square = square / part.clamp_(min=0.5 / layout.world_size)
    loss, norm = weighted_loss / weight, square.sqrt()
    values = torch.stack((loss, norm))
    there = sums[1:] != 0.0  # a loss, an overflow, a failure
    constant = _verdict_constants(pack.device)
    counts = there[:2] ^ constant.flip
    finite = torch.add(values, values, alpha=0)  # or NaN: Inf times 0 is
    nonfinite = (finite != finite) & counts
    outlier = (finite > limits) & (counts > there[2])
    withheld = outlier.any(dim=0, keepdim=True) & (row < max_row)
    facts = torch.cat((nonfinite, there[1:], withheld, outlier))
    figures = (constant.sums * facts).sum(dim=1).clamp_(max=constant.largest)
    bits, bad, overflow, unclear, is_withheld = figures.unbind()
    # Row + 1 if it was withheld, otherwise 0; unchanged if the step is unclear.
    after = torch.addcmul(is_withheld, row, is_withheld).lerp_(row, unclear)
    return Verdict(bad, bits, loss, norm, overflow, after, num_failed, values)


class _Constants(NamedTuple):
    flip: Tensor
    """Which of the two numbers counts if its flag is not set."""
    sums: Tensor
    """Weights of the facts: for the bits, and for four flags."""
    largest: Tensor


@functools.cache
def _verdict_constants(device: torch.device) -> _Constants:
    """Return the constants of the verdict; cached, so only the first step waits for the copy."""
    asked = (_STOPS, OVERFLOW, _UNCLEAR, WITHHELD)
    sums = [[float(fact) for fact in _FACTS]]
    sums += [[float(bool(fact & question)) for fact in _FACTS] for question in asked]
    return _Constants(
        torch.tensor([False, True], device=device),
        torch.tensor(sums, dtype=torch.float64, device=device),
        torch.tensor([math.inf, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64, device=device),
    )


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return max(1, (norm + 1e-6) / max_norm): the inverse of the factor of ``clip_grad_norm_``.

    A norm whose square overflows float32 may be too small (``trainer_hooks.tensors.gradients``),
    and the clipped gradients would still be huge: the divisor then removes such gradients
    completely. Torch's own norm is Inf in this case, and its clip leaves 0 too.
    """
    divisor = torch.clamp((norm + 1e-6) / max_norm, min=1.0)
    return divisor.masked_fill_(norm >= SHORT_FROM, torch.inf)


def auto_clip_divisor(norm: Tensor, limit: Tensor) -> Tensor:
    """Return the verdict's divisor that clips gradients to the limit of ``max_norm="auto"``.

    Exactly 1 at or below the limit, even if both are tiny, for NaN, and while there is no limit.
    Above it ``clip_divisor`` without the 1e-6, which is not small compared with every limit.

    Args:
        norm: global L2 norm before the clip, 0-dim float64.
        limit: the reduced limit, 0-dim float64; inf: none.
    """
    is_above = norm > limit
    divisor = torch.where(is_above, norm / limit, 1.0)
    return divisor.masked_fill_(is_above & (norm >= SHORT_FROM), torch.inf)


# -------------------------------------------------------------------------- on the host


NUM_FIGURES = 4
"""Values behind the vector from which ``VerdictFigures`` is made."""


class VerdictFigures(msgspec.Struct, frozen=True):
    """Values computed on the device, read back with the vector."""

    bits: int
    loss: float
    grad_norm: float
    loss_scale: float

    @classmethod
    def of(cls, numbers: list[float]) -> VerdictFigures:
        """Build the verdict's figures from the values behind the vector, in ``derived``'s order."""
        bits, loss, norm, scale = numbers
        return cls(int(bits), loss, norm, scale)

    def blocked(self, mode: str) -> bool:
        """Return whether the verdict skipped the update: in observe mode, only by the scaler."""
        stops = OVERFLOW if mode == "observe" else BAD_LOSS | BAD_GRADIENTS | OVERFLOW | WITHHELD
        return bool(self.bits & stops)

    def verdict_column(self, record: StepRecord) -> int:
        """Return the verdict for the row that rank 0 writes about the step."""
        bits = self.bits
        if record.commanded:  # the skip used limits that every value exceeds
            bits = bits & ~(WITHHELD | LOSS_OUTLIER | NORM_OUTLIER) | COMMANDED
        return (
            bits
            | (CLIPS if record.clips else 0)
            | (NONFINITE_STATE if record.nonfinite_state else 0)
            | (SNAPSHOT_MISSED if record.snapshots_missed else 0)
            | (REPLICAS_DIFFER if record.replicas_differ else 0)
            | (SETTINGS_DIFFER if record.settings_differ else 0)
            | (REPLAYED_ALIKE if record.replayed_alike else 0)
            | (RATE_DECLARED if record.rate_declared else 0)
            | (NO_GRADIENT if record.no_gradient else 0)
            | (CHANGE_EXPECTED if record.change_expected else 0)
        )


def culprits(reduced: ReducedNumbers, losses: list[float | None]) -> tuple[int, ...]:
    """Return the ranks that made the step non-finite, as far as the summed vector shows.

    A NaN loss on one rank makes every rank's gradients NaN through DDP's all-reduce, so losses are
    checked first. If all ranks hold the same bad gradients and every loss is finite, the cause is
    unknown, and no rank is returned.
    """
    by_loss = tuple(r for r, x in enumerate(losses) if x is not None and not math.isfinite(x))
    if by_loss:
        return by_loss
    by_squares = reduced.ranks_where("bad_squares")
    everyone = len(by_squares) == reduced.layout.world_size
    return () if everyone and reduced.layout.world_size > 1 else by_squares


def _largest_loss(losses: list[float | None]) -> tuple[float | None, int]:
    """Return the largest loss in the vector and its rank; a NaN is larger than everything."""
    if len(losses) == 1 and losses[0] is not None:
        return losses[0], 0
    pairs = [(x, r) for r, x in enumerate(losses) if x is not None]
    if not pairs:
        return None, -1
    return max(pairs, key=lambda pair: (math.isnan(pair[0]), pair[0], -pair[1]))


def step_record(
    reduced: ReducedNumbers,
    derived: VerdictFigures,
    *,
    step: int,
    attempt: int,
    skipped: bool,
    learning_rate: float | None,
    lr_factor: float = 1.0,
    before_clip: bool = True,
    turn: int = 0,
) -> StepRecord:
    """Return the step as detectors see it: a function of the vector, equal on all ranks.

    Unknown is not zero: without a gradient on any rank the norm is None, and without a loss on any
    rank the loss is None. A norm that was not measured ``before_clip`` is only used if it is
    non-finite.
    """
    losses = reduced.losses()
    loss_max, loss_max_rank = _largest_loss(losses)
    has_norm = reduced.has_gradients and (before_clip or not math.isfinite(derived.grad_norm))
    nonfinite = bool(derived.bits & (BAD_LOSS | BAD_GRADIENTS))
    in_state = reduced.ranks_where("nonfinite_state")
    failed = reduced.ranks_where("failed")
    # If the norm is 0 after the loop's own clip, it was 0 before the clip too.
    is_zero = not reduced.has_gradients or derived.grad_norm == 0.0
    return StepRecord(
        step=step,
        attempt=attempt,
        loss=derived.loss if loss_max is not None else None,
        loss_max=loss_max,
        loss_max_rank=loss_max_rank,
        grad_norm=derived.grad_norm if has_norm else None,
        loss_limit=reduced.limit("loss_limit"),
        grad_norm_limit=reduced.limit("grad_norm_limit"),
        nonfinite_ranks=culprits(reduced, losses) if nonfinite else (),
        failed_ranks=failed,
        nonfinite_params=len(reduced.ranks_where("nonfinite_params")),
        nonfinite_state=len(in_state),
        nonfinite_state_rank=in_state[0] if len(in_state) == 1 else -1,
        snapshots_missed=len(reduced.ranks_where("snapshot_missed")),
        skipped=skipped,
        withheld=bool(derived.bits & WITHHELD) and not reduced.is_told_to_skip,
        commanded=bool(derived.bits & WITHHELD) and reduced.is_told_to_skip,
        overflow=bool(derived.bits & OVERFLOW),
        learning_rate=None if learning_rate is None else learning_rate * lr_factor,
        lr_factor=lr_factor,
        rate_declared=bool(reduced.root["rate_declared"]),
        change_expected=bool(reduced.root["change_expected"]),
        clips=bool(reduced.root["clips"]),
        no_gradient=is_zero and not failed,
        turn=turn,
    )


def dissenters(reduced: ReducedNumbers) -> tuple[int, ...]:
    """Return the ranks whose digest of their last verdict is in the minority; () if all agree.

    With two equal halves, the half with rank 0 counts as correct.
    """
    digests = reduced.by_rank("digest")
    if min(digests) == max(digests):
        return ()
    usual = Counter(digests).most_common(1)[0][0]
    return tuple(rank for rank, digest in enumerate(digests) if digest != usual)
