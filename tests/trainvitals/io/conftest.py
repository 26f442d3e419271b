import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A private folder in shared memory, gone after the test."""
    if not SHM.is_dir():
        pytest.skip("no /dev/shm on this machine")
    folder = Path(tempfile.mkdtemp(prefix="vitals-test-", dir=SHM))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command on this machine")
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
