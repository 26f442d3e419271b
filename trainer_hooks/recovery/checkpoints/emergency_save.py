"""A checkpoint that each rank writes separately when there is no time for collectives.

``.alone-RUN/ID/rank-N-of-W/ID`` is rank N's part, with its own data, metadata and manifest. It is
complete as soon as it has that name. Data held by every rank is written by one of them, which each
rank determines without communication. At the next start rank 0 merges all parts into a checkpoint.
"""

import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints import payload
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.manifest import Manifest
from trainer_hooks.recovery.checkpoints.planner import TensorBox, num_bytes, stored_tensors
from trainvitals.errors import (
    CheckpointCorruptError,
    CheckpointError,
    InsecurePathError,
    VitalsError,
)
from trainvitals.io.private import ensure_own_dir

_LOG = logging.getLogger("trainvitals")
_PART = re.compile(r"rank-(\d+)-of-(\d+)\Z")


def write_part(
    folder: Path,
    content: Manifest,
    rank: int,
    boxes: Sequence[TensorBox],
    check_whole: Callable[[], None] = lambda: None,
    key: bytes = b"",
) -> None:
    """Write this rank's part of a checkpoint; an existing part is left unchanged.

    Files and sizes of ``content`` are filled in. ``check_whole`` raises if the boxes have changed
    by the time they are written. The run's ``key`` signs the part.

    Raises:
        CheckpointError: it could not be written.
        InsecurePathError: another user took the directory's name.
        OSError: the part could not be written.
    """
    home = _emergency_directory(folder, content.run_id) / content.id
    ensure_own_dir(ensure_own_dir(home.parent, read=0) / home.name)
    name = f"rank-{rank}-of-{content.world_size}"
    if (home / name).exists():
        return
    being_written = home / f".{name}"
    shutil.rmtree(being_written, ignore_errors=True)
    part = being_written / content.id

    def make_room(size: int) -> None:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise CheckpointError(f"{free >> 20} MiB free; rank {rank} needs {size >> 20} MiB")
        being_written.mkdir(mode=0o700)
        part.mkdir(mode=0o700)

    written = payload.write(part, boxes, None, make_room=make_room)
    check_whole()
    files = manifests.measure(part)
    content = msgspec.structs.replace(content, num_bytes=written.num_bytes, files=files)
    manifests.seal(part, content, key)
    being_written.rename(home / name)
    manifests.sync_folder(home)


def merge_emergency_parts(folder: CheckpointFolder, run_id: str) -> list[str]:
    """Make checkpoints of this run's parts, and remove the parts; return the new ids.

    Call when no rank writes any longer, so that incomplete parts stay incomplete. A damaged or
    incomplete checkpoint is reported and removed; one that is unreadable for another reason stays.
    Parts that another user created are reported and quarantined.
    """
    adopted: list[str] = []
    home = _emergency_directory(folder.path, run_id)
    if folder.is_planted(home.name):
        aside = home.with_name(f".refused-{home.name}-{secrets.token_hex(4)}")
        try:
            home.rename(aside)
        except OSError as error:  # a sticky directory: only its owner may rename it
            _LOG.warning("vitals: %s is another user's; it is skipped: %s", home, error.strerror)
            return adopted
        _LOG.warning("vitals: %s is another user's; it is refused, and kept as %s", home, aside)
    for parts in sorted(home.iterdir()) if home.is_dir() and not home.is_symlink() else []:
        if parts.is_symlink() or not manifests.is_id(parts.name):
            continue
        try:
            if parts.name not in folder.names():
                _merge_checkpoint(folder, parts, run_id)
                adopted.append(parts.name)
        except InsecurePathError as error:
            _LOG.warning("vitals: the parts of %s are refused: %s", parts.name, error.text)
            folder.note(parts.name, "bad", detail=f"saved by each rank on its own: {error.text}")
            continue
        except VitalsError as error:
            _LOG.warning("vitals: the parts of %s are incomplete: %s", parts.name, error.text)
            folder.note(parts.name, "bad", detail=f"saved by each rank on its own: {error.text}")
        except OSError as error:
            _LOG.warning("vitals: the parts of %s are kept for now: %s", parts.name, error)
            folder.discard(parts.name)
            continue
        shutil.rmtree(parts, ignore_errors=True)
    with suppress(OSError):  # missing, or not empty
        home.rmdir()
    return adopted


def _emergency_directory(folder: Path, run_id: str) -> Path:
    """Return the directory for the parts of a run's checkpoints, written without collectives."""
    return folder / f".alone-{run_id}"


def _merge_checkpoint(folder: CheckpointFolder, parts: Path, run_id: str) -> None:
    """Publish the checkpoint that the parts form; nothing is published unless it is complete."""
    checked = _check_parts(folder, parts, run_id)
    first = checked[0][1]
    merged = _combine_metadata([payload.read_metadata(part) for part, _ in checked])
    _check_whole(merged)
    partial = folder.partial(parts.name)
    partial.mkdir(mode=0o700)
    try:
        files = {}
        for rank, (part, content) in enumerate(checked):
            for name in sorted(content.files.keys() - {manifests.METADATA}):
                _link(part / name, partial / _rank_file_name(name, rank))
                files[_rank_file_name(name, rank)] = content.files[name]
        payload.write_metadata(partial, merged)
        files |= manifests.measure(partial, [manifests.METADATA])
        size = num_bytes(merged)
        content = msgspec.structs.replace(first, num_bytes=size, state="verified", files=files)
        folder.publish(content)
    except BaseException:
        folder.discard(parts.name)
        raise
    folder.note(parts.name, "verified", num_bytes=size, detail="saved by each rank on its own")


def _check_parts(folder: CheckpointFolder, parts: Path, run_id: str) -> list[tuple[Path, Manifest]]:
    """Return every rank's part of a checkpoint and its manifest, once all of them exist.

    The metadata of each part is read back here; the tensors at the next load, by all ranks at once.
    """
    manifests.check_owner(parts, folder.owner())
    paths = {p.name: p for p in parts.iterdir() if _PART.match(p.name) and not p.is_symlink()}
    if not paths:
        raise CheckpointError("no rank finished saving its part")
    world_size = int(next(iter(paths)).rpartition("-")[2])
    names = [f"rank-{rank}-of-{world_size}" for rank in range(world_size)]
    if missing := sorted(set(names) ^ paths.keys()):
        raise CheckpointError(
            f"{len(paths)} of {world_size} parts exist; they differ in {', '.join(missing[:8])}"
        )
    checked = []
    for name in names:
        part = paths[name] / parts.name
        manifests.check_owner(paths[name], folder.owner())
        content = folder.proven(part)
        if (content.run_id, content.world_size) != (run_id, world_size):
            raise CheckpointCorruptError(f"{name} belongs to another checkpoint")
        manifests.check_files(part, content, [manifests.METADATA])
        checked.append((part, content))
    return checked


def _combine_metadata(parts: list[Metadata]) -> Metadata:
    """Return the metadata of all parts of a checkpoint; a box of several ranks is the first's."""
    merged = Metadata(state_dict_metadata={}, storage_data={})
    for rank, part in enumerate(parts):
        for name, stored in stored_tensors(part).items():
            merged_tensor = merged.state_dict_metadata.setdefault(name, replace(stored, chunks=[]))
            assert isinstance(merged_tensor, TensorStorageMetadata)
            if (merged_tensor.size, merged_tensor.properties) != (stored.size, stored.properties):
                raise CheckpointCorruptError(f"the ranks' parts of {name} differ in kind")
            offsets = {chunk.offsets for chunk in merged_tensor.chunks}
            merged_tensor.chunks += [
                chunk for chunk in stored.chunks if chunk.offsets not in offsets
            ]
        for index, info in part.storage_data.items():
            moved = replace(info, relative_path=_rank_file_name(info.relative_path, rank))
            merged.storage_data.setdefault(index, moved)
    return merged


def _check_whole(metadata: Metadata) -> None:
    """Refuse merged parts of a checkpoint with missing or repeated boxes."""
    for name, stored in stored_tensors(metadata).items():
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise CheckpointError(f"the ranks wrote only some parts of {name}, or some twice")


def _rank_file_name(name: str, rank: int) -> str:
    """Return the name of a checkpoint part's ``__0_M.distcp`` file with the number of its rank."""
    return f"__{rank}_{name.split('_')[-1]}"


def _link(old: Path, new: Path) -> None:
    """Link a file of an emergency save under a new name, or copy it."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copyfile(old, new, follow_symlinks=False)
        with new.open("rb") as file:
            os.fsync(file.fileno())
