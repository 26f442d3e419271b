"""Copies of the user's working directory and caches that a drill may change.

Nothing in the source is changed, not even a time of change. Small files are copied; large files and
directories of data become symbolic links, whose targets the sandbox can only read.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trainvitals.errors import StorageError, UsageError
from trainvitals.io.rundir import is_run_id

LARGE_BYTES = 16 << 20
"""Larger files are linked, not copied."""
MAX_DATA_FILES = 2_000
"""A directory with more files and no code among them is linked as a whole."""
MAX_CACHE_FILES = 20_000
"""A directory of a cache with more files is linked as a whole."""
MAX_FILES = 20_000
MAX_BYTES = 2 << 30
"""A copy with more files or bytes is refused."""

_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODE = (".py", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".sh", ".ipynb")
_VERSION_CONTROL = (".git", ".hg", ".svn", ".bzr", ".jj", ".dvc")
_CACHES = (
    *("__pycache__", ".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox"),
    *(".ipynb_checkpoints", "node_modules", ".eggs"),
)
_TRACKERS = ("wandb", "mlruns", ".aim", ".neptune", ".cometml-runs", "lightning_logs")
_SECRETS = (".ssh", ".gnupg", ".netrc", ".aws")
_TOKENS = ("token", "stored_tokens")
_RUN_FILES = ("run.json", "plan.jsonl", "command.key")


class CopiedProject(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a copy; paths are relative to the source."""

    num_files: int
    num_bytes: int
    linked: tuple[str, ...]
    """Read-only: large files, directories of data, environments, and links to places outside."""
    changed: tuple[str, ...]
    """Files that another program changed while they were copied."""
    omitted: dict[str, str]
    """Why a file or directory is missing in the copy, by path."""


def copy_project(source: Path, target: Path, *, exclude: Iterable[Path] = ()) -> CopiedProject:
    """Copy the working directory of a training to a new directory.

    Version control, caches, files of trackers and run directories of Vitals are omitted.

    Args:
        source: directory to copy; it is only read.
        target: new directory, outside of the source; its parent must exist.
        exclude: further files and directories to omit, such as ``VITALS_DIR``.

    Raises:
        UsageError: the source is not a directory, contains the target or is in it, or is larger
            than the limits.
        StorageError: the disk is full, or the target cannot be created; it is deleted again.
    """
    source, target = source.resolve(), target.absolute()
    if not source.is_dir():
        raise UsageError(f"{source} is not a directory", hint="run the drill in your project")
    place = target.parent.resolve() / target.name
    if place.is_relative_to(source) or source.is_relative_to(place):
        raise UsageError(
            f"the copy {place} and the project {source} overlap",
            hint="set TMPDIR to a directory outside of the project",
        )
    copier = _Copier(source, place, {path.absolute() for path in exclude})
    return copier.copy()


def mirror_cache(source: Path, target: Path) -> CopiedProject:
    """Create a directory with links to all files of a cache, except its locks and tokens.

    Programs read what is cached, and write new files next to the links.

    Raises:
        StorageError: the disk is full, or the target cannot be created.
    """
    return _Copier(source.resolve(), target, frozenset(), is_cache=True).copy()


def translate_path(text: str, source: Path, target: Path) -> str:
    """Return an argument or variable in which an absolute path of the source names the copy.

    Args:
        text: for example ``/project/train.py``, ``--out=/project/out`` or ``/a:/project``.
        source: the project.
        target: its copy.
    """
    parts = text.replace("=", "\0=\0").replace(":", "\0:\0").split("\0")
    for index, part in enumerate(parts):
        if part == str(source) or part.startswith(f"{source}/"):
            parts[index] = f"{target}{part.removeprefix(str(source))}"
    return "".join(parts)


class _Copier:
    """One copy in progress."""

    def __init__(
        self, source: Path, target: Path, exclude: Iterable[Path], *, is_cache: bool = False
    ) -> None:
        self._source, self._target = source, target
        self._exclude, self._is_cache = frozenset(exclude), is_cache
        self._num_files = self._num_bytes = 0
        self._linked: list[str] = []
        self._changed: list[str] = []
        self._omitted: dict[str, str] = {}
        self._links: list[Path] = []

    def copy(self) -> CopiedProject:
        """Copy everything; delete the target if it cannot be completed."""
        try:
            self._target.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(
                f"{self._target}: the copy cannot be created: {error.strerror}",
                hint="set TMPDIR to a writable directory",
            ) from error
        try:
            self._copy_directory(self._source)
            for path in self._links:
                self._copy_link(path)
        except OSError as error:
            shutil.rmtree(self._target, ignore_errors=True)
            raise StorageError(
                f"{self._target}: the copy cannot be written: {error.strerror}",
                hint="free space on this disk, or set TMPDIR to a directory on another one",
                code="V302" if error.errno in _FULL else "",
            ) from error
        except UsageError:
            shutil.rmtree(self._target, ignore_errors=True)
            raise
        return CopiedProject(
            num_files=self._num_files,
            num_bytes=self._num_bytes,
            linked=tuple(sorted(self._linked)),
            changed=tuple(self._changed),
            omitted=self._omitted,
        )

    def _copy_directory(self, directory: Path) -> None:
        """Copy the entries of a directory, then its mode and time."""
        try:
            with os.scandir(directory) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            status = directory.stat()
        except OSError as error:
            self._omit(directory, f"cannot be read: {error.strerror}")
            return
        target = self._in_copy(directory)
        for entry in entries:
            self._copy_entry(Path(entry.path))
        target.chmod(stat.S_IMODE(status.st_mode) & 0o777 | 0o700)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _copy_entry(self, path: Path) -> None:
        """Copy, link or omit one entry of a directory."""
        try:
            status = path.lstat()
        except OSError as error:
            self._omit(path, f"cannot be read: {error.strerror}")
            return
        is_directory = stat.S_ISDIR(status.st_mode)
        reason = self._why_omitted(path, is_directory=is_directory)
        if reason:
            self._omit(path, reason)
        elif stat.S_ISLNK(status.st_mode):
            self._links.append(path)  # their targets must be copied first
        elif is_directory:
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

    def _why_omitted(self, path: Path, *, is_directory: bool) -> str:
        """Return why an entry is not copied; "" if it is."""
        if path in self._exclude:
            return "excluded"
        name = path.name
        if self._is_cache:
            return "lock or token" if name in _TOKENS or path.suffix == ".lock" else ""
        if name in _VERSION_CONTROL:
            return "version control"
        if name in _SECRETS:
            return "credentials"
        if not is_directory:
            return ""
        if name in _CACHES or ((path / "CACHEDIR.TAG").is_file() and not _is_environment(path)):
            return "cache"
        if name in _TRACKERS and not (path / "__init__.py").exists():
            return "files of an experiment tracker"
        is_run = is_run_id(name) and any((path / file).exists() for file in _RUN_FILES)
        return "run directory of Vitals" if is_run or name.startswith(".launches") else ""

    def _is_linked_directory(self, path: Path) -> bool:
        """Return whether a directory is linked as a whole: an environment, or many data files."""
        if not self._is_cache and _is_environment(path):
            return True  # not omitted: the command may name a program in it
        num_files = 0
        for _, _, names in os.walk(path):
            num_files += len(names)
            if not self._is_cache and any(name.endswith(_CODE) for name in names):
                return False
            if num_files > (MAX_CACHE_FILES if self._is_cache else MAX_DATA_FILES):
                return True
        return False

    def _copy_file(self, path: Path) -> None:
        """Copy a regular file with mode and time; report a change meanwhile."""
        target = self._in_copy(path)
        try:
            # The entry may have been replaced: by a link, which is not followed, or a FIFO, which
            # would block.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb", buffering=0) as reader, target.open("xb") as writer:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                self._count_file(before.st_size)
                rest = before.st_size  # not to the end: it may grow faster than it is read
                while rest and (chunk := reader.read(min(rest, _CHUNK_BYTES))):
                    writer.write(chunk)
                    rest -= len(chunk)
                after = os.fstat(fd)
            target.chmod(stat.S_IMODE(before.st_mode) & 0o777 | 0o600)
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as error:
            if error.errno in _FULL:
                raise
            target.unlink(missing_ok=True)
            self._omit(path, f"cannot be read: {error.strerror}")
            return
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self._changed.append(self._relative(path))

    def _copy_link(self, path: Path) -> None:
        """Create a symbolic link that names the same file in the copy, or the same one outside."""
        try:
            text, real = os.readlink(path), Path(os.path.realpath(path))  # noqa: PTH115
        except OSError as error:
            self._omit(path, f"cannot be read: {error.strerror}")
            return
        target = self._in_copy(path)
        if not real.exists():
            target.symlink_to(text)  # broken before, and broken in the copy
        elif not real.is_relative_to(self._source):
            self._link(path, real)
        elif os.path.lexists(self._in_copy(real)):
            target.symlink_to(os.path.relpath(self._in_copy(real), target.parent))
        else:
            self._omit(path, f"a link to {self._relative(real)}, which is not copied")

    def _link(self, path: Path, destination: Path) -> None:
        """Create a symbolic link to a file or directory outside of the copy."""
        self._in_copy(path).symlink_to(destination)
        self._linked.append(self._relative(path))

    def _count_file(self, size: int) -> None:
        """Count a copied file against the limits."""
        self._num_files += 1
        self._num_bytes += size
        if self._num_files > MAX_FILES or self._num_bytes > MAX_BYTES:
            raise UsageError(
                f"{self._source} has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB to copy",
                hint="run the drill in the directory of the training script, and move data out of "
                "the directories that contain code",
            )

    def _omit(self, path: Path, reason: str) -> None:
        self._omitted[self._relative(path)] = reason

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._source))

    def _in_copy(self, path: Path) -> Path:
        return self._target / path.relative_to(self._source)


def _is_environment(path: Path) -> bool:
    """Return whether a directory is a virtual environment of Python or conda."""
    return (path / "pyvenv.cfg").is_file() or (path / "conda-meta").is_dir()
