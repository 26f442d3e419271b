"""Holds everything that is stored against its checksums, as `vitals store check` does."""

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection, LargeBinary, Row, literal, select, type_coerce

from vitals_collector.storage.checksums import (
    body_crc,
    head_crc,
    is_record_whole,
    is_schema_whole,
    is_whole,
)
from vitals_collector.storage.columns import ColumnChunk
from vitals_collector.storage.schema import (
    batch_columns,
    batches,
    decisions,
    events,
    findings,
    row_schemas,
    runs,
)
from vitals_collector.storage.store import Store

_RECORDS = (runs, events, findings, decisions)
_AT_ONCE = 16
"""Batches in one reading: of the largest these are some dozen MiB."""


class Damaged(NamedTuple):
    """A batch, or a record, of which something is not what was written."""

    run_id: str
    source: str
    stream: str
    min_step: int
    max_step: int
    num_rows: int
    what: str
    """The record, the rows, their schema, or columns: their values, or the overview of them."""


class Checkup(NamedTuple):
    """How much was read, and what of it is damaged."""

    num_batches: int
    damaged: tuple[Damaged, ...]


def check(store: Store) -> Checkup:
    """Read every batch, and return which are damaged; readers leave those out.

    Raises:
        StorageError: the database cannot be read.
    """
    damaged: list[Damaged] = []
    num = 0
    damaged += _records(store)
    for row, what in _all(store):
        num += 1
        if what:
            about = (row.run_id, row.source, row.stream, row.min_step, row.max_step, row.num_rows)
            damaged.append(Damaged(*about, what))
    return Checkup(num, tuple(damaged))


def _records(store: Store) -> list[Damaged]:
    """Return the events, findings, decisions and attributes of runs that are damaged."""
    damaged: list[Damaged] = []
    for table in _RECORDS:
        body = type_coerce(table.c.info if table is runs else table.c.body, LargeBinary)
        step = literal(-1) if table is runs else table.c.step
        with store.read() as connection:
            query = select(table.c.run_id, step, body).execution_options(yield_per=1_000)
            for run_id, at, raw in connection.execute(query):
                if raw and not is_record_whole(raw):
                    damaged.append(Damaged(run_id, "", table.name, at, at, 1, "record"))
    return damaged


def _all(store: Store) -> Iterator[tuple[Row[tuple[object, ...]], str]]:
    """Yield each batch, and what of it is damaged; in short readings."""
    last = -1
    while True:
        query = select(batches).where(batches.c.id > last).order_by(batches.c.id).limit(_AT_ONCE)
        with store.read() as connection:
            rows = connection.execute(query).all()
            if not rows:
                return
            columns = _columns(connection, [row.id for row in rows if not row.row_bytes])
            broken = _broken_schemas(connection, {row.schema_digest for row in rows})
        for row in rows:
            if row.schema_digest in broken:
                yield row, "schema"
            elif row.row_bytes and not is_whole(row.row_crc, row.row_bytes):
                yield row, "rows"
            else:
                yield row, _broken_columns(columns.get(row.id, []))
        last = rows[-1].id


def _columns(connection: Connection, ids: list[int]) -> dict[int, list[Row[tuple[object, ...]]]]:
    rows_by_batch: dict[int, list[Row[tuple[object, ...]]]] = {}
    query = select(batch_columns).where(batch_columns.c.batch_id.in_(ids))
    for row in connection.execute(query.order_by(batch_columns.c.name)):
        rows_by_batch.setdefault(row.batch_id, []).append(row)
    return rows_by_batch


def _broken_schemas(connection: Connection, digests: set[str]) -> set[str]:
    schema_rows = connection.execute(select(row_schemas).where(row_schemas.c.digest.in_(digests)))
    return {row.digest for row in schema_rows if not is_schema_whole(row.digest, row.body)}


def _broken_columns(columns: list[Row[tuple[object, ...]]]) -> str:
    broken = []
    for row in columns:
        chunk = ColumnChunk(*(getattr(row, name) for name in ColumnChunk._fields))
        if row.body_crc != body_crc(chunk):
            broken.append(row.name or "sequence numbers")
        elif row.head_crc != head_crc(row.name, row.summary, row.marks):
            broken.append(f"overview of {row.name}")
    return ", ".join(broken)


__all__ = ["Checkup", "Damaged", "check"]
