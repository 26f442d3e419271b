"""Rows in memory: for one directory of runs, and the reference that the lake is tested against."""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
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
    Mask,
    RowSpan,
    SeriesKey,
    StreamKey,
    common_type,
    concat_columns,
    is_rising,
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
_BLOCK_ROWS = 1 << 15
"""Rows of a writer that are rearranged into columns: a curve then reads only its own bytes."""


class _ColumnBlock:
    """Rows of one writer, by column; a column without measured values has no arrays."""

    def __init__(
        self, seq: npt.NDArray[Any], columns: dict[str, tuple[npt.NDArray[Any], Mask]]
    ) -> None:
        self.seq = seq
        self.columns = columns
        self.nbytes = seq.nbytes + sum(v.nbytes + ok.nbytes for v, ok in columns.values())

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, which: Mask) -> "_ColumnBlock":
        """Return some of a writer's rows in memory."""
        columns = {name: (v[which], ok[which]) for name, (v, ok) in self.columns.items()}
        return _ColumnBlock(self.seq[which], columns)


class _StoredRows(NamedTuple):
    """Rows of one writer that were new."""

    identity: Identity
    schema: Schema
    rows: _Rows | _ColumnBlock
    extents: tuple[tuple[float, float], ...]
    """Least and largest value of each column in ``_SPAN_COLUMNS``: most reads need few parts."""

    @property
    def seq(self) -> npt.NDArray[Any]:
        """Sequence numbers of a writer's rows in memory."""
        seq: npt.NDArray[Any] = (
            self.rows.seq if isinstance(self.rows, _ColumnBlock) else self.rows["seq"]
        )
        return seq

    def column(self, name: str) -> tuple[npt.NDArray[Any], Mask]:
        """Return the values of a column of a writer's rows in memory, and which were measured."""
        if not isinstance(self.rows, _ColumnBlock):
            return column_of(self.schema, self.rows, name)
        column = self.rows.columns.get(name)
        if column is not None:
            return column
        kind = (
            self.schema.dtype[f"c{self.schema.index[name]}"] if name in self.schema.index else "f8"
        )
        return np.zeros(len(self.rows), kind), np.zeros(len(self.rows), np.bool_)

    def take(self, which: Mask) -> "_StoredRows":
        """Return some of a writer's rows in memory."""
        rows = self.rows
        return self._replace(
            rows=rows.take(which) if isinstance(rows, _ColumnBlock) else rows[which]
        )


_SPAN_COLUMNS = ("step", "time_unix_ns")
"""Columns whose values a span limits."""


class MemoryNumberStore:
    """Rows in order of arrival; a read skips the parts that are outside its span."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], list[_StoredRows]] = defaultdict(list)
        """By run and stream."""
        self._marks: dict[StreamKey, int] = {}
        self._num_unarranged: dict[StreamKey, int] = defaultdict(int)
        """Rows of each stream that are not in a block."""

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
                    self._num_unarranged[key] += len(rows)
                    if self._num_unarranged[key] >= _BLOCK_ROWS:
                        self._arrange_rows(key, schema)
        return num_new

    def _arrange_rows(self, key: StreamKey, schema: Schema) -> None:
        """Replace the latest parts of a stream in memory by one block of columns."""
        run_id, incarnation, stream = key
        parts = self._parts[run_id, stream]
        chosen = [
            part
            for part in parts
            if part.identity.incarnation == incarnation
            and part.schema == schema
            and not isinstance(part.rows, _ColumnBlock)
        ]
        ids = {id(part) for part in chosen}
        block = _arrange_parts(chosen)
        self._parts[run_id, stream] = [*(part for part in parts if id(part) not in ids), block]
        self._num_unarranged[key] = 0

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
        schemas = {id(part.schema): part.schema for part in self._stored_parts(run_id, stream)}
        for schema in schemas.values():  # writers share few of them
            for column in schema.columns:
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
        matching_parts, kinds = self._matching_parts(span), self.kinds(span.run_id, span.stream)

        def read(columns: Iterable[str]) -> Columns:
            return {
                n: concat_columns(
                    [_part_column(n, part) for part in matching_parts],
                    kinds.get(n, _OWN.get(n, "f8")),
                )
                for n in columns
            }

        first = read(ORDER[:1])
        if is_rising(first[ORDER[0]].values):  # one writer's rows, mostly: no other key is needed
            columns = first | read(dict.fromkeys(name for name in names if name not in first))
            return {name: columns[name] for name in names}
        return sort_columns(read(dict.fromkeys((*ORDER, *names))), names)

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
                part.column(name)[0].astype(np.int64, copy=False) for name in ("attempt", "step")
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


def _arrange_parts(parts: Sequence[_StoredRows]) -> _StoredRows:
    """Return the rows in memory of one writer as one block of columns."""
    schema = parts[0].schema
    columns = {}
    for column in schema.columns:
        pairs = [part.column(column.name) for part in parts]
        is_valid = np.concatenate([ok for _, ok in pairs])
        if is_valid.any():
            columns[column.name] = np.concatenate([values for values, _ in pairs]), is_valid
    block = _ColumnBlock(np.concatenate([part.seq for part in parts]), columns)
    extents = tuple(
        (min(low for low, _ in of_parts), max(high for _, high in of_parts))
        for of_parts in zip(*(part.extents for part in parts), strict=True)
    )
    return _StoredRows(parts[0].identity, schema, block, extents)


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
            masks.append(part.column(name)[0] >= first)
        if end is not None and not high < end:
            masks.append(part.column(name)[0] < end)
    if span.seqs is not None:
        first, end = span.seqs.get(part.identity.incarnation, (0, 0))
        masks.append((part.seq >= first) & (part.seq < end))
    if span.keyed is not None:
        masks.append(_has_key(span.keyed, part))
    if not masks:
        return part
    is_in = np.logical_and.reduce(masks)
    return part.take(is_in) if is_in.any() else None


def _has_key(keyed: SeriesKey, part: _StoredRows) -> npt.NDArray[np.bool_]:
    """Return which of a writer's rows in memory belong to a series."""
    number: int | None
    if isinstance(keyed.number_of, int):
        number = keyed.number_of
    else:
        number = keyed.number_of.get(part.identity.incarnation)
    column = _own_column(keyed.column, part)
    if number is None or column.values.dtype == object:
        return np.zeros(len(part.rows), np.bool_)
    has_key: npt.NDArray[np.bool_] = ~column.is_missing & (column.values == number)
    return has_key


def _part_column(name: str, part: _StoredRows) -> ColumnValues:
    """Return a column of one writer's rows in memory, also of its source, rank and number."""
    identity, num = part.identity, len(part.rows)
    of_writer = {"source": identity.source, "incarnation": identity.incarnation}
    if name in of_writer:
        texts = np.full(num, of_writer[name], object)
        return ColumnValues(texts, np.zeros(num, np.bool_))
    if name == "rank":
        return ColumnValues(np.full(num, rank_of(identity.source)), np.zeros(num, np.bool_))
    if name == "seq":
        return ColumnValues(part.seq, np.zeros(num, np.bool_))
    return _own_column(name, part)


def _own_column(name: str, part: _StoredRows) -> ColumnValues:
    """Return a column of a writer's rows in memory; all missing if it has none."""
    if name not in part.schema.index:
        return missing_column(len(part.rows))
    values, is_valid = part.column(name)
    return ColumnValues(texts_of(values) if values.dtype.kind == "S" else values, ~is_valid)
