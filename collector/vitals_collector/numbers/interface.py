"""Interface of a store of rows, and its data types: rows as columns, curves as points.

A store appends each row once, reports its last sequence number, and returns rows exactly as they
were. Everything else is computed from arrays, so the lake and the in-memory store share the
functions here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trainvitals.errors import FormatError, StorageError
from trainvitals.rows import STREAMS
from trainvitals.rows import Column as RowColumn
from trainvitals.views import Branch
from trainvitals.wire import Batch

FULL = "V302"
"""Error code: there is no room left."""
TAKEN = "another collector has taken run "
"""Error with which the catalog's database refuses a commit of a run's former owner; the run's id
follows."""


def is_full(text: str) -> bool:
    """Return whether an error of the store's libraries means that the disk is full."""
    low = text.lower()
    return any(word in low for word in ("disk is full", "no space left", "disk quota"))


def is_damaged(text: str) -> bool:
    """Return whether SQLite's error means that its file is damaged."""
    low = text.lower()
    return "malformed" in low or "not a database" in low


def damaged_error(where: object, text: str) -> StorageError:
    """Return the error of the store's damaged database, with the ways to continue."""
    return StorageError(
        f"{where} is damaged: {text}",
        hint="run on the copy that `vitals store backup` made: give its folder with --data; "
        "without a copy, start with a new folder. The run directories "
        "still hold what agents have sent: --folder imports it",
    )


def full_error(where: object, text: str) -> StorageError:
    """Return the error for a full disk below the stored rows."""
    return StorageError(
        f"{where} has no disk space left: {text}",
        hint="free space there; agents keep their spools and retry by themselves",
        code=FULL,
    )


# --------------------------------------------------------------------------------- points of curves

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Points(msgspec.Struct, frozen=True):
    """Measured values of one metric, in parallel arrays."""

    step: Ints
    attempt: Ints
    time_unix_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def take(self, which: Mask | Ints) -> "Points":
        """Return the chosen points of a metric, in the order of the choice."""
        return Points(
            self.step[which], self.attempt[which], self.time_unix_ns[which], self.value[which]
        )


def concat_points(parts: Sequence[Points]) -> Points:
    """Return a metric's points from all parts of a scan, one part after the other."""
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Points(none, none, none, np.zeros(0))
    return Points(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.attempt for part in parts]),
        np.concatenate([part.time_unix_ns for part in parts]),
        np.concatenate([part.value for part in parts]),
    )


class AttemptRow(NamedTuple):
    """Part of an attempt that ``stitch`` needs."""

    id: int
    parent: int | None
    fork_step: int


def lineage(attempts: Iterable[AttemptRow]) -> dict[int, float]:
    """Return the current attempt and its ancestors, each with the step before which its rows end.

    The current attempt is the latest that nothing forked from. An ancestor counts only below the
    lowest fork on the way to it: if a fork is after the start of the parent, the parent has no rows
    in the lineage.
    """
    by_id = {attempt.id: attempt for attempt in attempts}
    leaves = by_id.keys() - {attempt.parent for attempt in by_id.values()}
    bounds: dict[int, float] = {}
    bound = math.inf
    current = by_id.get(max(leaves)) if leaves else None
    while current is not None and current.id not in bounds:
        bounds[current.id] = bound
        bound = min(bound, current.fork_step)
        current = None if current.parent is None else by_id.get(current.parent)
    return bounds


def make_lineage_end_lookup(attempts: Iterable[AttemptRow]) -> Callable[[int], float]:
    """Return a function: for an attempt, the step before which its rows are in the lineage.

    An attempt without an event (rows can arrive before events) is in the lineage.
    """
    attempts = list(attempts)
    ids, bounds = {attempt.id for attempt in attempts}, lineage(attempts)
    return lambda attempt: bounds.get(attempt, -math.inf) if attempt in ids else math.inf


def stitch(points: Points, attempts: Sequence[AttemptRow], branch: Branch) -> Points:
    """Return the branch's points by step, then attempt; of a step written twice, the latest row."""
    if not is_rising(points.step):
        order = np.lexsort((points.time_unix_ns, points.attempt, points.step))
        points = points.take(order)
        points = points.take(_last_of_each(points.step, points.attempt))
    if branch == "all":
        return points
    is_kept = is_of_lineage(points.attempt, points.step, make_lineage_end_lookup(attempts))
    if branch == "discarded":
        return points.take(~is_kept)
    if not is_kept.all():
        points = points.take(is_kept)
    return points if is_rising(points.step) else points.take(_last_of_each(points.step))


def is_of_lineage(attempt: Ints, step: Ints, end_of: Callable[[int], float]) -> Mask:
    """Return which stored rows are in the lineage; others were rolled back.

    ``end_of``: ``make_lineage_end_lookup``.
    """
    is_kept = np.zeros(len(step), dtype=np.bool_)
    for attempt_id in _distinct(attempt):
        is_kept |= (attempt == attempt_id) & (step < end_of(attempt_id))
    return is_kept


def _distinct(values: Ints) -> list[int]:
    """Return the distinct values of stored rows; fast if equal values are adjacent."""
    is_new = np.concatenate(([True], values[1:] != values[:-1]))[: len(values)]
    distinct: list[int] = sorted_distinct(values[is_new]).tolist()
    return distinct


def sorted_distinct(values: Ints) -> Ints:
    """Return the distinct values in their order.

    ``np.unique`` imports ``numpy.ma``: a twentieth of the start of a command.
    """
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)]]


def is_rising(values: Ints) -> bool:
    """Return whether each of the stored rows' values is above the one before it."""
    return bool(np.all(values[1:] > values[:-1]))


def sort_by_time(points: Points) -> Points:
    """Return stored points without a step (GPUs, hosts, processes) in the order of their time.

    Points with equal time are sorted by attempt and value, so that the order does not depend on how
    they are stored.
    """
    times = points.time_unix_ns
    if not is_rising(times):
        points = points.take(np.lexsort((points.value, points.attempt, times)))
    return points


def _last_of_each(*keys: Ints) -> Mask:
    """Return where the next stored row has other keys; the rows are sorted by them."""
    is_last = np.ones(len(keys[0]), dtype=bool)
    if len(is_last) > 1:
        is_last[:-1] = np.any([key[:-1] != key[1:] for key in keys], axis=0)
    return is_last


# ------------------------------------------------------------------------------------ what is drawn

# A curve with too many points is cut into columns, each a power of two steps wide (nanoseconds if
# rows have no step) and counted from 0: the columns do not move while a run grows. From each column
# come the minimum and the maximum, and whether a value was non-finite.


def downsample(points: Points, num_points: int, branch: Branch = "lineage") -> Points:
    """Return between ``num_points`` and about twice as many stored points, or all if fewer.

    From each column: the first of its least values, the last of its greatest ones and the first
    non-finite one; also both ends of the curve. Discarded attempts have separate columns, in
    sequence. The points are in the order of their steps, or of their times if they have no step.
    """
    points, attempt = _by_branch(points, branch)
    if len(points) <= num_points:
        return points
    power = column_power(points, num_points, branch)
    column = _column_numbers(attempt, _axis_values(points), power or 0)
    is_finite = np.isfinite(points.value)
    finite, others = np.flatnonzero(is_finite), np.flatnonzero(~is_finite)
    selected_parts = [others[_column_starts(column[others])], finite[:1], finite[-1:]]
    if len(finite):
        selected_parts += _column_extremes(column[finite], points.value[finite], finite)
    return points.take(np.unique(np.concatenate(selected_parts)))


def downsample_means(points: Points, num_points: int, branch: Branch = "lineage") -> Points:
    """Return the mean of each column of ``downsample``, or all points if there are fewer.

    A mean has the place of its column's last finite value, so that later rows come after it. A
    column without a finite value keeps its first one, as a gap.
    """
    points, attempt = _by_branch(points, branch)
    if len(points) <= num_points:
        return points
    power = column_power(points, num_points, branch)
    column = _column_numbers(attempt, _axis_values(points), power or 0)
    is_finite = np.isfinite(points.value)
    finite = np.flatnonzero(is_finite)
    starts = _column_starts(column[finite])
    num = np.diff(starts, append=len(finite))
    last = finite[starts + num - 1]
    value = points.value.copy()
    if len(finite):
        value[last] = np.add.reduceat(points.value[finite] / np.repeat(num, num), starts)
    empty = np.flatnonzero(~is_finite & ~np.isin(column, column[last]))
    which = np.union1d(last, empty[_column_starts(column[empty])])
    return Points(points.step, points.attempt, points.time_unix_ns, value).take(which)


def column_power(points: Points, num_points: int, branch: Branch = "lineage") -> int | None:
    """Return the largest width of a curve's columns, a power of two, for this many points.

    None: even columns of one step give fewer.
    """
    points, attempt = _by_branch(points, branch)
    if not len(points):
        return None
    along = _axis_values(points)
    is_finite = np.isfinite(points.value)
    extent = int(along.max()) - int(along.min())
    most = 3 * (1 + np.count_nonzero(np.diff(attempt)))
    power = extent.bit_length()
    while power and most * ((extent >> power) + 2) < num_points:
        power -= 1
    for narrower in range(power, -1, -1):
        starts = _column_starts(_column_numbers(attempt, along, narrower))
        num = np.diff(starts, append=len(along))
        num_finite = np.add.reduceat(is_finite, starts, dtype=np.int64)
        if np.minimum(num_finite, 2).sum() + np.count_nonzero(num_finite < num) >= num_points:
            return narrower
    return None


def smooth(points: Points, weight: float, branch: Branch = "lineage") -> Points:
    """Return a curve's debiased exponential mean over all points; non-finite values stay.

    ``weight`` is that of the previous mean, 0 to below 1. The points are as for ``downsample``;
    each discarded attempt has a separate mean.
    """
    points, attempt = _by_branch(points, branch)
    value = points.value.copy()
    at = np.flatnonzero(np.isfinite(value))
    for attempt_indices in np.split(at, _column_starts(attempt[at])):
        if len(attempt_indices):
            value[attempt_indices] = _exponential_mean(
                value[attempt_indices], weight
            ) / _exponential_mean(np.ones(len(attempt_indices)), weight)
    return Points(points.step, points.attempt, points.time_unix_ns, value)


_BLOCK = 64


def _exponential_mean(values: Floats, weight: float) -> Floats:
    """Return y[i] = weight * y[i - 1] + (1 - weight) * values[i], from 0, a block at a time."""
    padded = np.zeros(-(-len(values) // _BLOCK) * _BLOCK)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, _BLOCK)
    apart = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    weights = np.where(apart >= 0, (1 - weight) * weight ** np.maximum(apart, 0), 0.0)
    means = blocks @ weights.T
    decay = weight ** np.arange(1, _BLOCK + 1)
    before = 0.0
    for block in means:
        block += before * decay
        before = block[-1]
    decayed: Floats = means.reshape(-1)[: len(values)]
    return decayed


def _by_branch(points: Points, branch: Branch) -> tuple[Points, Ints]:
    """Return a curve's points and the branch of each; in the lineage there is only one."""
    if branch == "lineage" or not len(points) or points.step[-1] < 0:
        return points, np.zeros(len(points), np.int64)
    if np.any(np.diff(points.attempt) < 0):
        points = points.take(np.lexsort((points.step, points.attempt)))
    return points, points.attempt


def _axis_values(points: Points) -> Ints:
    """Return the x values of stored points: steps, or times if rows have no step."""
    return points.step if points.step[-1] >= 0 else points.time_unix_ns


def _column_numbers(attempt: Ints, along: Ints, power: int) -> Ints:
    """Return the number of the column that each point of a downsampled curve is in."""
    column = along >> power
    is_new = (np.diff(column) != 0) | (np.diff(attempt) != 0)
    return np.concatenate(([0], np.cumsum(is_new)))


def _column_starts(column: Ints) -> Ints:
    """Return the first index of each column of a downsampled curve; numbers are 0 or more."""
    return np.flatnonzero(np.diff(column, prepend=-1))


def _column_extremes(column: Ints, value: Floats, at: Ints) -> list[Ints]:
    """Return the first minimum's and last maximum's index in each column to downsample."""
    starts = _column_starts(column)
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(column)))
    is_low = np.flatnonzero(value == np.minimum.reduceat(value, starts)[group])
    is_high = np.flatnonzero(value == np.maximum.reduceat(value, starts)[group])
    ends = np.flatnonzero(np.diff(group[is_high], append=-1))
    return [at[is_low[_column_starts(group[is_low])]], at[is_high[ends]]]


# --------------------------------------------------------------------------------------------- rows

StreamKey = tuple[str, str, str]
"""Run, incarnation and stream: one writer's rows of one kind, numbered from 0."""

RANKS = "ranks"
"""The stream of numbers over ranks, which no writer sends: old rows of steps become it."""
STORED_STREAMS = (*STREAMS, RANKS)

NOT_A_RANK = -1
"""The ``rank`` of a node's or a GPU's rows."""

HOST_STREAMS = ("gpu", "node", "process")
"""Streams that are ordered by time: their rows have no step."""


class SeriesKey(NamedTuple):
    """Rows with one value of a key column, such as one scalar. Each start numbers its names."""

    column: str
    """Column of the stream, even if a writer's column has the same name (``rank``)."""
    number_of: Mapping[str, int] | int
    """By incarnation, or one number for all. An incarnation that is missing has no such rows."""


class RowSpan(NamedTuple):
    """Rows of one stream of a run. None is an open side; no sources means all."""

    run_id: str
    stream: str
    sources: tuple[str, ...] = ()
    """Such as ``rank:0``."""
    from_step: int | None = None
    to_step: int | None = None
    """Steps below it."""
    from_unix_ns: int | None = None
    to_unix_ns: int | None = None
    """Times before it."""
    seqs: Mapping[str, tuple[int, int]] | None = None
    """Only these incarnations, each with its first sequence number and the one after its last."""
    keyed: SeriesKey | None = None


class CurveRequest(NamedTuple):
    """One column over the rows of a span, and how many points of it are wanted at least."""

    span: RowSpan
    column: str
    num_points: int | None = None
    """None: all points."""


class DownsampledCurve(NamedTuple):
    """A stitched curve: by step, or by time in streams whose rows have no step."""

    points: Points
    """All, or as many as ``downsample`` needs for the wanted number: minimum and maximum of each
    column, both ends of the curve, and all non-finite values."""
    num_values: int
    """Number of values of the branch within the span; values that were written twice count
    twice."""


class ColumnValues(NamedTuple):
    """Values in parallel to those of the other columns."""

    values: npt.NDArray[Any]
    """float64, int64, or str objects; a missing value's content is undefined."""
    is_missing: npt.NDArray[np.bool_]
    """NaN is a value, and not missing. The sign of a zero may be lost."""

    def take(self, which: npt.NDArray[Any]) -> "ColumnValues":
        """Return the column's chosen rows, in the order of the choice."""
        return ColumnValues(self.values[which], self.is_missing[which])


Columns = dict[str, ColumnValues]

ORDER = ("step", "rank", "time_unix_ns", "seq")
"""Sort keys of rows."""


def sort_columns(columns: Columns, names: Sequence[str]) -> Columns:
    """Return named columns of stored rows by ``ORDER``, whose columns all have to exist."""
    step = columns["step"].values
    if is_rising(step):  # one writer's, mostly: a million need no sorting
        return {name: columns[name] for name in names}
    order = np.lexsort([columns[name].values for name in reversed(ORDER)])
    return {name: columns[name].take(order) for name in names}


def missing_column(num: int) -> ColumnValues:
    """Return a column of this many missing values, for rows that lack it."""
    return ColumnValues(np.zeros(num), np.ones(num, np.bool_))


MAX_RANKS = 16_384
"""Ranks of a run that are merged: a number in a batch's header must not cost memory without end."""


@lru_cache(maxsize=1 << 16)  # called for every writer at each commit
def rank_of(source: str) -> int:
    """Return the rank that wrote the rows of a source, or NOT_A_RANK."""
    kind, _, key = source.partition(":")
    return int(key) if kind == "rank" else NOT_A_RANK


@lru_cache(maxsize=1 << 12)
def type_of(column: RowColumn) -> str:
    """Return a stored column's type: ``f8``, ``i8`` or ``S``; fixed-size texts all have ``S``."""
    return column.kind if column.kind in ("f8", "i8") else "S"


def common_type(kinds: Iterable[str]) -> str:
    """Return the type of a stored column that writers gave these types."""
    distinct = set(kinds)
    return "S" if "S" in distinct else "i8" if distinct == {"i8"} else "f8"


def texts_of(raw: npt.NDArray[np.bytes_]) -> npt.NDArray[np.object_]:
    """Return stored fixed-size texts as str; invalid UTF-8 is shown escaped and raises no error."""
    distinct, index = np.unique(raw, return_inverse=True)
    texts = np.array([name.decode(errors="replace") for name in distinct.tolist()], object)
    return texts[index] if len(texts) else np.zeros(0, object)


def concat_columns(columns: Sequence[ColumnValues], kind: str = "") -> ColumnValues:
    """Return the columns of stored rows concatenated; if types differ, converted as in ``scan``.

    Without a kind, different types are converted as in ``scan``.
    """
    if not kind or not columns:
        if len(columns) == 1:
            return columns[0]
        there = [column.values.dtype.kind for column in columns if not column.is_missing.all()]
        if not there:
            return missing_column(sum(len(column.values) for column in columns))
        kind = common_type({"O": "S", "f": "f8", "i": "i8"}[of] for of in there)
    dtype: Any = {"S": object, "f8": np.float64, "i8": np.int64}[kind]
    alike = [
        column._replace(values=column.values.astype(dtype, copy=False))
        if (column.values.dtype == object) == (kind == "S")
        else ColumnValues(
            np.full(len(column.values), "" if kind == "S" else 0, dtype),
            np.ones(len(column.values), np.bool_),
        )
        for column in columns
    ]
    return ColumnValues(
        np.concatenate([column.values for column in alike]),
        np.concatenate([column.is_missing for column in alike]),
    )


# ------------------------------------------------------------------------------- curves out of rows

POINT = ("step", "attempt", "time_unix_ns")
"""Columns of a point's row that it keeps, in addition to the value."""


def points_of(columns: Columns, name: str) -> Points:
    """Return a stored column's measured values as points; ``POINT`` must be there as well.

    Raises:
        FormatError: the column is text.
    """
    column = columns[name]
    if column.values.dtype == object:
        raise FormatError(f"{name} is text; a curve has numbers")
    step, attempt, time_unix_ns = (
        columns[key].values.astype(np.int64, copy=False) for key in POINT
    )
    points = Points(step, attempt, time_unix_ns, column.values.astype(np.float64, copy=False))
    return points.take(~column.is_missing) if column.is_missing.any() else points


def on_branch(
    points: Points, stream: str, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    """Return points of the branch, in their order; all, for streams whose rows have no step."""
    if stream in HOST_STREAMS or branch == "all":
        return points
    is_kept = is_of_lineage(points.attempt, points.step, make_lineage_end_lookup(attempts))
    if branch == "discarded":
        is_kept = ~is_kept
    return points if is_kept.all() else points.take(is_kept)


def order_curve(
    points: Points, stream: str, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    """Return stored points as a curve: stitched and by step, or by time if rows have no step."""
    return sort_by_time(points) if stream in HOST_STREAMS else stitch(points, attempts, branch)


# -------------------------------------------------------------------------------- what a store does

Reason = Literal["age", "size"]
"""Why rows were deleted: their age, or the size of their run."""


class StepWindow(NamedTuple):
    """Some steps of one attempt."""

    attempt: int
    first_step: int
    end_step: int
    """The step after the last; both are multiples of ``chunk_stats.CHUNK_STEPS``."""


class DueWindow(NamedTuple):
    """The oldest window from which nothing was deleted yet."""

    window: StepWindow
    """For streams whose rows have no step, in nanoseconds."""
    newest_unix_ns: int
    """Time of the window's latest row."""
    last_seqs: Mapping[str, int]
    """The number of the last row in it, by incarnation."""


class DeletedRows(NamedTuple):
    """Number of rows deleted from a stream of a run."""

    stream: str
    reason: Reason
    num_rows: int
    to_step: int
    """The last step of the latest window; -1 if rows have no step."""
    to_unix_ns: int
    """End of the latest window if rows have no step, otherwise 0."""


class RollUpResult(NamedTuple):
    """Result of rolling up a window."""

    num_rows: int
    """Deleted rows."""
    kept: tuple[str, ...]
    """Sources whose rows remain, in addition to rank 0: all, or the worst ranks."""


class NumberStoreReader(Protocol):
    """Read access to a store of rows. Thread-safe."""

    def kinds(self, run_id: str, stream: str) -> dict[str, str]:
        """Return the columns of a run's stream that have rows, each with its type.

        ``f8``, ``i8`` or ``S``; includes the columns of every row (``ROW_COLUMNS``). If writers
        gave one name two types, the result is the type that ``scan`` returns. Empty for a stream
        without rows.
        """

    def sources(self, run_id: str, stream: str) -> list[str]:
        """Return the writers of the stream's rows, sorted by name."""

    def num_rows(self, span: RowSpan) -> int:
        """Return an upper estimate of the rows that a scan would read; cheap."""

    def scan(self, span: RowSpan, names: Sequence[str]) -> dict[str, ColumnValues]:
        """Return columns of the rows in the span, by step, then rank, then time.

        Any of the stream's columns, and ``rank``, ``source``, ``incarnation`` and ``seq``. A column
        that the stream lacks is missing in every row. If writers gave one name two numeric types,
        all values are floats; if some are texts, the numbers are missing.
        """

    def curves(
        self, curves: Sequence[CurveRequest], attempts: Sequence[AttemptRow], branch: Branch
    ) -> list[DownsampledCurve]:
        """Return each curve's measured values on the branch; many cost little more than one.

        The curves may be in any streams of one run. The branch is ignored for streams without
        steps.

        Raises:
            FormatError: a column is text.
        """

    def last_steps(self, run_id: str, stream: str = "steps") -> dict[int, int]:
        """Return the last step of each attempt that has rows of the stream."""


class NumberStore(NumberStoreReader, Protocol):
    """A store of rows. Thread-safe; rows reported as stored survive a kill."""

    def check_place(self) -> None:
        """Raise StorageError if rows that were stored cannot be read; costs little."""

    def write_lock(self) -> AbstractContextManager[object]:
        """Hold the store's write lock: a merge may hold it for seconds.

        Acquire it before the database's write lock, so that no one waits for the database during a
        merge.
        """

    def append(self, batches: Sequence[Batch]) -> list[int]:
        """Store the new rows, all or none; return the number of new rows of each batch.

        A row is new if its sequence number is above all stored ones of its stream.

        Raises:
            StorageError: nothing was stored; send it again.
        """

    def mark(self, key: StreamKey) -> int:
        """Return the sequence number of the stream's last stored row; -1 if there is none."""

    def marks(self, run_ids: Collection[str]) -> Mapping[str, Mapping[tuple[str, str], int]]:
        """Return by run the marks of its streams by incarnation and stream."""

    def has_holes(self, run_id: str) -> bool:
        """Return whether rows of the run were lost to damage."""

    def missing(self, key: StreamKey) -> list[tuple[int, int]]:
        """Return the ranges of row numbers that a stream lost to damage.

        ``mark`` stays above them, and they are accepted when they are sent again.
        """

    def wanted(self, key: StreamKey, before: int) -> int:
        """Return the next lost row number to request from an agent again, or -1.

        It counts as requested from now on: an agent that no longer has it is asked again much
        later.
        """

    def deleted_rows(self, run_id: str) -> list[DeletedRows]:
        """Return the numbers of deleted rows of the run, by stream and reason."""

    def delete(self, run_id: str, exclude: Collection[str] = ()) -> None:
        """Delete the run's rows; its last sequence numbers stay, so that resent rows are ignored.

        Rows of incarnations that started after the removal (``exclude``) stay.

        Raises:
            StorageError: nothing was removed.
        """

    def num_bytes(self, run_id: str) -> int:
        """Return the approximate size of the run's rows."""

    def merge(self, max_seconds: float = 60.0) -> bool:
        """Merge the store's rows for so long; return whether all was done."""

    def close(self) -> None:
        """Close files and connections."""
