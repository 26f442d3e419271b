"""Content of a lake: layout of rows in its tables, and a cache of its catalogue.

One table per stream, whose columns only grow. A name that DuckDB could not distinguish from another
one (it folds case), or that exists with another type, gets a separate column whose name contains it
in hex.

The catalog of a run is read when it is first needed, so that a start costs the same with ten runs
and with ten thousand. Changes by this process are always current; those of other collectors are
read again after a second.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from hashlib import blake2b
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import CROCKFORD
from trainvitals.rows import Column as RowColumn
from trainvitals.rows import Schema, column_of
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import (
    STORED_STREAMS,
    ColumnValues,
    common_type,
    rank_of,
    texts_of,
    type_of,
)
from vitals_collector.numbers.lake_engine import CHECKSUMS, LakeEngine

# ------------------------------------------------------------------------------------------- tables

KEYS = {
    "run": "BIGINT",
    "incarnation": "VARCHAR",
    "source": "VARCHAR",
    "rank": "INTEGER",
    "seq": "BIGINT",
}
"""Columns of every stream's table in addition to those of its rows."""
FORMER_KEY = "$epoch"
"""A column in lakes of earlier versions; no longer written."""
TYPES = {"f8": "DOUBLE", "i8": "BIGINT", "S": "VARCHAR"}
SORTED_BY = "run ASC, step // 64 ASC, rank ASC, step ASC"
"""Order in merged files: one rank's steps are adjacent, and one step of all ranks is in few row
groups.
"""
_SPELLED = "$hex$"
"""Part of a lake column's name, before the column's name in hex."""

Places = dict[tuple[str, str], str]
"""By a column's name and type, the name of the table's column that holds it."""


class NewRows(msgspec.Struct, frozen=True, gc=False):
    """Rows of a batch that are new."""

    batch: Batch
    start: int
    end: int


def by_schema(parts: Sequence[NewRows]) -> Iterator[list[NewRows]]:
    """Yield the new rows for the lake by schema."""
    groups: dict[int, list[NewRows]] = defaultdict(list)
    for part in parts:
        groups[id(part.batch.header.stream_schema)].append(part)
    yield from groups.values()


def assign_lake_columns(schema: Schema, places: Places) -> Places:
    """Return lake columns for the columns of a stream that have none yet."""
    added: Places = {}
    taken = {name.casefold() for name in (*KEYS, *places.values())}
    for column in schema.columns:
        kind = type_of(column)
        if (column.name, kind) in places:
            continue
        is_free = column.name.casefold() not in taken and _SPELLED not in column.name
        lake_column = column.name if is_free else _encoded_column_name(column)
        taken.add(lake_column.casefold())
        added[column.name, kind] = lake_column
    return added


def to_arrow(group: Sequence[NewRows], runs: Mapping[str, int], places: Places) -> pa.Table:
    """Return new rows of one schema as an Arrow table for the lake."""
    schema = group[0].batch.header.stream_schema
    size = schema.row_size
    counts = np.array([part.end - part.start for part in group])
    raw = b"".join(
        [
            part.batch.rows
            if num_rows == part.batch.header.num_rows
            else part.batch.rows[part.start * size : part.end * size]
            for part, num_rows in zip(group, counts.tolist(), strict=True)
        ]
    )
    rows = np.frombuffer(raw, schema.dtype)
    writers = [part.batch.header.identity for part in group]
    columns: dict[str, pa.Array] = {
        "run": _repeated([runs[w.run_id] for w in writers], counts, pa.int64()),
        "incarnation": _repeated([w.incarnation for w in writers], counts, pa.string()),
        "source": _repeated([w.source for w in writers], counts, pa.string()),
        "rank": _repeated([rank_of(w.source) for w in writers], counts, pa.int32()),
        "seq": pa.array(rows["seq"]),
    }
    for column in schema.columns:
        values, is_valid = column_of(schema, rows, column.name)
        columns[places[column.name, type_of(column)]] = _arrow_array(values, is_valid)
    return pa.table(columns)


def _arrow_array(values: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Return a column of rows for the lake as Arrow array, with null for missing values."""
    mask = None if is_valid.all() else ~is_valid
    if values.dtype.kind != "S":
        return pa.array(np.ascontiguousarray(values), mask=mask, from_pandas=False)
    return pa.array(texts_of(values), pa.string(), mask=mask)


def _repeated(values: Sequence[Any], counts: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """Return each value repeated ``counts`` times, as a column of rows for the lake."""
    column = pa.array(values, kind)
    if (counts == 1).all():
        return column
    return column.take(pa.array(np.repeat(np.arange(len(values)), counts)))


def build_arrow_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Return rows of values as an Arrow table for the lake, with named columns."""
    columns = list(map(list, zip(*rows, strict=True))) or [[] for _ in names]
    return pa.table(dict(zip(names, columns, strict=True)))


def column_sql(name: str, places: Places) -> str:
    """Return the SQL expression of a lake's column; columns of every row have precedence."""
    return quoted(name) if name in KEYS else stream_column_sql(name, places)


def stream_column_sql(name: str, places: Places) -> str:
    """Return the SQL expression of a stream's column, over all lake columns of its types."""
    kinds = {kind: lake_column for (column, kind), lake_column in places.items() if column == name}
    if "S" in kinds:
        return quoted(kinds["S"])
    numbers = [quoted(lake_column) for lake_column in kinds.values()]
    if len(numbers) == 1:
        return numbers[0]
    doubles = [f"CAST({lake_column} AS DOUBLE)" for lake_column in numbers]
    return f"coalesce({', '.join(doubles)})" if doubles else "CAST(NULL AS DOUBLE)"


def column_from_arrow(values: pa.ChunkedArray) -> ColumnValues:
    """Return a column of the lake's query result, with a mask of its missing values."""
    is_missing = np.zeros(len(values), np.bool_)
    if values.null_count:
        is_missing = values.is_null().to_numpy()
        values = values.fill_null("" if pa.types.is_string(values.type) else 0)
    return ColumnValues(values.to_numpy(), is_missing)


def choose_run_number(run_id: str, taken: Iterable[int]) -> int:
    """Return a number for a run in the lake, in the order of the runs' beginnings.

    A lookup by number takes half the time of one by name. 48 bits are the ULID's milliseconds and
    15 are random; if another run has the number, the next is used.
    """
    bits = 0
    for character in run_id:
        bits = bits << 5 | CROCKFORD.index(character)
    number = bits >> 65
    taken = set(taken)
    while number in taken:
        number += 1
    return number


def quoted(name: str) -> str:
    """Return the name of a lake's table or column quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _encoded_column_name(column: RowColumn) -> str:
    """Return a name in the lake for a column whose own name is taken."""
    return f"{type_of(column)}{_SPELLED}{column.name.encode().hex()}"


def decode_column_name(lake_column: str) -> str:
    """Return the column name of a lake column."""
    _, mark, rest = lake_column.partition(_SPELLED)
    return bytes.fromhex(rest).decode() if mark else lake_column


# ------------------------------------------------------------------------------- what is remembered

RUNS, KINDS = "runs", "kinds"
NEW_MARKS, MARKS = "new_marks", "marks"
"""Last stored number of each stream, by commits since the last maintenance and before it: one row
per writer."""
HOLES = "holes"
"""Sequence numbers of rows that were stored and then lost to damage: they are accepted again."""
NUMBERED = "numbered"
"""Counts assignments of run numbers: one row, changed each time, so that one of two concurrent
assignments fails instead of using the same number."""
LEVELLED = "levelled"
"""Windows of writers' rows that were rolled up or downsampled: these rows are not missing."""
OUTLINES = "outlines"
"""Statistics that replace rows in overviews (``chunk_stats``)."""
MARK_COLUMNS = ("run", "incarnation", "source", "stream", "seq")
LEVELLED_COLUMNS = (
    *("run", "stream", "attempt", "first_at", "end_at", "incarnation"),
    *("first_seq", "last_seq", "num_taken", "reason"),
)
_MARK = "run BIGINT, incarnation VARCHAR, source VARCHAR, stream VARCHAR, seq BIGINT"
_TABLES = {
    RUNS: "run_id VARCHAR, run BIGINT",
    NEW_MARKS: _MARK,
    MARKS: _MARK,
    NUMBERED: "times BIGINT",
    HOLES: "run BIGINT, incarnation VARCHAR, stream VARCHAR, first_seq BIGINT, end_seq BIGINT",
    LEVELLED: "run BIGINT, stream VARCHAR, attempt BIGINT, first_at BIGINT, end_at BIGINT,"
    " incarnation VARCHAR, first_seq BIGINT, last_seq BIGINT, num_taken BIGINT, reason VARCHAR",
    KINDS: "run BIGINT, stream VARCHAR, name VARCHAR, kind VARCHAR",
}
_INLINED = (CHECKSUMS, RUNS, KINDS, HOLES, NUMBERED)
"""These are stored in the catalog itself; 4,096 marks there would cost 90 ms more."""
_FRESH_SECONDS = 1.0
_MINE_SECONDS = 5.0
"""Time for which this process assumes that it is still the only writer of a run."""
_ALONE_SECONDS = 60.0
"""Time for which a lake with one writer is assumed not to be maintained from the command line: a
check costs four times as much as an overview."""
_IDLE_SECONDS = 3_600.0
_HOLES_SECONDS = 60.0

Writer = tuple[str, str]
"""Incarnation and stream."""


P = ParamSpec("P")
R = TypeVar("R")


def locked(
    method: Callable[Concatenate["Catalogue", P], R],
) -> Callable[Concatenate["Catalogue", P], R]:
    """Serialize calls of a method of the lake's catalog cache."""

    @wraps(method)
    def call(self: "Catalogue", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class LakeRunState:
    """Cached state of one run."""

    def __init__(self, now: float) -> None:
        self.read_at = self.used_at = self.holes_read_at = now
        self.is_mine = False
        """Whether this process has written it since it was read: then it is the only writer."""
        self.marks: dict[Writer, int] = {}
        self.holes: dict[Writer, list[tuple[int, int]]] = {}
        """Missing numbers below the mark: a first one, and the one after the last."""
        self.sources: dict[Writer, str] = {}
        """Sources of the writers; missing if their rows were deleted."""
        self.kinds: dict[str, dict[str, set[str]]] = defaultdict(dict)
        """By stream and column."""

    def types(self, stream: str) -> dict[str, str]:
        """Return the columns of a stream, each with its type; none if its rows were removed."""
        if not any(source for (_, key), source in self.sources.items() if key == stream):
            return {}
        return {name: common_type(kinds) for name, kinds in self.kinds[stream].items()}

    def record_stored(
        self, writer: Writer, seq: int, source: str, holes: list[tuple[int, int]]
    ) -> None:
        """Record that a writer's stream is stored in the lake up to this number."""
        self.is_mine = True
        self.marks[writer] = seq
        self.sources[writer] = source
        if holes or writer in self.holes:
            self.holes[writer] = holes


def numeric_columns(kinds: Mapping[str, str]) -> list[str]:
    """Return the columns with chunk statistics and roll-ups: not those of every row."""
    row_columns = {column.name for column in ROW_COLUMNS}
    return [name for name, kind in kinds.items() if kind != "S" and name not in row_columns]


def name_key(name: str) -> int:
    """Return the key of a column's name in chunk statistics: other keys are skipped in files.

    64 bits: two names of one run practically never collide.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def newest_marks(runs: Iterable[int]) -> str:
    """Return the query for each writer's latest mark."""
    listed = ", ".join(map(str, runs))
    columns = ", ".join(MARK_COLUMNS)
    return (
        "SELECT run, incarnation, arg_max(source, seq) AS source, stream, max(seq) AS seq"
        f" FROM (SELECT {columns} FROM {NEW_MARKS} WHERE run IN ({listed})"
        f" UNION ALL SELECT {columns} FROM {MARKS} WHERE run IN ({listed}))"
        " GROUP BY run, incarnation, stream"
    )


class Catalogue:
    """Cache of the lake's catalog. Thread-safe."""

    def __init__(self, engine: LakeEngine, *, is_shared: bool) -> None:
        """Create missing tables, and read what there is.

        With ``is_shared``, others may write the runs that this process writes.
        """
        self._engine = engine
        self._is_shared = is_shared
        self.lock = threading.RLock()
        """Guards the cache; not held while the lake is changed, so that readers continue."""
        self.runs: dict[str, int] = {}
        self.places: dict[str, Places] = {}
        self.tables: frozenset[str] = frozenset()
        """Names of all tables of the lake, as last read."""
        self.epochs: dict[str, int] = {}
        """Lease epochs of the runs that this process owns; 0 for all others."""
        self._states: dict[str, LakeRunState] = {}
        with engine.transaction():
            for name, columns in _TABLES.items():
                engine.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
        engine.inline(*_INLINED)
        if not len(engine.ask(f"SELECT times FROM {NUMBERED}")):
            engine.execute(f"INSERT INTO {NUMBERED} VALUES (0)")
        self.reload()

    @locked
    def reload(self) -> None:
        """Read which runs and columns the lake has: another collector may have added some."""
        listed = self._engine.ask(f"SELECT run_id, run FROM {RUNS}").to_pydict()
        self.runs = dict(zip(listed["run_id"], listed["run"], strict=True))
        kinds = {lake_type: kind for kind, lake_type in TYPES.items()}
        columns = self._engine.ask(
            "SELECT table_name, column_name, data_type FROM duckdb_columns()"
            " WHERE database_name = 'lake' ORDER BY column_index"
        )
        self.tables = frozenset(columns["table_name"].to_pylist())
        places: dict[str, Places] = {}
        for table, lake_type, kind in zip(*columns.to_pydict().values(), strict=True):
            if table in STORED_STREAMS:
                of_table = places.setdefault(table, {})
                if lake_type not in (*KEYS, FORMER_KEY):
                    of_table[decode_column_name(lake_type), kinds[kind]] = lake_type
        self.places = places

    @locked
    def forget(self) -> None:
        """Drop the whole cache of the lake's catalog."""
        self._states.clear()
        self.reload()

    @locked
    def forget_run(self, run_id: str) -> None:
        """Drop the run from the cache, so that it is read again when needed."""
        self._states.pop(run_id, None)

    @locked
    def forget_idle(self) -> None:
        """Drop runs from the cache that were not used for an hour."""
        before = time.monotonic() - _IDLE_SECONDS
        for run_id, state in list(self._states.items()):
            if state.used_at < before:
                self._states.pop(run_id, None)

    @locked
    def run_number(self, run_id: str) -> int | None:
        """Return the run's number; None if the lake has no rows of it."""
        if run_id not in self.runs:
            self.reload()
        return self.runs.get(run_id)

    @locked
    def changed(self) -> list[str]:
        """Return the runs that got rows since the lake's last maintenance."""
        runs = set(self._engine.ask(f"SELECT DISTINCT run FROM {NEW_MARKS}")["run"].to_pylist())
        if not runs.issubset(self.runs.values()):
            self.reload()
        return [run_id for run_id, run in self.runs.items() if run in runs]

    @locked
    def new_numbers(self, run_ids: Iterable[str]) -> dict[str, int]:
        """Return numbers in the lake for those runs that have none."""
        numbers: dict[str, int] = {}
        for run_id in run_ids:
            if run_id not in self.runs and run_id not in numbers:
                numbers[run_id] = choose_run_number(
                    run_id, (*self.runs.values(), *numbers.values())
                )
        return numbers

    def write_numbers(self, numbers: Mapping[str, int]) -> None:
        """Write runs' new numbers in a transaction of the lake; fails after a concurrent change."""
        if numbers:
            self._engine.execute(f"UPDATE {NUMBERED} SET times = times + 1")
            self._engine.insert(RUNS, build_arrow_table(("run_id", "run"), numbers.items()))

    def run(self, run_id: str, *, is_fresh: bool = False) -> LakeRunState:
        """Return the state of a run; with ``is_fresh``, including all changes by others."""
        return self.states([run_id], is_fresh=is_fresh)[run_id]

    @locked
    def states(
        self, run_ids: Collection[str], *, is_fresh: bool = False
    ) -> dict[str, LakeRunState]:
        """Return the states of runs, reading missing ones together.

        A collector that takes over a hundred runs needs as many queries as for one. A run that the
        lake does not have is known to have nothing. ``is_fresh``: include all changes by others.
        """
        now = time.monotonic()
        due = [run_id for run_id in run_ids if self._is_due(run_id, now, is_fresh=is_fresh)]
        if due:
            if is_fresh and not self.runs.keys() >= set(due):
                self.reload()
            new = {run_id: LakeRunState(now) for run_id in due}
            there = {self.runs[run_id]: new[run_id] for run_id in due if run_id in self.runs}
            if there:
                self._load_run_states(there)
            self._states |= new
        states = {run_id: self._states[run_id] for run_id in run_ids}
        for state in states.values():
            state.used_at = now
        return states

    def _is_due(self, run_id: str, now: float, *, is_fresh: bool) -> bool:
        """Return whether a run's cached lake state has to be read again."""
        state = self._states.get(run_id)
        if state is None or not is_fresh:
            return state is None
        if not self._is_shared and state.is_mine:
            return False
        return now >= state.read_at + self._fresh_seconds(state)

    @locked
    def known(self, run_ids: Collection[str]) -> dict[str, LakeRunState]:
        """Return the states of runs with up-to-date holes."""
        states = self.states(run_ids)
        if self._is_shared:
            self._read_holes(states, time.monotonic())
        return states

    def _read_holes(self, states: Mapping[str, LakeRunState], now: float) -> None:
        """Read the holes of the runs, unless read recently: another process may have added some."""
        before = now - _HOLES_SECONDS
        if all(state.holes_read_at > before for state in states.values()):
            return
        there = {self.runs[run_id]: states[run_id] for run_id in states if run_id in self.runs}
        holes = self._load_holes(there) if there else {}
        for run, state in there.items():
            state.holes = holes.get(run, {})
        for state in states.values():  # also of a run without rows, or it is read each time
            state.holes_read_at = now

    def _fresh_seconds(self, state: LakeRunState) -> float:
        """Return how long the cached state of a run is used without a check."""
        if not self._is_shared:
            return _ALONE_SECONDS
        return _MINE_SECONDS if state.is_mine else _FRESH_SECONDS

    def _load_run_states(self, states: Mapping[int, LakeRunState]) -> None:
        """Read marks, sources, holes and columns of runs from the lake's catalog."""
        for table in (NEW_MARKS, MARKS):
            self._engine.files.check_files_of_runs(table, *states)
        runs = ", ".join(map(str, states))
        marks = self._engine.ask(newest_marks(states)).to_pydict()
        for run, incarnation, source, stream, seq in zip(*marks.values(), strict=True):
            states[run].marks[incarnation, stream] = seq
            if source:
                states[run].sources[incarnation, stream] = source
        for run, holes in self._load_holes(states).items():
            states[run].holes = holes
        kinds = self._engine.ask(
            f"SELECT DISTINCT run, stream, name, kind FROM {KINDS} WHERE run IN ({runs})"
        ).to_pydict()
        for run, stream, name, kind in zip(*kinds.values(), strict=True):
            states[run].kinds[stream].setdefault(name, set()).add(kind)

    @locked
    def holes(self, run_id: str) -> dict[Writer, list[tuple[int, int]]]:
        """Return the holes of a run; another process may maintain the lake."""
        state = self.run(run_id)
        if self._is_shared:
            self._read_holes({run_id: state}, time.monotonic())
        return state.holes

    def _load_holes(self, runs: Iterable[int]) -> dict[int, dict[Writer, list[tuple[int, int]]]]:
        """Read which rows of these runs the lake has lost to damage."""
        holes: dict[int, dict[Writer, list[tuple[int, int]]]] = {}
        listed = self._engine.ask(
            f"SELECT run, incarnation, stream, first_seq, end_seq FROM {HOLES}"
            f" WHERE run IN ({', '.join(map(str, runs))}) ORDER BY first_seq"
        ).to_pydict()
        for run, incarnation, stream, first, end in zip(*listed.values(), strict=True):
            of_run = holes.setdefault(run, {})
            of_run.setdefault((incarnation, stream), []).append((first, end))
        return holes

    @locked
    def new_kinds(
        self, written: Mapping[str, Mapping[str, Iterable[tuple[str, str]]]]
    ) -> list[tuple[str, str, str, str]]:
        """Return run, stream, name and type of the columns that the catalog lacks.

        ``written`` has by run and stream the columns with their types.
        """
        new = []
        for run_id, streams in written.items():
            columns_before = self.run(run_id).kinds
            for stream, columns in streams.items():
                before = columns_before[stream]
                new += [
                    (run_id, stream, name, kind)
                    for name, kind in columns
                    if kind not in before.get(name, ())
                ]
        return new

    @locked
    def kinds(self, run_id: str, stream: str) -> dict[str, str]:
        """Return the columns of the run's stream, each with its type."""
        return self.run(run_id, is_fresh=True).types(stream)

    @locked
    def columns(self, run_id: str, stream: str) -> Places:
        """Return the lake columns that hold the rows of a run's stream."""
        return self.places_of(self.run(run_id, is_fresh=True), stream)

    @locked
    def places_of(self, state: LakeRunState, stream: str) -> Places:
        """Return the lake columns of a run's rows in the stream, in that state."""
        columns = {
            (name, kind) for name, of_name in state.kinds[stream].items() for kind in of_name
        }
        if not columns <= self.places.get(stream, {}).keys():
            self.reload()  # another collector has added some
        return {column: self.places[stream][column] for column in sorted(columns)}

    @locked
    def sources(self, run_id: str, stream: str) -> list[str]:
        """Return the writers of rows in the run's stream."""
        sources = self.run(run_id, is_fresh=True).sources
        return sorted({source for (_, key), source in sources.items() if key == stream})

    @locked
    def marks(self, run_id: str, stream: str) -> dict[str, tuple[int, str]]:
        """Return by incarnation the run's last stored number of the stream, and its source."""
        state = self.run(run_id, is_fresh=True)
        return {
            incarnation: (state.marks[incarnation, key], source)
            for (incarnation, key), source in state.sources.items()
            if key == stream
        }
