"""Where time went is held against jobs that know it."""

import pytest

from trainvitals.goodput import BUCKETS
from vitals_bench.forecast.measure import _hold

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("seed", [4, 7])
def test_a_simulated_job_is_told_as_it_was(seed: int) -> None:
    held = _hold(seed)
    assert sum(held.run.truth.values()) == pytest.approx(held.run.wall_ns, rel=1e-6)
    assert held.is_exact
    assert max(held.off(bucket) for bucket in BUCKETS) < 0.005
    assert held.said.num_failures == held.run.num_failures
