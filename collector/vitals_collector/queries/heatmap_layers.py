"""Reads one column of all layers at once: layers have no summaries, so their rows are decoded.

What is decoded goes into the map's cells at once, some thousand rows at a time, so that neither
time nor memory grows with the number of pieces. That is right only for rows that no other row of
the same layer and step replaces: most batches overlap no other one, and of a step that a writer's
next batch goes on with, the rows wait. These, and all that does overlap, are stitched at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from trainvitals.views import Branch
from vitals_collector.queries.heatmap_cells import Drawn, Grid, even_starts
from vitals_collector.queries.load_curve import Selection
from vitals_collector.queries.read_columns import KEYS, ColumnBlock, Part, find_parts, read_blocks
from vitals_collector.queries.series import AttemptRow, Floats, Ints, Mask, ends, is_of_lineage
from vitals_collector.storage.schema import names

RATIO = "update_ratio"
_MAX_NUMBER = 4_096
"""Layers of lower numbers, which is all in practice, are looked up in an array."""


def load(
    connection: Connection,
    selection: Selection,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    points: int,
) -> Drawn:
    """Return the layers in the model's own order."""
    named = layer_names(connection, selection.run_id)
    spans = _spans(connection, selection, attempts, branch)
    families = _families(named, spans)
    calm, others, shared = _sorted_out(_clusters(spans, families, _lines(spans, branch)))
    source = _Source(connection, selection, attempts, branch, named)
    filling = _Filling(source, calm, points)
    for rows in source.read(others):
        filling.wait(rows)
    for rows in source.read(calm, is_timed=False):
        span = rows.span
        if not _is_rising(rows.step, rows.layer):
            filling.wait(rows)
        elif span.low in shared or span.high in shared:
            is_shared = np.isin(rows.step, [s for s in (span.low, span.high) if s in shared])
            filling.wait(rows.take(is_shared))
            filling.add(rows.take(~is_shared))
        else:
            filling.add(rows)
    names, starts, extremes, rolled_back = filling.finish()
    is_there = [
        i for i in source.rows.order() if (extremes.is_marked[i] | ~np.isnan(extremes.low[i])).any()
    ]
    return Drawn([names[i] for i in is_there], starts, extremes.take(is_there), rolled_back)


# ------------------------------------------------------------------------------ which overlap


class _Span(NamedTuple):
    """The wanted steps of a batch, as far as the batch itself tells."""

    low: int
    high: int
    place: int
    """Among all, by writer and as they were written: of rows of one time the last one stays."""
    part: Part


def _spans(
    connection: Connection, selection: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> list[_Span]:
    """Return the batches that may have rows of the branch, by step."""
    low, high = selection.from_step, selection.to_step
    end_of = ends(attempts)
    spans = []
    parts = find_parts(connection, selection.run_id, "layers", from_step=low, to_step=high)
    for place, part in enumerate(parts):
        first = part.min_step if low is None else max(part.min_step, low)
        last = part.max_step if high is None else min(part.max_step, high)
        end = end_of(part.min_attempt)
        if part.min_attempt == part.max_attempt and branch == "lineage" and last >= end:
            last = int(max(end, first)) - 1
        elif part.min_attempt == part.max_attempt and branch == "discarded" and first < end:
            first = int(min(end, last + 1))
        if first <= last:
            spans.append(_Span(first, last, place, part))
    return sorted(spans)


def _families(named: Mapping[tuple[str, int], str], spans: Sequence[_Span]) -> dict[str, int]:
    """Return a number for each writer: those of one number may have layers in common."""
    layers_of: dict[str, set[str]] = {span.part.incarnation: set() for span in spans}
    for (incarnation, _), name in named.items():
        if incarnation in layers_of:
            layers_of[incarnation].add(name)
    families: list[tuple[set[str], set[str]]] = []
    for writer, layers in layers_of.items():
        writers, common = {writer}, set(layers)
        apart = []
        for family in families:
            if layers and family[1].isdisjoint(layers):
                apart.append(family)
            else:
                writers |= family[0]
                common |= family[1]
        families = [*apart, (writers, common)]
    if not all(layers_of.values()):
        return dict.fromkeys(layers_of, 0)
    return {writer: i for i, (writers, _) in enumerate(families) for writer in writers}


def _lines(spans: Sequence[_Span], branch: Branch) -> dict[int, int]:
    """Return a number for each attempt: rows of those of one number may replace each other.

    Of the lineage the newer attempt's row stays; else each attempt has its own, and only batches
    with rows of several attempts keep these together.
    """
    lines: dict[int, int] = {}
    number, end = 0, -1
    for first, last in sorted({(s.part.min_attempt, s.part.max_attempt) for s in spans}):
        if branch != "lineage" and first > end:
            number += 1
        lines[first] = number
        end = max(end, last)
    return lines


def _sorted_out(
    clusters: Sequence[Sequence[_Span]],
) -> tuple[list[_Span], list[_Span], set[int]]:
    """Return the columnar batches that overlap none, the others, and steps at which some touch."""
    calm: list[_Span] = []
    others: list[_Span] = []
    shared: set[int] = set()
    for cluster in clusters:
        writers = {(s.part.incarnation, s.part.min_attempt, s.part.max_attempt) for s in cluster}
        pairs = list(pairwise(cluster))
        _, first_attempt, last_attempt = min(writers)
        if (
            len(writers) > 1
            or first_attempt != last_attempt
            or any(b.low < a.high for a, b in pairs)
        ):
            others += cluster
            continue
        shared |= {b.low for _, b in pairs}
        for span in cluster:
            (calm if span.part.is_columnar else others).append(span)
    return calm, sorted(others, key=lambda span: span.place), shared


def _clusters(
    spans: Sequence[_Span], family_of: Mapping[str, int], line_of: Mapping[int, int]
) -> list[list[_Span]]:
    """Return together what has steps in common with another batch of the family and the line."""
    clusters: list[list[_Span]] = []
    newest: dict[tuple[int, int], tuple[list[_Span], int]] = {}
    for span in spans:
        family = family_of[span.part.incarnation], line_of[span.part.min_attempt]
        cluster, end = newest.get(family, ([], span.low - 1))
        if span.low > end:
            cluster = []
            clusters.append(cluster)
        cluster.append(span)
        newest[family] = cluster, max(end, span.high)
    return clusters


# ------------------------------------------------------------------------------------ reading


class _Rows(NamedTuple):
    """Measured values of one batch, of the branch and the wanted steps."""

    span: _Span
    row: Ints
    layer: Ints
    step: Ints
    attempt: Ints
    time_unix_ns: Ints
    value: Floats

    def take(self, which: Mask | Ints) -> "_Rows":
        """Return the chosen ones."""
        row, layer, step = self.row[which], self.layer[which], self.step[which]
        attempt, time = self.attempt[which], self.time_unix_ns[which]
        return _Rows(self.span, row, layer, step, attempt, time, self.value[which])


class _Numbering:
    """Gives each layer its row in the map, as layers are met."""

    def __init__(self, named: Mapping[tuple[str, int], str]) -> None:
        self.names: list[str] = []
        self._named = named
        self._row_of: dict[str, int] = {}
        self._places: list[tuple[int, str, int]] = []
        self._known: dict[str, Ints] = {}

    def rows(self, source: str, incarnation: str, layer: Ints) -> Ints:
        """Return the row of each of the layers' numbers."""
        if layer.min() < 0 or layer.max() >= _MAX_NUMBER:
            numbers, which = np.unique(layer, return_inverse=True)
            of_numbers = [self._row(source, incarnation, number) for number in numbers.tolist()]
            return np.array(of_numbers, dtype=np.int64)[which]
        row_of = self._known.get(incarnation)
        if row_of is None:
            row_of = self._known[incarnation] = np.full(_MAX_NUMBER, -1, dtype=np.int64)
        rows = row_of[layer]
        if rows.min() >= 0:
            return rows
        for number in np.unique(layer[rows < 0]).tolist():
            row_of[number] = self._row(source, incarnation, number)
        return row_of[layer]

    def order(self) -> list[int]:
        """Return the rows by source, then by the lowest number that the layer had."""
        return sorted(range(len(self.names)), key=self._places.__getitem__)

    def _row(self, source: str, incarnation: str, number: int) -> int:
        name = self._named.get((incarnation, number), f"layer {number}")
        place = (len(source), source, number)  # rank:2 before rank:10
        row = self._row_of.setdefault(name, len(self.names))
        if row == len(self.names):
            self.names.append(name)
            self._places.append(place)
        self._places[row] = min(self._places[row], place)
        return row


class _Source:
    """Reads the values of batches."""

    def __init__(
        self,
        connection: Connection,
        selection: Selection,
        attempts: Sequence[AttemptRow],
        branch: Branch,
        named: Mapping[tuple[str, int], str],
    ) -> None:
        self.rows = _Numbering(named)
        self.branch = branch
        self.end_of = ends(attempts)
        self._connection = connection
        self._selection = selection

    def read(self, spans: Sequence[_Span], *, is_timed: bool = True) -> Iterator[_Rows]:
        """Yield the values of some batches at a time, in the order given; none is empty.

        The times are as much to read as all the rest. Without them rows have their batch's first
        time, at its last step its last one: that says which batch of a writer is the newer one.
        """
        keys = KEYS if is_timed else ("step", "attempt")
        selection, span_of = self._selection, {span.part.id: span for span in spans}
        columns = (
            ["update_norm", "weight_norm"] if selection.column == RATIO else [selection.column]
        )
        for block in read_blocks(
            self._connection,
            [span.part for span in spans],
            [*keys, "layer", *columns],
            from_step=selection.from_step,
            to_step=selection.to_step,
        ):
            value, is_kept = value_of(block, columns)
            span = span_of[int(block.batch[0])]
            if not self._is_whole(span):
                is_kept &= self._is_of_branch(block)
            if not is_kept.all():
                block, value = block.take(is_kept), value[is_kept]
            if len(block):
                yield self._rows(block, span, value, is_timed=is_timed)

    def _rows(self, block: ColumnBlock, span: _Span, value: Floats, *, is_timed: bool) -> _Rows:
        step, attempt, layer = (block.whole(name) for name in ("step", "attempt", "layer"))
        row = self.rows.rows(block.source, block.incarnation, layer)
        if is_timed:
            time = block.whole("time_unix_ns")
        else:
            first, last = span.part.min_time_unix_ns, span.part.max_time_unix_ns
            time = np.where(step == span.part.max_step, last, first)
        return _Rows(span, row, layer, step, attempt, time, value)

    def _is_whole(self, span: _Span) -> bool:
        """Return whether all rows of the span's block are of the branch."""
        part = span.part
        is_uncut = (span.low, span.high) == (part.min_step, part.max_step)
        is_pure = part.is_columnar and part.min_attempt == part.max_attempt
        return self.branch == "all" or (is_pure and is_uncut)

    def _is_of_branch(self, block: ColumnBlock) -> Mask:
        is_kept = is_of_lineage(block.whole("attempt"), block.whole("step"), self.end_of)
        return ~is_kept if self.branch == "discarded" else is_kept


class _Filling:
    """Puts values into cells, as soon as it is known which steps a column has."""

    def __init__(self, source: _Source, calm: Sequence[_Span], points: int) -> None:
        self._source = source
        self._calm = calm
        self._points = points
        self._steps = np.zeros(0, dtype=np.int64)
        self._held: list[_Rows] = []
        """What came before there were more steps than columns."""
        self._waiting: list[_Rows] = []
        self._grids: tuple[Grid, Grid] | None = None
        """Of the lineage, and of what was rolled back."""
        self._rolled_back: tuple[int, int] | None = None

    def wait(self, rows: _Rows) -> None:
        """Take in values that others of the same layer and step may replace."""
        if len(rows.step):
            self._waiting.append(rows)

    def add(self, rows: _Rows) -> None:
        """Take in values that none replaces."""
        if not len(rows.step):
            return
        if self._grids is None:
            self._held.append(rows)
            self._steps = np.union1d(self._steps, rows.step)
            if len(self._steps) <= self._points:
                return
            self._begin(even_starts(self._end(1), self._end(-1), self._points))
        else:
            self._put(rows, self._grids)

    def finish(self) -> Drawn:
        """Return all layers, in the order in which they were met."""
        for rows in self._stitched():
            self.add(rows)
        kept, left = self._grids or self._begin(self._steps)
        names = self._source.rows.names
        extremes = kept.extremes(len(names)).with_discarded(left.extremes(len(names)))
        return Drawn(names, kept.starts, extremes, self._rolled_back)

    def _begin(self, starts: Ints) -> tuple[Grid, Grid]:
        self._grids = grids = Grid(starts), Grid(starts)
        for rows in self._held:
            self._put(rows, grids)
        self._held.clear()
        return grids

    def _put(self, rows: _Rows, grids: tuple[Grid, Grid]) -> None:
        is_kept = is_of_lineage(rows.attempt, rows.step, self._source.end_of)
        if not is_kept.all():
            again, rows = rows.take(~is_kept), rows.take(is_kept)
            grids[1].add(again.row, again.step, again.value)
            low, high = int(again.step.min()), int(again.step.max())
            before = self._rolled_back or (low, high)
            self._rolled_back = min(low, before[0]), max(high, before[1])
        grids[0].add(rows.row, rows.step, rows.value)

    def _end(self, sign: int) -> int:
        """Return the first step that has a value, or with -1 the last one."""
        edges = [int((sign * rows.step).min()) for rows in (*self._waiting, *self._held)]
        best = min(edges)
        sides = [(span.low if sign > 0 else -span.high, span) for span in self._calm]
        sides.sort(key=lambda side: side[0])
        nearest = {span.part.id: side for side, span in sides}
        candidates = [span for side, span in sides if side < best]
        for rows in self._source.read(candidates, is_timed=False):
            if nearest[rows.span.part.id] >= best:
                break
            best = min(best, int((sign * rows.step).min()))
        return sign * best

    def _stitched(self) -> list[_Rows]:
        """Return what waited, of a layer's step (and attempt, but of a lineage) the newest row."""
        waiting, self._waiting = sorted(self._waiting, key=lambda rows: rows.span.place), []
        if not waiting:
            return []
        rows = _join(waiting)
        if _is_rising(rows.step, rows.row):
            return [rows]
        rows = rows.take(np.lexsort((rows.time_unix_ns, rows.attempt, rows.step, rows.row)))
        is_last = np.ones(len(rows.step), dtype=np.bool_)
        is_last[:-1] = (rows.row[:-1] != rows.row[1:]) | (rows.step[:-1] != rows.step[1:])
        if self._source.branch != "lineage":
            is_last[:-1] |= rows.attempt[:-1] != rows.attempt[1:]
        return [rows.take(is_last)]


def _join(pieces: Sequence[_Rows]) -> _Rows:
    return _Rows(
        pieces[0].span,
        np.concatenate([rows.row for rows in pieces]),
        np.concatenate([rows.layer for rows in pieces]),
        np.concatenate([rows.step for rows in pieces]),
        np.concatenate([rows.attempt for rows in pieces]),
        np.concatenate([rows.time_unix_ns for rows in pieces]),
        np.concatenate([rows.value for rows in pieces]),
    )


def _is_rising(step: Ints, layer: Ints) -> bool:
    """Return whether no layer has a step twice: steps rise, and the layers within each."""
    is_next = step[1:] > step[:-1]
    is_same = (step[1:] == step[:-1]) & (layer[1:] > layer[:-1])
    return bool(np.all(is_next | is_same))


def value_of(block: ColumnBlock, columns: Sequence[str]) -> tuple[Floats, Mask]:
    """Return a block's values, of two columns their ratio, and which rows have one."""
    masks = [block.column(name).valid for name in columns]
    is_there = np.ones(len(block), dtype=bool)
    for mask in masks:
        is_there &= True if mask is None else mask
    value = block.numbers(columns[0])
    if len(columns) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = value / block.numbers(columns[1])
    return value, is_there


def layer_names(connection: Connection, run_id: str) -> dict[tuple[str, int], str]:
    """Return the name of each incarnation's numbers."""
    table = names.c
    query = select(table.incarnation, table.id, table.name).where(
        table.run_id == run_id, table.stream == "layers"
    )
    return {(incarnation, number): name for incarnation, number, name in connection.execute(query)}


__all__ = ["RATIO", "layer_names", "load", "value_of"]
