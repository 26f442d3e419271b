"""What a checkpoint's folder must hold, byte for byte: names, sizes, checksums.

torch has no checksum of its own (a flipped bit loads silently) and its metadata is a pickle, so
nothing in a folder is opened before ``check`` has passed. sha256 rather than crc32: it costs 0.7 s
a GB in the background, holds for files of any size, and ``sha256sum`` can check it without us.

A checksum proves that nothing broke, not whose it is: that, the owner of the files says, and where
others may write the folder, the manifest's signature with the run's key.
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
from trainvitals.io.private import Owner, mac_of, open_own

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HEALTHY_MARK = "healthy"
"""An empty file beside the manifest: the checkpoint was verified when written, proven later."""
BEST_MARK = "best"
"""A file beside the manifest: no checkpoint of the run was better; holds by which metric."""
BAD_MARK = "bad"
"""A file beside the manifest: why the checkpoint was set aside, and when."""

METADATA = ".metadata"
"""What lies where; torch's own, small, and read by every rank."""
TEMPORARY = ".tmp-"
"""Beginning of names that hold nothing which counts; ``prepare`` removes them."""

_ID = re.compile(r"step-(\d{8,12})-(\d{1,20})\Z")
_FILE = re.compile(r"(\.metadata|__(\d+)_\d+\.distcp)\Z")
_CHUNK = 1 << 20
_MAX_SMALL = 64 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file."""

    size: int
    sha256: str


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a damaged or newer manifest says: unproven, good for words only."""

    format_version: int = 0
    run_id: str = ""
    state: str = ""
    num_bytes: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last, so a folder that has one was complete. Fields of a newer Vitals are kept."""

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
    mac: str = ""
    """HMAC of this manifest with ``mac`` and ``checksum`` empty, by the run's key; an earlier
    Vitals wrote none."""
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


def measure(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileEntry]:
    """Return sizes and checksums of these files, or of all; their bytes are on disk after."""
    names = [path.name for path in folder.iterdir()] if names is None else names
    return {name: _measure(folder / name) for name in sorted(names)}


def seal(folder: Path, manifest: Manifest, key: bytes = b"") -> None:
    """Write the manifest, last of all; it is on disk after, and so are the names in the folder.

    Who wrote a file has measured it (``measure``); it is not read once more here. ``key`` signs it.

    Raises:
        CheckpointCorruptError: the folder holds other files than were measured, or other sizes.
    """
    _check_names(folder, manifest)
    for name, entry in manifest.files.items():
        _check_size(folder, name, entry)
    body = msgspec.to_builtins(msgspec.structs.replace(manifest, mac="", checksum=""))
    body["mac"] = _mac(body, key) if key else ""
    body["checksum"] = _checksum(body)
    write_new(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(body)))
    sync_folder(folder)


def read(folder: Path, key: bytes | None = None) -> Manifest:
    """Return a folder's manifest, unharmed and about this folder.

    Args:
        folder: the checkpoint's.
        key: with which it must be signed; None where nothing has to prove whose it is.

    Raises:
        CheckpointCorruptError: it is missing, torn, changed, another folder's, or names a file that
            is none of a checkpoint: a path, say.
        InsecurePathError: it is not signed with the key.
        NewerVersionError: a newer Vitals wrote it.
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
    """Return what a manifest says, without proof; empty where it cannot be read at all."""
    try:
        return msgspec.json.decode(read_small(folder / MANIFEST), type=Header)
    except (OSError, ValueError, RecursionError):
        return Header()


def glance(folder: Path, key: bytes | None = None) -> Manifest:
    """Return the manifest once every file has its size: what can be seen without reading them.

    Raises:
        CheckpointCorruptError: as ``read``, or a file is missing or of another size.
        InsecurePathError, NewerVersionError: as ``read``.
    """
    manifest = read(folder, key)
    for name, entry in manifest.files.items():
        _check_size(folder, name, entry)
    return manifest


def _check_size(folder: Path, name: str, entry: FileEntry) -> None:
    try:
        size = (folder / name).lstat().st_size
    except OSError as error:
        raise CheckpointCorruptError(f"{folder.name}/{name}: {error.strerror}") from error
    if size != entry.size:
        raise CheckpointCorruptError(
            f"{folder.name}/{name}: {size} bytes; the manifest says {entry.size}"
        )


def _check_names(folder: Path, manifest: Manifest) -> None:
    there = {path.name for path in folder.iterdir()} - {MANIFEST, HEALTHY_MARK, BEST_MARK, BAD_MARK}
    if there != set(manifest.files):
        odd = ", ".join(sorted(there ^ set(manifest.files)))
        raise CheckpointCorruptError(f"{folder.name}: the manifest and the folder differ in {odd}")


def check(folder: Path, key: bytes | None = None) -> Manifest:
    """Return the manifest once every file matches it and there is no other file.

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
    """Return the manifest once the folder holds its files, each of its size, and no other.

    Raises:
        CheckpointCorruptError: a file is missing, more or of another size.
        InsecurePathError, NewerVersionError: as ``read``.
    """
    manifest = glance(folder, key)
    _check_names(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files and compare them with the manifest.

    Raises:
        CheckpointCorruptError: one is truncated or changed.
        OSError: one cannot be read, or is a link.
    """
    for name in names:
        entry, measured = manifest.files[name], _measure(folder / name)
        if measured != entry:
            raise CheckpointCorruptError(
                f"{folder.name}/{name}: {measured.size} bytes with checksum {measured.sha256[:8]}; "
                f"the manifest says {entry.size} bytes with {entry.sha256[:8]}"
            )


def written_by(name: str) -> int | None:
    """Return the rank that wrote a file; None of the metadata, which rank 0 wrote for all."""
    match = _FILE.match(name)
    return None if match is None or match[2] is None else int(match[2])


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank reads back for all: each file but the metadata is one rank's.

    With as many ranks as wrote it, they are those that it wrote.
    """
    writers = ((name, written_by(name)) for name in names)
    return sorted(name for name, by in writers if by is not None and by % world_size == rank)


def check_owner(folder: Path, owner: Owner) -> None:
    """Refuse a checkpoint that another user made.

    Raises:
        InsecurePathError: it or a file in it is another user's.
        OSError: it cannot be looked at.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return  # a link, which ``read`` refuses
    for path in chain((folder,), _inside(folder)):  # its owner first: it may be closed to us
        status = path.lstat()
        if not owner.owns(status):
            raise InsecurePathError(
                f"{path} belongs to user {status.st_uid}; it must belong to {owner.uid}: weights "
                "that another user can change cannot be trusted",
                hint=f"if you trust it, make it yours: chown -R {owner.uid} {folder}, or copy "
                "the folder",
            )


def _inside(folder: Path) -> Iterator[Path]:
    yield from folder.iterdir()


def open_to_others(folder: Path, owner: Owner) -> Path | None:
    """Return the folder in which others may change a checkpoint, as far as modes say; else None.

    Where they may write the folder that it lies in, they can put another in its place; not so in
    one like /tmp, where only its owner may rename a file.
    """
    if owner.is_writable_by_others(folder.lstat()):
        return folder
    around = folder.parent.stat()
    is_open = owner.is_writable_by_others(around) and not around.st_mode & stat.S_ISVTX
    return folder.parent if is_open or not owner.owns(around) else None


def write_new(path: Path, raw: bytes) -> None:
    """Write a file that is not there yet; its bytes are on disk after, its name is not."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def put(path: Path, near: Path, raw: bytes) -> None:
    """Write a file whole, durably: after a crash it holds the old bytes, if any, or the new.

    The temporary one lies in ``near``, on the same disk: a checkpoint holds no file that it should
    not, at any moment.
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
    """Write the folder's own entries to disk: a rename is durable only after this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that knows it not
            raise
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


def read_small(path: Path) -> bytes:
    """Return the bytes of a regular file of bounded size; anything else is an OSError."""
    with open(_open(path), "rb") as file:
        # Of its own size, not of the bound: a read of so many bytes takes that memory first.
        raw = file.read(min(os.fstat(file.fileno()).st_size, _MAX_SMALL) + 1)
    if len(raw) > _MAX_SMALL:
        raise OSError(errno.EFBIG, f"is larger than {_MAX_SMALL} bytes", str(path))
    return raw


def _open(path: Path) -> int:
    """Return a descriptor of a regular file of the folder's owner; anything else is an OSError."""
    try:
        return open_own(path, owner=Owner.whose(path.parent))
    except InsecurePathError as error:
        raise OSError(errno.EPERM, error.text, str(path)) from error


def _is_signed(body: dict[str, Any], key: bytes) -> bool:
    mac = body.get("mac")
    return bool(key) and isinstance(mac, str) and hmac.compare_digest(mac, _mac(body, key))


def _mac(body: dict[str, Any], key: bytes) -> str:
    unsigned = msgspec.json.encode(body | {"mac": "", "checksum": ""})
    return mac_of(key, b"checkpoint", unsigned)


def _checksum(body: dict[str, Any]) -> str:
    """Return the sha256 of what was written, fields that this version does not know included."""
    return hashlib.sha256(msgspec.json.encode(body | {"checksum": ""})).hexdigest()
