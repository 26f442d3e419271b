"""Reads rows and curves from a lake: selects rows in SQL, and few of them for few points.

Curves that differ only in their column, source or key are read by one query, whose result is then
split.

Overviews use chunk statistics instead of most rows. Rows are read if they have no statistics yet,
and for chunks that a bound or the end of a chart column cuts, that have too many non-finite values,
or that overlap: only the rows show which of two rows of a step counts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.views import Branch
from vitals_collector.numbers.chunk_stats import CHUNK_STEPS, EXTREMES, NONFINITE, ROWS, STREAMS
from vitals_collector.numbers.interface import (
    HOST_STREAMS,
    NOT_A_RANK,
    ORDER,
    POINT,
    AttemptRow,
    Columns,
    ColumnValues,
    CurveRequest,
    DownsampledCurve,
    Floats,
    Ints,
    Mask,
    Points,
    RowSpan,
    SeriesKey,
    column_power,
    common_type,
    concat_points,
    make_lineage_end_lookup,
    missing_column,
    on_branch,
    order_curve,
    points_of,
    rank_of,
    sort_columns,
)
from vitals_collector.numbers.lake_catalogue import (
    OUTLINES,
    Catalogue,
    Places,
    build_arrow_table,
    column_from_arrow,
    column_sql,
    name_key,
    stream_column_sql,
)
from vitals_collector.numbers.lake_engine import LakeEngine

# --------------------------------------------------------------------------------------------- rows


class RowSelection(NamedTuple):
    """Selection of rows of a stream's table."""

    run: int
    joins: str
    where: str
    values: list[object]
    tables: dict[str, pa.Table]

    def and_where(self, where: str, *values: object) -> "RowSelection":
        """Return the selection of lake rows with a further condition."""
        return self._replace(where=f"{self.where} AND {where}", values=[*self.values, *values])


def select_span(span: RowSpan, run: int, places: Places) -> RowSelection:
    """Return the selection of the lake's rows in a span of the run with this number."""
    selection = RowSelection(run, "", "run = ?", [run], {})
    if span.sources:
        selection = filter_sources(selection, span.sources)
    for side, bound in (
        ("step >= ?", span.from_step),
        ("step < ?", span.to_step),
        ("time_unix_ns >= ?", span.from_unix_ns),
        ("time_unix_ns < ?", span.to_unix_ns),
    ):
        if bound is not None:
            selection = selection.and_where(side, bound)
    if span.seqs is not None:
        selection = filter_seqs(selection, span.seqs)
    return selection if span.keyed is None else _filter_key(selection, span.keyed, places)


def filter_sources(selection: RowSelection, sources: Iterable[str]) -> RowSelection:
    """Return the selection of lake rows limited to these sources."""
    ranks = sorted({rank_of(source) for source in sources} - {NOT_A_RANK})
    others = [source for source in sources if rank_of(source) == NOT_A_RANK]
    sides, values = list[str](), list[object]()
    if ranks:
        sides.append(f"rank IN ({', '.join(map(str, ranks))})")
    if others:
        sides.append(f"source IN ({', '.join('?' * len(others))})")
        values += others
    return selection.and_where(f"({' OR '.join(sides)})", *values)


def filter_seqs(selection: RowSelection, seqs: Mapping[str, tuple[int, int]]) -> RowSelection:
    """Limit lake rows to these writers, each with its first number and the one after its last."""
    bounds = build_arrow_table(
        ("incarnation", "first_seq", "end_seq"),
        [(incarnation, *bounds) for incarnation, bounds in seqs.items()],
    )
    if not seqs:
        return selection.and_where("false")
    # What can be skipped is skipped by these; what holds for each writer is joined.
    selection = selection.and_where("seq >= ?", min(first for first, _ in seqs.values()))
    selection = selection.and_where("seq < ?", max(end for _, end in seqs.values()))
    return selection._replace(
        joins=f"{selection.joins} JOIN span_seqs USING (incarnation)",
        tables={**selection.tables, "span_seqs": bounds},
    ).and_where("seq >= first_seq AND seq < end_seq")


def _filter_key(selection: RowSelection, keyed: SeriesKey, places: Places) -> RowSelection:
    """Limit a selection of lake rows to one scalar or layer."""
    column = stream_column_sql(keyed.column, places)
    if (keyed.column, "S") in places or keyed.number_of == {}:
        return selection.and_where("false")
    if isinstance(keyed.number_of, int):
        return selection.and_where(f"{column} = ?", keyed.number_of)
    keys = build_arrow_table(("incarnation", "span_key"), keyed.number_of.items())
    return selection._replace(
        joins=f"{selection.joins} JOIN span_keys USING (incarnation)",
        tables={**selection.tables, "span_keys": keys},
    ).and_where(f"{column} = span_key")


def select_rows(
    engine: LakeEngine, stream: str, selection: RowSelection, expressions: Mapping[str, str]
) -> pa.Table:
    """Return the expressions' values for the chosen lake rows, by their names, in no order.

    Raises:
        StorageError: a file that may hold some of them is damaged.
    """
    engine.files.check_files_of_runs(stream, selection.run)
    listed = ", ".join(f"{sql} AS c{i}" for i, sql in enumerate(expressions.values()))
    answer = engine.ask(
        f"SELECT {listed} FROM {stream}{selection.joins} WHERE {selection.where}",
        selection.values,
        selection.tables,
    )
    return answer.rename_columns(list(expressions))


def locate_run(catalogue: Catalogue, span: RowSpan) -> tuple[int, Places] | None:
    """Return a run's number in the lake and its columns' places; None if it has no such rows."""
    places = catalogue.columns(span.run_id, span.stream)
    return (catalogue.runs[span.run_id], places) if places else None


# ------------------------------------------------------------------------------------- whole curves

_OWN = frozenset(column.name for column in ROW_COLUMNS)
_CELL = "the curve's cell"
NO_POINTS = concat_points([])


class CurveGroup(NamedTuple):
    """Curves that are asked for together."""

    run: int
    places: Places
    span: RowSpan
    """Span of all of them, without their key."""
    column: str
    """What tells apart whose rows are whose: ``source``, the column of a key, or "" for nothing."""
    cells: list[Any]
    """Value of each cell's rows in that column."""
    curves: list[tuple[int, str, int]]
    """For each curve its index in the call, its column and its cell's index."""

    @property
    def names(self) -> list[str]:
        """Return every column of the group's curves once."""
        return list(dict.fromkeys(name for _, name, _ in self.curves))

    def subset(self, curves: list[tuple[int, str, int]]) -> "CurveGroup":
        """Return some curves of the group, and no more cells than they have."""
        places = sorted({cell for _, _, cell in curves})
        renumbered = {cell: i for i, cell in enumerate(places)}
        cells = [self.cells[cell] for cell in places]
        span = self.span._replace(sources=tuple(cells)) if self.column == "source" else self.span
        return self._replace(
            span=span,
            cells=cells,
            curves=[(number, name, renumbered[cell]) for number, name, cell in curves],
        )


class FetchedRows(NamedTuple):
    """Rows of a group, those of each cell together and in order."""

    columns: Columns
    bounds: Ints
    """Where the rows of each cell begin, and one more: where the last one's end."""

    def steps_of(self, cell: int, along: str) -> Ints:
        """Return the steps of the rows of a cell that were read from the lake."""
        steps: Ints = self.columns[along].values[self.bounds[cell] : self.bounds[cell + 1]]
        return steps

    def points(self, name: str, cell: int) -> Points:
        """Return a column's measured values in the rows of a cell, read from the lake."""
        start, end = self.bounds[cell], self.bounds[cell + 1]
        parts = (*POINT, name)
        columns = {
            key: ColumnValues(c.values[start:end], c.is_missing[start:end])
            for key, c in ((key, self.columns[key]) for key in parts)
        }
        return points_of(columns, name)


def group_curves(
    catalogue: Catalogue, curves: Sequence[CurveRequest]
) -> Iterator[tuple[CurveGroup, bool]]:
    """Yield curves of the lake in groups, and whether chunk statistics may replace rows.

    Raises:
        FormatError: a column is text.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, (span, name, num_points) in enumerate(curves):
        is_overview = num_points is not None and span.keyed is None and span.seqs is None
        is_overview &= span.stream in STREAMS and name not in _OWN
        if span.from_step is not None and span.to_step is not None and num_points is not None:
            # For fewer chunks, the statistics have fewer points than wanted.
            is_overview &= 2 * (span.to_step - span.from_step) > num_points * CHUNK_STEPS
        keyed = None if span.keyed is None else (span.keyed.column, type(span.keyed.number_of))
        sources = "each" if keyed is None and len(span.sources) == 1 else span.sources
        bounds = (span.from_step, span.to_step, span.from_unix_ns, span.to_unix_ns)
        key = (span.run_id, span.stream, keyed, sources, *bounds, id(span.seqs), is_overview)
        members.setdefault(key, []).append(i)
    for (*_, is_overview), numbers in members.items():
        group = _curve_group(catalogue, curves, numbers)
        if group is not None:
            yield group, is_overview


def _distinct_curves(curves: Sequence[CurveRequest]) -> tuple[list[CurveRequest], list[int]]:
    """Return each requested curve once, with the largest number of points, and its indices.

    Two charts of a page may show the same one, and outlines have one place for it.
    """
    distinct: dict[Any, int] = {}
    unique_curves: list[CurveRequest] = []
    places = []
    for curve in curves:
        # Keys and numbers of writers are mappings, which have no hash.
        is_plain = curve.span.keyed is None and curve.span.seqs is None
        name = curve._replace(num_points=None) if is_plain else len(unique_curves)
        curve_index = distinct.setdefault(name, len(unique_curves))
        if curve_index == len(unique_curves):
            unique_curves.append(curve)
        num_points, other = unique_curves[curve_index].num_points, curve.num_points
        most = None if num_points is None or other is None else max(num_points, other)
        unique_curves[curve_index] = curve._replace(num_points=most)
        places.append(curve_index)
    return unique_curves, places


def _curve_group(
    catalogue: Catalogue, curves: Sequence[CurveRequest], numbers: Sequence[int]
) -> CurveGroup | None:
    """Return the curves that one query on the lake can read; None if they have no rows."""
    span = curves[numbers[0]].span
    places = catalogue.columns(span.run_id, span.stream)
    if not places:
        return None
    for i in numbers:
        name = curves[i].column
        if common_type(kind for column, kind in places if column == name) == "S":
            raise FormatError(f"{name} is text; a curve has numbers")
    cells: dict[Any, int] = {}
    placed = []
    for i in numbers:
        first_span = curves[i].span
        cell: Any = None
        if first_span.keyed is not None:
            of = first_span.keyed.number_of
            cell = of if isinstance(of, int) else tuple(of.items())
        elif len(first_span.sources) == 1:
            cell = first_span.sources[0]
        placed.append((i, curves[i].column, cells.setdefault(cell, len(cells))))
    column = "" if span.keyed is None else span.keyed.column
    if span.keyed is None and len(span.sources) == 1:
        column = "source"
        span = span._replace(sources=tuple(cells))
    span = span._replace(keyed=None)
    return CurveGroup(catalogue.runs[span.run_id], places, span, column, list(cells), placed)


def fetch_group(
    engine: LakeEngine,
    group: CurveGroup,
    narrowed: Sequence[Callable[[RowSelection], RowSelection]] = (lambda c: c,),
) -> FetchedRows:
    """Return the lake's rows for a group of curves."""
    selection, cell = select_span(group.span, group.run, group.places), ""
    if group.column == "source":
        is_by_rank = all(rank_of(source) != NOT_A_RANK for source in group.cells)
        cell = "rank" if is_by_rank else "source"
    elif group.column:
        selection, cell = _joined_to_cells(selection, group), "span_cell"
    expressions = {n: column_sql(n, group.places) for n in (*POINT, "rank", "seq", *group.names)}
    if cell:
        expressions[_CELL] = cell
    parts = [
        select_rows(engine, group.span.stream, narrow(selection), expressions)
        for narrow in narrowed
    ]
    rows = pa.concat_tables(parts)
    if not cell:
        codes = np.zeros(len(rows), np.int64)
    elif cell == "span_cell":
        codes = rows[_CELL].to_numpy()
    else:
        values = [rank_of(s) for s in group.cells] if cell == "rank" else group.cells
        codes = pa.compute.index_in(rows[_CELL], pa.array(values, rows[_CELL].type)).to_numpy()
    columns = {name: column_from_arrow(rows[name]) for name in expressions if name != _CELL}
    order = _row_order(codes, columns)
    if order is not None:
        codes = codes[order]
        columns = {n: c.take(order) for n, c in columns.items()}
    return FetchedRows(columns, np.searchsorted(codes, np.arange(len(group.cells) + 1)))


def _joined_to_cells(selection: RowSelection, group: CurveGroup) -> RowSelection:
    """Return the lake's rows that have one of the keys, with the cell of each."""
    column = stream_column_sql(group.column, group.places)
    names: tuple[str, ...] = ("span_key", "span_cell")
    rows: list[tuple[Any, ...]] = [(key, i) for i, key in enumerate(group.cells)]
    is_each = isinstance(group.cells[0], int)
    if not is_each:
        names = ("incarnation", *names)
        rows = [(*key, i) for i, keys in enumerate(group.cells) for key in keys]
    if not rows or (group.column, "S") in group.places:
        return selection.and_where("false")._replace(joins=", (SELECT 0 AS span_cell)")
    using = "ON true" if is_each else "USING (incarnation)"
    return selection._replace(
        joins=f"{selection.joins} JOIN span_cells {using}",
        tables={**selection.tables, "span_cells": build_arrow_table(names, rows)},
    ).and_where(f"{column} = span_key")


def _row_order(codes: Ints, columns: Columns) -> Ints | None:
    """Return lake rows' order by cell, then as in ``scan``; None if they are sorted already."""
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
    """Return whether lake rows are sorted by cell, then by step."""
    is_new_cell = codes[1:] > codes[:-1]
    is_rising = (codes[1:] == codes[:-1]) & (step[1:] > step[:-1])
    return bool(np.all(is_new_cell | is_rising))


def whole_curves(
    engine: LakeEngine, group: CurveGroup, attempts: Sequence[AttemptRow], branch: Branch
) -> Iterable[tuple[int, DownsampledCurve]]:
    """Yield every point of each curve of a group, by its place in the call."""
    fetched, stream = fetch_group(engine, group), group.span.stream
    for number, name, cell in group.curves:
        points = on_branch(fetched.points(name, cell), stream, attempts, branch)
        yield number, DownsampledCurve(order_curve(points, stream, attempts, branch), len(points))


# ---------------------------------------------------------------------------------------- overviews

_MOST_RANGES = 4
"""Read apart from each other: each costs as much as a small question."""
_INTS = (
    *("kind", "attempt", "num", "low_step", "low_unix_ns", "high_step", "high_unix_ns"),
    *("first_step", "first_unix_ns", "last_step", "last_unix_ns"),
)
_FLOATS = ("low", "high", "first", "last")


class _ChunkEntries(NamedTuple):
    """Entries of outlines by curve, then along it."""

    curve: Ints
    """Place in the group."""
    numbers: Mapping[str, Ints]
    values: Mapping[str, Floats]

    def take(self, which: Mask | Ints) -> "_ChunkEntries":
        """Return the chosen chunk statistics, in the order of the choice."""
        return _ChunkEntries(
            self.curve[which],
            {name: column[which] for name, column in self.numbers.items()},
            {name: column[which] for name, column in self.values.items()},
        )

    def is_kind(self, kind: int) -> Mask:
        """Return a mask of the chunk statistics with this kind, such as extremes."""
        is_kind: Mask = self.numbers["kind"] == kind
        return is_kind


def _overviews(
    engine: LakeEngine,
    catalogue: Catalogue,
    group: CurveGroup,
    least: Mapping[int, int],
    attempts: Sequence[AttemptRow],
    branch: Branch,
) -> dict[int, DownsampledCurve]:
    """Return the curves for which chunk statistics have as many points as are requested."""
    stream = group.span.stream
    along = "unix_ns" if stream in HOST_STREAMS else "step"
    entries, outlined = _load_chunk_entries(engine, group)
    if not outlined:
        return {}
    entries, is_cut = _select_entries(entries, group, attempts, branch)
    pending = _seqs_without_stats(catalogue, group, outlined)
    rows = None
    if pending:
        rows = fetch_group(engine, group, [lambda selection: filter_seqs(selection, pending)])
    is_met = np.zeros(len(entries.curve), np.bool_)
    if rows is not None and along == "step":
        is_met = _has_new_rows(entries, group, rows)

    def drawn_with(
        is_read: Mask, reread: FetchedRows | None, ranges: Sequence[_Ranges]
    ) -> dict[int, DownsampledCurve]:
        """Return each curve out of outlines and of what was read, by its place in the group."""
        kept_entries, _ = _split_drawn_and_read(entries, is_read, along, len(group.curves))
        owners, points = _drawn_points(kept_entries, along)
        bounds = np.searchsorted(kept_entries.curve, np.arange(len(group.curves) + 1))
        ends_of = np.searchsorted(owners, np.arange(len(group.curves) + 1))
        drawn = {}
        for i, (_, name, cell) in enumerate(group.curves):
            read = [] if rows is None else [rows.points(name, cell)]
            if reread is not None and len(ranges[i]):
                read.append(_points_within(reread.points(name, cell), ranges[i], along))
            of_rows = on_branch(concat_points(read), stream, attempts, branch)
            curve_points = points.take(np.arange(ends_of[i], ends_of[i + 1]))
            curve = order_curve(concat_points([curve_points, of_rows]), stream, attempts, branch)
            num_values = int(kept_entries.numbers["num"][bounds[i] : bounds[i + 1]].sum())
            drawn[i] = DownsampledCurve(curve, num_values + len(of_rows))
        return drawn

    # With fewer points than columns, columns only get narrower: all chunks that these cut are read.
    is_read = _find_chunks_to_read(entries, is_cut, along) | is_met
    powers = {
        i: column_power(some.points, least[group.curves[i][0]], branch)
        for i, some in drawn_with(is_read, None, ()).items()
    }
    is_read = (
        _find_chunks_to_read(entries, is_cut | _is_cut_by_column(entries, powers, along), along)
        | is_met
    )
    is_left = np.bincount(
        entries.curve, ~is_read & entries.is_kind(EXTREMES), minlength=len(powers)
    )
    enough = [i for i, power in powers.items() if power is not None and is_left[i]]
    if not enough:
        return {}
    _, ranges = _split_drawn_and_read(entries, is_read, along, len(group.curves))
    reread = _read_ranges(engine, group, ranges, enough, pending, outlined, along)
    drawn = drawn_with(is_read, reread, ranges)
    return {group.curves[i][0]: drawn[i] for i in enough}


def _load_chunk_entries(
    engine: LakeEngine, group: CurveGroup
) -> tuple[_ChunkEntries, dict[str, int]]:
    """Return the chunk statistics of the curves, and their last number by writer."""
    span = group.span
    engine.files.check_files_of_runs(OUTLINES, group.run)
    selection = RowSelection(group.run, "", "run = ? AND stream = ?", [group.run, span.stream], {})
    keys = [*map(name_key, group.names), name_key(ROWS)]
    selection = selection.and_where(f"name IN ({', '.join(map(str, keys))})")
    if span.sources:
        selection = filter_sources(selection, span.sources)
    for side, bound in (("last_step >= ?", span.from_step), ("first_step < ?", span.to_step)):
        if bound is not None:
            selection = selection.and_where(f"(name = {keys[-1]} OR {side})", bound)
    listed = ", ".join((*_INTS, *_FLOATS))
    outlines = engine.ask(
        f"SELECT name, source, incarnation, last_seq, {listed} FROM {OUTLINES}"
        f" WHERE {selection.where}",
        selection.values,
    )
    is_rows = pa.compute.equal(outlines["name"], keys[-1])
    marks = outlines.select(["incarnation", "last_seq"]).filter(is_rows)
    marks = marks.group_by("incarnation").aggregate([("last_seq", "max")])
    outlined = dict(
        zip(marks["incarnation"].to_pylist(), marks["last_seq_max"].to_pylist(), strict=True)
    )
    outlines = outlines.filter(pa.compute.invert(is_rows))
    entries = _ChunkEntries(
        _curve_of(group, outlines),
        {name: outlines[name].to_numpy().astype(np.int64, copy=False) for name in _INTS},
        {name: outlines[name].to_numpy() for name in _FLOATS},
    )
    return entries.take(entries.curve >= 0), outlined


def _curve_of(group: CurveGroup, stats: pa.Table) -> Ints:
    """Return the group's curve of each chunk statistic; -1 if no curve requests it."""
    names = group.names
    num_cells = len(group.cells)
    name = pa.compute.index_in(stats["name"], pa.array(map(name_key, names), pa.int64())).to_numpy()
    cell = np.zeros(len(stats), np.int64)
    if group.column:
        cell = pa.compute.index_in(stats["source"], pa.array(group.cells, pa.string())).to_numpy()
    numbers = np.full(len(names) * num_cells, -1)
    index_by_name = {name: i for i, name in enumerate(names)}
    for i, (_, of_curve, of_cell) in enumerate(group.curves):
        numbers[index_by_name[of_curve] * num_cells + of_cell] = i
    curve: Ints = numbers[name.astype(np.int64) * num_cells + cell]
    return curve


def _select_entries(
    entries: _ChunkEntries, group: CurveGroup, attempts: Sequence[AttemptRow], branch: Branch
) -> tuple[_ChunkEntries, Mask]:
    """Return the requested chunk statistics, in order, and which of them a bound cuts."""
    span, numbers = group.span, entries.numbers
    is_in = np.ones(len(entries.curve), np.bool_)
    is_cut = ~is_in
    bounds = [
        ("step", span.from_step, span.to_step),
        ("unix_ns", span.from_unix_ns, span.to_unix_ns),
    ]
    for unit, begin, end in bounds:
        first, last = numbers[f"first_{unit}"], numbers[f"last_{unit}"]
        if begin is not None:
            is_in &= last >= begin
            is_cut |= first < begin
        if end is not None:
            is_in &= first < end
            is_cut |= last >= end
    if branch != "all" and span.stream not in HOST_STREAMS:
        end_of = make_lineage_end_lookup(attempts)
        distinct, of_entry = np.unique(numbers["attempt"], return_inverse=True)
        end_at = np.array([end_of(attempt) for attempt in distinct.tolist()])[of_entry]
        first, last = numbers["first_step"], numbers["last_step"]
        is_in &= first < end_at if branch == "lineage" else last >= end_at
        is_cut |= (first < end_at) & (last >= end_at)
    along = "first_unix_ns" if span.stream in HOST_STREAMS else "first_step"
    order = np.flatnonzero(is_in)
    order = order[np.lexsort((numbers[along][order], entries.curve[order]))]
    return entries.take(order), is_cut[order]


def _find_chunks_to_read(entries: _ChunkEntries, is_cut: Mask, along: str) -> Mask:
    """Return the chunks whose rows have to be read: overlapping chunks are treated alike.

    Non-finite values follow their chunk (``_split_drawn_and_read``).
    """
    is_stretch = ~entries.is_kind(NONFINITE)
    # If all values are equal, two are drawn, and the second is the last.
    is_alike = (entries.numbers["num"] > 1) & (entries.values["low"] == entries.values["high"])
    is_unknown = is_alike & ~np.isfinite(entries.values["last"])
    is_read: Mask = is_stretch & (is_cut | is_unknown | ~entries.is_kind(EXTREMES))
    at = np.flatnonzero(is_stretch)
    curve = entries.curve[at]
    first, last = (entries.numbers[f"{side}_{along}"][at] for side in ("first", "last"))
    is_overlap = (curve[1:] == curve[:-1]) & (first[1:] <= last[:-1])
    for i in np.unique(curve[1:][is_overlap]).tolist():
        start, end = np.searchsorted(curve, (i, i + 1))
        highest = np.maximum.accumulate(last[start:end])
        cluster = np.concatenate(([0], np.cumsum(first[start + 1 : end] > highest[:-1])))
        is_together = np.bincount(cluster, is_read[at[start:end]]) > 0
        if along == "step":  # one of two rows of a step counts
            is_together |= np.bincount(cluster) > 1
        is_read[at[start:end]] = is_together[cluster]
    return is_read


def _seqs_without_stats(
    catalogue: Catalogue, group: CurveGroup, last_seq_with_stats: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return by writer the numbers of rows without chunk statistics."""
    span = group.span
    return {
        incarnation: (last_seq_with_stats.get(incarnation, -1) + 1, mark + 1)
        for incarnation, (mark, source) in catalogue.marks(span.run_id, span.stream).items()
        if mark > last_seq_with_stats.get(incarnation, -1)
        and (not span.sources or source in span.sources)
    }


def _has_new_rows(entries: _ChunkEntries, group: CurveGroup, rows: FetchedRows) -> Mask:
    """Return the chunks that overlap rows without statistics."""
    is_met = np.zeros(len(entries.curve), np.bool_)
    bounds = np.searchsorted(entries.curve, np.arange(len(group.curves) + 1))
    first, last = entries.numbers["first_step"], entries.numbers["last_step"]
    is_stretch = ~entries.is_kind(NONFINITE)
    for i, (_, _, cell) in enumerate(group.curves):
        entry_slice = slice(bounds[i], bounds[i + 1])
        steps = rows.steps_of(cell, "step")
        if len(steps) and bounds[i] < bounds[i + 1] and steps[0] <= last[entry_slice].max():
            is_met[entry_slice] = np.searchsorted(steps, first[entry_slice]) < np.searchsorted(
                steps, last[entry_slice], side="right"
            )
    is_met &= is_stretch
    return is_met


def _is_cut_by_column(entries: _ChunkEntries, powers: Mapping[int, int | None], along: str) -> Mask:
    """Return the chunks of lake rows that a boundary of a curve's columns cuts."""
    power = np.array([powers[i] or 0 for i in range(len(powers))], np.int64)[entries.curve]
    first, last = (entries.numbers[f"{side}_{along}"] for side in ("first", "last"))
    is_across: Mask = entries.is_kind(EXTREMES) & (first >> power != last >> power)
    return is_across


_Ranges = list[tuple[int, int]]


def _split_drawn_and_read(
    entries: _ChunkEntries, is_read: Mask, along: str, num_curves: int
) -> tuple[_ChunkEntries, list[_Ranges]]:
    """Return the chunk statistics to draw, and for each curve the ranges to read as rows."""
    first, last = (entries.numbers[f"{side}_{along}"] for side in ("first", "last"))
    ranges: list[_Ranges] = [[] for _ in range(num_curves)]
    for i, begin, end in zip(
        entries.curve[is_read].tolist(),
        first[is_read].tolist(),
        last[is_read].tolist(),
        strict=True,
    ):
        of_curve = ranges[i]
        if of_curve and begin <= of_curve[-1][1]:
            of_curve[-1] = of_curve[-1][0], max(end, of_curve[-1][1])
        else:
            of_curve.append((begin, end))
    is_drawn = ~is_read
    bounds = np.searchsorted(entries.curve, np.arange(num_curves + 1))
    for i in np.unique(entries.curve[is_read]).tolist():
        entry_slice = slice(bounds[i], bounds[i + 1])
        is_drawn[entry_slice] &= ~_is_within(first[entry_slice], ranges[i])
    return entries.take(is_drawn), ranges


def _is_within(along: Ints, ranges: _Ranges) -> Mask:
    """Return a mask of the positions in the ranges to read from the lake."""
    begins, ends_at = np.array(ranges, np.int64).T
    interval_index = np.searchsorted(begins, along, side="right") - 1
    is_within: Mask = (interval_index >= 0) & (along <= ends_at[interval_index])
    return is_within


def _points_within(points: Points, ranges: _Ranges, along: str) -> Points:
    return points.take(_is_within(points.step if along == "step" else points.time_unix_ns, ranges))


def _read_ranges(
    engine: LakeEngine,
    group: CurveGroup,
    ranges: Sequence[_Ranges],
    enough: Iterable[int],
    pending: Mapping[str, tuple[int, int]],
    outlined: Mapping[str, int],
    along: str,
) -> FetchedRows | None:
    """Return the lake's rows in the ranges, except those without statistics: already read."""
    together = sorted({of_range for i in enough for of_range in ranges[i]})
    if not together:
        return None
    column = "step" if along == "step" else "time_unix_ns"
    narrowed = []
    for begin, end in _coalesced(together):

        def narrow(selection: RowSelection, begin: int = begin, end: int = end) -> RowSelection:
            selection = selection.and_where(f"{column} BETWEEN ? AND ?", begin, end)
            if not pending:
                return selection
            marks = build_arrow_table(("incarnation", "outlined_seq"), outlined.items())
            return selection._replace(
                joins=f"{selection.joins} JOIN span_outlined USING (incarnation)",
                tables={**selection.tables, "span_outlined": marks},
            ).and_where("seq <= outlined_seq")

        narrowed.append(narrow)
    return fetch_group(engine, group, narrowed)


def _coalesced(ranges: _Ranges) -> Iterator[tuple[int, int]]:
    """Yield few ranges of rows that hold all of these; the widest gaps stay between them."""
    joined: _Ranges = []
    for begin, end in ranges:
        if joined and begin <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    gaps = sorted(range(1, len(joined)), key=lambda i: joined[i - 1][1] - joined[i][0])[
        : _MOST_RANGES - 1
    ]
    start = 0
    for cut in [*sorted(gaps), len(joined)]:
        yield joined[start][0], joined[cut - 1][1]
        start = cut


def _drawn_points(entries: _ChunkEntries, along: str) -> tuple[Ints, Points]:
    """Return the curve of each point from the chunk statistics, and the points."""
    curve, numbers, values = entries
    is_first = _is_curve_end(curve, numbers[f"first_{along}"], np.minimum)
    is_last = _is_curve_end(curve, numbers[f"last_{along}"], np.maximum)
    is_nonfinite = entries.is_kind(NONFINITE)
    low, high = (numbers[f"{side}_step"] for side in ("low", "high"))
    is_same = (low == high) & (numbers["low_unix_ns"] == numbers["high_unix_ns"])
    sides = [
        ("low", np.isfinite(values["low"]) | is_nonfinite),
        ("high", np.isfinite(values["high"]) & ~is_same),
        ("first", is_first & np.isfinite(values["first"]) & ~_is_extreme(numbers, "first")),
        (
            "last",
            (is_last | is_same) & np.isfinite(values["last"]) & ~_is_extreme(numbers, "last"),
        ),
    ]
    owners = np.concatenate([curve[mask] for _, mask in sides])
    points = Points(
        np.concatenate([numbers[f"{side}_step"][mask] for side, mask in sides]),
        np.concatenate([numbers["attempt"][mask] for _, mask in sides]),
        np.concatenate([numbers[f"{side}_unix_ns"][mask] for side, mask in sides]),
        np.concatenate([values[side][mask] for side, mask in sides]),
    )
    order = np.argsort(owners, kind="stable")
    return owners[order], points.take(order)


def _is_curve_end(curve: Ints, along: Ints, extreme: np.ufunc) -> Mask:
    """Return which chunks reach the end of their curve: one may be inside another."""
    starts = np.flatnonzero(np.diff(curve, prepend=-1))
    if not len(starts):
        return np.zeros(0, np.bool_)
    farthest = np.repeat(extreme.reduceat(along, starts), np.diff(starts, append=len(curve)))
    is_end: Mask = along == farthest
    return is_end


def _is_extreme(numbers: Mapping[str, Ints], side: str) -> Mask:
    """Return in which chunks the value at an end is an extreme, which is drawn anyway."""
    is_extreme = np.zeros(len(numbers["num"]), np.bool_)
    for extreme in ("low", "high"):
        is_same = numbers[f"{side}_step"] == numbers[f"{extreme}_step"]
        is_extreme |= is_same & (numbers[f"{side}_unix_ns"] == numbers[f"{extreme}_unix_ns"])
    return is_extreme


# ---------------------------------------------------------------------------------------- the lake


class OpenLake:
    """An open lake with all its queries (``NumbersReader``)."""

    def __init__(self, engine: LakeEngine, catalogue: Catalogue) -> None:
        self.engine = engine
        self.catalogue = catalogue

    def kinds(self, run_id: str, stream: str) -> dict[str, str]:
        """Return the columns of the stream's rows, each with its type."""
        return self.catalogue.kinds(run_id, stream)

    def sources(self, run_id: str, stream: str) -> list[str]:
        """Return the writers of the stream's rows, sorted by name."""
        return self.catalogue.sources(run_id, stream)

    def scan(self, span: RowSpan, names: Sequence[str]) -> Columns:
        """Return columns of the rows in the span, in order."""
        all_names = tuple(dict.fromkeys((*ORDER, *names)))
        location = locate_run(self.catalogue, span)
        if location is None:
            return {name: missing_column(0) for name in names}
        run, places = location
        selection = select_span(span, run, places)
        rows = select_rows(
            self.engine, span.stream, selection, {n: column_sql(n, places) for n in all_names}
        )
        return sort_columns({name: column_from_arrow(rows[name]) for name in all_names}, names)

    def num_rows(self, span: RowSpan) -> int:
        """Return how many rows the span has."""
        location = locate_run(self.catalogue, span)
        if location is None:
            return 0
        counted = select_rows(
            self.engine, span.stream, select_span(span, *location), {"num": "count(*)"}
        )
        return int(counted["num"][0].as_py())

    def last_steps(self, run_id: str, stream: str = "steps") -> dict[int, int]:
        """Return the last step of each attempt that has rows of the stream."""
        location = locate_run(self.catalogue, RowSpan(run_id, stream))
        if location is None:
            return {}
        answer = self.engine.ask(
            f"SELECT attempt, max(step) AS step FROM {stream}"
            " WHERE run = ? AND attempt IS NOT NULL AND step IS NOT NULL GROUP BY attempt",
            [location[0]],
        )
        return dict(zip(answer["attempt"].to_pylist(), answer["step"].to_pylist(), strict=True))

    def curves(
        self,
        curves: Sequence[CurveRequest],
        attempts: Sequence[AttemptRow],
        branch: Branch,
    ) -> list[DownsampledCurve]:
        """Return each curve's values on the branch; for an overview, downsampled.

        Raises:
            FormatError: a column is text.
        """
        distinct, places = _distinct_curves(curves)
        drawn: dict[int, DownsampledCurve] = {}
        for group, is_overview in group_curves(self.catalogue, distinct):
            rest = group.curves
            if is_overview:
                least = {number: distinct[number].num_points or 0 for number, _, _ in group.curves}
                drawn |= _overviews(self.engine, self.catalogue, group, least, attempts, branch)
                rest = [curve for curve in group.curves if curve[0] not in drawn]
            if rest:
                drawn |= whole_curves(self.engine, group.subset(rest), attempts, branch)
        return [drawn.get(i, DownsampledCurve(NO_POINTS, 0)) for i in places]
