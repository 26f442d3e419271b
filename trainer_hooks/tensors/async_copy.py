"""Copies of a step's numbers to the host, which are read a fixed number of steps later."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trainer_hooks.tensors.events import record_event

Note = TypeVar("Note")


@dataclass(slots=True)
class _Pending(Generic[Note]):
    buffer: Tensor | list[float]
    event: torch.cuda.Event | None
    note: Note


class AsyncCopy(Generic[Note]):
    """A queue of exactly ``lag`` steps between the device and the host.

    It limits how many steps the host is ahead: ``push`` waits at most for the copy of ``lag`` steps
    ago.
    """

    def __init__(self, *, lag: int, size: int, device: torch.device) -> None:
        self.lag = lag
        self._cuda = device.type == "cuda"
        self._size = size
        self._free = [self._buffer() for _ in range(lag + 1)]
        self._pending: deque[_Pending[Note]] = deque()

    def _buffer(self) -> Tensor:
        return torch.zeros(self._size, dtype=torch.float64, device="cpu", pin_memory=self._cuda)

    def push(self, numbers: Tensor | list[float], note: Note) -> tuple[list[float], Note] | None:
        """Start the copy of this step's numbers; return those of ``lag`` steps ago.

        Numbers that are on the host already wait for their turn too: a lag is the same for all.
        """
        if isinstance(numbers, list):
            self._pending.append(_Pending(numbers, None, note))
            return self.pop() if len(self._pending) > self.lag else None
        # Empty if a Ctrl-C interrupted between taking and noting one, and training continued.
        buffer = self._free.pop() if self._free else self._buffer()
        buffer.copy_(numbers, non_blocking=True)
        event = record_event(numbers.device) if self._cuda else None
        self._pending.append(_Pending(buffer, event, note))
        return self.pop() if len(self._pending) > self.lag else None

    def pop(self, *, patience_seconds: float | None = None) -> tuple[list[float], Note] | None:
        """Return the oldest pending numbers, waiting only for their copy; or None.

        With ``patience_seconds`` the wait is limited, and numbers that do not arrive are discarded:
        at the end of a loop a collective that a lost peer never enters may block them.
        """
        if not self._pending:
            return None
        pending = self._pending.popleft()
        if pending.event is not None and not _arrived(pending.event, patience_seconds):
            return None
        if isinstance(pending.buffer, list):
            return pending.buffer, pending.note
        numbers: list[float] = pending.buffer.tolist()
        self._free.append(pending.buffer)
        return numbers, pending.note


def _arrived(event: torch.cuda.Event, patience_seconds: float | None) -> bool:
    """Wait for the event, at most ``patience_seconds`` if given; return whether it happened."""
    if patience_seconds is None:
        event.synchronize()
        return True
    give_up = time.monotonic() + patience_seconds
    while not event.query() and time.monotonic() < give_up:
        time.sleep(0.001)
    done: bool = event.query()
    return done
