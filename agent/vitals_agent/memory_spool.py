"""Location of a run's spool: on its disk, or in the node's memory while the disk is full.

A spool in memory is shipped to the collector in the same way; it is bounded, and survives the
agent, but not the node. Once the disk has space again, its pending rows are appended to the spool
there. Acknowledged rows are not retained: the ranks need the memory.
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
"""Share of the free memory: the ranks' DataLoader workers need it too."""


def has_room(folder: Path, num_bytes: int = ROOM_BYTES) -> bool:
    """Create the agent's spool directory; return whether its disk accepts this many bytes.

    It is tested by a write, because free space may be reserved, or above a quota. A disk with
    another error counts as having space: the code that writes to it reports the error.
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
        with contextlib.suppress(OSError):  # it is retried, and then removed
            path.unlink(missing_ok=True)
    return True


def bytes_in(spool: Path) -> int:
    """Return the bytes of a run's spool on the agent's node; 0 if it does not exist."""
    return sum(path.stat().st_size for path in spool.glob("*.tvs"))


def open_in_memory(spool: Path, now: Callable[[], float]) -> Spool:
    """Open a spool in the node's memory: above its size limit, the oldest rows are dropped."""
    status = os.statvfs(ensure_private_dir(spool.parent))
    free = status.f_bavail * status.f_frsize + bytes_in(spool)
    bound = min(MAX_MEMORY_BYTES, int(free * MAX_MEMORY_SHARE))
    return Spool(spool, max_bytes=max(1, bound), keep=False, now=now)


def move_to_disk(memory: Path, spool: Spool) -> None:
    """Append the rows that the agent spooled in memory to the spool on disk; then delete them.

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
