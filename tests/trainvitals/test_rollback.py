"""Finite evidence leads back once, within its cooldown, and never stops a run."""

import itertools
import math

import pytest

from tests.trainvitals.played import reads
from tests.trainvitals.policy_run import Run
from trainvitals.alerting import alerts_for_finding
from trainvitals.policy.evidence import (
    NONFINITE_GRADIENT,
    LossTrend,
    ProbeResult,
    describe_reading,
)
from trainvitals.policy.state import DurablePolicyState, lr_factor_at, max_row


def test_a_damaged_state_goes_back_at_the_first_outlier_without_three_batches_on_either_side():
    run = Run(probe=reads(6.5))
    (back,) = run.feed("outlier")
    assert ("rollback", "state_damaged", 150, 7) == (
        back.action, back.rule, back.rollback_to_step, back.skip_batches,
    )  # fmt: skip
    assert "the loss on 8 earlier batches is 6.5x what it was" in back.reason


@pytest.mark.parametrize(
    ("ratio", "num_batches", "clips", "goes_back"),
    [(1.2, 8, True, False), (1.3, 8, True, True), (9.0, 2, True, False),
     (1.3, 8, False, False), (5.1, 8, False, True)],
)  # fmt: skip
def test_it_takes_lost_progress_or_a_multiple_of_the_loss_and_three_batches(
    ratio, num_batches, clips, goes_back
):
    run = Run(probe=reads(ratio, num_batches), clips=clips)
    actions = [d.action for d in run.feed("outlier")]
    assert goes_back == ("rollback" in actions)


def test_a_gradient_that_is_not_finite_on_a_kept_batch_is_damage_whatever_the_loss():
    run = Run(probe=lambda ask: ProbeResult(
        num_batches=8, then=2.0, now=2.0, has_gradient=False,
        detail=f"{NONFINITE_GRADIENT} (rank 0); steps 160 to 184",
    ))  # fmt: skip
    (back,) = run.feed("outlier")
    assert "rollback" == back.action
    assert f"{NONFINITE_GRADIENT}: the state is damaged" in back.reason
    (read,) = run.readings
    assert math.isinf(read.ratio)
    assert f"Probe: {NONFINITE_GRADIENT} (rank 0)" in describe_reading(read)


def test_it_is_not_repeated_for_an_onset_nor_within_the_cooldown_and_never_halts():
    run = Run(probe=reads(9.0), finite_cooldown=100)
    assert "rollback" == run.feed("outlier")[-1].action
    for start in (200, 240, 280):
        run.restored(start)
        actions = {d.action for d in run.feed(*("outlier",) * 8, *("ok",) * 3)}
        assert actions <= {"skip_step"}
    told = [f.reason for f in run.told if f.kind == "state_damaged"]
    assert 3 == len(told)
    assert "as before the rollback: the data is at fault" in told[0]
    run.restored(500)
    run.feed(*("ok",) * 100)
    assert "rollback" == run.feed("outlier")[-1].action
    assert "" == run.state.facts.halted


def test_in_guard_the_verdict_pages_once_with_what_repairs_it_and_nothing_goes_back():
    run = Run(mode="guard", probe=reads(9.0))
    assert {"skip_step"} == {d.action for d in run.feed(*("outlier",) * 10)}
    (damage,) = run.told
    (alert,) = alerts_for_finding(damage, run_id="r")
    assert ("StateDamaged", "page") == (alert.name, alert.severity)
    assert "restart it from a checkpoint before step 180" in damage.reason
    assert "vitals checkpoints list" in damage.reason


@pytest.mark.parametrize(("clips", "limit"), [(True, 2.0), (False, 5.0)])
def test_the_verdict_names_the_ratio_that_it_was_held_against(clips, limit):
    run = Run(mode="guard", probe=reads(9.0), clips=clips)
    run.feed("outlier")
    assert [(9.0, limit)] == [(pytest.approx(f.value), f.limit) for f in run.told]


def test_after_an_answer_outliers_are_applied_until_the_next_question_is_due():
    run = Run(mode="guard", probe=reads(9.0))
    assert 2 == max_row(run.state, run.config)
    run.feed("outlier")
    assert 0 == max_row(run.state, run.config)
    run.feed(*("ok",) * run.config.ask_pause)
    assert 2 == max_row(run.state, run.config)


def test_a_spike_that_began_unseen_long_before_its_report_is_acted_on():
    run = Run(probe=reads(9.0), onset=-21)
    (back,) = run.feed("reported")
    assert ("rollback", 179) == (back.action, run.readings[0].onset_step)


def test_what_reads_worse_long_after_its_onset_may_be_forgetting_and_leads_nowhere():
    run = Run(probe=reads(9.0), finding="divergence", onset=-64)
    assert [] == run.feed("reported")
    assert [("level", "state")] == [(read.trigger, read.verdict) for read in run.readings]
    assert [] == run.told


def test_what_reads_worse_soon_after_an_earlier_question_may_be_forgetting_too():
    """New data: each later question finds more of the old data forgotten."""
    ratios = itertools.chain([1.0, 6.5], itertools.repeat(9.0))
    run = Run(probe=lambda ask: reads(next(ratios))(ask))
    assert {"skip_step"} == {d.action for d in run.feed("outlier")}
    run.feed(*("ok",) * 16)
    assert {"skip_step"} == {d.action for d in run.feed("outlier")}
    assert [] == run.feed(*("ok",) * 32)  # it asks once more by itself
    assert ["sound", "state", "state"] == [read.verdict for read in run.readings]
    assert [] == run.feed(*("ok",) * 40)  # and again every 8 steps, for 32
    assert ["state"] * 4 == [read.verdict for read in run.readings[3:]]
    run.feed(*("ok",) * 100)
    assert "rollback" == run.feed("outlier")[-1].action


@pytest.mark.parametrize(
    ("recent", "is_damage"), [(30.0, True), (18.0, True), (16.0, True), (40.0, False), (9.0, False)]
)
def test_what_the_latest_steps_show_as_well_is_damage_and_not_forgetting(recent, is_damage):
    """The first question comes too late to tell them apart; others follow by themselves."""
    run = Run(probe=reads(9.0), finding="divergence", onset=-12)
    run.trend = LossTrend(2.0, 0.1, 3.0, 0.0, recent)
    assert [] == run.feed("reported")
    made = run.feed(*("ok",) * 40)
    num = 2 if is_damage else 4
    assert ["state"] * num == [read.verdict for read in run.readings]
    assert [run.readings[0].onset_step] * num == [read.onset_step for read in run.readings]
    assert (["rollback"] if is_damage else []) == [d.action for d in made]


def test_without_a_clip_only_the_first_outlier_of_a_group_proves_damage():
    """One update on new data does not undo the progress; a few do."""
    run = Run(probe=reads(5.1), clips=False)
    assert ["rollback"] == [d.action for d in run.feed("reported")]
    ratios = itertools.chain([1.0], itertools.repeat(5.1))
    run = Run(probe=lambda ask: reads(next(ratios))(ask), clips=False)
    assert [] == run.feed("reported", *("reported",) * 16)
    assert ["sound", "state"] == [read.verdict for read in run.readings]


@pytest.mark.parametrize(
    ("kind", "loss", "onset", "is_damage"),
    [
        ("outlier", 6.0, 0, True),
        ("outlier", 9.0, 0, True),
        ("outlier", 12.0, 0, False),
        ("reported", 2.1, 0, False),
        ("outlier", 6.0, -2, False),
    ],
    ids=["as bad", "somewhat better", "a hard batch", "its update did it", "not the first step"],
)
def test_without_a_clip_half_the_progress_is_enough_if_the_first_bad_step_lost_it_too(
    kind, loss, onset, is_damage
):
    """Earlier batches read 5.0, and read 2.0 before, of first losses of 8.0."""
    run = Run(probe=reads(5.16 / 2.16), clips=False, onset=onset)
    run.trend = LossTrend(2.0, 0.1, 8.0)
    actions = {d.action for d in run.feed(kind, value=loss)}
    assert is_damage == ("rollback" in actions)
    assert ["state" if is_damage else "worse"] == [read.verdict for read in run.readings]


@pytest.mark.parametrize(
    ("kind", "ratio", "clips", "is_damage"),
    [("written", 1.3, False, True), ("written", 1.3, True, True), ("written", 1.1, False, False),
     ("reported", 1.3, False, False)],
)  # fmt: skip
def test_weights_that_no_update_explains_are_damage_at_the_ratio_of_a_loop_with_a_clip(
    kind, ratio, clips, is_damage
):
    """No batch is at fault, so all are trained again."""
    run = Run(probe=reads(ratio), clips=clips)
    made = run.feed(kind)
    assert (["rollback"] if is_damage else []) == [d.action for d in made]
    assert all(d.skip_batches == 0 for d in made)


def test_a_write_in_the_step_of_a_spike_dates_the_damage():
    """The batch of the spike is not at fault, and probes of writes do not use up the others."""
    run = Run(probe=reads(1.3), onset=-40, step=300)
    (back,) = run.feed("written")
    assert ("rollback", 150) == (back.action, back.rollback_to_step)
    assert () == run.state.asked


def test_weights_that_were_written_are_read_however_recently_the_probe_ran():
    ratios = itertools.chain([1.1], itertools.repeat(1.3))
    run = Run(probe=lambda ask: reads(next(ratios))(ask))
    assert [] == run.feed("reported", "reported")
    assert ["rollback"] == [d.action for d in run.feed("written")]
    assert 2 == len(run.readings)


@pytest.mark.parametrize(
    ("ratio", "recent", "is_damage"),
    [(2.3, 4.6, True), (2.3, 3.6, False), (1.9, 3.8, False)],
)
def test_damage_that_shows_little_at_first_is_read_again_after_32_steps(ratio, recent, is_damage):
    run = Run(probe=reads(ratio), clips=False)
    run.trend = LossTrend(2.0, 0.1, 8.0, 0.0, recent)
    made = run.feed("outlier", *("ok",) * 31)
    assert "rollback" not in {d.action for d in made}
    assert ["worse" if ratio > 2.0 else "sound"] == [read.verdict for read in run.readings]
    assert (["rollback"] if is_damage else []) == [d.action for d in run.feed("ok")]


def test_a_suspicion_is_settled_after_32_steps_however_long_the_pause_is_by_now():
    ratios = iter([1.0, 1.0, 9.0, 9.0])
    run = Run(probe=lambda ask: reads(next(ratios))(ask))
    run.trend = LossTrend(2.0, 0.1, 3.0, 0.0, 18.0)
    for num_quiet in (16, 32, 0):
        assert {"skip_step"} == {d.action for d in run.feed("outlier")}
        assert [] == run.feed(*("ok",) * num_quiet)
    assert ["sound", "sound", "state"] == [read.verdict for read in run.readings]
    assert [] == run.feed(*("ok",) * 31)
    assert ["rollback"] == [d.action for d in run.feed("ok")]


def test_losses_below_zero_have_no_ratio():
    run = Run(probe=reads(9.0), lowest=-0.1)
    assert {"skip_step"} == {d.action for d in run.feed("outlier")}
    (read,) = run.readings
    assert ("abstained", None) == (read.verdict, read.ratio)
    assert "no verdict: losses below zero have no ratio" in describe_reading(read)


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
    facts = DurablePolicyState(lr_cap=0.001, lr_cap_from=350)
    assert [1.0, 1.0, pytest.approx(1 / 3), pytest.approx(1 / 30)] == [
        lr_factor_at(facts, 400, rate) for rate in (0.001, 0.0029, 0.003, 0.03)
    ]
