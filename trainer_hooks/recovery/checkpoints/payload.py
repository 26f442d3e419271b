"""The tensors of a checkpoint, through torch.distributed.checkpoint without three of its problems.

Its ``save`` waits in a collective for the slowest writer; its ``.metadata`` is a pickle, which can
run code; it has no checksum (see ``manifest``). Its files are opened as our own (``private``): no
links, and no other user's files.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from trainer_hooks.agreement import RankAgreement
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.planner import (
    BoxReader,
    BoxScanner,
    BoxWriter,
    TensorBox,
    stored_tensors,
)
from trainer_hooks.recovery.state import HostState, TensorSpec
from trainvitals.errors import CheckpointCorruptError, CheckpointError, VitalsError
from trainvitals.io.private import FileOwner, read_own, stream_own
from trainvitals.printable import name_type

BOX_BYTES = 16 << 20
"""Larger tensors are stored in several boxes: a box is read as one, and a restore must not need the
memory of the state twice."""

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


_MAX_METADATA_BYTES = 1 << 30
_MAX_REMEMBERED_BYTES = 1 << 20
"""Larger metadata is parsed at each read: kept, it would take memory of the training."""
_BUILT = {
    kind: {field.name for field in dataclasses.fields(kind)}
    for kind in (
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        _StorageInfo,
    )
}


class _MetadataUnpickler(pickle._Unpickler):
    """Builds a checkpoint's metadata and nothing else, without side effects.

    It is the unpickler in Python: in the one in C, the opcode BUILD sets attributes on any object,
    including a class, and cannot be replaced. It takes three times as long, 0.1 ms per box.
    """

    def _build(self) -> None:
        """Set the fields of a new instance of a class that checkpoint metadata may contain."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        built = stack[-1]
        fields: set[str] = _BUILT.get(type(built), set())
        if type(built) is TensorProperties and type(state) is tuple:
            built.__setstate__(state)
        elif fields and type(state) is dict and state.keys() <= fields:
            built.__dict__.update(state)
        else:
            raise CheckpointCorruptError(
                f"the metadata sets the state of {name_type(built)}, which it may not"
            )

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that a checkpoint's metadata may name; refuse any other."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        raise CheckpointCorruptError(
            f"the metadata names {module}.{name}, which is not allowed there"
        )


def _memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Return a memory format in a checkpoint by name; replaces ``getattr``; reads nothing else.

    Python 3.11.0 to 3.11.3 pickle the member of an enum as ``getattr(Enum, name)``.
    """
    if kind is not _MEM_FORMAT_ENCODING or name not in [member.name for member in kind]:
        raise CheckpointCorruptError("the metadata reads an attribute, which is not allowed there")
    return _MEM_FORMAT_ENCODING[name]


class _ShardWriter(FileSystemWriter):
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: a new checkpoint's directory already exists."""
        return plan  # ``make_room`` creates the directory, which never exists before


class _OwnFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a checkpoint's file for reading, if it belongs to its directory's owner."""
        assert mode == "rb", "it is a reader's"
        with stream_own(Path(path), owner=FileOwner.from_directory(Path(path).parent)) as stream:
            yield stream


def _unpickle_metadata(raw: bytes) -> Any:
    """Return a checkpoint's metadata from its bytes; runs no code in them."""
    return _MetadataUnpickler(io.BytesIO(raw)).load()


_remembered = functools.lru_cache(maxsize=1)(_unpickle_metadata)
"""The same, for one load of a checkpoint, which reads the same bytes several times."""


def read_metadata(folder: Path) -> Metadata:
    """Return the positions of a checkpoint's tensors; reads only the directory's own files.

    Raises:
        CheckpointCorruptError: it is not metadata, or refers to an external file or function.
    """
    try:
        path = folder / ".metadata"
        raw = read_own(path, owner=FileOwner.from_directory(folder), max_bytes=_MAX_METADATA_BYTES)
        metadata = (_remembered if len(raw) <= _MAX_REMEMBERED_BYTES else _unpickle_metadata)(raw)
    except CheckpointCorruptError:
        raise
    except Exception as error:  # any error of an unpickler about bytes that are not a pickle
        raise CheckpointCorruptError(f"{folder.name}/.metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(f"{folder.name}/.metadata is not checkpoint metadata")
    for path in {info.relative_path for info in (metadata.storage_data or {}).values()}:
        if "/" in path or not (folder / path).is_file():
            raise CheckpointCorruptError(f"{folder.name}: data in {path!r}")
    return metadata


class Written(NamedTuple):
    """Result of a save."""

    boxes: list[TensorBox]
    """Boxes written by this rank."""
    num_bytes: int
    """Bytes written by all ranks; known on rank 0, otherwise 0."""


def write(
    folder: Path,
    boxes: Sequence[TensorBox],
    agree: RankAgreement | None,
    *,
    make_room: Callable[[int], None],
) -> Written:
    """Write this rank's data of a checkpoint, each box once; fsynced. Collective.

    ``make_room`` creates ``folder``: it is called on rank 0 before anything is written, with the
    bytes of all. Without ``agree``, a part is written without collectives, to be merged with
    others.

    Raises:
        CheckpointError: on every rank, if one of them could not.
    """
    planner = BoxWriter(boxes, make_room=make_room, alone=agree is None)
    writer = _ShardWriter(folder, sync_files=True)
    _save_with_torch(writer, planner, agree or RankAgreement(Ranks(0, 1, 0, None)))
    return Written(planner.written(), planner.num_bytes)


def _save_with_torch(writer: _ShardWriter, planner: BoxWriter, agree: RankAgreement) -> None:
    """Save a checkpoint in the steps of torch's ``save``, without a timeout for a slow rank."""
    ranks, is_root = agree.ranks, agree.ranks.rank == 0
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=is_root)
    writer.set_up_storage_writer(is_root)
    local = ranks.gather_on_root(planner.create_local_plan())
    whole: list[tuple[list[SavePlan], Metadata]] = []
    written: list[list[WriteResult]] = []

    def plan_all() -> None:
        assert local is not None, "this is rank 0"
        plans, metadata = planner.create_global_plan(local)
        whole.append((writer.prepare_global_plan(plans), metadata))

    def write_own() -> None:
        results = writer.write_data(plan, planner)
        results.wait()
        written.append(results.value())

    agree.on_root(plan_all)
    plan = planner.finish_plan(ranks.scatter(whole[0][0] if is_root else None))
    agree.on_all(write_own)
    results = ranks.gather_on_root(written[0])
    agree.on_root(lambda: writer.finish(whole[0][1], results or []))


def specs(folder: Path) -> dict[str, TensorSpec]:
    """Return shape and type of every tensor in a checkpoint, by name.

    Raises:
        CheckpointCorruptError: the metadata cannot be read, or holds more than tensors.
    """
    stored = stored_tensors(read_metadata(folder))
    return {
        key: TensorSpec(tuple(entry.size), entry.properties.dtype) for key, entry in stored.items()
    }


def read(folder: Path, boxes: Sequence[TensorBox]) -> None:
    """Read stored boxes of a checkpoint into the memory of ``boxes``; not collective.

    Raises:
        CheckpointCorruptError: the data does not fit the metadata.
    """
    _load_with_torch(folder, BoxReader(boxes))


def scan(
    folder: Path,
    show: Callable[[MetadataIndex, Tensor], None],
    only: Sequence[MetadataIndex] | None = None,
) -> None:
    """Read boxes of a stored checkpoint one after another, and show each.

    Raises:
        CheckpointCorruptError: the data does not fit the metadata.
        VitalsError: what ``show`` raised.
    """
    _load_with_torch(folder, BoxScanner(show, only))


def stored_in(folder: Path, names: Collection[str]) -> list[MetadataIndex]:
    """Return the keys of the boxes that these files of a checkpoint contain.

    Raises:
        CheckpointCorruptError: as ``read_metadata``.
    """
    places = read_metadata(folder).storage_data or {}
    return [index for index, info in places.items() if info.relative_path in names]


def _load_with_torch(folder: Path, planner: LoadPlanner) -> None:
    """Load a checkpoint in the steps of torch's ``load``, independent of other ranks."""
    metadata = read_metadata(folder)
    reader = FileSystemReader(folder)
    reader.fs = _OwnFiles()
    try:
        planner.set_up_planner({}, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.finish_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
    except VitalsError:
        raise
    except Exception as error:  # any error of torch about bytes that were not written by it
        raise CheckpointCorruptError(f"{folder.name}: {type(error).__name__}: {error}") from error


def read_host(folder: Path, key: str, spec: TensorSpec) -> tuple[HostState, dict[str, Any]]:
    """Return (host state, meta) that ``pack_host`` made, from the checkpoint's tensor so named."""
    packed = torch.empty(spec.shape, dtype=torch.uint8)
    read(folder, [TensorBox.all_of(key, packed)])
    return unpack_host(packed)


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write the positions of a checkpoint's tensors; then the bytes are on disk."""
    with (folder / ".metadata").open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def pack_host(host: HostState, meta: Mapping[str, Any]) -> Tensor:
    """Return the host state as a tensor of bytes, proven to be readable without running code.

    Raises:
        CheckpointError: a part contains objects other than plain values or tensors.
    """
    raw = _save_to_bytes({"host": host, "meta": dict(meta)})
    try:
        _load_from_bytes(raw)
    except pickle.UnpicklingError as error:
        parts = {
            **{k: v for k, v in host.items() if k != "extra"},
            **host["extra"],
            "meta": meta,
        }
        raise CheckpointError(
            f"the state of {', '.join(_unreadable_parts(parts))} contains objects other than plain "
            "values and tensors",
            hint="state_dict() must return only numbers, strings, lists, dicts and tensors",
        ) from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def unpack_host(packed: Tensor) -> tuple[HostState, dict[str, Any]]:
    """Return a checkpoint's (host state, meta) from ``pack_host``'s result; runs no code in it."""
    both = _load_from_bytes(packed.numpy().tobytes())
    return both["host"], both["meta"]


def _unreadable_parts(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of parts that a checkpoint could not load without running code."""
    for name, part in parts.items():
        try:
            _load_from_bytes(_save_to_bytes(part))
        except pickle.UnpicklingError:
            yield repr(name)


def _save_to_bytes(value: Any) -> bytes:
    """Return a part of a checkpoint as the bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load_from_bytes(raw: bytes) -> Any:
    """Return a part of a checkpoint from its bytes; runs no code in them."""
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
