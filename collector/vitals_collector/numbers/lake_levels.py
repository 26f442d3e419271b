"""Old steps of a lake become levels: numbers over the ranks instead of most ranks' rows.

What a window's rows come to is asked for beside the commits. One commit then adds the numbers,
takes the rows and their outlines away, and says which rows they were: whatever dies when, a row is
there or is part of the numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import StorageError
from vitals_collector.numbers.interface import Column, Columns, Levelled, Reason, Span, Window
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import LEVELLED, LEVELLED_COLUMNS, Known
from vitals_collector.numbers.lake_outlines import OUTLINES, name_key
from vitals_collector.numbers.lake_scan import Chosen, located, select
from vitals_collector.numbers.lake_tables import Places, own_expression, table_of, to_column
from vitals_collector.numbers.levels import (
    DURATION,
    LOSS,
    NUM_RANKS,
    STATISTICS,
    worst_of,
)
from vitals_collector.numbers.outlines import ROWS

_WINDOW = "attempt = ? AND step >= ? AND step < ? AND rank > 0"


class Plan(NamedTuple):
    """What a window's rows come to."""

    window: Window
    run: int
    names: list[str]
    numbers: Columns
    writers: pa.Table
    """Incarnation, source, rank, first and last number, and how many rows."""
    result: Levelled
    reason: Reason

    @property
    def num_rows(self) -> int:
        """How many rows the window had."""
        return sum(self.writers["num"].to_pylist())


def plan(
    engine: Engine,
    known: Known,
    run_id: str,
    window: Window,
    num_worst: int,
    *,
    is_whole: bool,
    reason: Reason,
) -> Plan | None:
    """Return what the window's rows come to; None where it has none.

    Raises:
        StorageError: a file that may hold some of them is damaged.
    """
    place = located(known, Span(run_id, "steps"))
    if place is None:
        return None
    run, places = place
    own = {column.name for column in ROW_COLUMNS}
    names = [n for n, kind in known.kinds(run_id, "steps").items() if kind != "S" and n not in own]
    chosen = Chosen(run, "", f"run = ? AND {_WINDOW}", [run, *window], {})
    expressions = {name: own_expression(name, places) for name in names}
    numbers = _numbers(engine, chosen, expressions)
    if not len(numbers["step"].values):
        return None
    broken = [name for name in names if numbers[f"{name}:nonfinite"].values.any()]
    writers = _writers(engine, chosen, places, [expressions[name] for name in broken])
    sources = writers["source"].to_pylist()
    kept = sorted(set(sources))
    if not is_whole:
        kept = worst_of(
            _by(sources, writers["broken"]),
            _by(sources, writers["slow"]),
            _furthest(engine, chosen, places),
            num_worst,
        )
    nums = writers["num"].to_pylist()
    taken = sum(num for source, num in zip(sources, nums, strict=True) if source not in kept)
    result = Levelled(taken, tuple(kept))
    return Plan(window, run, names, numbers, writers, result, reason)


def _numbers(engine: Engine, chosen: Chosen, expressions: dict[str, str]) -> Columns:
    engine.files.need("steps", chosen.run)
    values, wanted = list[str](), list[str]()
    for i, sql in enumerate(expressions.values()):
        values.append(f"{sql}::DOUBLE AS x{i}, CASE WHEN isfinite(x{i}) THEN x{i} END AS f{i}")
        wanted.append(f"min(f{i}), sum(f{i}), max(f{i}), count(f{i}), count(x{i})")
    rows = engine.ask(
        f"SELECT {', '.join(('step, max(time_unix_ns), count(*)', *wanted))} FROM"
        f" (SELECT {', '.join(('step, time_unix_ns', *values))} FROM steps WHERE {chosen.where})"
        " GROUP BY step ORDER BY step",
        chosen.values,
    )
    columns = [to_column(column) for column in rows.columns]
    numbers = dict(zip(("step", "time_unix_ns", NUM_RANKS), columns, strict=False))
    for i, name in enumerate(expressions):
        numbers |= _statistics(name, *columns[3 + 5 * i : 8 + 5 * i])
    return numbers


def _statistics(
    name: str, low: Column, total: Column, high: Column, num: Column, of: Column
) -> Columns:
    nums, none = num.values, of.values == 0
    with np.errstate(over="ignore"):
        mean = Column(total.values / np.maximum(nums, 1), total.is_missing)
    counts = Column(nums, none), Column(of.values - nums, none)
    return dict(
        zip((f"{name}:{what}" for what in STATISTICS), (low, mean, high, *counts), strict=True)
    )


def _writers(engine: Engine, chosen: Chosen, places: Places, broken: Sequence[str]) -> pa.Table:
    """Return each writer's numbers of rows, its longest step, and its first with a broken value."""
    is_broken = " OR ".join(f"NOT isfinite({sql}::DOUBLE)" for sql in broken) or "false"
    duration = f"{own_expression(DURATION, places)}::DOUBLE"
    wanted = {
        "incarnation": "incarnation",
        "source": "source",
        "rank": "rank",
        "first_seq": "min(seq)",
        "last_seq": "max(seq)",
        "num": "count(*)",
        "slow": f"max({duration}) FILTER (isfinite({duration}))",
        "broken": f"min(step) FILTER ({is_broken})",
    }
    grouped = chosen._replace(where=f"{chosen.where} GROUP BY incarnation, source, rank")
    return select(engine, "steps", grouped, wanted)


def _furthest(engine: Engine, chosen: Chosen, places: Places) -> dict[str, float]:
    """Return how far each source's loss was from its step's median at most."""
    loss = f"{own_expression(LOSS, places)}::DOUBLE"
    answer = engine.ask(
        f"WITH losses AS (SELECT step, source, {loss} AS loss FROM steps"
        f" WHERE {chosen.where} AND isfinite({loss})),"
        " medians AS (SELECT step, median(loss) AS middle FROM losses GROUP BY step)"
        " SELECT source, max(abs(loss - middle)) AS far FROM losses JOIN medians USING (step)"
        " GROUP BY source",
        chosen.values,
    )
    return _by(answer["source"].to_pylist(), answer["far"])


def _by(sources: Sequence[str], values: pa.ChunkedArray) -> dict[str, Any]:
    """Return the values by source; of one that was started twice, either."""
    pairs = zip(sources, values.to_pylist(), strict=True)
    return {source: value for source, value in pairs if value is not None}


def take_away(engine: Engine, planned: Plan) -> None:
    """Remove, in a commit, the rows that are part of the numbers now, and say which they were.

    Raises:
        StorageError: rows came meanwhile, or another collector was quicker; look again.
    """
    run, window = planned.run, planned.window
    own = f"run = {run} AND attempt = {window.attempt}"
    steps = f"{own} AND step >= {window.first_step} AND step < {window.end_step} AND rank > 0"
    present = engine.read(f"SELECT count(*) AS num FROM steps WHERE {steps}")["num"][0].as_py()
    done = engine.read(
        f"SELECT count(*) AS num FROM {LEVELLED}"
        f" WHERE {own} AND stream = 'steps' AND first_at = {window.first_step}"
    )["num"][0].as_py()
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
        # What says how far a writer is outlined stays.
        engine.execute(
            f"DELETE FROM {OUTLINES} WHERE {own} AND stream = 'steps' AND rank > 0 AND {is_taken}"
            f" AND first_step >= {window.first_step} AND first_step < {window.end_step}"
            f" AND name <> {name_key(ROWS)}"
        )
    engine.insert(LEVELLED, _levelled(planned))


def _levelled(planned: Plan) -> pa.Table:
    kept = set(planned.result.kept)
    writers = planned.writers.select(["source", "incarnation", "first_seq", "last_seq", "num"])
    window = (planned.run, "steps", *planned.window)
    rows = [
        (*window, incarnation, first, last, 0 if source in kept else num, planned.reason)
        for source, incarnation, first, last, num in zip(*writers.to_pydict().values(), strict=True)
    ]
    return table_of(LEVELLED_COLUMNS, rows)
