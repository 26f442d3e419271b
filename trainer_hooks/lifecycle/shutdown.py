"""How a rank says that it ends, whichever way it comes: an exit nobody closed for, or SIGTERM.

Nothing here enters a collective, nor waits for one: a peer may be gone. SIGTERM is taken on rank 0
alone, which speaks for the run; every other rank dies of it as it did without us. Where there are
checkpoints every rank takes it: it becomes a flag in the next step's numbers, so that all ranks
save together and stop; where they cannot meet in time, each saves its part alone.
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
from typing import Any, Literal, Protocol
from weakref import WeakSet

from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.lifecycle.sigterm_watchdog import SigtermWatchdog
from trainer_hooks.step.context import RunContext
from trainvitals.records import RunEnded

_LOG = logging.getLogger("trainvitals")

EndState = Literal["finished", "interrupted", "failed"]
Handler = Callable[[int, FrameType | None], Any] | int | None


class Open(Protocol):
    """A monitor that is not closed yet."""

    shutdown: Shutdown
    left_open: tuple[EndState, str]
    """How it ended, where nobody closes it."""

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """What it guards."""

    def end(self, state: EndState, reason: str) -> None:
        """Close it."""

    def end_by(self, error: BaseException) -> None:
        """Close it, as the error tells."""


class Shutdown:
    """Says once how this rank's part of the run ended."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._sigterm = run.features[SigtermFeature]
        self._pid = os.getpid()
        self._said = self.interrupted = False
        recovery = run.recovery
        in_main = threading.current_thread() is threading.main_thread()
        self._grace = None
        if recovery is not None and in_main and recovery.settings.grace_seconds > 0:
            self._grace = SigtermWatchdog(self._alone, seconds=recovery.settings.grace_seconds / 3)

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the journal; a forked child did not."""
        return os.getpid() == self._pid

    @property
    def is_rank0(self) -> bool:
        """Whether this rank speaks for the run."""
        return self._run.is_rank0

    @property
    def saves(self) -> bool:
        """Whether SIGTERM is to be answered with a checkpoint."""
        return self._grace is not None

    def on_sigterm(self) -> None:
        """Let the next step tell all ranks that this one was sent SIGTERM."""
        self._sigterm.is_received = True

    @property
    def unanswered(self) -> bool:
        """Whether this rank was sent SIGTERM and no step was left to tell the others."""
        return self._sigterm.is_received

    def met(self) -> None:
        """All ranks have heard it, or the loop is over: no rank saves alone any more."""
        if self._grace is not None:
            self._grace.met()

    def _alone(self) -> None:
        """Save this rank's part, and end: the others were not met in time. Not the main thread.

        A loop with a handler of its own is not ended: it may be saving too.
        """
        ours = self._sigterm.is_received or signal.getsignal(signal.SIGTERM) is _on_sigterm
        ends = ours and not exits_by_itself()
        try:
            self.save_alone()
            if ends:
                self.interrupted = True
                self.say("interrupted", "SIGTERM")
        finally:
            if ends:
                os._exit(EXIT_CODE)

    def save_alone(self) -> None:
        """Save this rank's part of its last snapshot, asking nobody."""
        with self._run.faults.fail_open("save_alone"):
            if self._run.recovery is not None:
                self._run.recovery.save_alone()

    def say(self, state: EndState, reason: str) -> None:
        """Write the last event; rank 0 for the run, another rank only of its own failure."""
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
        """Leave SIGTERM's time of grace to others."""
        if self._grace is not None:
            self._grace.close()

    def put_off(self, call: Callable[[], None]) -> bool:
        """Have ``call`` made after the write the main thread is in; False where it is in none."""
        return self._run.emitter.put_off(call)


EXIT_CODE = 128 + signal.SIGTERM
"""Of a run that was told to stop: not 0, which a scheduler would take for finished."""

open_monitors: WeakSet[Open] = WeakSet()
"""Monitors that nobody has closed yet."""
_previous: Handler = None


def opened(monitor: Open) -> None:
    """Look after this monitor until it is closed."""
    open_monitors.add(monitor)
    if monitor.shutdown.is_rank0 or monitor.shutdown.saves:
        _listen()


def closed(monitor: Open) -> None:
    """Leave this monitor, and SIGTERM as it was found once no other needs it.

    One that came too late for a step to answer it ends the process now.
    """
    global _previous
    open_monitors.discard(monitor)
    monitor.shutdown.close()
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and not open_monitors and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, _previous)
        if _previous == signal.SIG_DFL and monitor.shutdown.unanswered:
            os.kill(os.getpid(), signal.SIGTERM)
        _previous = None


def is_interactive() -> bool:
    """Return whether a person types line by line, or cell by cell: Python's own way to tell."""
    return hasattr(sys, "ps1")


def close_earlier(optimizers: Sequence[object]) -> None:
    """Close the monitors that guard one of these still, where a person runs a cell again.

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
    """End what nobody closed. An error that nobody caught has been shown by now, and is known.

    But for a session: there it may be of any earlier line.
    """
    error = None if is_interactive() else getattr(sys, "last_value", None)
    for monitor in list(open_monitors):
        if error is None:
            monitor.end(*monitor.left_open)
        else:
            monitor.end_by(error)


def _listen() -> None:
    """Take SIGTERM, in the main thread only; where it is ignored or not Python's, leave it."""
    global _previous
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGTERM)
    if current in (None, signal.SIG_IGN, _on_sigterm):
        return
    _previous = current
    signal.signal(signal.SIGTERM, _on_sigterm)


def exits_by_itself() -> bool:
    """Return whether the loop has a way of its own to end on SIGTERM."""
    return callable(_previous)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Say that the run was interrupted, then do what would have been done without us.

    It may have come in the middle of a write of ours, whose lock this very thread holds: then it
    waits for that write to end.
    """
    ours = [monitor for monitor in open_monitors if monitor.shutdown.is_ours]
    if any(m.shutdown.put_off(lambda: _on_sigterm(number, None)) for m in ours):
        return
    default = _previous in (None, signal.SIG_DFL)
    saving = [monitor for monitor in ours if monitor.shutdown.saves]
    for monitor in saving:
        monitor.shutdown.on_sigterm()
    dying = default and not saving
    if dying:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the goodbye short
    for monitor in ours:
        monitor.shutdown.interrupted = monitor not in saving
        if dying:
            monitor.shutdown.say("interrupted", "SIGTERM")
    if dying:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif callable(_previous):  # the loop has its own way to end
        _previous(number, frame)
