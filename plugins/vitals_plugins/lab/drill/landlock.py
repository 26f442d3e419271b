"""Runs a command that can write only in some directories: ``python landlock.py JSON COMMAND``.

The restrictions hold for this process and all its children, and cannot be removed. Only the
standard library is imported, for ``python -I -S``.

Landlock is required. A mount namespace is added if the kernel allows one: other directories become
read-only also for ``chmod``, times and attributes, which Landlock does not control, and
``/dev/shm`` becomes a private one.
"""

import ctypes
import glob
import json
import os
import stat
import sys
from collections.abc import Iterable

MIN_ABI = 3
"""Earlier versions, before Linux 6.2, do not control ``truncate``."""
FAILED = 125
"""Exit code if the restrictions cannot be set; the command is not started then."""
SHARED_MEMORY = "/dev/shm"
DEVICES = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/kfd", "/dev/dxg", "/dev/gdrdrv"),
    *("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/renderD*", "/dev/infiniband/*"),
    *("/dev/accel/*", "/dev/habanalabs/*"),
)

# linux/landlock.h, linux/mount.h, sched.h
_WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 14)) | _TRUNCATE
_CHANGES_OF_DIRECTORIES = _CHANGES & ~(1 << 6 | 1 << 11)  # no device nodes
_CHANGES_OF_MEMORY = _WRITE_FILE | _TRUNCATE | 1 << 5 | 1 << 8  # make and remove files
_NO_SIGNALS_NO_ABSTRACT_SOCKETS = 0b11
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _MOUNT_SETATTR = 444, 445, 446, 442
_NEW_MOUNTS_AND_IPC, _NEW_USER = 0x00020000 | 0x08000000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _NO_SETUID_NO_DEVICES = 0x1000, 0x4000, 0x40000, 0x2 | 0x4
_NO_NEW_PRIVILEGES = 38

_LIBC = ctypes.CDLL(None, use_errno=True)


def restrict_writes(writable: Iterable[str]) -> None:
    """Deny this process and its children changes of files outside of the directories.

    Raises:
        OSError: the kernel refused, or its Landlock is too old.
    """
    abi = int(_LIBC.syscall(_CREATE_RULESET, None, 0, 1))
    if abi < MIN_ABI:
        raise OSError(0, f"it needs Landlock of Linux 6.2; this kernel has version {max(abi, 0)}")
    handled = _CHANGES | (_IOCTL_DEV if abi >= 5 else 0)
    attributes = (ctypes.c_uint64 * 3)(handled, 0, _NO_SIGNALS_NO_ABSTRACT_SOCKETS)
    size = 24 if abi >= 6 else 8
    ruleset = _call(_LIBC.syscall, _CREATE_RULESET, ctypes.byref(attributes), size, 0)
    for path in writable:
        _allow(ruleset, path, _CHANGES_OF_DIRECTORIES, os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.path.isdir(SHARED_MEMORY):  # noqa: PTH112 - pathlib would cost its import
        _allow(ruleset, SHARED_MEMORY, _CHANGES_OF_MEMORY, os.O_DIRECTORY)
    for path in (path for pattern in DEVICES for path in glob.glob(pattern)):  # noqa: PTH207
        if stat.S_ISCHR(os.stat(path).st_mode):  # noqa: PTH116
            _allow(ruleset, path, handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
    _call(_LIBC.prctl, _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(_LIBC.syscall, _RESTRICT_SELF, ruleset, 0)


def isolate_mounts(writable: Iterable[str], small: tuple[str, int] | None = None) -> None:
    """Make everything read-only except the directories, and ``/dev/shm`` private.

    Args:
        writable: directories in which programs may write.
        small: directory below one of them that becomes a disk in memory, and its bytes.

    Raises:
        OSError: the kernel does not allow it; a part may have been done.
    """
    uid, gid, cwd = os.geteuid(), os.getegid(), os.getcwd()  # noqa: PTH109
    try:
        _call(_LIBC.unshare, _NEW_MOUNTS_AND_IPC)
    except PermissionError:
        _call(_LIBC.unshare, _NEW_MOUNTS_AND_IPC | _NEW_USER)
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    for path in writable:
        _mount(path, path, None, _BIND)
    _set_read_only("/", recursive=True)
    for path in writable:
        _set_read_only(path, clear=True)
    if os.path.isdir(SHARED_MEMORY):  # noqa: PTH112
        _replace_shared_memory()
    if small is not None:
        options = f"size={small[1]},mode=0700"
        _mount("tmpfs", small[0], "tmpfs", _NO_SETUID_NO_DEVICES, options)
    os.chdir(cwd)  # otherwise it is the read-only directory below the new mount


def _replace_shared_memory() -> None:
    """Mount an empty ``/dev/shm`` of the same size; directories of data can be read in it."""
    status = os.statvfs(SHARED_MEMORY)
    with os.scandir(SHARED_MEMORY) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    directories = {
        name: os.open(f"{SHARED_MEMORY}/{name}", os.O_PATH | os.O_DIRECTORY)
        for name in names
        if not name.startswith("trainvitals-")
    }
    options = f"size={status.f_frsize * status.f_blocks},mode=1777"
    _mount("tmpfs", SHARED_MEMORY, "tmpfs", _NO_SETUID_NO_DEVICES, options)
    for name, fd in directories.items():
        path = f"{SHARED_MEMORY}/{name}"
        os.mkdir(path)  # noqa: PTH102
        _mount(f"/proc/self/fd/{fd}", path, None, _BIND)
        _set_read_only(path)


def _set_read_only(path: str, *, clear: bool = False, recursive: bool = False) -> None:
    """Make a mount read-only, or writable again."""
    attributes = (ctypes.c_uint64 * 4)(not clear, clear, 0, 0)
    flags, at_cwd = 0x8000 if recursive else 0, -100
    encoded = os.fsencode(path), flags, ctypes.byref(attributes), 32
    _call(_LIBC.syscall, _MOUNT_SETATTR, at_cwd, *encoded)


def _mount(source: str | None, path: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    encoded = [os.fsencode(text) if text is not None else None for text in (source, path, kind)]
    _call(_LIBC.mount, *encoded, ctypes.c_ulong(flags), options.encode() or None)


def _allow(ruleset: int, path: str, rights: int, flags: int = 0) -> None:
    """Add a rule: these rights at and below the path."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
    _call(_LIBC.syscall, _ADD_RULE, ruleset, 1, rule, 0)
    os.close(fd)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> int:
    """Call a function of libc and raise its error."""
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _can_isolate_mounts(writable: list[str]) -> bool:
    """Try it in a child: halfway, a process might be unable to write anywhere."""
    child = os.fork()
    if child == 0:
        try:
            isolate_mounts(writable)
            os._exit(0 if all(os.access(path, os.W_OK) for path in writable) else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def main(arguments: list[str]) -> int:
    """Set the restrictions, then become the command."""
    (writable, small), *command = json.loads(arguments[0]), *arguments[1:]
    # Files that are already open are not restricted.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # noqa: PTH208
    try:
        if _can_isolate_mounts(writable):
            isolate_mounts(writable, small)
            writable = [*writable, *filter(os.path.isdir, [SHARED_MEMORY])]
        restrict_writes(writable)
    except OSError as error:
        print(f"the sandbox of the drill cannot be set: {error.strerror}", file=sys.stderr)  # noqa: T201
        return FAILED
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
