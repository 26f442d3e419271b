"""Node samples: processors, memory, disks, network, and the time that tasks wait for them."""

import os
from pathlib import Path
from typing import Any

import psutil

from trainvitals.catalog import NODE_METRICS
from trainvitals.rows import Value

COLUMNS = tuple(metric.column for metric in NODE_METRICS)

_PRESSURES = {"some": "waiting", "full": "stalled"}


class HostSampler:
    """Reads the node. Each field that cannot be read is missing in its row, not zero.

    Args:
        journal_base: the directory whose file system's free bytes are reported.
        system: a module like ``psutil``.
        pressure: directory of the kernel's pressure files, if it has them.
    """

    def __init__(
        self, journal_base: Path, *, system: Any = psutil, pressure: Path = Path("/proc/pressure")
    ) -> None:
        self._base = journal_base
        self._system = system
        self._pressure_files = [
            path for path in (pressure / name for name in ("cpu", "memory", "io")) if path.exists()
        ]
        self._cpu = self._cpu_times()

    def sample(self) -> dict[str, Value]:
        """Sample the node's CPUs, memory, disks and network; return the values by column."""
        memory = self._system.virtual_memory()
        return {
            "cpu_ratio": self._cpu_ratio(),
            "load1": os.getloadavg()[0],
            "memory_used_bytes": float(memory.total - memory.available),
            "memory_total_bytes": float(memory.total),
            "swap_used_bytes": float(self._system.swap_memory().used),
            "shm_free_bytes": self._free_shm_bytes(),
            **self._disk_counters(),
            **self._network_counters(),
            **self._pressures(),
        }

    def _cpu_times(self) -> tuple[float, float]:
        """Return the total and the busy seconds of the node's CPUs."""
        times = self._system.cpu_times()
        # guest time is already part of user and nice: counting it twice would hide idle time
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total, total - times.idle - getattr(times, "iowait", 0.0)

    def _cpu_ratio(self) -> float | None:
        """Return the busy share of the node's CPUs since the last sample."""
        total_before, busy_before = self._cpu
        total, busy = self._cpu = self._cpu_times()
        if total <= total_before:
            return None
        return min(1.0, max(0.0, (busy - busy_before) / (total - total_before)))

    def _free_shm_bytes(self) -> float | None:
        """Return the node's free bytes for journals; None before the first run."""
        try:
            stat = os.statvfs(self._base)
        except OSError:
            return None  # no run has made the directory yet
        return float(stat.f_bavail * stat.f_frsize)

    def _disk_counters(self) -> dict[str, Value]:
        """Return the bytes that the node's disks have read and written."""
        counters = self._system.disk_io_counters(nowrap=False)
        if counters is None:  # a machine without a disk of its own
            return {}
        return {
            "disk_read_bytes": float(counters.read_bytes),
            "disk_write_bytes": float(counters.write_bytes),
        }

    def _network_counters(self) -> dict[str, Value]:
        """Return the node's bytes and errors on its network interfaces."""
        counters = self._system.net_io_counters(nowrap=False)
        if counters is None:  # a namespace without any interface
            return {}
        return {
            "network_receive_bytes": float(counters.bytes_recv),
            "network_transmit_bytes": float(counters.bytes_sent),
            "network_receive_errors": counters.errin + counters.dropin,
            "network_transmit_errors": counters.errout + counters.dropout,
        }

    def _pressures(self) -> dict[str, Value]:
        """Return the seconds in which tasks of the node waited, for each resource."""
        pressures: dict[str, Value] = {}
        for path in self._pressure_files:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue  # the kernel supports it, but counting is disabled
            for line in lines:  # some avg10=0.00 avg60=0.00 avg300=0.00 total=1234
                kind, _, numbers = line.partition(" ")
                _, is_there, total = numbers.rpartition("total=")
                column = f"pressure_{path.name}_{_PRESSURES.get(kind)}_seconds"
                if is_there and column in COLUMNS:  # "full" of a whole node's cpu means nothing
                    pressures[column] = int(total) / 1e6
        return pressures
