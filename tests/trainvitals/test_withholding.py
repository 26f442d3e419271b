"""Which finite steps are withheld: judge and device together, over the course of a run.

A course starts at 3 and falls to 2: its loss is an outlier above 2 + 25 x (3 - 2) = 27.
"""

import itertools

import msgspec
import pytest

from trainvitals.policy import Judge, JudgeConfig, Mode, StepInputs
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import DeviceRule
from trainvitals.records import StateRead, StepRecord
from trainvitals.testing import judgements, series

START = "loss 3x20 2.5x20 2..2.01x80"
"""120 steps that are trained, with progress to undo."""
BAD = " 90"
HEALTHY = ProbeResult(num_batches=5, then=2.0, now=2.0)
DAMAGED = ProbeResult(num_batches=5, then=2.0, now=9.0)


def played(text: str, *, lag=1, mode: Mode = "guard", clips=True, judge=None, probe=None):
    judge = judge or Judge(mode=mode)
    return judgements(judge, text, lag=lag, clips=clips, probe=probe)


def withheld(text: str, **options) -> list[int]:
    return [record.step for record, _ in played(text, **options) if record.withheld]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("clips", [True, False])
def test_two_outliers_in_a_row_are_withheld_and_the_third_is_applied(lag: int, clips: bool) -> None:
    assert [120, 121, 123] == withheld(START + " 90x4 2x50", lag=lag, clips=clips)


@pytest.mark.parametrize("lag", [0, 1])
def test_eight_in_any_1000_steps_are_withheld_and_then_outliers_are_applied(lag: int) -> None:
    assert [120 + 20 * i for i in range(8)] == withheld(START + (BAD + " 2x19") * 20, lag=lag)
    pairs = START + (BAD * 2 + " 2x19") * 20
    assert [120, 121, 141, 142, 162, 163, 183, 184] == withheld(pairs, lag=lag)
    over = START + (BAD + " 2x19") * 8 + " 2x1000" + BAD
    assert 9 == len(withheld(over, lag=lag))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("gap", range(4))
def test_no_spacing_of_outliers_gets_past_the_bounds(gap: int, lag: int) -> None:
    steps = withheld(START + (BAD + f" 2x{gap}" * bool(gap)) * 200, lag=lag)
    assert 8 == len(steps)
    assert not {step for step in steps if {step + 1, step + 2} <= set(steps)}


def test_a_new_level_costs_eight_updates_and_is_then_the_reference() -> None:
    judge = Judge()
    assert 8 == len(withheld(START + " 90x100", judge=judge))
    assert judge.limits().loss is None, "there is no progress to undo any more"


def test_a_loss_within_25_times_the_progress_is_applied_however_many_sigmas_it_is() -> None:
    assert [] == withheld(START + " 26x5 2x20")
    assert [120] == withheld(START + " 28 2x20")


def test_a_loss_within_8_robust_deviations_is_applied_however_little_progress_there_is() -> None:
    """The median is 2 and its MAD 0.5: the limit is 2 + 8 x 1.4826 x 0.5, nearly 7.93."""
    start = "loss 2.01x20 " + "1.5 2 2.5 " * 34
    assert [] == withheld(start + "7.9 2x9")
    assert [122] == withheld(start + "8 2x9")


def test_a_run_without_progress_has_no_limit_for_its_loss() -> None:
    judge = Judge()
    assert [] == withheld("loss 2..2.01x100 900 2x5", judge=judge)
    assert judge.limits().loss is None


def test_a_norm_is_withheld_above_100_times_both_its_median_and_the_first_norms() -> None:
    course = "loss 3x20 2x100; grad_norm {}x20 1x60 {}x1 1x39"
    assert [] == withheld(course.format(0.5, 99))
    assert [80] == withheld(course.format(0.5, 101))
    assert [] == withheld(course.format(3, 299)), "below 100 times the first norms"
    assert [80] == withheld(course.format(3, 301))


def test_before_50_steps_only_an_absurd_value_is_withheld_from_the_second_step_on() -> None:
    assert [1] == withheld("loss 3 4e5 3x20")
    assert [] == withheld("loss 3 2e5 3x20")
    assert [30, 31] == withheld("loss 3x30 1e6x3 3x10")


def test_a_non_finite_step_neither_counts_in_a_row_nor_ends_it() -> None:
    assert [120, 122] == withheld(START + " 90 nan 90 90 2x20")


@pytest.mark.parametrize("kind", ["rl", "adversarial"])
def test_a_loss_that_is_not_minimized_withholds_nothing(kind) -> None:
    judge = Judge(JudgeConfig(loss_kind=kind))
    assert [] == withheld(START + " 90x20", judge=judge)


def test_a_rank_of_its_own_withholds_nothing_and_is_named_where_the_mean_does() -> None:
    start = "; loss_max 3x20 2.5x20 2..2.01x80 400"
    assert [] == withheld(START + " 2.4 2x9" + start)
    pairs = played(START + " 90 2x9" + start + "; loss_max_rank -1x120 3")
    assert [3] == [
        f.rank for _, judged in pairs for f in judged.findings if f.level == "actionable"
    ]


def test_the_acting_limit_is_never_below_what_is_reported() -> None:
    judge = Judge()
    for record, judged in played(START + " 2.9 90 2 26 90x3 2x9", judge=judge):
        if record.withheld:
            assert "spike" in {finding.kind for finding in judged.findings}


def test_observe_reports_what_would_be_withheld_and_applies_it() -> None:
    pairs = played(START + " 90x4 2x50", mode="observe")
    assert [120, 121, 123] == [record.step for record, _ in pairs if record.withheld]
    assert not any(record.skipped for record, _ in pairs)
    made = [judged.decision for _, judged in pairs if judged.decision is not None]
    assert [("skip_step", False)] * 3 == [(decision.action, decision.acted) for decision in made]


# --------------------------------------------------------------- the question before the action


def asked(text: str, answer: ProbeResult, **options) -> tuple[list[int], list[StateRead]]:
    """Return which steps are withheld, and what was read."""
    pairs = played(text, probe=lambda ask: answer, **options)
    steps = [record.step for record, _ in pairs if record.withheld]
    return steps, [read for _, judged in pairs for read in judged.readings]


@pytest.mark.parametrize("answer", [HEALTHY, DAMAGED])
def test_an_answer_ends_the_hold_at_once_whichever_it_is(answer: ProbeResult) -> None:
    steps, readings = asked(START + " 90x12 2x20", answer, lag=0)
    assert [120] == steps, "asked at the first, before anything is withheld twice"
    assert [("spike", 120)] == [(read.trigger, read.onset_step) for read in readings]


def test_the_second_in_a_row_is_on_its_way_where_the_host_lags_one_step() -> None:
    steps, _ = asked(START + " 90x12 2x20", HEALTHY, lag=1)
    assert [120, 121] == steps


def test_a_probe_that_abstains_ends_no_hold() -> None:
    few = ProbeResult(num_batches=2, then=2.0, now=2.0)
    assert [120, 121, 123, 124] == asked(START + " 90x5 2x20", few)[0]


def test_a_spike_that_nothing_is_withheld_for_is_asked_about_too() -> None:
    steps, readings = asked(START + " 9 2x20", HEALTHY)
    assert ([], [("spike", "sound")]) == (steps, [(r.trigger, r.verdict) for r in readings])


def test_questions_are_at_most_six_in_1000_steps() -> None:
    numbers: list[int] = []
    judge = Judge()

    def probe(ask: Ask) -> ProbeResult:
        numbers.append(ask.step)
        return HEALTHY

    for height in range(1, 12):  # ever higher, so that none is known already
        judgements(judge, series(f"loss 3x20 2x60 {9 * height**2} 2x9", first_step=90 * height),
                   probe=probe)  # fmt: skip
    assert 3 <= len(numbers) <= 6
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    assert all(gap >= 16 << i for i, gap in enumerate(gaps))


# ----------------------------------------------------------------------------- state and format


def test_a_judge_that_is_saved_and_loaded_in_the_middle_of_a_row_goes_on_alike() -> None:
    text = START + " 90x5 2x9 90 2 90x3 2x40"
    records = series(text)
    whole = [(r.withheld, r.skipped) for r, _ in played(text, lag=0)]
    judge, device = Judge(), DeviceRule()
    parts = []
    for record in records:
        kept = msgspec.json.decode(msgspec.json.encode(judge.state_dict()))
        judge = Judge()
        judge.load_state_dict(kept)
        done, device = device.judge(record, judge.limits(), judge.max_row(), acts=True)
        judge.judge(done, StepInputs(done.step))
        parts.append((done.withheld, done.skipped))
    assert whole == parts


def test_a_state_of_the_version_before_is_loaded_without_what_is_gone() -> None:
    judge = Judge()
    played(START, judge=judge)
    state = msgspec.json.decode(msgspec.json.encode(judge.state_dict()))
    ladder = state["ladder"]
    ladder |= {"groups": [[1, 2, 3, 4.0, 5.0]], "firsts": [7], "spent": True, "passes_since": 4}
    ladder["facts"] |= {
        "accepted": [[4.0, 0.0]], "recurring": [5.0, 6.0],
        "turn": 0, "others": [[1, [[2.0, 1.0]], None]],
    }  # fmt: skip
    other = Judge()
    other.load_state_dict(state)
    assert judge.limits().loss is not None
    assert 4.0 <= (other.limits().loss or 0.0), "what was accepted stays"
    assert 2 == other.max_row()


def test_the_device_takes_a_row_over_a_step_that_is_not_whole() -> None:
    rule = DeviceRule(row=1)
    record = StepRecord(step=1, attempt=1, loss=2.0, failed_ranks=(1,))
    assert rule == rule.judge(record, Judge().limits(), 2, acts=True)[1]
