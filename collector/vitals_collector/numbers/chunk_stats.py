"""Statistics of chunks of rows: per chunk and column extremes, ends and non-finite values. Pure.

A chunk is consecutive rows of one writer and one attempt, with rising steps within 256 (for streams
without steps: times within five minutes). Both are powers of two, so that a chunk ends where a
column of a chart does (``downsample``). Statistics of later rows are added as new chunks, so a
chunk may be one row.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitals_collector.numbers.interface import HOST_STREAMS, ColumnValues, Floats, Ints, Mask

STREAMS = ("steps", "gpu", "node")
"""Streams with chunk statistics: a column of the others mixes several series."""
CHUNK_STEPS = 256
"""Steps."""
_HOST_CHUNK_NS = 1 << 38
"""Nanoseconds."""
EXTREMES, NONFINITE, TOO_MANY = 0, 1, 2
"""Kinds of entries: extremes and ends of a chunk; one non-finite value; or the ends of a chunk with
more than ``_MAX_NONFINITE`` of them, whose rows have to be read."""
_MAX_NONFINITE = 8
ROWS = ""
"""Name of the entries that record which rows have statistics."""


class StreamRows(NamedTuple):
    """Rows of one stream by writer and number, in parallel arrays."""

    writer: Ints
    seq: Ints
    step: Ints
    attempt: Ints
    time_unix_ns: Ints


class ChunkStats(NamedTuple):
    """Statistics of chunks, in parallel arrays."""

    name: Ints
    """Index of the column, counted from 1; 0 is ``ROWS``."""
    writer: Ints
    kind: npt.NDArray[np.int8]
    attempt: Ints
    last_seq: Ints
    """Last sequence number of the chunk."""
    num: Ints
    """Number of values."""
    low: Floats
    low_step: Ints
    low_unix_ns: Ints
    high: Floats
    high_step: Ints
    high_unix_ns: Ints
    first: Floats
    """May be non-finite, as may ``last``."""
    first_step: Ints
    first_unix_ns: Ints
    last: Floats
    last_step: Ints
    last_unix_ns: Ints


def compute_chunk_stats(
    stream: str, rows: StreamRows, columns: Mapping[str, ColumnValues]
) -> ChunkStats:
    """Return the chunk statistics of all columns, and those of ``ROWS``."""
    stretch = _chunk_numbers(stream, rows)
    last_seq = rows.seq[np.append(np.flatnonzero(np.diff(stretch)), len(stretch) - 1)]
    everything = np.arange(len(stretch))
    parts = [_column_stats(0, rows, stretch, last_seq, everything, np.zeros(len(stretch)))]
    for i, column in enumerate(columns.values(), 1):
        at = everything if not column.is_missing.any() else np.flatnonzero(~column.is_missing)
        if len(at):
            values = column.values[at].astype(np.float64, copy=False)
            parts.append(_column_stats(i, rows, stretch, last_seq, at, values))
    return ChunkStats(*map(np.concatenate, zip(*parts, strict=True)))


def _chunk_numbers(stream: str, rows: StreamRows) -> Ints:
    """Return the number of each row's chunk, by which statistics are computed."""
    is_host = stream in HOST_STREAMS
    along = rows.time_unix_ns // _HOST_CHUNK_NS if is_host else rows.step // CHUNK_STEPS
    is_new = np.diff(rows.writer) != 0
    is_new |= np.diff(rows.attempt) != 0
    is_new |= np.diff(along) != 0
    is_new |= np.diff(rows.time_unix_ns) < 0
    if not is_host:
        is_new |= np.diff(rows.step) <= 0
    return np.concatenate(([0], np.cumsum(is_new)))


def _column_stats(
    name: int, rows: StreamRows, chunk: Ints, last_seq: Ints, at: Ints, values: Floats
) -> ChunkStats:
    """Return the chunk statistics of one column."""
    of_value = chunk[at]
    starts = _group_starts(of_value)
    ends = np.append(starts[1:], len(at)) - 1
    nums = ends - starts + 1
    is_finite = np.isfinite(values)
    group = np.repeat(np.arange(len(starts)), nums)
    if is_finite.all():
        low, high, bad = values, values, np.zeros(0, np.int64)
        num_bad = np.zeros(len(starts), np.int64)
    else:
        low, high = (np.where(is_finite, values, side) for side in (np.inf, -np.inf))
        bad = np.flatnonzero(~is_finite)
        num_bad = np.bincount(group[bad], minlength=len(starts))
    lows = _first_of(low, group, starts, np.minimum)
    highs = _first_of(high, group, starts, np.maximum)
    kind = np.where(num_bad > _MAX_NONFINITE, TOO_MANY, EXTREMES)
    bad = bad[kind[group[bad]] == EXTREMES]  # these have an entry each
    num = np.where(kind == EXTREMES, nums - num_bad, nums)
    which = np.concatenate((np.arange(len(starts)), group[bad]))
    entry_indices = [np.concatenate((places, bad)) for places in (lows, highs, starts, ends)]
    low_at, high_at, first_at, last_at = (at[places] for places in entry_indices)
    of_low, of_high, of_first, of_last = (values[places] for places in entry_indices)
    return ChunkStats(
        name=np.full(len(which), name),
        writer=rows.writer[first_at],
        kind=np.concatenate((kind, np.full(len(bad), NONFINITE))).astype(np.int8),
        attempt=rows.attempt[first_at],
        last_seq=last_seq[of_value[starts]][which],
        num=np.concatenate((num, np.ones(len(bad), np.int64))),
        low=of_low,
        low_step=rows.step[low_at],
        low_unix_ns=rows.time_unix_ns[low_at],
        high=of_high,
        high_step=rows.step[high_at],
        high_unix_ns=rows.time_unix_ns[high_at],
        first=of_first,
        first_step=rows.step[first_at],
        first_unix_ns=rows.time_unix_ns[first_at],
        last=of_last,
        last_step=rows.step[last_at],
        last_unix_ns=rows.time_unix_ns[last_at],
    )


def _group_starts(groups: Ints) -> Ints:
    """Return the index at which each chunk of rows starts."""
    return np.concatenate(([0], np.flatnonzero(np.diff(groups)) + 1))


def _first_of(values: Floats, group: Ints, starts: Ints, extreme: np.ufunc) -> Ints:
    """Return the index of the first extreme value in each chunk of rows."""
    is_extreme: Mask = values == extreme.reduceat(values, starts)[group]
    at = np.flatnonzero(is_extreme)
    return at[_group_starts(group[at])]
