import math

import pytest

from trainvitals.detect.outliers import NonFiniteDetector
from trainvitals.detect.spike import SpikeDetector
from trainvitals.policy import Judge
from trainvitals.records import StepRecord
from trainvitals.testing import ManualClock, decisions, judgements, replay, series


def test_a_series_is_read_column_by_column() -> None:
    expected = [
        StepRecord(step=5, attempt=3, loss=2.0, grad_norm=1.0),
        StepRecord(step=6, attempt=3, loss=2.0, grad_norm=2.0),
        StepRecord(step=7, attempt=3, grad_norm=3.0, nonfinite_ranks=(1,), skipped=True),
    ]
    text = """
        loss 2x2 -
        grad_norm 1..3x3
        nonfinite_ranks -x2 1; skipped 0 0 1
    """
    assert expected == series(text, attempt=3, first_step=5)


def test_nan_and_infinity_are_values() -> None:
    first, second = series("loss nan -inf")
    assert first.loss is not None
    assert math.isnan(first.loss)
    assert -math.inf == second.loss


def test_an_unknown_column_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="'lost'"):
        series("lost 1 2")


def test_limits_are_in_force_one_step_after_the_lag() -> None:
    # 50 records are the warm-up; step 50 judges the last of them (step 49), so its limit is in
    # force from step 51. Without a lag step 49 judges it. The limit: 2 + 25 x (3 - 2).
    course = "loss 3x20 2x34"
    limits = [record.loss_limit for record, _ in judgements(Judge(), course)]
    assert 51 == limits.index(27.0)
    limits = [record.loss_limit for record, _ in judgements(Judge(), course, lag=0)]
    assert 50 == limits.index(27.0)


def test_a_detector_sees_the_records_as_they_are() -> None:
    assert ["spike"] == replay(SpikeDetector("loss"), "loss 2.1x40 9.5 2.1")[40]


def test_replay_takes_detectors_without_a_limit_and_whole_judges() -> None:
    assert {2: ["nonfinite"]} == replay(NonFiniteDetector(), "loss 2 2 nan 2")
    assert {2: ["nonfinite"]} == replay(Judge(), "loss 2 2 nan 2")


def test_decisions_are_the_judges_ledger() -> None:
    ledger = decisions(Judge(), "loss 2 nan 2 nan 2")
    assert [("skip_step", 1, 2), ("skip_step", 3, 4)] == [
        (d.action, d.step, d.decided_at_step) for d in ledger
    ]


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(time_ns=100, monotonic_ns=7)
    assert (100, 7) == (clock.time_ns(), clock.monotonic_ns())
    clock.advance(2.5)
    assert (2_500_000_100, 2_500_000_007) == (clock.time_ns(), clock.monotonic_ns())
    clock.jump(-3600)
    assert 2_500_000_007 == clock.monotonic_ns()
    with pytest.raises(ValueError, match="jump"):
        clock.advance(-1)
