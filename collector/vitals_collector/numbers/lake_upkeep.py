"""What keeps a lake small and quick: outlines, few files and marks; old states and runs removed."""

import sys
import time
from collections.abc import Collection

from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_files import CHECKSUMS
from vitals_collector.numbers.lake_known import (
    FENCES,
    HOLES,
    LEVELLED,
    MARKS,
    NEW_MARKS,
    Known,
    marks_of,
    newest_marks,
)
from vitals_collector.numbers.lake_outlines import OUTLINES, outline_runs
from vitals_collector.numbers.lake_owners import take_out
from vitals_collector.numbers.lake_place import META

_MOST_DELETED = 0.1
"""Share of deleted rows above which a file is written anew."""
_KEPT_SECONDS = 20
"""What was replaced stays for questions that are under way."""
_MERGED_BYTES = 64 << 20
"""Above twice the size that files are merged to, none is read by a merge."""


def merge(engine: Engine, known: Known, max_seconds: float) -> bool:
    """Outline new rows, make few sorted files of many small ones, forget the states before.

    Returns:
        Whether all was done; if not, the next call goes on with it.

    Raises:
        StorageError: another collector was in the way; nothing is lost, call it later.
    """
    end = time.monotonic() + max_seconds
    for table in (NEW_MARKS, MARKS, FENCES):
        engine.files.need_small(table, sys.maxsize)
    take_out(engine, known)
    is_done = outline_runs(engine, known, known.changed(), end)
    if is_done:  # else it would be forgotten which runs have changed
        _fold_marks(engine)
    for table in (*sorted(known.places), OUTLINES, MARKS, NEW_MARKS, LEVELLED):
        for call in ("merge_adjacent_files", "rewrite_data_files"):
            is_done &= _merge_table(engine, table, call, end)
    kept = f"older_than => now() - INTERVAL {_KEPT_SECONDS} SECOND"
    for call in ("expire_snapshots", "cleanup_old_files"):
        engine.execute(f"CALL ducklake_{call}('lake', {kept})")
    engine.keep_checksums()
    _forget_checksums(engine)
    known.forget_idle()
    engine.give_back_memory()
    return is_done


def _merge_table(engine: Engine, table: str, call: str, end: float) -> bool:
    """Merge the table's files one by one; commits take turns with it, and wait for one at most."""
    engine.files.need_small(table, _MERGED_BYTES)  # what is damaged would get a right checksum
    is_merge = call == "merge_adjacent_files"
    bound = ", max_compacted_files => 1" if is_merge else f", delete_threshold => {_MOST_DELETED}"
    while time.monotonic() < end:
        with engine.transaction(is_merge=True):
            merged = engine.read(f"CALL ducklake_{call}('lake', '{table}'{bound})")
        if not len(merged) or not is_merge:
            return True
    return False


def _forget_checksums(engine: Engine) -> None:
    """Remove the checksums of files that the catalogue names no more."""
    paths = engine.ask(f"SELECT path FROM {CHECKSUMS}")["path"].to_pylist()
    named = " UNION ALL ".join(
        f"SELECT t.table_name || '/' || d.path AS path FROM {META}_{kind}_file d"
        f" JOIN {META}_table t USING (table_id)"
        for kind in ("data", "delete")
    )
    gone = sorted(set(paths).difference(engine.ask(named)["path"].to_pylist()))
    for start in range(0, len(gone), 1_000):
        listed = ", ".join(f"'{path}'" for path in gone[start : start + 1_000])
        with engine.transaction():
            engine.execute(f"DELETE FROM {CHECKSUMS} WHERE path IN ({listed})")


def _fold_marks(engine: Engine) -> None:
    """Leave one mark of each writer: a commit adds one for each that it had rows of."""
    with engine.transaction():
        runs = engine.read(f"SELECT DISTINCT run FROM {NEW_MARKS}")["run"].to_pylist()
        if runs and not len(engine.read(marks_of(runs, is_stale=True))):  # they tell of stale rows
            marks = engine.read(newest_marks(runs))
            engine.execute(f"DELETE FROM {MARKS} WHERE run IN ({', '.join(map(str, runs))})")
            engine.execute(f"DELETE FROM {NEW_MARKS}")
            engine.insert(MARKS, marks)


def delete(engine: Engine, known: Known, run_id: str, but: Collection[str]) -> None:
    """Remove the run's rows for good; its marks stay, so that nothing sent again comes back.

    Its columns stay as well: a process that goes on writing the run knows that they are there.

    Raises:
        StorageError: nothing was removed.
    """
    with engine.lock:
        known.look_again()
        run = known.runs.get(run_id)
        if run is None:
            return
        kept = ", ".join("?" * len(but)) or "''"
        own = f"run = ? AND incarnation NOT IN ({kept})"
        with engine.transaction():
            for table in (*known.places, OUTLINES, HOLES, LEVELLED):
                engine.execute(f"DELETE FROM {table} WHERE {own}", [run, *but])
            for table in (NEW_MARKS, MARKS):  # whose rows are gone is no source any more
                engine.execute(f"UPDATE {table} SET source = '' WHERE {own}", [run, *but])
        known.forget_run(run_id)


def sizes(engine: Engine, known: Known, run_id: str | None = None) -> dict[str, int]:
    """Return about how many bytes of the files are a run's: by its share of each stream's rows.

    Args:
        engine: the lake.
        known: its catalogue.
        run_id: of this run; None for all.
    """
    totals: dict[int, int] = {}
    run = None if run_id is None else known.number(run_id)
    if run_id is not None and run is None:
        return {}
    where = "" if run is None else f" WHERE run = {run}"
    tables = engine.ask(
        "SELECT t.table_name, sum(d.record_count)::BIGINT, sum(d.file_size_bytes)::BIGINT"
        f" FROM {META}_data_file d JOIN {META}_table t USING (table_id)"
        " WHERE d.end_snapshot IS NULL GROUP BY ALL"
    )
    for table, num_rows, num_bytes in zip(*tables.to_pydict().values(), strict=True):
        if table not in known.places or not num_rows:
            continue
        rows = engine.ask(f"SELECT run, count(*) AS num FROM {table}{where} GROUP BY run")
        for number, num in zip(*rows.to_pydict().values(), strict=True):
            totals[number] = totals.get(number, 0) + num_bytes * num // num_rows
    return {name: totals[number] for name, number in known.runs.items() if number in totals}


def size(engine: Engine) -> int:
    """Return the bytes of all files that the catalogue knows."""
    files = " UNION ALL ".join(
        f"SELECT file_size_bytes AS size FROM {META}_{kind}_file" for kind in ("data", "delete")
    )
    total = engine.ask(f"SELECT coalesce(sum(size), 0)::BIGINT AS size FROM ({files})")
    return int(total["size"][0].as_py())
