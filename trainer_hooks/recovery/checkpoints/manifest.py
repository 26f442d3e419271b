"""Required content of a checkpoint's directory, byte for byte: names, sizes, checksums.

torch has no checksum of its own (a flipped bit loads silently) and its metadata is a pickle, so
nothing in a directory is opened before ``check`` has passed. sha256 rather than crc32: it costs
0.7 s per GB in the background, works for files of any size, and ``sha256sum`` can verify it.

A checksum detects damage but does not prove the origin: the owner of the files does, and if others
may write the directory, the manifest's signature with the run's key.
"""

import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from trainvitals.errors import (
    CheckpointCorruptError,
    InsecurePathError,
    NewerVersionError,
    UsageError,
)
from trainvitals.io.private import FileOwner, mac_of, open_own

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HEALTHY_MARK = "healthy"
"""An empty file next to the manifest: the checkpoint was verified when written, proven later."""
BEST_MARK = "best"
"""A file next to the manifest: the checkpoint is the best of the run; contains the metric."""
BAD_MARK = "bad"
"""A file next to the manifest: the reason and the time of a quarantine."""

METADATA = ".metadata"
"""Positions of the tensors; torch's own format, small, and read by every rank."""
TEMPORARY = ".tmp-"
"""Prefix of temporary names; ``prepare`` removes them."""

_ID = re.compile(r"step-(\d{8,12})-(\d{1,20})\Z")
_FILE = re.compile(r"(\.metadata|__(\d+)_\d+\.distcp)\Z")
_CHUNK = 1 << 20
_MAX_SMALL = 64 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file."""

    size: int
    sha256: str


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a damaged or newer manifest: unproven, only for display."""

    format_version: int = 0
    run_id: str = ""
    state: str = ""
    num_bytes: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last, so a directory with one is complete. Keeps fields of newer Vitals versions."""

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
    """Tensors that held NaN or Inf at the start of training (masks); all others are finite."""
    files: dict[str, FileEntry]
    mac: str = ""
    """HMAC of this manifest with ``mac`` and ``checksum`` empty, by the run's key; missing in
    earlier versions of Vitals."""
    checksum: str = ""
    """sha256 of this manifest with ``checksum`` empty."""


def checkpoint_id(step: int, attempt: int) -> str:
    """Return the id of a checkpoint, which is also its directory's name."""
    return f"step-{step:08d}-{attempt}"


def parse_id(name: str) -> tuple[int, int]:
    """Return (step, attempt) of a checkpoint's id.

    Raises:
        UsageError: it is not an id but, for example, a path.
    """
    match = _ID.match(name)
    if match is None:
        raise UsageError(
            f"checkpoint is {name!r}; it must be an id such as step-00000120-1763712486000123",
            hint="`vitals show` shows the ids",
        )
    return int(match[1]), int(match[2])


def is_id(name: str) -> bool:
    """Return whether a directory's name is the name of a complete checkpoint on disk."""
    return _ID.match(name) is not None


def measure(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileEntry]:
    """Return size and checksum of a checkpoint's files, these or all; bytes are then on disk."""
    names = [path.name for path in folder.iterdir()] if names is None else names
    return {name: _sync_and_hash(folder / name) for name in sorted(names)}


def seal(folder: Path, manifest: Manifest, key: bytes = b"") -> None:
    """Write the checkpoint's manifest last; then it is on disk, with the names in the directory.

    The writer of a file has measured it (``measure``); it is not read again here. ``key`` signs it.

    Raises:
        CheckpointCorruptError: the directory holds other files than were measured, or other sizes.
    """
    _check_names(folder, manifest)
    for name, entry in manifest.files.items():
        _check_size(folder, name, entry)
    body = msgspec.to_builtins(msgspec.structs.replace(manifest, mac="", checksum=""))
    body["mac"] = _manifest_mac(body, key) if key else ""
    body["checksum"] = _checksum(body)
    write_new(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(body)))
    sync_folder(folder)


def read(folder: Path, key: bytes | None = None) -> Manifest:
    """Return a checkpoint's manifest, if it is undamaged and belongs to this directory.

    Args:
        folder: directory of the checkpoint.
        key: key with which it must be signed; None if the origin need not be proven.

    Raises:
        CheckpointCorruptError: it is missing, torn, changed, or another directory's, or it lists a
            file that cannot belong to a checkpoint, such as a path.
        InsecurePathError: it is not signed with the key.
        NewerVersionError: a newer version of Vitals wrote it.
    """
    name = folder.name
    try:
        is_folder = stat.S_ISDIR(folder.lstat().st_mode)
        raw = read_small(folder / MANIFEST) if is_folder else b""
        body = msgspec.json.decode(raw, type=dict[str, Any]) if is_folder else {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: UnicodeDecodeError too
        raise CheckpointCorruptError(f"{name}: {MANIFEST} cannot be read: {error}") from error
    if not is_folder:
        raise CheckpointCorruptError(f"{name} is not a folder; symbolic links are not accepted")
    version = body.get("format_version")
    if (
        isinstance(version, int) and version > FORMAT_VERSION
    ):  # before its fields, which may be others
        raise NewerVersionError(
            f"{name} has format {version}; this program reads up to {FORMAT_VERSION}",
            hint="pip install -U trainvitals",
        )
    if body.get("checksum") != _checksum(body):
        raise CheckpointCorruptError(f"{name}: {MANIFEST} does not match its own checksum")
    if key is not None and not _is_signed(body, key):
        raise InsecurePathError(f"{name} is not signed with this run's key")
    try:
        manifest = msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointCorruptError(f"{name}: {MANIFEST} cannot be read: {error}") from error
    if manifest.id != name or parse_id(name) != (manifest.step, manifest.attempt):
        raise CheckpointCorruptError(f"{name}: {MANIFEST} belongs to {manifest.id}")
    odd = [file for file in manifest.files if not _FILE.match(file)]
    if odd:
        raise CheckpointCorruptError(f"{name}: {odd[0]!r} is not a file of a checkpoint")
    return manifest


def peek(folder: Path) -> Header:
    """Return the unproven content of a checkpoint's manifest; empty if it is not readable."""
    try:
        return msgspec.json.decode(read_small(folder / MANIFEST), type=Header)
    except (OSError, ValueError, RecursionError):
        return Header()


def read_with_sizes(folder: Path, key: bytes | None = None) -> Manifest:
    """Return a checkpoint's manifest once every file has its size: a check without reading them.

    Raises:
        CheckpointCorruptError: as ``read``, or a file is missing or of another size.
        InsecurePathError, NewerVersionError: as ``read``.
    """
    manifest = read(folder, key)
    for name, entry in manifest.files.items():
        _check_size(folder, name, entry)
    return manifest


def _check_size(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise if a file of a checkpoint does not have the size in the manifest."""
    try:
        size = (folder / name).lstat().st_size
    except OSError as error:
        raise CheckpointCorruptError(f"{folder.name}/{name}: {error.strerror}") from error
    if size != entry.size:
        raise CheckpointCorruptError(
            f"{folder.name}/{name}: {size} bytes; the manifest says {entry.size}"
        )


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Raise if the checkpoint's directory and its manifest differ in a file."""
    there = {path.name for path in folder.iterdir()} - {MANIFEST, HEALTHY_MARK, BEST_MARK, BAD_MARK}
    if there != set(manifest.files):
        odd = ", ".join(sorted(there ^ set(manifest.files)))
        raise CheckpointCorruptError(f"{folder.name}: the manifest and the folder differ in {odd}")


def check(folder: Path, key: bytes | None = None) -> Manifest:
    """Return a checkpoint's manifest once every file matches it and there is no other file.

    Raises:
        CheckpointCorruptError: a file is missing, more, a link, truncated or changed.
        InsecurePathError, NewerVersionError: as ``read``.
    """
    manifest = examine(folder, key)
    try:
        check_files(folder, manifest, manifest.files)
    except OSError as error:
        raise CheckpointCorruptError(
            f"{folder.name}/{Path(error.filename or '').name}: {error.strerror}"
        ) from error
    return manifest


def examine(folder: Path, key: bytes | None = None) -> Manifest:
    """Return a checkpoint's manifest once it holds its files, each of its size, and no other.

    Raises:
        CheckpointCorruptError: a file is missing, more or of another size.
        InsecurePathError, NewerVersionError: as ``read``.
    """
    manifest = read_with_sizes(folder, key)
    _check_names(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files of a checkpoint, and compare them with its manifest.

    Raises:
        CheckpointCorruptError: one is truncated or changed.
        OSError: one cannot be read, or is a link.
    """
    for name in names:
        entry, measured = manifest.files[name], _sync_and_hash(folder / name)
        if measured != entry:
            raise CheckpointCorruptError(
                f"{folder.name}/{name}: {measured.size} bytes with checksum {measured.sha256[:8]}; "
                f"the manifest says {entry.size} bytes with {entry.sha256[:8]}"
            )


def written_by(name: str) -> int | None:
    """Return the rank that wrote a checkpoint's file; None for the metadata."""
    match = _FILE.match(name)
    return None if match is None or match[2] is None else int(match[2])


def files_to_verify(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank reads back for all: each file except the metadata is one rank's.

    With as many ranks as wrote it, each rank gets its own files.
    """
    writers = ((name, written_by(name)) for name in names)
    return sorted(name for name, by in writers if by is not None and by % world_size == rank)


def check_owner(folder: Path, owner: FileOwner) -> None:
    """Refuse a checkpoint that another user made.

    Raises:
        InsecurePathError: it or a file in it belongs to another user.
        OSError: it cannot be examined.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return  # a link, which ``read`` refuses
    for path in chain(
        (folder,), _iterate_directory(folder)
    ):  # its owner first: it may be closed to us
        status = path.lstat()
        if not owner.owns(status):
            raise InsecurePathError(
                f"{path} belongs to user {status.st_uid}; it must belong to {owner.uid}: weights "
                "that another user can change cannot be trusted",
                hint=f"if you trust it, make it yours: chown -R {owner.uid} {folder}, or copy "
                "the folder",
            )


def _iterate_directory(folder: Path) -> Iterator[Path]:
    """Yield the files in a checkpoint's directory."""
    yield from folder.iterdir()


def open_to_others(folder: Path, owner: FileOwner) -> Path | None:
    """Return the directory in which others may change a checkpoint, according to modes; or None.

    If they may write the parent directory, they can replace the checkpoint; this does not apply to
    directories like /tmp, where only its owner may rename a file.
    """
    if owner.is_writable_by_others(folder.lstat()):
        return folder
    around = folder.parent.stat()
    is_open = owner.is_writable_by_others(around) and not around.st_mode & stat.S_ISVTX
    return folder.parent if is_open or not owner.owns(around) else None


def write_new(path: Path, raw: bytes) -> None:
    """Write a checkpoint's new file and sync its bytes; sync the directory for a durable name."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, near: Path, raw: bytes) -> None:
    """Write a file atomically and durably: after a crash it has the old bytes, if any, or the new.

    The temporary file is in ``near``, on the same disk: a checkpoint never contains a file that it
    should not.
    """
    temporary = near / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        write_new(temporary, raw)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a checkpoint directory's entries to disk: a rename is durable only after this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the file system
            raise
    finally:
        os.close(fd)


def _sync_and_hash(path: Path) -> FileEntry:
    """Return size and checksum of a checkpoint's file, whose bytes are then on disk."""
    digest = hashlib.sha256()
    with open(_open(path), "rb", buffering=0) as file:
        os.fsync(file.fileno())
        size = 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def read_small(path: Path) -> bytes:
    """Return a checkpoint's regular file of bounded size as bytes; anything else is an OSError."""
    with open(_open(path), "rb") as file:
        # By its own size, not by the limit: a read allocates the requested size first.
        raw = file.read(min(os.fstat(file.fileno()).st_size, _MAX_SMALL) + 1)
    if len(raw) > _MAX_SMALL:
        raise OSError(errno.EFBIG, f"is larger than {_MAX_SMALL} bytes", str(path))
    return raw


def _open(path: Path) -> int:
    """Return a descriptor of the owner's regular file in a checkpoint; otherwise raise OSError."""
    try:
        return open_own(path, owner=FileOwner.from_directory(path.parent))
    except InsecurePathError as error:
        raise OSError(errno.EPERM, error.text, str(path)) from error


def _is_signed(body: dict[str, Any], key: bytes) -> bool:
    """Return whether a checkpoint's manifest has a valid signature by this key."""
    mac = body.get("mac")
    return bool(key) and isinstance(mac, str) and hmac.compare_digest(mac, _manifest_mac(body, key))


def _manifest_mac(body: dict[str, Any], key: bytes) -> str:
    """Return the signature of a checkpoint's manifest by this key."""
    unsigned = msgspec.json.encode(body | {"mac": "", "checksum": ""})
    return mac_of(key, b"checkpoint", unsigned)


def _checksum(body: dict[str, Any]) -> str:
    """Return the sha256 of a manifest's written fields, with those unknown to this version."""
    return hashlib.sha256(msgspec.json.encode(body | {"checksum": ""})).hexdigest()
