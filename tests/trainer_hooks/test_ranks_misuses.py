"""Two real ranks: what is misused is refused on both alike, so that none waits for the other."""

import pytest

from tests.trainer_hooks.ranks_misusing import WRONG, main
from tests.trainer_hooks.spawned import spawned

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all cases in one launch and return what each rank met."""
    return spawned(main, tmp_path_factory.mktemp("misuses"))


@pytest.mark.parametrize("case", ["all", "all, not fused"])
def test_a_scheduler_that_all_loops_step_too_is_refused_on_all_ranks_at_one_step(results, case):
    for result in results:
        assert "LambdaLR.step() was called by the loop before step 1" in result[case]["error"]
        assert result[case]["steps"] == 2


def test_a_scheduler_that_rank_0_alone_steps_ends_both(results):
    own, other = (result["rank 0"] for result in results)
    assert "LambdaLR.step() was called by the loop before step 1" in own["error"]
    assert "rank 0's loop steps a scheduler" in other["error"]
    assert own["steps"] == other["steps"] == 2


def test_a_healthy_loop_goes_on(results):
    assert [result["none"] for result in results] == [{"error": "", "steps": 6}] * 2


def test_arguments_swapped_on_one_rank_are_refused_on_both(results):
    for result in results:
        assert "they are swapped" in result["swapped"]["error"]
        assert result["swapped"]["error"].startswith("rank 1: the model is")


@pytest.mark.parametrize("text", [*WRONG, "checkpoints cannot be kept"])
def test_an_argument_that_is_wrong_on_rank_1_alone_ends_both_and_names_it(results, text):
    for result in results:
        assert result[text]["error"].startswith(f"rank 1: {text}")
        assert "hint: " in result[text]["error"]
