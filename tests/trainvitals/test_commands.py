import math

import pytest

from tests.trainvitals.ladder_run import Run
from trainvitals.detect.outliers import Level
from trainvitals.policy import Mode, Proposal
from trainvitals.records import Command


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
        ("heal", Proposal(number=7, action="lr"), "'lr' is not offered"),
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
    assert (Level(30.0, 0.0),) == run.state.facts.accepted
    assert run.ack is not None
    assert ("done", "2 outliers, steps 200 to 201, count as normal") == (
        run.ack.status, run.ack.detail,
    )  # fmt: skip
    run.feed("ok", command=Proposal(number=8, action="accept", argument=-1.0))
    assert ("refused", "there is no step -1") == (run.ack.status, run.ack.detail)


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
    assert expected == Proposal.of(command)
