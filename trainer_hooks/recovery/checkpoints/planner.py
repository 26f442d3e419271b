"""Writes and reads boxes of tensors, as planners of torch.distributed.checkpoint."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainvitals.errors import CheckpointCorruptError


class TensorBox(NamedTuple):
    """A box of a stored tensor, and the memory that is its source or target."""

    name: str
    shape: tuple[int, ...]
    """Shape of the complete stored tensor."""
    offsets: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def all_of(cls, name: str, tensor: Tensor) -> "TensorBox":
        """Return the box of a tensor that is stored in a checkpoint in one piece."""
        return cls(name, tuple(tensor.shape), tuple(0 for _ in tensor.shape), tensor)

    @property
    def key(self) -> MetadataIndex:
        """Return the key of the box in the checkpoint's metadata."""
        return MetadataIndex(self.name, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return the position of the box in the format of the checkpoint's metadata."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class BoxWriter(DefaultSavePlanner):
    """Writes boxes: a box of several ranks is written by the rank with the least data.

    ``make_room`` is called on the coordinating rank with the total number of bytes. ``alone``:
    these are one rank's part, which need not form complete tensors.
    """

    def __init__(
        self, boxes: Sequence[TensorBox], *, make_room: Callable[[int], None], alone: bool
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.key: box for box in boxes}
        self._make_room = make_room
        self._alone = alone
        self.num_bytes = 0

    def create_local_plan(self) -> SavePlan:
        """Return the boxes of a checkpoint that this rank could write."""
        self.plan = SavePlan([_write_item(box) for box in self._boxes.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign a checkpoint's boxes to ranks; refuse complete tensors with holes."""
        if self._alone:
            plans, metadata = create_default_global_save_plan(all_plans)
        else:
            plans, metadata = super().create_global_plan(all_plans)
        self.num_bytes = num_bytes(metadata)
        self._make_room(self.num_bytes)
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of a box that is written to a checkpoint."""
        return self._boxes[write_item.index].tensor

    def written(self) -> list[TensorBox]:
        """Return the boxes that this rank wrote to the checkpoint."""
        return [self._boxes[item.index] for item in self.plan.items]


class BoxReader(DefaultLoadPlanner):
    """Reads stored boxes into separate memory."""

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        super().__init__()
        self._boxes = {box.key: box for box in boxes if box.tensor.numel()}

    def create_local_plan(self) -> LoadPlan:
        """Return the checkpoint's boxes that overlap with the wanted ones."""
        by_name: dict[str, list[TensorBox]] = defaultdict(list)
        for box in self._boxes.values():
            by_name[box.name].append(box)
        return LoadPlan(
            [item for name in by_name for item in self._read_items(name, by_name[name])]
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the target memory of a checkpoint's box, or of a part of it."""
        target = self._boxes[read_item.dest_index].tensor
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, size)
        return target

    def _read_items(self, name: str, boxes: list[TensorBox]) -> list[ReadItem]:
        """Return the reads for one tensor; raise if the checkpoint has only a part of it."""
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata[name]
        items = create_read_items_for_chunk_list(name, stored, [box.chunk for box in boxes])
        if sum(math.prod(i.lengths) for i in items) != sum(box.tensor.numel() for box in boxes):
            raise CheckpointCorruptError(f"{name} is incomplete in the checkpoint")
        return items


class BoxScanner(DefaultLoadPlanner):
    """Reads stored boxes one after another and shows each."""

    def __init__(
        self, show: Callable[[MetadataIndex, Tensor], None], only: Sequence[MetadataIndex] | None
    ) -> None:
        super().__init__()
        self._show = show
        self._only = only

    def create_local_plan(self) -> LoadPlan:
        """Return every box of the checkpoint, or the requested ones."""
        assert self.metadata is not None
        only = None if self._only is None else set(self._only)
        return LoadPlan(
            [
                _read_item(index, chunk.sizes)
                for index, chunk in stored_boxes(self.metadata)
                if only is None or index in only
            ]
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return memory for one box of a checkpoint."""
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata[read_item.storage_index.fqn]
        return torch.empty(read_item.lengths, dtype=stored.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Show the box that was read from the checkpoint."""
        self._show(read_item.storage_index, tensor)


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors stored in a checkpoint by name.

    Raises:
        CheckpointCorruptError: there is more than tensors.
    """
    by_name = {}
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointCorruptError("the metadata contains objects other than tensors")
        by_name[name] = stored
    return by_name


def stored_boxes(metadata: Metadata) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata]]:
    """Yield each box stored in a checkpoint, and its key."""
    for name, stored in stored_tensors(metadata).items():
        for chunk in stored.chunks:
            yield MetadataIndex(name, chunk.offsets), chunk


def num_bytes(metadata: Metadata) -> int:
    """Return the size of all boxes stored in a checkpoint."""
    return sum(
        math.prod(chunk.sizes) * stored.properties.dtype.itemsize
        for stored in stored_tensors(metadata).values()
        for chunk in stored.chunks
    )


def _write_item(box: TensorBox) -> WriteItem:
    """Return the order to write this box of a tensor to a checkpoint."""
    return WriteItem(
        index=box.key,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=box.chunk,
            properties=TensorProperties(dtype=box.tensor.dtype),
            size=torch.Size(box.shape),
        ),
    )


def _read_item(index: MetadataIndex, sizes: torch.Size) -> ReadItem:
    """Return the order to read this box of a checkpoint as a whole."""
    zeros = torch.Size([0] * len(sizes))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=zeros,
        storage_index=index,
        storage_offsets=zeros,
        lengths=sizes,
    )
