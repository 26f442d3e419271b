"""What the ladder does about a loss that walked away: a finding of many steps, not of one."""

import pytest

from tests.trainvitals.ladder_run import FIRST, REFS, Run
from trainvitals.policy import CheckpointRef, decide
from trainvitals.records import Finding, StepRecord


def diverged(run, *, level="act", onset=160, skipped=False, step=None, also=()):
    """Feed one step that a divergence is found at; return the decision."""
    step = run.step if step is None else step
    finding = Finding(
        kind="divergence",
        level=level,
        step=step,
        detector="loss_level",
        reason="the loss walked away",
        value=6.0,
        limit=4.8,
        onset_step=onset,
        cause="loss_divergence",
    )
    verdict = decide(
        run.state,
        [*also, finding],
        record=StepRecord(step=step, attempt=1, loss=6.0, skipped=skipped),
        decided_at_step=step + 1,
        checkpoints=run.refs,
        mode=run.mode,
        config=run.config,
        now_attempt_id=2,
    )
    run.state = verdict.state
    run.step = step + 1
    return verdict.decision


def test_it_goes_back_to_before_it_began():
    decision = diverged(Run())
    assert ("rollback", "divergence", "s100", 100) == (
        decision.action, decision.rule, decision.checkpoint_id, decision.rollback_to_step,
    )  # fmt: skip
    assert "the loss walked away; back to s100" in decision.reason


@pytest.mark.parametrize("mode", ["guard", "observe"])
def test_where_nothing_rolls_back_it_is_only_told(mode):
    run = Run(mode=mode, refs=() if mode == "observe" else REFS)
    assert None is diverged(run)
    assert [] == run.feed("ok", "ok")


def test_observed_with_checkpoints_it_is_entered_and_not_done():
    decision = diverged(Run(mode="observe"))
    assert ("rollback", False) == (decision.action, decision.acted)


def test_without_a_checkpoint_from_before_it_nothing_is_stopped():
    late = (CheckpointRef(id="late", step=190),)
    run = Run(refs=late)
    assert None is diverged(run)
    assert "" == run.state.facts.halted


def test_one_that_is_only_told_takes_no_action_but_proves_nothing_healthy():
    run = Run()
    assert None is diverged(run, level="tell")
    assert 200 == run.state.last_unhealthy_step


def test_right_after_a_rollback_it_waits():
    run = Run(cooldown_steps=20)
    assert "rollback" == diverged(run).action
    run.restored(100)
    assert None is diverged(run, onset=90, step=110)
    assert "rollback" == diverged(run, onset=90, step=125).action


def test_it_never_spends_more_than_its_cause_may_and_then_does_not_halt():
    run = Run(refs=(FIRST,), max_tries=2, cooldown_steps=0)
    actions = []
    for _ in range(4):
        decision = diverged(run, onset=50, step=80)
        actions.append(None if decision is None else decision.action)
        run.restored(0)
    assert ["rollback", "rollback", None, None] == actions


def test_a_step_the_device_skipped_is_not_explained_by_it():
    run = Run(mode="guard")
    decision = diverged(run, skipped=True)
    assert ("skip_step", "device") == (decision.action, decision.rule)


def test_a_bad_step_in_guard_mode_is_skipped_for_its_own_reason():
    nan = Finding(
        kind="nonfinite", level="act", step=200, detector="nonfinite", reason="loss is nan",
        cause="nonfinite_loss",
    )  # fmt: skip
    decision = diverged(Run(mode="guard"), skipped=True, also=(nan,))
    assert ("skip_step", "loss is nan") == (decision.action, decision.reason)
