"""Finite evidence leads back once, within its cooldown, and never stops a run."""

import pytest

from tests.trainvitals.ladder_run import Run
from tests.trainvitals.played import reads
from trainvitals.policy.state import LadderMemory, Withholding, lr_factor_at, withholding


def test_a_damaged_state_goes_back_at_the_third_outlier_without_three_batches_on_either_side():
    run = Run(probe=reads(6.5))
    assert [] == run.feed("outlier")  # left to the loop's clip
    ledger = run.feed("outlier", "outlier")
    assert [("skip_step", "outlier"), ("rollback", "state_damaged")] == [
        (d.action, d.rule) for d in ledger
    ]
    assert (150, 9) == (ledger[-1].rollback_to_step, ledger[-1].skip_batches)
    assert "the loss on 8 earlier batches is 6.5x what it was" in ledger[-1].reason


@pytest.mark.parametrize(
    ("ratio", "num_batches", "clips", "goes_back"),
    [(1.9, 8, True, False), (2.1, 8, True, True), (9.0, 2, True, False),
     (4.3, 8, False, False), (5.1, 8, False, True)],
)  # fmt: skip
def test_it_takes_twice_the_loss_five_times_without_a_clip_and_three_batches(
    ratio, num_batches, clips, goes_back
):
    run = Run(probe=reads(ratio, num_batches), clips=clips)
    actions = [d.action for d in run.feed(*("outlier",) * 3)]
    assert goes_back == ("rollback" in actions)


def test_it_is_not_repeated_for_an_onset_nor_within_the_cooldown_and_never_halts():
    run = Run(probe=reads(9.0), finite_cooldown=100)
    assert "rollback" == run.feed(*("outlier",) * 3)[-1].action
    for start in (200, 230, 260):
        run.restored(start)
        actions = {d.action for d in run.feed(*("outlier",) * 8, *("ok",) * 3)}
        assert {"skip_step"} == actions
    assert 2 == len([f for f in run.told if f.kind == "state_damaged"])  # of 230 and 260
    run.restored(400)
    run.feed(*("ok",) * 100)
    assert "rollback" == run.feed(*("outlier",) * 3)[-1].action
    assert "" == run.state.facts.halted


def test_in_guard_the_verdict_is_told_once_and_nothing_goes_back():
    run = Run(mode="guard", probe=reads(9.0))
    assert {"skip_step"} == {d.action for d in run.feed(*("outlier",) * 10)}
    assert ["state_damaged"] == [f.kind for f in run.told]


@pytest.mark.parametrize(("clips", "limit"), [(True, 2.0), (False, 5.0)])
def test_the_verdict_names_the_ratio_that_it_was_held_against(clips, limit):
    run = Run(mode="guard", probe=reads(9.0), clips=clips)
    run.feed(*("outlier",) * 3)
    assert [(9.0, limit)] == [(pytest.approx(f.value), f.limit) for f in run.told][:1]


def test_from_weights_that_were_read_damaged_nothing_more_is_withheld_in_this_row():
    run = Run(mode="guard", probe=reads(9.0))
    run.feed(*("outlier",) * 2)
    assert withholding(run.state, run.config, clips=True).left > 0
    run.feed("outlier")
    assert Withholding() == withholding(run.state, run.config, clips=True)
    run.feed("ok", "outlier")
    assert withholding(run.state, run.config, clips=True).left > 0


def test_non_finite_steps_without_end_are_skipped_on_where_the_state_reads_sound():
    run = Run(probe=reads(1.0), nonfinite_in_a_row=32)
    assert {"skip_step"} == {d.action for d in run.feed(*("nan",) * 300)}
    assert ["nonfinite_streak"] == [f.kind for f in run.told]


def test_a_budget_comes_back_with_time():
    run = Run(max_causes=1, budget_window=200)
    assert "rollback" == run.feed("params")[-1].action
    run.restored(300)
    run.feed(*("ok",) * 210)
    assert "rollback" == run.feed("params")[-1].action
    run.restored(600)
    assert ("halt", "budget") == (lambda d: (d.action, d.rule))(run.feed("params")[-1])


def test_a_held_rate_is_what_it_was_before_its_jump_while_the_schedule_asks_for_thrice_it():
    facts = LadderMemory(lr_cap=0.001, lr_cap_from=350)
    assert [1.0, 1.0, pytest.approx(1 / 3), pytest.approx(1 / 30)] == [
        lr_factor_at(facts, 400, rate) for rate in (0.001, 0.0029, 0.003, 0.03)
    ]
