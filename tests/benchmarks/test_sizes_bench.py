"""What a fleet takes is calculated from what is measured here, and grows as it must."""

import pytest

from vitals_bench import sizes
from vitals_bench.numbers.commits import Case
from vitals_bench.rows import Grid, Row
from vitals_bench.sizes import Costs, fleet_takes

pytestmark = pytest.mark.nightly

COSTS = Costs(commit_seconds=0.02, row_seconds=1e-5, row_bytes=50.0, level_bytes=200.0)


def test_a_fleet_takes_its_commits_and_its_rows() -> None:
    takes = fleet_takes(100_000, 1.0, COSTS)
    assert takes.cores == pytest.approx(0.02 + 1.0)
    assert takes.num_collectors == 3
    assert takes.whole_bytes == pytest.approx(86_400 * 100_000 * 50)
    assert takes.thinned_bytes == pytest.approx(86_400 * (9 * 50 + 200))


def test_slow_steps_are_committed_as_seldom_and_few_ranks_stay_whole() -> None:
    takes = fleet_takes(8, 10.0, COSTS)
    assert takes.cores == pytest.approx(0.002 + 8e-6)
    assert takes.num_collectors == 1
    assert takes.thinned_bytes == takes.whole_bytes == pytest.approx(8_640 * 8 * 50)


@pytest.mark.slow
def test_the_bench_measures_what_it_calculates_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "QUICK", ((Case(1, 1, 1), 1), (Case(1, 16, 1), 1)))
    told = list(sizes.measure_sizes(quick=True))
    measured = [row for row in told if isinstance(row, Row)]
    assert [row.unit for row in measured] == ["ms", "us", "bytes", "bytes"]
    assert 8 < (measured[2].ours or 0) < 200  # of twenty values, packed
    assert [len(grid.rows) for grid in told if isinstance(grid, Grid)] == [7, 7]
