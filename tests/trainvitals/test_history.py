"""A log without recorded limits is judged as the run it is of would have been."""

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from trainvitals.detect.outliers import LossKind
from trainvitals.judged_log import (
    JudgedStep,
    LoggedStep,
    export_judged_steps,
    judge_history,
    measure_log_cadence,
)
from trainvitals.policy import Judge, JudgeConfig, Mode
from trainvitals.policy.evidence import NO_READING, Ask, ProbeResult
from trainvitals.records import Decision, Finding
from trainvitals.testing import judgements, series


def log(text: str, *, first: int = 0, every: int = 1) -> list[LoggedStep]:
    """Return the records of ``series`` as a log that kept one of ``every`` steps."""
    return [
        LoggedStep(row, first + row * every, r.loss, r.grad_norm, r.learning_rate)
        for row, r in enumerate(series(text))
    ]


def joined(*parts: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Return logs as one that was appended to."""
    steps = [step for part in parts for step in part]
    return [step._replace(row=row) for row, step in enumerate(steps)]


def findings(said: Sequence[JudgedStep]) -> list[Finding]:
    return [finding for judged in said for finding in judged.judgement.findings]


def decisions(said: Sequence[JudgedStep]) -> list[Decision]:
    return [j.judgement.decision for j in said if j.judgement.decision is not None]


def actions(said: Sequence[JudgedStep]) -> list[tuple[int, str]]:
    return [(j.row, j.judgement.decision.action) for j in said if j.judgement.decision is not None]


def cannot_say(ask: Ask) -> ProbeResult:
    """Answer as a log does, in place of a probe."""
    return NO_READING


QUIET = "loss 3..2x120"
STORM = "loss 3..2x150 nanx40 2x150"


# ------------------------------------------------------------------------------- as it is live


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_limits_findings_and_decisions_are_those_of_a_live_loop(mode: Mode, lag: int) -> None:
    course = "loss 3..2x60 nan 2x10 400 2x30 300 300 2x5; grad_norm 1x60 1 1x10 50 1x30 9e9 1 1x5"
    # Observed without a checkpoint: as live, where none is announced.
    live = judgements(Judge(mode=mode), course, lag=lag, probe=cannot_say)
    said = list(judge_history(log(course), mode=mode, lag=lag, checkpoint_every=10**9))
    assert repr([record for record, _ in live]) == repr([j.record for j in said])
    assert repr([judged.findings for _, judged in live]) == repr(
        [j.judgement.findings for j in said]
    )
    if mode == "guard":
        assert repr([judged for _, judged in live]) == repr([j.judgement for j in said])


def test_a_value_that_would_have_been_skipped_enters_no_reference() -> None:
    spiked = list(judge_history(log("loss 3x20 2..1.9x60 500 500 1.9x40")))
    clean = list(judge_history(log("loss 3x20 2..1.9x60 - - 1.9x40")))
    assert [True, True] == [j.record.skipped for j in spiked[80:82]]
    # The steps in flight then have the limits of before or after one more sample.
    assert [j.record.loss_limit for j in clean[95:]] == [j.record.loss_limit for j in spiked[95:]]


def test_observe_skips_nothing_and_says_what_would_have_been_done() -> None:
    said = list(judge_history(log(STORM), mode="observe"))
    assert not any(j.record.skipped for j in said)
    assert "rollback" in [d.action for d in decisions(said)]
    assert not any(d.acted for d in decisions(said))


def test_guard_never_rolls_back() -> None:
    said = list(judge_history(log(STORM), mode="guard"))
    assert {"skip_step"} == {d.action for d in decisions(said)}


def test_every_record_is_judged_once_and_in_order() -> None:
    said = list(judge_history(log(STORM)))
    assert list(range(340)) == [j.row for j in said]
    assert list(range(340)) == [j.record.step for j in said]


# ------------------------------------------------------------- what only its owner can tell


@pytest.mark.parametrize("clips", [True, False])
def test_an_outlier_is_withheld_whether_the_loop_clips_or_not(clips: bool) -> None:
    said = list(judge_history(log("loss 3..2x100 400 2x50; grad_norm 1x151"), clips=clips))
    assert [(100, "skip_step")] == actions(said)
    assert [100] == [judged.row for judged in said if judged.record.withheld]
    assert {clips} == {judged.record.clips for judged in said}


@pytest.mark.parametrize("clips", [True, False])
def test_without_a_clip_a_log_is_judged_as_a_live_loop_without_one(clips: bool) -> None:
    course = "loss 3..2x60 400 2x10 300 300 2x5; grad_norm 1x60 1 1x10 50 50 1x5"
    live = judgements(Judge(mode="guard"), course, clips=clips, probe=cannot_say)
    said = list(judge_history(log(course), mode="guard", clips=clips))
    assert repr([(record, judged) for record, judged in live]) == repr(
        [(judged.record, judged.judgement) for judged in said]
    )


@pytest.mark.parametrize(("kind", "high"), [("rl", 9000), ("adversarial", 900)])
def test_a_loss_that_is_declared_withholds_nothing_and_its_norm_does(
    kind: LossKind, high: int
) -> None:
    course = "loss 3..2x100 90x{0} 2x50; grad_norm 1x100 {1}x{0} 1x50"
    config = JudgeConfig(loss_kind=kind)
    assert [] == actions(list(judge_history(log(course.format(6, 1)), config=config)))
    assert 4 == len(actions(list(judge_history(log(course.format(6, 1))))))
    assert 4 == len(actions(list(judge_history(log(course.format(6, high)), config=config))))
    assert [] == actions(list(judge_history(log(course.format(6, 0.1 * high)), config=config)))


@pytest.mark.parametrize("every", [1, 10])
def test_an_announced_change_withholds_nothing_and_the_one_after_it_does(every: int) -> None:
    course = log("loss 9x20 2x80 800x300 2x100 900x9 2x9; grad_norm 1x518", every=every)
    assert 8 == len(actions(list(judge_history(course))))
    announced = list(judge_history(course, expected=[100 * every]))
    rows = [judged.row for judged in announced if judged.record.withheld]
    assert [500, 501, 503, 504, 506, 507] == rows


def test_a_change_is_announced_by_the_first_record_from_its_step_on() -> None:
    course = log("loss 3..2x100 40x300; grad_norm 1x400", every=7)
    assert [] == actions(list(judge_history(course, expected=[694, 5])))


# -------------------------------------------------------------------------- the ladder's rungs


def test_a_storm_goes_back_to_a_checkpoint_that_was_healthy_before_it() -> None:
    said = list(judge_history(log(STORM)))
    back = decisions(said)[31]
    assert ("rollback", 181, 100, "assumed-000100") == (
        back.action, back.step, back.rollback_to_step, back.checkpoint_id,
    )  # fmt: skip
    assert 2 == said[-1].record.attempt


def test_a_storm_at_the_beginning_goes_back_to_before_the_log() -> None:
    said = list(judge_history(log("loss 3 3 nanx40 3x40", first=31_000)))
    back = decisions(said)[31]
    assert ("rollback", "before-the-log") == (back.action, back.checkpoint_id)


def test_what_never_recovers_is_rolled_back_until_the_budget_is_spent_and_then_halts() -> None:
    said = list(judge_history(log("loss 3..2x200 nanx2000")))
    done = [d.action for d in decisions(said) if d.action != "skip_step"]
    assert ["rollback"] * 3 + ["halt"] == done
    assert 2200 == len(said)
    assert "nonfinite" in [f.kind for f in said[-1].judgement.findings]


def test_after_a_halt_the_ladder_acts_again_only_when_the_log_has_recovered() -> None:
    course = "loss 3..2x200 nanx300 2x{} nan 2x50"
    soon = actions(list(judge_history(log(course.format(50)))))
    late = actions(list(judge_history(log(course.format(150)))))
    assert "halt" == soon[-1][1]
    assert (650, "skip_step") == late[-1]


def test_states_after_a_rollbacks_target_are_not_gone_back_to() -> None:
    said = list(judge_history(log("loss 3..2x125 nanx32 2x200 nanx32 2x10")))
    targets = [d.rollback_to_step for d in decisions(said) if d.action == "rollback"]
    assert [100, 300] == targets


# ------------------------------------------------------------------------------- odd histories


def test_an_empty_log_says_nothing() -> None:
    assert [] == list(judge_history([]))


def test_a_run_that_was_resumed_goes_on_with_the_detectors_of_that_step() -> None:
    whole = log("loss 11..2x400")
    resumed = joined(whole, whole[200:])
    said = list(judge_history(resumed))
    assert [] == findings(said)
    assert (400, 2) == (said[400].row, said[400].record.attempt)
    assert said[450].record.loss_limit == pytest.approx(said[250].record.loss_limit, rel=0.05)


def test_another_run_that_was_appended_begins_anew() -> None:
    said = list(judge_history(joined(log("loss 2..1x300"), log("loss 11..2x300"))))
    assert [] == findings(said)
    assert said[300].record.loss_limit is None


def test_one_late_record_is_no_restart() -> None:
    steps = log("loss 2x100")
    steps[50], steps[51] = steps[51]._replace(row=50), steps[50]._replace(row=51)
    cadence = measure_log_cadence(steps)
    assert (frozenset(), 1) == (cadence.restarts, cadence.num_out_of_order)
    assert 1 == list(judge_history(steps))[-1].record.attempt


def test_a_resume_after_a_halt_is_a_persons_and_the_ladder_acts_again() -> None:
    first = log("loss 3..2x200 nanx300")
    said = list(judge_history(joined(first, log("loss 2x100 nan 2x9", first=150))))
    assert (600, "skip_step") == actions(said)[-1]


def test_a_coarse_log_counts_records_and_names_the_logs_own_steps() -> None:
    every, coarse = log(STORM), log(STORM, first=5, every=10)
    assert measure_log_cadence(coarse).counts_records
    assert (10,) == measure_log_cadence(coarse).gaps
    fine, thin = list(judge_history(every)), list(judge_history(coarse))
    assert actions(fine) == actions(thin)
    assert [5 + 10 * d.step for d in decisions(fine)] == [d.step for d in decisions(thin)]
    back = decisions(thin)[31]
    assert ("rollback", 1815, 1816, 1005) == (
        back.action, back.step, back.decided_at_step, back.rollback_to_step,
    )  # fmt: skip


def test_a_gap_in_a_log_of_every_step_does_not_make_it_coarse() -> None:
    steps = joined(log("loss 2x50"), log("loss 2x50", first=500))
    assert not measure_log_cadence(steps).counts_records


def test_repeated_steps_are_counted_and_judged() -> None:
    steps = [LoggedStep(row, row // 2, 2.0) for row in range(40)]
    assert 20 == measure_log_cadence(steps).num_repeated
    assert 40 == len(list(judge_history(steps)))


def test_a_document_has_the_rows_of_the_log() -> None:
    steps = [step._replace(row=step.row * 2 + 1) for step in log("loss 2x30 nan 2x5")]
    body = export_judged_steps(judge_history(steps))
    assert [61] == [f["row"] for f in body["findings"]]
    assert {"row", "step", "kind", "level", "reason"} == set(body["findings"][0])
    assert [(61, "skip_step")] == [(d["row"], d["action"]) for d in body["decisions"]]


numbers = st.none() | st.floats() | st.floats(1.0, 2.5)
rows = st.tuples(st.integers(-5, 40) | st.integers(-(2**53), 2**53), numbers, numbers, numbers)


@settings(max_examples=examples(150))
@given(st.lists(rows, max_size=80), st.sampled_from(["observe", "guard", "heal"]))
def test_whatever_a_log_holds_every_record_is_judged_and_can_be_written(
    given_rows: list[tuple[int, float | None, float | None, float | None]], mode: Mode
) -> None:
    steps = [LoggedStep(row, *values) for row, values in enumerate(given_rows)]
    said = list(judge_history(steps, mode=mode))
    assert [step.row for step in steps] == [judged.row for judged in said]
    assert [step.step for step in steps] == [judged.record.step for judged in said]
    msgspec.json.encode(export_judged_steps(said))


def test_a_log_that_goes_back_again_and_again_keeps_a_bounded_memory() -> None:
    parts = [log("loss 2x10", first=90 - at) for at in range(0, 90, 5)]
    said = list(judge_history(joined(*parts)))
    assert 180 == len(said)
    assert [] == [f for f in findings(said) if f.level == "actionable"]
    assert all(j.record.loss is not None and math.isfinite(j.record.loss) for j in said)
