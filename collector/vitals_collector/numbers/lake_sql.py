"""SQL queries of users on a lake: attached read-only while collectors commit.

The views show rows of the lake and the tables of the collector's SQL database: ids are replaced by
names, times are in UTC, and content without a column here (bodies, commands, settings of the
collector, audit log) is not offered.

Only one query is accepted. The engine's own parser analyzes it. Every table in the parsed tree has
to be an offered view or part of the query itself, and every table function one that generates
numbers: the others read files, show the catalog, or maintain lakes. Files outside the lake's
directory are unreachable, and memory and time of a query are limited. File checksums are not
verified here: a query for a few rows would read whole files.
"""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers.interface import RANKS
from vitals_collector.numbers.lake_catalogue import (
    FORMER_KEY,
    KEYS,
    TYPES,
    Places,
    decode_column_name,
    quoted,
    stream_column_sql,
)
from vitals_collector.numbers.lake_engine import (
    FileStore,
    LocalFileStore,
    S3FileStore,
    connect_duckdb,
    escape_sql,
    find_duckdb_extension,
    translate_lake_errors,
)

# -------------------------------------------------------------------------------------------- views

_NAMED = {"scalars": "name", "layers": "layer"}
"""Streams whose rows have a number instead of a name, and its column."""
_NUMBERS = {
    "steps": ("steps", "rank = 0"),
    "ranks": ("steps", "rank >= 0"),
    "levels": (RANKS, "true"),
    "layers": ("layers", "true"),
    "scalars": ("scalars", "true"),
    "nodes": ("node", "true"),
    "gpus": ("gpu", "true"),
    "processes": ("process", "true"),
}
"""Each with the stream that it shows, and which of its rows."""
_WRITER = ("source", "incarnation", "seq")
_BRACED = re.compile(r"\{(\w+)\}")
_RECORDS = {
    "decisions": "run_id, step, action, rule, cause, rank, acted, attempt, decided_at_step,"
    " {time_unix_ns}",
    "findings": "run_id, step, attempt, rank, kind, level, detector, {time_unix_ns}",
    "alerts": "run_id, name, severity, state, summary, step, {started_unix_ns},"
    " {updated_unix_ns}, {ended_unix_ns}, acknowledged_by",
    "checkpoints": "run_id, checkpoint_id, place, step, attempt, state, num_bytes, detail,"
    " {time_unix_ns}",
    "events": "run_id, source, step, attempt, kind, summary, {time_unix_ns}",
    "annotations": "run_id, step, text, written_by, {time_unix_ns}",
}
"""Tables of the SQL database and their shown columns; times in braces."""
VIEWS = frozenset({"runs", *_NUMBERS, *_RECORDS})
"""Names that are offered once there is something to show."""
_RUNS = """
SELECT r.run_id, r.name, r.project, r.user_name AS "user", r.mode, r.world_size,
  {started} AS started, s.last_step, s.loss, {seen} AS last_seen,
  CASE WHEN h.run_id IS NOT NULL THEN 'halted'
    WHEN s.ended_state <> '' THEN s.ended_state
    WHEN NOT s.lives OR h2.seen < epoch_ns(now()) - 60000000000 THEN 'lost'
    ELSE 'running' END AS state,
  coalesce(s.ended_state, '') AS ended_state, coalesce(s.ended_reason, '') AS ended_reason
FROM db.runs r LEFT JOIN (
  SELECT run_id, max(last_step) AS last_step, max(last_seen_unix_ns) AS seen,
    arg_max(loss, last_step_unix_ns) AS loss,
    arg_max(incarnation, started_unix_ns) AS incarnation,
    arg_max(alive, started_unix_ns) <> 0 AS lives,
    arg_max(ended_state, started_unix_ns) AS ended_state,
    arg_max(ended_reason, started_unix_ns) AS ended_reason
  FROM db.sources WHERE rank = 0 GROUP BY run_id
) s ON s.run_id = r.run_id LEFT JOIN (
  SELECT run_id, max(greatest(last_received_unix_ns, last_seen_unix_ns)) AS seen
  FROM db.sources GROUP BY run_id
) h2 ON h2.run_id = r.run_id LEFT JOIN (
  SELECT DISTINCT run_id, incarnation FROM db.decisions WHERE action = 'halt' AND acted
) h ON h.run_id = r.run_id AND h.incarnation = s.incarnation
"""
"""``state`` is as in ``vitals runs``, for a collector that treats a run as lost after a minute."""


def views_of(
    columns: Mapping[str, Sequence[tuple[str, str]]], *, has_records: bool
) -> dict[str, str]:
    """Return the SELECT of each view of the lake that users can query.

    ``columns`` has names and DuckDB types for each of the lake's tables. With ``has_records``, the
    SQL database is attached as ``db``.
    """
    views = {
        view: _numbers_view_sql(stream, columns[stream], which, has_names=has_records)
        for view, (stream, which) in _NUMBERS.items()
        if stream in columns
    }
    if has_records:
        views |= {
            table: f"SELECT {_with_times(listed)} FROM db.{table}"
            for table, listed in _RECORDS.items()
        }
        views["runs"] = _RUNS.format(
            started=_time_sql("r.started_unix_ns"), seen=_time_sql("s.seen")
        )
    elif "runs" in columns:
        views["runs"] = "SELECT run_id FROM lake.runs"
    return views


def _numbers_view_sql(
    stream: str, columns: Sequence[tuple[str, str]], which: str, *, has_names: bool
) -> str:
    """Return the SELECT of the view that shows the rows of a stream to users."""
    kinds = {kind: short for short, kind in TYPES.items()}
    places: Places = {
        (decode_column_name(lake_column), kinds[kind]): lake_column
        for lake_column, kind in columns
        if lake_column not in (*KEYS, FORMER_KEY)
    }
    shown = {"rank": "rank", "time": _time_sql("time_unix_ns")}
    for (name, _), lake_column in places.items():
        if stream_column_sql(name, places) not in shown.values():
            # The engine folds case: the second of two such names is shown with the lake's name.
            labels = (*shown, *_WRITER, "run", "run_id")
            is_free = name.casefold() not in {label.casefold() for label in labels}
            shown[name if is_free else lake_column] = stream_column_sql(name, places)
    listed = ", ".join(f"{value} AS {quoted(label)}" for label, value in shown.items())
    rows = f"SELECT run, {listed}, {', '.join(_WRITER)} FROM lake.{stream} WHERE {which}"
    every = "SELECT u.run_id, r.* EXCLUDE (run)"
    runs = f"FROM ({rows}) r JOIN lake.runs u ON u.run = r.run"
    named = _NAMED.get(stream)
    if named not in shown or not has_names:
        return f"{every} {runs}"
    return (
        f"{every} REPLACE (coalesce(n.name, CAST(r.{named} AS VARCHAR)) AS {named}) {runs}"
        f" LEFT JOIN db.names n ON n.stream = '{stream}' AND n.run_id = u.run_id"
        f" AND n.incarnation = r.incarnation AND n.id = r.{named}"
    )


def _with_times(listed: str) -> str:
    """Return a view's columns, those in braces as moments under names without their unit."""
    return _BRACED.sub(
        lambda match: f"{_time_sql(match[1])} AS {match[1].removesuffix('_unix_ns')}", listed
    )


def _time_sql(column: str) -> str:
    """Return the SQL expression of a time in UTC for users; NULL without one."""
    return f"make_timestamp(nullif({column}, 0) // 1000)"


# ---------------------------------------------------------------------------------------- questions

EXAMPLE = "SELECT step, loss FROM steps WHERE run_id = '...' ORDER BY step"
_TABLE_FUNCTIONS = ("range", "generate_series", "unnest")
_REFUSED_FUNCTIONS = (
    *("getenv", "getvariable", "current_setting", "which_secret"),  # data of this process
    *("query", "query_table", "json_serialize_plan", "json_execute_serialized_sql"),
    *("write_log", "nextval", "currval", "setseed", "sleep_ms", "pg_sleep"),
)
_EXPLAIN = re.compile(r"\A\s*EXPLAIN\s+", re.IGNORECASE)


def check_query(
    connection: duckdb.DuckDBPyConnection, sql: str, views: Collection[str], taken: Collection[str]
) -> None:
    """Raise an error unless a user's SQL is a query over the lake's views.

    ``views`` are the offered names, in lower case. ``taken`` are lower-case names in the engine or
    an attached database: a part of a query may not have such a name, because it would be resolved
    outside its scope.

    Raises:
        UsageError: not SQL, more than one statement, not a SELECT or EXPLAIN of one, or it uses
            more than the views.
    """
    parsed = _parse_select(connection, _unwrap_explain(sql))
    parts = {name.casefold() for name in _iter_cte_names(parsed)}
    shadowed = sorted(parts & set(taken))
    if shadowed:
        raise UsageError(
            f"WITH {shadowed[0]}: that name belongs to something else here",
            hint=f"give this part of the question another name, such as my_{shadowed[0]}",
        )
    for refused in _iter_forbidden_names(parsed, {*views, *parts}):
        if (view := refused.removeprefix("the table ").casefold()) in VIEWS:
            raise UsageError(
                f"nothing was recorded here yet that {view} would show",
                hint=f"so far there are {', '.join(sorted(views))}",
            )
        raise UsageError(
            f"{refused} is not offered: it may read or change more than what runs recorded",
            hint=f"ask the views {', '.join(sorted(views))}, such as {EXAMPLE}",
        )


def _unwrap_explain(sql: str) -> str:
    """Return the one SELECT that a user's SQL is, or that it explains."""
    try:
        statements = duckdb.extract_statements(sql)
        if len(statements) == 1 and statements[0].type == duckdb.StatementType.EXPLAIN:
            sql = _EXPLAIN.sub("", sql)
            statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise UsageError(f"this is not valid SQL: {error}", hint=EXAMPLE) from None
    kinds = [statement.type for statement in statements]
    if kinds != [duckdb.StatementType.SELECT]:
        names = ", ".join(kind.name for kind in kinds) or "nothing"
        raise UsageError(
            f"only one SELECT, or EXPLAIN of one, is taken; this is {names}", hint=EXAMPLE
        )
    return sql


def _parse_select(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """Parse a user's SQL on the lake; an error if it is not a SELECT."""
    tree = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchone()
    parsed = json.loads(tree[0]) if tree is not None else {"error": True}
    if parsed["error"]:
        raise UsageError("only SELECT is taken; this is a command in the form of one", hint=EXAMPLE)
    return parsed


def _iter_cte_names(node: Any) -> Iterator[str]:
    """Yield the names of common table expressions (WITH) in a user's query."""
    for at in _walk_query(node):
        for part in at.get("cte_map", {}).get("map", ()):
            yield str(part["key"])


def _iter_forbidden_names(node: Any, names: Collection[str]) -> Iterator[str]:
    """Yield the tables and functions that a user's query on the lake must not use."""
    for at in _walk_query(node):
        kind, function = at.get("type"), at.get("function_name")
        if kind == "BASE_TABLE":
            path = [str(at.get(f"{part}_name", "")) for part in ("catalog", "schema", "table")]
            if any(path[:2]) or path[2].casefold() not in names:
                yield f"the table {'.'.join(part for part in path if part)}"
        elif kind == "SHOW_REF":
            yield "DESCRIBE, SHOW or SUMMARIZE"
        elif kind == "TABLE_FUNCTION":
            name = str(at.get("function", {}).get("function_name", "")).casefold()
            if name not in _TABLE_FUNCTIONS:
                yield f"the function {name or 'of a table'}"
        elif function is not None and str(function).casefold() in _REFUSED_FUNCTIONS:
            yield f"the function {function}"


def _walk_query(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of a user's parsed query."""
    if isinstance(node, list):
        for part in node:
            yield from _walk_query(part)
    elif isinstance(node, dict):
        yield node
        for part in node.values():
            yield from _walk_query(part)


# --------------------------------------------------------------------------------------- the reader

_NARROWER = "name a run (WHERE run_id = '...'), fewer columns, or a range of steps"


class SqlResult(NamedTuple):
    """Rows and column names of a result."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool = False
    """Whether there were more rows."""


class LakeReader(AbstractContextManager["LakeReader"]):
    """Runs SQL over views such as runs, steps, ranks, layers, scalars and decisions."""

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
        """Attach an existing lake, read-only.

        Args:
            folder: directory of the lake.
            catalogue: PostgreSQL, as ``dbname=... host=...``, which also has the collector's other
                tables; "" is a SQLite file in the directory.
            bucket: S3 location of its files; "" is the directory.
            database: the SQLite file of the collector's other tables; without it only the views of
                numbers exist.
            memory_limit: maximum memory of a query; it never writes to disk.
            max_seconds: maximum duration of a query.

        Raises:
            MissingDependencyError: DuckDB's extensions are not installed.
            StorageError: the lake cannot be opened.
            UsageError: there are no keys of the bucket in the environment.
        """
        self._memory_limit, self._max_seconds = memory_limit, max_seconds
        self._connection = connect_duckdb(python_enable_replacements=False)
        with translate_lake_errors():
            file_store = (
                S3FileStore(bucket, self._query_table) if bucket else LocalFileStore(folder)
            )
            self._attach(folder, catalogue, database, file_store)
            self._make_views(has_records=bool(catalogue) or database is not None)
            self._disable_external_access(file_store)

    def __exit__(self, *error: object) -> None:
        """Close the lake."""
        self._connection.close()

    def _query_table(self, sql: str) -> pa.Table:
        """Return the result of an SQL query on the lake as an Arrow table."""
        return self._connection.execute(sql).to_arrow_table()

    def _attach(
        self, folder: Path, catalogue: str, database: Path | None, file_store: FileStore
    ) -> None:
        """Attach the lake and the database read-only to the user's SQL engine."""
        scanner = "postgres_scanner" if catalogue else "sqlite_scanner"
        uri = f"postgres:{catalogue}" if catalogue else f"sqlite:{folder / 'catalogue.sqlite'}"
        # On SQLite, wait for a writer instead of failing.
        waits = "" if catalogue else ", META_BUSY_TIMEOUT 10000"
        for name in ("ducklake", scanner, *file_store.extensions):
            self._connection.execute(f"LOAD '{find_duckdb_extension(name)}'")
        file_store.prepare_connection(self._connection)
        root = _quote_sql_text(file_store.root)
        self._connection.execute(
            f"ATTACH {_quote_sql_text(f'ducklake:{uri}')} AS lake"
            f" (READ_ONLY, OVERRIDE_DATA_PATH true, DATA_PATH {root}{waits})"
        )
        if catalogue:
            self._connection.execute(
                f"ATTACH {_quote_sql_text(catalogue)} AS db (TYPE postgres, READ_ONLY)"
            )
        elif database is not None:
            self._connection.execute(
                f"ATTACH {_quote_sql_text(str(database))} AS db"
                " (TYPE sqlite, READ_ONLY, BUSY_TIMEOUT 10000)"
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
        """Names of the views."""

    def _disable_external_access(self, file_store: FileStore) -> None:
        """Disable external access for users' later queries on the lake."""
        for setting in (
            f"memory_limit = {_quote_sql_text(self._memory_limit)}",
            "threads = 1",  # the cores belong to the training
            "temp_directory = ''",
            f"allowed_directories = [{_quote_sql_text(file_store.root)}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def ask(self, sql: str, *, max_rows: int = 10_000) -> SqlResult:
        """Return the result of a user's query, at most ``max_rows`` rows.

        Raises:
            UsageError: it is not a query, uses more than the views, or is not SQL.
            StorageError: it took too long or too much memory.
        """
        check_query(self._connection, sql, self.views, self._taken)
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
            return SqlResult(names, rows[:max_rows], len(rows) > max_rows)
        except duckdb.OutOfMemoryException:
            raise StorageError(
                f"the question needs more than {self._memory_limit} of memory", hint=_NARROWER
            ) from None
        except duckdb.Error as error:
            if is_late.is_set():
                raise query_timeout_error(self._max_seconds) from None
            raise UsageError(f"DuckDB refuses the question: {error}") from None
        finally:
            timer.cancel()


def query_timeout_error(seconds: float) -> StorageError:
    """Return the error for a user's SQL query that took too long."""
    return StorageError(f"the question took longer than {seconds:g} s", hint=_NARROWER)


def _quote_sql_text(value: str) -> str:
    """Return a text quoted for a setting of the user's SQL engine."""
    return f"'{escape_sql(value)}'"
