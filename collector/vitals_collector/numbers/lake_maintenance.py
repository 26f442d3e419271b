"""Keeps a lake small and fast: chunk statistics, few files and marks.

Chunk statistics are computed after the append, for some writers' new rows at a time. Old snapshots
and removed runs are deleted.
"""

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute

from vitals_collector.numbers import chunk_stats
from vitals_collector.numbers.chunk_stats import ROWS, STREAMS, ChunkStats, compute_chunk_stats
from vitals_collector.numbers.interface import RowSpan, rank_of
from vitals_collector.numbers.lake_catalogue import (
    LEVELLED,
    MARKS,
    NEW_MARKS,
    OUTLINES,
    Catalogue,
    LakeRunState,
    Places,
    column_from_arrow,
    column_sql,
    name_key,
    newest_marks,
    numeric_columns,
)
from vitals_collector.numbers.lake_engine import CHECKSUMS, META, LakeEngine, file_paths_sql
from vitals_collector.numbers.lake_reading import select_rows, select_span

# ----------------------------------------------------------------------------------------- outlines

_KEYS = {
    "run": "BIGINT",
    "stream": "VARCHAR",
    "name": "BIGINT",
    "rank": "INTEGER",
    "source": "VARCHAR",
    "incarnation": "VARCHAR",
    "kind": "TINYINT",
}
_NUMBERS = {
    name: "DOUBLE" if name in ("low", "high", "first", "last") else "BIGINT"
    for name in ChunkStats._fields
    if name not in ("name", "writer", "kind")
}
_SORTED_BY = "run ASC, stream ASC, name ASC, rank ASC, first_step ASC"
FEWEST_ROWS = 4_096
"""Rows per stream and run. Fewer are read as fast as their statistics, which cost 0.1 s of CPU per
run: for a hundred runs of a few ranks, a fifth of a core."""
_MOST_VALUES = 4 << 20
"""Values per call: 32 MB, and temporarily a few times that."""


def create_chunk_stats_table(engine: LakeEngine, tables: Collection[str]) -> None:
    """Create the table of chunk statistics if the lake does not have it."""
    if OUTLINES in tables:
        return
    listed = ", ".join(f"{name} {kind}" for name, kind in {**_KEYS, **_NUMBERS}.items())
    with engine.transaction():
        engine.execute(f"CREATE TABLE {OUTLINES} ({listed})")
        engine.execute(f"ALTER TABLE {OUTLINES} SET SORTED BY ({_SORTED_BY})")


def _last_seqs_with_stats(
    engine: LakeEngine, runs: Sequence[int]
) -> dict[int, dict[tuple[str, str], int]]:
    """Return by run, incarnation and stream the last sequence number with chunk statistics."""
    engine.files.check_files_of_runs(OUTLINES, *runs)
    marks = engine.ask(
        f"SELECT run, incarnation, stream, max(last_seq) AS seq FROM {OUTLINES}"
        f" WHERE run IN ({', '.join(map(str, runs))}) AND name = ? GROUP BY ALL",
        [name_key(ROWS)],
    ).to_pydict()
    done: dict[int, dict[tuple[str, str], int]] = {run: {} for run in runs}
    for run, incarnation, stream, seq in zip(*marks.values(), strict=True):
        done[run][incarnation, stream] = seq
    return done


def add_chunk_stats(
    engine: LakeEngine, catalogue: Catalogue, run_ids: Sequence[str], end: float
) -> bool:
    """Add missing chunk statistics of runs, except for few rows.

    Start no run after ``end``, by ``time.monotonic``; return whether all were done.
    """
    numbers = {run_id: catalogue.runs[run_id] for run_id in run_ids if run_id in catalogue.runs}
    done = _last_seqs_with_stats(engine, list(numbers.values())) if numbers else {}
    states = catalogue.states(numbers, is_fresh=True)
    return all(
        _add_chunk_stats_of_run(engine, catalogue, run_id, states[run_id], done[run], end)
        for run_id, run in numbers.items()
    )


def _add_chunk_stats_of_run(
    engine: LakeEngine,
    catalogue: Catalogue,
    run_id: str,
    state: LakeRunState,
    done: Mapping[tuple[str, str], int],
    end: float,
) -> bool:
    """Add the missing chunk statistics of a run; return whether all were done by ``end``."""
    for stream in STREAMS:
        pending = _rows_without_stats(state, stream, done)
        if sum(stop - first for first, stop, _ in pending) < FEWEST_ROWS:
            continue
        columns = catalogue.places_of(state, stream)
        names = numeric_columns(state.types(stream))
        most_rows = max(1, _MOST_VALUES // (len(names) + 1))
        for seqs in _split_spans(pending, most_rows):
            if time.monotonic() > end:
                return False
            span = RowSpan(run_id, stream, seqs=seqs)
            _insert_chunk_stats(engine, catalogue.runs[run_id], span, state, columns, names)
    return True


def _rows_without_stats(
    state: LakeRunState, stream: str, done: Mapping[tuple[str, str], int]
) -> list[tuple[int, int, str]]:
    """Return each writer's rows without statistics: first number, and the one after the last."""
    pending = []
    for (incarnation, key), mark in state.marks.items():
        first = done.get((incarnation, stream), -1) + 1
        is_there = (incarnation, stream) in state.sources
        if key == stream and is_there and first <= mark:
            pending.append((first, mark + 1, incarnation))
    return pending


def _split_spans(
    pending: Sequence[tuple[int, int, str]], most_rows: int
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield some writers' numbers at a time, each with its first one and the one after its last.

    Numbers of one piece start near each other, so that other rows are skipped in the files.
    """
    piece: dict[str, tuple[int, int]] = {}
    num_rows = 0
    for first, end, incarnation in sorted(pending):
        for start in range(first, end, most_rows):
            stop = min(end, start + most_rows)
            if piece and (num_rows + stop - start > most_rows or incarnation in piece):
                yield piece
                piece, num_rows = {}, 0
            piece[incarnation] = start, stop
            num_rows += stop - start
    if piece:
        yield piece


def _insert_chunk_stats(
    engine: LakeEngine,
    run: int,
    span: RowSpan,
    state: LakeRunState,
    places: Places,
    names: Sequence[str],
) -> None:
    """Compute the chunk statistics of some rows of the lake, and add them."""
    stream, writers = span.stream, sorted(span.seqs or ())
    read = ("incarnation", "seq", "step", "attempt", "time_unix_ns", *names)
    selection = select_span(span, run, places)
    rows = select_rows(engine, stream, selection, {name: column_sql(name, places) for name in read})
    codes = pa.compute.index_in(rows["incarnation"], pa.array(writers)).to_numpy()
    order = np.lexsort((rows["seq"].to_numpy(), codes))
    if not len(order):
        return
    # A row without a time gets 0, as everywhere: NaN would end the statistics of every run.
    keys = ("seq", "step", "attempt", "time_unix_ns")
    of_row = (column_from_arrow(rows[name]).values[order] for name in keys)
    columns = {name: column_from_arrow(rows[name]).take(order) for name in names}
    entries = compute_chunk_stats(stream, chunk_stats.StreamRows(codes[order], *of_row), columns)
    sources = [state.sources.get((incarnation, stream), "") for incarnation in writers]
    with engine.transaction():
        engine.insert(
            OUTLINES, _stats_table(run, stream, entries, [ROWS, *columns], writers, sources)
        )


def _stats_table(
    run: int,
    stream: str,
    entries: ChunkStats,
    names: list[str],
    writers: list[str],
    sources: list[str],
) -> pa.Table:
    num, which = len(entries.writer), pa.array(entries.writer)
    columns = {
        "run": pa.array(np.full(num, run)),
        "stream": pa.repeat(pa.scalar(stream), num),
        "name": pa.array(np.array([name_key(name) for name in names])[entries.name]),
        "rank": pa.array([rank_of(source) for source in sources], pa.int32()).take(which),
        "source": pa.array(sources).take(which),
        "incarnation": pa.array(writers).take(which),
        "kind": pa.array(entries.kind),
    }
    return pa.table(columns | {name: pa.array(getattr(entries, name)) for name in _NUMBERS})


# ------------------------------------------------------------------------------------------- upkeep

_MOST_DELETED = 0.1
"""Share of deleted rows above which a file is rewritten."""
_KEPT_SECONDS = 20
"""Replaced files stay for running queries."""
_MERGED_BYTES = 64 << 20
"""A merge reads no larger file."""
_SMALL_BYTES = 8 << 20
"""Smaller files are merged. A larger commit of one minute is merged once: one minute of 4,096 ranks
blocks a commit for 0.4 s of CPU. If files were merged up to four times this size, each row would be
written three more times, and a commit blocked for 1.5 s."""
_TO_MERGE = f"""
SELECT t.table_name AS name, count(*) FILTER (d.file_size_bytes < {_SMALL_BYTES}) > 1 AS has_small,
  count(x.data_file_id) > 0 AS has_deleted
FROM {META}_data_file d JOIN {META}_table t ON t.table_id = d.table_id
LEFT JOIN {META}_delete_file x
  ON x.data_file_id = d.data_file_id AND x.end_snapshot IS NULL
WHERE d.end_snapshot IS NULL AND t.end_snapshot IS NULL GROUP BY ALL
"""


_CALLS = ("merge_adjacent_files", "rewrite_data_files")


def maintain_lake(engine: LakeEngine, catalogue: Catalogue, max_seconds: float) -> bool:
    """Maintain the lake, as described in ``Lake.merge``."""
    end = time.monotonic() + max_seconds
    for table in (NEW_MARKS, MARKS):
        engine.files.check_small_files(table, sys.maxsize)
    is_done = add_chunk_stats(engine, catalogue, catalogue.changed(), end)
    if is_done:  # otherwise the changed runs would be lost
        _fold_marks(engine)
    tables = (*sorted(catalogue.places), OUTLINES, MARKS, NEW_MARKS, LEVELLED)
    due = engine.ask(_TO_MERGE).to_pydict()  # a call that finds nothing to do takes 10 ms
    for table, *is_due in zip(*due.values(), strict=True):
        for call, is_needed in zip(_CALLS, is_due, strict=True):
            if is_needed and table in tables:
                is_done &= _merge_table(engine, table, call, end)
    older_than = f"older_than => now() - INTERVAL {_KEPT_SECONDS} SECOND"
    for call in ("expire_snapshots", "cleanup_old_files"):
        engine.execute(f"CALL ducklake_{call}('lake', {older_than})")
    engine.keep_checksums()
    _delete_old_checksums(engine)
    catalogue.forget_idle()
    engine.give_back_memory()
    return is_done


def _merge_table(engine: LakeEngine, table: str, call: str, end: float) -> bool:
    """Merge a lake table's files one by one; commits alternate with it and wait for at most one."""
    # Damaged content would get a valid checksum.
    engine.files.check_small_files(table, _MERGED_BYTES)
    is_merge = call == _CALLS[0]
    bound = f", delete_threshold => {_MOST_DELETED}"
    if is_merge:
        bound = f", max_compacted_files => 1, max_file_size => {_SMALL_BYTES}"
    while time.monotonic() < end:
        with engine.transaction(is_merge=True):
            merged = engine.query_in_transaction(f"CALL ducklake_{call}('lake', '{table}'{bound})")
        if not len(merged) or not is_merge:
            return True
    return False


def _delete_old_checksums(engine: LakeEngine) -> None:
    """Delete the checksums of files that the lake's catalog no longer lists."""
    paths = engine.ask(f"SELECT path FROM {CHECKSUMS}")["path"].to_pylist()
    named = engine.ask(file_paths_sql())["path"].to_pylist()
    unnamed = sorted(set(paths).difference(named))
    for start in range(0, len(unnamed), 1_000):
        listed = ", ".join(f"'{path}'" for path in unnamed[start : start + 1_000])
        with engine.transaction():
            engine.execute(f"DELETE FROM {CHECKSUMS} WHERE path IN ({listed})")


def _fold_marks(engine: LakeEngine) -> None:
    """Leave one mark of each writer in the lake: a commit adds one per writer of its rows."""
    with engine.transaction():
        runs = engine.query_in_transaction(f"SELECT DISTINCT run FROM {NEW_MARKS}")[
            "run"
        ].to_pylist()
        if runs:
            marks = engine.query_in_transaction(newest_marks(runs))
            engine.execute(f"DELETE FROM {MARKS} WHERE run IN ({', '.join(map(str, runs))})")
            engine.execute(f"DELETE FROM {NEW_MARKS}")
            engine.insert(MARKS, marks)
