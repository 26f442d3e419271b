"""Two real ranks: weights that only rank 0 reads are judged, and probed, on both."""

import pytest

from tests.trainer_hooks.measures.ranks_writing import WRITTEN, main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


def test_both_ranks_query_the_probe_about_weights_that_rank_0_found(tmp_path):
    first, second = spawned(main, tmp_path)
    assert {} == first["faults"] == second["faults"]
    assert first["weights"] == second["weights"]
    ((layer, onset),) = first["written"]
    assert ("4", True) == (layer, WRITTEN - 50 < onset <= WRITTEN + 50)
    assert ["level", onset] in first["read"]
    assert first["probed"] == second["probed"] != []
