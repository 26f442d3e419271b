"""Where time went is held against jobs that know it."""

import pytest

from trainvitals.goodput import BUCKETS
from vitals_bench.forecast import PARTS
from vitals_bench.forecast.measure import _hold
from vitals_bench.rows import Row


@pytest.mark.parametrize("seed", [4, 7])
def test_a_simulated_job_is_told_as_it_was(seed: int) -> None:
    held = _hold(seed)
    assert sum(held.run.truth.values()) == pytest.approx(held.run.wall_ns, rel=1e-6)
    assert held.is_exact
    assert max(held.off(bucket) for bucket in BUCKETS) < 0.005
    assert held.said.num_failures == held.run.num_failures


def test_the_bench_runs_and_has_a_goal_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitals_bench.forecast.measure._NUM_STEPS", 1_000)
    rows = [row for row in PARTS["goodput"](quick=True) if isinstance(row, Row)]
    assert [row.met for row in rows] == [True] * 4
