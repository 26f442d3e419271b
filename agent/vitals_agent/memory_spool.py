"""Where a run's spool lies: on its disk, and in the node's memory for as long as that is full.

What is in memory goes the same way to the collector; it is bounded, and survives the agent, but not
the node. Once the disk has room again, what still waits is appended to the spool there. What was
acknowledged does not stay: the ranks need the memory.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from trainvitals.errors import InsecurePathError
from trainvitals.io.private import ensure_private_dir, open_own
from trainvitals.io.rundir import is_full
from trainvitals.io.spool import Spool

ROOM_BYTES = 64 << 10
"""A disk that does not take this much is full."""
MAX_MEMORY_BYTES = 64 << 20
MAX_MEMORY_SHARE = 0.05
"""Of the memory that is free: the ranks' DataLoader workers need it too."""


def has_room(folder: Path, num_bytes: int = ROOM_BYTES) -> bool:
    """Return whether the folder's disk takes so much more; makes the folder.

    It is tried, as free space may be reserved for others, or beyond a quota. A disk that refuses
    for another reason has room: to say what is wrong with it is for those who write.
    """
    path = folder / ".room"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = open_own(path, os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except (OSError, InsecurePathError) as error:
        return not is_full(error)
    finally:
        with contextlib.suppress(OSError):  # it is tried again, and then removed
            path.unlink(missing_ok=True)
    return True


def bytes_in(spool: Path) -> int:
    """Return how much lies in a spool's folder; nothing where there is none."""
    return sum(path.stat().st_size for path in spool.glob("*.tvs"))


def open_in_memory(spool: Path, now: Callable[[], float]) -> Spool:
    """Open a spool in the node's memory: where there is more than fits, the oldest rows go."""
    status = os.statvfs(ensure_private_dir(spool.parent))
    free = status.f_bavail * status.f_frsize + bytes_in(spool)
    bound = min(MAX_MEMORY_BYTES, int(free * MAX_MEMORY_SHARE))
    return Spool(spool, max_bytes=max(1, bound), keep=False, now=now)


def move_to_disk(memory: Path, spool: Spool) -> None:
    """Append what waits in memory to the spool on disk; durable before it is let go.

    Raises:
        StorageError: the disk refused; then all of it is still in memory.
    """
    if not memory.is_dir():
        return
    source = Spool(memory, max_bytes=MAX_MEMORY_BYTES, keep=True)
    for _, raw in source.read(source.acked):
        spool.append(raw)
    spool.sync()
    source.close()
    shutil.rmtree(memory)
