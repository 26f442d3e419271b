"""Order of work between a GPU and its host, and copies that the host reads later."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor


def record_event(device: torch.device, *, timed: bool = False) -> torch.cuda.Event:
    """Record an event behind the current work of a CUDA device, and return it.

    It uses the stream of ``device``, whatever the process's current device is: an event on the
    stream of another GPU happens at once, and numbers would be read before their copy has ended. A
    host that waits for the event sleeps; otherwise it would spin, and a rank that waits for a hung
    GPU would look like one that computes. ``timed`` events have an ``elapsed_time``.
    """
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; waits only if that is the host.

    A copy to the host that does not wait may be read before it has ended.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


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
        """Return a new host buffer for a step's numbers, page-locked for a GPU."""
        return torch.zeros(self._size, dtype=torch.float64, device="cpu", pin_memory=self._cuda)

    def push(self, numbers: Tensor | list[float], note: Note) -> tuple[list[float], Note] | None:
        """Start the copy of this step's numbers to the host; return those of ``lag`` steps ago.

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
    """Wait for a copy's event, at most ``patience_seconds`` if given; return whether it came."""
    if patience_seconds is None:
        event.synchronize()
        return True
    give_up = time.monotonic() + patience_seconds
    while not event.query() and time.monotonic() < give_up:
        time.sleep(0.001)
    done: bool = event.query()
    return done
