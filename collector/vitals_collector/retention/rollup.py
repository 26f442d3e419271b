"""Says what is left of old rows: which windows stay whole, which ranks, and what all ranks were.

Pure: batches are described, ``now`` is handed in, nothing is read or written. Rows of ranks other
than 0 are thinned by windows of steps of one attempt. In its place a step keeps the minimum, mean
and maximum over the ranks of every column, with how many ranks had a number and how many a NaN or
an infinity; a window keeps the whole rows of its worst ranks. What people look back at, the steps
around a decision or a finding that acts, stays whole for ever.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.config import AtLeastOne, Count, NotNegative, Settings
from trainvitals.rows import Column, Schema, column_of

RANKS = "ranks"
"""Stream and source of the numbers over all ranks."""
STATISTICS = ("min", "mean", "max", "num", "nonfinite")
"""What is kept of a column: of its finite values, and how many were finite, and were not."""
NUM_RANKS = "num_ranks"
"""Column: ranks whose row of the step went into the numbers."""

_KEYS = tuple(column.name for column in ROW_COLUMNS)
_DURATION, _LOSS = "step_duration_seconds", "rank_loss"

Rows = npt.NDArray[np.void]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class VolumeSettings(Settings, frozen=True, kw_only=True):
    """What is kept of a run, and for how long."""

    section = "volumes"

    keep_hours: NotNegative = 24.0
    """How long every row stays as it came, where the cap allows it."""
    max_run_bytes: Count = 5_000_000_000
    """A run above it is thinned sooner, oldest rows first; 0 is no cap."""
    keep_days: NotNegative = 0.0
    """Whole runs are removed so long after their end; 0 keeps them for ever."""
    window_steps: AtLeastOne = 500
    """Rows of ranks are thinned by windows of so many steps."""
    margin_steps: int = 500
    """Steps before and behind a decision or an acting finding that stay whole for ever."""
    num_worst_ranks: int = 8
    """Ranks whose whole rows a thinned window keeps, beside rank 0."""
    layer_steps: AtLeastOne = 10
    """Layers keep the first of so many steps, where no finding is near."""
    host_samples: Annotated[int, Meta(ge=2)] = 30
    """So many samples of a GPU, node or process become two: the least and the greatest values."""
    margin_seconds: float = 600.0
    """Samples so near to a decision or an acting finding stay whole for ever."""


class Batch(NamedTuple):
    """What planning needs to know of one stored batch of a rank other than 0."""

    id: int
    writer: str
    """The incarnation."""
    attempt: int
    first_step: int
    last_step: int
    num_rows: int
    oldest_unix_ns: int
    newest_unix_ns: int
    last_seq: int
    is_pure: bool = True
    """Whether all rows are of one attempt and one window; others are cut first."""


class Window(NamedTuple):
    """Some steps of one attempt, and their batches."""

    attempt: int
    first_step: int
    end_step: int
    is_whole: bool
    """Whether the rows stay for ever, and only the numbers over the ranks are added."""
    batches: tuple[Batch, ...]


class Present(NamedTuple):
    """How far a run is, as rank 0 tells it: a decision may still come about its last steps."""

    attempt: int
    step: int


def plan_thinning(
    batches: Iterable[Batch],
    *,
    present: Present,
    before_unix_ns: int,
    near: Sequence[int],
    settings: VolumeSettings,
) -> Iterator[Window]:
    """Yield the windows whose rows may go now; holds one window's batches at a time.

    Args:
        batches: pure ones that were not thinned before, by attempt and first step.
        present: how far the run is.
        before_unix_ns: only windows whose rows are all older.
        near: steps that something happened at, ascending.
        settings: sizes and margins.
    """
    size = settings.window_steps
    open_: list[Batch] = []
    key: tuple[int, int] | None = None
    for batch in chain(batches, (None,)):
        next_key = None if batch is None else (batch.attempt, batch.first_step // size)
        if next_key != key and open_ and key is not None:
            window = _window(key, open_, near, settings)
            is_old = all(open_batch.newest_unix_ns < before_unix_ns for open_batch in open_)
            if is_old and _is_past(window, present, settings):
                yield window
            open_ = []
        key = next_key
        if batch is not None:
            open_.append(batch)


def _window(
    key: tuple[int, int], batches: list[Batch], near: Sequence[int], settings: VolumeSettings
) -> Window:
    attempt, number = key
    first, end = number * settings.window_steps, (number + 1) * settings.window_steps
    margin = settings.margin_steps
    is_whole = _any_between(near, first - margin, end - 1 + margin)
    return Window(attempt, first, end, is_whole, tuple(batches))


def _is_past(window: Window, present: Present, settings: VolumeSettings) -> bool:
    """Return whether no decision can come any more that would have kept the window."""
    if window.attempt != present.attempt:
        return window.attempt < present.attempt
    return window.end_step + settings.margin_steps <= present.step


def _any_between(steps: Sequence[int], low: int, high: int) -> bool:
    i = int(np.searchsorted(steps, low))
    return i < len(steps) and steps[i] <= high


def cut(
    schema: Schema, rows: Rows, *, present: Present, before_unix_ns: int, settings: VolumeSettings
) -> list[Rows]:
    """Return the rows in parts, in their order: each window that is due, and all others as one."""
    steps, attempts, times = (
        _whole(schema, rows, name) for name in ("step", "attempt", "time_unix_ns")
    )
    windows = steps // settings.window_steps
    at = np.flatnonzero((np.diff(windows) != 0) | (np.diff(attempts) != 0)) + 1
    ends = [*at.tolist(), len(rows)]
    start = 0
    parts: list[Rows] = []
    for end in ends:
        number = int(windows[start])
        window = _window((int(attempts[start]), number), [], (), settings)
        is_old = times[start:end].max() < before_unix_ns
        if not is_old or not _is_past(window, present, settings):
            break
        parts.append(rows[start:end])
        start = end
    return [*parts, rows[start:]] if start < len(rows) else parts


# --------------------------------------------------------------------------- over all ranks


class OverRanks:
    """Gathers a window's rows, one batch after the other; holds a few numbers for each.

    For every rank's step two numbers are held, its loss among them: so much is needed to say which
    ranks were the worst.
    """

    def __init__(self, first_step: int, end_step: int) -> None:
        self._first = first_step
        self._num = end_step - first_step
        self._ranks = np.zeros(self._num, dtype=np.int64)
        self._times = np.zeros(self._num, dtype=np.int64)
        self._columns: dict[str, _Column] = {}
        self._losses: dict[str, list[tuple[Ints, Floats]]] = {}
        self._longest: dict[str, float] = {}
        self._nonfinite: dict[str, int] = {}

    def add(self, source: str, schema: Schema, rows: Rows) -> None:
        """Take one rank's rows in; all of them are in the window."""
        at = _whole(schema, rows, "step") - self._first
        self._ranks += np.bincount(at, minlength=self._num)
        np.maximum.at(self._times, at, _whole(schema, rows, "time_unix_ns"))
        self._losses.setdefault(source, [])
        for column in schema.columns:
            values, valid = column_of(schema, rows, column.name)
            if column.name in _KEYS or values.dtype.kind not in "fi" or not valid.any():
                continue
            totals = self._columns.setdefault(column.name, _Column(self._num))
            numbers = values[valid].astype(np.float64)
            totals.add(at[valid], numbers)
            self._note(source, column.name, at[valid], numbers)

    def _note(self, source: str, name: str, at: Ints, numbers: Floats) -> None:
        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            first = int(at[~is_finite].min())
            self._nonfinite[source] = min(first, self._nonfinite.get(source, first))
        if name == _LOSS:
            self._losses[source].append((at, numbers))
        if name == _DURATION and is_finite.any():
            longest = float(numbers[is_finite].max())
            self._longest[source] = max(longest, self._longest.get(source, longest))

    def worst(self, num: int) -> list[str]:
        """Return the worst ranks, at most ``num``.

        First those with a NaN or an infinity, the earliest before the others. Then, by turns, the
        rank with the longest step and the one whose loss was furthest from the ranks' median.
        """
        broken = sorted(self._nonfinite, key=lambda source: (self._nonfinite[source], source))
        slow = sorted(self._longest, key=lambda source: (-self._longest[source], source))
        furthest = self._furthest()
        far = sorted(furthest, key=lambda source: (-furthest[source], source))
        turns = (source for pair in zip_longest(slow, far) for source in pair if source is not None)
        return list(dict.fromkeys([*broken, *turns]))[:num]

    def _furthest(self) -> dict[str, float]:
        every = np.full((len(self._losses), self._num), np.nan)
        for i, parts in enumerate(self._losses.values()):
            for at, losses in parts:
                every[i, at] = losses
        every[~np.isfinite(every)] = np.nan
        is_known = ~np.isnan(every).all(axis=0)
        if not is_known.any():
            return {}
        every = every[:, is_known]
        distances = np.abs(every - np.nanmedian(every, axis=0))
        largest = np.where(np.isnan(distances), -1.0, distances).max(axis=1)
        source_distances = zip(self._losses, largest.tolist(), strict=True)
        return {source: distance for source, distance in source_distances if distance >= 0}

    def rows(self, attempt: int) -> tuple[Schema, list[dict[str, float | int]]]:
        """Return the columns and one row of numbers for each step that a rank wrote."""
        schema = ranks_schema(self._columns)
        number_rows = []
        for at in np.flatnonzero(self._ranks).tolist():
            row: dict[str, float | int] = {
                "step": self._first + at,
                "attempt": attempt,
                "time_unix_ns": int(self._times[at]),
                "monotonic_ns": 0,
                NUM_RANKS: int(self._ranks[at]),
            }
            for name, column in self._columns.items():
                row |= {f"{name}:{what}": value for what, value in column.at(at).items()}
            number_rows.append(row)
        return schema, number_rows


class _Column:
    """Minimum, sum and maximum over ranks, by step."""

    def __init__(self, num: int) -> None:
        self._low = np.full(num, np.inf)
        self._high = np.full(num, -np.inf)
        self._sum = np.zeros(num)
        self._num = np.zeros(num, dtype=np.int64)
        self._nonfinite = np.zeros(num, dtype=np.int64)

    def add(self, at: Ints, numbers: Floats) -> None:
        """Take one rank's numbers in; a step that it wrote twice counts twice."""
        again = np.flatnonzero(np.diff(at) <= 0) + 1
        for at_once, numbers_once in zip(
            np.split(at, again), np.split(numbers, again), strict=True
        ):
            is_finite = np.isfinite(numbers_once)
            self._nonfinite[at_once[~is_finite]] += 1
            places, finite = at_once[is_finite], numbers_once[is_finite]
            self._low[places] = np.minimum(self._low[places], finite)
            self._high[places] = np.maximum(self._high[places], finite)
            self._num[places] += 1
            with np.errstate(over="ignore"):
                self._sum[places] += finite

    def at(self, i: int) -> dict[str, float | int]:
        """Return what is known of one step; without a finite value there is no minimum."""
        num, nonfinite = int(self._num[i]), int(self._nonfinite[i])
        counts: dict[str, float | int] = {"num": num, "nonfinite": nonfinite}
        if not num:
            return counts if nonfinite else {}
        low, high = float(self._low[i]), float(self._high[i])
        mean = min(high, max(low, float(self._sum[i]) / num))
        return {"min": low, "mean": mean, "max": high, **counts}


def ranks_schema(columns: Iterable[str]) -> Schema:
    """Return the columns of the numbers over ranks of some columns."""
    kinds = {"num": "i8", "nonfinite": "i8"}
    statistics = (
        Column(f"{name}:{what}", kinds.get(what, "f8"))
        for name in sorted(columns)
        for what in STATISTICS
    )
    return Schema(RANKS, (*ROW_COLUMNS, Column(NUM_RANKS, "i8"), *statistics))


def merge_rows(
    numbers: Mapping[str, float | int], other: Mapping[str, float | int]
) -> dict[str, float | int]:
    """Return the numbers of a step over the ranks of both: some ranks' rows came late."""
    merged: dict[str, float | int] = {**numbers, **other}
    merged["time_unix_ns"] = max(numbers["time_unix_ns"], other["time_unix_ns"])
    merged[NUM_RANKS] = numbers[NUM_RANKS] + other[NUM_RANKS]
    both = {name.rpartition(":")[0] for name in numbers.keys() & other.keys() if ":" in name}
    for name in both:
        nums = [row.get(f"{name}:num", 0) for row in (numbers, other)]
        merged[f"{name}:num"] = sum(nums)
        merged[f"{name}:nonfinite"] = sum(
            row.get(f"{name}:nonfinite", 0) for row in (numbers, other)
        )
        if all(nums):
            merged[f"{name}:min"] = min(row[f"{name}:min"] for row in (numbers, other))
            merged[f"{name}:max"] = max(row[f"{name}:max"] for row in (numbers, other))
            total = math.fsum(
                row[f"{name}:mean"] * num for row, num in zip((numbers, other), nums, strict=True)
            )
            merged[f"{name}:mean"] = total / sum(nums)
    return merged


# -------------------------------------------------------------------------- layers and hosts


def thin_layers(schema: Schema, rows: Rows, near: Sequence[int], settings: VolumeSettings) -> Rows:
    """Return the rows near a finding, and of the others the first of every so many steps.

    A step is kept with all its layers, or goes with them.
    """
    steps = _whole(schema, rows, "step")
    kept = _is_near(steps, near, settings.margin_steps)
    attempts = _whole(schema, rows, "attempt")
    bucket, before = None, None
    for i, (attempt, step) in enumerate(zip(attempts.tolist(), steps.tolist(), strict=True)):
        row_bucket = (attempt, step // settings.layer_steps)
        if row_bucket != bucket:
            bucket, before = row_bucket, step
        kept[i] |= step == before
    return rows[kept]


def thin_hosts(schema: Schema, rows: Rows, near: Sequence[int], settings: VolumeSettings) -> Rows:
    """Return rows near an incident as they are, and two rows for every so many of the others.

    The first has the least value of every column, the second the greatest: a peak stays to be
    seen, a counter keeps its first and its last. Text is that of the group's ends.
    """
    times = _whole(schema, rows, "time_unix_ns")
    is_near = _is_near(times, near, int(settings.margin_seconds * 1e9))
    ranks, has_rank = column_of(schema, rows, "rank")
    of = np.where(has_rank, ranks.astype(np.int64), -1)
    kept = [rows[is_near]]
    for source in np.unique(of[~is_near]).tolist():
        mine = np.flatnonzero(~is_near & (of == source))
        gaps = np.flatnonzero(np.diff(np.cumsum(is_near)[mine]) > 0) + 1
        for part in np.split(mine, gaps):
            starts = range(0, len(part), settings.host_samples)
            groups = [rows[part[start : start + settings.host_samples]] for start in starts]
            kept += [_ends(schema, group) for group in groups]
    kept_rows = np.concatenate(kept)
    return kept_rows[np.argsort(kept_rows["seq"], kind="stable")]


def _ends(schema: Schema, rows: Rows) -> Rows:
    """Return two rows: the least and the greatest values of all; up to two stay as they are."""
    if len(rows) <= 2:
        return rows
    ends = rows[[0, -1]].copy()
    ends["validity"] = np.bitwise_or.reduce(rows["validity"], axis=0)
    for i, column in enumerate(schema.columns):
        values, valid = column_of(schema, rows, column.name)
        if column.name in _KEYS or values.dtype.kind not in "fi" or not valid.any():
            continue
        measured = values[valid]
        broken = measured[~np.isfinite(measured)]
        finite = measured[np.isfinite(measured)]
        least = finite.min() if len(finite) else broken[0]
        ends[f"c{i}"] = least, (broken[0] if len(broken) else finite.max())
    return ends


def _is_near(values: Ints, near: Collection[int] | Sequence[int], margin: int) -> Mask:
    if not len(near):
        return np.zeros(len(values), dtype=bool)
    near_values = np.asarray(near, dtype=np.int64)
    after = np.searchsorted(near_values, values - margin)
    nearest = near_values[np.minimum(after, len(near_values) - 1)]
    is_within: Mask = (after < len(near_values)) & (nearest <= values + margin)
    return is_within


def _whole(schema: Schema, rows: Rows, name: str) -> Ints:
    return column_of(schema, rows, name)[0].astype(np.int64)


__all__ = [
    "NUM_RANKS",
    "RANKS",
    "STATISTICS",
    "Batch",
    "OverRanks",
    "Present",
    "VolumeSettings",
    "Window",
    "cut",
    "merge_rows",
    "plan_thinning",
    "ranks_schema",
    "thin_hosts",
    "thin_layers",
]
