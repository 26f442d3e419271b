"""Numbers come to the host a fixed number of steps late, so that nothing waits for the GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


@dataclass(slots=True)
class _Pending(Generic[Note]):
    host: Tensor
    event: torch.cuda.Event | None
    note: Note


class Readback(Generic[Note]):
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
        host = self._free.pop() if self._free else self._buffer()
        host.copy_(numbers, non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_Pending(host, event, note))
        return self.pop() if len(self._pending) > self.lag else None

    def pop(self) -> tuple[list[float], Note] | None:
        """Return the oldest pending numbers, waiting for their copy alone; or None."""
        if not self._pending:
            return None
        pending = self._pending.popleft()
        if pending.event is not None:
            pending.event.synchronize()
        numbers: list[float] = pending.host.tolist()
        self._free.append(pending.host)
        return numbers, pending.note
