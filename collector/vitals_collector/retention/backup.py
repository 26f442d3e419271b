"""Copies a store while a collector writes to it: one moment of it, checked, and then in place.

SQLite's own backup reads through a connection like any other, so it never blocks a writer. The copy
gets a temporary name, is synced and checked, and only then renamed: a file of that name is a whole
store, or was never there.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainvitals.errors import StorageError, UsageError
from vitals_collector.storage.store import DATABASE_FILE, FULL

_PAGES_AT_ONCE = -1
"""All pages in one step: a copy in several begins anew whenever somebody writes between them."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""What file systems say that have no second names for a file."""
EXISTS = "V304"
"""Error code: there is a file of that name."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What was written."""

    file: Path
    num_bytes: int
    version: str
    """The tables' version, which the program that restores it must know."""


def backup(
    data: Path, file: Path, *, force: bool = False, copied: Callable[[], None] | None = None
) -> Backup:
    """Write a copy of the data directory's store to ``file``, 0600, and return what it holds.

    Everything that was acknowledged before the call is in it.

    Args:
        data: the collector's data directory; a collector may run on it.
        file: where to; in a directory that exists.
        force: replace a file that is there.
        copied: called between copying and checking (for tests).

    Raises:
        UsageError: the file exists, or there is no store in ``data``.
        StorageError: it cannot be read or written, or the copy is damaged.
    """
    source = data / DATABASE_FILE
    file = file.expanduser().absolute()
    if not source.is_file():
        raise UsageError(
            f"{source} does not exist; a backup copies the SQLite store of a data directory",
            hint="give the collector's --data; for PostgreSQL use pg_dump",
        )
    if file.exists() and (not force or file.samefile(source)):
        raise UsageError(
            f"{file} already exists; a backup overwrites a file only with --force",
            hint="give another name, or --force",
            code=EXISTS,
        )
    temporary = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        version = _copy(source, temporary)
        if copied is not None:
            copied()
        _check(temporary)
        _sync(temporary)
        num_bytes = temporary.stat().st_size
        _put(temporary, file, force=force)
        _sync(file.parent)
    except sqlite3.Error as error:
        raise _failed(file, str(error)) from error
    except OSError as error:
        raise _failed(file, error.strerror or str(error)) from error
    finally:
        for leftover in ("", "-wal", "-shm", "-journal"):
            temporary.with_name(temporary.name + leftover).unlink(missing_ok=True)
    return Backup(file, num_bytes, version)


def _copy(source: Path, target: Path) -> str:
    # Made by us, so that the copy is never created with the umask's mode.
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30.0)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing, pages=_PAGES_AT_ONCE)
        # A file by itself, without a WAL beside it; the store switches it on again.
        writing.execute("PRAGMA journal_mode=DELETE").close()
        version_row = writing.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(version_row[0]) if version_row else ""


def _check(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        report_lines = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    if report_lines != ["ok"]:
        raise StorageError(
            f"the copy is damaged: {'; '.join(report_lines)}",
            hint="the disk or the store may be damaged; check both",
        )


def _put(temporary: Path, file: Path, *, force: bool) -> None:
    if force:
        temporary.replace(file)
        return
    try:
        os.link(temporary, file)  # unlike a rename, it never takes the place of another file
    except FileExistsError:
        raise UsageError(
            f"{file} was created meanwhile; a backup overwrites a file only with --force",
            hint="give another name, or --force",
            code=EXISTS,
        ) from None
    except OSError as error:
        if error.errno not in _NO_LINKS or file.exists():
            raise
        temporary.replace(file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(file: Path, error_text: str) -> StorageError:
    is_full = "full" in error_text.lower() or "no space" in error_text.lower()
    return StorageError(
        f"the backup to {file} failed: {error_text}",
        hint="free space there, or give another place" if is_full else "check both places",
        code=FULL if is_full else "V300",
    )


__all__ = ["EXISTS", "Backup", "backup"]
