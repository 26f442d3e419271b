import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_disks import small_file_system

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
    with small_file_system(tmp_path / "small", "64k") as folder:
        yield folder
