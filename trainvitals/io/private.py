"""Files that are checked before they are believed, and folders that only this user may reach.

Other users of a node or of a shared disk can create any file there: a link instead of our file, a
FIFO that blocks, their file under our name. So a file is opened without following links and without
blocking, and its owner, type, mode and size are checked on the open file, never by name. Nothing is
written through a link, nor into a file with a second name.

Journal and mailbox are in shared memory, which every user of the node can write: their directory is
created with mode 0700, and owner, mode and "not a link" are checked each time.
"""

import contextlib
import errno
import functools
import grp
import hashlib
import hmac
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from trainvitals.errors import FormatError, InsecurePathError, StorageError, VitalsError

MAX_BYTES = 1 << 20
"""Maximum size of a file of ours, unless its reader allows more."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_READABLE = 0o055
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
    """Yield this user's private directories for journals, best first, created if needed.

    Only ``VITALS_SHM`` if it is set; otherwise /dev/shm if it is writable, TMPDIR, /tmp and
    /var/tmp. ``refused`` gets the reason why one cannot be used: any user of the node can take the
    name, which may cost only the better location.
    """
    configured = environ.get("VITALS_SHM")
    if configured and not Path(configured).is_dir():
        text = f"VITALS_SHM is {configured!r}; it must be an existing folder"
        refused.append(StorageError(text, hint="unset VITALS_SHM to use /dev/shm"))
        return
    for parent in [Path(configured)] if configured else _candidate_parents(environ):
        try:
            base = ensure_private_dir(parent.absolute() / f"trainvitals-{os.getuid()}")
        except VitalsError as error:
            refused.append(error)
        else:
            yield base


def _candidate_parents(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that may contain the private base, best first."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        first = [_SHARED_MEMORY]
    else:
        first = []
    temporary = [Path(environ["TMPDIR"])] if environ.get("TMPDIR") else []
    return list(dict.fromkeys([*first, *temporary, *_TEMPORARY]))


def ensure_private_dir(path: Path) -> Path:
    """Create the directory with mode 0700 if it is missing, check it, and return it.

    Raises:
        InsecurePathError: it is a link, belongs to another user, or is accessible for others.
        StorageError: it cannot be created.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # whatever is there is judged below
    except OSError as error:
        raise StorageError(f"{path}: cannot be created: {error.strerror}") from error
    _check_path_security(
        path, path.lstat(), stat.S_ISDIR, "folder", FileOwner.current_user(), private=True
    )
    return path


def open_private(path: Path, flags: int = os.O_RDONLY, *, any_links: bool = False) -> int:
    """Return a descriptor of a file that only this user may reach; a new one gets mode 0600.

    The caller closes it.

    Args:
        path: the file.
        flags: those of ``os.open``.
        any_links: write even if it has a second name; for files that are named by a link, in a
            directory that only this user can write.

    Raises:
        InsecurePathError: a link, another user's, accessible for others, or with a second name when
            opened for writing.
        OSError: as ``os.open``.
    """
    return _open_checked(
        path, flags, 0o600, FileOwner.current_user(), private=True, any_links=any_links
    )


# ---------------------------------------------------------------- what others may read, not write


class FileOwner(msgspec.Struct, frozen=True):
    """User whose files are trusted, and whether the file system has modes.

    A network file system may map root's files to nobody, and another may show every mode as 0777.
    """

    uid: int
    writable: int = 0
    """Write bits for others that it shows for a directory created with 0700."""

    @classmethod
    def current_user(cls) -> Self:
        """Return this process's user as the owner whose files are trusted."""
        return cls(os.geteuid())

    @classmethod
    def from_status(cls, status: os.stat_result) -> Self:
        """Return the owner and modes of something that we created with mode 0700."""
        return cls(status.st_uid, status.st_mode & _WRITABLE)

    @classmethod
    def from_directory(cls, folder: Path) -> Self:
        """Return a directory's owner, for its files: a reader may be another user.

        Modes are ignored then: earlier versions left them to the umask.
        """
        return cls(folder.stat().st_uid, _WRITABLE)

    def owns(self, status: os.stat_result) -> bool:
        """Return whether a file belongs to the trusted user, this user or root."""
        return status.st_uid in (self.uid, os.geteuid(), 0)

    def is_writable_by_others(self, status: os.stat_result) -> bool:
        """Return whether other users may write there, according to its mode."""
        mode = status.st_mode & _WRITABLE & ~self.writable
        if mode == stat.S_IWGRP and _is_private_group(status.st_gid, status.st_uid):
            return False
        return bool(mode)

    def check_uid(self, path: Path, status: os.stat_result) -> None:
        """Raise an error for another user's file.

        Raises:
            InsecurePathError: it is so.
        """
        if not self.owns(status):
            raise InsecurePathError(
                f"{path} belongs to user {status.st_uid}; it must belong to {self.uid}",
                hint=f"if you trust it, make it yours: chown {self.uid} {path}",
            )

    def check(self, path: Path, status: os.stat_result) -> None:
        """Raise an error for a file that another user owns or can write.

        Raises:
            InsecurePathError: it is so.
        """
        self.check_uid(path, status)
        if self.is_writable_by_others(status):
            raise InsecurePathError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; other users can write it",
                hint=f"if you trust it: chmod go-w {path}",
            )


@functools.cache
def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a file's group is its owner's private one: with umask 002 files are 0775."""
    try:
        user, group = pwd.getpwuid(uid).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return uid != 0 and group.gr_name == user and set(group.gr_mem) <= {user}


def open_own(
    path: Path, flags: int = os.O_RDONLY, *, owner: FileOwner | None = None, mode: int = 0o644
) -> int:
    """Return a descriptor of a regular file which others may read at most. The caller closes it.

    Args:
        path: the file; if its last part is a link, it is not followed.
        flags: those of ``os.open``; nothing is truncated before all is checked.
        owner: expected owner; None for this process's user.
        mode: of a new file.

    Raises:
        InsecurePathError: a link, not a regular file, another user's, writable by others, or with a
            second name when opened for writing.
        OSError: as ``os.open``.
    """
    return _open_checked(path, flags, mode, owner or FileOwner.current_user())


def stream_own(path: Path, *, owner: FileOwner | None = None) -> BinaryIO:
    """Return a file opened by ``open_own`` as a stream.

    Raises:
        InsecurePathError, OSError: as ``open_own``.
    """
    return open(path, "rb", opener=lambda _, flags: open_own(path, flags, owner=owner))


def read_own(path: Path, *, owner: FileOwner | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file that ``open_own`` opens.

    Raises:
        FormatError: it is larger than ``max_bytes``; none of our files is.
        InsecurePathError, OSError: as ``open_own``.
    """
    return read_whole(open_own(path, owner=owner), path, max_bytes=max_bytes)


def read_whole(fd: int, path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read an open file, and close it; ``path`` is for messages.

    Raises:
        FormatError: it is larger than ``max_bytes``.
        OSError: it cannot be read.
    """
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size  # allocate at most this much memory, at once
        raw = file.read(min(size, max_bytes) + 1)
        if size < len(raw) <= max_bytes:  # it grows, or has no size
            raw += file.read(max_bytes + 1 - len(raw))
    if len(raw) > max_bytes:
        raise FormatError(
            f"{path} has more than {max_bytes} bytes; none that Vitals writes has",
            hint=f"`ls -l {path}` shows whose it is; move it away",
        )
    return raw


def ensure_own_dir(path: Path, *, read: int | None = None) -> Path:
    """Create the directory if missing, and check that only this user may write there.

    An existing directory of ours is made unwritable for others. A link of this user, or root, is
    followed, such as to another disk.

    Args:
        path: the directory; its parent exists.
        read: mode bits of a new one for group and others; None for those of the parent directory.

    Raises:
        InsecurePathError: it belongs to another user, or is another user's link.
        OSError: it cannot be created or opened.
    """
    owner = FileOwner.current_user()
    with contextlib.suppress(FileExistsError):  # whatever is there is judged below
        path.mkdir(mode=0o700)
        readable_by = (path.parent.stat().st_mode if read is None else read) & _READABLE
        if readable_by:
            path.chmod(0o700 | readable_by | (path.stat().st_mode & stat.S_ISGID))
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode):
        owner.check_uid(path, link)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        owner.check_uid(path, status)
        if owner.is_writable_by_others(status):
            with contextlib.suppress(OSError):  # a file system that knows no modes
                os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~_WRITABLE)
    finally:
        os.close(fd)
    return path


def replace_file(path: Path, raw: bytes, *, mode: int = 0o644) -> None:
    """Replace the file whole, durably: after a crash it holds the old bytes or the new.

    A link under its name, or a file of another user, is replaced, never followed.
    """
    temporary = f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            try:
                write_all(fd, raw, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        _sync_directory(folder)
    finally:
        os.close(folder)


def sync_folder(path: Path) -> None:
    """Sync the names in the directory, if its file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_directory(fd)
    finally:
        os.close(fd)


def _sync_directory(folder: int) -> None:
    """Sync an open directory to the disk, unless its file system refuses."""
    with contextlib.suppress(OSError):  # some network file systems refuse to
        os.fsync(folder)


def write_all(fd: int, raw: bytes, offset: int) -> None:
    """Write all bytes to the open file at the offset, in as many calls as needed."""
    view = memoryview(raw)
    while view:
        num = os.pwrite(fd, view, offset)
        view, offset = view[num:], offset + num


def write_new_private(path: Path, raw: bytes) -> None:
    """Create a file that only this user may read, and sync it; remove it if a write fails.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be written.
    """
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(fd, raw, 0)
        os.fsync(fd)
    except OSError:
        path.unlink()  # the next start would read a partial key as damaged
        raise
    finally:
        os.close(fd)


def decode_key(raw: bytes, path: Path, num_bytes: int, hint: str) -> bytes:
    """Return the key in a file's bytes: hexadecimal, of ``num_bytes`` bytes.

    Raises:
        FormatError: it is not hexadecimal, or has another length.
    """
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != num_bytes:
        raise FormatError(f"{path} must hold {2 * num_bytes} hexadecimal characters", hint=hint)
    return key


def mac_of(key: bytes, *parts: bytes) -> str:
    """Sign the contents of a private file: HMAC-SHA256 over the parts, each with its length."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.hexdigest()


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


def _open_checked(
    path: Path,
    flags: int,
    mode: int,
    owner: FileOwner,
    *,
    private: bool = False,
    any_links: bool = False,
) -> int:
    """Open a file; refuse it if its owner or permissions are insecure."""
    quiet = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags & ~os.O_TRUNC | quiet, mode)
    except OSError as error:
        _raise_if_insecure(path, owner, error, private=private)
        raise
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode) and owner.owns(status):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _check_path_security(path, status, stat.S_ISREG, "file", owner, private=private)
        is_written = flags & os.O_ACCMODE != os.O_RDONLY
        if is_written and status.st_nlink > 1 and not any_links:
            raise InsecurePathError(
                f"{path} has {status.st_nlink} names (hard links); what is written must have one",
                hint=f"cp {path} {path}.new && mv {path}.new {path}",
            )
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _raise_if_insecure(path: Path, owner: FileOwner, error: OSError, *, private: bool) -> None:
    """Raise an error for a file that cannot be opened because it is insecure."""
    try:
        status = path.lstat()
    except OSError:
        return
    if error.errno != errno.EEXIST:
        try:
            _check_path_security(path, status, stat.S_ISREG, "file", owner, private=private)
        except InsecurePathError as refused:
            raise refused from error


def _check_path_security(
    path: Path,
    status: os.stat_result,
    is_kind: Callable[[int], bool],
    kind: str,
    owner: FileOwner,
    *,
    private: bool,
) -> None:
    """Raise an error for a path that other users own, or can access."""
    if not is_kind(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else f"not a {kind}"
        raise InsecurePathError(f"{path} is {what}; it must be a {kind}", hint=f"remove {path}")
    if not private:
        owner.check(path, status)
        return
    if status.st_uid != owner.uid:
        raise InsecurePathError(
            f"{path} belongs to user {status.st_uid}; it must belong to {owner.uid}",
            hint="set VITALS_SHM to a folder of your own",
        )
    if status.st_mode & 0o077:
        raise InsecurePathError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; other users can access it",
            hint=f"chmod go-rwx {path}",
        )
