"""Two real ranks: early stopping is agreed on, whatever each of them evaluated."""

import pytest

from tests.trainer_hooks.ranks_early_stopping import main
from tests.trainer_hooks.spawned import spawned

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one launch and return what each rank found."""
    return spawned(main, tmp_path_factory.mktemp("stopping"))


def test_ranks_with_different_values_stop_at_the_same_step_and_restore_rank_0_s_best(found):
    for one in found:
        result = one["own values"]
        assert (14, [6, 1.0], True) == (result["stopped"], result["best"], result["exact"])
        assert {} == result["faults"]
    assert ["early_stopping", "best_restored"] == found[0]["own values"]["said"]
    assert [] == found[1]["own values"]["said"]


def test_nan_on_rank_0_alone_ends_all_ranks_and_nothing_is_kept(found):
    for one in found:
        result = one["nan on rank 0"]
        assert 8 == result["stopped"]
        assert "no state was kept as the best of loss" in result["refused"]
    assert 2 == found[0]["nan on rank 0"]["said"].count("early_stopping_not_finite")


def test_where_rank_0_alone_evaluates_all_stop_by_its_value_and_it_is_said_that_none_is_kept(found):
    for one in found:
        assert 14 == one["rank 0 alone"]["stopped"]
        assert "no state was kept" in one["rank 0 alone"]["refused"]
    assert ["best_not_on_all_ranks", "early_stopping"] == found[0]["rank 0 alone"]["said"]


def test_a_value_of_rank_1_alone_ends_nothing_and_is_said_on_rank_0(found):
    assert [None, None] == [one["rank 1 alone"]["stopped"] for one in found]
    assert ["evaluated_without_rank_0"] == found[0]["rank 1 alone"]["said"]


def test_an_evaluation_after_the_last_step_is_agreed_on_as_well(found):
    for one in found:
        result = one["after the last step"]
        assert (None, [60, 0.0], True) == (result["stopped"], result["best"], result["exact"])


def test_settings_that_differ_between_the_ranks_are_refused_on_all(found):
    for one in found:
        assert "early_stopping: " in one["other settings"]
