"""The judge of a drill: facts in, one row out."""

import pytest
from msgspec.structs import replace

from trainvitals.records import Decision, Finding
from trainvitals.views import CheckpointView
from vitals_plugins.lab.drill.facts import DrillFacts
from vitals_plugins.lab.drill.faults import FAULTS, DrillRecord
from vitals_plugins.lab.drill.judge import judge_fault
from vitals_plugins.lab.drill.receiver import ReceivedAlert

STEP, END, SECOND = 80, 110, 1_000_000_000
LOSSES = dict.fromkeys(range(END), 2.0)
UNDISTURBED = DrillFacts(losses=dict.fromkeys(range(200), 1.0))


def record(kind, rank=0, step=-1, **fields):
    return DrillRecord(kind=kind, rank=rank, step=step, time_unix_ns=SECOND, **fields)


def facts(fault="nan_gradient", mode="guard", rank=1, **changes):
    started = record("started", mode=mode, world_size=2)
    records = (started, record("injected", rank, STEP), record("ended", step=END))
    return replace(
        DrillFacts(records=records, exit_code=0, losses=LOSSES, steps=frozenset(LOSSES)), **changes
    )


def decision(action, rule, rank=1, step=STEP, acted=True, **fields):
    given = {"ledger_seq": 1, "decided_at_step": step, "attempt": 1, "reason": "", "cause": ""}
    return 3 * SECOND, Decision(
        action=action, rule=rule, rank=rank, step=step, acted=acted, **given, **fields
    )


def finding(kind, rank=1, step=STEP, cause=""):
    return 4 * SECOND, Finding(
        kind=kind, level="advisory", step=step, detector="x", reason="", rank=rank, cause=cause
    )


def alert(name):
    return ReceivedAlert(name=name, run_id="r", severity="page", received_unix_ns=5 * SECOND)


def judged(fault, found):
    row = judge_fault(FAULTS[fault], found, UNDISTURBED)
    return row.outcome, row.is_named_right, row.reason


def test_a_skipped_update_of_the_right_rank_is_kept_with_time_and_loss():
    row = judge_fault(
        FAULTS["nan_gradient"],
        facts(decisions=(decision("skip_step", "nonfinite"),), alerts=(alert("X"),)),
        UNDISTURBED,
    )
    assert ("kept", STEP, "nonfinite", True) == (
        row.outcome, row.injected_step, row.seen, row.is_named_right
    )  # fmt: skip
    assert (2.0, 2.0, "X (page)") == (row.seconds, row.loss_ratio, row.alert)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, "broken", "the update of step 80 was not skipped"),
        (
            {"decisions": (decision("skip_step", "nonfinite", step=81),)},
            "broken",
            "was not skipped",
        ),
        (
            {"decisions": (decision("skip_step", "nonfinite", rank=0),)},
            "broken",
            "rank 0 was named",
        ),
        (
            {"decisions": (decision("skip_step", "nonfinite", acted=False),)},
            "not protected",
            "only records",
        ),
        (
            {"decisions": (decision("skip_step", "nonfinite"),), "losses": {0: 1.0}},
            "broken",
            "final loss is missing",
        ),
        ({"is_out_of_time": True}, "not tested", "budget"),
    ],
)
def test_a_fault_that_must_be_skipped(changes, outcome, reason):
    row = judge_fault(FAULTS["nan_gradient"], facts(**changes), UNDISTURBED)
    assert outcome == row.outcome
    assert reason in row.reason


def test_a_fault_that_was_not_injected_is_never_kept_nor_broken():
    started = record("started", mode="guard")
    skipped = (decision("skip_step", "nonfinite"),)
    ended = facts(records=(started,), decisions=skipped, losses={0: 1.0, 1: 1.0})
    assert ("not tested", None) == judged("nan_gradient", ended)[:2]
    assert (
        "ended before the fault, which is injected at step 80" in judged("nan_gradient", ended)[2]
    )
    failed = replace(ended, exit_code=3)
    assert "failed before the fault, with exit code 3" in judged("spike", failed)[2]
    impossible = record("impossible", text="no other rank holds the same parameters")
    shard = replace(ended, records=(started, impossible))
    assert ("not protected", None, impossible.text) == judged("bit_flip", shard)


def test_heal_repairs_a_damaged_state_and_guard_pages():
    healed = facts(mode="heal", decisions=(decision("rollback", "nonfinite_params", step=83),))
    assert ("kept", True, "") == judged("nan_parameters", healed)
    assert ("broken", None, "the damaged state was not rolled back") == judged(
        "nan_parameters", facts(mode="heal", alerts=(alert("TrainingHalted"),))
    )
    halted = facts(
        records=facts().records[:2],
        decisions=(decision("halt", "nonfinite_params", step=83),),
        findings=(finding("nonfinite_params"),),
        alerts=(alert("TrainingHalted"),),
    )
    outcome, is_named_right, reason = judged("nan_parameters", halted)
    assert ("not protected", True) == (outcome, is_named_right)
    assert "does not repair it" in reason
    assert "broken" == judged("nan_parameters", replace(halted, alerts=()))[0]


def test_of_two_ranks_the_one_with_the_flipped_bit_is_named_after_the_replay():
    rollback = decision("rollback", "replica_corrupted", rank=-1, step=100)
    named = facts(mode="heal", decisions=(rollback,), findings=(finding("replica_named"),))
    assert ("kept", True, "") == judged("bit_flip", named)
    unnamed = facts(mode="heal", decisions=(rollback,))
    assert ("kept", None, "") == judged("bit_flip", unnamed)
    wrong = facts(mode="heal", decisions=(rollback,), findings=(finding("replica_named", 0),))
    assert ("broken", False) == judged("bit_flip", wrong)[:2]


def test_a_slow_rank_must_be_named():
    late = facts(findings=(finding("straggler", cause="straggler_forward"),))
    assert ("kept", True, "") == judged("slow_rank", late)
    assert "broken" == judged("slow_rank", facts(findings=(finding("straggler", 0),)))[0]
    assert "broken" == judged("slow_rank", facts())[0]


def test_a_stopped_rank_is_paged_and_continues():
    hung = facts(findings=(finding("hang"),), alerts=(alert("RankHung"),))
    assert ("kept", True, "") == judged("stopped_rank", hung)
    assert ("broken", None, "the hang was not paged") == judged("stopped_rank", facts())
    still = replace(hung, records=hung.records[:2])
    assert "training ended after step 109" in judged("stopped_rank", still)[2]


def test_a_killed_rank_is_reported_and_a_second_start_continues():
    gone = (2 * SECOND, "Note", "rank 1 (pid 7 on vm) ended without a clean exit [rank_gone]")
    killed = facts(alerts=(alert("RunFailed"),), notes=(gone,), losses=LOSSES)
    outcome, is_named_right, reason = judged("killed_rank", killed)
    assert ("not protected", True, "without checkpoints a restart begins at step 0") == (
        outcome, is_named_right, reason
    )  # fmt: skip
    saved = record("started", mode="heal", first_save_step=60)
    failed = replace(killed, records=(saved, *killed.records[1:]), exit_code=1)
    assert ("not tested", True) == judged("killed_rank", failed)[:2]
    resumed = replace(failed, records=(saved, saved, *killed.records[1:]), resumed_step=60)
    assert "were not compared" in judged("killed_rank", resumed)[2]
    resumed = replace(resumed, repeated_rates={60: (0.1, 0.1)})
    assert ("kept", True, "") == judged("killed_rank", resumed)
    rates = dict.fromkeys(range(60, 80), (0.1, 0.1)) | {70: (0.1, 1.0)}
    assert ("broken", "the learning rate of step 70 was 0.1, and is 1 after the new start") == (
        judged("killed_rank", replace(resumed, repeated_rates=rates))[::2]
    )
    again = replace(resumed, resumed_step=0)
    assert "did not continue from a checkpoint" in judged("killed_rank", again)[2]
    assert "are not stored" in judged("killed_rank", replace(resumed, steps=frozenset({0})))[2]
    assert "no alert arrived" in judged("killed_rank", replace(resumed, alerts=()))[2]


def test_an_update_that_the_gradient_scaler_skips_is_kept():
    row = judge_fault(FAULTS["nan_gradient"], facts(overflow_steps=frozenset({STEP})), UNDISTURBED)
    assert ("kept", "overflow", None) == (row.outcome, row.seen, row.is_named_right)
    assert "update skipped by the gradient scaler" == row.action
    other = facts(overflow_steps=frozenset({STEP + 1}))
    assert "was not skipped" in judged("nan_gradient", other)[2]


def test_a_loop_with_an_adapter_gets_no_advice_that_it_cannot_follow():
    damaged = facts(
        alerts=(alert("TrainingHalted"),), findings=(finding("nonfinite_params"),), exit_code=1
    )
    killed = facts(alerts=(alert("RunFailed"),))
    for fault, each, words in (
        ("nan_parameters", damaged, "a loop of your own"),
        ("killed_rank", killed, "checkpoints of the loop"),
    ):
        watched = judge_fault(FAULTS[fault], each, UNDISTURBED)
        started = replace(each.records[0], owns_step=False)
        attached = replace(each, records=(started, *each.records[1:]))
        row = judge_fault(FAULTS[fault], attached, UNDISTURBED)
        assert ("not protected", "not protected") == (watched.outcome, row.outcome)
        assert watched.hint.startswith("trainvitals.watch(")
        assert row.hint.startswith(words)


@pytest.mark.parametrize("fault", ["killed_agent", "collector_down"])
def test_no_row_is_lost_without_the_agent_or_the_collector(fault):
    note = (2 * SECOND, "Note", "the node's agent was killed; restarted [agent_restarted]")
    records = (*facts().records, record("continued", step=100))
    whole = facts(notes=(note,), records=records)
    assert "kept" == judged(fault, whole)[0]
    gap = replace(whole, steps=frozenset(LOSSES) - {90})
    assert ("broken", None, "1 step missing, 0 rows lost") == judged(fault, gap)
    lost = replace(whole, num_lost_rows=2)
    assert "2 rows lost" in judged(fault, lost)[2]
    assert "broken" == judged(fault, facts())[0]


def test_a_new_start_that_trains_other_batches_is_broken_if_it_is_said_to_be_exact():
    saved = record("started", mode="heal", first_save_step=60)
    records = (saved, saved, *facts().records[1:])
    killed = facts(
        alerts=(alert("RunFailed"),), records=records, resumed_step=60, repeated_rates={60: (1, 1)}
    )
    noise = [0.0, 0.2, 0.1, 0.3, 0.0, 0.4, 0.2, 0.1, 0.3, 0.2]
    same = {60 + i: (2 + loss, 2 + loss + 1e-4) for i, loss in enumerate(noise)}
    assert "kept" == judged("killed_rank", replace(killed, repeated_losses=same))[0]
    losses = {60 + i: (2 + loss, 2.15) for i, loss in enumerate(noise)}
    other = replace(killed, repeated_losses=losses)
    row = judge_fault(FAULTS["killed_rank"], other, UNDISTURBED)
    assert ("not protected", True) == (row.outcome, "monitor.batches" in row.hint)
    note = (2 * SECOND, "Note", "data: continues exactly at batch 18 of epoch 3 [data]")
    assert "got other batches" in judged("killed_rank", replace(other, notes=(note,)))[2]
    assert "broken" == judged("killed_rank", replace(other, notes=(note,)))[0]


def poisoned(end_loss=1.0, window_loss=1.0, **changes):
    losses = LOSSES | dict.fromkeys(range(STEP), 1.0)
    losses |= dict.fromkeys(range(STEP, STEP + 8), window_loss)
    losses |= dict.fromkeys(range(STEP + 8, END), end_loss)
    return facts(losses=losses, **changes)


def test_damaged_batches_are_reported_and_the_loss_recovers():
    skips = tuple(decision("skip_step", "outlier", -1, STEP + i, skipped=True) for i in (0, 1))
    row = judge_fault(
        FAULTS["poisoned_window"], poisoned(window_loss=9.0, decisions=skips), UNDISTURBED
    )
    assert ("kept", "outlier", "2 updates skipped") == (row.outcome, row.seen, row.action)
    seen = judge_fault(
        FAULTS["poisoned_window"], poisoned(1.0, 9.0, findings=(finding("spike"),)), UNDISTURBED
    )
    assert ("kept", "spike", "reported") == (seen.outcome, seen.seen, seen.action)
    assert ("broken", None, "the damaged batches were not reported") == judged(
        "poisoned_window", poisoned(window_loss=9.0)
    )
    harmless = judge_fault(FAULTS["poisoned_window"], poisoned(window_loss=1.5), UNDISTURBED)
    assert ("kept", "", "none needed") == (harmless.outcome, harmless.seen, harmless.action)


def test_damage_that_damaged_batches_leave_is_broken_only_if_heal_has_a_probe():
    damaged = poisoned(3.0, 9.0, findings=(finding("spike"),))
    row = judge_fault(FAULTS["poisoned_window"], damaged, UNDISTURBED)
    assert ("not protected", True) == (row.outcome, "probe=loss_of" in row.hint)
    diverged = judge_fault(
        FAULTS["poisoned_window"], poisoned(float("inf"), findings=(finding("spike"),)), UNDISTURBED
    )
    assert ("not protected", "the final loss is missing or not finite") == (
        diverged.outcome, diverged.reason
    )  # fmt: skip
    unended = replace(damaged, records=damaged.records[:2], exit_code=1)
    assert "broken" == judged("poisoned_window", unended)[0]
    halted = replace(unended, decisions=(decision("halt", "nonfinite_streak", step=95),))
    assert "not protected" == judged("poisoned_window", halted)[0]
    started, _, ended = damaged.records
    healing = replace(started, mode="heal")
    probed = (healing, record("injected", 1, STEP, has_probe=True), ended)
    assert "broken" == judged("poisoned_window", replace(damaged, records=probed))[0]
    unprobed = (healing, record("injected", 1, STEP), ended)
    assert "not protected" == judged("poisoned_window", replace(damaged, records=unprobed))[0]
    rolled_back = decision("rollback", "spike", rollback_to_step=60)
    healed = poisoned(1.0, 9.0, decisions=(rolled_back,), records=probed)
    row = judge_fault(FAULTS["poisoned_window"], healed, UNDISTURBED)
    assert ("kept", "rolled back to step 60") == (row.outcome, row.action)


def test_a_forgotten_learning_rate_must_be_reported():
    reported = facts("forgotten_lr", findings=(finding("learning_rate", -1, cause="lr_forgotten"),))
    row = judge_fault(FAULTS["forgotten_lr"], reported, UNDISTURBED)
    assert ("kept", "lr_forgotten", "reported") == (row.outcome, row.seen, row.action)
    assert "was not reported" in judged("forgotten_lr", facts("forgotten_lr"))[2]
    text = "without checkpoints a restart begins at step 0"
    impossible = facts(records=(record("started"), record("impossible", text=text)))
    row = judge_fault(FAULTS["forgotten_lr"], impossible, UNDISTURBED)
    assert ("not protected", text, True) == (row.outcome, row.reason, "heal" in row.hint)


def checkpoint(state, seconds, detail=""):
    return CheckpointView(
        checkpoint_id="c", step=60, attempt=1, state=state, where="disk", num_bytes=1,
        detail=detail, time_unix_ns=seconds * SECOND,
    )  # fmt: skip


def test_a_full_disk_is_reported_and_costs_neither_rows_nor_later_checkpoints():
    note = (2 * SECOND, "Note", "the disk of x is full: node vm ... [spool_in_memory]")
    started, injected, ended = facts().records
    records = (started, injected, record("continued", step=100), ended)
    full = facts(notes=(note,), records=records)
    assert ("kept", None, "") == judged("full_disk", full)
    assert "not reported" in judged("full_disk", replace(full, notes=()))[2]
    assert "did not continue" in judged("full_disk", replace(full, records=facts().records))[2]
    assert "1 step missing" in judged("full_disk", replace(full, steps=full.steps - {90}))[2]
    saves = replace(full, records=(replace(started, first_save_step=60), *records[1:]))
    assert "no checkpoint was saved after" in judged("full_disk", saves)[2]
    failed = checkpoint("bad", 0, "not saved: the disk is full")
    later = replace(saves, checkpoints=(failed, checkpoint("healthy", 2)))
    assert "kept" == judged("full_disk", later)[0]
    unmounted = (started, record("impossible", text="no disk could be mounted"))
    assert "not tested" == judged("full_disk", facts(records=unmounted))[0]


def test_steps_are_stored_once_those_of_the_second_start_are():
    first = facts()
    assert first.is_stored
    assert not replace(first, steps=first.steps - {50}).is_stored
    second = replace(first, records=(first.records[0], *first.records))
    assert not replace(second, latest_steps=frozenset({60})).is_stored
    assert replace(second, latest_steps=frozenset({60, END - 1})).is_stored


def test_an_outlier_of_an_unknown_norm_names_the_line_that_would_protect():
    note = (2 * SECOND, "Note", "gradient-norm outliers are not judged [norm_unknown]")
    row = judge_fault(FAULTS["spike"], facts(notes=(note,)), UNDISTURBED)
    assert "not protected" == row.outcome
    assert "attach(max_norm=...)" in row.hint
