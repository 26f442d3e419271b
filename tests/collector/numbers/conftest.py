"""The two stores of numbers, for tests of what both promise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vitals_collector.numbers import lake_upkeep
from vitals_collector.numbers.interface import Numbers
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.memory import MemoryNumbers


@pytest.fixture(autouse=True)
def _outlined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the few rows of a test be outlined, as many are."""
    monkeypatch.setattr(lake_upkeep, "FEWEST_ROWS", 1)


@pytest.fixture(params=["lake", "memory"])
def numbers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Numbers]:
    """Give an empty store of each kind."""
    if request.param == "memory":
        yield MemoryNumbers()
        return
    lake = Lake(tmp_path)
    yield lake
    lake.close()
