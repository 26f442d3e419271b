"""Runs one command that can write only in listed directories: ``python landlock.py JSON COMMAND``.

A separate program: the restrictions hold for the process that sets them and all its children, and
cannot be removed. It imports only the standard library, so that ``python -I -S`` can start it.

Two layers. Landlock is required. A mount namespace is added if the kernel allows one: everything
except the listed directories becomes read-only, also for ``chmod``, times and attributes, which
Landlock does not control, and ``/dev/shm`` becomes an empty private one.
"""

import ctypes
import glob
import json
import os
import stat
import sys
from collections.abc import Iterable

MIN_ABI = 3
"""Before Linux 6.2, Landlock does not control ``truncate``."""
FAILED = 125
"""Exit code if the restrictions cannot be set; the command is not started then."""
SHARED_MEMORY = "/dev/shm"
DEVICES = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/kfd", "/dev/dxg", "/dev/gdrdrv"),
    *("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/renderD*", "/dev/infiniband/*"),
    *("/dev/accel/*", "/dev/habanalabs/*"),
)

_WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
_REMOVE_FILE, _MAKE_REGULAR = 1 << 5, 1 << 8
_MAKE_DEVICES = 1 << 6 | 1 << 11
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 14)) | _TRUNCATE
"""All rights that change files: write, remove, make, and move between directories."""
_SCOPED = 0b11
"""No abstract UNIX sockets of, and no signals to, processes outside."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _MOUNT_SETATTR = 444, 445, 446, 442
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NO_SETUID_NO_DEVICES = 0x2 | 0x4
_MAX_SHARED_DIRECTORIES = 64

_LIBC = ctypes.CDLL(None, use_errno=True)


def read_abi() -> int:
    """Return the version of Landlock in this kernel; 0 without Landlock."""
    return max(int(_LIBC.syscall(_CREATE_RULESET, None, 0, 1)), 0)


def restrict_writes(writable: Iterable[str], *, shares_memory: bool) -> None:
    """Deny this process and its children all writes outside of the directories.

    Args:
        writable: existing directories, not links.
        shares_memory: whether ``/dev/shm`` is the one of the whole machine.

    Raises:
        OSError: the kernel refused.
    """
    abi = read_abi()
    handled = _CHANGES | (_IOCTL_DEV if abi >= 5 else 0)
    attributes = (ctypes.c_uint64 * 3)(handled, 0, _SCOPED)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_LIBC.syscall, _CREATE_RULESET, ctypes.byref(attributes), size, 0)
    for path in writable:
        _allow(ruleset, path, _CHANGES & ~_MAKE_DEVICES, os.O_DIRECTORY | os.O_NOFOLLOW)
    for path in (path for pattern in DEVICES for path in glob.glob(pattern)):  # noqa: PTH207
        if stat.S_ISCHR(os.stat(path).st_mode):  # noqa: PTH116 - pathlib would cost its import
            _allow(ruleset, path, handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
    if os.path.isdir(SHARED_MEMORY):  # noqa: PTH112
        shared = _WRITE_FILE | _TRUNCATE | _REMOVE_FILE | _MAKE_REGULAR
        rights = shared if shares_memory else _CHANGES & ~_MAKE_DEVICES
        _allow(ruleset, SHARED_MEMORY, rights, os.O_DIRECTORY)
    set_no_new_privileges = 38
    _call(_LIBC.prctl, set_no_new_privileges, 1, 0, 0, 0)
    _call(_LIBC.syscall, _RESTRICT_SELF, ruleset, 0)


def isolate_mounts(writable: Iterable[str]) -> None:
    """Make all mounts read-only except the directories, and ``/dev/shm`` private.

    Raises:
        OSError: the kernel does not allow it; some of it may have been done.
    """
    uid, gid, cwd = os.geteuid(), os.getegid(), os.getcwd()  # noqa: PTH109
    try:
        _call(_LIBC.unshare, _NEW_MOUNTS)
    except PermissionError:
        _call(_LIBC.unshare, _NEW_MOUNTS | _NEW_USER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    directories = list(writable)
    if os.path.isdir(SHARED_MEMORY):  # noqa: PTH112
        _replace_shared_memory()
        directories.append(SHARED_MEMORY)
    for path in directories[: len(directories)]:
        if path != SHARED_MEMORY:
            _mount(path, path, None, _BIND)
    _set_read_only("/", clear=False, recursive=True)
    for path in directories:
        _set_read_only(path, clear=True, recursive=False)
    os.chdir(cwd)  # the old one is below the new mounts, and read-only


def _replace_shared_memory() -> None:
    """Mount an empty ``/dev/shm`` of the same size; data directories stay readable in it."""
    status = os.statvfs(SHARED_MEMORY)
    names = []
    with os.scandir(SHARED_MEMORY) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    names = [name for name in names if not name.startswith("trainvitals-")]
    opened = {}
    for name in names[:_MAX_SHARED_DIRECTORIES]:
        opened[name] = os.open(f"{SHARED_MEMORY}/{name}", os.O_PATH | os.O_DIRECTORY)
    options = f"size={status.f_frsize * status.f_blocks},mode=1777"
    _mount("tmpfs", SHARED_MEMORY, "tmpfs", _NO_SETUID_NO_DEVICES, options)
    for name, fd in opened.items():
        os.mkdir(f"{SHARED_MEMORY}/{name}")  # noqa: PTH102
        _mount(f"/proc/self/fd/{fd}", f"{SHARED_MEMORY}/{name}", None, _BIND | _RECURSIVE)
        os.close(fd)


def _set_read_only(path: str, *, clear: bool, recursive: bool) -> None:
    """Make a mount read-only, with those below it, or writable again."""
    at_cwd, at_recursive, read_only = -100, 0x8000, 1
    attributes = (ctypes.c_uint64 * 4)(0 if clear else read_only, read_only if clear else 0, 0, 0)
    flags = at_recursive if recursive else 0
    arguments = (at_cwd, path.encode(), flags, ctypes.byref(attributes), 32)
    _call(_LIBC.syscall, _MOUNT_SETATTR, *arguments)


def _mount(source: str | None, path: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    encoded = [text.encode() if text is not None else None for text in (source, path, kind)]
    _call(_LIBC.mount, *encoded, ctypes.c_ulong(flags), options.encode() or None)


def _allow(ruleset: int, path: str, rights: int, flags: int = 0) -> None:
    """Add a rule: these rights at and below the path."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
    path_beneath = 1
    _call(_LIBC.syscall, _ADD_RULE, ruleset, path_beneath, rule, 0)
    os.close(fd)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> int:
    """Call a function of libc and raise its error."""
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def enter(writable: list[str]) -> dict[str, object]:
    """Set all restrictions for this process; return which of them hold.

    Raises:
        OSError: Landlock is not available.
    """
    mounts = ""
    try:
        if any(f"{path}/".startswith(f"{SHARED_MEMORY}/") for path in writable):
            mounts = f"a writable directory is in {SHARED_MEMORY}"
        else:
            isolate_mounts(writable)
    except OSError as error:
        mounts = str(error)
    restrict_writes(writable, shares_memory=bool(mounts))
    return {"abi": read_abi(), "without_mounts": mounts}


def main(arguments: list[str]) -> int:
    """Set the restrictions, then become the command; without one, print what holds."""
    writable, *command = json.loads(arguments[0]), *arguments[1:]
    os.closerange(3, 1 << 16)  # Landlock does not restrict files that are already open
    try:
        if not command:
            return _print_probe(writable)
        enter(writable)
    except OSError as error:
        print(f"vitals drill: the sandbox cannot be set: {error}", file=sys.stderr)  # noqa: T201
        return FAILED
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"vitals drill: {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return 127


def _print_probe(writable: list[str]) -> int:
    """Print which restrictions hold, after an attempt to write next to a writable directory."""
    result = enter(writable)
    try:
        os.mkdir(f"{writable[0]}-outside")  # noqa: PTH102
        result["leak"] = True
    except OSError:
        result["leak"] = False  # as it must be
    print(json.dumps(result))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
