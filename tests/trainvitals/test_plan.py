"""What a plan journal says of a run's branches."""

import json

import msgspec
import pytest

from trainvitals.policy.plan import BatchWindow, Branch, Plan, PlanLine, extend_plan, read_plan
from trainvitals.policy.state import DurablePolicyState


def plan(*branches):
    return Plan(branches=tuple(Branch(*b) for b in branches))


def test_a_run_without_branches_holds_every_state():
    assert Plan().is_in_lineage(10, 7)


def test_a_state_of_the_present_branch_is_held_whatever_its_step():
    assert plan((1, None, 0)).is_in_lineage(10**6, 1)


def test_a_state_of_the_branch_that_was_left_is_held_up_to_the_fork():
    forked = plan((1, None, 0), (2, 1, 50))
    assert (True, True, False) == (
        forked.is_in_lineage(20, 1),
        forked.is_in_lineage(50, 1),
        forked.is_in_lineage(51, 1),
    )


def test_what_was_rolled_back_away_stays_away_after_a_later_branch():
    twice = plan((1, None, 0), (2, 1, 50), (3, 2, 80))
    assert (True, False, True, False) == (
        twice.is_in_lineage(50, 1),
        twice.is_in_lineage(60, 1),
        twice.is_in_lineage(80, 2),
        twice.is_in_lineage(90, 2),
    )


def test_a_deeper_rollback_takes_away_all_that_lay_above_it():
    deeper = plan((1, None, 0), (2, 1, 50), (3, 1, 20))
    assert (True, False, False) == (
        deeper.is_in_lineage(20, 1), deeper.is_in_lineage(30, 1), deeper.is_in_lineage(50, 2)
    )  # fmt: skip


def test_a_branch_through_a_grandparent_is_cut_at_the_lowest_fork():
    low = plan((1, None, 0), (2, 1, 50), (3, 2, 20))
    assert (True, False) == (low.is_in_lineage(20, 1), low.is_in_lineage(40, 1))


def test_a_relaunch_after_a_decided_rollback_does_not_load_what_it_rolled_back():
    before = plan((1, None, 0))
    decided = extend_plan(before, PlanLine(DurablePolicyState(num_rollbacks=1), Branch(2, 1, 40)))
    assert (True, False) == (decided.is_in_lineage(40, 1), decided.is_in_lineage(60, 1))
    assert 1 == decided.facts.num_rollbacks


def test_a_branch_that_is_told_again_is_the_newer_word():
    told = extend_plan(
        plan((1, None, 0), (2, 1, 40)), PlanLine(DurablePolicyState(), Branch(2, 1, 20))
    )
    assert (True, False) == (told.is_in_lineage(20, 1), told.is_in_lineage(40, 1))


def test_a_parent_of_another_journal_is_known_by_its_id_alone():
    moved = plan((9, 5, 30))
    assert (True, False, False) == (
        moved.is_in_lineage(30, 5),
        moved.is_in_lineage(31, 5),
        moved.is_in_lineage(1, 4),
    )


def test_a_start_that_found_nothing_to_load_gives_up_nothing_that_came_before_it():
    amid = plan((1, None, 0), (2, 1, 50), (3, None, 0), (4, 3, 10))
    assert (True, False, True) == (
        amid.is_in_lineage(50, 1),
        amid.is_in_lineage(60, 1),
        amid.is_in_lineage(900, 2),
    )
    assert (True, False, True) == (
        amid.is_in_lineage(10, 3),
        amid.is_in_lineage(11, 3),
        amid.is_in_lineage(99, 4),
    )


def test_what_a_start_from_nothing_trained_is_left_once_the_older_states_are_found_again():
    found = plan((1, None, 0), (2, None, 0), (3, 1, 900))
    assert (True, False, True) == (
        found.is_in_lineage(900, 1),
        found.is_in_lineage(10, 2),
        found.is_in_lineage(950, 3),
    )


def test_the_newest_attempt_is_known_though_its_branch_never_began():
    decided = extend_plan(Plan(), PlanLine(DurablePolicyState(attempt=3), Branch(4, 3, 10)))
    assert 4 == decided.newest_attempt


def test_what_was_written_is_read_again():
    lines = [
        PlanLine(DurablePolicyState(attempt=1), Branch(1, None, 0)),
        PlanLine(DurablePolicyState(num_rollbacks=1), Branch(2, 1, 40), BatchWindow(0, 7, 50)),
        PlanLine(DurablePolicyState(attempt=2, num_rollbacks=1, last_command=9)),
    ]
    read = read_plan(json.loads(msgspec.json.encode(lines)))
    assert DurablePolicyState(attempt=2, num_rollbacks=1, last_command=9) == read.facts
    assert (Branch(1, None, 0), Branch(2, 1, 40)) == read.branches
    assert (BatchWindow(0, 7, 50),) == read.windows


def test_a_damaged_line_is_an_error_and_never_a_guess():
    with pytest.raises(msgspec.ValidationError):
        read_plan([{"facts": 5}])
