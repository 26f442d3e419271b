"""A copy of a lake while a collector writes to it: its catalogue at one moment, and its files.

Files never change once they are written, so a copy is a second name of each where the file system
has such: it costs no room, and is to be taken to another disk against the loss of this one. A copy
is a lake like any other, wherever it is put.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
from pathlib import Path
from typing import NamedTuple

from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.lake_place import known_bucket, sync_path

CATALOGUE = "catalogue.sqlite"
_DATA = "data"
_ASIDE = "checksums"
_MOST_TRIES = 10
"""Upkeep removes files that were replaced for some time: then the catalogue is newer as well."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""What file systems say that have no second names for a file, or not for this one."""
_FILES = (
    "SELECT s.path || t.path || f.path FROM ducklake_{kind}_file f"
    " JOIN ducklake_table t ON t.table_id = f.table_id"
    " JOIN ducklake_schema s ON s.schema_id = t.schema_id"
)


class Copied(NamedTuple):
    """What a copy holds."""

    num_files: int
    num_bytes: int


def copy_lake(folder: Path, target: Path) -> Copied:
    """Make a copy of a lake with a SQLite catalogue in a folder that does not exist yet.

    All that was stored before the call is in it. For a lake whose catalogue is PostgreSQL, dump
    the database and then copy the folder.

    Raises:
        UsageError: there is no such lake, or something is at the target already.
        StorageError: it cannot be read or written.
    """
    if not (folder / CATALOGUE).is_file():
        raise UsageError(
            f"{folder / CATALOGUE} does not exist; a lake with a SQLite catalogue is expected",
            hint="of PostgreSQL, make a dump first (pg_dump) and then copy the folder",
        )
    if bucket := known_bucket(folder / CATALOGUE):
        raise UsageError(
            f"the rows of {folder} lie in {bucket}, where files have no second names",
            hint="let the bucket keep versions of its objects, and copy the files of the data"
            " folder while the collector is stopped (docs/scale.md)",
        )
    if target.exists():
        raise UsageError(f"{target} already exists", hint="give another name")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        copied = _copied(folder, partial)
        partial.rename(target)
        sync_path(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"the copy of {folder} to {target} failed: {error}", hint="check both places"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copied


def _copied(folder: Path, partial: Path) -> Copied:
    (partial / _DATA).mkdir(parents=True, mode=0o700)
    for _ in range(_MOST_TRIES):
        _copy_checksums(folder / _ASIDE, partial / _ASIDE)
        _copy_catalogue(folder / CATALOGUE, partial / CATALOGUE)
        _copy_checksums(folder / _ASIDE, partial / _ASIDE)  # what came while that lasted
        paths = _paths(partial / CATALOGUE)
        try:
            sizes = [_link(folder / _DATA / path, partial / _DATA / path) for path in paths]
        except FileNotFoundError:
            continue  # it was replaced meanwhile: what is copied stays, for files never change
        named = {partial / _DATA / path for path in paths}
        for path in [p for p in (partial / _DATA).rglob("*") if p.is_file() and p not in named]:
            path.unlink()
        for changed in (partial / CATALOGUE, *(p for p in partial.rglob("*") if p.is_dir())):
            sync_path(changed)
        return Copied(len(sizes), sum(sizes) + (partial / CATALOGUE).stat().st_size)
    raise StorageError(
        f"files of {folder} were replaced each of {_MOST_TRIES} times that they were copied",
        hint="a file may be lost: `vitals store check` says so; else copy it again",
    )


def _copy_checksums(source: Path, target: Path) -> None:
    """Copy what the catalogue does not have yet of merged files; it stays until the next merge."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the catalogue has had it for long
            shutil.copyfile(file, target / file.name)


def _copy_catalogue(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30.0)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing)


def _paths(catalogue: Path) -> list[str]:
    """Return the files of the newest state; those that only older states name may be gone."""
    with contextlib.closing(sqlite3.connect(catalogue)) as connection:
        return [
            path
            for kind in ("data", "delete")
            for (path,) in connection.execute(
                f"{_FILES.format(kind=kind)} WHERE f.end_snapshot IS NULL"
            )
        ]


def _link(source: Path, target: Path) -> int:
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
