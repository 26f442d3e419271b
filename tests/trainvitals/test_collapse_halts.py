"""A finding that was told to stop the run becomes a halt: at most one entry per step."""

import math

import pytest

from trainvitals.hindsight import judge_decision_in_hindsight
from trainvitals.policy import Judge, StepInputs
from trainvitals.policy.actions import rule_words
from trainvitals.records import Finding, StepRecord

COLLAPSE = Finding(
    kind="policy_collapse",
    level="advisory",
    step=7,
    detector="policy_collapse",
    reason="the policy collapsed",
    value=0.01,
    limit=0.1,
    onset_step=4,
    cause="policy_collapse",
)


def record(step: int, **fields: object) -> StepRecord:
    known = {"step": step, "attempt": 1, "loss": 0.001, "grad_norm": 0.5}
    return StepRecord(**(known | fields))  # type: ignore[arg-type]


def judge(mode: str, **fields: object):
    """Judge seven healthy steps, then one with the finding."""
    judge = Judge(mode=mode)  # type: ignore[arg-type]
    for step in range(7):
        assert judge.judge(record(step), StepInputs(step)).decision is None
    return judge, judge.judge(record(7, **fields), StepInputs(8, collapse=COLLAPSE)).decision


@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_the_run_is_halted_with_the_words_of_the_finding(mode: str):
    judged, decision = judge(mode)
    assert ("halt", True, 7, 8) == (
        decision.action,
        decision.acted,
        decision.step,
        decision.decided_at_step,
    )
    assert ("policy_collapse", 0.01, 0.1) == (decision.cause, decision.value, decision.limit)
    assert "the policy collapsed (on_collapse='stop')" == decision.reason
    assert "a policy that is lost" in rule_words(decision.rule)
    assert judged.halted
    assert judged.judge(record(8), StepInputs(8, collapse=COLLAPSE)).decision is None


def test_in_observe_mode_it_is_recorded_and_later_steps_are_judged_as_usual():
    judged, decision = judge("observe")
    assert ("halt", False) == (decision.action, decision.acted)
    assert not judged.halted
    losses = dict.fromkeys(range(300), 0.001)
    assert judge_decision_in_hindsight(decision, losses) is None, "the loss says nothing about it"
    bad = record(8, loss=math.nan, loss_max=math.nan, nonfinite_ranks=(0,))
    assert "skip_step" == judged.judge(bad, StepInputs(8)).decision.action


def test_a_skip_of_the_same_step_is_part_of_the_entry():
    _, decision = judge(
        "guard", loss=math.nan, loss_max=math.nan, nonfinite_ranks=(0,), skipped=True
    )
    assert ("halt", 1, True) == (decision.action, decision.ledger_seq, decision.skipped)
