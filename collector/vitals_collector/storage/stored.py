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
from sqlalchemy import ColumnElement, Connection, Label, Row, func, select

from trainvitals.rows import Schema, rows_of
from vitals_collector.storage.columns import ColumnChunk, decode_columns, decode_rows, whole
from vitals_collector.storage.schema import batch_columns, batches, row_schemas

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
    known: MutableMapping[str, Schema] = {} if schemas is None else schemas
    order = [order_by] if isinstance(order_by, ColumnElement) else order_by
    query = select(batches).where(*where).order_by(*order).limit(limit)
    # Closed at once where the caller looks at no more pages: a server keeps a cursor for it.
    with connection.execute(query.execution_options(yield_per=64)) as found:
        for row in found:
            schema = known.get(row.schema_digest)
            if schema is None:
                schema = known[row.schema_digest] = read_schema(connection, row.schema_digest)
            rows = _rows(connection, row, schema, pick)
            if pick is None or len(rows):
                yield Page(
                    row.id, row.incarnation, row.source, schema, row.first_seq, row.num_rows, rows
                )


def _rows(
    connection: Connection, row: Row[Any], schema: Schema, pick: Pick | None
) -> npt.NDArray[np.void]:
    if row.row_bytes:
        rows = rows_of(schema, row.row_bytes)
        return rows if pick is None else rows[pick(whole(schema, rows, "step"))]
    which = None
    if pick is not None:
        steps = _steps(connection, row)
        which = pick(steps)
        if not len(which):
            return np.zeros(0, dtype=schema.dtype)
    chunks = read_columns(connection, [row.id]).get(row.id, ())
    return decode_rows(schema, chunks, row.first_seq, row.num_rows, which)


def _steps(connection: Connection, row: Row[Any]) -> npt.NDArray[np.int64]:
    chunks = read_columns(connection, [row.id], ["step"]).get(row.id, ())
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
    found = [
        (int(when), page.incarnation, page, bytes(row))
        for page in pages
        for when, row in zip(whole(page.schema, page.rows, "time_unix_ns"), page.rows, strict=True)
    ]
    return [(page, row) for _, _, page, row in sorted(found, key=lambda one: one[:2])]


def read_columns(
    connection: Connection, ids: Sequence[int], names: Sequence[str] | None = None
) -> dict[int, list[ColumnChunk]]:
    """Return the columns of compacted batches by batch, all or those of the names."""
    query = select(batch_columns.c.batch_id, *_COLUMN_FIELDS).where(
        batch_columns.c.batch_id.in_(ids)
    )
    if names is not None:
        query = query.where(batch_columns.c.name.in_(names))
    found: dict[int, list[ColumnChunk]] = {}
    for batch_id, *fields in connection.execute(query):
        found.setdefault(batch_id, []).append(ColumnChunk(*fields))
    return found


def read_schema(connection: Connection, digest: str) -> Schema:
    """Return the columns that were stored under the digest."""
    body = connection.execute(
        select(row_schemas.c.body).where(row_schemas.c.digest == digest)
    ).scalar_one()
    return msgspec.msgpack.decode(body, type=Schema)


__all__ = [
    "Page",
    "Pick",
    "is_columnar",
    "read_columns",
    "read_pages",
    "read_schema",
    "rows_at_step",
]
