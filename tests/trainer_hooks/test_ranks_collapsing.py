"""Two real ranks: a collapse that only rank 0 sees halts both at the same step."""

import pytest

from tests.trainer_hooks.ranks_collapsing import main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("collapsing"))


def test_both_ranks_halt_at_the_same_step_and_save_a_checkpoint_of_it(found):
    first, second = (rank["trained"] for rank in found)
    assert 60 < first["step"] == second["step"] < 80
    assert {} == first["faults"] == second["faults"]
    assert f"step-{first['step']:08d}" in first["kept"][-1]
    assert "the policy collapsed: its entropy fell from 1 to 0.01" in first["halted"]
    assert "policy collapse, found on rank 0" in second["halted"]
    for rank in (first, second):
        assert f"saved {first['kept'][-1]}" in rank["halted"]


def test_ranks_with_different_reactions_are_refused(found):
    assert all("on_collapse" in rank["refused"] for rank in found)
