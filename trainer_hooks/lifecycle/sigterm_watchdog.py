"""The time between SIGTERM and SIGKILL, watched beside a main thread that may be stuck.

A signal handler of Python runs between two of its instructions: never, while the main thread waits
in a collective for a rank that is gone. The wakeup descriptor is written at once, and a thread
reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet


class SigtermWatchdog:
    """Calls ``act`` in a thread of its own, ``seconds`` after SIGTERM, unless ``met`` came first.

    Make it in the main thread. Where somebody else owns the wakeup descriptor (an event loop), it
    does nothing, and ``available`` says so.
    """

    def __init__(self, act: Callable[[], None], *, seconds: float) -> None:
        self._act = act
        self._seconds = seconds
        self._met = threading.Event()
        self._pid = os.getpid()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._reader, True)
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self.available = before == -1
        if not self.available:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            os.close(self._reader)
            os.close(self._writer)
            return
        _open.add(self)
        threading.Thread(target=self._watch, name="vitals-grace", daemon=True).start()

    def _watch(self) -> None:
        while (number := os.read(self._reader, 1)) not in (b"", _CLOSED):
            if number[0] == signal.SIGTERM and not self._met.wait(self._seconds):
                self._act()
                self._met.set()  # once
        os.close(self._reader)

    def met(self) -> None:
        """The main thread has taken it in hand: nothing is to be done beside it."""
        self._met.set()

    def close(self) -> None:
        """Give the descriptor back; from the main thread."""
        self.met()
        if self.available and os.getpid() == self._pid:
            self.available = False
            _open.discard(self)
            theirs = signal.set_wakeup_fd(-1)
            if theirs != self._writer:  # an event loop has taken it meanwhile
                signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
            with suppress(BlockingIOError):
                os.write(self._writer, _CLOSED)  # a forked worker may hold the other end open
            os.close(self._writer)


_CLOSED = b"\0"
"""Number of no signal."""

_open: WeakSet[SigtermWatchdog] = WeakSet()


def _in_child() -> None:
    """A forked worker that is sent SIGTERM must not speak for its parent."""
    if _open:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)
