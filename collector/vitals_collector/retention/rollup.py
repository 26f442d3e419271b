"""Says which old rows of a run go, and lets its numbers take them away, window by window."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitals_collector.numbers.chunk_stats import STRETCH
from vitals_collector.numbers.interface import HOST_STREAMS, Due, Numbers, Reason, StepWindow
from vitals_collector.retention.settings import VolumeSettings

if TYPE_CHECKING:
    from vitals_collector.numbers.lake import Lake

LAYERS = "layers"
_UNWATCHED = ("process",)
"""Streams that no watcher reads."""
_HOUR_NS = 3_600_000_000_000

Rest = Callable[[float], object]


class Present(NamedTuple):
    """How far a run is, as rank 0 tells it: a decision may still come about its last steps."""

    attempt: int
    step: int


class RunHistory(NamedTuple):
    """What deciding needs to know of a run."""

    run_id: str
    attempts: Sequence[int]
    """Those that have rows of steps."""
    present: Present | None
    """How far the run is; None where rank 0 has told nothing, and no step is old."""
    near: Sequence[int]
    """Steps that a decision or an acting finding was at, and forks, ascending."""
    num_ranks: int
    """Beside rank 0."""
    near_layers: Sequence[int] = ()
    """The same, and the steps of all other findings."""
    near_unix_ns: Sequence[int] = ()
    """When decisions were made and acting findings raised."""
    watched: Mapping[str, int] | None = None
    """By ``incarnation/stream``, how far the watchers are done with the rows; None where they have
    set the run aside, and its rows wait for them no more."""

    def is_watched(self, due: Due, stream: str) -> bool:
        """Return whether the watchers are done with all rows of a window."""
        if self.watched is None or stream in _UNWATCHED:
            return True
        done = self.watched
        return all(seq <= done.get(f"{who}/{stream}", -1) for who, seq in due.last_seqs.items())


class When(NamedTuple):
    """Which rows go, and how long to go on."""

    before_unix_ns: int
    """Only windows whose rows are all older."""
    now_unix_ns: int
    reason: Reason = "age"
    is_enough: Callable[[], bool] = lambda: False
    """Asked before each window."""
    rest: Rest = lambda seconds: None
    """Called behind each window with the seconds that it took: writers have their turn."""


def level_run(numbers: Numbers, run: RunHistory, settings: VolumeSettings, when: When) -> int:
    """Make levels of the run's old steps, oldest first; return how many rows were taken away.

    Raises:
        StorageError: the window at hand is as it was, those before it are done; call again.
    """
    if run.present is None or run.num_ranks <= settings.num_worst_ranks:
        return 0
    num = 0
    for attempt in sorted(run.attempts):
        while not when.is_enough():
            due = numbers.next_window(run.run_id, attempt, window_size(settings))
            if due is None or not _is_due(due, "steps", run, settings, when):
                break
            began = time.monotonic()
            is_whole = _is_near(due.window, run.near, settings.margin_steps)
            num += numbers.level(
                run.run_id,
                due.window,
                settings.num_worst_ranks,
                is_whole=is_whole,
                reason=when.reason,
            ).num_rows
            when.rest(time.monotonic() - began)
    return num


def thin_run(lake: "Lake", run: RunHistory, settings: VolumeSettings, when: When) -> int:
    """Thin the run's old layers and samples; return how many rows were taken away.

    Raises:
        StorageError: the window at hand is as it was, those before it are done; call again.
    """
    steps = window_size(settings)
    num = sum(
        _thin(lake, run, LAYERS, attempt, steps, settings.layer_steps, settings, when)
        for attempt in sorted(lake.last_steps(run.run_id, LAYERS))  # its steps may be lost
    )
    every = settings.host_seconds * 1_000_000_000
    return num + sum(
        _thin(lake, run, stream, 0, _HOUR_NS, every, settings, when) for stream in HOST_STREAMS
    )


def _thin(
    lake: "Lake",
    run: RunHistory,
    stream: str,
    attempt: int,
    size: int,
    every: int,
    settings: VolumeSettings,
    when: When,
) -> int:
    num = 0
    near, margin = run.near_layers, settings.margin_steps
    if stream in HOST_STREAMS:
        near, margin = run.near_unix_ns, int(settings.margin_seconds * 1e9)
    while not when.is_enough():
        due = lake.next_window(run.run_id, attempt, size, stream)
        if due is None or not _is_due(due, stream, run, settings, when):
            break
        began = time.monotonic()
        is_whole = _is_near(due.window, near, margin)
        num += lake.thin(
            run.run_id, stream, due.window, every, is_whole=is_whole, reason=when.reason
        )
        when.rest(time.monotonic() - began)
    return num


def window_size(settings: VolumeSettings) -> int:
    """Return the steps of a window: whole stretches."""
    return -(-settings.window_steps // STRETCH) * STRETCH


def _is_due(due: Due, stream: str, run: RunHistory, settings: VolumeSettings, when: When) -> bool:
    """Return whether a window is old, watched, and nothing can come that would have kept it."""
    if due.newest_unix_ns >= when.before_unix_ns or not run.is_watched(due, stream):
        return False
    window = due.window
    if stream in HOST_STREAMS:
        return window.end_step + int(settings.margin_seconds * 1e9) < when.now_unix_ns
    if run.present is None:
        return False
    return is_past(window.attempt, window.end_step, run.present, settings)


def is_past(attempt: int, end_step: int, present: Present, settings: VolumeSettings) -> bool:
    """Return whether no decision can come any more that would have kept the steps below one."""
    if attempt != present.attempt:
        return attempt < present.attempt
    return end_step + settings.margin_steps <= present.step


def _is_near(window: StepWindow, near: Sequence[int], margin: int) -> bool:
    """Return whether one of the places, which ascend, is in the window or so close to it."""
    i = int(np.searchsorted(near, window.first_step - margin))
    return i < len(near) and near[i] <= window.end_step - 1 + margin


__all__ = ["Present", "RunHistory", "When", "level_run", "thin_run", "window_size"]
