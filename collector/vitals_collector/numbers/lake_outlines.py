"""Outlines in a table of the lake: written behind the rows, some writers' new ones at a time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trainvitals.catalog import ROW_COLUMNS
from vitals_collector.numbers import outlines
from vitals_collector.numbers.interface import Column, Span, rank_of
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import Known, RunState
from vitals_collector.numbers.lake_scan import chosen_of, select
from vitals_collector.numbers.lake_tables import Places, expression, to_column
from vitals_collector.numbers.outlines import ROWS, STREAMS, Entries, outline

OUTLINES = "outlines"
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
    for name in Entries._fields
    if name not in ("name", "writer", "kind")
}
_SORTED_BY = "run ASC, stream ASC, name ASC, rank ASC, first_step ASC"
FEWEST_ROWS = 4_096
"""Of a stream of a run: fewer are read as soon as their outlines, which cost .1 s of CPU a run, so
that a hundred runs of a few ranks would take a fifth of a core."""
_MOST_VALUES = 4 << 20
"""Outlined at a time: as many take 32 MB, and a few times that for a moment."""


def name_key(name: str) -> int:
    """Return what a column's name is among outlines: other numbers than these are skipped in files.

    Of 64 bits: that two names of a run share one is as good as impossible.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def prepare(engine: Engine) -> None:
    """Make the table if it is missing."""
    tables = engine.ask("SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake'")
    if OUTLINES in tables["table_name"].to_pylist():
        return
    listed = ", ".join(f"{name} {kind}" for name, kind in {**_KEYS, **_NUMBERS}.items())
    with engine.transaction():
        engine.execute(f"CREATE TABLE {OUTLINES} ({listed})")
        engine.execute(f"ALTER TABLE {OUTLINES} SET SORTED BY ({_SORTED_BY})")


def _outlined_seqs(engine: Engine, runs: Sequence[int]) -> dict[int, dict[tuple[str, str], int]]:
    """Return by run, incarnation and stream the number of the last row that is outlined."""
    for run in runs:
        engine.files.need(OUTLINES, run)
    marks = engine.ask(
        f"SELECT run, incarnation, stream, max(last_seq) AS seq FROM {OUTLINES}"
        f" WHERE run IN ({', '.join(map(str, runs))}) AND name = ? GROUP BY ALL",
        [name_key(ROWS)],
    ).to_pydict()
    done: dict[int, dict[tuple[str, str], int]] = {run: {} for run in runs}
    for run, incarnation, stream, seq in zip(*marks.values(), strict=True):
        done[run][incarnation, stream] = seq
    return done


def outline_runs(engine: Engine, known: Known, run_ids: Sequence[str], end: float) -> bool:
    """Outline the runs' rows that are not yet, but for a few; return whether all were by ``end``.

    Args:
        engine: the lake.
        known: its catalogue.
        run_ids: the runs, which have rows.
        end: moment of ``time.monotonic`` after which no more is begun.
    """
    numbers = {run_id: known.runs[run_id] for run_id in run_ids if run_id in known.runs}
    done = _outlined_seqs(engine, list(numbers.values())) if numbers else {}
    return all(
        _outline_run(engine, known, run_id, run, done[run], end) for run_id, run in numbers.items()
    )


def _outline_run(
    engine: Engine,
    known: Known,
    run_id: str,
    run: int,
    done: Mapping[tuple[str, str], int],
    end: float,
) -> bool:
    state = known.run(run_id, is_fresh=True)
    for stream in STREAMS:
        pending = _pending(state, stream, done)
        if sum(stop - first for first, stop, _ in pending) < FEWEST_ROWS:
            continue
        columns = known.columns(run_id, stream)
        names = _outlined_columns(known.kinds(run_id, stream))
        most_rows = max(1, _MOST_VALUES // (len(names) + 1))
        for seqs in _pieces(pending, most_rows):
            if time.monotonic() > end:
                return False
            span = Span(run_id, stream, seqs=seqs)
            _outline(engine, run, span, state, columns, names)
    return True


def _outlined_columns(kinds: Mapping[str, str]) -> list[str]:
    own = {column.name for column in ROW_COLUMNS}
    return [name for name, kind in kinds.items() if kind != "S" and name not in own]


def _pending(
    state: RunState, stream: str, done: Mapping[tuple[str, str], int]
) -> list[tuple[int, int, str]]:
    """Return each writer's numbers that are not outlined: the first, the one behind the last."""
    pending = []
    for (incarnation, key), mark in state.marks.items():
        first = done.get((incarnation, stream), -1) + 1
        is_there = (incarnation, stream) in state.sources
        if key == stream and is_there and first <= mark:
            pending.append((first, mark + 1, incarnation))
    return pending


def _pieces(
    pending: Sequence[tuple[int, int, str]], most_rows: int
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield some writers' numbers at a time, each with its first one and the one behind its last.

    Those of one piece begin near each other: what is not asked for is skipped in the files.
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


def _outline(
    engine: Engine, run: int, span: Span, state: RunState, places: Places, names: Sequence[str]
) -> None:
    stream, writers = span.stream, sorted(span.seqs or ())
    wanted = ("incarnation", "seq", "step", "attempt", "time_unix_ns", *names)
    chosen = chosen_of(span, run, places)
    rows = select(engine, stream, chosen, {name: expression(name, places) for name in wanted})
    codes = pa.compute.index_in(rows["incarnation"], pa.array(writers)).to_numpy()
    order = np.lexsort((rows["seq"].to_numpy(), codes))
    if not len(order):
        return
    # One that says no time lies at 0, as everywhere: as NaN it would end the outlines of every run.
    keys = ("seq", "step", "attempt", "time_unix_ns")
    of_row = (to_column(rows[name]).values[order] for name in keys)
    columns = {}
    for name in names:
        column = to_column(rows[name])
        columns[name] = Column(column.values[order], column.is_missing[order])
    entries = outline(stream, outlines.Rows(codes[order], *of_row), columns)
    sources = [state.sources.get((incarnation, stream), "") for incarnation in writers]
    with engine.transaction():
        engine.insert(OUTLINES, _table(run, stream, entries, [ROWS, *columns], writers, sources))


def _table(
    run: int,
    stream: str,
    entries: Entries,
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
