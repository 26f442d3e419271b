"""Points of curves: put together, and stitched over the attempts of a run. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.views import Branch

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


def join(parts: Sequence[Points]) -> Points:
    """Return the points of all parts, one part after the other."""
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
    """What stitching needs to know of an attempt."""

    id: int
    parent: int | None
    fork_step: int


def lineage(attempts: Iterable[AttemptRow]) -> dict[int, float]:
    """Return the present attempt and its ancestors, each with the step its rows end before.

    The present attempt is the newest that nothing forked from. An ancestor counts only below the
    lowest fork on the way to it: a fork behind the parent's own beginning leaves nothing of it.
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


def ends(attempts: Iterable[AttemptRow]) -> Callable[[int], float]:
    """Return what gives for any attempt the step before which its rows are of the lineage.

    An attempt that no event told of yet (rows can arrive before events) is part of it.
    """
    attempts = list(attempts)
    ids, bounds = {attempt.id for attempt in attempts}, lineage(attempts)
    return lambda attempt: bounds.get(attempt, -math.inf) if attempt in ids else math.inf


def stitch(points: Points, attempts: Sequence[AttemptRow], branch: Branch) -> Points:
    """Return the branch's points by step, then attempt; of a step written twice the newest row."""
    if not _is_rising(points.step):
        order = np.lexsort((points.time_unix_ns, points.attempt, points.step))
        points = points.take(order)
        points = points.take(_last_of_each(points.step, points.attempt))
    if branch == "all":
        return points
    is_kept = is_of_lineage(points.attempt, points.step, ends(attempts))
    if branch == "discarded":
        return points.take(~is_kept)
    if not is_kept.all():
        points = points.take(is_kept)
    return points if _is_rising(points.step) else points.take(_last_of_each(points.step))


def is_of_lineage(attempt: Ints, step: Ints, end_of: Callable[[int], float]) -> Mask:
    """Return which rows are of the lineage; all others were rolled back. ``end_of``: ``ends``."""
    is_kept = np.zeros(len(step), dtype=np.bool_)
    for attempt_id in _distinct(attempt):
        is_kept |= (attempt == attempt_id) & (step < end_of(attempt_id))
    return is_kept


def _distinct(values: Ints) -> list[int]:
    """Return which values there are; quick where the same ones lie side by side."""
    is_new = np.concatenate(([True], values[1:] != values[:-1]))[: len(values)]
    distinct: list[int] = np.unique(values[is_new]).tolist()
    return distinct


def _is_rising(values: Ints) -> bool:
    return bool(np.all(values[1:] > values[:-1]))


def by_time(points: Points) -> Points:
    """Return points that have no step (GPUs, hosts, processes) in the order of their time.

    Of points of one time the order is that of attempts and values: the same wherever they lay.
    """
    times = points.time_unix_ns
    if not _is_rising(times):
        points = points.take(np.lexsort((points.value, points.attempt, times)))
    return points


def _last_of_each(*keys: Ints) -> Mask:
    """Return where the next row has other keys; the rows are sorted by them."""
    is_last = np.ones(len(keys[0]), dtype=bool)
    if len(is_last) > 1:
        is_last[:-1] = np.any([key[:-1] != key[1:] for key in keys], axis=0)
    return is_last
