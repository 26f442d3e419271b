"""Starts a process for each target, and restarts it if it failed or hangs.

A process writes a byte to a pipe after each call of the tracker's library. One that is silent for
long is killed with all its children, and so are the remaining children of a failed one: a tracker's
child must not write at the same time as the next process. This process loads no tracker.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitals_plugins.bridges.mirrors.worker import TrackerTarget

HANG_SECONDS = 180.0
"""A tracker that is silent for this long hangs; W&B itself gives a login 90 s."""
START_SECONDS = 900.0
"""Longer until the first message: a long run's directory is read, and the tracker opened."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
STOP_SECONDS = 5.0
HELD, USAGE = 3, 2
"""Exit codes after which a restart would not help: another process mirrors the run to this target,
or the request is invalid."""

CommandOf = Callable[[TrackerTarget, int], Sequence[str]]
"""Returns the command of a target's process, which writes to the pipe with that number."""


class _MirrorProcess:
    """One target's process, or the pause before the next."""

    def __init__(
        self, target: TrackerTarget, command_of: CommandOf, say: Callable[[str], None]
    ) -> None:
        self.target = target
        self._command_of, self._say = command_of, say
        self._process: subprocess.Popen[bytes] | None = None
        self.pipe = -1
        self._seen = 0.0
        self._num_failures = 0
        self._due = 0.0
        self.exit_code: int | None = None
        """Its final exit code; None while it runs."""

    def start_or_stop(self, now: float, hang_seconds: float, start_seconds: float) -> None:
        """Start the mirror's process if it is due, end it if it hangs."""
        if self._process is None:
            if now >= self._due:
                self._start_process(now, start_seconds)
        elif now - self._seen > hang_seconds:
            self._schedule_restart(f"shows no sign of life for {hang_seconds:g} s", now)

    def _start_process(self, now: float, start_seconds: float) -> None:
        """Start the process that mirrors the run to this target."""
        self.pipe, theirs = os.pipe()
        self._process = subprocess.Popen(
            self._command_of(self.target, theirs),
            pass_fds=[theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = now + start_seconds

    def poll_messages(self, now: float) -> None:
        """Read the messages of the mirror's process, or its end."""
        assert self._process is not None
        signs = os.read(self.pipe, 65_536)
        if signs:
            self._seen = now
            if b"+" in signs:
                self._num_failures = 0
            return
        # The pipe closes when it ends; its children may have kept it open until now.
        code = self._process.wait()
        if code in (0, HELD, USAGE):
            self.exit_code = code
            self._clear()
        else:
            how = f"exit code {code}, its message is above" if code > 0 else f"signal {-code}"
            self._schedule_restart(f"failed ({how})", now)

    def _schedule_restart(self, why: str, now: float) -> None:
        """Kill what remains of a failed mirror, and restart it after a growing pause."""
        self._clear()
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self._num_failures, 20))
        self._num_failures += 1
        self._due = now + pause
        self._say(
            f"{self.target}: {why}; the training is not affected. Next try in {pause:g} s, from "
            "where it was"
        )

    def _clear(self) -> None:
        """Kill the mirror's remaining children, also those with their own session (W&B's)."""
        assert self._process is not None
        below = _descendant_pids(self._process.pid)
        for end, pid in ((os.killpg, self._process.pid), *((os.kill, pid) for pid in below)):
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.pipe)
        self._process, self.pipe = None, -1

    def stop(self) -> None:
        """Ask the mirror's process to end, and kill it if it does not."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._clear()


def supervise(
    targets: Sequence[TrackerTarget],
    command_of: CommandOf,
    *,
    say: Callable[[str], None],
    hang_seconds: float = HANG_SECONDS,
    start_seconds: float = START_SECONDS,
) -> dict[TrackerTarget, int]:
    """Restart the mirrors' processes until all have ended permanently; return their exit codes.

    SIGTERM and Ctrl-C end them all and leave as KeyboardInterrupt.
    """
    children = [_MirrorProcess(target, command_of, say) for target in targets]
    before = signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    try:
        while alive := [child for child in children if child.exit_code is None]:
            now = time.monotonic()
            for child in alive:
                child.start_or_stop(now, hang_seconds, start_seconds)
            pipes = {child.pipe: child for child in alive if child.pipe >= 0}
            readable, _, _ = select.select(list(pipes), [], [], min(0.5, hang_seconds / 4))
            for pipe in readable:
                pipes[pipe].poll_messages(time.monotonic())
    finally:
        for child in children:
            child.stop()
        signal.signal(signal.SIGTERM, before)
    return {child.target: child.exit_code or 0 for child in children}


def _descendant_pids(pid: int) -> list[int]:
    """Return all processes that a living mirror started, and those that these did."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended, or this is not Linux
        return []
    return [each for child in children for each in (int(child), *_descendant_pids(int(child)))]


def _raise_keyboard_interrupt(number: int, frame: object) -> None:
    """Let SIGTERM stop the mirrors as Ctrl-C does."""
    raise KeyboardInterrupt
