"""Tables of steps and of ranks: filtered by the columns of their conditions, then read.

First only the columns in conditions are decoded, one source after the other, so that a query over a
million steps of many ranks holds one rank's at a time. Then the requested number of matching rows
is read with all columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection

from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.metrics import STEP_METRICS
from trainvitals.views import Branch, TableQuestion
from vitals_collector.numbers.interface import (
    AttemptRow,
    Columns,
    Ints,
    NumberStoreReader,
    Points,
    RowSpan,
    concat_columns,
    stitch,
)
from vitals_collector.queries.conditions import Kind, TableColumn, TableCondition
from vitals_collector.queries.series import attempt_rows, exclusive_end, measured_by_stream
from vitals_collector.storage.store import ReadSnapshot

MAX_SCANNED_ROWS = 200_000_000
"""Maximum number of rows that one query scans."""
_MOST_READ = 1 << 18
"""Rows that are read together with all their columns."""
_APART = 8_192
"""Gap between requested rows from which the rows in it are not read."""
_PLAIN = ("step", "attempt", "time_unix_ns")
_Bounds = tuple[int | None, int | None]


class MatchingSteps(NamedTuple):
    """Rows that match the conditions: one per rank, step and attempt."""

    rank: Ints
    step: Ints
    attempt: Ints

    def take(self, which: Ints) -> "MatchingSteps":
        """Return the chosen rows of a table query, in the order of the choice."""
        return MatchingSteps._make(column[which] for column in self)


class StepTableResult(NamedTuple):
    """The requested rows, and the number of others."""

    rows: MatchingSteps
    num_total: int
    """Number of rows that match the conditions."""
    num_discarded: int
    """Rows discarded by rollbacks that were not scanned, if only the lineage is requested."""


def columns_of_steps(connection: Connection, run_id: str, table: str) -> dict[str, Kind]:
    """Query the columns of the table of steps or ranks, those without any value last."""
    there = measured_by_stream(connection, run_id)["steps"] - {*_PLAIN, "monotonic_ns"}
    scope_of = {m.column: m.scope for m in STEP_METRICS}
    if table == "ranks":  # values that are equal on all ranks are columns of the steps
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
    """Query the columns that a table of steps shows: those with a value in this run."""
    there = measured_by_stream(connection, run_id)["steps"] | {*_PLAIN, "rank"}
    return [name for name in columns if name in there]


def find_steps(
    moment: ReadSnapshot, request: TableQuestion, conditions: Sequence[TableCondition]
) -> StepTableResult:
    """Find the rows for a query of the table of steps or ranks, by step, attempt, rank.

    Raises:
        UsageError: there are too many rows to scan.
    """
    attempts = attempt_rows(moment.sql, request.run_id)
    columns = [c.column for c in conditions if c.column not in ("rank", *_PLAIN)]
    names = list(dict.fromkeys([*_PLAIN, *columns]))
    matches: list[MatchingSteps] = []
    num_total = num_discarded = 0
    for span in _spans(moment.numbers, request, conditions):
        rows = moment.numbers.scan(span, names)
        rank = _rank_or_minus_one(span.sources[0])
        met, num_left = _matching_rows(rows, rank, request.branch, attempts, conditions)
        del rows  # free the memory for the next source
        num_total += len(met.step)
        num_discarded += num_left
        matches = [_first_rows(_concatenate_matches([*matches, met]), request)]
    return StepTableResult(_concatenate_matches(matches), num_total, num_discarded)


def read_steps(
    numbers: NumberStoreReader, run_id: str, rows: MatchingSteps, names: Sequence[str]
) -> dict[str, TableColumn]:
    """Read the requested columns for the rows that a table query has found."""
    rest = [name for name in names if name not in ("rank", "step")]
    number_of = _Numbering(rows)
    keys = number_of(rows.step, rows.rank, rows.attempt)
    order = np.argsort(keys)
    # Rows that are damaged in columns outside the conditions have no values.
    places: list[Ints] = []
    read: list[Columns] = []
    for span in _together(run_id, rows):
        columns = numbers.scan(span, list(dict.fromkeys(["step", "rank", "attempt", *rest])))
        key = number_of(*(columns[name].values for name in ("step", "rank", "attempt")))
        key_index = np.minimum(np.searchsorted(keys[order], key), len(keys) - 1)
        is_wanted = np.flatnonzero(keys[order][key_index] == key)
        places.append(order[key_index[is_wanted]])  # the latest of rewritten rows comes last
        read.append({name: columns[name].take(is_wanted) for name in rest})
    all_places = np.concatenate([np.zeros(0, np.int64), *places])
    cells = {"rank": TableColumn(rows.rank), "step": TableColumn(rows.step)}
    for name in rest:
        column = concat_columns([part[name] for part in read])
        values = np.zeros(len(keys), column.values.dtype)
        valid = np.zeros(len(keys), np.bool_)
        values[all_places], valid[all_places] = column.values, ~column.is_missing
        cells[name] = TableColumn(values, None if valid.all() else valid)
    return cells


class _Numbering:
    """Assigns a number to each step of the rows' ranks and attempts; -1 to others."""

    def __init__(self, rows: MatchingSteps) -> None:
        self._known = [np.unique(column) for column in (rows.step, rows.rank, rows.attempt)]

    def __call__(self, *keys: Ints) -> Ints:
        numbers = np.zeros(len(keys[0]), np.int64)
        is_known = np.ones(len(keys[0]), np.bool_)
        for distinct, key in zip(self._known, keys, strict=True):
            at = np.minimum(np.searchsorted(distinct, key), len(distinct) - 1)
            is_known &= distinct[at] == key
            numbers = numbers * len(distinct) + at
        return np.where(is_known, numbers, -1)


def _together(run_id: str, rows: MatchingSteps) -> Iterator[RowSpan]:
    """Yield the rows that match a table query as spans that are read together."""
    if not len(rows.step):
        return
    sources = tuple(f"rank:{rank}" for rank in np.unique(rows.rank).tolist())
    width, apart = max(1, _MOST_READ // len(sources)), max(1, _APART // len(sources))
    steps = np.unique(rows.step)
    ends = np.flatnonzero(np.diff(steps, append=steps[-1] + 2 * apart) > apart)
    begins = np.concatenate(([0], ends[:-1] + 1))
    for first, last in zip(steps[begins].tolist(), steps[ends].tolist(), strict=True):
        for low in range(first, last + 1, width):
            high = min(low + width, last + 1)
            yield RowSpan(run_id, "steps", sources, from_step=low, to_step=high)


def _bounds(request: TableQuestion, conditions: Sequence[TableCondition]) -> _Bounds:
    """Return the steps that a table query has to read, narrowed by its conditions."""
    lows = [] if request.from_step is None else [request.from_step]
    highs = [] if request.to_step is None else [request.to_step]
    for column, op, value in conditions:
        if column == "step" and isinstance(value, int):
            lows += [value] if op in ("=", ">", ">=") else []
            highs += [value] if op in ("=", "<", "<=") else []
    low = _as_int64(max(lows)) if lows else None
    return low, _as_int64(min(highs)) if highs else None


def _as_int64(value: int) -> int:
    """Return a step of a table query, limited to 64 bits."""
    return max(min(value, 2**63 - 1), -(2**63))


def _spans(
    numbers: NumberStoreReader, request: TableQuestion, conditions: Sequence[TableCondition]
) -> list[RowSpan]:
    """Return the stored rows that a table query scans, the lowest rank first."""
    ranks = [c.value for c in conditions if c.column == "rank" and c.op == "="]
    if request.table == "steps":
        sources = ["rank:0"]
    else:
        sources = sorted(numbers.sources(request.run_id, "steps"), key=_rank_or_minus_one)
        if ranks:
            sources = [source for source in sources if source == f"rank:{ranks[0]}"]
    low, high = _bounds(request, conditions)
    span = RowSpan(request.run_id, "steps", from_step=low, to_step=exclusive_end(high))
    is_one = len(sources) == 1
    num = numbers.num_rows(span._replace(sources=tuple(sources)) if is_one else span)
    if num > MAX_SCANNED_ROWS:
        raise UsageError(
            f"the query would scan {num} rows; at most {MAX_SCANNED_ROWS} are allowed",
            hint="narrow it with from_step and to_step, or ask for one rank: rank = 3",
        )
    return [span._replace(sources=(source,)) for source in sources]


def _rank_or_minus_one(source: str) -> int:
    """Return the rank of a source, by which a table query sorts; -1 if it is not a rank."""
    rank = Source.parse(source).rank
    return -1 if rank is None else rank


def _matching_rows(
    rows: Columns,
    rank: int,
    branch: Branch,
    attempts: Sequence[AttemptRow],
    conditions: Sequence[TableCondition],
) -> tuple[MatchingSteps, int]:
    """Return the rows that match a table query, and how many are outside the lineage."""
    step, attempt, time = (rows[name].values.astype(np.int64, copy=False) for name in _PLAIN)
    points = Points(step, attempt, time, np.arange(len(step), dtype=np.float64))
    which = stitch(points, attempts, branch).value.astype(np.int64)
    num_left = 0
    if branch == "lineage" and len(which) < len(points):
        num_left = len(stitch(points, attempts, "discarded"))
    for condition in conditions:
        if condition.column == "rank":
            cells = TableColumn(np.full(len(which), rank, dtype=np.int64))
        else:
            column = rows[condition.column].take(which)
            cells = TableColumn(column.values, ~column.is_missing)
        which = which[condition.matching_cells(cells)]
    ranks = np.full(len(which), rank, dtype=np.int64)
    return MatchingSteps(ranks, step[which], attempt[which]), num_left


def _concatenate_matches(parts: Sequence[MatchingSteps]) -> MatchingSteps:
    """Join the matching rows of all sources for the response to a table query."""
    if len(parts) == 1:
        return parts[0]
    none = MatchingSteps._make([np.zeros(0, dtype=np.int64)] * len(MatchingSteps._fields))
    return MatchingSteps._make(
        np.concatenate(columns) for columns in zip(none, *parts, strict=True)
    )


def _first_rows(rows: MatchingSteps, request: TableQuestion) -> MatchingSteps:
    """Return the rows of a table that its query wants, in the requested order."""
    sign = -1 if request.newest_first else 1
    order = np.lexsort((rows.rank, sign * rows.attempt, sign * rows.step))
    return rows.take(order[: request.limit])
