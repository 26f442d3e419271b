"""What waits for a person's yes."""

import msgspec
import pytest

from tests.trainvitals.policy_run import STORM, Run
from trainvitals.alerting import alerts_for_decision, alerts_for_finding
from trainvitals.policy import PolicyState, Proposal
from trainvitals.policy.state import DurablePolicyState


def asking(*what: str, **config) -> Run:
    run = Run(ask=what or ("rollback",), ask_steps=5, **config)
    run.state = PolicyState(facts=DurablePolicyState(attempt=1))
    return run


def yes_or_no(run: Run, action: str, argument: float = 0.0, *, kind: str = "ok"):
    return run.feed(kind, command=Proposal(number=run.step, action=action, argument=argument))


def test_a_rollback_is_proposed_once_with_its_evidence_and_nothing_is_spent() -> None:
    run = asking()
    proposed = run.feed(*STORM)[-1]
    assert ("rollback", False, 150) == (proposed.action, proposed.acted, proposed.rollback_to_step)
    assert "waits for approval (approve or veto 3): without a reply by step 208 it is done" in (
        proposed.reason
    )
    assert (3, 3, ()) == (
        proposed.ledger_seq, run.state.facts.waiting.number, run.state.facts.causes,
    )  # fmt: skip
    assert ["approval_needed"] == [finding.kind for finding in run.told]
    again = run.feed("nan", "nan")
    assert ["skip_step", "skip_step"] == [decision.action for decision in again]
    assert "3 waits for approval" in again[0].reason
    assert 1 == len(run.told)


def test_a_yes_goes_back_to_what_is_healthy_by_then() -> None:
    run = asking()
    run.feed(*STORM)
    run.refs = [ref for ref in run.refs if ref.id != "s150"]
    (decision,) = yes_or_no(run, "approve", 3.0, kind="nan")
    assert ("rollback", True, 100) == (decision.action, decision.acted, decision.rollback_to_step)
    assert "approved" in decision.reason
    assert decision.command_number > 0
    assert (None, 1) == (run.state.facts.waiting, len(run.state.facts.causes))
    assert run.ack is not None and "done" == run.ack.status


def test_without_an_answer_the_default_is_done() -> None:
    run = asking()
    run.feed(*STORM)
    assert [] == run.feed("ok", "ok", "ok", "ok")
    (decision,) = run.feed("ok")
    assert ("rollback", True) == (decision.action, decision.acted)
    assert "no answer in 5 steps" in decision.reason


def test_the_default_may_be_a_veto() -> None:
    run = asking(ask_default="veto")
    assert "it is vetoed" in run.feed(*STORM)[-1].reason
    assert [] == run.feed(*("ok",) * 8)
    assert run.state.facts.waiting.vetoed
    run.feed(*("ok",) * 8)
    assert run.state.facts.waiting is None


def test_after_a_no_the_run_goes_on_and_the_same_may_be_asked_later() -> None:
    run = asking()
    run.feed(*STORM)
    assert [] == yes_or_no(run, "veto")
    assert run.ack is not None and "done" == run.ack.status
    held = run.feed("nan", "nan", "nan")
    assert {"skip_step"} == {decision.action for decision in held}
    assert "was vetoed" in held[-1].reason
    asked = run.feed(*("nan",) * 6)
    assert ["rollback"] == [d.action for d in asked if d.action != "skip_step"]
    assert not any(decision.acted for decision in asked if decision.action == "rollback")


def test_a_vetoed_run_that_makes_no_progress_halts_in_the_end() -> None:
    run = Run(ask=("rollback",), ask_steps=100, max_skips_in_a_row=10)
    run.feed(*STORM)
    yes_or_no(run, "veto", kind="nan")
    assert "halt" == run.feed(*("nan",) * 8)[-1].action


def test_only_what_lowers_the_rate_may_be_asked_for() -> None:
    run = asking("lr_cut")
    (first,) = [d for d in run.feed(*STORM) if d.action == "rollback"]
    assert first.acted
    run.restored(first.rollback_to_step)
    run.state = msgspec.structs.replace(run.state, rolling_back=False)
    run.feed(*("ok",) * 51)
    second = run.feed(*STORM)[-1]
    assert ("rollback", False) == (second.action, second.acted)
    assert "learning rate x 0.5" in yes_or_no(run, "approve", kind="nan")[0].reason


def test_damaged_parameters_wait_as_well_and_are_told_once() -> None:
    run = asking()
    told = run.feed("params", "params", "params")
    assert [False, True, True] == [decision.acted for decision in told]
    assert ["rollback", "skip_step", "skip_step"] == [decision.action for decision in told]


def test_finite_evidence_waits_and_keeps_its_cooldown_for_the_yes() -> None:
    run = asking()
    run.feed("state")
    assert run.state.facts.waiting is not None
    (decision,) = yes_or_no(run, "approve")
    assert ("nonfinite_state", True) == (decision.rule, decision.acted)


@pytest.mark.parametrize("action", ["approve", "veto"])
def test_an_approval_that_nothing_waits_for_is_refused(action: str) -> None:
    run = asking()
    yes_or_no(run, action)
    assert run.ack is not None
    assert ("refused", "no decision waits for approval") == (run.ack.status, run.ack.detail)


def test_an_answer_to_another_question_is_refused() -> None:
    run = asking()
    run.feed(*STORM)
    yes_or_no(run, "approve", 2.0, kind="nan")
    assert run.ack is not None
    assert "decision 2 does not wait for approval; 3 does" == run.ack.detail


def test_who_asks_for_a_rollback_himself_is_not_asked() -> None:
    run = asking()
    (decision,) = run.feed("ok", command=Proposal(number=7, action="rollback"))
    assert decision.acted


def test_what_waits_pages_once_and_by_what_asks_for_it() -> None:
    run = asking()
    proposed = run.feed(*STORM)[-1]
    assert () == alerts_for_decision(proposed, run_id="r")
    (alert,) = alerts_for_finding(run.told[0], run_id="r")
    assert ("ApprovalNeeded", "page") == (alert.name, alert.severity)


def test_what_waits_is_in_the_plan_and_comes_back_from_it() -> None:
    run = asking()
    run.feed(*STORM)
    facts = msgspec.convert(msgspec.to_builtins(run.state.facts), DurablePolicyState)
    assert facts == run.state.facts
