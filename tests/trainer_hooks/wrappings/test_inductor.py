"""What torch.compile's own compiler makes of a model is measured and guarded as any other."""

from functools import partial

import pytest

from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.wrappings.cases import main
from tests.trainer_hooks.wrappings.models import SLOW

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return spawned(partial(main, world=2, names=list(SLOW)), tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("name", SLOW)
def test_norms_of_a_compiled_model_are_those_of_its_gathered_gradients(ranks, name):
    for rank in ranks:
        norms = rank[name]["norms"]
        assert pytest.approx(norms["full"], rel=2e-5, abs=1e-13) == norms["ours"]
        assert (norms["names"], {}) == (list(norms["ours"]), norms["faults"])


@pytest.mark.parametrize("name", SLOW)
def test_a_fault_on_one_rank_of_a_compiled_model_leaves_no_trace_on_any(ranks, name):
    first, second = (rank[name]["faults"]["cases"] for rank in ranks)
    for case, result in first.items():
        assert result["decisions"] == second[case]["decisions"]
        for one in (result, second[case]):
            assert [True] * 4 == [one[w] for w in ("kept", "same_rng", "trained", "finite")], case
            assert 0 != one["bits"]
