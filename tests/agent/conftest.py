"""A node with shared memory, as the agent's tests need it."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.builders import World
from tests.support.hung_ranks import Rank
from trainvitals.io.private import private_base

SHM = Path("/dev/shm")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return an empty node; everything that was started on it is stopped afterwards."""
    shm = Path(tempfile.mkdtemp(dir=SHM if SHM.is_dir() else tmp_path))
    made = World(base=private_base({"VITALS_SHM": str(shm)}), vitals_dir=tmp_path / "runs")
    yield made
    for close in reversed(made.closers):
        close()
    shutil.rmtree(shm)


@pytest.fixture
def ranks(world: World) -> list[Rank]:
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    return [Rank(world, 0), Rank(world, 1)]
