"""Writes to files without waiting for the disk: only a power cut could show the difference."""

import os


def skip_syncs() -> None:
    """Let ``os.fsync`` in this process check its argument only; a kill loses nothing by it."""

    def check(fd: int) -> None:
        os.fstat(fd)

    os.fsync = check
