"""Rows in DuckLake: Parquet in a directory, with a transactional catalog in SQLite or PostgreSQL.

One table per stream, whose columns only grow. A commit holds the rows of any number of writers and
the last sequence number of each stream: a row reported as durable is stored once, whichever process
dies.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from trainvitals.errors import StorageError
from trainvitals.rows import Schema
from trainvitals.wire import Batch
from vitals_collector.numbers import lake_damage, lake_maintenance, lake_rollup
from vitals_collector.numbers.interface import (
    RANKS,
    DeletedRows,
    DueWindow,
    Reason,
    RollUpResult,
    StepWindow,
    StreamKey,
    type_of,
)
from vitals_collector.numbers.lake_catalogue import (
    HOLES,
    KEYS,
    KINDS,
    LEVELLED,
    MARK_COLUMNS,
    MARKS,
    NEW_MARKS,
    OUTLINES,
    SORTED_BY,
    TYPES,
    Catalogue,
    NewRows,
    assign_lake_columns,
    build_arrow_table,
    by_schema,
    quoted,
    to_arrow,
)
from vitals_collector.numbers.lake_damage import DamagedFile
from vitals_collector.numbers.lake_engine import META, LakeEngine
from vitals_collector.numbers.lake_reading import OpenLake
from vitals_collector.numbers.rank_rollup import ranks_batch

_OPTIONS = {
    "parquet_compression": "zstd",
    # Split bytes and deltas: a fifth smaller, and a curve is read in two thirds of the time.
    "parquet_version": "2",
    # Rows that a query for a window or a rank skips at once.
    "parquet_row_group_size": "32768",
    # A commit waits while so much is merged into one file.
    "target_file_size": "16MB",
}


_MOST_TRIES = 50
"""At giving runs numbers while others do."""
_ASK_SECONDS = 600.0
"""A response may be lost, and an agent without the rows searches for them each time."""


class Lake(OpenLake):
    """A lake opened by one process. Any number may append to one, each for different streams.

    After a StorageError, nothing was changed, or the same call completes the change.
    """

    def __init__(
        self, folder: Path, catalogue: str = "", *, bucket: str = "", memory_limit: str = "192MB"
    ) -> None:
        """Open the lake, or make it.

        Args:
            folder: directory of the Parquet files, unless they are in a bucket.
            catalogue: PostgreSQL, as ``dbname=... host=...``; "" is a SQLite file in the directory.
            bucket: S3 location as ``s3://BUCKET/PREFIX``, with keys from the environment; "" is the
                directory, or the bucket that an existing SQLite catalog there names.
            memory_limit: maximum of DuckDB's memory, such as ``1GB``; beyond it, it writes to disk.

        Raises:
            MissingDependencyError: DuckDB's extensions are not installed.
            StorageError: the lake cannot be opened.
            UsageError: the bucket's URL or keys are invalid.
        """
        engine = LakeEngine(folder, catalogue, memory_limit, bucket)
        options = engine.ask("SELECT option_name FROM ducklake_options('lake')")
        if "parquet_version" not in options["option_name"].to_pylist():
            for name, value in _OPTIONS.items():
                engine.execute(f"CALL lake.set_option('{name}', '{value}')")
        super().__init__(engine, Catalogue(engine, is_shared=bool(catalogue)))
        lake_maintenance.create_chunk_stats_table(self.engine, self.catalogue.tables)
        self._asked: dict[tuple[StreamKey, int], float] = {}
        """Holes that agents were asked to fill, and when they may be asked again."""

    def close(self) -> None:
        """Finish the current operation and close the lake's catalog."""
        self.engine.close()

    # --------------------------------------------------------------------------------- writing

    def check_place(self) -> None:
        """Raise StorageError if rows that were stored cannot be read."""
        self.engine.check_place()

    def write_lock(self) -> AbstractContextManager[object]:
        """Hold the lake's write lock."""
        return self.engine.lock

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the rows that are new, all in one commit; durable when it returns."""
        with self.engine.lock:
            self._reload_if_stale()
            num_new, parts, taken = self._split_new_rows(batches)
            if parts:
                owned_epochs = self.catalogue.epochs
                run_ids = {run_id for run_id, _, _ in taken}
                epochs = {run_id: owned_epochs[run_id] for run_id in run_ids & owned_epochs.keys()}
                self._store(parts, taken, epochs)
            return num_new

    def _reload_if_stale(self) -> None:
        """Reload the cached catalog after a commit with an unknown result."""
        if self.engine.is_unsure:
            self.catalogue.forget()
            self.engine.is_unsure = False

    def _store(
        self,
        parts: Sequence[NewRows],
        taken: Mapping[StreamKey, "_StreamState"],
        epochs: Mapping[str, int],
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit rows to the lake, with their marks and what ``also`` does."""
        groups = list(by_schema(parts))
        for group in groups:
            self._ensure_columns(group[0].batch.header.stream_schema)
        runs = self.catalogue.new_numbers(run_id for run_id, _, _ in taken)
        numbers = {**self.catalogue.runs, **runs}
        kinds = self.catalogue.new_kinds(_column_types_by_run(groups))
        with self.engine.transaction(epochs=epochs):
            self.catalogue.write_numbers(runs)
            for group in groups:
                stream = group[0].batch.header.stream
                rows = to_arrow(group, numbers, self.catalogue.places[stream])
                self.engine.insert(stream, rows)
            if kinds:
                named = [(numbers[run_id], *column) for run_id, *column in kinds]
                self.engine.insert(
                    KINDS, build_arrow_table(("run", "stream", "name", "kind"), named)
                )
            marks = [
                (numbers[run], incarnation, of.source, stream, of.mark)
                for (run, incarnation, stream), of in taken.items()
            ]
            self.engine.insert(NEW_MARKS, build_arrow_table(MARK_COLUMNS, marks))
            also()
            for key, of in taken.items():
                if of.filled is not None:
                    lake_damage.record_filled_holes(
                        self.engine, numbers[key[0]], key[1:], of.filled, of.holes
                    )
        with self.catalogue.lock:
            self.catalogue.runs |= runs
            states = self.catalogue.states({key[0] for key in taken})
            for key, of in taken.items():
                states[key[0]].record_stored(key[1:], of.mark, of.source, of.holes)
            for run_id, stream, name, kind in kinds:
                self.catalogue.run(run_id).kinds[stream].setdefault(name, set()).add(kind)

    def become_owner(self, epochs: Mapping[str, int]) -> None:
        """Take over runs, each with the epoch of its lease: later appends are made under it."""
        with self.engine.lock:
            self.catalogue.reload()
            tries_left = _MOST_TRIES
            while new := self.catalogue.new_numbers(epochs):
                tries_left -= 1
                try:
                    with self.engine.transaction():
                        self.catalogue.write_numbers(new)
                except StorageError as error:
                    if not tries_left or "conflict" not in error.text:
                        raise
                self.catalogue.reload()
            for run_id, epoch in epochs.items():
                self.catalogue.forget_run(run_id)
                self.catalogue.epochs[run_id] = epoch

    def mark(self, key: StreamKey) -> int:
        """Return the sequence number of the stream's last stored row; -1 if there is none."""
        return self.catalogue.run(key[0]).marks.get(key[1:], -1)

    def marks(self, run_ids: Collection[str]) -> Mapping[str, Mapping[tuple[str, str], int]]:
        """Return by run the marks of its streams by incarnation and stream."""
        return {run_id: run.marks for run_id, run in self.catalogue.known(run_ids).items()}

    def has_holes(self, run_id: str) -> bool:
        """Return whether rows of the run were lost to damage."""
        return any(self.catalogue.holes(run_id).values())

    def _split_new_rows(
        self, batches: Sequence[Batch]
    ) -> tuple[list[int], list[NewRows], dict[StreamKey, "_StreamState"]]:
        """Return how many rows of each batch are new, which, and each stream's state afterwards."""
        taken: dict[StreamKey, _StreamState] = {}
        states = self.catalogue.states({batch.header.identity.run_id for batch in batches})
        num_new, parts = [], list[NewRows]()
        for batch in batches:
            header = batch.header
            identity, first = header.identity, header.first_seq
            end = first + header.num_rows
            writer = identity.incarnation, header.stream_schema.stream
            key = (identity.run_id, *writer)
            stream, state = taken.get(key), states[key[0]]
            if stream is None and not state.holes and first == state.marks.get(writer, -1) + 1:
                parts.append(NewRows(batch, 0, header.num_rows))  # nearly always
                num_new.append(header.num_rows)
                taken[key] = _StreamState(identity.source, end - 1, [])
                continue
            if stream is None:
                mark, holes = state.marks.get(writer, -1), state.holes.get(writer, [])
                stream = _StreamState(identity.source, mark, holes)
            new = stream.missing_seqs(first, end) if stream.holes else []
            filled = stream.without(new) if new else stream
            if end - 1 > stream.mark:
                new.append((max(first, stream.mark + 1), end))
                filled = _StreamState(stream.source, end - 1, filled.holes, filled.filled)
            parts += [NewRows(batch, low - first, high - first) for low, high in new]
            num_new.append(sum(high - low for low, high in new))
            if new:
                taken[key] = filled
        return num_new, parts, taken

    def _ensure_columns(self, schema: Schema) -> None:
        """Add missing columns to the stream's table; columns are never removed."""
        places = self.catalogue.places.get(schema.stream, {})
        added = assign_lake_columns(schema, places)
        if not added:
            return
        self.catalogue.reload()  # another collector may have added them
        places = self.catalogue.places.get(schema.stream, {})
        added = assign_lake_columns(schema, places)
        typed = {lake_column: TYPES[kind] for (_, kind), lake_column in added.items()}
        with self.engine.transaction():
            if places:
                for lake_column, kind in typed.items():
                    self.engine.execute(
                        f"ALTER TABLE {schema.stream} ADD COLUMN {quoted(lake_column)} {kind}"
                    )
            else:
                listed = ", ".join(f"{quoted(k)} {v}" for k, v in {**KEYS, **typed}.items())
                self.engine.execute(f"CREATE TABLE {schema.stream} ({listed})")
                self.engine.execute(f"ALTER TABLE {schema.stream} SET SORTED BY ({SORTED_BY})")
        self.catalogue.places[schema.stream] = {**places, **added}

    # ----------------------------------------------------------------------------- maintenance

    def merge(self, max_seconds: float = 60.0) -> bool:
        """Add statistics of new rows, merge small files into few sorted ones, delete old snapshots.

        For one collector at a time; otherwise StorageError. Appends wait for at most one merged
        file: two concurrent changes of a SQLite catalog would make one of them fail. Start nothing
        after ``max_seconds``. Return whether everything was done; if not, the next call continues.
        """
        return lake_maintenance.maintain_lake(self.engine, self.catalogue, max_seconds)

    def give_back_memory(self) -> None:
        """Free caches that are not in use; called by each process that has the lake open."""
        self.catalogue.forget_idle()
        self.engine.give_back_memory()

    def sizes(self, run_id: str | None = None) -> dict[str, int]:
        """Return about how many bytes of the files are each run's: by its share of the rows.

        With a run id, only that run is measured.
        """
        totals: dict[int, int] = {}
        run = None if run_id is None else self.catalogue.run_number(run_id)
        if run_id is not None and run is None:
            return {}
        where = "" if run is None else f" WHERE run = {run}"
        tables = self.engine.ask(
            "SELECT t.table_name, sum(d.record_count)::BIGINT, sum(d.file_size_bytes)::BIGINT"
            f" FROM {META}_data_file d JOIN {META}_table t USING (table_id)"
            " WHERE d.end_snapshot IS NULL GROUP BY ALL"
        )
        for table, num_rows, num_bytes in zip(*tables.to_pydict().values(), strict=True):
            if table not in self.catalogue.places or not num_rows:
                continue
            rows = self.engine.ask(f"SELECT run, count(*) AS num FROM {table}{where} GROUP BY run")
            for number, num in zip(*rows.to_pydict().values(), strict=True):
                totals[number] = totals.get(number, 0) + num_bytes * num // num_rows
        return {
            name: totals[number] for name, number in self.catalogue.runs.items() if number in totals
        }

    def next_window(
        self, run_id: str, attempt: int, size: int, stream: str = "steps"
    ) -> DueWindow | None:
        """Return the oldest steps that are not rolled up yet; for hosts, nanoseconds.

        None if there are none; for steps, only rows of ranks other than 0 count. Rows that arrive
        after their steps were rolled up stay unchanged. ``size`` is the steps of a window, a
        multiple of ``chunk_stats.CHUNK_STEPS``.
        """
        return lake_rollup.next_window(self.engine, self.catalogue, run_id, stream, attempt, size)

    def roll_up(
        self,
        run_id: str,
        window: StepWindow,
        num_worst: int,
        *,
        is_whole: bool = False,
        reason: Reason = "age",
    ) -> RollUpResult:
        """Replace most ranks' rows of some steps by statistics over the ranks, in one commit.

        The rows of rank 0 and of the ``num_worst`` worst ranks stay, or all (``is_whole``). For
        each numeric column the stream ``ranks`` gets ``NAME:min``, ``mean`` and ``max`` of the
        finite values, ``num`` (their number) and ``nonfinite``, over the other ranks of a step, and
        ``num_ranks``.
        """
        planned = lake_rollup.plan(
            self.engine, self.catalogue, run_id, window, num_worst, is_whole=is_whole, reason=reason
        )
        if planned is None:
            return RollUpResult(0, ())
        with self.engine.lock:
            self._reload_if_stale()
            self.catalogue.reload()
            self.catalogue.forget_run(run_id)  # another process may have rolled it up
            first_seq = self.mark((run_id, RANKS, RANKS)) + 1
            batch = ranks_batch(run_id, window.attempt, planned.names, planned.numbers, first_seq)
            _, parts, taken = self._split_new_rows([batch])
            self._store(
                parts,
                taken,
                {},  # maintenance rolls up runs of any owner
                lambda: lake_rollup.delete_rows(self.engine, planned),
            )
        return planned.result

    def downsample_window(
        self,
        run_id: str,
        stream: str,
        window: StepWindow,
        every: int,
        *,
        is_whole: bool = False,
        reason: Reason = "age",
    ) -> int:
        """Downsample a window of layers or host samples in one commit; return the deleted rows.

        ``every`` is in steps of layers, or nanoseconds of samples.
        """
        run = self.catalogue.run_number(run_id)
        if run is not None:
            self.engine.files.check_files_of_runs(
                stream, run
            )  # reads files, so not while commits have to wait
        with self.engine.lock:
            self._reload_if_stale()
            self.catalogue.reload()
            return lake_rollup.downsample_window(
                self.engine,
                self.catalogue,
                run_id,
                stream,
                window,
                every,
                is_whole=is_whole,
                reason=reason,
            )

    def deleted_rows(self, run_id: str) -> list[DeletedRows]:
        """Return the numbers of deleted rows of the run, by stream and reason."""
        return lake_rollup.deleted_rows(self.engine, self.catalogue, run_id)

    def num_bytes(self, run_id: str) -> int:
        """Return the approximate size of the run's rows, as ``sizes`` does."""
        return self.sizes(run_id).get(run_id, 0)

    def size(self) -> int:
        """Return the bytes of all files, of those as well that the next ``merge`` removes."""
        files = " UNION ALL ".join(
            f"SELECT file_size_bytes AS size FROM {META}_{kind}_file" for kind in ("data", "delete")
        )
        total = self.engine.ask(f"SELECT coalesce(sum(size), 0)::BIGINT AS size FROM ({files})")
        return int(total["size"][0].as_py())

    def check(self) -> list[DamagedFile]:
        """Read every file; return those that are missing or differ from what was written."""
        return lake_damage.find_damaged_files(self.engine, self.catalogue)

    def drop_damaged_files(self) -> list[DamagedFile]:
        """Remove damaged files; their rows are accepted once when they are sent again."""
        return lake_damage.drop_damaged_files(self.engine, self.catalogue)

    def missing(self, key: StreamKey) -> list[tuple[int, int]]:
        """Return what a stream lost to damage: first numbers, each with the one after the last.

        ``mark`` stays above them.
        """
        return list(self.catalogue.holes(key[0]).get(key[1:], ()))

    def wanted(self, key: StreamKey, before: int) -> int:
        """Return the first lost number below ``before`` that was not requested yet, or -1."""
        now = time.monotonic()
        for low, _ in self.missing(key):
            if low < before and now >= self._asked.get((key, low), now):
                self._asked[key, low] = now + _ASK_SECONDS
                return low
        return -1

    def delete(self, run_id: str, exclude: Collection[str] = ()) -> None:
        """Delete the run's rows; its last sequence numbers stay, so that resent rows are ignored.

        The bytes go with the next ``merge``. Its columns stay as well: a process that still writes
        the run assumes that they exist.
        """
        with self.engine.lock:
            self.catalogue.reload()
            run = self.catalogue.runs.get(run_id)
            if run is None:
                return
            placeholders = ", ".join("?" * len(exclude)) or "''"
            row_filter = f"run = ? AND incarnation NOT IN ({placeholders})"
            with self.engine.transaction():
                for table in (*self.catalogue.places, OUTLINES, HOLES, LEVELLED):
                    self.engine.execute(f"DELETE FROM {table} WHERE {row_filter}", [run, *exclude])
                for table in (NEW_MARKS, MARKS):  # a writer without rows has no source
                    self.engine.execute(
                        f"UPDATE {table} SET source = '' WHERE {row_filter}", [run, *exclude]
                    )
            self.catalogue.forget_run(run_id)


class _StreamState(msgspec.Struct, frozen=True, gc=False):
    """A stream's state after a commit."""

    source: str
    mark: int
    holes: list[tuple[int, int]]
    filled: int | None = None
    """The first number that was stored in a hole."""

    def missing_seqs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return which of these row numbers are missing in the lake."""
        missing = ((max(first, low), min(end, high)) for low, high in self.holes)
        return [(low, high) for low, high in missing if low < high]

    def without(self, filled: Sequence[tuple[int, int]]) -> "_StreamState":
        """Return the state after the lake has got these missing row numbers."""
        holes = self.holes
        for first, end in filled:
            sides = [((low, min(high, first)), (max(low, end), high)) for low, high in holes]
            holes = [side for both in sides for side in both if side[0] < side[1]]
        first = min(low for low, _ in filled)
        filled_from = first if self.filled is None else min(first, self.filled)
        return _StreamState(self.source, self.mark, holes, filled_from)


def _column_types_by_run(
    groups: Sequence[Sequence[NewRows]],
) -> dict[str, dict[str, set[tuple[str, str]]]]:
    """Return by run and stream the columns of rows for the lake, with their types."""
    written: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(dict)
    for group in groups:
        schema = group[0].batch.header.stream_schema
        columns = {(column.name, type_of(column)) for column in schema.columns}
        for run_id in {part.batch.header.identity.run_id for part in group}:
            written[run_id].setdefault(schema.stream, set()).update(columns)
    return written
