"""The two stores of numbers, for tests of what both promise."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.rolled_memory import RolledMemory
from vitals_collector.numbers import lake_maintenance
from vitals_collector.numbers.interface import NumberStore
from vitals_collector.numbers.lake import Lake


@pytest.fixture(autouse=True)
def _outlined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the few rows of a test be outlined, as many are."""
    monkeypatch.setattr(lake_maintenance, "FEWEST_ROWS", 1)


@pytest.fixture(scope="session")
def fresh_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty lake: to make one takes twice as long as to open it."""
    folder = tmp_path_factory.mktemp("fresh") / "lake"
    Lake(folder).close()
    return folder


@pytest.fixture(params=["lake", "memory"])
def numbers(
    request: pytest.FixtureRequest, tmp_path: Path, fresh_lake: Path
) -> Iterator[NumberStore]:
    """Give an empty store of each kind."""
    with empty_numbers(request.param, tmp_path, fresh_lake) as empty:
        yield empty


@contextmanager
def empty_numbers(kind: str, folder: Path, fresh_lake: Path) -> Iterator[NumberStore]:
    """Open an empty store of that kind."""
    if kind == "memory":
        yield RolledMemory()
        return
    shutil.copytree(fresh_lake, folder, dirs_exist_ok=True)
    lake = Lake(folder)
    yield lake
    lake.close()
