"""Decides which old rows of a run are deleted, and deletes them window by window."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitals_collector.numbers.chunk_stats import CHUNK_STEPS
from vitals_collector.numbers.interface import HOST_STREAMS, DueWindow, Reason, StepWindow
from vitals_collector.retention.settings import VolumeSettings

if TYPE_CHECKING:
    from vitals_collector.numbers.lake import Lake

LAYERS = "layers"
_UNWATCHED = ("process",)
"""Streams that no watcher reads."""
_HOUR_NS = 3_600_000_000_000

Rest = Callable[[float], object]


class CurrentStep(NamedTuple):
    """Current step of a run, reported by rank 0: a decision may still concern its last steps."""

    attempt: int
    step: int


class RunHistory(NamedTuple):
    """Part of a run's history that decides which rows are deleted."""

    run_id: str
    attempts: Sequence[int]
    """Those that have rows of steps."""
    present: CurrentStep | None
    """Current step; None if rank 0 has reported none, and then no step is old."""
    near: Sequence[int]
    """Steps that a decision or an acting finding was at, and forks, ascending."""
    num_ranks: int
    """In addition to rank 0."""
    near_layers: Sequence[int] = ()
    """Steps of decisions and actionable findings, and forks, ascending."""
    near_unix_ns: Sequence[int] = ()
    """Times of decisions and actionable findings."""
    watched: Mapping[str, int] | None = None
    """By ``incarnation/stream``, the last number that the fleet detectors have processed; None if
    watching the run is suspended, and its rows do not wait."""

    def is_watched(self, due: DueWindow, stream: str) -> bool:
        """Return whether watchers are done with all rows of a window, so that it may be deleted."""
        if self.watched is None or stream in _UNWATCHED:
            return True
        done = self.watched
        return all(seq <= done.get(f"{who}/{stream}", -1) for who, seq in due.last_seqs.items())


class DeletionPass(NamedTuple):
    """Limits of one deletion: which rows, and for how long."""

    before_unix_ns: int
    """Only windows whose rows are all older."""
    now_unix_ns: int
    reason: Reason = "age"
    is_enough: Callable[[], bool] = lambda: False
    """Called before each window."""
    rest: Rest = lambda seconds: None
    """Called after each window with the seconds that it took, so that writers can continue."""


def roll_up_run(lake: "Lake", run: RunHistory, settings: VolumeSettings, when: DeletionPass) -> int:
    """Roll up the run's old steps, oldest first; return the number of deleted rows.

    After a StorageError the current window is unchanged, and those before it are done: call again.
    """
    if run.present is None or run.num_ranks <= settings.num_worst_ranks:
        return 0
    num = 0
    for attempt in sorted(run.attempts):
        while not when.is_enough():
            due = lake.next_window(run.run_id, attempt, window_size(settings))
            if due is None or not _is_window_due(due, "steps", run, settings, when):
                break
            began = time.monotonic()
            is_whole = _is_near_incident(due.window, run.near, settings.margin_steps)
            num += lake.roll_up(
                run.run_id,
                due.window,
                settings.num_worst_ranks,
                is_whole=is_whole,
                reason=when.reason,
            ).num_rows
            when.rest(time.monotonic() - began)
    return num


def downsample_run(
    lake: "Lake", run: RunHistory, settings: VolumeSettings, when: DeletionPass
) -> int:
    """Downsample the run's old layers and samples, as ``roll_up_run`` does with steps."""
    steps = window_size(settings)
    num = sum(
        _delete_due_rows(lake, run, LAYERS, attempt, steps, settings.layer_steps, settings, when)
        for attempt in sorted(lake.last_steps(run.run_id, LAYERS))  # its steps may be lost
    )
    every = settings.host_seconds * 1_000_000_000
    return num + sum(
        _delete_due_rows(lake, run, stream, 0, _HOUR_NS, every, settings, when)
        for stream in HOST_STREAMS
    )


def _delete_due_rows(
    lake: "Lake",
    run: RunHistory,
    stream: str,
    attempt: int,
    size: int,
    every: int,
    settings: VolumeSettings,
    when: DeletionPass,
) -> int:
    """Downsample a stream's old windows, oldest first; return the deleted rows."""
    num = 0
    near, margin = run.near_layers, settings.margin_steps
    if stream in HOST_STREAMS:
        near, margin = run.near_unix_ns, int(settings.margin_seconds * 1e9)
    while not when.is_enough():
        due = lake.next_window(run.run_id, attempt, size, stream)
        if due is None or not _is_window_due(due, stream, run, settings, when):
            break
        began = time.monotonic()
        is_whole = _is_near_incident(due.window, near, margin)
        num += lake.downsample_window(
            run.run_id, stream, due.window, every, is_whole=is_whole, reason=when.reason
        )
        when.rest(time.monotonic() - began)
    return num


def window_size(settings: VolumeSettings) -> int:
    """Return the steps of a window that is rolled up at once: a multiple of the chunk size."""
    return -(-settings.window_steps // CHUNK_STEPS) * CHUNK_STEPS


def _is_window_due(
    due: DueWindow, stream: str, run: RunHistory, settings: VolumeSettings, when: DeletionPass
) -> bool:
    """Return whether a window can be deleted: old, processed, and no decision can still keep it."""
    if due.newest_unix_ns >= when.before_unix_ns or not run.is_watched(due, stream):
        return False
    window = due.window
    if stream in HOST_STREAMS:
        return window.end_step + int(settings.margin_seconds * 1e9) < when.now_unix_ns
    if run.present is None:
        return False
    return is_past(window.attempt, window.end_step, run.present, settings)


def is_past(attempt: int, end_step: int, present: CurrentStep, settings: VolumeSettings) -> bool:
    """Return whether no later decision can keep the steps below ``end_step`` from deletion."""
    if attempt != present.attempt:
        return attempt < present.attempt
    return end_step + settings.margin_steps <= present.step


def _is_near_incident(window: StepWindow, near: Sequence[int], margin: int) -> bool:
    """Return whether a window stays: an ascending step is in it, or within ``margin`` of it."""
    i = int(np.searchsorted(near, window.first_step - margin))
    return i < len(near) and near[i] <= window.end_step - 1 + margin
