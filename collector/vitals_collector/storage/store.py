"""Opens the database, SQLite or PostgreSQL, and gives out transactions whose errors are ours.

A write that returned is on disk: SQLite runs with WAL and ``synchronous=FULL`` (every commit is
fsynced), PostgreSQL with its own default. Rows of numbers are not here, but in ``Store.numbers``.
"""

import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import sqlalchemy
from sqlalchemy import (
    Connection,
    Engine,
    Table,
    Update,
    create_engine,
    event,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import StaticPool

from trainvitals.clock import Clock
from trainvitals.errors import InsecurePathError, NotOwnerError, StorageError, UsageError
from trainvitals.records import EventRow
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import (
    FULL,
    NumberStore,
    StreamKey,
    damaged_error,
    full_error,
    is_damaged,
    is_full,
)
from vitals_collector.numbers.memory import MemoryNumberStore
from vitals_collector.storage.migrate import lock_migrations, migrate
from vitals_collector.storage.schema import DamageCounter, audit, engine_state

# Imported by a store on PostgreSQL: the others start sooner and are smaller without it.
if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert as PostgresInsert

DATABASE_FILE = "vitals.db"
LAKE_FOLDER = "lake"
"""In the data directory: the rows' files, and their catalogue."""
UNKNOWN = "V101"
"""Error code: there is nothing of that name."""
_PAUSED_NS = 30_000_000_000
"""Between two polls, or for one commit: more than this is a pause of the process."""
LOCKED = "V303"
"""Error code: another process has locked the database."""
_FEW_PAGES = 32
_CHECK: ContextVar[Callable[[Connection], None] | None] = ContextVar("check", default=None)
_LOG = logging.getLogger("vitals.collector.store")

AfterIngest = Callable[[Sequence[tuple[Batch, Sequence[EventRow]]]], None]
"""Called with new rows (without duplicates) and their events after the commit: once for all batches
that were committed together."""


Part = Literal[
    "after_ingest",
    "engine",
    "folder",
    "goodput",
    "ingest",
    "leases",
    "remote_write",
    "tokens",
    "upkeep",
    "watching",
]
"""A part of the collector whose errors are kept from the others."""
PARTS: tuple[str, ...] = get_args(Part)
RemovalReason = Literal["asked", "age"]
"""Why a run was removed: a user's request, or its age."""
REMOVAL_REASONS: tuple[str, ...] = get_args(RemovalReason)


class IngestCounters(msgspec.Struct):
    """What came in, and what failed, since this process started; read by ``/metrics``."""

    num_rows: int = 0
    num_duplicate: int = 0
    num_lost: int = 0
    num_damaged: int = 0
    """Damaged ranges and states of spools that were skipped."""
    rejected: dict[str, int] = {}
    """Refused batches by error code."""
    refused: dict[str, int] = {}
    """Requests refused for want of a right, by error code."""
    num_deferred: int = 0
    """Bodies sent away because there was no room, to come back later."""
    thinned: dict[tuple[str, str], int] = {}
    """Rows taken away, by stream and reason."""
    num_forgotten: int = 0
    """Rows that came of runs which were removed."""
    removed_runs: dict[str, int] = {}
    """Runs removed, by reason."""
    over_cap: dict[str, str] | None = None
    """Runs that exceed their cap with nothing left to delete, with a message each; None before all
    runs were checked."""
    failures: dict[str, int] = {}
    """Errors that one part of the collector kept from the others, by part."""
    remote_writes: dict[str, int] = {}
    """Pushes of run metrics by outcome; empty where none are pushed."""
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """Held by whoever counts."""

    def reject(self, code: str) -> None:
        """Count, among the store's counters, a body that contains no batches."""
        with self.lock:
            self.rejected[code] = self.rejected.get(code, 0) + 1

    def refuse(self, code: str) -> None:
        """Count, among the store's counters, a request that its token does not allow."""
        with self.lock:
            self.refused[code] = self.refused.get(code, 0) + 1

    def fail(self, part: Part) -> None:
        """Count an error that ended only the current work of a part; it is retried."""
        with self.lock:
            self.failures[part] = self.failures.get(part, 0) + 1

    def defer(self) -> None:
        """Count, among the store's counters, a body for which there was no space."""
        with self.lock:
            self.num_deferred += 1


class SteadyClock:
    """Wall time that never jumps: the clock's at the start, counted on by its monotonic clock.

    For times that one process compares with each other: arrivals, silence, holds. Setting the clock
    forward by an hour is not an hour of silence.
    """

    def __init__(self, clock: Clock) -> None:
        self._offset_ns = clock.time_ns() - clock.monotonic_ns()
        self.monotonic_ns = clock.monotonic_ns

    def time_ns(self) -> int:
        """Return the Unix time by which arrivals in the store are compared: it never jumps."""
        return self._offset_ns + self.monotonic_ns()


class IngestUptime:
    """Time since which a collector has received rows without a break. Thread-safe.

    The intervals in which ingest worked: not while the process or machine was paused, and not while
    rows could not be stored. All times are of the clock that rows are received by
    (``SteadyClock``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_ns = 0
        self._looked_ns: int | None = None
        self._storing: dict[int, int] = {}
        """Since when each thread stores."""

    def restart(self, now_ns: int) -> None:
        """Restart the time for which the store has received rows continuously."""
        with self._lock:
            self._since_ns, self._looked_ns = now_ns, None

    def looked(self, now_ns: int) -> None:
        """Record that all runs in the store were checked at this time."""
        with self._lock:
            self._looked_ns = now_ns

    def since(self, now_ns: int) -> int:
        """Return since when this collector has been receiving; 0 if it never failed to."""
        with self._lock:
            for begun_ns in (self._looked_ns, *self._storing.values()):
                if begun_ns is not None and abs(now_ns - begun_ns) > _PAUSED_NS:
                    self._since_ns = now_ns
            return self._since_ns

    @contextmanager
    def storing(self, clock: Clock) -> Iterator[None]:
        """Record whether the store takes the received rows; refused ones count as not received."""
        with self._lock:
            self._storing[threading.get_ident()] = clock.time_ns()
        try:
            yield
        except BaseException:
            with self._lock:
                self._since_ns = clock.time_ns()
            raise
        finally:
            self.since(clock.time_ns())
            with self._lock:
                self._storing.pop(threading.get_ident(), None)


class StreamOffset(msgspec.Struct):
    """Last stored row of one stream."""

    key: StreamKey
    source: str
    last_seq: int = -1
    last_unix_ns: int = 0
    """When its latest row was written; 0 if unknown."""
    started_unix_ns: int = 0
    """When its writer started."""
    token_id: str = ""
    """Token that created its writer."""
    writer_key_hash: str = ""
    """SHA-256 of its writer's key; "" if none is required."""
    num_lost: int = 0
    """New in this transaction."""
    expected_seq: int = -1
    """Up to this number, missing rows were counted already."""
    noted_seq: int = -1
    """``last_seq`` in the database."""


class OwnedElsewhere(NamedTuple):
    """A run that another collector owns."""

    run_id: str
    epoch: int
    """The number of its lease."""
    report: bytes
    """The last report of this or an earlier owner; empty without one."""


class RunClaims:
    """Runs whose rows may be stored here, and other owners; here of a store's only collector."""

    def claim(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Acquire the store's runs without an owner; return the owners of the others.

        Raises:
            StorageError: the store refused; call again.
        """
        return {}

    def owned(self) -> dict[str, int] | None:
        """Return the owned runs, each with the epoch of its lease; None: all."""
        return None

    def hold(self, connection: Connection, run_ids: Collection[str]) -> set[str]:
        """Return the runs in the database that are owned here until the transaction ends."""
        return set(run_ids)

    def elsewhere(self, connection: Connection) -> list[OwnedElsewhere]:
        """Return the runs in the database that other collectors own now."""
        return []


class Store:
    """A migrated database.

    ``read_transaction`` and ``write`` yield connections; both raise only StorageError.

    Writers of one process wait on a lock, so that SQLite's busy timeout is only for other
    processes.
    """

    def __init__(self, engine: Engine, numbers: NumberStore) -> None:
        self.engine = engine
        self.numbers = numbers
        """The rows of all runs; data that users filter by is in the database."""
        self.damage = DamageCounter()
        """Damage that was found."""
        self.damage.attach_to(engine.dialect)
        self.counters = IngestCounters()
        self.after_ingest: list[AfterIngest] = []
        self.claims = RunClaims()
        """The runs whose rows may be stored here."""
        self.offsets: dict[StreamKey, StreamOffset] = {}
        """Offsets of streams written by this process; ingest compares them with the database before
        any change."""
        self.ingest_uptime = IngestUptime()
        """Since when what this process is sent was stored."""
        self.is_importing = False
        """Whether a directory is being imported: the end of a run may still be missing."""
        self.no_room: StorageError | None = None
        """The error of the last write, if the disk was full."""
        self._write_mutex = threading.RLock()
        self._is_sqlite = engine.dialect.name == "sqlite"

    @property
    def where(self) -> str:
        """Return the database's URL without its password, for messages."""
        return self.engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Yield a connection to the SQL database whose reads see one snapshot."""
        with (
            self._one_at_a_time(),
            self._translate_db_errors(),
            self.engine.connect() as connection,
        ):
            if not self._is_sqlite:  # there, every transaction is a snapshot
                options: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
                connection = connection.execution_options(**options, postgresql_readonly=True)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield an SQL connection inside a transaction; commit durably at the end, or roll back."""
        turn = self._write_mutex if self._is_sqlite else threading.RLock()
        try:
            with turn, self._translate_db_errors(), self.engine.connect() as connection:
                writing = connection.execution_options(vitals_write=True)
                with writing.begin():
                    if (check := _CHECK.get()) is not None:
                        check(writing)
                    yield writing
        except StorageError as error:
            if error.code == FULL:
                self.no_room = error
            raise
        self.no_room = None

    @contextmanager
    def write_rows(self) -> Iterator[Connection]:
        """Write to the SQL database like ``write``, together with the numeric rows.

        Acquires the rows' lock first, so that no one waits for the database during a merge.
        """
        with self.numbers.write_lock(), self.write() as connection:
            yield connection

    def snapshot_on(self, connection: Connection) -> "ReadSnapshot":
        """Return the SQL connection of a ``read_transaction`` together with the numbers."""
        return ReadSnapshot(connection, self.numbers)

    @contextmanager
    def check_writes(self, check: Callable[[Connection], None]) -> Iterator[None]:
        """Call ``check`` first in each SQL transaction that this thread writes, to refuse it."""
        token = _CHECK.set(check)
        try:
            yield
        finally:
            _CHECK.reset(token)

    def reclaim(self, *, above: float = 0.0, max_pages: int = 512) -> int:
        """Return free pages of an SQLite file to the disk; PostgreSQL does that itself.

        Do nothing unless a share ``above`` of the file is free. At most ``max_pages`` are returned,
        because other pages have to move. Return their number.
        """
        if not self._is_sqlite:
            return 0

        with self.read_transaction() as connection:
            num_free = _pragma(connection, "freelist_count")
            if not num_free or num_free <= above * _pragma(connection, "page_count"):
                return 0
        try:
            return self._vacuum_pages(min(max_pages, num_free))
        except StorageError as error:
            if error.code != FULL:
                raise
            self.checkpoint()  # the journal has no space for that many at once
            num = self._vacuum_pages(min(_FEW_PAGES, num_free))
            self.checkpoint()  # only now the file is shorter
            return num

    def _vacuum_pages(self, num_pages: int) -> int:
        """Return free pages of the SQLite file to the disk; return their number."""
        with self.write() as connection:
            before = _pragma(connection, "freelist_count")
            # Regardless of the argument, the driver executes one step, which frees one page.
            for _ in range(num_pages):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
            return before - _pragma(connection, "freelist_count")

    def checkpoint(self) -> None:
        """Checkpoint SQLite's WAL, which otherwise grows to some MiB."""
        if self._is_sqlite:
            with (
                self._one_at_a_time(),
                self._translate_db_errors(),
                self.engine.connect() as connection,
            ):
                connection.exec_driver_sql("PRAGMA wal_checkpoint")

    def close(self) -> None:
        """Close all connections to the SQL database, and the store of numeric rows."""
        self.engine.dispose()
        self.numbers.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Let one thread at a time use an SQL database in memory."""
        # A database in memory is one connection, shared by all threads.
        if isinstance(self.engine.pool, StaticPool):
            with self._write_mutex:
                yield
        else:
            yield

    @contextmanager
    def _translate_db_errors(self) -> Iterator[None]:
        """Raise StorageError instead of the SQL driver's errors."""
        try:
            yield
        except DBAPIError as error:
            raise storage_error(error, self.where) from error
        except sqlalchemy.exc.TimeoutError as error:
            raise StorageError(
                f"{self.where} has no free connection: {error}",
                hint="too many queries at the same time; try again",
                code=LOCKED,
            ) from error


_LIVENESS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Connections to PostgreSQL end 25 seconds after the network drops their packets. By default one
that waits for a response would hang for two hours, and with it the reads and writes behind it."""


class ReadSnapshot(NamedTuple):
    """Snapshot for a query. Rows may be ahead of SQL by one commit."""

    sql: Connection
    numbers: NumberStore


def _pragma(connection: Connection, name: str) -> int:
    """Return the value of a pragma of the SQLite database."""
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)


def storage_error(error: DBAPIError, where: str) -> StorageError:
    """Convert an error of the SQL driver to a StorageError with its fix."""
    message = str(error.orig).strip() or type(error.orig).__name__
    low = message.lower()
    if is_full(message):
        return full_error(where, message)
    if "locked" in low or "lock timeout" in low:
        return StorageError(
            f"{where} is locked by another process: {message}",
            hint="check for a second collector, a backup or a database shell that uses it",
            code=LOCKED,
        )
    if is_damaged(message):
        return damaged_error(where, message.splitlines()[0])
    return StorageError(
        f"{where} cannot be used: {message.splitlines()[0]}",
        hint="check that it exists, that you can write to it, and that its server runs",
    )


def insert(connection: Connection, table: Table) -> "sqlite.Insert | PostgresInsert":
    """Return the SQL dialect's INSERT, which has ``on_conflict_do_nothing`` and ``_do_update``."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def open_store(url: str, numbers: NumberStore | None = None, *, busy_seconds: float = 5.0) -> Store:
    """Open and migrate the SQL database at an SQLAlchemy URL; ``sqlite://`` is in memory.

    Args:
        url: ``sqlite:///FILE``, ``sqlite://`` or ``postgresql://USER@HOST/DATABASE``.
        numbers: store of the rows; None is in memory. Closed with the store.
        busy_seconds: how long a write waits for another process before it fails.

    Raises:
        UsageError: the URL is not one, or of a database that is not supported.
        StorageError: the database is locked, of a newer version, full, or not there.
    """
    store = Store(
        _build_engine(url, busy_seconds), MemoryNumberStore() if numbers is None else numbers
    )
    try:
        with store.write() as connection:
            migrate(connection, store.where)
    except BaseException:
        store.close()
        raise
    return store


def open_data_store(
    data: Path, url: str = "", *, lake: str = "", busy_seconds: float = 5.0
) -> Store:
    """Open the SQL database in a data directory, made private first (0700, file 0600).

    Args:
        data: directory of the database if it is a file, and of the rows unless ``lake`` is set.
        url: of a PostgreSQL that holds everything except the rows; "" is a file in ``data``.
        lake: location of the rows, a directory or ``s3://BUCKET/PREFIX``; all collectors on one
            PostgreSQL share it, and "" is the location that the first one chose.
        busy_seconds: how long a write waits for another process before it fails.

    Raises:
        UsageError: the URL is not one.
        StorageError: the database or the lake cannot be opened.
        MissingDependencyError: the lake's engine is not installed.
    """
    # Imported here, because its engine is heavy, and reading a directory does not need it.
    from vitals_collector.numbers.lake import Lake
    from vitals_collector.numbers.lake_engine import S3, known_bucket

    if lake and not url and not lake.startswith(S3):
        raise UsageError(
            f"--lake {lake} is a folder, which goes with --database postgresql://...",
            hint="without a database the rows are stored in --data: set that instead",
        )
    ensure_data_dir(data)
    if not url:
        file = data / DATABASE_FILE
        try:
            # Created here, so that SQLite never creates it (and its WAL) with the umask's mode.
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise StorageError(
                f"{file} cannot be opened: {error.strerror}",
                hint="give another directory with --data",
            ) from error
    catalogue = libpq_conninfo(url) if url else ""
    store = open_store(url or f"sqlite:///{file}", busy_seconds=busy_seconds)
    try:
        lake_folder = data / LAKE_FOLDER
        if not url:
            bucket = lake or known_bucket(lake_folder / "catalogue.sqlite")
            _make_private(lake_folder)
            store.numbers = Lake(lake_folder.absolute(), bucket=bucket)
            return store
        with store.write() as connection:
            lock_migrations(connection)  # two concurrent creations of a lake would fail
            lake_place = lake or _known_lake(connection)
            bucket = lake_place if lake_place.startswith(S3) else ""
            folder = (lake_folder if bucket or not lake_place else Path(lake_place)).absolute()
            _make_private(folder)
            store.numbers = Lake(folder, catalogue, bucket=bucket)
    except BaseException:
        store.close()
        raise
    return store


def known_lake(url: str) -> str:
    """Return where a PostgreSQL with the lake's catalog has its files; "" without a lake.

    Raises:
        UsageError: the URL is not one.
        StorageError: the database does not respond, or the directory is not on this machine.
    """
    engine = _build_engine(url, busy_seconds=5.0)
    try:
        with engine.connect() as connection:
            return _known_lake(connection)
    except DBAPIError as error:
        raise storage_error(error, engine.url.render_as_string(hide_password=True)) from error
    finally:
        engine.dispose()


def _known_lake(connection: Connection) -> str:
    """Query where the PostgreSQL database's lake has its files; "" without a lake."""
    if connection.dialect.name == "sqlite" or not sqlalchemy.inspect(connection).has_table(
        "ducklake_metadata"
    ):
        return ""
    query = sqlalchemy.text("SELECT value FROM ducklake_metadata WHERE key = 'data_path'")
    root = str(connection.execute(query).scalar_one())
    from vitals_collector.numbers.lake_engine import bucket_of

    if bucket := bucket_of(root):
        return bucket
    folder = Path(root).parent
    if not folder.is_dir():
        raise StorageError(
            f"the rows of this database are stored in {folder}, which is not on this machine",
            hint="collectors on one database share a folder: give it to each of them with --lake",
        )
    return str(folder)


def _make_private(folder: Path) -> None:
    """Create the directory for the rows of a store whose SQL tables are in PostgreSQL."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot hold the rows: {error.strerror}",
            hint="give another folder with --lake, or another --data",
        ) from error


def libpq_conninfo(url: str) -> str:
    """Convert the URL of a PostgreSQL database to libpq's format, as DuckDB needs it.

    Raises:
        UsageError: the URL is invalid.
    """
    try:
        parsed = sqlalchemy.make_url(url)
    except ArgumentError as error:
        raise _unusable_url_error(url, error) from error
    from psycopg.conninfo import make_conninfo  # the extra [postgresql] has it

    parts: dict[str, Any] = {
        **_LIVENESS,
        **parsed.query,  # such as sslmode; a socket's directory is a host as well
        "dbname": parsed.database,
        "host": parsed.host or parsed.query.get("host"),
        "port": parsed.port or parsed.query.get("port"),
        "user": parsed.username,
        "password": parsed.password,
    }
    return make_conninfo(**{name: value for name, value in parts.items() if value})


def ensure_data_dir(data: Path) -> Path:
    """Create the directory of the database with mode 0700; reject one of another user.

    Raises:
        InsecurePathError: others may enter it, and it holds more than ours.
        StorageError: it cannot be created, or belongs to another user.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = data.stat()
        is_ours = (data / DATABASE_FILE).exists() or not any(data.iterdir())
    except OSError as error:
        raise StorageError(
            f"{data} cannot be used as a data directory: {error.strerror}",
            hint="give another directory with --data",
        ) from error
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"{data} belongs to user {status.st_uid}, not to you ({os.geteuid()})",
            hint="give a directory of your own with --data",
        )
    if status.st_mode & 0o077:
        if not is_ours:
            raise InsecurePathError(
                f"{data} has mode {status.st_mode & 0o777:04o} and holds other files",
                hint="give a directory of its own with --data, or chmod go-rwx this one",
            )
        data.chmod(0o700)
    return data


def upsert(
    connection: Connection,
    table: Table,
    *rows: Mapping[str, Any],
    newer_by: str = "",
) -> None:
    """Insert rows with the same columns, or write them over those with the same primary keys.

    A row with a greater value in the column ``newer_by`` is not written over.
    """
    if not rows:
        return
    statement = insert(connection, table)
    new = statement.excluded
    where = table.c[newer_by] <= new[newer_by] if newer_by else None
    key = table.primary_key.columns.keys()
    values = {name: new[name] for name in rows[0] if name not in key}
    connection.execute(
        statement.on_conflict_do_update(index_elements=key, set_=values, where=where), rows
    )


def load_state(connection: Connection, name: str) -> bytes | None:
    """Return a body of ``engine_state``; None if there is none of that name."""
    query = select(engine_state.c.body).where(engine_state.c.name == name)
    return connection.execute(query).scalar()


def save_states(connection: Connection, bodies: Mapping[str, bytes]) -> None:
    """Write bodies of ``engine_state`` by name, in the order of names to avoid deadlocks."""
    rows = [{"name": name, "body": body} for name, body in sorted(bodies.items())]
    upsert(connection, engine_state, *rows)


def write_audit(
    connection: Connection, time_unix_ns: int, actor: str, action: str, subject: str, detail: str
) -> None:
    """Append an action of a user or of the collector to the audit log."""
    values = {"actor": actor, "action": action, "subject": subject, "detail": detail}
    connection.execute(audit.insert().values(time_unix_ns=time_unix_ns, **values))


def remove_nul(text: str) -> str:
    """Return the text without NUL, which a PostgreSQL column does not store."""
    return text.replace("\0", "")


def unknown_run(run_id: str) -> UsageError:
    """Return the error for a run that the database does not have."""
    return UsageError(
        f"there is no run {run_id}", hint="`vitals runs` lists the known runs", code=UNKNOWN
    )


def _build_engine(url: str, busy_seconds: float) -> Engine:
    """Create the SQLAlchemy engine for an SQLite or PostgreSQL URL."""
    try:
        parsed = sqlalchemy.make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        backend = parsed.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise UsageError(
                f"database is {parsed.render_as_string()!r}; supported are sqlite and postgresql",
                hint="leave --database out to use a file in the data directory",
            )
        options: dict[str, Any] = {}
        if backend == "sqlite":
            options["connect_args"] = {"timeout": busy_seconds, "check_same_thread": False}
            if parsed.database in (None, "", ":memory:"):
                options["poolclass"] = StaticPool
        else:
            limits = {key: v for key, v in _LIVENESS.items() if key not in parsed.query}
            options |= {"pool_pre_ping": True, "connect_args": limits}
        engine = create_engine(parsed, **options)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise _unusable_url_error(url, error) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_pragmas)
        event.listen(engine, "begin", _begin)
    return engine


def _unusable_url_error(url: str, error: Exception) -> UsageError:
    """Return the error for a database URL that SQLAlchemy cannot use."""
    return UsageError(
        f"database URL {_without_password(url)!r} cannot be used: {error}",
        hint="for PostgreSQL: pip install 'trainvitals[postgresql]' and "
        "postgresql://USER@HOST/DATABASE",
    )


def _without_password(url: str) -> str:
    """Return a database URL without its password, for an error message."""
    head, at, tail = url.rpartition("@")
    scheme, is_url, _ = head.partition("://")
    return f"{scheme if is_url else ''}{is_url}***{at}{tail}" if at else url


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    """Set the pragmas of a new SQLite connection: WAL, durable commits, foreign keys."""
    # SQLAlchemy sends BEGIN (see below), so that a read is a snapshot and a write starts as one.
    connection.isolation_level = None
    # Some builds overwrite all deleted data with zeros: on a full disk, that takes the journal
    # space that a deletion should free.
    pragmas = [
        *("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"),
        "secure_delete=FAST",
    ]
    # So that freed pages can be returned incrementally, which only an empty database can switch on:
    # repeating it would be a write, which a full disk refuses.
    if connection.execute("PRAGMA page_count").fetchone() == (0,):
        pragmas.insert(0, "auto_vacuum=INCREMENTAL")
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """Begin an SQLite transaction; a write locks the database at once."""
    writes = connection.get_execution_options().get("vitals_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@lru_cache
def _positional_dialect(name: str) -> Dialect:
    """Return the SQL dialect by its name, with parameters by position."""
    if name == "sqlite":
        return SQLiteDialect(paramstyle="qmark")
    from sqlalchemy.dialects.postgresql.base import PGDialect

    return PGDialect(paramstyle="format")  # type: ignore[no-untyped-call]


_ROWS_AT_ONCE = 128
"""Rows per SQLite statement: with one row each, a fifth of the time goes to Python's lock."""


class PreparedStatement:
    """An UPDATE with values by position, in the order of ``names``, its ``bindparam``s.

    It costs at most as much as the driver's own ``executemany``. SQLAlchemy compiles the statement
    once for each dialect; its further work per row (dictionaries, defaults, conversions without
    effect here) costs several times what the database needs for the row, and every row of every
    rank is written here.
    """

    def __init__(self, statement: Update, names: Sequence[str]) -> None:
        self._statement = statement
        self._names = tuple(names)
        self._compiled = lru_cache(self._compile)

    def execute(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run the SQL statement for each row; return how many rows of the table it changed.

        Each of the rows has to change a different row of the table.
        """
        if not rows:
            return 0
        sql, order, sql_at_once = self._compiled(connection.dialect.name)
        num_at_once = len(rows) // _ROWS_AT_ONCE * _ROWS_AT_ONCE if sql_at_once else 0
        num_changed = 0
        if num_at_once:
            groups = [
                tuple(chain.from_iterable(rows[start : start + _ROWS_AT_ONCE]))
                for start in range(0, num_at_once, _ROWS_AT_ONCE)
            ]
            num_changed = connection.exec_driver_sql(sql_at_once, groups).rowcount
        if num_at_once < len(rows):
            ordered_rows = [order(row) for row in rows[num_at_once:]]
            num_changed += connection.exec_driver_sql(sql, ordered_rows).rowcount
        return num_changed

    def _compile(self, dialect: str) -> tuple[str, Callable[[tuple[Any, ...]], Any], str]:
        """Return the SQL of the statement, the order of its values, and the SQL for a group."""
        compiled = self._statement.compile(dialect=_positional_dialect(dialect))
        places = [self._names.index(name) for name in compiled.positiontup or ()]
        return str(compiled), itemgetter(*places), self._compile_group(dialect)

    def _compile_group(self, dialect: str) -> str:
        """Return the SQL for a group of rows; "" if the database has no such statement."""
        if dialect != "sqlite" or sqlite3.sqlite_version_info < (3, 33):
            return ""
        sql = str(self._statement.compile(dialect=SQLiteDialect(paramstyle="named")))
        sql = re.sub(r":(\w+)", lambda m: f"v.column{self._names.index(m[1]) + 1}", sql)
        row = f"({', '.join('?' * len(self._names))})"
        values = ", ".join([row] * _ROWS_AT_ONCE)
        return sql.replace(" WHERE ", f" FROM (VALUES {values}) AS v WHERE ", 1)
