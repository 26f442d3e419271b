"""Node samples: processors, memory, network, and the shared memory that journals lie in."""

import os
from pathlib import Path
from typing import Any

import psutil

from trainvitals.catalog import NODE_METRICS
from trainvitals.rows import Value

COLUMNS = tuple(metric.column for metric in NODE_METRICS)


class HostSampler:
    """Reads the node. Each field that cannot be read is missing in its row, not zero.

    Args:
        journal_base: the directory whose file system's free bytes are reported.
        system: a module like ``psutil``.
    """

    def __init__(self, journal_base: Path, *, system: Any = psutil) -> None:
        self._base = journal_base
        self._system = system
        self._cpu = self._cpu_times()

    def sample(self) -> dict[str, Value]:
        """Return the node's values by column name."""
        memory = self._system.virtual_memory()
        return {
            "cpu_ratio": self._cpu_ratio(),
            "load1": os.getloadavg()[0],
            "memory_used_bytes": float(memory.total - memory.available),
            "memory_total_bytes": float(memory.total),
            "shm_free_bytes": self._free_bytes(),
            **self._network(),
        }

    def _cpu_times(self) -> tuple[float, float]:
        times = self._system.cpu_times()
        # guest time is already part of user and nice: counting it twice would hide idle time
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total, total - times.idle - getattr(times, "iowait", 0.0)

    def _cpu_ratio(self) -> float | None:
        total_before, busy_before = self._cpu
        total, busy = self._cpu = self._cpu_times()
        if total <= total_before:
            return None
        return min(1.0, max(0.0, (busy - busy_before) / (total - total_before)))

    def _free_bytes(self) -> float | None:
        try:
            stat = os.statvfs(self._base)
        except OSError:
            return None  # no run has made the directory yet
        return float(stat.f_bavail * stat.f_frsize)

    def _network(self) -> dict[str, Value]:
        counters = self._system.net_io_counters()
        if counters is None:  # a namespace without any interface
            return {}
        return {
            "network_receive_bytes": float(counters.bytes_recv),
            "network_transmit_bytes": float(counters.bytes_sent),
        }
