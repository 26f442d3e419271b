"""Reads one metric out of the stored batches: decode, merge incarnations, stitch, downsample.

Chunks are read a few hundred at a time and only the wanted columns are kept. What is lost on the
way to the screen is points that say nothing new: each bucket keeps its minimum and its maximum, and
every non-finite value stays as a mark.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, select

from trainvitals.errors import FormatError
from trainvitals.rows import Schema, column_of, rows_of
from trainvitals.views import Branch, NonFiniteMark
from vitals_collector.schema import batches
from vitals_collector.stored import read_schema

_CHUNKS_AT_ONCE = 256

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Points:
    """Measured values of one metric, in parallel arrays."""

    step: Ints
    attempt: Ints
    time_unix_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def take(self, which: Mask | Ints) -> "Points":
        """Return the chosen points, in the order of the choice."""
        return Points(
            self.step[which], self.attempt[which], self.time_unix_ns[which], self.value[which]
        )


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


class AttemptRow(NamedTuple):
    """What stitching needs to know of an attempt."""

    id: int
    parent: int | None
    fork_step: int


# ---------------------------------------------------------------------------------- reading


def load(connection: Connection, wanted: Selection) -> Points:
    """Return every measured point of the selection, in the order of arrival."""
    schemas: dict[str, Schema] = {}
    parts: list[Points] = []
    for chunks in _chunks(connection, wanted):
        digest, incarnation = chunks[0].schema_digest, chunks[0].incarnation
        if digest not in schemas:
            schemas[digest] = read_schema(connection, digest)
        raw = b"".join(chunk.row_bytes for chunk in chunks)
        points = _decode(schemas[digest], raw, wanted, incarnation)
        if points is not None:
            parts.append(points)
    return _concatenate(parts)


def _chunks(connection: Connection, wanted: Selection) -> Iterator[list[Row[Any, Any, Any]]]:
    query = select(batches.c.schema_digest, batches.c.incarnation, batches.c.row_bytes).where(
        batches.c.run_id == wanted.run_id, batches.c.stream == wanted.stream
    )
    if wanted.source:
        query = query.where(batches.c.source == wanted.source)
    if wanted.from_step is not None:
        query = query.where(batches.c.max_step >= wanted.from_step)
    if wanted.to_step is not None:
        query = query.where(batches.c.min_step <= wanted.to_step)
    result = connection.execute(query.order_by(batches.c.id).execution_options(yield_per=256))
    for page in result.partitions(_CHUNKS_AT_ONCE):
        for _, alike in groupby(page, key=lambda row: (row.schema_digest, row.incarnation)):
            yield list(alike)


def _decode(schema: Schema, raw: bytes, wanted: Selection, incarnation: str) -> Points | None:
    rows = rows_of(schema, raw)
    values, valid = column_of(schema, rows, wanted.column)
    if values.dtype.kind not in "fi":
        raise FormatError(f"{wanted.stream}.{wanted.column} is text, not a number")
    steps = _whole(schema, rows, "step")
    if wanted.key_column:
        key = wanted.keys if isinstance(wanted.keys, int) else wanted.keys.get(incarnation)
        if key is None:
            return None
        valid = valid & (_whole(schema, rows, wanted.key_column) == key)
    if wanted.from_step is not None:
        valid = valid & (steps >= wanted.from_step)
    if wanted.to_step is not None:
        valid = valid & (steps <= wanted.to_step)
    # Fancy indexing copies: the chunk's bytes are let go.
    return Points(
        steps[valid],
        _whole(schema, rows, "attempt")[valid],
        _whole(schema, rows, "time_unix_ns")[valid],
        values[valid].astype(np.float64),
    )


def _whole(schema: Schema, rows: npt.NDArray[np.void], name: str) -> Ints:
    return column_of(schema, rows, name)[0].astype(np.int64)


def _concatenate(parts: Sequence[Points]) -> Points:
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Points(none, none, none, np.zeros(0))
    return Points(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.attempt for part in parts]),
        np.concatenate([part.time_unix_ns for part in parts]),
        np.concatenate([part.value for part in parts]),
    )


# --------------------------------------------------------------------------------- stitching


def lineage(attempts: Iterable[AttemptRow]) -> dict[int, float]:
    """Return the present attempt and its ancestors, each with the step its rows end before.

    The present attempt is the newest that nothing forked from. An ancestor counts only below the
    lowest fork on the way to it: a fork behind the parent's own beginning leaves nothing of it.
    """
    known = {attempt.id: attempt for attempt in attempts}
    leaves = known.keys() - {attempt.parent for attempt in known.values()}
    bounds: dict[int, float] = {}
    bound = math.inf
    current = known.get(max(leaves)) if leaves else None
    while current is not None and current.id not in bounds:
        bounds[current.id] = bound
        bound = min(bound, current.fork_step)
        current = None if current.parent is None else known.get(current.parent)
    return bounds


def stitch(points: Points, attempts: Sequence[AttemptRow], branch: Branch) -> Points:
    """Return the branch's points by step, then attempt; a step written twice keeps its newest row.

    An attempt that no event told of yet (rows can arrive before events) is part of the lineage.
    """
    order = np.lexsort((points.time_unix_ns, points.attempt, points.step))
    points = points.take(order)
    points = points.take(_last_of_each(points.step, points.attempt))
    if branch == "all":
        return points
    is_kept = ~np.isin(points.attempt, [attempt.id for attempt in attempts])
    for attempt, bound in lineage(attempts).items():
        is_kept |= (points.attempt == attempt) & (points.step < bound)
    if branch == "discarded":
        return points.take(~is_kept)
    points = points.take(is_kept)
    return points.take(_last_of_each(points.step))


def by_time(points: Points) -> Points:
    """Return points that have no step (GPUs, hosts, processes) in the order of their time."""
    return points.take(np.argsort(points.time_unix_ns, kind="stable"))


def _last_of_each(*keys: Ints) -> Mask:
    """Return where the next row has other keys; the rows are sorted by them."""
    is_last = np.ones(len(keys[0]), dtype=bool)
    if len(is_last) > 1:
        is_last[:-1] = np.any([key[:-1] != key[1:] for key in keys], axis=0)
    return is_last


# ------------------------------------------------------------------------------- downsampling


def downsample(points: Points, num_points: int) -> Points:
    """Return about ``num_points`` points: of each bucket its minimum and maximum, and the ends.

    Non-finite values do not take part; the first of each unbroken row of them stays, so that the
    curve has its gap (of more than ``num_points`` such gaps, evenly spaced ones).
    """
    if len(points) <= num_points:
        return points
    is_finite = np.isfinite(points.value)
    finite = np.flatnonzero(is_finite)
    begins = ~is_finite & np.concatenate(([True], is_finite[:-1]))
    gaps = np.flatnonzero(begins)
    if len(gaps) > num_points:
        gaps = gaps[np.linspace(0, len(gaps) - 1, num_points).astype(np.int64)]
    return points.take(np.union1d(_extremes(points.value, finite, num_points), gaps))


def _extremes(values: Floats, finite: Ints, num_points: int) -> Ints:
    num_out = max(2, num_points - 2) // 2 * 2
    if len(finite) <= num_out + 2:
        return finite
    from tsdownsample import MinMaxDownsampler  # 180 ms to import; small answers do without

    sampler: Any = MinMaxDownsampler
    chosen = sampler().downsample(np.ascontiguousarray(values[finite]), n_out=num_out)
    ends = [0, len(finite) - 1]
    kept: Ints = finite[np.union1d(chosen.astype(np.int64), ends)]
    return kept


def nonfinite_marks(points: Points) -> tuple[NonFiniteMark, ...]:
    """Return a mark for each NaN and infinity."""
    which = np.flatnonzero(~np.isfinite(points.value))
    return tuple(
        NonFiniteMark(int(points.step[i]), int(points.attempt[i]), kind_of(points.value[i]))
        for i in which
    )


def kind_of(value: float) -> Literal["nan", "+inf", "-inf"]:
    """Return the name of a non-finite number."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"
