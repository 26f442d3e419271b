from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainvitals.policy_run import FIRST, REFS, STORM, Run
from trainvitals.errors import ConfigError
from trainvitals.policy import (
    CheckpointRef,
    DecisionContext,
    DurablePolicyState,
    Judge,
    Mode,
    PolicyConfig,
    PolicyState,
    Proposal,
    StepInputs,
    decide,
    lr_factor_at,
)
from trainvitals.records import StepRecord
from trainvitals.testing import decisions

# ------------------------------------------------------------------------------------- skips


def test_a_healthy_step_needs_no_decision() -> None:
    assert [] == Run().feed("ok")


def test_a_skipped_step_is_one_ledger_entry_with_its_reason() -> None:
    (decision,) = Run(mode="guard").feed("nan")
    assert ("skip_step", 200, 201, 3, 9.5, 4.2, True, 1) == (
        decision.action, decision.step, decision.decided_at_step, decision.rank,
        decision.value, decision.limit, decision.acted, decision.cost_steps,
    )  # fmt: skip
    assert ("nan went wrong", "test", "nan", 1) == (
        decision.reason, decision.rule, decision.cause, decision.ledger_seq,
    )  # fmt: skip


def test_a_step_the_device_skipped_without_a_finding_is_entered_too() -> None:
    record = StepRecord(step=5, attempt=1, skipped=True)
    verdict = decide(PolicyState(), (), DecisionContext(record, StepInputs(6)))
    assert verdict.decision is not None
    assert ("skip_step", "device") == (verdict.decision.action, verdict.decision.rule)


def test_an_overflow_under_a_scaler_is_neither_entered_nor_unhealthy() -> None:
    record = StepRecord(step=5, attempt=1, skipped=True, overflow=True)
    verdict = decide(PolicyState(), (), DecisionContext(record, StepInputs(6)))
    assert None is verdict.decision
    assert -1 == verdict.state.last_unhealthy_step


def test_a_rank_that_failed_to_measure_is_the_reason_of_its_skip() -> None:
    judge = Judge()
    (decision,) = decisions(judge, "loss 2 2; failed_ranks - 1; skipped 0 1")
    assert ("rank_failed", 1) == (decision.cause, decision.rank)
    assert "rank 1 could not measure the step" == decision.reason


# -------------------------------------------------------------------------------- rollbacks


def test_a_storm_goes_back_to_the_newest_healthy_checkpoint_before_the_margin() -> None:
    decision = Run().feed(*STORM)[-1]
    assert ("rollback", "s150", 150, 2, 9, 54, 2) == (
        decision.action, decision.checkpoint_id, decision.rollback_to_step,
        decision.new_attempt, decision.skip_batches, decision.cost_steps, decision.budget_left,
    )  # fmt: skip
    assert (
        "3 non-finite steps in a row; the last: nan went wrong; "
        "rollback to step 150 (s150); skipping 9 batches from step 197"
    ) == decision.reason


def test_bad_steps_far_apart_are_no_reason_to_go_back() -> None:
    calm = ("ok",) * 10
    actions = {d.action for d in Run().feed("nan", *calm, "nan", *calm, "nan", *calm)}
    assert {"skip_step"} == actions


def test_the_margin_is_kept() -> None:
    refs = (FIRST, CheckpointRef(id="close", step=190))
    assert "first" == Run(refs=refs).feed(*STORM)[-1].checkpoint_id
    assert "close" == Run(refs=refs, margin=10).feed(*STORM)[-1].checkpoint_id


@pytest.mark.parametrize("state", ["candidate", "verified", "retired", "bad"])
def test_only_a_healthy_checkpoint_is_a_target(state: Any) -> None:
    refs = (FIRST, CheckpointRef(id="newer", step=150, state=state))
    assert "first" == Run(refs=refs).feed(*STORM)[-1].checkpoint_id


def test_the_target_does_not_depend_on_the_order_of_the_list() -> None:
    twins = (
        CheckpointRef(id="a", step=150, where="disk"),
        CheckpointRef(id="b", step=150, where="memory"),
        CheckpointRef(id="c", step=150, where="disk"),
    )
    assert {"b"} == {Run(refs=refs).feed(*STORM)[-1].checkpoint_id for refs in (twins, twins[::-1])}


def test_the_state_before_the_first_step_is_within_every_margin() -> None:
    decision = Run(step=5, refs=(FIRST,)).feed(*STORM)[-1]
    assert ("rollback", 0, 9) == (
        decision.action, decision.rollback_to_step, decision.cost_steps,
    )  # fmt: skip


def test_non_finite_parameters_roll_back_at_once() -> None:
    (decision,) = Run().feed("params")
    assert ("rollback", "nonfinite_params") == (decision.action, decision.rule)


def test_a_state_that_is_not_finite_behind_a_finite_loss_rolls_back_and_plays_all_again() -> None:
    (decision,) = Run().feed("ok", "state")
    assert ("rollback", "nonfinite_state", 150, 0, 3) == (
        decision.action, decision.rule, decision.rollback_to_step, decision.skip_batches,
        decision.rank,
    )  # fmt: skip


def test_where_that_does_not_cure_it_it_is_told_and_never_halts_or_loops() -> None:
    run = Run()
    run.feed("state")
    run.restored(150)
    for _ in range(20):
        assert [] == run.feed(*["ok"] * 49, "state")
    finding, *others = run.told
    assert ("nonfinite_state", "actionable", 199, 3) == (
        finding.kind, finding.level, finding.step, finding.rank,
    )  # fmt: skip
    assert [(199 + 50 * i, 199) for i in range(1, 20)] == [(f.step, f.onset_step) for f in others]
    assert "it is there again after a rollback, so training continues" in finding.reason
    assert "" == run.state.facts.halted


def test_what_did_not_cure_is_tried_again_once_the_budget_s_window_is_over() -> None:
    run = Run(budget_window=100)
    run.feed("state")
    run.restored(150)
    run.feed(*["ok"] * 50, "state")
    assert [] == run.feed(*["ok"] * 90, "state")
    assert ["rollback"] == [d.action for d in run.feed(*["ok"] * 10, "state")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "guard"}, "mode 'guard' does not roll back"),
        ({"mode": "observe"}, "mode 'observe' does not roll back"),
        (
            {"refs": (CheckpointRef(id="late", step=195, state="verified"),)},
            "the only checkpoint is not healthy",
        ),
    ],
)
def test_where_nothing_can_go_back_it_is_told_and_not_at_each_look(
    options: dict[str, Any], words: str
) -> None:
    run = Run(**options)
    assert [] == run.feed("state", "ok", "state", "state")
    (finding,) = run.told
    assert words in finding.reason


def test_a_skip_of_the_same_step_stays_in_the_ledger_where_nothing_goes_back() -> None:
    run = Run(mode="guard")
    record = StepRecord(step=200, attempt=1, loss=2.1, skipped=True, nonfinite_state=1)
    verdict = decide(run.state, (), DecisionContext(record, StepInputs(201)))
    assert verdict.decision is not None
    assert ("skip_step", 1, 1) == (
        verdict.decision.action, verdict.decision.ledger_seq, verdict.state.facts.ledger_seq,
    )  # fmt: skip
    assert ["nonfinite_state"] == [f.kind for f in verdict.findings]


def test_missed_snapshots_are_told_ever_more_seldom() -> None:
    run = Run()
    run.feed(*["missed", "ok"] * 9)
    assert [1.0, 2.0, 4.0, 8.0] == [finding.value for finding in run.told]


def test_without_a_usable_checkpoint_heal_halts_and_says_so() -> None:
    refs = (CheckpointRef(id="late", step=195, state="verified"),)
    decision = Run(refs=refs).feed(*STORM)[-1]
    assert ("halt", "no_checkpoint") == (decision.action, decision.rule)
    assert "the only checkpoint is not healthy and at or before the onset" in decision.reason


def test_soon_after_a_start_the_first_state_before_the_onset_is_the_target() -> None:
    refs = (CheckpointRef(id="start", step=190), CheckpointRef(id="newer", step=199))
    decision = Run(refs=refs).feed(*STORM)[-1]
    assert ("rollback", "start") == (decision.action, decision.checkpoint_id)


def test_a_second_try_goes_further_back_skips_twice_as_much_and_halves_the_rate() -> None:
    run = Run()
    run.feed(*STORM)
    run.restored(150)
    run.feed(*("ok",) * 50)
    second = run.feed(*STORM)[-1]
    assert ("s100", 15, 0.5, 1) == (
        second.checkpoint_id, second.skip_batches, second.lr_factor, second.budget_left,
    )  # fmt: skip
    assert "older than at the previous attempt" in second.reason
    run.restored(100)
    run.feed(*("ok",) * 100)
    third = run.feed(*STORM)[-1]
    assert ("first", 27, 0.25, 0) == (
        third.checkpoint_id, third.skip_batches, third.lr_factor, third.budget_left,
    )  # fmt: skip


def test_the_budget_of_a_cause_ends_in_a_halt_and_then_nothing() -> None:
    run = Run()
    for _ in range(3):
        run.feed(*STORM)
        run.restored(150)
    halt = run.feed(*STORM)[-1]
    assert ("halt", "budget") == (halt.action, halt.rule)
    assert "3 rollbacks (the limit) did not fix it" in halt.reason
    assert [] == run.feed("nan", "params", "ok")
    assert 3 == run.state.facts.num_rollbacks


def test_with_no_older_checkpoint_left_the_oldest_is_used_again() -> None:
    run = Run(refs=(FIRST,))
    run.feed(*STORM)
    run.restored(0)
    run.feed(*("ok",) * 150)
    decision = run.feed(*STORM)[-1]
    assert "first" == decision.checkpoint_id
    assert "no older one is left" in decision.reason


def test_skipped_batches_double_up_to_the_bound() -> None:
    run = Run(max_tries=10, max_leave_out_margin=20)
    skips = []
    for _ in range(7):
        skips.append(run.feed(*STORM)[-1].skip_batches)
        run.restored(150)
    assert [9, 15, 27, 43, 43, 43, 43] == skips  # three, and 3, 6, 12, 20... on either side


def test_trouble_after_progress_is_a_new_cause_and_spends_the_overall_budget() -> None:
    run = Run(max_causes=2)
    for budget_left in (1, 0):
        assert budget_left == run.feed(*STORM)[-1].budget_left
        run.restored(150)
        run.feed(*("ok",) * (run.ledger[-1].decided_at_step + 100 - 150))
        run.refs = (*REFS, CheckpointRef(id=f"s{run.step}", step=run.step - 30))
    halt = run.feed(*STORM)[-1]
    assert ("halt", "budget") == (halt.action, halt.rule)
    assert "2 causes (the limit) were rolled back within 10000 steps" in halt.reason


def test_right_after_a_rollback_non_finite_parameters_still_roll_back() -> None:
    run = Run()
    run.feed(*STORM)
    run.restored(150)
    assert ["rollback"] == [d.action for d in run.feed("params")]


def test_after_a_rollback_was_decided_nothing_is_until_it_is_done() -> None:
    run = Run()
    run.feed(*STORM)
    assert [] == run.feed("nan", "params")


# ------------------------------------------------------------------------ guard and observe


def test_guard_skips_through_a_storm_and_halts_where_nothing_is_trained_any_more() -> None:
    run = Run(mode="guard", max_skips_in_a_row=30)
    ledger = run.feed(*("nan",) * 31)
    assert ["skip_step"] * 29 + ["halt"] == [d.action for d in ledger]
    assert "stuck" == ledger[-1].rule
    assert "30 non-finite steps in a row" in ledger[-1].reason


def test_guard_halts_on_non_finite_parameters_because_nothing_else_helps() -> None:
    (decision,) = Run(mode="guard").feed("params")
    assert ("halt", "nonfinite_params") == (decision.action, decision.rule)
    assert "mode 'guard' has no checkpoint" in decision.reason


def test_observe_records_what_heal_would_do_and_does_nothing() -> None:
    run = Run(mode="observe")
    ledger = run.feed(*STORM)
    assert ["skip_step", "skip_step", "rollback"] == [d.action for d in ledger]
    assert {False} == {d.acted for d in ledger}
    assert (0, 0) == (ledger[-1].new_attempt, ledger[-1].cost_steps)
    assert not run.state.rolling_back


def test_observe_without_checkpoints_records_what_guard_would_do() -> None:
    run = Run(mode="observe", refs=())
    assert ["skip_step"] * 3 == [d.action for d in run.feed(*STORM)]
    (decision,) = run.feed("params")
    assert ("halt", False) == (decision.action, decision.acted)


def test_observe_falls_silent_after_its_halt_and_speaks_again_after_a_recovery() -> None:
    run = Run(mode="observe")
    ledger = run.feed(*("params",) * 500)
    assert ["rollback"] * 3 + ["halt"] == [d.action for d in ledger]
    run.feed(*("ok",) * 100)
    assert ["skip_step"] == [d.action for d in run.feed("nan")]


def test_observe_leaves_the_learning_rate_alone() -> None:
    judge = Judge(
        mode="observe",
        facts=DurablePolicyState(lr_factor=0.5, lr_hold_until=100, lr_full_from=200),
    )
    assert 1.0 == judge.lr_factor_at(50)


# ---------------------------------------------------------------------------- learning rate


def test_a_lowered_rate_is_held_then_climbs_back() -> None:
    facts = DurablePolicyState(lr_factor=0.5, lr_hold_until=100, lr_full_from=200)
    assert [0.5, 0.5, 0.75, 1.0, 1.0] == [
        lr_factor_at(facts, step) for step in (0, 99, 150, 200, 999)
    ]


def test_an_untouched_rate_is_whole() -> None:
    assert 1.0 == lr_factor_at(DurablePolicyState(), 0)


@pytest.mark.parametrize(
    "settings",
    [{"max_withheld": 0}, {"margin": -1}, {"state_ratio": 1.0}, {"lr_cut": 0.0}, {"lr_cut": 1.5},
     {"max_tries": 0}, {"lr_jump": 0.5}],
    ids=str,
)  # fmt: skip
def test_a_setting_without_sense_is_refused_with_its_value(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"ladder.{name} is {value}"):
        PolicyConfig(**settings)


# ------------------------------------------------------------------------------- properties

words = st.sampled_from(
    ["ok", "ok", "ok", "ok", "ok", "nan", "outlier", "params", "state", "missed", "slow"]
)
modes: st.SearchStrategy[Mode] = st.sampled_from(["observe", "guard", "heal"])


@settings(max_examples=examples(60))
@given(st.lists(words, max_size=150), modes, st.data())
def test_the_ladder_keeps_its_promises_whatever_happens(
    kinds: list[str], mode: Mode, data: st.DataObject
) -> None:
    run = Run(mode=mode, max_tries=2, max_causes=3)
    for kind in kinds:
        command = data.draw(st.none() | st.builds(
            Proposal, number=st.integers(1, 50),
            action=st.sampled_from(["halt", "rollback", "lr"]), argument=st.floats(-2, 200)),
        ) if kind == "slow" else None  # fmt: skip
        before = run.state
        run.feed("ok" if kind == "slow" else kind, command=command)
        entries = len(run.ledger)
        assert entries == run.state.facts.ledger_seq
        assert run.state.facts.last_command >= before.facts.last_command
        if run.state.rolling_back:
            assert mode == "heal"
            run.restored(run.ledger[-1].rollback_to_step)
    rollbacks = [d for d in run.ledger if d.action == "rollback"]
    assert all(d.acted == (mode == "heal") for d in rollbacks)
    if mode == "heal":
        assert len(rollbacks) <= 3 * 2
    halts = [i for i, d in enumerate(run.ledger) if d.action == "halt"]
    if mode != "observe":
        assert halts in ([], [len(run.ledger) - 1])
    assert list(range(1, len(run.ledger) + 1)) == [d.ledger_seq for d in run.ledger]
