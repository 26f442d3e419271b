"""Where a lake's files lie: a folder of this machine or of several, or a bucket on S3.

A bucket is written and read through DuckDB alone. What is there of it the catalogue knows, so it is
hardly ever listed; each file that was written is read back once, for its checksum.
"""

import os
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from trainvitals.errors import StorageError, UsageError

if TYPE_CHECKING:  # the base install has neither
    import duckdb
    import pyarrow as pa

META = "__ducklake_metadata_lake.ducklake"
S3 = "s3://"
_SLASH = "--"
_BUCKET = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=-]+)*/?")
_ID, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_WRITES = re.compile(r"(?:INSERT INTO|DELETE FROM|UPDATE|CALL ducklake_\w+\('lake',) '?(\w+)")
"""Statements that may write files, each with its table."""
_MARGIN_MS = 10
_PATHS = f"""
SELECT d.path FROM {META}_{{kind}}_file d JOIN {META}_table t USING (table_id)
WHERE t.table_name = '{{table}}'
"""
Ask = Callable[..., "pa.Table"]


class Place(Protocol):
    """Where the files lie. A file is named by its table and its own name: ``steps/NAME``."""

    root: str
    """As DuckLake takes it."""
    extensions: tuple[str, ...]
    """Those of DuckDB that it needs."""

    def enter(self, connection: "duckdb.DuckDBPyConnection") -> None:
        """Let a connection read and write there."""

    def prepare(self) -> None:
        """Have everything there that has to be, and know what is."""

    def begin(self) -> None:
        """Be told that a transaction begins."""

    def written(self, statements: Sequence[str]) -> list[str]:
        """Return the files that came since ``begin``, by these statements or others'; durable."""

    def crc(self, path: str) -> int | None:
        """Return a file's checksum; None where it is not there or its disk cannot read it."""

    def state(self, table: str) -> int | None:
        """Return a number that is another one after the table's files changed; None: no files."""

    def paths(self, table: str) -> set[str]:
        """Return the table's files, also those that are gone soon or not committed yet."""

    def set_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Keep checksums beside the files."""

    def aside(self) -> list[tuple[str, int]]:
        """Return the checksums that were set aside."""

    def clear_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Remove such checksums."""


class Folder:
    """A folder: what is written there is synced, file by file and name by name."""

    def __init__(self, folder: Path) -> None:
        self.root = f"{folder / 'data'}/"
        self.extensions: tuple[str, ...] = ()
        self._tables, self._aside = folder / "data" / "main", folder / "checksums"
        self._synced: dict[str, set[str]] = {}

    def enter(self, connection: "duckdb.DuckDBPyConnection") -> None:
        """Keep no files in memory: the system's own cache has them, and gives its room back."""
        connection.execute("SET enable_external_file_cache = false")

    def prepare(self) -> None:
        """Make the folders, and take what is there as synced."""
        self._tables.mkdir(parents=True, exist_ok=True)
        self._aside.mkdir(exist_ok=True)
        self._synced = {
            folder.name: {entry.name for entry in os.scandir(folder)}
            for folder in self._tables.iterdir()
        }

    def begin(self) -> None:
        """Do nothing: what was there is known."""

    def written(self, statements: Sequence[str]) -> list[str]:
        """Return the new files, synced; those of another collector may be among them."""
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
        """Return a file's checksum; None where it is not there or cannot be read."""
        crc = 0
        try:
            with (self._tables / path).open("rb") as file:
                while block := file.read(1 << 20):
                    crc = zlib.crc32(block, crc)
        except OSError:
            return None
        return crc

    def state(self, table: str) -> int | None:
        """Return when the table's folder changed."""
        try:
            return (self._tables / table).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def paths(self, table: str) -> set[str]:
        """Return what lies in the table's folder."""
        return {f"{table}/{entry.name}" for entry in os.scandir(self._tables / table)}

    def set_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Keep each checksum in a file of its own."""
        for path, crc in checksums:
            file = self._aside / path.replace("/", _SLASH)
            file.write_text(str(crc))
            sync_path(file)
        sync_path(self._aside)

    def aside(self) -> list[tuple[str, int]]:
        """Return the checksums that lie in files of their own."""
        checksums = []
        for file in self._aside.iterdir():
            with suppress(OSError, ValueError):  # torn before its commit was made
                checksums.append((file.name.replace(_SLASH, "/"), int(file.read_text())))
        return checksums

    def clear_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Remove such files."""
        for path, _ in checksums:
            (self._aside / path.replace("/", _SLASH)).unlink(missing_ok=True)


class Bucket:
    """A bucket on S3, or a prefix in one: a file that was written there is whole, and kept."""

    def __init__(self, url: str, ask: Ask) -> None:
        """Take the place without looking at it.

        Args:
            url: ``s3://BUCKET/PREFIX``.
            ask: puts a question to DuckDB.

        Raises:
            UsageError: it is no such address.
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

    def enter(self, connection: "duckdb.DuckDBPyConnection") -> None:
        """Give a connection the keys of the environment, and room for what it has read.

        Raises:
            UsageError: they are not there.
        """
        connection.execute("SET s3_uploader_max_filesize = '50GB'")  # 5 MB at a time, not 80
        values = _secret()
        text = ", ".join(
            f"{name} '{value.replace(chr(39), 2 * chr(39))}'" for name, value in values
        )
        scope = "/".join(self._url.split("/")[:3])
        connection.execute(
            "CREATE TEMPORARY SECRET lake_files"
            f" (TYPE s3, SCOPE '{scope}', USE_SSL {_is_tls()}, {text})"
        )

    def prepare(self) -> None:
        """Look whether the bucket answers."""
        self._ask(f"SELECT file FROM glob('{self.root}main/runs/*') LIMIT 1")

    def begin(self) -> None:
        """Note the time: the names of files begin with it."""
        self._began = time.time() * 1000, time.monotonic() * 1000

    def written(self, statements: Sequence[str]) -> list[str]:
        """Return the files of this time in the tables that the statements name."""
        tables = {table for sql in statements for table in _WRITES.findall(sql)}
        if not tables:
            return []
        began, monotonic = self._began
        now, took = time.time() * 1000, time.monotonic() * 1000 - monotonic
        # However the clock was set meanwhile: the time that a file was begun lies between these.
        first, last = min(began, now - took) - _MARGIN_MS, max(now, began + took) + _MARGIN_MS
        low, high = f"{int(first):012x}", f"{int(last):012x}"
        num_equal = next((i for i in range(12) if low[i] != high[i]), 12)
        begin = low[:num_equal]
        name = f"ducklake-{begin[:8]}{'-' if len(begin) > 8 else ''}{begin[8:]}*"
        globs = " UNION ALL ".join(
            f"SELECT file FROM glob('{self.root}main/{table}/{name}')" for table in sorted(tables)
        )
        return [path.removeprefix(f"{self.root}main/") for path in _texts(self._ask(globs))]

    def crc(self, path: str) -> int | None:
        """Return a file's checksum; None where it is not there, but its bucket is.

        Raises:
            StorageError: S3 did not answer, or not with the file.
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
        """Return the lake's newest state."""
        newest = self._ask(f"SELECT max(snapshot_id) AS newest FROM {META}_snapshot")
        return int(newest["newest"][0].as_py())

    def paths(self, table: str) -> set[str]:
        """Return the table's files that the catalogue names."""
        kinds = " UNION ALL ".join(_PATHS.format(kind=k, table=table) for k in ("data", "delete"))
        return {f"{table}/{name}" for name in _texts(self._ask(kinds))}

    def set_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Keep each checksum in an object of its own."""
        for path, crc in checksums:
            self._ask(f"COPY (SELECT {crc}) TO '{self._of(path)}/crc' (FORMAT csv, HEADER false)")

    def aside(self) -> list[tuple[str, int]]:
        """Return the checksums that lie in objects of their own."""
        read = self._ask(f"SELECT filename, content FROM read_text('{self._url}/checksums/*/crc')")
        return [
            (name.split("/")[-2].replace(_SLASH, "/"), int(content))
            for name, content in zip(*read.to_pydict().values(), strict=True)
        ]

    def clear_aside(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Remove such objects: DuckDB does it before it writes a folder, here of nothing."""
        for path, _ in checksums:
            self._ask(
                f"COPY (SELECT 0 AS crc, 0 AS part WHERE false) TO '{self._of(path)}'"
                " (FORMAT csv, PARTITION_BY (part), OVERWRITE true)"
            )

    def _of(self, path: str) -> str:
        return f"{self._url}/checksums/{path.replace('/', _SLASH)}"


def _texts(answer: "pa.Table") -> list[str]:
    return [str(text) for text in answer.column(0).to_pylist()]


def _secret() -> list[tuple[str, str]]:
    env = os.environ
    if missing := [name for name in (_ID, _SECRET) if not env.get(name)]:
        raise UsageError(
            f"{' and '.join(missing)} not set, and the lake's files lie on S3",
            hint=f"set {_ID}, {_SECRET}, AWS_REGION, and {_TOKEN} and AWS_ENDPOINT_URL where the"
            " service has such",
        )
    values = [
        ("KEY_ID", env[_ID]),
        ("SECRET", env[_SECRET]),
        ("REGION", env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"),
    ]
    if token := env.get(_TOKEN):
        values.append(("SESSION_TOKEN", token))
    if endpoint := _endpoint():
        values += [("ENDPOINT", urlsplit(endpoint).netloc), ("URL_STYLE", "path")]
    return values


def _endpoint() -> str:
    value = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.netloc or "@" in value):
        raise UsageError(
            "AWS_ENDPOINT_URL is no address such as https://s3.example.org:9000",
            hint="give scheme, host and port, and the keys in their own variables",
        )
    return value


def _is_tls() -> bool:
    return not _endpoint().startswith("http:")


def without_keys(text: str) -> str:
    """Return a message without what of S3's keys is in it."""
    for name in (_ID, _SECRET, _TOKEN):
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return text


_AWAY = "check AWS_ENDPOINT_URL and AWS_REGION; agents keep their rows meanwhile"
_REFUSALS = (
    ("NoSuchBucket", "the bucket is not there: make it, or correct VITALS_DATA (--lake)"),
    ("403", f"check {_ID} and {_SECRET}, and that they may list, read, write and delete there"),
    (
        "Could not connect",
        "check AWS_ENDPOINT_URL and AWS_REGION; agents keep their rows meanwhile",
    ),
    ("imeout", "check AWS_ENDPOINT_URL and AWS_REGION; agents keep their rows meanwhile"),
)


def s3_hint(text: str) -> str:
    """Return what to do about an error of S3; "" for others."""
    if "HTTP" not in text:
        return ""
    return next((hint for sign, hint in _REFUSALS if sign in text), "")


def known_bucket(catalogue: Path) -> str:
    """Return the bucket that a SQLite catalogue is of; "" where it is of a folder, or not there."""
    if not catalogue.is_file():
        return ""
    try:
        with closing(sqlite3.connect(f"{catalogue.as_uri()}?mode=ro", uri=True)) as connection:
            query = "SELECT value FROM ducklake_metadata WHERE key = 'data_path'"
            (root,) = connection.execute(query).fetchone() or ("",)
    except sqlite3.Error:  # DuckDB says what is the matter with it
        return ""
    return bucket_of(str(root))


def bucket_of(root: str) -> str:
    """Return the bucket of a lake's path in its catalogue; "" for a folder."""
    return root.removesuffix("/").removesuffix("/data") if root.startswith(S3) else ""


def sync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
