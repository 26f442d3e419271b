"""Opens the database, SQLite or PostgreSQL, and gives out transactions whose errors are ours.

A write that returned is on disk: SQLite runs with WAL and ``synchronous=FULL`` (every commit is
fsynced), PostgreSQL with its own default. One fsync per batch of a hundred rows is affordable, and
it makes ``durable_seq`` simply the last stored row, where WAL checkpoints once a second would need
a clock, a thread and a second number.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import StaticPool

from trainvitals.errors import InsecurePathError, StorageError, UsageError
from trainvitals.records import EventRow
from trainvitals.wire import Batch
from vitals_collector.storage.checksums import Damage
from vitals_collector.storage.migrate import migrate

DATABASE_FILE = "vitals.db"
FULL = "V302"
"""Error code: there is no room left."""
UNKNOWN = "V101"
"""Error code: there is nothing of that name."""
LOCKED = "V303"
"""Error code: somebody else holds the database."""
_FEW_PAGES = 32
_LOG = logging.getLogger("vitals.collector.store")

AfterIngest = Callable[[Sequence[tuple[Batch, Sequence[EventRow]]]], None]
"""Told of new rows (duplicates cut off) and the events in them, after their commit: of all batches
that were committed together at once."""


@dataclass(slots=True)
class IngestCounters:
    """What came in, and what failed, since this process started; read by ``/metrics``."""

    num_rows: int = 0
    num_duplicate: int = 0
    num_lost: int = 0
    num_damaged: int = 0
    """Stretches of spools, and their states, that were damaged and passed over."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Refused batches by error code."""
    num_deferred: int = 0
    """Bodies sent away because there was no room, to come back later."""
    thinned: dict[tuple[str, str], int] = field(default_factory=dict)
    """Rows taken away, by stream and reason."""
    num_forgotten: int = 0
    """Rows that came of runs which were removed."""
    removed_runs: dict[str, int] = field(default_factory=dict)
    """Runs removed, by reason."""
    over_cap: dict[str, str] | None = None
    """Runs that are above their cap now with nothing left to thin, and what is said of each; None
    before all runs were looked at."""
    failures: dict[str, int] = field(default_factory=dict)
    """Errors that one part of the collector kept from the others, by part."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by whoever counts."""

    def reject(self, code: str) -> None:
        """Count a body that holds no batches; single batches are counted where they are stored."""
        with self.lock:
            self.rejected[code] = self.rejected.get(code, 0) + 1

    def fail(self, part: str) -> None:
        """Count an error that ended nothing but what a part was at; it is tried again."""
        with self.lock:
            self.failures[part] = self.failures.get(part, 0) + 1

    def defer(self) -> None:
        """Count a body for which there was no room."""
        with self.lock:
            self.num_deferred += 1


class Store:
    """A migrated database. ``read`` and ``write`` give connections; both raise StorageError only.

    Writers of one process take turns by a lock, so that SQLite's own waiting is for other
    processes alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.damage = Damage()
        """What was found damaged."""
        self.damage.be_told(engine.dialect)
        self.counters = IngestCounters()
        self.after_ingest: list[AfterIngest] = []
        self.is_reading_in = False
        """Whether a folder's past is being read: how a run ended may be yet to come."""
        self.flush: Callable[[], None] = _nothing_waits
        """Places what was acknowledged and is not in its tables yet: called before reads."""
        self.exclusive: Callable[[], AbstractContextManager[None]] = nullcontext
        """Does so too, and lets nothing be acknowledged before the context ends."""
        self.note_stored: Callable[[Sequence[Batch]], None] = _nobody_asks
        """Told, before that context ends, which rows were stored in it."""
        self.forget_marks: Callable[[Iterable[tuple[str, str, str]]], None] = _nobody_asks
        """Told, before that context ends, of which streams more is known than their rows tell."""
        self.no_room: StorageError | None = None
        """What the last write was refused with, where that was for want of room."""
        self._is_behind = False
        self._turn = threading.RLock()
        self._is_sqlite = engine.dialect.name == "sqlite"

    @property
    def where(self) -> str:
        """The database's address without its password, for messages."""
        return self.engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self, *, settled: bool = True) -> Iterator[Connection]:
        """Give a connection whose reads see one moment.

        Args:
            settled: that moment has the rows that were acknowledged before, as far as there is
                room to place them. Who reads no rows, or has them from ``after_ingest``, need not
                ask for it.
        """
        if settled:
            self.try_to_settle()
        with self._one_at_a_time(), self._translated(), self.engine.connect() as connection:
            if not self._is_sqlite:  # there, a transaction sees one moment by itself
                options: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
                connection = connection.execution_options(**options, postgresql_readonly=True)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection inside a transaction; commit durably at the end, or undo everything."""
        turn = self._turn if self._is_sqlite else threading.RLock()
        try:
            with turn, self._translated(), self.engine.connect() as connection:
                writing = connection.execution_options(vitals_write=True)
                with writing.begin():
                    yield writing
        except StorageError as error:
            if error.code == FULL:
                self.no_room = error
            raise
        self.no_room = None

    def try_to_settle(self) -> None:
        """Settle; on a full disk or a locked database what waits goes on waiting, and that is said.

        Else nobody could look at what is there just when there is something to look for.

        Raises:
            StorageError: the database refused for another reason.
        """
        try:
            self.flush()
        except StorageError as error:
            if error.code not in (FULL, LOCKED):
                raise
            if not self._is_behind:  # not again at each read
                self.counters.fail("arrivals")
                _LOG.warning("newest_rows_not_shown: %s", error)
            self._is_behind = True
        else:
            self._is_behind = False

    def reclaim(self, *, above: float = 0.0, max_pages: int = 512) -> int:
        """Give free pages of an SQLite file back to the disk; PostgreSQL does that by itself.

        Args:
            above: do nothing until so large a share of the file is free.
            max_pages: at most so many, for it moves others into their place.

        Returns:
            How many were given back.
        """
        if not self._is_sqlite:
            return 0

        with self.read() as connection:
            num_free = _pragma(connection, "freelist_count")
            if not num_free or num_free <= above * _pragma(connection, "page_count"):
                return 0
        try:
            return self._give_back(min(max_pages, num_free))
        except StorageError as error:
            if error.code != FULL:
                raise
            self.checkpoint()  # the journal has no room for so many at once
            num = self._give_back(min(_FEW_PAGES, num_free))
            self.checkpoint()  # only now the file is shorter
            return num

    def _give_back(self, num_pages: int) -> int:
        with self.write() as connection:
            before = _pragma(connection, "freelist_count")
            # However many it is told, the driver takes one step, and a step gives one page back.
            for _ in range(num_pages):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
            return before - _pragma(connection, "freelist_count")

    def checkpoint(self) -> None:
        """Have the room of SQLite's journal be used again, which else grows to some MiB."""
        if self._is_sqlite:
            with self._one_at_a_time(), self._translated(), self.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint")

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # A database in memory is one connection, shared by all threads.
        if isinstance(self.engine.pool, StaticPool):
            with self._turn:
                yield
        else:
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise storage_error(error, self.where) from error


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)


def _nothing_waits() -> None:
    return


def _nobody_asks(_: object) -> None:
    return


def storage_error(error: DBAPIError, where: str) -> StorageError:
    """Return the error a person can act on for what the database said."""
    message = str(error.orig).strip() or type(error.orig).__name__
    low = message.lower()
    if "disk is full" in low or "no space left" in low or "disk quota" in low:
        return StorageError(
            f"{where} has no disk space left: {message}",
            hint="free space there; agents keep their spools and retry by themselves",
            code=FULL,
        )
    if "locked" in low or "lock timeout" in low:
        return StorageError(
            f"{where} is locked by another process: {message}",
            hint="check for a second collector, a backup or a database shell that uses it",
            code=LOCKED,
        )
    if "malformed" in low or "not a database" in low:
        return StorageError(
            f"{where} is damaged: {message.splitlines()[0]}",
            hint="put the copy that `vitals store backup` made as vitals.db into a new folder and "
            "give it with --data; without a copy, start with a new folder. The run directories "
            "still hold what agents have sent: --folder imports it",
        )
    return StorageError(
        f"{where} cannot be used: {message.splitlines()[0]}",
        hint="check that it exists, that you can write to it, and that its server runs",
    )


def insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's INSERT, which knows ``on_conflict_do_nothing`` and ``_do_update``."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)


def open_store(url: str, *, busy_seconds: float = 5.0) -> Store:
    """Return the migrated store at an SQLAlchemy URL; ``sqlite://`` is one in memory.

    Args:
        url: ``sqlite:///FILE``, ``sqlite://`` or ``postgresql://USER@HOST/DATABASE``.
        busy_seconds: how long a write waits for another process before it says so.

    Raises:
        UsageError: the URL is not one, or of a database that is not supported.
        StorageError: the database is locked, of a newer version, full, or not there.
    """
    store = Store(_engine(url, busy_seconds))
    try:
        with store.write() as connection:
            migrate(connection, store.where)
    except BaseException:
        store.close()
        raise
    return store


def open_data_store(data: Path, *, busy_seconds: float = 5.0) -> Store:
    """Return the store in a data directory, made private (directory 0700, file 0600) first."""
    ensure_data_dir(data)
    file = data / DATABASE_FILE
    try:
        # Made by us, so that SQLite never creates it (and its WAL) with the umask's mode.
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise StorageError(
            f"{file} cannot be opened: {error.strerror}",
            hint="give another directory with --data",
        ) from error
    return open_store(f"sqlite:///{file}", busy_seconds=busy_seconds)


def ensure_data_dir(data: Path) -> Path:
    """Make the directory private to its owner where it does not exist; refuse a stranger's.

    Raises:
        InsecurePathError: others may enter it, and it holds more than ours.
        StorageError: it cannot be made, or belongs to somebody else.
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


def clean(text: str) -> str:
    """Return the text without NUL, which PostgreSQL does not store."""
    return text.replace("\0", "")


def unknown_run(run_id: str) -> UsageError:
    """Return the error that says that no run has this id."""
    return UsageError(
        f"there is no run {run_id}", hint="`vitals runs` lists the known runs", code=UNKNOWN
    )


def _engine(url: str, busy_seconds: float) -> Engine:
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
            options |= {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        engine = create_engine(parsed, **options)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UsageError(
            f"database URL {_without_password(url)!r} cannot be used: {error}",
            hint="for PostgreSQL: pip install 'trainvitals[postgresql]' and "
            "postgresql://USER@HOST/DATABASE",
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_pragmas)
        event.listen(engine, "begin", _begin)
    return engine


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***{at}{tail}" if at else url


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    # SQLAlchemy says BEGIN (see below), so that a read sees one moment and a write starts as one.
    connection.isolation_level = None
    # Some builds write zeros over all that is deleted: that takes the room in the journal which to
    # delete is to give back on a full disk.
    pragmas = [
        *("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"),
        "secure_delete=FAST",
    ]
    # So it can give back freed pages little by little, which only a fresh database learns: to say
    # so once more would be a write, which a full disk refuses.
    if connection.execute("PRAGMA page_count").fetchone() == (0,):
        pragmas.insert(0, "auto_vacuum=INCREMENTAL")
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("vitals_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


__all__ = [
    *("FULL", "LOCKED", "UNKNOWN", "Store"),
    *("clean", "ensure_data_dir", "open_data_store", "open_store", "unknown_run"),
]
