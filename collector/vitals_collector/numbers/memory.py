"""Numbers in memory: for one folder of runs, and what the lake is tested against."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.identity import Identity
from trainvitals.rows import Schema, column_of
from trainvitals.wire import Batch
from vitals_collector.numbers.interface import (
    ORDER,
    Column,
    Columns,
    Span,
    StreamKey,
    in_order,
    none_of,
    rank_of,
    texts_of,
)

_Rows = npt.NDArray[np.void]


class _Part(NamedTuple):
    """Rows of one writer that were new."""

    identity: Identity
    schema: Schema
    rows: _Rows


class MemoryNumbers:
    """Rows as they came, found by going through them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], list[_Part]] = defaultdict(list)
        """By run and stream."""
        self._marks: dict[StreamKey, int] = {}

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Keep the rows that are new; nothing here survives the process."""
        num_new = []
        with self._lock:
            for batch in batches:
                header, schema = batch.header, batch.header.stream_schema
                key = header.identity.run_id, header.identity.incarnation, header.stream
                rows = np.frombuffer(batch.rows, schema.dtype)
                rows = rows[max(0, self._marks.get(key, -1) + 1 - header.first_seq) :]
                num_new.append(len(rows))
                if len(rows):
                    part = _Part(header.identity, schema, rows)
                    self._parts[header.identity.run_id, header.stream].append(part)
                    self._marks[key] = header.last_seq
        return num_new

    def mark(self, key: StreamKey) -> int:
        """Return the number of the last row that the stream has; -1 where it has none."""
        return self._marks.get(key, -1)

    def scan(self, span: Span, names: Sequence[str]) -> Columns:
        """Return columns of the rows in the span, in order."""
        with self._lock:
            parts = list(self._parts.get((span.run_id, span.stream), ()))
        wanted = tuple(dict.fromkeys((*ORDER, *names)))
        chosen = [
            part._replace(rows=part.rows[_is_in(span, part.schema, part.rows)])
            for part in parts
            if not span.ranks or rank_of(part.identity) in span.ranks
        ]
        return in_order({name: _joined(name, chosen) for name in wanted}, names)

    def delete(self, run_id: str) -> None:
        """Forget the run's rows; its marks stay."""
        with self._lock:
            for key in [key for key in self._parts if key[0] == run_id]:
                del self._parts[key]


def _is_in(span: Span, schema: Schema, rows: _Rows) -> npt.NDArray[np.bool_]:
    steps: npt.NDArray[Any] = column_of(schema, rows, "step")[0]
    is_in = np.ones(len(rows), np.bool_)
    if span.from_step is not None:
        is_in &= steps >= span.from_step
    if span.to_step is not None:
        is_in &= steps < span.to_step
    return is_in


def _joined(name: str, parts: Sequence[_Part]) -> Column:
    columns = [_column(name, *part) for part in parts]
    if not columns:
        return none_of(0)
    kinds = {column.values.dtype.kind for column in columns if not column.is_missing.all()}
    dtype: Any = object if "O" in kinds else np.float64 if kinds != {"i"} else np.int64
    return Column(
        np.concatenate([_as(column, dtype) for column in columns]),
        np.concatenate([_missing(column, dtype) for column in columns]),
    )


def _column(name: str, identity: Identity, schema: Schema, rows: _Rows) -> Column:
    of_writer = {"source": identity.source, "incarnation": identity.incarnation}
    if name in of_writer:
        texts = np.full(len(rows), of_writer[name], object)
        return Column(texts, np.zeros(len(rows), np.bool_))
    if name == "rank":
        return Column(np.full(len(rows), rank_of(identity)), np.zeros(len(rows), np.bool_))
    if name == "seq":
        return Column(rows["seq"], np.zeros(len(rows), np.bool_))
    if name not in schema.index:
        return none_of(len(rows))
    column: tuple[npt.NDArray[Any], npt.NDArray[np.bool_]] = column_of(schema, rows, name)
    values, is_valid = column
    return Column(texts_of(values) if values.dtype.kind == "S" else values, ~is_valid)


def _as(column: Column, dtype: Any) -> npt.NDArray[Any]:
    if dtype is object and column.values.dtype != object:
        return np.full(len(column.values), "", object)
    if dtype is not object and column.values.dtype == object:
        return np.zeros(len(column.values), dtype)
    return column.values.astype(dtype)


def _missing(column: Column, dtype: Any) -> npt.NDArray[np.bool_]:
    is_other = (dtype is object) != (column.values.dtype == object)
    return np.ones_like(column.is_missing) if is_other else column.is_missing
