"""Two real ranks, one of them hostile: they stay together, or are refused together."""

import pytest

from tests.trainer_hooks.ranks_under_attack import main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("observe on one", "mode: observe on rank 1"),
        ("off on one", "mode: off on rank 1"),
        ("wrong on one", "VITALS_MODE"),
        ("agent on one", "VITALS_AGENT"),
        ("shm on one", "VITALS_SHM"),
        ("dir on root", "cannot be created"),
        ("other lag", "found_inf=False"),
        ("other parameters", "parameters"),
        ("other checkpoints", "checkpoints"),
    ],
)
def test_what_differs_between_ranks_is_refused_on_all_of_them(found, case, words):
    texts = [one["refusals"][case]["text"] for one in found]
    assert texts[0] == texts[1]
    assert words in texts[0]


def test_what_is_alike_is_let_in(found):
    assert [one["refusals"]["none"]["error"] for one in found] == ["", ""]


@pytest.mark.parametrize("what", ["gradients", "squares_into"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_whose_preparation_fails_clips_as_the_others_do(found, what, fused):
    for one in found:
        result = one[f"prepare {what} {fused}"]
        assert (result["same"], result["as_plain"]) == (True, True)
        assert "split_verdict" not in result["notes"]


def test_a_rank_that_cannot_fill_its_pack_still_enters_the_exchange(found):
    assert [one["fill"]["same"] for one in found] == [True, True]


@pytest.mark.parametrize("fused", [True, False])
def test_a_nan_forward_on_one_rank_leaves_no_trace_on_any(found, fused):
    for one in found:
        result = one[f"nan {fused}"]
        assert result["kept"] == [True, False, False, True, False]
        assert result["same"]
        assert result["faults"] == {}


def test_an_overflow_of_one_shard_lowers_every_rank_s_scale(found):
    assert [one["overflow"] for one in found] == [{"scale": 4.0, "same": True}] * 2


def test_a_change_announced_on_rank_0_reaches_all(found):
    for one in found:
        assert one["announced"]["skips"] == 0
        assert one["announced"]["same"]
        assert "split_verdict" not in one["announced"]["notes"]


def test_a_full_disk_on_one_rank_parts_nobody(found):
    first, second = (one["full disk"] for one in found)
    assert first == second
    assert first["same"]
    assert len(first["back"]) == 1


def test_no_gradient_on_any_rank_is_said_on_every_rank_at_the_same_step(found):
    assert found[0]["no gradients"] == found[1]["no gradients"]
    assert found[0]["no gradients"]["error"] == "UsageError"


def test_accumulated_losses_are_weighted_over_ranks_with_and_without_sync(found):
    for name in ("sync", "no_sync"):
        assert found[0][name] == found[1][name]
        assert found[0][name]["same"]
        assert found[0][name]["tokens"] == 18
