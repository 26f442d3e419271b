"""Reads several columns of many rows at once, however they lie, without decoding the others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, select

from trainvitals.rows import column_of
from vitals_collector.queries.conditions import Cells
from vitals_collector.storage.columns import decode_columns
from vitals_collector.storage.read_rows import is_columnar, read_columns, read_pages
from vitals_collector.storage.schema import batches

Ints = npt.NDArray[np.int64]
Which = npt.NDArray[np.bool_] | npt.NDArray[np.intp]
KEYS = ("step", "attempt", "time_unix_ns")
"""Columns that every row has."""

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Some columns of some rows of one writer's stream."""

    source: str
    incarnation: str
    batch: Ints
    """The batch each row lies in, and where there."""
    at: Ints
    columns: dict[str, Cells]

    def __len__(self) -> int:
        return len(self.at)

    def column(self, name: str) -> Cells:
        """Return a column; of one that is not there, no value was measured."""
        cells = self.columns.get(name)
        return Cells(np.zeros(len(self)), np.zeros(len(self), bool)) if cells is None else cells

    def whole(self, name: str) -> Ints:
        """Return a column that every row has, such as its step."""
        return self.column(name).values.astype(np.int64, copy=False)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column and which were measured: what was not is NaN only beside its mask."""
        return self.column(name).values.astype(np.float64, copy=False)

    def take(self, which: Which) -> "ColumnBlock":
        """Return the chosen rows."""
        columns = {name: cells.take(which) for name, cells in self.columns.items()}
        return ColumnBlock(
            self.source, self.incarnation, self.batch[which], self.at[which], columns
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A batch, as far as choosing goes."""

    id: int
    source: str
    incarnation: str
    num_rows: int
    is_columnar: bool
    min_step: int
    max_step: int
    min_attempt: int
    max_attempt: int
    min_time_unix_ns: int
    max_time_unix_ns: int


def find_parts(
    connection: Connection,
    run_id: str,
    stream: str,
    *where: ColumnElement[bool],
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Part]:
    """Return the batches that may have rows of the steps, by source, writer and order."""
    table = batches.c
    query = select(
        table.id, table.source, table.incarnation, table.num_rows, is_columnar,
        table.min_step, table.max_step, table.min_attempt, table.max_attempt,
        table.min_time_unix_ns, table.max_time_unix_ns,
    ).where(table.run_id == run_id, table.stream == stream, *where)  # fmt: skip
    if from_step is not None:
        query = query.where(table.max_step >= from_step)
    if to_step is not None:
        query = query.where(table.min_step <= to_step)
    rows = connection.execute(query.order_by(table.source, table.incarnation, table.first_seq))
    return [Part(*row) for row in rows]


def read_blocks(
    connection: Connection,
    parts: Iterable[Part],
    names: Sequence[str],
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> Iterator[ColumnBlock]:
    """Yield the named columns of the batches' rows, in their order; no block is empty.

    The step is always among the columns where steps are asked for.
    """
    has_bounds = from_step is not None or to_step is not None
    column_names = tuple(dict.fromkeys([*names, "step"] if has_bounds else names))
    for is_columns, alike in groupby(parts, key=lambda part: part.is_columnar):
        group = list(alike)
        read = _of_columns if is_columns else _of_rows
        for i in range(0, len(group), _AT_ONCE):
            for block in read(connection, group[i : i + _AT_ONCE], column_names):
                if has_bounds:
                    block = _within(block, from_step, to_step)
                if len(block):
                    yield block


def _within(block: ColumnBlock, from_step: int | None, to_step: int | None) -> ColumnBlock:
    steps = block.whole("step")
    is_in = np.ones(len(block), bool)
    if from_step is not None:
        is_in &= steps >= from_step
    if to_step is not None:
        is_in &= steps <= to_step
    return block if is_in.all() else block.take(is_in)


def _of_columns(
    connection: Connection, parts: Sequence[Part], names: Sequence[str]
) -> Iterator[ColumnBlock]:
    chunks = read_columns(connection, [part.id for part in parts], names)
    for part in parts:
        if part.id not in chunks:
            continue  # damaged
        decoded = decode_columns(chunks[part.id], part.num_rows)
        columns = {chunk.name: Cells(values, valid) for chunk, values, valid in decoded}
        batch = np.broadcast_to(np.int64(part.id), part.num_rows)
        at = np.arange(part.num_rows)
        yield ColumnBlock(part.source, part.incarnation, batch, at, columns)


def _of_rows(
    connection: Connection, parts: Sequence[Part], names: Sequence[str]
) -> Iterator[ColumnBlock]:
    ids = batches.c.id.in_([part.id for part in parts])
    order = (batches.c.source, batches.c.incarnation, batches.c.first_seq)
    pages = read_pages(connection, ids, order_by=order)
    for _, alike in groupby(pages, key=lambda page: (page.incarnation, id(page.schema))):
        writer_pages = list(alike)
        rows, schema = np.concatenate([page.rows for page in writer_pages]), writer_pages[0].schema
        nums = [len(page.rows) for page in writer_pages]
        batch = np.repeat(np.array([page.id for page in writer_pages], dtype=np.int64), nums)
        at = np.concatenate([np.arange(num) for num in nums])
        columns = {name: Cells(*column_of(schema, rows, name)) for name in names}
        yield ColumnBlock(writer_pages[0].source, writer_pages[0].incarnation, batch, at, columns)


def join_blocks(blocks: Sequence[ColumnBlock], names: Iterable[str]) -> ColumnBlock:
    """Return the rows of all blocks, one block after the other, under the first one's name."""
    if len(blocks) == 1:
        return blocks[0]
    none = np.zeros(0, dtype=np.int64)
    if not blocks:
        return ColumnBlock("", "", none, none, {})
    columns = {name: _joined([block.column(name) for block in blocks]) for name in names}
    batch = np.concatenate([block.batch for block in blocks])
    at = np.concatenate([block.at for block in blocks])
    return ColumnBlock(blocks[0].source, blocks[0].incarnation, batch, at, columns)


def _joined(parts: Sequence[Cells]) -> Cells:
    there = [part for part in parts if part.valid is None or part.valid.any()]
    kind = np.result_type(*(part.values.dtype for part in there)) if there else np.dtype("f8")
    values = np.concatenate([part.values.astype(kind, copy=False) for part in parts])
    if all(part.valid is None for part in parts):
        return Cells(values)
    masks = [np.ones(len(p.values), bool) if p.valid is None else p.valid for p in parts]
    return Cells(values, np.concatenate(masks))


__all__ = ["KEYS", "ColumnBlock", "Part", "find_parts", "join_blocks", "read_blocks"]
