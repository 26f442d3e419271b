"""Numbers come to the host a fixed number of steps late, so that nothing waits for the GPU."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


@dataclass(slots=True)
class _Pending(Generic[Note]):
    controller: Tensor
    event: torch.cuda.Event | None
    note: Note


class AsyncCopy(Generic[Note]):
    """A queue of exactly ``lag`` steps between the device and the host.

    The host's run-ahead is bounded by it: ``push`` waits at most for the copy of ``lag`` steps ago.
    """

    def __init__(self, *, lag: int, size: int, device: torch.device) -> None:
        self.lag = lag
        self._cuda = device.type == "cuda"
        self._size = size
        self._free = [self._buffer() for _ in range(lag + 1)]
        self._pending: deque[_Pending[Note]] = deque()

    def _buffer(self) -> Tensor:
        return torch.zeros(self._size, dtype=torch.float64, device="cpu", pin_memory=self._cuda)

    def push(self, numbers: Tensor, note: Note) -> tuple[list[float], Note] | None:
        """Start the copy of this step's numbers; return those of ``lag`` steps ago."""
        # None is left where a Ctrl-C came between taking one and noting it, and training went on.
        controller = self._free.pop() if self._free else self._buffer()
        controller.copy_(numbers, non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_Pending(controller, event, note))
        return self.pop() if len(self._pending) > self.lag else None

    def pop(self, *, patience_seconds: float | None = None) -> tuple[list[float], Note] | None:
        """Return the oldest pending numbers, waiting for their copy alone; or None.

        With ``patience_seconds`` the wait is bounded, and numbers that did not come are given up:
        at the end of a loop they may stand behind a collective that a lost peer never enters.
        """
        if not self._pending:
            return None
        pending = self._pending.popleft()
        if pending.event is not None and not _arrived(pending.event, patience_seconds):
            return None
        numbers: list[float] = pending.controller.tolist()
        self._free.append(pending.controller)
        return numbers, pending.note


def _arrived(event: torch.cuda.Event, patience_seconds: float | None) -> bool:
    """Wait for the event, for ever or so long; return whether it happened."""
    if patience_seconds is None:
        event.synchronize()
        return True
    give_up = time.monotonic() + patience_seconds
    while not event.query() and time.monotonic() < give_up:
        time.sleep(0.001)
    done: bool = event.query()
    return done
