"""What a checkpoint's folder must hold, byte for byte: names, sizes, checksums.

torch has no checksum of its own (a flipped bit loads silently) and its metadata is a pickle, so
nothing in a folder is opened before ``check`` has passed. sha256 rather than crc32: it costs 0.7 s
a GB in the background, holds for files of any size, and ``sha256sum`` can check it without us.
"""

import hashlib
import os
import re
import stat
from pathlib import Path

import msgspec

from trainvitals.errors import CheckpointCorruptError, NewerVersionError, UsageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HEALTHY_MARK = "healthy"
"""An empty file beside the manifest: the checkpoint was verified when written, proven later."""

_ID = re.compile(r"step-(\d{8,12})-(\d{1,20})\Z")
_FILE = re.compile(r"(\.metadata|__\d+_\d+\.distcp)\Z")
_CHUNK = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last, so a folder that has one was complete."""

    format_version: int = FORMAT_VERSION
    id: str
    run_id: str
    step: int
    attempt: int
    state: str
    world_size: int
    torch_version: str
    num_bytes: int
    may_be_nonfinite: tuple[str, ...] = ()
    """Tensors which held NaN or Inf when the training began (masks); all others are finite."""
    files: dict[str, FileEntry]
    checksum: str = ""
    """sha256 of this manifest with ``checksum`` empty."""


def checkpoint_id(step: int, attempt: int) -> str:
    """Return the id, which is also the folder's name."""
    return f"step-{step:08d}-{attempt}"


def parse_id(name: str) -> tuple[int, int]:
    """Return (step, attempt) of an id.

    Raises:
        UsageError: it is not an id: a path, say.
    """
    match = _ID.match(name)
    if match is None:
        raise UsageError(
            f"checkpoint is {name!r}; it must be an id such as step-00000120-1763712486000123",
            hint="`vitals show` shows the ids",
        )
    return int(match[1]), int(match[2])


def is_id(name: str) -> bool:
    """Return whether a folder's name is that of a complete checkpoint."""
    return _ID.match(name) is not None


def seal(folder: Path, manifest: Manifest) -> None:
    """Checksum every file of the folder, then write the manifest; all of it is on disk after."""
    files = {path.name: _measure(path) for path in sorted(folder.iterdir())}
    unsigned = msgspec.structs.replace(manifest, files=files, checksum="")
    signed = msgspec.structs.replace(unsigned, checksum=_checksum(unsigned))
    with (folder / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(signed)))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """Return a folder's manifest, unharmed and about this folder.

    Raises:
        CheckpointCorruptError: it is missing, torn, changed, or another folder's.
        NewerVersionError: a newer Vitals wrote it.
    """
    name = folder.name
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise CheckpointCorruptError(f"{name} is no folder; links are refused")
    try:
        manifest = msgspec.json.decode(_bytes(folder / MANIFEST), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointCorruptError(f"{name}: {MANIFEST} cannot be read: {error}") from error
    if manifest.format_version > FORMAT_VERSION:
        raise NewerVersionError(
            f"{name} has format {manifest.format_version}; this Vitals reads {FORMAT_VERSION}",
            hint="pip install -U trainvitals",
        )
    if manifest.checksum != _checksum(msgspec.structs.replace(manifest, checksum="")):
        raise CheckpointCorruptError(f"{name}: {MANIFEST} does not match its own checksum")
    if manifest.id != name or parse_id(name) != (manifest.step, manifest.attempt):
        raise CheckpointCorruptError(f"{name}: {MANIFEST} is that of {manifest.id}")
    return manifest


def check(folder: Path) -> Manifest:
    """Return the manifest once every file matches it and there is no other file.

    Raises:
        CheckpointCorruptError: a file is missing, more, a link, truncated or changed.
    """
    manifest = read(folder)
    there = {path.name for path in folder.iterdir()} - {MANIFEST, HEALTHY_MARK}
    if there != set(manifest.files):
        odd = ", ".join(sorted(there ^ set(manifest.files)))
        raise CheckpointCorruptError(f"{folder.name}: the manifest and the folder differ in {odd}")
    for name, entry in manifest.files.items():
        if not _FILE.match(name):
            raise CheckpointCorruptError(f"{folder.name}: {name} is no file of a checkpoint")
        try:
            found = _measure(folder / name)
        except OSError as error:
            raise CheckpointCorruptError(f"{folder.name}/{name}: {error.strerror}") from error
        if found != entry:
            raise CheckpointCorruptError(
                f"{folder.name}/{name}: {found.size} bytes with checksum {found.sha256[:8]}; the "
                f"manifest says {entry.size} bytes with {entry.sha256[:8]}"
            )
    return manifest


def sync_folder(folder: Path) -> None:
    """Write the folder's own entries to disk: a rename is durable only after this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _measure(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    with open(_open(path), "rb", buffering=0) as file:
        os.fsync(file.fileno())
        size = 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def _bytes(path: Path) -> bytes:
    with open(_open(path), "rb") as file:
        return file.read()


def _open(path: Path) -> int:
    """Return a descriptor of a regular file; a link is an OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is no regular file", str(path))
    return fd


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()
