"""Damaged files of a lake: found, and removed so that their rows can be sent again."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vitals_collector.numbers.interface import STORED_STREAMS
from vitals_collector.numbers.lake_catalogue import (
    HOLES,
    LEVELLED,
    MARK_COLUMNS,
    MARKS,
    NEW_MARKS,
    OUTLINES,
    Catalogue,
    build_arrow_table,
    newest_marks,
)
from vitals_collector.numbers.lake_engine import CHECKSUMS, META, LakeEngine, file_paths_sql

_HOLE = ("run", "incarnation", "stream", "first_seq", "end_seq")
_Hole = tuple[int, str, str, int, int]


class DamagedFile(NamedTuple):
    """A file that differs from what was written, and its content according to the catalogue."""

    path: str
    """Table and file."""
    num_rows: int
    run_ids: tuple[str, ...]
    """Runs that it may have rows of."""
    bounds: dict[str, tuple[int, int]]
    """Minimum and maximum of ``run``, ``step`` and ``seq``, if the table has them."""

    @property
    def table(self) -> str:
        """Return the table of the file: a stream, or one of the lake's own tables."""
        return self.path.partition("/")[0]


def find_damaged_files(engine: LakeEngine, catalogue: Catalogue) -> list[DamagedFile]:
    """Read every file of the lake; return those that are damaged or missing."""
    catalogue.reload()
    paths = engine.files.check((*catalogue.places, OUTLINES, MARKS, NEW_MARKS, LEVELLED))
    return [_describe_damaged_file(engine, catalogue, path) for path in paths]


def _describe_damaged_file(engine: LakeEngine, catalogue: Catalogue, path: str) -> DamagedFile:
    """Return a damaged file of the lake with the runs and rows that the catalog lists for it."""
    name = path.partition("/")[2]
    column_stats = engine.ask(
        f"SELECT d.record_count AS num, c.column_name AS name, s.min_value, s.max_value"
        f" FROM {META}_data_file d JOIN {META}_column c ON c.table_id = d.table_id"
        f" JOIN {META}_file_column_stats s"
        "  ON s.data_file_id = d.data_file_id AND s.column_id = c.column_id"
        f" WHERE d.data_file_id = ({_DATA_FILE}) AND c.column_name IN ('run', 'step', 'seq')",
        [name, name],
    ).to_pylist()
    bounds = {
        row["name"]: (int(row["min_value"]), int(row["max_value"]))
        for row in column_stats
        if row["min_value"] is not None
    }
    low, high = bounds.get("run", (-(2**63), 2**63 - 1))
    run_ids = tuple(sorted(r for r, number in catalogue.runs.items() if low <= number <= high))
    return DamagedFile(path, int(column_stats[0]["num"]) if column_stats else 0, run_ids, bounds)


_DATA_FILE = (
    f"SELECT data_file_id FROM {META}_data_file WHERE path = ? UNION ALL"
    f" SELECT data_file_id FROM {META}_delete_file WHERE path = ?"
)


def files_without_checksum(engine: LakeEngine) -> list[str]:
    """Return files of the lake's current snapshot without a checksum, so not verifiable."""
    is_live = f"WHERE d.end_snapshot IS NULL AND t.table_name <> '{CHECKSUMS}'"
    paths = set(engine.ask(file_paths_sql(is_live))["path"].to_pylist())
    return sorted(paths - engine.files.summed())


def drop_damaged_files(engine: LakeEngine, catalogue: Catalogue) -> list[DamagedFile]:
    """Remove the damaged files from the lake, and record holes for their rows.

    A writer's undamaged rows stay; those in the file are accepted once when they are sent again. If
    the marks of deleted runs were damaged, these runs are unknown afterwards.

    Raises:
        StorageError: nothing was changed, or it is to be called again.
    """
    # Reads every file, so appends continue in the meantime.
    damaged = find_damaged_files(engine, catalogue)
    with engine.lock:
        live = engine.files.live(file.path for file in damaged)
        damaged = [file for file in damaged if file.path in live]  # not removed by another process
        if not damaged:
            return []
        _end_files(engine, [file.path.partition("/")[2] for file in damaged])
        engine.files.forget(file.path for file in damaged)
        run_ids = {run_id for file in damaged for run_id in file.run_ids}
        numbers = [catalogue.runs[run_id] for run_id in run_ids]
        if numbers:
            streams = {file.table for file in damaged} & set(STORED_STREAMS)
            _recompute_metadata(engine, catalogue, numbers, damaged, streams)
        catalogue.forget()
        return damaged


def _end_files(engine: LakeEngine, names: Sequence[str]) -> None:
    """Create a snapshot of the lake without these damaged files.

    Same changes as DuckLake's when every row of a file was deleted.
    """
    ids = engine.ask(
        f"SELECT data_file_id AS id, table_id FROM {META}_data_file WHERE data_file_id IN"
        f" (SELECT data_file_id FROM {META}_data_file WHERE path IN "
        f"({_sql_placeholders(names)}) UNION ALL"
        f" SELECT data_file_id FROM {META}_delete_file WHERE path IN ({_sql_placeholders(names)}))",
        [*names, *names],
    ).to_pydict()
    files = ", ".join(map(str, ids["id"]))
    changes = ",".join(f"deleted_from_table:{table}" for table in sorted(set(ids["table_id"])))
    with engine.catalogue_transaction():
        engine.execute(
            f"INSERT INTO {META}_snapshot SELECT snapshot_id + 1, now(), schema_version,"
            f" next_catalog_id, next_file_id FROM {META}_snapshot"
            " ORDER BY snapshot_id DESC LIMIT 1"
        )
        newest = f"(SELECT max(snapshot_id) FROM {META}_snapshot)"
        engine.execute(
            f"INSERT INTO {META}_snapshot_changes (snapshot_id, changes_made)"
            f" SELECT max(snapshot_id), '{changes}' FROM {META}_snapshot"
        )
        for kind in ("data", "delete"):
            engine.execute(
                f"UPDATE {META}_{kind}_file SET end_snapshot = {newest}"
                f" WHERE data_file_id IN ({files}) AND end_snapshot IS NULL"
            )


def _sql_placeholders(values: Sequence[object]) -> str:
    """Return the placeholders for values in the SQL about damaged files."""
    return ", ".join("?" * len(values))


def _recompute_metadata(
    engine: LakeEngine,
    catalogue: Catalogue,
    numbers: Sequence[int],
    damaged: Iterable[DamagedFile],
    streams: set[str],
) -> None:
    """Make the lake's marks, holes and chunk statistics of these runs match the remaining rows."""
    listed = ", ".join(map(str, numbers))
    with engine.transaction():
        marks: dict[tuple[int, str, str], tuple[str, int]] = {}
        for row in engine.query_in_transaction(newest_marks(numbers)).to_pylist():
            key = row["run"], row["incarnation"], row["stream"]
            marks[key] = row["source"], row["seq"]
        if any(file.table in (MARKS, NEW_MARKS) for file in damaged):
            for stream in catalogue.places:
                last_seqs = engine.query_in_transaction(
                    f"SELECT run, incarnation, source, max(seq) AS seq FROM {stream}"
                    f" WHERE run IN ({listed}) GROUP BY ALL"
                )
                for row in last_seqs.to_pylist():
                    key = row["run"], row["incarnation"], stream
                    if marks.get(key, ("", -1))[1] < row["seq"]:
                        marks[key] = row["source"], row["seq"]
        rows = [
            (run, incarnation, source, stream, seq)
            for (run, incarnation, stream), (source, seq) in marks.items()
        ]
        if rows:  # among the new ones: maintenance checks these runs again
            engine.insert(NEW_MARKS, build_arrow_table(MARK_COLUMNS, rows))
        engine.execute(f"DELETE FROM {OUTLINES} WHERE run IN ({listed})")
        for stream in streams:
            bounds = [file.bounds["seq"] for file in damaged if file.table == stream]
            first, last = min(low for low, _ in bounds), max(high for _, high in bounds)
            of_stream = f"FROM {HOLES} WHERE run IN ({listed}) AND stream = '{stream}'"
            before = engine.query_in_transaction(
                f"SELECT {', '.join(_HOLE)} {of_stream}"
            ).to_pydict()
            holes = [
                *zip(*before.values(), strict=True),
                *_find_holes(engine, stream, numbers, marks, first, last),
            ]
            if holes:
                engine.execute(f"DELETE {of_stream}")
                engine.insert(HOLES, build_arrow_table(_HOLE, _merge_holes(holes)))


def _find_holes(
    engine: LakeEngine,
    stream: str,
    numbers: Sequence[int],
    marks: dict[tuple[int, str, str], tuple[str, int]],
    first: int,
    last: int,
) -> list[_Hole]:
    """Return the row numbers that a damaged lake lacks between two, although the mark is above.

    Numbers of rows that were rolled up or downsampled are not missing.
    """
    listed = ", ".join(map(str, numbers))
    stored_seqs = engine.query_in_transaction(
        f"SELECT run, incarnation, list(seq) AS seqs FROM {stream}"
        f" WHERE run IN ({listed}) AND seq BETWEEN {first} AND {last} GROUP BY ALL"
    )
    present = {
        (row["run"], row["incarnation"]): np.sort(np.array(row["seqs"], np.int64))
        for row in stored_seqs.to_pylist()
    }
    levelled = _rolled_up_spans(engine, stream, listed, first, last)
    holes = []
    for (run, incarnation, of_stream), (source, mark) in marks.items():
        if of_stream != stream or not source:
            continue
        present_seqs = present.get((run, incarnation), np.zeros(0, np.int64))
        levels = [np.arange(*bounds) for bounds in levelled.get((run, incarnation), ())]
        present_seqs = np.unique(np.concatenate((present_seqs, *levels)))
        ends = np.concatenate(([first - 1], present_seqs, [min(last, mark) + 1]))
        holes += [
            (run, incarnation, stream, int(ends[i]) + 1, int(ends[i + 1]))
            for i in np.flatnonzero(np.diff(ends) > 1).tolist()
        ]
    return holes


def _rolled_up_spans(
    engine: LakeEngine, stream: str, runs: str, first: int, last: int
) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return by writer the ranges of downsampled rows, each with its first number and its end."""
    ranges: dict[tuple[int, str], list[tuple[int, int]]] = {}
    levels = engine.query_in_transaction(
        f"SELECT run, incarnation, greatest(first_seq, {first}) AS low,"
        f" least(last_seq, {last}) + 1 AS high FROM {LEVELLED}"
        f" WHERE run IN ({runs}) AND stream = '{stream}'"
        f" AND num_taken > 0 AND first_seq <= {last} AND last_seq >= {first}"
    )
    for run, incarnation, low, high in zip(*levels.to_pydict().values(), strict=True):
        ranges.setdefault((run, incarnation), []).append((low, high))
    return ranges


def _merge_holes(holes: Iterable[_Hole]) -> list[_Hole]:
    """Return the same row numbers of a damaged lake in holes that do not touch."""
    joined: list[_Hole] = []
    for hole in sorted(holes):
        before = joined[-1] if joined else None
        if before is not None and before[:3] == hole[:3] and hole[3] <= before[4]:
            joined[-1] = (*hole[:3], before[3], max(hole[4], before[4]))
        else:
            joined.append(hole)
    return joined


def record_filled_holes(
    engine: LakeEngine,
    run: int,
    writer: Sequence[str],
    first: int,
    holes: Sequence[tuple[int, int]],
) -> None:
    """Note, in a commit, a writer's remaining holes, and that rows from ``first`` on are new.

    Rows after them get their statistics again: progress is one number per writer.
    """
    of_writer = "WHERE run = ? AND incarnation = ? AND stream = ?"
    engine.execute(f"DELETE FROM {HOLES} {of_writer}", [run, *writer])
    if holes:
        engine.insert(HOLES, build_arrow_table(_HOLE, [(run, *writer, *hole) for hole in holes]))
    outlined = f"DELETE FROM {OUTLINES} {of_writer} AND last_seq >= ?"
    engine.execute(outlined, [run, *writer, first])
