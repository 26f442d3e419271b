"""Copies a store while a collector writes to it: consistent and verified.

SQLite's backup API reads like any other connection, so it never blocks a writer; files of rows
never change. The copy gets a temporary name, is synced and verified, and only then renamed: a
directory with the final name is always complete.

Files of rows never change once they are written, so a copy of a lake is a second name of each where
the file system has such: it costs no room, and is to be taken to another disk against the loss of
this one. A copy is a lake like any other, wherever it is put.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.interface import FULL, is_full
from vitals_collector.numbers.lake_damage import files_without_checksum
from vitals_collector.numbers.lake_engine import CATALOGUE, LakeEngine, known_bucket, sync_path
from vitals_collector.storage.store import DATABASE_FILE, LAKE_FOLDER

# ----------------------------------------------------------------------------------------- the lake

_DATA = "data"
_ASIDE = "checksums"
_MOST_TRIES = 10
"""Maintenance deletes replaced files after a while: then the catalog is newer as well."""
_COPY = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1], timeout=30.0)) as reading:
    with contextlib.closing(sqlite3.connect(sys.argv[2])) as writing:
        reading.backup(writing)
"""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""Errors of file systems without hard links, or without one for this file."""
_FILES = (
    "SELECT s.path || t.path || f.path FROM ducklake_{kind}_file f"
    " JOIN ducklake_table t ON t.table_id = f.table_id"
    " JOIN ducklake_schema s ON s.schema_id = t.schema_id"
)


class BackupContent(NamedTuple):
    """Content of a copy."""

    num_files: int
    num_bytes: int


def copy_lake(folder: Path, target: Path) -> BackupContent:
    """Copy a lake with a SQLite catalog into a new directory, as a backup.

    It contains everything that was stored before the call. For a lake with a PostgreSQL catalog,
    dump the database and then copy the directory.

    Raises:
        UsageError: there is no such lake, or the target exists already.
        StorageError: it cannot be read or written.
    """
    if not (folder / CATALOGUE).is_file():
        raise UsageError(
            f"{folder / CATALOGUE} does not exist; a lake with a SQLite catalog is expected",
            hint="with PostgreSQL, make a dump first (pg_dump) and then copy the directory",
        )
    if target.exists():
        raise UsageError(f"{target} already exists", hint="give another name")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        copied = _copy_lake(folder, partial)
        partial.rename(target)
        sync_path(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"the copy of {folder} to {target} failed: {error}", hint="check both places"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copied


def _copy_lake(folder: Path, partial: Path) -> BackupContent:
    """Copy a lake's catalog, checksums and files into a backup; retry if files were deleted."""
    (partial / _DATA).mkdir(parents=True, mode=0o700)
    for _ in range(_MOST_TRIES):
        _copy_checksums(folder / _ASIDE, partial / _ASIDE)
        _copy_catalogue(folder / CATALOGUE, partial / CATALOGUE)
        _copy_checksums(folder / _ASIDE, partial / _ASIDE)  # added in the meantime
        _refuse_bucket(folder, partial / CATALOGUE)
        paths = _live_lake_files(partial / CATALOGUE)
        try:
            sizes = [_link_or_copy(folder / _DATA / path, partial / _DATA / path) for path in paths]
        except FileNotFoundError:
            # it was replaced in the meantime: copied files stay valid, because files never change
            continue
        if _files_without_checksum(partial):
            continue  # one merge was not done with its checksums, and the next has removed them
        named = {partial / _DATA / path for path in paths}
        for path in [p for p in (partial / _DATA).rglob("*") if p.is_file() and p not in named]:
            path.unlink()
        for changed in (partial / CATALOGUE, *(p for p in partial.rglob("*") if p.is_dir())):
            sync_path(changed)
        return BackupContent(len(sizes), sum(sizes) + (partial / CATALOGUE).stat().st_size)
    raise StorageError(
        f"files of {folder} were replaced each of {_MOST_TRIES} times that they were copied",
        hint="a file or its checksum may be lost: `vitals store check` says so; else copy it again",
    )


def _refuse_bucket(folder: Path, copied: Path) -> None:
    """Refuse to back up rows in a bucket, where files have no hard links."""
    if bucket := known_bucket(copied):
        raise UsageError(
            f"the rows of {folder} are stored in {bucket}, where files have no hard links",
            hint="let the bucket keep versions of its objects, and copy the files of the data"
            " folder while the collector is stopped (docs/scale.md)",
        )


def _files_without_checksum(copy: Path) -> list[str]:
    """Return the files of a backup without a checksum, which cannot be verified."""
    engine = LakeEngine(copy, "", "64MB")
    try:
        return files_without_checksum(engine)
    finally:
        engine.close()


def _copy_checksums(source: Path, target: Path) -> None:
    """Back up checksums that are not in the catalog yet; they stay until the next merge."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir() if source.is_dir() else ():  # a bucket has its own
        with contextlib.suppress(FileNotFoundError):  # already moved to the catalog
            shutil.copyfile(file, target / file.name)


def _copy_catalogue(source: Path, target: Path) -> None:
    """Copy the lake's catalog into the backup, in a separate process.

    A process that has opened a lake uses DuckDB's own SQLite. Closing a file releases all locks of
    the process on it, and the two SQLites do not know of each other.
    """
    command = [sys.executable, "-I", "-S", "-c", _COPY, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"it ended by {done.returncode}")


def _live_lake_files(catalogue: Path) -> list[str]:
    """Return the current snapshot's files to back up; those of older ones may be deleted."""
    with contextlib.closing(sqlite3.connect(catalogue)) as connection:
        return [
            path
            for kind in ("data", "delete")
            for (path,) in connection.execute(
                f"{_FILES.format(kind=kind)} WHERE f.end_snapshot IS NULL"
            )
        ]


def _link_or_copy(source: Path, target: Path) -> int:
    """Link a file of the lake into the backup, or copy it; return its size."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            part = target.with_name(f"{target.name}.part")
            shutil.copyfile(source, part)
            sync_path(part)
            part.rename(target)
    return target.stat().st_size


# ---------------------------------------------------------------------------------------- the store

_PAGES_AT_ONCE = -1
"""All pages in one step: a copy in several restarts after every write between them."""
EXISTS = "V103"
"""Error code: the output already exists."""


@dataclass(frozen=True, slots=True)
class BackupResult:
    """Result of a backup."""

    folder: Path
    num_bytes: int
    version: str
    """The tables' version, which the program that restores it must know."""


def backup(data: Path, target: Path, *, copied: Callable[[], None] | None = None) -> BackupResult:
    """Back up the data directory's store to a new directory, 0700, and return a summary.

    A collector may run on ``data``; the copy contains everything that was acknowledged before the
    call. The parent of ``target`` exists. If the file system supports hard links, files of rows are
    linked and take no space: move the copy to another disk. ``copied`` is called between copying
    and checking (for tests).

    Raises:
        UsageError: the target exists, or there is no store in ``data``.
        StorageError: it cannot be read or written, or the copy is damaged.
    """
    source = data / DATABASE_FILE
    target = target.expanduser().absolute()
    if not source.is_file():
        raise UsageError(
            f"{source} does not exist; a backup copies the SQLite store of a data directory",
            hint="give the collector's --data; for PostgreSQL use pg_dump, then copy the rows",
        )
    if target.exists():
        raise UsageError(f"{target} already exists", hint="give another name", code=EXISTS)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(mode=0o700)
        version = _copy_database(source, partial / DATABASE_FILE)
        # Rows may be ahead of the database, as after a crash.
        rows = copy_lake(data / LAKE_FOLDER, partial / LAKE_FOLDER)
        if copied is not None:
            copied()
        _check_database(partial / DATABASE_FILE)
        for path in (partial / DATABASE_FILE, partial):
            sync_path(path)
        num_bytes = (partial / DATABASE_FILE).stat().st_size + rows.num_bytes
        partial.rename(target)
        sync_path(target.parent)
    except sqlite3.Error as error:
        raise _backup_error(target, str(error)) from error
    except OSError as error:
        raise _backup_error(target, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return BackupResult(target, num_bytes, version)


def _copy_database(source: Path, target: Path) -> str:
    """Copy the SQLite database into the backup while it is used; return its version."""
    # Created here, so that the copy never has the umask's mode.
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30.0)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing, pages=_PAGES_AT_ONCE)
        # One file without a WAL; the store switches it on again.
        writing.execute("PRAGMA journal_mode=DELETE").close()
        version_row = writing.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(version_row[0]) if version_row else ""


def _check_database(file: Path) -> None:
    """Raise StorageError if the backup's database is damaged."""
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        report_lines = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    if report_lines != ["ok"]:
        raise StorageError(
            f"the copy is damaged: {'; '.join(report_lines)}",
            hint="the disk or the store may be damaged; check both",
        )


def _backup_error(target: Path, error_text: str) -> StorageError:
    """Return the error of a failed backup; its code shows whether a disk is full."""
    is_out_of_room = is_full(error_text)
    return StorageError(
        f"the backup to {target} failed: {error_text}",
        hint="free space there, or give another place" if is_out_of_room else "check both places",
        code=FULL if is_out_of_room else "V300",
    )
