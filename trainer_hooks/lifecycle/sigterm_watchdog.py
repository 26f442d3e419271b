"""Watches the time between SIGTERM and SIGKILL while the main thread may be blocked.

Python runs a signal handler between two instructions of the main thread, so never while that waits
in a collective for a dead rank. The signal wakeup descriptor is written immediately, and a thread
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
    """Calls ``act`` on its own thread ``seconds`` after SIGTERM, unless ``cancel`` was called.

    Create it on the main thread. If another component owns the wakeup descriptor (an event loop),
    it does nothing, and ``available`` is False.
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
        """Act on shutdown after SIGTERM's grace period, unless the main thread handled it."""
        while (number := os.read(self._reader, 1)) not in (b"", _CLOSED):
            if number[0] == signal.SIGTERM and not self._met.wait(self._seconds):
                self._act()
                self._met.set()  # act only once
        os.close(self._reader)

    def cancel(self) -> None:
        """Cancel the action at shutdown: the main thread handles the signal."""
        self._met.set()

    def close(self) -> None:
        """Restore the wakeup descriptor at the loop's shutdown; call on the main thread."""
        self.cancel()
        if self.available and os.getpid() == self._pid:
            self.available = False
            _open.discard(self)
            theirs = signal.set_wakeup_fd(-1)
            if theirs != self._writer:  # an event loop has replaced it since
                signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
            with suppress(BlockingIOError):
                os.write(self._writer, _CLOSED)  # a forked worker may hold the other end open
            os.close(self._writer)


_CLOSED = b"\0"
"""Not a signal number."""

_open: WeakSet[SigtermWatchdog] = WeakSet()


def _disable_in_child() -> None:
    """Disable a shutdown's watchdog in a forked worker: its SIGTERM must not act for the parent."""
    if _open:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_disable_in_child)
