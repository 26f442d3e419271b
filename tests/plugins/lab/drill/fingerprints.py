"""Shows whether a directory is unchanged."""

import hashlib
import os
import stat


def fingerprint(directory):
    """Content, mode and times of everything below a directory."""
    facts = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else ""  # noqa: PTH115
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        facts[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content)
    return facts
