"""The tables of steps and of ranks: found by the columns of their conditions, then read for good.

First only the columns that conditions ask for are decoded, one source after the other, so that a
question about a million steps of many ranks holds one rank's at a time. Of the rows that meet them,
as many as are wanted are read with all their columns.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.metrics import STEP_METRICS
from trainvitals.views import Branch, TableQuestion
from vitals_collector.queries.conditions import Cells, Condition, Kind
from vitals_collector.queries.ledger import attempt_rows
from vitals_collector.queries.read_columns import (
    KEYS,
    ColumnBlock,
    Ints,
    Part,
    find_parts,
    join_blocks,
    read_blocks,
)
from vitals_collector.queries.series import AttemptRow, Points, stitch
from vitals_collector.storage.schema import batches, measured_columns

MAX_SCANNED_ROWS = 200_000_000
"""Rows that one question may look at."""
_PLAIN = ("step", "attempt", "time_unix_ns")
_Bounds = tuple[int | None, int | None]


class Found(NamedTuple):
    """Rows that met the conditions: of which rank and attempt, and where they lie."""

    rank: Ints
    step: Ints
    attempt: Ints
    batch: Ints
    at: Ints

    def take(self, which: Ints) -> "Found":
        """Return the chosen rows, in the order of the choice."""
        return Found._make(column[which] for column in self)


class Answer(NamedTuple):
    """The rows wanted, and what is not among them."""

    rows: Found
    num_total: int
    """Rows that met the conditions."""
    num_discarded: int
    """Rows discarded by rollbacks that were not looked at: the branch is ``lineage``."""


def columns_of_steps(connection: Connection, run_id: str, table: str) -> dict[str, Kind]:
    """Return the columns of the table, those without any value in this run last."""
    measured = select(measured_columns.c.name).where(
        measured_columns.c.run_id == run_id, measured_columns.c.stream == "steps"
    )
    there = set(connection.execute(measured).scalars()) - {*KEYS, "monotonic_ns"}
    scope_of = {m.column: m.scope for m in STEP_METRICS}
    if table == "ranks":  # what is equal on all ranks is a column of the steps
        there = {name for name in there if scope_of.get(name) == "rank"}
        scope_of = {name: scope for name, scope in scope_of.items() if scope == "rank"}
    first = (*_PLAIN, "rank") if table == "ranks" else _PLAIN
    names = (
        *first,
        *(n for n in scope_of if n in there),
        *sorted(there - scope_of.keys()),
        *scope_of,
    )
    return dict.fromkeys(names, "number")


def shown_columns(connection: Connection, run_id: str, columns: Mapping[str, Kind]) -> list[str]:
    """Return the columns that have a value in this run."""
    measured = select(measured_columns.c.name).where(
        measured_columns.c.run_id == run_id, measured_columns.c.stream == "steps"
    )
    there = {*connection.execute(measured).scalars(), *_PLAIN, "rank"}
    return [name for name in columns if name in there]


def find_steps(
    connection: Connection, request: TableQuestion, conditions: Sequence[Condition]
) -> Answer:
    """Return the rows wanted, by step, then attempt, then rank.

    Raises:
        UsageError: they are too many to look at.
    """
    attempts = attempt_rows(connection, request.run_id)
    bounds = _bounds(request, conditions)
    kept: list[Found] = []
    num_total = num_discarded = 0
    for source, parts in _parts(connection, request, conditions, bounds).items():
        rows = _rows_of(connection, parts, conditions, bounds)
        met, num_left = _met(rows, _rank(source), request.branch, attempts, conditions)
        del rows  # those of the next source take their place
        num_total += len(met.step)
        num_discarded += num_left
        kept = [_first(_joined([*kept, met]), request)]
    return Answer(_joined(kept), num_total, num_discarded)


def read_steps(
    connection: Connection, run_id: str, rows: Found, names: Sequence[str]
) -> dict[str, Cells]:
    """Return the named columns of the rows."""
    columns = {"rank": Cells(rows.rank), "step": Cells(rows.step)}
    rest = [name for name in names if name not in columns]
    ids = np.unique(rows.batch)
    row_keys = np.sort(_key(rows.batch, rows.at))
    blocks: list[ColumnBlock] = []
    for i in range(0, len(ids), 500):
        is_wanted = batches.c.id.in_(ids[i : i + 500].tolist())
        parts = find_parts(connection, run_id, "steps", is_wanted)
        for block in read_blocks(connection, parts, rest):
            key = _key(block.batch, block.at)  # blocks may be many and small: no look at all rows
            first = np.searchsorted(row_keys, key)
            blocks.append(block.take(np.searchsorted(row_keys, key, side="right") > first))
    whole = join_blocks(blocks, rest)
    keys = _key(whole.batch, whole.at)
    order = np.argsort(keys)
    at = order[np.searchsorted(keys[order], _key(rows.batch, rows.at))]
    return columns | {name: whole.column(name).take(at) for name in rest}


def _key(batch: Ints, at: Ints) -> Ints:
    return (batch << 24) | at  # a batch has far fewer rows than 2**24


def _bounds(request: TableQuestion, conditions: Sequence[Condition]) -> _Bounds:
    """Return the steps asked for, conditions on the step included: less is read."""
    lows = [] if request.from_step is None else [request.from_step]
    highs = [] if request.to_step is None else [request.to_step]
    for column, op, value in conditions:
        if column == "step" and isinstance(value, int):
            lows += [value] if op in ("=", ">", ">=") else []
            highs += [value] if op in ("=", "<", "<=") else []
    low = _as_int64(max(lows)) if lows else None
    return low, _as_int64(min(highs)) if highs else None


def _as_int64(value: int) -> int:
    return max(min(value, 2**63 - 1), -(2**63))


def _parts(
    connection: Connection,
    request: TableQuestion,
    conditions: Sequence[Condition],
    bounds: _Bounds,
) -> dict[str, list[Part]]:
    """Return the batches to look into, by source, the lowest rank first."""
    ranks = [c.value for c in conditions if c.column == "rank" and c.op == "="]
    where = []
    if request.table == "steps":
        where = [batches.c.source == "rank:0"]
    elif ranks:
        where = [batches.c.source == f"rank:{ranks[0]}"]
    parts = find_parts(
        connection, request.run_id, "steps", *where, from_step=bounds[0], to_step=bounds[1]
    )
    num = sum(part.num_rows for part in parts)
    if num > MAX_SCANNED_ROWS:
        raise UsageError(
            f"the question looks at {num} rows; {MAX_SCANNED_ROWS} is the most",
            hint="narrow it with from_step and to_step, or ask for one rank: rank = 3",
        )
    by_source: dict[str, list[Part]] = {}
    for part in parts:
        by_source.setdefault(part.source, []).append(part)
    return {source: by_source[source] for source in sorted(by_source, key=_rank)}


def _rank(source: str) -> int:
    rank = Source.parse(source).rank
    return -1 if rank is None else rank


def _rows_of(
    connection: Connection,
    parts: Sequence[Part],
    conditions: Sequence[Condition],
    bounds: _Bounds,
) -> ColumnBlock:
    """Return one source's rows, with the columns that the conditions ask for."""
    asked = [c.column for c in conditions if c.column not in ("rank", *_PLAIN)]
    names = list(dict.fromkeys([*_PLAIN, *asked]))
    low, high = bounds
    blocks = list(read_blocks(connection, parts, names, from_step=low, to_step=high))
    return join_blocks(blocks, names)


def _met(
    rows: ColumnBlock,
    rank: int,
    branch: Branch,
    attempts: Sequence[AttemptRow],
    conditions: Sequence[Condition],
) -> tuple[Found, int]:
    """Return the branch's rows that meet the conditions, and how many a lineage left out."""
    step, attempt = rows.whole("step"), rows.whole("attempt")
    index = np.arange(len(rows), dtype=np.float64)
    points = Points(step, attempt, rows.whole("time_unix_ns"), index)
    which = stitch(points, attempts, branch).value.astype(np.int64)
    num_left = 0
    if branch == "lineage" and len(which) < len(points):
        num_left = len(stitch(points, attempts, "discarded"))
    for condition in conditions:
        if condition.column == "rank":
            cells = Cells(np.full(len(which), rank, dtype=np.int64))
        else:
            cells = rows.column(condition.column).take(which)
        which = which[condition.met(cells)]
    ranks = np.full(len(which), rank, dtype=np.int64)
    met = Found(ranks, step[which], attempt[which], rows.batch[which], rows.at[which])
    return met, num_left


def _joined(parts: Sequence[Found]) -> Found:
    if len(parts) == 1:
        return parts[0]
    none = Found._make([np.zeros(0, dtype=np.int64)] * len(Found._fields))
    return Found._make(np.concatenate(columns) for columns in zip(none, *parts, strict=True))


def _first(rows: Found, request: TableQuestion) -> Found:
    """Return the rows in the order wanted, as many as are."""
    sign = -1 if request.newest_first else 1
    order = np.lexsort((rows.rank, sign * rows.attempt, sign * rows.step))
    return rows.take(order[: request.limit])


__all__ = ["Answer", "Found", "columns_of_steps", "find_steps", "read_steps", "shown_columns"]
