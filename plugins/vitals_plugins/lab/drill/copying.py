"""Copies of the user's working directory and caches that a drill may change.

The source is only read. Small files are copied; large files and directories of data become symbolic
links, whose targets the sandbox cannot change.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from trainvitals.errors import StorageError, UsageError
from trainvitals.io.rundir import is_run_id
from trainvitals.printable import printable

LARGE_BYTES = 16 << 20
"""Larger files are linked, not copied."""
MAX_DATA_FILES = 2_000
"""A directory with more files, and no code before them, is linked as a whole."""
MAX_FILES, MAX_BYTES = 20_000, 2 << 30
"""A copy with more is refused."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODE = (".py", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".sh", ".ipynb")
_OMITTED = {
    **dict.fromkeys((".git", ".hg", ".svn", ".jj", ".dvc"), "version control"),
    **dict.fromkeys((".ssh", ".gnupg", ".netrc", ".aws"), "credentials"),
    **dict.fromkeys(("__pycache__", ".cache", ".mypy_cache", ".pytest_cache"), "cache"),
    **dict.fromkeys((".ruff_cache", ".tox", ".nox", "node_modules"), "cache"),
}
_TRACKERS = ("wandb", "mlruns", ".aim", ".neptune", ".cometml-runs", "lightning_logs")
_RUN_FILES = ("run.json", "plan.jsonl", "command.key")
_TOKENS = ("token", "stored_tokens")
_SHARED_CACHES = {"huggingface", "torch", "hub", "datasets"}
"""Directories of a cache that get new entries next to the present ones."""


class CopiedProject(msgspec.Struct, kw_only=True):
    """Result of a copy; paths are relative to the source."""

    num_files: int = 0
    num_bytes: int = 0
    linked: list[str] = msgspec.field(default_factory=list)
    """Read-only: large files, directories of data, environments, and links to places outside."""
    changed: list[str] = msgspec.field(default_factory=list)
    """Files that another program changed while they were copied."""
    omitted: dict[str, str] = msgspec.field(default_factory=dict)
    """Why a file or directory is not in the copy, by path."""


def copy_project(source: Path, target: Path, *, exclude: Iterable[Path] = ()) -> CopiedProject:
    """Copy the working directory of a training to a new directory.

    Version control, caches, files of trackers and run directories of Vitals are omitted.

    Args:
        source: directory to copy.
        target: new directory, outside of the source; its parent exists.
        exclude: further files and directories to omit, such as ``VITALS_DIR``.

    Raises:
        UsageError: the source is not a directory, overlaps the target, or is above the limits.
        StorageError: the target cannot be created, or the disk is full; the target is deleted.
    """
    source, target = source.resolve(), target.parent.resolve() / target.name
    if not source.is_dir():
        raise UsageError(f"{source} is not a directory", hint="run the drill in your project")
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise UsageError(
            f"the copy {target} and the project {source} overlap",
            hint="set TMPDIR to a directory outside of the project",
        )
    return _Copier(source, target, exclude={path.absolute() for path in exclude}).copy()


def mirror_cache(source: Path, target: Path) -> CopiedProject:
    """Create a directory with links to all files of a cache, except its locks and tokens.

    Programs can read what is cached, and write new files next to the links.

    Raises:
        StorageError: as ``copy_project``.
    """
    return _Copier(source.resolve(), target, is_cache=True).copy()


def translate_path(text: str, source: Path, target: Path) -> str:
    """Return an argument or variable in which absolute paths of the source name the copy."""
    pattern = rf"(?<![^=:,]){re.escape(str(source))}(?![^/=:,])"
    return re.sub(pattern, lambda _: str(target), text)


class _Copier:
    """One copy in progress."""

    def __init__(
        self, source: Path, target: Path, *, exclude: Collection[Path] = (), is_cache: bool = False
    ) -> None:
        self._source, self._target = source, target
        self._exclude, self._is_cache = exclude, is_cache
        self._result = CopiedProject()
        self._links: list[Path] = []

    def copy(self) -> CopiedProject:
        """Copy everything; delete the target if that fails."""
        is_created = False
        try:
            self._target.mkdir(mode=0o700)
            is_created = True
            self._copy_directory(self._source)
            for path in self._links:  # when their destinations are copied
                self._copy_link(path)
        except (OSError, UsageError) as error:
            if is_created:
                shutil.rmtree(self._target, ignore_errors=True)
            if isinstance(error, UsageError):
                raise
            raise StorageError(
                f"{self._target}: the copy cannot be written: {error.strerror}",
                hint="set TMPDIR to a directory with free space",
                code="V302" if error.errno in _FULL else "",
            ) from error
        self._result.linked.sort()
        return self._result

    def _copy_directory(self, directory: Path) -> None:
        """Copy the entries of a directory, then its mode and time."""
        try:
            status, names = directory.stat(), sorted(os.listdir(directory))  # noqa: PTH208
        except OSError as error:
            self._omit(directory, f"cannot be read: {error.strerror}")
            return
        target = self._in_copy(directory)
        for name in names:
            self._copy_entry(directory / name)
        target.chmod(status.st_mode & 0o777 | 0o700)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _copy_entry(self, path: Path) -> None:
        """Copy, link or omit one entry of a directory."""
        try:
            status = path.lstat()
            reason = self._why_omitted(path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        if reason:
            self._omit(path, reason)
        elif stat.S_ISLNK(status.st_mode):
            self._links.append(path)
        elif stat.S_ISDIR(status.st_mode):
            if self._is_linked_directory(path):
                self._link(path, path)
            else:
                self._in_copy(path).mkdir(mode=0o700)
                self._copy_directory(path)
        elif not stat.S_ISREG(status.st_mode):
            self._omit(path, "not a regular file")
        elif self._is_cache or status.st_size > LARGE_BYTES:
            self._link(path, path)
        else:
            self._copy_file(path)

    def _why_omitted(self, path: Path) -> str:
        """Return why an entry is not copied; "" if it is."""
        if path in self._exclude:
            return "excluded"
        if self._is_cache:
            return "lock or token" if path.name in _TOKENS or path.suffix == ".lock" else ""
        if path.name in _OMITTED:
            return _OMITTED[path.name]
        if path.name in _TRACKERS and path.is_dir() and not (path / "__init__.py").exists():
            return "files of an experiment tracker"
        if (path / "CACHEDIR.TAG").exists() and not _is_environment(path):
            return "cache"
        is_run = is_run_id(path.name) and any((path / name).exists() for name in _RUN_FILES)
        return "run directory of Vitals" if is_run or path.name.startswith(".launches") else ""

    def _is_linked_directory(self, path: Path) -> bool:
        """Return whether a directory is linked as a whole: an environment, or many data files."""
        if self._is_cache and _SHARED_CACHES.issuperset(path.relative_to(self._source).parts):
            return False
        if not self._is_cache and _is_environment(path):
            return True  # not omitted: the command may name a program in it
        num_files = 0
        for _, _, names in os.walk(path):
            num_files += len(names)
            if not self._is_cache and any(name.endswith(_CODE) for name in names):
                return False
            if num_files > MAX_DATA_FILES:
                return True
        return False

    def _copy_file(self, path: Path) -> None:
        """Copy a regular file with mode and time; report a change meanwhile."""
        target = self._in_copy(path)
        try:
            # It may have been replaced: a link is not followed, and a FIFO does not block.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as reader, target.open("xb") as writer:
                before = os.fstat(fd)
                self._count_file(before.st_size)
                writer.write(reader.read(before.st_size))  # not to the end: it may be growing
                after = os.fstat(fd)
            target.chmod(before.st_mode & 0o777 | 0o600)
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as error:
            if error.errno in _FULL:
                raise
            target.unlink(missing_ok=True)
            self._omit(path, f"cannot be read: {error.strerror}")
            return
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self._result.changed.append(self._name(path))

    def _count_file(self, size: int) -> None:
        """Count a copied file against the limits."""
        self._result.num_files += 1
        self._result.num_bytes += size
        if self._result.num_files > MAX_FILES or self._result.num_bytes > MAX_BYTES:
            raise UsageError(
                f"{self._source} has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB to copy",
                hint="run the drill in the directory of the training script, and move data to "
                "directories without code",
            )

    def _copy_link(self, path: Path) -> None:
        """Create a symbolic link that names the same file in the copy, or the same one outside."""
        target, real = self._in_copy(path), Path(os.path.realpath(path))
        if not real.exists():
            target.symlink_to(path.readlink())  # broken before, and broken in the copy
        elif not real.is_relative_to(self._source):
            self._link(path, real)
        elif os.path.lexists(self._in_copy(real)):
            target.symlink_to(os.path.relpath(self._in_copy(real), target.parent))
        else:
            self._omit(path, f"a link to {self._name(real)}, which is not copied")

    def _link(self, path: Path, destination: Path) -> None:
        """Create a symbolic link to a file or directory outside of the copy."""
        self._in_copy(path).symlink_to(destination)
        self._result.linked.append(self._name(path))

    def _omit(self, path: Path, reason: str) -> None:
        self._result.omitted[self._name(path)] = reason

    def _name(self, path: Path) -> str:
        return printable(str(path.relative_to(self._source)))

    def _in_copy(self, path: Path) -> Path:
        return self._target / path.relative_to(self._source)


def _is_environment(path: Path) -> bool:
    """Return whether a directory is a virtual environment of Python or conda."""
    return (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
