"""State and resource use of rank processes. Pids are reused, so process ages are compared."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainvitals.clock import Clock, SystemClock
from trainvitals.identity import Identity
from trainvitals.rows import Value

AGE_SLACK_SECONDS = 5.0
"""Tolerance for clock ticks and NTP: a process may seem this much younger than its journal."""


class RankProcess:
    """The process that writes a journal; after its end, a new one with its pid never counts."""

    def __init__(self, identity: Identity, *, clock: Clock | None = None) -> None:
        self.identity = identity
        self._process = _find_rank_process(identity, clock or SystemClock())

    def alive(self) -> bool:
        """Return whether the rank's process exists on this node; a zombie counts as ended."""
        if self._process is None:
            return False
        try:
            exists = self._process.is_running()
            if exists and self._process.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            pass  # it ended between the two calls
        self._process = None
        return False

    def sample(self) -> dict[str, Value]:
        """Sample the rank's process: values by column; for an ended one, only ``alive``."""
        if not self.alive() or self._process is None:
            return {"alive": 0}
        values: dict[str, Value] = {"alive": 1}
        process = self._process
        with process.oneshot():
            for read in _READERS:
                try:
                    values.update(read(process))
                except (psutil.Error, OSError):
                    continue  # another user's process, or it is ending: missing
        return values


def stat_fields(pid: int, thread: int | None = None) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name, for the process or one thread."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    # The name may contain anything, also parentheses.
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


def _cpu_seconds(process: psutil.Process) -> dict[str, Value]:
    """Sample the CPU seconds of a rank's process."""
    times = process.cpu_times()
    return {"cpu_seconds": times.user + times.system}


def _io_bytes(process: psutil.Process) -> dict[str, Value]:
    """Sample the bytes that a rank's process has read and written."""
    counters = process.io_counters()
    return {
        "io_read_bytes": float(counters.read_bytes),
        "io_write_bytes": float(counters.write_bytes),
    }


def _context_switches(process: psutil.Process) -> dict[str, Value]:
    """Sample the context switches of a rank's process."""
    switches = process.num_ctx_switches()
    return {
        "voluntary_context_switches": switches.voluntary,
        "involuntary_context_switches": switches.involuntary,
    }


def _major_page_faults(process: psutil.Process) -> dict[str, Value]:
    """Sample the page faults of a rank's process that need a disk."""
    return {"major_page_faults": int(stat_fields(process.pid)[9])}


_READERS: tuple[Callable[[psutil.Process], dict[str, Value]], ...] = (
    _cpu_seconds,
    lambda process: {"resident_memory_bytes": float(process.memory_info().rss)},
    lambda process: {"threads": process.num_threads()},
    lambda process: {"open_fds": process.num_fds()},
    _io_bytes,
    _context_switches,
    _major_page_faults,
)
"""Values that cost more than reading a small file are omitted, such as unshared memory."""


def _find_rank_process(identity: Identity, clock: Clock) -> psutil.Process | None:
    """Find the process on this node that writes the journal; None if it has ended.

    Ages are compared, not start times: the wall clock may have been set since the journal started.
    """
    if identity.pid <= 0 or _is_other_boot(identity.boot_id):
        return None
    try:
        process = psutil.Process(identity.pid)
        process_age = _age(process, clock)
    except psutil.Error:
        return None
    if identity.started_monotonic_ns:
        journal_age = (clock.monotonic_ns() - identity.started_monotonic_ns) / 1e9
        if process_age < journal_age - AGE_SLACK_SECONDS:
            return None
    return process


def _age(process: psutil.Process, clock: Clock) -> float:
    """Return the seconds since a rank's process started, by a monotonic clock if there is one.

    psutil uses the wall time of the boot, which it caches.
    """
    try:
        ticks = int(stat_fields(process.pid)[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, AttributeError):  # ended, or not Linux
        return clock.time_ns() / 1e9 - float(process.create_time())


def holds_files(pid: int, directory: Path) -> bool:
    """Return whether the process has a file of this journal open, as the rank that writes it.

    Containers may share memory without sharing process ids: then the rank's pid refers to another
    process here. Check this before any signal.
    """
    files = {
        (s.st_dev, s.st_ino) for path in _list_directory(directory) if (s := _stat_or_none(path))
    }
    opened = map(_stat_or_none, _list_directory(Path(f"/proc/{pid}/fd")))
    return any(s is not None and (s.st_dev, s.st_ino) in files for s in opened)


def _list_directory(directory: Path) -> list[Path]:
    """Return the files of a rank's journal or process; none if they were removed."""
    try:
        return list(directory.iterdir())
    except OSError:  # deleted, or another user's
        return []


def _stat_or_none(path: Path) -> os.stat_result | None:
    """Return the status of a file of a rank's journal or process; None if it was removed."""
    try:
        return path.stat()
    except OSError:
        return None


def _is_other_boot(boot_id: str) -> bool:
    """Return whether the rank's process was started before the node's last boot."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return bool(boot_id) and path.exists() and path.read_text().strip() != boot_id
