"""Copies a store while a collector writes to it: database and rows, each at one moment, checked.

SQLite's own backup reads through a connection like any other, so it never blocks a writer; files of
rows never change. The copy gets a temporary name, is synced and checked, and only then renamed: a
folder of that name is a whole store, or was never there. It is a data directory like any other.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.full_disk import FULL, is_full
from vitals_collector.numbers.lake_backup import copy_lake
from vitals_collector.numbers.lake_place import sync_path
from vitals_collector.storage.store import DATABASE_FILE, LAKE_FOLDER

_PAGES_AT_ONCE = -1
"""All pages in one step: a copy in several begins anew whenever somebody writes between them."""
EXISTS = "V304"
"""Error code: there is something of that name."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What was written."""

    folder: Path
    num_bytes: int
    version: str
    """The tables' version, which the program that restores it must know."""


def backup(data: Path, target: Path, *, copied: Callable[[], None] | None = None) -> Backup:
    """Write a copy of the data directory's store to a new folder, 0700, and return what it holds.

    Everything that was acknowledged before the call is in it. Where the file system has second
    names for files, those of rows get one and take no room: take the copy to another disk.

    Args:
        data: the collector's data directory; a collector may run on it.
        target: where to; in a directory that exists.
        copied: called between copying and checking (for tests).

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
        # Rows may be newer than what the database says of them, as after a crash.
        rows = copy_lake(data / LAKE_FOLDER, partial / LAKE_FOLDER)
        if copied is not None:
            copied()
        _check(partial / DATABASE_FILE)
        for path in (partial / DATABASE_FILE, partial):
            sync_path(path)
        num_bytes = (partial / DATABASE_FILE).stat().st_size + rows.num_bytes
        partial.rename(target)
        sync_path(target.parent)
    except sqlite3.Error as error:
        raise _failed(target, str(error)) from error
    except OSError as error:
        raise _failed(target, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Backup(target, num_bytes, version)


def _copy_database(source: Path, target: Path) -> str:
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


def _failed(target: Path, error_text: str) -> StorageError:
    is_out_of_room = is_full(error_text)
    return StorageError(
        f"the backup to {target} failed: {error_text}",
        hint="free space there, or give another place" if is_out_of_room else "check both places",
        code=FULL if is_out_of_room else "V300",
    )


__all__ = ["EXISTS", "Backup", "backup"]
