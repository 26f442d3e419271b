"""Positions of one rank's tensors in the complete ones: the layout of a checkpoint.

A checkpoint holds each parameter, and each optimizer state with its parameter's shape, as one
complete tensor in boxes, whichever rank wrote them. A rank's tensor is one such box (a DTensor), a
few of them (a range of the flattened parameter, as FSDP1 shards it), or ranges of several
parameters (FSDP1's flat one).
"""

import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainer_hooks.tensors.gradients import clean_name, flat_parameters
from trainvitals.errors import CheckpointError

Shape = tuple[int, ...]
Extent = tuple[Shape, Shape]
"""Offsets and sizes."""


class ShardPiece(NamedTuple):
    """A box of a complete tensor, and the position of its elements in a rank's tensor."""

    name: str
    shape: Shape
    """Shape of the complete tensor."""
    offsets: Shape
    sizes: Shape
    start: int | None
    """Index of the first element in the rank's flat tensor; None: all of it, in its shape."""

    def of(self, local: Tensor) -> Tensor:
        """Return the elements, a box in a checkpoint, as a view of the rank's tensor."""
        if self.start is None:
            return local
        stop = self.start + math.prod(self.sizes)
        return local.view(-1)[self.start : stop].view(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """Content of one of the rank's tensors."""

    shape: Shape
    """Shape of the rank's tensor."""
    wholes: Mapping[str, Shape]
    """Each complete tensor with a place in it, by name; a rank may hold none of its elements."""
    pieces: tuple[ShardPiece, ...]
    copy: int = 0
    copies: int = 1
    """Number of ranks known to hold the same; ``copy`` is this rank's index among them."""
    uncut: bool = False
    """Whether every rank holds all of it."""

    def renamed(self, old: str, new: str) -> "LocalShard":
        """Return the place in a checkpoint with another prefix of the complete tensors' names."""
        pieces = [p._replace(name=new + p.name.removeprefix(old)) for p in self.pieces]
        wholes = {new + name.removeprefix(old): shape for name, shape in self.wholes.items()}
        return replace(self, wholes=wholes, pieces=tuple(pieces))

    def writes(self, name: str, offsets: Shape) -> bool:
        """Return whether this rank writes the box to a checkpoint, among those that hold it."""
        return zlib.crc32(repr((name, tuple(offsets))).encode()) % self.copies == self.copy


def range_boxes(shape: Shape, start: int, stop: int) -> Iterator[Extent]:
    """Yield, in order, a checkpoint's boxes that form a range of the flat, row-major tensor."""
    row = math.prod(shape[1:])
    while start < stop:
        if not shape:
            yield (), ()
            return
        index, within = divmod(start, row)
        full = (stop - start) // row
        if within == 0 and full:
            yield (index, *(0 for _ in shape[1:])), (full, *shape[1:])
            start += full * row
            continue
        end = min(stop, (index + 1) * row)
        for offsets, sizes in range_boxes(shape[1:], within, within + end - start):
            yield (index, *offsets), (1, *sizes)
        start = end


def split_box(sizes: Shape, most: int) -> Iterator[Extent]:
    """Yield, in order, a checkpoint's boxes of at most ``most`` elements that form these sizes."""
    row = math.prod(sizes[1:])
    if not sizes or sizes[0] * row <= most:
        yield _whole_extent(sizes)
        return
    if row > most:
        for index in range(sizes[0]):
            for offsets, inner in split_box(sizes[1:], most):
                yield (index, *offsets), (1, *inner)
        return
    rows = most // row
    for index in range(0, sizes[0], rows):
        zeros = (0 for _ in sizes[1:])
        yield (index, *zeros), (min(rows, sizes[0] - index), *sizes[1:])


def local_shards(
    module: nn.Module,
    prefix: str,
    tensors: Mapping[str, Tensor],
    *,
    alike: Collection[str],
    rank: int,
    world_size: int,
) -> dict[str, LocalShard]:
    """Return this rank's content of tensors with a position in complete ones; others are left out.

    ``tensors`` are by the module's names. The plain ones in ``alike`` are equal on every rank.
    """
    ranges = _flat_ranges(module)
    places = {}
    for name, tensor in tensors.items():
        shards = None
        if id(tensor) in ranges:
            shards = _held_in_ranges(prefix, tensor, *ranges[id(tensor)])
        elif hasattr(tensor, "to_local"):
            shards = _held_of_dtensor(prefix + name, tensor)
        elif name in alike:
            shards = _held_whole(prefix + name, tuple(tensor.shape))
            shards = replace(shards, copy=rank, copies=world_size, uncut=True)
        if shards is not None:
            places[prefix + name] = shards
    return places


def _held_whole(name: str, shape: Shape) -> LocalShard:
    """Return the checkpoint's shard of a tensor that this rank holds completely."""
    piece = ShardPiece(name, shape, *_whole_extent(shape), None)
    return LocalShard(shape=shape, wholes={name: shape}, pieces=(piece,))


def _held_of_dtensor(name: str, tensor: Any) -> LocalShard | None:
    """Return this rank's shard of a DTensor that is stored in a checkpoint."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, local = tuple(tensor.shape), tuple(tensor.to_local().shape)
    here = mesh.get_coordinate()
    if here is None or any(placement.is_partial() for placement in placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(sizes) != local:
        raise CheckpointError(
            f"{name} is cut into {local} on this rank; by its layout {placements} it would be "
            f"{tuple(sizes)}",
            hint="choose sizes that are divisible by the number of ranks, or use a newer torch",
        )
    pieces = _held_whole(name, shape).pieces
    if local != shape:
        filled = math.prod(local) > 0
        pieces = (ShardPiece(name, shape, tuple(offsets), local, None),) if filled else ()
    copy, copies, uncut = 0, 1, True
    for at, size, placement in zip(here, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * size + at, copies * size
        else:
            uncut = uncut and size == 1
    return LocalShard(
        shape=local,
        wholes={name: shape},
        pieces=pieces,
        copy=copy,
        copies=copies,
        uncut=uncut,
    )


class _Range(NamedTuple):
    """The elements of a flattened parameter that FSDP1's tensor contains."""

    fqn: str
    shape: Shape
    begin: int
    """Index in the parameter."""
    size: int
    start: int
    """Index in this rank's tensor."""


def _flat_ranges(module: nn.Module) -> dict[int, tuple[list[_Range], bool]]:
    """Return a checkpoint's ranges in each FSDP1 tensor, and whether it is uncut, by tensor id."""
    by_tensor: dict[int, tuple[list[_Range], bool]] = {}
    for prefix, handle, flat in flat_parameters(module):
        if not all(flat._contiguities):
            continue  # has another memory format: not in the order of its rows
        ranges = [
            _Range(
                clean_name(f"{prefix}.{fqn}"),
                tuple(shape),
                info.intra_param_start_idx or 0,
                info.numel_in_shard or 0,
                info.offset_in_shard or 0,
            )
            for fqn, shape, info in zip(
                flat._fqns, flat._shapes, flat._shard_param_infos, strict=True
            )
        ]
        uncut = not handle.uses_sharded_strategy
        by_tensor[id(flat)] = ranges, uncut
        for param, param_range in zip(flat._params or (), ranges, strict=False):
            by_tensor[id(param)] = [param_range._replace(start=0)], uncut
    return by_tensor


def _held_in_ranges(prefix: str, tensor: Tensor, ranges: list[_Range], uncut: bool) -> LocalShard:
    """Return the shard for a checkpoint in one of FSDP1's flattened tensors."""
    local = tuple(tensor.shape)
    if len(ranges) == 1 and local == ranges[0].shape:
        return replace(_held_whole(prefix + ranges[0].fqn, local), uncut=uncut)
    pieces, wholes = [], {}
    for fqn, shape, begin, size, start in ranges:
        wholes[prefix + fqn] = shape
        boxes = (
            range_boxes(shape, begin, begin + size) if math.prod(shape) else [_whole_extent(shape)]
        )
        at = start
        for offsets, sizes in boxes:
            pieces.append(ShardPiece(prefix + fqn, shape, offsets, sizes, at))
            at += math.prod(sizes)
    return LocalShard(shape=local, wholes=wholes, pieces=tuple(pieces), uncut=uncut)


def _whole_extent(shape: Shape) -> Extent:
    """Return a checkpoint's box that covers a complete tensor of this shape."""
    return tuple(0 for _ in shape), shape
