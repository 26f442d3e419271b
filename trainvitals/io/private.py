"""Folders and files that only this user may reach.

Journal and mailbox lie in shared memory, which every user of the node can write: so the folder is
made 0700, and owner, mode and "not a link" are checked each time, never assumed.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainvitals.errors import InsecurePathError, StorageError, VitalsError

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))


def private_base(environ: Mapping[str, str]) -> Path:
    """Return the first of ``private_bases``.

    Raises:
        VitalsError: none can be used.
    """
    refused: list[VitalsError] = []
    for base in private_bases(environ, refused):
        return base
    if len(refused) == 1:
        raise refused[0]
    raise StorageError(
        f"no usable folder for journals: {'; '.join(error.text for error in refused)}",
        hint="set VITALS_SHM to a folder of your own",
    )


def private_bases(environ: Mapping[str, str], refused: list[VitalsError]) -> Iterator[Path]:
    """Yield this user's private folders for journals, best first, each made if need be.

    They lie under ``VITALS_SHM`` and nowhere else where that is set; else under /dev/shm where that
    can be written, TMPDIR, /tmp and /var/tmp. ``refused`` gets why one cannot be used: any user of
    the node can take the name, and that may cost us no more than the better place.
    """
    chosen = environ.get("VITALS_SHM")
    if chosen and not Path(chosen).is_dir():
        text = f"VITALS_SHM is {chosen!r}; it must be an existing folder"
        refused.append(StorageError(text, hint="unset VITALS_SHM to use /dev/shm"))
        return
    for parent in [Path(chosen)] if chosen else _parents(environ):
        try:
            base = ensure_private_dir(parent.absolute() / f"trainvitals-{os.getuid()}")
        except VitalsError as error:
            refused.append(error)
        else:
            yield base


def _parents(environ: Mapping[str, str]) -> list[Path]:
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        first = [_SHARED_MEMORY]
    else:
        first = []
    temporary = [Path(environ["TMPDIR"])] if environ.get("TMPDIR") else []
    return list(dict.fromkeys([*first, *temporary, *_TEMPORARY]))


def ensure_private_dir(path: Path) -> Path:
    """Make the folder with mode 0700 where it is missing, check it, and return it.

    Raises:
        InsecurePathError: it is a link, belongs to someone else, or others may enter it.
        StorageError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # whatever is there is judged below
    except OSError as error:
        raise StorageError(f"{path}: cannot be created: {error.strerror}") from error
    _check(path, path.lstat(), stat.S_ISDIR, "folder")
    return path


def open_private(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file that only this user may reach; a new one gets mode 0600.

    The caller closes it. ``flags`` are those of ``os.open``.

    Raises:
        InsecurePathError: a link, someone else's, or open to others.
        OSError: as ``os.open``.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise InsecurePathError(
                f"{path} is a symbolic link; a private file must be a regular file"
            ) from error
        raise
    try:
        _check(path, os.fstat(fd), stat.S_ISREG, "file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_memory_backed(path: Path) -> bool:
    """Return whether the file system of ``path`` is memory, so that mapping it waits for no disk.

    Unknown is False: the slow way is always right.
    """
    try:
        device = path.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return False
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == device_number:
            return right.split()[0] in _MEMORY_TYPES
    return False


def _check(path: Path, status: os.stat_result, is_kind: Callable[[int], bool], kind: str) -> None:
    if not is_kind(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else f"not a {kind}"
        raise InsecurePathError(f"{path} is {what}; it must be a {kind}", hint=f"remove {path}")
    if status.st_uid != os.getuid():
        raise InsecurePathError(
            f"{path} belongs to user {status.st_uid}; it must belong to {os.getuid()}",
            hint="set VITALS_SHM to a folder of your own",
        )
    if status.st_mode & 0o077:
        raise InsecurePathError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; other users can access it",
            hint=f"chmod go-rwx {path}",
        )
