"""The tensors of a checkpoint, through torch.distributed.checkpoint, with its traps disarmed.

Three of them: its ``CheckpointException`` is no ``Exception``; its ``.metadata`` is a pickle, which
runs what is in it; it knows no checksum (see ``manifest``).
"""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save

from trainer_hooks.state import HostState, Spec
from trainvitals.errors import CheckpointCorruptError, CheckpointError

_PART_BYTES = 64 << 20
"""Read at most about this much at a time: a restore must not need the state a second time."""

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


class _MetadataUnpickler(pickle.Unpickler):
    """Builds a checkpoint's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointCorruptError(
            f"the metadata names {module}.{name}, which has no place there"
        )


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """Return what lies where; reads the folder's own files only, whatever the metadata says.

    Raises:
        CheckpointCorruptError: it is no metadata, or names a file or a function of elsewhere.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise CheckpointCorruptError(f"{folder.name}/.metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(f"{folder.name}/.metadata is no metadata")
    for info in (metadata.storage_data or {}).values():
        if "/" in info.relative_path or not (folder / info.relative_path).is_file():
            raise CheckpointCorruptError(f"{folder.name}: data in {info.relative_path!r}")
    return metadata


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's tensors; fsynced. Collective on ``group``, alone without one.

    Raises:
        CheckpointError: on every rank, if one of them could not.
    """
    _expect_no_dist_warning()
    writer = FileSystemWriter(folder, sync_files=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = {f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()}
        raise CheckpointError("; ".join(sorted(causes))) from error


def specs(folder: Path) -> dict[str, Spec]:
    """Return shape and type of every tensor by name."""
    known = read_metadata(folder).state_dict_metadata
    if not all(isinstance(entry, TensorStorageMetadata) for entry in known.values()):
        raise CheckpointCorruptError(f"{folder.name}: the metadata holds more than tensors")
    return {key: Spec(tuple(entry.size), entry.properties.dtype) for key, entry in known.items()}  # type: ignore[union-attr]


def read(folder: Path, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors by name, some megabytes at a time; not collective.

    Raises:
        CheckpointCorruptError: one is missing or cannot be read.
    """
    _expect_no_dist_warning()
    known = specs(folder)
    part: dict[str, Tensor] = {}
    for i, key in enumerate(keys):
        if key not in known:
            raise CheckpointCorruptError(f"{folder.name} holds no tensor {key}")
        part[key] = torch.empty(known[key].shape, dtype=known[key].dtype)
        if i == len(keys) - 1 or sum(t.nbytes for t in part.values()) >= _PART_BYTES:
            try:
                load_into(part, storage_reader=_Reader(folder), no_dist=True)
            except CheckpointException as error:
                raise CheckpointCorruptError(f"{folder.name}: {error}") from error
            yield part
            part = {}


def pack_host(host: HostState, meta: Mapping[str, Any]) -> Tensor:
    """Return the host state as a tensor of bytes, proven to be readable without running code.

    Raises:
        CheckpointError: a part holds objects that are no plain values or tensors.
    """
    raw = _saved({"host": host, "meta": dict(meta)})
    try:
        _loaded(raw)
    except pickle.UnpicklingError as error:
        parts = {**{k: v for k, v in host.items() if k != "extra"}, **host["extra"], "meta": meta}
        raise CheckpointError(
            f"the state of {', '.join(_unreadable(parts))} is more than plain values and tensors",
            hint="let state_dict() return numbers, strings, lists, dicts and tensors",
        ) from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def unpack_host(packed: Tensor) -> tuple[HostState, dict[str, Any]]:
    """Return (host state, meta) of what ``pack_host`` made; runs no code of theirs."""
    both = _loaded(bytes(packed.untyped_storage()))
    return both["host"], both["meta"]


def _unreadable(parts: Mapping[str, Any]) -> Iterator[str]:
    for name, part in parts.items():
        try:
            _loaded(_saved(part))
        except pickle.UnpicklingError:
            yield repr(name)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def _expect_no_dist_warning() -> None:
    # Said at each save and load of a single process. ``catch_warnings`` is not thread-safe.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
