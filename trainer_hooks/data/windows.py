"""Windows of batches that are passed over, in the loader's own coordinates: epoch and index."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from trainvitals.policy.plan import Window

MAX_WINDOWS = 1000
"""The newest are kept: a run goes back ten times at most, and each time by a window or two."""


def holds(windows: Iterable[Window], epoch: int, batch: int) -> bool:
    """Return whether a batch lies in one of the windows, as far as they lie in its epoch."""
    return any(
        w.epoch == epoch and w.first_batch <= batch < w.first_batch + w.num_batches for w in windows
    )


def carry_over(windows: Iterable[Window], epoch: int, length: int) -> list[Window]:
    """Return the windows with what lies beyond the end of an epoch moved into the next."""
    carried: list[Window] = []
    for window in windows:
        end = window.first_batch + window.num_batches
        if window.epoch != epoch or end <= length:
            carried.append(window)
            continue
        inside = max(0, length - window.first_batch)
        if inside:
            carried.append(replace(window, num_batches=inside))
        first = max(0, window.first_batch - length)
        rest = window.num_batches - inside
        carried.append(replace(window, epoch=epoch + 1, first_batch=first, num_batches=rest))
    return carried


def among(window: Window, num_ranks: int) -> Window:
    """Return the window where another number of ranks shares the data; it covers no less."""
    if window.num_ranks in (0, num_ranks):
        return window
    first = window.first_batch * window.num_ranks // num_ranks
    end = -(-(window.first_batch + window.num_batches) * window.num_ranks // num_ranks)
    return replace(window, first_batch=first, num_batches=end - first, num_ranks=num_ranks)
