"""Rows in memory: for one directory of runs, and the reference that the lake is tested against."""

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.identity import Identity
from trainvitals.rows import Schema, column_of
from trainvitals.views import Branch
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import (
    ORDER,
    POINT,
    AttemptRow,
    Columns,
    ColumnValues,
    CurveRequest,
    DeletedRows,
    DownsampledCurve,
    RowSpan,
    SeriesKey,
    StreamKey,
    common_type,
    concat_columns,
    missing_column,
    on_branch,
    order_curve,
    points_of,
    rank_of,
    sort_columns,
    sorted_distinct,
    texts_of,
    type_of,
)

_Rows = npt.NDArray[np.void]
_OWN = {"rank": "i8", "seq": "i8", "source": "S", "incarnation": "S"}
"""Columns of a row that identify its writer."""


class _StoredRows(NamedTuple):
    """Rows of one writer that were new."""

    identity: Identity
    schema: Schema
    rows: _Rows
    extents: tuple[tuple[float, float], ...]
    """Least and largest value of each column in ``_SPAN_COLUMNS``: most reads need few parts."""


_SPAN_COLUMNS = ("step", "time_unix_ns")
"""Columns whose values a span limits."""


class MemoryNumberStore:
    """Rows in order of arrival; a read skips the parts that are outside its span."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], list[_StoredRows]] = defaultdict(list)
        """By run and stream."""
        self._marks: dict[StreamKey, int] = {}

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the new rows; they do not survive the process."""
        num_new = []
        with self._lock:
            for batch in batches:
                header, schema = batch.header, batch.header.stream_schema
                key = header.identity.run_id, header.identity.incarnation, header.stream
                rows = np.frombuffer(batch.rows, schema.dtype)
                rows = rows[max(0, self._marks.get(key, -1) + 1 - header.first_seq) :]
                num_new.append(len(rows))
                if len(rows):
                    extents = tuple(_extent(schema, rows, name) for name in _SPAN_COLUMNS)
                    part = _StoredRows(header.identity, schema, rows, extents)
                    self._parts[header.identity.run_id, header.stream].append(part)
                    self._marks[key] = header.last_seq
        return num_new

    def mark(self, key: StreamKey) -> int:
        """Return the sequence number of the stream's last row; -1 if it has none."""
        return self._marks.get(key, -1)

    def marks(self, run_ids: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
        """Return by run the marks of its streams by incarnation and stream."""
        of_runs: dict[str, dict[tuple[str, str], int]] = {run_id: {} for run_id in run_ids}
        with self._lock:
            for (run_id, *stream), mark in self._marks.items():
                if run_id in of_runs:
                    of_runs[run_id][stream[0], stream[1]] = mark
        return of_runs

    def has_holes(self, run_id: str) -> bool:
        """Return False: no disk holds these rows."""
        return False

    def check_place(self) -> None:
        """Do nothing: memory can always be read."""

    def write_lock(self) -> AbstractContextManager[object]:
        """Return no lock: nothing takes long in memory."""
        return nullcontext()

    def missing(self, key: StreamKey) -> list[tuple[int, int]]:
        """Return nothing: no disk holds these rows."""
        return []

    def wanted(self, key: StreamKey, before: int) -> int:
        """Return -1: no disk holds these rows."""
        return -1

    def kinds(self, run_id: str, stream: str) -> dict[str, str]:
        """Return the columns of the stream's rows, each with its type."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for part in self._stored_parts(run_id, stream):
            for column in part.schema.columns:
                kinds[column.name].append(type_of(column))
        return {name: common_type(of_name) for name, of_name in kinds.items()}

    def sources(self, run_id: str, stream: str) -> list[str]:
        """Return the writers of the stream's rows, sorted by name."""
        return sorted({part.identity.source for part in self._stored_parts(run_id, stream)})

    def num_rows(self, span: RowSpan) -> int:
        """Return how many rows the span has."""
        return sum(len(part.rows) for part in self._matching_parts(span))

    def scan(self, span: RowSpan, names: Sequence[str]) -> Columns:
        """Return columns of the rows in the span, in order."""
        all_names = tuple(dict.fromkeys((*ORDER, *names)))
        matching_parts, kinds = self._matching_parts(span), self.kinds(span.run_id, span.stream)
        return sort_columns(
            {
                n: concat_columns(
                    [_part_column(n, *part[:3]) for part in matching_parts],
                    kinds.get(n, _OWN.get(n, "f8")),
                )
                for n in all_names
            },
            names,
        )

    def curves(
        self, curves: Sequence[CurveRequest], attempts: Sequence[AttemptRow], branch: Branch
    ) -> list[DownsampledCurve]:
        """Return each curve's measured values on the branch; every one, however few are wanted."""
        whole = []
        for curve in curves:
            span, stream = curve.span, curve.span.stream
            points = points_of(self.scan(span, [*POINT, curve.column]), curve.column)
            points = on_branch(points, stream, attempts, branch)
            ordered = order_curve(points, stream, attempts, branch)
            whole.append(DownsampledCurve(ordered, len(points)))
        return whole

    def last_steps(self, run_id: str, stream: str = "steps") -> dict[int, int]:
        """Return the last step of each attempt that has rows of the stream."""
        last: dict[int, int] = {}
        for part in self._stored_parts(run_id, stream):
            attempt, step = (
                column_of(part.schema, part.rows, name)[0].astype(np.int64, copy=False)
                for name in ("attempt", "step")
            )
            for i in sorted_distinct(attempt).tolist():
                last[i] = max(last.get(i, -1), int(step[attempt == i].max()))
        return dict(sorted(last.items()))

    def deleted_rows(self, run_id: str) -> list[DeletedRows]:
        """Return nothing: no rows in memory are rolled up."""
        return []

    def _stored_parts(self, run_id: str, stream: str) -> list[_StoredRows]:
        """Return the rows in memory of a run's stream, by writer."""
        with self._lock:
            return list(self._parts.get((run_id, stream), ()))

    def _matching_parts(self, span: RowSpan) -> list[_StoredRows]:
        """Return the rows in memory of the writers in a span."""
        parts = [
            _part_in_span(span, part)
            for part in self._stored_parts(span.run_id, span.stream)
            if not span.sources or part.identity.source in span.sources
        ]
        return [part for part in parts if part is not None]

    def num_bytes(self, run_id: str) -> int:
        """Return how many bytes the run's rows have."""
        with self._lock:
            parts = [
                part for key, of_key in self._parts.items() if key[0] == run_id for part in of_key
            ]
        return sum(part.rows.nbytes for part in parts)

    def merge(self, max_seconds: float = 60.0) -> bool:
        """Do nothing: rows stay as they came."""
        return True

    def close(self) -> None:
        """Do nothing: the rows go with the process."""

    def delete(self, run_id: str, exclude: Collection[str] = ()) -> None:
        """Delete the run's rows from memory; its marks stay."""
        with self._lock:
            for key in [key for key in self._parts if key[0] == run_id]:
                remaining_parts = [
                    part for part in self._parts[key] if part.identity.incarnation in exclude
                ]
                if remaining_parts:
                    self._parts[key] = remaining_parts
                else:
                    del self._parts[key]


def _span_values(part: _StoredRows, name: str) -> npt.NDArray[Any]:
    """Return the step or time of a writer's rows in memory."""
    return column_of(part.schema, part.rows, name)[0]


def _extent(schema: Schema, rows: _Rows, name: str) -> tuple[float, float]:
    """Return the least and the largest value of a writer's rows in memory."""
    values: npt.NDArray[Any] = column_of(schema, rows, name)[0]
    return values.min().item(), values.max().item()


def _part_in_span(span: RowSpan, part: _StoredRows) -> _StoredRows | None:
    """Return a writer's rows in memory that are in a span, without a copy if all are.

    None if there are none.
    """
    bounds = ((span.from_step, span.to_step), (span.from_unix_ns, span.to_unix_ns))
    masks: list[npt.NDArray[np.bool_]] = []
    for name, (first, end), (low, high) in zip(_SPAN_COLUMNS, bounds, part.extents, strict=True):
        if (first is not None and high < first) or (end is not None and low >= end):
            return None
        if first is not None and not low >= first:
            masks.append(_span_values(part, name) >= first)
        if end is not None and not high < end:
            masks.append(_span_values(part, name) < end)
    if span.seqs is not None:
        first, end = span.seqs.get(part.identity.incarnation, (0, 0))
        masks.append((part.rows["seq"] >= first) & (part.rows["seq"] < end))
    if span.keyed is not None:
        masks.append(_has_key(span.keyed, part))
    if not masks:
        return part
    is_in = np.logical_and.reduce(masks)
    return part._replace(rows=part.rows[is_in]) if is_in.any() else None


def _has_key(keyed: SeriesKey, part: _StoredRows) -> npt.NDArray[np.bool_]:
    """Return which of a writer's rows in memory belong to a series."""
    number: int | None
    if isinstance(keyed.number_of, int):
        number = keyed.number_of
    else:
        number = keyed.number_of.get(part.identity.incarnation)
    column = _own_column(keyed.column, part.schema, part.rows)
    if number is None or column.values.dtype == object:
        return np.zeros(len(part.rows), np.bool_)
    has_key: npt.NDArray[np.bool_] = ~column.is_missing & (column.values == number)
    return has_key


def _part_column(name: str, identity: Identity, schema: Schema, rows: _Rows) -> ColumnValues:
    """Return a column of one writer's rows in memory, also of its source, rank and number."""
    of_writer = {"source": identity.source, "incarnation": identity.incarnation}
    if name in of_writer:
        texts = np.full(len(rows), of_writer[name], object)
        return ColumnValues(texts, np.zeros(len(rows), np.bool_))
    if name == "rank":
        return ColumnValues(
            np.full(len(rows), rank_of(identity.source)), np.zeros(len(rows), np.bool_)
        )
    if name == "seq":
        return ColumnValues(rows["seq"], np.zeros(len(rows), np.bool_))
    return _own_column(name, schema, rows)


def _own_column(name: str, schema: Schema, rows: _Rows) -> ColumnValues:
    """Return a column of a writer's rows in memory; all missing if it has none."""
    if name not in schema.index:
        return missing_column(len(rows))
    column: tuple[npt.NDArray[Any], npt.NDArray[np.bool_]] = column_of(schema, rows, name)
    values, is_valid = column
    return ColumnValues(texts_of(values) if values.dtype.kind == "S" else values, ~is_valid)
