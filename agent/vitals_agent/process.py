"""Rank processes: whether they exist, what they use. Pids are reused, so ages are compared."""

from pathlib import Path
from typing import Any

import psutil

from trainvitals.catalog import PROCESS_METRICS
from trainvitals.clock import Clock, SystemClock
from trainvitals.identity import Identity
from trainvitals.rows import Value

COLUMNS = tuple(metric.column for metric in PROCESS_METRICS)
AGE_SLACK_SECONDS = 5.0
"""Clock ticks and NTP: a process may seem this much younger than the journal it wrote."""


class RankProcess:
    """The process behind a journal. Once gone, it stays gone, whoever gets its pid."""

    def __init__(self, identity: Identity, *, clock: Clock | None = None) -> None:
        self.identity = identity
        self._process = _find(identity, clock or SystemClock())

    def alive(self) -> bool:
        """Return whether the process exists; a zombie is gone: it trains no more."""
        if self._process is None:
            return False
        try:
            exists = self._process.is_running()
            if exists and self._process.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            pass  # it ended between the two questions: gone, as below
        self._process = None
        return False

    def sample(self) -> dict[str, Value]:
        """Return the values by column name; of a process that is gone, only ``alive``."""
        if not self.alive() or self._process is None:
            return {"alive": 0}
        values: dict[str, Value] = {"alive": 1}
        process = self._process
        with process.oneshot():
            for column, read in _READERS:
                try:
                    values[column] = read(process)
                except psutil.Error:
                    continue  # another user's process, or it ends just now: missing
        return values


_READERS: tuple[tuple[str, Any], ...] = (
    ("cpu_seconds", lambda p: p.cpu_times().user + p.cpu_times().system),
    ("resident_memory_bytes", lambda p: float(p.memory_info().rss)),
    ("threads", lambda p: p.num_threads()),
    ("open_fds", lambda p: p.num_fds()),
)


def _find(identity: Identity, clock: Clock) -> psutil.Process | None:
    """Return the process that wrote the journal, or None if it is gone or was another one.

    Ages are compared, not times: the wall clock may have been set since the journal began.
    """
    if identity.pid <= 0 or _other_boot(identity.boot_id):
        return None
    try:
        process = psutil.Process(identity.pid)
        process_age = clock.time_ns() / 1e9 - process.create_time()
    except psutil.Error:
        return None
    if identity.started_monotonic_ns:
        journal_age = (clock.monotonic_ns() - identity.started_monotonic_ns) / 1e9
        if process_age < journal_age - AGE_SLACK_SECONDS:
            return None
    return process


def _other_boot(boot_id: str) -> bool:
    path = Path("/proc/sys/kernel/random/boot_id")
    return bool(boot_id) and path.exists() and path.read_text().strip() != boot_id
