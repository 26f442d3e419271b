"""How often what observe would have done would have been right."""

import math

import pytest

from trainvitals.hindsight import judge_decision_in_hindsight, summarize_outcomes
from trainvitals.records import Decision


def would(action="skip_step", *, step=100, cause="loss_outlier", acted=False):
    return Decision(
        ledger_seq=1, action=action, step=step, decided_at_step=step + 1, attempt=1,
        reason="", rule="", cause=cause, mode="observe", acted=acted,
    )  # fmt: skip


def course(steps=400, *, bump=0.0, decay=0.0, at=100):
    """Return a loss of 2 with a little noise and, from a step on, something on top of it."""
    losses = {}
    for step in range(steps):
        extra = bump * math.exp(-decay * (step - at)) if step >= at else 0.0
        losses[step] = 2.0 + 0.01 * math.sin(7.0 * step) + extra
    return losses


def test_a_spike_that_left_nothing_behind_need_not_have_been_skipped():
    losses = {**course(), 100: 9.0}
    assert "unneeded" == judge_decision_in_hindsight(would(), losses)


def test_one_that_the_loss_did_not_come_back_from_should_have_been():
    assert "needed" == judge_decision_in_hindsight(would(), course(bump=1.0))
    assert "needed" == judge_decision_in_hindsight(would(), course(bump=1.0, decay=0.02))


def test_a_non_finite_update_should_always_have_been_skipped():
    assert "needed" == judge_decision_in_hindsight(would(cause="nonfinite_gradient"), course())


def test_a_loss_that_is_not_finite_afterwards_is_harm():
    losses = course() | dict.fromkeys(range(101, 400), math.nan)
    assert "needed" == judge_decision_in_hindsight(would(), losses)


@pytest.mark.parametrize("action", ["rollback", "halt"])
def test_a_course_of_steps_has_longer_to_recover_by_itself(action):
    assert "unneeded" == judge_decision_in_hindsight(would(action), course(bump=3.0, decay=0.05))
    assert "needed" == judge_decision_in_hindsight(would(action), course(bump=3.0, decay=0.001))


def test_before_the_steps_after_it_are_known_nothing_is_said():
    assert "open" == judge_decision_in_hindsight(would(), course(104))
    assert "open" == judge_decision_in_hindsight(would("rollback"), course(250))
    assert "open" == judge_decision_in_hindsight(would(step=3), course())
    assert "open" == judge_decision_in_hindsight(would(), {})


def test_what_was_carried_out_or_changes_nothing_is_no_shadow():
    assert None is judge_decision_in_hindsight(would(acted=True), course())
    assert None is judge_decision_in_hindsight(would("accept_level"), course())


def test_the_tally_is_in_words():
    assert "" == summarize_outcomes([None, None])
    assert "2 of 3 would have been needed, 1 was not" == summarize_outcomes(
        ["needed", "needed", "unneeded", None]
    )
    assert "0 of 0 would have been needed, 0 were not; 2 are undecided" == summarize_outcomes(
        ["open", "open"]
    )
