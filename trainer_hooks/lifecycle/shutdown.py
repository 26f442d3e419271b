"""Records how a rank ends: closed, exited without closing, or SIGTERM.

Nothing here enters or waits for a collective, because a peer may be gone. Without checkpoints only
rank 0 handles SIGTERM, and records the end of the run; other ranks die of it as without Vitals.
With checkpoints, every rank handles it: the signal becomes a number in the next reduce vector, so
that all ranks save together and stop. If they cannot meet in time, each saves its part alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.lifecycle.sigterm_watchdog import SigtermWatchdog
from trainer_hooks.step.context import RunContext
from trainvitals.records import RunEnded

if TYPE_CHECKING:
    from trainer_hooks.lifecycle.loop import MonitorBase

_LOG = logging.getLogger("trainvitals")

EndState = Literal["finished", "interrupted", "failed"]
Handler = Callable[[int, FrameType | None], Any] | int | None


class Shutdown:
    """Records once how this rank's part of the run ended."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.sigterm = run.features[SigtermFeature]
        """Knows of a SIGTERM on this rank until a step has reported it to the others."""
        self._pid = os.getpid()
        self._said = self.interrupted = False
        recovery = run.recovery
        in_main = threading.current_thread() is threading.main_thread()
        self._grace = None
        seconds = 0.0
        if recovery is not None and recovery.is_on_disk:
            seconds = recovery.settings.grace_seconds
        if in_main and seconds > 0:
            self._grace = SigtermWatchdog(self._save_alone_and_exit, seconds=seconds / 3)

    @property
    def is_ours(self) -> bool:
        """Return whether this process opened the loop's journal; False in a forked child."""
        return os.getpid() == self._pid

    @property
    def is_rank0(self) -> bool:
        """Whether this rank records the end of the run."""
        return self._run.is_rank0

    @property
    def saves(self) -> bool:
        """Whether SIGTERM makes this rank save a checkpoint."""
        return self._grace is not None

    def cancel_lone_save(self) -> None:
        """Cancel the separate save: all ranks have received SIGTERM, or the loop has ended."""
        if self._grace is not None:
            self._grace.cancel()

    def _save_alone_and_exit(self) -> None:
        """Save this rank's part and end the process: the ranks did not meet in time.

        Called on the watchdog thread. A loop with its own handler is not ended: it may be saving
        too.
        """
        ours = self.sigterm.is_received or signal.getsignal(signal.SIGTERM) is _on_sigterm
        ends = ours and not exits_by_itself()
        try:
            self.save_alone()
            if ends:
                self.interrupted = True
                self.record_end("interrupted", "SIGTERM")
        finally:
            if ends:
                os._exit(EXIT_CODE)

    def save_alone(self) -> None:
        """Save this rank's part of its last snapshot, without collectives."""
        with self._run.faults.fail_open("save_alone"):
            if self._run.recovery is not None:
                self._run.recovery.save_alone()

    def record_end(self, state: EndState, reason: str) -> None:
        """Write the last event: rank 0 for the run, another rank only for its own failure."""
        if self._said or not self.is_ours:
            return
        self._said = True
        run = self._run
        if self.interrupted and state == "finished":
            state, reason = "interrupted", "SIGTERM"
        if run.halted is None and (run.is_rank0 or state == "failed"):
            event = RunEnded(state=state, reason=reason)
            run.emitter.event(event, step=run.last_step + 1, attempt=run.attempt)
        run.emitter.close()

    def close(self) -> None:
        """Stop the watchdog of SIGTERM's grace period."""
        if self._grace is not None:
            self._grace.close()

    def defer_call(self, call: Callable[[], None]) -> bool:
        """Run ``call`` after the current write of the main thread; False if it is not writing."""
        return self._run.emitter.defer_call(call)


EXIT_CODE = 128 + signal.SIGTERM
"""Exit code after SIGTERM: not 0, which a scheduler would treat as finished."""

open_monitors: WeakSet[MonitorBase] = WeakSet()
"""Monitors that are not closed yet."""
_previous: Handler = None


def track_monitor(monitor: MonitorBase) -> None:
    """Track this monitor until it is closed, so that a shutdown of the process ends it."""
    open_monitors.add(monitor)
    if monitor.shutdown.is_rank0 or monitor.shutdown.saves:
        _install_sigterm_handler()


def untrack_monitor(monitor: MonitorBase) -> None:
    """Stop tracking this monitor; restore the SIGTERM handler if it was the last one.

    If a SIGTERM arrived too late for a step to handle it, end the process now.
    """
    global _previous
    open_monitors.discard(monitor)
    monitor.shutdown.close()
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and not open_monitors and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, _previous)
        if _previous == signal.SIG_DFL and monitor.shutdown.sigterm.is_received:
            os.kill(os.getpid(), signal.SIGTERM)
        _previous = None


def is_interactive() -> bool:
    """Return whether Python runs the loop interactively, in a REPL or a notebook."""
    return hasattr(sys, "ps1")


def close_earlier(optimizers: Sequence[object]) -> None:
    """Close open monitors of these optimizers, if a notebook cell is run again.

    In a program that is a mistake, and refused.
    """
    if not is_interactive():
        return
    for monitor in [m for m in open_monitors if m.shutdown.is_ours]:
        if any(optimizer is other for optimizer in monitor.optimizers for other in optimizers):
            _LOG.warning(
                "vitals: closed the earlier monitor of this optimizer, because watch() made a new "
                "one"
            )
            monitor.end("interrupted", "its optimizer was given to another monitor")


@atexit.register
def _at_exit() -> None:
    """End monitors still open at interpreter exit, with the uncaught error if any.

    Except in an interactive session, where the last error may belong to any earlier line.
    """
    error = None if is_interactive() else getattr(sys, "last_value", None)
    for monitor in list(open_monitors):
        if error is None:
            monitor.end(*monitor.left_open)
        else:
            monitor.end_by(error)


def _install_sigterm_handler() -> None:
    """Install the SIGTERM handler, on the main thread, unless it is ignored or not Python's."""
    global _previous
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGTERM)
    if current in (None, signal.SIG_IGN, _on_sigterm):
        return
    _previous = current
    signal.signal(signal.SIGTERM, _on_sigterm)


def exits_by_itself() -> bool:
    """Return whether the loop has its own SIGTERM handler."""
    return callable(_previous)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Record the interruption, then do what would have happened without Vitals.

    The signal may have interrupted a write by Vitals on this thread, which holds a lock. Then the
    handler runs after that write.
    """
    ours = [monitor for monitor in open_monitors if monitor.shutdown.is_ours]
    if any(m.shutdown.defer_call(lambda: _on_sigterm(number, None)) for m in ours):
        return
    default = _previous in (None, signal.SIG_DFL)
    saving = [monitor for monitor in ours if monitor.shutdown.saves]
    for monitor in saving:
        monitor.shutdown.sigterm.is_received = True
    dying = default and not saving
    if dying:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the shutdown
    for monitor in ours:
        monitor.shutdown.interrupted = monitor not in saving
        if dying:
            monitor.shutdown.record_end("interrupted", "SIGTERM")
    if dying:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif callable(_previous):  # the loop has its own handler
        _previous(number, frame)
