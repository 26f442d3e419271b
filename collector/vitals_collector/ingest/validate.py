"""Decides which batches are fit to be stored, and says of many at once what their rows hold.

Schemas are shared objects: numpy works once on all rows of a schema, not once for each batch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import (
    GPU_SCHEMA,
    LAYERS_SCHEMA,
    NODE_SCHEMA,
    PROCESS_SCHEMA,
    ROW_COLUMNS,
    SCALARS_SCHEMA,
    steps_schema,
)
from trainvitals.errors import FormatError
from trainvitals.records import EVENT_SCHEMA
from trainvitals.rows import Schema, column_of
from trainvitals.wire import Batch, decode_batch

_MAX_SEQ = 2**53
"""Rows that no stream ever has: what counts on from a number below it stays in 64 bits."""
_MAX_NAME = 255
"""Characters of a column's name: no index of a database takes it at any length."""
_KINDS = {
    schema.stream: {column.name: column.kind for column in schema.columns}
    for schema in (
        *(steps_schema(), LAYERS_SCHEMA, SCALARS_SCHEMA),
        *(GPU_SCHEMA, NODE_SCHEMA, PROCESS_SCHEMA),
    )
}
"""Of each stream's columns, as the catalog has them: what reads them relies on it."""

Checked = Batch | FormatError
"""A batch that is fit to be stored, or why it is not."""


class Summary(NamedTuple):
    """What the database says of one batch's rows."""

    measured: int
    """Validity bits: column i has a value in some row."""
    newest_unix_ns: int
    """When the last row was made."""
    last: tuple[int | float | str | None, ...] | None
    """The newest row of a rank's steps as ``LAST`` names its numbers; None in other streams."""


LAST = ("last_step", "last_attempt", "last_step_unix_ns", "loss", "grad_norm")


def check_batches(raws: Sequence[bytes]) -> list[Checked]:
    """Return each batch decoded and verified, or its error in its place."""
    checked: list[Checked] = []
    for raw in raws:
        try:
            batch = decode_batch(raw)
            header = batch.header
            if header.last_seq > _MAX_SEQ:
                text = f"rows are numbered up to {header.last_seq}; no run comes beyond {_MAX_SEQ}"
                raise FormatError(text)
            checked.append(batch)
        except FormatError as error:
            checked.append(error)
    good = [batch for batch in checked if isinstance(batch, Batch)]
    places = [i for i, batch_or_error in enumerate(checked) if isinstance(batch_or_error, Batch)]
    for schema, which in _by_schema(good):
        schema_batches = [good[i] for i in which]
        for i, wrong in _errors_in(schema, schema_batches):
            checked[places[which[i]]] = wrong
    return checked


def summarize(batches: Sequence[Batch]) -> list[Summary]:
    """Return what is to be said of each batch's rows."""
    summaries: dict[int, Summary] = {}
    for schema, which in _by_schema(batches):
        of_schema = _summaries(schema, [batches[i] for i in which])
        summaries |= zip(which, of_schema, strict=True)
    return [summaries[i] for i in range(len(batches))]


def _by_schema(batches: Sequence[Batch]) -> Iterator[tuple[Schema, list[int]]]:
    """Yield every schema with the positions of its batches."""
    places_by_schema: dict[int, list[int]] = {}
    for i, batch in enumerate(batches):
        places_by_schema.setdefault(id(batch.header.stream_schema), []).append(i)
    for which in places_by_schema.values():
        yield batches[which[0]].header.stream_schema, which


def _summaries(schema: Schema, batches: Sequence[Batch]) -> list[Summary]:
    rows, starts, counts = _joined(schema, batches)
    words = np.bitwise_or.reduceat(rows["validity"], starts, axis=0)
    times = column_of(schema, rows, "time_unix_ns")[0]
    newest = np.maximum.reduceat(times, starts).tolist()
    is_steps = schema.stream == "steps"
    last = _last_of(schema, rows[starts + counts - 1]) if is_steps else repeat(None, len(batches))
    return [Summary(*fields) for fields in zip(_as_numbers(words), newest, last, strict=True)]


def _last_of(
    schema: Schema, rows: npt.NDArray[np.void]
) -> Iterator[tuple[int | float | str | None, ...]]:
    """Yield what the list of runs shows of each row; NaN as text, since SQLite stores none."""
    columns: list[list[Any]] = [
        column_of(schema, rows, name)[0].tolist() for name in ("step", "attempt", "time_unix_ns")
    ]
    for name in ("loss", "grad_norm"):
        values, is_valid = column_of(schema, rows, name)
        is_shown = is_valid if values.dtype.kind in "fi" else is_valid & False
        columns.append(
            [
                None if not shown else "nan" if math.isnan(value) else float(value)
                for value, shown in zip(values.tolist(), is_shown.tolist(), strict=True)
            ]
        )
    return zip(*columns, strict=True)


def _joined(
    schema: Schema, batches: Sequence[Batch]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all rows, and where each batch's begin and how many they are."""
    rows = np.frombuffer(b"".join([batch.rows for batch in batches]), schema.dtype)
    counts = np.array([batch.header.num_rows for batch in batches], np.int64)
    return rows, np.cumsum(counts) - counts, counts


def _as_numbers(words: npt.NDArray[np.uint64]) -> list[int]:
    if words.shape[1] == 1:
        numbers: list[int] = words[:, 0].tolist()
        return numbers
    return [int.from_bytes(row.tobytes(), "little") for row in words]


def _errors_in(schema: Schema, batches: Sequence[Batch]) -> Iterator[tuple[int, FormatError]]:
    """Yield the position and error of each batch whose rows are not what its header says."""
    is_events = schema.stream == "events"
    required_columns = EVENT_SCHEMA.columns if is_events else ROW_COLUMNS
    missing = [column.name for column in required_columns if column not in schema.columns]
    if missing:
        text = f"rows of {schema.stream} lack the columns {', '.join(missing)}"
    else:
        text = _misfit_of(schema)
    if text:
        yield from ((i, FormatError(text)) for i in range(len(batches)))
        return
    rows, starts, counts = _joined(schema, batches)
    firsts = np.array([batch.header.first_seq for batch in batches], np.int64)
    expected = np.repeat(firsts - starts, counts) + np.arange(len(rows))
    is_wrong = rows["seq"] != expected
    if is_wrong.any():
        for place in np.flatnonzero(np.logical_or.reduceat(is_wrong, starts)):
            yield (
                int(place),
                FormatError("the rows' sequence numbers are not those the header gives"),
            )
    for i, batch in enumerate(batches) if is_events else ():
        if not _has_whole_rows(schema, batch.rows):
            yield i, FormatError("the checksum of an event's row does not hold")


def _misfit_of(schema: Schema) -> str:
    """Return what is wrong with a column, in words; empty where nothing is."""
    kinds = _KINDS.get(schema.stream, {})
    for name, kind in ((column.name, column.kind) for column in schema.columns):
        if len(name) > _MAX_NAME:
            text = f"has a name of {len(name)} characters; at most {_MAX_NAME} are stored"
            return f"column {name[:16]}... of {schema.stream} {text}"
        # Of ``learning_rate.1`` the catalog says what it says of ``learning_rate``.
        catalog_kind = kinds.get(name.partition(".")[0], kind)
        # A whole number is a number.
        if kind != catalog_kind and (kind, catalog_kind) != ("i8", "f8"):
            return (
                f"column {name!r} of {schema.stream} is {kind}; by the catalog it is {catalog_kind}"
            )
    return ""


def _has_whole_rows(schema: Schema, rows: bytes) -> bool:
    size = schema.row_size
    return all(
        schema.seq_of(rows[start : start + size]) is not None for start in range(0, len(rows), size)
    )


__all__ = ["LAST", "Checked", "Summary", "check_batches", "summarize"]
