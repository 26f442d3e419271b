"""Keeps in memory what the curves of compacted batches look like from afar.

A run grows at its end: what was compacted stays as it is, so that who asks for an overview again
has only to read what is new. A batch is known by its writer, its numbers and its limits: what a
writer wrote under a number never changes, and a batch that was joined with others, cut or thinned
has other rows. Only the numbers over all ranks are rewritten as they lie; those are never kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, select

from vitals_collector.queries.select import HOST_STREAMS, Part, Selection, some_at_once
from vitals_collector.queries.series import Ints, Points, join
from vitals_collector.retention.rollup import RANKS
from vitals_collector.storage.columns import MARK, SUMMARY
from vitals_collector.storage.read_rows import HEAD, whole_heads
from vitals_collector.storage.schema import batch_columns

MOST_BYTES = 64 << 20
"""About what the outlines of 300 columns of a million steps take."""
_ARRAY_BYTES = 112
_AROUND_BYTES = 4 * _ARRAY_BYTES + 300
"""What an outline takes beside its numbers."""


class ChunkSummary(NamedTuple):
    """One column of one compacted batch."""

    points: Points | None
    """The extremes of each stretch, both ends, and what is not finite, in their order; None where
    the rows are to be read instead."""
    num_drawn: int
    """How many extremes there are."""
    num_values: int
    """How many values the batch has."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return _AROUND_BYTES + 32 * (0 if self.points is None else len(self.points))


_NOT_SUMMED = ChunkSummary(None, 0, 0)
Columns = Mapping[str, ChunkSummary | None]
"""What is known of a batch; None says that no row of it has the column."""
_Key = tuple[str, str, Part]


class ChunkSummaryCache:
    """The outlines that were asked for last, in bounded memory. For any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Columns] = OrderedDict()

    def of(
        self,
        connection: Connection,
        selections: Sequence[Selection],
        part_lists: Sequence[Sequence[Part]],
    ) -> list[dict[int, ChunkSummary]]:
        """Return each curve's outlines by batch; a batch that has not the column is left out.

        Args:
            connection: the moment of the store in which the batches were found.
            selections: the curves.
            part_lists: the batches of each (``parts.find``).
        """
        names: dict[int, set[str]] = {}
        for selection, parts in zip(selections, part_lists, strict=True):
            names.setdefault(id(parts), set()).add(selection.column)
        looked: dict[int, dict[int, Columns]] = {}
        for selection, parts in zip(selections, part_lists, strict=True):
            if id(parts) not in looked:
                looked[id(parts)] = self._look(connection, selection, parts, names[id(parts)])
        return [
            {
                batch: outline
                for batch, columns in looked[id(parts)].items()
                if (outline := columns[selection.column]) is not None
            }
            for selection, parts in zip(selections, part_lists, strict=True)
        ]

    def _look(
        self, connection: Connection, of: Selection, parts: Sequence[Part], names: set[str]
    ) -> dict[int, Columns]:
        compacted = [part for part in parts if part.is_columnar]
        looked, missing = self._known(of, compacted, names)
        if missing:
            read = _read(connection, of, missing, names)
            looked.update(read)
            if of.stream != RANKS:
                self._keep(((of.run_id, of.stream, part), read[part.id]) for part in missing)
        return looked

    def _known(
        self, of: Selection, parts: Iterable[Part], names: set[str]
    ) -> tuple[dict[int, Columns], list[Part]]:
        columns_by_batch: dict[int, Columns] = {}
        missing = []
        with self._lock:
            for part in parts:
                key = of.run_id, of.stream, part
                columns = self._kept.get(key)
                if columns is None or not names <= columns.keys():
                    missing.append(part)
                else:
                    self._kept.move_to_end(key)
                    columns_by_batch[part.id] = columns
        return columns_by_batch, missing

    def _keep(self, read: Iterable[tuple[_Key, Columns]]) -> None:
        with self._lock:
            for key, columns in read:
                before = self._kept.pop(key, {})
                self._kept[key] = {**before, **columns}
                self.num_bytes += _num_bytes(self._kept[key]) - _num_bytes(before)
            while self.num_bytes > self._most_bytes:
                _, evicted = self._kept.popitem(last=False)
                self.num_bytes -= _num_bytes(evicted)


def _num_bytes(columns: Columns) -> int:
    return sum(
        _ARRAY_BYTES if outline is None else outline.num_bytes for outline in columns.values()
    )


class _Head(NamedTuple):
    """What lies beside a column of a batch (``columns.ColumnChunk``)."""

    batch: int
    attempt: int
    summary: bytes
    marks: bytes


def _read(
    connection: Connection, of: Selection, parts: Sequence[Part], names: set[str]
) -> Mapping[int, Columns]:
    """Return what the batches have of the columns."""
    attempts = {part.id: part.min_attempt for part in parts}
    heads: dict[str, list[_Head]] = {name: [] for name in names}
    query = select(*HEAD).where(batch_columns.c.name.in_(sorted(names)))
    for batch_ids in some_at_once(list(attempts)):
        read = whole_heads(connection, query.where(batch_columns.c.batch_id.in_(batch_ids)))
        for batch, name, summary, marks in read:
            heads[name].append(_Head(batch, attempts[batch], summary, marks))
    columns_by_batch: dict[int, dict[str, ChunkSummary | None]] = {
        p.id: dict.fromkeys(names) for p in parts
    }
    for name, of_column in heads.items():
        for head in of_column:
            columns_by_batch[head.batch][name] = _NOT_SUMMED
        summed = [head for head in of_column if head.summary and head.marks]
        outlines = _outlines_of(summed, is_by_time=of.stream in HOST_STREAMS)
        for head, outline in zip(summed, outlines, strict=True):
            columns_by_batch[head.batch][name] = outline
    return columns_by_batch


def _outlines_of(heads: Sequence[_Head], *, is_by_time: bool) -> list[ChunkSummary]:
    """Return the outline of each; all at once, for numpy's own price is paid for each call."""
    if not heads:
        return []
    entries = np.frombuffer(b"".join(head.summary for head in heads), dtype=SUMMARY)
    nums = [len(head.summary) // SUMMARY.itemsize for head in heads]
    attempts = np.array([head.attempt for head in heads], dtype=np.int64)
    parts = [_extremes(entries, np.repeat(np.arange(len(heads)), nums)), _marks(heads)]
    points = join(parts)  # whose attempts are the numbers of the heads so far
    along = points.time_unix_ns if is_by_time else points.step
    points = points.take(np.lexsort((along, points.attempt)))
    if not is_by_time:  # a step has one row, which may be an end and an extreme as well
        is_last = (np.diff(points.step) != 0) | (np.diff(points.attempt) != 0)
        points = points.take(np.append(is_last, True))
    ends = np.searchsorted(points.attempt, np.arange(len(heads) + 1)).tolist()
    num_values = np.add.reduceat(entries["num"].astype(np.int64), np.cumsum([0, *nums[:-1]]))
    outlines = []
    for i, num in enumerate(num_values.tolist()):
        # Copied, so that what is forgotten frees its room whatever was read with it.
        head_points = points.take(np.arange(ends[i], ends[i + 1]))
        own = replace(head_points, attempt=np.full(len(head_points), attempts[i]))
        outlines.append(ChunkSummary(own, 2 * nums[i], num))
    return outlines


def _extremes(entries: npt.NDArray[np.void], owner: Ints) -> Points:
    """Return the least and the greatest value of each entry, in their order."""
    steps = np.stack([entries["low_step"], entries["high_step"]], axis=1)
    times = np.stack([entries["low_time"], entries["high_time"]], axis=1)
    values = np.stack([entries["low"], entries["high"]], axis=1)
    is_kept = np.isfinite(values)
    is_same = (steps[:, 0] == steps[:, 1]) & (times[:, 0] == times[:, 1])
    is_kept[:, 1] &= ~is_same
    points = Points(steps.ravel(), np.repeat(owner, 2), times.ravel(), values.ravel())
    return points.take(is_kept.ravel())


def _marks(heads: Sequence[_Head]) -> Points:
    """Return both ends of each, and its values that are not finite."""
    marks = np.frombuffer(b"".join(head.marks for head in heads), dtype=MARK)
    nums = [len(head.marks) // MARK.itemsize for head in heads]
    owner = np.repeat(np.arange(len(heads)), nums)
    return Points(marks["step"], owner, marks["time"], marks["value"])


__all__ = ["MOST_BYTES", "ChunkSummary", "ChunkSummaryCache"]
