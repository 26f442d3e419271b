"""Reads the values of chosen batches, in full: of several curves at once, each batch once."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection

from trainvitals.errors import FormatError
from trainvitals.rows import column_of
from vitals_collector.queries.select import Part, Selection, some_at_once
from vitals_collector.queries.series import Ints, Mask, Points, join
from vitals_collector.storage.columns import Values, decode_columns
from vitals_collector.storage.read_rows import read_columns, read_pages
from vitals_collector.storage.schema import batches

_ROWS = ("step", "attempt", "time_unix_ns")
_Column = tuple[Values, Mask | None]
_Read = Callable[[str], _Column]


class Reading(NamedTuple):
    """A curve, and the batches that are to be read for it."""

    selection: Selection
    parts: Sequence[Part]

    @property
    def names(self) -> frozenset[str]:
        """The columns that are needed of them."""
        key = (self.selection.key_column,) if self.selection.key_column else ()
        return frozenset((*_ROWS, self.selection.column, *key))


def read_points(connection: Connection, readings: Sequence[Reading]) -> list[Points]:
    """Return each curve's measured values, as good as in the order of its batches."""
    takers: dict[Part, list[int]] = defaultdict(list)
    for i, reading in enumerate(readings):
        for part in reading.parts:
            takers[part].append(i)
    by_batch: list[dict[int, Points]] = [{} for _ in readings]
    for batch, incarnation, which, column in _stretches(connection, readings, takers):
        for i in which:
            points = _kept(column, readings[i].selection, incarnation)
            if points is not None:
                by_batch[i][batch] = points
    return [
        join([points[part.id] for part in reading.parts if part.id in points])
        for reading, points in zip(readings, by_batch, strict=True)
    ]


class _Stretch(NamedTuple):
    """Consecutive rows of one writer, who wants them, and what gives a column of them."""

    batch: int
    incarnation: str
    takers: Sequence[int]
    column: _Read


def _stretches(
    connection: Connection, readings: Sequence[Reading], takers: dict[Part, list[int]]
) -> Iterator[_Stretch]:
    alike: dict[frozenset[str], list[Part]] = defaultdict(list)
    for part, which in takers.items():
        names = frozenset[str]() if not part.is_columnar else _joined(readings, which)
        alike[names].append(part)
    for names, parts in alike.items():
        for portion in some_at_once(parts):
            if names:
                yield from _of_columns(connection, portion, takers, names)
            else:
                yield from _of_rows(connection, portion, takers)


def _joined(readings: Sequence[Reading], which: Sequence[int]) -> frozenset[str]:
    return frozenset[str]().union(*(readings[i].names for i in which))


def _of_columns(
    connection: Connection,
    parts: Sequence[Part],
    takers: dict[Part, list[int]],
    names: frozenset[str],
) -> Iterator[_Stretch]:
    chunks = read_columns(connection, [part.id for part in parts], sorted(names))
    for part in parts:
        if part.id not in chunks:
            continue  # damaged
        # What no row has reads as zero, and was not measured.
        nothing = np.zeros(part.num_rows, np.int64), np.zeros(part.num_rows, np.bool_)
        columns: dict[str, _Column] = dict.fromkeys(names, nothing)
        for chunk, values, valid in decode_columns(chunks[part.id], part.num_rows):
            columns[chunk.name] = values, valid
        yield _Stretch(part.id, part.incarnation, takers[part], columns.__getitem__)


def _of_rows(
    connection: Connection, parts: Sequence[Part], takers: dict[Part, list[int]]
) -> Iterator[_Stretch]:
    which = {part.id: takers[part] for part in parts}
    order = (batches.c.incarnation, batches.c.first_seq)
    pages = read_pages(connection, batches.c.id.in_(list(which)), order_by=order)
    for _, alike in groupby(pages, key=lambda p: (p.incarnation, id(p.schema), which[p.id])):
        writer_pages = list(alike)
        rows, schema = np.concatenate([page.rows for page in writer_pages]), writer_pages[0].schema
        column: _Read = cache(partial(column_of, schema, rows))
        yield _Stretch(
            writer_pages[0].id, writer_pages[0].incarnation, which[writer_pages[0].id], column
        )


def _kept(column: _Read, selection: Selection, incarnation: str) -> Points | None:
    """Return the measured values among some rows of one writer that the selection asks for."""
    values, valid = column(selection.column)
    if values.dtype.kind not in "fi":
        raise FormatError(f"{selection.stream}.{selection.column} is text, not a number")
    steps, times = _whole(column, "step"), _whole(column, "time_unix_ns")
    masks = [] if valid is None else [valid]
    if selection.key_column:
        key = selection.key_of(incarnation)
        if key is None:
            return None
        masks.append(_whole(column, selection.key_column) == key)
    if selection.from_step is not None:
        masks.append(steps >= selection.from_step)
    if selection.to_step is not None:
        masks.append(steps <= selection.to_step)
    if selection.from_time_unix_ns is not None:
        masks.append(times >= selection.from_time_unix_ns)
    if selection.to_time_unix_ns is not None:
        masks.append(times <= selection.to_time_unix_ns)
    attempts = _whole(column, "attempt")
    points = Points(steps, attempts, times, values.astype(np.float64, copy=False))
    return points.take(np.logical_and.reduce(masks)) if masks else points


def _whole(column: _Read, name: str) -> Ints:
    return column(name)[0].astype(np.int64, copy=False)


__all__ = ["Reading", "read_points"]
