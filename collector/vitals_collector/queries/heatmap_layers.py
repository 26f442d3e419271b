"""Reads one column of all layers together, in windows of steps: layers have no summaries.

Each window is stitched separately, because all rows of a step are in one window, and is added to
the map's cells directly: memory grows neither with the steps nor with the layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from trainvitals.views import Branch
from vitals_collector.numbers.interface import (
    AttemptRow,
    Columns,
    CurveRequest,
    Floats,
    Ints,
    Mask,
    NumberStoreReader,
    RowSpan,
    is_of_lineage,
    make_lineage_end_lookup,
)
from vitals_collector.queries.heatmap_cells import (
    CellExtremes,
    HeatmapGrid,
    HeatmapRows,
    even_starts,
)
from vitals_collector.storage.schema import names, streams
from vitals_collector.storage.store import ReadSnapshot

RATIO = "update_ratio"
MAX_ROWS = 1 << 18
"""Approximate rows per window."""
_MOST_CODES = 1 << 22
_MIN_APART = 1_024
"""Number of values from which a map's column is filled separately."""


def load_layer_rows(
    moment: ReadSnapshot,
    curve: CurveRequest,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    points: int,
) -> HeatmapRows:
    """Load the rows of a queried heat map of layers, in the model's order."""
    source = _WindowReader(moment, curve, attempts, branch)
    filling = _HeatmapFiller(points)
    windows = _split_windows(moment.numbers, curve.span)
    last: _WindowRows | None = None
    while windows:
        filling.add(source.load_window(windows.pop(0)))
        if filling.is_full:
            while windows and not (last and len(last.step)):
                last = source.load_window(windows.pop())
            filling.draw_columns(last)
    if last:
        filling.add(last)
    layers = source.layers
    starts, extremes, rolled_back = filling.finish(len(layers.names))
    is_there = np.any(extremes.is_marked | ~np.isnan(extremes.low), axis=1)
    layer_indices = [i for i in layers.order() if is_there[i]]
    return HeatmapRows(
        [layers.names[i] for i in layer_indices], starts, extremes.take(layer_indices), rolled_back
    )


def _split_windows(numbers: NumberStoreReader, span: RowSpan) -> list[RowSpan]:
    """Split the steps of a heat map of layers in windows with few rows each."""
    num = numbers.num_rows(span)
    if num <= MAX_ROWS:
        return [span]
    low = span.from_step or 0
    newest = max(numbers.last_steps(span.run_id).values(), default=0)
    high = newest + 1 if span.to_step is None else min(span.to_step, newest + 1)
    # If rows of several writers share a range of thousands of steps, a window's count is too high.
    least = max(1, (high - low) * MAX_ROWS // (4 * num))
    return _split_span(numbers, span, low, high, least)


def _split_span(
    numbers: NumberStoreReader, span: RowSpan, low: int, high: int, least: int
) -> list[RowSpan]:
    """Halve the steps of a heat map of layers until each part has few rows."""
    if high - low <= least or numbers.num_rows(span) <= MAX_ROWS:
        return [span]
    middle = (low + high) // 2
    before, after = span._replace(to_step=middle), span._replace(from_step=middle)
    return [
        *_split_span(numbers, before, low, middle, least),
        *_split_span(numbers, after, middle, high, least),
    ]


# ------------------------------------------------------------------------------------ reading


class _WindowRows(NamedTuple):
    """Measured values of a window, stitched, by step: one per layer and step."""

    row: Ints
    step: Ints
    value: Floats
    is_kept: Mask
    """Which rows belong to the lineage."""


class _LayerOrder:
    """Assigns each layer a row of the map, in the order of occurrence."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self.names: list[str] = []
        self._row_of: dict[str, int] = {}
        self._places: list[tuple[int, int]] = []
        self._names_of: dict[str, dict[int, str]] = {}
        for (incarnation, number), name in layer_names(connection, run_id).items():
            self._names_of.setdefault(incarnation, {})[number] = name
        table = streams.c
        query = select(table.incarnation).where(table.run_id == run_id, table.stream == "layers")
        writers = list(connection.execute(query).scalars())
        first = self._names_of.get(writers[0], {}) if writers else {}
        self._common = (
            first if all(self._names_of.get(writer, {}) == first for writer in writers) else None
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that identify a layer of the heat map: usually not the writer's."""
        return ("layer", *(("rank", "incarnation") if self._common is None else ("rank",)))

    def rows(self, columns: Columns) -> tuple[Ints, bool]:
        """Return the heat map's row of each value, and whether certainly none has a step twice."""
        layer, rank = (
            columns[name].values.astype(np.int64, copy=False) for name in ("layer", "rank")
        )
        if self._common is not None:
            writer, names_of = rank, None
        else:
            incarnations = columns["incarnation"].values.tolist()
            number_of = {name: i for i, name in enumerate(dict.fromkeys(incarnations))}
            writer = np.array([number_of[name] for name in incarnations], dtype=np.int64)
            names_of = [self._names_of.get(name, {}) for name in number_of]
        code, distinct, first = _encode_pairs(writer, layer)
        row_of = np.zeros(len(distinct), dtype=np.int64)
        for i, at in enumerate(first.tolist()):
            layer_names = self._common if names_of is None else names_of[int(writer[at])]
            row_of[i] = self._get_or_add_row(layer_names or {}, int(rank[at]), int(layer[at]))
        is_apart = len(set(row_of.tolist())) == len(row_of)
        return row_of[code], is_apart and _is_rising(columns["step"].values, code)

    def order(self) -> list[int]:
        """Return the heat map's rows by rank, then by the lowest number of the layer."""
        return sorted(range(len(self.names)), key=self._places.__getitem__)

    def _get_or_add_row(self, layer_names: Mapping[int, str], rank: int, number: int) -> int:
        """Return the heat map's row of a layer; a new layer gets a new row."""
        name = layer_names.get(number, f"layer {number}")
        row = self._row_of.setdefault(name, len(self.names))
        if row == len(self.names):
            self.names.append(name)
            self._places.append((rank, number))
        self._places[row] = min(self._places[row], (rank, number))
        return row


def _encode_pairs(writer: Ints, layer: Ints) -> tuple[Ints, Ints, Ints]:
    """Number the pairs of writer and layer in a heat map; return also the pairs and an index."""
    width, num = int(layer.max()) + 1, int(writer.max()) + 1
    if layer.min() < 0 or writer.min() < 0 or width * num > _MOST_CODES:
        pairs, first, code = np.unique(
            np.stack([writer, layer]), axis=1, return_index=True, return_inverse=True
        )
        return code.ravel(), pairs[0], first
    pair = writer * width + layer
    codes = np.full(width * num, -1, dtype=np.int64)
    codes[pair] = np.arange(len(pair))  # any of them
    distinct = np.flatnonzero(codes >= 0)
    first = codes[distinct]
    codes[distinct] = np.arange(len(distinct))
    return codes[pair], distinct, first


class _WindowReader:
    """Reads the values of windows."""

    def __init__(
        self,
        moment: ReadSnapshot,
        curve: CurveRequest,
        attempts: Sequence[AttemptRow],
        branch: Branch,
    ) -> None:
        self.layers = _LayerOrder(moment.sql, curve.span.run_id)
        self._numbers = moment.numbers
        self._end_of = make_lineage_end_lookup(attempts)
        self._branch = branch
        ratio = ["update_norm", "weight_norm"]
        self._columns = ratio if curve.column == RATIO else [curve.column]

    def load_window(self, window: RowSpan, *, is_timed: bool = False) -> _WindowRows:
        """Query the values of layers in a window of a heat map's steps.

        The times take as long to read as all other columns, and are read only if some rows may
        replace others.
        """
        keys = ("step", "attempt", *self.layers.needs, *(("time_unix_ns",) if is_timed else ()))
        columns = self._numbers.scan(window, [*keys, *self._columns])
        value, is_wanted = metric_values(columns, self._columns)
        step, attempt = (
            columns[name].values.astype(np.int64, copy=False) for name in ("step", "attempt")
        )
        is_kept = is_of_lineage(attempt, step, self._end_of)
        if self._branch != "all":
            is_wanted &= is_kept if self._branch == "lineage" else ~is_kept
        if not is_wanted.all():
            columns = {name: column.take(is_wanted) for name, column in columns.items()}
            step, attempt, is_kept = step[is_wanted], attempt[is_wanted], is_kept[is_wanted]
            value = value[is_wanted]
        if not len(step):
            return _WindowRows(step, step, value, is_kept)
        row, is_rising = self.layers.rows(columns)
        if is_rising:
            return _WindowRows(row, step, value, is_kept)
        if not is_timed:
            return self.load_window(window, is_timed=True)
        which = self._newest(row, step, attempt, columns["time_unix_ns"].values)
        return _WindowRows(row[which], step[which], value[which], is_kept[which])

    def _newest(self, row: Ints, step: Ints, attempt: Ints, time: Ints) -> Ints:
        """Return the latest row per layer and step (and attempt, except in a lineage), by step."""
        order = np.lexsort((time, attempt, row, step))
        keys = [step[order], row[order]]
        if self._branch != "lineage":
            keys.append(attempt[order])
        is_last = np.ones(len(order), dtype=np.bool_)
        is_last[:-1] = np.any([key[:-1] != key[1:] for key in keys], axis=0)
        return order[is_last]


# ------------------------------------------------------------------------------------ filling


class _HeatmapFiller:
    """Adds values to cells once the steps of each column are known."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._steps = np.zeros(0, dtype=np.int64)
        self._held: list[_WindowRows] = []
        """Rows that arrived before there were more steps than columns."""
        self._grids: tuple[HeatmapGrid, HeatmapGrid] | None = None
        """Cells of the lineage, and of discarded rows."""
        self._rolled_back: tuple[int, int] | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are more steps than columns, and the end of the last column is unknown."""
        return self._grids is None and len(self._steps) > self._points

    def add(self, rows: _WindowRows) -> None:
        """Add the values of further steps to the heat map."""
        if self._grids is not None:
            self._add_to_grids(rows, self._grids)
        elif len(rows.step):
            self._held.append(rows)
            is_new = np.append(True, rows.step[1:] != rows.step[:-1])
            self._steps = np.concatenate([self._steps, rows.step[is_new]])

    def draw_columns(self, last: _WindowRows | None) -> None:
        """Set equally wide columns of the heat map, up to the end of the last rows."""
        steps = last.step if last and len(last.step) else self._steps
        self._create_grids(even_starts(int(self._steps[0]), int(steps[-1]), self._points))

    def finish(self, num_rows: int) -> tuple[Ints, CellExtremes, tuple[int, int] | None]:
        """Return the filled heat map: the columns' first steps, the cells, and discarded steps."""
        lineage_grid, discarded_grid = self._grids or self._create_grids(self._steps)
        extremes = lineage_grid.extremes(num_rows).with_discarded(discarded_grid.extremes(num_rows))
        return lineage_grid.starts, extremes, self._rolled_back

    def _create_grids(self, starts: Ints) -> tuple[HeatmapGrid, HeatmapGrid]:
        """Create the heat map's cells for these columns, and add the values that waited."""
        self._grids = grids = HeatmapGrid(starts), HeatmapGrid(starts)
        for rows in self._held:
            self._add_to_grids(rows, grids)
        self._held.clear()
        return grids

    def _add_to_grids(self, rows: _WindowRows, grids: tuple[HeatmapGrid, HeatmapGrid]) -> None:
        """Add values to the heat map's cells, those of discarded steps separately."""
        row, step, value, is_kept = rows
        if not is_kept.all():
            again = ~is_kept
            grids[1].add(row[again], step[again], value[again])
            low, high = int(step[again].min()), int(step[again].max())
            before = self._rolled_back or (low, high)
            self._rolled_back = min(low, before[0]), max(high, before[1])
            row, step, value = row[is_kept], step[is_kept], value[is_kept]
        for begin, end in _by_column(step, grids[0].starts):
            grids[0].add(row[begin:end], step[begin:end], value[begin:end])


def _by_column(step: Ints, starts: Ints) -> Iterator[tuple[int, int]]:
    """Yield the row range of each column of the heat map, or one for all if there are few."""
    bounds = np.unique(np.searchsorted(step, starts))
    if len(step) < _MIN_APART * len(bounds):
        yield 0, len(step)
        return
    yield from pairwise([0, *bounds[(bounds > 0) & (bounds < len(step))].tolist(), len(step)])


def _is_rising(step: Ints, layer: Ints) -> bool:
    """Return whether no layer of the heat map has a step twice."""
    is_next = step[1:] > step[:-1]
    is_same = (step[1:] == step[:-1]) & (layer[1:] > layer[:-1])
    return bool(np.all(is_next | is_same))


def metric_values(columns: Columns, names: Sequence[str]) -> tuple[Floats, Mask]:
    """Return the values that a heat map of layers shows: of a column, or a ratio of two."""
    values = [columns[name].values.astype(np.float64, copy=False) for name in names]
    if len(names) == 1:
        return values[0], ~columns[names[0]].is_missing
    is_there = ~np.logical_or.reduce([columns[name].is_missing for name in names])
    with np.errstate(divide="ignore", invalid="ignore"):
        return values[0] / values[1], is_there


def layer_names(connection: Connection, run_id: str) -> dict[tuple[str, int], str]:
    """Query the names of a run's layers, by incarnation and number."""
    table = names.c
    query = select(table.incarnation, table.id, table.name).where(
        table.run_id == run_id, table.stream == "layers"
    )
    return {(incarnation, number): name for incarnation, number, name in connection.execute(query)}
