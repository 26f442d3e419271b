"""Queries with filters: runs, steps, ranks, decisions, findings, alerts and events.

Every table is a list of columns with their types; conditions are parsed before anything is read.
Only rows that match all conditions are returned and counted.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, Table, select

from trainvitals.errors import UsageError
from trainvitals.jsonable import jsonable, non_finite_word
from trainvitals.records import Decision, Finding
from trainvitals.views import AlertView, EventView, RunSummary, TableQuestion, TableReply
from vitals_collector.alerts.inbox import alert_from_row
from vitals_collector.live import overview
from vitals_collector.live.run_status import Liveness
from vitals_collector.queries.conditions import (
    Kind,
    TableColumn,
    TableCondition,
    parse,
    unknown_column,
)
from vitals_collector.queries.ledger import event_view, run_row
from vitals_collector.queries.step_tables import (
    columns_of_steps,
    find_steps,
    read_steps,
    shown_columns,
)
from vitals_collector.storage.schema import alerts, decisions, events, findings
from vitals_collector.storage.store import ReadSnapshot

MAX_ROWS = 1_000_000
"""Maximum number of rows in a response."""
MAX_LISTED = 1_000_000
"""Maximum number of decisions, findings, alerts or events that one query scans."""
_INT64 = 2**63 - 1
_OF_STEPS = ("steps", "ranks")

_decision = msgspec.msgpack.Decoder(Decision).decode
_finding = msgspec.msgpack.Decoder(Finding).decode


def query_table(
    moment: ReadSnapshot,
    request: TableQuestion,
    when: Liveness,
    reach: frozenset[str] | None = None,
) -> TableReply:
    """Respond to a table query: rows of runs, steps or events that match its conditions.

    Raises:
        UsageError: an unknown run, column or operator, or a number out of bounds.
    """
    _check_request(request)
    if request.run_id:
        run_row(moment.sql, request.run_id)
    if request.table in _OF_STEPS:
        return _step_table(moment, request)
    columns = _COLUMNS[request.table]
    conditions = parse(request.where, columns)
    shown = _requested_columns(request, columns, list(columns))
    rows = _read_rows(moment.sql, request, when)
    if reach is not None:
        rows = [row for row in rows if row["run_id"] in reach]
    which = _matching_indices(rows, columns, conditions)
    if request.newest_first:
        which = which[::-1]
    shown_rows = [rows[i] for i in which[: request.limit]]
    data = tuple(tuple(_to_json_scalar(row[name]) for row in shown_rows) for name in shown)
    return TableReply(columns=tuple(shown), data=data, num_total=len(which))


def _check_request(request: TableQuestion) -> None:
    """Reject a table query with invalid numbers, or filters that its table lacks."""
    if not 1 <= request.limit <= MAX_ROWS:
        raise UsageError(f"limit is {request.limit}; it must be 1 to {MAX_ROWS}")
    for name in ("from_step", "to_step"):
        value = getattr(request, name)
        if value is None:
            continue
        if not -_INT64 <= value <= _INT64:
            raise UsageError(f"{name} is {value}; it must be {-_INT64} to {_INT64}")
        if request.table == "runs":
            raise UsageError(f"{name} was given; runs have none", hint="such as last_step >= 100")
    if request.table not in _OF_STEPS and request.branch != "all":
        raise UsageError(
            f"the branch is {request.branch}; {request.table} are always of all attempts",
            hint=f"leave it out; only {' and '.join(_OF_STEPS)} have branches",
        )
    if request.table in _OF_STEPS and not request.run_id:
        raise UsageError(
            f"run_id is empty; {request.table} need one run",
            hint="the table runs has the ids",
        )


def _requested_columns(
    request: TableQuestion, columns: Mapping[str, Kind], default: Sequence[str]
) -> Sequence[str]:
    """Return the columns that a table query wants, otherwise the default ones."""
    for name in request.columns:
        if name not in columns:
            raise unknown_column(name, columns)
    return tuple(dict.fromkeys(request.columns)) or default


def _step_table(moment: ReadSnapshot, request: TableQuestion) -> TableReply:
    """Respond to a query of the table of steps or ranks."""
    columns = columns_of_steps(moment.sql, request.run_id, request.table)
    conditions = parse(request.where, columns)
    shown = _requested_columns(request, columns, shown_columns(moment.sql, request.run_id, columns))
    answer = find_steps(moment, request, conditions)
    read = read_steps(moment.numbers, request.run_id, answer.rows, shown)
    return TableReply(
        columns=tuple(shown),
        data=tuple(_json_values(read[name]) for name in shown),
        num_total=answer.num_total,
        num_discarded=answer.num_discarded,
    )


def _json_values(cells: TableColumn) -> tuple[Any, ...]:
    """Return a column of a table reply as JSON values."""
    values: list[Any] = cells.values.tolist()
    if cells.values.dtype.kind == "f":
        for i in np.flatnonzero(~np.isfinite(cells.values)).tolist():
            values[i] = non_finite_word(values[i])
    if cells.valid is not None:
        for i in np.flatnonzero(~cells.valid).tolist():
            values[i] = None
    return tuple(values)


def _fields(kind: type, *, but: Sequence[str] = ()) -> dict[str, Kind]:
    """Return the columns of a record type for table queries."""
    columns: dict[str, Kind] = {}
    for name, of in typing.get_type_hints(kind).items():
        if name in but:
            continue
        kinds = set(typing.get_args(of) or (of,)) - {type(None)}
        columns[name] = "bool" if kinds == {bool} else "number" if kinds <= {int, float} else "text"
    return columns


def _row_dict(record: msgspec.Struct, **row_values: object) -> dict[str, Any]:
    """Convert a stored record to a row of a queried table, by column."""
    return row_values | {name: getattr(record, name) for name in record.__struct_fields__}


def _to_json_scalar(value: Any) -> str | float | int | bool | None:
    """Convert a value of a stored record to a cell of a queried table."""
    if value is None or isinstance(value, str | float | int | bool):
        word: str | float | int | bool | None = jsonable(value)
        return word
    if isinstance(value, tuple):
        return ", ".join(str(element) for element in value)
    return msgspec.json.encode(jsonable(value), order="sorted").decode()


def _matching_indices(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Kind],
    conditions: Sequence[TableCondition],
) -> list[int]:
    """Return which rows match all conditions of a table query."""
    which = np.arange(len(rows))
    for condition in conditions:
        values = [rows[i][condition.column] for i in which.tolist()]
        which = which[condition.matching_cells(_table_column(values, columns[condition.column]))]
    return [int(i) for i in which]


def _table_column(row_values: Sequence[Any], kind: Kind) -> TableColumn:
    """Convert a column of records to values that the conditions of a table query can filter."""
    valid = np.array([value is not None for value in row_values], dtype=bool)
    if kind == "text":
        values = np.empty(len(row_values), dtype=object)
        values[:] = [_to_json_scalar(value) or "" for value in row_values]
        return TableColumn(values, valid)
    is_whole = all(value is None or isinstance(value, int) for value in row_values)
    dtype = np.int64 if is_whole and kind == "number" else bool if kind == "bool" else np.float64
    return TableColumn(np.array([value or 0 for value in row_values], dtype=dtype), valid)


class _RecordTable(NamedTuple):
    """Records of one table: their order, and their columns as a dict."""

    table: Table
    order: Sequence[str]
    read: Callable[[Row[Any]], dict[str, Any] | None]
    """None for a damaged record."""


def _decode_record(
    row: Row[Any], decode: Callable[[bytes], msgspec.Struct]
) -> dict[str, Any] | None:
    """Return the columns of a record, its run and its time; None for a damaged one."""
    if not row.body:
        return None
    return _row_dict(decode(row.body), run_id=row.run_id, time_unix_ns=row.time_unix_ns)


_RECORDS = {
    "decisions": _RecordTable(
        decisions,
        ("time_unix_ns", "run_id", "ledger_seq"),
        lambda row: _decode_record(row, _decision),
    ),
    "findings": _RecordTable(
        findings,
        ("time_unix_ns", "run_id", "step", "seq"),
        lambda row: _decode_record(row, _finding),
    ),
    "alerts": _RecordTable(
        alerts, ("started_unix_ns", "fingerprint"), lambda row: _row_dict(alert_from_row(row).view)
    ),
    "events": _RecordTable(
        events, ("time_unix_ns", "id"), lambda row: _row_dict(event_view(row), run_id=row.run_id)
    ),
}


def _read_rows(
    connection: Connection, request: TableQuestion, when: Liveness
) -> list[dict[str, Any]]:
    """Return the rows of the requested run and steps, the oldest first."""
    if request.table == "runs":
        views = overview.load_run_summaries(connection, when, request.run_id or None)
        return [_row_dict(view) for view in reversed(views)]
    table, order, read = _RECORDS[request.table]
    query = select(table).order_by(*(table.c[name] for name in order)).limit(MAX_LISTED + 1)
    if request.run_id:
        query = query.where(table.c.run_id == request.run_id)
    if request.from_step is not None:
        query = query.where(table.c.step >= request.from_step)
    if request.to_step is not None:
        query = query.where(table.c.step <= request.to_step)
    rows = connection.execute(query).all()
    if len(rows) > MAX_LISTED:
        raise UsageError(
            f"the question looks at more than {MAX_LISTED} rows",
            hint="narrow it with run_id, from_step and to_step",
        )
    return [fields for row in rows if (fields := read(row)) is not None]


_OWN: dict[str, Kind] = {"run_id": "text", "time_unix_ns": "number"}
_COLUMNS: dict[str, dict[str, Kind]] = {
    "runs": _fields(RunSummary),
    "decisions": _OWN | _fields(Decision),
    "findings": _OWN | _fields(Finding),
    "alerts": _fields(AlertView, but=("silenced_until_unix_ns", "silence_reason")),
    "events": _OWN | _fields(EventView),
}
