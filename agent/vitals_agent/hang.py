"""Checks this node's ranks twice per second: heartbeat and process. Finds blocking ranks.

`trainvitals.detect.hang` decides. If ranks of the job are on other nodes, the observations go to
the collector, which sees all of them. Stacks are requested once per wait, from ranks that are not
stopped, with a signal that the rank handles according to its heartbeat; a process that may be
another one by now never gets a signal.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainvitals.detect.hang import FAILED, HangConfig, HangFollower
from trainvitals.errors import VitalsError
from trainvitals.io.heartbeat import read_heartbeat
from trainvitals.records import (
    FindingRaised,
    Heartbeat,
    Note,
    ProcessState,
    RankActivity,
    RanksStill,
)
from vitals_agent.process import stat_fields
from vitals_agent.restart import HungJob, JobProcess
from vitals_agent.run import ServedRun
from vitals_agent.sampling import Spawn, on_a_thread
from vitals_agent.stacks import StackTaker
from vitals_agent.tailer import JournalTail

ACTIVE_SECONDS = 2.0
"""Time window of a rank's activity for deciding whether it computes."""
ACTIVE_SHARE = 0.03
"""Share of a core: a thread that polls a queue, or sends heartbeats, takes less."""
ACTIVE_BYTES = 1 << 20
MUTE_SECONDS = 3.0
"""Age from which a heartbeat is too old, if the process is not stopped."""
STILL_SECONDS = 2.0
"""Time without progress after which other nodes are informed."""
RESEND_SECONDS = 2.0
ALL_ACTIVE_SHARE = 0.2
"""The same for all threads of the process together: backward may run on another one."""
MAX_GAP_SECONDS = 3600.0
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_STATES: dict[str, ProcessState] = {"T": "stopped", "t": "traced", "D": "disk"}


class _ProcessStats(NamedTuple):
    """The system's data about a rank's process and its training thread."""

    state: str
    started: int
    """Its start in clock ticks since boot: distinguishes it from a later process with this pid."""
    cpu_seconds: float
    """CPU time of the training thread."""
    all_cpu_seconds: float
    num_bytes: int
    """Read and written, also from memory."""


class _WorkSample(NamedTuple):
    """Resource use and position of a rank's process at one check."""

    at: float
    where: str
    process: _ProcessStats


@dataclass(slots=True)
class _ObservedRank:
    """A rank as the watch for hangs saw it at the last check."""

    word: Heartbeat | None = None
    beat_at: float = 0.0
    moved: tuple[object, ...] = ()
    moved_at: float = 0.0
    first_step: int = -1
    started: int = 0
    was_stopped: bool = False
    work: deque[_WorkSample] = field(default_factory=deque)
    state: ProcessState = "alive"
    exit: str = ""
    was_asked: bool = False
    """Whether its stacks were requested in this wait."""


class HangWatch:
    """The ranks of one run on this node. For the agent's main thread.

    Args:
        run: run of the ranks, which also stores the findings.
        exits: returns how processes ended.
        config: how long ranks may wait.
        spawn: starts calls that may hang.
    """

    def __init__(
        self,
        run: ServedRun,
        exits: "ExitWatch",
        *,
        config: HangConfig | None = None,
        spawn: Spawn = on_a_thread,
    ) -> None:
        self._run = run
        self._exits = exits
        self._stacks = StackTaker(run, spawn=spawn)
        self._seen: dict[Path, _ObservedRank] = {}
        self._follower = HangFollower(config)
        self._job = HungJob(run, self._follower.config, run.clock)
        self._sent_at: float | None = None
        self._is_recorder_reported = False
        self._are_nodes_reported = False

    def check(self, now: float) -> None:
        """Check this node's ranks of the run for a hang, and report new findings.

        ``now`` is in monotonic seconds.
        """
        tails = _latest_journals(self._run.tails.values())
        activities = {rank: self._observe_rank(tail, now) for rank, tail in tails.items()}
        ranks = [activity for activity in activities.values() if activity is not None]
        if not ranks:
            return
        world_size = next(iter(tails.values())).identity.world_size
        if len(ranks) < world_size:
            self._send_hang_state(ranks, world_size, now)
            still = min(rank.still_seconds for rank in ranks)
            is_waiting = still >= self._follower.config.show_seconds
        else:
            if not self._job.is_ending:  # an end that we caused is not reported
                self._report_findings(ranks, world_size)
            is_waiting = self._follower.verdict is not None
        with self._run.faults.contained("restart"):
            self._end_hung_job(ranks, tails, world_size, now)
        step = max(rank.step for rank in ranks)
        self._take_stacks(tails, world_size, step, is_waiting=is_waiting)

    def _take_stacks(
        self, tails: dict[int, JournalTail], world_size: int, step: int, *, is_waiting: bool
    ) -> None:
        """Request the stacks of this node's ranks, once per wait or on an operator's request."""
        number = self._run.stacks_wanted.popleft() if self._run.stacks_wanted else 0
        if number:
            self._stacks.start_request(number, num_here=len(tails), num_ranks=world_size)
        for tail in tails.values():
            seen = self._seen[tail.directory]
            if seen.word is None or not (number or (is_waiting and not seen.was_asked)):
                continue
            seen.was_asked |= is_waiting
            with self._run.faults.contained("hang"):
                # All stacks of a wait are stored at one step, that of the finding.
                at = seen.word.step if number else step
                self._stacks.ask(tail, seen.word, seen.state, step=at, number=number)
        with self._run.faults.contained("hang"):
            self._stacks.collect()

    # ----------------------------------------------------------------------------- reports

    def _report_findings(self, ranks: list[RankActivity], world_size: int) -> None:
        """Report new findings of waits and hangs on this node, and the end of a wait."""
        before = self._follower.verdict
        attempt = max((tail.last.attempt for tail in self._run.tails.values()), default=0)
        say = self._run.node_source.write_event
        for finding in self._follower.new_findings(ranks, world_size=world_size):
            say(FindingRaised(finding=finding), step=finding.step, attempt=attempt)
            self._report_recorder()
        if before is not None and self._follower.verdict is None:
            living = [rank for rank in ranks if rank.process not in ("gone", "ended")]
            if living and before.reason not in ("gone", "ended"):
                text = f"The wait is over, after {before.seconds:.1f} s. It was: {before.text}"
                say(Note(code="wait_over", text=text), step=before.step, attempt=attempt)

    def _report_recorder(self) -> None:
        """Report once why the agent cannot name the collectives that ranks wait in."""
        recorder_entries = [seen.word for seen in self._seen.values() if seen.word is not None]
        why = next((word.no_recorder for word in recorder_entries if word.no_recorder), "")
        if why and not self._is_recorder_reported:
            self._is_recorder_reported = True
            text = f"{why}: which collective a rank waits in is not known"
            self._run.node_source.write_event(Note(code="no_flight_recorder", text=text))

    def _send_hang_state(self, ranks: list[RankActivity], world_size: int, now: float) -> None:
        """Inform the collector, which sees all nodes, of a hang on this node and of its end."""
        is_still = all(rank.still_seconds >= STILL_SECONDS for rank in ranks)
        if not is_still and self._sent_at is None:
            return
        if is_still and self._sent_at is not None and now - self._sent_at < RESEND_SECONDS:
            return
        limits = self._follower.history.limits(self._follower.config)
        event = RanksStill(
            world_size=world_size, ranks=tuple(ranks) if is_still else (), limits=limits
        )
        self._run.node_source.write_event(event)
        self._sent_at = now if is_still else None

    def _end_hung_job(
        self, ranks: list[RankActivity], tails: dict[int, JournalTail], world_size: int, now: float
    ) -> None:
        """End a job that hangs, if all its ranks are on this node and have enabled that."""
        seen = {rank: self._seen[tail.directory] for rank, tail in tails.items()}
        rank_words = [each.word for each in seen.values() if each.word is not None]
        if any(word.on_hang != "restart" for word in rank_words):
            return
        if len(ranks) < world_size:
            self._report_nodes()
            return
        processes = [
            JobProcess(tails[rank].identity.pid, each.started, each.state, tails[rank].directory)
            for rank, each in seen.items()
            if each.started and each.state not in ("gone", "ended")
        ]
        self._job.end_if_due(self._follower.verdict, ranks, processes, now)

    def _report_nodes(self) -> None:
        """Report once that a job on several nodes is not ended by this agent."""
        if not self._are_nodes_reported:
            self._are_nodes_reported = True
            text = "on_hang='restart' works where all ranks are on one node; here a hang only pages"
            self._run.node_source.write_event(
                Note(code="no_restart", text=text, severity="warning")
            )

    # ----------------------------------------------------------------------------- observations

    def _observe_rank(self, tail: JournalTail, now: float) -> RankActivity | None:
        """Return the observations of a rank; None for one that never had a heartbeat."""
        seen = self._seen.setdefault(tail.directory, _ObservedRank(moved_at=now, beat_at=now))
        if seen.state not in ("gone", "ended"):
            self._read_heartbeat(tail, seen, now)
            if seen.word is None:
                return None
            self._read_process(tail, seen, now)
        word = seen.word
        if word is None:
            return None
        is_living = seen.state not in ("gone", "ended")
        runs = seen.state in ("alive", "disk")
        return RankActivity(
            rank=tail.identity.rank,
            node=tail.identity.node,
            step=word.step,
            phase=word.phase,
            is_announced=word.is_announced,
            is_debugged=word.is_debugged,
            pipeline=word.pipeline,
            where=word.where,
            sequences=word.sequences,
            last_collectives=word.last_collectives,
            started=word.started,
            process=seen.state,
            still_seconds=now - seen.moved_at,
            is_active=is_living and _is_active(seen.work, now),
            is_mute=runs and now - seen.beat_at > MUTE_SECONDS,
            num_steps=max(0, word.step - seen.first_step),
            exit=seen.exit,
        )

    def _read_heartbeat(self, tail: JournalTail, seen: _ObservedRank, now: float) -> None:
        """Update the agent's record of a rank by its heartbeat: step, phase, last progress."""
        try:
            word = read_heartbeat(tail.directory)
        except (OSError, VitalsError):
            return  # none yet, torn, or its directory was deleted: keep the last one
        if seen.word is None:
            seen.first_step = word.step
        if seen.word is None or word.beat != seen.word.beat:
            seen.beat_at = now
        seen.word, before = word, seen.word
        moved = (word.step, tuple(sorted(word.sequences.items())))
        if moved != seen.moved:
            gap = now - seen.moved_at
            # Exclude the first step, and times in which the process was stopped, as unusual.
            is_usual = before is not None and word.step - seen.first_step > 2
            if before is not None and is_usual and not seen.was_stopped and gap < MAX_GAP_SECONDS:
                self._follower.history.add(before.phase, gap)
            seen.moved, seen.moved_at, seen.was_stopped = moved, now, False
            seen.was_asked = False

    def _read_process(self, tail: JournalTail, seen: _ObservedRank, now: float) -> None:
        """Update the agent's record of a rank's process, and of how it ended."""
        assert seen.word is not None
        pid = tail.identity.pid
        process = None
        if seen.started or tail.process.alive():
            process = _read_process_stats(pid, seen.word.thread or pid)
        if process is not None and seen.started in (0, process.started):
            if not seen.started:
                seen.started = process.started
                self._exits.watch(pid)
            if process.state not in "ZX":
                seen.state = _STATES.get(process.state, "alive")
                seen.was_stopped |= seen.state in ("stopped", "traced")
                _add_work(seen, process, now)
                return
        # Ended: the journal shows whether the exit was clean. Its journal is not closed yet.
        seen.state = "ended" if tail.closed or tail.removed else "gone"
        seen.exit = tail.exit = self._exits.exit_text(pid)
        if seen.state == "ended" and tail.last.ended == "failed":
            seen.exit = FAILED


def _latest_journals(tails: Iterable[JournalTail]) -> dict[int, JournalTail]:
    """Return the journal of each rank on this node; the latest of a rank that started again."""
    newest: dict[int, JournalTail] = {}
    for tail in sorted(tails, key=lambda tail: tail.identity.started_unix_ns):
        newest[tail.identity.rank] = tail
    return dict(sorted(newest.items()))


def _read_process_stats(pid: int, thread: int) -> _ProcessStats | None:
    """Return the system's data on the process of a watched rank; None if it does not exist."""
    try:
        whole = stat_fields(pid)
        thread_stat = whole if thread == pid else stat_fields(pid, thread)
    except (OSError, IndexError):
        return None
    num_bytes = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/io").read_text().split()
        num_bytes = int(lines[1]) + int(lines[3])
    return _ProcessStats(
        state=thread_stat[0],
        started=int(whole[19]),
        cpu_seconds=(int(thread_stat[11]) + int(thread_stat[12])) * _TICK,
        all_cpu_seconds=(int(whole[11]) + int(whole[12])) * _TICK,
        num_bytes=num_bytes,
    )


def _add_work(seen: _ObservedRank, process: _ProcessStats, now: float) -> None:
    """Append a sample of a watched rank's CPU time and I/O; drop old ones."""
    where = "" if seen.word is None else seen.word.where
    seen.work.append(_WorkSample(now, where, process))
    while len(seen.work) > 2 and now - seen.work[1].at >= ACTIVE_SECONDS:
        seen.work.popleft()


def _is_active(work: Sequence[_WorkSample], now: float) -> bool:
    """Return whether a rank that seems to hang has computed, done I/O or moved in its code."""
    if len(work) < 2 or now - work[0].at < ACTIVE_SECONDS:
        return True  # too early to decide
    seconds = work[-1].at - work[0].at
    first, last = work[0].process, work[-1].process
    places = {each.where for each in work if each.where}
    return (
        last.cpu_seconds - first.cpu_seconds > ACTIVE_SHARE * seconds
        or last.all_cpu_seconds - first.all_cpu_seconds > ALL_ACTIVE_SHARE * seconds
        or last.num_bytes - first.num_bytes > ACTIVE_BYTES
        or len(places) > 1
        # In a call to a disk: a save that waits for it is indistinguishable from a lost one.
        or any(each.process.state == "D" for each in work)
    )


# ------------------------------------------------------------------------- how processes ended


class ExitWatch:
    """Records how processes other than our children ended, as far as the system reports it.

    A thread waits for their end and reads their exit status before their parent takes it: until
    then they are zombies. If that is missed, Linux 6.15 or newer still reports it; on other systems
    it is unknown.
    """

    def __init__(self) -> None:
        self._ended: dict[int, str] = {}
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Start waiting for the end of a rank's process on this node."""
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return  # an old kernel, or the process has ended: then its exit status is unknown
        with self._lock:
            self._ended.pop(pid, None)
            self._fds[fd] = pid
            self._poll.register(fd, select.POLLIN)
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._poll.register(self._pipe[0], select.POLLIN)
            self._thread = threading.Thread(target=self._run, name="vitals-exits", daemon=True)
            self._thread.start()
        os.write(self._pipe[1], b"w")

    def exit_text(self, pid: int) -> str:
        """Return a description of how a process on the agent's node ended; "" if unknown."""
        return self._ended.get(pid, "")

    def close(self) -> None:
        """Stop the agent's thread that waits for the end of ranks."""
        pipe, self._pipe = self._pipe, None
        if pipe is None or self._thread is None:
            return
        os.write(pipe[1], b"c")
        self._thread.join()
        with self._lock:
            for fd in (*self._fds, *pipe):
                os.close(fd)
            self._fds = {}

    def _run(self) -> None:
        """Wait in a thread for the end of the ranks' processes."""
        assert self._pipe is not None
        wake = self._pipe[0]
        while True:
            for fd, _ in self._poll.poll():
                if fd == wake:
                    if b"c" in os.read(fd, 4096):
                        return
                    continue
                with self._lock:
                    pid = self._fds.pop(fd)
                    self._poll.unregister(fd)
                try:
                    text = exit_of(pid, fd)
                finally:
                    os.close(fd)
                if text:
                    self._ended[pid] = text


_PIDFD_GET_INFO, _INFO_EXIT = 0xC040FF0B, 8
"""From linux/pidfd.h: _IOWR(0xFF, 11, 64 bytes), and the bit that requests the exit status."""
_INFO = struct.Struct("=Q52xi")
"""``struct pidfd_info``: requested and returned fields, and at its end the exit status."""


def exit_of(pid: int, fd: int) -> str:
    """Return how a rank's process ended, from its zombie or its descriptor; "" if unknown."""
    status = _zombie_exit_status(pid)
    if status is None:
        info = bytearray(_INFO.pack(_INFO_EXIT, 0))
        try:
            fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
        except OSError:
            return ""  # before Linux 6.15
        answered, status = _INFO.unpack(info)
        if not answered & _INFO_EXIT:
            return ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"signal {number}, {signal.Signals(number).name}"
        return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _zombie_exit_status(pid: int) -> int | None:
    """Return the exit status of a rank that is a zombie on this node; None for any other."""
    try:
        fields = stat_fields(pid)
        return int(fields[49]) if fields[0] in "ZX" else None
    except (OSError, IndexError, ValueError):
        return None
