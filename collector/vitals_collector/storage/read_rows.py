"""Gives stored rows back, however they lie: one place knows the forms, and all readers ask here.

A batch lies as the bytes that came, or, once it was compacted, as columns (``columns``): then its
``row_bytes`` is empty. Compaction makes one batch of many: a reader that goes on where it was must
ask for the batch that holds the next row, not for one that begins with it.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Label, Row, Select, func, select

from trainvitals.rows import Schema, rows_of
from vitals_collector.storage.checksums import (
    body_crc,
    head_crc,
    is_schema_whole,
    is_whole,
    tell_damage,
)
from vitals_collector.storage.columns import (
    ColumnChunk,
    decode_columns,
    decode_rows,
    whole,
    without_values,
)
from vitals_collector.storage.schema import batch_columns, batches, row_schemas

HEAD = tuple(batch_columns.c[name] for name in ("batch_id", "name", "summary", "marks", "head_crc"))
"""What ``whole_heads`` needs of a column."""
_COLUMN_FIELDS = tuple(batch_columns.c[name] for name in ColumnChunk._fields)
is_columnar: Label[bool] = (func.length(batches.c.row_bytes) == 0).label("is_columnar")
"""Condition: the batch's rows lie as columns."""

Pick = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.intp]]
"""Says which rows are wanted, from the steps of all."""


class Page(NamedTuple):
    """Consecutive rows of one writer's stream."""

    id: int
    incarnation: str
    source: str
    schema: Schema
    first_seq: int
    num_rows: int
    rows: npt.NDArray[np.void]
    """As ``schema.dtype``; the rows' own checksums may be gone."""


def read_pages(
    connection: Connection,
    *where: ColumnElement[bool],
    order_by: ColumnElement[Any] | Sequence[ColumnElement[Any]] = batches.c.first_seq,
    limit: int | None = None,
    schemas: MutableMapping[str, Schema] | None = None,
    pick: Pick | None = None,
) -> Iterator[Page]:
    """Yield the rows of all batches that meet every condition.

    Args:
        connection: one moment of the store.
        where: conditions on ``schema.batches``.
        order_by: in which order.
        limit: at most so many pages.
        schemas: known schemas by digest; what is new is added.
        pick: only these rows of each page; a page without any is left out.
    """
    schemas_by_digest: MutableMapping[str, Schema] = {} if schemas is None else schemas
    order = [order_by] if isinstance(order_by, ColumnElement) else order_by
    query = select(batches).where(*where).order_by(*order).limit(limit)
    # Closed at once where the caller looks at no more pages: a server keeps a cursor for it.
    with connection.execute(query.execution_options(yield_per=64)) as batch_rows:
        for row in batch_rows:
            schema = schemas_by_digest.get(row.schema_digest) or read_schema(
                connection, row.schema_digest
            )
            if schema is None:
                continue
            schemas_by_digest[row.schema_digest] = schema
            rows = _rows(connection, row, schema, pick)
            if rows is not None and (pick is None or len(rows)):
                yield Page(
                    row.id, row.incarnation, row.source, schema, row.first_seq, row.num_rows, rows
                )


def _rows(
    connection: Connection, row: Row[Any], schema: Schema, pick: Pick | None
) -> npt.NDArray[np.void] | None:
    """Return the batch's rows; None where they are damaged."""
    if row.row_bytes:
        if not is_whole(row.row_crc, row.row_bytes):
            tell_damage(connection, f"batch {row.id}")
            return None
        rows = rows_of(schema, row.row_bytes)
        return rows if pick is None else rows[pick(whole(schema, rows, "step"))]
    which = None
    if pick is not None:
        steps = _steps(connection, row)
        which = None if steps is None else pick(steps)
        if which is None or not len(which):
            return None
    chunks = read_columns(connection, [row.id], is_for_rows=True).get(row.id)
    if chunks is None:
        return None
    return decode_rows(schema, chunks, row.first_seq, row.num_rows, which)


def _steps(connection: Connection, row: Row[Any]) -> npt.NDArray[np.int64] | None:
    chunks = read_columns(connection, [row.id], ["step"]).get(row.id)
    if chunks is None:
        return None
    for _, values, _ in decode_columns(chunks, row.num_rows):
        return values.astype(np.int64, copy=False)
    return np.zeros(row.num_rows, dtype=np.int64)


def rows_at_step(
    connection: Connection, run_id: str, step: int, stream: str = "steps"
) -> list[tuple[Page, bytes]]:
    """Return all sources' rows of one step, packed, each with its page; the newest written last."""
    table = batches.c
    of_steps = (table.run_id == run_id, table.stream == stream)
    at_step = (table.min_step <= step, table.max_step >= step)
    pages = read_pages(connection, *of_steps, *at_step, pick=lambda s: np.flatnonzero(s == step))
    timed_rows = [
        (int(when), page.incarnation, page, bytes(row))
        for page in pages
        for when, row in zip(whole(page.schema, page.rows, "time_unix_ns"), page.rows, strict=True)
    ]
    return [
        (page, row) for _, _, page, row in sorted(timed_rows, key=lambda timed_row: timed_row[:2])
    ]


def read_columns(
    connection: Connection,
    ids: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    is_for_rows: bool = False,
) -> dict[int, list[ColumnChunk]]:
    """Return the columns of compacted batches by batch, all or those of the names.

    A damaged column reads as one that was not measured, where it is one of numbers that nothing
    hangs on. Where rows are made of it (``is_for_rows``), or their keys may be in it, none of the
    batch's rows is whole: the batch is left out, as is one that is not there.
    """
    query = select(batch_columns.c.batch_id, batch_columns.c.body_crc, *_COLUMN_FIELDS).where(
        batch_columns.c.batch_id.in_(ids)
    )
    if names is not None:
        query = query.where(batch_columns.c.name.in_(names))
    chunks_by_batch: dict[int, list[ColumnChunk]] = {batch_id: [] for batch_id in ids}
    for batch_id, crc, *fields in connection.execute(query):
        chunk = ColumnChunk(*fields)
        if crc != body_crc(chunk):
            tell_damage(connection, f"column {chunk.name!r} of batch {batch_id}")
            if is_for_rows or chunk.kind != "f8":
                chunks_by_batch.pop(batch_id, None)
            chunk = without_values(chunk)
        if batch_id in chunks_by_batch:
            chunks_by_batch[batch_id].append(chunk)
    return chunks_by_batch


def whole_heads(
    connection: Connection, query: Select[Any]
) -> Iterator[tuple[int, str, bytes, bytes]]:
    """Yield what a selection of ``HEAD`` finds: each column's batch, name, summary and marks.

    Both are empty where they are damaged: then the rows are to be read.
    """
    for batch_id, name, summary, marks, crc in connection.execute(query):
        if crc == head_crc(name, summary, marks):
            yield batch_id, name, summary, marks
        else:
            tell_damage(connection, f"overview of column {name!r} of batch {batch_id}")
            yield batch_id, name, b"", b""


def read_schema(connection: Connection, digest: str) -> Schema | None:
    """Return the columns that were stored under the digest; None where they are damaged."""
    body = connection.execute(
        select(row_schemas.c.body).where(row_schemas.c.digest == digest)
    ).scalar_one()
    if not is_schema_whole(digest, body):
        tell_damage(connection, f"schema {digest[:12]}")
        return None
    return msgspec.msgpack.decode(body, type=Schema)


__all__ = [
    "HEAD",
    "Page",
    "Pick",
    "is_columnar",
    "read_columns",
    "read_pages",
    "read_schema",
    "rows_at_step",
    "whole_heads",
]
