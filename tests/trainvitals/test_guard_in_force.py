"""Steps that nobody measured, and steps that train nothing."""

import pytest

from trainvitals.detect.guard import AGAIN, GuardDetector
from trainvitals.policy import Judge, JudgeConfig
from trainvitals.testing.series import replay, series


def test_ten_unmeasured_steps_in_a_row_are_found_and_reported_again_while_they_last():
    found = replay(GuardDetector(), "loss 2x200; failed_ranks -x50 0x70")
    assert {59: ["unguarded"], 59 + AGAIN: ["unguarded"]} == found


@pytest.mark.parametrize(
    ("course", "steps"),
    [
        ("-x5 0x9 -x90", []),
        ("-x20 " + "0x1 -x15 " * 40, []),
        ("0x1 -x1 " * 30, [20]),
        ("0x1 -x9 " * 200, [900]),
        ("0x10 -x200 0x10", [9, 219]),
    ],
    ids=["nine", "one of 16", "every other", "every tenth", "two stretches"],
)
def test_only_what_does_not_pass_is_found(course, steps):
    records = series(f"failed_ranks {course}")
    found = [step for step, kinds in replay(GuardDetector(), records).items() if kinds]
    assert steps == found[: len(steps)] and bool(steps) == bool(found)


def test_the_finding_names_the_rank_and_counts_the_steps():
    detector = GuardDetector()
    for record in series("failed_ranks -x3 1x10"):
        findings = detector.update(record)
    (finding,) = findings
    assert ("unguarded", "advisory", 1, 3) == (
        finding.kind, finding.level, finding.rank, finding.onset_step,
    )  # fmt: skip
    assert "rank 1 could not measure the gradients in 10 of 10 steps since step 3" in finding.reason


@pytest.mark.parametrize(
    ("course", "steps"),
    [
        ("loss 2x40; no_gradient 1x40", [4]),
        ("loss 2x40; no_gradient 0x10 1x20 0x1 1x9", [14, 35]),
        ("loss 2x40; no_gradient " + "1x4 0x1 " * 8, []),
        ("loss 0x60; no_gradient 1x60", [49]),
        ("no_gradient 1x9", [4]),
        ("loss 2x9; failed_ranks -x3 0x3 -x3; no_gradient 1x3 0x3 1x3", [7]),
    ],
    ids=["from the start", "twice", "single batches", "a margin kept", "no loss", "unmeasured"],
)
def test_gradients_of_exactly_zero_are_found_at_once(course, steps):
    found = replay(GuardDetector(), course)
    assert steps == [step for step, kinds in found.items() if "zero_gradient" in kinds]


def test_where_the_loss_is_not_minimized_a_gradient_of_zero_may_last():
    course = "loss 2x60; no_gradient 1x60"
    judge = Judge(JudgeConfig(loss_kind="rl"))
    told = [step for step, kinds in replay(judge, course).items() if "zero_gradient" in kinds]
    assert [49] == told
