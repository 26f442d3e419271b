import pytest

from vitals_agent.daemon import Ending, LoopConfig

CALM = {
    "num_living": 0,
    "has_served": False,
    "drained": True,
    "parent_alive": True,
    "num_signals": 0,
}


def ends(config: LoopConfig, *timeline: dict) -> list[bool]:
    """Whether the end is reached at second 0, 1, 2, ..."""
    ending = Ending(config)
    return [ending.reached(float(now), **{**CALM, **at}) for now, at in enumerate(timeline)]


CHILD = LoopConfig(child=True, drain_grace_seconds=3.0, stop_grace_seconds=2.0)


def test_a_standalone_agent_waits_for_runs_for_ever():
    assert not any(ends(LoopConfig(), {}, {"has_served": True}, {"parent_alive": False}))


def test_a_standalone_agent_ends_at_the_first_signal():
    assert [False, True] == ends(
        LoopConfig(), {"num_living": 1}, {"num_living": 1, "num_signals": 1}
    )


def test_once_ends_after_one_cycle():
    assert [True] == ends(LoopConfig(once=True), {"num_living": 2})


def test_a_child_ends_when_its_ranks_are_gone_and_everything_is_drained():
    served = {"has_served": True}
    timeline = [{}, {"num_living": 2, **served}, {**served, "drained": False}, served]
    assert [False, False, False, True] == ends(CHILD, *timeline)


def test_a_child_waits_for_its_first_rank_only_while_its_parent_lives():
    assert [False, False, True] == ends(CHILD, {}, {}, {"parent_alive": False})


def test_a_child_without_its_parent_stays_while_another_rank_lives():
    orphan = {"has_served": True, "parent_alive": False}
    assert [False, False, True] == ends(
        CHILD, {"num_living": 1, **orphan}, {"num_living": 1, **orphan}, orphan
    )


def test_a_child_does_not_wait_for_ever_for_a_collector_that_is_away():
    stuck = {"has_served": True, "drained": False}
    assert [False, False, False, True] == ends(CHILD, stuck, stuck, stuck, stuck)


def test_a_rank_that_comes_back_ends_the_waiting():
    stuck = {"has_served": True, "drained": False}
    back = {**stuck, "num_living": 1}
    assert not any(ends(CHILD, stuck, stuck, back, stuck, stuck, stuck))


@pytest.mark.parametrize("num_living", [0, 1])
def test_a_child_that_is_told_to_stop_waits_a_little_for_its_ranks(num_living):
    told = {"num_living": num_living, "has_served": True, "num_signals": 1}
    expected = [True, True, True] if num_living == 0 else [False, False, True]
    assert expected == ends(CHILD, told, told, told)


def test_a_child_that_is_told_twice_ends_at_once():
    assert [True] == ends(CHILD, {"num_living": 1, "num_signals": 2})
