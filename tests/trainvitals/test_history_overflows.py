"""A log does not say what a loss scaler skipped by itself: it is told by its numbers."""

import math

import pytest

from trainvitals.judged_log import LoggedStep, find_overflow_records, judge_history
from trainvitals.testing.merged import merged_series

NAN, INF = math.nan, math.inf


def log(text: str) -> list[LoggedStep]:
    """Return a course of ``loss``, ``grad_norm`` and ``loss_scale`` as a log."""
    rows = [merged.run for merged in merged_series(text)]
    return [
        LoggedStep(
            row, row, r.get("loss"), r.get("grad_norm"), None, loss_scale=r.get("loss_scale")
        )
        for row, r in enumerate(rows)
    ]


def places(text: str) -> list[int]:
    return sorted(find_overflow_records(log(text)))


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        ("loss 2x20; grad_norm 1x9 inf 1x10", [9]),
        ("loss 2x20; grad_norm 1x9 nan inf 1x9", [9, 10]),
        ("loss 2x20; grad_norm 1x9 infx5 1x6", [9, 10, 11, 12, 13]),
        ("loss 2x20; grad_norm 1x9 infx6 1x5", []),  # no scaler needs so many
        ("loss 2x60; grad_norm infx40 1x20", list(range(40))),  # but at its beginning
        ("loss 2x60; grad_norm infx41 1x19", []),
        ("loss 2x20; grad_norm 1x18 infx2", []),  # nobody knows how it goes on
        ("loss 2x9 nan 2x10; grad_norm 1x9 nan 1x10", []),  # a loss is no scaler's doing
        ("loss 2x20; grad_norm 1x9 - 1x10", []),
        ("grad_norm 1x9 inf 1x10", []),  # who knows what the loss was
    ],
)
def test_norms_that_are_soon_finite_again_beside_a_finite_loss_are_overflows(course, expected):
    assert expected == places(course)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ("1024x10 512x10", [9]),  # written before the scaler's update
        ("1024x9 512x11", [9]),  # and after it
        ("1024x20", []),  # it did not fall: nothing was skipped
        ("512x9 1024x11", []),
    ],
)
def test_where_the_log_has_the_scale_it_must_fall(scales, expected):
    assert expected == places(f"loss 2x20; grad_norm 1x9 inf 1x10; loss_scale {scales}")


OVERFLOWS = "loss 3..2x200; grad_norm infx12 1x88 inf 1x99"


def test_an_overflow_of_a_log_is_skipped_and_no_fault():
    judged = list(judge_history(log(OVERFLOWS)))
    at = [j.row for j in judged if j.record.overflow]
    assert [*range(12), 100] == at
    assert [True] * 13 == [judged[row].record.skipped for row in at]
    assert [] == [j.judgement.decision for j in judged if j.judgement.decision is not None]
    assert "nonfinite" not in {f.kind for j in judged for f in j.judgement.findings}


def test_what_is_no_overflow_is_a_fault_as_ever():
    judged = list(judge_history(log(OVERFLOWS + "; loss_scale 1024x200")))
    skipped = [j.judgement.decision for j in judged if j.judgement.decision is not None]
    assert ["skip_step"] * 13 == [made.action for made in skipped]
    assert not any(j.record.overflow for j in judged)


def test_an_overflow_between_two_outliers_neither_counts_in_their_row_nor_ends_it():
    course = "loss 3x20 2.5x20 2x60 90 2 90 90 2x20; grad_norm 1x101 inf 1x22"
    made = [j.judgement.decision for j in judge_history(log(course)) if j.judgement.decision]
    assert [("skip_step", 100, 1.0), ("skip_step", 102, 2.0)] == [
        (d.action, d.step, d.evidence["in_a_row"]) for d in made
    ], "two in a row are withheld, the third is applied"
