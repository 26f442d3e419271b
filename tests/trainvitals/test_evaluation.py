"""An evaluation is evidence about the state only where outliers came since the one before."""

import math

import pytest

from tests.trainvitals.played import reads
from tests.trainvitals.policy_run import Run
from trainvitals.policy import Proposal


def evaluated(mode="heal", **config) -> Run:
    """Return a run that was evaluated at step 200; its next step is 201."""
    run = Run(mode=mode, **config)
    run.feed("ok", evaluation=1.0)
    return run


def verdicts(run: Run) -> list[str]:
    return [read.verdict for read in run.readings if read.trigger == "evaluation"]


def test_twice_the_loss_behind_outliers_goes_back_to_before_the_first_of_them():
    run = evaluated()
    run.feed("ok", "outlier", "ok", "outlier", "outlier", *("ok",) * 5)
    (back,) = run.feed("ok", evaluation=2.5)
    assert ("rollback", "evaluation", 211, 150) == (
        back.action, back.rule, back.step, back.rollback_to_step,
    )  # fmt: skip
    assert 205 - 202 + 1 + 2 * 3 == back.skip_batches  # with three on either side
    assert "skipping 10 batches from step 199" in back.reason
    assert "the evaluation loss is 2.5x the previous one: the state is damaged" in back.reason
    assert ["sound", "state"] == verdicts(run)


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(2.0, "sound"), (2.01, "state"), (1e9, "state"), (math.inf, "state")]
)
def test_it_takes_more_than_twice_the_loss(ratio, verdict):
    run = evaluated()
    run.feed("outlier")
    made = run.feed("ok", evaluation=ratio)
    assert verdict == verdicts(run)[-1]
    assert (verdict == "state") == ("rollback" in [d.action for d in made])


def test_in_guard_it_is_told_once_and_nothing_is_decided():
    run = evaluated("guard")
    run.feed("outlier", "ok")
    assert [] == run.feed("ok", evaluation=3.0)
    assert [("state_damaged", "actionable", "evaluation", 201)] == [
        (f.kind, f.level, f.detector, f.onset_step) for f in run.told
    ]
    run.feed("ok", evaluation=3.0)  # no outlier since the one before
    assert ["sound", "state", "abstained"] == verdicts(run)
    assert 1 == len(run.told)


def test_without_an_outlier_since_the_one_before_it_says_nothing():
    run = Run()
    run.feed("outlier", "ok")
    run.feed("ok", evaluation=1.0)
    assert [] == run.feed(*("ok",) * 20)
    assert [] == run.feed("ok", evaluation=5.0)
    assert ["sound", "abstained"] == verdicts(run)
    assert "no outlier since the previous evaluation" == run.readings[-1].detail
    assert [] == run.told


def test_the_first_evaluation_of_a_branch_has_none_before_it():
    run = Run()
    run.feed("outlier", "ok")
    assert [] == run.feed("ok", evaluation=5.0)
    assert ["abstained"] == verdicts(run)


def test_an_operators_word_since_makes_it_forgetting_too():
    run = evaluated()
    run.feed("outlier", "outlier", "ok")
    run.feed("ok", command=Proposal(number=7, action="accept", argument=201.0))
    assert [] == run.feed("ok", evaluation=5.0)
    assert ["sound", "abstained"] == verdicts(run)


@pytest.mark.parametrize("loss_kind", ["rl", "adversarial"])
def test_a_loss_that_is_not_to_become_small_is_no_evidence(loss_kind):
    run = evaluated(loss_kind=loss_kind)
    run.feed("outlier", "ok")
    assert [] == run.feed("ok", evaluation=5.0)
    assert "state" not in verdicts(run)


# ------------------------------------------------------------------------------ in the same step


def test_what_it_decides_takes_the_place_of_the_steps_own_entry():
    run = evaluated()
    run.feed("outlier")
    (entry,) = run.feed("outlier", evaluation=3.0)
    assert ("rollback", "evaluation", 2) == (entry.action, entry.rule, entry.ledger_seq)
    assert (2, 2) == (run.state.facts.ledger_seq, run.state.facts.num_skips)


def test_where_it_is_only_told_the_steps_own_entry_stays():
    run = evaluated("guard")
    run.feed("outlier")
    (entry,) = run.feed("outlier", evaluation=3.0)
    assert ("skip_step", "outlier", 2) == (entry.action, entry.rule, entry.ledger_seq)
    assert ["state_damaged"] == [finding.kind for finding in run.told]
    (later,) = run.feed("ok", "outlier")
    assert 3 == later.ledger_seq == run.state.facts.ledger_seq


@pytest.mark.parametrize(
    ("kinds", "rule"), [(("nan", "params"), "nonfinite_params"), (("nan", "outlier"), "probe")]
)
def test_a_rollback_of_the_step_itself_goes_before_and_is_not_repeated(kinds, rule):
    run = evaluated(probe=reads(9.0))
    run.feed(*kinds[:-1])
    (entry,) = run.feed(kinds[-1], evaluation=3.0)
    assert ("rollback", rule.replace("probe", "state_damaged")) == (entry.action, entry.rule)
    assert "state" == verdicts(run)[-1]
    assert 1 == run.state.facts.num_rollbacks


def test_an_outlier_of_the_step_that_brings_it_came_after_it_and_counts_for_the_next():
    run = evaluated()
    assert ["skip_step"] == [d.action for d in run.feed("outlier", evaluation=5.0)]
    assert [] == run.feed(*("ok",) * 20)
    (back,) = run.feed("ok", evaluation=5.0)
    assert ["sound", "abstained", "state"] == verdicts(run)
    assert ("evaluation", 7) == (back.rule, back.skip_batches)


def test_what_the_probe_said_in_the_cooldown_is_told_and_an_evaluation_does_not_go_back_either():
    run = evaluated(probe=reads(9.0), finite_cooldown=100)
    assert "rollback" == run.feed("outlier")[-1].action
    run.restored(200)
    run.feed("ok", evaluation=1.0)
    run.feed(*("ok",) * 20, "outlier", "ok")
    assert [] == run.feed("ok", evaluation=4.0)
    assert "the previous such rollback was under 100 steps ago" in run.told[-1].reason
