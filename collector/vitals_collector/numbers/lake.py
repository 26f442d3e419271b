"""Numbers in DuckLake: Parquet in a folder, with a transactional catalogue in SQLite or PostgreSQL.

One table a stream, whose columns only grow. A commit holds the rows of any number of writers, and
how far each writer's stream is stored: what is told to be durable is there once, whatever dies
when. DuckDB's SQLite catalogue is synced at each commit; its Parquet files are not, so a commit
syncs them itself before it ends (seen with strace).

A name that DuckDB could not tell from another one (it folds case), or that another type has taken,
gets a column of its own whose name spells it in hex.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainvitals.errors import MissingDependencyError, StorageError
from trainvitals.identity import CROCKFORD
from trainvitals.rows import Column as RowColumn
from trainvitals.rows import Schema, column_of
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import (
    ORDER,
    Column,
    Columns,
    Span,
    StreamKey,
    in_order,
    none_of,
    rank_of,
    texts_of,
)

_KEYS = {
    "run": "BIGINT",
    "incarnation": "VARCHAR",
    "source": "VARCHAR",
    "rank": "INTEGER",
    "seq": "BIGINT",
}
_TYPES = {"f8": "DOUBLE", "i8": "BIGINT"}
_RUNS, _MARKS = "runs", "marks"
_SPELLED = "$hex$"
"""In the name of a column's place, before the column's name in hex."""
_SORTED_BY = "run ASC, step // 64 ASC, rank ASC, step ASC"
"""Of merged files: one rank's steps lie together, and one step of all ranks in few groups of rows.
"""
_OPTIONS = {
    "parquet_compression": "zstd",
    # Split bytes and deltas: a fifth smaller, and a curve is read in two thirds of the time.
    "parquet_version": "2",
    # What is skipped at once where a window or a rank is asked for.
    "parquet_row_group_size": "32768",
}


class Lake:
    """One process's way to a lake. Any number may append to one, each its own writers' streams."""

    def __init__(self, folder: Path, catalogue: str = "", *, memory_limit: str = "1GB") -> None:
        """Open the lake, or make it.

        Args:
            folder: where the Parquet files lie.
            catalogue: of PostgreSQL, as ``dbname=... host=...``; "" is a SQLite file in the folder.
            memory_limit: what DuckDB may take, such as ``1GB``; beyond it, it writes to disk.

        Raises:
            MissingDependencyError: DuckDB's extensions are not installed.
            StorageError: the lake cannot be opened.
        """
        self._data = folder / "data"
        self._tables = self._data / "main"
        """Where DuckLake puts a folder for each table."""
        self._tables.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._synced: dict[str, set[str]] = {}
        self._readers: list[duckdb.DuckDBPyConnection] = []
        scanner = "postgres_scanner" if catalogue else "sqlite_scanner"
        uri = f"postgres:{catalogue}" if catalogue else f"sqlite:{folder / 'catalogue.sqlite'}"
        # SQLite's log lets one read while another writes; who has to wait does, for so long.
        of_catalogue = "" if catalogue else ", META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT 10000"
        # Nothing is downloaded, and nothing is copied into somebody's home.
        self._root = duckdb.connect(
            config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
        )
        with _translated():
            for name in ("ducklake", scanner):
                self._root.execute(f"LOAD '{_extension(name)}'")
            self._root.execute(f"SET memory_limit = '{memory_limit}'")
            self._root.execute("SET threads = 1")  # the cores belong to the training
            self._root.execute(f"SET temp_directory = '{folder / 'spill'}'")
            # Several collectors commit at once: a conflict is tried again.
            self._root.execute("SET ducklake_max_retry_count = 100")
            self._root.execute(
                f"ATTACH 'ducklake:{uri}' AS lake"
                f" (DATA_PATH '{self._data}/', DATA_INLINING_ROW_LIMIT 0{of_catalogue})"
            )
            self._root.execute("USE lake")
            self._prepare()
            self._remember()

    def close(self) -> None:
        """End what is under way and let the catalogue go."""
        with self._lock:
            for connection in (*self._readers, self._root):
                connection.close()

    # --------------------------------------------------------------------------------- writing

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the rows that are new, all in one commit; durable when it returns.

        Raises:
            StorageError: nothing was stored; send it again.
        """
        with self._lock:
            if self._is_unsure:
                self._remember()
            cut, marks = self._cut(batches)
            num_new = [
                batch.header.num_rows - skip for batch, skip in zip(batches, cut, strict=True)
            ]
            if not marks:
                return num_new
            groups = list(_by_schema(batches, cut))
            for group in groups:
                self._ensure_columns(group[0][0].header.stream_schema)
            runs = self._number(run_id for run_id, _, _ in marks)
            with self._transaction():
                if runs:
                    self._insert(_RUNS, _table(("run_id", "run"), runs.items()))
                for group in groups:
                    self._insert(
                        group[0][0].header.stream, self._arrow(group, {**self._runs, **runs})
                    )
                named = [(*key, seq) for key, seq in marks.items()]
                self._insert(_MARKS, _table(("run_id", "incarnation", "stream", "seq"), named))
                self._sync()
            self._runs |= runs
            self._marks |= marks
            return num_new

    def _insert(self, table: str, rows: pa.Table) -> None:  # "rows" is found by its name
        self._root.execute(f"INSERT INTO {table} BY NAME SELECT * FROM rows")

    def _number(self, run_ids: Iterable[str]) -> dict[str, int]:
        """Return numbers for those runs that have none: in the order of their beginnings.

        Rows are found by a number in half the time of a name. 48 bits are a ULID's milliseconds
        and 15 are of its random ones; where another run has the number, the next is taken.
        """
        taken = set(self._runs.values())
        numbers: dict[str, int] = {}
        for run_id in run_ids:
            if run_id in self._runs or run_id in numbers:
                continue
            number = _ulid_bits(run_id) >> 65
            while number in taken:
                number += 1
            taken.add(number)
            numbers[run_id] = number
        return numbers

    def mark(self, key: StreamKey) -> int:
        """Return the number of the last row that the stream has stored; -1 where it has none."""
        return self._marks.get(key, -1)

    def _cut(self, batches: Sequence[Batch]) -> tuple[list[int], dict[StreamKey, int]]:
        """Return how many rows at each batch's beginning are stored, and the marks afterwards."""
        marks: dict[StreamKey, int] = {}
        cut = []
        for batch in batches:
            header = batch.header
            key = header.identity.run_id, header.identity.incarnation, header.stream
            mark = marks.get(key, self._marks.get(key, -1))
            skip = min(max(0, mark + 1 - header.first_seq), header.num_rows)
            cut.append(skip)
            if skip < header.num_rows:
                marks[key] = header.last_seq
        return cut, marks

    def _arrow(self, group: Sequence[tuple[Batch, int]], runs: Mapping[str, int]) -> pa.Table:
        schema = group[0][0].header.stream_schema
        size = schema.row_size
        raw = b"".join([batch.rows[skip * size :] if skip else batch.rows for batch, skip in group])
        rows = np.frombuffer(raw, schema.dtype)
        counts = np.array([batch.header.num_rows - skip for batch, skip in group])
        writers = [batch.header.identity for batch, _ in group]
        columns: dict[str, pa.Array] = {
            "run": _repeated([runs[w.run_id] for w in writers], counts, pa.int64()),
            "incarnation": _repeated([w.incarnation for w in writers], counts, pa.string()),
            "source": _repeated([w.source for w in writers], counts, pa.string()),
            "rank": _repeated([rank_of(w) for w in writers], counts, pa.int32()),
            "seq": pa.array(rows["seq"]),
        }
        places = self._columns[schema.stream]
        for column in schema.columns:
            values, is_valid = column_of(schema, rows, column.name)
            columns[places[column.name, _type_of(column)]] = _array(values, is_valid)
        return pa.table(columns)

    def _ensure_columns(self, schema: Schema) -> None:
        """Let the stream's table have a place for each column; it keeps it for good."""
        table = self._columns.setdefault(schema.stream, {})
        missing = [c for c in schema.columns if (c.name, _type_of(c)) not in table]
        if missing:
            taken = {name.casefold() for name in (*_KEYS, *table.values())}
            added = {}
            for column in missing:
                is_free = column.name.casefold() not in taken and _SPELLED not in column.name
                name = column.name if is_free else _spelled(column)
                taken.add(name.casefold())
                added[column.name, _type_of(column)] = name
            self._add_columns(schema.stream, added, is_new=not table)
            table |= added

    def _add_columns(
        self, stream: str, added: Mapping[tuple[str, str], str], *, is_new: bool
    ) -> None:
        typed = {name: _TYPES.get(kind, "VARCHAR") for (_, kind), name in added.items()}
        with self._transaction():
            if is_new:
                listed = ", ".join(f"{_quoted(k)} {v}" for k, v in {**_KEYS, **typed}.items())
                self._root.execute(f"CREATE TABLE {stream} ({listed})")
                self._root.execute(f"ALTER TABLE {stream} SET SORTED BY ({_SORTED_BY})")
                return
            for name, kind in typed.items():
                self._root.execute(f"ALTER TABLE {stream} ADD COLUMN {_quoted(name)} {kind}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translated():
            self._root.execute("BEGIN")
            try:
                yield
                self._commit()
            except BaseException:
                # Whether a commit that failed was one is known to the catalogue alone, and another
                # collector may have made what this one was about to make.
                self._is_unsure = True
                with suppress(duckdb.Error):  # a commit that failed has ended it already
                    self._root.execute("ROLLBACK")
                raise

    def _commit(self) -> None:
        self._root.execute("COMMIT")

    def _sync(self) -> None:
        """Make the files durable that this transaction has written: DuckDB leaves that to others.

        A file of another collector may be among them, which does no harm.
        """
        for folder in self._tables.iterdir():
            names = {entry.name for entry in os.scandir(folder)}
            new = names - self._synced.get(folder.name, set())
            for name in new:
                with suppress(FileNotFoundError):  # another collector's, which has merged it
                    _sync_path(folder / name)
            if new:
                _sync_path(folder)
            self._synced[folder.name] = names

    # --------------------------------------------------------------------------------- reading

    def scan(self, span: Span, names: Sequence[str]) -> Columns:
        """Return columns of the rows in the span, in order."""
        wanted = tuple(dict.fromkeys((*ORDER, *names)))
        present = {*_KEYS, *(name for name, _ in self._columns.get(span.stream, ()))}
        is_known = present.issuperset(wanted)
        if span.run_id not in self._runs or not is_known:
            self._look_again()
        run, places = self._runs.get(span.run_id), self._columns.get(span.stream)
        if run is None or places is None:
            return {name: none_of(0) for name in names}
        conditions, values = ["run = ?"], list[object]([run])
        if span.ranks:
            conditions.append(f"rank IN ({', '.join('?' * len(span.ranks))})")
            values += span.ranks
        for side, step in (("step >= ?", span.from_step), ("step < ?", span.to_step)):
            if step is not None:
                conditions.append(side)
                values.append(step)
        chosen = ", ".join(_expression(name, places) for name in wanted)
        rows = self._ask(
            f"SELECT {chosen} FROM {span.stream} WHERE {' AND '.join(conditions)}", values
        )
        return in_order(dict(zip(wanted, map(_column, rows.columns), strict=True)), names)

    def _ask(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        with _translated(), self._cursor() as reader:
            return reader.execute(sql, list(values)).to_arrow_table()

    # ----------------------------------------------------------------------------- maintenance

    def merge(self) -> None:
        """Make few sorted files of many small ones, and forget the states before.

        For one collector at a time. Rows that come meanwhile wait for one call of it at most: two
        that change a SQLite catalogue at once would refuse each other.

        Raises:
            StorageError: another collector was in the way; nothing is lost, call it later.
        """
        for call in ("merge_adjacent_files('lake')", "rewrite_data_files('lake')"):
            with self._lock, self._transaction():
                self._root.execute(f"CALL ducklake_{call}")
                self._sync()  # what they replace goes below
        for call in ("expire_snapshots", "cleanup_old_files"):
            with self._lock, _translated():
                self._root.execute(
                    f"CALL ducklake_{call}('lake', older_than => now() - INTERVAL 20 SECOND)"
                )

    def delete(self, run_id: str) -> None:
        """Remove the run's rows for good; its marks stay, so that nothing sent again comes back.

        The bytes go with the next ``merge``.

        Raises:
            StorageError: nothing was removed.
        """
        with self._lock:
            self._look_again()
            if run_id not in self._runs:
                return
            with self._transaction():
                for stream in self._columns:
                    self._root.execute(f"DELETE FROM {stream} WHERE run = ?", [self._runs[run_id]])
                self._sync()

    # --------------------------------------------------------------------------------- opening

    def _prepare(self) -> None:
        options = self._root.execute("SELECT option_name FROM ducklake_options('lake')").fetchall()
        if ("parquet_version",) not in options:
            for name, value in _OPTIONS.items():
                self._root.execute(f"CALL lake.set_option('{name}', '{value}')")
        for table, columns in (
            (_RUNS, "run_id VARCHAR, run BIGINT"),
            (_MARKS, "run_id VARCHAR, incarnation VARCHAR, stream VARCHAR, seq BIGINT"),
        ):
            self._root.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")

    def _remember(self) -> None:
        """Read what is kept here of the catalogue: runs, columns, how far streams are stored."""
        with _translated():
            rows = self._root.execute(
                f"SELECT run_id, incarnation, stream, max(seq) FROM {_MARKS} GROUP BY ALL"
            ).fetchall()
            self._marks: dict[StreamKey, int] = {
                (run, incarnation, stream): seq for run, incarnation, stream, seq in rows
            }
            self._look_again()
            self._is_unsure = False

    def _look_again(self) -> None:
        """Read which runs and columns there are: another collector may have added to them."""
        with _translated(), self._cursor() as reader:
            self._runs = dict(reader.execute(f"SELECT run_id, run FROM {_RUNS}").fetchall())
            kinds = {kind: name for name, kind in _TYPES.items()}
            columns: dict[str, dict[tuple[str, str], str]] = {}
            for table, place, kind in reader.execute(
                "SELECT table_name, column_name, data_type FROM duckdb_columns()"
                " WHERE database_name = 'lake' ORDER BY column_index"
            ).fetchall():
                if table not in (_RUNS, _MARKS):
                    places = columns.setdefault(table, {})
                    if place not in _KEYS:
                        places[_unspelled(place), kinds.get(kind, "S")] = place
            self._columns = columns

    @contextmanager
    def _cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a way of its own to the lake, for one reader at a time.

        They are kept: a new one costs a third of a small question.
        """
        try:
            reader = self._readers.pop()  # list's own lock
        except IndexError:
            reader = self._root.cursor()
            reader.execute("USE lake")
        yield reader
        self._readers.append(reader)  # but for one that failed


def _by_schema(batches: Sequence[Batch], cut: Sequence[int]) -> Iterator[list[tuple[Batch, int]]]:
    """Yield the batches of each schema that have new rows, each with how many to leave out."""
    groups: dict[int, list[tuple[Batch, int]]] = defaultdict(list)
    for batch, skip in zip(batches, cut, strict=True):
        if skip < batch.header.num_rows:
            groups[id(batch.header.stream_schema)].append((batch, skip))
    yield from groups.values()


def _array(values: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_]) -> pa.Array:
    mask = None if is_valid.all() else ~is_valid
    if values.dtype.kind != "S":
        return pa.array(np.ascontiguousarray(values), mask=mask, from_pandas=False)
    return pa.array(texts_of(values), pa.string(), mask=mask)


def _repeated(values: Sequence[Any], counts: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """Return each value so many times."""
    return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(values)), counts)))


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> pa.Table:
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def _expression(name: str, places: Mapping[tuple[str, str], str]) -> str:
    """Return what gives a column by its name, however many places its types have made for it."""
    kinds = {kind: place for (column, kind), place in places.items() if column == name}
    texts = [_quoted(place) for kind, place in kinds.items() if kind not in _TYPES]
    numbers = [_quoted(place) for kind, place in kinds.items() if kind in _TYPES]
    if name in _KEYS:
        return name
    if texts or len(numbers) == 1:
        return f"coalesce({', '.join(texts or numbers)})"
    doubles = [f"CAST({place} AS DOUBLE)" for place in numbers]
    return f"coalesce({', '.join(doubles)})" if doubles else "CAST(NULL AS DOUBLE)"


def _column(values: pa.ChunkedArray) -> Column:
    is_missing = np.zeros(len(values), np.bool_)
    if values.null_count:
        is_missing = values.is_null().to_numpy()
        values = values.fill_null("" if pa.types.is_string(values.type) else 0)
    return Column(values.to_numpy(), is_missing)


def _ulid_bits(run_id: str) -> int:
    bits = 0
    for character in run_id:
        bits = bits << 5 | CROCKFORD.index(character)
    return bits


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type_of(column: RowColumn) -> str:
    """Return the column's type; names of any size are of one."""
    return column.kind if column.kind in _TYPES else "S"


def _spelled(column: RowColumn) -> str:
    return f"{_type_of(column)}{_SPELLED}{column.name.encode().hex()}"


def _unspelled(place: str) -> str:
    _, mark, rest = place.partition(_SPELLED)
    return bytes.fromhex(rest).decode() if mark else place


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _extension(name: str) -> Path:
    """Return the file of an extension, which comes as a package of DuckDB's own version."""
    spec = find_spec(f"duckdb_extension_{name}")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        for path in Path(place).glob(f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"):
            return path
    raise MissingDependencyError(
        f"DuckDB {duckdb.__version__} lacks its extension {name}",
        hint="pip install 'trainvitals[collector]'",
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise StorageError(f"the lake refused: {error}") from error
    except OSError as error:
        raise StorageError(f"the lake's files cannot be kept: {error}") from error
