"""Whose rows of a run count: each owner has an epoch, and what an older one commits is taken out.

A lease says who owns a run; an owner that was paused does not know that its lease was taken, and
may still commit. So a new owner first commits its epoch: what was committed before counts, and how
far each stream was by then is its fence. Rows of an older epoch above the fence came later: they
are found by their marks, and taken out.
"""

import sys
from collections.abc import Collection, Mapping

from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import (
    EPOCH,
    FENCES,
    MARK_COLUMNS,
    MARKS,
    NEW_MARKS,
    OWNERS,
    RUNS,
    Known,
    marks_of,
    newest_marks,
)
from vitals_collector.numbers.lake_outlines import OUTLINES
from vitals_collector.numbers.lake_tables import table_of


def own(engine: Engine, known: Known, epochs: Mapping[str, int]) -> None:
    """Take runs over: from here on this process commits for them.

    Args:
        engine: the lake.
        known: its catalogue.
        epochs: of each run's lease; above those of all owners before.

    Raises:
        StorageError: nothing was changed, or it is to be called again.
    """
    with engine.lock:
        known.look_again()
        new = known.new_numbers(epochs)
        numbers = {**known.runs, **new}
        owned = {numbers[run_id]: epoch for run_id, epoch in epochs.items()}
        take_out(engine, known, owned)
        with engine.transaction():
            if new:
                engine.insert(RUNS, table_of(("run_id", "run"), new.items()))
            engine.insert(OWNERS, table_of(("run", "epoch"), owned.items()))
        snapshot = engine.read("SELECT id FROM ducklake_last_committed_snapshot('lake') AS s(id)")
        marks = engine.read(newest_marks(owned, snapshot["id"][0].as_py())).to_pylist()
        fences = [
            (m["run"], owned[m["run"]], m["incarnation"], m["stream"], m["seq"]) for m in marks
        ]
        fences += [(run, epoch, "", "", -1) for run, epoch in owned.items()]
        names = ("run", "epoch", "incarnation", "stream", "seq")
        with engine.transaction():  # the last ones say that there are all of them
            before = " OR ".join(f"run = {run} AND epoch < {epoch}" for run, epoch in owned.items())
            for table in (FENCES, OWNERS):
                engine.execute(f"DELETE FROM {table} WHERE {before}")
            engine.insert(FENCES, table_of(names, fences))
        known.look_again()
        for run_id, epoch in epochs.items():
            known.forget_run(run_id)
            known.epochs[run_id] = epoch


def take_out(engine: Engine, known: Known, runs: Collection[int] | None = None) -> int:
    """Remove what owners committed after others had taken their runs; of all runs or of these.

    Returns:
        How many marks it was found by.

    Raises:
        StorageError: nothing was removed.
    """
    for table in (NEW_MARKS, MARKS, FENCES):
        engine.files.need_small(table, sys.maxsize)
    if runs is None:
        runs = engine.ask(f"SELECT DISTINCT run FROM {FENCES}")["run"].to_pylist()
    stale = engine.ask(marks_of(runs, is_stale=True))["run"].to_pylist() if runs else []
    num = 0
    for run in sorted(set(stale)):
        with engine.transaction():
            num += _take_out(engine, known, run)
    return num


def _take_out(engine: Engine, known: Known, run: int) -> int:
    stale = engine.read(marks_of([run], is_stale=True))
    if not len(stale):
        return 0
    fences = f"SELECT * FROM {FENCES} WHERE run = {run}"
    newest = f"(SELECT max(epoch) FROM ({fences}))"
    for table in (*known.places, NEW_MARKS, MARKS):
        is_stream = table in known.places
        epoch, stream = (f'"{EPOCH}"', f"'{table}'") if is_stream else ("epoch", "t.stream")
        engine.execute(
            f"DELETE FROM {table} t WHERE run = {run} AND {epoch} < {newest}"
            f" AND seq > coalesce((SELECT max(f.seq) FROM ({fences}) f WHERE f.epoch = {newest}"
            f" AND f.incarnation = t.incarnation AND f.stream = {stream}), -1)"
        )
    # Outlines do not say whose rows they are of: upkeep writes them anew.
    engine.execute(f"DELETE FROM {OUTLINES} WHERE run = {run}")
    marks = engine.read(newest_marks([run])).select(list(MARK_COLUMNS))
    engine.insert(NEW_MARKS, marks)
    return len(stale)
