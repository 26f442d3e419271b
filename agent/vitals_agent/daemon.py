"""The agent as a process: its start conditions, its loop, and its end."""

import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal

from trainvitals.errors import UsageError, VitalsError
from trainvitals.identity import Identity
from trainvitals.io.journal import find_journals
from trainvitals.io.rundir import RunDir
from trainvitals.printable import LineFormatter
from vitals_agent.agent import Agent
from vitals_agent.backoff import Backoff
from vitals_agent.io_loop import IoThread
from vitals_agent.process import RankProcess
from vitals_agent.state_dir import AgentStateDir
from vitals_agent.tailer import journal_identity

log = logging.getLogger("vitals_agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Timing of the loop, and the conditions of its end."""

    interval_seconds: float = 0.5
    """Time from the end of a cycle to the next."""
    child: bool = False
    """Started by a rank: end with the ranks, and exit silently if another agent exists."""
    once: bool = False
    """Run one cycle and end."""
    lingers: bool = False
    """A child whose ranks have ended: start with their rows, and end once a collector has them."""
    drain_grace_seconds: float = 15.0
    """Time that a child waits, after the last rank has ended, for a collector that does not
    respond, or a full disk."""
    stop_grace_seconds: float = 5.0
    """Time that a stopped child waits for its ranks: they receive the same signal."""
    lock_wait_seconds: float = 2.0
    """Time that a child waits for another agent that may be about to end."""
    last_turn_seconds: float = 5.0
    """Time that the end waits for requests in flight to the collector."""


class AgentStopCondition:
    """Decides when the loop ends. Reads no clock and no signal; remembers start times."""

    def __init__(self, config: LoopConfig) -> None:
        self._config = config
        self._idle_since: float | None = None
        self._stopping_since: float | None = None

    def reached(
        self,
        now: float,
        *,
        num_living: int,
        has_served: bool,
        drained: bool,
        parent_alive: bool,
        num_signals: int,
    ) -> bool:
        """Return whether to end after this cycle.

        A child that has seen no rank yet waits as long as its parent lives. While a rank lives here
        it stays, even without its parent: that rank's last rows matter most. It does not wait
        indefinitely for rows that cannot be stored: the disk may be full permanently.
        """
        if self._config.once or num_signals > (1 if self._config.child else 0):
            return True
        if not self._config.child:
            return False
        if num_signals:
            if self._stopping_since is None:
                self._stopping_since = now
            if now - self._stopping_since >= self._config.stop_grace_seconds:
                return True
        if num_living or not (has_served or num_signals or not parent_alive):
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return drained or now - self._idle_since >= self._config.drain_grace_seconds


Outcome = Literal["ended", "stopped", "elsewhere"]
"""Reason for the end of a loop: done, a signal, or another agent that serves the directory."""


def run(agent: Agent, config: LoopConfig) -> Outcome:
    """Start the agent, run it until its end, and stop it.

    SIGTERM and SIGINT end it within seconds, after its rows are drained, synced and, if a collector
    responds, shipped. Must be called in the main thread.

    Raises:
        UsageError: another agent serves the directory, and this one was not started by a rank.
    """
    parent = 0 if config.lingers else os.getppid()
    with StopSignals() as signals:
        if not _start(agent, config):
            return "elsewhere"
        try:
            if config.once:
                agent.cycle(time.monotonic())
            else:
                _run_loop(agent, config, signals, parent)
        finally:
            agent.stop()
        return "stopped" if signals.count else "ended"


def _run_loop(agent: Agent, config: LoopConfig, signals: "StopSignals", parent: int) -> None:
    """Run the agent on this thread and its I/O loop on another one, until it should end."""
    ending = AgentStopCondition(config)
    if config.lingers:
        agent.io_loop.find_collector(
            time.monotonic()
        )  # before the first turn, which reads the leftovers
    io_thread = IoThread(agent.io_loop, interval_seconds=config.interval_seconds)
    if agent.ahead is not None:
        agent.ahead.start()
    while True:
        now = time.monotonic()
        agent.run_once(now)
        if ending.reached(
            now,
            num_living=agent.num_living_ranks,
            has_served=agent.has_served,
            drained=agent.drained,
            parent_alive=os.getppid() == parent,
            num_signals=signals.count,
        ):
            break
        signals.wait(config.interval_seconds)
    if signals.count:
        agent.run_once(time.monotonic())
    if not io_thread.end(config.last_turn_seconds):
        log.warning("the collector is busy: unshipped rows stay in the spools")
    agent.run_once(time.monotonic())  # reports of the I/O loop
    if config.child:
        agent.report_unspooled_rows()


def _start(agent: Agent, config: LoopConfig) -> bool:
    """Start the agent; return False for a child if another agent serves the directory."""
    deadline = time.monotonic() + config.lock_wait_seconds
    while True:
        try:
            agent.start()
            return True
        except UsageError as error:
            if not config.child:
                raise
            if time.monotonic() >= deadline:
                log.debug("another agent is running: %s", error.text)
                return False
        time.sleep(0.1)


class StopSignals:
    """Counts SIGTERM and SIGINT and wakes the waiting loop."""

    def __init__(self) -> None:
        self.count = 0
        # A handler runs in the waiting thread. The lock of a `threading.Event` may be held there:
        # its `set` would wait forever, while a `SimpleQueue` can be put to at any point.
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def wait(self, seconds: float) -> None:
        """Pause between two cycles of the agent; return early on SIGTERM or SIGINT."""
        with contextlib.suppress(Empty):
            self._wakeups.get(timeout=seconds)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Count a SIGTERM or SIGINT, and wake the agent's loop."""
        self.count += 1
        self._wakeups.put(None)

    def __enter__(self) -> "StopSignals":
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def log_to_stderr(level: int) -> None:
    """Send the agent's log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s vitals-agent %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)


# --------------------------------------------------------------- a run that ended, and no collector


def deliver_when_reachable(
    deliver: Callable[[], Outcome],
    *,
    is_waiting: Callable[[], bool],
    answers: Callable[[float], bool],
    seconds: float,
    stopwatch: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Send the rows that wait in the agent's spool as soon as a collector responds.

    In between no lock is held: any other agent may deliver them first. The collector waits for
    silent runs for a minute after its own start, so the interval between attempts is shorter. After
    ``seconds``, rows are left to other agents.
    """
    backoff = Backoff(first_seconds=1.0, max_seconds=20.0, rng=random.Random())
    deadline = stopwatch() + seconds
    while (now := stopwatch()) < deadline:
        if backoff.due(now):
            try:
                if not is_waiting() or (answers(now) and deliver() == "stopped"):
                    return
            except (OSError, VitalsError) as error:  # a disk or a network that is down
                log.debug("cannot deliver yet: %s", error)
            backoff.record_failure(now)
        sleep(1.0)


def close_inherited() -> None:
    """Close file descriptors that the agent inherited from its parent, except for the output.

    Otherwise a lock of ``flock``, or a pipe whose reader waits for its end, would be held for as
    long as this process outlives the training.
    """
    for path in list(Path("/dev/fd").iterdir()):
        fd = int(path.name)
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if fd > 2 and os.get_inheritable(fd):
                os.close(fd)


# --------------------------------------------------------------------- agents that are about to end


LEAVING_SECONDS = 20.0
"""Slightly more than a rank's child waits for its collector once the ranks have ended."""


def wait_for_release(
    base: Path,
    vitals_dir: Path,
    *,
    seconds: float = LEAVING_SECONDS,
    stopwatch: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no agent holds a run of the directory whose ranks on this node have all ended.

    After ``seconds`` it returns in any case. A run with a living rank here is ignored.
    """
    deadline = stopwatch() + seconds
    state_dirs = _ended_run_state_dirs(base, vitals_dir)
    while (
        any(state_dir.is_held_by_another() for state_dir in state_dirs) and stopwatch() < deadline
    ):
        sleep(0.1)


def _ended_run_state_dirs(base: Path, vitals_dir: Path) -> list[AgentStateDir]:
    ranks: dict[Path, list[Identity]] = {}
    for ref in find_journals(base):
        if ref.run_dir is None or ref.run_dir.resolve().parent != vitals_dir.resolve():
            continue
        who = _journal_identity_or_none(ref.directory)
        if who is not None:
            ranks.setdefault(ref.run_dir, []).append(who)
    ended = {
        path: who
        for path, who in ranks.items()
        if not any(RankProcess(each).alive() for each in who)
    }
    folders = {
        RunDir.open(path).agent_path(each.node) for path, who in ended.items() for each in who
    }
    return [AgentStateDir(folder, base) for folder in sorted(folders)]


def _journal_identity_or_none(directory: Path) -> Identity | None:
    """Return the writer of a journal that the agent found; None if it cannot be read."""
    try:
        return journal_identity(directory)
    except VitalsError:
        return None  # written by a newer version: the agent reports it
