"""Makes few big columnar batches of many small ones, behind the ingest's back.

What readers see does not change: one transaction takes the old rows of ``batches`` away and puts
the new one in their place. A writer's stream is compacted twice: some hundred rows at first, so
that they are soon small and quick to read, then sixteen of those together. Reading and encoding
happen outside of the write's transaction, so a writer waits for a few milliseconds at most.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, delete, func, select, update

from trainvitals.rows import Schema
from vitals_collector.storage.checksums import as_rows
from vitals_collector.storage.columns import SEQ, encode_rows, whole
from vitals_collector.storage.read_rows import Page, is_columnar, read_pages, read_schema
from vitals_collector.storage.schema import batch_columns, batches, thinned_to
from vitals_collector.storage.store import Store, clean

FIRST_ROWS = 512
"""Rows that are worth a chunk."""
FULL_ROWS = 8_192
"""Rows from which a chunk is left alone."""
MIN_ROWS = 64
"""Fewer rows than these stay as they came: as columns they would take more room."""
_MAX_BYTES = 16 << 20
"""As bytes of rows, a chunk has about these at most, however wide its rows are."""

Key = tuple[str, str, str]
"""Run, incarnation and stream: whose rows are consecutive."""


class Piece(NamedTuple):
    """What planning needs to know of a batch."""

    id: int
    schema_digest: str
    first_seq: int
    num_rows: int
    is_columnar: bool
    min_attempt: int
    max_attempt: int
    min_step: int
    max_step: int
    is_thinned: bool = False
    """What is left of rows after thinning; it is never joined with rows that may yet be."""


@dataclass(slots=True)
class Compacted:
    """What a compaction did."""

    num_before: int = 0
    """Batches that were there."""
    num_after: int = 0
    """Batches that took their place."""
    num_rows: int = 0


# ----------------------------------------------------------------------------------- planning


def plan(
    pieces: Sequence[Piece], *, is_over: bool = False, full_rows: int = FULL_ROWS
) -> list[list[Piece]]:
    """Return which batches of one writer's stream, in order, are to become one each.

    Args:
        pieces: all batches of the stream by sequence number.
        is_over: nothing more is to come for now, so that what there is need not wait for more.
        full_rows: rows from which a chunk is left alone.
    """
    stretches = [list(alike) for _, alike in groupby(pieces, _Stretch())]
    groups: list[list[Piece]] = []
    for i, stretch in enumerate(stretches):
        groups += _plan_stretch(stretch, is_over or i < len(stretches) - 1, full_rows)
    return groups


class _Stretch:
    """Numbers the stretches of batches that may become one."""

    def __init__(self) -> None:
        self._last: Piece | None = None
        self._number = 0

    def __call__(self, piece: Piece) -> int:
        if self._last is not None and not _may_join(self._last, piece):
            self._number += 1
        self._last = piece
        return self._number


def _may_join(a: Piece, b: Piece) -> bool:
    """Return whether a chunk of both still is of one attempt, by growing steps."""
    return (
        a.schema_digest == b.schema_digest
        and a.is_thinned == b.is_thinned
        and a.first_seq + a.num_rows == b.first_seq
        and a.min_attempt == b.max_attempt == a.max_attempt == b.min_attempt
        and a.max_step <= b.min_step
    )


def _plan_stretch(stretch: list[Piece], is_closed: bool, full_rows: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    group: list[Piece] = []
    num_rows = 0
    for piece in stretch:
        if piece.is_columnar and 2 * piece.num_rows >= full_rows:
            groups += _rest(group, is_closed=True)
            group, num_rows = [], 0
            continue
        group.append(piece)
        num_rows += piece.num_rows
        if num_rows >= full_rows:
            groups.append(group)
            group, num_rows = [], 0
    return groups + _rest(group, is_closed=is_closed)


def _rest(group: list[Piece], *, is_closed: bool) -> list[list[Piece]]:
    raw = [piece for piece in group if not piece.is_columnar]
    if is_closed:
        is_worth_it = _num_rows(raw) >= MIN_ROWS or len(group) - len(raw) > 1
        return [group] if is_worth_it else []
    return [raw] if _num_rows(raw) >= FIRST_ROWS and raw == group[-len(raw) :] else []


def _num_rows(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_rows for piece in pieces)


# ----------------------------------------------------------------------------------- writing


def compact(store: Store, *, run_id: str | None = None) -> Compacted:
    """Compact everything there is, or a run's, at once; what is compacted already stays.

    Raises:
        StorageError: the store refused; what was done stays done.
    """
    done = Compacted()
    for key in writers(store, run_id=run_id):
        compact_writer(store, key, done, is_over=True)
    while store.reclaim():
        pass
    return done


def writers(store: Store, *, run_id: str | None = None) -> dict[Key, int]:
    """Return the writers' streams that have rows in more than one batch, with how many rows."""
    table = batches.c
    keys = (table.run_id, table.incarnation, table.stream)
    query = select(*keys, func.sum(table.num_rows)).where(table.stream != "events", ~is_columnar)
    if run_id is not None:
        query = query.where(table.run_id == run_id)
    with store.read(settled=False) as connection:
        writer_totals = connection.execute(query.group_by(*keys)).all()
    return {(run, incarnation, stream): int(num) for run, incarnation, stream, num in writer_totals}


def compact_writer(store: Store, key: Key, done: Compacted, *, is_over: bool) -> None:
    """Compact what the plan says of one writer's stream, and count it in ``done``.

    Raises:
        StorageError: the store refused.
    """
    with store.read(settled=False) as connection:
        pieces = _pieces(connection, key)
        schema = read_schema(connection, pieces[0].schema_digest) if pieces else None
    if schema is None or not _has_plain_names(schema):
        return
    full_rows = max(1, min(FULL_ROWS, _MAX_BYTES // schema.row_size))
    for group in plan(pieces, is_over=is_over, full_rows=full_rows):
        with store.read(settled=False) as connection:
            pages = list(read_pages(connection, batches.c.id.in_([piece.id for piece in group])))
        if len(pages) != len(group):
            continue  # retention was here in between, or a batch is damaged
        # Numpy would look for a common type of all pages, column by column; it is the same.
        rows = np.frombuffer(b"".join([page.rows.tobytes() for page in pages]), pages[0].rows.dtype)
        with store.write() as connection:
            is_done = rewrite(connection, pages, rows)
        if is_done:
            done.num_before += len(group)
            done.num_after += 1
            done.num_rows += len(rows)


def rewrite(connection: Connection, pages: Sequence[Page], rows: npt.NDArray[np.void]) -> bool:
    """Put one columnar batch of these rows in the place of some; without rows, they are removed.

    The pages are of one writer, one schema and in order; the rows are theirs, or some of theirs.

    Returns:
        False where a batch is no more what it was when the pages were read: nothing has changed.
    """
    read = {page.id: (page.first_seq, page.num_rows) for page in pages}
    query = select(batches.c.id, batches.c.first_seq, batches.c.num_rows)
    stored_rows = connection.execute(query.where(batches.c.id.in_(read)).with_for_update())
    if read != {row.id: (row.first_seq, row.num_rows) for row in stored_rows}:
        return False
    first, schema = pages[0], pages[0].schema
    replaced_ids = [page.id for page in pages[1:]] if len(rows) else list(read)
    if replaced_ids:
        connection.execute(delete(batches).where(batches.c.id.in_(replaced_ids)))
    if not len(rows):
        return True
    connection.execute(delete(batch_columns).where(batch_columns.c.batch_id == first.id))
    about = {
        "first_seq": int(rows["seq"][0]),
        "num_rows": len(rows),
        "row_bytes": b"",
        "row_crc": None,
    }
    for name in ("step", "attempt", "time_unix_ns"):
        values = whole(schema, rows, name)
        about |= {f"min_{name}": int(values.min()), f"max_{name}": int(values.max())}
    connection.execute(update(batches).where(batches.c.id == first.id).values(about))
    connection.execute(batch_columns.insert(), as_rows(first.id, encode_rows(schema, rows)))
    return True


def _pieces(connection: Connection, key: Key) -> list[Piece]:
    table, (run_id, incarnation, stream) = batches.c, key
    mark = select(thinned_to.c.last_seq).where(
        thinned_to.c.run_id == run_id,
        thinned_to.c.incarnation == incarnation,
        thinned_to.c.stream == stream,
    )
    last = connection.execute(mark).scalar()
    is_thinned = table.first_seq <= (-1 if last is None else last)
    expressions = {"is_columnar": is_columnar, "is_thinned": is_thinned}
    fields = (expressions[name] if name in expressions else table[name] for name in Piece._fields)
    query = (
        select(*fields)
        .where(table.run_id == run_id, table.incarnation == incarnation, table.stream == stream)
        .order_by(table.first_seq)
    )
    return [Piece._make(row) for row in connection.execute(query)]


def _has_plain_names(schema: Schema) -> bool:
    """Return whether databases can keep the columns' names; else rows stay as they came."""
    return all(clean(c.name) == c.name != SEQ for c in schema.columns)


__all__ = [
    "FIRST_ROWS", "FULL_ROWS", "MIN_ROWS", "Compacted", "Key", "Piece", "compact",
    "compact_writer", "plan", "rewrite", "writers",
]  # fmt: skip
