"""Two real ranks whose loop steps by itself: what is wrong on one is skipped on both."""

import pytest

from tests.trainer_hooks.ranks_attached import main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("attached"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("case", "step"), [("nan", 3), ("given", 30), ("owned", 30)])
def test_what_is_wrong_on_one_rank_is_skipped_on_both(found, case, step, fused):
    ranks = [one[f"{case} {fused}"] for one in found]
    assert [[step]] * 2 == [one["kept"] for one in ranks]
    assert [1, 1] == [one["skips"] for one in ranks]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert [{}, {}] == [one["faults"] for one in ranks]
    assert all(one["same"] for one in ranks)


def test_a_rank_that_cannot_measure_still_steps_as_the_others_do(found):
    ranks = [one["failing"] for one in found]
    assert all(one["same"] for one in ranks)
    assert [[], []] == [one["kept"] for one in ranks]
    assert [{}, {"prepare": 4}] == [one["faults"] for one in ranks]


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_on_one_rank_is_one_on_both_and_both_see_the_step(found, fused):
    expected = {"scale": 4.0, "same": True, "step": 3}
    assert [expected] * 2 == [one[f"overflow {fused}"] for one in found]


def test_fsdp2_gives_its_norm_as_it_is(found):
    assert [{"kept": [30, 31], "norms": True}] * 2 == [one["sharded"] for one in found]


def test_fsdp2_with_an_adapter_whose_gradient_one_rank_reads_does_not_hang(found):
    assert [{"step": 5, "faults": {}}] * 2 == [one["adapted"] for one in found]


def test_the_state_of_one_rank_protects_all_from_the_first_step(found):
    ranks = [one["resumed"] for one in found]
    assert [([0], 33, 1)] * 2 == [(one["kept"], one["step"], one["skips"]) for one in ranks]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert all(one["same"] for one in ranks)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_in_heal_a_weight_that_is_nan_on_one_rank_sends_both_back_to_the_same_state(
    found, is_sharded
):
    ranks = [one["healed"][is_sharded] for one in found]
    ((step, back, is_same, last_epoch),) = ranks[0]["back"]
    assert (step in range(60, 64), 0 < back < 60, is_same) == (True, True, True)
    assert back - 1 == last_epoch
    assert ranks[0] == ranks[1]
    assert (True, True, {}) == (ranks[0]["finite"], ranks[0]["agreed"], ranks[0]["faults"])
