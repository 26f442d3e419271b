"""Memory that this job may still use: the minimum that the machine and cgroups allow."""

from pathlib import Path

_ROOT = Path("/")


def host_memory_left(root: Path = _ROOT) -> int | None:
    """Return the bytes left for copies such as snapshots; None if the system does not report it.

    File cache counts as free, because the kernel releases it. Reads cgroup v2 and v1, at this
    process's group and all groups above it: in a container or a Slurm job the limit is rarely on
    the lowest level.
    """
    limits = [
        free_bytes
        for free_bytes in (_available_bytes(root), *_cgroup_free_bytes(root))
        if free_bytes is not None
    ]
    return max(0, min(limits)) if limits else None


def _available_bytes(root: Path) -> int | None:
    """Return the host's available memory for snapshots, from ``/proc/meminfo``."""
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free_bytes(root: Path) -> list[int | None]:
    """Return the bytes that each cgroup of this job still allows for snapshots; None: no limit."""
    limits = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        levels = [group, *(p for p in group.parents if p.is_relative_to(top))]
        limits += [_left_in(level, *names) for level in levels]
    return limits


def _left_in(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return the bytes that a cgroup still allows for snapshots; None without a limit."""
    limit, usage = _read_text(group / limit_name).strip(), _read_text(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # no such file, or "max"
    stat = dict(line.split(" ", 1) for line in _read_text(group / "memory.stat").splitlines())
    return int(limit) - int(usage) + int(stat.get(cache_name, 0))


def _read_text(path: Path) -> str:
    """Return the text of a system file on the memory for snapshots; empty if unreadable."""
    try:
        return path.read_text()
    except OSError:  # this system has no such file; the other sources are read too
        return ""
