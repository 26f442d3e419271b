"""DuckDB with a DuckLake attached: connections, transactions, questions, and the files below them.

DuckDB's SQLite catalog is synced at each commit; its Parquet files are not, so a transaction syncs
them itself before it ends (seen with strace). On S3 a completed write is durable.

Three layers: the *store* of the files, a local or shared directory or a bucket; the *checksums* of
the files, verified before first use; and the *engine* that runs SQL over them.
"""

import ctypes
import json
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import duckdb
import pyarrow as pa

from trainvitals.errors import MissingDependencyError, StorageError, UsageError
from trainvitals.io.private import ensure_own_dir
from vitals_collector.numbers.interface import (
    TAKEN,
    damaged_error,
    full_error,
    is_damaged,
    is_full,
)

# ---------------------------------------------------------------------------------------- the place

META = "__ducklake_metadata_lake.ducklake"
CATALOGUE = "catalogue.sqlite"
S3 = "s3://"
_SLASH = "--"
_BUCKET = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=-]+)*/?")
_ID, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_WRITES = re.compile(r"(?:INSERT INTO|DELETE FROM|UPDATE|CALL ducklake_\w+\('lake',) '?(\w+)")
"""Statements that may write files, each with its table."""
_MARGIN_MS = 10
Ask = Callable[..., pa.Table]


_RESTORE = "stop the collector, restore the directory or a backup, and start it again"


class LocalFileStore:
    """Files in a directory, with synced contents and names."""

    def __init__(self, folder: Path) -> None:
        self.root = f"{folder / 'data'}/"
        self.extensions: tuple[str, ...] = ()
        self._tables, self._aside = folder / "data" / "main", folder / "checksums"
        self._synced: dict[str, set[str]] = {}
        self._inode = 0

    def prepare_connection(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Let DuckDB cache no files in memory: the system's cache does, and frees if needed."""
        connection.execute("SET enable_external_file_cache = false")

    def prepare(self) -> None:
        """Create the lake's directories for this user only; treat existing files as synced.

        Raises:
            InsecurePathError: another user created one of them.
        """
        for folder in (self._tables.parent, self._tables, self._aside):
            ensure_own_dir(folder, read=0)
        self._synced = {
            folder.name: {entry.name for entry in os.scandir(folder)}
            for folder in self._tables.iterdir()
        }
        self._inode = self._tables.stat().st_ino

    def check_place(self) -> None:
        """Raise StorageError if the lake's directory was deleted, or replaced by a new one."""
        try:
            inode = self._tables.stat().st_ino
        except OSError as error:
            raise StorageError(
                f"{self._tables} cannot be read: {error.strerror}", hint=_RESTORE
            ) from error
        if inode != self._inode:
            # DuckLake creates a missing directory with the next rows; the earlier ones are lost.
            raise StorageError(
                f"{self._tables} was replaced while the collector ran; its rows are missing",
                hint=_RESTORE,
            )

    def has_files(self) -> bool:
        """Return whether ``prepare`` found files with the lake's rows."""
        return any(self._synced.values())

    def on_transaction_start(self) -> None:
        """Do nothing: the lake's existing files are known."""

    def written(self, statements: Sequence[str]) -> list[str]:
        """Return the lake's new files, synced; another collector's may be among them."""
        paths = []
        for folder in self._tables.iterdir():
            names = {entry.name for entry in os.scandir(folder)}
            new = names - self._synced.get(folder.name, set())
            for name in new:
                with suppress(FileNotFoundError):  # another collector's, which has merged it
                    sync_path(folder / name)
                    paths.append(f"{folder.name}/{name}")
            if new:
                sync_path(folder)
            self._synced[folder.name] = names
        return paths

    def crc(self, path: str) -> int | None:
        """Return the checksum of a lake's file; None if it is missing or unreadable."""
        crc = 0
        try:
            with (self._tables / path).open("rb") as file:
                while block := file.read(1 << 20):
                    crc = zlib.crc32(block, crc)
        except OSError:
            return None
        return crc

    def state(self, table: str) -> int | None:
        """Return the change time of the directory of the lake's table; None without one."""
        try:
            return (self._tables / table).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def paths(self, table: str) -> set[str]:
        """Return the files in the directory of the lake's table."""
        return {f"{table}/{entry.name}" for entry in os.scandir(self._tables / table)}

    def defer_checksums(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Store each checksum of the lake's files in a separate file."""
        for path, crc in checksums:
            file = self._aside / path.replace("/", _SLASH)
            file.write_text(str(crc))
            sync_path(file)
        sync_path(self._aside)

    def deferred_checksums(self) -> list[tuple[str, int]]:
        """Return the checksums of the lake's files that are in separate files."""
        checksums = []
        for file in self._aside.iterdir():
            with suppress(OSError, ValueError):  # torn before its commit
                checksums.append((file.name.replace(_SLASH, "/"), int(file.read_text())))
        return checksums

    def delete_deferred(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Delete the separate files with these checksums of the lake's files."""
        for path, _ in checksums:
            (self._aside / path.replace("/", _SLASH)).unlink(missing_ok=True)


class S3FileStore:
    """Files in an S3 bucket, or under a prefix in one: a written file is complete and durable."""

    def __init__(self, url: str, ask: Ask) -> None:
        """Parse the URL ``s3://BUCKET/PREFIX``; send no request.

        Raises:
            UsageError: the URL is invalid.
        """
        if not _BUCKET.fullmatch(url):
            raise UsageError(
                f"the lake's place is {url!r}; s3://BUCKET or s3://BUCKET/PREFIX is expected",
                hint="a prefix has letters, digits, . _ = - and slashes",
            )
        self._url, self._ask = url.rstrip("/"), ask
        self.root = f"{self._url}/data/"
        self.extensions: tuple[str, ...] = ("httpfs",)
        self._began = (0.0, 0.0)

    def prepare_connection(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Give a DuckDB connection the environment's keys, and a cache for data that it reads.

        Raises:
            UsageError: they are not there.
        """
        connection.execute("SET s3_uploader_max_filesize = '50GB'")  # 5 MB at a time, not 80
        values = _s3_secret_options()
        text = ", ".join(
            f"{name} '{value.replace(chr(39), 2 * chr(39))}'" for name, value in values
        )
        scope = "/".join(self._url.split("/")[:3])
        is_tls = not _s3_endpoint_url().startswith("http:")
        connection.execute(
            "CREATE TEMPORARY SECRET lake_files"
            f" (TYPE s3, SCOPE '{scope}', USE_SSL {is_tls}, {text})"
        )

    def check_place(self) -> None:
        """Do nothing: each commit to the lake reports a bucket that does not respond."""

    def prepare(self) -> None:
        """Check that the lake's bucket responds."""
        self._ask(f"SELECT file FROM glob('{self.root}main/runs/*') LIMIT 1")

    def on_transaction_start(self) -> None:
        """Record the time: the names of the lake's new files start with it."""
        self._began = time.time() * 1000, time.monotonic() * 1000

    def written(self, statements: Sequence[str]) -> list[str]:
        """Return the lake's files of this time in the tables that the statements name."""
        tables = {table for sql in statements for table in _WRITES.findall(sql)}
        if not tables:
            return []
        began, monotonic = self._began
        now, took = time.time() * 1000, time.monotonic() * 1000 - monotonic
        # Even if the clock was set in the meantime, the file was started between these times.
        first, last = min(began, now - took) - _MARGIN_MS, max(now, began + took) + _MARGIN_MS
        low, high = f"{int(first):012x}", f"{int(last):012x}"
        num_equal = next((i for i in range(12) if low[i] != high[i]), 12)
        begin = low[:num_equal]
        name = f"ducklake-{begin[:8]}{'-' if len(begin) > 8 else ''}{begin[8:]}*"
        globs = " UNION ALL ".join(
            f"SELECT file FROM glob('{self.root}main/{table}/{name}')" for table in sorted(tables)
        )
        return [
            path.removeprefix(f"{self.root}main/") for path in _first_column_texts(self._ask(globs))
        ]

    def crc(self, path: str) -> int | None:
        """Return a lake file's checksum; None if it is missing although its bucket exists.

        Raises:
            StorageError: S3 did not respond, or not with the file.
        """
        try:
            read = self._ask("SELECT content FROM read_blob(?)", [f"{self.root}main/{path}"])
        except StorageError as error:
            if "HTTP 404" not in error.text:
                raise
            self.prepare()
            return None
        return zlib.crc32(read["content"][0].as_buffer())

    def state(self, table: str) -> int | None:
        """Return the lake's current snapshot."""
        newest = self._ask(f"SELECT max(snapshot_id) AS newest FROM {META}_snapshot")
        return int(newest["newest"][0].as_py())

    def paths(self, table: str) -> set[str]:
        """Return the files of a table in the lake's catalog."""
        query = file_paths_sql(f"WHERE t.table_name = '{table}'")
        return set(_first_column_texts(self._ask(query)))

    def defer_checksums(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Store each checksum of the lake's files in a separate object of the bucket."""
        for path, crc in checksums:
            self._ask(
                f"COPY (SELECT {crc}) TO '{self._checksum_path(path)}/crc' (FORMAT csv, "
                f"HEADER false)"
            )

    def deferred_checksums(self) -> list[tuple[str, int]]:
        """Return the checksums of the lake's files that are in separate objects."""
        read = self._ask(f"SELECT filename, content FROM read_text('{self._url}/checksums/*/crc')")
        return [
            (name.split("/")[-2].replace(_SLASH, "/"), int(content))
            for name, content in zip(*read.to_pydict().values(), strict=True)
        ]

    def delete_deferred(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Delete checksum objects: DuckDB does so before writing a directory, here an empty one."""
        for path, _ in checksums:
            self._ask(
                f"COPY (SELECT 0 AS crc, 0 AS part WHERE false) TO '{self._checksum_path(path)}'"
                " (FORMAT csv, PARTITION_BY (part), OVERWRITE true)"
            )

    def _checksum_path(self, path: str) -> str:
        """Return the path in the bucket of the checksum of a lake's file."""
        return f"{self._url}/checksums/{path.replace('/', _SLASH)}"


FileStore = LocalFileStore | S3FileStore
"""Storage of the files. A file is named by its table and its own name: ``steps/NAME``."""


def file_paths_sql(where: str = "") -> str:
    """Return the query for the files in the catalog, each with its table: ``steps/NAME``."""
    return " UNION ALL ".join(
        f"SELECT t.table_name || '/' || d.path AS path FROM {META}_{kind}_file d"
        f" JOIN {META}_table t USING (table_id) {where}"
        for kind in ("data", "delete")
    )


def _first_column_texts(answer: pa.Table) -> list[str]:
    return [str(text) for text in answer.column(0).to_pylist()]


def _s3_secret_options() -> list[tuple[str, str]]:
    """Return DuckDB's S3 options from the environment, for the lake's bucket."""
    env = os.environ
    if missing := [name for name in (_ID, _SECRET) if not env.get(name)]:
        raise UsageError(
            f"{' and '.join(missing)} not set, and the lake's files are on S3",
            hint=f"set {_ID}, {_SECRET}, AWS_REGION, and {_TOKEN} and AWS_ENDPOINT_URL if the"
            " service has them",
        )
    values = [
        ("KEY_ID", env[_ID]),
        ("SECRET", env[_SECRET]),
        ("REGION", env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"),
    ]
    if token := env.get(_TOKEN):
        values.append(("SESSION_TOKEN", token))
    if endpoint := _s3_endpoint_url():
        values += [("ENDPOINT", urlsplit(endpoint).netloc), ("URL_STYLE", "path")]
    return values


def _s3_endpoint_url() -> str:
    """Return the URL of the S3 server that has the lake's bucket; "" for Amazon's."""
    value = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.netloc or "@" in value):
        raise UsageError(
            "AWS_ENDPOINT_URL is not a URL such as https://s3.example.org:9000",
            hint="give scheme, host and port, and the keys in their own variables",
        )
    return value


def redact_s3_keys(text: str) -> str:
    """Return a message of the lake without the S3 keys."""
    for name in (_ID, _SECRET, _TOKEN):
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return text


_AWAY = "check AWS_ENDPOINT_URL and AWS_REGION; agents keep their rows meanwhile"
_REFUSALS = (
    ("NoSuchBucket", "the bucket is not there: make it, or correct VITALS_DATA (--lake)"),
    ("403", f"check {_ID} and {_SECRET}, and that they may list, read, write and delete there"),
    ("Could not connect", _AWAY),
    ("imeout", _AWAY),
)


def s3_hint(text: str) -> str:
    """Return what to do about an error of the lake's S3 bucket; "" for others."""
    if "HTTP" not in text:
        return ""
    return next((hint for sign, hint in _REFUSALS if sign in text), "")


def known_bucket(catalogue: Path) -> str:
    """Return the bucket in the lake's SQLite catalog; "" for a directory or a missing catalog."""
    if not catalogue.is_file():
        return ""
    try:
        with closing(sqlite3.connect(f"{catalogue.as_uri()}?mode=ro", uri=True)) as connection:
            query = "SELECT value FROM ducklake_metadata WHERE key = 'data_path'"
            (root,) = connection.execute(query).fetchone() or ("",)
    except sqlite3.Error:  # DuckDB reports the error
        return ""
    return bucket_of(str(root))


def bucket_of(root: str) -> str:
    """Return the bucket of a lake's path in its catalog; "" for a directory."""
    return root.removesuffix("/").removesuffix("/data") if root.startswith(S3) else ""


def sync_path(path: Path) -> None:
    """Sync a file of the lake, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------- checksums

CHECKSUMS = "checksums"
DAMAGED = "V305"
"""Error code: bytes that are not those that were written."""
CHECKSUM_COLUMNS = "path VARCHAR, crc BIGINT"
_LIVE = f"""
SELECT t.table_name || '/' || d.path AS path, d.end_snapshot IS NULL AS is_live,
  d.file_size_bytes AS num_bytes,
  CAST(s.min_value AS BIGINT) AS min_run, CAST(s.max_value AS BIGINT) AS max_run
FROM {META}_data_file d JOIN {META}_table t ON d.table_id = t.table_id
LEFT JOIN {META}_column c ON c.table_id = t.table_id AND c.column_name = 'run'
LEFT JOIN {META}_file_column_stats s
  ON s.data_file_id = d.data_file_id AND s.column_id = c.column_id
WHERE t.table_name = '{{table}}'
UNION ALL
SELECT t.table_name || '/' || d.path, d.end_snapshot IS NULL, d.file_size_bytes, NULL, NULL
FROM {META}_delete_file d JOIN {META}_table t ON d.table_id = t.table_id
WHERE t.table_name = '{{table}}'
"""
_LEAST, _GREATEST = -(2**63), 2**63 - 1


class _FileBounds(NamedTuple):
    num_bytes: int
    min_run: int
    max_run: int


class FileChecksums:
    """Checksums of the files in the tables' directories. Thread-safe.

    ``file_store`` has the files, and the checksums that the lake does not have yet.
    """

    def __init__(self, file_store: FileStore, ask: Ask) -> None:
        self._place, self._ask = file_store, ask
        self._lock = threading.Lock()
        """Guards the caches; not held while a file is read, so that commits continue."""
        self._reading = threading.Lock()
        """Held while a query's files are verified: another query that needs them waits."""
        self._whole: set[str] = set()
        self._damaged: dict[str, _FileBounds] = {}
        self._unchecked: dict[str, _FileBounds] = {}
        self._dead: set[str] = set()
        """Merged files that running queries may still read."""
        self._seen_at: dict[str, int] = {}
        """By table, the state of its directory when it was last listed."""

    def checksum_new_file(self, path: str) -> tuple[str, int]:
        """Return path and checksum of the lake's new file; it is believed from now on."""
        checksum = self._place.crc(path)
        with self._lock:
            self._whole.add(path)
        return path, -1 if checksum is None else checksum

    def check_files_of_runs(self, table: str, *runs: int) -> None:
        """Check the files of a lake's table that may hold rows of the runs, each once."""
        self._check_needed_files(
            table, lambda _, bounds: any(bounds.min_run <= run <= bounds.max_run for run in runs)
        )

    def check_small_files(self, table: str, num_bytes: int) -> None:
        """Verify the files of a lake's table up to this size."""
        self._check_needed_files(table, lambda _, bounds: bounds.num_bytes <= num_bytes)

    def _check_needed_files(
        self, table: str, is_needed: Callable[[str, _FileBounds], bool]
    ) -> None:
        def needed(files: dict[str, _FileBounds]) -> list[str]:
            table_files = ((path, of) for path, of in files.items() if path.startswith(f"{table}/"))
            return [path for path, bounds in table_files if is_needed(path, bounds)]

        with self._lock:
            self._discover_files(table)
            is_known = not needed(self._unchecked)
        if not is_known:
            with self._reading:
                with self._lock:
                    files = {path: self._unchecked[path] for path in needed(self._unchecked)}
                self._check(files)
        with self._lock:
            damaged = needed(self._damaged)
            if damaged:  # another collector may have removed them
                live = {path for path, is_live, _ in self.list_table_files(table) if is_live}
                for path in set(damaged) - live:
                    del self._damaged[path]
                    self._dead.add(path)
                damaged = [path for path in damaged if path in live]
        if damaged:
            raise StorageError(
                f"{damaged[0]} is damaged: its bytes are not those that were written",
                hint="Lake.check says what it held; after Lake.drop_damaged_files that is taken"
                " when it is sent again",
                code=DAMAGED,
            )

    def check(self, tables: Iterable[str]) -> list[str]:
        """Read every live file of the lake again; return the damaged ones. Other work continues."""
        live = {
            path: bounds
            for table in tables
            for path, is_live, bounds in self.list_table_files(table)
            if is_live
        }
        self._check(live)
        with self._lock:
            return sorted(self._damaged.keys() & live.keys())

    def live(self, paths: Iterable[str]) -> set[str]:
        """Return which of these files are in the lake's catalog."""
        listed = set(paths)
        tables = {path.partition("/")[0] for path in listed}
        return {
            path
            for table in tables
            for path, is_live, _ in self.list_table_files(table)
            if is_live and path in listed
        }

    def summed(self) -> set[str]:
        """Return the files whose checksums are known, in the lake or in separate files."""
        stored = self._ask(f"SELECT path FROM {CHECKSUMS}")["path"].to_pylist()
        return {*stored, *(path for path, _ in self._place.deferred_checksums())}

    def forget(self, paths: Iterable[str]) -> None:
        """Drop the lake's files from the cache."""
        with self._lock:
            for path in paths:
                self._damaged.pop(path, None)
                self._dead.add(path)

    def _discover_files(self, table: str) -> None:
        """Find the files that were added to the lake since the last listing."""
        state = self._place.state(table)
        if state is None or state == self._seen_at.get(table):
            return
        there = self._place.paths(table)
        seen = self._whole | self._damaged.keys() | self._unchecked.keys() | self._dead
        new = there - seen
        if new:
            for path, is_live, bounds in self.list_table_files(table):
                if path in new:
                    new.discard(path)
                    if is_live:
                        self._unchecked[path] = bounds
                    else:
                        self._dead.add(path)
        for file_sets in (self._whole, self._dead):
            file_sets -= {path for path in file_sets if path.startswith(f"{table}/")} - there
        if not new:  # otherwise another collector is about to commit one
            self._seen_at[table] = state

    def list_table_files(self, table: str) -> list[tuple[str, bool, _FileBounds]]:
        """Return path, whether it is live, and bounds of each file of a lake's table."""
        rows = self._ask(_LIVE.format(table=table)).to_pylist()
        return [
            (
                row["path"],
                row["is_live"],
                _FileBounds(
                    row["num_bytes"],
                    _LEAST if row["min_run"] is None else row["min_run"],
                    _GREATEST if row["max_run"] is None else row["max_run"],
                ),
            )
            for row in rows
        ]

    def _check(self, files: Mapping[str, _FileBounds]) -> None:
        """Read the lake's files, and remember which are whole."""
        if not files:
            return
        listed = ", ".join(f"'{path}'" for path in files)
        stored: dict[str, set[int]] = {}
        rows = self._ask(f"SELECT path, crc FROM {CHECKSUMS} WHERE path IN ({listed})").to_pylist()
        for row in rows:  # a checksum of another collector's file may have been read too early
            stored.setdefault(row["path"], set()).add(row["crc"])
        for path, crc in self._place.deferred_checksums():
            stored.setdefault(path, set()).add(crc)
        whole = {path for path in files if self._place.crc(path) in stored.get(path, ())}
        damaged = self.live(files.keys() - whole)
        with self._lock:
            for path, bounds in files.items():
                self._unchecked.pop(path, None)
                self._damaged.pop(path, None)
                if path in damaged:
                    self._damaged[path] = bounds
            self._whole = (self._whole | whole) - damaged
            # Another collector, or maintenance, has merged these since they were listed.
            self._dead |= files.keys() - whole - damaged


# --------------------------------------------------------------------------------------- the engine

_INLINED_ROWS = 2_000
"""More rows are stored in a file, which is faster."""
_PASSWORD = re.compile(r"password=.*")
"""To the end of the line: it is the last parameter for libpq, and may contain spaces and quotes."""
_TAKEN = re.compile(TAKEN + r"\w+")
_CLOSE_SECONDS = 10.0
"""So long the end waits for questions that were interrupted."""
_MOST_COMMITS = 50
"""Commits after which maintenance reopens the database, for 0.3 s of CPU."""


class _RunningQuery:
    """A running query."""

    def __init__(self) -> None:
        self.reader: duckdb.DuckDBPyConnection | None = None


class LakeEngine:
    """One process's way to a lake: one connection that writes, others that read.

    Statements and queries raise StorageError if DuckDB refuses.
    """

    def __init__(self, folder: Path, catalogue: str, memory_limit: str, bucket: str = "") -> None:
        """Attach the lake; see ``Lake``."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        """Held while the lake is changed: two changes at once in one process would conflict."""
        self.is_unsure = False
        """Whether a commit ended with an unknown result: the caches may be wrong."""
        self._statements: list[str] = []
        """Statements of the current transaction."""
        bucket = bucket or ("" if catalogue else known_bucket(folder / CATALOGUE))
        self._place: FileStore = S3FileStore(bucket, self.ask) if bucket else LocalFileStore(folder)
        self._readers: list[tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyConnection]] = []
        """Each with the connection that it came from."""
        self._asking: list[_RunningQuery] = []
        self._asked = threading.Condition()
        """Notified when a query ends; changes of ``_asking`` hold its lock."""
        self._is_closed = False
        self._catalogue, self._memory_limit = catalogue, memory_limit
        self._num_commits = 0
        self._holder: duckdb.DuckDBPyConnection | None = None
        self._kept_checksums: list[tuple[str, int]] = []
        self.files = FileChecksums(self._place, self.ask)
        with translate_lake_errors(folder / CATALOGUE):
            self._root = self._attach_lake()
            has_rows = self._has_rows()
            self._place.prepare()
        self._check_catalog_of_files()
        if has_rows and isinstance(self._place, LocalFileStore) and not self._place.has_files():
            self.close()
            raise StorageError(
                f"{self._place.root} has no files, but the catalog lists some: the directory was "
                "deleted, or its disk is not mounted",
                hint="restore it or a backup, or start with another data directory",
            )
        self.execute(f"CREATE TABLE IF NOT EXISTS {CHECKSUMS} ({CHECKSUM_COLUMNS})")

    def _attach_lake(self) -> duckdb.DuckDBPyConnection:
        """Open DuckDB with the lake and its catalog attached."""
        root = connect_duckdb()
        catalogue, folder = self._catalogue, self.folder
        scanner = "postgres_scanner" if catalogue else "sqlite_scanner"
        uri = f"postgres:{escape_sql(catalogue)}" if catalogue else f"sqlite:{folder / CATALOGUE}"
        # Wait this long for a lock.
        of_catalogue = "" if catalogue else ", META_BUSY_TIMEOUT 10000"
        # A directory may be moved with the catalog in it; a catalog elsewhere must belong to this
        # lake, otherwise rows of another collector would be missing.
        if not catalogue and isinstance(self._place, LocalFileStore):
            of_catalogue += ", OVERRIDE_DATA_PATH true"
        for name in ("ducklake", scanner, *self._place.extensions):
            root.execute(f"LOAD '{find_duckdb_extension(name)}'")
        root.execute(f"SET memory_limit = '{self._memory_limit}'")
        root.execute("SET threads = 1")  # the cores belong to the training
        self._place.prepare_connection(root)
        root.execute(f"SET temp_directory = '{folder / 'spill'}'")
        # Several collectors commit at once: retry after a conflict.
        root.execute("SET ducklake_max_retry_count = 100")
        if not catalogue:
            self._holder = _hold_catalog_open(root, folder / CATALOGUE)
        try:
            root.execute(
                f"ATTACH 'ducklake:{uri}' AS lake"
                f" (DATA_PATH '{self._place.root}', DATA_INLINING_ROW_LIMIT 0{of_catalogue})"
            )
        except duckdb.Error as error:
            if "does not match existing data path" not in str(error):
                raise
            raise StorageError(
                f"{self._place.root} is not the lake of this database:"
                f" {str(error).splitlines()[0]}",
                hint="give that place with --lake, the same one to all collectors",
            ) from error
        root.execute("USE lake")
        return root

    def check_place(self) -> None:
        """Raise StorageError if rows that were stored cannot be read."""
        self._place.check_place()

    def _has_rows(self) -> bool:
        """Return whether the catalog lists files; called before ``prepare``, which lists them."""
        return bool(self.ask(f"SELECT 1 FROM {META}_data_file LIMIT 1").num_rows)

    def _check_catalog_of_files(self) -> None:
        """Raise StorageError for an empty catalog next to stored rows, which would be lost."""
        if not (isinstance(self._place, LocalFileStore) and self._place.has_files()):
            return
        query = f"SELECT 1 FROM duckdb_tables() WHERE table_name = '{CHECKSUMS}'"
        if not self.ask(query).num_rows:
            where = "its database" if self._catalogue else self.folder / CATALOGUE
            text = f"{where} has no tables, but {self._place.root} has rows"
            self.close()
            raise damaged_error("the lake", text)

    def give_back_memory(self) -> None:
        """Return unused memory to the system.

        DuckLake 1.5.5 keeps 20 to 200 KB of every commit in memory until its database is closed: so
        it is reopened. The previous one is closed with its last query.
        """
        if self._num_commits >= _MOST_COMMITS:
            with self.lock, translate_lake_errors():
                # Never by close(): that also closes cursors during another thread's query, which
                # fails or ends the process. Dropping the last reference closes it.
                self._release_catalog()
                self._root = self._attach_lake()
                self._num_commits = 0
                self._readers.clear()
        pa.default_memory_pool().release_unused()
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)

    def close(self) -> None:
        """Finish the current operation and close the catalogue. Queries fail from now on.

        A connection in use is never closed: that may end the process. If a query does not end in
        time, its connections stay open until the process ends.
        """
        with self.lock:
            if self._interrupt_queries():
                self._release_catalog()
                for connection in (*(reader for _, reader in self._readers), self._root):
                    connection.close()

    def _release_catalog(self) -> None:
        """Checkpoint the catalog's WAL and start a new one."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def _interrupt_queries(self) -> bool:
        """Interrupt all queries until none is left; return False if one continues."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._asked:
            self._is_closed = True
            while self._asking and time.monotonic() < deadline:
                for asking in self._asking:
                    if asking.reader is not None:
                        asking.reader.interrupt()
                self._asked.wait(0.05)  # one that had not begun yet was not interrupted
            return not self._asking

    # --------------------------------------------------------------------------------- writing

    @contextmanager
    def transaction(
        self, *, is_merge: bool = False, epochs: Mapping[str, int] | None = None
    ) -> Iterator[None]:
        """Commit all ``execute`` calls in the block at once; durable at its end.

        A commit that merges files cannot store their checksums (DuckLake does not support it): they
        are in separate files until ``keep_checksums``. ``epochs`` are of the leases of the written
        runs: after another collector has acquired one, the catalog's database refuses the commit,
        in the same transaction (``cluster.leases.install_lake_fence``).

        Raises:
            StorageError: nothing was changed, or (``is_unsure``) the result is unknown.
        """
        with self.lock, translate_lake_errors():
            self._root.execute("BEGIN")
            self._statements.clear()
            self._place.on_transaction_start()
            try:
                yield
                # A file of another collector may be among them: both checksums are valid.
                paths = self._place.written(self._statements)
                checksums = [self.files.checksum_new_file(path) for path in paths]
                if is_merge:
                    self._place.defer_checksums(checksums)
                elif checksums:
                    self._insert_checksums(checksums)
                if epochs:
                    epochs_json = escape_sql(json.dumps(epochs))
                    self._root.execute(
                        f"CALL lake.set_commit_message('', '', extra_info => '{epochs_json}')"
                    )
                self._commit()
            except BaseException:
                # Only the catalog knows whether a failed commit took effect, and another collector
                # may have made the same change.
                self.is_unsure = True
                with suppress(duckdb.Error):  # a commit that failed has ended it already
                    self._root.execute("ROLLBACK")
                raise

    @contextmanager
    def catalogue_transaction(self) -> Iterator[None]:
        """Change the catalog's own tables together, which a transaction of the lake cannot do."""
        with self.lock, translate_lake_errors():
            self._root.execute("BEGIN")
            try:
                yield
                self._root.execute("COMMIT")
            except BaseException:
                with suppress(duckdb.Error):
                    self._root.execute("ROLLBACK")
                raise

    def execute(
        self, sql: str, values: Sequence[object] = (), rows: pa.Table | None = None
    ) -> None:
        """Run a statement on the writing connection; ``rows`` is a table of that name in it."""
        with self.lock, translate_lake_errors():  # DuckDB finds "rows" by its name
            self._statements.append(sql)
            self._root.execute(sql, list(values))

    def query_in_transaction(self, sql: str) -> pa.Table:
        """Return a query's result as the current transaction sees the lake."""
        with self.lock, translate_lake_errors():
            self._statements.append(sql)
            return self._root.execute(sql).to_arrow_table()

    def insert(self, table: str, rows: pa.Table) -> None:
        """Add rows to a table, by the names of their columns."""
        self.execute(f"INSERT INTO {table} BY NAME SELECT * FROM rows", rows=rows)

    def _commit(self) -> None:
        """Commit the lake's current transaction, and count it."""
        self._root.execute("COMMIT")
        self._num_commits += 1

    def keep_checksums(self) -> None:
        """Move the checksums of merged files into the lake.

        The separate files stay until the next call: a copy of the lake finds one or the other.
        """
        self._place.delete_deferred(self._kept_checksums)
        self._kept_checksums = self._place.deferred_checksums()
        if self._kept_checksums:
            with self.transaction():
                self._insert_checksums(self._kept_checksums)

    def _insert_checksums(self, checksums: Sequence[tuple[str, int]]) -> None:
        """Add the checksums of files to the lake's table of them."""
        paths, crcs = zip(*checksums, strict=True)
        self.insert(CHECKSUMS, pa.table({"path": list(paths), "crc": list(crcs)}))

    def inline(self, *tables: str) -> None:
        """Store few rows at a time of these tables in the catalog itself."""
        inlined = self.ask(
            "SELECT scope_entry FROM ducklake_options('lake')"
            " WHERE option_name = 'data_inlining_row_limit'"
        )["scope_entry"].to_pylist()
        for table in tables:
            if f"main.{table}" not in inlined:
                self.execute(
                    f"CALL lake.set_option('data_inlining_row_limit', {_INLINED_ROWS},"
                    f" table_name => '{table}')"
                )

    # --------------------------------------------------------------------------------- reading

    def ask(
        self, sql: str, values: Sequence[object] = (), tables: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Return a query's result; ``tables`` can be used in it by their names."""
        with translate_lake_errors(), self._cursor() as reader:
            for name, table in (tables or {}).items():
                reader.register(name, table)
            try:
                return reader.execute(sql, list(values)).to_arrow_table()
            finally:
                for name in tables or {}:
                    reader.unregister(name)

    @contextmanager
    def _cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield a separate cursor of the lake, for one reader at a time.

        They are reused: a new one costs a third of a small query.
        """
        with self._register_query() as asking:
            root, asking.reader = self._root, self._acquire_reader()
            yield asking.reader
            if root is self._root:
                self._readers.append((root, asking.reader))  # except for one that failed

    @contextmanager
    def _register_query(self) -> Iterator[_RunningQuery]:
        """Register a running query of the lake, so that closing can interrupt it."""
        asking = _RunningQuery()
        with self._asked:
            if self._is_closed:
                raise StorageError("the lake is closed", hint="ask again once the collector is up")
            self._asking.append(asking)
        try:
            yield asking
        finally:
            with self._asked:
                self._asking.remove(asking)
                self._asked.notify_all()

    def _acquire_reader(self) -> duckdb.DuckDBPyConnection:
        """Return an idle reading connection to the lake, or a new one."""
        root, reader = self._root, None
        while self._readers and reader is None:
            with suppress(IndexError):  # another thread popped it
                of_root, cached = self._readers.pop()
                reader = cached if of_root is root else None
        if reader is None:
            reader = root.cursor()
            reader.execute("USE lake")
        return reader


def connect_duckdb(**more: bool) -> duckdb.DuckDBPyConnection:
    """Return a connection that downloads nothing, and writes nothing to the home directory.

    The extensions are next to this program's code; hashing them each time takes 0.2 s of CPU.
    """
    config: dict[str, Any] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_unsigned_extensions": True,
    }
    return duckdb.connect(config=config | more)


def _hold_catalog_open(
    root: duckdb.DuckDBPyConnection, catalogue: Path
) -> duckdb.DuckDBPyConnection:
    """Keep the lake's SQLite catalog open as it is until the returned connection is closed.

    It has a WAL, so that a query can read during a write. Each query and each commit opens and
    closes it. The last one to close it removes the WAL under a lock; a query that arrives at that
    moment waits, and SQLite as built into DuckDB sleeps for a whole second: measured for one of
    thirty queries at ten commits per second. While it is held open, the WAL grows by about 40 kB
    per commit.

    No other library of this process may open it to write in the meantime: closing a file releases
    all locks of the process on it, and would remove the WAL.
    """
    holder = root.cursor()
    options = "TYPE sqlite, BUSY_TIMEOUT 10000, JOURNAL_MODE 'WAL'"
    holder.execute(f"ATTACH '{escape_sql(str(catalogue))}' AS held ({options})")
    holder.execute("BEGIN")
    # BEGIN alone opens no file.
    holder.execute("SELECT * FROM sqlite_query('held', 'SELECT count(*) FROM sqlite_master')")
    holder.fetchall()
    return holder


def find_duckdb_extension(name: str) -> Path:
    """Return the file of a DuckDB extension for the lake: a package with DuckDB's own version.

    Raises:
        MissingDependencyError: it is not installed.
    """
    spec = find_spec(f"duckdb_extension_{name}")
    places = [] if spec is None else spec.submodule_search_locations or []
    for directory in places:
        for path in Path(directory).glob(
            f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"
        ):
            return path
    extra = {"postgres_scanner": "postgresql", "httpfs": "s3"}.get(name, "collector")
    raise MissingDependencyError(
        f"DuckDB {duckdb.__version__} lacks its extension {name}",
        hint=f"pip install 'trainvitals[{extra}]'",
    )


def escape_sql(text: str) -> str:
    """Return a text escaped for quotes in DuckDB's SQL."""
    return text.replace("'", "''")


@contextmanager
def translate_lake_errors(catalogue: object = "the lake's catalogue") -> Iterator[None]:
    """Raise what DuckDB and the disk refuse as StorageError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        # The error for a failed ATTACH contains all its parameters.
        text = redact_s3_keys(_PASSWORD.sub("password=***", str(error).strip()))
        if taken := _TAKEN.search(text):
            raise StorageError(
                f"{taken[0]}: its rows are no longer stored here, nor the rows in the same commit",
                hint="nothing to do: agents send them again, here or to the next owner",
            ) from error
        if is_full(text):
            raise full_error("the lake", text) from error
        if is_damaged(text):
            raise damaged_error(catalogue, text.splitlines()[0]) from error
        what = "files cannot be kept" if isinstance(error, OSError) else "engine refused"
        raise StorageError(f"the lake's {what}: {text}", hint=s3_hint(text)) from error
