"""Reads one metric out of the store: every value, or what an overview of them needs.

An overview reads the summaries of compacted batches, two points for some hundred values each, and
the marks beside them, each value that is not finite. A batch is read in full where that would not
do: where too many values are not finite, where the branch or what is asked for ends within it, and
where another batch has rows of the same steps. So no spike and no NaN is lost that the rows have.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Select, select

from trainvitals.errors import FormatError
from trainvitals.rows import column_of
from trainvitals.views import Branch
from vitals_collector.queries.series import (
    AttemptRow,
    Ints,
    Mask,
    Points,
    by_time,
    ends,
    join,
    stitch,
)
from vitals_collector.storage.columns import MARK, SUMMARY, Values, decode_columns
from vitals_collector.storage.schema import batch_columns, batches
from vitals_collector.storage.stored import HEAD, is_columnar, read_columns, read_pages, whole_heads

HOST_STREAMS = ("gpu", "node", "process")
"""Streams that are ordered by time: their rows have no step."""

_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows of a run hold a metric."""

    run_id: str
    stream: str
    column: str
    source: str = ""
    """Only this source's rows; "" takes those of all."""
    key_column: str = ""
    """Only rows whose ``key_column`` has the incarnation's key, such as a scalar's name id."""
    keys: Mapping[str, int] | int = 0
    """The key: one for all, or one for each incarnation that knows it."""
    from_step: int | None = None
    to_step: int | None = None
    from_time_unix_ns: int | None = None
    to_time_unix_ns: int | None = None

    def key_of(self, incarnation: str) -> int | None:
        """Return the key in this incarnation's rows; None where it has none."""
        return self.keys if isinstance(self.keys, int) else self.keys.get(incarnation)


class Outlined(NamedTuple):
    """A curve of which an overview is wanted."""

    wanted: Selection
    branch: Branch
    num_points: int


class _Part(NamedTuple):
    """A batch that may hold some of it."""

    id: int
    source: str
    incarnation: str
    first_seq: int
    num_rows: int
    min_step: int
    max_step: int
    min_time_unix_ns: int
    max_time_unix_ns: int
    min_attempt: int
    max_attempt: int
    is_columnar: bool
    summary: bytes | None
    marks: bytes | None

    @property
    def is_summed(self) -> bool:
        """Whether an overview can do without its rows."""
        return bool(self.summary and self.marks)


_Cluster = list[_Part]
"""Batches whose steps overlap, by writer and in order; mostly a single one."""


def load(connection: Connection, wanted: Selection) -> Points:
    """Return every measured point of the selection, as good as ordered by step or time."""
    (parts,) = _find(connection, [wanted])
    clusters = _clusters(parts, wanted)
    return join(list(_read(connection, wanted, [part for some in clusters for part in some])))


def load_curve(
    connection: Connection, wanted: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    """Return every point of the branch in its order: by step, or by time where there is none."""
    return _arranged(load(connection, wanted), wanted, attempts, branch)


def load_outline(
    connection: Connection,
    wanted: Selection,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    num_points: int,
) -> tuple[Points, int]:
    """Return the curve, or at least ``num_points`` points of it that keep its shape.

    Every non-finite value, the ends, and the extremes of each stretch are among them.

    Returns:
        The points, and how many the whole curve has.
    """
    return load_outlines(connection, [Outlined(wanted, branch, num_points)], attempts)[0]


def load_outlines(
    connection: Connection, outlined: Sequence[Outlined], attempts: Sequence[AttemptRow]
) -> list[tuple[Points, int]]:
    """Return what ``load_outline`` does, of several curves of one run, in few searches."""
    found = _find(connection, [one.wanted for one in outlined])
    return [
        _outline(connection, one, attempts, parts)
        for one, parts in zip(outlined, found, strict=True)
    ]


def load_outlines_by_source(
    connection: Connection,
    wanted: Selection,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    num_points: int,
) -> dict[str, Points]:
    """Return what ``load_outline`` would, of every source that has rows, in one search."""
    by_source: dict[str, list[_Part]] = {}
    (found,) = _find(connection, [wanted])
    for part in found:
        by_source.setdefault(part.source, []).append(part)
    one = Outlined(wanted, branch, num_points)
    return {
        source: _outline(connection, one, attempts, parts)[0] for source, parts in by_source.items()
    }


def _outline(
    connection: Connection,
    outlined: Outlined,
    attempts: Sequence[AttemptRow],
    parts: Sequence[_Part],
) -> tuple[Points, int]:
    wanted, branch, num_points = outlined
    clusters = _clusters(parts, wanted)
    side_of = _sides(wanted, attempts, branch)
    summed = [c[0] for c in clusters if len(c) == 1 and c[0].is_summed and side_of(c[0]) == "in"]
    is_summed = {part.id for part in summed}
    others = [part for c in clusters for part in c if part.id not in is_summed]
    others = [part for part in others if side_of(part) != "out"]
    entries = _entries(summed)
    if 2 * len(entries) + sum(part.num_rows for part in others) < num_points:
        curve = join(list(_read(connection, wanted, [part for c in clusters for part in c])))
        curve = _arranged(curve, wanted, attempts, branch)
        return curve, len(curve)
    read = _arranged(join(list(_read(connection, wanted, others))), wanted, attempts, branch)
    drawn = [read, _extremes(summed, entries), _marks(summed)]
    curve = _arranged(join(drawn), wanted, attempts, branch)
    return curve, len(read) + int(entries["num"].sum())


def _arranged(
    points: Points, wanted: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    if wanted.stream in HOST_STREAMS:
        return by_time(points)
    return stitch(points, attempts, branch)


# ------------------------------------------------------------------------------------ finding


def _find(connection: Connection, wanted: Sequence[Selection]) -> list[list[_Part]]:
    """Return the batches to look into for each; curves of the same rows share the search."""
    alike: dict[tuple[Any, ...], list[Selection]] = {}
    for one in wanted:
        alike.setdefault(_rows_of(one), []).append(one)
    found = {key: _find_alike(connection, some) for key, some in alike.items()}
    return [found[_rows_of(one)][one.column] for one in wanted]


def _rows_of(wanted: Selection) -> tuple[Any, ...]:
    steps = wanted.from_step, wanted.to_step
    times = wanted.from_time_unix_ns, wanted.to_time_unix_ns
    return wanted.run_id, wanted.stream, wanted.source, steps, times


def _find_alike(connection: Connection, alike: Sequence[Selection]) -> dict[str, list[_Part]]:
    """Return the batches by column, of selections that differ in nothing else."""
    columns = sorted({one.column for one in alike})
    fields = (is_columnar if n == "is_columnar" else batches.c[n] for n in _Part._fields[:-2])
    rows = connection.execute(_narrowed(select(*fields), alike[0]))
    bare = [_Part._make((*row, None, None)) for row in rows]
    table = batch_columns.c
    of_columns = select(*HEAD)
    of_columns = of_columns.join(batches, table.batch_id == batches.c.id)
    of_columns = _narrowed(of_columns, alike[0]).where(table.name.in_(columns))
    there: dict[str, dict[int, tuple[bytes | None, bytes | None]]] = {name: {} for name in columns}
    for batch_id, name, summary, marks in whole_heads(connection, of_columns):
        there[name][batch_id] = (summary, marks)
    none = (None, None)
    # A compacted batch without the column has no value of it.
    return {
        name: [
            part._replace(summary=summary, marks=marks)
            for part in bare
            for summary, marks in (found.get(part.id, none),)
            if summary is not None or not part.is_columnar
        ]
        for name, found in there.items()
    }


def _narrowed(query: Select[Any], wanted: Selection) -> Select[Any]:
    query = query.where(batches.c.run_id == wanted.run_id, batches.c.stream == wanted.stream)
    if wanted.source:
        query = query.where(batches.c.source == wanted.source)
    if wanted.from_step is not None:
        query = query.where(batches.c.max_step >= wanted.from_step)
    if wanted.to_step is not None:
        query = query.where(batches.c.min_step <= wanted.to_step)
    if wanted.from_time_unix_ns is not None:
        query = query.where(batches.c.max_time_unix_ns >= wanted.from_time_unix_ns)
    if wanted.to_time_unix_ns is not None:
        query = query.where(batches.c.min_time_unix_ns <= wanted.to_time_unix_ns)
    return query


def _clusters(parts: Iterable[_Part], wanted: Selection) -> list[_Cluster]:
    """Return the batches in the order of their steps, or of their times; together what overlaps."""
    clusters: list[_Cluster] = []
    end = 0
    if wanted.stream in HOST_STREAMS:
        spans = [(p.min_time_unix_ns, p.max_time_unix_ns, p) for p in parts]
    else:
        spans = [(p.min_step, p.max_step, p) for p in parts]
    for first, last, part in sorted(spans):
        if clusters and first <= end:
            clusters[-1].append(part)
            end = max(end, last)
        else:
            clusters.append([part])
            end = last
    for some in clusters:
        some.sort(key=lambda part: (part.incarnation, part.first_seq))
    return clusters


def _sides(
    wanted: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Callable[[_Part], Literal["in", "out", "both"]]:
    """Return what says whether a batch's rows are wanted: all, none, or perhaps some."""
    end_of = ends(attempts)
    low, since = (
        -math.inf if begin is None else begin
        for begin in (wanted.from_step, wanted.from_time_unix_ns)
    )
    high, until = (
        math.inf if end is None else end for end in (wanted.to_step, wanted.to_time_unix_ns)
    )

    def side_of(part: _Part) -> Literal["in", "out", "both"]:
        is_cut = part.min_step < low or part.max_step > high
        is_cut |= part.min_time_unix_ns < since or part.max_time_unix_ns > until
        if wanted.stream in HOST_STREAMS:
            return "both" if is_cut else "in"
        end = end_of(part.min_attempt) if branch != "all" else math.inf
        is_split = part.min_attempt != part.max_attempt or part.min_step < end <= part.max_step
        if branch != "all" and not is_split and (part.max_step < end) != (branch == "lineage"):
            return "out"
        return "both" if is_split or is_cut else "in"

    return side_of


# ----------------------------------------------------------------------------------- outlining


def _entries(summed: Sequence[_Part]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(part.summary or b"" for part in summed), dtype=SUMMARY)


def _attempts(summed: Sequence[_Part], nums: Sequence[int]) -> Ints:
    return np.repeat(np.array([part.min_attempt for part in summed], dtype=np.int64), nums)


def _extremes(summed: Sequence[_Part], entries: npt.NDArray[np.void]) -> Points:
    """Return the least and the greatest value of each entry, in their order."""
    steps = np.stack([entries["low_step"], entries["high_step"]], axis=1)
    times = np.stack([entries["low_time"], entries["high_time"]], axis=1)
    values = np.stack([entries["low"], entries["high"]], axis=1)
    nums = [2 * len(part.summary or b"") // SUMMARY.itemsize for part in summed]
    is_kept = np.isfinite(values)
    is_same = (steps[:, 0] == steps[:, 1]) & (times[:, 0] == times[:, 1])
    is_kept[:, 1] &= ~is_same
    points = Points(steps.ravel(), _attempts(summed, nums), times.ravel(), values.ravel())
    return points.take(is_kept.ravel())


def _marks(summed: Sequence[_Part]) -> Points:
    """Return the ends of each part, and its values that are not finite."""
    found = np.frombuffer(b"".join(part.marks or b"" for part in summed), dtype=MARK)
    nums = [len(part.marks or b"") // MARK.itemsize for part in summed]
    return Points(found["step"], _attempts(summed, nums), found["time"], found["value"])


# ------------------------------------------------------------------------------------ reading


def _read(connection: Connection, wanted: Selection, parts: Iterable[_Part]) -> Iterator[Points]:
    for is_columns, alike in groupby(parts, key=lambda part: part.is_columnar):
        some = list(alike)
        for i in range(0, len(some), _AT_ONCE):
            read = _read_columns if is_columns else _read_rows
            yield from read(connection, wanted, some[i : i + _AT_ONCE])


def _read_columns(
    connection: Connection, wanted: Selection, parts: Sequence[_Part]
) -> Iterator[Points]:
    names = ["step", "attempt", "time_unix_ns", wanted.column]
    names += [wanted.key_column] if wanted.key_column else []
    chunks = read_columns(connection, [part.id for part in parts], names)
    for part in parts:
        if part.id not in chunks:
            continue  # damaged
        found: dict[str, _Column] = {
            chunk.name: (values, valid)
            for chunk, values, valid in decode_columns(chunks[part.id], part.num_rows)
        }
        for name in names:  # what no row has reads as zero
            found.setdefault(name, (np.zeros(part.num_rows, dtype=np.int64), None))
        yield from _kept(found.__getitem__, wanted, part.incarnation)


def _read_rows(
    connection: Connection, wanted: Selection, parts: Sequence[_Part]
) -> Iterator[Points]:
    ids = batches.c.id.in_([part.id for part in parts])
    pages = read_pages(connection, ids, order_by=(batches.c.incarnation, batches.c.first_seq))
    for (incarnation, _), alike in groupby(pages, key=lambda p: (p.incarnation, id(p.schema))):
        some = list(alike)
        rows, schema = np.concatenate([page.rows for page in some]), some[0].schema
        yield from _kept(partial(column_of, schema, rows), wanted, incarnation)


_Column = tuple[Values, Mask | None]


def _kept(
    column: Callable[[str], _Column], wanted: Selection, incarnation: str
) -> Iterator[Points]:
    """Yield the measured values among some rows of one writer that the selection asks for."""
    values, valid = column(wanted.column)
    if values.dtype.kind not in "fi":
        raise FormatError(f"{wanted.stream}.{wanted.column} is text, not a number")
    steps = _whole(column, "step")
    masks = [] if valid is None else [valid]
    if wanted.key_column:
        key = wanted.key_of(incarnation)
        if key is None:
            return
        masks.append(_whole(column, wanted.key_column) == key)
    if wanted.from_step is not None:
        masks.append(steps >= wanted.from_step)
    if wanted.to_step is not None:
        masks.append(steps <= wanted.to_step)
    attempts, times = _whole(column, "attempt"), _whole(column, "time_unix_ns")
    if wanted.from_time_unix_ns is not None:
        masks.append(times >= wanted.from_time_unix_ns)
    if wanted.to_time_unix_ns is not None:
        masks.append(times <= wanted.to_time_unix_ns)
    points = Points(steps, attempts, times, values.astype(np.float64, copy=False))
    yield points.take(np.logical_and.reduce(masks)) if masks else points


def _whole(column: Callable[[str], _Column], name: str) -> Ints:
    return column(name)[0].astype(np.int64, copy=False)


__all__ = [
    "HOST_STREAMS",
    "Outlined",
    "Selection",
    "load",
    "load_curve",
    "load_outline",
    "load_outlines",
    "load_outlines_by_source",
]
