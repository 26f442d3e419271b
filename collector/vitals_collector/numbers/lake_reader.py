"""A lake for people's SQL: attached read-only by another process, live while collectors commit.

Only questions to the offered views are taken (``lake_question``), files outside the lake's own
folder are out of reach, and what a question may use of memory and time has a limit. The checksums
of files are not compared here: that would read whole files for a question about a few rows.
"""

import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.lake_engine import extension, translated
from vitals_collector.numbers.lake_place import Bucket, Folder, Place
from vitals_collector.numbers.lake_question import check
from vitals_collector.numbers.lake_views import views_of

_NARROWER = "name a run (WHERE run_id = '...'), fewer columns, or a range of steps"


class Answer(NamedTuple):
    """Rows of an answer, and the names of their columns."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool = False
    """Whether there were more rows."""


class LakeReader:
    """Answers SQL over views such as runs, steps, ranks, layers, scalars and decisions."""

    def __init__(
        self,
        folder: Path,
        catalogue: str = "",
        *,
        bucket: str = "",
        database: Path | None = None,
        memory_limit: str = "512MB",
        max_seconds: float = 60.0,
    ) -> None:
        """Attach a lake that is there, read-only.

        Args:
            folder: where the lake lies.
            catalogue: of PostgreSQL, as ``dbname=... host=...``, which holds the collector's other
                tables as well; "" is a SQLite file in the folder.
            bucket: where its files lie on S3; "" is in the folder.
            database: the SQLite file of the collector's other tables; without them only the views
                of numbers are there.
            memory_limit: what a question may take; it never writes to disk.
            max_seconds: how long a question may take.

        Raises:
            MissingDependencyError: DuckDB's extensions are not installed.
            StorageError: the lake cannot be opened.
            UsageError: there are no keys of the bucket in the environment.
        """
        self._memory_limit, self._max_seconds = memory_limit, max_seconds
        # Nothing is downloaded, now or by a question.
        self._connection = duckdb.connect(
            config={
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "allow_unsigned_extensions": True,  # those of our own packages, as the engine does
                "python_enable_replacements": False,
            }
        )
        with translated():
            place = Bucket(bucket, self._rows) if bucket else Folder(folder)
            self._attach(folder, catalogue, database, place)
            self._make_views(has_records=bool(catalogue) or database is not None)
            self._lock_in(place)

    def __enter__(self) -> "LakeReader":
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the lake go."""
        self._connection.close()

    def _rows(self, sql: str) -> pa.Table:
        return self._connection.execute(sql).to_arrow_table()

    def _attach(self, folder: Path, catalogue: str, database: Path | None, place: Place) -> None:
        scanner = "postgres_scanner" if catalogue else "sqlite_scanner"
        uri = f"postgres:{catalogue}" if catalogue else f"sqlite:{folder / 'catalogue.sqlite'}"
        # Who meets a writer on SQLite waits for it, instead of being refused.
        waits = "" if catalogue else ", META_BUSY_TIMEOUT 10000"
        for name in ("ducklake", scanner, *place.extensions):
            self._connection.execute(f"LOAD '{extension(name)}'")
        place.enter(self._connection)
        self._connection.execute(
            f"ATTACH {_text(f'ducklake:{uri}')} AS lake"
            f" (READ_ONLY, OVERRIDE_DATA_PATH true, DATA_PATH {_text(place.root)}{waits})"
        )
        if catalogue:
            self._connection.execute(f"ATTACH {_text(catalogue)} AS db (TYPE postgres, READ_ONLY)")
        elif database is not None:
            self._connection.execute(
                f"ATTACH {_text(str(database))} AS db (TYPE sqlite, READ_ONLY, BUSY_TIMEOUT 10000)"
            )

    def _make_views(self, *, has_records: bool) -> None:
        columns: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for table, name, kind in self._connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns()"
            " WHERE database_name = 'lake' ORDER BY column_index"
        ).fetchall():
            columns[table].append((name, kind))
        names = self._connection.execute(
            "SELECT table_name FROM duckdb_tables() UNION SELECT view_name FROM duckdb_views()"
        ).fetchall()
        self._taken = {name.casefold() for (name,) in names}
        views = views_of(columns, has_records=has_records)
        for view, sql in views.items():
            self._connection.execute(f"CREATE VIEW {view} AS {sql}")
        self.views = tuple(views)
        """What can be asked."""

    def _lock_in(self, place: Place) -> None:
        """Take every way out from the questions to come."""
        for setting in (
            f"memory_limit = {_text(self._memory_limit)}",
            "threads = 1",  # the cores belong to the training
            "temp_directory = ''",
            f"allowed_directories = [{_text(place.root)}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def ask(self, sql: str, *, max_rows: int = 10_000) -> Answer:
        """Return a question's answer, at most so many rows of it.

        Raises:
            UsageError: it is no question, asks for more than the views, or is no SQL.
            StorageError: it took too long or too much memory.
        """
        check(self._connection, sql, self.views, self._taken)
        is_late = threading.Event()

        def interrupt() -> None:
            is_late.set()
            self._connection.interrupt()

        timer = threading.Timer(self._max_seconds, interrupt)
        timer.start()
        try:
            cursor = self._connection.execute(sql)
            names = tuple(column[0] for column in cursor.description or ())
            rows = cursor.fetchmany(max_rows + 1)
            return Answer(names, rows[:max_rows], len(rows) > max_rows)
        except duckdb.OutOfMemoryException:
            raise StorageError(
                f"the question needs more than {self._memory_limit} of memory", hint=_NARROWER
            ) from None
        except duckdb.Error as error:
            if is_late.is_set():
                raise too_late(self._max_seconds) from None
            raise UsageError(f"DuckDB refuses the question: {error}") from None
        finally:
            timer.cancel()


def too_late(seconds: float) -> StorageError:
    """Return the error for a question that took too long."""
    return StorageError(f"the question took longer than {seconds:g} s", hint=_NARROWER)


def _text(value: str) -> str:
    """Return a text as SQL takes it."""
    return "'" + value.replace("'", "''") + "'"
