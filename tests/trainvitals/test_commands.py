import math

import msgspec
import pytest

from tests.trainvitals.policy_run import Run
from trainvitals.policy import DecisionContext, Mode, PolicyState, Proposal, StepInputs, decide
from trainvitals.policy.state import AcceptedLevel, DurablePolicyState, lr_factor_at
from trainvitals.records import Command, CommandAck, StepRecord


def test_a_commanded_halt_is_done_and_acknowledged() -> None:
    run = Run(mode="guard")
    (decision,) = run.feed("ok", command=Proposal(number=7, action="halt"))
    assert ("halt", "command", 7) == (
        decision.action, decision.rule, decision.command_number,
    )  # fmt: skip
    assert run.ack is not None
    assert (7, "done", 201) == (run.ack.number, run.ack.status, run.ack.step)


@pytest.mark.parametrize(
    ("proposal", "target"),
    [
        (Proposal(number=7, action="rollback"), "s150"),
        (Proposal(number=7, action="rollback", argument=100.0), "s100"),
        (Proposal(number=7, action="rollback", checkpoint_id="first"), "first"),
    ],
)
def test_a_commanded_rollback_goes_where_it_says(proposal: Proposal, target: str) -> None:
    run = Run()
    (decision,) = run.feed("ok", command=proposal)
    assert ("rollback", target) == (decision.action, decision.checkpoint_id)
    assert () == run.state.facts.causes


@pytest.mark.parametrize(
    ("mode", "proposal", "words"),
    [
        ("observe", Proposal(number=7, action="halt"), "mode is 'observe'"),
        ("guard", Proposal(number=7, action="rollback"), "needs mode 'heal'"),
        ("heal", Proposal(number=7, action="rollback", checkpoint_id="x"), "checkpoint x"),
        ("heal", Proposal(number=7, action="rollback", argument=7.0), "of step 7"),
        ("heal", Proposal(number=7, action="rollback", argument=-2.0), "of step -2"),
        ("heal", Proposal(number=7, action="rollback", argument=math.nan), "of step nan"),
        ("heal", Proposal(number=7, action="lr", argument=0.0), "above 0"),
        ("observe", Proposal(number=7, action="skip", argument=1.0), "mode is 'observe'"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_done_is_refused_with_the_reason(
    mode: Mode, proposal: Proposal, words: str
) -> None:
    run = Run(mode=mode)
    assert [] == run.feed("ok", command=proposal)
    assert run.ack is not None
    assert "refused" == run.ack.status
    assert words in run.ack.detail


def test_a_command_is_answered_once() -> None:
    run = Run()
    proposal = Proposal(number=7, action="lr")
    run.feed("ok", command=proposal)
    run.feed("ok", command=proposal)
    assert None is run.ack


def test_a_commanded_rollback_spends_no_budget_and_is_never_refused_for_one() -> None:
    run = Run(max_causes=1)
    run.feed("params")
    for number in (7, 8, 9):
        run.restored(150)
        (decision,) = run.feed("ok", command=Proposal(number=number, action="rollback"))
        assert ("rollback", "command") == (decision.action, decision.rule)
    assert 1 == len(run.state.facts.causes)


def test_an_operators_word_makes_outliers_normal_and_is_kept_in_the_facts() -> None:
    run = Run(mode="guard")
    run.feed("outlier", "outlier", "ok", value=30.0)
    command = Proposal(number=7, action="accept", argument=200.0)
    (decision,) = run.feed("ok", command=command)
    assert ("accept_level", "operator_accepted") == (decision.action, decision.rule)
    assert (AcceptedLevel(30.0, 0.0),) == run.state.facts.accepted
    assert run.ack is not None
    assert ("done", "2 outliers, steps 200 to 201, count as normal") == (
        run.ack.status, run.ack.detail,
    )  # fmt: skip
    run.feed("ok", command=Proposal(number=8, action="accept", argument=-1.0))
    assert ("refused", "there is no step -1") == (run.ack.status, run.ack.detail)


def test_an_operator_who_names_a_step_after_a_long_group_of_outliers_accepts_all_of_it() -> None:
    run = Run(mode="guard")
    calm = ["ok"] * 8
    run.feed("outlier", *calm, "outlier", *calm, "outlier", "ok", value=30.0)
    run.feed("ok", command=Proposal(number=7, action="accept", argument=220.0))
    assert run.ack is not None
    assert ("done", "3 outliers, steps 200 to 218, count as normal") == (
        run.ack.status, run.ack.detail,
    )  # fmt: skip


def test_a_command_in_a_bad_step_is_one_entry_that_names_both() -> None:
    run = Run()
    (decision,) = run.feed("nan", command=Proposal(number=7, action="halt"))
    assert "manual command; this step: nan went wrong" == decision.reason


def test_the_ladders_own_rollback_goes_before_a_commanded_one() -> None:
    run = Run()
    (decision,) = run.feed("params", command=Proposal(number=7, action="rollback", argument=0.0))
    assert "nonfinite_params" == decision.rule
    assert run.ack is not None
    assert "refused" == run.ack.status


def test_a_proposal_takes_from_a_command_what_decides() -> None:
    command = Command(
        number=9, run_id="r", action="rollback", reason="why", issued_by="me",
        issued_unix_ns=1, expires_unix_ns=2, checkpoint_id="s100",
    )  # fmt: skip
    expected = Proposal(number=9, action="rollback", argument=-1.0, checkpoint_id="s100")
    assert expected == Proposal.from_command(command)


# ------------------------------------------------------------- what changes the steps to come


def answered(run: Run, action: str, argument: float = 0.0, number: int = 7) -> CommandAck:
    run.feed("ok", command=Proposal(number=number, action=action, argument=argument))
    assert run.ack is not None
    return run.ack


def test_a_skip_holds_for_its_steps_of_this_branch_alone() -> None:
    run = Run(mode="guard")
    run.state = PolicyState(facts=DurablePolicyState(attempt=1))
    ack = answered(run, "skip", 3)
    assert ("done", "the updates of steps 202 to 204 are skipped") == (ack.status, ack.detail)
    facts = run.state.facts
    assert [202, 203, 204] == [step for step in range(400) if facts.is_skipped(step)]
    elsewhere = msgspec.structs.replace(facts, attempt=2)
    assert not any(map(elsewhere.is_skipped, range(400)))


def test_a_skipped_update_is_in_the_ledger_and_keeps_no_snapshot_from_being_healthy() -> None:
    run = Run(mode="guard")
    run.state = PolicyState(facts=DurablePolicyState(attempt=1))
    answered(run, "skip", 1)
    run.feed("ok")
    record = StepRecord(step=202, attempt=1, loss=2.0, skipped=True, commanded=True)
    verdict = decide(run.state, (), DecisionContext(record, StepInputs(203), mode="guard"))
    assert verdict.decision is not None
    assert ("skip_step", "command", True) == (
        verdict.decision.action, verdict.decision.rule, verdict.decision.acted,
    )  # fmt: skip
    assert -1 == verdict.state.last_unhealthy_step


def test_a_learning_rate_is_held_and_a_factor_is_of_the_schedules() -> None:
    run = Run()
    assert "0.0001 from step 202" in answered(run, "lr", 1e-4).detail
    for rate in (1e-3, 5e-2):
        assert 1e-4 == pytest.approx(rate * lr_factor_at(run.state.facts, 300, rate))
    assert "times 0.5" in answered(run, "lr_factor", 0.5, number=8).detail
    assert 0.5 == lr_factor_at(run.state.facts, 300, 1e-3)
    answered(run, "lr_factor", 1.0, number=9)
    assert 1.0 == lr_factor_at(run.state.facts, 300, 1e-3)


def test_a_rate_that_a_person_raises_is_no_jump() -> None:
    run = Run()
    run.state = PolicyState(facts=DurablePolicyState(attempt=1, clock=500), learning_rate=1e-3)
    answered(run, "lr_factor", 10.0)
    record = StepRecord(step=202, attempt=1, loss=2.0, learning_rate=1e-2, lr_factor=10.0)
    verdict = decide(run.state, (), DecisionContext(record, StepInputs(203), mode="heal"))
    assert () == verdict.findings and verdict.state.lr_jump is None


def test_what_a_loop_cannot_do_is_refused_with_its_reason() -> None:
    record = StepRecord(step=5, attempt=1, loss=2.0)
    inputs = StepInputs(
        6,
        command=Proposal(number=7, action="checkpoint"),
        unavailable_commands={"checkpoint": "no disk"},
    )
    verdict = decide(PolicyState(), (), DecisionContext(record, inputs))
    assert verdict.ack is not None
    assert ("refused", "no disk") == (verdict.ack.status, verdict.ack.detail)


@pytest.mark.parametrize("argument", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("action", ["skip", "lr", "lr_factor"])
def test_a_number_that_cannot_be_is_refused(action: str, argument: float) -> None:
    assert "refused" == answered(Run(), action, argument).status
