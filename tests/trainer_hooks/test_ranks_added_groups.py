"""Parameter groups that two ranks add during training: adopted together, or refused on both."""

import pytest

from tests.trainer_hooks.ranks_adding_groups import two
from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.thawing import THAW

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("cases", ["skips", "attached"])
def test_skips_are_exact_on_both_ranks_before_at_and_after_a_thaw(found, cases):
    for rank in found:
        for name, case in rank[cases].items():
            assert case == {"exact": True, "faults": {}}, name


def test_a_rollback_after_a_thaw_is_exact_on_both_ranks(found):
    for rank in found:
        for name, case in rank["heals"].items():
            assert case["exact"], name
            assert len(case["back"]) == 1, name
            assert min(case["oldest"], case["back"][0]) > THAW, name
            assert case["faults"] == {}, name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rank 1, lag 1", "rank 1 added parameter groups before step 6, and rank 0 did not"),
        ("rank 0, lag 1", "rank 0 added parameter groups before step 6, and rank 1 did not"),
        ("rank 1, lag 0", "rank 1 added parameter groups before step 6, and rank 0 did not"),
        ("different", "different parameter groups were added before step 6 on rank 0, rank 1"),
        ("attached, lag 1", "rank 1 added parameter groups before step 6, and rank 0 did not"),
        ("attached, lag 0", "rank 0 added parameter groups before step 6, and rank 1 did not"),
    ],
)
def test_ranks_that_disagree_get_one_error_that_names_them_and_no_update(found, name, text):
    for rank in found:
        case = rank["disagrees"][name]
        assert text == case["text"]
        assert case["same"]
    assert found[0]["disagrees"][name]["at"] == found[1]["disagrees"][name]["at"]


def test_a_layer_that_ddp_does_not_average_is_refused_on_both_ranks(found):
    for rank in found:
        assert "the gradient of 0.weight" in rank["apart"]
        assert "DDP does not average it" in rank["apart"]


def test_rank_0_logs_one_message(found):
    assert [1, 0] == [len(rank["messages"]["added"]) for rank in found]
    assert all(rank["messages"]["same"] and rank["messages"]["steps"] for rank in found)
