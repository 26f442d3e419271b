"""Folders and files that only this user may reach.

Journal and mailbox lie in shared memory, which every user of the node can write: so the folder is
made 0700, and owner, mode and "not a link" are checked each time, never assumed.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trainvitals.errors import InsecurePathError, StorageError

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
_SHARED_MEMORY = Path("/dev/shm")


def private_base(environ: Mapping[str, str]) -> Path:
    """Return this user's private folder for journals, made if need be.

    It lies under ``VITALS_SHM``, else /dev/shm where that can be written, else the folder for
    temporary files.
    """
    chosen = environ.get("VITALS_SHM")
    if chosen:
        parent = Path(chosen)
        if not parent.is_dir():
            raise StorageError(
                f"VITALS_SHM is {chosen!r}; it must be an existing folder",
                hint="unset VITALS_SHM to use /dev/shm",
            )
    elif _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        parent = _SHARED_MEMORY
    else:
        parent = Path(tempfile.gettempdir())
    return ensure_private_dir(parent.absolute() / f"trainvitals-{os.getuid()}")


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
        raise StorageError(f"{path}: cannot be made: {error.strerror}") from error
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
            raise InsecurePathError(f"{path} is a link; a private file may not be one") from error
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
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0] in _MEMORY_TYPES
    return False


def _check(path: Path, status: os.stat_result, is_kind: Callable[[int], bool], kind: str) -> None:
    if not is_kind(status.st_mode):
        what = "a link" if stat.S_ISLNK(status.st_mode) else f"no {kind}"
        raise InsecurePathError(f"{path} is {what}; it must be a {kind}", hint=f"remove {path}")
    if status.st_uid != os.getuid():
        raise InsecurePathError(
            f"{path} belongs to user {status.st_uid}; it must belong to {os.getuid()}",
            hint="set VITALS_SHM to a folder of your own",
        )
    if status.st_mode & 0o077:
        raise InsecurePathError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; others may reach it",
            hint=f"chmod go-rwx {path}",
        )
