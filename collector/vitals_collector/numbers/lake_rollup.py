"""Old rows of a lake: numbers over the ranks, every tenth step, the ends of each minute.

Steps are rolled up: statistics over the ranks replace most ranks' rows. The statistics of a window
are computed outside the commits.

Layers: the first step of every ``every`` steps stays. Samples of a GPU, node or process: each
interval becomes two rows, the first with the minimum of every column, the second with the maximum,
so that peaks stay visible and a counter keeps its first and last value. Text is that of the ends. A
sample with a non-finite value stays unchanged.

One commit deletes a window's rows, inserts their replacement, and records which they were:
whichever process dies, a row is either stored or part of its replacement.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trainvitals.errors import StorageError
from vitals_collector.numbers.chunk_stats import ROWS
from vitals_collector.numbers.interface import (
    HOST_STREAMS,
    Columns,
    ColumnValues,
    DeletedRows,
    DueWindow,
    Reason,
    RollUpResult,
    RowSpan,
    StepWindow,
)
from vitals_collector.numbers.lake_catalogue import (
    KEYS,
    LEVELLED,
    LEVELLED_COLUMNS,
    OUTLINES,
    Catalogue,
    Places,
    build_arrow_table,
    column_from_arrow,
    name_key,
    numeric_columns,
    quoted,
    stream_column_sql,
)
from vitals_collector.numbers.lake_engine import LakeEngine
from vitals_collector.numbers.lake_reading import RowSelection, locate_run, select_rows
from vitals_collector.numbers.rank_rollup import (
    DURATION,
    LOSS,
    NUM_RANKS,
    STATISTICS,
    order_worst_ranks,
)

# ---------------------------------------------------------------------------------- levels of steps

_WINDOW = "attempt = ? AND step >= ? AND step < ? AND rank > 0"


class RollUpPlan(NamedTuple):
    """Statistics of a window's rows, and the rows that stay."""

    window: StepWindow
    run: int
    names: list[str]
    numbers: Columns
    writers: pa.Table
    """Incarnation, source, rank, first and last number, and how many rows."""
    result: RollUpResult
    reason: Reason

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the window to roll up."""
        return sum(self.writers["num"].to_pylist())


def plan(
    engine: LakeEngine,
    catalogue: Catalogue,
    run_id: str,
    window: StepWindow,
    num_worst: int,
    *,
    is_whole: bool,
    reason: Reason,
) -> RollUpPlan | None:
    """Plan the roll-up of a window of steps; None if it has no rows to replace.

    Raises:
        StorageError: a file that may hold some of them is damaged.
    """
    location = locate_run(catalogue, RowSpan(run_id, "steps"))
    if location is None:
        return None
    run, places = location
    names = numeric_columns(catalogue.kinds(run_id, "steps"))
    selection = RowSelection(run, "", f"run = ? AND {_WINDOW}", [run, *window], {})
    expressions = {name: stream_column_sql(name, places) for name in names}
    numbers = _query_statistics(engine, selection, expressions)
    if not len(numbers["step"].values):
        return None
    broken = [name for name in names if numbers[f"{name}:nonfinite"].values.any()]
    writers = _writers_in(engine, selection, places, [expressions[name] for name in broken])
    sources = writers["source"].to_pylist()
    kept_sources = sorted(set(sources))
    if not is_whole:
        kept_sources = order_worst_ranks(
            _values_by_source(sources, writers["broken"]),
            _values_by_source(sources, writers["slow"]),
            _max_loss_distances(engine, selection, places),
            num_worst,
        )
    nums = writers["num"].to_pylist()
    taken = sum(
        num for source, num in zip(sources, nums, strict=True) if source not in kept_sources
    )
    result = RollUpResult(taken, tuple(kept_sources))
    return RollUpPlan(window, run, names, numbers, writers, result, reason)


def _query_statistics(
    engine: LakeEngine, selection: RowSelection, expressions: dict[str, str]
) -> Columns:
    """Return the statistics over ranks of each step of a window to roll up."""
    engine.files.check_files_of_runs("steps", selection.run)
    values, statistics = list[str](), list[str]()
    for i, sql in enumerate(expressions.values()):
        values.append(f"{sql}::DOUBLE AS x{i}, CASE WHEN isfinite(x{i}) THEN x{i} END AS f{i}")
        statistics.append(f"min(f{i}), sum(f{i}), max(f{i}), count(f{i}), count(x{i})")
    rows = engine.ask(
        f"SELECT {', '.join(('step, max(time_unix_ns), count(*)', *statistics))} FROM"
        f" (SELECT {', '.join(('step, time_unix_ns', *values))} FROM steps WHERE {selection.where})"
        " GROUP BY step ORDER BY step",
        selection.values,
    )
    columns = [column_from_arrow(column) for column in rows.columns]
    numbers = dict(zip(("step", "time_unix_ns", NUM_RANKS), columns, strict=False))
    for i, name in enumerate(expressions):
        numbers |= _statistics_columns(name, *columns[3 + 5 * i : 8 + 5 * i])
    return numbers


def _statistics_columns(
    name: str,
    low: ColumnValues,
    total: ColumnValues,
    high: ColumnValues,
    num: ColumnValues,
    of: ColumnValues,
) -> Columns:
    """Return the rolled-up columns of a metric: minimum, mean, maximum, counts."""
    nums, none = num.values, of.values == 0
    with np.errstate(over="ignore"):
        mean = ColumnValues(total.values / np.maximum(nums, 1), total.is_missing)
    counts = ColumnValues(nums, none), ColumnValues(of.values - nums, none)
    return dict(
        zip((f"{name}:{what}" for what in STATISTICS), (low, mean, high, *counts), strict=True)
    )


def _writers_in(
    engine: LakeEngine, selection: RowSelection, places: Places, broken: Sequence[str]
) -> pa.Table:
    """Return each writer's rows in a window, its longest step, its first with a broken value."""
    is_broken = " OR ".join(f"NOT isfinite({sql}::DOUBLE)" for sql in broken) or "false"
    duration = f"{stream_column_sql(DURATION, places)}::DOUBLE"
    expressions = {
        "incarnation": "incarnation",
        "source": "source",
        "rank": "rank",
        "first_seq": "min(seq)",
        "last_seq": "max(seq)",
        "num": "count(*)",
        "slow": f"max({duration}) FILTER (isfinite({duration}))",
        "broken": f"min(step) FILTER ({is_broken})",
    }
    grouped = selection._replace(where=f"{selection.where} GROUP BY incarnation, source, rank")
    return select_rows(engine, "steps", grouped, expressions)


def _max_loss_distances(
    engine: LakeEngine, selection: RowSelection, places: Places
) -> dict[str, float]:
    """Return each source's largest distance from the step's median loss, in rows to roll up."""
    loss = f"{stream_column_sql(LOSS, places)}::DOUBLE"
    answer = engine.ask(
        f"WITH losses AS (SELECT step, source, {loss} AS loss FROM steps"
        f" WHERE {selection.where} AND isfinite({loss})),"
        " medians AS (SELECT step, median(loss) AS middle FROM losses GROUP BY step)"
        " SELECT source, max(abs(loss - middle)) AS far FROM losses JOIN medians USING (step)"
        " GROUP BY source",
        selection.values,
    )
    return _values_by_source(answer["source"].to_pylist(), answer["far"])


def _values_by_source(sources: Sequence[str], values: pa.ChunkedArray) -> dict[str, Any]:
    """Return a window's values by source; for a source with two incarnations, either."""
    pairs = zip(sources, values.to_pylist(), strict=True)
    return {source: value for source, value in pairs if value is not None}


def delete_rows(engine: LakeEngine, planned: RollUpPlan) -> None:
    """Delete, in a commit, the rows that a roll-up's statistics replace; record which they were.

    Raises:
        StorageError: rows arrived in the meantime, or another collector was faster; plan again.
    """
    run, window = planned.run, planned.window
    where = f"run = {run} AND attempt = {window.attempt}"
    steps = f"{where} AND step >= {window.first_step} AND step < {window.end_step} AND rank > 0"

    def count(rows: str) -> int:
        counted = engine.query_in_transaction(f"SELECT count(*) AS num FROM {rows}")
        return int(counted["num"][0].as_py())

    is_done = f"stream = 'steps' AND first_at = {window.first_step}"
    present, done = count(f"steps WHERE {steps}"), count(f"{LEVELLED} WHERE {where} AND {is_done}")
    if present != planned.num_rows or done:
        raise StorageError(
            f"the steps {window.first_step} to {window.end_step - 1} were changed meanwhile:"
            f" {present} rows where {planned.num_rows} were read",
            hint="they are thinned in the next round",
        )
    ranks = sorted({int(source.partition(":")[2]) for source in planned.result.kept})
    is_taken = f"rank NOT IN ({', '.join(map(str, ranks))})" if ranks else "true"
    if planned.result.num_rows:
        engine.execute(f"DELETE FROM steps WHERE {steps} AND {is_taken}")
        # Keep the marks of how far each writer has chunk statistics.
        engine.execute(
            f"DELETE FROM {OUTLINES} WHERE {where} AND stream = 'steps' AND rank > 0 AND {is_taken}"
            f" AND first_step >= {window.first_step} AND first_step < {window.end_step}"
            f" AND name <> {name_key(ROWS)}"
        )
    engine.insert(LEVELLED, _rolled_up_rows(planned))


def _rolled_up_rows(planned: RollUpPlan) -> pa.Table:
    """Return the lake's records of which rows a roll-up replaced."""
    kept_sources = set(planned.result.kept)
    writers = planned.writers.select(["source", "incarnation", "first_seq", "last_seq", "num"])
    window = (planned.run, "steps", *planned.window)
    rows = [
        (*window, incarnation, first, last, 0 if source in kept_sources else num, planned.reason)
        for source, incarnation, first, last, num in zip(*writers.to_pydict().values(), strict=True)
    ]
    return build_arrow_table(LEVELLED_COLUMNS, rows)


# --------------------------------------------------------------------------------- layers and hosts

_GROUP = ("run", "incarnation", "source", "rank")


def next_window(
    engine: LakeEngine, catalogue: Catalogue, run_id: str, stream: str, attempt: int, size: int
) -> DueWindow | None:
    """Return the oldest window of a stream that was not downsampled yet; None if there is none.

    For steps, the rows of ranks other than 0. For hosts, windows are in nanoseconds, and attempts
    are not distinguished.
    """
    location = locate_run(catalogue, RowSpan(run_id, stream))
    if location is None:
        return None
    run = location[0]
    where, along = _window_filter(stream, attempt)
    done = engine.ask(
        f"SELECT max(end_at) AS at FROM {LEVELLED}"
        f" WHERE run = ? AND stream = '{stream}' AND attempt = ?",
        [run, attempt],
    )["at"].to_pylist()[0]
    # Only the first: row groups that start after the current minimum are skipped.
    first = engine.ask(
        f"SELECT {along} AS at FROM {stream} WHERE run = ? AND {where} AND {along} >= ?"
        f" ORDER BY {along} LIMIT 1",
        [run, -(2**62) if done is None else done],
    )["at"].to_pylist()
    if not first:
        return None
    start = first[0] // size * size
    window = StepWindow(attempt, start, start + size)
    writers = engine.ask(
        f"SELECT incarnation, max(seq) AS seq, coalesce(max(time_unix_ns), 0) AS at FROM {stream}"
        f" WHERE run = ? AND {where} AND {along} >= ? AND {along} < ? GROUP BY incarnation",
        [run, window.first_step, window.end_step],
    )
    incarnations, seqs, times = writers.to_pydict().values()
    return DueWindow(window, max(times), dict(zip(incarnations, seqs, strict=True)))


def _window_filter(stream: str, attempt: int) -> tuple[str, str]:
    """Return which of the lake's rows a window has, and along what."""
    if stream in HOST_STREAMS:
        return "true", "time_unix_ns"
    return f"attempt = {attempt}" + (" AND rank > 0" if stream == "steps" else ""), "step"


def downsample_window(
    engine: LakeEngine,
    catalogue: Catalogue,
    run_id: str,
    stream: str,
    window: StepWindow,
    every: int,
    *,
    is_whole: bool,
    reason: Reason,
) -> int:
    """Downsample a window in one commit, as described in ``Lake.downsample_window``."""
    location = locate_run(catalogue, RowSpan(run_id, stream))
    if location is None:
        return 0
    run, places = location
    where, along = _window_filter(stream, window.attempt)
    rows = (
        f"run = {run} AND {where} AND {along} >= {window.first_step}"
        f" AND {along} < {window.end_step}"
    )
    engine.files.check_files_of_runs(stream, run)
    with engine.transaction():
        before = _writer_seq_ranges(engine, stream, rows)
        if stream in HOST_STREAMS and not is_whole:
            ends = engine.query_in_transaction(_extreme_rows_sql(stream, rows, places, every))
            engine.execute(f"DELETE FROM {stream} WHERE {rows}")
            engine.insert(stream, ends)
        elif not is_whole:
            firsts = f"SELECT min(step) FROM {stream} WHERE {rows} GROUP BY step // {every}"
            engine.execute(f"DELETE FROM {stream} WHERE {rows} AND step NOT IN ({firsts})")
        remaining_rows = before if is_whole else _writer_seq_ranges(engine, stream, rows)
        num_left = dict(
            zip(*(remaining_rows[name].to_pylist() for name in ("writer", "num")), strict=True)
        )
        listed = [
            (run, stream, *window, writer, first, last, num - num_left.get(writer, 0), reason)
            for writer, first, last, num in zip(*before.to_pydict().values(), strict=True)
        ]
        engine.insert(LEVELLED, build_arrow_table(LEVELLED_COLUMNS, listed))
    return len(before) and sum(before["num"].to_pylist()) - sum(num_left.values())


def _writer_seq_ranges(engine: LakeEngine, stream: str, rows: str) -> pa.Table:
    """Return by writer the first and last number of the lake's rows in a window."""
    return engine.query_in_transaction(
        "SELECT incarnation AS writer, min(seq) AS first, max(seq) AS last, count(*) AS num"
        f" FROM {stream} WHERE {rows} GROUP BY incarnation"
    )


def _extreme_rows_sql(stream: str, rows: str, places: Places, every: int) -> str:
    """Return the query for the rows that remain of the lake's samples: all if at most two."""
    keys = ", ".join(map(quoted, _GROUP))
    # The stream's own column distinguishes a node's GPUs.
    of = stream_column_sql("rank", places)
    broken = [f"NOT isfinite({quoted(name)})" for (_, kind), name in places.items() if kind == "f8"]
    is_broken = " OR ".join(f"coalesce({each}, false)" for each in broken) or "false"
    columns = [*_GROUP, "seq", *places.values()]
    # Non-finite samples stay visible, and do not hide the peak of their minute.
    sides = [
        f"SELECT {', '.join(map(quoted, columns))} FROM {stream} WHERE {rows} AND ({is_broken})"
    ]
    for extreme in ("min", "max"):
        columns = [f"{extreme}(seq) AS seq"]
        for (_, kind), name in places.items():
            value = f"arg_{extreme}({quoted(name)}, seq)" if kind == "S" else ""
            columns.append(f"{value or f'{extreme}({quoted(name)})'} AS {quoted(name)}")
        is_two = "" if extreme == "min" else " HAVING count(*) > 1"
        sides.append(
            f"SELECT {keys}, {', '.join(columns)} FROM {stream} WHERE {rows} AND NOT ({is_broken})"
            f" GROUP BY {keys}, {of}, time_unix_ns // {every}{is_two}"
        )
    return " UNION ALL BY NAME ".join(sides)


def deleted_rows(engine: LakeEngine, catalogue: Catalogue, run_id: str) -> list[DeletedRows]:
    """Return how many of the run's rows the lake deleted, by stream and reason."""
    run = catalogue.run_number(run_id)
    if run is None:
        return []
    taken = engine.ask(
        "SELECT stream, reason, sum(num_taken)::BIGINT AS num, max(end_at) AS end_at"
        f" FROM {LEVELLED} WHERE run = ? AND num_taken > 0 GROUP BY ALL ORDER BY ALL",
        [run],
    )
    return [
        DeletedRows(stream, reason, num, -1, end)
        if stream in HOST_STREAMS
        else DeletedRows(stream, reason, num, end - 1, 0)
        for stream, reason, num, end in zip(*taken.to_pydict().values(), strict=True)
    ]


assert set(_GROUP) < set(KEYS), "all but the number"
