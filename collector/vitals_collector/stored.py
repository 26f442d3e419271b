"""Gives stored rows back, however they lie: one place knows the forms, and all readers ask here."""

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, select

from trainvitals.rows import Schema, rows_of
from vitals_collector.schema import batches, row_schemas


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
    order_by: ColumnElement[Any] = batches.c.first_seq,
    limit: int | None = None,
    schemas: MutableMapping[str, Schema] | None = None,
) -> Iterator[Page]:
    """Yield the rows of all batches that meet every condition.

    Args:
        connection: one moment of the store.
        where: conditions on ``schema.batches``.
        order_by: in which order.
        limit: at most so many pages.
        schemas: known schemas by digest; what is new is added.
    """
    known: MutableMapping[str, Schema] = {} if schemas is None else schemas
    query = select(batches).where(*where).order_by(order_by).limit(limit)
    for row in connection.execute(query.execution_options(yield_per=64)):
        schema = known.get(row.schema_digest)
        if schema is None:
            schema = known[row.schema_digest] = read_schema(connection, row.schema_digest)
        yield Page(
            row.id,
            row.incarnation,
            row.source,
            schema,
            row.first_seq,
            row.num_rows,
            rows_of(schema, row.row_bytes),
        )


def read_schema(connection: Connection, digest: str) -> Schema:
    """Return the columns that were stored under the digest."""
    body = connection.execute(
        select(row_schemas.c.body).where(row_schemas.c.digest == digest)
    ).scalar_one()
    return msgspec.msgpack.decode(body, type=Schema)


__all__ = ["Page", "read_pages", "read_schema"]
