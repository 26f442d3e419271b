"""Curves out of the lake: many in few questions; for an overview outlines in place of most rows.

Curves that differ in their column, their source or their key alone are asked for together: all are
one question, and each is cut out of its answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.views import Branch
from vitals_collector.numbers.drawn import POINT, arranged, on_branch, points_of
from vitals_collector.numbers.interface import (
    NOT_A_RANK,
    Column,
    Columns,
    Curve,
    Drawn,
    Span,
    common_type,
    rank_of,
)
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import Known
from vitals_collector.numbers.lake_scan import Chosen, chosen_of, select
from vitals_collector.numbers.lake_tables import (
    Places,
    expression,
    own_expression,
    table_of,
    to_column,
)
from vitals_collector.numbers.outlines import STREAMS, STRETCH
from vitals_collector.numbers.points import AttemptRow, Ints, Points, join

_OWN = frozenset(column.name for column in ROW_COLUMNS)
_CELL = "the curve's cell"
NO_POINTS = join([])


class Group(NamedTuple):
    """Curves that are asked for together."""

    run: int
    places: Places
    span: Span
    """Of all of them, without what tells them apart."""
    column: str
    """What tells apart whose rows are whose: ``source``, the column of a key, or "" for nothing."""
    cells: list[Any]
    """What the rows of each kind have there."""
    curves: list[tuple[int, str, int]]
    """Of each curve its place in the call, its column and its cell's place."""

    @property
    def names(self) -> list[str]:
        """Every column once."""
        return list(dict.fromkeys(name for _, name, _ in self.curves))

    def of(self, curves: list[tuple[int, str, int]]) -> "Group":
        """Return some curves of it, and no more cells than they have."""
        places = sorted({cell for _, _, cell in curves})
        renumbered = {cell: i for i, cell in enumerate(places)}
        cells = [self.cells[cell] for cell in places]
        span = self.span._replace(sources=tuple(cells)) if self.column == "source" else self.span
        return self._replace(
            span=span,
            cells=cells,
            curves=[(number, name, renumbered[cell]) for number, name, cell in curves],
        )


class Fetched(NamedTuple):
    """Rows of a group, those of each cell together and in order."""

    columns: Columns
    bounds: Ints
    """Where the rows of each cell begin, and one more: where the last one's end."""

    def steps_of(self, cell: int, along: str) -> Ints:
        """Return where the rows of a cell lie."""
        steps: Ints = self.columns[along].values[self.bounds[cell] : self.bounds[cell + 1]]
        return steps

    def points(self, name: str, cell: int) -> Points:
        """Return the measured values of a column in the rows of a cell."""
        start, end = self.bounds[cell], self.bounds[cell + 1]
        wanted = (*POINT, name)
        columns = {
            key: Column(c.values[start:end], c.is_missing[start:end])
            for key, c in ((key, self.columns[key]) for key in wanted)
        }
        return points_of(columns, name)


def grouped(known: Known, curves: Sequence[Curve]) -> Iterator[tuple[Group, bool]]:
    """Yield the curves in groups; with whether outlines may stand for rows.

    Raises:
        FormatError: a column is text.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, (span, name, num_points) in enumerate(curves):
        is_overview = num_points is not None and span.keyed is None and span.seqs is None
        is_overview &= span.stream in STREAMS and name not in _OWN
        if span.from_step is not None and span.to_step is not None and num_points is not None:
            # Of fewer stretches the outlines have fewer points than are wanted.
            is_overview &= 2 * (span.to_step - span.from_step) > num_points * STRETCH
        keyed = None if span.keyed is None else (span.keyed.column, type(span.keyed.number_of))
        sources = "each" if keyed is None and len(span.sources) == 1 else span.sources
        bounds = (span.from_step, span.to_step, span.from_unix_ns, span.to_unix_ns)
        key = (span.run_id, span.stream, keyed, sources, *bounds, id(span.seqs), is_overview)
        members.setdefault(key, []).append(i)
    for (*_, is_overview), numbers in members.items():
        group = _group(known, curves, numbers)
        if group is not None:
            yield group, is_overview


def _group(known: Known, curves: Sequence[Curve], numbers: Sequence[int]) -> Group | None:
    span = curves[numbers[0]].span
    places = known.columns(span.run_id, span.stream)
    if not places:
        return None
    for i in numbers:
        name = curves[i].column
        if common_type(kind for column, kind in places if column == name) == "S":
            raise FormatError(f"{name} is text; a curve has numbers")
    cells: dict[Any, int] = {}
    placed = []
    for i in numbers:
        own = curves[i].span
        cell: Any = None
        if own.keyed is not None:
            of = own.keyed.number_of
            cell = of if isinstance(of, int) else tuple(of.items())
        elif len(own.sources) == 1:
            cell = own.sources[0]
        placed.append((i, curves[i].column, cells.setdefault(cell, len(cells))))
    column = "" if span.keyed is None else span.keyed.column
    if span.keyed is None and len(span.sources) == 1:
        column = "source"
        span = span._replace(sources=tuple(cells))
    span = span._replace(keyed=None)
    return Group(known.runs[span.run_id], places, span, column, list(cells), placed)


def fetch(
    engine: Engine, group: Group, narrowed: Sequence[Callable[[Chosen], Chosen]] = (lambda c: c,)
) -> Fetched:
    """Return a group's rows.

    Args:
        engine: the lake.
        group: whose rows.
        narrowed: of all of them those that each of these gives, together.
    """
    chosen, cell = chosen_of(group.span, group.run, group.places), ""
    if group.column == "source":
        is_by_rank = all(rank_of(source) != NOT_A_RANK for source in group.cells)
        cell = "rank" if is_by_rank else "source"
    elif group.column:
        chosen, cell = _joined_to_cells(chosen, group), "span_cell"
    wanted = {n: expression(n, group.places) for n in (*POINT, "rank", "seq", *group.names)}
    if cell:
        wanted[_CELL] = cell
    parts = [select(engine, group.span.stream, narrow(chosen), wanted) for narrow in narrowed]
    rows = pa.concat_tables(parts)
    if not cell:
        codes = np.zeros(len(rows), np.int64)
    elif cell == "span_cell":
        codes = rows[_CELL].to_numpy()
    else:
        values = [rank_of(s) for s in group.cells] if cell == "rank" else group.cells
        codes = pa.compute.index_in(rows[_CELL], pa.array(values, rows[_CELL].type)).to_numpy()
    columns = {name: to_column(rows[name]) for name in wanted if name != _CELL}
    order = _order(codes, columns)
    if order is not None:
        codes = codes[order]
        columns = {n: Column(c.values[order], c.is_missing[order]) for n, c in columns.items()}
    return Fetched(columns, np.searchsorted(codes, np.arange(len(group.cells) + 1)))


def _joined_to_cells(chosen: Chosen, group: Group) -> Chosen:
    """Return the rows that have one of the keys, with the cell of each."""
    column = own_expression(group.column, group.places)
    names: tuple[str, ...] = ("span_key", "span_cell")
    rows: list[tuple[Any, ...]] = [(key, i) for i, key in enumerate(group.cells)]
    is_each = isinstance(group.cells[0], int)
    if not is_each:
        names = ("incarnation", *names)
        rows = [(*key, i) for i, keys in enumerate(group.cells) for key in keys]
    if not rows or (group.column, "S") in group.places:
        return chosen.also("false")._replace(joins=", (SELECT 0 AS span_cell)")
    using = "ON true" if is_each else "USING (incarnation)"
    return chosen._replace(
        joins=f"{chosen.joins} JOIN span_cells {using}",
        tables={**chosen.tables, "span_cells": table_of(names, rows)},
    ).also(f"{column} = span_key")


def _order(codes: Ints, columns: Columns) -> Ints | None:
    """Return the order by cell, then as ``scan`` gives rows; None where they lie so."""
    step = columns["step"].values
    if len(step) < 2 or _is_rising(codes, step):
        return None
    if step.min() >= 0 and step.max() < 1 << 42:  # one key is sorted in a fraction of the time
        order = np.argsort((codes.astype(np.int64) << 42) | step, kind="stable")
        if _is_rising(codes[order], step[order]):
            return order
    keys = ("seq", "time_unix_ns", "rank", "step")
    return np.lexsort([*(columns[key].values for key in keys), codes])


def _is_rising(codes: Ints, step: Ints) -> bool:
    is_new_cell = codes[1:] > codes[:-1]
    is_rising = (codes[1:] == codes[:-1]) & (step[1:] > step[:-1])
    return bool(np.all(is_new_cell | is_rising))


def whole_curves(
    engine: Engine, group: Group, attempts: Sequence[AttemptRow], branch: Branch
) -> Iterable[tuple[int, Drawn]]:
    """Yield every point of each curve of a group, by its place in the call."""
    fetched, stream = fetch(engine, group), group.span.stream
    for number, name, cell in group.curves:
        points = on_branch(fetched.points(name, cell), stream, attempts, branch)
        yield number, Drawn(arranged(points, stream, attempts, branch), len(points))
