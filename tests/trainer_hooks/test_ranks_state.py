"""Two real ranks: sharded optimizer state, hooks with a memory, and what is refused there."""

import pytest

from tests.trainer_hooks.ranks_with_state import BAD, main
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("case", ["zero True False", "zero False True"])
def test_a_sharded_optimizer_is_skipped_on_all_ranks_and_goes_on_as_if_it_had_not_been(found, case):
    for one in found:
        assert one[case] == {
            "kept": [True] * len(BAD),
            "stood_still": False,
            "as_plain": True,
            "same": True,
            "lag": 0,
            "faults": {},
        }


def test_a_rollback_brings_a_sharded_optimizer_s_state_back_from_memory(found):
    for one in found:
        assert one["zero heals"] == {"back": 1, "exact": [True], "same": True}


def test_a_relaunch_brings_a_sharded_optimizer_s_state_back_from_disk(found):
    for one in found:
        assert one["zero relaunched"]["step"] > 0
        assert (one["zero relaunched"]["exact"], one["zero relaunched"]["same"]) == (True, True)


@pytest.mark.parametrize("case", ["powersgd", "powersgd batched"])
def test_a_registered_hook_s_memory_is_put_back_and_training_goes_on_as_without_the_step(
    found, case
):
    for one in found:
        result = one[case]
        assert [step for step in result["kept"] if step >= 2] == list(BAD)  # it begins at step 2
        assert result["tensors"] > 0
        assert (result["as_plain"], result["memory"], result["same"]) == (True, True, True)
        assert result["faults"] == {}


def test_a_memory_that_a_bad_step_made_starts_anew(found):
    for one in found:
        assert one["powersgd first"] == {
            "finite": True,
            "moved": True,
            "same": True,
            "alive": True,
        }


def test_a_rollback_brings_a_hook_s_memory_and_counters_back(found):
    for one in found:
        assert one["powersgd heals"] == {"back": 1, "exact": [True], "same": True}


def test_an_unregistered_memory_is_warned_about_once_and_is_poisoned_indeed(found):
    first, second = (one["hooks"]["powersgd"] for one in found)
    (said,) = first["said"]
    assert "PowerSGDState" in said
    assert "watch(..., state=" in said
    assert second["said"] == []
    assert first["skips"] > 1  # one NaN, and every step after it


@pytest.mark.parametrize("hook", ["fp16", "local", "none"])
def test_a_hook_without_a_memory_is_let_in_without_a_word(found, hook):
    for one in found:
        assert one["hooks"][hook] == {"said": [], "skips": 1}


@pytest.mark.parametrize("how", ["join", "Join"])
def test_a_loop_within_join_is_refused_at_its_first_step(found, how):
    for one in found:
        assert one[how]["error"] == "UsageError"
        assert "within Join" in one[how]["text"]
        assert one[how]["steps"] == 1  # the step after it, where join is not enabled


@pytest.mark.parametrize("case", ["overlapped", "fused in backward"])
def test_an_optimizer_that_ddp_steps_within_backward_is_refused(found, case):
    for one in found:
        assert one[case]["error"] == "UsageError"
        assert "inside backward" in one[case]["text"]
